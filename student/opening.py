"""Open what a run works on: settings with nothing left open, its store, its task and its directory.

Everything that does not belong together is refused here, before anything is built. Left out: the training (train.py),
how open settings are settled (resolve.py), what the directory holds (runs/).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from mlsm.common.errors import RunError
from mlsm.common.invocation import program
from shards.reader import Store
from student.config import StudentConfig
from student.encoders.products import choose_products, contradicts
from student.masks.config import UNIFORM
from student.masks.weights import mask_tables
from student.ranks import Ranks
from student.resolve import Resolved, resolve, resolve_compile, resolve_dtype
from student.runs.directory import Run
from student.runs.tracking import check_trackers
from student.task import TrainingTask

logger = logging.getLogger(__name__)


def open_run(
    config: StudentConfig, ranks: Ranks, prepare: Callable[[Any, Store], TrainingTask], origins: dict[str, str] | None
) -> tuple[Resolved, Store, TrainingTask, Run]:
    """Settings with nothing left open, store, task and directory of the run. RunError where they do not belong
    together."""
    check_trackers(config.track)
    if config.store is None:
        raise RunError(f"no store given. Make one:  {program()} encode-lsp   or name one with --store.")
    store = Store.open(config.stores[0])
    store.read_tokenizer()  # refuses another one now, not in the export; the export gets these bytes
    dtype, compiled = resolve_dtype(config.dtype, ranks.device), resolve_compile(config.compile, ranks.device)
    resolved = resolve(replace(config, dtype=dtype, compile=compiled), store, origins)
    ranks.share(resolved.config.batch_windows)  # refuses more processes than windows
    task = prepare(resolved.config, store)
    tables = mask_tables(resolved.config, store)
    names = [UNIFORM if table is None else table.name for table in tables]
    settings = task.settings(resolved.config)
    if any(tables):  # their content counts, and not their places
        settings["mask_weights"] = names if len(names) > 1 else names[0]

    def choose() -> Mapping[str, str]:
        return choose_products(resolved.config, task.build(), store.max_length, ranks.device, ranks.size)

    run = Run(
        resolved.config, store, task.architecture, settings, tables, create=ranks.is_first, choose_products=choose
    )
    if ranks.is_first and contradicts(run.products, resolved.config, ranks.device):
        logger.warning(
            "--products %s is not taken: the run in %s began with other products and keeps them to its end. "
            "Another --run-dir begins a run of its own",
            config.products,
            run.directory,
        )
    return resolved, store, task, run
