"""Learn LSP atoms from a teacher, stored hidden states or a .npy file (encode-lsp does when it needs them)."""

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_join, shell_quote
from mlsm.results import LearnedDictionary
from mlsm.terminal.tables import table
from pipeline.config import OF_LEARNING, EncodeConfig
from pipeline.config import LearnConfig as Settings

RECIPES = True


def run(settings: Settings, progress: Progress = silent) -> list[LearnedDictionary]:
    """Learn the dictionary of each layer and k of a teacher, or one of the vectors in a file: hidden="states.npy"."""
    from pipeline.learn import learn_dictionary

    return [LearnedDictionary.of(report) for report in learn_dictionary(settings, progress)]


def show(reports: list[dict], settings: Settings) -> str:
    """Show the learned dictionaries, and the command that encodes with each."""
    lines = []
    for report in reports:
        lines.append(f"\nThe dictionary {'was finished already' if report['finished_before'] else 'is finished'}.")
        lines.append(table(_dictionary_rows(report, settings)))
    if settings.hidden is not None and "layer" not in reports[0]:  # a file of vectors
        report = reports[0]
        lines.append(
            f"\nTo encode text with it, name the model and the layer that these vectors of width {report['width']} "
            "are from:"
        )
        lam = [] if settings.lam == EncodeConfig.lam else ["--lam", settings.lam]
        given = shell_join(["encode-lsp", "--dictionary", report["dictionary"], *lam])
        lines.append(f"  {program()} {given} --teacher ... --layer ... --corpus ...")
        shown = f"show-lsp {shell_quote(report['dictionary'])} --vectors {shell_quote(str(settings.hidden))}"
        lines.append(f"\nTo see on which of the vectors its LSPs are heaviest:\n  {program()} {shown} --html lsps")
        return "\n".join(lines)
    lines += ["\nNext:", *(f"  {program()} {_encoding_with(report, settings)}" for report in reports)]
    return "\n".join(lines)


def _encoding_with(report: dict, settings: Settings) -> str:
    """Write the command that encodes the same corpus with this dictionary and with the same settings."""
    from mlsm.common.settings import plain
    from mlsm.recipes.reading import recipe_settings

    of_recipe: dict = recipe_settings(settings.recipe, "encode-lsp", EncodeConfig, False) if settings.recipe else {}
    usual = plain(EncodeConfig(**of_recipe))
    now = plain(settings) | {"layer": [report["layer"]], "k": [report["k"]]}
    always = {"layer"} if settings.recipe else {"teacher", "layer", "corpus"}
    if settings.hidden is not None:
        always = {"hidden"}
        now = {name: value for name, value in now.items() if name not in ("layer", "teacher", "corpus")}
    words = ["encode-lsp", *(["--recipe", settings.recipe] if settings.recipe else [])]
    for name in [name for name in now if name in usual and name not in ("k", *OF_LEARNING)]:  # it is learned
        flag, value = name.replace("_", "-"), now[name]
        if name not in always and value == usual[name]:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, list) else ["None" if value is None else value])]
    return shell_join(map(str, [*words, "--dictionary", report["dictionary"]]))


def _closeness(report, settings):
    """Say how close atoms are to one another; empty for dictionaries without this measurement."""
    from pipeline.dictionary.near import NEAR

    if "largest_cosine" not in report:
        return []
    closeness = f"the largest cosine of two atoms is {report['largest_cosine']:.4f}; {report['near_atoms']:,} nearly "
    closeness += "equal ones were replaced"
    if report["largest_cosine"] > NEAR and report["epoch"]:  # centroids are left as k-means finds them
        closeness += "; others are left, because the vectors are too similar"
        closeness += ": try --center mean" * (settings.hidden is None and settings.center == "none")
    return [("distinct", closeness)]


def _dictionary_rows(report, settings):
    """List facts about a dictionary, from `Dictionary.report`."""
    passes = f", {report['epoch']:.2g} passes" if report["epoch"] else ""  # 0 for atoms that are not learned
    return [
        ("dictionary", report["dictionary"]),
        ("atoms", f"{report['k']:,} of width {report['width']}, {report['dead_atoms']:,} of them dead"),
        *_closeness(report, settings),
        ("held out", f"objective {report['objective']:.5f}, {report['explained_variance']:.1%} of variance explained"),
        ("non-zeros", f"{report['nnz']:.1f} per vector"),
        ("learned" if passes else "taken", f"from {report['vectors']:,} vectors{passes}"),
        ("stopped", report["stopped"]),
    ]
