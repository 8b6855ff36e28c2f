"""Train an encoder from shards."""

from mlsm.commands._newest import stores_for_the_objective
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_join
from mlsm.results import TrainedStudent
from mlsm.terminal.tables import store_rows, table
from mlsm.terminal.training import how_to_load, trained_rows
from student.config import StudentConfig as Settings
from student.objectives import LSP_OBJECTIVES, WITHOUT_WORDS

RECIPES = True
TRAINS = True  # settings left unset follow from the store that it trains on
DOWNLOADS = False
newest = stores_for_the_objective


def run(settings: Settings, progress: Progress = silent) -> TrainedStudent:
    """Train an encoder from shards; continue where an interrupted run of the same settings stopped.

    mlsm.train_student(store=store, encoder="bert-6x256")    # steps, batch size and learning rate follow from the store
    """
    from student.train import train

    progress("prepare store and student", 0, None)
    return TrainedStudent.of(train(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the store, the student, and how to load the student."""
    from mlsm.recipes.reading import asks_for_the_demonstration
    from shards.reader import Store

    store = Store.open(result["store"], result["plan"])
    lines = [
        f"\nThe student {'was finished already' if result['finished_before'] else 'is finished'}.",
        table(
            [
                *store_rows(store.path, store.report()),
                *(("and its targets of", other) for other in result.get("other_stores", ())),
                (
                    "student",
                    f"{result['encoder']}, objective {result['objective']}, {result['parameters']:,} parameters",
                ),
                *trained_rows(result, settings.positions),
                ("run", result["run"]),
                ("student exported to", result["export"]),
            ]
        ),
        how_to_load(result["export"]),
    ]
    masks = settings.positions == "masked"
    if masks and result["objective"] in LSP_OBJECTIVES and result["objective"] in WITHOUT_WORDS:
        probe = shell_join(["train-probe", "--student", result["run"], "--store", result["store"]])
        lines.append(f"\nNext, words from its LSPs:\n  {program()} {probe}")
    if asks_for_the_demonstration(store.command):
        lines += [
            "\nThis was the demonstration, with a small teacher and a small corpus. To train on your own text:\n",
            f"  {program()} encode-lsp --recipe small-encoder --corpus 'texts/*.txt' --teacher DIRECTORY",
            f"  {program()} train-student --recipe small-encoder",
        ]
    if result["objective"] in LSP_OBJECTIVES:
        pages = shell_join(["show-lsp", result["store"], "--html", "lsps"])
        word = f"{store.load_tokenizer().mask_token} " if masks else ""
        sentence = f"In {word}1995 his brother moved to London."
        text = f'{shell_join(["show-lsp", result["run"]])} --text "{sentence}"'
        lines.append(
            f"\nTo see what its LSPs represent, and what it predicts:\n  {program()} {pages}\n  {program()} {text}"
        )
    return "\n".join(lines)
