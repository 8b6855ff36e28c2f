"""How fast a store is verified in full: bytes per second of one core, against SHA-256 alone over the same files.

    python -m benchmarks.verify

The codes of the bench states, n = 32, as a store of four units of about a million tokens (the 8,192 rows again and
again, in blocks of 65,536 tokens), written with the project's own writer; one thread, files in the page cache.
`verify_bytes_per_second` counts this thread's processor time, so that other processes on the machine do not count;
the wall clock's rate is given beside it. The anchor reads and hashes the same files and checks nothing else. Prints
JSON as its last line.
"""

import hashlib
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, report, with_quartiles
from benchmarks.stores import real_columns, write_store
from shards.derive import derive
from shards.schema import BLOCK_TOKENS
from shards.verify import verify

UNITS, BLOCKS, ROUNDS = 4, 16, 7


def main():
    with tempfile.TemporaryDirectory() as directory:
        files = write_store(Path(directory) / "stores" / "bench", real_columns(BLOCK_TOKENS), UNITS, BLOCKS)
        shards = sorted(files.units.glob("*.tar"))
        measured = {name: [] for name in ("verify", "quick", "hash")}
        for _ in range(ROUNDS + 1):
            measured["verify"].append(timed(lambda: whole(verify(files.path, full=True, threads=1))))
            measured["quick"].append(timed(lambda: whole(verify(files.path, threads=1))))
            measured["hash"].append(timed(lambda: [hash_file(path) for path in shards]))
        size = sum(path.stat().st_size for path in shards)
        derived = timed(lambda: derive(files.path, 8))
    rounds = {name: np.array(times[1:]) for name, times in measured.items()}  # the first warms up
    result = {
        **with_quartiles("verify_bytes_per_second", size / rounds["verify"][:, 0]),
        "verify_bytes_per_wall_second": size / statistics.median(rounds["verify"][:, 1]),
        **with_quartiles("verify_vs_hash_alone", rounds["hash"][:, 0] / rounds["verify"][:, 0]),
        "hash_bytes_per_second": size / statistics.median(rounds["hash"][:, 0]),
        "quick_look_seconds": statistics.median(rounds["quick"][:, 1]),
        "derive_tokens_per_second": UNITS * BLOCKS * BLOCK_TOKENS / derived[0],
        "bytes": size,
        **conditions(),
    }
    report(result)


def whole(report):
    if report["damaged"] or report["missing"]:
        raise SystemExit(f"the bench store is damaged: {report}")


def hash_file(path):
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").digest()


def timed(work):
    """Seconds of processor time, of all threads, and of the wall clock."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


if __name__ == "__main__":
    main()
