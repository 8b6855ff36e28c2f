"""What Numba compiles of the CPU solver: cached, compiled anew when its code changes, and within its arrays.

Each compiles in processes of its own, and depends on the solvers alone.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from data import ROOT

sys.path.append(str(Path(__file__).resolve().parent))

import kernels_changed

pytestmark = kernels_changed.only_if_changed("compiled")

CODE_AND_HASH = """
import hashlib, numpy as np
from pipeline.solvers import nonneg_lasso
rng = np.random.default_rng(0)
hidden, atoms = (rng.normal(size=(n, 24)).astype(np.float32) for n in (1500, 200))
hidden /= np.linalg.norm(hidden, axis=1, keepdims=True); atoms /= np.linalg.norm(atoms, axis=1, keepdims=True)
codes = nonneg_lasso(hidden, atoms, 0.05)
print(hashlib.sha256(codes.indices.tobytes() + codes.values.tobytes() + codes.kkt.tobytes()).hexdigest())
"""


def run_in_new_process(arguments, package_root=ROOT, **environment):
    environment = {**os.environ, "PYTHONPATH": str(package_root), **environment}
    command = [sys.executable, *arguments]
    run = subprocess.run(command, cwd=package_root, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_same_bits_compiled_cached_and_with_any_number_of_threads(tmp_path):
    """The process that finds the cache has one thread, the one that compiles as many as there are cores."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    compiled = run_in_new_process(["-c", CODE_AND_HASH], **cache)
    assert list(tmp_path.rglob("*.nbc"))
    assert run_in_new_process(["-c", CODE_AND_HASH], NUMBA_NUM_THREADS="1", **cache) == compiled


@pytest.fixture
def copied_solvers(tmp_path):
    """A directory with a copy of the package, which a test may change."""
    solvers = Path("pipeline", "solvers")
    shutil.copytree(ROOT / solvers, tmp_path / solvers, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_works_where_nothing_can_be_cached(copied_solvers):
    """A package and a home directory that cannot be written: no cache, but no failure."""
    home = copied_solvers / "home"
    for blocked in (copied_solvers / "pipeline" / "solvers" / "__pycache__", home):
        blocked.write_text("a file, so that no directory can be made here, not even by root")
    # all kernels ask for a cache when they are imported; one is compiled, the smallest
    code = "import numpy as np; from pipeline.solvers import cd_cpu, prepared\n"
    code += "integers = np.zeros((2, 2), np.int16); prepared._quantise(np.eye(2, dtype=np.float32), 3.0, integers)\n"
    code += "print(prepared.__file__, integers.tolist())"
    printed = run_in_new_process(["-c", code], copied_solvers, HOME=str(home), XDG_CACHE_HOME=str(home / "cache"))
    assert printed == f"{copied_solvers / 'pipeline' / 'solvers' / 'prepared.py'} [[3, 0], [0, 3]]\n"
    assert not list(copied_solvers.rglob("*.nbc"))


SMALL_KERNEL = """
import numpy as np
from pipeline.solvers import cd_cpu
from pipeline.solvers.parallel import kernel
from pipeline.solvers.vectors import LANES, SUBTRACTED_ROWS, subtract_rows

@kernel
def subtract(out, weights, matrix, rows, count):
    subtract_rows(out, weights, matrix, rows, count)
    out[0] += 0

out, weights, matrix = (np.ones(shape, np.float32) for shape in (LANES, SUBTRACTED_ROWS, (LANES, LANES)))
subtract(out, weights, matrix, np.arange(SUBTRACTED_ROWS, dtype=np.int32), SUBTRACTED_ROWS)
print(out[0] - 1, sum(subtract.stats.cache_hits.values()), cd_cpu._solve_rows.py_func.__qualname__)
"""


def test_a_change_of_what_is_compiled_in_is_noticed(copied_solvers):
    """Numba's cache looks at time and size of a kernel's own file; its vector loops are in another."""
    (copied_solvers / "small.py").write_text(SMALL_KERNEL)

    def run():
        cache = str(copied_solvers / "cache")
        printed = run_in_new_process(["small.py"], copied_solvers, NUMBA_CACHE_DIR=cache).split()
        return float(printed[0]), printed[1] == "1", printed[2]

    compiled, cached = run(), run()
    assert compiled == (-8.0, False, cached[2]) and cached[:2] == (-8.0, True)
    small = copied_solvers / "small.py"
    status = small.stat()
    small.write_text(SMALL_KERNEL.replace("+= 0", "+= 1"))
    os.utime(small, ns=(status.st_atime_ns, status.st_mtime_ns))  # size and time are all that Numba compares
    assert run()[:2] == (-7.0, False)
    small.write_text(SMALL_KERNEL)
    vectors = copied_solvers / "pipeline" / "solvers" / "vectors.py"
    vectors.write_text(vectors.read_text().replace("builder.fsub(total, product", "builder.fadd(total, product"))
    changed = run()
    assert changed[:2] == (8.0, False) and changed[2] != cached[2]  # that of the solver's own kernel, too


BEYOND_ALL_CHECKS = """
import warnings, numba, numpy as np
from pipeline.solvers import cd_cpu, onednn, prepare, vectors
from pipeline.solvers.parallel import OPTIONS
warnings.simplefilter("ignore")

@numba.njit(**OPTIONS)
def subtract(out, weights, matrix, rows, count):
    vectors.subtract_rows(out, weights, matrix, rows, count)

for row in (16, -1):  # the explicit vectors are checked as well
    rows = np.full(8, row, np.int32)
    try:
        subtract(np.ones(16, "f4"), np.ones(8, "f4"), np.ones((16, 16), "f4"), rows, 8)
    except IndexError:
        print("checked")

possible = (True, False) if onednn.multiplies_bfloat16() else (False,)
rng = np.random.default_rng(0)
wrong = [np.nan, np.inf, -np.inf, 1e20, -1e20, 3e38, -3e38, 1e-45, 1e10]
for k, d, n in [(4, 4, 3), (37, 12, 5), (130, 20, 4)]:
    atoms = rng.normal(size=(k, d)).astype("f4")
    for bfloat16 in possible:
        onednn.multiplies_bfloat16 = lambda: bfloat16
        view = (prepared := prepare(atoms / np.linalg.norm(atoms, axis=1, keepdims=True))).view
        for trial in range(12):
            hidden = rng.normal(size=(n, d)).astype("f4")
            hidden[rng.integers(n, size=3), rng.integers(d, size=3)] = rng.choice(wrong, 3)
            changed = view._replace(atoms_Kd=view.atoms_Kd.copy(), square_K=view.square_K.copy())
            if trial % 3 == 1:
                changed.square_K[rng.integers(k)] = rng.choice(wrong)
            if trial % 3 == 2:
                changed.atoms_Kd[rng.integers(k), 0] = rng.choice(wrong)
                changed = changed._replace(scale=np.float32(rng.choice(wrong)))
            lam, tol = rng.choice([0.05, 1e-6, 1e-45, 3e38]), rng.choice([1e-3, 1e-6, 1e-45, 3e38])
            codes = cd_cpu.solve(hidden, atoms, prepared._replace(view=changed), lam, tol)
            assert (np.diff(codes.indptr) <= k).all() and ((codes.indices >= 0) & (codes.indices < k)).all()
print("survived")
"""


def test_kernels_stay_within_their_arrays_whatever_the_numbers():
    """With every access checked, on what nonneg_lasso refuses: given to the kernels all the same."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NUMBA_BOUNDSCHECK": "1"}
    command = [sys.executable, "-c", BEYOND_ALL_CHECKS]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.stdout.split() == ["checked", "checked", "survived"], run.stdout + run.stderr[-3000:]
