"""Records and logs of paired pre-trainings, as a study leaves them: with given scores."""

import json

from tiny_records import a_record, digest

from mlsm.evaluation.records import METRICS

WITHOUT_TARGETS = dict.fromkeys(("layer", "k", "lambda", "dictionary", "teacher"))
TARGETS = {"mlm": WITHOUT_TARGETS, "untrained": WITHOUT_TARGETS}


def identity(objective, seed, **settings):
    """All that decided a pre-training, as far as a comparison asks for it."""
    known = {"objective": objective, "encoder": "bert-2x32", "lr": 1e-3, "max_steps": 1000, "seed": seed} | settings
    target = {"kind": "ids"} if objective == "mlm" else {"kind": "lsp", "layer": 10, "k": 3072, "lam": 0.05}
    facts = {"objective": objective, "settings": known, "plan": "p" * 32, "windowing": {"max_length": 128}}
    return facts | {"target": target["kind"], "target_settings": target, "tail": None}


def arm(objective, scores, name=None, fraction=1.0, root="runs", of_identity=None, **fields):
    """Records of one arm: scores {pre-training seed: {task: mean}}, each of two fine-tunings 0.01 beside it."""
    records = []
    for seed, by_task in scores.items():
        run, step = f"{name or objective}-seed{seed}", int(1000 * fraction)
        label, place = (run, "export") if fraction == 1 else (f"{run}-step-{step:08}", f"checkpoints/step-{step:08}")
        of = "untrained" if fraction == 0 and "continue_from" not in (of_identity or {}) else objective
        facts = {"objective": of, "run_seed": seed, "step": step, "fraction": fraction, "encoder": "bert-2x32"}
        facts |= {"path": f"{root}/{run}/{place}", "weights": digest(label)} | TARGETS.get(of, {})
        facts |= {"identity": identity(objective, seed, **of_identity or {})} | fields
        for task, mean in by_task.items():
            for spread, tuning in ((-0.01, 0), (0.01, 1)):
                values = [mean + spread] * len(METRICS[task])
                records.append(a_record(label, task, tuning, values, **facts))
    return records


def pair(differences_ST, tasks=("cola", "mrpc", "rte"), base=0.5):
    """Records of mlsm and mlm whose differences by pre-training seed and task are given."""
    seeds = range(len(differences_ST))
    mlm = {seed: dict.fromkeys(tasks, base + seed / 100) for seed in seeds}
    mlsm = {
        seed: {task: mlm[seed][task] + d for task, d in zip(tasks, row, strict=True)}
        for seed, row in enumerate(differences_ST)
    }
    return arm("mlsm", mlsm) + arm("mlm", mlm)


def write_log(run, losses, step_seconds=0.5, slow=10.0, step_flops=100):
    """A run's log: a start, then a line a step; only the last tenth of the steps is as fast as the machine.

    losses  {step: held-out loss}
    """
    run.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 0, "event": "start", "baseline": {"loss": 4.0}}]
    last = max(losses)
    for step in range(1, last + 1):
        seconds = step_seconds if step > last - last // 10 else slow
        line = {"step": step, "loss": 3.0, "tokens": 64 * step, "flops": step_flops * step}
        line["flops_per_second"] = step_flops / seconds
        if step in losses:
            line |= {"held_out": {"loss": losses[step]}, "held_out_vs_baseline": losses[step] / 4}
        lines.append(line)
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
