"""Import a checkpoint of the official code: encoder, LSP head and word head as an export."""

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_join
from mlsm.results import ImportedStudent
from mlsm.terminal.tables import table
from mlsm.terminal.training import how_to_load
from student.runs.config import ImportStudentConfig as Settings


def run(settings: Settings, progress: Progress = silent) -> ImportedStudent:
    """Split a checkpoint of the official MLSM code into encoder, LSP head and word head: an export."""
    from student.runs.import_student import import_student

    return ImportedStudent.of(import_student(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show the parts of the checkpoint, how to load its export, and what to do with it."""
    words = f"{report['words']:,}"
    if not report["predicts_words"]:
        words += "; it was not trained to predict them (--mlm_weight 0), so it has no word head"
    rows = [("checkpoint", report["model"]), ("LSPs", f"{report['lsps']:,}"), ("words", words)]
    scored, data = ("evaluate-blimp", "data/blimp") if report["predicts_words"] else ("finetune", "data")
    return "\n".join(
        [
            "\nThe checkpoint is imported.",
            table([*rows, ("export", report["export"])]),
            how_to_load(report["export"]),
            "\nNext:",
            f"  {program()} {shell_join([scored, report['export'], '--data-dir', data])}",
        ]
    )
