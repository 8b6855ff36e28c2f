"""Fine-tune models on ten tasks with the same heads for all: one record per task and seed.

Not handled here: significance (mlsm/evaluation/comparison).
"""

from statistics import mean, stdev

from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig as Settings
from mlsm.results import Evaluated
from mlsm.terminal.tables import columns


def run(settings: Settings, progress: Progress = silent) -> Evaluated:
    """Fine-tune models on ten tasks, with paired heads and batches: one record per task and seed."""
    from mlsm.evaluation.tasks.finetuning.suite import finetune

    return Evaluated.of(finetune(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the scores of the models, one row per metric, and notes about them."""
    if settings.frozen:
        return _frozen(result)
    state = "was finished already" if result["finished_before"] else "is finished"
    counts = f"{result['made']} training runs now, {result['kept']} before"
    lines = [f"\nThe fine-tuning {state}: {counts}; means over seeds ± standard deviation.\n", _table(result)]
    limits = {"--limit-train": settings.limit_train, "--max-steps": settings.max_steps}
    if given := [f"{flag} {value}" for flag, value in limits.items() if value is not None]:
        lines.append(
            f"\nTraining was limited by {' and '.join(given)}: compare these scores only with others of the same limit."
        )
    alike = result["settings"]
    segments = "given" if alike["segments"] == "always" else "not given"
    lines.append(
        f"\nSame for all models: inputs of at most {alike['max_length']} tokens, dropout {alike['dropout']:g}, "
        f"segments of pairs {segments}."
    )
    chosen = [
        f"  {model['model']}: {task} {' '.join(f'{lr:g}' for lr in rates.values())}"
        for model in result["models"]
        for task, rates in model["chosen_lr"].items()
    ]
    if chosen:
        lines.append("\n".join(["\nLearning rates chosen on a tenth of the training examples, by seed:", *chosen]))
    if settings.split == "train-tenth":
        lines.append("Scored on the held-out tenth of the training examples: for choosing settings, not for reporting.")
    for how in ("diverged", "collapsed"):
        notes = [f"{model['model']}, {sentence}" for model in result["models"] for sentence in model[how]]
        if notes:
            lines.append("\n".join([f"\n{how.capitalize()}, but included in the means:", *(f"  {n}" for n in notes)]))
    cut: dict[str, float] = {}  # by task: the largest share of its examples that was cut, over the models
    for model in result["models"]:
        for task, share in model["cut"].items():
            cut[task] = max(share, cut.get(task, 0.0))
    if cut_tasks := [f"{task} {share:.0%}" for task, share in cut.items() if share >= 0.01]:
        named = ", ".join(cut_tasks)
        lines.append(f"\nCut because longer than {alike['max_length']} tokens (of the scored examples): {named}")
    if result["differing"]:
        files = "\n".join(f"  {file}" for file in result["differing"])
        lines.append(f"\nMade with other settings; kept as they are and included in the means:\n{files}")
    lines.append("\nRecords:\n" + "\n".join(f"  {model['directory']}" for model in result["models"]))
    if len(result["models"]) > 1:
        lines.append(f"\nNext:  {program()} compare {shell_quote(result['output'] + '/evaluations')}")
    return "\n".join(lines)


def _frozen(result):
    """The same for frozen encoders, which have one score per metric."""
    state = "was finished already" if result["finished_before"] else "is finished"
    counts = f"{result['made']} records now, {result['kept']} before"
    models = [model | {"figures": {name: [v] for name, v in model["figures"].items()}} for model in result["models"]]
    layers = result["settings"]["layers"]
    lines = [
        f"\nThe frozen measures: the command {state}: {counts}.\n",
        _table({"models": [model | {"average": None} for model in models]}),
        f"\nLayers: {layers if layers == 'all' else ' '.join(map(str, layers))}; inputs of at most"
        f" {result['settings']['max_length']} tokens. tuning: a tenth of train, by which penalties and layers were"
        " chosen (wsd: semeval2007; stsb cosine: the training examples).",
    ]
    if result["differing"]:
        files = "\n".join(f"  {file}" for file in result["differing"])
        lines.append(f"\nMade with other settings; kept as they are and shown:\n{files}")
    lines.append("\nRecords:\n" + "\n".join(f"  {model['directory']}" for model in models))
    return "\n".join(lines)


def _table(result):
    models = result["models"]
    rows = [["", *(model["model"] for model in models)]]
    for name in dict.fromkeys(name for model in models for name in model["figures"]):
        row = [name]
        for model in models:
            values = model["figures"].get(name, [])
            if not values:
                row.append("–")
                continue
            spread = f" ± {100 * stdev(values):.2f}" if len(values) > 1 else ""
            row.append(f"{100 * mean(values):.2f}{spread}")
        rows.append(row)
    if models[0]["average"] is not None:
        rows.append(["average of 14", *(f"{100 * model['average']:.2f}" for model in models)])
    return "\n".join(columns(rows[0], rows[1:]))
