"""The commands over finished stores, called with their settings as the command line and `import mlsm` call them.

    report = verify_shards(VerifyConfig(store="runs/stores/lsp-..."))

Left out: the work itself (verify.py, derive.py, clean.py).
"""

from shards.config import CleanConfig, DeriveConfig, VerifyConfig


def _silent(*_, **__):
    """The progress that nobody wants to see."""


def verify_shards(settings: VerifyConfig, progress=_silent) -> dict:
    """Check that a store is whole. Returns and raises what shards.verify.verify does."""
    from shards.verify import verify

    return verify(settings.store, settings.full, settings.repair, progress=progress)


def derive_shards(settings: DeriveConfig, progress=_silent) -> list[dict]:
    """Make a store with a smaller n. Returns its report, alone in a list as of an encoding; raises what derive does."""
    from shards.derive import derive

    return [derive(settings.store, settings.top_n, settings.output, progress)]


def clean(settings: CleanConfig, progress=_silent) -> dict:
    """Remove left-overs. Returns and raises what shards.clean.clean does."""
    from shards.clean import clean

    return clean(settings.path, settings.dry_run, settings.all)
