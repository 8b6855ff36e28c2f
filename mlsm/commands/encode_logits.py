"""Encode a teacher's most probable words at every token, for distillation."""

from mlsm.common.progress import Progress, silent
from mlsm.results import EncodedStore, stores_or_estimates
from mlsm.terminal.encoding import code_of_quarantine, encoding
from pipeline.config import EncodeLogitsConfig as Settings

RECIPES = True
exit_code = code_of_quarantine
show = encoding


def run(settings: Settings, progress: Progress = silent) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's most probable words, for distillation: a list of one store."""
    from pipeline.commands import encode_logits

    return stores_or_estimates(encode_logits(settings, progress))
