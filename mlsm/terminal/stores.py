"""What the tools for stores say: the reports of shards/ and mlsm/evaluation/inspection/stores.py as text."""

from collections.abc import Sequence
from pathlib import Path

from mlsm.common.invocation import program
from mlsm.common.text import shell_quote
from mlsm.terminal.tables import entries_name, quantity, size, store_rows, table
from shards.config import VerifyConfig

_LONGEST_LIST = 50
_LINEAGE = (
    "teacher_name",
    "tokenizer_name",
    "layer",
    "k",
    "lam",
    "top_n",
    "derived_from",
    "hidden",
    "quantise",
    "width",
    "solver",
    "tolerance",
    "masked_passes",
    "dtype",
    "documents_apart",
    "segments",
)


def verification(report: dict, settings: VerifyConfig) -> str:
    """Show what verify-shards found: damage first, the way to repair it last."""
    damaged = report["damaged"]
    how = "every byte was read" if report["full"] else "records, sizes and end marks; --full reads every byte"
    rate = f" in {report['seconds']:.1f} s" + (
        f" ({report['bytes'] / report['seconds'] / 1e6:,.0f} MB/s)" if report["full"] and report["seconds"] else ""
    )
    checked = f"{quantity(report['units'], 'unit')}, {report['bytes']:,} bytes{rate}: {how}"
    rows = [("store", report["store"]), ("checked", checked)]
    for plan in report["plans"]:
        state = f"{plan['missing']:,} of {plan['units']:,} units are missing" if plan["missing"] else "finished"
        rows.append(("plan", f"{plan['plan']}: {state}"))
    lines = ["", _verdict(report), table(rows)]
    places = []
    for entry in damaged:
        block = f", block {entry['block']} (bytes {entry['offset']:,} to {entry['offset'] + entry['length']:,})"
        places.append(f"{entry['file']}{block if entry['block'] else ''}: {entry['problem']}")
    lines += _list("Damaged", places)
    units = []
    for entry in report["missing"]:
        first, last = entry["records"]
        units.append(f"unit {entry['unit']} ({entry['split']}, records {first:,} to {last:,} of {entry['source']})")
    lines += _list("Missing", units)
    stray = [f"{entry['file']}  {entry['kind']}, {entry['bytes']:,} bytes" for entry in report["stray"]]
    lines += _list(f"Stray, and ignored by readers ({program()} clean removes left-overs)", stray)
    lines += _list("Removed", report["repaired"])
    if damaged and "://" in report["store"]:
        lines.append(
            "\nNext, where the store was made:\n"
            f"  {program()} verify-shards <its directory> --repair     # names what encodes the damaged units again\n"
            "  and copy the store again"
        )
    if report["commands"]:
        lines.append("\nNext:")
        if damaged and not settings.repair:
            lines.append(
                f"  {program()} verify-shards {shell_quote(report['store'])} --repair     # removes what is damaged"
            )
        lines += [f"  {line}" for line in report["commands"]]
        if any(" --corpus " in line for line in report["commands"]):
            lines.append(
                "  with the same --max-tokens, --unit-tokens, --text-field and --document-boundary as then, if any"
            )
        place, digits = Path(report["store"]).absolute(), report["target"][:12]
        if place.parent.name != "stores" or not place.name.endswith(f"-{digits}"):
            wanted = f"{place.parent.parent}/stores/*-{digits}"
            lines.append(f"\nThe store was moved or renamed: the last command above looks for {wanted}.")
            lines.append("Move it there first, or all of it is encoded anew, and give verify-shards its new place.")
    return "\n".join(lines)


def _verdict(report):
    if report["damaged"]:
        units = {entry["unit"] for entry in report["damaged"]} - {None}
        return f"The store is damaged: {quantity(len(report['damaged']), 'place')} in {quantity(len(units), 'unit')}."
    if report["missing"] or not report["plans"]:
        return "Nothing is damaged; the store is unfinished."
    return "The store is whole."


def _list(title, entries):
    if not entries:
        return []
    more = [f"... and {len(entries) - _LONGEST_LIST:,} more (--json lists all)"] if len(entries) > _LONGEST_LIST else []
    return [f"\n{title}:", *(f"  {entry}" for entry in [*entries[:_LONGEST_LIST], *more])]


def exporting(report: dict, settings: object) -> str:
    """Show the files that export-store made, and the line of Python that reads them."""
    rows = [("directory", report["output"]), ("store", report["store"]), ("size", size(report["bytes"]))]
    for split, counts in report["splits"].items():
        lacking = f", {counts['quarantined']:,} with quarantined documents" if counts["quarantined"] else ""
        rows.append((split, f"{quantity(counts['windows'], 'window')} in {quantity(counts['files'], 'file')}{lacking}"))
    state = "was finished already" if report["finished_before"] else "is finished"
    lines = ["", f"The export {state}.", table(rows), "\nTo read it in Python:"]
    return "\n".join([*lines, f"  datasets.load_dataset({report['output']!r})"])


def cleaning(report: dict, settings: object) -> str:
    """List what clean removed, or would remove."""
    done = "Would remove" if report["dry_run"] else "Removed"
    removed = [f"{entry['path']}  {entry['kind']}, {entry['bytes']:,} bytes" for entry in report["removed"]]
    lines = _list(done, removed)
    lines += _list("Kept", [f"{entry['path']}  {entry['kind']}: {entry['reason']}" for entry in report["kept"]])
    freed = f"{report['bytes']:,} bytes {'would be ' if report['dry_run'] else ''}freed under {report['path']}."
    return "\n".join([*lines, "", freed if report["removed"] else f"Nothing to remove under {report['path']}."])


def view(shown: dict, settings: object) -> str:
    """Show the view that show-shards was asked for."""
    if "differing" in shown:
        return _difference(shown)
    return _tokens(shown) if "tokens" in shown and "heading" in shown else _statistics(shown)


def _difference(shown):
    first, second = shown["stores"]
    lines = ["", f"  {first}\n  {second}\n"]
    if shown["differing"]:
        lines.append(table([(name, f"{ours}  |  {theirs}") for name, (ours, theirs) in shown["differing"].items()]))
    else:
        lines.append("The settings are equal.")
    pairs = "one plan, so windows pair exactly" if shown["same_plan"] else "different plans, so windows do not pair"
    tokens = "  |  ".join(f"{counts['tokens']:,}" for counts in shown["counts"])
    return "\n".join([*lines, f"\nTokens: {tokens}; {pairs}."])


def _tokens(shown):
    lines = [f"\n{shown['heading']}\n"]
    width = max((len(token["text"]) for token in shown["tokens"]), default=0)
    for token in shown["tokens"]:
        entries = token.get("lsps", token.get("words"))
        if entries is None:
            lines.append(f"  {token['text']}")
            continue
        shares = "  ".join(f"{label}:{weight:.3f}" for label, weight in entries) or "no code"
        more = f"  ({token['nnz']} in all, tail {token['tail']:.1%})" if token["nnz"] > len(entries) else ""
        lines.append(f"  {token['text']:<{width}}  {shares}{more}")
    return "\n".join(lines)


def _statistics(shown):
    rows = store_rows(shown["store"], shown)
    rows += [
        (
            name,
            f"{quantity(split['windows'], 'window')}, {split['tokens']:,} tokens, "
            f"{quantity(split['documents'], 'document')} in {quantity(split['units'], 'unit')}",
        )
        for name, split in shown["splits"].items()
    ]
    if "most_used" in shown:
        entry = "word" if shown["kind"] == "logits" else "atom"
        rows += [
            (f"dead {entry}s", f"{shown[f'dead_{entry}s']:,} of {shown['settings'].get('k', 0):,} have no mass"),
            ("entropy", f"{shown['entropy_nats']:.3f} nats per token; {shown['mean_entropy_nats']:.3f} of the average"),
            ("tail", f"{shown['tail_mass']:.2%} of the mass was dropped"),
            (f"most used {entry}s", "  ".join(f"{label}:{share:.2%}" for label, share in shown["most_used"])),
        ]
    lines = ["", table(rows), "\nMade by:", table(_lineage_rows(shown))]
    if "nnz_histogram" in shown:
        lines += [f"\nTokens by {entries_name(shown)}:", histogram(shown["nnz_histogram"])]
    return "\n".join(lines)


def _lineage_rows(shown):
    settings = shown["settings"]
    rows = [(name.replace("_", " "), _write_value(settings[name])) for name in _LINEAGE if name in settings]
    if figures := {name: value for name, value in shown.get("dictionary", {}).items() if name != "settings"}:
        words = (
            f"{name.replace('_', ' ')} {value:.5g}" if isinstance(value, float | int) else str(value)
            for name, value in figures.items()
        )
        rows.append(("dictionary", ", ".join(words)))
    for entry in shown["environments"]:
        facts = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "units")
        rows.append((quantity(entry["units"], "unit"), facts))
    return rows


def _write_value(value):
    """Write a setting in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return "yes" if value is True else value


def histogram(counts: Sequence[int], bins: int = 10, width: int = 40) -> str:
    """Draw how many tokens have how many non-zeros, as lines with bars; counts[n] tokens have n."""
    most = max((n for n, count in enumerate(counts) if count), default=0)
    step = max(1, -(-(most + 1) // bins))
    sums = [(first, sum(counts[first : first + step])) for first in range(0, most + 1, step)]
    largest, total = max(1, max(count for _, count in sums)), max(1, sum(counts))
    lines = []
    for first, count in sums:
        last = min(first + step - 1, most)
        span = str(first) if first == last else f"{first} to {last}"
        lines.append(f"  {span:>9}  {count / total:6.1%}  {'#' * round(width * count / largest)}".rstrip())
    return "\n".join(lines)
