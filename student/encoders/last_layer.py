"""The last layer of an encoder, computed at masked positions only.

The head reads no other position, so the last layer needs the others only as keys and values: their queries, attention,
feed-forward and norms are skipped. The logits are the same, and a step saves most of one layer. The families in
`FORWARDS` support this; others compute the whole layer.

The layer's forward method is replaced, not its weights or their names; without `restrict` the encoder is unchanged. Not
handled here: the head (model.py).

Shapes: W windows, L positions, M masked tokens, m the most of them in a window, d hidden width, H heads.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from student.encoders.dropout import attend


class LastLayer:
    """The last layer of one encoder, and the rows that it should compute now."""

    def __init__(self, encoder: nn.Module):
        forward = FORWARDS.get(encoder.config.model_type)
        self.restricted = False
        self._masked: tuple | None = None
        if forward is not None and not _is_followed(encoder):
            self.restricted = True
            self._layer = layer = _layers(encoder)[-1]
            layer.forward = partial(self._forward, partial(forward, layer), layer.forward)

    def restrict(self, where_M: Tensor, most_masked: int) -> bool:
        """Let the encoder return hidden states (M, d) of the masked positions alone, until `release`.

        where_M      int64 masked positions in the flattened (W L) input, ascending; the last one may be repeated
        most_masked  m, the most masked positions of a window, not counting the repetitions, or more
        Returns      False if this is not possible: the encoder then returns the states of all positions
        """
        if not self.restricted or most_masked == 0:
            return False
        self._layer.gradient_checkpointing = False  # recomputation in the backward pass would come after `release`
        self._masked = where_M, most_masked
        return True

    def release(self) -> None:
        """Restore the encoder."""
        self._masked = None

    def _forward(self, restricted, whole, hidden_WLd, *args, **kwargs):
        if self._masked is None:
            return whole(hidden_WLd, *args, **kwargs)
        return restricted(hidden_WLd, *self._masked, *args, **kwargs)


def _bert(layer, hidden_WLd, where_M, most_masked, attention_mask=None, *args, **kwargs):
    attention = layer.attention.self
    queries_Wm, slots_M = _queries(where_M, most_masked, hidden_WLd.shape)
    flat = hidden_WLd.flatten(0, 1)
    query = _heads(attention.query(flat[queries_Wm]), attention)
    key, value = (_heads(project(hidden_WLd), attention) for project in (attention.key, attention.value))
    mask, dropout = _mask_of_queries(attention_mask, queries_Wm), attention.dropout.p if layer.training else 0.0
    context = attend(query, key, value, mask, dropout, attention.scaling)
    context_Md = context.transpose(1, 2).flatten(2).flatten(0, 1)[slots_M]
    return layer.feed_forward_chunk(layer.attention.output(context_Md, flat[where_M]))


def _deberta(layer, hidden_WLd, where_M, most_masked, attention_mask, *, query_states=None, **kwargs):
    context, _ = layer.attention.self(hidden_WLd, attention_mask, query_states=query_states, **kwargs)
    context_Md, hidden_Md = (states.flatten(0, 1)[where_M] for states in (context, hidden_WLd))
    attended_Md = layer.attention.output(context_Md, hidden_Md)
    return layer.output(layer.intermediate(attended_Md), attended_Md), None


def _distilbert(layer, hidden_WLd, where_M, most_masked, *args, **kwargs):
    context, *_ = layer.attention(hidden_WLd, *args, **kwargs)
    attended_Md = layer.sa_layer_norm((context + hidden_WLd).flatten(0, 1)[where_M])
    return layer.output_layer_norm(layer.ffn(attended_Md) + attended_Md)


def _modernbert(layer, hidden_WLd, where_M, most_masked, *args, **kwargs):
    context, *_ = layer.attn(layer.attn_norm(hidden_WLd), *args, **kwargs)
    attended_Md = (hidden_WLd + context).flatten(0, 1)[where_M]
    return attended_Md + layer.mlp(layer.mlp_norm(attended_Md))


FORWARDS: dict[str, Callable[..., Any]] = {
    "bert": _bert,
    "camembert": _bert,
    "electra": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "deberta": _deberta,
    "deberta-v2": _deberta,
    "distilbert": _distilbert,
    "modernbert": _modernbert,
}


def _layers(encoder):
    inner = getattr(encoder, "encoder", getattr(encoder, "transformer", encoder))
    return getattr(inner, "layer", None) or inner.layers


def _is_followed(encoder) -> bool:
    """Whether positions are mixed outside the layers, too: DeBERTa-v2's convolution follows its first layer."""
    return getattr(getattr(encoder, "encoder", None), "conv", None) is not None and len(_layers(encoder)) == 1


def _queries(where_M, most_masked: int, shape):
    """The masked positions as a matrix with a row for every window.

    Returns  int64 (W, m) positions in the flattened (W L) input, rows filled up with their window's first position;
             and int64 (M), where the masked positions are in the flattened matrix. Repetitions of the last position
             have slots after its own, which no other position uses; slots that they overwrite hold the same value
    """
    windows, length = shape[:2]
    first_W = torch.arange(0, windows * length, length, device=where_M.device)
    window_M = where_M // length
    rank_M = torch.arange(len(where_M), device=where_M.device) - torch.searchsorted(where_M, first_W)[window_M]
    slots_M = (window_M * most_masked + rank_M).clamp_(max=windows * most_masked - 1)
    queries_Wm = first_W.repeat_interleave(most_masked).index_copy(0, slots_M, where_M)
    return queries_Wm.view(windows, most_masked), slots_M


def _heads(states, attention):
    """(W, n, d) to (W, H, n, d / H)."""
    return states.unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)


def _mask_of_queries(mask, queries_Wm):
    """The rows of an attention mask that belong to the queries, in the form that SDPA takes."""
    if mask is None:
        return None
    if mask.dim() == 2:  # flash attention's, of the keys
        return mask[:, None, None, :].bool()
    if mask.shape[2] == 1:
        return mask
    windows = torch.arange(len(queries_Wm), device=mask.device)[:, None]
    return mask.expand(len(queries_Wm), -1, -1, -1)[windows, :, queries_Wm % mask.shape[2]].transpose(1, 2)
