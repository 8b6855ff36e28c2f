"""Run a whole study from one recipe: stores, students, evaluations, comparison."""

from collections import Counter
from itertools import groupby
from operator import itemgetter
from statistics import fmean

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.studies.protocol.config import StudyConfig as Settings
from mlsm.results import Report
from mlsm.terminal.encoding import code_of_quarantine
from mlsm.terminal.tables import columns, duration, size

LOSSES = """\
A held-out loss is computed against the arm's own targets, so it cannot be compared across objectives, layers or k. How
far it is below that of a constant prediction shows how much of these targets was learned, not which student is better:
fine-tuning shows that."""


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Run a whole study from one recipe: stores, students, evaluations, and their comparison."""
    from mlsm.evaluation.studies.protocol.study import study

    return Report.of(study(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the parts of a study with their costs, their commands, or its conclusion and where its report is."""
    if "commands" in result:
        return result["commands"]
    lines = [f"\n{result['title']}", result["question"], ""]
    lines += _parts(result["parts"], settings.dry_run)
    lines += result["left_out"]
    if result["students"]:
        lines += ["", *_students(result["students"]), "", LOSSES, f"Each student:  {settings.directory}/students.csv"]
    if result["composite"] is not None:
        lines += ["", *_composite(result["composite"])]
    if result["changed"]:
        lines += [result["changed"], ""]
    if result["comparison"] is not None:
        lines += [*result["comparison"]["conclusion"], "", f"Report:  {result['comparison']['report']}"]
        lines += [f"Tables here:  {result['tables']}"] if result["tables"] else []
    return "\n".join(lines)


def exit_code(result: dict) -> int:
    """Return the exit code of a study: that of encoding its stores."""
    advice = "The commands of --print-commands with --retry-quarantine try them again"
    return code_of_quarantine(result.get("quarantined", []), advice)


def _parts(parts, with_all):
    """The state of every part and what is left to do; without `with_all` only of the parts that are not done."""
    counts = Counter(part["state"] for part in parts)
    shown = [part for part in parts if with_all or part["state"] != "done"]
    width = max((len(part["part"]) for part in parts), default=0)
    lines = [
        f"  {part['part']:<{width}}  {part['state']:<8} {_short(part['commit'] or ''):<19}"
        + ("" if part["finished"] else _cost(part["seconds"], part["bytes"]))
        for part in shown
    ]
    left = [part for part in parts if not part["finished"]]
    if left:
        total = _cost(sum(part["seconds"] for part in left), sum(part["bytes"] for part in left))
        lines += ["", f"  {'everything left':<{width}}  {total}, from measurements of a few seconds"]
    return [*lines, "", "parts: " + ", ".join(f"{counts[state]} {state}" for state in counts), ""]


def _students(rows):
    """The arms by how much lower their loss is than that of a constant prediction, averaged over seeds."""
    header = (
        "arm",
        "seeds",
        "mass kept",
        "held-out loss",
        "of a constant",
        "below it",
        "tokens/s",
        "FLOPs",
        "encoding",
    )
    formats = {"mass_kept": ".1%", "held_out_loss": ".4f", "baseline_loss": ".4f", "improvement": ".1%"}
    formats |= {"tokens_per_second": ",.0f", "flops": ".2e", "encoding_flops": ".2e"}
    cells = []
    for name, of_arm in groupby(rows, key=itemgetter("arm")):
        students = list(of_arm)
        means = {key: [row[key] for row in students if row[key] is not None] for key in formats}
        shown = [format(fmean(means[key]), how) if means[key] else "-" for key, how in formats.items()]
        cells.append((name, len(students), *shown))
    return columns(header, cells)


def _short(commit):
    """The first digits of a commit, and whether files differed from it; a version is returned unchanged."""
    return commit if commit.startswith("version ") else commit[:12] + ("-dirty" if "-dirty" in commit else "")


def _cell(value):
    return f"{value:.1f}" if isinstance(value, float) else "" if value is None else value


def _composite(composite):
    """The arms by their composite score, the condition for testing (gate), the hypotheses and other contrasts."""
    from mlsm.evaluation.comparison.conclusion import between, conclude_contrasts, exploratory_contrasts, points
    from mlsm.evaluation.comparison.tables import table_of_composites

    if not composite["arms"]:
        return ["No composite yet: it needs the scores of the teacher and of an untrained student."]
    measures = [row["measure"] for row in composite["gate"]]
    header = ("arm", "seeds", "composite", "sd", *measures)
    lines = columns(header, [[*map(_cell, row)] for row in table_of_composites(composite, measures).data[1]])
    for row in composite["gate"]:
        if row["stays"] is not None:
            lines.append(
                f"gate: {row['measure']} {'passes' if row['stays'] else 'fails'}: untrained "
                f"{row['untrained']:.1f}, trained {row['trained']:.1f} ± {row['standard_error']:.2f}, teacher "
                f"{row['teacher']:.1f}"
            )
    lines.append("")
    for _, said in conclude_contrasts(composite):
        lines.append(f"{said.label}: {' '.join((said.sentence, *said.beside))}")
    explored = [one for one in exploratory_contrasts(composite) if "paired" in one]
    lines += ["", "Exploratory, with 95 % intervals:"] if explored else []
    for one in explored:
        difference, bounds = points(one["difference"] / 100), between(one["paired"])
        lines.append(f"  {' − '.join(one['pair'])}: {difference} points ({bounds}; {len(one['seeds'])} seeds)")
    return lines


def _cost(seconds, octets):
    disk = f", {size(octets)}" if octets else ""
    return f"about {duration(seconds)}{disk}"
