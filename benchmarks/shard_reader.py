"""How fast a store is read, how far its order is from a uniform shuffle, and what many units cost.

    python -m benchmarks.shard_reader

Reading: a store of 64 blocks of 512 windows x 128 tokens (4.2 million tokens, one shuffle window), whose rows are
the real codes of the bench states, top 32, repeated; one thread, warm page cache, every block verified before the
clock starts. A step asks for `order`, reads the windows and decodes the rows of a random 15 % of the tokens,
chosen beforehand. Its memory is that of a process of its own, after one pass. `read_vs_raw` compares with the same
steps on plain arrays in memory-mapped .npy files: ids by window, rows in CSR form (int32 atoms, float32 weights and
tails) of the whole store, for the same windows and tokens; nothing to unpack, nothing to check. Rounds take turns.

Opening: records of a million tokens (16 blocks) each, made up, in warm cache, no shards; a process of its own for
each size. `open_seconds` is from nothing to the first 32 window numbers: target, plan, which units are missing, every
record with its checksum, order. Memory is the growth of RssAnon, imports left out.

CPU seconds stand beside those of the clock, for machines that others use.

Shuffle: the order over the made-up store of 1,000 units, 8 million windows. Prints JSON as its last line.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.data import ROOT, conditions, memory_mb, report, with_quartiles
from benchmarks.stores import MAX_LENGTH, VOCABULARY, K, make_store, real_columns, write_store
from shards.manifest import Plan, PlannedUnit, UnitRecord, fingerprint
from shards.reader import Store

UNITS, BLOCKS_A_UNIT, BLOCK_WINDOWS = 4, 16, 512
MASK_RATE, ROUNDS = 0.15, 7


def main():
    result = measure()
    report(result | conditions())


def measure():
    """All figures of this file, by name."""
    with tempfile.TemporaryDirectory() as directory:
        columns = real_columns(BLOCK_WINDOWS * MAX_LENGTH)
        store = Store.open(write_store(Path(directory) / "store", columns, UNITS, BLOCKS_A_UNIT).path)
        raw = RawArrays(Path(directory) / "raw", columns, UNITS * BLOCKS_A_UNIT)
        result = reading(store, raw) | in_its_own_process("reading_memory", store.path)
        for units in (1_000, 10_000, 100_000):
            path = Path(directory) / f"units-{units}"
            write_records(path, units)
            result |= {f"{name}_{units}_units": value for name, value in in_its_own_process("opening", path).items()}
            if units == 1_000:
                result |= displacement(Store.open(path).split("train"))
    return result


def in_its_own_process(function, path):
    """Figures that a function of this file prints, from a fresh interpreter."""
    code = f"import json, benchmarks.shard_reader as b; print(json.dumps(b.{function}({str(path)!r})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, check=True)
    return json.loads(run.stdout)


# -- reading ---------------------------------------------------------------------------------------------


def reading(store, raw):
    """Tokens a second through order, read and targets, for batches of 1,024 and of 32 windows; the same against raw
    arrays."""
    windows = store.split("train")
    windows.read(np.arange(0, len(windows), BLOCK_WINDOWS))  # verifies every block
    result = {}
    for size in (1024, 32):
        pairs = [
            (read_epoch_part(windows, size, epoch), gather_epoch_part(raw, windows, size, epoch))
            for epoch in range(ROUNDS + 1)
        ][1:]  # the first fetches the files' pages
        rates = np.array([ours for ours, _ in pairs])
        for name, rate in zip(("second", "cpu_second"), rates.T, strict=True):
            result |= with_quartiles(f"read_tokens_per_{name}_batch_{size}", rate)
        ratio = np.array([ours[0] / anchor for ours, anchor in pairs])
        result |= with_quartiles("read_vs_raw" if size == 1024 else f"read_vs_raw_batch_{size}", ratio)
    return result


def read_epoch_part(windows, size, epoch, batches=None):
    """Tokens a second over half an epoch; by the clock, and by this process's CPU time."""
    batches, masks = batches or len(windows) // size // 2, choose_tokens(size, epoch)
    start, cpu = time.perf_counter(), time.process_time()
    for step in range(batches):
        batch = windows.read(windows.order(42, epoch, step * size, (step + 1) * size))
        windows.targets(batch, *masks[step % len(masks)])
    tokens = batches * size * MAX_LENGTH
    return tokens / (time.perf_counter() - start), tokens / (time.process_time() - cpu)


def gather_epoch_part(raw, windows, size, epoch):
    """Tokens a second of the same steps on raw arrays, which get the order for nothing."""
    batches, masks = len(windows) // size // 2, choose_tokens(size, epoch)
    order = windows.order(42, epoch, 0, batches * size)
    start = time.perf_counter()
    for step in range(batches):
        raw.gather(order[step * size : (step + 1) * size], *masks[step % len(masks)])
    return batches * size * MAX_LENGTH / (time.perf_counter() - start)


def choose_tokens(size, epoch):
    """The tokens whose rows a step decodes, as windows of the batch and positions: four sets, used in turn."""
    rng, tokens = np.random.default_rng(epoch), size * MAX_LENGTH
    chosen = [np.sort(rng.choice(tokens, int(MASK_RATE * tokens), replace=False)) for _ in range(4)]
    return [np.divmod(tokens, MAX_LENGTH) for tokens in chosen]


class RawArrays:
    """What the store holds as plain arrays in memory-mapped files, in the types that a trainer wants."""

    def __init__(self, directory, columns, blocks):
        directory.mkdir()
        entries = np.arange(blocks)[:, None] * columns["nnz"].sum() + np.cumsum(columns["nnz"])
        arrays = {
            "ids_WL": np.tile(columns["ids"].astype(np.int32), blocks).reshape(-1, MAX_LENGTH),
            "documents_WL": np.zeros((blocks * BLOCK_WINDOWS, MAX_LENGTH), np.int32),
            "indptr": np.concatenate(([0], entries.ravel())),
            **{name: np.tile(columns[name], blocks) for name in ("indices", "weights", "tail")},
        }
        for name, array in arrays.items():
            np.save(directory / f"{name}.npy", array)
            setattr(self, name, np.load(directory / f"{name}.npy", mmap_mode="r").view(np.ndarray))

    def gather(self, windows_W, window_M, position_M):
        """Ids and documents of some windows, and the rows of some of their tokens."""
        tokens_M = windows_W[window_M] * MAX_LENGTH + position_M
        first_M = self.indptr[tokens_M]
        nnz_M = self.indptr[tokens_M + 1] - first_M
        indptr = np.concatenate(([0], np.cumsum(nnz_M)))
        entries = np.arange(indptr[-1]) + np.repeat(first_M - indptr[:-1], nnz_M)
        rows = indptr, self.indices[entries], self.weights[entries], self.tail[tokens_M]
        return self.ids_WL[windows_W], self.documents_WL[windows_W], rows


def reading_memory(path):
    """Anonymous memory that a pass over the store takes beyond the interpreter and its imports."""
    before = memory_mb("RssAnon")
    windows = Store.open(path).split("train")
    read_epoch_part(windows, 1024, epoch=0, batches=len(windows) // 1024)
    return {"reading_anonymous_memory_mb": memory_mb("RssAnon") - before}


# -- opening ---------------------------------------------------------------------------------------------


def opening(path):
    """Seconds and memory from nothing to the first windows of a store with many units."""
    before, start, cpu = memory_mb("RssAnon"), time.perf_counter(), time.process_time()
    store = Store.open(path)
    decided = time.perf_counter()
    windows = store.split("train")
    windows.order(42, 0, len(windows) // 2, len(windows) // 2 + 32)
    return {
        "missing_units_seconds": decided - start,
        "open_seconds": time.perf_counter() - start,
        "open_cpu_seconds": time.process_time() - cpu,
        "anonymous_memory_mb": memory_mb("RssAnon") - before,
    }


def write_records(path, units):
    """Records and plan of made-up units: as the writer would leave them, without shards and without fsync."""
    files, target = make_store(path)
    names = [fingerprint([number]) for number in range(units)]
    plan = Plan({}, tuple(PlannedUnit(name, "train", "made up", n, n + 1) for n, name in enumerate(names)))
    files.publish_plan(plan)
    template = made_up_record(target["target"])
    for name in names:
        values = json.loads(template.replace("UNIT", name))
        text = json.dumps(values | {"checksum": fingerprint(values)}, indent=None, sort_keys=True)
        files.record_file(name).write_text(text.replace(", ", ",\n "))  # as long as the writer's, one fact a line


def made_up_record(target):
    """JSON of a record without its checksum; its unit is called UNIT."""
    digest = "5" * 64
    block = {"length": 4_600_000, "sha256": digest, "windows": BLOCK_WINDOWS, "tokens": BLOCK_WINDOWS * MAX_LENGTH}
    blocks = [{"name": f"{n:06d}", "offset": 1024 + n * 4_600_000, **block} for n in range(BLOCKS_A_UNIT)]
    sizes = {"__meta__": 1024, "__stats__": 8 * (VOCABULARY + K)}  # which sums something for every word and LSP
    ends = [{"name": name, "offset": 0, "length": size, "sha256": digest} for name, size in sizes.items()]
    tokens = BLOCKS_A_UNIT * BLOCK_WINDOWS * MAX_LENGTH
    statistics = {
        "documents": 900,
        "entries": 27 * tokens,
        "coded_tokens": tokens,
        "kept_mass": 0.984 * tokens,
        "entropy_nats": 2.7 * tokens,
        "nnz_histogram": [133 * n for n in range(256)],
        "max_kkt": 1e-3,
    }
    environment = {"cpu": "made up", "python": "3.11", "numpy": "2", "teacher_seconds": 1.0, "solver_seconds": 2.0}
    record = UnitRecord(
        "UNIT",
        target,
        "UNIT-5.tar",
        74_000_000,
        digest,
        BLOCKS_A_UNIT * BLOCK_WINDOWS,
        tokens,
        (ends[0], *blocks, ends[1]),
        statistics,
        environment,
    )
    values = record.as_dict()
    values.pop("checksum")
    return json.dumps(values)


# -- shuffle ---------------------------------------------------------------------------------------------


def displacement(windows):
    """How far the order is from a uniform shuffle: the way windows move, and who meets in a batch.

    A uniform shuffle moves a window by a third of the epoch on average, and puts two given windows into one batch of
    B of N with probability (B - 1) / (N - 1). Ours does the latter to windows of one block far more often.
    """
    order = windows.order(42, 0, 0, len(windows))
    count = len(order)
    result = {
        "shuffle_displacement": float(np.abs(order - np.arange(count)).mean() / count),
        "shuffle_displacement_uniform": 1 / 3,
    }
    blocks = order // BLOCK_WINDOWS
    pairs = count * (BLOCK_WINDOWS - 1) / 2
    for size in (32, 1024):
        batches = blocks[: count // size * size].reshape(-1, size)
        together = np.unique(batches + np.arange(len(batches))[:, None] * count, return_counts=True)[1]
        result |= {
            f"same_block_same_batch_{size}": float((together * (together - 1) / 2).sum() / pairs),
            f"same_block_same_batch_{size}_uniform": (size - 1) / (count - 1),
            f"blocks_in_a_batch_{size}": len(together) / len(batches),
        }
    return result


if __name__ == "__main__":
    main()
