"""The table of scores by task."""

from mlsm.terminal.comparison import _task_table


def test_tasks_that_no_model_has_are_left_out():
    """After a first look at one task, thirteen of fourteen rows were empty."""
    figure = {"task": "wic", "metric": "accuracy", "mean": 0.5, "seeds": 2, "failed": False}
    models = [{"model": "a", "figures": [figure]}, {"model": "b", "figures": []}]
    lines = _task_table(models, {"a": 1, "b": 2}).splitlines()
    assert [line.split()[0] for line in lines if line.strip()] == ["mean", "wic", "(s):"]
