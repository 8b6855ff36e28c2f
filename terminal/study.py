"""What study says: what its parts cost, their commands, or what came out."""

from common.invocation import program
from common.text import shell_quote
from evaluation.studies.protocol.config import StudyConfig
from terminal.tables import duration, size


def summary(result: dict, settings: StudyConfig) -> str:
    """Show the parts of a study with their costs, their commands, or its conclusion and where its report is."""
    if "commands" in result:
        return result["commands"]
    lines = [f"\n{result['title']}", result["question"], ""]
    if settings.dry_run:
        lines += _costs(result["parts"])
    lines += [f"Left out: {sentence}" for sentence in result["left_out"]]
    if result["comparison"] is not None:
        records = settings.comparison.results[0]
        lines += [
            *result["comparison"]["conclusion"],
            "",
            f"Report:  {result['comparison']['report']}",
            f"Tables here:  {program()} compare {shell_quote(records)}",
        ]
    return "\n".join(lines)


def _costs(parts):
    width = max(len(part["part"]) for part in parts)
    lines = [
        f"  {part['part']:<{width}}  " + ("finished" if part["finished"] else _cost(part["seconds"], part["bytes"]))
        for part in parts
    ]
    total = _cost(sum(part["seconds"] for part in parts), sum(part["bytes"] for part in parts))
    return [*lines, "", f"  {'all that is left':<{width}}  {total}, from measurements of some seconds", ""]


def _cost(seconds, octets):
    disk = f", {size(octets)}" if octets else ""
    return f"about {duration(seconds)}{disk}"
