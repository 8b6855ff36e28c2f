"""The conclusions of a diagnostic of several layers: the recommended layer, tables and a figure.

The main score is that of raw codes and npmi0 on ALL. The layer with the best main score is recommended. The
shallowest layer that is not significantly worse is named as well, since it encodes at lower cost. The test is McNemar's
exact two-sided test at 5 %, on the words that only one of the two layers answers correctly. Not handled here: the
scores themselves (choose_layer.py), what is printed (mlsm/commands/choose_layer.py), and the correlation with
fine-tuning averages (figure 4 of mlsm/evaluation/comparison/paper.py).

Shapes: V variants, Q test words.
"""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from mlsm.common.disk import read_file
from mlsm.common.durable import refuse_what_is_in_the_way, replace_json
from mlsm.common.errors import WsdDataError
from mlsm.common.invocation import program
from mlsm.evaluation.plots import drawn, new_figure, save_figure, save_table
from mlsm.evaluation.studies.word_senses.config import DEVELOPMENT, EXPECTED, HEADLINE, LEAST_COVERAGE
from mlsm.evaluation.studies.word_senses.framework import TEST_SETS

SIGNIFICANT = 0.05
GROUPS = ("ALL", *TEST_SETS, "NOUN", "VERB", "ADJ", "ADV")


def summarise_layers(layers: list[dict], right: list[np.ndarray]) -> dict:
    """The parts of the result that compare layers.

    layers    records of layer.json;  right  whether each answer is correct, bool (V, Q); the first row is the main
              score's variant
    """
    entries = [_entry(layer) for layer in layers]
    highest = max(entry["costs"]["encoding_microseconds"] for entry in entries)
    for entry in entries:
        entry["costs"]["relative_encoding"] = entry["costs"]["encoding_microseconds"] / highest
    sizes = sorted({entry["k"] for entry in entries})
    correct = {(entry["layer"], entry["k"]): right_VQ[0] for entry, right_VQ in zip(entries, right, strict=True)}
    by_size = {k: [entry for entry in entries if entry["k"] == k] for k in sizes}
    counts = layers[0]["counts"]
    return {
        "headline": HEADLINE,
        "conclusive": is_conclusive(counts),
        "first_sense": layers[0]["first_sense"],
        "counts": counts,
        "layers": entries,
        "recommended": [recommend(by_size[k], correct) for k in sizes],
    }


def is_conclusive(counts: dict) -> bool:
    """Whether enough annotated words were learned from to recommend a layer."""
    return counts["training_words"] >= LEAST_COVERAGE * EXPECTED["training"]


def _entry(layer):
    """A layer's record with the main score, the best variant on the development set, and the cost of encoding."""
    scores = layer["scores"]
    best = max(scores, key=lambda name: scores[name][DEVELOPMENT] or 0)  # the first of equal ones: the main score's
    costs = layer["costs"]
    per_token = costs["teacher_seconds"] / costs["teacher_tokens"] + costs["coding_seconds"] / costs["coded_words"]
    return {name: value for name, value in layer.items() if name not in ("first_sense", "counts")} | {
        "f1": scores[HEADLINE]["ALL"],
        "best_on_development": {"variant": best, "f1": scores[best]["ALL"]},
        "costs": costs | {"encoding_microseconds": 1e6 * per_token},
    }


def recommend(entries: list[dict], correct: dict[tuple[int, int], np.ndarray]) -> dict:
    """The best layer of one k, and the shallowest that is not significantly worse.

    correct  (layer, k) to bool (Q)
    """
    best = max(entries, key=lambda entry: (entry["f1"], -entry["layer"]))
    k, right_Q = best["k"], correct[best["layer"], best["k"]]
    for entry in sorted(entries, key=lambda entry: entry["layer"]):
        p = mcnemar(right_Q, correct[entry["layer"], k])
        if p >= SIGNIFICANT:
            break
    share = right_Q.mean()
    standard_error = float(np.sqrt(share * (1 - share) / len(right_Q)))
    return {
        "k": k,
        "layer": best["layer"],
        "f1": best["f1"],
        "standard_error": standard_error,
        "cheapest_not_worse": {"layer": entry["layer"], "f1": entry["f1"], "p": p},
    }


def mcnemar(left_Q: np.ndarray, right_Q: np.ndarray) -> float:
    """Exact two-sided p of McNemar's test for two lists of right and wrong answers to the same questions."""
    only_left, only_right = int((left_Q & ~right_Q).sum()), int((right_Q & ~left_Q).sum())
    if only_left + only_right == 0:
        return 1.0
    return float(stats.binomtest(only_left, only_left + only_right).pvalue)


# -- a result that was written --------------------------------------------------------------------------------


class Diagnosed(NamedTuple):
    """The part of a result.json that other commands use: the teacher's name and fingerprint, (layer, k) to F1 on
    ALL."""

    teacher: str
    fingerprint: str
    f1: dict[tuple[int, int], float]


def read_result(path: str | Path) -> Diagnosed:
    """Read a result.json. Raises WsdDataError if the file is not one."""
    try:
        kept = json.loads(read_file(path))
        f1 = {(entry["layer"], entry["k"]): float(entry["f1"]) for entry in kept["layers"]}
        return Diagnosed(kept["teacher"]["name"], kept["teacher"]["fingerprint"], f1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WsdDataError(
            f"--diagnostic {path} is not a result of choose-layer ({error!r}). Pass its result.json, or make one:  "
            f"{program()} choose-layer --data-dir DIR"
        ) from None


# -- what is written -------------------------------------------------------------------------------------------


@refuse_what_is_in_the_way()
def write_report(result: dict, directory: Path) -> None:
    """Write result.json, table.csv with every variant and group of words, and a figure for every k."""
    result["files"] = ["result.json", "table.csv"]
    save_table(directory / "table.csv", ["layer", "k", "variant", *GROUPS, "back_off"], _full_table(result))
    for k in [recommended["k"] for recommended in result["recommended"]]:
        result["files"] += [path.name for path in drawn(draw_layers, result, k, directory / f"layers-k{k}")]
    replace_json(directory / "result.json", result)


def _full_table(result):
    for entry in result["layers"]:
        for variant, scores in entry["scores"].items():
            yield [entry["layer"], entry["k"], variant, *(scores[name] for name in (*GROUPS, "back_off"))]
    yield ["", "", "first sense", *(result["first_sense"][name] for name in GROUPS), ""]


def draw_layers(result: dict, k: int, stem: Path, png: bool = True) -> list[Path]:
    """Draw scores and costs of the layers of one k. Returns the files, as `save_figure` does."""
    entries = [entry for entry in result["layers"] if entry["k"] == k]
    layers = [entry["layer"] for entry in entries]
    columns = {
        "raw codes, npmi0 (headline)": [100 * entry["f1"] for entry in entries],
        "variant best on semeval2007": [100 * entry["best_on_development"]["f1"] for entry in entries],
        "raw codes, npmi0, semeval2007 only": [100 * entry["scores"][HEADLINE][DEVELOPMENT] for entry in entries],
        "cost": [entry["costs"]["relative_encoding"] for entry in entries],
    }
    first_sense = 100 * result["first_sense"]["ALL"]
    figure, (upper, lower) = new_figure(rows=2)
    for (label, values), style in zip(list(columns.items())[:3], ("o-", "s--", ".:"), strict=True):
        upper.plot(layers, values, style, label=label)
    upper.axhline(first_sense, color="black", linewidth=1, label="first sense")
    upper.set(xlabel="layer", ylabel="F1 (%)", xticks=layers, title=f"{Path(result['teacher']['name']).name}, k = {k}")
    upper.legend()
    lower.bar(layers, columns["cost"])
    lower.set(xlabel="layer", ylabel="cost of encoding a token\n(relative to the costliest)", xticks=layers)
    header = ["layer", "f1", "f1_best_on_development", "f1_semeval2007", "relative_encoding", "first_sense"]
    rows = zip(layers, *columns.values(), [first_sense] * len(layers), strict=True)
    return save_figure(figure, stem, header, rows, png)
