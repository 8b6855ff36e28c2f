"""What a training is estimated to cost, with a measurement in which a window takes the square of its length."""

import pytest
import yaml

from evaluation.studies.protocol import costs
from evaluation.studies.protocol.description import read_study
from evaluation.studies.protocol.parts import plan

STEPS, BATCH, WINDOW = 10, 8, 32


@pytest.fixture
def seconds(tmp_path, monkeypatch):
    """The estimated seconds of every training of a study, by part."""

    def measure(encoder, vocabulary, outputs, length, device):
        return costs.Speed(length**2, parameters=1)

    monkeypatch.setattr(costs, "_measure", measure)
    (tmp_path / "blimp" / "data").mkdir(parents=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    parts = plan(read_study(str(recipe)), tmp_path / "made", tmp_path).parts
    trainings = [part for part in parts if part.verb in ("train-student", "train-probe")]
    return {cost.part: cost.seconds for cost in costs.costs(trainings, parts, {}, None)}


RECIPE = {
    "study": {
        "title": "Windows",
        "question": "Do short ones do?",
        "primary": ["half", "whole"],
        "seeds": [0],
        "stores": {"lsp": {"command": "encode-lsp"}},
        "arms": {
            "whole": {"store": "lsp"},
            "usual": {"store": "lsp", "short-windows": 8},
            "half": {"store": "lsp", "short-windows": 16, "short-share": 0.5},
        },
    },
    "encode-lsp": {"teacher": "bundled", "corpus": ["a.txt"], "layer": 10, "k": 64, "max-length": WINDOW},
    "train-student": {"encoder": "bert-2x32", "dropout": 0.0, "max-steps": STEPS, "batch-windows": BATCH, "lr": 1e-3},
    "train-probe": {"max-steps": 4, "batch-windows": BATCH},
    "evaluate-blimp": {},
}


def test_steps_on_pieces_cost_what_the_pieces_do(seconds):
    whole, forward_and_backward = WINDOW**2, 3 * BATCH
    assert seconds["train-student/whole-seed0"] == forward_and_backward * 10 * whole
    assert seconds["train-student/usual-seed0"] == forward_and_backward * (9 * 4 * 8**2 + 1 * whole)
    assert seconds["train-student/half-seed0"] == forward_and_backward * (5 * 2 * 16**2 + 5 * whole)


def test_a_probe_reads_whole_windows_whatever_its_student_read(seconds):
    probes = {part: found for part, found in seconds.items() if part.startswith("train-probe/")}
    assert any("usual" in part for part in probes)
    assert set(probes.values()) == {4 * BATCH * WINDOW**2}
