"""Read a log of JSON lines leniently: a damaged line is skipped.

    lines, damaged = read_json_lines("log.jsonl")      # [{"step": 1, ...}, ...], {17: b'{"st\x85p": ...'}

`stream_json_lines` keeps one line at a time, for a log of any length. A log only accompanies the work, so damage to it
must never stop the work. This module does not warn the user; `damage` words the warning.
"""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mlsm.common import disk


def read_json_lines(path: str | Path, needed: Sequence[str] = ("step",)) -> tuple[list[dict], dict[int, bytes]]:
    """The lines of a log.

    needed   names of whole numbers without which a line is damaged
    Raises   OSError, also if it is not a file (a pipe is not waited for)
    Returns  (dicts in order, {number of a damaged line, from 1: its bytes}); a last line without a newline, as a killed
             process leaves it, is in neither
    """
    damaged: dict[int, bytes] = {}
    return list(stream_json_lines(path, damaged, needed)), damaged


def stream_json_lines(path: str | Path, damaged: dict[int, bytes], needed: Sequence[str] = ("step",)) -> Iterator[dict]:
    """The same line by line: yields the dicts, and adds damaged lines to `damaged` as it passes them."""
    with io.BufferedReader(disk.open_to_read(path)) as file:
        whole = (part for line in file if line.endswith(b"\n") for part in line.splitlines())  # also at a \r
        for number, line in enumerate(whole, start=1):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                values = None
            if isinstance(values, dict) and all(type(values.get(name)) is int for name in needed):
                yield values
            else:
                damaged[number] = line


def damage(path: str | Path, damaged: Mapping[int, bytes]) -> str:
    """A message about damaged lines: how many, and the first one."""
    first = ", ".join(map(str, list(damaged)[:5])) + (", ..." if len(damaged) > 5 else "")
    return f"{path}: {len(damaged)} damaged lines are passed over (line {first})"
