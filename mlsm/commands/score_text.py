"""Score how likely each sentence of a file is; with --pairs, minimal pairs of your own."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import quantity, table


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Score the sentences, or the minimal pairs, of files: models="bert-base-cased", sentences="reviews.txt"."""
    from mlsm.evaluation.tasks.scoring.score import score_text

    return Report.of(score_text(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the scores of every model and file, the pairs that the model gets most wrong, and where all scores are."""
    return "\n" + "\n\n".join(table(_rows(record)) + _wrong(record) for record in result["results"])


def _wrong(record):
    if not record.get("wrong"):
        return ""
    second, first = "{:9,.2f} nats  second  {}", "{:>21}   {}"
    lines = []
    for pair in record["wrong"]:
        lines += [second.format(pair["nats"], pair["bad"]), first.format("first", pair["good"])]
    return "\n".join(["\n\n  Pairs whose first sentence is not more likely, largest difference first:", *lines])


def _rows(record):
    step = "" if record["step"] is None else f", step {record['step']:,}"
    rows = [("model", f"{record['model']}{step}"), ("file", record["file"])]
    if record["pairs"]:
        as_published = " (as CrowS-Pairs is scored)" if record["metric"] == "original" else ""
        rows += [
            ("pairs", f"{record['n']:,}, scored by {record['metric']}"),
            ("first more likely", _share(record)),
            ("by shared tokens only", _share(record["shared"]) + as_published),
        ]
    else:
        sentences = quantity(record["n"], "sentence")
        rows += [
            ("sentences", f"{sentences} of {quantity(record['tokens'], 'token')}, scored by {record['metric']}"),
            ("PLL", f"{record['pll']:,.3f} nats, {record['pll'] / record['tokens']:.4f} per token"),
            ("PPPL", "too large for a number" if record["pppl"] is None else f"{record['pppl']:,.4g}"),
        ]
    time = "scored already" if record["finished_before"] else f"{record['wall']:.1f} s"
    return [*rows, ("time", time), ("scores", record["scores"])]


def _share(figures):
    interval = f"{100 * figures['low']:.1f} to {100 * figures['high']:.1f}"
    ties = f"; {quantity(figures['ties'], 'tie')}, counted as wrong" if figures["ties"] else "; no ties"
    return f"{100 * figures['accuracy']:.2f} % (95 % interval {interval}){ties}"
