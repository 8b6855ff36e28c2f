"""One training step, from top to bottom: load, mask, forward, loss, backward, clip, update.

    batch = loader.step(config.seed, step, config.batch_windows)      # load and mask; runs one step ahead in a thread
    loss, grad_norm = stepper.update(step, batch)                     # the rest

Both are functions of (seed, step), so that there is no state of a reader or generator to save. The training stream is
one endless sequence of windows: epoch 0 in its order, then epoch 1 in its own, and so on. With B windows in a batch,
step s takes the windows [s B, (s + 1) B), so that every batch is full and some batches span two epochs. The loss is a
mean over the whole effective batch, whatever the micro-batch and the number of processes. The CPU waits for a GPU
once a step, when it reads loss and norm, while AdamW, which looks at them on the device, runs already. Left out: the
loop around it (trainer.py), how windows are stored (shards), which positions are masked (masking.py), what a target
and its loss are (objectives.py), how processes add up (ranks.py).

Shapes: W windows, L positions of a window, M masked tokens, K outputs, T loss terms.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from common.products import USUAL
from shards.counter import hash_u64
from shards.segments import segment_ids
from shards.windows import WindowBatch, WindowReader
from student.batches import Batch, MicroBatch, begin_reading, digest_windows, to_device
from student.config import ResolvedConfig
from student.encoders.dropout import use_fast_dropout
from student.encoders.linear import use_fast_linear
from student.masks.adaptive import AdaptiveWeights
from student.masks.masking import Masking
from student.masks.table import MaskTable
from student.memory import free_unused
from student.objectives.base import MaskedTokens, Objective
from student.optimizer import Muon
from student.ranks import Ranks

_DROPOUT_PURPOSE = 0x64726F70  # "drop"
_NORM_BLOCK = 2**16  # gradient values; float32 sums of 23 million, an embedding's, are up to 1e-3 too low


class Loader:
    """Reads and masks batches of a split for one objective.

    read_targets     MaskedTokens -> their targets; the objective's method
    documents_apart  whether batches say which tokens belong to one document
    segments         whether batches of sentence pairs say which sentence a token belongs to
    mask_later       whether batches say how many tokens stand at places that are not masked
    by_token         whether batches say which tokens are masked, for counting losses by token
    few_shapes       whether these numbers and those of masked positions are rounded up by fillers, so that a compiled
                     model meets few
    pieces           into how many pieces of equal length the first `short_steps` steps cut each window
    """

    def __init__(
        self,
        windows: WindowReader,
        masking: Masking,
        read_targets: Callable[[MaskedTokens], Any],
        *,
        micro_batch: int,
        documents_apart: bool = False,
        segments: bool = False,
        mask_later: bool = False,
        by_token: bool = False,
        few_shapes: bool = False,
        pieces: int = 1,
        short_steps: int = 0,
    ):
        self.windows = windows
        self.masking = masking
        self.read_targets = read_targets
        self.micro_batch = micro_batch
        self.documents_apart = documents_apart
        self.segments = segments
        self.mask_later = mask_later
        self.by_token = by_token
        self.few_shapes = few_shapes
        self.pieces = pieces
        self.short_steps = short_steps

    def step(self, seed: int, step: int, batch_windows: int, share: tuple[int, int] | None = None) -> Batch:
        """The batch of one optimiser step, counted from 0.

        share  first and last (exclusive) of its windows to read, for one of several processes; by default all
        """
        first, last = share or (0, batch_windows)
        begin = step * batch_windows
        window_ids_W, epochs_W = self.windows.stream(seed, begin + first, begin + last)
        rate, table = self.masking.rate_at(step), self.masking.table_at(step)
        pieces = self.pieces if step < self.short_steps else 1
        return self.load(window_ids_W, epochs_W, seed, rate, table, first, pieces)

    def load(
        self,
        window_ids_W: np.ndarray,
        epochs_W: np.ndarray,
        mask_seed: int,
        mask_rate: float,
        table: MaskTable | None = None,
        first_place: int = 0,
        pieces: int = 1,
    ) -> Batch:
        """Read windows, mask them, and split them into micro-batches.

        table        of mask weights; None: all tokens are alike
        first_place  the place of the first of them in the batch
        pieces       into how many pieces the encoder reads each window cut; masks and targets are those of the window
        """
        read = self.windows.read(window_ids_W)
        counted: dict[str, Any] = {"seed": mask_seed, "epoch": epochs_W}
        mask_WL = self.masking.choose(read, window_ids_W, **counted, rate=mask_rate, table=table)
        input_WL = self.masking.corrupt(read.ids, mask_WL, window_ids_W, seed=mask_seed, epoch=epochs_W)
        places_W = first_place + np.arange(len(window_ids_W))
        starts = range(0, len(window_ids_W), self.micro_batch)
        micro = [self._build_micro_batch(read, input_WL, mask_WL, start, pieces) for start in starts]
        return Batch(
            micro=micro,
            counts=tuple(map(sum, zip(*(part.targets.counts for part in micro), strict=True))),
            tokens=int(read.lengths.sum()),
            digest=digest_windows(places_W, window_ids_W, epochs_W, read.ids, np.where(mask_WL, input_WL, -1)),
        )

    def _build_micro_batch(
        self, read: WindowBatch, input_WL: np.ndarray, mask_WL: np.ndarray, start: int, pieces: int
    ) -> MicroBatch:
        part = slice(start, start + self.micro_batch)
        ids_WL, input_WL, lengths_W, mask_WL = read.ids[part], input_WL[part], read.lengths[part], mask_WL[part]
        documents_WL = read.documents[part]
        window_M, position_M = np.nonzero(mask_WL)
        width = input_WL.shape[1]
        real_WL = np.arange(width) < lengths_W[:, None]
        segments_WL = None
        if self.segments:  # of the window as it was read: what is masked may have become another token
            segments_WL = torch.from_numpy(segment_ids(ids_WL, lengths_W, self.masking.special_ids["sep"]))
        if pieces > 1:  # each becomes a row of its own; no token leaves its place in the flattened input
            rows = pieces * len(input_WL)
            input_WL, mask_WL = input_WL.reshape(rows, -1), mask_WL.reshape(rows, -1)
            real_WL, documents_WL = real_WL.reshape(rows, -1), documents_WL.reshape(rows, -1)
            real_WL[~real_WL.any(axis=1)] = True  # padding alone sees itself: some kernels give NaN otherwise
        where_M, most_masked, fillers = window_M * width + position_M, int(mask_WL.sum(axis=1).max()), 0
        if self.few_shapes:
            most_masked, fillers = round_up(most_masked), round_up(len(where_M)) - len(where_M)
            where_M = np.pad(where_M, (0, fillers), mode="edge") if fillers else where_M
        visible = None
        if self.mask_later:
            visible_W = (real_WL & (input_WL != self.masking.special_ids["mask"])).sum(axis=1)
            most = int(visible_W.max())
            visible = int(visible_W.min()), min(width, round_up(most)) if self.few_shapes else most
        masked = MaskedTokens(self.windows, read, start + window_M, position_M)
        return MicroBatch(
            input_WL=torch.from_numpy(input_WL),
            attention_WL=None if real_WL.all() else torch.from_numpy(real_WL.astype(np.int64)),
            where_M=torch.from_numpy(where_M),
            most_masked=most_masked,
            targets=self.read_targets(masked),
            documents_WL=torch.from_numpy(documents_WL.astype(np.int64)) if self.documents_apart else None,
            segments_WL=segments_WL,
            fillers=fillers,
            visible=visible,
            ids_M=torch.from_numpy(masked.ids()) if self.by_token else None,
        )


class Stepper:
    """Updates a student that is on its device already.

    ranks       the processes that share every batch
    products    which library computes which product (arithmetic.py)
    adaptive    what counts the losses of updates by token, if anything does
    """

    def __init__(
        self,
        config: ResolvedConfig,
        model: nn.Module,
        objective: Objective,
        ranks: Ranks | None = None,
        products: Mapping[str, str] = USUAL,
        adaptive: AdaptiveWeights | None = None,
    ):
        self.config, self.model, self.objective, self.adaptive = config, model.train(), objective, adaptive
        self.ranks = ranks or Ranks()
        self.device = next(model.parameters()).device
        if self.device.type == "cpu":
            use_fast_dropout(model.encoder)
            use_fast_linear(model, products)
        if config.activation_checkpointing:
            model.checkpoint_activations()
        if config.compile:
            model.compile()
        self.parallel = self.ranks.parallel(model)
        self.first_micro = self.ranks.micro_batches_before(config.batch_windows, config.micro_batch)
        in_float32 = resolve_dtype(config.dtype, self.device) == "float32"
        self.autocast_dtype = None if in_float32 else torch.bfloat16
        self.optimizer = build_optimizer(model, config)

    def update(self, step: int, batch: Batch) -> tuple[float, float]:
        """Do one step, counted from 0, inside torch.random.fork_rng.

        batch    this process's share of the batch, its counts those of the whole one
        Returns  loss (nats per token that carries loss) and gradient norm before clipping; where one of them
                 is not finite, the weights were not updated
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for index, micro in enumerate(batch.micro):
            seed_dropout(self.device, self.config.seed, step, self.first_micro + index)
            with self.ranks.accumulating(self.parallel, last=index == len(batch.micro) - 1):
                # Forward pass, objective, share of the batch:
                part = self.loss(micro, batch.counts, self.parallel, self.adaptive)
                part.backward()
            loss += part.detach()
        weights = list(self.model.parameters())
        grad_norm = gradient_norm(weights)
        torch.nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip, grad_norm)
        figures = torch.stack([loss, grad_norm])
        read = begin_reading(figures)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config, step)
        # As a GradScaler does: the fused kernel itself leaves weights and moments as they are where this is not zero.
        self.optimizer.found_inf = self.ranks.any((~figures.isfinite().all()).float())
        self.optimizer.step()
        loss, grad_norm = read()  # waits for the GPU
        [loss] = self.ranks.sum([loss])
        return loss, grad_norm

    def loss(
        self,
        micro: MicroBatch,
        counts: tuple,
        model: nn.Module | None = None,
        adaptive: AdaptiveWeights | None = None,
    ) -> Tensor:
        """A micro-batch's part of the loss of a whole effective batch, which has these counts.

        adaptive  what counts the loss of each token, if anything does
        """
        micro = to_device(micro, self.device)
        logits_MK = self.forward(micro, model)
        if adaptive is not None:
            adaptive.count(micro, logits_MK)
        sums_T = self.objective.loss_sums(logits_MK, micro.targets)
        scales = term_scales(self.objective.term_weights, counts)
        return sum(total * scale for total, scale in zip(sums_T.unbind(), scales, strict=True))

    def forward(self, micro: MicroBatch, model: nn.Module | None = None) -> Tensor:
        """Logits (M, K) of a micro-batch that lies on the model's device, without those of fillers.

        model  the student itself unless given: in an update, the one that also sums gradients over processes
        """
        model = self.model if model is None else model
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            logits_MK = model(
                micro.input_WL,
                micro.attention_WL,
                micro.where_M,
                micro.documents_WL,
                micro.most_masked,
                micro.segments_WL,
                micro.visible,
            )
        return logits_MK[: -micro.fillers] if micro.fillers else logits_MK

    def fits(self, micro: MicroBatch, counts: tuple) -> bool:
        """Whether memory suffices for a step on this micro-batch alone. Updates nothing, and leaves no gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        free_unused(self.device)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        try:
            moments = [] if self.optimizer.state else [torch.empty_like(weight) for weight in 2 * weights]
            torch.autograd.grad(self.loss(micro, counts), weights, allow_unused=True)
        except torch.OutOfMemoryError:
            return False
        del moments  # AdamW's, which the first step allocates after its backward pass
        return True


def round_up(count: int) -> int:
    """The next number of three significant bits: 19 to 20, 2,432 to 2,560. At most a quarter more."""
    unit = 1 << max(0, count.bit_length() - 3)
    return -(-count // unit) * unit


def gradient_norm(weights: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of the gradients of all weights together, a float32 scalar exact to about 1e-6.

    It is the norm of the norms of blocks, since a float32 sum over a large table rounds every addend to its own size.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return torch.nn.utils.get_total_norm([block for one in gradients for block in one.reshape(-1).split(_NORM_BLOCK)])


def learning_rate(config: ResolvedConfig, step: int) -> float:
    """Rate of one step, counted from 0: linear rise to the peak, then the schedule's way down, which ends above zero.

    With w warm-up steps the first step has 1/w of the peak, where transformers' schedules begin with a step of rate 0.
    """
    warmup_steps = round(config.warmup * config.max_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    steps_left, falling_steps = config.max_steps - step, config.max_steps - warmup_steps
    if config.schedule == "cosine":
        return config.lr * (1 - math.cos(math.pi * steps_left / falling_steps)) / 2
    if config.schedule == "wsd":
        falling_steps = min(falling_steps, max(1, round(config.decay_share * config.max_steps)))
        return config.lr * min(1.0, steps_left / falling_steps)
    return config.lr * steps_left / falling_steps  # in this order: other orders have other last bits


def term_scales(weights: Sequence[float], counts: Sequence[int]) -> list[float]:
    """What every term's summed loss is multiplied with: its weight over the tokens of the whole effective batch."""
    return [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]


def build_optimizer(model: nn.Module, config: ResolvedConfig) -> torch.optim.Optimizer:
    """AdamW; norms and biases, the one-dimensional weights, decay if asked for.

    With Muon, the matrices between the layers of encoder and head are its; embeddings and outputs stay AdamW's.
    """
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    hidden = [weight for weight in weights if id(weight) in linear and config.optimizer == "muon"]
    matrices = [weight for weight in weights if weight.ndim > 1 and id(weight) not in set(map(id, hidden))]
    small_decay = config.weight_decay if config.decay_all else 0.0
    groups: list[dict] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": small_decay},
    ]
    betas = (config.adam_beta1, config.adam_beta2)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=1e-8, fused=True)
    groups.insert(0, {"params": hidden, "weight_decay": config.weight_decay, "orthogonal": True})
    return Muon(groups, lr=config.lr, betas=betas, eps=1e-8, fused=True)


def seed_dropout(device: torch.device, seed: int, step: int, micro: int) -> None:
    """Let dropout follow from (seed, step, micro-batch). Call inside torch.random.fork_rng."""
    key = int(hash_u64(_DROPOUT_PURPOSE, seed, step, micro))
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def resolve_compile(setting: bool | None, device: torch.device) -> bool:
    """Whether a setting means that the student is compiled on a device."""
    return device.type == "cuda" if setting is None else setting


def resolve_dtype(name: Literal["auto", "float32", "bfloat16"], device: torch.device) -> Literal["float32", "bfloat16"]:
    """The arithmetic that a dtype setting means on a device."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"
