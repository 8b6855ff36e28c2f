"""What train-student, train-probe and export-student say when they are done."""

from pathlib import Path
from textwrap import indent

from mlsm.common.invocation import program
from mlsm.common.text import shell_join
from mlsm.terminal.tables import store_rows, table
from student.config import ProbeConfig
from student.objectives import LSP_OBJECTIVES, OBJECTIVES, WITHOUT_WORDS


def training(result: dict, settings: object) -> str:
    """Show the store that was read, the student, and how to load it."""
    from shards.reader import Store

    store = Store.open(result["store"], result["plan"])
    lines = [
        f"\nThe student {'was finished already' if result['already_finished'] else 'is finished'}.",
        table(
            [
                *store_rows(store.path, store.report()),
                *(("and its targets of", other) for other in result.get("other_stores", ())),
                (
                    "student",
                    f"{result['encoder']}, objective {result['objective']}, {result['parameters']:,} parameters",
                ),
                *_trained_rows(result),
                ("run", result["run"]),
                ("student exported to", result["export"]),
            ]
        ),
        _how_to_load(result["export"]),
    ]
    if result["objective"] in LSP_OBJECTIVES and result["objective"] in WITHOUT_WORDS:
        probe = shell_join(["train-probe", "--student", result["run"], "--store", result["store"]])
        lines.append(f"\nNext, words from its LSPs:\n  {program()} {probe}")
    if store.settings.get("teacher_name") == "bundled":
        lines += [
            "\nThis was the demonstration: a small teacher, a small corpus. The real thing, with your text:\n",
            f"  {program()} encode-lsp --recipe paper --corpus 'wikipedia/*.txt.gz'",
            "\nThen the line that it prints: a student trained on that store has the paper's settings, too.",
        ]
    return "\n".join(lines)


def probing(result: dict, settings: ProbeConfig) -> str:
    """Show what a probe predicts and how to load it."""
    matrix = f"{result['parameters']:,} parameters on the {settings.probe_input} of {result['encoder']}"
    rows = [("store", result["store"]), ("probe", matrix), *_trained_rows(result)]
    return "\n".join(
        [
            f"\nThe probe {'was finished already' if result['already_finished'] else 'is finished'}.",
            table([*rows, ("run", result["run"]), ("exported to", result["export"])]),
            _how_to_load(result["export"]),
            "\nNext, BLiMP with it:",
            f"  {program()} {shell_join(['evaluate-blimp', result['run']])} --data-dir blimp/data",
        ]
    )


def exporting(report: dict, settings: object) -> str:
    """Show what export-student wrote and pushed, or would."""
    verb = "would be" if report["dry_run"] else "is"
    rows = [("run", report["run"]), ("checkpoint", f"step {report['step']:,}"), ("export", report["export"])]
    lines = [f"\nThe checkpoint {verb} exported.", table(rows)]
    if not report["dry_run"]:
        lines.append(_how_to_load(report["export"]))
    if "revisions" in report:
        lines.append(f"\nTo {report['address'] or report['repository']} {verb} pushed:")
        lines.append(
            table(
                [
                    (
                        row["branch"],
                        f"{len(row['files'])} files, {sum(row['files'].values()):,} bytes of {row['directory']}",
                    )
                    for row in report["revisions"]
                ]
            )
        )
    return "\n".join(lines)


def _how_to_load(export):
    """Quote the lines of the model card that load an export."""
    from student.runs.export import loading_code

    return "\nLoad it:\n\n" + indent(loading_code(Path(export)).strip(), "  ")


def _trained_rows(result):
    first_step = result["seconds_to_first_step"]  # None when the last process had no step left to do
    rows = [
        (
            "trained",
            f"{result['steps']:,} steps, {result['tokens']:,} tokens, {result['tokens_per_second']:,.0f} tokens/s"
            + (f", first step {first_step:.1f} s after loading" if first_step else ""),
        ),
    ]
    return rows + _held_out_rows(result["objective"], result["held_out"], result["baseline"])


def _held_out_rows(objective, figures, baseline):
    if not figures:
        return [("held out", "nothing: the corpus has no held-out windows")]
    from student.meter import closest_baseline

    objective, loss = OBJECTIVES[objective].load(), figures["loss"]
    loss_name = f"{objective.loss_name}, weighted sum" if "loss_1" in figures else objective.loss_name
    plain = _side(loss, baseline["loss"], objective.reference)
    closest = closest_baseline(baseline)
    if closest == "loss":
        rows = [(loss_name, f"{loss:.4f} {objective.unit}, {plain}")]
    else:
        reference = getattr(objective, closest.replace("loss", "reference"))
        headline = _side(loss, baseline[closest], reference)
        rows = [(loss_name, f"{loss:.4f} {objective.unit}, {headline}"), ("", plain)]
    number = 1
    while f"loss_{number}" in figures:  # of several stores
        of_store = _side(figures[f"loss_{number}"], baseline[f"loss_{number}_by_position"], "the same by position")
        rows.append((f"of store {number}", f"{figures[f'loss_{number}']:.4f} nats, {of_store}"))
        number += 1
    if "accuracy" in figures:
        guess = f" ({objective.guess}: {baseline['accuracy']:.1%})" if "accuracy" in baseline else ""
        accuracy = f"{figures['accuracy']:.1%} of masked tokens{guess}, perplexity {figures['perplexity']:.1f}"
        rows.append(("held-out accuracy", accuracy))
    return rows


def _side(loss, baseline, reference):
    """Say how far a loss is from that of a baseline."""
    improvement = 1 - loss / baseline if baseline else 0.0
    return f"{abs(improvement):.1%} {'below' if improvement >= 0 else 'ABOVE'} the {baseline:.4f} of {reference}"
