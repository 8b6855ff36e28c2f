"""The name of this machine, and the path of its user's cache."""

import os
import platform
from pathlib import Path


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


def cache_directory() -> Path:
    """The directory for files that can be computed or downloaded again: $MLSM_CACHE, else mlsm in the user's cache."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "mlsm")
    return Path(os.environ.get("MLSM_CACHE") or user).expanduser()
