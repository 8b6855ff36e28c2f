"""Dropout on a CPU from 16 random bits per element, and attention that uses it.

torch draws a float for every element, which takes a fifth of a small BERT's step. Here four elements share one 64-bit
number of torch's generator, so dropout still follows from its seed. A probability is rounded to a multiple of 2^-16,
and kept elements are scaled for the rounded probability. On a GPU and under torch.compile torch's dropout is used.

Not handled here: seeding (train.py).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_LEVELS = 2**16
_NAME = "sdpa_16_bit_dropout"


def use_fast_dropout(encoder: nn.Module) -> None:
    """Use this dropout in the layers of an encoder on a CPU and, where it uses torch's SDPA, in its attention."""
    for module in encoder.modules():
        if type(module) is torch.nn.Dropout:
            module.__class__ = Dropout
    if encoder.config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        encoder.config._attn_implementation = _NAME


class Dropout(torch.nn.Dropout):
    """torch's dropout, except for the source of its random bits."""

    def forward(self, states: Tensor) -> Tensor:
        return drop(states, self.p) if self.training else states


def drop(states: Tensor, probability: float) -> Tensor:
    """Set some of the states to zero and scale the others up."""
    level = round(probability * _LEVELS)
    if not _serves(states) or not 0 < level < _LEVELS:
        return F.dropout(states, probability)
    return _Drop.apply(states, level)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float) -> Tensor:
    """scaled_dot_product_attention with this dropout. Shapes (windows, heads, tokens, width of a head)."""
    if dropout == 0 or not _serves(query):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    scores = (query * scale) @ key.transpose(-1, -2)
    if mask is not None:
        lowest = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask
    return drop(scores.softmax(dim=-1), dropout) @ value


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, level: int):
        ctx.kept, ctx.scale = _draw(states.shape, level), _LEVELS / (_LEVELS - level)
        return torch.mul(states, ctx.kept).mul_(ctx.scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return torch.mul(gradient, ctx.kept).mul_(ctx.scale), None


def _draw(shape, level: int):
    """Booleans of a shape, false with probability level / 2^16."""
    wanted = math.prod(shape)
    numbers = torch.empty(-(-wanted // 4), dtype=torch.int64).random_(-(2**63), None)  # all 64 bits
    return (numbers.view(torch.int16)[:wanted] >= level - _LEVELS // 2).view(shape)


def _attention(module, query, key, value, attention_mask, dropout=0.0, scaling=None, **kwargs):
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if (queries_per_key := query.shape[1] // key.shape[1]) > 1:  # several heads of queries share one of keys and values
        key, value = (states.repeat_interleave(queries_per_key, dim=1) for states in (key, value))
    return attend(query, key, value, attention_mask, dropout, scale).transpose(1, 2).contiguous(), None


def _serves(states) -> bool:
    return states.device.type == "cpu" and not torch.compiler.is_compiling()
