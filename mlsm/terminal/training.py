"""Output that commands share on students: training results, how to load the model, how it reads a text."""

from pathlib import Path
from textwrap import indent

from student.objectives import OBJECTIVES


def how_to_load(export: str) -> str:
    """The lines of the model card that load an export."""
    from student.runs.export import loading_code

    return "\nLoad it:\n\n" + indent(loading_code(Path(export)).strip(), "  ")


def how_it_reads(positions: str) -> str:
    """How a student that was trained at these positions (masked or all) reads a text to predict its LSPs."""
    return "every token masked in turn" if positions == "masked" else "which reads the text as it is"


def trained_rows(result: dict, positions: str = "masked") -> list[tuple[str, str]]:
    """List the duration of training and the results on held-out text.

    positions  the tokens that were predicted, masked or all
    """
    first_step = result["seconds_to_first_step"]  # None if the last process had no steps left to do
    rows = [
        (
            "trained",
            f"{result['steps']:,} steps, {result['tokens']:,} tokens, {result['tokens_per_second']:,.0f} tokens/s"
            + (f", first step {first_step:.1f} s after loading" if first_step else ""),
        ),
    ]
    return rows + _held_out_rows(result["objective"], result["held_out"], result["baseline"], positions == "all")


def _held_out_rows(objective, figures, baseline, reads_words):
    if not figures:
        return [("held out", "nothing: there are no held-out windows, or no token in them has a target")]
    from student.meter import closest_baseline

    objective, loss = OBJECTIVES[objective].load(), figures["loss"]
    loss_name = f"{objective.loss_name}, weighted sum" if "loss_1" in figures else objective.loss_name
    plain = _side(loss, baseline["loss"], objective.reference)
    closest = closest_baseline(baseline, reads_words=reads_words)
    if closest == "loss":
        rows = [(loss_name, f"{loss:.4f} {objective.unit}, {plain}")]
    else:
        reference = getattr(objective, closest.replace("loss", "reference"))
        headline = _side(loss, baseline[closest], reference)
        rows = [(loss_name, f"{loss:.4f} {objective.unit}, {headline}"), ("", plain)]
    if "loss_by_type" in baseline and closest != "loss_by_type":
        rows.append(("", _side(loss, baseline["loss_by_type"], objective.reference_by_type)))
    number = 1
    while f"loss_{number}" in figures:  # one per store
        of_store = _side(figures[f"loss_{number}"], baseline[f"loss_{number}_by_position"], "the same by position")
        rows.append((f"of store {number}", f"{figures[f'loss_{number}']:.4f} nats, {of_store}"))
        number += 1
    if "accuracy" in figures:
        guess = f" ({objective.guess}: {baseline['accuracy']:.1%})" if "accuracy" in baseline else ""
        which = "all" if reads_words else "masked"
        accuracy = f"{figures['accuracy']:.1%} of {which} tokens{guess}, perplexity {figures['perplexity']:.1f}"
        rows.append(("held-out accuracy", accuracy))
    return rows


def _side(loss, baseline, reference):
    """Say how far a loss is from a baseline's."""
    improvement = 1 - loss / baseline if baseline else 0.0
    return f"{abs(improvement):.1%} {'below' if improvement >= 0 else 'ABOVE'} the {baseline:.4f} of {reference}"
