"""The command score-text: score the sentences, or the minimal pairs, of files with masked language models.

    score_text(config)["results"]

The pseudo-log-likelihood (PLL) of a sentence is the sum of ln p of its tokens, each predicted while it is masked
(scorer.py); its pseudo-perplexity (PPPL) is exp(-PLL / tokens), and that of a file exp(-sum of PLLs / sum of tokens)
(Salazar et al. 2020). A pair is correct if its first sentence has the strictly higher PLL. Equal PLLs are wrong and are
counted as ties, as in evaluate-blimp. Also reported is the measure of CrowS-Pairs (Nangia et al. 2020), which compares
the PLL of only the tokens that both sentences share. Intervals are Wilson's, at 95 %.

For every model and file there is a file of JSON lines under <output>/scores, one line per sentence or pair. While
scoring, every CHUNK of them are written to a separate file in the directory <name>, so an interrupted command continues
after the last of these files. The record <name>.json, with the results and settings, is written last. The name ends in
a hash of the model's weights, configuration and tokenizer, the metric and the file's content, so a change of any of
them gives another file.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from mlsm.common.device import choose_device, environment
from mlsm.common.durable import refuse_what_is_in_the_way, replace_bytes, replace_json
from mlsm.common.errors import ScoringError
from mlsm.common.invocation import program
from mlsm.common.paths import utf8
from mlsm.common.progress import silent
from mlsm.common.workplaces import discard, workplace
from mlsm.evaluation import records
from mlsm.evaluation.models import directories
from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig
from mlsm.evaluation.tasks.scoring.files import Material, read
from mlsm.evaluation.tasks.scoring.models import check_family, load
from mlsm.evaluation.tasks.scoring.scorer import EncodedSentence, Scorer
from shards.manifest import fingerprint

SCHEMA = "mlsm-scores-1"
CHUNK = 1000  # rows that are scored and written together
SHOWN = 5  # wrong pairs to show


def score_text(config: ScoreTextConfig, progress: Callable[..., None] = silent) -> dict:
    """Score every file with every model, unless an earlier command did.

    Returns  results: one for every model and file, its record (<name>.json next to <name>.jsonl), with finished_before
             and the path of its `scores`; for pairs also `wrong`: the most wrong pairs, at most SHOWN, [{"good", "bad",
             "nats": by how much the bad one scores higher}]
    Raises   ScoringError, CorpusError, ModelError, RunError, RecordError, DeviceError, TeacherError (a tokenizer):
             if a file or a model cannot be used
    """
    progress("read texts and models", 0, None)
    device = choose_device(config.device)
    if not config.models:
        raise ScoringError(f"no model to score with. Name one or more:  {program()} score-text MODEL --sentences FILE")
    places = directories(config.models, config.step)
    for directory in places:
        check_family(directory)
    files = config.sentences or config.pairs
    materials = [read(path, config.text_field, bool(config.pairs)) for path in files]
    kind = {"pairs": bool(config.pairs), "metric": config.metric}
    jobs = []  # directory of a model, and for every file: path, material, record to be, place
    for directory in places:
        known = records.describe_model(directory)
        model = records.directory_of(config.output, known | {"suite": "scores"}).parent.name
        content = [known[name] for name in records.CONTENT]
        of_model = []
        for path, material in zip(files, materials, strict=True):
            record = {"schema": SCHEMA, **known, **kind, "file": str(path), "digest": material.digest}
            digits = fingerprint([*content, *kind.values(), material.digest])[:8]
            base = config.output / "scores" / model / f"{path.name}-{config.metric}-{digits}"
            of_model.append((path, material, record, base))
        jobs.append((directory, of_model))

    def load_and_check(directory, of_model):
        """The scorer of a model, if every sentence that it still has to score can be scored."""
        left = [material for _, material, _, base in of_model if _read_finished(base) is None]
        if not left:
            return None
        scorer = Scorer(*load(directory, device), config.metric, config.batch_tokens)
        for material in left:
            _check_sentences(scorer, material)
        return scorer

    for directory, of_model in jobs[1:]:  # so that what cannot be scored is found before the first is scored
        load_and_check(directory, of_model)
    results = []
    for directory, of_model in jobs:
        scorer = None  # frees the model before
        scorer = load_and_check(directory, of_model)
        for path, material, record, base in of_model:
            scores, commit = _files(base)
            finished = _read_finished(base)
            if finished is not None:
                discard(base)  # of a command that was killed after its last write
            else:
                scorer = scorer or Scorer(*load(directory, device), config.metric, config.batch_tokens)
                clock = time.perf_counter()
                with refuse_what_is_in_the_way(), workplace(base, ("*.jsonl",)):
                    finished = _read_finished(base)  # by another command since
                    if finished is None:
                        rows = _score_in_parts(scorer, material, base, record["model"], progress)
                        replace_bytes(scores, _json_lines(rows))
                        took = {"env": environment(device), "wall": time.perf_counter() - clock}
                        record |= figures_of(rows) | took
                        replace_json(commit, record)
            if finished is not None:
                record, rows = finished
                record = record | {"file": str(path)}  # it may have been another file of the same rows
            wrong = {"wrong": _furthest_wrong(rows)} if config.pairs else {}
            results.append(record | {"scores": str(scores), "finished_before": finished is not None} | wrong)
    return {"results": results}


def figures_of(rows: Sequence[dict]) -> dict:
    """The results of a file. For sentences: their number, tokens, PLL in nats and PPPL (None: too large). For pairs:
    those of `_judge`, for all tokens and for the tokens that both sentences share.
    """
    if "shared_pll" in rows[0]:
        return _judge([row["pll"] for row in rows]) | {"shared": _judge([row["shared_pll"] for row in rows])}
    tokens, pll = sum(len(row["tokens"]) for row in rows), math.fsum(row["pll"] for row in rows)
    return {"n": len(rows), "tokens": tokens, "pll": pll, "pppl": _pseudo_perplexity(pll, tokens)}


def _pseudo_perplexity(pll: float, tokens: int) -> float | None:
    """exp(-pll / tokens); None if it is too large for a number, from about 709 nats per token on."""
    try:
        return math.exp(-pll / tokens)
    except OverflowError:
        return None


def _judge(scores: Sequence[Sequence[float]]) -> dict:
    """How often the first of two scores is higher: pairs, right, ties, accuracy and its 95 % interval."""
    from scipy.stats import binomtest

    right, ties = sum(good > bad for good, bad in scores), sum(good == bad for good, bad in scores)
    low, high = binomtest(right, len(scores)).proportion_ci(method="wilson")
    figures = {"n": len(scores), "right": right, "ties": ties, "accuracy": right / len(scores)}
    return figures | {"low": float(low), "high": float(high)}


def _furthest_wrong(rows: Sequence[dict]) -> list[dict]:
    """The pairs in which the second sentence scores higher by the most nats, or equal, most wrong first."""
    furthest = sorted(rows, key=lambda row: row["pll"][0] - row["pll"][1])[:SHOWN]
    found = []
    for row in furthest:
        good, bad, *_ = row.values()  # whatever the names of the columns
        if row["pll"][0] <= row["pll"][1]:
            found.append({"good": good, "bad": bad, "nats": row["pll"][1] - row["pll"][0]})
    return found


def _files(base: Path) -> tuple[Path, Path]:
    """The scores of a file, and the record that they are finished."""
    scores, commit = (base.with_name(base.name + suffix) for suffix in (".jsonl", ".json"))
    return scores, commit


def _check_sentences(scorer: Scorer, material: Material) -> None:
    """Raise ScoringError on a sentence that is too long or has no tokens."""
    for start in range(0, len(material.rows), CHUNK):
        sentences = [sentence for row in material.rows[start : start + CHUNK] for sentence in row]
        for sentence, code in zip(sentences, scorer.encode(sentences), strict=True):
            if not len(code.places):
                raise _cannot_be_scored(sentence, "it has no tokens")


def _score_in_parts(
    scorer: Scorer, material: Material, place: Path, model: str, progress: Callable[..., None]
) -> list[dict]:
    """Score the rows of a file. Every CHUNK rows are written to a file, which is reused after an interruption."""
    rows: list[dict] = []
    for start in range(0, len(material.rows), CHUNK):
        progress("score", start, len(material.rows), unit="rows", model=model)
        part, chunk = place / f"{start:09}.jsonl", material.rows[start : start + CHUNK]
        if part.is_file():  # complete: it was written in one step
            rows += _read_lines(part)
            continue
        found = score_rows(scorer, chunk, material.columns)
        replace_bytes(part, _json_lines(found))
        rows += found
    progress("score", len(material.rows), len(material.rows), unit="rows", model=model)
    return rows


def _cannot_be_scored(sentence: str, why: str) -> ScoringError:
    return ScoringError(f"the sentence {sentence[:60]!r} cannot be scored: {why}.")


def score_rows(scorer: Scorer, rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> list[dict]:
    """Score sentences, (sentence,), or minimal pairs, (good, bad).

    columns  names of the two sentences of a pair
    Returns  for a sentence: {"sentence", "tokens": [[token, ln p], ...], "pll": nats, "pppl" (None: too large)}; for a
             pair its sentences under their columns, and two values each of "tokens" (their number), "pll" and
             "shared_pll"
    Raises   ScoringError on a sentence without tokens or longer than the model reads, and on scores that are not finite
    """
    sentences = [sentence for row in rows for sentence in row]
    encoded, scores = scorer.encode(sentences), scorer.score(sentences)
    for sentence, values in zip(sentences, scores, strict=True):
        if not len(values):
            raise _cannot_be_scored(sentence, "it has no tokens")
        if not np.isfinite(values).all():
            raise _cannot_be_scored(sentence, "its scores are not finite, because the model's weights are not")
    # fsum rounds once, so the sum does not depend on the order of the scores
    plls = [math.fsum(values) for values in scores]
    if len(rows[0]) == 1:
        found = []
        for sentence, code, values, pll in zip(sentences, encoded, scores, plls, strict=True):
            tokens = scorer.tokenizer.convert_ids_to_tokens([code.ids[place] for place in code.places])
            each = [[token, float(value)] for token, value in zip(tokens, values, strict=True)]
            found.append({"sentence": sentence, "tokens": each, "pll": pll, "pppl": _pseudo_perplexity(pll, len(each))})
        return found
    found_pairs = []
    for first, pair in zip(range(0, len(sentences), 2), rows, strict=True):
        shared = [
            math.fsum(values[token] for token in tokens)
            for values, tokens in zip(scores[first : first + 2], _shared(*encoded[first : first + 2]), strict=True)
        ]
        lengths = [len(values) for values in scores[first : first + 2]]
        named = dict(zip(columns, pair, strict=True))
        found_pairs.append({**named, "tokens": lengths, "pll": plls[first : first + 2], "shared_pll": shared})
    return found_pairs


def _shared(good: EncodedSentence, bad: EncodedSentence) -> tuple[list[int], list[int]]:
    """The tokens of each sentence that the other also has, found by difflib on their ids, as in the code of
    CrowS-Pairs.
    """
    found: tuple[list[int], list[int]] = ([], [])
    for block in SequenceMatcher(None, good.ids, bad.ids, autojunk=False).get_matching_blocks():
        for side, sentence, start in ((0, good, block.a), (1, bad, block.b)):
            inside = range(start, start + block.size)
            found[side].extend(token for token, place in enumerate(sentence.places) if place in inside)
    return found


def _read_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]


def _read_finished(base: Path) -> tuple[dict, list[dict]] | None:
    """The record and the rows that an earlier command wrote; None if there are none, or if they are damaged."""
    scores, commit = _files(base)
    if not scores.is_file():
        return None
    try:
        record = json.loads(commit.read_text(encoding="utf-8"))
        rows = _read_lines(scores)
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(record, dict) and record.get("schema") == SCHEMA and record.get("n") == len(rows)
    return (record, rows) if is_whole else None


def _json_lines(rows: Sequence[dict]) -> bytes:
    return utf8("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
