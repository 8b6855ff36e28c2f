"""What `finetune` says when it is done: figures of the models, one row a metric.

Left out: significance (evaluation/comparison).
"""

from statistics import mean, stdev

from common.invocation import program


def summary(result: dict, settings: object) -> str:
    """Show the figures of the models, a row a metric, and what to know about them."""
    state = "was finished already" if result["finished_before"] else "is finished"
    counts = f"{result['made']} trainings now, {result['kept']} before"
    lines = [f"\nThe fine-tuning {state}: {counts}; means over seeds ± standard deviation.\n", _table(result)]
    alike = result["settings"]
    told = "told" if alike["segments"] == "always" else "not told"
    settled = f"inputs of at most {alike['max_length']} tokens, dropout {alike['dropout']:g}, segments of pairs {told}"
    lines.append(f"\nAlike for all models: {settled}.")
    for how in ("diverged", "collapsed"):
        notes = [f"{model['model']}, {sentence}" for model in result["models"] for sentence in model[how]]
        if notes:
            lines.append("\n".join([f"\n{how.capitalize()}, and counted all the same:", *(f"  {n}" for n in notes)]))
    if cut := _cut(result["models"]):
        lines.append(f"\nLonger than {alike['max_length']} tokens, and cut (development sets): {cut}")
    if result["differing"]:
        files = "\n".join(f"  {file}" for file in result["differing"])
        lines.append(f"\nMade with other settings, left and counted all the same:\n{files}")
    lines.append("\nRecords:\n" + "\n".join(f"  {model['directory']}" for model in result["models"]))
    if len(result["models"]) > 1:
        lines.append(f"\nNext:  {program()} compare {result['output']}/evaluations")
    return "\n".join(lines)


def _cut(models):
    """Name the tasks of which at least one example in a hundred was cut, with the largest share over the models."""
    tasks = dict.fromkeys(task for model in models for task in model["cut"])
    shares = {task: max(model["cut"].get(task, 0) for model in models) for task in tasks}
    return ", ".join(f"{task} {share:.0%}" for task, share in shares.items() if share >= 0.01)


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
