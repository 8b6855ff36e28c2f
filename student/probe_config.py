"""Settings of a linear probe. Imports nothing heavy."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from student.config import ObjectiveName, StudentConfig

ProbeInput = Literal["softmax", "logits", "hidden"]
_NAMED = {"mask_rate", "mask_rate_end", "mask_unit", "corruption"}  # fixed settings that are part of a run's identity


@dataclass(frozen=True)
class ProbeConfig(StudentConfig):
    """Which student to probe, on which store, and how.

    Those settings of a student that a probe does not have are fixed: the encoder is the student's, the objective mlm.
    """

    store: str | None = None
    """directory or URL of a store of the student's tokenizer, of any kind; unset: the one the student learned from"""

    segments: Literal["auto", "never"] = "auto"
    """which sentence of a pair a token belongs to: `auto` tells a student that was trained so, on a store packed as
    pairs; `never` gives segment 0 to every token"""

    student: str | None = None
    """a run, an export, a kept checkpoint or a Hub id of an mlsm, hard-mlsm, naive-mlsm or mtl student, for hidden of
    any student; unset: the newest finished run with LSPs under runs/students"""

    probe_input: ProbeInput = "softmax"
    """what the probe reads: `softmax`, the LSP distribution, tests what LSPs carry; `logits`, the raw outputs, tests
    what the encoder carries, and merges with the output matrix into a decoder that AutoModelForMaskedLM loads;
    `hidden`, the encoder's last hidden states, is the same readout for students of every objective, mlm included"""

    max_steps: int | None = None
    """optimiser steps; unset: as the recipe that made the store says, else a tenth of a student's, at least 1,000"""

    lr: float | None = None
    """peak learning rate of AdamW; unset: 0.001 for logits and hidden; for softmax 100 / max_steps, at most 0.5, as
    weights of probabilities have a long way to go and AdamW moves them by about the rate"""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay of the probe's matrix"""

    output: Path | None = None
    """directory of the run; unset: runs/probes/<input>-<student>-seed<seed>-<fingerprint>"""

    objective: ObjectiveName = field(init=False, default="mlm")
    wordnet: Path | None = field(init=False, default=None)
    store_weights: tuple[float, ...] | None = field(init=False, default=None)
    kappa: float | None = field(init=False, default=None)
    regress_loss: Literal["cosine", "mse"] = field(init=False, default="cosine")
    target_temperature: float = field(init=False, default=1.0)
    untied: bool = field(init=False, default=False)
    positions: Literal["masked", "all"] = field(init=False, default="masked")
    mask_later: int = field(init=False, default=0)  # [MASK] enters where it enters the student
    mask_rate: float = field(init=False, default=0.15)  # masks are BERT's: uniform, of tokens alone
    mask_rate_end: float | None = field(init=False, default=None)
    mask_schedule: Literal["linear", "cosine", "steps"] = field(init=False, default="linear")
    mask_rate_steps: tuple[float, ...] = field(init=False, default=(0.5,))
    mask_weights: str | tuple[str, ...] | None = field(init=False, default=None)
    mask_weight_steps: tuple[float, ...] = field(init=False, default=(0.5,))
    mask_update_steps: int = field(init=False, default=200)
    mask_unit: Literal["token", "word", "span"] = field(init=False, default="token")
    corruption: Literal["mask", "80-10-10"] = field(init=False, default="mask")
    short_windows: int | None = field(init=False, default=None)
    short_share: float = field(init=False, default=0.9)
    encoder: str = field(init=False, default="")
    continue_from: Path | None = field(init=False, default=None)
    continue_head: bool = field(init=False, default=False)
    optimizer: Literal["adamw", "muon"] = field(init=False, default="adamw")
    dropout: float | None = field(init=False, default=None)

    def identity(self) -> dict:
        """The settings that decide what is trained. The student is identified by its content, not by its path.

        How the probe masks is fixed, and part of the run's name all the same.
        """
        fixed = {"student", *(entry.name for entry in fields(self) if not entry.init)} - _NAMED
        return {name: value for name, value in super().identity().items() if name not in fixed}

    root = "runs/probes"

    @property
    def kind(self) -> str:
        """What the name of a run begins with."""
        return self.probe_input

    @property
    def encoder_source(self) -> str:
        """Name of the student: of its run, with the step of a checkpoint, or the last part of its path or Hub id."""
        path = Path(self.student or "")
        if path.parent.name == "checkpoints":
            return f"{path.parent.parent.name}-{path.name}"
        return path.parent.name if path.name == "export" else path.name
