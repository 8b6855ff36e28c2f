"""Encode text with a teacher: sparse codes of every token, as LSP shards."""

from mlsm.common.progress import Progress, silent
from mlsm.results import EncodedStore, stores_or_estimates
from mlsm.terminal.encoding import code_of_quarantine, encoding
from pipeline.config import EncodeConfig as Settings

RECIPES = True
exit_code = code_of_quarantine
show = encoding


def run(settings: Settings, progress: Progress = silent) -> list[EncodedStore]:
    """Encode a corpus into LSP shards: a store for each layer and k, from one pass of the teacher.

    mlsm.encode_lsp(teacher="bert-base-cased", layer=10, corpus="wiki/*.txt")
    With dry_run=True it returns a list of one Estimate and keeps no files.
    """
    from pipeline.commands import encode_lsp

    return stores_or_estimates(encode_lsp(settings, progress))
