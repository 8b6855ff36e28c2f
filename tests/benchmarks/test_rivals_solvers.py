"""Every rival of the solver benchmark solves the same problem, and its gap is measured against the same optimum."""

import numpy as np
import pytest
from planted import planted

from benchmarks import rivals_solvers as benchmark
from benchmarks.data import unit_rows
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.problem import objective

MODULES = {"SPAMS": "spams", "scikit-learn": "sklearn", "skglm": "skglm", "celer": "celer"}


@pytest.fixture(scope="module")
def train():
    hidden, _ = planted()
    return unit_rows(hidden, np.float32)


@pytest.fixture(scope="module")
def problem(train, tmp_path_factory):
    path = tmp_path_factory.mktemp("rivals") / "atoms.npy"
    np.save(path, train[:40])
    exact = unit_rows(train[-40:])
    return benchmark.Problem(exact.astype(np.float32), exact, train[:40], path)


@pytest.fixture(scope="module")
def tight(problem):
    return nonneg_lasso(problem.hidden_Nd, problem.atoms_Kd, benchmark.LAM, tol=1e-6)


@pytest.fixture(scope="module")
def optimum(problem, tight):
    return objective(problem.exact_Nd, problem.atoms_Kd, tight, benchmark.LAM)


@pytest.mark.parametrize("name", ["ours", *MODULES])
def test_every_variant_reaches_the_optimum(name, problem, train, tight, optimum):
    if name in MODULES:
        pytest.importorskip(MODULES[name])
    for variant in benchmark.rivals(problem, train, tight)[name]:
        setting, code = variant[-1]
        assert abs(benchmark.gap(problem, code(3), optimum)) < benchmark.CLOSE, setting


def test_fista_is_the_official_solver(problem, train, tight, optimum):
    ((_, code),) = benchmark.rivals(problem, train, tight)["FISTA"][0]
    expected = nonneg_lasso(problem.hidden_Nd[:9], problem.atoms_Kd, benchmark.LAM, backend="fista", tol=None)
    np.testing.assert_allclose(code(9), expected.dense(40), atol=1e-5)


def test_the_encoder_is_judged_by_the_objective(problem, train, tight, optimum):
    encoder = benchmark.TopK(problem, train, kept=5)
    codes = encoder(7)
    assert codes.shape == (7, 40) and codes.nnz == 35 and codes.data.min() >= 0
    untrained = problem.hidden_Nd[:7] @ problem.atoms_Kd.T - benchmark.LAM
    untrained[untrained < np.sort(untrained)[:, -5:-4]] = 0
    assert 0 < benchmark.gap(problem, codes, optimum) < benchmark.gap(problem, np.maximum(untrained, 0), optimum)


def test_the_fastest_close_setting_is_chosen_else_the_nearest(problem, tight, optimum, monkeypatch):
    monkeypatch.setattr(benchmark, "TRIED", 8)
    exact, calls = tight.dense(40), []

    def codes(scale, name):
        def code(count):
            calls.append(name)
            return scale * exact[:count]

        return name, code

    chosen = benchmark.choose(problem, [[codes(0.9, "loose"), codes(1, "close"), codes(1, "too tight")]], optimum)
    assert chosen.setting == "close" and "too tight" not in calls and abs(chosen.gap) < 1e-6
    chosen = benchmark.choose(problem, [[codes(0.5, "far"), codes(0.9, "near")], [codes(0.8, "between")]], optimum)
    assert chosen.setting == "near" and chosen.gap > benchmark.CLOSE
    rates = benchmark.take_turns({"near": chosen._replace(rate=1e9)}, rounds=2)
    assert len(rates["near"]) == 2 and min(rates["near"]) > 0
