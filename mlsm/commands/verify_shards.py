"""Verify that a store is whole; name the damaged files and the commands that encode them again."""

from pathlib import Path

from mlsm.commands._newest import stores
from mlsm.common.errors import EXIT_STORE
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.results import Verified
from mlsm.terminal.tables import long_list, quantity, table
from shards.config import VerifyConfig as Settings
from shards.config import store_of

newest = stores


def run(settings: Settings, progress: Progress = silent) -> Verified:
    """Check that a store is whole; with full=True every byte of it."""
    from shards.verify import verify

    return Verified.of(verify(store_of(settings), settings.full, settings.repair, progress=progress))


def show(report: dict, settings: Settings) -> str:
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
    lines += long_list("Damaged", places)
    units = [f"unit {entry['unit']} ({entry['split']}, {entry['text']})" for entry in report["missing"]]
    lines += long_list("Missing", units)
    stray = [f"{entry['file']}  {entry['kind']}, {entry['bytes']:,} bytes" for entry in report["stray"]]
    lines += long_list(f"Stray, and ignored by readers ({program()} clean removes left-overs)", stray)
    lines += long_list("Removed", report["repaired"])
    lines += long_list("Not removed", [f"{entry['file']}: {entry['reason']}" for entry in report["not_repaired"]])
    if damaged and "://" in report["store"]:
        lines.append(
            "\nNext, where the store was made:\n"
            f"  {program()} verify-shards <its directory> --repair     # names what encodes the damaged units again\n"
            "  and copy the store again"
        )
    if damaged and _all_unread(damaged):
        lines.append("\nNext: check permissions and the disk, and run the same command again.")
    elif report["commands"]:
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
            lines.append(
                "Move it there first (otherwise all of it is encoded again), and pass its new path to verify-shards."
            )
    return "\n".join(lines)


def _verdict(report):
    if report["damaged"]:
        units = {entry["unit"] for entry in report["damaged"]} - {None}
        if _all_unread(report["damaged"]):
            return f"{quantity(len(report['damaged']), 'place')} could not be read, and may be whole."
        return f"The store is damaged: {quantity(len(report['damaged']), 'place')} in {quantity(len(units), 'unit')}."
    unfinished = [plan["plan"] for plan in report["plans"] if plan["missing"]]
    if len(unfinished) == len(report["plans"]):
        return "Nothing is damaged, but the store is unfinished."
    if unfinished:
        return f"Nothing is damaged. Readers use the newest finished plan; unfinished: {', '.join(unfinished)}."
    return "The store is whole."


def _all_unread(damaged):
    return all(entry["unread"] for entry in damaged)


def exit_code(report: dict) -> int:
    """3 if the store is damaged, else 0."""
    return EXIT_STORE if report["damaged"] else 0
