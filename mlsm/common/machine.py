"""The name, cores and memory of this machine, its user's cache, and the JSON files of answers in it."""

import json
import math
import os
import platform
from pathlib import Path

from mlsm.common import disk
from mlsm.common.durable import make_directories, replace_json

CONTROL_GROUPS = Path("/sys/fs/cgroup")


def cpu_model() -> str:
    """The processor's model if the system reports it, else its architecture."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor() -> str:
    """The processor's model, and the numbers that distinguish generations with the same name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return cpu_model()
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    numbers = [f"{name} {facts[name]}" for name in ("cpu family", "model", "stepping") if name in facts]
    return ", ".join([cpu_model(), *numbers])


def usable_cores() -> int:
    """Cores that this process may run on; where the system does not tell (macOS), all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores() -> int:
    """Cores that this process may use: those of its affinity, or fewer if its control group has a quota."""
    cores = usable_cores()
    v2 = control_group_numbers("{group}/cpu.max")
    v1 = control_group_numbers("cpu/cpu.cfs_quota_us") + control_group_numbers("cpu/cpu.cfs_period_us")
    quotas = [math.ceil(found[0] / found[1]) for found in (v1, v2) if len(found) == 2 and found[0] > 0]
    return min([cores, *quotas])


def available_memory() -> int:
    """Bytes of memory of this machine, or of the control group of this process if that has fewer."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [
        control_group_numbers(name)
        for name in ("memory/memory.limit_in_bytes", "{group}/memory.max", "{group}/memory.high")
    ]
    return min([machine, *(found[0] for found in limits if found)])


def control_group_numbers(name: str) -> list[int]:
    """The numbers in a file of the control groups (versions 1 and 2); [] if it is missing or states no limit."""
    try:
        group = Path("/proc/self/cgroup").read_text().split(":")[-1].strip().strip("/")  # control groups of version 2
        return [int(word) for word in (CONTROL_GROUPS / name.format(group=group).strip("/")).read_text().split()]
    except (OSError, ValueError):
        return []


def cache_directory() -> Path:
    """The directory for files that can be computed or downloaded again: $MLSM_CACHE, else mlsm in the user's cache."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mlsm")
    return Path(os.environ.get("MLSM_CACHE") or user).expanduser()


def make_cache() -> None:
    """Make the directory. Raises OSError, PlaceError; RuntimeError if the home directory is unknown."""
    disk.follow_no_links_below(cache_directory())  # it may be inside an --output, or reached through links in it
    make_directories(cache_directory())


def read_cache(name: str) -> dict:
    """The JSON object in a file of the cache; empty if there is none or it cannot be read."""
    try:
        known = json.loads(disk.read_file(cache_directory() / name))
    except (OSError, ValueError, RecursionError, RuntimeError):  # RuntimeError: the home directory is unknown
        return {}
    return known if isinstance(known, dict) else {}


def write_cache(name: str, known: dict) -> None:
    """Replace such a file. Raises the errors of `make_cache`."""
    make_cache()
    replace_json(cache_directory() / name, known, allow_nan=True)
