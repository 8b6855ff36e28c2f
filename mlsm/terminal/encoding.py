"""The output of the encoding commands and of derive-shards when they are done, and of --dry-run."""

from mlsm.common.errors import EXIT_QUARANTINE
from mlsm.common.invocation import program
from mlsm.common.text import shell_join
from mlsm.terminal.process import complain
from mlsm.terminal.tables import duration, quantity, size, store_rows, table
from pipeline.config import EncodeHiddenConfig
from student.objectives import USUAL_OBJECTIVE


def objective_of(kind: str) -> list[str]:
    """The option with which train-student learns from a store of this kind; none if it is the default."""
    return [] if kind == "lsp" else ["--objective", USUAL_OBJECTIVE[kind]]


def encoding(reports: list[dict], settings: object) -> str:
    """Show the new stores, the command that trains on each, and the command that shows LSPs."""
    if getattr(settings, "dry_run", False):
        return show_estimate(reports[0])
    lines = []
    for report in reports:
        lines.append(f"\nThe store {'was finished already' if report['finished_before'] else 'is finished'}.")
        rows = store_rows(report["store"], report)
        if "dictionary" in report:
            rows.append(("dictionary", report["dictionary"]))
        if report["new_units"]:
            tokens, seconds = report["new_tokens"], report["seconds"]
            rows.append(("this run", f"{tokens:,} tokens in {duration(seconds)} ({tokens / seconds:,.0f}/s)"))
        lines.append(table(rows))
    lines += corpus_lines(reports[0].get("corpus"))
    kind = reports[0]["kind"]
    stores = [shell_join(["train-student", "--store", report["store"], *objective_of(kind)]) for report in reports]
    lines += ["\nNext:", *(f"  {program()} {words}" for words in stores)]
    if getattr(settings, "recipe", "") is None:  # without a recipe nothing names an encoder
        small = "--recipe small-encoder --lr 0.004" if kind == "ids" else "--encoder modernbert-2x128"
        lines.append(f"  The default student has the size of BERT-base. A small one: {small}")
    if isinstance(settings, EncodeHiddenConfig) and settings.quantise == "int8":
        output = [] if settings.output == EncodeHiddenConfig.output else ["--output", str(settings.output)]
        lines += ["\nTo learn LSPs of them instead:"]
        for report in reports:
            words = ["encode-lsp", "--hidden", report["store"], *_atoms(settings), *output]
            lines.append(f"  {program()} {shell_join(words)}")
    if kind == "lsp":
        show = shell_join(["show-lsp", reports[0]["store"], "--html", "lsps"])
        lines.append(f"\nTo see what its LSPs represent:\n  {program()} {show}")
    return "\n".join(lines)


def _atoms(settings):
    """The options of encode-lsp that say how many atoms are learned: the recipe, if it says so."""
    from mlsm.recipes.reading import read_recipe

    if settings.recipe is None or "encode-lsp" not in read_recipe(settings.recipe)[1]:
        return ["--k", "1024"]
    return ["--recipe", settings.recipe]


def show_estimate(report: dict) -> str:
    """Show the results of --dry-run."""
    rows = [
        ("tokens", f"about {report['tokens']:,} in {quantity(report['units'], 'unit')}"),
        ("size", f"about {size(report['bytes'])} ({report['bytes_per_token']:.1f} bytes per token and store)"),
        ("disk", f"{size(report['disk_free'])} are free" + (": TOO LITTLE" * (report["bytes"] > report["disk_free"]))),
        ("time", f"about {duration(report['seconds'])} at {report['tokens_per_second']:,.0f} tokens/s in one process"),
    ]
    if report.get("lacking"):
        time = duration(report["learning_seconds"])
        rows.append(("dictionaries", f"{report['lacking']} to be learned first, about {time}"))
    if report["kept"]:
        kept = ", ".join(f"{mass:.1%} of the mass in {n} entries per token" for n, mass in report["kept"])
        rows.append(("kept", f"{kept} at most"))
    slowest, fastest = (f"{report[name]:,.0f}" for name in ("slowest", "fastest"))
    spread = f"{slowest} to {fastest}" if slowest != fastest else slowest
    measured = (
        f"{report['measured_tokens']:,} tokens of the corpus, encoded just now at {spread} tokens/s; nothing was kept"
    )
    return "\n".join(["\nAn estimate:", table([*rows, ("measured", measured)]), *corpus_lines(report.get("corpus"))])


def corpus_lines(corpus: dict | None) -> list[str]:
    """Show the number of documents of the corpus, in total and by file; nothing if the report has no counts (None)."""
    if corpus is None:
        return []
    listed = corpus["files_listed"]
    one = f"{listed[0]['file']}" if corpus["files"] == 1 else f"{corpus['files']:,} files"
    cut = ", before --max-tokens" if corpus["max_tokens"] else ""
    lines = [f"\nThe text{cut}: {one}: {_documents(corpus)}"]
    if corpus["files"] > 1:
        rows = [(entry["file"], _documents(entry)) for entry in listed]
        rest = {name: corpus[name] - sum(entry[name] for entry in listed) for name in listed[0] if name != "file"}
        others = corpus["files"] - len(listed)
        lines.append(table(rows + ([(f"{others:,} others", _documents(rest))] if others else [])))
    return lines


def _documents(counts):
    more = [f"{quantity(counts['duplicates'], 'duplicate')} left out"] if counts["duplicates"] else []
    left_out = {"blank": "blank", "too_short": "too short", "invalid": "not UTF-8"}
    more += [f"{counts[name]:,} {words}" for name, words in left_out.items() if counts[name]]
    return ", ".join([quantity(counts["documents"], "document"), f"{counts['held_out_documents']:,} held out", *more])


def code_of_quarantine(
    reports: list[dict], advice: str = "Run the same command with --retry-quarantine to try them again"
) -> int:
    """Return the exit code of an encoding: 5, with a printed line, if documents could not be encoded; else 0."""
    count = sum(report.get("quarantined", 0) for report in reports)  # an estimate has none
    if not count:
        return 0
    stores = ", ".join(report["store"] for report in reports if report["quarantined"])
    return complain(
        f"finished, but {count} documents could not be coded and have no targets; the records in {stores}/units name "
        f"them and the reasons. {advice}",
        EXIT_QUARANTINE,
    )
