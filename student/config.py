"""Settings of one training run of a student, or of a linear probe of one.

A frozen dataclass that the command line turns into flags and a recipe fills with defaults. It imports nothing heavy,
so that `--help` answers at once.

There are two kinds of settings. Those in `OPERATIONAL` say where and how the work is done, and may change when a run
is resumed. All others say *what* is trained and, with the store's two fingerprints, name the run.

Those in `FOLLOWING` may be left open, as None: their values then follow from the store (resolve.py). Only a resolved
configuration names a run.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from mlsm.common.settings import check, require, require_at_least
from student.masks.config import ADAPTIVE, UNIFORM, corruption_shares
from student.objectives import OBJECTIVES, OWN_SETTINGS

if TYPE_CHECKING:
    ObjectiveName: TypeAlias = str
else:
    ObjectiveName = Literal[tuple(OBJECTIVES)]
# The next smaller stored weight differs by a factor of e^-0.033, the smallest by e^-8.3 (shards/codec.py). float32 ends
# at e^-104 and cannot distinguish e^-1e-8 from 1.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-4, 1e9

MaskUnit = Literal["token", "word", "span"]  # masks/masking.py explains them
TrackerName = Literal["tensorboard", "wandb", "trackio"]

FOLLOWING = ("max_steps", "batch_windows", "micro_batch", "lr", "save_every", "eval_every", "eval_windows")

OPERATIONAL = frozenset(
    ["store", "run_dir", "device", "epochs", "micro_batch", "checkpoints", "save_every", "eval_every", "eval_windows"]
    + ["track", "keep_last", "activation_checkpointing", "products", "wordnet"]
)

UNNAMED = {  # setting -> usual value, which is not part of a run's identity, so that names stay
    "optimizer": "adamw",
    "positions": "masked",
    "regress_loss": "cosine",
    "schedule": "linear",
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "continue_head": False,
    "mask_later": 0,
    "mask_schedule": "linear",
    "mask_weights": None,
    "short_windows": None,
    "target_temperature": 1.0,
}

OF_MASKS = ("mask_rate", "mask_rate_end", "mask_schedule", "mask_weights", "mask_unit", "corruption", "mask_later")
ProbeInput = Literal["softmax", "logits", "hidden"]
_NAMED = {"mask_rate", "mask_rate_end", "mask_unit", "corruption"}  # fixed settings that are part of a run's identity


@dataclass(frozen=True)
class StudentConfig:
    """The settings of training a student: what to train, on which store, and how.

    Settings that are unset follow from the store and the recipe that made it.
    """

    store: str | tuple[str, ...] | None = None
    """Directory or URL of the store to train on, which an `encode-...` command or `derive-shards` has written. With
    several stores of one plan, mlsm and hard-mlsm learn all targets at once, with a block of outputs for each."""

    store_weights: tuple[float, ...] | None = None
    """With several stores: the weight of each one's loss in the sum, in their order; unset: 1 each."""

    objective: ObjectiveName = field(
        default="mlsm", metadata={"choices": {name: facts.target for name, facts in OBJECTIVES.items()}}
    )
    """What the student learns about a token that it predicts:"""

    wordnet: Path | None = None
    """For supersense: WordNet's sense index, the file index.sense or the directory that contains it. The run is named
    after its content, not its path."""

    kappa: float | None = None
    """Weight of the words' cross-entropy: for mtl, added to the KL of the LSPs (unset: 1, the best of four above
    0 in the paper's table 4, where 0 is better still); for regress, added to the loss of the hidden states (unset: 0,
    no words)."""

    regress_loss: Literal["cosine", "mse"] = "cosine"
    """For regress: the loss between outputs and hidden states, which are centred and standardised. `cosine` is 1 -
    cosine, `mse` the mean squared error."""

    target_temperature: float = 1.0
    """For mlsm, mtl and naive-mlsm: learn the LSP distribution p^(1/T), renormalised over the stored entries. Above 1
    it is flatter than the stored one, below 1 sharper; there is no evidence that flatter ones train better students
    (mlsm docs objectives). From 1e-4, below which float32 keeps only the largest entry, to 1e9. Losses at different T
    cannot be compared; kl_untempered can."""

    untied: bool = False
    """For mlm, kd, mtl and naive-mlsm: give the vocabulary its own output matrix. By default its rows of the
    output matrix are the token embedding, as in the official code."""

    encoder: str = "bert-12x768"
    """Architecture: bert-tiny, -mini, -small, -medium or -base, deberta-base, modernbert-base, any
    bert-<layers>x<width> or modernbert-<layers>x<width> (these need no network), or a Hugging Face config: Hub id,
    config.json or directory (./bert-base if it has one of these names). bert-12x768 has the size of the paper's
    students."""

    continue_from: Path | None = None
    """Continue from a run, an export or a directory of safetensors that AutoModel loads: its encoder and weights are
    used instead of --encoder."""

    continue_head: bool = False
    """Also use the prediction head of the masked language model in --continue-from: its dense layer and norm and, for
    objectives that predict tokens, the biases of the vocabulary and, with --untied, its output matrix. By default the
    head is initialised from scratch."""

    documents_apart: bool = False
    """Keep the documents of a packed window apart: each token sees only its own document, and positions start again
    with each. The window's [CLS] belongs to its first document; the others start without one and end with their
    [SEP]."""

    segments: Literal["auto", "never"] = "auto"
    """Which sentence of a pair a token belongs to: `auto` tells an encoder with segment embeddings (token types) on a
    store packed as pairs; `never` gives every token segment 0, as on all other stores."""

    short_windows: int | None = None
    """Cut each window into pieces of this many tokens during the first steps (128, say, for windows of 512). The pieces
    do not see each other and are cheaper. Held-out windows are never cut. Unset: all steps read whole windows."""

    short_share: float = 0.9
    """With --short-windows: share of the steps that reads pieces; the others read whole windows (BERT: 0.9)."""

    dropout: float | None = None
    """Probability of every dropout in the encoder; unset: that of the encoder's config (BERT: 0.1)."""

    epochs: float | None = None
    """Passes over the training windows, instead of --max-steps."""

    max_steps: int | None = None
    """Optimiser steps; unset: those of the recipe that made the store, else 4 epochs, as in the paper (section 4.1),
    and at least 2,000 steps."""

    batch_windows: int | None = None
    """Windows per optimiser step, regardless of the micro-batch; unset: those of the recipe that made the store, else
    1,024, as in the paper, if the epochs then give 10,000 steps, otherwise the largest power of two that does, at least
    64. Both are halved for each doubling of the windows' length beyond 512 tokens, down to 8."""

    micro_batch: int | None = None
    """Windows per forward and backward pass. Lower it if memory runs out; unset: 2,048 tokens, with which
    small students train about the fastest (mlsm docs log, 2026-11-26), on a GPU 16,384, the paper's 128 windows of
    128."""

    lr: float | None = None
    """Peak learning rate; unset: that of the recipe that made the store, else 1e-4, as in the paper, for encoders as
    wide as BERT-base (768), 1e-3 up to width 256, and in between on a straight line in logarithms; with muon
    four times as much, mlm's best in our studies' pilots; always 1e-4 with --continue-from (mlsm docs training)."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """What turns gradients into updates: `adamw`, or `muon`, which makes the updates of the matrices in encoder and
    head orthogonal (Jordan et al. 2024) and scales them to the size of AdamW's. All other weights use AdamW, the
    paper's optimiser."""

    warmup: float = 0.02
    """Share of the steps in which the learning rate rises linearly to its peak. In the paper (section 4.1) 0.02. What
    follows: --schedule."""

    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    """Learning rate after its rise: `linear`, as in the paper, falls to zero on a straight line, `cosine` on half a
    cosine wave; `wsd` (warm-up, stable, decay) stays at the peak and falls on a straight line at the end."""

    decay_share: float = 0.2
    """For wsd: share of the steps in which the learning rate falls to zero, at most those after the warm-up."""

    adam_beta1: float = 0.9
    """AdamW's decay of the mean of gradients; 0.9 is torch's default, and the paper states none."""

    adam_beta2: float = 0.999
    """AdamW's decay of the mean of squared gradients; 0.999 is torch's default, and the paper states none."""

    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, on everything except norms and biases; in the official code 0.01."""

    decay_all: bool = False
    """Apply weight decay to norms and biases, too, as the official code does."""

    grad_clip: float = 1.0
    """Clip the gradient at this norm over all parameters; in the official code 1.0."""

    positions: Literal["masked", "all"] = "masked"
    """Which tokens are predicted: `masked`, as in the paper, those that a mask hides; `all`, every token that is not
    special, with none hidden: the student reads the text as the teacher did. `all` is for objectives that learn only
    stored targets. For LSPs, such students scored eleven points more than those of masked tokens in the second study
    without fine-tuning, and no more with it (0: untrained, 100: teacher; not planned; mlsm docs results); `masked` is
    the paper's way."""

    mask_rate: float = 0.15
    """Share of a window's non-special tokens that are masked and predicted; 0.15 is the official code's, and the paper
    states none."""

    mask_rate_end: float | None = None
    """Mask rate at the last step, reached from --mask-rate as --mask-schedule says (0.30 to 0.15, say); unset:
    constant. Held-out windows are always masked at this final rate."""

    mask_schedule: Literal["linear", "cosine", "steps"] = "linear"
    """How the mask rate moves to --mask-rate-end: on a straight line, along half a cosine (slowly at both ends), or in
    `steps` of equal size at --mask-rate-steps."""

    mask_rate_steps: tuple[float, ...] = (0.5,)
    """With --mask-schedule steps: shares of the steps at which the mask rate changes."""

    mask_weights: str | tuple[str, ...] | None = None
    """Choose the masked tokens in proportion to weights: a file of make-mask-weights; `frequency`, `common` or `pmi`
    for one that is made of this store with that command's defaults (pmi masks collocations as one); or `adaptive`, the
    student's own loss on each token so far. Several, which may include `uniform`, take turns at --mask-weight-steps.
    Unset, or only uniform: all tokens have the same weight, as held-out windows always do; there is no evidence that
    other weights are better (mlsm docs masks)."""

    mask_weight_steps: tuple[float, ...] = (0.5,)
    """With several --mask-weights: shares of the steps at which the second, the third and so on take over."""

    mask_update_steps: int = 200
    """With --mask-weights adaptive: optimiser steps between two updates of the weights; 200, as in Edman and Fraser
    (2025; mlsm docs masks)."""

    mask_unit: MaskUnit = "token"
    """What is masked together: `token`, as in the official code, each token by itself; `word` the tokens of a word;
    `span` neighbours (SpanBERT's geometric lengths)."""

    corruption: str = "mask"
    """What replaces a masked token: `mask`, as in the official code, is always the mask token; `80-10-10` is the mask
    token in 80 %, a random token in 10 %, the token itself in 10 %. Other shares, such as 50-0-50, may be given."""

    mask_later: int = 0
    """Layer, counted from 0, at which [MASK] enters the encoder (Liao et al. 2022). The layers below it see only the
    other tokens and cost less by the share that is masked, which pays at a high mask rate, such as 0.4. 0: the first
    layer, as usual. For BERT, RoBERTa, XLM-R, ELECTRA, ModernBERT, DeBERTa and DeBERTa-v2 without a convolution."""

    seed: int = 42
    """Seed of weights, order, masks and dropout; 42, as in the official code."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the forward pass; `auto` is float32 on a CPU, and on a GPU bfloat16 if a trial there found it right
    and faster. Weights stay float32."""

    products: Literal["auto", "onednn", "torch"] = "auto"
    """Library of the float32 matrix products on a CPU: `auto` times torch's own and oneDNN's once per machine and uses
    the faster one for each shape. A resumed run keeps what it started with: another value is then ignored with a
    warning."""

    device: str = "auto"
    """`auto` (a GPU if there is one), cpu, cuda or cuda:1. Of several processes on GPUs each uses its own."""

    compile: bool | None = None
    """Compile the student with torch.compile: its first step takes a minute or more, and it rounds differently; unset:
    on a GPU, if a trial there found it right and faster."""

    activation_checkpointing: bool = False
    """Compute the layers a second time in the backward pass instead of keeping their results: less memory, slower."""

    checkpoints: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    """Shares of the steps at which to keep a checkpoint that AutoModel loads; by default those of the paper (section
    4.2.3). 0 keeps the untrained student, the lower bound with which evaluations compare trained ones."""

    save_every: int | None = None
    """Optimiser steps between checkpoints to resume from; 0: none; unset: a twentieth of the run, from 50 to 1,000."""

    keep_last: int = 1
    """How many of the newest checkpoints to keep, in addition to those of --checkpoints."""

    eval_every: int | None = None
    """Optimiser steps between evaluations on held-out windows; 0: only at kept checkpoints; unset: a twentieth of
    the run, from 50 to 1,000."""

    eval_windows: int | None = None
    """Held-out windows per evaluation, with fixed masks; unset: 256, halved for each doubling of their length beyond
    512 tokens."""

    track: tuple[TrackerName, ...] = ()
    """Also show the log's values in tensorboard (tensorboard --logdir runs/students), wandb (or offline, with
    WANDB_MODE=offline) or trackio; needs mlsm-pretrain[track]."""

    run_dir: Path | None = None
    """Directory of this run; unset: runs/students/<objective>-<encoder>-seed<seed>-<fingerprint>."""

    # Class attributes, not settings:
    root = "runs/students"  # the default directory of runs
    origins: ClassVar[Mapping[str, str] | None] = None  # setting to "flag" or its recipe; None: no recipe was applied

    def __post_init__(self):
        check(self)
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"--epochs {self.epochs:g} and --max-steps {self.max_steps} both set the length of the run. Pass only "
                "one of them."
            )
        require_at_least(self, 1, "max_steps", "batch_windows", "micro_batch", "eval_windows", "keep_last")
        require_at_least(self, 0, "save_every", "eval_every", "weight_decay", "seed", "mask_later")
        for name in ("lr", "grad_clip", "epochs", "target_temperature"):
            require(self, name, lambda value: value > 0 and math.isfinite(value), "a positive number")
        facts = OBJECTIVES[self.objective]
        if facts.kappa == 0:
            require(self, "kappa", lambda value: 0 <= value < math.inf, "0 or more")
        else:
            require(self, "kappa", lambda value: 0 < value < math.inf, "a positive number")
        if self.kappa is not None and facts.kappa is None:
            raise ValueError(
                f"--kappa {self.kappa:g} is only for objectives that learn words in addition to another target"
                f" ({_names('kappa')}), found {self.objective}. Omit it."
            )
        for name in OWN_SETTINGS:
            value = getattr(self, name)
            if name not in facts.settings and value != getattr(type(self), name):
                of = ", ".join(other.name for other in OBJECTIVES.values() if name in other.settings)
                flag = f"--{name.replace('_', '-')} {value}"
                raise ValueError(f"{flag} is only for --objective {of}, found {self.objective}. Omit it.")
        require(self, "warmup", lambda value: 0 <= value < 1, "a share of the steps from 0 to below 1")
        require(self, "decay_share", lambda value: 0 < value <= 1, "a share of the steps above 0")
        require_at_least(self, 2, "short_windows")
        require(self, "short_share", lambda value: 0 < value < 1, "a share of the steps between 0 and 1")
        if self.short_windows is not None and self.mask_later > 0:
            raise ValueError(
                f"--short-windows {self.short_windows} and --mask-later {self.mask_later} cannot be combined: the "
                "lower layers would read nothing of a piece that is masked as a whole. Omit one of them."
            )
        for name in ("adam_beta1", "adam_beta2"):
            require(self, name, lambda value: 0 <= value < 1, "from 0 to below 1")
        require(self, "dropout", lambda value: 0 <= value < 1, "a probability from 0 to below 1")
        _check_masks(self)
        shares = all(0 <= share <= 1 for share in self.checkpoints)
        require(self, "checkpoints", lambda _: shares, "shares of the steps from 0 to 1")
        if self.positions == "all" and not facts.all_positions:
            raise ValueError(
                "--positions all hides no token, so it is only for objectives that learn only stored targets "
                f"({_names('all_positions')}); {self.objective} would learn to copy its input. Omit it."
            )
        if self.positions == "all" and self.word_weight > 0:
            raise ValueError(
                "--positions all hides no token, so --kappa would teach to copy the input. Omit one of them."
            )
        if self.continue_head and self.continue_from is None:
            raise ValueError("--continue-head needs --continue-from, the model whose head it takes.")
        if not LOWEST_TEMPERATURE <= self.target_temperature <= HIGHEST_TEMPERATURE:
            raise ValueError(
                f"--target-temperature must be from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}, found"
                f" {self.target_temperature:g}. Targets are float32: below, every weight but a token's largest is 0, as"
                f" with --objective hard-mlsm; above, all stored entries of a token have the same weight."
            )
        if "wordnet" in facts.settings and self.wordnet is None:
            raise ValueError(
                f"--objective {self.objective} needs --wordnet, WordNet's index.sense, which prepare-data wsd provides."
            )
        if self.untied and not facts.vocabulary:
            raise ValueError(
                f"--untied is only for objectives with an output for every token ({_names('vocabulary')}), found"
                f" {self.objective}. Omit it."
            )

        self._check_stores()

    def _check_stores(self) -> None:
        """Raise ValueError if stores, objective and weights do not fit. A list of one store becomes that store."""
        if isinstance(self.store, tuple) and len(self.store) == 1:
            object.__setattr__(self, "store", self.store[0])
        several = isinstance(self.store, tuple)
        if several and not self.store:
            raise ValueError("--store needs a value.")
        if several and not OBJECTIVES[self.objective].several_stores:
            raise ValueError(
                f"several stores are for the objectives {_names('several_stores')}, found {self.objective}."
                f" Name one --store."
            )
        if self.store_weights is None:
            return
        if len(self.store_weights) != len(self.stores) or not several:
            raise ValueError(
                f"--store-weights needs one number for each of several stores, found {len(self.store_weights)} for "
                f"{len(self.stores)}."
            )
        positive = all(weight > 0 and math.isfinite(weight) for weight in self.store_weights)
        require(self, "store_weights", lambda _: positive, "positive numbers")

    def identity(self) -> dict:
        """The settings that decide what is trained, as plain JSON values.

        Some settings are in it only where they have an unusual value (UNNAMED), so that names of runs stay: mtl and
        naive-mlsm say that they are tied, mlm and kd that they are not. Whether segments are read depends on store and
        encoder, so that key is the task's (task.py).
        """
        unused = {"segments", "store_weights"}
        facts = OBJECTIVES[self.objective]
        unused |= set() if self.untied and not facts.lsps else {"untied"}
        unused |= {"encoder"} if self.continue_from is not None else set()
        unused |= set() if self.word_weight > 0 else {"kappa"}
        unused |= {name for name, first in UNNAMED.items() if getattr(self, name) == first}
        unused |= {"mask_rate_steps"} if self.mask_schedule != "steps" else set()
        unused |= {"mask_update_steps"} if self.mask_weights != ADAPTIVE else set()
        unused |= {"mask_weight_steps"} if not isinstance(self.mask_weights, tuple) else set()
        unused |= {"decay_share"} if self.schedule != "wsd" else set()
        unused |= {"short_share"} if self.short_windows is None else set()
        later: dict = {"tied": True} if facts.lsps and facts.vocabulary and not self.untied else {}
        later |= {"store_weights": list(self.weights)} if len(self.stores) > 1 else {}
        settings = self.to_json() | {"kappa": self.word_weight}
        return {name: value for name, value in settings.items() if name not in OPERATIONAL | unused} | later

    def to_json(self) -> dict:
        """All settings, as plain JSON values."""
        settings = asdict(self)
        for name in ("run_dir", "continue_from", "wordnet"):
            settings[name] = None if settings[name] is None else str(settings[name])
        lists = [name for name, value in settings.items() if isinstance(value, tuple)]
        return settings | {name: list(settings[name]) for name in lists}

    @property
    def word_weight(self) -> float:
        """The weight of predicting words relative to the other target of mtl and regress; 0 for the other
        objectives."""
        usual = OBJECTIVES[self.objective].kappa
        return 0.0 if usual is None else usual if self.kappa is None else self.kappa

    @property
    def predicted(self) -> tuple[float, float]:
        """Share of a window's tokens that are predicted at the first step and at the last one."""
        if self.positions == "all":
            return 1.0, 1.0
        return self.mask_rate, self.mask_rate if self.mask_rate_end is None else self.mask_rate_end

    @property
    def stores(self) -> tuple[str, ...]:
        """The named stores: windows are read from the first, and the others add their targets."""
        return self.store if isinstance(self.store, tuple) else () if self.store is None else (self.store,)

    @property
    def weights(self) -> tuple[float, ...]:
        """The factor of each store's loss."""
        return tuple(map(float, self.store_weights or [1] * len(self.stores)))

    @property
    def kind(self) -> str:
        """The first part of a run's name."""
        return self.objective

    @property
    def shared_directory(self) -> Path:
        """The directory for what runs share: beside the run, or beside the directory of all runs."""
        return (Path(self.root) if self.run_dir is None else self.run_dir).parent

    @property
    def initial_weights(self) -> Path | None:
        """The directory to load for `continue_from`: a run's export, or the directory itself."""
        if self.continue_from is None:
            return None
        export = self.continue_from / "export"
        return export if export.is_dir() else self.continue_from

    @property
    def encoder_source(self) -> str:
        """The source of the architecture: `continue_from` if that is set, else `encoder`."""
        return self.encoder if self.continue_from is None else str(self.initial_weights)

    def checkpoint_steps(self, max_steps: int) -> list[int]:
        """The optimiser steps after which a checkpoint is kept; the last step always is one. Step 0 means before the
        first step, and is included only for a share of 0."""
        kept = {0 if share == 0 else max(1, round(share * max_steps)) for share in self.checkpoints}
        return sorted(kept | {max_steps})

    def short_steps(self, max_steps: int) -> int:
        """How many of max_steps optimiser steps, from the first, read windows cut into pieces; never all of them."""
        return 0 if self.short_windows is None else min(round(self.short_share * max_steps), max_steps - 1)


@dataclass(frozen=True)
class ProbeConfig(StudentConfig):
    """The settings of training a probe: of which student, on which store, and how.

    Settings that only students have are fixed for a probe: its encoder is the student's, its objective mlm.
    """

    store: str | None = None
    """Directory or URL of a store, of any kind, with the student's tokenizer; unset: the one that the student learned
    from."""

    segments: Literal["auto", "never"] = "auto"
    """Which sentence of a pair a token belongs to: `auto` tells a student that was trained so, on a store packed as
    pairs; `never` gives every token segment 0."""

    student: str | None = None
    """A run, an export, a kept checkpoint or a Hub id of a student with LSP outputs (for `hidden`, of any student);
    unset: the newest finished run with LSPs under runs/students."""

    probe_input: ProbeInput = "softmax"
    """What the probe reads: `softmax`, the LSP distribution, tests what LSPs carry; `logits`, the raw outputs, tests
    what the encoder carries, and merges with the output matrix into a decoder that AutoModelForMaskedLM loads;
    `hidden`, the encoder's last hidden states, is the same readout for students of every objective, mlm included."""

    max_steps: int | None = None
    """Optimiser steps; unset: those of the recipe that made the store, else a tenth of a student's, at least 1,000."""

    lr: float | None = None
    """Peak learning rate; unset: 0.001 for logits and hidden; for softmax 100 / max_steps, at most 0.5, as weights of
    probabilities have a long way to go and AdamW moves them by about the learning rate."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay of the probe's matrix."""

    run_dir: Path | None = None
    """Directory of this run; unset: runs/probes/<input>-<student>-seed<seed>-<fingerprint>."""

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
    mask_unit: MaskUnit = field(init=False, default="token")
    corruption: str = field(init=False, default="mask")
    short_windows: int | None = field(init=False, default=None)
    short_share: float = field(init=False, default=0.9)
    encoder: str = field(init=False, default="")
    continue_from: Path | None = field(init=False, default=None)
    continue_head: bool = field(init=False, default=False)
    optimizer: Literal["adamw", "muon"] = field(init=False, default="adamw")
    dropout: float | None = field(init=False, default=None)

    def identity(self) -> dict:
        """The settings that decide what is trained. The student is identified by its content, not by its path.

        The settings of the probe's masks cannot be changed, but they are part of the run's name.
        """
        fixed = {"student", *(entry.name for entry in fields(self) if not entry.init)} - _NAMED
        return {name: value for name, value in super().identity().items() if name not in fixed}

    root = "runs/probes"

    @property
    def kind(self) -> str:
        """The first part of a run's name."""
        return self.probe_input

    @property
    def encoder_source(self) -> str:
        """Name of the student: of its run, with the step of a checkpoint, or the last part of its path or Hub id."""
        path = Path(self.student or "")
        if path.parent.name == "checkpoints":
            return f"{path.parent.parent.name}-{path.name}"
        return path.parent.name if path.name == "export" else path.name


def _check_masks(config: "StudentConfig") -> None:
    """Raise ValueError if a setting of the masks is out of its range, or two of them contradict each other.

    A list of one table of weights becomes that table, and uniform weights become none.
    """
    for name in ("mask_rate", "mask_rate_end"):
        require(config, name, lambda value: 0 < value < 1, "a share between 0 and 1")
    corruption_shares(config.corruption)
    if config.mask_schedule != "linear" and config.mask_rate_end is None:
        raise ValueError(
            f"--mask-schedule {config.mask_schedule} moves the mask rate to --mask-rate-end, which is missing. Add "
            "it, or omit the schedule."
        )
    require(config, "mask_rate_steps", _rise, "rising shares of the steps between 0 and 1")
    weights = config.mask_weights if isinstance(config.mask_weights, tuple) else (config.mask_weights,)
    if len(weights) == 1:
        object.__setattr__(config, "mask_weights", None if weights[0] == UNIFORM else weights[0])
    elif not weights:
        raise ValueError("--mask-weights needs a value.")
    elif ADAPTIVE in weights:
        raise ValueError(
            f"--mask-weights {' '.join(weights)}: adaptive weights are for a whole run and cannot take turns with "
            "others. Pass only adaptive, or omit it."
        )
    elif len(config.mask_weight_steps) != len(weights) - 1:
        raise ValueError(
            "--mask-weight-steps needs a share of the steps for each of the --mask-weights except the first: "
            f"{len(weights) - 1} for {len(weights)}, found {len(config.mask_weight_steps)}."
        )
    require(config, "mask_weight_steps", _rise, "rising shares of the steps between 0 and 1")
    if "domain" in weights:
        raise ValueError(
            "--mask-weights domain: these weights compare the store with a general one, or come from a list of "
            "words. Make the file first (make-mask-weights --kind domain), and pass its path."
        )
    require_at_least(config, 1, "mask_update_steps")
    if config.positions == "all":
        _check_unmasked(config)
    if config.mask_later > 0 and config.corruption != "mask":
        raise ValueError(
            f"--mask-later {config.mask_later} is only for --corruption mask, found {config.corruption}: any other "
            "token at a masked position would be visible to the lower layers. Omit one of them."
        )


def _check_unmasked(config: "StudentConfig") -> None:
    """Raise ValueError if a setting about hiding tokens is set, as `positions` is all and hides none."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in OF_MASKS:
        if getattr(config, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} sets how tokens are hidden, but --positions all hides none. Omit one of them.")


def _rise(shares: tuple[float, ...]) -> bool:
    """Whether these are rising shares between 0 and 1, at least one."""
    return bool(shares) and all(before < after for before, after in zip((0, *shares), (*shares, 1), strict=True))


def _names(fact: str) -> str:
    """The objectives of which a fact is true, or has a value."""
    found = {name: getattr(facts, fact) for name, facts in OBJECTIVES.items()}
    return ", ".join(name for name, value in found.items() if value is not None and value is not False)


class ResolvedConfig(StudentConfig):
    """A configuration without unset values, as `resolve` returns it. Only for the type checker: it has no instances."""

    max_steps: int
    batch_windows: int
    micro_batch: int
    lr: float
    save_every: int
    eval_every: int
    eval_windows: int
    dtype: Literal["float32", "bfloat16"]
    compile: bool
