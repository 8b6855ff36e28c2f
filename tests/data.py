"""Where the tests find real data that is not in the repository."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def bench_file(name):
    """Path of a file of the bench data, in $MLSM_DATA/bench or ../shared/bench; skips the test without it."""
    places = [Path(os.environ["MLSM_DATA"])] if "MLSM_DATA" in os.environ else []
    for place in [*places, ROOT.parent / "shared"]:
        if (place / "bench" / name).is_file():
            return place / "bench" / name
    pytest.skip(f"no bench/{name}: set MLSM_DATA to the directory that contains bench/")
