"""Encode text as shards of token ids only, for the mlm objective."""

from mlsm.common.progress import Progress, silent
from mlsm.results import EncodedStore, stores_or_estimates
from mlsm.terminal.encoding import code_of_quarantine, encoding
from pipeline.config import EncodeIdsConfig as Settings

RECIPES = True
exit_code = code_of_quarantine
show = encoding


def run(settings: Settings, progress: Progress = silent) -> list[EncodedStore]:
    """Encode a corpus into shards of token ids, all that the mlm objective needs: a list of one store."""
    from pipeline.commands import encode_ids

    return stores_or_estimates(encode_ids(settings, progress))
