"""Records of evaluations without any evaluation: scores that are given, or those of the paper's tables."""

import hashlib
import json

from evaluation.comparison import published
from evaluation.records import METRICS, SCHEMA, path_of

SPREAD = (-0.02, -0.01, 0.0, 0.01, 0.02)    # of five seeds around a score; its mean is 0


def digest(text):
    return hashlib.sha256(str(text).encode()).hexdigest()


def a_record(model, task, seed, values, **fields):
    """A record of a fine-tuning whose values are in the order of the task's metrics; `fields` replace others."""
    figures = [{"metric": name, "value": value, "n": 100} for name, value in zip(METRICS[task], values, strict=True)]
    record = {
        "schema": SCHEMA, "suite": "finetune", "task": task, "seed": seed, "figures": figures, "diverged": False,
        "model": model, "path": f"runs/{model}", "weights": digest(model), "head": digest((task, seed)),
        "objective": "mlsm", "step": 1000, "fraction": 1.0, "layer": 10, "k": 3072, "lambda": 0.05, "dictionary": "d",
        "encoder": "deberta-base", "teacher": "bert-base-cased",
        "flops": {"pretraining": 9e12, "teacher": 2e12}, "wall": 1.0,
        "data": {"name": task, "files": {"train.tsv": digest(task)}, "n_train": 1000, "n_eval": 100},
        "settings": {"learning_rate": 2e-5, "epochs": 3}, "env": {},
    }
    return record | fields


def of_table(model, scores, seeds=5, **fields):
    """Records of the whole suite: per seed a score of {(task, metric): score} plus SPREAD, so that means stay."""
    return [
        a_record(model, task, seed, [round(scores[task, metric] + SPREAD[seed], 6) for metric in metrics], **fields)
        for task, metrics in METRICS.items() for seed in range(seeds)
    ]


def a_blimp_record(model, accuracies, **fields):
    """A BLiMP record with accuracies of some paradigms."""
    figures = [{"metric": name, "value": value, "n": 1000, "ties": 1} for name, value in accuracies.items()]
    record = a_record(model, "rte", 0, [0.5], head=None)
    return record | {"suite": "blimp", "task": "blimp", "seed": None, "figures": figures} | fields


def layer_study(layers=(2, 4, 6, 8, 9, 10, 11, 12), seeds=5):
    """Records of one finished model a layer, with the scores of the paper's table 1."""
    table = published.scores(1)
    return [record for layer in layers for record in of_table(f"mlsm-l{layer}", table[layer], seeds, layer=layer)]


def paper_study(seeds=5):
    """Records of a study whose scores are those of the paper's tables where it prints them, and invented beyond."""
    layers, ks, kappas = (published.scores(table) for table in (1, 2, 4))
    records = layer_study(seeds=seeds)
    for k, scores in ks.items():
        if k != 3072:
            records += of_table(f"mlsm-k{k:g}", scores, seeds, k=int(k))
    for kappa, scores in kappas.items():
        if kappa:
            records += of_table(f"mtl-{kappa:g}", scores, seeds, objective="mtl", kappa=kappa)
    for encoder, best in (("deberta-base", layers[10.0]), ("bert-base", layers[12.0])):
        records += _checkpoints(encoder, best, seeds)
    return records + _blimp()


def _checkpoints(encoder, best, seeds):
    records = []
    for objective, deficit in (("mlsm", 0.0), ("mlm", 0.02), ("kd", 0.01)):
        target = {} if objective == "mlsm" else {"layer": None, "k": None, "lambda": None}
        for step, missing in ((100, 0.1), (250, 0.06), (500, 0.03), (1000, 0.0)):
            if (encoder, objective, step) == ("deberta-base", "mlsm", 1000):
                continue    # among the layers
            scores = {figure: score - missing - deficit * (figure[0] != "cola") for figure, score in best.items()}
            facts = {"objective": objective, "encoder": encoder, "step": step, "fraction": step / 1000} | target
            records += of_table(f"{objective}-{encoder}-{step}", scores, seeds, **facts)
    return records


def _blimp():
    records = []
    for objective, cost, last in (("mlsm", 9.3e18, 0.71), ("mlm", 9e18, 0.715), ("kd", 1.19e19, 0.735)):
        for fraction in (0.1, 0.25, 0.5, 1.0):
            accuracies = {"a": last - 0.05 * (1 - fraction), "b": last + 0.05 * fraction}
            spent = {"pretraining": 9e18 * fraction, "teacher": (cost - 9e18) * fraction}
            facts = {"objective": objective, "step": int(1000 * fraction), "fraction": fraction, "flops": spent}
            records.append(a_blimp_record(f"{objective}-words-{fraction:g}", accuracies, **facts))
    return records


def store(directory, records):
    """Write records where evaluations write them, without waiting for the disk. Returns the directory."""
    for record in records:
        file = path_of(directory, record)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record))
    return directory / "evaluations"
