"""SIGKILL ahead of every call of the commit protocol, each in a child of its own; prints counts as JSON.

A script, because a fork wants a process without threads.
"""

import json
import shutil
import signal
import sys
from pathlib import Path

from faulty_disk import forked, killed_at
from test_commit import content, temporaries, visible_units_are_whole, write


def main(directory):
    killed, number = 0, 0
    while True:
        path = directory / str(number)
        code = killed_at(number, lambda path=path: write(path))
        if code == 0:
            break
        assert code == -signal.SIGKILL, code
        killed += 1
        if (path / "units").is_dir():
            visible_units_are_whole(path)
        assert len(temporaries(path)) <= 2
        assert forked(lambda path=path: write(path)) == 0
        found = {name: raw for name, raw in content(path).items() if not name.startswith(".")}
        whole = {name: len(raw) for name, raw in found.items()}
        if number == 0:
            first = found
        assert found == first, number
        shutil.rmtree(path)
        number += 1
    print(json.dumps({"killed": killed, "finished": 1, "rerun": whole}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
