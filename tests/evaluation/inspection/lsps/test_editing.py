"""Words after LSPs are taken out or amplified, against the formula written out in NumPy on the files of the export."""

import json
import os
import re
import shutil

import numpy as np
import pytest
import torch
from lsp_pages import LspPage
from preloaded import run_command
from safetensors.numpy import load_file
from tiny_exports import LINEAGE, exported
from tiny_store import write_store
from transformers import AutoTokenizer

from mlsm.commands.show_lsp import show as summary
from mlsm.common.errors import InspectionError, RunError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.editing import (
    AMPLIFIED,
    EDITED_AT_ONCE,
    EXAMPLE_WORDS,
    EXAMPLES,
    WORDS,
    edit,
    edit_sample,
    load_probe_of,
)
from mlsm.evaluation.inspection.lsps.show import show
from mlsm.evaluation.inspection.lsps.view import StoreView
from student.lsp_model import LspModel
from student.objectives.mlsm import Mlsm
from student.probe import ProbedStudent, export_probe


def export_as_if_probed(store, export, directory, probe_input="softmax"):
    student = LspModel.from_pretrained(export)
    probed = ProbedStudent(student.student, store.vocab_size, probe_input)
    with torch.no_grad():
        probed.probe_Vk.normal_(std=5, generator=torch.Generator().manual_seed(2))
    directory.mkdir(parents=True)
    lineage = LINEAGE | {"student": {"name": "a student", "weights": "0", "objective": "mlsm"}}
    export_probe(probed, directory, student.facts, store, lineage)
    return directory


@pytest.fixture(scope="module")
def export(coded_store, tmp_path_factory):
    return exported("bert-1x32", Mlsm(coded_store), coded_store, tmp_path_factory.mktemp("student") / "export")[1]


@pytest.fixture(scope="module")
def probe(coded_store, export, tmp_path_factory):
    """A finished run of train-probe, as far as it is looked at."""
    export_as_if_probed(coded_store, export, (run := tmp_path_factory.mktemp("work") / "runs/probes/a") / "export")
    return run


def by_definition(probe, ids, position, factors):
    """Words before and after at a position of a text: one dense sum a word."""
    tokenizer = AutoTokenizer.from_pretrained(probe / "export")
    ids = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
    ids[position + 1] = tokenizer.mask_token_id
    with torch.no_grad():
        logits_k = LspModel.from_pretrained(probe)(torch.tensor([ids]))[0, position + 1].double().numpy()
    q_k = np.exp(logits_k) / np.exp(logits_k).sum()
    edited_k = np.array([factors.get(lsp, 1.0) * q for lsp, q in enumerate(q_k)])
    probe_Vk = load_file(probe / "export" / "probe.safetensors")["probe.weight"].astype(np.float64)
    words = []
    for p_k in (q_k, edited_k / edited_k.sum()):
        scores_V = np.array([sum(row[lsp] * p_k[lsp] for lsp in range(len(p_k))) for row in probe_Vk])
        words.append(np.exp(scores_V) / np.exp(scores_V).sum())
    return q_k, edited_k / edited_k.sum(), *words


@pytest.mark.parametrize("text", ["The function returns a [MASK] of [MASK].", "Return the list of values."])
def test_words_before_and_after_are_those_of_the_dense_formula(text, probe):
    tokenizer = AutoTokenizer.from_pretrained(probe / "export")
    names = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    factors = {3: 0.0, 11: 0.0, 5: 4.0, 40: 0.25}
    result = edit(str(probe), text, factors)
    masks = [t for t, id in enumerate(ids) if id == tokenizer.mask_token_id]
    assert [found["position"] for found in result["positions"]] == (masks or list(range(len(ids))))
    for found in result["positions"]:
        t = found["position"]
        q_k, edited_k, before_V, after_V = by_definition(probe, ids, t, factors)
        assert found["edited"] == [[lsp, pytest.approx(q_k[lsp]), pytest.approx(edited_k[lsp])] for lsp in factors]
        for name, p_V in (("before", before_V), ("after", after_V)):
            order = np.argsort(-p_V)[:WORDS]
            assert found[name] == [[names[word], pytest.approx(p_V[word], rel=1e-5)] for word in order]
        change_V = after_V - before_V
        for name, order in (("gain", np.argsort(-change_V)), ("lose", np.argsort(change_V))):
            expected = [[names[word], before_V[word], after_V[word]] for word in order[:WORDS]]
            assert [word for word, *_ in found[name]] == [word for word, *_ in expected]
            assert [p for _, *p in found[name]] == [pytest.approx(p, rel=1e-5) for _, *p in expected]
        assert found["kl"] == pytest.approx((before_V * np.log(before_V / after_V)).sum(), rel=1e-4)
        assert found["own"] == (None if masks else pytest.approx([before_V[ids[t]], after_V[ids[t]]], rel=1e-5))
        assert change_V.max() > 0.002  # no rounding


def test_an_edit_of_nothing_changes_nothing_and_all_but_one_leaves_that_one(coded_store, probe):
    (found,) = edit(str(probe), "the [MASK]", {7: 1.0})["positions"]
    assert [p for _, p in found["after"]] == [pytest.approx(p, rel=1e-12) for _, p in found["before"]]
    assert abs(found["kl"]) < 1e-12
    others = {lsp: 0.0 for lsp in range(coded_store.k) if lsp != 7}
    (found,) = edit(str(probe), "the [MASK]", others)["positions"]
    column_V = load_file(probe / "export" / "probe.safetensors")["probe.weight"][:, 7].astype(np.float64)
    assert found["after"][0][1] == pytest.approx(np.exp(column_V.max()) / np.exp(column_V).sum())


def test_the_view_names_the_lsps_and_takes_the_newest_probe(coded_store, probe, tmp_path):
    arguments = ["show-lsp", coded_store.path, "--text", "The function returns [MASK]."]
    older = export_as_if_probed(coded_store, probe, tmp_path / "runs/probes/older/export")
    (tmp_path / "runs/probes/newer").symlink_to(probe)
    os.utime(older / "probe.safetensors", (1, 1))
    of_hidden_states = tmp_path / "runs/probes/newest/export"  # has no LSPs
    of_hidden_states.mkdir(parents=True)
    shutil.copy(probe / "export" / "probe.safetensors", of_hidden_states)
    run = run_command([*arguments, "--scale", "3=0", "11=0", "5=2.5", "7=0.5"], cwd=tmp_path, code=0)
    edited = "3 taken out, 11 taken out, 5 × 2.5, 7 × 0.5"
    for words in ("runs/probes/newer", edited, "[MASK]", "gain", "Typical words"):
        assert words in run.stdout
    settings = ShowLspConfig(store=str(probe), text="The list", scale=("3=0",))
    result = show(settings, silent)
    assert json.loads(json.dumps(result)) == result and "The, probability" in summary(result, settings)
    unseen = ShowLspConfig(store=str(probe), text="The list", scale=("3=1.000001",))
    assert "gain    none in three digits" in summary(show(unseen, silent), unseen)


def test_words_of_a_sample_are_those_of_the_dense_formula_in_their_documents(coded_store, probe):
    view = StoreView(coded_store, 4_000)
    edits = edit_sample(*load_probe_of(str(probe), coded_store), view)
    assert edits["factor"] == AMPLIFIED and len(edits["lsps"]) == coded_store.k
    assert max(map(len, edits["lsps"])) == EXAMPLES and sum(map(len, edits["lsps"])) > EDITED_AT_ONCE
    tokenizer = AutoTokenizer.from_pretrained(probe / "export")
    names = [
        re.sub(r"^##(?=[^\W_])", "-", name).removeprefix("##") for name in tokenizer.convert_ids_to_tokens(range(600))
    ]
    lengths, changes = set(), []
    for lsp, examples in enumerate(edits["lsps"][::12]):
        lsp *= 12
        heaviest = view.entries.weights(lsp).max(initial=0)
        for number, example in enumerate(examples):
            batch = coded_store.split("train").read([example["window"]])
            place, ids, documents = example["position"], batch.ids[0], batch.documents[0]
            of_document = np.flatnonzero((documents == documents[place]) & ~np.isin(ids, tokenizer.all_special_ids))
            rows = coded_store.split("train").targets(batch, np.zeros(1, np.int64), np.array([place]))
            weight = dict(zip(rows.indices.tolist(), rows.weights.tolist(), strict=True))[lsp]
            assert weight == pytest.approx(heaviest) or number
            text, position = ids[of_document].tolist(), int(np.flatnonzero(of_document == place)[0])
            lengths.add(len(text))
            q_k, _, before_V, without_V = by_definition(probe, text, position, {lsp: 0.0})
            amplified_V = by_definition(probe, text, position, {lsp: AMPLIFIED})[3]
            assert example["probability"] == pytest.approx(q_k[lsp], rel=1e-4)
            for found, p_V in zip(example["words"], (before_V, without_V, amplified_V), strict=True):
                order = np.argsort(-p_V)[:EXAMPLE_WORDS]
                expected = [[names[word], pytest.approx(p_V[word], rel=1e-4), word == ids[place]] for word in order]
                assert found == expected
            changes.append(np.abs(before_V - without_V).max())
    assert len(lengths) > 1 and max(changes) > 0.002  # windows were padded, and it is no rounding


def test_pages_show_the_words_where_a_probe_is_given(coded_store, probe, tmp_path):
    settings = ShowLspConfig(store=str(coded_store.path), html=tmp_path / "lsps", student=str(probe), samples=4_000)
    result = show(settings, silent)
    assert result["probe"] == "a" and json.loads(json.dumps(result)) == result
    assert f"probe{' ' * 4}a" in summary(result, settings)
    edits = edit_sample(*load_probe_of(str(probe), coded_store), StoreView(coded_store, 4_000))["lsps"]
    page, lsp = LspPage(settings.html), max(range(coded_store.k), key=lambda lsp: len(edits[lsp]))
    assert page.data["facts"]["probe"] == "a" and page.data["factor"] == 3
    assert page.edits(lsp) == [
        {
            "place": (one["window"], one["position"]),
            "probability": round(1000 * one["probability"]),
            "words": [[[word, round(1000 * p), own] for word, p, own in words] for words in one["words"]],
        }
        for one in edits[lsp]
    ]
    assert str(tmp_path) not in (settings.html / "data.js").read_text()
    show(ShowLspConfig(store=settings.store, html=settings.html, samples=4_000), silent)
    page = LspPage(settings.html)
    assert page.data["facts"]["probe"] is None and "edits" not in page.lsps


def test_a_browser_shows_the_words(browser, coded_store, probe, tmp_path):
    settings = ShowLspConfig(store=str(coded_store.path), html=tmp_path, student=str(probe), samples=4_000)
    show(settings, silent)
    page = LspPage(tmp_path)
    lsp = max(range(coded_store.k), key=lambda lsp: len(page.edits(lsp)))
    browser.get((tmp_path / "index.html").as_uri() + f"#lsp-{lsp}")
    assert browser.get_log("browser") == []
    table = browser.find_element("css selector", "table.edits")
    for selector, owns in ((".edits td > span:has(small)", (0, 1)), (".edits td > span > b", (1,))):
        found = [one.get_property("textContent") for one in table.find_elements("css selector", selector)]
        expected = [
            word if selector.endswith("b") else f"{word} {share / 10:.1f} %"
            for example in page.edits(lsp)
            for words in example["words"]
            for word, share, own in words
            if own in owns
        ]
        assert found == expected
    assert f"Without LSP {lsp}" in table.text and f"LSP {lsp} × 3" in table.text
    assert len(table.find_elements("css selector", "mark.at")) == len(page.edits(lsp))
    assert f"the student gives LSP {lsp} {page.edits(lsp)[0]['probability'] / 1000:.3f}" in table.text


def test_pages_refuse_a_probe_of_other_lsps_tokens_or_windows(coded_store, hostile_store, export, probe, tmp_path):
    with pytest.raises(RunError, match="has no softmax probe"):
        show(ShowLspConfig(store=str(coded_store.path), html=tmp_path / "a", student=str(export)), silent)
    with pytest.raises(InspectionError, match="numbers mean different things"):
        load_probe_of(str(probe), hostile_store)
    with pytest.raises(InspectionError, match=r"predicts 48 LSPs, .* has 24. Pass a probe of a student"):
        load_probe_of(str(probe), write_store(tmp_path / "smaller", k=24))
    with pytest.raises(InspectionError, match="another tokenizer"):
        load_probe_of(str(probe), write_store(tmp_path / "foreign", k=48))
    shutil.copytree(probe / "export", short := tmp_path / "short")
    facts = json.loads((short / "lsp_config.json").read_text())
    (short / "lsp_config.json").write_text(json.dumps(facts | {"max_length": 16}))
    settings = ShowLspConfig(store=str(coded_store.path), html=tmp_path / "b", student=str(short))
    with pytest.raises(InspectionError, match="at most 16 tokens, those of .* up to 32"):
        show(settings, silent)
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_what_cannot_be_edited_is_refused(coded_store, export, probe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    usual = {"store": str(coded_store.path), "text": "the [MASK]", "scale": ("3=0",)}

    def refused(message, **settings):
        with pytest.raises((InspectionError, RunError, ValueError), match=message):
            show(ShowLspConfig(**usual | settings), silent)

    refused("no finished softmax probe.*train-probe")
    refused("has no softmax probe", student=str(export))
    logits = export_as_if_probed(coded_store, export, tmp_path / "logits", "logits")
    refused("has no softmax probe", student=str(logits))
    (headless := tmp_path / "mlm").mkdir()
    refused("has no LSP outputs", student=str(headless))
    with pytest.raises(InspectionError, match="numbers mean different things"):
        edit(str(probe), "the [MASK]", {3: 0.0}, "0" * 64)
    refused("there is no LSP 48: .* from 0 to 47", student=str(probe), scale=("48=0",))
    refused("there is no LSP -1", student=str(probe), scale=("-1=0",))
    refused("nothing is left", student=str(probe), scale=tuple(f"{lsp}=0" for lsp in range(48)))
    refused("has no token", student=str(probe), text=" ")
    refused("at most 30", student=str(probe), text="word " * 31)
    refused('Add --text "..."', text=None)
    refused("without --teacher", teacher="elsewhere")
    refused("without --teacher", similar_to="1")
    for entry, message in (
        ("230", "takes LSP=FACTOR"),
        ("a=3", "takes LSP=FACTOR"),
        ("1=-2", "from 0, .* below 1e9"),
        ("1=inf", "below 1e9"),
        ("1=nan", "below 1e9"),
        ("3=2", "names LSP 3 twice"),
    ):
        refused(message, scale=("3=0", entry))
