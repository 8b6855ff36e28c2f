"""What learn-dictionary, import-dictionary and encode-images say when they are done."""

from mlsm.common.invocation import program
from mlsm.common.text import shell_join, shell_quote
from mlsm.terminal.tables import table
from pipeline.config import LearnConfig
from pipeline.images import ImagesConfig
from pipeline.imported import ImportConfig


def dictionaries(reports: list[dict], settings: LearnConfig) -> str:
    """Show the dictionaries that were learned, and the command that encodes with each."""
    lines = []
    for report in reports:
        lines.append(f"\nThe dictionary {'was finished already' if report['finished_before'] else 'is finished'}.")
        lines.append(table(_dictionary_rows(report)))
    if settings.hidden is not None and "layer" not in reports[0]:  # a file of vectors
        report = reports[0]
        lines.append(f"\nTo encode text with it, name the model of these vectors, {report['width']} wide, and a layer:")
        given = f"encode-lsp --dictionary {shell_quote(report['dictionary'])}"
        lines.append(f"  {program()} {given} --teacher ... --layer ... --corpus ...")
        shown = f"show-lsp {shell_quote(report['dictionary'])} --vectors {shell_quote(str(settings.hidden))}"
        lines.append(f"\nTo see on which of the vectors its LSPs are heaviest:\n  {program()} {shown} --html lsps")
        return "\n".join(lines)
    lines += ["\nNext:", *(f"  {program()} {_encoding_with(report, settings)}" for report in reports)]
    return "\n".join(lines)


def imported(report: dict, settings: ImportConfig) -> str:
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


def image_vectors(report: dict, settings: ImagesConfig) -> str:
    """Show the vectors of images, and the commands that learn visual LSPs from them and show these."""
    state = "were there already" if report["finished_before"] else "are written"
    rows, columns = report["grid"]
    facts = [
        ("vectors", report["vectors"]),
        ("images", f"{report['images']:,}, {rows} × {columns} patches each"),
        ("width", report["width"]),
    ]
    learn = f"{program()} learn-dictionary --hidden {shell_quote(report['vectors'])} --k 256"
    return f"\nThe vectors {state}.\n{table(facts)}\n\nNext:\n  {learn}"


def _encoding_with(report: dict, settings: LearnConfig) -> str:
    """Write the command that encodes the same corpus with this dictionary and with the same settings."""
    from mlsm.recipes.reading import recipe_settings
    from pipeline.config import EncodeConfig, plain

    of_recipe: dict = recipe_settings(settings.recipe, "encode-lsp", EncodeConfig, False) if settings.recipe else {}
    usual = plain(EncodeConfig(**of_recipe))
    now = plain(settings) | {"layer": [report["layer"]], "k": [report["k"]]}
    always = {"layer"} if settings.recipe else {"teacher", "layer", "corpus"}
    if settings.hidden is not None:
        always = {"hidden"}
        now = {name: value for name, value in now.items() if name not in ("layer", "teacher", "corpus")}
    words = ["encode-lsp", *(["--recipe", settings.recipe] if settings.recipe else [])]
    for name in [name for name in now if name in usual and name != "k"]:  # the dictionary says how many atoms it has
        flag, value = name.replace("_", "-"), now[name]
        if name not in always and value == usual[name]:
            continue
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *(value if isinstance(value, list) else ["None" if value is None else value])]
    return shell_join(map(str, [*words, "--dictionary", report["dictionary"]]))


def _closeness(report):
    """Say how close atoms are to one another; nothing about dictionaries whose facts do not hold it."""
    if "largest_cosine" not in report:
        return []
    return [
        (
            "distinct",
            f"the largest cosine of two atoms is {report['largest_cosine']:.4f}; {report['near_atoms']:,} nearly equal "
            "ones were replaced",
        )
    ]


def _dictionary_rows(report):
    """List what a dictionary holds, from `Dictionary.report`."""
    passes = f", {report['epoch']:.2g} passes" if report["epoch"] else ""  # atoms that are not learned take none
    return [
        ("dictionary", report["dictionary"]),
        ("atoms", f"{report['k']:,} of width {report['width']}, {report['dead_atoms']:,} of them dead"),
        *_closeness(report),
        ("held out", f"objective {report['objective']:.5f}, {report['explained_variance']:.1%} of variance explained"),
        ("non-zeros", f"{report['nnz']:.1f} a vector"),
        ("learned" if passes else "taken", f"from {report['vectors']:,} vectors{passes}"),
        ("stopped", report["stopped"]),
    ]
