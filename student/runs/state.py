"""The progress of a run, as one object shared by the loop, the log, checkpoints, exports and the summary."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from student.config import ResolvedConfig
from student.encoders.libraries import libraries_record
from student.meter import share_of_baseline
from student.runs.directory import Run


@dataclass
class RunState:
    """The counts and figures of a run in this process."""

    steps: int = 0
    """optimiser steps done"""
    tokens: int = 0
    """real tokens seen"""
    seconds: float = 0.0
    """seconds spent in steps, summed over the processes that did this run one after the other"""
    flops: int = 0
    """nominal floating-point operations of these steps"""
    figures: dict = field(default_factory=dict)
    """newest held-out figures"""
    figures_step: int = 0
    """the step after which they were measured"""
    baseline: dict = field(default_factory=dict)
    """held-out figures of constant predictions"""
    seconds_to_first_step: float | None = None
    saved: Path | None = None
    """newest whole checkpoint"""
    saved_step: int | None = None
    """step of the last checkpoint that this process saved"""

    def restore(self, path: Path, state: dict) -> None:
        """Continue from a whole checkpoint and its state."""
        self.saved, self.steps, self.tokens = path, state["step"], state["tokens"]
        self.seconds, self.flops, self.figures = state["seconds"], state["flops"], state["held_out"]
        self.figures_step = state["held_out_step"]

    def to_json(self) -> dict:
        """The part of the state that a checkpoint holds, except the step."""
        figures = {"held_out": self.figures, "held_out_step": self.figures_step}
        return {"tokens": self.tokens, "flops": self.flops, "seconds": self.seconds, **figures}

    def held_out_line(self) -> dict:
        """The log's entries for an evaluation."""
        line = {"held_out": self.figures, "held_out_vs_baseline": share_of_baseline(self.figures, self.baseline)}
        for suffix in self._suffixes():
            line[f"held_out_vs_baseline{suffix}"] = share_of_baseline(self.figures, self.baseline, f"loss{suffix}")
        return line

    def lineage(self, run: Run, config: ResolvedConfig) -> dict:
        """The facts that an export is made from, for its lineage.json and its card."""
        found: dict[str, Any] = {
            "settings": run.identity["settings"],
            "step": self.steps,
            "tokens": self.tokens,
            "flops": self.flops,
            "held_out": self.figures,
            "held_out_step": self.figures_step,
            "baseline": self.baseline,
        }
        if config.continue_from is not None:  # the settings have the weights' hash; this is their path
            found["continued_from"] = str(config.continue_from.absolute())
        return found | libraries_record(run.libraries)

    def summary(self, run: Run, config: ResolvedConfig, parameters: int) -> dict:
        """The content of result.json for a finished run; `train` explains the entries."""
        result = {
            **run.places(),
            "objective": config.objective,
            "encoder": config.encoder_source,
            "parameters": parameters,
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens / self.seconds if self.seconds > 0 else 0.0,
            "flops": self.flops,
            "seconds_to_first_step": self.seconds_to_first_step,
            "held_out": self.figures,
            "baseline": self.baseline,
            "held_out_loss": self.figures.get("loss"),
            "baseline_loss": self.baseline.get("loss"),
            "improvement": self._improvement("loss"),
        }
        for suffix in self._suffixes():
            result[f"baseline_loss{suffix}"] = self.baseline[f"loss{suffix}"]
            result[f"improvement{suffix}"] = self._improvement(f"loss{suffix}")
        return result

    def _suffixes(self) -> list[str]:
        """Name endings of the figures of baselines that are stronger than one constant."""
        return [suffix for suffix in ("_by_position", "_by_type") if f"loss{suffix}" in self.baseline]

    def _improvement(self, name: str) -> float | None:
        share = share_of_baseline(self.figures, self.baseline, name)
        return None if share is None else 1 - share
