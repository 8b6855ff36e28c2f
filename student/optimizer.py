"""The optimiser, its learning rate at every step, and the gradient's norm.

Muon makes the momentum updates of hidden weight matrices orthogonal, and uses AdamW for all other weights:

    optimizer = Muon([{"params": matrices, "orthogonal": True}, {"params": others}], lr=1e-3, ...)

From Jordan et al. 2024 (kellerjordan.github.io/posts/muon) and Liu et al. 2025 (arXiv:2502.16982), whose scale makes an
update of a matrix about as large as AdamW's, so that learning rate and weight decay mean the same for both.
torch.optim.Muon does the same to one matrix at a time and in bfloat16, which is about ten times as slow on processors
without that type. Here matrices of equal shape are computed together, in float32 on a CPU.

Shapes: B matrices of one shape, R rows, C columns, R <= C.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from student.config import ResolvedConfig

_NORM_BLOCK = 2**16  # gradient values; float32 sums of 23 million, an embedding's, are up to 1e-3 too low

# The odd polynomial of degree 5 that is steepest at 0 among those that then stay near 1 (Jordan et al.).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_MOMENTUM = 0.95
_RMS = 0.2  # root mean square of an update's entries, as AdamW's (Liu et al., section 2.2)


def build_optimizer(model: nn.Module, config: ResolvedConfig) -> torch.optim.Optimizer:
    """AdamW; weight decay on norms and biases, the one-dimensional weights, only if asked for.

    With Muon, it updates the matrices between the layers of encoder and head; AdamW updates embeddings and outputs.
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


def learning_rate(config: ResolvedConfig, step: int) -> float:
    """Learning rate of one step, counted from 0: a linear rise to the peak, then the schedule's fall, which ends above
    zero.

    With w warm-up steps the first step has 1/w of the peak; transformers' schedules start with a step of rate 0.
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


def gradient_norm(weights: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of the gradients of all weights together, a float32 scalar exact to about 1e-5.

    It is the norm of the norms of blocks, since a float32 sum over a large table rounds every addend to its own size.
    """
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return torch.nn.utils.get_total_norm([block for one in gradients for block in one.reshape(-1).split(_NORM_BLOCK)])


class Muon(torch.optim.AdamW):
    """Takes AdamW's arguments. In groups with `orthogonal` all weights are matrices; their state is a momentum, and
    the count of steps that AdamW expects in every state."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step. It changes nothing if the scalar tensor `found_inf`, which must be set before, is not 0."""
        for group in self.param_groups:
            if not group.get("orthogonal", False):
                continue
            by_shape = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for weights in by_shape.values():
                self._update(weights, group["lr"], group["weight_decay"])
        super().step(closure)  # skips weights without a gradient

    def _update(self, weights: list[Tensor], rate: float, decay: float) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] |= {
                    "step": torch.zeros((), device=weight.device),
                    "momentum": torch.zeros_like(weight),
                }
        gradients = torch.stack([weight.grad for weight in weights])
        before = torch.stack([self.state[weight]["momentum"] for weight in weights])
        after = before.lerp(gradients, 1 - _MOMENTUM)
        updates = orthogonalise(gradients.lerp(after, _MOMENTUM)).to(gradients.dtype)  # Nesterov momentum
        finite = self.found_inf == 0
        updates *= rate * _RMS * max(weights[0].shape) ** 0.5
        for weight, kept, momentum, update in zip(weights, before, after, updates, strict=True):
            self.state[weight]["step"] += finite
            self.state[weight]["momentum"] = torch.where(finite, momentum, kept)
            weight.copy_(torch.where(finite, weight * (1 - rate * decay) - update, weight))
            weight.grad = None


def orthogonalise(matrices: Tensor) -> Tensor:
    """U V' of every matrix U S V', roughly: singular values from 0.7 to 1.2 (Newton-Schulz iteration)."""
    wide = matrices.shape[-2] <= matrices.shape[-1]
    X_BRC = matrices if wide else matrices.mT
    X_BRC = X_BRC.float() if X_BRC.device.type == "cpu" else X_BRC.bfloat16()
    X_BRC = X_BRC / X_BRC.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        gram_BRR = X_BRC @ X_BRC.mT
        X_BRC = torch.baddbmm(X_BRC, torch.baddbmm(gram_BRR, gram_BRR, gram_BRR, beta=b, alpha=c), X_BRC, beta=a)
    return X_BRC if wide else X_BRC.mT
