"""Make a table of how often each token is masked, for train-student --mask-weights."""

from mlsm.commands._newest import stores
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import printable, shell_join
from mlsm.results import MaskWeights
from mlsm.terminal.encoding import objective_of
from mlsm.terminal.tables import table
from student.masks.config import MaskWeightsConfig as Settings

newest = stores


def run(settings: Settings, progress: Progress = silent) -> MaskWeights:
    """Make a table of how often each token is to be masked: mlsm.train_student(mask_weights=made)."""
    from student.masks.weights import make_mask_weights

    return MaskWeights.of(make_mask_weights(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the table's file, its extremes, and the line that trains with it."""
    rows: list[tuple[str, object]] = [
        ("mask weights", f"{result['mask_weights']}{' (finished before)' * result['finished_before']}"),
        ("store", f"{result['store']}, {result['tokens']:,} tokens counted"),
    ]
    for name in ("heaviest", "lightest"):
        if name in result:
            rows.append((name, ", ".join(f"{printable(token)} {weight:.3g}" for token, weight in result[name])))
    if result["collocations"]:
        examples = ", ".join(map(printable, result["examples"]))
        rows.append(("collocations", f"{result['collocations']:,}, first: {examples}"))
    words = ["train-student", "--store", result["store"], *objective_of(result["kind"])]
    rows.append(("next", f"{program()} {shell_join([*words, '--mask-weights', result['mask_weights']])}"))
    return "\n".join(["", table(rows)])
