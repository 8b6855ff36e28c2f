"""Stage A: corpus, teacher, dictionaries, solver and shards joined, one unit at a time.

    report, = encode_lsp(EncodeConfig(layer=(10,)))

Running it again continues: finished units are found by their records and left alone. What an interruption
costs is the unit that is being written and the few batches that were ahead of it. Reading and coding run in
stages ahead of the writing (coder.py says which beside which), over all units without a pause between two;
writing and progress stay in the caller's thread. Several layers, or several k, share one pass of the teacher and go
to one store each. A document whose coding fails is quarantined: its windows keep their numbers but carry no
entries, and its unit's record names it. Left out: the parts themselves, and several processes.
"""

import time
import warnings
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.coder import UNIT_END, Block, EncodeError, IdsCoder, LspCoder, Output
from pipeline.config import plain, with_absolute_paths
from pipeline.corpus import join_windows, silent
from pipeline.job import Job, check_teacher, load_teacher, named_by_content, teacher_job
from pipeline.learn import dictionaries
from pipeline.stages import Stages
from shards.manifest import StoreFiles, publish_directory, publish_json
from shards.reader import Store
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES, ShardMeta, windows_per_block
from shards.writer import UnitWriter

QUARANTINE_SHARE = 0.01  # of a plan's documents; when more fail, the fault is not the documents'
QUARANTINE_LEAST = 10  # documents that may fail in a plan however small


def encode_ids(config, progress=silent):
    """Write a store of token ids only. Returns a list of one report dict, as `encode_lsp`."""
    from pipeline.teacher import load_tokenizer

    job = Job(config, load_tokenizer(config.tokenizer), progress)
    settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
    target = job.target(settings, {"tokenizer_name": config.tokenizer}, k=0)
    store = StoreInWork(job, f"ids-L{config.max_length}", target, {"encode-ids": _kept(config)})
    return _run(job, [store], IdsCoder())


def encode_logits(config, progress=silent):
    """Write a store of the teacher's vocabulary distributions. Returns a list of one report dict, as `encode_lsp`.

    Raises  CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    from pipeline.logits import LogitsCoder, MaskedLm
    from pipeline.teacher import load_tokenizer

    teacher = MaskedLm.load(config.teacher, dtype=config.dtype, device=config.device)
    job = Job(config, load_tokenizer(config.teacher), progress)
    check_teacher(job, teacher)
    coder = LogitsCoder(teacher, [Output(teacher.layer, None)], config, job.special_ids)
    return _run(job, [_logits_store(job, teacher)], coder)


def _logits_store(job, teacher):
    settings = {
        "kind": "logits",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "k": teacher.vocabulary,
        "top_n": job.config.top_n,
        "octaves": LOGITS_OCTAVES,
        "dtype": _dtype_name(teacher),
    }
    lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
    target = job.target(settings, lineage, teacher.vocabulary, LOGITS_OCTAVES)
    return StoreInWork(job, f"logits-{Path(teacher.name).name}", target, {"encode-logits": _kept(job.config)})


def encode_lsp(config, progress=silent):
    """Encode the corpus into one LSP store for every layer and k, learning dictionaries where none is given.

    progress  called with (stage, done, total, unit=..., **figures)
    Returns   list of report dicts, layer by layer: store, finished_before, timing, the store's statistics
    Raises    CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    job = teacher_job(config, progress)
    teacher = load_teacher(job)
    outputs, stores, facts = [], [], []
    for layer, source in _dictionaries(job, teacher):
        output = Output(layer, _load_dictionary(source, teacher))
        outputs.append(output)
        stores.append(_lsp_store(job, teacher, output))
        facts.append({"layer": layer, "dictionary": source, "top_n": config.top_n, "teacher": teacher.name})
    reports = _run(job, stores, LspCoder(teacher, outputs, config, job.special_ids))
    for report in reports:
        _warn_of_empty_codes(report, config.lam)
    return [report | fact for report, fact in zip(reports, facts, strict=True)]


def _dictionaries(job, teacher):
    """Pairs (layer, directory of a dictionary), one for every store."""
    config = job.config
    if config.dictionary is not None:
        return [(config.layer[0], str(config.dictionary))]
    return [(report["layer"], report["dictionary"]) for report in dictionaries(job, teacher)]


def _load_dictionary(source, teacher):
    from pipeline.dictionary import Dictionary

    dictionary = Dictionary.load(Path(source))
    width = dictionary.atoms_Kd.shape[1]
    if width != teacher.hidden_size:
        raise EncodeError(
            f"{source}: atoms of width {width}, but {teacher.name} has hidden "
            f"states of width {teacher.hidden_size}. Learn one for this teacher: mlsm learn-dictionary"
        )
    return dictionary


def _lsp_store(job, teacher, output):
    config, k = job.config, len(output.dictionary.atoms_Kd)
    settings = {
        "kind": "lsp",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "layer": output.layer,
        "dictionary": output.dictionary.fingerprint,
        "k": k,
        "lam": config.lam,
        "top_n": config.top_n,
        "tolerance": config.tolerance,
        "dtype": _dtype_name(teacher),
    }
    lineage = {
        "teacher_name": teacher.name,
        "teacher_layers": teacher.num_layers,
        "dictionary_settings": output.dictionary.settings,
    }
    name = f"lsp-{Path(teacher.name).name}-l{output.layer}-k{k}"
    command = {"encode-lsp": _kept(config) | {"layer": [output.layer], "k": [k]}}
    return StoreInWork(job, name, job.target(settings, lineage, k), command, output.dictionary)


def _dtype_name(teacher):
    return str(teacher.dtype).removeprefix("torch.")


def _kept(config):
    """The settings that a store keeps, so that the command can be given again from anywhere."""
    return {name: value for name, value in with_absolute_paths(plain(config)).items() if name != "retry_quarantine"}


def _warn_of_empty_codes(report, lam):
    share = report["empty_codes"] / max(1, report["empty_codes"] + report["coded_tokens"])
    if share > 0.5:
        warnings.warn(
            f"{share:.1%} of the tokens have an empty code at --lam {lam} and will carry no loss "
            f"({report['store']}). Use a smaller one; 0.05 is usual.",
            stacklevel=2,
        )


# -- stores ------------------------------------------------------------------------------------------------


class StoreInWork:
    """A store that a command adds to: its files, which units it wants, and what was done.

    command  {verb: settings}, kept beside the plan, so that verify-shards can name the command again
    wanted   ids of the units that it lacks, or that shall be tried again
    """

    def __init__(self, job, name, target, command, dictionary=None):
        self.job, self.target = job, target
        self.files = files = StoreFiles(named_by_content(job.config.output / "stores", name, target["target"]))
        files.create(target)
        if not files.tokenizer.is_dir():
            publish_directory(files.tokenizer, job.tokenizer.save_pretrained, replace=False)
        if dictionary is not None and not files.dictionary.is_dir():
            dictionary.save(files.dictionary)
        files.publish_plan(job.plan)
        publish_json(files.plans / f"{job.plan.id}.yaml", command)  # JSON is YAML
        self.wanted = {unit.id for unit in files.missing_units(job.plan)}
        self.done = self._quarantined = self._new_tokens = 0
        for unit in job.plan.units:
            self._survey(unit)

    def _survey(self, unit):
        """Count a unit that is finished; one that is not, or is to be tried again, is wanted."""
        record = None if unit.id in self.wanted else self.files.record(unit.id)
        if record is None or (self.job.config.retry_quarantine and record.quarantined):
            self.wanted.add(unit.id)
        else:
            self.done += record.tokens
            self._quarantined += len(record.quarantined)

    @contextmanager
    def writer(self, unit, environment):
        """The UnitWriter of a unit; its end commits, if the source is unchanged and not too much failed."""
        target = self.target
        meta = ShardMeta(target["target"], unit.id, target["k"], target["vocab_size"], target["max_length"],
                         target["weight_octaves"])  # fmt: skip
        with UnitWriter(self.files, meta, environment, retry=self.job.config.retry_quarantine) as writer:
            yield writer
            self.job.check_unchanged(unit.source)
            self._check_quarantine(writer)
        self._new_tokens += writer.record.tokens

    def _check_quarantine(self, writer):
        """Raise EncodeError when too many documents failed, this unit's included."""
        self._quarantined += len(writer.quarantined)
        allowed = max(QUARANTINE_LEAST, int(QUARANTINE_SHARE * self.job.plan.corpus["documents"]))
        if self._quarantined > allowed:
            raise EncodeError(
                f"{self.files.path.name}: {self._quarantined} documents could not be coded, more than the {allowed} "
                "that may be in quarantine, so the fault is hardly theirs. The last one: "
                f"{writer.quarantined[-1]['reason']}"
            )

    def report(self, seconds):
        """What was made, with the store's statistics."""
        store = Store.open(self.files.path, self.job.plan.id)
        return {
            "store": str(self.files.path),
            "plan": self.job.plan.id,
            "finished_before": not self.wanted,
            "new_units": len(self.wanted),
            "new_tokens": self._new_tokens,
            "seconds": seconds,
            "quarantined": sum(len(record.quarantined) for record in store.iter_records()),
            **store.report(),
        }


def _run(job, stores, coder):
    """Encode every unit of the plan that a store wants; returns their reports."""
    started = time.perf_counter()
    tasks = [(unit, [n for n, store in enumerate(stores) if unit.id in store.wanted]) for unit in job.plan.units]

    def show(block, writer):
        stores[block.output].done += block.tokens
        done = sum(store.done for store in stores) // len(stores)
        job.progress("encode", done, job.expected_tokens, **_figures(writer.statistics))

    write_units(
        [(unit, outputs) for unit, outputs in tasks if outputs],
        job.windows,
        coder,
        job.config.max_length,
        lambda unit, output: stores[output].writer(unit, coder.environment),
        show,
    )
    return [store.report(time.perf_counter() - started) for store in stores]


def _figures(statistics):
    """The figures of merit beside the progress bar, from the sums of the unit in flight."""
    coded = statistics.get("coded_tokens")
    if not coded:
        return {}
    return {"nnz": statistics["entries"] / coded, "mass_kept": statistics["kept_mass"] / coded}


# -- units -------------------------------------------------------------------------------------------------


def write_units(tasks, windows_of, coder, max_length, open_writer, after_block):
    """Read, code and write units in overlapping stages; the bytes do not depend on what overlaps.

    tasks        pairs (unit, numbers of the outputs that want it)
    windows_of   function from a unit to its windows
    coder        IdsCoder, LspCoder or LogitsCoder
    open_writer  function from a unit and an output to a context manager that gives a UnitWriter and commits at its end
    after_block  called with each Block and its UnitWriter once it is written
    Raises       what any of these raises, as it is; the units before it are committed
    """
    with Stages() as stages:
        items = _read_blocks(tasks, windows_of, max_length)
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


def _read_blocks(tasks, windows_of, max_length):
    """Lists of Blocks with the ids alone, one for every output, and UNIT_END after those of each unit."""
    for unit, outputs in tasks:
        windows = windows_of(unit)
        while chunk := list(islice(windows, windows_per_block(max_length))):
            columns = join_windows(chunk)
            yield [Block(dict(columns), output) for output in outputs]
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
