"""Equal settings have the names of runs that they had: golden names, which finished and unfinished runs are found by.

They were made at commit 73185cf, on stores that tests/tiny_store.py writes.
"""

import pytest

from student.config import StudentConfig
from student.runs.identity import default_name, run_identity
from student.task import student_task

ENCODER = {"encoder": "bert-2x32", "seed": 1, "max_steps": 12, "batch_windows": 12, "lr": 1e-3, "compile": False}
NAMES = {
    "mlsm-bert-2x32-seed1-e03d38c6": {"objective": "mlsm"},
    "mlm-bert-2x32-seed1-4300e33b": {"objective": "mlm"},
    "kd-bert-2x32-seed1-d633ec46": {"objective": "kd"},
    "mtl-bert-2x32-seed1-8a43b75f": {"objective": "mtl"},
    "hard-mlsm-bert-2x32-seed1-442be36b": {"objective": "hard-mlsm"},
    "naive-mlsm-bert-2x32-seed1-d2902626": {"objective": "naive-mlsm"},
    "supersense-bert-2x32-seed1-1613bc4f": {"objective": "supersense"},
    "type-bert-2x32-seed1-1c9b4f20": {"objective": "type"},
    "regress-bert-2x32-seed1-2ea2e869": {"objective": "regress"},
    "recon-bert-2x32-seed1-9a1248e1": {"objective": "recon"},
    "mlm-bert-2x32-seed1-289946bc": {"objective": "mlm", "untied": True},
    "kd-bert-2x32-seed1-0e120c92": {"objective": "kd", "untied": True},
    "mtl-bert-2x32-seed1-0688960b": {"objective": "mtl", "untied": True},
    "naive-mlsm-bert-2x32-seed1-3126b732": {"objective": "naive-mlsm", "untied": True},
    "mtl-bert-2x32-seed1-50bb0d41": {"objective": "mtl", "kappa": 0.5},
    "regress-bert-2x32-seed1-45b33fd6": {"objective": "regress", "kappa": 0.5},
    "regress-bert-2x32-seed1-7ce61575": {"objective": "regress", "regress_loss": "mse"},
    "mlsm-bert-2x32-seed1-bc06b420": {"objective": "mlsm", "target_temperature": 2.0},
    "mlsm-bert-2x32-seed1-ec3e1c30": {"objective": "mlsm", "positions": "all"},
    "mlsm-bert-2x32-seed1-e32a9183": {"objective": "mlsm", "mask_rate": 0.4, "mask_later": 1},
    "mlsm-bert-2x32-seed1-a0319b26": {
        "objective": "mlsm",
        "mask_rate": 0.3,
        "mask_rate_end": 0.15,
        "mask_schedule": "steps",
        "mask_rate_steps": (0.25, 0.5),
    },
    "mlm-bert-2x32-seed1-1e13d949": {"objective": "mlm", "mask_unit": "span", "corruption": "80-10-10"},
    "mlsm-bert-2x32-seed1-2947bbd6": {"objective": "mlsm", "mask_weights": "adaptive", "mask_update_steps": 50},
    "mlsm-bert-2x32-seed1-c12a79db": {"objective": "mlsm", "short_windows": 8, "short_share": 0.5},
    "mlsm-bert-2x32-seed1-4ea3ad21": {"objective": "mlsm", "optimizer": "muon", "schedule": "wsd", "decay_share": 0.3},
    "mlsm-bert-2x32-seed1-37d09b24": {"objective": "mlsm", "adam_beta2": 0.98, "decay_all": True, "dropout": 0.0},
    "mlsm-bert-2x32-seed1-41c42f47": {"objective": "mlsm", "documents_apart": True},
}


@pytest.mark.parametrize("name", NAMES)
def test_equal_settings_have_equal_names(name, store_for, needed_by):
    settings = NAMES[name] | needed_by(NAMES[name]["objective"])
    assert name_of(settings, store_for) == name


def name_of(settings, store_for):
    store = store_for(settings["objective"])
    config = StudentConfig(**ENCODER | {"store": store.path, "dtype": "float32"} | settings)
    task = student_task(config, store)
    return default_name(config, run_identity(config, store, task.architecture, task.settings(config, [None])))
