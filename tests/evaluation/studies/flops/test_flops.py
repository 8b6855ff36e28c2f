"""Operations against the paper's printed table, torch's counter, and sums by hand."""

import json

import pytest
import torch
from data import ROOT, data_path
from preloaded import run_command
from transformers import BertConfig, DebertaConfig, DistilBertConfig, ElectraConfig, ModernBertConfig, RobertaConfig

from mlsm.commands.count_flops import PAPER_TOTALS
from mlsm.commands.count_flops import show as summary
from mlsm.evaluation.studies.flops.config import CountFlopsConfig
from mlsm.evaluation.studies.flops.count import as_printed, count_flops, short_flops
from mlsm.evaluation.studies.flops.encoders import EncoderShape, measure_head, measure_student
from mlsm.evaluation.studies.flops.pretraining import (
    FISTA,
    Setting,
    dictionary_flops,
    encoding_flops,
    full_table,
    offline_flops,
    pretraining_table,
    teacher_flops,
)
from mlsm.evaluation.studies.flops.solver import correlation_flops, fista_flops

PAPER = {  # table 3; the totals apart
    "trained encoder": ("9.06e12", "9.06e12", "9.06e12", "9.06e12", "9.06e12"),
    "trained unembedding": ("2.25e12", "2.25e12", "2.48e12", "0.29e12", "0.29e12"),
    "auxiliary encoder": ("", "2.78e12", "2.78e12", "2.78e12", "2.32e12"),
    "auxiliary unembedding": ("", "0.75e12", "0.75e12", "", ""),
}
TOTALS = ("1.13e13", "1.49e13", "1.50e13", "1.21e13", "1.16e13")
PERCENT = ("100", "131.9", "132.7", "107.1", "102.7")
COLUMNS = ("mlm", "kd", "naive-mlsm", "mlsm-12", "mlsm-10")
SIZE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 80, "vocab_size": 50}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "type_vocab_size": 0}
SMALL = {"encoder": "bert-2x128", "teacher": "bundled", "k": 64, "max_length": 16}


@pytest.fixture(scope="module")
def paper():
    return Setting.of(CountFlopsConfig())


def test_every_cell_of_table_3(paper):
    columns = pretraining_table(paper)
    assert tuple(columns) == COLUMNS
    for row, cells in PAPER.items():
        assert tuple(as_printed(row, columns[name][row]) for name in COLUMNS) == cells


def test_the_papers_totals_are_ours_but_for_three_of_its_roundings(paper):
    ours = {name: f"{rows['total'] / 1e13:.2f}e13" for name, rows in pretraining_table(paper).items()}
    differing = {name for name, total in zip(COLUMNS, TOTALS, strict=True) if ours[name] != total}
    assert differing == set(PAPER_TOTALS)
    for name, total, percent in zip(COLUMNS, TOTALS, PERCENT, strict=True):
        assert abs(float(ours[name]) - float(total)) < 0.0101e13
        assert f"{100 * float(total) / 1.13e13:.1f}".removesuffix(".0") == percent
        assert PAPER_TOTALS.get(name, (total,))[0] == total


def test_the_numbers_above_are_those_of_the_file():
    rows = [line.split(",") for line in (data_path("../paper") / "table3.csv").read_text().splitlines()[1:]]
    found = {name: tuple(cells) for name, *cells in rows}
    assert found == PAPER | {"total": TOTALS, "percent of MLM": PERCENT}


def test_unrounded_percentages(paper):
    percent = {name: round(rows["percent_of_mlm"], 1) for name, rows in pretraining_table(paper).items()}
    assert percent == {"mlm": 100.0, "kd": 131.2, "naive-mlsm": 133.3, "mlsm-12": 107.3, "mlsm-10": 103.2}


def test_what_the_table_leaves_out(paper):
    full, mlm = full_table(paper), pretraining_table(paper)["mlm"]["total"]
    assert full["mlsm-10"][FISTA] == fista_flops(0.15 * 128 * 128, 3072, 768) == pytest.approx(2.32e12, rel=1e-3)
    student = [
        sum(flops for part, flops in full[name].items() if part.startswith("student")) / mlm
        for name in ("mlm", "mlsm-10")
    ]
    assert [round(share, 3) for share in student] == [0.831, 0.805]
    assert "teacher, attention" not in full["mlm"] and full["kd"]["teacher, attention"] == 12 * 4 * 128 * 768 * 128**2
    for rows in full.values():
        assert rows["total"] == sum(rows[part] for part in rows if part not in ("total", "percent_of_mlm"))
    run = 100_000 * 8 * pretraining_table(paper)["mlsm-10"]["total"]
    assert 0 < dictionary_flops(paper, 2_000_000, 2.0) / run < 1e-3


def test_fista_is_as_many_products_as_its_code_computes():
    from torch.utils.flop_counter import FlopCounterMode

    from pipeline.solvers.fista import fista_steps

    with FlopCounterMode(display=False) as counter:
        fista_steps(torch.rand(5, 16), torch.rand(24, 16), 0.1, 0.1, 100)
    assert counter.get_total_flops() == fista_flops(5, 24, 16) == 200 * correlation_flops(5, 24, 16)


def test_encoding_is_shared_by_its_reuses(paper):
    once, often = offline_flops(paper, 1), offline_flops(paper, 8)
    encoding = sum(encoding_flops(paper).values())
    assert once["total"] - often["total"] == pytest.approx(encoding * 7 / 8)
    assert teacher_flops(paper.teacher, 10, 3, 128) * 128 == 3 * encoding_flops(paper)["teacher"]
    assert encoding_flops(paper)["teacher"] == paper.teacher.cut(10).measure(128, 128)


FAMILIES = {
    "bert": (BertConfig, {}),
    "roberta": (RobertaConfig, {}),
    "electra": (ElectraConfig, {"embedding_size": 16}),
    "electra, one width": (ElectraConfig, {"embedding_size": 32}),
    "distilbert": (DistilBertConfig, {}),
    "deberta": (DebertaConfig, RELATIVE | {"pos_att_type": ["c2p", "p2c"]}),
    "deberta, one direction": (DebertaConfig, RELATIVE | {"pos_att_type": ["c2p"]}),
    "deberta, few positions": (DebertaConfig, RELATIVE | {"pos_att_type": ["p2c"], "max_relative_positions": 10}),
    "deberta, absolute": (DebertaConfig, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "windows", "length"), [(1, 1, 7), (3, 4, 24)])
def test_formulas_are_what_torch_counts(family, layers, windows, length):
    kind, settings = FAMILIES[family]
    encoder = EncoderShape(family, kind(**SIZE | settings, num_hidden_layers=layers))
    if family == "distilbert":
        encoder = EncoderShape(family, kind(dim=32, n_layers=layers, n_heads=4, hidden_dim=80, vocab_size=50))
    assert encoder.is_analytic
    assert encoder.forward(windows, length).total == encoder.measure(windows, length)
    assert encoder.head(windows * length, 11) == measure_head(encoder, windows * length, 11)


@pytest.mark.parametrize("name", ["bert-tiny", "bert-3x192", "bundled", "deberta-base"])
def test_named_encoders_too(name):
    encoder = EncoderShape.find(name)
    assert encoder.forward(2, 128).total == encoder.measure(2, 128)


def test_others_are_measured(tmp_path):
    ModernBertConfig(**SIZE | {"vocab_size": 50_400}, num_hidden_layers=2).save_pretrained(tmp_path)
    encoder = EncoderShape.find(str(tmp_path))
    assert not encoder.is_analytic and encoder.vocabulary == 50_400
    assert encoder.forward(2, 16).total == encoder.measure(2, 16) > 0
    settings = CountFlopsConfig(**SMALL | {"teacher": str(tmp_path)}, layer=1, output=tmp_path / "runs")
    assert "layers and (no formula) its attention, no solver" in summary(count_flops(settings), settings)
    talking = DebertaConfig(**SIZE, **RELATIVE, talking_head=True, pos_att_type=["c2p"])
    assert not EncoderShape("talking", talking).is_analytic


def test_the_student_as_trained_skips_most_of_its_last_layer():
    encoder = EncoderShape.find("bert-3x64")
    whole = encoder.forward(4, 16).total + encoder.head(4 * 2, 20)
    skipped = 4 * 14 * 2 * (2 * 64 * 64 + 2 * 64 * 256 + 2 * 16 * 64)  # of 16 positions 14 need keys and values only
    assert measure_student(encoder, 4, 16, 4 * 2, 20) == whole - skipped
    assert measure_student(encoder, 1, 1024, 2, 20) > 0  # windows longer than its positions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "bert-tiny"}, "bert-tiny has 2 layers, no layer 10"),
        ({"encoder": "no/such-model"}, "no configuration found"),
        ({"encoder": "bert-2x200"}, "multiple of 64"),
        ({"encoder": "modernbert-2x130"}, "divisible by 4"),
    ],
)
def test_what_cannot_be_counted_says_so(settings, message):
    with pytest.raises(ValueError, match=message):
        count_flops(CountFlopsConfig(**settings))


def test_the_command_counts_tells_and_draws(tmp_path):
    settings = CountFlopsConfig(**SMALL, output=tmp_path)
    result = count_flops(settings)
    json.dumps(result)
    text = summary(result, settings)
    assert "MLSM12" in text and "The paper's totals" not in text and "30,522" in text
    assert all(row["formula"] in (None, row["measured"]) for row in result["measured"])
    assert sorted(path.name for path in (tmp_path / "flops").iterdir()) == [
        "cost_per_run.csv",
        "cost_per_run.png",
        "cost_per_run.svg",
    ]
    first, *_, last = (tmp_path / "flops" / "cost_per_run.csv").read_text().splitlines()[1:]
    assert float(first.split(",")[1]) == pytest.approx(result["offline"]["1"]["percent_of_mlm"], abs=1e-3)
    assert last.startswith("100,")


def test_json_the_papers_words_and_the_page(tmp_path):
    result = json.loads(run_command(["count-flops", "--json"], cwd=tmp_path).stdout)
    assert result["percent_of_mlm"] == pytest.approx(
        {"kd": 131.2, "naive-mlsm": 133.3, "mlsm-12": 107.3, "mlsm-10": 103.2}, abs=0.05
    )
    assert (tmp_path / result["figure"][0]).is_file() and "1.49e13 (131.9 %)" in summary(result, CountFlopsConfig())
    saving = 1 - result["table3"]["mlsm-10"]["total"] / result["table3"]["naive-mlsm"]["total"]
    assert round(saving, 3) == 0.226
    shown = summary(result | {"figure": []}, CountFlopsConfig()).strip("\n").split("\n")
    page = (ROOT / "docs/flops.md").read_text(encoding="utf-8")
    assert "\n".join(["    $ mlsm count-flops", *(f"    {line}".rstrip() for line in shown)]) in page


def test_small_counts_are_not_rounded_to_nothing():
    shown = [short_flops(flops) for flops in (3.02e12, 1.2e10, 9.99e9, 4.2e6, 0.0, None)]
    assert shown == ["3.02e12", "0.01e12", "9.99e9", "4.20e6", "", ""]
    small = {"encoder": "bert-2x128", "teacher": "bert-2x128", "layer": 1, "vocab_size": 100}
    tiny = CountFlopsConfig(max_length=4, k=16, **small)
    text = summary(count_flops(tiny), tiny)
    assert "0.00e12" not in text and "e6" in text
