"""The table of scores by task."""

from types import SimpleNamespace

from mlsm.evaluation.comparison.result import FigureMean
from mlsm.terminal.comparison import _task_table


def test_tasks_that_no_model_has_are_left_out():
    """After a first look at one task, thirteen of fourteen rows were empty."""
    figure = FigureMean("wic", "accuracy", mean=0.5, sd=None, seeds=2, failed=0)
    models = [
        SimpleNamespace(label="a", figures=[figure], common_average=0.5),
        SimpleNamespace(label="b", figures=[], common_average=None),
    ]
    lines = _task_table(models, {"a": 1, "b": 2}).splitlines()
    assert [line.split()[0] for line in lines if line.strip()] == ["mean", "wic", "(s):"]
