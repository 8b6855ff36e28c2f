"""The same rows in other libraries' files: how fast they are read in shuffled order, and how reading resumes.

    python -m benchmarks.rivals_readers [--quick]

Rows: 8,192 windows of 128 tokens (--quick: 2,048) of a store with the real codes of the bench states, top 32. From that
store's reader every other library gets, window by window, its number, ids (uint16), entries of each token (uint8),
atoms (uint16) and weights (float16), uncompressed. All deliver the same batch of 32 windows, as torch tensors: numbers
(32), input_ids (32, 128), lsp_indices and lsp_weights (32, 128, most entries); ours by LspDataset, which adds three
more, the others by one function of this file, which pads arrays that lie end to end.

- ours          LspDataset, endless, batches by the dataset
- streaming     MosaicML's StreamingDataset (MDS, shuffle py1e, one canonical node) and StreamingDataLoader
- LitData       StreamingDataset and StreamingDataLoader
- HF datasets   Arrow on disk, shuffle(seed + epoch).select(rest).shard(ranks, rank, contiguous=False); a batch is one
                Arrow table
- WebDataset    one tenbin member a window; shards of 128 windows and a buffer of 1,000 windows shuffled by the seed. It
                has no state: going on means skipping, so a late place costs reading what comes before it

Each figure is of a forked process in which everything is imported. `windows_per_s`: an epoch after its first batch, by
one core without workers (`windows_per_cpu_s`: by its processor time), and by two workers. `first_batch_s`: from nothing
to the first batch of epoch 0. `resume_s`: the same at step 1,000,180, late in an epoch, by the library's own state (HF
datasets and WebDataset have none: the arithmetic is the user's). `resume_exact`: what follows equals that epoch read
from its begin. Libraries take turns in every round; files are in the page cache. `bytes_per_token`: everything on disk.

`after_kill`: 1,024 windows, two ranks, batches of 32. After six batches rank 0 saves the state, after eight SIGKILL
ends both. The rest of the epoch by two ranks again, and by one rank with batches of 64. "exact": every step has the
windows that it would have had without the kill. "each once": every window of the epoch comes once, in other batches.
Else how many come twice and how many never. Where a library fails, its error.

Packages that are missing are left out, with the command that installs them. Prints a table in Markdown, and JSON as its
last line. Left out: reading from a URL, masks, the workers of a loader in a kill.
"""

import argparse
import contextlib
import importlib.machinery
import json
import multiprocessing
import os
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
import types
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

from benchmarks.data import conditions, find_module
from benchmarks.stores import MAX_LENGTH, real_columns, write_store
from shards.codec import pad_rows
from shards.reader import Store
from shards.torch_dataset import LspDataset

SEED, BATCH, BLOCK_WINDOWS, SHARD_WINDOWS, BUFFER = 1, 32, 512, 128, 1000
BLOCKS, QUICK_BLOCKS, KILL_BLOCKS, ROUNDS, QUICK_ROUNDS = 16, 4, 2, 3, 1
STEP, COMPARED = 1_000_180, 5  # a late step, and how many batches after it are compared
SAVED, KILLED, LIMIT_SECONDS = 6, 8, 180
REQUIREMENTS = {
    "streaming": "--no-deps mosaicml-streaming==0.13.0 brotli catalogue cramjam python-snappy xxhash zstd",
    "litdata": "--no-deps litdata==0.2.76 lightning-utilities boto3 botocore s3transfer jmespath",
    "datasets": "datasets",
    "webdataset": "webdataset",
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the windows, one round")
    quick = parser.parse_args().quick
    readers, left_out = available()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(Path(directory), readers, QUICK_BLOCKS if quick else BLOCKS, QUICK_ROUNDS if quick else ROUNDS)
        for name, found in after_kill(Path(directory) / "kill", readers).items():
            rows[name]["after_kill"] = found
    result = {"benchmark": "rivals_readers", "readers": rows, "left_out": left_out, "batch": BATCH, "step": STEP}
    print(markdown(result))
    print(json.dumps(result | conditions("mosaicml-streaming", "litdata", "datasets", "webdataset")))


def available():
    """The readers whose packages are there, by name; of the others what installs them."""
    readers, left_out = {"ours": Ours}, {}
    for reader in (Streaming, LitData, HuggingFace, WebData):
        with image_stand_in() if reader is Streaming else contextlib.nullcontext():
            found = find_module(reader.module, REQUIREMENTS[reader.module])
        if found:
            readers[reader.name] = reader
        else:
            left_out[reader.name] = f"pip install {REQUIREMENTS[reader.module]}"
    return readers, left_out


@contextlib.contextmanager
def image_stand_in():
    """Empty classes in place of torchvision, which MosaicML's package imports for data sets of images.

    The wheel of PyPI needs a torch for GPUs, so beside a torch for CPUs it cannot be loaded.
    """
    parts = {
        "": (),
        ".datasets": ("VisionDataset", "CIFAR10"),
        ".transforms": (),
        ".transforms.functional": ("to_tensor",),
    }
    added = []
    if importlib.util.find_spec("torchvision") is None:
        for part, names in parts.items():
            module = types.ModuleType(f"torchvision{part}")
            module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
            vars(module).update({name: type(name, (), {}) for name in names})
            sys.modules[module.__name__] = module
            added.append(module.__name__)
    yield
    for name in added:
        del sys.modules[name]


# -- rows ------------------------------------------------------------------------------------------------


def samples_of(store):
    """The windows of a store as plain arrays, one by one."""
    windows = store.split("train")
    for number in range(len(windows)):
        read = windows.read([number])
        rows = windows.targets(read, *np.nonzero(read.documents >= 0))
        yield {
            "number": number,
            "ids": read.ids[0].astype(np.uint16),
            "nnz": np.diff(rows.indptr).astype(np.uint8),
            "atoms": rows.indices.astype(np.uint16),
            "weights": rows.weights.astype(np.float16),
        }


def collate(samples):
    """A batch of samples, from dicts of arrays."""
    arrays = {name: np.concatenate([sample[name] for sample in samples]) for name in ("ids", "nnz", "atoms", "weights")}
    return batch_of(np.array([int(sample["number"]) for sample in samples]), **arrays)


def batch_of(numbers, ids, nnz, atoms, weights):
    """A batch from arrays that lie end to end."""
    rows = {
        "lsp_indices": pad_rows(nnz, atoms).astype(np.int64),
        "lsp_weights": pad_rows(nnz, weights).astype(np.float32),
    }
    batch = {name: array.reshape(len(numbers), MAX_LENGTH, -1) for name, array in rows.items()}
    batch |= {"input_ids": ids.reshape(-1, MAX_LENGTH).astype(np.int64), "window_ids": numbers.astype(np.int64)}
    return {name: torch.from_numpy(array) for name, array in batch.items()}


# -- readers ---------------------------------------------------------------------------------------------


class Reader:
    """One library's data set and loader in one process of `ranks`.

    open()               makes both
    batches()            from where it stands to the end of the epoch (of ours: endlessly)
    state()              as the library saves it after what `batches` has delivered
    load(state)          before `batches`
    place(epoch, begin)  likewise, from the number of windows that all ranks have had in the epoch
    """

    def __init__(self, path, windows, batch=BATCH, workers=0, rank=0, ranks=1):
        self.path, self.windows, self.batch, self.workers = path, windows, batch, workers
        self.rank, self.ranks, self.delivered = rank, ranks, 0
        self.open()

    def batches(self):
        return iter(self.loader)

    def state(self):
        return self.loader.state_dict()

    def load(self, state):
        self.loader.load_state_dict(state)


class Counted(Reader):
    """The same of a library without a state: the user counts what it has delivered."""

    where = 0, 0  # epoch, and windows of it that all ranks have had

    def state(self):
        epoch, begin = self.where
        return {"epoch": epoch, "begin": begin + self.delivered * self.ranks}

    def load(self, state):
        self.place(**state)

    def place(self, epoch, begin):
        self.where = epoch, begin


class Ours(Reader):
    name = "ours"

    @staticmethod
    def write(store, path):
        shutil.copytree(store.path, path)

    def open(self):
        self.dataset = LspDataset(
            self.path, seed=SEED, endless=True, batch_size=self.batch, rank=self.rank, world_size=self.ranks
        )

    def batches(self):
        for batch in DataLoader(self.dataset, batch_size=None, num_workers=self.workers):
            self.delivered += 1
            yield batch

    def state(self):
        return self.dataset.state_after(self.delivered) if self.workers else self.dataset.state_dict()

    def load(self, state):
        self.dataset.load_state_dict(state)

    def place(self, epoch, begin):
        self.load(self.dataset.state_after(0) | {"epoch": epoch, "position": begin})


class Streaming(Reader):
    name, module = "streaming", "streaming"

    @staticmethod
    def write(store, path):
        from streaming import MDSWriter

        columns = {"number": "int", "ids": "ndarray:uint16", "nnz": "ndarray:uint8"}
        columns |= {"atoms": "ndarray:uint16", "weights": "ndarray:float16"}
        with MDSWriter(out=str(path), columns=columns) as writer:
            for sample in samples_of(store):
                writer.write(sample)

    def open(self):
        from streaming import StreamingDataLoader, StreamingDataset

        given = {"shuffle_seed": SEED, "num_canonical_nodes": 1, "batch_size": self.batch}
        self.dataset = StreamingDataset(local=str(self.path), shuffle=True, **given)
        self.loader = StreamingDataLoader(
            self.dataset, batch_size=self.batch, num_workers=self.workers, collate_fn=collate
        )

    def place(self, epoch, begin):
        place = {"epoch": epoch, "sample_in_epoch": begin, "shuffle_seed": SEED}
        self.load(place | {"num_canonical_nodes": 1, "initial_physical_nodes": 1})


class LitData(Reader):
    name, module = "LitData", "litdata"

    @staticmethod
    def write(store, path):
        from litdata.streaming.writer import BinaryWriter

        writer = BinaryWriter(str(path), chunk_bytes="64MB")
        for number, sample in enumerate(samples_of(store)):
            writer[number] = sample
        writer.done()
        writer.merge()

    def open(self):
        from litdata import StreamingDataLoader, StreamingDataset

        self.dataset = StreamingDataset(str(self.path), shuffle=True, seed=SEED, drop_last=False)
        self.loader = StreamingDataLoader(
            self.dataset, batch_size=self.batch, num_workers=self.workers, collate_fn=collate
        )

    def place(self, epoch, begin):
        if not begin:
            self.loader.current_epoch = epoch - 1  # which the loader counts up when it begins
            return
        each = begin // self.ranks
        where = {"current_epoch": epoch, "num_samples_yielded": each}
        state = self.loader.state_dict() | where
        state["latest_worker_idx"] = (each // self.batch - 1) % max(1, self.workers)
        state["dataset"] |= where | {"sample_in_epoch": begin}
        self.load(state)


class HuggingFace(Counted):
    name, module = "HF datasets", "datasets"

    @staticmethod
    def write(store, path):
        from datasets import Dataset, Features, Sequence, Value, disable_progress_bars

        disable_progress_bars()
        columns = {"ids": "uint16", "nnz": "uint8", "atoms": "uint16", "weights": "float16"}
        features = Features(
            {"number": Value("int32")} | {name: Sequence(Value(kind)) for name, kind in columns.items()}
        )
        cache = path.with_name(f"{path.name}-cache")
        made = Dataset.from_generator(samples_of, features, gen_kwargs={"store": store}, cache_dir=str(cache))
        made.save_to_disk(path)
        shutil.rmtree(cache)

    def open(self):
        from datasets import load_from_disk

        self.dataset = load_from_disk(self.path)

    def batches(self):
        epoch, begin = self.where
        order = self.dataset.shuffle(SEED + epoch, keep_in_memory=True, load_from_cache_file=False)
        rest = order.select(range(begin, len(order)))
        mine = rest.shard(self.ranks, self.rank, contiguous=False).with_format("arrow")
        for batch in DataLoader(
            Tables(mine), batch_size=self.batch, num_workers=self.workers, collate_fn=collate_table
        ):
            self.delivered += len(batch["window_ids"])
            yield batch


class Tables:
    """Fetches a batch as one Arrow table, as torch's loader allows by `__getitems__`."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitems__(self, indices):
        return self.dataset[indices]


def collate_table(table):
    names = "ids", "nnz", "atoms", "weights"
    arrays = {name: table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names}
    return batch_of(table["number"].to_numpy(), **arrays)


class WebData(Counted):
    name, module = "WebDataset", "webdataset"

    @staticmethod
    def write(store, path):
        from webdataset import ShardWriter
        from webdataset.tenbin import encode_buffer

        path.mkdir()
        with ShardWriter(str(path / "%06d.tar"), maxcount=SHARD_WINDOWS, verbose=0) as writer:
            for sample in samples_of(store):
                arrays = [np.atleast_1d(np.asarray(array)) for array in sample.values()]
                writer.write({"__key__": f"{sample['number']:08d}", "rows.ten": bytes(encode_buffer(arrays))})

    def open(self):
        self.shards = sorted(map(str, self.path.glob("*.tar")))

    def batches(self):
        import webdataset

        epoch, begin = self.where
        order = {"shardshuffle": len(self.shards), "detshuffle": True, "seed": SEED + epoch}
        dataset = webdataset.WebDataset(self.shards, nodesplitter=webdataset.split_by_node, **order).compose(
            webdataset.detshuffle(BUFFER, BUFFER, SEED + epoch),
            webdataset.decode(),
            webdataset.to_tuple("rows.ten"),
            webdataset.map(named),
            webdataset.batched(self.batch, collation_fn=collate),
        )
        every = DataLoader(dataset, batch_size=None, num_workers=self.workers)
        for batch in islice(every, begin // (self.batch * self.ranks), None):
            self.delivered += len(batch["window_ids"])
            yield batch


def named(arrays):
    """A sample of the arrays of its one member."""
    number, *rest = arrays[0]
    return {"number": number[0]} | dict(zip(("ids", "nnz", "atoms", "weights"), rest, strict=True))


# -- processes -------------------------------------------------------------------------------------------


def in_processes(work, *arguments, ranks=1, one_core=False):
    """What work(*arguments, rank, ranks) yields last in each of some forked processes; of its error the last line."""
    context, port = multiprocessing.get_context("fork"), free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(ranks)]
    children = []
    for rank, (_, writing) in enumerate(pipes):
        child = context.Process(target=run, args=(writing, work, arguments, rank, ranks, port, one_core))
        child.start()
        children.append(child)
    found = [reading.recv() if reading.poll(LIMIT_SECONDS) else {"error": "no answer"} for reading, _ in pipes]
    for child in children:
        child.join(LIMIT_SECONDS)
        child.kill()
    return found if ranks > 1 else found[0]


def run(pipe, work, arguments, rank, ranks, port, one_core):
    place = {"RANK": rank, "GLOBAL_RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    try:
        found = work(*arguments, rank=rank, ranks=ranks)
    except BaseException as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
    pipe.send(found)
    os.kill(os.getpid(), signal.SIGKILL)  # also where nothing is killed on purpose: no exit of a library is measured


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# -- measuring -------------------------------------------------------------------------------------------


def measure(directory, readers, blocks, rounds):
    """Rates, times and bytes of every reader."""
    paths, windows = write_all(directory, readers, blocks)
    tokens = windows * MAX_LENGTH
    rows = {
        name: {"bytes_per_token": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / tokens}
        for name, path in paths.items()
    }
    times = {name: [] for name in readers}
    for _ in range(rounds + 1):  # the first fetches the files' pages
        for name, reader in readers.items():
            alone = in_processes(read_epoch, reader, paths[name], windows, 0, one_core=True)
            workers = in_processes(read_epoch, reader, paths[name], windows, 2)
            late = in_processes(resume_late, reader, paths[name], windows)
            times[name].append((alone, workers, late))
    for name, found in times.items():
        rows[name] |= summarize(found[1:])
    for row in rows.values():
        if "windows_per_s" in row:
            row["ours_over_it"] = rows["ours"]["windows_per_s"] / row["windows_per_s"]
            row["cpu_ours_over_it"] = rows["ours"]["windows_per_cpu_s"] / row["windows_per_cpu_s"]
    return rows


def write_all(directory, readers, blocks):
    """Every reader's files of one store, by name; and how many windows that has."""
    directory.mkdir(exist_ok=True)
    columns = real_columns(BLOCK_WINDOWS * MAX_LENGTH)
    store = Store.open(write_store(directory / "store", columns, 1, blocks).path)
    paths = {name: directory / name.replace(" ", "-") for name in readers}
    for name, reader in readers.items():
        if error := in_processes(write, reader, store, paths[name]):
            sys.exit(f"{name} could not write its files: {error['error']}")
    return paths, len(store.split("train"))


def write(reader, store, path, rank, ranks):
    reader.write(store, path)


def read_epoch(reader, path, windows, workers, rank, ranks):
    clock = time.perf_counter()
    batches = reader(path, windows, workers=workers).batches()
    next(batches)
    began, cpu, rest = time.perf_counter(), time.process_time(), windows // BATCH - 1
    found = sum(len(batch["window_ids"]) for batch in islice(batches, rest))
    figures = {"first_batch_s": began - clock, "windows_per_s": found / (time.perf_counter() - began)}
    return figures if workers else figures | {"windows_per_cpu_s": found / (time.process_time() - cpu)}


def resume_late(reader, path, windows, rank, ranks):
    epoch, begin = divmod(STEP * BATCH, windows)
    clock = time.perf_counter()
    resumed = reader(path, windows)
    resumed.place(epoch, begin)
    batches = resumed.batches()
    first = next(batches)
    seconds = time.perf_counter() - clock
    found = [first, *islice(batches, COMPARED - 1)]
    whole = reader(path, windows)
    whole.place(epoch, 0)
    expected = islice(whole.batches(), begin // BATCH, begin // BATCH + COMPARED)
    same = all(torch.equal(a["window_ids"], b["window_ids"]) for a, b in zip(found, expected, strict=True))
    return {"resume_s": seconds, "resume_exact": same}


def summarize(rounds):
    """Medians and ranges of the rounds of one reader: (alone, with two workers, late) each; or the first error."""
    figures = {}
    for place, prefix in enumerate(("", "two_workers_", "")):
        found = [each[place] for each in rounds]
        if errors := [each["error"] for each in found if "error" in each]:
            figures[f"{('one_core', 'two_workers', 'resume')[place]}_error"] = errors[0]
            continue
        for name in found[0]:
            values = [each[name] for each in found]
            if name == "resume_exact":
                figures[name] = all(values)
                continue
            figures[prefix + name] = statistics.median(values)
            figures[f"{prefix}{name}_range"] = [min(values), max(values)]
    return figures


# -- after a kill ----------------------------------------------------------------------------------------


def after_kill(directory, readers):
    """For every reader what follows a kill, with as many ranks and with fewer."""
    paths, windows = write_all(directory, readers, KILL_BLOCKS)
    return {name: kill_and_resume(reader, paths[name], windows) for name, reader in readers.items()}


def kill_and_resume(reader, path, windows):
    unbroken = in_processes(read_to_the_end, reader, path, windows, BATCH, None, 0, ranks=2)
    killed = in_processes(read_and_die, reader, path, windows, ranks=2)
    if errors := [found["error"] for found in (*unbroken, *killed) if "error" in found]:
        return {"2 ranks": errors[0], "1 rank": errors[0]}
    expected, done = steps_of(unbroken), SAVED * BATCH * 2
    results = {}
    for title, ranks in (("2 ranks", 2), ("1 rank", 1)):
        found = in_processes(
            read_to_the_end, reader, path, windows, BATCH * 2 // ranks, killed[0]["state"], done, ranks=ranks
        )
        found = found if ranks > 1 else [found]
        errors = [each["error"] for each in found if "error" in each]
        results[title] = errors[0] if errors else judge(expected, steps_of(found))
    return results


def read_to_the_end(reader, path, windows, batch, state, done, rank, ranks):
    """The numbers of every batch of this rank, from a state or the begin of epoch 0 to the epoch's end."""
    opened = reader(path, windows, batch, rank=rank, ranks=ranks)
    if state is not None:
        opened.load(state)
    left = -(-(windows - done) // (batch * ranks))
    return {"batches": [found["window_ids"].tolist() for found in islice(opened.batches(), left)]}


def read_and_die(reader, path, windows, rank, ranks):
    """The state after some batches; `run` kills the process when it has had some more."""
    opened = reader(path, windows, rank=rank, ranks=ranks)
    batches = opened.batches()
    for _ in islice(batches, SAVED):
        pass
    state = json.loads(json.dumps(opened.state()))
    for _ in islice(batches, KILLED - SAVED):
        pass
    return {"state": state}


def steps_of(ranks):
    """The windows of every step, over all ranks."""
    steps = []
    for step in range(max(len(rank["batches"]) for rank in ranks)):
        steps.append([number for rank in ranks for batch in rank["batches"][step : step + 1] for number in batch])
    return steps


def judge(unbroken, resumed):
    """What follows a kill: the steps without one against those that came after the last saved."""
    rest = unbroken[SAVED:]
    if [sorted(step) for step in rest] == [sorted(step) for step in resumed]:
        return "exact"
    had = [number for step in unbroken[:SAVED] + resumed for number in step]
    wanted = {number for step in unbroken for number in step}
    twice, never = len(had) - len(set(had)), len(wanted - set(had))
    return f"{twice} twice, {never} never" if twice or never else "each once"


def markdown(result):
    """The table of a result, for docs/benchmarks.md."""
    found = result["readers"]
    lines = [f"| | {' | '.join(found)} |", "|---" * (len(found) + 1) + "|"]
    shown = {
        "windows a second, one core": ("windows_per_s", "{:,.0f}"),
        "the same, two workers": ("two_workers_windows_per_s", "{:,.0f}"),
        "ours over it, one core": ("ours_over_it", "{:.2f}"),
        "the same, processor time": ("cpu_ours_over_it", "{:.2f}"),
        "first batch, one core; s": ("first_batch_s", "{:.3f}"),
        "first batch, two workers; s": ("two_workers_first_batch_s", "{:.2f}"),
        f"resume at step {result['step']:,}; s": ("resume_s", "{:.3f}"),
        "exact": ("resume_exact", "{}"),
        "bytes a token": ("bytes_per_token", "{:.1f}"),
    }
    for title, (name, form) in shown.items():
        cells = (form.format(each[name]) if name in each else "failed" for each in found.values())
        lines.append(f"| {title} | {' | '.join(cells)} |")
    for ranks in ("2 ranks", "1 rank"):
        cells = (each["after_kill"][ranks] for each in found.values())
        lines.append(f"| after a kill of 2 ranks, by {ranks} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
