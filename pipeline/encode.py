"""Stage A: corpus, teacher, dictionaries, solver and shards joined, one unit at a time.

    report, = encode_lsp(EncodeConfig(layer=(10,)))

Running it again continues: finished units are found by their records and left alone. What an interruption
costs is the unit that is being written and the few batches that were ahead of it. Reading and coding run in
stages ahead of the writing (coder.py says which beside which), over all units without a pause between two;
writing and progress stay in the caller's thread. Several layers, or several k, share one pass of the teacher and go
to one store each. A document whose coding fails is quarantined: its windows keep their numbers but carry no
entries, and its unit's record names it. Left out: the parts themselves, and the processes that may share the units
(distributed.py).
"""

import logging
import os
import time
import warnings
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from common.durable import publish_directory, replace_json
from common.errors import EncodeError, ShardError, StoreError
from common.paths import utf8_name
from common.progress import silent
from pipeline.coder import UNIT_END, Block, IdsCoder, LspCoder, Output, Reading
from pipeline.config import HOW, plain, with_absolute_paths
from pipeline.corpus import join_windows
from pipeline.estimate import estimate, estimate_lsp, likely_bytes, warn_of_disk
from pipeline.job import (
    Job,
    check_same_teacher,
    check_teacher,
    helped,
    load_teacher,
    named_by_content,
    teacher_job,
)
from pipeline.learn import dictionaries, load_dictionary
from pipeline.stages import Stages
from shards import copies
from shards.manifest import StoreFiles, differing, fingerprint
from shards.reader import Store
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES, ShardMeta, windows_per_block
from shards.writer import UnitWriter

logger = logging.getLogger(__name__)
QUARANTINE_SHARE = 0.01  # of a plan's documents; when more fail, the fault is not the documents'
QUARANTINE_LEAST = 10  # documents that may fail in a plan however small


def encode_ids(config, progress=silent):
    """Write a store of token ids only. Returns a list of one report dict, as `encode_lsp`."""
    from pipeline.teacher import load_tokenizer

    job = Job(config, load_tokenizer(config.tokenizer), progress)
    settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
    target = job.target(settings, {"tokenizer_name": config.tokenizer}, k=0)
    if config.dry_run:
        return [estimate(job, IdsCoder(), [target], write_units)]
    store = StoreInWork(job, f"ids-L{config.max_length}", target, {"encode-ids": _kept(config)})
    with helped(job):
        return run(job, [store], ids_coder)


def ids_coder(job, stores):
    """What codes for an ids store."""
    return IdsCoder()


def encode_logits(config, progress=silent):
    """Write a store of the teacher's vocabulary distributions. Returns a list of one report dict, as `encode_lsp`.

    Raises  CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    from pipeline.logits import MaskedLm
    from pipeline.teacher import check_documents_apart, load_tokenizer

    if config.documents_apart:
        check_documents_apart(config.teacher)
    teacher = MaskedLm.load(config.teacher, dtype=config.dtype, device=config.device)
    job = Job(config, load_tokenizer(config.teacher), progress)
    check_teacher(job, teacher)
    job.teacher = teacher
    if config.dry_run:
        target = job.target({"top_n": config.top_n}, {}, teacher.vocabulary, LOGITS_OCTAVES)
        return [estimate(job, logits_coder(job, []), [target], write_units)]
    _point_to_other_dtypes(job, teacher, "logits")
    with helped(job):
        return run(job, [_logits_store(job, teacher)], logits_coder)


def logits_coder(job, stores):
    """What codes for a logits store, in any process. Raises as `lsp_coder`."""
    from pipeline.logits import LogitsCoder, MaskedLm

    if job.teacher is None:
        job.teacher = MaskedLm.load(job.config.teacher, dtype=job.config.dtype, device=job.config.device)
    _check_teacher_of(stores, job.teacher)
    for store in stores:
        _check_settings(store, _logits_settings(job, job.teacher))
    return LogitsCoder(job.teacher, [Output(job.teacher.layer, None)], job.config, job.special_ids)


def _check_teacher_of(stores, teacher):
    for store in stores:
        check_same_teacher(teacher, store.target["settings"]["teacher"], store.target["settings"]["dtype"])


def _check_settings(store, settings):
    """Raise EncodeError when a store was made with other settings than those that it would be added to with."""
    found = store.target["settings"]
    if fingerprint(settings) != fingerprint(found):
        raise EncodeError(
            f"{store.files.path} was made with other settings than those of this command: {differing(found, settings)}."
            " Give the settings of the store, or another --output."
        )


def _logits_settings(job, teacher):
    """What names a store of logits."""
    from pipeline.logits import entries_kept

    return {
        "kind": "logits",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "k": teacher.vocabulary,
        "top_n": entries_kept(job.config.top_n, teacher),
        "octaves": LOGITS_OCTAVES,
        "dtype": _dtype_name(teacher),
    } | Reading.of(job.config, teacher).settings()


def _logits_store(job, teacher):
    lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
    target = job.target(_logits_settings(job, teacher), lineage, teacher.vocabulary, LOGITS_OCTAVES)
    return StoreInWork(job, f"logits-{Path(teacher.name).name}", target, {"encode-logits": _kept(job.config)})


def encode_lsp(config, progress=silent):
    """Encode the corpus into one LSP store for every layer and k, learning dictionaries where none is given.

    progress  called with (stage, done, total, unit=..., **figures)
    Returns   list of report dicts, layer by layer: store, finished_before, timing, the store's statistics
    Raises    CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    job = teacher_job(config, progress)
    teacher = load_teacher(job)
    if config.dry_run:
        return [estimate_lsp(job, teacher, write_units)]
    _point_to_other_dtypes(job, teacher, "lsp")
    stores, facts = [], []
    with helped(job):
        for layer, source in _dictionaries(job, teacher):
            stores.append(_lsp_store(job, teacher, Output(layer, load_dictionary(config, source, teacher))))
            facts.append({"layer": layer, "dictionary": source, "top_n": config.top_n, "teacher": teacher.name})
        reports = run(job, stores, lsp_coder)
    for report in reports:
        _warn_of_empty_codes(report, config.lam)
    return [report | fact for report, fact in zip(reports, facts, strict=True)]


def lsp_coder(job, stores):
    """What codes for LSP stores, in any process: the teacher of the settings, the stores' own dictionaries.

    Raises  EncodeError where the teacher is not the stores', StoreError where a store holds another dictionary than its
            target names
    """
    from pipeline.dictionary import Dictionary

    teacher = load_teacher(job)
    _check_teacher_of(stores, teacher)
    outputs = []
    for store in stores:
        dictionary = Dictionary.load(store.files.dictionary)
        copies.check_dictionary(store.files, dictionary.fingerprint)
        outputs.append(Output(store.target["settings"]["layer"], dictionary))
        _check_settings(store, _lsp_settings(job, teacher, outputs[-1]))
    return LspCoder(teacher, outputs, job.config, job.special_ids)


def _dictionaries(job, teacher):
    """Pairs (layer, directory of a dictionary), one for every store."""
    config = job.config
    if config.dictionary is not None:
        return [(config.layer[0], str(config.dictionary))]
    return [(report["layer"], report["dictionary"]) for report in dictionaries(job, teacher)]


def _lsp_settings(job, teacher, output):
    """What names a store of LSPs."""
    config = job.config
    settings = {
        "kind": "lsp",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "layer": output.layer,
        "dictionary": output.dictionary.fingerprint,
        "k": len(output.dictionary.atoms_Kd),
        "lam": config.lam,
        "top_n": config.top_n,
        "dtype": _dtype_name(teacher),
    }
    if config.solver == "fista":
        settings["solver"] = {"name": "fista", "steps": config.solver_steps}
    else:
        settings["tolerance"] = config.tolerance  # which FISTA does not ask for
    if output.dictionary.center is not None:  # stores of before there was centring have no such key
        settings["center"] = output.dictionary.centering
    return settings | Reading.of(config, teacher).settings()


def _lsp_store(job, teacher, output):
    config, k = job.config, len(output.dictionary.atoms_Kd)
    lineage = {
        "teacher_name": teacher.name,
        "teacher_layers": teacher.num_layers,
        "dictionary_settings": output.dictionary.settings,
    }
    name = f"lsp-{Path(teacher.name).name}-l{output.layer}-k{k}"
    command = {"encode-lsp": _kept(config) | {"layer": [output.layer], "k": [k]}}
    target = job.target(_lsp_settings(job, teacher, output), lineage, k)
    _mention_other_tolerance(config.output / "stores", target)
    return StoreInWork(job, name, target, command, output.dictionary)


def _mention_other_tolerance(stores, target):
    """Say so where a new store is about to be made beside one that differs in nothing but the solver's tolerance."""
    if any(stores.glob(f"*-{target['target'][:12]}")):
        return
    wanted = {name: value for name, value in target["settings"].items() if name != "tolerance"}
    for path in sorted(stores.glob("*/target.json")):
        try:
            found = dict(StoreFiles(path.parent).target()["settings"])
        except ValueError:  # a damaged store is none of this command's concern
            continue
        tolerance = found.pop("tolerance", None)
        if tolerance is not None and found == wanted:
            logger.info(
                "a new store: %s differs only in the solver's tolerance, %g instead of %g; "
                "--tolerance %g goes on with it",
                path.parent, tolerance, target["settings"]["tolerance"], tolerance,
            )  # fmt: skip


def _dtype_name(teacher):
    return str(teacher.dtype).removeprefix("torch.")


def _kept(config):
    """The settings that a store keeps, so that the command can be given again from anywhere."""
    left_out = {"fista": ("tolerance",), "cd": ("solver", "solver_steps")}.get(getattr(config, "solver", None), ())
    left_out += ("held_out_by",) if config.held_out_by == "document" else ()
    return {
        name: value for name, value in with_absolute_paths(plain(config)).items() if name not in (*HOW, *left_out)
    }


def _point_to_other_dtypes(job, teacher, kind):
    """Say which stores of this teacher and text `--dtype auto` does not add to, since they have another dtype."""
    if job.config.dtype != "auto":
        return
    wanted = {"kind": kind, "teacher": teacher.fingerprint, "windowing": job.rules}
    found = {}
    for path in sorted((job.config.output / "stores").glob("*/target.json")):
        with suppress(ShardError):
            settings = StoreFiles(path.parent).target()["settings"]
            if all(settings.get(name) == value for name, value in wanted.items()) and "derived_from" not in settings:
                found.setdefault(settings["dtype"], path.parent)
    ours = _dtype_name(teacher)
    if ours not in found:
        for dtype, store in found.items():
            logger.info("the teacher computes in %s, so this is another store than %s, whose dtype is %s: --dtype %s "
                        "adds to that one", ours, store, dtype, dtype)  # fmt: skip


def _warn_of_empty_codes(report, lam):
    share = report["empty_codes"] / max(1, report["empty_codes"] + report["coded_tokens"])
    if share > 0.5:
        warnings.warn(
            f"{share:.1%} of the tokens have an empty code at --lam {lam} and will carry no loss "
            f"({report['store']}). Use a smaller one; 0.05 is usual.",
            stacklevel=2,
        )


# -- stores ------------------------------------------------------------------------------------------------


class OpenStore:
    """A store as a process sees it that writes units of a job into it.

    new_tokens  of the units that were written
    """

    def __init__(self, job, path):
        self.job, self.files, self.new_tokens = job, StoreFiles(path), 0
        self.target = self.files.target()

    def finished(self, unit):
        """The record of a unit; None if it is to be encoded, for the first time or again."""
        record = self.files.record(unit.id)
        return None if record and record.quarantined and self.job.config.retry_quarantine else record

    @contextmanager
    def writer(self, unit, environment):
        """The UnitWriter of a unit; its end commits, if the source is unchanged and not too much failed."""
        target = self.target
        meta = ShardMeta(target["target"], unit.id, target["k"], target["vocab_size"], target["max_length"],
                         target["weight_octaves"])  # fmt: skip
        with UnitWriter(self.files, meta, environment, retry=self.job.config.retry_quarantine) as writer:
            yield writer
            self.job.check_unchanged(unit.source)
            self._check_quarantine(unit, writer.quarantined)
        self.new_tokens += writer.record.tokens

    def _check_quarantine(self, unit, quarantined):
        """Raise EncodeError when too many documents failed, this unit's and those of all records there are."""
        if not quarantined:
            return
        plan = self.job.plan
        records = (self.files.record(other.id) for other in plan.units if other.id != unit.id)
        count = len(quarantined) + sum(len(record.quarantined) for record in records if record)
        allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * plan.corpus["documents"]))
        if count > allowed:
            raise EncodeError(
                f"{self.files.path.name}: {count} documents could not be coded, more than the {allowed} that may be "
                f"in quarantine, so the fault is hardly theirs. The last one: {quarantined[-1]['reason']}"
            )


def _save_tokenizer(tokenizer, directory):
    with utf8_name(directory) as place:
        tokenizer.save_pretrained(place)


class StoreInWork(OpenStore):
    """A store that a command adds to: made where it is not there, which units it wants, and what was done.

    command  {verb: settings}, kept beside the plan, so that verify-shards can name the command again
    wanted   ids of the units that it lacks, or that shall be tried again
    """

    def __init__(self, job, name, target, command, dictionary=None):
        files = StoreFiles(named_by_content(job.config.output / "stores", name, target["target"]))
        files.create(target)
        super().__init__(job, files.path)
        _keep_copy(files.tokenizer, lambda: copies.read_tokenizer(files), partial(_save_tokenizer, job.tokenizer))
        if dictionary is not None:
            _keep_copy(files.dictionary, lambda: copies.read_dictionary(files), dictionary.save)
        files.publish_plan(job.plan)
        # What trains on the store starts from that recipe. A command that finds the store by flags does not change it.
        kept = command | {"recipe": job.config.recipe or files.command(job.plan.id).get("recipe")}
        replace_json(files.plans / f"{job.plan.id}.yaml", kept)  # JSON is YAML; the corpus may have moved
        self.wanted = {unit.id for unit in files.missing_units(job.plan)}
        self.done = 0
        for unit in job.plan.units:
            self._survey(unit)

    def _survey(self, unit):
        """Count a unit that is finished; one that is not, or is to be tried again, is wanted."""
        record = None if unit.id in self.wanted else self.finished(unit)
        if record is None:
            self.wanted.add(unit.id)
        else:
            self.done += record.tokens

    def note(self, unit, tokens, quarantined):
        """Note that a worker committed a unit; raises as its own check does, which cannot see what others are about
        to commit."""
        self.new_tokens += tokens
        self._check_quarantine(unit, quarantined)

    def report(self, seconds):
        """What was made, with the store's statistics."""
        store = Store.open(self.files.path, self.job.plan.id)
        return {
            "store": str(self.files.path),
            "plan": self.job.plan.id,
            "finished_before": not self.wanted,
            "new_units": len(self.wanted),
            "new_tokens": self.new_tokens,
            "seconds": seconds,
            "quarantined": sum(len(record.quarantined) for record in store.iter_records()),
            "corpus": self.job.describe_corpus(),
            **store.report(),
        }


def _keep_copy(directory, read, write):
    """Write a store's copy of a tokenizer or dictionary where it is not there, or is not the one of its target.

    read   raises StoreError unless the copy is the right one
    write  called with a directory to fill
    """
    there = os.path.lexists(directory)
    if there:
        try:
            read()
            return
        except StoreError as error:
            logger.warning("%s It is restored now.", error)
    publish_directory(directory, write, replace=there)


def run(job, stores, make_coder):
    """Encode every unit of the plan that a store wants, here or on the job's workers; returns the stores' reports.

    make_coder  function of a module, from a job and its list of stores to their coder; called in every process that
                encodes, where the stores are OpenStores
    """
    started = time.perf_counter()
    tasks = [(unit, [n for n, store in enumerate(stores) if unit.id in store.wanted]) for unit in job.plan.units]
    tasks = [(unit, outputs) for unit, outputs in tasks if outputs]
    shares = [likely_bytes(store.target) * len(store.wanted) / len(job.plan.units) for store in stores]
    warn_of_disk(job.config.output, sum(shares) * job.expected_tokens)
    if job.crew and tasks:
        for unit, counts, figures in job.crew.encode(tasks, [store.files.path for store in stores], make_coder):
            for output, (tokens, quarantined) in counts.items():
                stores[output].note(unit, tokens, quarantined)
                _show(job, stores, output, tokens, figures)
    elif tasks:
        _encode_here(job, stores, tasks, make_coder(job, stores))
    return [store.report(time.perf_counter() - started) for store in stores]


def _encode_here(job, stores, tasks, coder):
    def show(block, writer):
        _show(job, stores, block.output, block.tokens, _figures(writer.statistics))

    write_units(tasks, job.windows, coder, job.config.max_length, _writers(stores, coder), show)


def _show(job, stores, output, tokens, figures):
    stores[output].done += tokens
    done = sum(store.done for store in stores) // len(stores)
    job.progress("encode", done, job.expected_tokens, **figures)


def _writers(stores, coder):
    return lambda unit, output: stores[output].writer(unit, coder.environment)


def _figures(statistics):
    """The figures of merit beside the progress bar, from the sums of the unit in flight."""
    coded = statistics.get("coded_tokens")
    if not coded:
        return {}
    return {"nnz": statistics["entries"] / coded, "mass_kept": statistics["kept_mass"] / coded}


# -- units -------------------------------------------------------------------------------------------------


def encode_unit(job, stores, unit, outputs, coder, windows_of, failed):
    """Encode what stores still lack of a unit: a worker's part of `run`.

    outputs  numbers of the stores that want it
    failed   its windows that are known to fail, with the reason
    Returns  tokens and quarantined documents of every output, figures of merit
    """
    lacking, figures = [output for output in outputs if stores[output].finished(unit) is None], {}
    if lacking:
        write_units(
            [(unit, lacking)],
            windows_of,
            coder,
            job.config.max_length,
            _writers(stores, coder),
            lambda block, writer: figures.update(_figures(writer.statistics)),
            {unit.id: failed},
        )
    records = {output: stores[output].files.record(unit.id) for output in outputs}
    return {output: (record.tokens, record.quarantined) for output, record in records.items()}, figures


def code_in_vain(coder, windows, output):
    """Code some windows for an output and keep nothing: to see whether the process survives it."""
    items = [[Block(join_windows(windows), output)]] if windows else []
    for _, stage in coder.stages():
        items = stage(items)
    for _ in items:
        pass


def write_units(tasks, windows_of, coder, max_length, open_writer, after_block, failed=None):
    """Read, code and write units in overlapping stages; the bytes do not depend on what overlaps.

    tasks        pairs (unit, numbers of the outputs that want it)
    windows_of   function from a unit to its windows
    coder        IdsCoder, LspCoder or LogitsCoder
    open_writer  function from a unit and an output to a context manager that gives a UnitWriter and commits at its end
    after_block  called with each Block and its UnitWriter once it is written
    failed       of units by their id: windows that are known to fail, with the reason
    Raises       what any of these raises, as it is; the units before it are committed
    """
    with Stages() as stages:
        items = _read_blocks(tasks, windows_of, max_length, failed or {})
        for name, stage in coder.stages():
            items = stages.ahead(stage(items), coder.layout[name])
        for unit, outputs in tasks:
            with ExitStack() as commits:
                writers = {output: commits.enter_context(open_writer(unit, output)) for output in outputs}
                for block in _blocks_of_unit(items):
                    writer = writers[block.output]
                    _note_failed(writer.quarantined, block, unit, writer.windows)
                    writer.write_block(**block.columns)
                    block.add_to(writer.statistics, writer.environment)
                    after_block(block, writer)


def _read_blocks(tasks, windows_of, max_length, failed):
    """Lists of Blocks with the ids alone, one for every output, and UNIT_END after those of each unit."""
    for unit, outputs in tasks:
        windows, first, known = windows_of(unit), 0, failed.get(unit.id, {})
        while chunk := list(islice(windows, windows_per_block(max_length))):
            columns, stop = join_windows(chunk), first + len(chunk)
            here = {window - first: reason for window, reason in known.items() if first <= window < stop}
            yield [Block(dict(columns), output, failed=dict(here)) for output in outputs]
            first = stop
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
