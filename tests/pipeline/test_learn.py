"""The learn-dictionary command below the command line: a sample that survives interruptions, vectors from a file."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from planted import planted

from mlsm.common import workplaces
from mlsm.common.disk import file_sha256
from mlsm.common.errors import DeviceError, EncodeError
from mlsm.common.workplaces import is_part, read_mark
from pipeline.config import EncodeConfig, LearnConfig, minibatch_size
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule
from pipeline.dictionary import checkpoint as learning_checkpoint
from pipeline.dictionary import learn_dictionary as learn
from pipeline.dictionary.learning import ALGORITHM
from pipeline.learn import learn_dictionary
from pipeline.sample import check_enough
from shards.manifest import fingerprint


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    return LearnConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=48,
        lam=0.1,
        max_length=32,
        max_tokens=40_000,
        dictionary_tokens=5_000,
        batch_tokens=1024,
        device="cpu",
        output=tmp_path_factory.mktemp("learn"),
    )


@pytest.fixture(scope="module")
def unbroken(place):
    return learn_dictionary(place)[0]


def stop_at(wanted, vectors):
    def progress(stage, done, total=None, **figures):
        if stage == wanted and done > vectors:
            raise KeyboardInterrupt

    return progress


def test_the_report_tells_what_was_learned_and_finds_it_again(place, unbroken):
    assert (unbroken["k"], unbroken["width"], unbroken["finished_before"]) == (48, 32, False)
    assert 4400 < unbroken["vectors"] <= 4500 and unbroken["objective"] > 0 and "passes" in unbroken["stopped"]
    assert learn_dictionary(place)[0] == unbroken | {"finished_before": True}
    assert [path.name for path in (place.output / "dictionaries").iterdir()] == [Path(unbroken["dictionary"]).name]


@pytest.mark.parametrize(
    ("stage", "vectors", "kept"),
    [
        ("sample", 2000, None),  # half a sample is of no use: nothing stays
        ("dictionary", 4500, {"sample.npy", "learning.npz", "lock"}),
    ],
)
def test_interrupted_and_resumed_equals_unbroken(place, unbroken, tmp_path, monkeypatch, stage, vectors, kept):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    given = replace(place, output=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(given, stop_at(stage, vectors))
    left = list((tmp_path / "dictionaries").iterdir())
    assert [{path.name for path in work.iterdir()} for work in left] == ([kept] if kept else [])
    assert all(work.name.endswith(".learning") for work in left)
    assert all(is_part(path.name, read_mark(work)) for work in left for path in work.iterdir())
    stages = {}
    report = learn_dictionary(given, lambda stage, done, *_, **figures: stages.setdefault(stage, done))[0]
    assert ("sample" in stages) == (stage == "sample") and (stages["dictionary"] > 4500) == (stage == "dictionary")
    found, expected = (Dictionary.load(one["dictionary"]) for one in (report, unbroken))
    assert found.fingerprint == expected.fingerprint and found.history == expected.history
    assert [path.name for path in (tmp_path / "dictionaries").iterdir()] == [Path(report["dictionary"]).name]


def test_more_atoms_than_fit_into_memory_are_refused_before_the_teacher_runs(place, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.learn.available_memory", lambda: 14_400_000)
    many = replace(place, k=1001, output=tmp_path)
    with pytest.raises(EncodeError, match=r"--k 1001: .* at most --k 1000\. Use a smaller"):
        learn_dictionary(many, stop_at("sample", -1))
    for fitting in (replace(many, k=1000), replace(many, atoms="sampled")):
        with pytest.raises(KeyboardInterrupt):
            learn_dictionary(fitting, stop_at("sample", -1))
    monkeypatch.setattr("pipeline.learn.choose_device", lambda _: torch.device("cuda"))
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(many, stop_at("sample", -1))


def test_too_few_vectors_are_refused_before_the_teacher_runs(place, tmp_path):
    with pytest.raises(EncodeError, match="--k 6000 atoms need at least 6,000 vectors .* only 4,4"):
        learn_dictionary(replace(place, k=6000, output=tmp_path), stop_at("sample", -1))
    assert not list((tmp_path / "dictionaries").iterdir())


def test_a_text_that_the_tokenizer_does_not_know_is_told_as_such():
    with pytest.raises(EncodeError, match="knows none of the text's words"):
        check_enough(0, 0)  # as `encode-hidden --quantise pq` calls it, which has no --k


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_vectors_of_a_file(tmp_path, dtype):
    hidden = planted()[0].astype(dtype)
    np.save(tmp_path / "speech.npy", hidden)
    config = LearnConfig(hidden=tmp_path / "speech.npy", k=30, lam=0.1, seed=3, output=tmp_path / "runs")
    (report,) = learn_dictionary(config)
    found = Dictionary.load(report["dictionary"])
    assert found.fingerprint == learn(hidden, DictionarySettings(30, 0.1, seed=3)).fingerprint
    assert Path(report["dictionary"]).name.startswith("speech-k30-") and report["width"] == 24


OF_VECTORS = {"k", "atoms", "lam", "dictionary_epochs", "seed", "device", "output", "hidden"}


@pytest.mark.parametrize("name", sorted({field.name for field in fields(LearnConfig)} - OF_VECTORS - {"center"}))
def test_a_setting_that_means_nothing_for_a_file_of_vectors_is_refused(tmp_path, name):
    """20 of 30; --center is refused for stores of hidden states as well."""
    np.save(tmp_path / "a.npy", planted(500)[0])
    default = LearnConfig.__dataclass_fields__[name].default
    usual = {"teacher": "x", "corpus": ("x.txt",), "layer": (3,), "max_tokens": 9, "scheduler": "tcp://a:1"}
    words = {"document_boundary": "file", "held_out_by": "file", "packing": "pairs", "invalid_utf8": "skip"}
    words |= {"text_field": "body", "dtype": "float32", "products": "torch", "batch_tokens": 9000}
    value = (usual | words).get(name, not default if isinstance(default, bool) else None)
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, output=tmp_path, **{name: value or default + 1})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} applies only when a teacher reads text"):
        learn_dictionary(config)
    object.__setattr__(config, "origins", {name: "recipe paper"})  # which names text for other commands too
    assert learn_dictionary(config)[0]["k"] == 10


def test_the_name_follows_from_content_and_settings(tmp_path):
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, lam=0.1, dictionary_epochs=0.5, output=tmp_path / "runs")
    np.save(tmp_path / "a.npy", planted(500)[0])
    first = learn_dictionary(config)[0]
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    again = learn_dictionary(replace(config, hidden=tmp_path / "b.npy"))[0]
    assert again == first | {"finished_before": True}
    np.save(tmp_path / "a.npy", planted(500, seed=1)[0])
    others = [learn_dictionary(config)[0], learn_dictionary(replace(config, hidden=tmp_path / "b.npy", k=11))[0]]
    assert len({report["dictionary"] for report in [first, *others]}) == 3


def test_a_file_that_changes_while_it_is_learned_from(tmp_path):
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, lam=0.1, dictionary_epochs=0.5, output=tmp_path / "runs")
    np.save(tmp_path / "a.npy", planted(500)[0])

    def touch(*_, **figures):
        (tmp_path / "a.npy").touch()

    with pytest.raises(ValueError, match="a.npy changed while it was read. Run the command again"):
        learn_dictionary(config, touch)
    assert not list((tmp_path / "runs" / "dictionaries").iterdir())


@pytest.mark.parametrize(
    "device",
    [
        "toaster",
        "meta",
        pytest.param(
            "cuda", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
        ),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_the_file_is_read(tmp_path, device, monkeypatch):
    monkeypatch.setattr("pipeline.learn.file_sha256", None)
    np.save(tmp_path / "a.npy", planted(500)[0])
    with pytest.raises(DeviceError, match="auto"):
        learn_dictionary(LearnConfig(hidden=tmp_path / "a.npy", device=device, output=tmp_path))


def test_what_another_process_finished_meanwhile_is_taken(tmp_path, monkeypatch):
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, lam=0.1, dictionary_epochs=0.5, output=tmp_path / "runs")
    np.save(tmp_path / "a.npy", planted(500)[0])
    lock = workplaces._lock

    def late(file, directory):
        monkeypatch.setattr(workplaces, "_lock", lock)
        shutil.rmtree(directory)
        others.append(learn_dictionary(config)[0])
        return lock(file, directory)

    others = []
    monkeypatch.setattr(workplaces, "_lock", late)
    assert learn_dictionary(config)[0] == others[0] | {"finished_before": True}
    assert len(list((tmp_path / "runs" / "dictionaries").iterdir())) == 1


def test_a_leftover_place_goes_and_another_name_resumes_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, lam=0.1, output=tmp_path / "runs")
    np.save(tmp_path / "a.npy", planted(5000)[0])
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(config, stop_at("dictionary", 4600))
    (work,) = (tmp_path / "runs" / "dictionaries").iterdir()
    shutil.copytree(work, tmp_path / "copy")
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    config, calls = replace(config, hidden=tmp_path / "b.npy"), []
    learn_dictionary(config, lambda stage, done, *_, **figures: calls.append(done) if stage == "dictionary" else None)
    assert calls[0] > 4500 and not work.exists()
    shutil.copytree(tmp_path / "copy", work)
    assert learn_dictionary(config)[0]["finished_before"] and not work.exists()


def test_the_minibatch_follows_from_the_size_of_the_sample():
    sizes = {1: 400, 20_000: 400, 51_200: 400, 65_536: 512, 131_072: 1024, 262_144: 2048, 2_000_000: 2048}
    assert {count: minibatch_size(count) for count in sizes} == sizes


def test_a_minibatch_that_always_was_keeps_the_name_and_another_gets_its_own(tmp_path, monkeypatch):
    np.save(tmp_path / "a.npy", planted(3000)[0])
    config = LearnConfig(hidden=tmp_path / "a.npy", k=10, lam=0.1, dictionary_epochs=0.5, output=tmp_path / "runs")
    request = {"content": file_sha256(config.hidden), "k": 10, "lam": 0.1, "epochs": 0.5, "seed": 42}
    request["algorithm"] = ALGORITHM
    made = {}
    for batch in (None, 400, 500, 2048):
        with monkeypatch.context() as patch:
            if batch is not None:
                patch.setattr("pipeline.learn.minibatch_size", lambda vectors, batch=batch: batch)
            made[batch] = learn_dictionary(config)[0]["dictionary"]
    assert Path(made[2048]).name.endswith(fingerprint(request)[:12])
    assert made[None] == made[400] and Path(made[400]).name.endswith(fingerprint(request | {"batch": 400})[:12])
    assert len(set(made.values())) == 3
    assert [Dictionary.load(made[batch]).settings["batch"] for batch in (None, 500, 2048)] == [400, 500, 2048]


def test_the_minibatch_of_a_teachers_sample_is_part_of_the_name(place, unbroken, tmp_path, monkeypatch):
    assert Dictionary.load(unbroken["dictionary"]).settings["batch"] == 400
    monkeypatch.setattr("pipeline.learn.minibatch_size", lambda vectors: 2048)
    older = learn_dictionary(replace(place, output=tmp_path))[0]
    assert Path(older["dictionary"]).name != Path(unbroken["dictionary"]).name
    assert Dictionary.load(older["dictionary"]).settings["batch"] == 2048
    assert unbroken["objective"] < older["objective"]


def test_a_checkpoint_of_another_minibatch_is_not_gone_on_from(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    hidden = planted(3000)[0]
    settings = DictionarySettings(10, 0.1, seed=0)
    learn(hidden, settings, LearningSchedule(epochs=0.5, batch=2048), checkpoint=tmp_path)
    with caplog.at_level("INFO"):
        again = learn(hidden, settings, LearningSchedule(epochs=0.5), checkpoint=tmp_path)
    assert "of other settings" in caplog.text and again.settings["batch"] == 400


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dictionary_epochs": 0}, "--dictionary-epochs must be a positive number, found 0"),
        ({"dictionary_epochs": float("inf")}, "--dictionary-epochs must be"),
        ({"dictionary_epochs": float("nan")}, "--dictionary-epochs must be"),
        ({"dictionary_tokens": 0}, "--dictionary-tokens must be at least 1, found 0"),
        ({"seed": -1}, "--seed must be at least 0, found -1"),
        ({"lam": 5e-5}, r"found 0.0001: .* Give --tolerance as well, below --lam\."),
        ({"tolerance": 0.2}, r"found 0.2: .* The usual value is 0.0001\."),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_flag(wrong, message):
    with pytest.raises(ValueError, match=message):
        EncodeConfig(**wrong)
