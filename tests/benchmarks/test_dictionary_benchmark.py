"""The dictionary benchmark's parts at a tiny size: what it would compare is really computed."""

import numpy as np
import pytest
from planted import planted

from benchmarks import dictionary as benchmark


@pytest.fixture(scope="module")
def task():
    hidden, _ = planted()
    return benchmark.Task(hidden[:2800].astype(np.float16), hidden[2800:].astype(np.float16), 40, 0.05)


def test_ours_and_spams_are_judged_alike(task):
    spams = pytest.importorskip("spams")
    rivals = benchmark.run_spams(spams, task, 7), benchmark.run_spams(spams, task, 7, np.float64)
    ours = benchmark.run_ours(task, 3, 700, batch=350)
    assert rivals[0]["objective"] == pytest.approx(rivals[1]["objective"], rel=0.02)
    assert ours["objective"] == pytest.approx(min(value for *_, value in ours["curve"]), rel=1e-3)
    assert ours["objective"] < 1.1 * rivals[0]["objective"]
    seconds = [point[0] for point in ours["curve"]]
    assert seconds == sorted(seconds) and len(seconds) == 12 and seconds[-1] <= ours["seconds"]


def test_default_settings_are_judged_alike(task):
    figures = benchmark.run_defaults(task)
    assert figures["default_epochs"] == 2 and figures["default_evaluations"] == 2 and figures["default_seconds"] > 0
    assert figures["default_objective"] == pytest.approx(benchmark.run_ours(task, 2, 65_536)["objective"], rel=1e-6)


def test_figures_follow_from_the_curves():
    runs = [
        {"curve": [[1.0, 0.5, 0.3], [2.0, 1.0, 0.2], [3.0, 1.5, last]], "seconds": 3.0, "objective": last}
        for last in (0.10, 0.11)
    ]
    spams = {"seconds": 10.0, "objective": 0.2}, {"seconds": 2.5, "objective": 0.15}
    figures = benchmark.against_spams(runs, 4.0, *spams, spams[0])
    assert figures["time_to_spams_objective"] == 0.2 and figures["seconds_to_spams300_objective"] == 3.0
    assert figures["objective_at_spams300_time"] == 0.2
    never = benchmark.against_spams(runs, 4.0, {"seconds": 10.0, "objective": 0.1}, *2 * [spams[1]])
    assert never["time_to_spams_objective"] is None
    quick = benchmark.against_spams(runs, 4.0, spams[0])
    assert quick.items() < figures.items() and quick["time_to_spams_objective"] == 0.2


def test_scikit_learn_solves_the_same_problem(task):
    """With its penalty scaled wrongly its codes would be empty (0.5) or dense; it starts worse than we do."""
    figures = benchmark.against_sklearn(task, epochs=3)
    assert 0.95 * figures["sklearn_setting_ours_objective"] < figures["sklearn_objective"] < 0.2
