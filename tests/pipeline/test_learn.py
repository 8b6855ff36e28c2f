"""The learn-dictionary command below the command line: a sample that survives interruptions, vectors from a file."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import planted

from pipeline import learning_checkpoint
from pipeline.config import LearnConfig
from pipeline.dictionary import Dictionary
from pipeline.dictionary import learn_dictionary as learn
from pipeline.encode import EncodeError, learn_dictionary


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


@pytest.mark.parametrize(("stage", "vectors", "kept"), [
    ("sample", 2000, None),
    ("dictionary", 4500, {"sample.npy", "learning.npz", "lock"}),
])  # fmt: skip
def test_interrupted_and_resumed_equals_unbroken(place, unbroken, tmp_path, monkeypatch, stage, vectors, kept):
    monkeypatch.setattr(learning_checkpoint, "SECONDS_BETWEEN", 0)
    given = replace(place, output=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        learn_dictionary(given, stop_at(stage, vectors))
    works = list((tmp_path / "dictionaries").iterdir())
    assert all(work.name.endswith(".learning") for work in works)
    assert [{path.name for path in work.iterdir()} for work in works] == ([kept] if kept else [])
    stages = {}
    report = learn_dictionary(given, lambda stage, done, *_, **figures: stages.setdefault(stage, done))[0]
    assert ("sample" in stages) == (stage == "sample") and (stages["dictionary"] > 4500) == (stage == "dictionary")
    found, expected = (Dictionary.load(one["dictionary"]) for one in (report, unbroken))
    assert found.fingerprint == expected.fingerprint and found.history == expected.history
    assert [path.name for path in (tmp_path / "dictionaries").iterdir()] == [Path(report["dictionary"]).name]


def test_too_few_vectors_are_refused_before_the_teacher_runs(place, tmp_path):
    with pytest.raises(EncodeError, match="--k 6000 atoms need more training vectors .* has 4,9"):
        learn_dictionary(replace(place, k=6000, output=tmp_path), stop_at("sample", -1))
    assert not list((tmp_path / "dictionaries").iterdir())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_vectors_of_a_file(tmp_path, dtype):
    hidden = planted()[0].astype(dtype)
    np.save(tmp_path / "speech.npy", hidden)
    config = LearnConfig(hidden=tmp_path / "speech.npy", k=30, lam=0.1, seed=3, output=tmp_path / "runs")
    (report,) = learn_dictionary(config)
    found = Dictionary.load(report["dictionary"])
    assert found.fingerprint == learn(hidden, 30, 0.1, seed=3).fingerprint
    assert Path(report["dictionary"]).name.startswith("speech-k30-") and report["width"] == 24


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


def test_hidden_and_a_teacher_contradict_each_other():
    with pytest.raises(ValueError, match="Leave one of them out"):
        LearnConfig(hidden=Path("a.npy"), teacher="somewhere")
    with pytest.raises(ValueError, match="Leave one of them out"):
        LearnConfig(hidden=Path("a.npy"), corpus=("a.txt",))
