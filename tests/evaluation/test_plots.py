"""Figures are written in one step, contain the plotted numbers, and have the same bytes each time."""

import csv
import sys

import pytest

from mlsm.common.errors import MissingPackageError
from mlsm.evaluation.plots import new_figure, save_figure


def draw(stem):
    figure, axes = new_figure()
    axes.plot([1, 2, 3], [0.5, 0.7, 0.6], label="F1 on ALL")
    axes.legend()
    return save_figure(figure, stem, ["layer", "f1"], [[1, 0.5], [2, 0.7], [3, 0.6]])


def test_three_files_the_same_bytes_each_time(tmp_path):
    first, second = draw(tmp_path / "a" / "layers.v1"), draw(tmp_path / "b" / "layers.v1")
    assert [path.name for path in first] == ["layers.v1.svg", "layers.v1.png", "layers.v1.csv"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert "F1 on ALL" in first[0].read_text() and first[1].read_bytes().startswith(b"\x89PNG")
    assert list(csv.reader(first[2].open()))[1:] == [["1", "0.5"], ["2", "0.7"], ["3", "0.6"]]


def test_without_matplotlib_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        new_figure()
