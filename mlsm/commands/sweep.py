"""Train a student for every layer, or every k, from one pass of the teacher: --recipe sweep-layers | sweep-k."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.studies.sweeps.config import SweepConfig as Settings
from mlsm.evaluation.studies.sweeps.full_scale import full_scale_lines
from mlsm.results import Report
from mlsm.terminal.encoding import code_of_quarantine

NOTE = """\
Held-out KL is against each row's own distributions, so it is not comparable across layers or k. The share by which
it is below the marginal's says how much was learned of them, not which student is better: fine-tuning says that."""

INTRUDERS = """\
Intruders: how often words that do not belong to an LSP are told from its own, 50% by chance, by {}."""

RECIPES = True


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Train a student for every layer, or every k, from one pass of the teacher."""
    from mlsm.evaluation.studies.sweeps.sweep import sweep

    return Report.of(sweep(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the table of a sweep, what its figures mean, and what the paper's own sweep would cost."""
    scale = full_scale_lines(result["full_scale"])
    if "rows" not in result:
        parts = ", ".join(f"layer {part['layer']} k {part['k']:,}" for part in result["parts"])
        return "\n".join([f"\nA sweep over {result['over']}, here: {parts}. Nothing was done.", "", *scale])
    state = "was finished already" if result["finished_before"] else "is finished"
    said = [result["caption"], NOTE]
    if "judge" in result:
        said.append(INTRUDERS.format(result["judge"]))
    files = ["", f"Table and figure:  {result['directory']}/sweep.json, .csv, .svg, .png"]
    lines = [f"\nThe sweep over {result['over']} {state}.", "", *_table(result["rows"]), "", *said]
    return "\n".join([*lines, "", *scale, *files])


def _table(rows):
    heads = [
        (name, head)
        for name, head in (("f1", "      F1"), ("intruder_auc", "  intruders"))
        if any(row[name] is not None for row in rows)
    ]
    columns = "layer      k  mass kept  held-out KL  of marginal  below it  tokens/s  student FLOPs  encoding FLOPs"
    lines = [f"  {columns}{''.join(head for _, head in heads)}"]
    for row in rows:
        figures = f"{'-':>12}{'-':>13}{'-':>10}"
        if row["held_out_kl"] is not None:
            figures = f"{row['held_out_kl']:>12.4f}{row['marginal_kl']:>13.4f}{row['improvement']:>10.1%}"
        shares = "".join(
            f"{'-' if row[name] is None else format(row[name], '.1%'):>{len(head)}}" for name, head in heads
        )
        lines.append(
            f"  {row['layer']:>5}{row['k']:>7,}{row['mass_kept']:>11.1%} {figures}{row['tokens_per_second']:>10,.0f}"
            f"{row['student_flops']:>15.2e}{row['encoding_flops']:>16.2e}{shares}"
        )
    return lines


def exit_code(report: dict) -> int:
    """That of an encoding of its stores."""
    advice = "encode-lsp with these settings and --retry-quarantine tries them again"
    return code_of_quarantine(report.get("rows", []), advice)
