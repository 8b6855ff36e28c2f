"""Compare models by their evaluations: averages, tests, win rates, the paper's figures, a report."""

from typing import TYPE_CHECKING

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.comparison.config import CompareConfig as Settings
from mlsm.results import Compared

if TYPE_CHECKING:
    from mlsm.evaluation.comparison.result import Comparison


def run(settings: Settings, progress: Progress = silent) -> Compared:
    """Compare models by the records of finetune and evaluate_blimp."""
    from mlsm.evaluation.comparison.compare import compare

    found = compare(settings, progress)
    return Compared(found.as_report(), found)


def show(found: "Comparison", settings: Settings) -> str:
    """Show the numbered models, and tables whose columns are those numbers."""
    from mlsm.terminal.comparison import comparison

    return comparison(found, settings)
