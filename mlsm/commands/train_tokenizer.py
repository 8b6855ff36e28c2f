"""Train a cased WordPiece tokenizer on a corpus."""

from mlsm.common.progress import Progress, silent
from pipeline.config import TokenizerConfig as Settings

RECIPES = True
DOWNLOADS = False


def run(settings: Settings, progress: Progress = silent) -> list[str]:
    """Train a cased WordPiece tokenizer. Returns a list with its directory."""
    from pipeline.tokenizer import make_tokenizer

    return [str(path) for path in make_tokenizer(settings, progress)]


def show(made: list[str], settings: Settings) -> str:
    """Show the directory."""
    return "\n".join(made)
