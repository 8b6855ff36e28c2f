"""Read a log of JSON lines leniently: a damaged line is skipped.

    lines, damaged = read_json_lines("log.jsonl")      # [{"step": 1, ...}, ...], {17: b'{"st\x85p": ...'}

A log only accompanies the work, so damage to it must never stop the work. This module does not warn the user; `damage`
words the warning.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mlsm.common import disk


def read_json_lines(path: str | Path, needed: Sequence[str] = ("step",)) -> tuple[list[dict], dict[int, bytes]]:
    """The lines of a log.

    needed   names of whole numbers without which a line is damaged
    Raises   OSError, also if it is not a file (a pipe is not waited for)
    Returns  (dicts in order, {number of a damaged line, from 1: its bytes}); a last line without a newline, as a killed
             process leaves it, is in neither
    """
    raw, lines, damaged = disk.read_file(path), [], {}
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and all(type(values.get(name)) is int for name in needed):
            lines.append(values)
        else:
            damaged[number] = line
    return lines, damaged


def damage(path: str | Path, damaged: Mapping[int, bytes]) -> str:
    """A message about damaged lines: how many, and the first one."""
    first = ", ".join(map(str, list(damaged)[:5])) + (", ..." if len(damaged) > 5 else "")
    return f"{path}: {len(damaged)} damaged lines are passed over (line {first})"
