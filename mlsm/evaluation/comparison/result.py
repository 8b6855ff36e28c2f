"""The result of `compare`, from which its page, tables, figures, terminal view and --json are made.

    result = compare(settings, progress)
    result.tests[0].conclusion.sentence
    result.as_report()["significance"]["scores"]["p"][0][1]     # the dict that --json prints

Scores are fractions, and so are their differences. Not handled here: how the numbers are computed (models.py,
effects.py) and shown (tables.py, figures.py, paper.py, page.py, mlsm/terminal/comparison.py).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

from mlsm.evaluation.comparison.arms import Arm, Arms
from mlsm.evaluation.comparison.conclusion import Test
from mlsm.evaluation.comparison.config import StudyFacts
from mlsm.evaluation.comparison.curves import Course, Reached
from mlsm.evaluation.comparison.effects import (
    LEVELS,
    AlongTheWay,
    ArmScores,
    BlimpPair,
    Contest,
    LeftOut,
    Matrices,
    WinRate,
)
from mlsm.evaluation.comparison.identity import Differences, differences
from mlsm.evaluation.comparison.models import (
    Model,
    SuiteFigure,
    average,
    blimp_average,
    checkpoint_name,
)


class FigureMean(NamedTuple):
    """A model's mean of one figure of the suite over its fine-tuning seeds.

    sd      None with one seed
    failed  how many of its fine-tuning runs on this task diverged or collapsed; their scores are included
    """

    task: str
    metric: str
    mean: float
    sd: float | None
    seeds: int
    failed: int


class BlimpMean(NamedTuple):
    """A model's mean BLiMP accuracy: over its own paradigms, and over those common to all models that were scored in
    the same way.

    pairs, ties  numbers of sentence pairs
    """

    average: float
    paradigms: int
    pairs: int
    common_average: float | None
    common_paradigms: int
    ties: int


@dataclass(frozen=True)
class Summary:
    """One model.

    average         over the suite's figures that it has; None if it has none
    common_average  over the figures that all fine-tuned models have, so these are comparable; None if there are none
    intruder_auc    AUC of the LSPs of the store that it learned from; None if the store was not judged
    """

    model: Model
    average: float | None
    common_average: float | None
    figures: list[FigureMean]
    blimp: BlimpMean | None
    intruder_auc: float | None

    @property
    def label(self) -> str:
        """The model's name."""
        return self.model.label

    @property
    def n(self) -> int:
        """How many scores of the suite it has."""
        return len(self.model.scores)

    @property
    def fields(self) -> dict[str, Any]:
        """All fields by their names in tables and --json."""
        return {
            "model": self.label,
            **self.model.facts,
            "checkpoint": checkpoint_name(self.model),
            "n": self.n,
            "average": self.average,
            "common_average": self.common_average,
            "figures": [figure._asdict() for figure in self.figures],
            "mass_kept": self.model.kept,
            "failed": [{"task": task, "seed": seed, "why": why} for (task, seed), why in self.model.failed.items()],
            "blimp": self.blimp and self.blimp._asdict(),
            "intruder_auc": self.intruder_auc,
        }


class FrozenScore(NamedTuple):
    """One score of a frozen encoder. n: number of examples."""

    model: str
    task: str
    metric: str
    value: float
    n: int


class PairDifferences(NamedTuple):
    """The settings of pre-training in which two models differ.

    unknown  whether some settings of either are not recorded
    alone    whether at most one thing differs and nothing is unknown
    """

    model: str
    against: str
    differ_in: list[str]
    unknown: bool
    alone: bool


class PaperFigure(NamedTuple):
    """One of the paper's figures, drawn from these records.

    figure   its number in the paper
    models   whose numbers it shows; caption, whether they differ only in what the figure is about. None if not drawn
    lacks    what it needs; None if it is drawn
    """

    figure: int
    shows: str
    files: list[str]
    models: str | None
    caption: str | None
    lacks: str | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of some records. Lists of models are in the order of `summaries`.

    The first fields are about single models, from all records:
    """

    records: int
    summaries: Sequence[Summary]
    figures_in_common: Sequence[SuiteFigure]
    """that all fine-tuned models have"""
    compared: Sequence[str]
    """the fine-tuned models, M: the rows and columns of the matrices"""
    significance: Mapping[str, Matrices]
    """by name of a level in `effects.LEVELS`; (M, M) each"""
    win_rates: Sequence[WinRate]
    frozen: Sequence[FrozenScore]
    blimp: Sequence[BlimpPair]
    differences: Differences
    """the settings in which the models differ"""
    pairs: Sequence[PairDifferences]
    """the same for every pair of models"""
    left_out: Sequence[LeftOut]
    notes: Sequence[str]

    # The next fields are about arms:
    study: StudyFacts | None
    """the study with the tasks that it tests; None if nothing was planned"""
    arms: Arms
    tasks: Sequence[str]
    """tasks whose mean is compared"""
    tests: Sequence[Test]
    """tests of the hypotheses, the primary one first; empty if there is no obvious pair of arms"""
    scores: Sequence[ArmScores]
    contests: Sequence[Contest]
    arms_differ: Differences
    """the settings in which the arms differ, by the arms' names"""
    rivals: Sequence[Arm]
    """the two arms of the first hypothesis; empty if one has no records"""
    along_the_way: Sequence[AlongTheWay]
    """effects between the checkpoints of these two arms"""
    courses: Sequence[Course]
    """the runs' logs"""
    reached: Sequence[Reached]
    """mean scores of checkpoints"""
    notes_on_tasks: Sequence[str]

    # The last fields are about the files:
    tables: Sequence[str] = ()
    """CSV files of single models"""
    figures: Sequence[PaperFigure] = ()
    report: str = ""
    """the page with all results"""

    @property
    def models(self) -> list[Model]:
        """All models."""
        return [summary.model for summary in self.summaries]

    @property
    def composite(self) -> Mapping[str, Any] | None:
        """The study's composites and their contrasts; None if its hypotheses are about fine-tuning."""
        return self.study.composite if self.study else None

    @property
    def withheld(self) -> bool:
        """Whether the study withholds its primary hypothesis, so that no record was read."""
        return self.study is not None and self.study.withheld

    @property
    def conclusion(self) -> list[str]:
        """The sentences on the first hypothesis about fine-tuning; empty if no two arms are compared."""
        said = [said for test in self.tests[:1] for said in (test.conclusion.sentence, *test.conclusion.beside)]
        return [*said, *self.notes_on_tasks] if said else []

    def as_report(self) -> dict[str, Any]:
        """The dict that --json prints: results of single models, the files, and the conclusion on the arms."""
        return {
            "records": self.records,
            "models": [summary.fields for summary in self.summaries],
            "common_figures": len(self.figures_in_common),
            "levels": {level.name: {"meaning": level.meaning, "full": level.full} for level in LEVELS},
            "significance": {level: cells._asdict() for level, cells in self.significance.items()},
            "compared": list(self.compared),
            "win_rates": [rate._asdict() for rate in self.win_rates],
            "frozen": [score._asdict() for score in self.frozen],
            "blimp": [pair._asdict() for pair in self.blimp],
            "differences": {
                "settings": self.differences.settings,
                "unknown": self.differences.unknown,
                "pairs": [pair._asdict() for pair in self.pairs],
            },
            "left_out": [found._asdict() for found in self.left_out],
            "notes": list(self.notes),
            "tables": list(self.tables),
            "figures": [figure._asdict() for figure in self.figures],
            "conclusion": self.conclusion,
            "report": self.report,
        }


def summarise_model(
    model: Model, figures: Collection[SuiteFigure], paradigms: Collection[str], aucs: Mapping[str, float | None]
) -> Summary:
    """One model for the result.

    figures, paradigms  those that all models have, so that averages are comparable
    aucs                intruder AUC by target of a store
    """
    failed = [task for task, _ in model.failed]
    return Summary(
        model,
        average(model) if model.figures else None,
        average(model, figures) if figures and model.trainings else None,
        [
            FigureMean(task, metric, fmean(of), stdev(of) if len(of) > 1 else None, len(of), failed.count(task))
            for (task, metric), of in model.values.items()
        ],
        _summarise_blimp(model, paradigms),
        aucs.get(model.target) if model.target else None,
    )


def _summarise_blimp(model: Model, paradigms: Collection[str]) -> BlimpMean | None:
    if model.blimp is None:
        return None
    figures = model.blimp["figures"]
    return BlimpMean(
        blimp_average(model),
        len(figures),
        sum(figure["n"] for figure in figures),
        blimp_average(model, paradigms) if paradigms else None,
        len(paradigms),
        sum(figure.get("ties", 0) for figure in figures),
    )


def pairs_of(models: Sequence[Model]) -> list[PairDifferences]:
    """The differences of every pair of models."""
    pairs = []
    for i, model in enumerate(models):
        for other in models[i + 1 :]:
            found = differences([model, other])
            pairs.append(
                PairDifferences(model.label, other.label, list(found.settings), bool(found.unknown), found.alone)
            )
    return pairs
