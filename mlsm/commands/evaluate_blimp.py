"""Score masked language models on the minimal pairs of BLiMP's 67 paradigms."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.tasks.blimp.config import BlimpConfig as Settings
from mlsm.results import Evaluated
from mlsm.terminal.tables import table


def run(settings: Settings, progress: Progress = silent) -> Evaluated:
    """Score masked language models on BLiMP's minimal pairs."""
    from mlsm.evaluation.tasks.blimp.evaluate import evaluate_blimp

    return Evaluated.of(evaluate_blimp(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show a column of scores for every model, and where its records are."""
    found = result["records"]
    columns = [_column(record) for record in found]
    numbered = len(found) > 1
    rows = [(name, "  ".join(f"{column[name]:>8}" for column in columns)) for name in columns[0]]
    head = [("accuracy, %", "  ".join(f"{f'({n})':>8}" for n in range(1, len(found) + 1)))] if numbered else []
    models = [
        (f"({n})" if numbered else "model", _model(record, known))
        for n, (record, known) in enumerate(zip(found, result["finished_before"], strict=True), 1)
    ]
    first = found[0]
    pairs = sum(figure["n"] for figure in first["figures"])
    notes = [
        ("pairs", f"{pairs:,} of {len(first['figures'])} paradigms, scored by {first['settings']['metric']}"),
        (
            "headline",
            "the unweighted mean over all paradigms; for a phenomenon, over its own paradigms",
        ),
        ("ties", "pairs with equal scores, counted as wrong; in 7 published pairs both sentences are equal"),
        *(("record", path) for path in result["paths"]),
    ]
    return "\n".join(["", table(models), "", table(head + rows), "", table(notes)])


def _column(record: dict) -> dict[str, str]:
    averages = record["averages"]
    phenomena = {name: f"{100 * share:.1f}" for name, share in averages["phenomena"].items()}
    return phenomena | {"HEADLINE": f"{100 * averages['headline']:.2f}", "ties": str(averages["ties"])}


def _model(record: dict, known: bool) -> str:
    step = "" if record["step"] is None else f", step {record['step']:,}"
    rate = sum(2 * figure["n"] for figure in record["figures"]) / max(record["wall"], 1e-9)
    seconds = f"{record['wall']:.1f} s, {rate:,.0f} sentences/s"
    return f"{record['model']}{step}: {'scored already' if known else seconds}"
