"""Cost estimates of training, with a fake measurement in which a window's time is the square of its length."""

from pathlib import Path

import pytest
import yaml

from mlsm.evaluation import records
from mlsm.evaluation.studies.protocol import costs
from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.studies.protocol.facts import facts_of, keep_costs, kept_costs
from mlsm.evaluation.studies.protocol.parts import plan

STEPS, BATCH, WINDOW = 10, 8, 32


@pytest.fixture
def seconds(tmp_path, monkeypatch):
    """The estimated seconds of every training of a study, by part."""

    def measure(encoder, vocabulary, outputs, length, device):
        return costs.Speed(length**2, parameters=1)

    monkeypatch.setattr(costs, "_measure", measure)
    return {cost.part: cost.seconds for cost in costs_of(RECIPE, tmp_path)}


def parts_of(recipe, directory, output="made"):
    (directory / "blimp" / "data").mkdir(parents=True, exist_ok=True)
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return plan(read_study(str(path)), directory / output, directory).parts


def costs_of(recipe, directory, verbs=("train-student", "train-probe")):
    """Those of all parts of some kinds."""
    parts = parts_of(recipe, directory)
    return list(costs.costs([part for part in parts if part.verb in verbs], parts, {}, None))


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


def test_stores_that_differ_only_in_their_seed_are_measured_once(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(costs, "_dry_run", lambda part, _: measured.append(part.name) or {"seconds": 9.0, "bytes": 1})
    study = RECIPE["study"] | {
        "seeds": [0, 1, 2],
        "stores": {
            "hidden": {"command": "encode-hidden"},
            "lsp": {"command": "encode-lsp", "hidden": "hidden", "seed": "each"},
            "nearest": {"command": "encode-lsp", "hidden": "hidden", "seed": "each", "solver": "nearest"},
        },
        "arms": RECIPE["study"]["arms"] | {"usual": {"store": "nearest"}},
    }
    text = {name: RECIPE["encode-lsp"][name] for name in ("teacher", "corpus", "max-length")}
    recipe = RECIPE | {"study": study, "encode-hidden": text | {"layer": 10}, "encode-lsp": {"k": 64}}
    found = costs_of(recipe, tmp_path, ("encode-hidden", "encode-lsp"))
    assert [cost.seconds for cost in found] == [9.0] * 7
    assert measured == ["encode-hidden/hidden", "encode-lsp/lsp-seed0", "encode-lsp/nearest-seed0"]


def test_steps_on_pieces_cost_what_the_pieces_do(seconds):
    whole, forward_and_backward = WINDOW**2, 3 * BATCH
    assert seconds["train-student/whole-seed0"] == forward_and_backward * 10 * whole
    assert seconds["train-student/usual-seed0"] == forward_and_backward * (9 * 4 * 8**2 + 1 * whole)
    assert seconds["train-student/half-seed0"] == forward_and_backward * (5 * 2 * 16**2 + 5 * whole)


def test_a_kept_cost_is_that_of_the_settings_that_were_measured(tmp_path):
    """Of a part and of those it needs, wherever the study is."""
    parts = parts_of(RECIPE, tmp_path)
    keep_costs([costs.Cost(part.name, 1.0, 2) for part in parts], tmp_path, parts)
    everything = {part.name for part in parts}
    assert kept_costs(tmp_path, parts_of(RECIPE, tmp_path, "elsewhere")).keys() == everything
    longer = RECIPE | {"train-student": RECIPE["train-student"] | {"max-steps": 2 * STEPS}}
    assert kept_costs(tmp_path, parts_of(longer, tmp_path)).keys() == {"encode-lsp/lsp"}
    study = RECIPE["study"]
    changed = RECIPE | {"study": study | {"arms": study["arms"] | {"whole": {"store": "lsp", "lr": 1e-4}}}}
    parts = parts_of(changed, tmp_path)
    assert kept_costs(tmp_path, parts).keys() == {name for name in everything if "whole" not in name}
    kept = keep_costs([costs.Cost("train-student/whole-seed0", 5.0, 2)], tmp_path, parts)
    assert kept["train-student/whole-seed0"]["seconds"] == 5.0


def test_a_probe_reads_whole_windows_whatever_its_student_read(seconds):
    probes = {part: found for part, found in seconds.items() if part.startswith("train-probe/")}
    assert any("usual" in part for part in probes)
    assert set(probes.values()) == {4 * BATCH * WINDOW**2}


@pytest.mark.parametrize(("encoder", "window"), [("modernbert-2x64", 32), ("bert-2x32", 600)])
def test_an_encoder_is_measured_with_the_teacher_s_vocabulary_and_windows(tmp_path, encoder, window):
    """A ModernBERT's padding has an id beyond the bundled vocabulary; a BERT's positions end at 512."""
    recipe = RECIPE | {
        "encode-lsp": RECIPE["encode-lsp"] | {"max-length": window},
        "train-student": RECIPE["train-student"] | {"encoder": encoder},
    }
    assert all(cost.seconds > 0 for cost in costs_of(recipe, tmp_path))


SENTENCES = ["the " * 10, "the", "the the the", "the"]  # to train on


def labelled(sentences):
    """As SST-2 is published."""
    return "sentence\tlabel\n" + "".join(f"{sentence.strip()}\t1\n" for sentence in sentences)


def tagged(sentences):
    """As CoNLL-2003 is published, each word labelled."""
    return "\n".join("".join(f"{word} DT I-NP O\n" for word in sentence.split()) for sentence in sentences)


@pytest.mark.parametrize(
    ("task", "folder", "files", "write"),
    [
        ("sst2", "SST-2", ("train.tsv", "dev.tsv"), labelled),
        ("conll2003", "conll2003", ("train.txt", "dev.txt"), tagged),
    ],
)
def test_fine_tuning_costs_what_padded_batches_do_whatever_was_learned_before(
    task, folder, files, write, tmp_path, monkeypatch
):
    """Two epochs of two batches, one padded to 12 tokens and one to 5, and ten examples to evaluate."""
    monkeypatch.setattr(
        costs, "_measure", lambda encoder, vocabulary, outputs, *where: costs.Speed(WINDOW * outputs, 1)
    )
    (tmp_path / folder).mkdir()
    for name, sentences in zip(files, (SENTENCES, ["the the"] * 10), strict=True):
        (tmp_path / folder / name).write_text(write(sentences))
    tuning = {"tasks": [task], "seeds": 1, "epochs": 2, "batch": 2, "lr": 1e-4}
    arms = RECIPE["study"]["arms"] | {"words": {"store": "lsp", "objective": "mlm"}}
    recipe = RECIPE | {"finetune": tuning, "study": RECIPE["study"] | {"arms": arms}}
    found = {cost.part: cost.seconds for cost in costs_of(recipe, tmp_path, ("finetune", "evaluate-blimp"))}
    padded, mean, outputs = (12 + 5) / 2, (12 + 3 + 5 + 3) / 4, 2
    expected = outputs * (3 * 2 * 4 * padded + 10 * mean)
    assert found["finetune/words-seed0"] == found["finetune/whole-seed0"] == pytest.approx(expected)
    assert found["evaluate-blimp/words-seed0"] == found["evaluate-blimp/softmax-whole-seed0"] > 0
    short = recipe | {"finetune": tuning | {"max-steps": 1}, "evaluate-blimp": {"tasks": ["island effects"]}}
    cut = {cost.part: cost.seconds for cost in costs_of(short, tmp_path, ("finetune", "evaluate-blimp"))}
    expected = outputs * (3 * 2 * padded + 10 * mean)  # one batch of two
    assert cut["finetune/words-seed0"] == pytest.approx(expected)
    islands = found["evaluate-blimp/words-seed0"] * 8 / 67
    assert cut["evaluate-blimp/words-seed0"] == pytest.approx(islands)
    rates = recipe | {"finetune": tuning | {"max-steps": 1, "lr": [1e-4, 1e-3]}}
    chosen = {cost.part: cost.seconds for cost in costs_of(rates, tmp_path, ("finetune",))}
    expected += outputs * 2 * (3 * 2 * padded + 0.1 * 4 * mean)  # for each rate one batch, and all of the tenth
    assert chosen["finetune/words-seed0"] == pytest.approx(expected)


def test_frozen_measures_cost_by_the_examples_that_linear_models_learn_from(tmp_path, monkeypatch):
    """Except wsd, which learns from all of its own."""
    monkeypatch.setattr(costs, "_measure", lambda *_: costs.Speed(0.0, 1))  # so that only fitting is counted
    monkeypatch.setattr(costs, "_task_size", lambda *_: costs.TaskSize(8_000, 10, 5.0, 5.0))
    found = [
        costs_of(RECIPE | {"frozen": {"tasks": tasks} | limit}, tmp_path, ("finetune",))[0].seconds
        for tasks, limit in (
            (["conll2003"], {}),
            (["conll2003"], {"limit-train": 400}),
            (["conll2003"], {"limit-train": 40_000}),
            (["wsd"], {"limit-train": 400}),
        )
    ]
    assert found == pytest.approx([120, 12, 240, 60])


@pytest.mark.parametrize("verbs", [("choose-layer",), ("encode-lsp", "choose-layer")])
def test_the_diagnostic_costs_the_same_whatever_else_is_measured_and_however_many_layers_are_encoded(
    verbs, tmp_path, monkeypatch
):
    """A measurement of three layers, each of 2 s a token to code and 7 s to learn, with 1 s a token for the teacher."""

    def measure(part, progress):
        per_token = {"teacher_seconds": 1.0, "solver_seconds": 3 * 2.0}
        return per_token | {"seconds": 100.0, "bytes": 1, "learning_seconds": 3 * 7.0, "lacking": 3}

    monkeypatch.setattr(costs, "_dry_run", measure)
    (tmp_path / "wsd").mkdir()
    study = RECIPE["study"] | {"primary": ["whole-l2", "whole-l4"], "arms": {"whole": {"store": "lsp"}}}
    recipe = RECIPE | {
        "study": study,
        "encode-lsp": RECIPE["encode-lsp"] | {"layer": [2, 4, 6]},
        "choose-layer": RECIPE["encode-lsp"] | {"layer": [2, 4]},
    }
    found = {cost.part: cost.seconds for cost in costs_of(recipe, tmp_path, verbs)}
    assert found["choose-layer"] == costs.SEMCOR_TOKENS * (1 + 2 * 2) + 2 * 7


HIDDEN = {
    "command": "encode-hidden", "teacher": "bundled", "corpus": ["a.txt"], "max-length": WINDOW,
}  # fmt: skip
OF_HIDDEN = RECIPE | {
    "study": RECIPE["study"]
    | {
        "stores": {
            "hidden": HIDDEN,
            "pq": {"command": "encode-hidden", "hidden": "hidden", "quantise": "pq"},
            "lsp": {"hidden": "pq", "seed": "each"},
        }
    },
    "encode-lsp": {"k": 64},
}


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_store_of_hidden_states_that_are_not_there_or_not_whole_is_measured_from_text(
    is_begun, tmp_path, monkeypatch
):
    """Also where the hidden states are made from others, of the layer that no one named."""
    measured = {}

    def measure(part, progress):
        measured[part.name] = part.settings()
        return {"seconds": 1.0, "bytes": 1}

    monkeypatch.setattr(costs, "_dry_run", measure)
    if is_begun:
        (tmp_path / "made/stores/pq/stores" / f"hidden-a-l10-{'0' * 12}").mkdir(parents=True)
    costs_of(OF_HIDDEN, tmp_path, ("encode-hidden", "encode-lsp"))
    found = measured["encode-lsp/lsp-seed0"]
    assert (found.hidden, found.layer, found.corpus, found.teacher) == (None, (10,), ("a.txt",), "bundled")
    assert (found.k, found.seed, found.max_length) == ((64,), 0, WINDOW)


def test_an_arm_s_encoding_has_the_hidden_states_of_its_store_and_a_dictionary(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(OF_HIDDEN))
    study = read_study(str(path))
    kept = {
        name: {"seconds": seconds, "bytes": 1}
        for name, seconds in (
            ("encode-hidden/hidden", 100.0),
            ("encode-hidden/pq", 10.0),
            ("encode-lsp/lsp-seed0", 1.0),
        )
    }
    facts = facts_of(study, plan(study, tmp_path / "made", None), kept)
    assert facts.accounts["half"] == {"encoding": 111.0}


def test_a_deleted_student_in_a_directory_of_two_words_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE | {"frozen": {"tasks": ["cola"]}}))
    parts = plan(read_study("recipe.yaml"), Path("."), tmp_path).parts
    (part,) = (part for part in parts if part.name == "frozen/half-seed0")
    assert part.values["models"] == ("students/half-seed0",)
    record = {"model": "half-seed0", "weights": "0" * 8, "suite": "frozen", "task": "cola", "seed": None}
    file = records.path_of(tmp_path, record)
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    assert costs.is_finished(part, parts)


def test_an_evaluation_is_finished_when_one_model_has_the_records_of_all_its_tasks(tmp_path):
    """Not when there are as many files: of another task, or half of them of other weights."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPE | {"frozen": {"tasks": ["cola", "stsb"]}}))
    parts = plan(read_study(str(path)), tmp_path, tmp_path).parts
    (part,) = (part for part in parts if part.name == "frozen/half-seed0")

    def score(task, weights):
        record = {"model": "half-seed0", "weights": weights, "suite": "frozen", "task": task, "seed": None}
        file = records.path_of(tmp_path, record)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}")

    for task, weights, is_whole in (
        ("cola", "0" * 8, False), ("mrpc", "0" * 8, False), ("stsb", "1" * 8, False), ("stsb", "0" * 8, True),
    ):  # fmt: skip
        score(task, weights)
        assert costs.is_finished(part, parts) == is_whole
