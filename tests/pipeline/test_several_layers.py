"""Several layers and several k in one pass of the teacher: every store as if it had been made alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stored import shards

from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import LAYOUTS
from pipeline.targets import lsp
from pipeline.teacher import Teacher
from shards.reader import Store


@pytest.fixture(scope="module")
def place(tmp_path_factory, english_text, teacher_directory):
    """Settings of two layers and two sizes of dictionary."""
    return EncodeConfig(
        teacher=str(teacher_directory),
        layer=(1, 3),
        k=(40, 48),
        corpus=(str(english_text),),
        lam=0.1,
        top_n=8,
        max_length=32,
        max_tokens=20_000,
        unit_tokens=8_000,
        dictionary_tokens=4_000,
        batch_tokens=2048,
        device="cpu",
        output=tmp_path_factory.mktemp("together"),
    )


@pytest.fixture(scope="module")
def together(place):
    return encode_lsp(place)


def test_every_store_is_the_one_that_would_be_made_alone(place, together, tmp_path):
    assert len({report["store"] for report in together}) == 4
    for report, (layer, k) in zip(together, [(1, 40), (1, 48), (3, 40), (3, 48)], strict=True):
        (alone,) = encode_lsp(replace(place, layer=layer, k=k, output=tmp_path / f"{layer}-{k}"))
        assert Store.open(alone["store"]).settings["layer"] == layer and Store.open(alone["store"]).k == k
        assert Path(alone["store"]).name == Path(report["store"]).name
        assert shards(alone["store"]) == shards(report["store"]) and len(shards(report["store"])) >= 3
        pair = [Dictionary.load(one["dictionary"]).fingerprint for one in (alone, report)]
        assert pair[0] == pair[1]


def test_the_teacher_runs_once(place, together, tmp_path, monkeypatch):
    passes, works = [], Teacher.__call__

    def counted(teacher, *args, **kwargs):
        passes.append(kwargs.get("layers"))
        return works(teacher, *args, **kwargs)

    monkeypatch.setattr(Teacher, "__call__", counted)
    encode_lsp(replace(place, layer=3, k=40, output=tmp_path / "one"))
    alone = len(passes)
    encode_lsp(replace(place, output=tmp_path / "all"))
    assert len(passes) == 2 * alone and passes[alone:] == [[1, 3]] * alone


@pytest.mark.parametrize("layout", ["alone", "cuda"])
def test_what_is_lacking_is_added_to_what_is_there(place, together, tmp_path, monkeypatch, layout):
    monkeypatch.setitem(LAYOUTS, "cpu", dict.fromkeys(LAYOUTS["cpu"], 0) if layout == "alone" else LAYOUTS["cuda"])
    given = replace(place, output=tmp_path)
    first = encode_lsp(replace(given, layer=3, k=48))
    for path in sorted(Path(first[0]["store"]).glob("units/*.json"))[:2]:
        path.unlink()
    reports = encode_lsp(given)
    assert [report["finished_before"] for report in reports] == [False] * 4
    assert [report["new_units"] for report in reports] == [together[0]["units"]] * 3 + [2]
    for report, whole in zip(reports, together, strict=True):
        assert shards(report["store"]) == shards(whole["store"])
    assert all(report["finished_before"] for report in encode_lsp(given))


def test_a_failure_in_one_output_leaves_the_others_alone(place, together, tmp_path, monkeypatch):
    """The solver fails at one window of one dictionary: only that store has it in quarantine."""
    solves, calls = lsp.nonneg_lasso, []

    def solver(hidden_Nd, atoms_Kd, *args, **options):
        if len(atoms_Kd) == 40 and (np.abs(hidden_Nd - poison).max(1) < 1e-7).any():
            calls.append(1)
            raise ValueError("the solver chokes on this")
        return solves(hidden_Nd, atoms_Kd, *args, **options)

    store = Store.open(together[0]["store"])
    batch = store.split("train").read([7])
    teacher = Teacher.load(place.teacher, 3)
    state = teacher(torch.from_numpy(batch.ids).long(), torch.from_numpy(batch.documents >= 0), layers=[1, 3])[0][0, 5]
    poison = (state / state.norm()).numpy()
    monkeypatch.setattr(lsp, "nonneg_lasso", solver)
    for report in together:
        assert not report["quarantined"]
    stores = {}
    dictionaries = {(r["layer"], Store.open(r["store"]).k): r["dictionary"] for r in together}
    for report in encode_lsp(replace(place, output=copied(place.output, tmp_path))):
        stores[report["layer"], Store.open(report["store"]).k] = report
    assert dictionaries.keys() == stores.keys() and calls
    assert [stores[key]["quarantined"] > 0 for key in sorted(stores)] == [True, False, False, False]
    for report in together[1:]:
        again = stores[report["layer"], Store.open(report["store"]).k]
        assert shards(again["store"]) == shards(report["store"])


def copied(output, directory):
    """An output directory with the dictionaries of another."""
    (directory / "dictionaries").parent.mkdir(exist_ok=True)
    (directory / "dictionaries").symlink_to(output / "dictionaries")
    return directory


def test_settings_take_one_number_or_several():
    assert (EncodeConfig(layer=7, k=100).layer, EncodeConfig(k=100).k) == ((7,), (100,))
    for change, message in [
        ({"layer": (2, 2)}, "--layer names a number twice: 2 2"),
        ({"k": ()}, "--k needs at least one number"),
        ({"k": (5, 0)}, "--k must be at least 1, found"),
        ({"k": (5, 6), "dictionary": Path("x")}, "--dictionary fits one k, but --k names 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            EncodeConfig(**change)
