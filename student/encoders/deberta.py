"""DeBERTa's layers as transformers has them, from fewer and larger operations; the results are the same.

Disentangled attention (He et al. 2021, section 3.1) adds two terms to every score: query times relative position, and
relative position times key. transformers gathers both from tables of 2 L columns, and scatters their gradients. Query i
and key j use column L + i - j, so the entries are at a fixed stride in memory. Here they are a view of the flattened
table (the relative shift of Transformer-XL, Dai et al. 2019, appendix B), and their sum is the bias of
scaled_dot_product_attention. The norm is one operation instead of six. Tokens that are packed closer together than they
are in their window (mask_later.py) have no fixed stride: their entries are gathered.

Not handled here: DeBERTa-v2, whose positions are bucketed; windows longer than the table of relative positions; talking
heads. These run as in transformers.

Shapes: W windows, L positions, H heads, e width of a head, U packed tokens of a window.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm, DisentangledSelfAttention

from mlsm.common.documents import accept_pairwise_mask
from student.encoders.dropout import attend


def adapt_deberta(encoder: nn.Module) -> None:
    """Compute DeBERTa's attention and norms inside an encoder by this module; their weights and names stay.

    The attention of both DeBERTa and DeBERTa-v2 then also accepts a mask for every pair of positions.
    """
    ours = {DisentangledSelfAttention: ShiftedSelfAttention, DebertaLayerNorm: FusedLayerNorm}
    for module in encoder.modules():
        module.__class__ = ours.get(type(module), type(module))
    accept_pairwise_mask(encoder)


class PackedPositions(NamedTuple):
    """The positions of packed tokens, for `relative_pos` of an attention."""

    relative_WUU: Tensor
    """int64, position of the query minus position of the key"""
    length: int
    """length of the window, in positions"""


class FusedLayerNorm(DebertaLayerNorm):
    """Layer norm in float32, with the epsilon inside the root, as everywhere."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.layer_norm(hidden_states, self.weight.shape, self.weight, self.bias, self.variance_epsilon)


class AutocastSelfAttention(DisentangledSelfAttention):
    """transformers' attention, in a form that works under autocast."""

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        """(W, L, H e) to (W, H, L, e), in autocast's type.

        transformers adds float32 biases after the products. So in bfloat16 queries and scores have different types, and
        transformers fails when it fills scores with the smallest number of the queries' type (its issue 35332).
        """
        kind = x.device.type
        if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
            x = x.to(torch.get_autocast_dtype(kind))
        return super().transpose_for_scores(x)


class ShiftedSelfAttention(AutocastSelfAttention):
    """Disentangled attention without gathers."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        output_attentions: bool = False,
        query_states: Tensor | None = None,
        relative_pos: Tensor | PackedPositions | None = None,
        rel_embeddings: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        packed = relative_pos if isinstance(relative_pos, PackedPositions) else None
        length = hidden_states.shape[1] if packed is None else packed.length
        relates = self.relative_attention and rel_embeddings is not None and bool(self.pos_att_type)
        serves = relates and not self.talking_head and (packed is not None or length <= self.max_relative_positions)
        if output_attentions or query_states is not None or not serves:
            relative_pos = relative_pos if packed is None else packed.relative_WUU
            return super().forward(
                hidden_states, attention_mask, output_attentions, query_states, relative_pos, rel_embeddings
            )
        query, key, value = self.transpose_for_scores(self.in_proj(hidden_states)).chunk(3, dim=-1)  # (W, H, L, e)
        query = (query + self.transpose_for_scores(self.q_bias[None, None, :])) / self._scale()
        value = value + self.transpose_for_scores(self.v_bias[None, None, :])
        bias_WHLL = self._position_bias(query, key, rel_embeddings, length, packed)
        bias_WHLL = bias_WHLL.masked_fill(~attention_mask.bool(), torch.finfo(bias_WHLL.dtype).min)
        dropout = self.dropout.p if self.training else 0.0
        context = attend(query, key, value, bias_WHLL, dropout, 1.0)
        return context.transpose(1, 2).flatten(2), None

    def _scale(self) -> float:
        return math.sqrt(self.attention_head_size * (1 + len(self.pos_att_type)))

    def _position_bias(self, query, key, rel_embeddings, length: int, packed: PackedPositions | None):
        """The terms that positions add to the scores (W, H, L, L), or (W, H, U, U) for packed tokens."""
        span, columns_WHUU = min(length, self.max_relative_positions), None
        if packed is not None:  # L + i - j
            columns_WUU = (span + packed.relative_WUU).clamp(0, 2 * span - 1)
            columns_WHUU = columns_WUU[:, None].expand(-1, query.shape[1], -1, -1)
        near = slice(self.max_relative_positions - span, self.max_relative_positions + span)
        positions = self.pos_dropout(rel_embeddings)[near][None]
        bias = 0
        if "c2p" in self.pos_att_type:  # column L + i - j of row i; with columns reversed, L - 1 - i + j
            position_key = self.transpose_for_scores(self.pos_proj(positions))
            if columns_WHUU is None:
                bias = _shift(query @ position_key.flip(-2).transpose(-1, -2), length - 1)
            else:
                bias = (query @ position_key.transpose(-1, -2)).gather(-1, columns_WHUU)
        if "p2c" in self.pos_att_type:  # column L + i - j of row j
            position_query = self.transpose_for_scores(self.pos_q_proj(positions)) / self._scale()
            table = key @ position_query.transpose(-1, -2)
            of_key = _shift(table, length) if columns_WHUU is None else table.gather(-1, columns_WHUU.transpose(-1, -2))
            bias = bias + of_key.transpose(-1, -2)
        return bias


def _shift(table, first: int):
    """Entries (r, first - r + c) for rows r and columns c below L, of a table (..., L, 2 L): a view (..., L, L)."""
    length = table.shape[-2]
    stride = 2 * length - 1
    return table.flatten(-2)[..., first : first + length * stride].unflatten(-1, (length, stride))[..., :length]
