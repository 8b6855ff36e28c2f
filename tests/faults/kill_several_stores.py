"""Kill an encoding of two layers and two k at calls of the commit protocol, finish it, compare with an unbroken run.

    python tests/faults/kill_several_stores.py DIRECTORY CASES

Prints JSON as its last line. A process of its own, because what forks must not have computed anything.
"""

import collections
import errno
import json
import re
import shutil
import sys
from pathlib import Path

from faulty_disk import forked, killed_at, raising_at, recorded
from soak import check_visible, prepare  # sets paths and threads first

from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig


def main(directory, cases):
    prepared = directory / "prepared"
    assert forked(lambda: prepare(prepared)) == 0
    assert forked(lambda: count(prepared, directory / "whole")) == 0
    whole, (calls, between) = shards(directory / "whole"), json.loads((directory / "whole" / "calls").read_text())
    counts = collections.Counter(name.partition("/")[0] for name in whole)
    assert len(counts) == 4 and len(set(counts.values())) == 1
    seen = collections.Counter()
    for case in range(cases):
        output, share = directory / f"case-{case}", case / max(1, cases - 1)
        number = between[int(share * (len(between) - 1))] if case % 2 else 1 + int(share * (calls - 2))
        if case % 4 == 3:
            assert forked(lambda output=output, number=number: full_disk(prepared, output, number)) == 0
            assert not list(output.rglob(".*.tmp")), number
            seen["full disks"] += 1
        else:
            assert killed_at(number, lambda output=output: encode(prepared, output)) < 0
            seen["kills"] += 1
        check_visible(output, seen)
        done = [len(list(store.glob("units/*.json"))) for store in sorted(output.glob("stores/*"))]
        seen["with stores apart"] += len(set(done)) > 1
        assert forked(lambda output=output: encode(prepared, output)) == 0
        assert shards(output) == whole, number
        shutil.rmtree(output)
    print(json.dumps(dict(seen)))


def encode(prepared, output):
    encode_lsp(
        EncodeConfig(
            teacher=str(prepared / "tiny"),
            layer=(1, 3),
            k=(20, 30),
            corpus=(str(prepared / "text.txt"),),
            lam=0.1,
            top_n=8,
            max_length=32,
            max_tokens=12_000,
            unit_tokens=5_000,
            batch_tokens=2048,
            dictionary_tokens=2_000,
            dictionary_epochs=1,
            device="cpu",
            output=output,
        )
    )


def count(prepared, output):
    """An unbroken run; how many calls it makes, and which commit a unit to a store after another store has it."""
    calls = recorded(lambda: encode(prepared, output))
    commits = [
        number
        for number, (name, arguments) in enumerate(calls)
        if name == "link" and re.search(r"/units/\w+\.json$", str(arguments[-1]))
    ]
    between = [number for place, number in enumerate(commits) if place % 4]
    assert len(commits) >= 8 and len(commits) % 4 == 0
    (output / "calls").write_text(json.dumps([len(calls), between]))


def full_disk(prepared, output, number):
    """An encoding whose disk is full at one call."""
    try:
        with raising_at(number, errno.ENOSPC):
            encode(prepared, output)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("nothing was said of the full disk")


def shards(output):
    """Shards of all stores by store and name."""
    return {f"{path.parent.parent.name}/{path.name}": path.read_bytes() for path in output.glob("stores/*/units/*.tar")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
