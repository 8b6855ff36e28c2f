"""Train a linear probe that predicts words from the LSPs of a frozen student, for BLiMP."""

from mlsm.commands._newest import students
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_join
from mlsm.results import TrainedStudent
from mlsm.terminal.tables import table
from mlsm.terminal.training import how_to_load, trained_rows
from student.config import ProbeConfig as Settings

RECIPES = True
TRAINS = True  # settings left unset follow from the store that it trains on
WORKS_ON = "student"
DOWNLOADS = False
newest = students


def complete(settings: Settings) -> Settings:
    """Fill in the student and the store if the settings do not name them."""
    from student.runs.probed import with_student_and_store

    return with_student_and_store(settings)


def run(settings: Settings, progress: Progress = silent) -> TrainedStudent:
    """Train a linear probe that predicts words from the LSPs of a frozen student."""
    from student.probe import train_probe

    progress("prepare store and probe", 0, None)
    return TrainedStudent.of(train_probe(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show what a probe predicts and how to load it."""
    matrix = f"{result['parameters']:,} parameters on the {settings.probe_input} of {result['encoder']}"
    rows = [("store", result["store"]), ("probe", matrix), *trained_rows(result)]
    return "\n".join(
        [
            f"\nThe probe {'was finished already' if result['finished_before'] else 'is finished'}.",
            table([*rows, ("run", result["run"]), ("exported to", result["export"])]),
            how_to_load(result["export"]),
            "\nNext, BLiMP with it:",
            f"  {program()} {shell_join(['evaluate-blimp', result['run']])} --data-dir data/blimp",
        ]
    )
