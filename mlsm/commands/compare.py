"""Compare models by their evaluations: averages, tests, win rates, the paper's figures, a report."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.comparison.config import CompareConfig as Settings
from mlsm.results import Report


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Compare models by the records of finetune and evaluate_blimp."""
    from mlsm.evaluation.comparison.compare import compare

    return Report.of(compare(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show models by number, and tables whose columns are those numbers."""
    from mlsm.terminal.comparison import comparison

    return comparison(report, settings)
