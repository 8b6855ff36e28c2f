"""The paper's figures in a study's report: what they draw are the scores of its records and of its diagnostic."""

import csv
import json
import random
from pathlib import Path
from statistics import fmean

import pytest
import yaml
from tiny_senses import write_miniature

from mlsm.common.errors import StudyError
from mlsm.common.progress import silent
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.costs import is_finished
from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.studies.protocol.parts import Part, find_diagnostic, plan
from mlsm.evaluation.studies.protocol.study import study
from mlsm.evaluation.tasks.blimp.data import PARADIGMS
from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures

pytestmark = pytest.mark.filterwarnings("ignore:.* in this data")
WORDS = ("the", "a", "file", "object", "returns", "list", "of", "is", "not", "string")
ENCODING = {"corpus": [], "k": 16, "lam": 0.1, "max-length": 32, "max-tokens": 20_000, "dictionary-tokens": 1_000}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Evaluation data of every kind, in miniature."""
    directory, draw = write_miniatures(tmp_path_factory.mktemp("data")), random.Random(0)
    write_miniature(directory / "wsd")
    (directory / "blimp/data").mkdir(parents=True)
    for name in PARADIGMS:
        lines = [
            json.dumps({f"sentence_{kind}": " ".join(draw.choices(WORDS, k=5)) for kind in ("good", "bad")})
            for _ in range(3)
        ]
        (directory / f"blimp/data/{name}.jsonl").write_text("\n".join(lines) + "\n")
    return directory


@pytest.fixture(scope="module")
def settings(tmp_path_factory, english_text, teacher_directory, data):
    """A study of three layers, of which one has a curve, beside the words."""
    directory = tmp_path_factory.mktemp("study")
    of_teacher = ENCODING | {"teacher": str(teacher_directory), "corpus": [str(english_text)], "layer": [1, 2, 3]}
    described = {
        "study": {
            "title": "A toy", "question": "Which layer?", "primary": ["mlsm-l2", "mlm"], "seeds": [0],
            "curves": ["mlsm-l2", "mlm"], "stores": {"lsp": {"command": "encode-lsp"}},
            "arms": {"mlsm": {"store": "lsp"}, "mlm": {"store": "lsp", "objective": "mlm"}},
        },
        "encode-lsp": of_teacher | {"unit-tokens": 8_000, "device": "cpu"},
        "train-student": {
            "encoder": "bert-2x32", "dropout": 0.1, "max-steps": 6, "batch-windows": 8, "micro-batch": 8, "lr": 1e-3,
            "checkpoints": [0.5, 1.0], "device": "cpu",
        },
        "train-probe": {
            "max-steps": 4, "batch-windows": 8, "micro-batch": 8, "checkpoints": [0.25, 0.5, 1.0], "device": "cpu",
        },
        "finetune": {"tasks": ["mrpc"], "seeds": 1, "epochs": 1, "device": "cpu"},
        "evaluate-blimp": {"per-paradigm": 2, "tasks": ["wh_island", "causative"], "device": "cpu"},
        "choose-layer": of_teacher | {"dictionary-epochs": 1.0, "device": "cpu"},
        "compare": {"paper": True},
    }  # fmt: skip
    recipe = directory / "toy.yaml"
    recipe.write_text(yaml.safe_dump(described, sort_keys=False))
    return StudyConfig(recipe=str(recipe), output=directory / "made", data_dir=data)


@pytest.fixture(scope="module")
def result(settings):
    return study(settings)


@pytest.fixture(scope="module")
def recorded(settings, result):
    """(suite, model) -> its one record."""
    found = {}
    for file in settings.evaluations.glob("*/*/*.json"):
        record = json.loads(file.read_text())
        found[record["suite"], record["model"]] = record
    return found


def mean(record):
    return fmean(figure["value"] for figure in record["figures"])


def rows_of(settings, figure):
    (file,) = settings.directory.glob(f"comparison/figure-{figure:02}-*.csv")
    with file.open() as lines:
        return [row for row in csv.DictReader(lines) if row["source"] == "measured"]


def test_figure_4_has_the_f1_of_every_layer_beside_the_scores_of_its_student(settings, result, recorded):
    rows = rows_of(settings, 4)
    (diagnostic,) = settings.directory.glob("stores/lsp/diagnostics/*/result.json")
    f1 = {str(entry["layer"]): entry["f1"] for entry in json.loads(diagnostic.read_text())["layers"]}
    assert {row["x"]: float(row["value"]) for row in rows if row["panel"] == "word senses"} == f1 and len(f1) == 3
    scores = {row["x"]: float(row["value"]) for row in rows if row["series"] == "mean"}
    names = {"1": "mlsm-l1-seed0", "2": "mlsm-l2-seed0-step-00000006", "3": "mlsm-l3-seed0"}
    assert scores == {layer: pytest.approx(mean(recorded["finetune", name])) for layer, name in names.items()}
    assert f"--diagnostic {diagnostic}" in result["tables"] and "--paper" in result["tables"]


def test_a_study_does_not_choose_between_two_results_of_choose_layer(tmp_path):
    part = Part("choose-layer", "choose-layer", {"output": tmp_path})
    for name in ("a", "b"):
        (made := tmp_path / "diagnostics" / f"teacher-{name}").mkdir(parents=True)
        assert find_diagnostic([part]) == (None if name == "a" else tmp_path / "diagnostics/teacher-a/result.json")
        (made / "result.json").write_text("{}")
    with pytest.raises(StudyError, match="there are 2 results of choose-layer, perhaps made with other settings"):
        find_diagnostic([part])


def test_figure_6_has_every_kept_checkpoint_of_the_arms_with_a_curve(settings, result, recorded):
    found = [(row["x"], float(row["value"])) for row in rows_of(settings, 6) if row["panel"] == "average"]
    names = [f"{arm}-seed0-step-{step:08}" for arm in ("mlm", "mlsm-l2") for step in (3, 6)]
    wanted = [(str(int(name[-8:])), pytest.approx(mean(recorded["finetune", name]))) for name in names]
    assert sorted(found) == sorted(wanted, key=lambda pair: (pair[0], pair[1].expected))


def test_figure_9_has_every_kept_checkpoint_of_students_and_probes_at_its_operations(settings, result, recorded):
    """A probe's come after all steps of its student, whose operations count."""
    found = {row["against"]: (float(row["x"]), float(row["value"])) for row in rows_of(settings, 9)}
    probes = [f"{source}-mlsm-l2-seed0-step-{step:08}" for source in ("softmax", "logits") for step in (1, 2, 4)]
    others = [f"{source}-mlsm-l{layer}-seed0" for source in ("softmax", "logits") for layer in (1, 3)]
    assert found.keys() == {"mlm-seed0-step-00000003", "mlm-seed0-step-00000006", *probes, *others}
    for name, (flops, value) in found.items():
        record = recorded["blimp", name]
        assert flops == pytest.approx(record["flops"]["pretraining"] + record["flops"]["teacher"])
        assert value == pytest.approx(mean(record))
    assert found[probes[0]][0] < found[probes[1]][0] < found[probes[2]][0]


def test_the_report_shows_the_figures_and_the_finished_probe(settings, result, recorded):
    page = Path(result["comparison"]["report"]).read_text()
    for name in ("figure-04-word-senses", "figure-06-steps", "figure-09-blimp"):
        assert f'href="{name}.csv"' in page and f'id="{name}-' in page  # the numbers, and the drawing itself
    with (settings.directory / "comparison/report-scores.csv").open() as lines:
        blimp = {row["model"]: float(row["mean"]) for row in csv.DictReader(lines) if row["score"] == "blimp"}
    assert blimp["mlsm-l2"] == pytest.approx(mean(recorded["blimp", "logits-mlsm-l2-seed0-step-00000004"]))
    assert blimp["mlm"] == pytest.approx(mean(recorded["blimp", "mlm-seed0-step-00000006"]))


def test_every_part_is_found_finished_and_every_checkpoint_is_asked_for(settings, result, recorded):
    parts = plan(read_study(settings.recipe), settings.directory, settings.data).parts
    assert all(is_finished(part, parts) for part in parts)
    place = settings.evaluations
    (one,) = place.glob("logits-mlsm-l2-seed0-step-00000002-*")
    one.rename(place / "elsewhere")
    try:
        assert [part.name for part in parts if not is_finished(part, parts)] == ["evaluate-blimp/logits-mlsm-l2-seed0"]
    finally:
        (place / "elsewhere").rename(one)


def test_a_diagnostic_of_another_teacher_is_not_drawn(settings, result, tmp_path):
    (diagnostic,) = settings.directory.glob("stores/lsp/diagnostics/*/result.json")
    kept = diagnostic.read_text()
    (tmp_path / "result.json").write_text(kept.replace(json.loads(kept)["teacher"]["fingerprint"], "0" * 64))
    files = {}
    for file in (tmp_path / "result.json", diagnostic):
        students = tuple(settings.evaluations.glob("mlsm-l*"))
        found = compare(CompareConfig(results=students, output=tmp_path / "made", diagnostic=file), silent)
        (figure,) = (one for one in found.figures if one.figure == 4)
        files[file] = figure.files, figure.lacks
    assert files[diagnostic][0] and not files[tmp_path / "result.json"][0]
    assert "a result of choose-layer for the models' own teacher" in files[tmp_path / "result.json"][1]
