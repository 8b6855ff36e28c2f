"""Settings of export-student and import-student. Imports nothing heavy."""

import re
from dataclasses import dataclass
from pathlib import Path

from mlsm.common.settings import Positional, check, require


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Export a checkpoint of a run, finished or not, and push it to the Hub."""

    run: Positional[Path | None] = None
    """Directory of a run of train-student or train-probe; unset: the newest under ./runs."""
    step: str = "latest"
    """`latest`, the newest whole one, or the optimiser step of one."""
    output: Path | None = None
    """Directory to write; unset: runs/exports/<run>-step-<step>."""
    store: tuple[str, ...] | None = None
    """Directory or URL of the run's store, which a checkpoint that is not kept needs, or of all its stores in the run's
    order; unset: those that the run names."""
    push_to_hub: str | None = None
    """Also push to this Hub repository, like someone/student: the export as main, every kept checkpoint as a branch
    step-<step>. Needs a token (`hf auth login`, or HF_TOKEN)."""
    private: bool = False
    """Make the repository private, if it is new."""
    license: str | None = None
    """The licence that the model card names, by its identifier on the Hub, like apache-2.0; none unless given, since it
    also depends on the text and on the teacher."""
    language: tuple[str, ...] = ()
    """The languages of the text, for the model card: codes of ISO 639, like en de, or `multilingual`, `code`."""
    dry_run: bool = False
    """Keep and push nothing; list what would be pushed."""

    def __post_init__(self):
        check(self)
        if self.step != "latest" and not self.step.isdecimal():
            raise ValueError(f"--step is `latest` or an optimiser step, found {self.step}")
        if self.license is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", self.license):
            raise ValueError(f"--license is an identifier of the Hub's, like apache-2.0 or other, found {self.license}")
        if wrong := [code for code in self.language if not re.fullmatch("[a-z]{2,3}|multilingual|code", code)]:
            raise ValueError(f"--language takes codes of ISO 639, like en or deu, found {wrong[0]}")


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
