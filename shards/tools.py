"""The commands on finished stores, as functions of their settings. Both command line and `import mlsm` call them.

    report = verify_shards(VerifyConfig(store="runs/stores/lsp-..."))

Not handled here: the work itself (verify.py, derive.py, export.py, clean.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlsm.common.progress import silent
from shards.config import CleanConfig, DeriveConfig, ExportStoreConfig, VerifyConfig


def verify_shards(settings: VerifyConfig, progress: Callable[..., None] = silent) -> dict:
    """Check that a store is whole. Returns and raises what shards.verify.verify does."""
    from shards.verify import verify

    return verify(store_of(settings), settings.full, settings.repair, progress=progress)


def derive_shards(settings: DeriveConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Make a store with a smaller n. Returns a list with its report, like an encoding command; raises derive's
    errors."""
    from shards.derive import derive

    return [derive(store_of(settings), settings.top_n, settings.output, progress)]


def export_store(settings: ExportStoreConfig, progress: Callable[..., None] = silent) -> dict:
    """Write a store as Parquet files. Returns and raises what shards.export.export does."""
    from shards.export import export

    return export(store_of(settings), settings.output, progress)


def clean(settings: CleanConfig, progress: Callable[..., None] = silent) -> dict:
    """Remove left-overs. Returns and raises what shards.clean.clean does."""
    from shards.clean import clean

    return clean(settings.path, settings.dry_run, settings.all)


def store_of(settings: Any) -> str | Path:
    """The store that the settings name; callers fill in the newest one if the settings name none."""
    if settings.store is None:
        raise ValueError("STORE is missing: name the directory or the URL of a store")
    return settings.store
