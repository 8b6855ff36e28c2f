"""What `finetune` says when it is done: figures of the models, one row a metric.

Left out: significance (evaluation/comparison).
"""

from statistics import mean, stdev

from evaluation.summaries import command


def summary(result, settings):
    """The result of suite.finetune as lines of text."""
    state = "was finished already" if result["finished_before"] else "is finished"
    counts = f"{result['made']} trainings now, {result['kept']} before"
    lines = [f"\nThe fine-tuning {state}: {counts}; means over seeds ± standard deviation.\n", _table(result)]
    notes = [f"{model['model']}, {sentence}" for model in result["models"] for sentence in model["diverged"]]
    if notes:
        lines.append("\nDiverged, and counted all the same:\n" + "\n".join(f"  {note}" for note in notes))
    if result["differing"]:
        files = "\n".join(f"  {file}" for file in result["differing"])
        lines.append(f"\nMade with other settings, left and counted all the same:\n{files}")
    lines.append("\nRecords:\n" + "\n".join(f"  {model['directory']}" for model in result["models"]))
    if len(result["models"]) > 1:
        lines.append(f"\nNext:  {command()} compare {result['output']}/evaluations")
    return "\n".join(lines)


def _table(result):
    models = result["models"]
    rows = [["", *(model["model"] for model in models)]]
    rows += [[name, *(_cell(model["figures"][name]) for model in models)] for name in models[0]["figures"]]
    if models[0]["average"] is not None:
        rows.append(["average of 14", *(f"{100 * model['average']:.2f}" for model in models)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(map(_padded, row, widths)).rstrip() for row in rows)


def _padded(cell, width):
    return f"{cell:<{width}}"


def _cell(values):
    spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.2f}{spread}"
