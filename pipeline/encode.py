"""Stage A: corpus, teacher, dictionary, solver and shards joined, one unit at a time.

    report, = encode_lsp(EncodeConfig(layer=(10,)))

Running it again continues: finished units are found by their records and left alone. What an interruption
costs is the unit that is being written and the few batches that were ahead of it. Reading and coding run in
stages ahead of the writing (coder.py says which beside which), over all units without a pause between two;
writing and progress stay in the caller's thread. A document at which teacher or solver fails is quarantined: its
windows keep their numbers but carry no LSPs, and its unit's record names it. Left out: the parts themselves, and
several processes.

Shapes: W windows, L window length, N coded tokens, d hidden width, K atoms.
"""

import logging
import time
import warnings
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline import plan as planning
from pipeline.coder import (
    UNIT_END,
    Block,
    EncodeError,
    IdsCoder,
    LspCoder,
    describe,
    hidden_rows,
    may_be_the_texts_fault,
)
from pipeline.config import LearnConfig
from pipeline.corpus import CorpusError, join_windows, open_sources, silent
from pipeline.corpus.documents import Selection
from pipeline.stages import Stages
from shards.manifest import StoreFiles, fingerprint, publish_directory
from shards.reader import Store
from shards.schema import FORMAT_VERSION, LSP_OCTAVES, ShardMeta, StoreError, windows_per_block
from shards.writer import UnitWriter

QUARANTINE_SHARE = 0.01  # of a plan's documents; when more fail, the fault is not the documents'
QUARANTINE_LEAST = 10  # documents that may fail in a plan however small
logger = logging.getLogger(__name__)


def encode_ids(config, progress=silent):
    """Write a store of token ids only. Returns a list of one report dict, as `encode_lsp`."""
    from pipeline.teacher import load_tokenizer

    job = Job(config, load_tokenizer(config.tokenizer), progress)
    settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
    target = job.target(settings, {"tokenizer_name": config.tokenizer}, k=0)
    return [job.run(f"ids-L{config.max_length}", target, IdsCoder())]


def encode_lsp(config, progress=silent):
    """Encode the corpus into one LSP store a layer, learning dictionaries where none is given.

    progress  called with (stage, done, total, unit=..., **figures)
    Returns   list of report dicts: store, finished_before, timing, the store's statistics
    Raises    CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    job = _teacher_job(config, progress)
    return [_encode_layer(job, _load_teacher(job, layer)) for layer in config.layer]


def learn_dictionary(config, progress=silent):
    """Learn, or find, the dictionary of every layer that the settings name, or that of the file config.hidden.

    Returns  list of report dicts: directory, finished_before, the figures of its atoms
    Raises   as encode_lsp, DictionaryError; ValueError on a file that cannot be used or changes meanwhile
    """
    if config.hidden is not None:
        return [_dictionary_of_file(config, progress)]
    job = _teacher_job(config, progress)
    return [_dictionary_of_layer(job, _load_teacher(job, layer)) for layer in config.layer]


def _teacher_job(config, progress):
    from pipeline.teacher import check_layers, load_tokenizer

    check_layers(config.teacher, config.layer)  # before the corpus is read
    return Job(config, load_tokenizer(config.teacher), progress)


def _load_teacher(job, layer):
    from pipeline.teacher import Teacher

    config = job.config
    teacher = Teacher.load(config.teacher, layer, dtype=config.dtype, device=config.device)
    teacher.check_tokenizer(job.tokenizer)
    if teacher.device.type == "cuda":
        _require_gpu_solver()
    if config.max_length > teacher.max_positions:
        raise EncodeError(
            f"--max-length {config.max_length}, but {teacher.name} reads at most {teacher.max_positions} tokens. "
            f"Use --max-length {teacher.max_positions} or less."
        )
    return teacher


def _require_gpu_solver():
    try:
        from pipeline.solvers import cd_cuda  # noqa: F401
    except ImportError as error:
        raise EncodeError(f"{error}. Or use --device cpu.") from error


class Job:
    """What every unit of one command shares: sources, tokenizer, plan, output."""

    def __init__(self, config, tokenizer, progress):
        from pipeline.teacher import special_ids, tokenizer_fingerprint

        self.config, self.tokenizer, self.progress = config, tokenizer, progress
        self._done, self._quarantined, self._records = 0, 0, []
        _refuse_foreign_output(config.output)
        self.special_ids = special_ids(tokenizer)
        self.rules = planning.windowing(tokenizer_fingerprint(tokenizer), config.max_length, config.packing)
        sources = open_sources(config, progress)
        self.sources = {source.name: source for source in sources}
        self._stamps = {source.name: source.stamp() for source in sources}
        self.plan = planning.scan(
            sources,
            tokenizer,
            self.special_ids,
            self.rules,
            unit_tokens=config.unit_tokens,
            max_tokens=config.max_tokens,
            selection=Selection.of(config),
            progress=progress,
        )
        self.check_sources()

    def check_sources(self):
        """Raise CorpusError if a source is no longer the file that was scanned."""
        for name in self.sources:
            self._check_unchanged(name)

    def _check_unchanged(self, name):
        if self.sources[name].stamp() != self._stamps[name]:
            raise CorpusError(f"{name} changed while it was read. Run the command again once nobody writes to it.")

    @property
    def expected_tokens(self):
        """About how many tokens the plan holds, for progress."""
        estimate = self.plan.corpus["bytes"] // planning.BYTES_PER_TOKEN
        return min(estimate, self.config.max_tokens or estimate)

    def target(self, settings, lineage, k):
        """The content of target.json."""
        return {
            "target": fingerprint(settings),
            "settings": settings,
            "lineage": lineage,
            "k": k,
            "vocab_size": max(self.tokenizer.get_vocab().values()) + 1,
            "max_length": self.config.max_length,
            "weight_octaves": LSP_OCTAVES,
            "special_ids": self.special_ids,
        }

    def windows(self, unit):
        """The windows of a planned unit."""
        return planning.unit_windows(unit, self.sources[unit.source], self.tokenizer, self.special_ids, self.rules)

    def run(self, name, target, coder, dictionary=None):
        """Encode every unit of the plan that the store lacks; returns the report."""
        started = time.perf_counter()
        files = StoreFiles(self._store_directory(name, target["target"]))
        files.create(target)
        if not files.tokenizer.is_dir():
            publish_directory(files.tokenizer, self.tokenizer.save_pretrained, replace=False)
        if dictionary is not None and not files.dictionary.is_dir():
            dictionary.save(files.dictionary)
        files.publish_plan(self.plan)
        if self.config.retry_quarantine:
            _withdraw_quarantined(files, self.plan)
        missing = set(files.missing_units(self.plan))
        finished = [files.record(unit.id) for unit in self.plan.units if unit not in missing]
        missing = [unit for unit in self.plan.units if unit in missing]
        self._done = sum(record.tokens for record in finished)
        self._quarantined = sum(len(record.quarantined) for record in finished)
        self._records = []
        write_units(
            missing,
            self.windows,
            coder,
            self.config.max_length,
            lambda unit: self._unit_writer(files, target, unit, coder.environment),
            self._show_progress,
        )
        return _report(files, self.plan, missing, self._records, time.perf_counter() - started)

    @contextmanager
    def _unit_writer(self, files, target, unit, environment):
        meta = ShardMeta(target["target"], unit.id, target["k"], target["vocab_size"], target["max_length"])
        with UnitWriter(files, meta, environment) as writer:
            yield writer
            self._check_unchanged(unit.source)
            self._check_quarantine(writer)
        self._records.append(writer.record)

    def _check_quarantine(self, writer):
        """Raise EncodeError when too many documents failed, this unit's included."""
        self._quarantined += len(writer.quarantined)
        allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * self.plan.corpus["documents"]))
        if self._quarantined > allowed:
            raise EncodeError(
                f"{self._quarantined} documents could not be coded, more than the {allowed} that may be in quarantine, "
                f"so the fault is hardly theirs. The last one: {writer.quarantined[-1]['reason']}"
            )

    def _show_progress(self, block, writer):
        self._done += block.tokens
        self.progress("encode", self._done, self.expected_tokens, **_figures(writer.statistics))

    def _store_directory(self, name, target):
        """Where the store of a target is, whatever teacher's name it was made under, or shall be."""
        return named_by_content(self.config.output / "stores", name, target)


def write_units(units, windows_of, coder, max_length, open_writer, after_block):
    """Read, code and write units in overlapping stages; the bytes do not depend on what overlaps.

    windows_of   function from a unit to its windows
    coder        LspCoder or IdsCoder
    open_writer  function from a unit to a context manager that gives its UnitWriter and commits at its end
    after_block  called with each Block and its UnitWriter once it is written
    Raises       what any of these raises, as it is; the units before it are committed
    """
    with Stages() as stages:
        items = _read_blocks(units, windows_of, max_length)
        for name, stage in coder.stages():
            items = stages.ahead(stage(items), coder.layout[name])
        for unit in units:
            with open_writer(unit) as writer:
                for block in _blocks_of_unit(items):
                    _note_failed(writer.quarantined, block, unit, writer.windows)
                    writer.write_block(**block.columns)
                    block.add_to(writer.statistics, writer.environment)
                    after_block(block, writer)


def _read_blocks(units, windows_of, max_length):
    """Blocks with the ids alone, and UNIT_END after those of each unit."""
    for unit in units:
        windows = windows_of(unit)
        while block := list(islice(windows, windows_per_block(max_length))):
            yield Block(join_windows(block))
        yield UNIT_END


def _blocks_of_unit(items):
    for item in items:
        if item is UNIT_END:
            return
        yield item
    raise AssertionError("the stages ended inside a unit")  # it must not be committed


def _note_failed(quarantined, block, unit, first_window):
    """Name the documents in the windows that failed, each once in a unit."""
    known = {entry["record"]: entry for entry in quarantined}
    begins = np.cumsum(block.columns["lengths"]) - block.columns["lengths"]
    windows = np.searchsorted(begins, block.columns["run_starts"], side="right") - 1
    for window, reason in sorted(block.failed.items()):
        for record in block.columns["run_records"][windows == window]:
            number = unit.start + int(record)
            if number not in known:
                known[number] = {"record": number, "source": unit.source, "windows": [], "reason": reason}
                quarantined.append(known[number])
            known[number]["windows"].append(first_window + window)


def _withdraw_quarantined(files, plan):
    missing = set(files.missing_units(plan))
    for unit in plan.units:
        if unit not in missing and files.record(unit.id).quarantined:
            files.withdraw(unit.id)


def named_by_content(parent, name, content):
    """`<parent>/<name>-<12 digits of content>`, or what has those digits already, under whatever name."""
    return next(iter(sorted(parent.glob(f"*-{content[:12]}"))), parent / f"{name}-{content[:12]}")


def _refuse_foreign_output(output):
    if Path(output).is_file():
        raise StoreError(f"--output {output} is a file. Give a directory, such as ./runs.")
    for mark, what in (("target.json", "a store"), ("config.json", "a training run")):
        if (Path(output) / mark).is_file():
            raise StoreError(
                f"--output {output} is {what} itself. Give the directory that shall contain stores, such as ./runs."
            )


def _figures(statistics):
    """The figures of merit beside the progress bar, from the sums of the unit in flight."""
    coded = statistics.get("coded_tokens")
    if not coded:
        return {}
    return {"nnz": statistics["entries"] / coded, "mass_kept": statistics["kept_mass"] / coded}


def _report(files, plan, missing, records, seconds):
    store = Store.open(files.path, plan.id)
    return {
        "store": str(files.path),
        "plan": plan.id,
        "finished_before": not missing,
        "new_units": len(missing),
        "new_tokens": sum(record.tokens for record in records),
        "seconds": seconds,
        "quarantined": sum(len(record.quarantined) for record in store.records()),
        **store.report(),
    }


# -- LSPs ------------------------------------------------------------------------------------------------


def _encode_layer(job, teacher):
    from pipeline.dictionary import Dictionary

    config = job.config
    source = config.dictionary or Path(_dictionary_of_layer(job, teacher)["dictionary"])
    dictionary = Dictionary.load(source)
    _check_dictionary(dictionary, teacher, source)
    settings = {
        "kind": "lsp",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "layer": teacher.layer,
        "dictionary": dictionary.fingerprint,
        "k": len(dictionary.atoms_Kd),
        "lam": config.lam,
        "top_n": config.top_n,
        "tolerance": config.tolerance,
        "dtype": str(teacher.dtype).removeprefix("torch."),
    }
    lineage = {
        "teacher_name": teacher.name,
        "teacher_layers": teacher.num_layers,
        "dictionary_settings": dictionary.settings,
    }
    coder = LspCoder(teacher, dictionary, config, job.special_ids)
    name = f"lsp-{Path(teacher.name).name}-l{teacher.layer}-k{len(dictionary.atoms_Kd)}"
    report = job.run(name, job.target(settings, lineage, k=len(dictionary.atoms_Kd)), coder, dictionary)
    _warn_of_empty_codes(report["empty_codes"], report["coded_tokens"], config.lam)
    return report | {
        "layer": teacher.layer,
        "dictionary": str(source),
        "top_n": config.top_n,
        "teacher": teacher.name,
    }


def _check_dictionary(dictionary, teacher, source):
    if dictionary.atoms_Kd.shape[1] != teacher.hidden_size:
        raise EncodeError(
            f"{source}: atoms of width {dictionary.atoms_Kd.shape[1]}, but {teacher.name} has hidden "
            f"states of width {teacher.hidden_size}. Learn one for this teacher: mlsm learn-dictionary"
        )


def _warn_of_empty_codes(empty, coded, lam):
    share = empty / max(1, empty + coded)
    if share > 0.5:
        warnings.warn(
            f"{share:.1%} of the tokens have an empty code at --lam {lam} and will carry no loss. "
            "Use a smaller one; 0.05 is usual.",
            stacklevel=2,
        )


# -- the dictionary's sample ------------------------------------------------------------------------------


def _dictionary_of_layer(job, teacher):
    """Report of the dictionary that these settings ask for; learned now if it is not there."""
    config = job.config
    request = {
        "teacher": teacher.fingerprint,
        "layer": teacher.layer,
        "plan": job.plan.id,
        "k": config.k,
        "lam": config.lam,
        "tokens": config.dictionary_tokens,
        "epochs": config.dictionary_epochs,
        "seed": config.seed,
    }
    name = f"{Path(teacher.name).name}-l{teacher.layer}-k{config.k}"
    directory = named_by_content(config.output / "dictionaries", name, fingerprint(request))
    if not directory.is_dir():
        _announce(directory)
    return _learn_once(directory, config, job.progress, lambda place: sample_hidden(job, teacher, place))


def _dictionary_of_file(config, progress):
    """Report of the dictionary of the vectors in a .npy file; no teacher and no corpus is loaded."""
    from pipeline.device import choose_device
    from pipeline.training_vectors import file_digest, file_stamp, open_vectors, refuse_unusable

    _refuse_foreign_output(config.output)
    if (config.teacher, config.corpus) != (LearnConfig.teacher, LearnConfig.corpus):
        logger.info("learning from %s: the settings of teacher, layer and corpus are not used", config.hidden)
    if choose_device(config.device).type == "cuda":
        _require_gpu_solver()
    stamp = file_stamp(config.hidden)

    def check_unchanged():
        if file_stamp(config.hidden) != stamp:
            raise ValueError(
                f"{config.hidden} changed while it was read. Run the command again once nobody writes to it."
            )

    hidden_Nd = open_vectors(config.hidden)
    refuse_unusable(hidden_Nd, config.hidden)
    request = {
        "content": file_digest(config.hidden),
        "k": config.k,
        "lam": config.lam,
        "epochs": config.dictionary_epochs,
        "seed": config.seed,
    }
    name = f"{config.hidden.stem}-k{config.k}"
    directory = named_by_content(config.output / "dictionaries", name, fingerprint(request))
    return _learn_once(directory, config, progress, lambda place: hidden_Nd, check_unchanged)


def _learn_once(directory, config, progress, make_vectors, check_vectors=silent):
    """Report of a dictionary: the one in `directory`, or else learned from make_vectors(working directory).

    check_vectors  raises when they are no longer what the name of the directory says
    """
    from pipeline import dictionary as learning
    from pipeline.learning_checkpoint import discard, workplace

    work = directory.with_name(f".{directory.name.rpartition('-')[2]}.learning")  # whatever the vectors' name
    finished_before = directory.is_dir()
    if finished_before:
        discard(work)
    else:
        with workplace(work) as place:
            finished_before = directory.is_dir()  # another process may have finished it before we had the place
            if not finished_before:
                _learn(config, make_vectors(place), place, progress, check_vectors).save(directory)
    return learning.Dictionary.load(directory).report() | {
        "dictionary": str(directory),
        "finished_before": finished_before,
    }


def _learn(config, hidden_Nd, place, progress, check_vectors):
    from pipeline.dictionary import learn_dictionary as learn
    from pipeline.learning_checkpoint import forget

    found = learn(
        hidden_Nd,
        config.k,
        config.lam,
        seed=config.seed,
        epochs=config.dictionary_epochs,
        device=config.device,
        checkpoint=place,
        progress=progress,
    )
    try:
        check_vectors()
    except ValueError:
        forget(place)  # learned in part from other vectors
        raise
    return found


def _announce(directory):
    """Say that a new dictionary means a new store, when others were learned for the same teacher, layer and k."""
    others = sorted(directory.parent.glob(directory.name.rpartition("-")[0] + "-*"))
    if others:
        logger.info(
            "learning a new dictionary for this corpus and these settings, hence a new store; "
            "--dictionary %s would add to the store of an earlier one",
            others[-1],
        )


def sample_hidden(job, teacher, directory):
    """Unit-length hidden states of a uniform sample of training windows, float16 (N, d), memory-mapped.

    They are written to sample.npy in `directory` batch by batch; the file appears when it is complete, and one
    that is there already is used.
    """
    path = directory / "sample.npy"
    if not path.is_file():
        config = job.config
        windows = planning.sample_windows(job.plan, job.windows, config.dictionary_tokens, config.seed)
        job.check_sources()
        special = job.special_ids["all"]
        count = min(config.dictionary_tokens, sum(int((~np.isin(window.ids, special)).sum()) for window in windows))
        if count <= config.k:
            raise EncodeError(
                f"--k {config.k} atoms need more training vectors than that, but the sample has "
                f"{count:,}. Use a smaller --k, more text or more --dictionary-tokens."
            )
        _write_sample(path, job, teacher, windows, count)
    return np.load(path, mmap_mode="r")


def _write_sample(path, job, teacher, windows, count):
    from pipeline.files import write_rows

    def blocks():
        batch, done = max(1, job.config.batch_tokens // job.config.max_length), 0
        for i in range(0, len(windows), batch):
            rows_nd = _usable_rows(job, teacher, windows[i : i + batch], batch)
            if not len(rows_nd):
                raise EncodeError(f"{teacher.name}, layer {teacher.layer}, fails at a whole batch; see the log")
            rows_nd = rows_nd[: count - done]
            done += len(rows_nd)
            yield rows_nd
            job.progress("sample", done, count)

    write_rows(path, (count, teacher.hidden_size), np.float16, blocks())


def _usable_rows(job, teacher, windows, batch):
    """Hidden states of the windows at which the teacher does not fail, found by halving."""
    try:
        return hidden_rows(teacher, windows, batch, job.config.max_length, job.special_ids)[0]
    except Exception as error:
        if not may_be_the_texts_fault(error):
            raise
        if len(windows) == 1:
            logger.warning("a window is left out of the dictionary's sample: %s", describe(error))
            return np.zeros((0, teacher.hidden_size), np.float32)
    half = len(windows) // 2
    return np.concatenate([_usable_rows(job, teacher, part, batch) for part in (windows[:half], windows[half:])])
