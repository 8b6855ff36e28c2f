"""Settings of one training run of a student, or of a linear probe of one.

A frozen dataclass that the command line turns into flags and a recipe fills with defaults. It imports nothing heavy,
so that `--help` answers at once.

There are two kinds of settings. Those in `OPERATIONAL` say where and how the work is done, and may change when a run
is resumed. All others say *what* is trained and, with the store's two fingerprints, name the run.

Those in `FOLLOWING` may be left open, as None: their values then follow from the store (resolve.py). Only a resolved
configuration names a run.
"""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from mlsm.common.settings import check, require
from student.masks.config import ADAPTIVE, UNIFORM
from student.objectives import OBJECTIVES

if TYPE_CHECKING:
    ObjectiveName: TypeAlias = str
else:
    ObjectiveName = Literal[tuple(OBJECTIVES)]
# The next smaller stored weight differs by a factor of e^-0.033, the smallest by e^-8.3 (shards/codec.py); float32 ends
# at e^-104, and does not tell e^-1e-8 from 1.
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-4, 1e9

TrackerName = Literal["tensorboard", "wandb", "trackio"]
TRACKERS: tuple[str, ...] = get_args(TrackerName)

FOLLOWING = ("max_steps", "batch_windows", "micro_batch", "lr", "save_every", "eval_every")

OPERATIONAL = frozenset(
    ["store", "run_dir", "device", "epochs", "micro_batch", "checkpoints", "save_every", "eval_every", "eval_windows"]
    + ["track", "keep_last", "activation_checkpointing", "products", "wordnet"]
)

UNNAMED = {  # settings that are part of a run's identity only where they have another value, so that names stay
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

_OF_MASKS = ("mask_rate", "mask_rate_end", "mask_schedule", "mask_weights", "mask_unit", "corruption", "mask_later")
ProbeInput = Literal["softmax", "logits", "hidden"]
_NAMED = {"mask_rate", "mask_rate_end", "mask_unit", "corruption"}  # fixed settings that are part of a run's identity


@dataclass(frozen=True)
class StudentConfig:
    """What to train, on which store, and how."""

    store: str | tuple[str, ...] | None = None
    """directory or URL of the store (one target) that an `encode-...` command or `derive-shards` has written. Of
    several stores of one plan, mlsm and hard-mlsm learn all targets at once, in a block of outputs for each"""

    store_weights: tuple[float, ...] | None = None
    """several stores: what each one's loss is multiplied with in the sum, in their order; unset: 1 each"""

    objective: ObjectiveName = field(
        default="mlsm", metadata={"choices": {name: facts.target for name, facts in OBJECTIVES.items()}}
    )
    """what the student learns of a masked token:"""

    wordnet: Path | None = None
    """supersense: WordNet's sense index, the file index.sense or the directory that holds it. Its content names the
    run, not its place"""

    kappa: float | None = None
    """weight of the words' cross-entropy: of mtl, beside the KL of the LSPs (unset: 1); of regress, beside the loss of
    the hidden states (unset: 0, no words)"""

    regress_loss: Literal["cosine", "mse"] = "cosine"
    """regress: the loss between outputs and hidden states, which are centred and standardised: `cosine` is 1 - cosine,
    `mse` the mean squared error"""

    target_temperature: float = 1.0
    """mlsm, mtl and naive-mlsm: learn the LSP distribution p^(1/T), renormalised over the stored entries; above 1 it is
    flatter than the stored one, below 1 sharper. From 1e-4, below which float32 holds the largest entry alone, to 1e9.
    Losses of different T do not compare: kl_untempered does"""

    untied: bool = False
    """mlm, kd, mtl and naive-mlsm: give the vocabulary an output matrix of its own, apart from the token embedding. By
    default the vocabulary's rows of the output matrix are the token embedding, as in the official code"""

    encoder: str = "bert-12x768"
    """bert-tiny, -mini, -small, -medium or -base, deberta-base, modernbert-base, any bert-<layers>x<width> or
    modernbert-<layers>x<width> (no network needed); or a Hugging Face config: Hub id, config.json or directory
    (./bert-base if it has one of these names)"""

    continue_from: Path | None = None
    """run, export or directory of safetensors that AutoModel loads: the encoder is that one, with its weights,
    whatever `encoder` says"""

    continue_head: bool = False
    """take the prediction head of the masked language model in continue_from, too (its dense layer and norm and, for
    objectives that predict tokens, the biases of the vocabulary); by default the head begins anew"""

    documents_apart: bool = False
    """keep the documents of a packed window apart: each token sees its own document only, positions begin anew with
    each. The window's [CLS] belongs to its first document; others begin without one, and end with their [SEP]"""

    segments: Literal["auto", "never"] = "auto"
    """which sentence of a pair a token belongs to: `auto` tells an encoder with segment embeddings (token types) on a
    store packed as pairs; `never` gives segment 0 to every token, as on all other stores"""

    short_windows: int | None = None
    """tokens of a piece: the first steps read each window cut into pieces of this length (128, say, of windows of 512),
    which do not see each other and are cheaper. Held-out windows are whole throughout. Unset: all steps read whole
    windows"""

    short_share: float = 0.9
    """short_windows: share of max_steps that reads pieces; the others read whole windows (BERT: 0.9)"""

    dropout: float | None = None
    """probability of every dropout in the encoder; unset: what the encoder's config says (BERT: 0.1)"""

    epochs: float | None = None
    """passes over the training windows, in place of max_steps"""

    max_steps: int | None = None
    """optimiser steps; unset: as the recipe that made the store says, else 4 epochs, and at least 2,000 steps"""

    batch_windows: int | None = None
    """windows per optimiser step, whatever the micro-batch; unset: as the recipe that made the store says, else 1,024
    where the epochs then give 10,000 steps, otherwise the largest power of two that does, at least 64"""

    micro_batch: int | None = None
    """windows per forward and backward pass; lower it when memory runs out; unset: 4,096 tokens, on a GPU 16,384"""

    lr: float | None = None
    """peak learning rate of AdamW; unset: as the recipe that made the store says, else 1e-4 for encoders as wide as
    BERT-base (768), 1e-3 up to width 256, between them on a straight line in logarithms"""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """what turns gradients into updates. `muon` makes those of the matrices inside encoder and head orthogonal (Jordan
    et al. 2024), scaled to the size of AdamW's, which the other weights keep: rate and weight decay mean the same"""

    warmup: float = 0.02
    """share of max_steps in which the rate rises linearly to its peak; `schedule` says how it goes on"""

    schedule: Literal["linear", "cosine", "wsd"] = "linear"
    """the rate after its rise: `linear` falls to zero on a straight line, `cosine` on half a cosine wave; `wsd`
    (warm-up, stable, decay) stays at the peak and falls on a straight line at the end"""

    decay_share: float = 0.2
    """wsd: share of max_steps in which the rate falls to zero, at most those behind the warm-up"""

    adam_beta1: float = 0.9
    """AdamW's decay of the mean of gradients"""

    adam_beta2: float = 0.999
    """AdamW's decay of the mean of squared gradients"""

    weight_decay: float = 0.01
    """AdamW's decoupled weight decay, on everything but norms and biases"""

    decay_all: bool = False
    """weight decay on norms and biases too, as in the official code"""

    grad_clip: float = 1.0
    """largest norm of the gradient over all parameters"""

    positions: Literal["masked", "all"] = "masked"
    """which tokens are predicted: `masked` those that a mask hides; `all` every token that is not special, and none is
    hidden: the student reads the text as the teacher did. `all` is for objectives that learn only stored targets"""

    mask_rate: float = 0.15
    """share of a window's non-special tokens that are hidden and to be predicted"""

    mask_rate_end: float | None = None
    """share at the last step, reached from mask_rate as mask_schedule says (0.30 to 0.15, say); unset: constant.
    Held-out windows are masked at this final rate throughout"""

    mask_schedule: Literal["linear", "cosine", "steps"] = "linear"
    """how the share moves to mask_rate_end: on a straight line, along half a cosine (slowly at both ends), or in
    `steps` of equal size at mask_rate_steps"""

    mask_rate_steps: tuple[float, ...] = (0.5,)
    """mask_schedule steps: shares of max_steps at which the mask rate changes"""

    mask_weights: str | tuple[str, ...] | None = None
    """draw what is hidden in proportion to weights of the tokens: a file of make-mask-weights, or `frequency`, `common`
    or `pmi` for one that is made of this store with that command's defaults (pmi: collocations are hidden as one), or
    `adaptive`, the loss of the student itself on each token so far. Several, of which `uniform` may be one, take turns
    at mask_weight_steps. Unset, or uniform alone: all tokens alike, as on held-out windows always"""

    mask_weight_steps: tuple[float, ...] = (0.5,)
    """several mask_weights: shares of max_steps at which the second, the third and so on take over"""

    mask_update_steps: int = 200
    """mask_weights adaptive: optimiser steps between two updates of the weights"""

    mask_unit: Literal["token", "word", "span"] = "token"
    """what is masked together: `token` nothing, `word` the tokens of a word, `span` neighbours (SpanBERT's geometric
    lengths)"""

    corruption: Literal["mask", "80-10-10"] = "mask"
    """what stands at a hidden token: `mask` always the mask token; `80-10-10` that in 80 %, a random token in 10 %, the
    token itself in 10 %"""

    mask_later: int = 0
    """layer, counted from 0, at which [MASK] enters the encoder (Liao et al. 2022). The layers below it see the other
    tokens alone and cost less by the share that is masked: worth it at a high mask_rate, such as 0.4. 0: the first
    layer, as everywhere else. For BERT, RoBERTa, XLM-R, ELECTRA, ModernBERT, DeBERTa and DeBERTa-v2 without a
    convolution"""

    seed: int = 42
    """decides weights, order, masks and dropout"""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """arithmetic of the forward pass; auto: float32 on a CPU, and on a GPU bfloat16, if a trial there found it right
    and faster. Weights stay float32"""

    products: Literal["auto", "onednn", "torch"] = "auto"
    """library of the float32 matrix products on a CPU: `auto` times torch's own and oneDNN's, once on a machine, and
    takes the faster one for each shape. A run keeps what it began with, also where it is resumed: another value is then
    not taken, and a warning says so"""

    device: str = "auto"
    """auto (a GPU where there is one), cpu, cuda, cuda:1; of several processes on GPUs each takes its own"""

    compile: bool | None = None
    """torch.compile the student: its first step takes a minute or more, and it rounds differently; unset: on a
    GPU, if a trial there found it right and faster"""

    activation_checkpointing: bool = False
    """compute the layers a second time in the backward pass instead of keeping their results: less memory, slower"""

    checkpoints: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    """shares of max_steps at which a checkpoint is kept, each loadable with AutoModel; 0 keeps the untrained student,
    the floor that evaluations compare trained ones with"""

    save_every: int | None = None
    """optimiser steps between checkpoints to resume from; 0: none; unset: a twentieth of the run, from 50 to 1,000"""

    keep_last: int = 1
    """how many of the newest checkpoints stay; those of `checkpoints` stay always"""

    eval_every: int | None = None
    """optimiser steps between evaluations on held-out windows; 0: at kept checkpoints only; unset: as save_every"""

    eval_windows: int = 256
    """held-out windows in an evaluation, with fixed masks"""

    track: tuple[TrackerName, ...] = ()
    """show the log's figures in these, too: tensorboard (tensorboard --logdir runs/students), wandb (or offline, with
    WANDB_MODE=offline), trackio; needs mlsm-pretrain[track]"""

    run_dir: Path | None = None
    """directory of the run itself; unset: runs/students/<objective>-<encoder>-seed<seed>-<fingerprint>"""

    def __post_init__(self):
        check(self)
        if self.epochs is not None and self.max_steps is not None:
            raise ValueError(
                f"--epochs {self.epochs:g} and --max-steps {self.max_steps} say the same thing twice. Give one of them."
            )
        for name in ("max_steps", "batch_windows", "micro_batch", "eval_windows", "keep_last"):
            require(self, name, lambda value: value >= 1, "at least 1")
        for name in ("save_every", "eval_every", "weight_decay", "seed", "mask_later"):
            require(self, name, lambda value: value >= 0, "0 or more")
        for name in ("lr", "grad_clip", "epochs", "target_temperature"):
            require(self, name, lambda value: value > 0 and math.isfinite(value), "a positive number")
        facts = OBJECTIVES[self.objective]
        if facts.kappa == 0:
            require(self, "kappa", lambda value: 0 <= value < math.inf, "0 or more")
        else:
            require(self, "kappa", lambda value: 0 < value < math.inf, "a positive number")
        if self.regress_loss != "cosine" and self.objective != "regress":
            raise ValueError(
                f"--regress-loss {self.regress_loss} is only for --objective regress, found {self.objective}. Omit it."
            )
        require(self, "warmup", lambda value: 0 <= value < 1, "a share of the steps from 0 to below 1")
        require(self, "decay_share", lambda value: 0 < value <= 1, "a share of the steps above 0")
        require(self, "short_windows", lambda value: value >= 2, "at least 2 tokens")
        require(self, "short_share", lambda value: 0 < value < 1, "a share of the steps between 0 and 1")
        if self.short_windows is not None and self.mask_later > 0:
            raise ValueError(
                f"--short-windows {self.short_windows} and --mask-later {self.mask_later} do not go together: of a"
                f" piece that is masked as a whole the layers below would read nothing. Leave one of them out."
            )
        for name in ("adam_beta1", "adam_beta2"):
            require(self, name, lambda value: 0 <= value < 1, "from 0 to below 1")
        require(self, "dropout", lambda value: 0 <= value < 1, "a probability from 0 to below 1")
        _check_masks(self)
        shares = all(0 <= share <= 1 for share in self.checkpoints)
        require(self, "checkpoints", lambda _: shares, "shares of the steps from 0 to 1")
        if self.positions == "all" and not facts.all_positions:
            raise ValueError(
                f"--positions all hides no token, so it is only for objectives that learn nothing but stored targets"
                f" ({_names('all_positions')}); {self.objective} would learn to copy its input. Omit it."
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
        if self.target_temperature != 1 and not facts.temperable:
            raise ValueError(
                f"--target-temperature other than 1 is for the objectives {_names('temperable')}, found"
                f" {self.objective}: mlm, hard-mlsm and supersense learn no stored one, and the entries that a kd store"
                f" leaves out are one bucket, whose power is not the sum of theirs. Leave it out, or take one of these"
                f" objectives."
            )
        if (self.wordnet is None) == facts.wordnet:
            raise ValueError(
                f"--wordnet, WordNet's index.sense as prepare-data wsd brings it, and --objective supersense go"
                f" together; found objective {self.objective}, wordnet {self.wordnet or 'unset'}. Give both or neither."
            )
        if self.untied and not facts.vocabulary:
            raise ValueError(
                f"--untied is only for objectives with an output for every token ({_names('vocabulary')}), found"
                f" {self.objective}. Omit it."
            )

        self._check_stores()

    def _check_stores(self) -> None:
        """Raise ValueError where several stores, objective and weights do not go together. One store is no list."""
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
                f"--store-weights takes a number for each of several stores, found {len(self.store_weights)} for"
                f" {len(self.stores)}."
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

    root = "runs/students"  # where runs lie, unless `run_dir` says otherwise; no annotation, so not a setting

    @property
    def word_weight(self) -> float:
        """The weight of the words beside what else mtl and regress learn; 0 for the other objectives."""
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
        """The stores that are named; the first one's windows are read, the others are learned from beside it."""
        return self.store if isinstance(self.store, tuple) else () if self.store is None else (self.store,)

    @property
    def weights(self) -> tuple[float, ...]:
        """What each store's loss is multiplied with."""
        return tuple(map(float, self.store_weights or [1] * len(self.stores)))

    @property
    def kind(self) -> str:
        """What the name of a run begins with."""
        return self.objective

    @property
    def initial_weights(self) -> Path | None:
        """The directory that `continue_from` means: of a run, its export."""
        if self.continue_from is None:
            return None
        export = self.continue_from / "export"
        return export if export.is_dir() else self.continue_from

    @property
    def encoder_source(self) -> str:
        """Where the architecture comes from: `continue_from` if that is set, else `encoder`."""
        return self.encoder if self.continue_from is None else str(self.initial_weights)

    def checkpoint_steps(self, max_steps: int) -> list[int]:
        """Those of max_steps optimiser steps after which a checkpoint is kept; the last one always is. 0 is before the
        first step, and is kept only where the share is 0."""
        kept = {0 if share == 0 else max(1, round(share * max_steps)) for share in self.checkpoints}
        return sorted(kept | {max_steps})

    def short_steps(self, max_steps: int) -> int:
        """Of max_steps optimiser steps, how many at the beginning read windows cut into pieces; never all of them."""
        return 0 if self.short_windows is None else min(round(self.short_share * max_steps), max_steps - 1)


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
    """a run, an export, a kept checkpoint or a Hub id of a student with LSP outputs, for hidden of any
    student; unset: the newest finished run with LSPs under runs/students"""

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

    run_dir: Path | None = None
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


def _check_masks(config: "StudentConfig") -> None:
    """Raise ValueError where a setting of the masks is out of its range, or two of them contradict each other.

    A list of one table of weights becomes that table, and uniform weights become none.
    """
    for name in ("mask_rate", "mask_rate_end"):
        require(config, name, lambda value: 0 < value < 1, "a share between 0 and 1")
    if config.mask_schedule != "linear" and config.mask_rate_end is None:
        raise ValueError(
            f"--mask-schedule {config.mask_schedule} moves the mask rate to --mask-rate-end, which is not given. Give"
            f" it, or leave the schedule out."
        )
    require(config, "mask_rate_steps", _rise, "rising shares of the steps between 0 and 1")
    weights = config.mask_weights if isinstance(config.mask_weights, tuple) else (config.mask_weights,)
    if len(weights) == 1:
        object.__setattr__(config, "mask_weights", None if weights[0] == UNIFORM else weights[0])
    elif not weights:
        raise ValueError("--mask-weights needs a value.")
    elif ADAPTIVE in weights:
        raise ValueError(
            f"--mask-weights {' '.join(weights)}: adaptive weights are those of a whole run, and take no turns with"
            f" others. Give adaptive alone, or leave it out."
        )
    elif len(config.mask_weight_steps) != len(weights) - 1:
        raise ValueError(
            f"--mask-weight-steps takes a share of the steps for each of the --mask-weights but the first:"
            f" {len(weights) - 1} for {len(weights)}, found {len(config.mask_weight_steps)}."
        )
    require(config, "mask_weight_steps", _rise, "rising shares of the steps between 0 and 1")
    if "domain" in weights:
        raise ValueError(
            "--mask-weights domain: these weights compare the store with a general one, or come from a list of"
            " words. Make the file first (make-mask-weights --kind domain), and give its path."
        )
    require(config, "mask_update_steps", lambda value: value >= 1, "at least 1")
    if config.positions == "all":
        _check_unmasked(config)
    if config.mask_later > 0 and config.corruption != "mask":
        raise ValueError(
            f"--mask-later {config.mask_later} is for --corruption mask alone, found {config.corruption}: a token that"
            f" stands at a masked position would tell the layers below that it is one. Leave one of them out."
        )


def _check_unmasked(config: "StudentConfig") -> None:
    """Raise ValueError if a setting says how tokens are hidden."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in _OF_MASKS:
        if getattr(config, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} says how tokens are hidden, and --positions all hides none. Omit one of them.")


def _rise(shares: tuple[float, ...]) -> bool:
    """Whether these are rising shares between 0 and 1, at least one."""
    return bool(shares) and all(before < after for before, after in zip((0, *shares), (*shares, 1), strict=True))


def _names(fact: str) -> str:
    return ", ".join(name for name, facts in OBJECTIVES.items() if getattr(facts, fact))


class ResolvedConfig(StudentConfig):
    """A configuration with nothing left open, as `resolve` returns it: a name for the type checker, never an object."""

    max_steps: int
    batch_windows: int
    micro_batch: int
    lr: float
    save_every: int
    eval_every: int
    compile: bool
