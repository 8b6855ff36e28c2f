"""Which models are not scored."""

import json

import pytest
import torch
from tiny_families import edit_weights, tiny_model
from tiny_store import write_tokenizer

from mlsm.common.errors import ModelError
from mlsm.evaluation.tasks.scoring.models import load

pytestmark = pytest.mark.promise("a checkpoint of which …")


def test_a_model_that_transformers_would_compute_as_another_is_refused(tmp_path):
    tiny_model("bert", "masked-lm").save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 59)
    load(tmp_path, torch.device("cpu"))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModelForMaskedLM": "own.Model"}}))
    with pytest.raises(ModelError, match="auto_map: own.Model"):
        load(tmp_path, torch.device("cpu"))
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit_weights(tmp_path, lambda weights: weights | {"bert.encoder.layer.0.scale": torch.ones(2)})
    with pytest.raises(ModelError, match=r"no place for \(bert.encoder.layer.0.scale\)"):
        load(tmp_path, torch.device("cpu"))
