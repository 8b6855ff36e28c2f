"""Settings of `compare`, and what a study tells it that no record can. Imports nothing heavy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlsm.common.settings import Positional, check


@dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Compare models by the records of finetune and evaluate-blimp."""

    results: Positional[tuple[Path, ...]] = ()
    """Records, or directories that are searched for them; unset: runs/evaluations."""
    output: Path = Path("runs/comparison")
    """Directory of the page (report.html), the tables (CSV, LaTeX) and the figures (SVG, PNG, CSV). Files of these
    names that are already there are replaced."""
    paper: bool = False
    """Show the numbers of the paper's tables 1 to 4 next to your own."""
    diagnostic: Path | None = None
    """result.json of choose-layer, for figure 4: word-sense F1 next to the fine-tuning averages."""
    intruders: tuple[Path, ...] = ()
    """Outputs of `show-lsp --intruders --json`: how interpretable each model's LSPs are is added to the table of
    models."""

    def __post_init__(self):
        check(self)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """The cost of one part of a study."""

    name: str
    predicted_seconds: float | None = None
    measured_seconds: float | None = None
    """of a quiet machine; None: not run yet, or not measured"""
    bytes: int | None = None
    """on the disk, as predicted; None: not predicted"""


@dataclass(frozen=True, kw_only=True)
class StudyFacts:
    """The plan of a study and the costs of its parts.

    An arm is one way to pre-train: all its runs differ in the pre-training seed alone. A hypothesis names two arms,
    (better, than), or earlier checkpoints of arms, as in "mlsm at 50%".
    """

    title: str
    question: str
    primary: tuple[str, str]
    """the one hypothesis that is tested at 5 %, unadjusted"""
    planned: bool = True
    """whether it was fixed before its scores were seen; else it is shown as exploratory"""
    secondary: tuple[tuple[str, str], ...] = ()
    """hypotheses that are tested at 5 % together, by Holm's method"""
    exploratory: tuple[str, ...] = ()
    """sentences about results that are shown but were not planned as tests"""
    arms: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """name of an arm -> names of its runs, and of their probes; empty: arms are found by the settings of pre-training
    and are named after the settings that distinguish them, or after their objective if only one arm has it"""
    models: tuple[str, ...] = ()
    """names of the models that are evaluated besides the arms; if arms are named, other models are left out"""
    seeds: tuple[int, ...] = ()
    """the planned pre-training seeds: no other is tested; empty: all are"""
    seeds_of: Mapping[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)
    """hypothesis -> its planned seeds, where they are others than `seeds`"""
    tasks: tuple[str, ...] = ()
    """the fine-tuning tasks whose mean is tested, chosen in the pilot; empty: all that both arms have"""
    learned_by: str | None = None
    """name of an arm: only those tasks are tested in which it is above the untrained encoder by more than two standard
    errors over two or more seeds; None: all tasks"""
    parts: tuple[Spent, ...] = ()
    accounts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """name of an arm -> everything else that its training needed, such as "encoding", in the same order for all arms
    -> seconds on a quiet machine. The table shows costs without these, then adds them one by one. Empty: the arm needed
    nothing else; absent: unknown"""
    warning: str = ""
    """a sentence above the conclusion that says why the scores mean nothing; empty if they mean something"""
    changed: str = ""
    """a sentence next to the conclusion on what was changed after the first scores; empty if nothing was"""
    not_run: tuple[str, ...] = ()
    """sentences on what was planned and not run, and why"""
    composite: Mapping[str, Any] | None = None
    """the result of `compose` (mlsm/evaluation/studies/protocol/composite.py), which the hypotheses are then about:
    comparisons of fine-tuning scores are exploratory. None: the hypotheses are about the mean fine-tuning score"""

    @property
    def withheld(self) -> bool:
        """Whether the study withholds its primary hypothesis, so that none of its records may be shown."""
        return self.composite is not None and self.composite["withheld"]
