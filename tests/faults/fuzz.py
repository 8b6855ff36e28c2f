# ruff: noqa: E402
"""Spoil whole stores, runs, outputs, dictionaries, exports, teachers, recipes, records and servers, and use them, also
to write into them: the result is the unspoilt one's, or a typed error that names a file.

    python tests/faults/fuzz.py --seconds 600 --seed 0       # cases 0, 1, 2, ... until the time is over
    python tests/faults/fuzz.py --seed 0 --cases 60          # so many, whatever time they take
    python tests/faults/fuzz.py --seed 0 --case 17           # one again; --only 0,2 with some of its mutations

A case is a function of (seed, case): a subject, one to three mutations of it (mutations.py) or faults of its server,
and everything that reads such a subject, one after the other, in a process of its own. What must hold of each:

    damage      what is computed equals what the unspoilt subject gives, or a typed error names a file
    crafted     (right checksums) what is computed is well formed, or a typed error names a file; and what
                `verify --full` finds whole can be read
    always      within SECONDS and MEMORY; no signal; nothing outside the output changed, no secret of a file outside is
                in the output, nothing of the subject was executed; what only reads leaves the subject as it was

A finding is printed with its traceback, and with the fewest of its mutations that show it. The last line is JSON; exit
code 1 when there are findings.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import logging
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mlsm.common.errors import (
    ComparisonError,
    CorpusError,
    DictionaryError,
    EncodeError,
    InspectionError,
    ModelError,
    PlaceError,
    RecordError,
    RequestError,
    RunError,
    ScoringError,
    ShardError,
    StoreError,
    TeacherError,
    TrainingError,
    WriteError,
)

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), *(str(HERE.parents[1] / name) for name in (".", "faults", "shards"))]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import numpy as np
import torch
import transformers.models.bert.modeling_bert  # noqa: F401  (imported once, for all the children)
from http_store import HOSTILE, _bomb, serving
from mutations import CRAFTED, DAMAGE, SECRET, Scene
from safetensors.torch import load_file
from test_foreign_stores import named_store
from tiny_records import a_blimp_record, a_record
from tiny_store import SPECIAL, WORDS, write_store
from tiny_teacher import tiny_teacher
from yaml import safe_dump as as_yaml

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.commands.show_lsp import show as lsps_summary
from mlsm.commands.show_shards import show as view
from mlsm.commands.train_student import show as training_summary
from mlsm.commands.verify_shards import show as verification
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison import compare as comparison_report
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.inspection.lsps import show as lsps_show
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.stores import show_shards
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.suite import finetune
from mlsm.evaluation.tasks.finetuning.trials import load as suite_load
from mlsm.evaluation.tasks.scoring import models as masked_lms
from mlsm.evaluation.tasks.scoring.scorer import Scorer
from pipeline.commands import encode_ids, encode_logits
from pipeline.config import EncodeIdsConfig, EncodeLogitsConfig
from pipeline.dictionary import Dictionary
from pipeline.imported import ImportConfig, import_dictionary
from pipeline.teacher import load_tokenizer, read_config
from shards.clean import clean
from shards.config import ShowConfig
from shards.derive import derive
from shards.reader import Store, finished_stores
from shards.remote import Remote
from shards.verify import verify
from student.config import ProbeConfig, StudentConfig
from student.lsp_model import LspModel
from student.probe import train_probe
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.probed import with_student_and_store
from student.train import train

SECONDS = 20  # of one use; those of a server that drips take most
TICK = 0.5  # seconds
MEMORY = 400 << 20  # bytes that a case may need beside what the imports take
ADDRESSES = 4 << 30  # bytes of address space beside them: an array of absurd size is a MemoryError
TYPED = (
    StoreError,
    ShardError,
    PlaceError,
    CorpusError,
    EncodeError,
    RunError,
    DictionaryError,
    RecordError,
    ComparisonError,
    InspectionError,
    ModelError,
    ScoringError,
    TeacherError,
    TrainingError,
    WriteError,
)
LSPS = {"samples": 2000}
TRAINING = {
    "objective": "mlsm",
    "encoder": "bert-1x16",
    "max_steps": 4,
    "batch_windows": 12,
    "micro_batch": 12,
    "lr": 1e-3,
    "seed": 1,
    "eval_windows": 8,
    "save_every": 1,
    "eval_every": 0,
    "keep_last": 2,
    "checkpoints": (0.5, 1.0),
    "device": "cpu",
}


TRACKERS = ("tensorboard",) if find_spec("accelerate") and find_spec("tensorboard") else ()
TRACKED = TRAINING | {"track": TRACKERS}
SAID = ("the", "a", "bank", "river", "money", "of", "in", "runs", "to", "and", "flows", "loan", "water", "boat")


class Finding(AssertionError):
    """What should not be."""


class Place(NamedTuple):
    """Directories of a case.

    subject   what is spoilt;  output  what may be written;  healthy  an unspoilt store, its name beside the subject's
    pristine  the unspoilt subjects, for commands that write into a spoilt one
    """

    subject: Path
    output: Path
    healthy: Path
    pristine: Path


# -- uses ---------------------------------------------------------------------------------------------------


def read_store(place, store=None):
    """Every window and row, as digests; well formed."""
    store = store or Store.open(place.subject)
    digest = hashlib.sha256()
    for split in sorted({unit.split for unit in store.plan.units}):
        windows = store.split(split)
        batch = windows.read(np.arange(len(windows)))
        _check(batch.ids.shape == (len(windows), store.max_length), "windows of the wrong shape")
        _check(((batch.ids >= 0) & (batch.ids < store.vocab_size)).all(), "ids outside of the vocabulary")
        _check(((batch.lengths > 0) & (batch.lengths <= store.max_length)).all(), "lengths")
        for array in (batch.ids, batch.lengths, batch.documents, windows.document_keys(batch)):
            digest.update(np.ascontiguousarray(array))
        windows.order(0, 0, 0, len(windows))
        if store.k:
            window_M, position_M = np.nonzero(np.arange(store.max_length) < batch.lengths[:, None])
            rows = windows.targets(batch, window_M, position_M)
            _check(np.isfinite(rows.weights).all() and (rows.weights >= 0).all(), "weights")
            _check(((rows.indices >= 0) & (rows.indices < store.k)).all(), "atoms outside of k")
            for array in (rows.indptr, rows.indices, rows.weights, rows.tail):
                digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def read_sums(place):
    store = Store.open(place.subject)
    windows = store.split("train")
    sums = [windows.token_counts()] + ([windows.mean_distribution()] if store.k else [])
    _check(all(np.isfinite(array).all() for array in sums), "sums that are no numbers")
    return hashlib.sha256(b"".join(array.tobytes() for array in sums)).hexdigest()


def check_store(place):
    """verify; what it finds whole must be readable."""
    found = verify(place.subject, full=True)
    verification(found, argparse.Namespace(repair=False))
    verify(place.subject)
    whole = found["plans"] and not found["damaged"] and not found["missing"]
    if whole:
        try:
            read_store(place), Store.open(place.subject).report()
            if any(unit.split == "train" for unit in Store.open(place.subject).plan.units):
                read_sums(place)
        except TYPED as error:
            raise Finding(f"verify --full finds it whole, but: {type(error).__name__}: {error}") from error
    return None


def repair_store(place):
    copy = place.output / "repaired"
    shutil.copytree(place.subject, copy, symlinks=True, copy_function=_copy_anything)
    verify(copy, repair=True)
    again = verify(copy, full=True)
    _check(
        not [entry for entry in again["damaged"] if entry["unit"] and _is_gone(copy / entry["file"])],
        "damage that --repair leaves",
    )


def _is_gone(path):
    return not path.is_dir()


def _copy_anything(source, target):
    if os.path.isfile(source):
        shutil.copy2(source, target, follow_symlinks=False)
    else:
        os.mkfifo(target)  # also for sockets and devices


def derive_store(place):
    made = derive(place.subject, 2, output=place.output)
    return sorted((path.name, _digest(path)) for path in Path(made["store"]).glob("units/*.tar"))


def show_store(place):
    for asked in ({}, {"document": 0}, {"window": 1}, {"against": str(place.healthy)}):
        json.dumps(shown := show_shards(ShowConfig(store=str(place.subject), **asked)))
        view(shown, None)


def show_lsps(place):
    _show_lsps(ShowLspConfig(store=str(place.subject), **LSPS))
    _show_lsps(ShowLspConfig(store=str(place.subject), lsp=(3,), **LSPS))


def _show_lsps(settings):
    shown = lsps_show.show(settings, silent)
    json.dumps(shown)
    lsps_summary(shown, settings)


def find_newest(place):
    """One bad store hides no other."""
    _check(finished_stores(place.subject.parent)[0] in (place.healthy, place.subject), "the newest store")


def clean_store(place):
    clean(place.subject, dry_run=True)


def show_more(place):
    """Views that read the tokenizer, too."""
    _show_lsps(ShowLspConfig(store=str(place.subject), word="w3", **LSPS))
    _show_lsps(ShowLspConfig(store=str(place.subject), similar_to="0:1", **LSPS))
    _show_lsps(ShowLspConfig(store=str(place.subject), html=place.output / "pages", **LSPS))


def train_otherwise(place):
    """With other objectives, units of masking and temperatures than `train_on_store`."""
    ways = {
        "lsp": {"objective": "naive-mlsm", "mask_unit": "word", "target_temperature": 2.0},
        "ids": {"objective": "mlm", "mask_unit": "span", "documents_apart": True},
        "logits": {"objective": "kd", "mask_unit": "word"},
    }
    changes = TRAINING | ways[Store.open(place.subject).kind] | {"max_steps": 1}
    return _trained(StudentConfig(store=str(place.subject), run_dir=place.output / "otherwise", **changes))


def train_on_store(place):
    objective = {"lsp": "mlsm", "ids": "mlm", "logits": "kd"}[Store.open(place.subject).kind]
    settings = TRAINING | {"objective": objective, "max_steps": 2}
    return _trained(StudentConfig(store=str(place.subject), run_dir=place.output / "run", **settings))


def _trained(config):
    train(config)
    weights = load_file(config.run_dir / "export" / "model.safetensors")
    _check(all(torch.isfinite(tensor).all() for tensor in weights.values()), "weights that are no numbers")
    return hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()


def resume_run(place):
    return _trained(StudentConfig(store=str(place.healthy), run_dir=place.subject, **TRAINING))


def export_newest(place):
    output = place.output / "export"
    export_run(ExportConfig(run=place.subject, output=output, store=str(place.healthy)))
    load_file(output / "model.safetensors")


def export_resumable(place):
    export_run(ExportConfig(run=place.subject, step="3", output=place.output / "third", store=str(place.healthy)))
    load_file(place.output / "third" / "model.safetensors")


def describe_run(place):
    for path in [place.subject / "export", *sorted(place.subject.glob("checkpoints/*"))]:
        if (path / "config.json").is_file():  # one that is kept
            json.dumps(records.describe_model(path))


def finish_again(place):
    """What a command says of a run that is finished already; one whose summary is damaged is finished anew."""
    config = StudentConfig(store=str(place.healthy), run_dir=place.subject, **TRAINING)
    result = train(config)
    training_summary(result, config)
    return {name: result[name] for name in ("held_out", "baseline", "tokens", "steps")}


def probe_run(place):
    """A probe of the run, on the store that its config.json names, which is none on this machine."""
    with_student_and_store(ProbeConfig(student=str(place.subject)))


def load_dictionary(place):
    atoms = Dictionary.load(place.subject).atoms_Kd
    return atoms.shape, hashlib.sha256(np.ascontiguousarray(atoms)).hexdigest()


def show_dictionary(place):
    _show_lsps(ShowLspConfig(store=str(place.subject)))
    _show_lsps(ShowLspConfig(store=str(place.subject), lsp=(0,)))


def use_export(place):
    [found] = LspModel.from_pretrained(place.subject).lsp(["w1 w2 w3"])
    _check(len(found.tokens) == len(found.distributions_Tk), "tokens without a distribution")


def show_export(place):
    _show_lsps(ShowLspConfig(store=str(place.subject)))
    _show_lsps(ShowLspConfig(store=str(place.subject), text="w1 w2"))


def describe_export(place):
    json.dumps(records.describe_model(place.subject))


def continue_from_export(place):
    config = StudentConfig(
        store=str(place.healthy),
        run_dir=place.output / "run",
        continue_from=place.subject,
        **TRAINING | {"max_steps": 1},
    )
    train(config)


def finetune_export(place):
    settings = {"seeds": 1, "max_steps": 1, "limit_train": 8, "batch": 4, "tasks": ("rte", "conll2003"), "smoke": True}
    finetune(FinetuneConfig(models=(str(place.subject),), output=place.output / "finetuned", device="cpu", **settings))


def load_to_finetune(place):
    suite_load(place.subject)


def probe_export(place):
    steps = {name: TRAINING[name] for name in ("batch_windows", "micro_batch", "eval_windows", "device")}
    student = {"student": str(place.subject), "store": str(place.healthy)}
    for probe_input in ("softmax", "logits"):
        output = place.output / f"probe-{probe_input}"
        train_probe(ProbeConfig(**student, **steps, probe_input=probe_input, max_steps=1, lr=0.1, run_dir=output))


def score_sentences(place):
    model, tokenizer = masked_lms.load(place.subject, torch.device("cpu"))
    for metric in ("original", "within-word-l2r"):
        [scores] = Scorer(model, tokenizer, metric).score(["w1 w2 w3"])
        _check(len(scores) == 3, "not a score for every token")


def compare_records(place):
    settings = CompareConfig(results=(place.subject,), output=place.output / "comparison")
    json.dumps(comparison_report.compare(settings, silent).as_report())


def _remote(place):
    return Remote(cache=place.output / "cache", attempts=2, delay=0.01, timeout=0.3)


WEB = []  # the running server of this process


def read_remote(place):
    return read_store(place, Store.open(WEB[0], remote=_remote(place)))


def verify_remote(place):
    from shards import remote

    made, remote.Remote = remote.Remote, lambda **cache: replace(_remote(place), **cache)
    try:
        verify(WEB[0], full=True)
    finally:
        remote.Remote = made


def show_remote(place):
    store = Store.open(WEB[0], remote=_remote(place))
    store.report()
    store.read_tokenizer()
    _ = store.files.dictionary, store.command


def clean_copy(place):
    """Of a store, a run or an output: all left-overs, and nothing outside."""
    copy = place.output / "cleaned"
    shutil.copytree(place.subject, copy, symlinks=True, copy_function=_copy_anything)
    clean(copy, everything=True)


def _encoding(place, output):
    return {"corpus": (str(place.pristine / "text.txt"),), "max_length": 32, "unit_tokens": 2000, "output": output}


def encode_into(place):
    """Token ids into an output directory that holds them already."""
    [made] = encode_ids(EncodeIdsConfig(tokenizer=str(place.pristine / "teacher"), **_encoding(place, place.subject)))
    return read_store(place, Store.open(made["store"]))


def import_into(place):
    settings = {"file": place.pristine / "atoms.npy", "orientation": "rows", "output": place.subject}
    return Dictionary.load(import_dictionary(ImportConfig(**settings))["dictionary"]).fingerprint


def derive_into(place):
    return read_store(place, Store.open(derive(place.pristine / "store", 2, output=place.subject)["store"]))


def export_into(place):
    output = place.subject / "export"
    export_run(ExportConfig(run=place.pristine / "finished", output=output, store=str(place.healthy)))
    load_file(output / "model.safetensors")


def compare_into(place):
    settings = CompareConfig(results=(place.pristine / "records",), output=place.subject / "comparison")
    json.dumps(comparison_report.compare(settings, silent).as_report())


def show_into(place):
    _show_lsps(ShowLspConfig(store=str(place.healthy), html=place.subject / "pages", **LSPS))


def train_into(place):
    return _trained(StudentConfig(store=str(place.healthy), run_dir=place.subject / "run", **TRACKED))


def clean_output(place):
    clean(place.subject, everything=True)


def track_run(place):
    return _trained(StudentConfig(store=str(place.healthy), run_dir=place.subject, **TRACKED))


def encode_with(place):
    """A teacher's logits; the teacher is what is spoilt."""
    settings = {"teacher": str(place.subject), "top_n": 8, "dtype": "float32", "device": "cpu"}
    [made] = encode_logits(EncodeLogitsConfig(**settings, **_encoding(place, place.output / "encoded")))
    read_store(place, Store.open(made["store"]))


def read_teacher(place):
    read_config(place.subject, place.subject)
    load_tokenizer(place.subject)


def parse_recipe(place):
    """Mistakes of a recipe are plain ValueErrors, as those of flags are."""
    try:
        for verb in ("train-student", "encode-lsp", "learn-dictionary"):
            parse(load(verb), [], str(place.subject / "recipe.yaml"))
    except ValueError as error:
        _check(type(error) is ValueError, f"{type(error).__name__}: {error}")
        raise RequestError(f"recipe.yaml: {error}") from None


def show_vectors(place):
    settings = {"store": str(place.pristine / "dictionary"), "vectors": place.subject / "v.npy"}
    _show_lsps(ShowLspConfig(**settings, html=place.output / "pictures"))


READING = (
    read_store,
    read_sums,
    check_store,
    repair_store,
    derive_store,
    show_store,
    find_newest,
    clean_store,
    clean_copy,
)


WRITING, DRAWING = (encode_into, import_into, derive_into, export_into), (compare_into, show_into, train_into)


class Subject(NamedTuple):
    """A kind of thing that is spoilt.

    name      below the stores' directory
    always    its uses;  sometimes: those that take longer, each in one of four cases
    changes   uses that may write into the subject
    sealed    whether damage must be found: what has no checksum, as an export, can only be well formed
    """

    name: str
    always: tuple
    sometimes: tuple = ()
    changes: tuple = ()
    sealed: bool = True
    share: int = 1


SUBJECTS = {
    "store": Subject("store", READING, (show_lsps, show_more, train_on_store, train_otherwise), share=8),
    "ids store": Subject("ids", READING, (train_on_store, train_otherwise), share=2),
    "logits store": Subject("logits", READING, (train_on_store, train_otherwise), share=2),
    "run": Subject(
        "run", (describe_run, export_newest, export_resumable, clean_copy, resume_run), changes=(resume_run,), share=3
    ),
    "tracked run": Subject("run", (track_run,), changes=(track_run,)),
    "output": Subject("output", (*WRITING, clean_output), DRAWING, (*WRITING, *DRAWING, clean_output), share=4),
    "teacher": Subject("teacher", (read_teacher,), (encode_with,), sealed=False, share=2),
    "recipe": Subject("recipe", (parse_recipe,), sealed=False),
    "vectors": Subject("vectors", (show_vectors,), sealed=False),
    "finished run": Subject("finished", (describe_run, probe_run, finish_again), changes=(finish_again,)),
    "dictionary": Subject("dictionary", (load_dictionary, show_dictionary)),
    "export": Subject(
        "export",
        (describe_export, use_export, load_to_finetune),
        (show_export, continue_from_export, finetune_export, probe_export),
        sealed=False,
        share=3,
    ),
    "probe": Subject("probe", (describe_export, use_export, score_sentences), sealed=False),
    "masked LM": Subject("mlm", (describe_export, score_sentences), (finetune_export,), sealed=False),
    "records": Subject("records", (compare_records,), sealed=False, share=2),
    "server": Subject("served", (read_remote, verify_remote, show_remote), share=2),
}
FAULTS = ("500", "403", "drop", "wrong", "short", "truncate", "stall", "shifted", "too much", "other", *HOSTILE)
WHERE = (r"target\.json", r"plans/\w+\.json", r"units/.*\.json", r"\.tar", r"plans/$", r"tokenizer", r"dictionary", ".")


# -- a case -------------------------------------------------------------------------------------------------


def describe_case(seed, case):
    """The dice of a case, the name of its subject, and how many mutations it has."""
    dice = random.Random(f"{seed}/{case}")
    kind = dice.choice([name for name, subject in SUBJECTS.items() for _ in range(subject.share)])
    return dice, kind, dice.choice([1, 1, 1, 2, 3])


class Fuzzer:
    """Cases of one seed in a directory, which holds the pristine subjects, the canary and the current case."""

    def __init__(self, directory, seed):
        self.directory, self.seed = Path(directory), seed
        self.pristine, self.other = self.directory / "pristine", self.directory / "other"
        self.canary, self.work = self.directory / "canary", self.directory / "work"
        self.expected = {}
        self.counts, self.findings = collections.Counter(), []

    def prepare(self):
        """The pristine subjects, and what they give."""
        _must(_forked(lambda: [make_subjects(self.pristine, 0), make_subjects(self.other, 1)], 300))
        self._make_canary()
        self.seen = snapshot(self.canary, self.pristine)
        _bomb()
        for kind in SUBJECTS:
            found = _must(_forked(lambda kind=kind: self._use(kind, [], []), 300))
            bad = {name: outcome for name, outcome in found["uses"].items() if outcome["outcome"] == "finding"}
            assert not bad, (kind, bad)
            refused = {name: use["error"] for name, use in found["uses"].items() if use["outcome"] == "refused"}
            assert not refused.keys() - {"derive_store"}, (kind, refused)  # of token ids there is nothing to derive
            self.expected[kind] = {name: outcome.get("result") for name, outcome in found["uses"].items()}
            if os.environ.get("FUZZ_TIMES"):
                print(kind, found["memory"] >> 20, {name: use["seconds"] for name, use in found["uses"].items()})

    def _make_canary(self):
        self.canary.mkdir()
        (self.canary / "secret.json").write_text(json.dumps({"secret": SECRET}))
        (self.canary / "notes.txt").write_text(SECRET)
        (self.canary / "plain.txt").write_text("no secret, since a second name of a file cannot be told from a file\n")

    def run(self, case, only=None, verbose=False):
        """One case. Returns its finding, a dict; None where all held."""
        dice, kind, count = describe_case(self.seed, case)
        chosen = [number for number in range(count) if only is None or number in only]
        report = _forked(lambda: self._use(kind, chosen, [case]), 120)
        problems = self._problems(kind, report)
        for outcome in report.get("uses", {}).values():
            self.counts[outcome["outcome"]] += 1
        if verbose:
            print(json.dumps(report, indent=1))
        if not problems:
            return None
        said = report.get("mutations")
        return {"case": case, "subject": kind, "only": chosen, "mutations": said, "problems": problems}

    def fewest(self, finding):
        """The same finding with as few of its mutations as show it."""
        for number in finding["only"] if len(finding["only"]) > 1 else ():
            if smaller := self.run(finding["case"], only=[number]):
                return smaller
        return finding

    def _problems(self, kind, report):
        found = []
        if "uses" not in report:
            found.append(report["ended"])
        for name, use in report.get("uses", {}).items():
            if use["outcome"] == "finding":
                found.append(f"{name}: {use['what']}")
            same = use.get("result") in (None, self.expected.get(kind, {}).get(name))
            if use["outcome"] == "done" and report["damage"] and SUBJECTS[kind].sealed and not same and self.expected:
                found.append(f"{name}: damage changed the result silently")
        if report.get("memory", 0) > MEMORY:
            found.append(f"{report['memory'] >> 20} MB more than before")
        if (now := snapshot(self.canary, self.pristine)) != self.seen:
            found.append(f"changed outside: {sorted(set(now.items()) ^ set(self.seen.items()))[:4]}")
            shutil.rmtree(self.canary)
            self._make_canary()
            self.seen = snapshot(self.canary, self.pristine)
        return found

    def _use(self, kind, chosen, case):
        """In a process of its own: spoil a copy of the subject and use it."""
        subject = SUBJECTS[kind]
        if self.work.exists():
            shutil.rmtree(self.work)
        stores, output = self.work / "stores", self.work / "output"
        output.mkdir(parents=True)
        for name in {subject.name, "healthy"}:
            shutil.copytree(self.pristine / name, stores / name, symlinks=True)
        place = Place(stores / subject.name, output, stores / "healthy", self.pristine)
        os.chdir(self.work)
        os.environ |= {"MLSM_CACHE": str(output / "cache"), "TMPDIR": str(output)}
        tempfile.tempdir = None
        dice = random.Random(f"{self.seed}/{case}/uses")
        said, faults, damage = [], [], True
        for number in chosen:
            if kind == "server" and random.Random(f"{self.seed}/{case}/{number}/web").random() < 0.75:
                faults.append(_choose_fault(random.Random(f"{self.seed}/{case}/{number}/fault")))
                said.append(f"the server: {faults[-1][1]} for {faults[-1][0]}{', lasting' * faults[-1][2]}")
                continue
            mutation = random.Random(f"{self.seed}/{case}/{number}")
            what, is_damage = self._spoil(mutation, place.subject, subject.name, is_first=not said)
            damage &= is_damage
            said.append(what)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _limit_addresses()
        uses = [*subject.always, *(use for use in subject.sometimes if not chosen or dice.random() < 0.25)]
        if kind == "server":
            outcomes = self._use_served(uses, place, faults, chosen)
        else:
            outcomes = {use.__name__: self._one(use, place, use in subject.changes) for use in uses}
        memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        written = [*_files(output), *(_files(place.subject) if subject.changes else ())]
        leaked = [path for path in written if SECRET.encode() in path.read_bytes()[: 1 << 20]]
        if leaked and kind != "server":  # whose own server follows links
            outcomes["output"] = {"outcome": "finding", "what": f"a secret in {leaked[:3]}"}
        return {"uses": outcomes, "mutations": said, "damage": damage, "memory": memory}

    def _spoil(self, dice, root, name, is_first):
        """Apply a mutation that finds something to spoil. Returns what it did, and whether it is plain damage.

        is_first  no mutation came before it, so that it finds what it expects
        """
        scene = Scene(root, self.other / name, self.canary)
        while True:
            is_damage = dice.random() < 0.45
            spoil = dice.choice(DAMAGE if is_damage else CRAFTED)
            try:
                what = spoil(dice, scene)
            except Exception as error:
                if is_first:
                    raise
                what = f"not done, since something was spoilt before ({type(error).__name__})"
            if what is not None:
                return f"{spoil.__name__}: {what}", is_damage

    def _use_served(self, uses, place, faults, chosen):
        with serving(place.subject.parent) as web:
            web.other = self.other  # whose files the fault "other" sends, under another ETag
            WEB[:] = [f"{web.url}/{place.subject.name}"]
            outcomes = {}
            for use in uses:
                web.faults[:] = faults
                outcomes[use.__name__] = self._one(use, place, False)
            web.faults.clear()
            for _ in range(4):  # an error may say that a record was removed, and to try again
                outcomes["afterwards"] = after = self._one(read_remote, place, False)
                if "That record is removed" not in after.get("error", ""):
                    break
            if len(faults) == len(chosen) and after["outcome"] == "refused":  # the store itself is whole
                after |= {"outcome": "finding", "what": f"a fault that is over is still felt: {after['error']}"}
        return outcomes

    def _one(self, use, place, may_change):
        """What came of one use: done with a result, refused with a typed error, or a finding."""
        before, began = None if may_change else snapshot(place.subject, place.healthy), time.monotonic()
        try:
            with _within(SECONDS * max(1, os.getloadavg()[0] / os.cpu_count())), _quiet():  # others may be busy here
                outcome = {"outcome": "done", "result": json.loads(json.dumps(use(place)))}
        except TYPED as error:
            outcome = {"outcome": "refused", "error": f"{type(error).__name__}: {error}"[:2000]}
            if len(str(error)) > 5000:
                what = f"an error of {len(str(error)):,} characters: {str(error)[:300]}"
                outcome = {"outcome": "finding", "what": what}
            elif not isinstance(error, TrainingError | ComparisonError) and not _names_a_file(str(error), place):
                outcome = {"outcome": "finding", "what": f"names no file: {type(error).__name__}: {error}"}
        except BaseException as error:
            trace = "".join(traceback.format_exception(error, limit=-12))[-3500:]
            outcome = {"outcome": "finding", "what": f"{type(error).__name__}: {str(error)[:300]}", "trace": trace}
        if before is not None and (after := snapshot(place.subject, place.healthy)) != before:
            changed = sorted(map(str, set(after.items()) ^ set(before.items())))[:4]
            outcome = {"outcome": "finding", "what": f"a reader changed what it reads: {changed}"}
        return outcome | {"seconds": round(time.monotonic() - began, 3)}


def _choose_fault(dice):
    fault = dice.choice(FAULTS[: -len(HOSTILE)] * 3 + HOSTILE)
    return dice.choice(WHERE), fault, dice.random() < 0.4


def _check(holds, what):
    if not holds:
        raise Finding(what)


def _names_a_file(text, place):
    names = {path.name for path in place.subject.rglob("*")}
    return any(known in text for known in (*map(str, place), "http://", *names))


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _files(directory):
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def snapshot(*directories):
    """What lies in some directories: kind, size, time and, of files up to a megabyte, the content."""
    found = {}
    for directory in directories:
        for path in [directory, *directory.rglob("*")]:
            status = path.lstat()
            is_file = path.is_file() and not path.is_symlink() and status.st_size < 1 << 20
            when = None if path.is_dir() else status.st_mtime_ns
            size = None if path.is_dir() else status.st_size
            found[str(path)] = status.st_mode, size, when, is_file and _digest(path)
    return found


@contextlib.contextmanager
def _within(seconds):
    """Limit the time of what is done inside, less that in which somebody has stopped this process: then ticks of the
    timer become one."""
    ticks, computed = [0], time.process_time()

    def stop(*_):
        ticks[0] += 1
        if max(ticks[0] * TICK, time.process_time() - computed) >= seconds:
            raise Finding(f"still at work after {seconds:.0f} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _quiet():
    with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        yield


def _limit_addresses():
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ADDRESSES,) * 2)


def _forked(work, seconds):
    """The JSON that work() returns in a child process; {"ended": how} when it does not return."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            answer = work()
        except BaseException:
            answer = {"ended": traceback.format_exc()}
        with open(writing, "wb") as pipe:
            pipe.write(json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    raw, waited, before = b"", 0.0, time.monotonic()
    with open(reading, "rb", buffering=0) as pipe:
        os.set_blocking(reading, False)
        while waited < seconds:
            part, now = pipe.read(1 << 16), time.monotonic()
            waited, before = waited + min(TICK, now - before), now  # a longer look: this process was stopped, too
            if part == b"":
                break
            raw += part or b""
            if part is None:
                time.sleep(0.002)
        else:
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return json.loads(raw) if raw else {"ended": f"the process ended with {code}; after {seconds} s it is killed"}


def _must(report):
    assert report is None or "ended" not in report, report["ended"]
    return report


# -- the subjects -------------------------------------------------------------------------------------------


def make_subjects(directory, number):
    """Pristine subjects; `number` decides their content."""
    directory.mkdir()
    store = named_store(directory / "store", scale=1.0 + number)
    write_store(directory / "ids", k=0, train_windows=90 + number)
    write_store(directory / "logits", k=WORDS + len(SPECIAL) + 3, kind="logits", train_windows=90 + number)
    for name in ("healthy", "served"):
        shutil.copytree(store.path, directory / name)
    os.utime(directory / "healthy" / "target.json")
    shutil.copytree(store.path / "dictionary", directory / "dictionary")
    config = StudentConfig(store=str(store.path), run_dir=directory / "whole", **TRAINING | {"seed": 1 + number})
    train(config)
    shutil.copytree(config.run_dir / "export", directory / "export")
    of_ids = StudentConfig(
        store=str(directory / "ids"),
        run_dir=directory / "of-ids",
        **TRAINING | {"objective": "mlm", "seed": 1 + number},
    )
    train(of_ids)
    shutil.move(of_ids.run_dir / "export", directory / "mlm")
    names = ("max_steps", "batch_windows", "micro_batch", "eval_windows", "device")
    of_export = ProbeConfig(
        student=str(directory / "export"),
        store=str(store.path),
        run_dir=directory / "of-export",
        lr=0.1,
        **{name: TRAINING[name] for name in names},
    )
    train_probe(of_export)
    shutil.move(of_export.run_dir / "export", directory / "probe")
    shutil.move(config.run_dir, directory / "finished")
    begun = replace(config, run_dir=directory / "run")

    def stop(*_, step, **__):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with contextlib.suppress(KeyboardInterrupt):
        train(begun, stop)
    make_records(directory / "records", directory / "export", number)
    make_material(directory, number)
    output = directory / "output"
    output.mkdir()
    for write in (*WRITING, compare_into, show_into):
        write(Place(output, output, directory / "healthy", directory))


def make_material(directory, number):
    """A text, a teacher, atoms, a recipe, and vectors of images with their pictures."""
    words = random.Random(number)
    text = ["".join(f"{words.choice(SAID)} " for _ in range(words.randrange(5, 60))) for _ in range(150)]
    (directory / "text.txt").write_text("\n\n".join(text) + "\n")
    shutil.move(tiny_teacher(directory, directory / "text.txt", vocab_size=120, seed=number), directory / "teacher")
    numbers = np.random.default_rng(number)
    atoms_Kd = np.load(directory / "dictionary" / "atoms.npy")
    np.save(directory / "atoms.npy", np.roll(atoms_Kd, number, axis=1))
    sections = {"train-student": {"max-steps": 7 + number, "lr": 1e-3}, "encode-lsp": {"layer": 4}}
    (directory / "recipe").mkdir()
    (directory / "recipe" / "recipe.yaml").write_text(as_yaml(sections))
    (directory / "vectors" / "pictures").mkdir(parents=True)
    np.save(directory / "vectors" / "v.npy", numbers.normal(size=(24, atoms_Kd.shape[1])).astype(np.float32))
    index = {"grid": [2, 2], "images": [f"{name}.png" for name in range(6)]}
    (directory / "vectors" / "v.images.json").write_text(json.dumps(index))
    for name in range(6):
        (directory / "vectors" / "pictures" / f"{name}.jpg").write_bytes(numbers.bytes(50))


def make_records(directory, export, number):
    known = records.describe_model(export)
    for seed in range(2):
        for name, facts in {"ours": known | {"path": "export"}, "theirs": {}}.items():
            for task, values in {"rte": [0.5], "mrpc": [0.6, 0.7]}.items():
                values = [value + 0.01 * seed + 0.02 * number for value in values]
                records.write(directory, a_record(name, task, seed, values) | facts | {"model": name})
    accuracies = {"adjunct_island": 0.7, "anaphor_gender_agreement": 0.8}
    records.write(directory, a_blimp_record("ours", accuracies) | known | {"path": "export", "model": "ours"})
    for path in directory.rglob("*.json"):  # shorter names
        path.rename(directory / f"{path.parent.parent.name[:6]}-{path.name}")


# -- the command --------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, help="start no case after so many (600 unless --cases is given)")
    parser.add_argument("--cases", type=int, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="this one alone")
    parser.add_argument("--only", help="with --case: numbers of its mutations, 0,2")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        fuzzer = Fuzzer(directory, given.seed)
        fuzzer.prepare()
        if given.case is not None:
            only = None if given.only is None else [int(number) for number in given.only.split(",")]
            finding = fuzzer.run(given.case, only, verbose=True)
            print(json.dumps(finding, indent=1))
            sys.exit(finding is not None)
        outcome = fuzz(fuzzer, given.first, given.cases, given.seconds or (1e9 if given.cases else 600))
    print(json.dumps(outcome))
    sys.exit(bool(outcome["findings"]))


def fuzz(fuzzer, first, cases, seconds):
    """Run cases; prints what they find. Returns counts."""
    case, began = first, time.monotonic()
    while time.monotonic() < began + seconds and (cases is None or case < first + cases):
        if finding := fuzzer.run(case):
            finding = fuzzer.fewest(finding)
            fuzzer.findings.append(finding)
            again = f"--seed {fuzzer.seed} --case {case} --only {','.join(map(str, finding['only']))}"
            print(f"FINDING  {again}  {finding['subject']}")
            for line in [*(finding["mutations"] or []), *finding["problems"]]:
                print(f"    {line}", flush=True)
        case += 1
    spent = time.monotonic() - began
    return {
        "seed": fuzzer.seed,
        "first": first,
        "cases": case - first,
        "seconds": round(spent),
        "cases a minute": round(60 * (case - first) / max(spent, 1e-9)),
        "uses": dict(fuzzer.counts),
        "findings": len(fuzzer.findings),
    }


if __name__ == "__main__":
    main()
