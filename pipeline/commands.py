"""The commands of stage A that encode a corpus: they make targets from settings, teacher and dictionaries, then stores.

    report, = encode_lsp(EncodeConfig(layer=(10,)))

Running a command again continues it: units that have a record are finished and skipped. An interruption loses only the
unit that is being written and the few batches read ahead. Several layers, or several k, share one pass of the teacher;
each gets its own store. Not handled here: how units are encoded (encode.py), what the stores of each kind contain
(targets/), the processes that may share the units (executor.py).
"""

import logging
from collections.abc import Callable
from typing import Any

from mlsm.common.durable import check_links
from mlsm.common.errors import TeacherError
from mlsm.common.model_checks import describe_unsplit
from mlsm.common.progress import silent
from mlsm.common.settings import plain
from mlsm.common.text import redacted
from pipeline.announcement import (
    announcement,
    mention_kept_mass,
    mention_other_tolerance,
    point_to_other_dtypes,
    warn_of_empty_codes,
)
from pipeline.config import (
    FROM_STORE,
    HOW,
    EncodeConfig,
    EncodeHiddenConfig,
    EncodeIdsConfig,
    EncodeLogitsConfig,
    with_absolute_paths,
)
from pipeline.dictionary import Dictionary
from pipeline.encode import encode
from pipeline.estimate import estimate, estimate_lsp
from pipeline.job import fit_teacher, load_teacher, open_executor, open_job, scan_corpus
from pipeline.learn import check_bytes, load_dictionary, provide_codebook, provide_dictionaries, wanted_dictionaries
from pipeline.stores import TargetStore
from pipeline.targets.hidden import HiddenStates, provisional_codebook
from pipeline.targets.ids import Ids
from pipeline.targets.logits import Logits
from pipeline.targets.lsp import Lsp
from pipeline.teacher import check_documents_apart, check_max_length, check_reads_masks, load_tokenizer
from pipeline.teacher.masked_lm import MaskedLm
from shards.reader import is_url

ADDED_LATER = {"held_out_by": "document", "atoms": "learned", "masked": False}  # setting -> value of older stores
logger = logging.getLogger(__name__)


def encode_ids(config: EncodeIdsConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write a store of token ids only. Returns a list of one report dict, as `encode_lsp`."""
    assert config.tokenizer is not None, "a config has taken the bundled one"
    job = scan_corpus(config, load_tokenizer(config.tokenizer), progress)
    logger.info("%s", announcement("encode-ids", job))
    target = Ids(config)
    if config.dry_run:
        return [estimate(job, None, [target])]
    store = TargetStore(job, target, {"encode-ids": select_settings(config)})
    with open_executor(job) as executor:
        return encode(executor, [store], Ids)


def encode_logits(config: EncodeLogitsConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write a store of the teacher's vocabulary distributions. Returns a list of one report dict, as `encode_lsp`.

    Raises  CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    assert config.teacher is not None, "a config has taken the bundled one"
    if config.documents_apart:
        check_documents_apart(config.teacher)
    if config.masked:
        check_reads_masks(config.teacher)
    tokenizer = load_tokenizer(config.teacher)
    if trouble := describe_unsplit(tokenizer, config.teacher):
        raise TeacherError(trouble)
    # Load the teacher before the corpus is read, so that a teacher without a head is refused at once.
    progress("load teacher", 0, None)
    teacher = MaskedLm.load(config.teacher, dtype=config.dtype, device=config.device)
    check_max_length(config.teacher, config.max_length)
    job = scan_corpus(config, tokenizer, progress)
    fit_teacher(job, teacher)
    logger.info("%s", announcement("encode-logits", job, teacher))
    target = Logits(config, teacher, job.special_ids)
    if config.dry_run:
        return [estimate(job, teacher, [target])]
    point_to_other_dtypes(job, teacher, "logits")
    store = TargetStore(job, target, {"encode-logits": select_settings(config)})
    with open_executor(job, teacher) as executor:
        return encode(executor, [store], Logits)


def encode_hidden(config: EncodeHiddenConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Write one store of the teacher's hidden states for every layer, or quantise those of the store config.hidden.

    Returns  list of report dicts, layer by layer, as `encode_lsp`
    Raises   as encode_lsp
    """
    job = open_job(config, progress)
    config, teacher = job.config, load_teacher(job)
    logger.info("%s", announcement("encode-hidden", job, teacher))
    check_bytes(config, teacher)
    if config.dry_run:
        codebook = provisional_codebook(config, teacher.hidden_size)
        return [estimate(job, teacher, [HiddenStates(config, teacher, layer, codebook) for layer in config.layer])]
    point_to_other_dtypes(job, teacher, "hidden")
    stores = []
    with open_executor(job, teacher) as executor:
        for layer in config.layer:
            target = HiddenStates(config, teacher, layer, provide_codebook(executor, teacher, layer))
            command = select_settings(config) | {"layer": [layer]}
            stores.append(TargetStore(job, target, {"encode-hidden": command}))
        reports = encode(executor, stores, HiddenStates)
    return [
        report | {"layer": layer, "teacher": teacher.name} for report, layer in zip(reports, config.layer, strict=True)
    ]


def encode_lsp(config: EncodeConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Encode the corpus into one LSP store for every layer and k, learning dictionaries if none is given.

    progress  called with (stage, done, total, unit=..., **figures)
    Returns   list of report dicts, layer by layer: store, finished_before, timing, the store's statistics
    Raises    CorpusError, TeacherError, DeviceError, EncodeError, StoreError
    """
    if config.dictionary is not None:
        Dictionary.load(config.dictionary)  # refuses a missing or damaged one before the corpus is read
    job = open_job(config, progress)
    config, teacher = job.config, load_teacher(job)
    given = None if config.dictionary is None else load_dictionary(config, config.dictionary, teacher)
    wanted = [] if given else wanted_dictionaries(job, teacher)
    lacking = [entry.directory for entry in wanted if not entry.directory.is_dir()]
    logger.info("%s", announcement("encode-lsp", job, teacher, given, lacking))
    if config.dry_run:
        return [estimate_lsp(job, teacher, given)]
    point_to_other_dtypes(job, teacher, "lsp")
    stores, facts = [], []
    with open_executor(job, teacher) as executor:
        if given is not None:
            sources = [(config.layer[0], str(config.dictionary))]
        else:
            if lacking:
                check_links(config.output)  # before hours of learning
            learned = provide_dictionaries(executor, teacher)
            sources = [(report["layer"], report["dictionary"]) for report in learned]
        for layer, source in sources:
            target = Lsp(config, teacher, layer, given or load_dictionary(config, source, teacher))
            mention_other_tolerance(config.output / "stores", target.describe_store(job)[1])
            if given is None:  # otherwise it is in the announcement
                mention_kept_mass(config, layer, target.dictionary)
            command = select_settings(config) | {"layer": [layer], "k": [len(target.dictionary.atoms_Kd)]}
            stores.append(TargetStore(job, target, {"encode-lsp": command}))
            facts.append({"layer": layer, "dictionary": source, "top_n": target.top_n, "teacher": teacher.name})
        reports = encode(executor, stores, Lsp)
    for report in reports:
        warn_of_empty_codes(report, config.lam)
    return [report | fact for report, fact in zip(reports, facts, strict=True)]


def select_settings(config: Any) -> dict:
    """The settings that a store keeps of its command, so that it can be run again from any directory."""
    left_out = {*HOW}
    of_others = {"cd": {"solver", "solver_steps"}, "fista": {"tolerance"}, "nearest": {"tolerance", "solver_steps"}}
    left_out |= of_others[config.solver] if hasattr(config, "solver") else set()
    left_out |= {name for name, before in ADDED_LATER.items() if getattr(config, name, before) == before}
    left_out |= {name for name in ("hidden", "bytes", "codebook") if getattr(config, name, None) is None}
    if getattr(config, "hidden", None) is not None:
        left_out |= FROM_STORE
    values = with_absolute_paths(plain(config))
    if is_url(values.get("hidden") or ""):
        values["hidden"] = redacted(values["hidden"])
    return {name: value for name, value in values.items() if name not in left_out}
