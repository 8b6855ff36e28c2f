"""What docs/results.md says of the study on two cores follows from the records that are committed with it."""

import csv
from pathlib import Path

import pytest

from common.progress import silent
from evaluation.comparison.compare import compare
from evaluation.comparison.config import CompareConfig
from evaluation.studies.protocol.description import read_study
from evaluation.studies.protocol.facts import facts_of
from evaluation.studies.protocol.parts import plan

DOCS = Path(__file__).resolve().parents[3] / "docs"
COMMITTED = DOCS / "studies" / "cpu"


@pytest.fixture(scope="module")
def computed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("study")
    described = read_study("study-cpu")
    facts = facts_of(described, plan(described, directory, None), {})
    compare(CompareConfig(results=(COMMITTED / "evaluations",), output=directory), silent, facts)
    return directory


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["hypotheses", "differences", "scores", "settings"])
def test_a_table_of_the_page_follows_from_its_records(computed, name):
    rows, committed = (rows_of(place / f"report-{name}.csv") for place in (computed, COMMITTED / "comparison"))
    assert len(rows) == len(committed) > 0
    for row, expected in zip(rows, committed, strict=True):
        assert row.keys() == expected.keys()
        for column, value in expected.items():
            assert row[column] == value or float(row[column]) == pytest.approx(float(value), rel=1e-9, abs=1e-12)


def test_the_text_tells_the_tested_difference():
    (primary,) = (row for row in rows_of(COMMITTED / "comparison/report-hypotheses.csv") if row["role"] == "primary")
    difference, low, high = (
        f"{100 * float(primary[name]):+.2f}".replace("-", "−") for name in ("difference", "low", "high")
    )
    for page in (DOCS / "results.md", DOCS.parent / "README.md"):
        text = " ".join(page.read_text(encoding="utf-8").split())
        assert f"{difference} points (95 % interval {low} to {high}, p = {float(primary['p']):.2f})" in text
