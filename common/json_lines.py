"""A log of JSON lines, read leniently: a line that is damaged costs that line.

    lines, damaged = read_json_lines("log.jsonl")      # [{"step": 1, ...}, ...], {17: b'{"st\x85p": ...'}

A log is evidence beside the work, and never worth the work. Left out: saying so (whoever reads).
"""

import errno
import json
import os
import stat


def read_json_lines(path, needed=("step",)):
    """The lines of a log.

    needed   names of whole numbers without which a line is damaged
    Raises   OSError, also where it is no file, which is not waited for
    Returns  (dicts in order, {number of a damaged line, from 1: its bytes}); a last line without its end, as a killed
             process leaves it, is in neither
    """
    with open(path, "rb", opener=_open_regular) as file:
        raw = file.read()
    lines, damaged = [], {}
    for number, line in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), start=1):
        values = _parsed(line)
        if isinstance(values, dict) and all(type(values.get(name)) is int for name in needed):
            lines.append(values)
        else:
            damaged[number] = line
    return lines, damaged


def damage(path, damaged):
    """What to say of damaged lines: how many, and which."""
    first = ", ".join(map(str, list(damaged)[:5])) + (", ..." if len(damaged) > 5 else "")
    return f"{path}: {len(damaged)} damaged lines are passed over (line {first})"


def _open_regular(path, flags):
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no file", str(path))
    return descriptor


def _parsed(line):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
