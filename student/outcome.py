"""What a run writes down about itself when it exports: the lineage of the export, and the summary in result.json.

Left out: the log (trainer.py), the model card (export.py).
"""

from typing import TYPE_CHECKING

from student.encoders.products import products_record
from student.meter import closest_baseline, share_of_baseline

if TYPE_CHECKING:
    from student.trainer import Trainer


def lineage(trainer: "Trainer") -> dict:
    """What an export is made from, for its lineage.json and its card."""
    found = {
        "settings": trainer.run.identity["settings"],
        "step": trainer.steps,
        "tokens": trainer.tokens,
        "flops": trainer.meter.flops_after(trainer.steps),
        "held_out": trainer.figures,
        "baseline": trainer.held_out.baseline,
    }
    if trainer.config.continue_from is not None:  # settings say which weights, by their content; this says where
        found["continued_from"] = str(trainer.config.continue_from)
    return found | products_record(trainer.run.products)


def summary(trainer: "Trainer") -> dict:
    """What result.json holds of a run that did all its steps; `train` explains the entries."""
    figures, baseline = trainer.figures, trainer.held_out.baseline
    result = {
        **trainer.run.places(),
        "objective": trainer.config.objective,
        "encoder": trainer.config.encoder_source,
        "parameters": sum(weight.numel() for weight in trainer.model.parameters()),
        "steps": trainer.steps,
        "tokens": trainer.tokens,
        "seconds": trainer.seconds,
        "tokens_per_second": trainer.tokens / trainer.seconds if trainer.seconds > 0 else 0.0,
        "flops": trainer.meter.flops_after(trainer.steps),
        "seconds_to_first_step": trainer.seconds_to_first_step,
        "held_out": figures,
        "baseline": baseline,
        "held_out_loss": figures.get("loss"),
        "baseline_loss": baseline.get("loss"),
        "improvement": _improvement(figures, baseline, "loss"),
    }
    if (closest := closest_baseline(baseline)) != "loss":
        suffix = closest.removeprefix("loss")
        result[f"baseline_loss{suffix}"] = baseline[closest]
        result[f"improvement{suffix}"] = _improvement(figures, baseline, closest)
    return result


def _improvement(figures: dict, baseline: dict, name: str) -> float | None:
    share = share_of_baseline(figures, baseline, name)
    return None if share is None else 1 - share
