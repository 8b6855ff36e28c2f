"""Where the tests find real data that is not in the repository."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def bench_file(name):
    """Path of a file of the bench data, in $MLSM_DATA/bench or ../shared/bench; skips the test without it."""
    return _found("bench", name)


def data_path(name):
    """Path of a file or directory of the evaluation data, in $MLSM_DATA/data or ../shared/data; skips likewise."""
    return _found("data", name)


def _found(folder, name):
    places = [Path(os.environ["MLSM_DATA"])] if "MLSM_DATA" in os.environ else []
    for place in [*places, ROOT.parent / "shared"]:
        if (place / folder / name).exists():
            return place / folder / name
    pytest.skip(f"no {folder}/{name}: set MLSM_DATA to the directory that contains {folder}/")
