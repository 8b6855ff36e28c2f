"""Settings of a sweep over layers or over k. Imports nothing heavy.

A sweep takes some of the settings of encode-lsp and of train-student, under the same names. What it does not take keeps
the default of that command; what it takes is checked there. So the few are fields here, instead of inherited with the
thirty that are no flags of a sweep.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from mlsm.common.settings import check
from pipeline.config import DictionaryConfig, EncodeConfig
from student.config import StudentConfig


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Encode several layers (or k) in one pass of the teacher, then train one student on each, all else equal."""

    layer: tuple[int, ...] = EncodeConfig.layer
    """Layers of the teacher; several of these, or several --k."""
    k: tuple[int, ...] = DictionaryConfig.k
    """Numbers of latent semantic properties."""
    teacher: str | None = EncodeConfig.teacher
    """Directory or Hub id of a BERT-family encoder; `bundled` is the small demonstration teacher, and only the
    demonstration's own text has it by default."""
    corpus: tuple[str, ...] = EncodeConfig.corpus
    """As of encode-lsp."""
    max_length: int = EncodeConfig.max_length
    """Window length in tokens, special tokens included."""
    max_tokens: int | None = None
    """Tokens that are encoded; the whole corpus when not given."""
    unit_tokens: int = EncodeConfig.unit_tokens
    """About this many tokens make one shard; an interruption costs at most about a shard of every store."""
    lam: float = EncodeConfig.lam
    """Penalty of equation 2, in units of a correlation."""
    top_n: int | Literal["all"] | None = None
    """Largest entries kept of each token's distribution; `all`: every one, as far as a shard holds them; unset: as of
    encode-lsp, for each store by its dictionary. One number keeps less of the mass at some layers and k than at others:
    the table says how much of each store."""
    dictionary_tokens: int = EncodeConfig.dictionary_tokens
    """Hidden vectors in each dictionary's training sample."""
    encoder: str = StudentConfig.encoder
    """The students' encoder, as of train-student."""
    dropout: float | None = None
    """The students' dropout; not given: what the encoder's config says."""
    max_steps: int | None = StudentConfig.max_steps
    """Optimiser steps of each student; unset: as of train-student, from the size of the stores."""
    batch_windows: int | None = StudentConfig.batch_windows
    """Windows per optimiser step; unset: as of train-student."""
    micro_batch: int | None = StudentConfig.micro_batch
    """Windows per forward and backward pass; unset: as of train-student."""
    lr: float | None = StudentConfig.lr
    """Peak learning rate; unset: as of train-student, from the width of the encoder."""
    warmup: float = StudentConfig.warmup
    """Share of the steps in which the rate rises."""
    save_every: int | None = StudentConfig.save_every
    """Optimiser steps between checkpoints to resume from; unset: a twentieth of the run, from 50 to 1,000."""
    seed: int = EncodeConfig.seed
    """Of dictionaries and students: weights, order, masks."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`."""
    diagnostic: Path | None = None
    """JSON that choose-layer printed for the same teacher: its F1 goes beside each student."""
    intruders: bool = False
    """Judge how interpretable the LSPs of each store are, as show-lsp --intruders does; its AUC goes beside each
    student."""
    judge: str | None = None
    """With --intruders: as of show-lsp, an encoder that judges in place of the teacher's word embeddings."""
    gpu: str = "NVIDIA H100 80GB HBM3"
    """GPU that hours at full scale are stated for, as CUDA names it, at 40 % of its bfloat16 peak."""
    dry_run: bool = False
    """Say what would be done and what full scale costs, and stop."""
    output: Path = EncodeConfig.output
    """Directory for stores, dictionaries, students, and the table under `sweeps`."""
    json: bool = False
    """Print the result as JSON."""

    def __post_init__(self):
        check(self)
        object.__setattr__(self, "teacher", self.encoding().teacher)
        self.training(store=None)  # which checks the others
        if len(self.layer) > 1 and len(self.k) > 1:
            raise ValueError(
                f"a sweep is over --layer or over --k, found {len(self.layer)} layers and {len(self.k)} k. Give one "
                "layer with several k, or one k with several layers."
            )
        if self.judge and not self.intruders:
            raise ValueError("--judge is for the judgement of LSPs. Add --intruders")

    def encoding(self) -> EncodeConfig:
        """The settings of the one pass of the teacher that makes all stores."""
        return EncodeConfig(**self._shared_with(EncodeConfig))

    def training(self, store: str | None) -> StudentConfig:
        """The settings of the student of one store."""
        own = {"store": store, "objective": "mlsm", "eval_every": 0}
        return StudentConfig(**self._shared_with(StudentConfig) | own)

    def _shared_with(self, settings_class) -> dict[str, Any]:
        names = {field.name for field in fields(settings_class)} & {field.name for field in fields(self)}
        return {name: getattr(self, name) for name in names}

    @property
    def over(self) -> str:
        """What is varied: `layer` or `k`."""
        return "k" if len(self.k) > 1 else "layer"
