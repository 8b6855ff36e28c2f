"""The numbers published in the paper, to be drawn next to your own.

published.csv has tables 1 (layers of the teacher), 2 (k) and 4 (weight κ of MLM next to MLSM), with the fourteen mean
scores and their average, and the totals of table 3 (floating-point operations per batch). From "Hitchhikers' Guide to
Masked Latent Semantic Modeling". Not handled here: results that are published only as drawings (BLiMP, single runs,
intermediate checkpoints, p values).
"""

import csv
from importlib.resources import files

UPDATES = 100_000  # of a pre-training run in the paper
BATCHES_PER_UPDATE = 8  # 1,024 windows of 128 tokens per update, 128 x 128 tokens per batch of table 3
WORD_SENSE_CORRELATION = {"spearman": 0.946, "pearson": 0.908}  # section 4.2.1, 8 layers


def _rows(table):
    text = (files("mlsm.evaluation.comparison") / "published.csv").read_text(encoding="utf-8")
    return [row for row in csv.DictReader(text.splitlines()) if row["table"] == str(table)]


def scores(table: int) -> dict[float, dict[tuple[str, str], float]]:
    """{value of the varied setting: {(task, metric): score}} of table 1, 2 or 4, without its averages."""
    found: dict[float, dict[tuple[str, str], float]] = {}
    for row in _rows(table):
        if row["task"] != "average":
            found.setdefault(float(row["value"]), {})[row["task"], row["metric"]] = float(row["score"])
    return found


def printed_averages(table: int) -> dict[float, float]:
    """{value of the varied setting: average} as printed in table 1, 2 or 4."""
    return {float(row["value"]): float(row["score"]) for row in _rows(table) if row["task"] == "average"}


def pretraining_cost() -> dict[str, float]:
    """{objective as table 3 names it: floating-point operations of the whole pre-training, the teacher's included}."""
    return {row["value"]: float(row["score"]) * BATCHES_PER_UPDATE * UPDATES for row in _rows(3)}
