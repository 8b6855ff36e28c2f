"""Settings that are the same for all models of a command: dropout, longest input, segments; and what is cut."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_families import tiny_model

from mlsm.commands.finetune import show as summary
from mlsm.common.errors import RecordError, StudyError
from mlsm.evaluation import records
from mlsm.evaluation.comparison.models import models_of
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.heads import Backbone, read_config
from mlsm.evaluation.tasks.finetuning.suite import finetune, settle
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from mlsm.evaluation.tasks.finetuning.trials import Candidate


@pytest.fixture
def settings(teacher_directory, miniatures, tmp_path):
    """One model, RTE, one seed, one epoch."""
    return FinetuneConfig(
        models=(str(teacher_directory),),
        tasks=("rte",),
        seeds=1,
        data_dir=miniatures,
        output=tmp_path / "out",
        epochs=1,
        lr=1e-3,
        device="cpu",
    )


def copied(directory, place, config=None, lineage=None):
    """A copy of a model, with other values in its config.json and a lineage.json of ours."""
    shutil.copytree(directory, place)
    known = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(known | (config or {})))
    if lineage is not None:
        (place / "lineage.json").write_text(json.dumps(lineage))
    return str(place)


def student_lineage(max_length=128, **settings):
    return {"objective": "mlsm", "settings": settings, "step": 10, "store": {"windowing": {"max_length": max_length}}}


def recorded(settings):
    """Model and task -> record."""
    return {(record["model"], record["task"]): record for record in records.read([settings.output / "evaluations"])}


WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def test_a_student_without_dropout_is_fine_tuned_with_that_of_its_family(settings, teacher_directory, tmp_path):
    """Its config.json says 0.0, a stock model's 0.1; the trainings are the same, bit for bit, and say so."""
    stock = finetune(settings)
    student = copied(teacher_directory, tmp_path / "student", WITHOUT_DROPOUT)
    trained = replace(settings, models=(student,), output=tmp_path / "other")
    assert finetune(trained)["models"][0]["figures"] == stock["models"][0]["figures"]
    (first,), (second,) = recorded(settings).values(), recorded(trained).values()
    assert first["settings"] == second["settings"] and first["settings"]["dropout"] == 0.1
    finetune(replace(trained, dropout=0.0, overwrite="always"))
    assert recorded(trained)["student", "rte"]["settings"]["dropout"] == 0.0


@pytest.mark.parametrize("family", ["bert", "deberta", "distilbert", "roberta"])
def test_dropout_is_the_stock_familys_wherever_the_model_has_one(tmp_path, family):
    """0.1 gives the dropouts that a stock configuration gives; a rate of a student's own is nowhere left."""
    places = {}
    for name, rate in (("stock", None), ("student", 0.0)):
        model = tiny_model(family, "bare")
        stock = type(model.config)().to_dict()
        for field in [field for field in stock if "dropout" in field]:
            setattr(model.config, field, stock[field] if rate is None else rate)
        model.save_pretrained(tmp_path / name)
        backbone = Backbone(tmp_path / name)
        backbone.set_dropout(0.1)
        whole, _ = backbone.with_head(TASKS["rte"], 0, tmp_path / "heads")
        places[name] = {place: module.p for place, module in whole.named_modules() if hasattr(module, "p")}
    untouched, _ = Backbone(tmp_path / "stock").with_head(TASKS["rte"], 0, tmp_path / "heads")
    expected = {place: module.p for place, module in untouched.named_modules() if hasattr(module, "p")}
    assert places["student"] == places["stock"] == expected and 0.1 in expected.values()


def test_inputs_are_as_long_as_all_models_were_pre_trained_on(settings, teacher_directory, other_directory, tmp_path):
    first = copied(teacher_directory, tmp_path / "first", lineage=student_lineage(16))
    second = copied(other_directory, tmp_path / "second", lineage=student_lineage(64))
    result = finetune(replace(settings, models=(first, second), limit_train=8))
    assert {record["settings"]["max_length"] for record in recorded(settings).values()} == {16}
    assert result["settings"]["max_length"] == 16 and "at most 16 tokens" in summary(result, settings)
    alone = replace(settings, models=(second,), output=tmp_path / "alone", limit_train=8)
    assert finetune(alone)["settings"]["max_length"] == 64
    stock = replace(alone, models=settings.models, output=tmp_path / "stock")
    assert finetune(stock)["settings"]["max_length"] == 128  # its positions


def test_a_longer_input_by_flag_names_whose_positions_were_not_trained(settings, teacher_directory, tmp_path, caplog):
    model = copied(teacher_directory, tmp_path / "student", lineage=student_lineage(16))
    finetune(replace(settings, models=(model,), max_length=64, limit_train=8))
    assert "--max-length 64" in caplog.text and "student (16)" in caplog.text and "never trained" in caplog.text
    assert recorded(settings)["student", "rte"]["settings"]["max_length"] == 64


@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_that_one_model_cannot_read_is_refused(frozen, settings, other_directory):
    """Otherwise that model would read less than the others, under the same settings in the record."""
    settings = replace(settings, models=(*settings.models, str(other_directory)), max_length=512)
    with pytest.raises(StudyError, match=r"reads at most 128 tokens; found --max-length 512"):
        finetune(replace(settings, frozen=True, seeds=5, lr=2e-5, epochs=3) if frozen else settings)
    assert not list(settings.output.rglob("*.json"))


def test_a_record_is_of_one_tokenizer(settings, teacher_directory, tmp_path):
    model = copied(teacher_directory, tmp_path / "model")
    settings = replace(settings, models=(model,), limit_train=8)
    finetune(settings)
    assert finetune(settings)["finished_before"]
    file = tmp_path / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = [word for word in tokenizer["model"]["vocab"] if word.isalpha()][:2]
    ids = [tokenizer["model"]["vocab"][word] for word in words]
    tokenizer["model"]["vocab"] |= dict(zip(words, reversed(ids), strict=True))
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(StudyError, match=r"rte-seed0.json was made with other settings: tokenizer \(there "):
        finetune(settings)


def set_config(directory, **fields):
    file = Path(directory) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_record_is_of_one_configuration(frozen, settings, teacher_directory, tmp_path):
    """Weights and tokenizer stay the same, what the model computes does not."""
    model = copied(teacher_directory, tmp_path / "model")
    settings = replace(settings, models=(model,), limit_train=8)
    if frozen:
        settings = replace(settings, frozen=True, tasks=("stsb",), seeds=5, lr=2e-5, epochs=3, limit_train=None)
    finetune(settings)
    set_config(model, architectures=["BertForMaskedLM"], use_cache=False, transformers_version="4.0.0")
    assert finetune(settings)["finished_before"]
    set_config(model, hidden_act="relu")
    with pytest.raises(StudyError, match=r"json was made with other settings: config \(there "):
        finetune(settings)


def test_a_model_cut_in_its_configuration_is_another_one(settings, teacher_directory, tmp_path):
    whole, cut = (copied(teacher_directory, tmp_path / name) for name in ("whole", "cut"))
    set_config(cut, num_hidden_layers=1)
    finetune(replace(settings, models=(whole, cut), limit_train=8))
    first, second = (recorded(settings)[name, "rte"] for name in ("whole", "cut"))
    assert first["weights"] == second["weights"] and first["config"] != second["config"]
    models, notes = models_of([first, second])
    assert sorted(model.label for model in models) == ["cut", "whole"] and not notes
    (tmp_path / "other").mkdir()
    same_name = shutil.copytree(cut, tmp_path / "other" / "whole")
    with pytest.raises(RecordError, match="have the same name and weights"):
        finetune(replace(settings, models=(whole, str(same_name)), limit_train=8))


def test_of_models_of_one_name_the_shortest_decides(settings, teacher_directory, other_directory, tmp_path):
    """As exports that were copied out of their runs are all called `export`."""
    places = [tmp_path / name / "export" for name in ("a", "b")]
    for place in places:
        place.parent.mkdir()
    short = copied(teacher_directory, places[0], lineage=student_lineage(16))
    long = copied(other_directory, places[1], lineage=student_lineage(64))
    for models in ((short, long), (long, short)):
        candidates = [Candidate(Path(one), records.describe_model(Path(one)), read_config(Path(one))) for one in models]
        assert settle(replace(settings, models=models), candidates).max_length == 16


def test_the_share_of_cut_examples_is_in_the_record(settings):
    whole = finetune(replace(settings, tasks=("rte", "conll2003")))
    assert all(record["cut"]["evaluation"] == record["cut"]["train"] == 0.0 for record in recorded(settings).values())
    assert whole["models"][0]["cut"] == {"conll2003": 0.0, "rte": 0.0}
    short = replace(settings, tasks=("rte", "conll2003"), max_length=8, output=settings.output / "short")
    result = finetune(short)
    found = recorded(short)
    assert found["tiny", "rte"]["cut"] == {"train": 1.0, "evaluation": 1.0}
    assert 0 < found["tiny", "conll2003"]["cut"]["words"] < 1
    assert "(of the scored examples): conll2003 100%, rte 100%" in summary(result, short)


TRAINED = student_lineage(segments=True)


@pytest.mark.parametrize(
    ("lineages", "segments", "told"),
    [
        ((TRAINED, TRAINED), "auto", True),
        ((TRAINED, student_lineage()), "auto", False),
        ((TRAINED, None), "auto", False),
        ((TRAINED, TRAINED), "never", False),
        ((None, None), "always", True),
    ],
)
def test_all_models_are_told_segments_or_none_is(
    settings, teacher_directory, other_directory, tmp_path, monkeypatch, lineages, segments, told, caplog
):
    read = []
    forward = torch.nn.Embedding.forward

    def watch(table, ids):
        if table.num_embeddings == 2:  # BERT's segments
            read.append(bool((ids == 1).any()))
        return forward(table, ids)

    monkeypatch.setattr(torch.nn.Embedding, "forward", watch)
    models = [
        copied(directory, tmp_path / name, lineage=lineage)
        for name, directory, lineage in zip("ab", (teacher_directory, other_directory), lineages, strict=True)
    ]
    with caplog.at_level("INFO", logger="mlsm.evaluation"):
        finetune(replace(settings, models=tuple(models), segments=segments, tasks=("rte", "cola"), limit_train=8))
    assert any(read) == told
    found = recorded(settings)
    assert {found[model, "rte"]["settings"]["segments"] for model in "ab"} == {told}
    assert {found[model, "cola"]["settings"]["segments"] for model in "ab"} == {False}  # single sentences
    assert ("--segments always" in caplog.text) == (segments == "auto" and not told)


# -- small settings ------------------------------------------------------------------------------------------


def test_a_look_first_takes_few_examples_and_steps(settings):
    small = replace(settings, limit_train=20, max_steps=3, batch=4)
    finetune(small)
    (record,) = recorded(small).values()
    assert record["data"]["n_train"] == 20 and record["settings"]["max_steps"] == 3
    with pytest.raises(StudyError, match=r"n_train \(there 20, now 64\).* max_steps \(there 3, now None\)"):
        finetune(replace(settings, batch=4))
    assert finetune(replace(small, limit_train=20, max_steps=3))["finished_before"]
    with pytest.raises(StudyError, match=r"max_steps \(there 3, now None\)"):
        finetune(replace(small, max_steps=99))  # more than an epoch has: no limit
