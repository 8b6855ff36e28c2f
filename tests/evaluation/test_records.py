"""Records are complete, checked field by field, and contain a model's origin."""

import copy
import hashlib
import json
import shutil

import pytest
from tiny_store import write_store
from tiny_teacher import standard_text, tiny_teacher
from transformers import AutoModelForMaskedLM

import mlsm
from mlsm.common.errors import RecordError
from mlsm.evaluation import records
from mlsm.evaluation.comparison.models import match_trainings, models_of
from mlsm.evaluation.lineage import FIELDS, lineage
from mlsm.results import Evaluated
from pipeline.teacher import teacher_fingerprint
from student.config import StudentConfig
from student.train import train

UNKNOWN = dict.fromkeys(FIELDS) | {"flops": {"pretraining": None, "teacher": None}, "identity": None}


def record(**changes):
    """A record as if MRPC had been trained."""
    return {
        "schema": "mlsm-record-2",
        "suite": "finetune",
        "task": "mrpc",
        "seed": 0,
        "diverged": False,
        "collapsed": False,
        "figures": [{"metric": "accuracy", "value": 0.86, "n": 408}, {"metric": "f1", "value": 0.9, "n": 408}],
        "model": "some/model",
        "path": "/models/some",
        "weights": "ab" * 32,
        **UNKNOWN,
        "head": "cd" * 32,
        "data": {"name": "mrpc", "files": {}, "n_train": 3668, "n_eval": 408},
        "settings": {"warmup": 0.06, "grad_clip": 1.0},
        "env": {},
        "wall": 1.5,
    } | changes


def test_what_is_written_is_read_again(tmp_path):
    first, second = record(), record(seed=1, diverged="the loss was not finite at step 3")
    path = records.write(tmp_path, first)
    assert path == tmp_path / "evaluations/some-model-abababab/finetune/mrpc-seed0.json"
    other = records.write(tmp_path, second)
    whole = [first | {"file": str(path)}, second | {"file": str(other)}]
    assert records.read([tmp_path]) == whole
    assert records.read([path, tmp_path, path]) == whole
    records.write(tmp_path, first | {"wall": 2.0})
    assert records.read([path])[0]["wall"] == 2.0
    assert sorted(file.name for file in path.parent.iterdir()) == ["mrpc-seed0.json", "mrpc-seed1.json"]


def test_the_records_of_a_result_are_read(tmp_path):
    """A result is also a Mapping, whose keys are not paths."""
    path, result = records.write(tmp_path, record()), Evaluated.of({"output": str(tmp_path), "made": 1})
    whole = [record() | {"file": str(path)}]
    assert mlsm.read_records(result) == mlsm.read_records([result]) == mlsm.read_records(tmp_path) == whole


def test_a_record_that_names_neither_warm_up_nor_clipping_was_made_without_them(tmp_path):
    path = records.write(tmp_path, record(settings={"lr": 1e-3}))
    assert records.read([path])[0]["settings"] == {"lr": 1e-3, "warmup": 0.0, "grad_clip": 0.0}
    earlier = models_of(records.read([path]))[0][0]
    for changes, pairs in (({"warmup": 0.0, "grad_clip": 0.0}, 1), ({"warmup": 0.06, "grad_clip": 1.0}, 0)):
        other = record(settings={"lr": 1e-3} | changes, weights="cd" * 32, model="other", head="ef" * 32)
        with_head = record(settings=earlier.trainings["mrpc", 0]["settings"], head="ef" * 32)
        one, two = (models_of([one])[0][0] for one in (with_head, other))
        assert len(match_trainings(one, two)[0]) == pairs


def test_blimp_has_one_record_a_model():
    blimp = record(suite="blimp", task="blimp", seed=None, figures=[{"metric": "x", "value": 1, "n": 10, "ties": 1}])
    records.check_record(blimp, "here")
    assert records.path_of("out", blimp).name == "blimp.json"


MALFORMED = [
    ({"schema": "mlsm-record-9"}, "schema"),
    ({"suite": "glue"}, "suite"),
    ({"task": "boolq"}, "task"),
    ({"seed": -1}, "seed"),
    ({"seed": None}, "seed"),
    ({"seed": True}, "seed"),
    ({"figures": [{"metric": "accuracy", "value": 86, "n": 408}]}, "figures[0].value"),
    ({"figures": [{"metric": "accuracy", "value": float("nan"), "n": 408}]}, "figures[0].value"),
    ({"figures": [{"metric": "accuracy", "value": 0.5, "n": 408, "ties": "few"}]}, "figures[0].ties"),
    ({"figures": [{"metric": "accuracy", "value": 0.5, "n": 408}]}, "figures"),
    ({"figures": []}, "figures"),
    ({"diverged": True}, "diverged"),
    ({"weights": "xyz"}, "weights"),
    ({"flops": {"pretraining": 1.0}}, "flops.teacher is missing,"),
    ({"fraction": 10}, "fraction"),
    ({"data": None}, "data"),
    ({"wall": "a minute"}, "wall"),
]


@pytest.mark.parametrize(("changes", "field"), MALFORMED)
def test_a_malformed_record_names_file_and_field(tmp_path, changes, field):
    file = tmp_path / "mrpc-seed0.json"
    file.write_text(json.dumps(record(**changes)))
    with pytest.raises(RecordError) as caught:
        records.read([tmp_path])
    assert str(file) in str(caught.value) and f"field {field}" in str(caught.value)
    with pytest.raises(RecordError):
        records.write(tmp_path / "new", record(**changes))
    assert not (tmp_path / "new").exists()


def test_a_missing_field_a_cut_file_and_no_records(tmp_path):
    cut = record()
    del cut["weights"]
    (tmp_path / "a.json").write_text(json.dumps(cut))
    with pytest.raises(RecordError, match="a.json: field weights is missing"):
        records.read([tmp_path])
    (tmp_path / "a.json").write_text(json.dumps(record())[:100])
    with pytest.raises(RecordError, match="a.json: expected a record as JSON"):
        records.read([tmp_path])
    (tmp_path / "a.json").unlink()
    with pytest.raises(RecordError, match="no records in"):
        records.read([tmp_path])
    with pytest.raises(RecordError, match="no such file"):
        records.read([tmp_path / "nowhere"])


def test_weights_are_told_by_content_alone(tmp_path):
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    digests = {name: records.weights_sha256(tmp_path / name) for name in "abc"}
    assert digests["a"] == digests["b"] != digests["c"] and len(digests["a"]) == 64
    with pytest.raises(RecordError, match="no safetensors"):
        records.weights_sha256(tmp_path)


def test_a_model_that_is_saved_again_keeps_the_hash_of_its_configuration(tmp_path):
    directory = tiny_teacher(tmp_path, standard_text(tmp_path, 50))
    AutoModelForMaskedLM.from_pretrained(directory).half().save_pretrained(tmp_path / "again")
    assert records.config_sha256(tmp_path / "again") == records.config_sha256(directory)
    again = tmp_path / "again" / "config.json"
    again.write_text(json.dumps(json.loads(again.read_text()) | {"layer_norm_eps": 1e-5}))
    assert records.config_sha256(tmp_path / "again") != records.config_sha256(directory)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 8 steps, and its summary."""
    directory = tmp_path_factory.mktemp("run")
    store = write_store(directory / "store", k=24)
    config = StudentConfig(
        store=store.path,
        encoder="bert-2x32",
        max_steps=8,
        batch_windows=12,
        micro_batch=4,
        eval_windows=8,
        device="cpu",
        run_dir=directory / "mlsm-tiny",
    )
    return config.run_dir, train(config)


def test_a_student_tells_its_lineage(run):
    directory, result = run
    whole, half = (records.describe_model(directory / part) for part in ("export", "checkpoints/step-00000004"))
    assert whole["model"] == "mlsm-tiny" and half["model"] == "mlsm-tiny-step-00000004"
    assert whole["weights"] != half["weights"]
    expected = {"objective": "mlsm", "kappa": None, "run_seed": 42, "step": 8, "fraction": 1.0, "layer": 3, "k": 24}
    expected["encoder"] = "bert-2x32"
    assert {name: whole[name] for name in expected} == expected
    assert (half["step"], half["fraction"]) == (4, 0.5)
    assert whole["flops"]["pretraining"] == pytest.approx(result["flops"], rel=1e-12)
    assert half["flops"]["pretraining"] == pytest.approx(result["flops"] / 2, rel=1e-12)
    assert whole["flops"]["teacher"] is None  # no such teacher on this machine
    records.check_record(record(**whole), "here")


@pytest.mark.parametrize("objective", ["mlm", "supersense"])
def test_a_student_of_words_has_no_teacher_whatever_its_store_holds(run, tmp_path, objective):
    known = json.loads((run[0] / "export" / "lineage.json").read_text())
    (tmp_path / "lineage.json").write_text(json.dumps(known | {"objective": objective}))
    found = lineage(tmp_path)
    assert [found[name] for name in ("layer", "k", "lambda", "dictionary", "teacher")] == [None] * 5
    assert found["flops"]["teacher"] == 0.0 and found["encoder"] == "bert-2x32"


def test_the_identity_is_all_that_named_the_run_and_its_store(run):
    directory, _ = run
    known = lineage(directory / "export")["identity"]
    config = json.loads((directory / "config.json").read_text())
    assert known["settings"] == config["settings"] | {"dropout": 0.1}  # left open, so the encoder's own
    assert (known["target"], known["plan"]) == (config["store"]["target"], config["store"]["plan"])
    assert known["target_settings"]["layer"] == 3
    assert known["tail"] == pytest.approx({"mass_kept": 1.0, "mass_dropped": 0.0})
    assert "mean mass that top-n dropped | 0.00%" in (directory / "export" / "README.md").read_text()
    half = lineage(directory / "checkpoints" / "step-00000004")
    assert half["identity"] == known and half["step"] == 4


def test_a_probe_adds_its_operations_to_those_of_its_student(run, tmp_path):
    directory, result = run
    shutil.copytree(directory / "export", tmp_path / "probe")
    known = json.loads((directory / "export" / "lineage.json").read_text())
    (tmp_path / "probe" / "lineage.json").write_text(json.dumps({"student": known, "flops": 1e9, "step": 3}))
    found = lineage(tmp_path / "probe")
    assert found["flops"]["pretraining"] == pytest.approx(result["flops"] + 1e9, rel=1e-12)
    assert (found["objective"], found["step"]) == ("mlsm", 8)


def test_the_operations_of_a_student_that_continues_another_encoder_are_not_known(run, tmp_path):
    known = json.loads((run[0] / "export" / "lineage.json").read_text())
    known["settings"] |= {"continue_from": "1234"}
    (tmp_path / "lineage.json").write_text(json.dumps(known))
    assert lineage(tmp_path)["flops"]["pretraining"] is None


def test_an_export_keeps_its_flops_when_it_is_moved(run, tmp_path):
    directory, result = run
    shutil.copytree(directory / "export", tmp_path / "moved")
    assert lineage(tmp_path / "moved")["flops"]["pretraining"] == result["flops"]


def test_of_a_stock_model_nothing_is_known(tmp_path):
    snapshot = tmp_path / "models--bert--base" / "snapshots" / "abc"
    shutil.copytree(tiny_teacher(tmp_path, standard_text(tmp_path, 50)), snapshot)
    said = records.describe_model(snapshot)
    assert said["model"] == "bert/base" and {name: said[name] for name in UNKNOWN} == UNKNOWN


def test_the_teacher_counts_its_forward_passes(run, tmp_path):
    layers, length, width, inner = 2, 16, 32, 64
    teacher = tiny_teacher(tmp_path, standard_text(tmp_path, 50), layers=3, width=width)
    export = tmp_path / "export"
    export.mkdir()
    known = json.loads((run[0] / "export" / "lineage.json").read_text())
    known["store"]["settings"] |= {
        "teacher": teacher_fingerprint(teacher),
        "teacher_name": str(teacher),
        "layer": layers,
        "windowing": {"max_length": length},
    }

    def flops(known):
        (export / "lineage.json").write_text(json.dumps(known))
        return lineage(export)["flops"]["teacher"]

    a_layer = 2 * length * (4 * width**2 + 2 * width * inner) + 2 * 2 * length**2 * width
    assert flops(known) == pytest.approx(known["tokens"] / length * layers * a_layer)
    assert flops(known | {"objective": "mlm"}) == 0.0
    whole = copy.deepcopy(known)
    whole["store"]["settings"].pop("layer")  # a store of logits: all layers, and the head at every token
    vocabulary = json.loads((teacher / "config.json").read_text())["vocab_size"]
    head = 2 * length * (width**2 + width * vocabulary)
    assert flops(whole) == pytest.approx(known["tokens"] / length * (3 * a_layer + head))
    second = copy.deepcopy(known["store"])
    second["settings"]["layer"] = 1
    assert flops(known | {"other_stores": [second]}) == pytest.approx(known["tokens"] / length * (layers + 1) * a_layer)
    second["settings"]["teacher"] = "0" * 64
    assert flops(known | {"other_stores": [second]}) is None, "unknown, not that of the first alone"
    whole["store"]["settings"]["masked_passes"] = 7
    assert flops(whole) == pytest.approx(known["tokens"] / length * (7 * 3 * a_layer + head))
    known["store"]["settings"]["teacher"] = hashlib.sha256(b"another").hexdigest()
    assert flops(known) is None


def test_a_dropout_that_was_left_open_is_the_encoders_own(run, tmp_path):
    """Given or left open, 0.1 is one setting, and no difference between two models."""
    known = json.loads((run[0] / "export" / "lineage.json").read_text())
    for dropout in (None, 0.1):
        known["settings"]["dropout"] = dropout
        directory = tmp_path / str(dropout)
        directory.mkdir()
        (directory / "lineage.json").write_text(json.dumps(known))
        config = json.loads((run[0] / "export" / "config.json").read_text())
        own = {name: 0.1 for name in config if "dropout" in name and "classif" not in name}
        (directory / "config.json").write_text(json.dumps(config | own))
        assert lineage(directory)["identity"]["settings"]["dropout"] == 0.1
        of_probe = {"student": known | {"name": "a-student-elsewhere"}, "flops": 1e9, "step": 3}
        (directory / "lineage.json").write_text(json.dumps(of_probe))
        assert lineage(directory)["identity"]["settings"]["dropout"] == 0.1, "of a probe it is its student's"
