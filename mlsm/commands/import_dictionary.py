"""Import a dictionary of the official code, or any .npy file of atoms."""

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.results import SavedDictionary
from mlsm.terminal.tables import table
from pipeline.imported import ImportConfig as Settings

DOWNLOADS = False


def run(settings: Settings, progress: Progress = silent) -> SavedDictionary:
    """Make a dictionary from a .npy file of atoms, such as the official code's: file="layer_10_k_3000.npy"."""
    from pipeline.imported import import_dictionary

    return SavedDictionary.of(import_dictionary(settings, progress))


def show(report: dict, settings: Settings) -> str:
    """Show the dictionary that was imported, and the command that encodes with it."""
    zeros = f", {report['zero_atoms']:,} of them zero" if report["zero_atoms"] else ""
    rows = [
        ("dictionary", report["dictionary"]),
        ("atoms", f"{report['k']:,} of width {report['width']}{zeros}; the {report['orientation']} of the file"),
        ("numbers", f"{report['dtype']}, kept as float32; the largest norm is {report['largest_norm']:.6f}"),
    ]
    state = "was imported already" if report["finished_before"] else "is imported"
    given = f"encode-lsp --dictionary {shell_quote(report['dictionary'])}"
    return (
        f"\nThe dictionary {state}.\n{table(rows)}\n\nTo encode with it, name the teacher that it was learned from, "
        f"{report['width']} wide, and the layer:\n  {program()} {given} --teacher ... --layer ... --corpus ..."
    )
