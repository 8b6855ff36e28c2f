"""benchmarks/dask.py has the name of the package that it uses, and counts a steady state by hand."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dask import steady

ROOT = Path(__file__).resolve().parents[2]


def test_as_a_module_it_does_not_hide_dask():
    code = "import benchmarks.dask, dask, distributed; assert 'benchmarks' not in dask.__file__ and dask.config"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_start_and_end_do_not_count():
    """One worker a unit of 10 tokens a second, two workers twice that; the first and the last units are slow."""
    one = [(100.0, 10), *((101.0 + i, 10) for i in range(8))]
    assert steady(one, 1) == pytest.approx(10)
    two = [(90.0, 10), (100.0, 10), (100.5, 10), (101.0, 10), *((101.5 + i / 2, 10) for i in range(8)), (150.0, 10)]
    assert steady(two, 2) == pytest.approx(20)
