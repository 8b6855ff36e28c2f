"""Turns every open claim about a GPU into a figure: two commands, each within nine minutes on an H200.

    python -m benchmarks.gpu_check --part solve
    python -m benchmarks.gpu_check --part train
    python -m benchmarks.gpu_check --part train --only losses out_of_memory
    python -m benchmarks.gpu_check --part solve --toy                # tiny sizes, on a CPU too: does the code run?

Each item runs in a process of its own and within its own limit, so that one that hangs or crashes costs the others
nothing. Whenever one ends, its entry of the JSON file (--output, by default gpu-check-<part>.json) is replaced: what
was predicted or is wanted, what was measured (as far as it came, where time ran out), the status (ok; skipped, failed
or timed out, and why), seconds, device and versions. Entries of other items stay, so that a file is completed by
several calls. The last line that is printed is one JSON object of all statuses.

Hidden states are the bench data, if $MLSM_DATA/bench has them, else the bundled teacher's; both are lifted to 768
dimensions (benchmarks/lifted.py), and the entries name which. Without a GPU every item is skipped, unless --toy is
given: then those of its parts run that a CPU can run. The predictions are from counted instructions and bandwidths,
before a GPU had run any of it.

solve.py and train.py have the items, in the order in which they run; items.py says what one is.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.data import conditions, has_bench_data
from benchmarks.gpu_check import solve, train  # noqa: F401  (they enter their items)
from benchmarks.gpu_check.items import ITEMS, PARTS, Setting, Skip
from mlsm.common.device import choose_device
from mlsm.common.durable import replace_json

PART_SECONDS = 9 * 60
LEAST_SECONDS = 5  # with less left, an item is not begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--only", nargs="+", metavar="ITEM", choices=sorted(ITEMS), help="these items alone")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, to see that the code runs")
    parser.add_argument("--output", type=Path, help="the JSON file; by default gpu-check-PART.json")
    parser.add_argument("--child", type=Path, metavar="FILE", help=argparse.SUPPRESS)  # one item, in this process
    given = parser.parse_args()
    setting = Setting(choose_device("auto"), given.toy)
    if given.child:
        (name,) = given.only
        raise SystemExit(run_here(name, setting, given.child))
    names = [name for name, entry in ITEMS.items() if entry.part == given.part and name in (given.only or ITEMS)]
    if not names:
        parser.error(f"no such item in part {given.part}; it has {', '.join(_names_of(given.part))}")
    statuses = run_part(names, setting, given.output or Path(f"gpu-check-{given.part}.json"))
    print(json.dumps({"benchmark": "gpu_check", "part": given.part, "toy": given.toy, "statuses": statuses}))


def run_part(names: list[str], setting: Setting, output: Path) -> dict[str, str]:
    """Run items one after the other, each in its process; their statuses by name."""
    begun, statuses = time.monotonic(), {}
    for name in names:
        left = PART_SECONDS - (time.monotonic() - begun)
        found = run_alone(name, setting, min(ITEMS[name].seconds, left))
        record(output, name, found | {"toy": setting.toy})
        statuses[name] = found["status"]
        print(f"{name:20} {found['seconds']:6.1f} s  {found['status']}", flush=True)
        for figure, value in found["measurement"].items():
            print(f"    {figure:32} {value}", flush=True)
    return statuses


def run_alone(name: str, setting: Setting, seconds: float) -> dict:
    """What one item's own process says within some seconds: measurement, status, seconds."""
    if not setting.on_gpu and not setting.toy:
        return {"measurement": {}, "status": "skipped: needs a GPU", "seconds": 0.0}
    if seconds < LEAST_SECONDS:
        return {"measurement": {}, "status": "skipped: the time of the part is over", "seconds": 0.0}
    begun = time.monotonic()
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--part", ITEMS[name].part, "--only", name]
    with tempfile.TemporaryDirectory() as directory:
        found, said = Path(directory) / "found.json", Path(directory) / "said.txt"
        with open(said, "w") as streams:
            process = subprocess.Popen(
                [*command, "--child", str(found), *(["--toy"] if setting.toy else [])],
                stdout=streams,
                stderr=streams,
                start_new_session=True,
            )
            try:
                code = process.wait(seconds)
                status = f"failed: it ended with code {code}: {_last_line(said)}"
            except subprocess.TimeoutExpired:
                status = f"timed out after {seconds:.0f} s"
            except BaseException:
                _end_group(process)
                raise
            _end_group(process)  # whatever it started, too
        result = json.loads(found.read_text()) if found.exists() else {"measurement": {}, "status": None}
    return {
        "measurement": result["measurement"],
        "status": result["status"] or status,
        "seconds": time.monotonic() - begun,
    }


def _end_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):  # nothing of it runs any more
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_line(file: Path) -> str:
    return (file.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def run_here(name: str, setting: Setting, into: Path) -> int:
    """Run an item in this process, and keep what it has measured so far in a file. Returns the exit code."""
    measurement: dict = {}

    def write(status: str | None) -> None:
        replace_json(into, {"measurement": measurement, "status": status}, allow_nan=True)

    try:
        for more in ITEMS[name].work(setting):
            measurement |= more
            write(None)
    except Skip as reason:
        write(f"skipped: {reason}")
        return 0
    except Exception as error:
        traceback.print_exc()
        write(f"failed: {type(error).__name__}: {' '.join(str(error).split())[:500]}")
        return 1
    write("ok")
    return 0


def record(output: Path, name: str, found: dict) -> None:
    """Replace the entry of an item in the file, which is whole at any time."""
    entry = ITEMS[name]
    whole = {"benchmark": "gpu_check", "items": {}}
    if output.exists():
        whole |= json.loads(output.read_text())
    whole["items"][name] = {"part": entry.part, "limit": entry.seconds, "prediction": entry.prediction} | found
    whole["items"][name]["conditions"] = machine()
    replace_json(output, whole, allow_nan=True)


def machine() -> dict:
    """Device, versions, date."""
    gpu = {}
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        gpu = {"gpu": torch.cuda.get_device_name(), "gpu_bytes": total, "gpu_bytes_free": free}
    states = "bench data" if has_bench_data() else "bundled teacher"
    return conditions("numba-cuda", "triton") | {"cuda": torch.version.cuda, "states": states} | gpu


def _names_of(part: str) -> list[str]:
    return [name for name, entry in ITEMS.items() if entry.part == part]


if __name__ == "__main__":
    main()
