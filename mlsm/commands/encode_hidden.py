"""Encode a teacher's hidden states, to code or to learn from without it."""

from mlsm.common.progress import Progress, silent
from mlsm.results import EncodedStore, stores_or_estimates
from mlsm.terminal.encoding import code_of_quarantine, encoding
from pipeline.config import EncodeHiddenConfig as Settings

RECIPES = True
exit_code = code_of_quarantine
show = encoding


def run(settings: Settings, progress: Progress = silent) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's hidden states: a list of one store for each layer."""
    from pipeline.commands import encode_hidden

    return stores_or_estimates(encode_hidden(settings, progress))
