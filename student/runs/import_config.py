"""Settings of import-student. Imports nothing heavy."""

from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import Positional, check, require


@dataclass(frozen=True, kw_only=True)
class ImportStudentConfig:
    """Make an export from a checkpoint of the official MLSM code."""

    model: Positional[str | None] = None
    """Directory of a checkpoint that the official code saved, or a Hub id, like SzegedAI/babylm-strict-mlsm."""
    max_length: int = 128
    """Tokens of the longest window that it was trained on, special ones included: the official code's --max-seq-len,
    which the checkpoint does not say."""
    output: Path | None = None
    """Directory to write; unset: runs/exports/<name of the checkpoint>, unless that holds another
    import."""

    def __post_init__(self):
        check(self)
        if self.model is None:
            raise ValueError("MODEL is missing: a checkpoint of the official MLSM code, a directory or a Hub id")
        require(self, "max_length", lambda value: 3 <= value <= 65_535, "from 3 to 65535")
