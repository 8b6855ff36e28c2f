"""Records of evaluations without any evaluation: scores that are given, or those of the paper's tables."""

import hashlib
import json

from mlsm.evaluation.comparison import published
from mlsm.evaluation.records import METRICS, SCHEMA, path_of

SPREAD = (-0.02, -0.01, 0.0, 0.01, 0.02)  # of five seeds around a score; its mean is 0


def digest(text):
    return hashlib.sha256(str(text).encode()).hexdigest()


def a_record(model, task, seed, values, **fields):
    """A record of a fine-tuning whose values are in the order of the task's metrics; `fields` replace others."""
    figures = [{"metric": name, "value": value, "n": 100} for name, value in zip(METRICS[task], values, strict=True)]
    record = {
        "schema": SCHEMA,
        "suite": "finetune",
        "task": task,
        "seed": seed,
        "figures": figures,
        "diverged": False,
        "collapsed": False,
        "identity": None,
        "model": model,
        "path": f"runs/{model}",
        "weights": digest(model),
        "head": digest((task, seed)),
        "objective": "mlsm",
        "kappa": None,
        "run_seed": 42,
        "step": 1000,
        "fraction": 1.0,
        "layer": 10,
        "k": 3072,
        "lambda": 0.05,
        "dictionary": "d",
        "encoder": "deberta-base",
        "teacher": "bert-base-cased",
        "flops": {"pretraining": 9e12, "teacher": 2e12},
        "wall": 1.0,
        "data": {"name": task, "files": {"train.tsv": digest(task)}, "n_train": 1000, "n_eval": 100},
        "settings": {"learning_rate": 2e-5, "epochs": 3},
        "env": {},
    }
    return record | fields


def of_table(model, scores, seeds=5, **fields):
    """Records of the whole suite: per seed a score of {(task, metric): score} plus SPREAD, so that means stay."""
    return [
        a_record(model, task, seed, [round(scores[task, metric] + SPREAD[seed], 6) for metric in metrics], **fields)
        for task, metrics in METRICS.items()
        for seed in range(seeds)
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


def paper_study(layers=(8, 10, 12), ks=(1536, 12288), kappas=(1.0, 2.0), steps=(250, 1000), seeds=2):
    """Records for every figure: scores of the paper's tables where it prints them, invented beyond."""
    records = layer_study(layers, seeds)
    for k in ks:
        records += of_table(f"mlsm-k{k}", published.scores(2)[k], seeds, k=k)
    for kappa in kappas:
        records += of_table(f"mtl-{kappa:g}", published.scores(4)[kappa], seeds, objective="mtl", kappa=kappa)
    for encoder, layer in (("deberta-base", 10), ("bert-base", 12)):
        records += _checkpoints(encoder, published.scores(1)[layer], steps, seeds)
    return records + _blimp(steps)


def _checkpoints(encoder, best, steps, seeds):
    records = []
    for objective, deficit in (("mlsm", 0.0), ("mlm", 0.02), ("kd", 0.01)):
        target = {} if objective == "mlsm" else {"layer": None, "k": None, "lambda": None}
        for step in steps:
            if (encoder, objective, step) == ("deberta-base", "mlsm", 1000):
                continue  # among the layers
            missing = 0.1 * (1 - step / 1000)
            scores = {figure: score - missing - deficit * (figure[0] != "cola") for figure, score in best.items()}
            facts = {"objective": objective, "encoder": encoder, "step": step, "fraction": step / 1000} | target
            records += of_table(f"{objective}-{encoder}-{step}", scores, seeds, **facts)
    return records


def _blimp(steps):
    records = []
    for objective, cost, last in (("mlsm", 9.3e18, 0.71), ("mlm", 9e18, 0.715), ("kd", 1.19e19, 0.735)):
        for fraction in (step / 1000 for step in steps):
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
