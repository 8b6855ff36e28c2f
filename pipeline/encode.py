"""The commands of stage A that encode a corpus: corpus, teacher, dictionaries, solver and shards joined.

    report, = encode_lsp(EncodeConfig(layer=(10,)))

Running a command again continues it: finished units are found by their records and left alone. An interruption costs
the unit that is being written and the few batches that were ahead of it. Several layers, or several k, share one pass
of the teacher and go to one store each. Left out: how a unit is encoded (units.py), what the stores of each kind need
(kinds.py), the processes that may share the units (executors/).
"""

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ShardError
from common.progress import silent
from pipeline.announcement import announcement
from pipeline.codebooks import provide_codebook
from pipeline.coding.batch import Output
from pipeline.coding.coder import IdsCoder
from pipeline.coding.kept import entries_kept, expected_mass
from pipeline.coding.masked import PASSES
from pipeline.config import (
    HOW,
    EncodeConfig,
    EncodeHiddenConfig,
    EncodeIdsConfig,
    EncodeLogitsConfig,
    plain,
    with_absolute_paths,
)
from pipeline.estimate import estimate, estimate_lsp, likely_bytes, warn_of_disk
from pipeline.executors import open_executor
from pipeline.executors.base import Executor
from pipeline.job import Job, check_teacher, load_teacher, scan_corpus, stored_job, teacher_job
from pipeline.kinds import KINDS, Kind, name_of_dtype
from pipeline.learn import load_dictionary, provide_dictionaries, wanted_dictionaries
from pipeline.stored import FROM_STORE
from pipeline.stores import TargetStore
from pipeline.units import encode_missing
from shards.files import StoreFiles
from shards.schema import LOGITS_OCTAVES

if TYPE_CHECKING:
    from pipeline.coding.quantise import Codebook
    from pipeline.dictionary import Dictionary
    from pipeline.teacher import Teacher

logger = logging.getLogger(__name__)


def encode_ids(config: EncodeIdsConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write a store of token ids only. Returns a list of one report dict, as `encode_lsp`."""
    from pipeline.teacher import load_tokenizer

    assert config.tokenizer is not None, "a config has taken the bundled one"
    job = scan_corpus(config, load_tokenizer(config.tokenizer), progress)
    logger.info("%s", announcement("encode-ids", job))
    if config.dry_run:
        return [estimate(job, IdsCoder(), [KINDS["ids"].target(job, None, None)])]
    store = make_store(job, "ids", None, None, {"encode-ids": select_settings(config)})
    with open_executor(job) as executor:
        return run(executor, [store], KINDS["ids"])


def encode_logits(config: EncodeLogitsConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write a store of the teacher's vocabulary distributions. Returns a list of one report dict, as `encode_lsp`.

    Raises  CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    from pipeline.coding.logits import LogitsCoder
    from pipeline.teacher import check_documents_apart, check_reads_masks, load_tokenizer
    from pipeline.teacher.masked_lm import MaskedLm

    assert config.teacher is not None, "a config has taken the bundled one"
    if config.documents_apart:
        check_documents_apart(config.teacher)
    if config.masked:
        check_reads_masks(config.teacher)
    # Loaded before the corpus is read, so that a teacher without a head is refused at once.
    progress("load teacher", 0, None)
    teacher = MaskedLm.load(config.teacher, dtype=config.dtype, device=config.device)
    job = scan_corpus(config, load_tokenizer(config.teacher), progress)
    check_teacher(job, teacher)
    teacher.choose_products(config.products, config.batch_tokens)
    logger.info("%s", announcement("encode-logits", job, teacher))
    output = Output(teacher.layer, None)
    if config.dry_run:
        target = job.target({"top_n": config.top_n}, {}, teacher.vocabulary, LOGITS_OCTAVES)
        return [estimate(job, LogitsCoder(teacher, [output], config, job.special_ids), [target])]
    _point_to_other_dtypes(job, teacher, "logits")
    store = make_store(job, "logits", teacher, output, {"encode-logits": select_settings(config)})
    with open_executor(job, teacher) as executor:
        return run(executor, [store], KINDS["logits"])


def encode_hidden(config: EncodeHiddenConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write one store of the teacher's hidden states for every layer, or quantise those of the store config.hidden.

    Returns  list of report dicts, layer by layer, as `encode_lsp`
    Raises   as encode_lsp
    """
    from pipeline.coding.quantise import provisional_codebook

    job = _open_job(config, progress)
    config, teacher = job.config, load_teacher(job)
    logger.info("%s", announcement("encode-hidden", job, teacher))
    if config.dry_run:
        outputs = [Output(layer, provisional_codebook(config, teacher.hidden_size)) for layer in config.layer]
        targets = [KINDS["hidden"].target(job, teacher, output) for output in outputs]
        return [estimate(job, KINDS["hidden"].make_coder(teacher, outputs, config, job.special_ids), targets)]
    _point_to_other_dtypes(job, teacher, "hidden")
    stores = []
    with open_executor(job, teacher) as executor:
        for layer in config.layer:
            codebook = provide_codebook(executor, teacher, layer)
            command = {"encode-hidden": select_settings(config) | {"layer": [layer]}}
            stores.append(make_store(job, "hidden", teacher, Output(layer, codebook), command, codebook=codebook))
        reports = run(executor, stores, KINDS["hidden"])
    return [
        report | {"layer": layer, "teacher": teacher.name} for report, layer in zip(reports, config.layer, strict=True)
    ]


def _open_job(config, progress):
    """The Job of a command that reads text with a teacher, or the store that --hidden names."""
    return teacher_job(config, progress) if config.hidden is None else stored_job(config, progress)


def encode_lsp(config: EncodeConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Encode the corpus into one LSP store for every layer and k, learning dictionaries where none is given.

    progress  called with (stage, done, total, unit=..., **figures)
    Returns   list of report dicts, layer by layer: store, finished_before, timing, the store's statistics
    Raises    CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    job = _open_job(config, progress)
    config, teacher = job.config, load_teacher(job)
    given = None if config.dictionary is None else load_dictionary(config, config.dictionary, teacher)
    wanted = [] if given else wanted_dictionaries(job, teacher)
    lacking = [entry.directory for entry in wanted if not entry.directory.is_dir()]
    logger.info("%s", announcement("encode-lsp", job, teacher, given, lacking))
    if config.dry_run:
        return [estimate_lsp(job, teacher, given)]
    _point_to_other_dtypes(job, teacher, "lsp")
    stores, facts = [], []
    with open_executor(job, teacher) as executor:
        if config.dictionary is not None:
            sources = [(config.layer[0], str(config.dictionary))]
        else:
            reports = provide_dictionaries(executor, teacher)
            sources = [(report["layer"], report["dictionary"]) for report in reports]
        for layer, source in sources:
            output = Output(layer, given or load_dictionary(config, source, teacher))
            stores.append(make_lsp_store(job, teacher, output))
            top_n = stores[-1].target["settings"]["top_n"]
            facts.append({"layer": layer, "dictionary": source, "top_n": top_n, "teacher": teacher.name})
        reports = run(executor, stores, KINDS["lsp"])
    for report in reports:
        _warn_of_empty_codes(report, config.lam)
    return [report | fact for report, fact in zip(reports, facts, strict=True)]


def make_lsp_store(job: Job, teacher: "Teacher", output: Output) -> TargetStore:
    """The TargetStore of one layer and dictionary."""
    command = select_settings(job.config) | {"layer": [output.layer], "k": [len(output.dictionary.atoms_Kd)]}
    _mention_other_tolerance(job.config.output / "stores", KINDS["lsp"].target(job, teacher, output))
    if job.config.dictionary is None:  # of a given one the announcement has said so
        _mention_kept_mass(job.config, output)
    return make_store(job, "lsp", teacher, output, {"encode-lsp": command}, output.dictionary)


def make_store(
    job: Job,
    kind: str,
    teacher: "Teacher | None",
    output: Output | None,
    command: dict,
    dictionary: "Dictionary | None" = None,
    codebook: "Codebook | None" = None,
) -> TargetStore:
    """The TargetStore of a kind; other arguments as of TargetStore and `Kind.describe`."""
    name = KINDS[kind].describe(job, teacher, output).name
    return TargetStore(job, name, KINDS[kind].target(job, teacher, output), command, dictionary, codebook)


def select_settings(config: Any) -> dict:
    """The settings of a command that a store keeps, so that the command can be given again from anywhere."""
    left_out = {*HOW}
    of_others = {"cd": {"solver", "solver_steps"}, "fista": {"tolerance"}, "nearest": {"tolerance", "solver_steps"}}
    left_out |= of_others[config.solver] if hasattr(config, "solver") else set()
    added_later = {"held_out_by": "document", "atoms": "learned", "masked": False}  # and what they were before
    left_out |= {name for name, before in added_later.items() if getattr(config, name, before) == before}
    left_out |= {name for name in ("hidden", "bytes", "codebook") if getattr(config, name, None) is None}
    if getattr(config, "hidden", None) is not None:
        left_out |= FROM_STORE
    return {name: value for name, value in with_absolute_paths(plain(config)).items() if name not in left_out}


def run(executor: Executor, stores: Sequence[TargetStore], kind: Kind) -> list[dict]:
    """Encode every unit of the plan that a store wants. Returns the stores' reports.

    kind  that of all the stores
    """
    job, started = executor.job, time.perf_counter()
    tasks = [(unit, [n for n, store in enumerate(stores) if unit.id in store.wanted]) for unit in job.plan.units]
    tasks = [(unit, outputs) for unit, outputs in tasks if outputs]
    shares = [likely_bytes(store.target) * len(store.wanted) / len(job.plan.units) for store in stores]
    warn_of_disk(job.config.output, sum(shares) * job.expected_tokens)
    begun = [0] * len(stores)  # tokens of the unit in flight that were shown block by block

    def show(output, tokens, figures):
        begun[output] += tokens
        stores[output].done += tokens
        done = sum(store.done for store in stores) // len(stores)
        job.progress("encode", done, job.expected_tokens, **figures)

    job.progress("encode", sum(store.done for store in stores) // len(stores), job.expected_tokens)
    paths = [store.files.path for store in stores]
    for unit, counts, figures in encode_missing(executor, tasks, paths, kind, show):
        for output, (tokens, quarantined) in counts.items():
            stores[output].note(unit, tokens, quarantined)
            if tokens > begun[output]:
                show(output, tokens - begun[output], figures)
            begun[output] = 0
    return [store.report(time.perf_counter() - started) for store in stores]


# -- notes and warnings ------------------------------------------------------------------------------------


def _mention_other_tolerance(stores, target):
    """Log when a new store is about to be made beside one that differs in nothing but the solver's tolerance."""
    if any(stores.glob(f"*-{target['target'][:12]}")):
        return
    wanted = {name: value for name, value in target["settings"].items() if name != "tolerance"}
    for path in sorted(stores.glob("*/target.json")):
        try:
            found = dict(StoreFiles(path.parent).target()["settings"])
        except ValueError:  # a damaged store does not concern this command
            continue
        tolerance = found.pop("tolerance", None)
        if tolerance is not None and found == wanted:
            logger.info(
                "a new store: %s differs only in the solver's tolerance, %g instead of %g; "
                "--tolerance %g goes on with it",
                path.parent,
                tolerance,
                target["settings"]["tolerance"],
                tolerance,
            )


def _mention_kept_mass(config, output):
    """Log how many entries of each token are kept, why, and which share of the mass they are expected to hold."""
    kept, mass = entries_kept(config, output.dictionary), expected_mass(config, output.dictionary)
    if config.solver == "nearest":
        return
    logger.info(
        "layer %d, k %d: %s entries of each token are kept at most (%s), %s",
        output.layer,
        len(output.dictionary.atoms_Kd),
        255 if kept == "all" else kept,
        "by default" if config.top_n is None else f"--top-n {kept}",
        "the share of the mass is not known before; --dry-run measures it"
        if mass is None
        else f"with {mass:.1%} of the mass, by the dictionary's held-out vectors",
    )


def _point_to_other_dtypes(job, teacher, kind):
    """Log which stores of this teacher and text `--dtype auto` does not add to, since they have another dtype."""
    if job.config.dtype != "auto":
        return
    passes = PASSES if getattr(job.config, "masked", False) else None
    wanted = {"kind": kind, "teacher": teacher.fingerprint, "windowing": job.rules, "masked_passes": passes}
    found: dict[str, Path] = {}
    for path in sorted((job.config.output / "stores").glob("*/target.json")):
        with suppress(ShardError):
            settings = StoreFiles(path.parent).target()["settings"]
            if all(settings.get(name) == value for name, value in wanted.items()) and "derived_from" not in settings:
                found.setdefault(settings["dtype"], path.parent)
    ours = name_of_dtype(teacher)
    if ours not in found:
        for dtype, store in found.items():
            logger.info(
                "the teacher computes in %s, so this is another store than %s, whose dtype is %s: --dtype %s "
                "adds to that one",
                ours,
                store,
                dtype,
                dtype,
            )


def _warn_of_empty_codes(report, lam):
    share = report["empty_codes"] / max(1, report["empty_codes"] + report["coded_tokens"])
    if share > 0.5:
        warnings.warn(
            f"{share:.1%} of the tokens have an empty code at --lam {lam} and will carry no loss "
            f"({report['store']}). Use a smaller one; 0.05 is usual.",
            stacklevel=2,
        )
