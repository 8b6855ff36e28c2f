"""Derive a store with fewer entries per token from a stored one, without the teacher."""

from mlsm.commands._newest import stores_with_entries
from mlsm.common.progress import Progress, silent
from mlsm.results import EncodedStore
from mlsm.terminal.encoding import encoding
from shards.config import DeriveConfig as Settings

newest = stores_with_entries


def show(report: dict, settings: Settings) -> str:
    """Show the store that was made, and the command that trains on it."""
    return encoding([report], settings)


def run(settings: Settings, progress: Progress = silent) -> EncodedStore:
    """Make a store with fewer entries per token from a stored one, without the teacher."""
    from shards.derive import derive_shards

    return EncodedStore.of(derive_shards(settings, progress)[0])
