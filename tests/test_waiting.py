"""How OpenMP's threads wait for one another: set before torch is loaded, unless the user has set it."""

import os
import subprocess
import sys

import pytest

SHOW = """
import os, sys
from mlsm import __main__ as cli
try:
    cli.main(["--version"])
except SystemExit:
    pass
assert "torch" not in sys.modules
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=["default", "count", "policy"],
)
def test_threads_sleep_soon_unless_the_user_says_otherwise(given, expected):
    kept = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", SHOW], env=kept | given, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == expected
