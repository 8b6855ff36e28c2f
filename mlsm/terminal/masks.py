"""What make-mask-weights says when it is done."""

from mlsm.common.invocation import program
from mlsm.common.text import printable, shell_join
from mlsm.terminal.tables import table
from student.masks.config import MaskWeightsConfig


def weights(result: dict, settings: MaskWeightsConfig) -> str:
    """Show the table's file, its extremes, and the line that trains with it."""
    rows: list[tuple[str, object]] = [
        ("mask weights", f"{result['mask_weights']}{' (finished before)' * result['already_finished']}"),
        ("store", f"{result['store']}, {result['tokens']:,} tokens counted"),
    ]
    for name in ("heaviest", "lightest"):
        if name in result:
            rows.append((name, ", ".join(f"{printable(token)} {weight:.3g}" for token, weight in result[name])))
    if result["collocations"]:
        examples = ", ".join(map(printable, result["examples"]))
        rows.append(("collocations", f"{result['collocations']:,}, first: {examples}"))
    command = shell_join(["train-student", "--store", result["store"], "--mask-weights", result["mask_weights"]])
    rows.append(("next", f"{program()} {command}"))
    return "\n".join(["", table(rows)])
