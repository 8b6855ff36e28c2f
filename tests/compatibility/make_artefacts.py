"""Write what a version of this project leaves on disk, for the tests of later versions: run it once, at that commit.

    git worktree add ../old 1837c65
    cp -r tests/compatibility ../old/tests/
    cd ../old && OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 python tests/compatibility/make_artefacts.py \
        tests/compatibility/1837c65

then copy the directory back. Everything is made by the command line of the checkout that the script lies in, in a
temporary directory, from material/: stores of every kind, each interrupted and finished; a dictionary; a run of every
objective, killed after a checkpoint; a finished run, a killed probe, records of evaluations. `expected.json` keeps the
commands that were given and what they led to when they were not interrupted. Left out: the tests, and the material's
text, which is a part of docs/*.md of 1837c65, a paragraph a document.

    material/                     text.txt; more.txt, by which the corpus grows; teacher/, made once
    <commit>/learning/            ./runs with a dictionary whose learning was killed; what was learned is learned.npy
    <commit>/unfinished/          ./runs as the interrupted encodings left it
    <commit>/finished/            ./runs with finished stores, the killed runs and the finished one, records
    <commit>/expected.json

The directory in which all this was made is written as /ROOT; a test puts its own there.
"""

import contextlib
import hashlib
import io
import json
import os
import platform
import shlex
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent)]
MATERIAL = HERE / "material"
ROOT = "/ROOT"  # stands for the directory in which the commands were given


def but(command, *flags):
    """The command with other values of some flags, or with flags that it has not."""
    starts = [place for place, word in enumerate(flags) if word.startswith("--")]
    for start, stop in zip(starts, [*starts[1:], len(flags)], strict=True):
        if flags[start] in command:
            place = command.index(flags[start])
            rest = [n for n, word in enumerate(command) if n > place and word.startswith("--")]
            command = command[:place] + command[min(rest, default=len(command)) :]
        command = [*command, *flags[start:stop]]
    return command


CORPUS = ["--corpus", "text.txt", "--max-length", "32", "--unit-tokens", "900", "--seed", "42"]
TEACHER = ["--teacher", "teacher", "--batch-tokens", "1024", "--dtype", "float32", "--device", "cpu"]
DICTIONARY = ["--layer", "2", "--k", "24", "--lam", "0.05", "--dictionary-tokens", "1500", "--dictionary-epochs", "1"]
LSP = ["encode-lsp", *CORPUS, *TEACHER, *DICTIONARY, "--tolerance", "0.001", "--top-n", "6"]
IDS = ["encode-ids", *CORPUS, "--tokenizer", "teacher"]
LOGITS = ["encode-logits", *CORPUS, *TEACHER, "--top-n", "5"]
ENCODINGS = {
    "lsp": LSP,
    "pairs": but(LSP, "--packing", "pairs"),
    "ids": IDS,
    "logits": LOGITS,
}

HOW = ["--device", "cpu", "--dtype", "float32", "--micro-batch", "8", "--checkpoints", "1", "--eval-windows", "8",
       "--eval-every", "6", "--save-every", "5", "--keep-last", "1", "--log-every", "1"]  # fmt: skip
STEPS = ["--max-steps", "12", "--batch-windows", "8", "--warmup", "0.25", "--grad-clip", "1", "--mask-rate", "0.15",
         "--mask-unit", "token", "--corruption", "mask"]  # fmt: skip
STUDENT = ["train-student", *HOW, *STEPS, "--encoder", "bert-1x8", "--dropout", "0.1", "--lr", "0.01",
           "--weight-decay", "0.01", "--kappa", "1"]  # fmt: skip
KILLED_AT = 7  # steps; the checkpoint is of step 5
RUNS = {
    "mlsm": [*STUDENT, "--objective", "mlsm", "--store", "{lsp}", "--seed", "1"],
    "mlm": [*STUDENT, "--objective", "mlm", "--store", "{ids}", "--seed", "1"],
    "kd": [*STUDENT, "--objective", "kd", "--store", "{logits}", "--seed", "1"],
    "mtl": [*STUDENT, "--objective", "mtl", "--store", "{lsp}", "--seed", "1"],
    "naive-mlsm": [*STUDENT, "--objective", "naive-mlsm", "--store", "{lsp}", "--seed", "1"],
    "pairs": [*STUDENT, "--objective", "mlsm", "--store", "{pairs}", "--seed", "1"],
    "probe": ["train-probe", *HOW, *STEPS, "--student", "{finished}", "--store", "{lsp}", "--probe-input", "softmax",
              "--lr", "0.1", "--weight-decay", "0", "--seed", "1"],
}  # fmt: skip
FINISHED = [*STUDENT, "--objective", "mlsm", "--store", "{lsp}", "--seed", "2"]
FINETUNE = ["finetune", "{finished}", "--smoke", "--tasks", "rte", "stsb", "--seeds", "1", "--epochs", "1",
            "--lr", "0.001", "--batch", "32", "--max-length", "32", "--device", "cpu"]  # fmt: skip

# Commands of which only the names count of what they make.
LEARN = ["learn-dictionary", *CORPUS, *TEACHER, *DICTIONARY]
LEARNING = but(LEARN, "--seed", "8", "--dictionary-epochs", "4")  # an epoch is a minibatch here, and an evaluation
NAMES = [
    but(IDS, "--max-length", "24"),
    but(IDS, "--packing", "pairs"),
    but(IDS, "--min-characters", "300"),
    but(IDS, "--max-tokens", "1500"),
    but(IDS, "--unit-tokens", "600"),
    but(IDS, "--document-boundary", "file"),
    but(IDS, "--corpus", "text.txt", "more.txt", "--keep-duplicates"),
    but(LOGITS, "--top-n", "2"),
    but(LOGITS, "--max-length", "24"),
    but(LSP, "--dictionary", "{dictionary}", "--lam", "0.1"),
    but(LSP, "--dictionary", "{dictionary}", "--top-n", "all"),
    but(LSP, "--dictionary", "{dictionary}", "--tolerance", "0.0001"),
    but(LSP, "--dictionary", "{dictionary}", "--layer", "1"),
    but(LSP, "--dictionary", "{dictionary}", "--dtype", "bfloat16"),
    ["derive-shards", "{lsp}", "--top-n", "2"],
    but(LEARN, "--layer", "1", "2", "--k", "20", "28"),
    but(LEARN, "--seed", "7"),
    but(LEARN, "--dictionary-tokens", "900", "--dictionary-epochs", "0.5"),
    but(LEARN, "--lam", "0.1"),
    but(LEARN, "--dtype", "bfloat16"),
    but(LEARN, "--max-length", "24"),
    but(RUNS["mlsm"], "--seed", "3"),
    but(RUNS["mlsm"], "--encoder", "bert-tiny"),
    but(RUNS["mlsm"], "--documents-apart"),
    but(RUNS["mlsm"], "--mask-rate-end", "0.3", "--mask-unit", "word", "--corruption", "80-10-10"),
    but(RUNS["mlsm"], "--decay-all", "--lr", "0.001", "--dropout", "0"),
    but(RUNS["mlsm"], "--continue-from", "{finished}"),
    but(RUNS["mlm"], "--store", "{lsp}"),
    but(RUNS["kd"], "--max-steps", "20"),
    but(RUNS["probe"], "--probe-input", "logits"),
]
DEMONSTRATION = ["encode-lsp", "--layer", "10"], ["train-student"]


def main(out):
    import torch

    torch.set_num_threads(1)
    if not (MATERIAL / "teacher").is_dir():
        make_teacher(MATERIAL / "teacher")
    out.mkdir()
    with TemporaryDirectory() as temporary:
        place = Path(temporary).resolve() / "place"
        place.mkdir()
        for path in MATERIAL.iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, place / path.name)
        with contextlib.chdir(place):
            expected = {"commit": commit(), "machine": machine(), "killed_at": KILLED_AT}
            expected |= {"learning": learn(out), "stores": make_stores(out)}
            expected |= make_runs(expected["stores"], out)
            expected |= {"names": names(expected["places"]), "demonstration": demonstration(expected["places"])}
    (out / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    for path in out.rglob("*"):
        if path.suffix in (".json", ".yaml") and str(place) in (text := path.read_text()):
            path.write_text(text.replace(str(place), ROOT))


def make_teacher(directory):
    """A random BERT with weights so large that its distributions over words are peaked."""
    from safetensors.torch import load_file, save_file
    from tiny_teacher import tiny_teacher

    tiny_teacher(MATERIAL, MATERIAL / "text.txt", layers=2, width=16, vocab_size=300).rename(directory)
    weights = load_file(directory / "model.safetensors")
    larger = {name: weight * (20 if weight.ndim == 2 else 1) for name, weight in weights.items()}
    save_file(larger, directory / "model.safetensors", metadata={"format": "pt"})


def commit():
    """The commit of this checkout, for people."""
    import subprocess

    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE, capture_output=True, text=True).stdout.strip()


def machine():
    """What floating-point sums depend on: where all of it is equal, bits are compared, else numbers."""
    import numpy
    import torch

    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("model name", "flags"))]
    return {
        "cpu": hashlib.sha256("\n".join(sorted(set(cpu))).encode()).hexdigest()[:16] if cpu else platform.processor(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }


def give(command, places, stopped_by=None):
    """Give a command in the working directory.

    places      what stands in braces
    stopped_by  a patch under which the command does not end by itself
    """
    import cli

    argv = [word.format(**places) for word in command]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if stopped_by is None:
            assert cli.run(argv) == 0, said.getvalue()
            return
        with stopped_by, contextlib.suppress(KeyboardInterrupt):
            cli.run(argv)
            raise AssertionError(f"not stopped: {argv}")


# -- a dictionary ------------------------------------------------------------------------------------------


def learn(out):
    """Kill the learning of a dictionary, keep what is there, then go on to the end."""
    from pipeline.dictionary import checkpoint as learning_checkpoint

    with mock.patch.object(learning_checkpoint, "SECONDS_BETWEEN", 0):
        give(LEARNING, {}, killed_in_minibatch(3))
    shutil.copytree("runs", out / "learning")
    give(LEARNING, {})
    (directory,) = Path("runs/dictionaries").iterdir()
    shutil.copy(directory / "atoms.npy", out / "learned.npy")
    learned = json.loads((directory / "dictionary.json").read_text())
    shutil.rmtree("runs")
    facts = {name: learned[name] for name in ("fingerprint", "history")}
    return {"command": shlex.join(LEARNING), "dictionary": str(directory), **facts}


def killed_in_minibatch(number):
    """A kill in the minibatch of that number."""
    from pipeline.dictionary.learning import _Learning

    whole, begun = _Learning._minibatch, []

    def minibatch(self):
        begun.append(self)
        if len(begun) == number:
            raise KeyboardInterrupt
        return whole(self)

    return mock.patch.object(_Learning, "_minibatch", minibatch)


# -- stores ------------------------------------------------------------------------------------------------


def make_stores(out):
    """Interrupt every encoding, keep what is there, then go on to the end."""
    for command in ENCODINGS.values():
        give(command, {}, interrupted_in_unit(3))
    shutil.copytree("runs", out / "unfinished")
    stores, found = {}, set()
    for kind, command in ENCODINGS.items():
        stores[kind] = {"command": shlex.join(command)}
    for kind, command in ENCODINGS.items():
        give(command, {})
        path = next(p for p in sorted(Path("runs/stores").iterdir()) if p not in found and is_finished(p))
        found.add(path)
        done = {p.name for p in (out / "unfinished/stores" / path.name / "units").iterdir()}
        stores[kind] |= {"store": str(path), "finished_when_interrupted": sorted(done)}
    shutil.copytree("runs", "before-growth")
    for kind, store in stores.items():
        store |= {"made": describe(Path(store["store"]))}
        dictionary = ["--dictionary", dictionary_of(store["store"])] if kind in ("lsp", "pairs") else []
        command = grown(ENCODINGS[kind]) + dictionary
        give(command, {})
        store["grown"] = shlex.join(command)
        store |= {"made_grown": describe(Path(store["store"]))}
    shutil.rmtree("runs")
    Path("before-growth").rename("runs")
    return stores


def is_finished(path):
    from common.errors import StoreError
    from shards.reader import Store

    try:
        Store.open(path)
    except StoreError:
        return False
    return True


def grown(command):
    """The same command for the corpus with one file more."""
    at = command.index("text.txt")
    return [*command[: at + 1], "more.txt", *command[at + 1 :]]


def dictionary_of(store):
    """The dictionary in runs/dictionaries that a store was made with."""
    kept = Path(store, "dictionary", "atoms.npy").read_bytes()
    return next(str(p) for p in sorted(Path("runs/dictionaries").iterdir()) if (p / "atoms.npy").read_bytes() == kept)


def describe(path):
    """What a store is and holds: names, fingerprints, and a hash of every unit's shard and of its text."""
    from shards.reader import Store
    from shards.shard_file import blocks

    store = Store.open(path)
    units = {}
    for record in store.iter_records():
        text = hashlib.sha256()
        for _, columns in blocks(store.files, record):
            for name in ("ids", "lengths", "run_starts", "run_records"):
                text.update(f"{name} {columns[name].dtype}".encode() + columns[name].tobytes())
        units[record.unit] = {"shard": record.sha256, "text": text.hexdigest(), "windows": record.windows}
    return {"target": store.target_id, "plan": store.plan_id, "units": units}


def interrupted_in_unit(number):
    """Ctrl-C while the unit of that number is being written."""
    from pipeline.stores import OpenStore

    whole, begun = OpenStore.writer, []

    @contextlib.contextmanager
    def writer(self, unit, environment):
        begun.append(unit)
        with whole(self, unit, environment) as opened:
            if len(begun) == number:
                raise KeyboardInterrupt
            yield opened

    return mock.patch.object(OpenStore, "writer", writer)


# -- runs --------------------------------------------------------------------------------------------------


def make_runs(stores, out):
    """A finished run with records of its evaluation, and killed ones with what they came to when they went on."""
    places = {kind: store["store"] for kind, store in stores.items()}
    places["dictionary"] = dictionary_of(places["lsp"])
    give(FINISHED, places)
    (places["finished"],) = map(str, Path("runs/students").iterdir())
    give(FINETUNE, places)
    runs = {}
    for name, command in RUNS.items():
        before = all_runs()
        give(command, places, killed_in_step(KILLED_AT))
        (made_now,) = all_runs() - before
        runs[name] = {"command": shlex.join(command), "run": made_now}
    shutil.copytree("runs", out / "finished")
    for name, run in runs.items():
        give(RUNS[name], places)
        run |= outcome(run["run"])
    write_pairs(Path("blimp"))
    give(["evaluate-blimp", runs["mlm"]["run"], "--data-dir", "blimp", "--output", "runs", "--device", "cpu"], places)
    for record in Path("runs/evaluations").rglob("blimp/*.json"):
        (out / "finished" / record.parent.relative_to("runs")).mkdir(parents=True)
        shutil.copy(record, out / "finished" / record.relative_to("runs"))
    shutil.rmtree("runs")
    shutil.copytree(out / "finished", "runs")
    finished = {"command": shlex.join(FINISHED), "run": places["finished"]} | outcome(places["finished"])
    return {"places": places, "finished": finished, "runs": runs, "finetune": shlex.join(FINETUNE)}


def all_runs():
    return {str(path) for kind in ("students", "probes") for path in Path("runs", kind).glob("*")}


def killed_in_step(number):
    """A kill in the step of that number, of those that are counted from 0."""
    from student.step import Stepper

    whole = Stepper.update

    def update(self, step, batch):
        if step == number:
            raise KeyboardInterrupt
        return whole(self, step, batch)

    return mock.patch.object(Stepper, "update", update)


def outcome(run):
    """What a finished run came to: of every step the hash of its batch and the loss; the final figures."""
    lines = [json.loads(line) for line in Path(run, "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    result = json.loads(Path(run, "result.json").read_text())
    return {
        "steps": [line["step"] for line in steps],
        "batches": [line["batch"] for line in steps],
        "losses": [line["loss"] for line in steps],
        "figures": {name: result[name] for name in ("parameters", "tokens", "held_out", "baseline")},
    }


def write_pairs(directory):
    """Two made-up pairs of every BLiMP paradigm."""
    from evaluation.tasks.blimp.data import PARADIGMS

    directory.mkdir()
    for number, name in enumerate(PARADIGMS):
        pairs = [(f"the store {word} {number}", f"{word} the {number} store") for word in ("reads", "is")]
        lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


# -- names -------------------------------------------------------------------------------------------------


def names(places):
    """Commands with the names of what they make, in a copy of the runs in which everything else is finished."""
    found = []
    for command in NAMES:
        shutil.copytree("runs", "kept")
        found.append({"command": shlex.join(command), "made": give_and_name(command, places)})
        shutil.rmtree("runs")
        Path("kept").rename("runs")
    return found


def give_and_name(command, places):
    """Give a command, a training up to its first step only.

    Returns  path of what is new (dictionaries, runs, stores, and stores with a new plan) to what must never change:
             target and plans of a store, settings and fingerprints of a run; of a dictionary the path itself
    """
    before = made()
    give(command, places, before_training() if command[0].startswith("train-") else None)
    return {path: facts for path, facts in made().items() if before.get(path) != facts}


def made():
    """Path to facts of all that there is under runs."""
    found = {str(path): "dictionary" for path in Path("runs/dictionaries").iterdir() if not path.name.startswith(".")}
    for path in Path("runs/stores").iterdir():
        plans = sorted(plan.stem for plan in (path / "plans").glob("*.json"))
        found[str(path)] = {"target": json.loads((path / "target.json").read_text())["target"], "plans": plans}
    for path in all_runs():
        config = json.loads(Path(path, "config.json").read_text())
        found[path] = {name: config[name] for name in ("settings", "store", "encoder")}
    return found


def before_training():
    """Ctrl-C before the first step."""
    from student.trainer import Trainer

    return mock.patch.object(Trainer, "run_to_end", side_effect=KeyboardInterrupt)


def demonstration(places):
    """What the two bare commands of the demonstration ask for.

    The bundled teacher takes minutes, so that the store under which the student is named is not its own but the tiny
    one, with what the demonstration's command keeps beside its plan.
    """
    import cli
    from pipeline.encode import select_settings
    from terminal.settings import parse

    encode, train = DEMONSTRATION
    settings = parse("encode-lsp", cli.VERBS["encode-lsp"], encode[1:]).settings
    kept = {"encode-lsp": select_settings(settings)}
    shutil.rmtree("runs/students")
    for path in Path("runs/stores").iterdir():
        if str(path) != places["lsp"]:
            shutil.rmtree(path)
    (plan,) = Path(places["lsp"], "plans").glob("*.yaml")
    plan.write_text(json.dumps(kept))
    return {"encode": shlex.join(encode), "train": shlex.join(train), "kept": kept, "made": give_and_name(train, {})}


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main(Path(sys.argv[1]).resolve())
