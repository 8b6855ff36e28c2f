"""One optimiser step: forward and backward by micro-batches, one division, one clipped update.

The loss is a mean over the whole effective batch, whatever the micro-batch and the number of processes. Rate and
dropout follow from the number of the step. A GPU is waited for once a step, when loss and norm are asked for. Left
out: what a batch is (batches.py), when to save or evaluate (trainer.py), how processes add up (ranks.py).
"""

import math

import torch

from common.errors import RunError
from shards.counter import hash_u64
from student.batches import to_device
from student.config import StudentConfig
from student.dropout import use_fast_dropout
from student.memory import free_unused
from student.ranks import Ranks

_DROPOUT_PURPOSE = 0x64726F70  # "drop"
_NORM_BLOCK = 2**16            # gradient values; float32 sums of 23 million, an embedding's, are up to 1e-3 too low


class Stepper:
    """Updates a student that lies on its device already.

    ranks           the processes that share every batch
    norm_in_blocks  False: the gradient's norm is summed as in runs of before it was summed in blocks
    """

    def __init__(self, config: StudentConfig, model, objective, ranks: Ranks | None = None, norm_in_blocks=True):
        self.config, self.model, self.objective = config, model.train(), objective
        self.ranks, self.norm_in_blocks = ranks or Ranks(), norm_in_blocks
        self.device = next(model.parameters()).device
        _prepare(model, config)
        self.parallel = self.ranks.parallel(model)
        self.first_micro = self.ranks.micro_batches_before(config.batch_windows, config.micro_batch)
        self.autocast_dtype = choose_dtype(config.dtype, self.device)
        self.optimizer = build_optimizer(model, config)

    def forward(self, micro):
        """Logits (M, K) of a micro-batch that lies on the model's device."""
        return self._logits(self.model, micro)

    def _logits(self, model, micro):
        with torch.autocast(self.device.type, self.autocast_dtype, enabled=self.autocast_dtype is not None):
            return model(
                micro.input_WL, micro.attention_WL, micro.where_M, micro.documents_WL, micro.most_masked,
                micro.segments_WL,
            )  # fmt: skip

    def update(self, step: int, batch) -> tuple[float, float]:
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
                part = self._loss(self.parallel, micro, batch.counts)
                part.backward()
            loss += part.detach()
        grad_norm = self._clip_gradient()
        loss, grad_norm = torch.stack([loss, grad_norm]).tolist()
        [loss] = self.ranks.sum([loss])
        if math.isfinite(loss) and math.isfinite(grad_norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.config, step)
            self.optimizer.step()
        return loss, grad_norm

    def _clip_gradient(self) -> torch.Tensor:
        """Scale the gradient down to the largest norm of the settings; returns its norm before that."""
        weights = list(self.model.parameters())
        if not self.norm_in_blocks:
            return torch.nn.utils.clip_grad_norm_(weights, self.config.grad_clip)
        norm = gradient_norm(weights)
        torch.nn.utils.clip_grads_with_norm_(weights, self.config.grad_clip, norm)
        return norm

    def fits(self, micro, counts: tuple) -> bool:
        """Whether memory suffices for a step on this micro-batch alone. Updates nothing, and leaves no gradient."""
        self.optimizer.zero_grad(set_to_none=True)
        free_unused(self.device)
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        try:
            moments = [] if self.optimizer.state else [torch.empty_like(weight) for weight in 2 * weights]
            torch.autograd.grad(self._loss(self.model, micro, counts), weights, allow_unused=True)
        except torch.OutOfMemoryError:
            return False
        del moments    # AdamW's, which the first step allocates after its backward pass
        return True

    def _loss(self, model, micro, counts: tuple):
        """A micro-batch's part of the loss."""
        micro = to_device(micro, self.device)
        sums_T = self.objective.loss_sums(self._logits(model, micro), micro.targets)
        scales = term_scales(self.objective.term_weights, counts)
        return sum(total * scale for total, scale in zip(sums_T.unbind(), scales, strict=True))


def _prepare(model, config: StudentConfig) -> None:
    if next(model.parameters()).device.type == "cpu":
        use_fast_dropout(model.encoder)
    if config.activation_checkpointing:
        model.checkpoint_activations()
    if config.compile:
        model.compile()


def gradient_norm(weights) -> torch.Tensor:
    """Euclidean norm of the gradients of all weights together, a float32 scalar exact to about 1e-6.

    It is the norm of the norms of blocks, since a float32 sum over a large table rounds every addend to its own size.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return torch.nn.utils.get_total_norm([block for one in gradients for block in one.reshape(-1).split(_NORM_BLOCK)])


def learning_rate(config: StudentConfig, step: int) -> float:
    """Rate of one step, counted from 0: linear rise to the peak, then linear fall that ends above zero.

    With w warm-up steps the first step has 1/w of the peak, where transformers' schedule begins with a step of rate 0.
    """
    warmup_steps = round(config.warmup * config.max_steps)
    if step < warmup_steps:
        return config.lr * (step + 1) / warmup_steps
    return config.lr * (config.max_steps - step) / (config.max_steps - warmup_steps)


def term_scales(weights: tuple, counts: tuple) -> list[float]:
    """What every term's summed loss is multiplied with: its weight over the tokens of the whole effective batch."""
    return [weight / max(count, 1) for weight, count in zip(weights, counts, strict=True)]


def build_optimizer(model, config: StudentConfig):
    """AdamW with betas 0.9 and 0.999; norms and biases, the one-dimensional weights, decay if asked for."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    small_decay = config.weight_decay if config.decay_all else 0.0
    groups = [
        {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": small_decay},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.999), eps=1e-8, fused=True)


def seed_dropout(device, seed: int, step: int, micro: int) -> None:
    """Let dropout follow from (seed, step, micro-batch). Call inside torch.random.fork_rng."""
    key = int(hash_u64(_DROPOUT_PURPOSE, seed, step, micro))
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(key)
    else:
        torch.default_generator.manual_seed(key)


def choose_device(name: str) -> torch.device:
    """The device of a name; `auto` is the first GPU, or the CPU. RunError where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RunError(f"device {name}: expected auto, cpu, cuda or cuda:<number>.") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise RunError(f"device {name}: only cpu and cuda are supported.")
    index = device.index or 0
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        raise RunError(f"device {name}: torch sees {torch.cuda.device_count()} GPUs. Use --device cpu.")
    return torch.device("cuda", index)


def resolved_dtype(name: str, device) -> str:
    """What `auto` means on a device; another name as it is."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def choose_dtype(name: str, device) -> torch.dtype | None:
    """Type of the forward pass's matrix products; None for plain float32."""
    return None if resolved_dtype(name, device) == "float32" else torch.bfloat16
