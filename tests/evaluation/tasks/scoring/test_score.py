"""score-text against minicons, the code of CrowS-Pairs and the formula of the interval; after a kill; when finished."""

import difflib
import json
import math
import shutil
import signal
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from preloaded import run_python
from tiny_store import write_tokenizer
from tokenizers import Tokenizer
from tokenizers.normalizers import BertNormalizer
from transformers import AutoModelForMaskedLM

from mlsm import __main__ as cli
from mlsm.cli import run as command_line
from mlsm.commands.score_text import show as summary
from mlsm.common.errors import ScoringError
from mlsm.evaluation.tasks.scoring import score as scoring
from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig
from mlsm.evaluation.tasks.scoring.models import load
from mlsm.evaluation.tasks.scoring.score import score_text
from mlsm.evaluation.tasks.scoring.scorer import Scorer

RECORDED = json.loads(Path(__file__).with_name("minicons_scores.json").read_text(encoding="utf-8"))
PAIRS = [("w1 w2 w3", "w1 w9 w3"), ("w4 w5 w6 w7", "w4 w7 w6"), ("w8 w8", "w8 w8"), ("w9", "w3 w9 w3"), ("w2", "w1")]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(model, tmp_path):
    lines = [json.dumps({"sent_more": good, "sent_less": bad}) for good, bad in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    (tmp_path / "texts.txt").write_text("\n".join(sentence for pair in PAIRS for sentence in pair))
    return ScoreTextConfig(
        models=(str(model),), pairs=(tmp_path / "pairs.jsonl",), output=tmp_path / "out", device="cpu"
    )


def sentences_of(config):
    return replace(config, pairs=(), sentences=(config.pairs[0].with_name("texts.txt"),))


def rows_of(result):
    return [json.loads(line) for line in Path(result["scores"]).read_text(encoding="utf-8").split("\n")[:-1]]


def test_a_sentence_that_is_too_long_is_named_before_any_is_scored(config, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK", 1)
    config = sentences_of(config)
    config.sentences[0].write_text("w1 w2\nw3\n" + "w4 " * 600)
    with pytest.raises(ScoringError, match="a sentence of 602 tokens .*'w4 w4"):
        score_text(config)
    assert not list(config.output.rglob("*.jsonl"))


@pytest.mark.parametrize("metric", ["original", "within-word-l2r"])
def test_sentences_score_as_minicons_recorded_them(metric, tmp_path):
    entries = RECORDED["scores"][metric]
    (tmp_path / "a.txt").write_text("\n".join(entry["sentence"] for entry in entries), encoding="utf-8")
    (result,) = score_text(
        ScoreTextConfig(
            models=("bundled",), sentences=(tmp_path / "a.txt",), metric=metric, output=tmp_path, device="cpu"
        )
    )["results"]
    rows = rows_of(result)
    assert [row["sentence"] for row in rows] == [entry["sentence"] for entry in entries]
    for row, entry in zip(rows, entries, strict=True):
        np.testing.assert_allclose([score for _, score in row["tokens"]], entry["tokens"], rtol=0, atol=1e-4)
        assert row["pll"] == pytest.approx(sum(entry["tokens"]), rel=2e-6)
        assert row["pppl"] == pytest.approx(math.exp(-np.mean(entry["tokens"])), rel=1e-4)
    tokens = [score for entry in entries for score in entry["tokens"]]
    assert result["tokens"] == len(tokens) and result["n"] == len(entries)
    assert result["pppl"] == pytest.approx(math.exp(-sum(tokens) / len(tokens)), rel=1e-4)


def test_a_pppl_beyond_all_numbers_is_null(config, model, tmp_path):
    """A model that is certain of one word: its ln p are finite, of less than -709 nats."""
    certain, directory = AutoModelForMaskedLM.from_pretrained(model), tmp_path / "certain"
    with torch.no_grad():
        certain.cls.predictions.bias[7] = 1e4
    certain.save_pretrained(directory)
    write_tokenizer(directory, 59)
    config = replace(sentences_of(config), models=(str(directory),))
    (result,) = score_text(config)["results"]
    assert result["pppl"] is None and -2e4 < result["pll"] / result["tokens"] < -5e3
    rows = rows_of(result)
    assert all(math.isfinite(row["pll"]) for row in rows)
    assert {row["sentence"] for row in rows if row["pppl"] is not None} == {"w2"}  # the word
    assert "too large for a number" in summary(score_text(config), config)


def crows_pairs_score(scorer, first, second):
    """PLLs of both sentences by the definition in the code of CrowS-Pairs (metric.py): tokens of `equal` spans of the
    whole ids, the first and the last span position, [CLS] and [SEP], left out."""
    ids = [encoded.ids for encoded in scorer.encode([first, second])]
    spans = ([], [])
    for tag, *bounds in difflib.SequenceMatcher(None, *ids).get_opcodes():
        if tag == "equal":
            spans[0].extend(range(bounds[0], bounds[1]))
            spans[1].extend(range(bounds[2], bounds[3]))
    tokens = scorer.score([first, second])
    return [sum(float(tokens[side][place - 1]) for place in spans[side][1:-1]) for side in (0, 1)]


def test_pairs_are_judged_by_all_tokens_and_by_those_that_are_shared(config, model):
    (result,) = score_text(config)["results"]
    scorer = Scorer(*load(model, scoring.choose_device("cpu")))
    rows = rows_of(result)
    for row, (good, bad) in zip(rows, PAIRS, strict=True):
        plls = [sum(map(float, tokens)) for tokens in scorer.score([good, bad])]
        assert (row["sent_more"], row["sent_less"]) == (good, bad)
        assert row["pll"] == pytest.approx(plls, rel=1e-5)
        assert row["shared_pll"] == pytest.approx(crows_pairs_score(scorer, good, bad), rel=1e-5)
    assert rows[-1]["shared_pll"] == [0, 0]  # nothing is shared
    right = sum(row["pll"][0] > row["pll"][1] for row in rows)
    assert (result["n"], result["right"], result["ties"], result["accuracy"]) == (5, right, 1, right / 5)
    assert result["shared"]["ties"] == 2
    z, share = 1.959963984540054, right / 5
    middle = (share + z * z / 10) / (1 + z * z / 5)
    half = z / (1 + z * z / 5) * math.sqrt(share * (1 - share) / 5 + z * z / 100)
    assert (result["low"], result["high"]) == pytest.approx((middle - half, middle + half))
    wrong = [(pll[1] - pll[0], pair) for pll, pair in zip((row["pll"] for row in rows), PAIRS, strict=True)]
    wrong = sorted((found for found in wrong if found[0] >= 0), reverse=True)
    assert len(wrong) >= 2
    assert [(pair["nats"], (pair["good"], pair["bad"])) for pair in result["wrong"]] == wrong
    text = summary({"results": [result]}, config)
    places = [text.index(f"second  {pair['bad']}\n") for pair in result["wrong"]]
    assert places == sorted(places)
    assert f"{100 * right / 5:.2f} %" in text and "1 tie, counted as wrong" in text


def test_pairs_and_sentences_have_the_same_scores_and_both_are_found_again(config, monkeypatch):
    config = replace(config, models=config.models * 2)
    pairs, again = score_text(config)["results"]
    (one, _) = score_text(sentences_of(config))["results"]
    plls = [row["pll"] for row in rows_of(one)]
    assert plls == pytest.approx([pll for row in rows_of(pairs) for pll in row["pll"]], rel=1e-5)
    assert (pairs["finished_before"], again["finished_before"]) == (False, True)
    monkeypatch.setattr(scoring, "load", None)
    (left_over := Path(pairs["scores"]).with_suffix("")).mkdir()  # of a command that was killed behind its record
    later = score_text(config)["results"]
    assert not left_over.exists()
    assert [result | {"finished_before": False} for result in later] == [pairs, pairs]
    assert "scored already" in summary({"results": later}, config)
    with pytest.raises(TypeError):  # another metric is other work
        score_text(replace(config, metric="within-word-l2r"))


@pytest.mark.parametrize("damage", ["", "[1]", '{"schema": "mlsm-scores-1"', '{"schema": "mlsm-scores-1"}', None])
def test_a_damaged_record_is_scored_again(config, damage):
    (first,) = score_text(config)["results"]
    scores = Path(first["scores"])
    if damage is None:  # cut at the end of a line
        scores.write_text(scores.read_text().splitlines(keepends=True)[0])
    else:
        scores.with_suffix(".json").write_text(damage)
    (again,) = score_text(config)["results"]
    assert not again["finished_before"] and again | {"wall": first["wall"]} == first
    assert score_text(config)["results"][0]["finished_before"]


def test_another_tokenizer_on_the_same_weights_is_other_work(config, model, tmp_path, monkeypatch):
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    write_tokenizer(other, 59, step=-1)
    both = replace(config, models=(str(model), str(other)))
    first, second = score_text(both)["results"]
    assert first["weights"] == second["weights"] and first["scores"] != second["scores"]
    assert rows_of(first) != rows_of(second)
    monkeypatch.setattr(scoring, "load", None)
    assert [result["finished_before"] for result in score_text(both)["results"]] == [True, True]


def test_another_configuration_of_the_same_weights_is_other_work(config, model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other" / model.name)
    values = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"hidden_act": "relu"}))
    first, second = score_text(replace(config, models=(str(model), str(other))))["results"]
    assert first["weights"] == second["weights"] and first["scores"] != second["scores"]
    assert rows_of(first) != rows_of(second)


def test_a_killed_command_goes_on_behind_its_last_part(config, monkeypatch):
    config = sentences_of(config)
    code = textwrap.dedent(f"""
        import os, signal
        from mlsm.evaluation.tasks.scoring import score
        from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig

        def progress(stage, done, total, unit="tokens", **figures):
            if done == 6:
                os.kill(os.getpid(), signal.SIGKILL)

        score.CHUNK = 3
        score.score_text(ScoreTextConfig(models=({config.models[0]!r},), sentences=({str(config.sentences[0])!r},),
                                         output={str(config.output)!r}, device="cpu"), progress)
    """)
    assert run_python(["-c", code]).returncode == -signal.SIGKILL
    assert sorted(path.name for path in config.output.rglob("*.json*")) == ["000000000.jsonl", "000000003.jsonl"]
    monkeypatch.setattr(scoring, "CHUNK", 3)
    scored, score_rows = [], scoring.score_rows
    monkeypatch.setattr(scoring, "score_rows", lambda *given: scored.extend(given[1]) or score_rows(*given))
    (resumed,) = score_text(config)["results"]
    assert scored == [(sentence,) for pair in PAIRS for sentence in pair][6:]
    assert not [path for path in config.output.rglob("*") if path.name.startswith("0000")]
    (unbroken,) = score_text(replace(config, output=config.output / "other"))["results"]
    assert rows_of(resumed) == rows_of(unbroken) and resumed["pll"] == unbroken["pll"]


def test_two_commands_do_not_work_in_one_place(config, monkeypatch):
    config = sentences_of(config)
    again = []

    def score_rows(*given):
        with pytest.raises(ValueError, match="another process"):
            score_text(config)
        again.append(given)
        return original(*given)

    original = scoring.score_rows
    monkeypatch.setattr(scoring, "score_rows", score_rows)
    (result,) = score_text(config)["results"]
    assert len(again) == 1 and rows_of(result)


def test_a_file_that_another_command_scores_meanwhile_is_not_scored_again(config, monkeypatch):
    others, load = [], scoring.load

    def load_late(*given):
        monkeypatch.setattr(scoring, "load", load)
        others.extend(score_text(config)["results"])
        return load(*given)

    monkeypatch.setattr(scoring, "load", load_late)
    (result,) = score_text(config)["results"]
    assert others == [result | {"finished_before": False}] and result["finished_before"]


def test_sentences_that_cannot_be_scored_are_quoted(config, tmp_path, monkeypatch):
    model = shutil.copytree(config.models[0], tmp_path / "cleaning")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.normalizer = BertNormalizer()  # which leaves nothing of a control character
    tokenizer.save(str(model / "tokenizer.json"))
    for text, problem in (("w1\n\x01\n", "it has no tokens"), ("w1 " * 200, "this model reads at most")):
        (tmp_path / "odd.txt").write_text(text)
        with monkeypatch.context() as patch, pytest.raises(ScoringError, match=problem):
            patch.setattr(scoring, "score_rows", lambda *_: pytest.fail("was scored before all were looked at"))
            score_text(replace(config, models=(str(model),), pairs=(), sentences=(tmp_path / "odd.txt",)))
        (tmp_path / "even.txt").write_text("w1 w2\n")
        files = (tmp_path / "even.txt", tmp_path / "odd.txt")
        for models in ((str(model),), (*config.models, str(model))):  # behind another file, and of another model
            with monkeypatch.context() as patch, pytest.raises(ScoringError, match=problem):
                patch.setattr(scoring, "score_rows", lambda *_: pytest.fail("was scored before all were looked at"))
                score_text(replace(config, models=models, pairs=(), sentences=files))


@pytest.mark.parametrize("flags", [[], ["--pairs", "a.csv", "--sentences", "b.txt"]])
def test_one_kind_of_files_is_asked_for(flags, monkeypatch, capsys):
    monkeypatch.setattr(cli, "end_on_signals", lambda: None)
    monkeypatch.setattr(command_line, "quiet_libraries", lambda downloads: None)
    with pytest.raises(SystemExit) as end:
        cli.main(["score-text", "bundled", *flags])
    assert end.value.code == 2 and "reads files of either --sentences or --pairs" in capsys.readouterr().err
