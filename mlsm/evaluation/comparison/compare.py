"""`compare`: from records to averages, tests, win rates, tables as CSV, figures and a page of it all.

    result = compare(CompareConfig(results=(Path("runs/evaluations"),)), progress)

Reads records and the logs of their runs: no model, no text. Left out: the page (report/), what is printed
(mlsm/terminal/comparison.py).
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

from mlsm.common.durable import make_directories
from mlsm.common.errors import ComparisonError
from mlsm.evaluation import records
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.drawing import Study
from mlsm.evaluation.comparison.figures import draw_all
from mlsm.evaluation.comparison.identity import differences
from mlsm.evaluation.comparison.intruders import read_judgements
from mlsm.evaluation.comparison.models import (
    average,
    blimp_average,
    checkpoint_name,
    common_figures,
    common_paradigms,
    frozen_alike,
    models_of,
    scored_alike,
)
from mlsm.evaluation.comparison.report import StudyFacts, write_report
from mlsm.evaluation.comparison.significance import LEVELS, compare_on_blimp, matrices, win_rates
from mlsm.evaluation.comparison.withheld import refuse_withheld
from mlsm.evaluation.plots import save_table

DEFAULT_RESULTS = Path("runs/evaluations")


def compare(settings: CompareConfig, progress: Callable[..., None], facts: StudyFacts | None = None) -> dict:
    """Compare the models of some records.

    facts     what a study planned, for the page
    Returns   dict for JSON: models (averages, figures of the suite, what failed), significance by level (matrices of
              row against column), win_rates, frozen (figures of frozen encoders), blimp (two models each, paired by
              paradigm), differences (settings: in what all of them differ; unknown: models whose settings are not all
              recorded; pairs), left_out (trainings that both models have but that are no pair, and why), notes, figures
              (files, or what they lack), tables (CSV files), common_figures, report (the page that shows all of it),
              conclusion (its sentences)
    Raises    RecordError, ComparisonError: records that are malformed or contradict each other
    """
    refuse_withheld(settings.results or (DEFAULT_RESULTS,))
    found = records.read(settings.results or (DEFAULT_RESULTS,))
    models, notes = models_of(found)
    judgements = read_judgements(settings.intruders)
    tuned = [model for model in models if model.trainings]
    tests, left_out = matrices(tuned)
    scored, unlike = scored_alike(models)
    notes_on_blimp = [
        f"The BLiMP scores of {label} cannot be compared with the others: {why}" for label, why in unlike.items()
    ]
    frozen, notes_on_frozen = frozen_alike(models)
    figures = common_figures(tuned) if tuned else []
    paradigms = common_paradigms(scored) if scored else []
    result = {
        "records": len(found),
        "models": [
            _describe(model, figures, paradigms if model in scored else [])
            | {"intruder_auc": judgements.aucs.get(model.target) if model.target else None}
            for model in models
        ],
        "common_figures": len(common_figures(tuned)),
        "levels": {level.name: {"meaning": level.meaning, "full": level.full} for level in LEVELS},
        "significance": tests,
        "compared": [model.label for model in tuned],
        "win_rates": win_rates(models),
        "frozen": [
            {"model": model.label, "task": task, **figure}
            for task, measured in frozen.items()
            for model in measured
            for figure in model.frozen[task, None]["figures"]
        ],
        "blimp": compare_on_blimp(models),
        "differences": _differences(models),
        "left_out": left_out,
        "notes": [
            *notes,
            *_notes_on_fine_tuning(models),
            *notes_on_blimp,
            *notes_on_frozen,
            *differences(models).on_masks,
        ]
        + _notes_on_intruders(settings, models, judgements),
    }
    result["tables"] = _save_tables(settings.output, result)
    study = Study(models, settings.paper, settings.diagnostic)
    result["figures"] = draw_all(study, settings.output, progress)
    page, result["conclusion"] = write_report(result, models, settings.output, facts)
    result["report"] = str(page)
    return result


def _differences(models):
    """In which settings the models differ: all of them, and every two."""
    found, pairs = differences(models), []
    for i, model in enumerate(models):
        for other in models[i + 1 :]:
            both = differences([model, other])
            pairs.append(
                {
                    "model": model.label,
                    "against": other.label,
                    "differ_in": list(both.settings),
                    "unknown": bool(both.unknown),
                    "alone": both.alone,
                }
            )
    return {"settings": found.settings, "unknown": found.unknown, "pairs": pairs}


def _notes_on_fine_tuning(models):
    chosen = []
    for model in models:
        rates = Counter(record["lr_choice"]["lr"] for record in model.trainings.values() if "lr_choice" in record)
        if rates:
            counts = ", ".join(f"{lr:g} by {count}" for lr, count in sorted(rates.items()))
            tried = {tried["lr"] for r in model.trainings.values() for tried in r.get("lr_choice", {}).get("tried", ())}
            chosen.append(f"Learning rates that the fine-tunings of {model.label} chose, of {len(tried)}: {counts}.")
    early = [
        model.label
        for model in models
        if any("dropout" not in record["settings"] for record in model.trainings.values())
    ]
    if not early:
        return chosen
    return [
        *chosen,
        f"It is unknown whether dropout and segments of the fine-tuning agree for {', '.join(early)}: an earlier "
        "version did not record them. Give finetune the same models again.",
    ]


def _notes_on_intruders(settings, models, judgements):
    if not settings.intruders:
        return []
    if not any(model.target in judgements.aucs for model in models):
        raise ComparisonError(
            "--intruders: none of the judged stores is one that these models learned LSPs from, as far as their records"
            " say. Judge those stores, or leave it out."
        )
    return [
        f"Intruder AUC: how often {judgements.judge} can tell words that do not belong to an LSP from its own, the mean"
        " over the LSPs of the store that a model learned from; 50% by chance. It is of the store, not of the model."
    ]


def _describe(model, figures, paradigms):
    """What the result says of one model.

    figures, paradigms  those that all models have: averages over these can be compared
    """
    return {
        "model": model.label,
        **model.facts,
        "checkpoint": checkpoint_name(model),
        "n": len(model.scores),
        "average": average(model) if model.figures else None,
        "common_average": average(model, figures) if figures and model.trainings else None,
        "figures": [_describe_figure(model, *figure) for figure in model.figures],
        "mass_kept": model.kept,
        "failed": [{"task": task, "seed": seed, "why": why} for (task, seed), why in model.failed.items()],
        "blimp": _describe_blimp(model, paradigms) if model.blimp else None,
    }


def _describe_figure(model, task, metric):
    values = [value for (of, name, _), value in model.scores.items() if (of, name) == (task, metric)]
    return {
        "task": task,
        "metric": metric,
        "mean": fmean(values),
        "sd": stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
        "failed": sum(of == task for of, _ in model.failed),
    }


def _describe_blimp(model, paradigms):
    figures = model.blimp["figures"]
    return {
        "average": blimp_average(model),
        "paradigms": len(figures),
        "pairs": sum(figure["n"] for figure in figures),
        "common_average": blimp_average(model, paradigms) if paradigms else None,
        "common_paradigms": len(paradigms),
        "ties": sum(figure.get("ties", 0) for figure in figures),
    }


# -- tables -----------------------------------------------------------------------------------------------

_MODEL_COLUMNS = (
    "model",
    "weights",
    "objective",
    "encoder",
    "teacher",
    "layer",
    "k",
    "lambda",
    "kappa",
    "step",
    "fraction",
    "mass_kept",
    "intruder_auc",
    "average",
    "common_average",
    "n",
)
_MATRIX_COLUMNS = ("n", "wins", "losses", "ties", "p", "holm", "two_sided", "two_sided_holm")


def _save_tables(directory, result):
    """Write the CSV files. Returns their paths."""
    differ_in = _name_differences(result["differences"]["pairs"])
    single_trainings = [
        found | {"task": task, "seed": seed} for found in result["left_out"] for task, seed in found["trainings"]
    ]
    contents = {
        "models": _model_rows(result["models"]),
        "tasks": _task_rows(result["models"]),
        "significance": _significance_rows(result, differ_in),
        "win-rates": _rows_of(
            ("model", "against", "differ_in", "step", "task", "n", "wins", "losses", "ties", "rate"),
            [rate | {"differ_in": differ_in[rate["model"], rate["against"]]} for rate in result["win_rates"]],
        ),
        "blimp": _rows_of(
            (
                "model",
                "against",
                "differ_in",
                "paradigms",
                "wins",
                "losses",
                "ties",
                "difference",
                "low",
                "high",
                "p",
                "holm",
            ),
            [row | {"differ_in": differ_in[row["model"], row["against"]]} for row in result["blimp"]],
        ),
        "frozen": _rows_of(("model", "task", "metric", "value", "n"), result["frozen"]),
        "differences": _difference_rows(result),
        "left-out": _rows_of(("model", "against", "why", "task", "seed"), single_trainings),
    }
    make_directories(directory)
    paths = []
    for name, (header, rows) in contents.items():
        paths.append(str(save_table(directory / f"{name}.csv", header, rows)))
    return paths


def _name_differences(pairs):
    """(model, against), both ways -> in what the two differ."""
    said = {}
    for pair in pairs:
        text = ", ".join([*pair["differ_in"], *(["unknown settings"] if pair["unknown"] else [])])
        said[pair["model"], pair["against"]] = said[pair["against"], pair["model"]] = text
    return said


def _difference_rows(result):
    rows = [
        [name, value, label]
        for name, values in result["differences"]["settings"].items()
        for value, labels in values.items()
        for label in labels
    ]
    rows += [["settings of pre-training", "not all recorded", label] for label in result["differences"]["unknown"]]
    return ("setting", "value", "model"), rows


def _rows_of(header, dicts):
    return header, [[row[name] for name in header] for row in dicts]


def _model_rows(models):
    costs = ("pretraining_flops", "teacher_flops")
    header = (*_MODEL_COLUMNS, "failed", *costs, "blimp", "blimp_paradigms", "blimp_ties")
    rows = []
    for model in models:
        blimp = model["blimp"] or dict.fromkeys(("average", "paradigms", "ties"))
        rows.append(
            [
                *(model[name] for name in _MODEL_COLUMNS),
                len(model["failed"]),
                model["flops"]["pretraining"],
                model["flops"]["teacher"],
                blimp["average"],
                blimp["paradigms"],
                blimp["ties"],
            ]
        )
    return header, rows


def _task_rows(models):
    header = ("model", "task", "metric", "mean", "sd", "seeds", "failed")
    return header, [
        [model["model"], *(figure[name] for name in header[1:])] for model in models for figure in model["figures"]
    ]


def _significance_rows(result, differ_in):
    names, rows = result["compared"], []
    for level, cells in result["significance"].items():
        for i, name in enumerate(names):
            for j, other in enumerate(names):
                if i != j:
                    full = result["levels"][level]["full"]
                    said = differ_in[name, other]
                    rows.append([level, full, name, other, said, *(cells[column][i][j] for column in _MATRIX_COLUMNS)])
    return ("level", "of", "model", "against", "differ_in", *_MATRIX_COLUMNS), rows
