"""The notebooks in docs/tutorials: each runs at toy size from first cell to last; stored outputs are of its code.

They run one after the other in one directory, as the same reader would run them: four use the same store, which the
first of them makes and the others find.
"""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from preloaded import run_python
from run_notebook import digest

from shards.reader import Store

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NAMES = [path.stem for path in NOTEBOOKS]
MADE = {  # what is left behind by a notebook that did all that it says
    "choose-layer": ["handbook.txt", "runs/diagnostics/*/result.json"],
    "compare-objectives": ["runs/evaluations/*/finetune/sst2-seed0.json", "runs/comparison/report.html"],
    "custom-loop": ["handbook.txt", "my-encoder/model.safetensors"],
    "look-at-lsps": ["handbook.txt", "lsps/index.html", "runs/stores/*/target.json"],
    "own-corpus": ["handbook.txt", "runs/stores/*/target.json", "runs/students/mlsm-*/export/model.safetensors"],
    "own-vectors": ["digits.npy", "runs/dictionaries/digits-*/atoms.npy"],
}
SAID = {"compare-objectives": "One pair of pre-training runs is too few to tell"}  # by others, something of an LSP


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """The directory in which the notebooks run."""
    return tmp_path_factory.mktemp("tutorials")


def test_every_notebook_is_known():
    assert list(MADE) == NAMES, "MADE says of every notebook in docs/tutorials what it makes"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_it_runs_at_toy_size(notebook, desk):
    pytest.importorskip("matplotlib", reason='tutorials draw with matplotlib: pip install "mlsm-pretrain[eval]"')
    environment = {"PYTHONPATH": str(ROOT), "MLSM_TUTORIAL_SIZE": "toy", "MPLBACKEND": "agg", "HF_HUB_OFFLINE": "1"}
    run = run_python([ROOT / "tests" / "run_notebook.py", notebook], cwd=desk, env=os.environ | environment)
    assert run.returncode == 0, run.stderr[-3000:]
    assert SAID.get(notebook.stem, "LSP ") in run.stdout
    assert [pattern for pattern in MADE[notebook.stem] if not list(desk.glob(pattern))] == []
    if notebook.stem == "custom-loop":
        (store,) = desk.glob("runs/stores/lsp-*")
        printed = re.search(r"a constant prediction scores (\S+)", run.stdout)
        assert float(printed[1]) == pytest.approx(loss_of_constant(store), abs=0.006), "printed with two digits"


def loss_of_constant(store):
    """Mean KL divergence of the held-out LSPs from the mean LSP distribution of the training text, in nats per token.

    In float64, from the rows of the store's reader: not by torch, its kl_div or LspDataset, as the notebook does it.
    """
    store = Store.open(store)
    rows = {}
    for split in ("train", "held_out"):
        windows = store.split(split)
        batch = windows.read(np.arange(len(windows)))
        rows[split] = windows.targets(batch, *np.nonzero(batch.documents >= 0))
    train, held_out = rows["train"], rows["held_out"]
    mean = np.bincount(train.indices, train.weights, store.k) + 1e-3
    mean /= mean.sum()
    nats = held_out.weights.astype(np.float64) * np.log(held_out.weights / mean[held_out.indices])
    return nats.sum() / (np.diff(held_out.indptr) > 0).sum()


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=NAMES)
def test_it_is_stored_as_people_should_find_it(notebook):
    stored = json.loads(notebook.read_text(encoding="utf-8"))
    assert (stored["nbformat"], stored["nbformat_minor"]) == (4, 5)
    first, *cells = stored["cells"]
    assert first["cell_type"] == "markdown" and re.match(r"# \S", first["source"][0]), "the first line is the title"
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert 'SIZE = os.environ.get("MLSM_TUTORIAL_SIZE", "full")' in "".join(code[0]["source"])
    if "executed" in stored["metadata"]:
        assert stored["metadata"]["executed"] == digest(stored), "outputs are of another code: make notebooks"
        assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
        outputs = json.dumps([cell["outputs"] for cell in code])
        assert len(outputs) < 200_000 and str(ROOT) not in outputs and str(Path.home()) not in outputs
    else:
        assert not [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None]
    ids = [cell["id"] for cell in stored["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", name) for name in ids)
