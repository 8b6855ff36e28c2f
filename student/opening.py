"""Open the parts of a run: its settings with all values filled in, its store, its task and its directory.

Combinations that do not fit are refused here, before anything is built. Not handled here: the training (train.py), how
unset settings get their values (resolve.py), what the directory holds (runs/).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlsm.common.errors import RunError
from mlsm.common.invocation import program
from mlsm.common.settings import revise
from shards.reader import Store
from student import proof
from student.config import StudentConfig
from student.encoders.libraries import choose_libraries, contradicts
from student.masks.weights import mask_tables
from student.ranks import Ranks
from student.resolve import Resolved, resolve, resolve_compile, resolve_dtype
from student.runs.directory import MARGINALS, RESULT_FILE, Run
from student.runs.identity import differing_settings, directory_of, find_description, run_identity
from student.runs.tracking import check_trackers
from student.task import TrainingTask

logger = logging.getLogger(__name__)


def open_run(
    config: StudentConfig, ranks: Ranks, prepare: Callable[[Any, Store], TrainingTask]
) -> tuple[Resolved, Store, TrainingTask, Run]:
    """Settings with all values filled in, store, task and directory of the run. Raises RunError if they do not belong
    together."""
    check_trackers(config.track)
    if config.store is None:
        raise RunError(f"no store given. Make one:  {program()} encode-lsp   or name one with --store.")
    store = Store.open(config.stores[0])
    store.read_tokenizer()  # refuses a wrong tokenizer now, not only at the export, which gets these bytes
    resolved = resolve(config, store)
    dtype, compiled = resolve_dtype(config.dtype, ranks.device), resolve_compile(config.compile, ranks.device)
    resolved = resolved._replace(config=revise(resolved.config, dtype=dtype, compile=compiled))
    ranks.share(resolved.config.batch_windows)  # refuses more processes than windows
    task = prepare(resolved.config, store)
    tables = mask_tables(resolved.config, store)
    if proof.is_needed(config, ranks.device):
        proven = _prove(config, resolved.config, store, task, tables, ranks, prepare)
        resolved, task = resolved._replace(config=proven), prepare(proven, store)
    settings = task.settings(resolved.config, tables)

    def choose() -> Mapping[str, str]:
        return choose_libraries(resolved.config, task.build(), store.max_length, ranks.device, ranks.size)

    run = Run(
        resolved.config, store, task.architecture, settings, tables, create=ranks.is_first, choose_libraries=choose
    )
    if ranks.is_first and contradicts(run.libraries, resolved.config, ranks.device):
        logger.warning(
            "--products %s is ignored: the run in %s started with other libraries for matrix products and keeps "
            "them. Another --run-dir starts a new run",
            config.products,
            run.directory,
        )
    return resolved, store, task, run


def _prove(asked, settled, store, task, tables, ranks, prepare):
    """The settings with dtype and compile that are right on this GPU (proof.py), or those that the run started with."""
    for one in proof.candidates(asked, settled):
        identity = run_identity(one, store, task.architecture, task.settings(one, tables))
        directory = directory_of(one, identity, task.architecture)
        kept = find_description(directory)
        if kept is not None and not differing_settings(kept, identity, task.architecture):
            begun = one
            break
    else:
        begun = None
    if begun is not None and (not ranks.is_first or (directory / RESULT_FILE).exists()):
        return begun  # the first process has chosen already, or the run is finished
    marginals = settled.shared_directory / MARGINALS
    choice = proof.find_arithmetic(asked, settled, store, task, prepare, ranks.device, marginals=marginals)
    if begun is None:
        return replace(settled, dtype=choice.dtype, compile=choice.compile)
    name = proof.name_of(begun.dtype, begun.compile)
    if choice.keep and choice.right and name not in choice.right and name in choice.trials:
        raise RunError(
            f"this run was started in {name}, which does not work on this GPU now ({choice.line}). To continue "
            f"it anyway, pass --dtype {begun.dtype} --{'' if begun.compile else 'no-'}compile. Another "
            "--run-dir starts a new run."
        )
    return begun
