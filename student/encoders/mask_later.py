"""[MASK] later: masked positions enter the encoder at layer m (Liao et al. 2022, "Mask More and Mask Later").

The layers below m see only the other tokens, packed closer together, and cost less by the share that is masked. At
layer m the masked positions join them, with the embeddings of [MASK], position and segment as the embedding layer
returns them. Packed tokens keep their positions in the window: embeddings are added before packing, and DeBERTa's
relative positions and ModernBERT's rotations and distances are those of the window. Rows with fewer tokens are filled
up, and the fillers are hidden. There are few fillers, because every window is masked by the same share.

The layer is in the encoder's config, and so in every export:

    "mask_later": {"layer": 8, "mask_token_id": 103}

A position counts as masked if it holds that token. So text without it, as in fine-tuning, is read as by the stock
encoder. transformers itself ignores the entry and lets [MASK] enter at layer 0: code that passes [MASK] to the encoder
has to use `MaskLater`. This module replaces the loop over the layers, which for ModernBERT is the whole forward pass,
and nothing else. Not handled here: what is masked (masks/), DeBERTa's attention between packed tokens (deberta.py).

Shapes: W windows, L positions, U the most visible tokens of a window, neither masked nor padding; d hidden width.
"""

from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPastAndCrossAttentions

from mlsm.common.documents import attention_inputs, padding_mask
from mlsm.common.errors import RunError
from mlsm.common.json_checks import find_problem, object_of, within
from student.encoders.deberta import PackedPositions, adapt_deberta

FAMILIES = ("bert", "deberta", "deberta-v2", "electra", "modernbert", "roberta", "xlm-roberta")


def set_mask_later(hf_config: PretrainedConfig, layer: int, mask_token_id: int) -> None:
    """Write into an encoder's config at which layer [MASK] enters; 0: remove the entry, if there was one.

    Raises  RunError if the encoder does not have that layer, or its layers cannot be run in two parts
    """
    if hasattr(hf_config, "mask_later"):
        del hf_config.mask_later
    if layer > 0:
        hf_config.mask_later = {"layer": layer, "mask_token_id": mask_token_id}
        if problem := _find_problem(hf_config):
            raise RunError(f"--mask-later {layer}: {problem}. Use a smaller one, another encoder, or omit it.")


def mask_later_of(hf_config: PretrainedConfig) -> int:
    """The layer at which [MASK] enters an encoder of this config, counted from 0.

    Raises  ValueError if there is no such layer
    """
    if getattr(hf_config, "mask_later", None) is None:
        return 0
    if problem := _find_problem(hf_config):
        raise ValueError(f"mask_later of config.json: {problem}")
    return hf_config.mask_later["layer"]


class MaskLater:
    """The loop over the layers of one encoder. It stays as it is if the config has no `mask_later`.

    Raises  ValueError if there is no such layer
    """

    def __init__(self, encoder: nn.Module):
        self.layer = mask_later_of(encoder.config)
        self._packing: tuple | None = None
        if self.layer > 0:
            adapt_deberta(encoder)  # its attention accepts packed tokens
            self._encoder, self._mask_token_id = encoder, encoder.config.mask_later["mask_token_id"]
            if encoder.config.model_type == "modernbert":
                encoder.forward = partial(self._forward_modernbert, encoder.forward)
            else:
                encoder.encoder.forward = partial(self._forward, encoder.encoder.forward)

    def pack(
        self,
        input_WL: Tensor,
        attention_WL: Tensor | None = None,
        documents_WL: Tensor | None = None,
        visible: tuple[int, int] | None = None,
    ) -> None:
        """Until `release`, let [MASK] enter the encoder at its layer when the encoder reads these inputs, which are as
        of a Student. Does nothing for an encoder that [MASK] enters at its first layer.

        visible  the fewest and the most visible tokens of a window, the latter perhaps rounded up. If not given, they
                 are counted, for which the host waits for a GPU
        """
        if self.layer == 0:
            return
        visible_WL = input_WL != self._mask_token_id
        if attention_WL is not None:
            visible_WL = visible_WL & attention_WL.bool()
        if visible is None:
            counts_W = visible_WL.sum(dim=1)
            visible = int(counts_W.min()), int(counts_W.max())
        fewest, most = visible
        # Visible positions first, then the others, each in order: so fillers are distinct positions of the window.
        places_WU = (~visible_WL).byte().argsort(dim=1, stable=True)[:, :most]
        real_WU, mask = visible_WL.gather(1, places_WU), None
        if documents_WL is not None:
            documents_WU = documents_WL.gather(1, places_WU).masked_fill(~real_WU, -1)
            mask = attention_inputs(self._encoder, None, documents_WU, places_WU)["attention_mask"]
        elif fewest < most or self._encoder.config.model_type in ("deberta", "deberta-v2", "modernbert"):
            mask = padding_mask(self._encoder, real_WU.long(), places_WU)
        self._packing = places_WU, mask, visible_WL if fewest < most else None

    def release(self) -> None:
        """Restore the encoder."""
        self._packing = None

    def _forward(self, whole, hidden_WLd, attention_mask=None, *args, **kwargs):
        if self._packing is None:
            return whole(hidden_WLd, attention_mask, *args, **kwargs)
        places_WU, packed_mask, _ = self._packing
        inner, config = self._encoder.encoder, self._encoder.config
        below, above = {"attention_mask": packed_mask}, {"attention_mask": attention_mask}
        if config.model_type in ("deberta", "deberta-v2"):
            rel_embeddings, relative_1LL = inner.get_rel_embedding(), inner.get_rel_pos(hidden_WLd)
            for inputs in (below, above):
                inputs["attention_mask"] = inner.get_attention_mask(inputs["attention_mask"])
                inputs |= {"rel_embeddings": rel_embeddings, "relative_pos": relative_1LL}
            if relative_1LL is not None:
                relative_WUU = relative_1LL[0][places_WU[:, :, None], places_WU[:, None, :]]
                below["relative_pos"] = PackedPositions(relative_WUU, hidden_WLd.shape[1])
                if (
                    config.model_type == "deberta-v2"
                ):  # its attention in transformers needs relative positions as (1, W H, U, U)
                    below["relative_pos"] = relative_WUU.repeat_interleave(config.num_attention_heads, dim=0)[None]
        last = self._run_layers(list(inner.layer), hidden_WLd, lambda layer: below, lambda layer: above)
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=last, hidden_states=(last,))

    def _forward_modernbert(self, whole, input_ids=None, attention_mask=None, position_ids=None, **kwargs):
        if self._packing is None:
            return whole(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **kwargs)
        (places_WU, packed_masks, _), encoder = self._packing, self._encoder
        if attention_mask is None:  # one mask for all windows; None for layers with full attention
            attention_mask = padding_mask(encoder, torch.ones_like(input_ids[:1])) | {"full_attention": None}
        elif not isinstance(attention_mask, dict):
            attention_mask = padding_mask(encoder, attention_mask)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        hidden_WLd, packed_WU = encoder.embeddings(input_ids=input_ids), position_ids.gather(1, places_WU)

        def inputs(masks, positions):  # by kind of layer
            turned = {kind: encoder.rotary_emb(hidden_WLd, positions, kind) for kind in set(encoder.config.layer_types)}
            return lambda layer: {
                "attention_mask": masks[layer.attention_type],
                "position_embeddings": turned[layer.attention_type],
            }

        below, above = inputs(packed_masks, packed_WU), inputs(attention_mask, position_ids)
        last = self._run_layers(list(encoder.layers), hidden_WLd, below, above)
        return BaseModelOutput(last_hidden_state=encoder.final_norm(last))

    def _run_layers(self, layers, embedded_WLd, below, above):
        """Hidden states (W, L, d) after the last layer. `below` and `above` are the layers' other arguments: `below`
        for the layers that packed tokens pass through, `above` for the others."""
        assert self._packing is not None, "it is what is run here"
        (places_WU, _, visible_WL), (windows, length, width) = self._packing, embedded_WLd.shape
        rows_N = (torch.arange(0, windows * length, length, device=places_WU.device)[:, None] + places_WU).flatten()
        flat = embedded_WLd.flatten(0, 1)
        states = flat.index_select(0, rows_N).view(windows, -1, width)
        for number, layer in enumerate(layers):
            if number == self.layer:
                states = flat.index_copy(0, rows_N, states.flatten(0, 1).to(flat.dtype)).view_as(embedded_WLd)
                if visible_WL is not None:  # drop the fillers
                    states = torch.where(visible_WL[..., None], states, embedded_WLd)
            states = layer(states, **(below if number < self.layer else above)(layer))
            states = states[0] if isinstance(states, tuple) else states  # DeBERTa's return attention, too
        return states


def _find_problem(hf_config) -> str | None:
    """Why [MASK] cannot enter later, as the setting says, in an encoder of this config; None if it can."""
    family = hf_config.model_type
    if family not in FAMILIES:
        return f"letting [MASK] enter later is not supported for a {family} encoder, only for {', '.join(FAMILIES)}"
    if getattr(hf_config, "conv_kernel_size", 0) > 0:
        return (
            f"this {family} encoder has a convolution over neighbouring tokens, which change if masked ones are left "
            "out"
        )
    if getattr(hf_config, "talking_head", False):
        return f"this {family} encoder has talking heads, whose attention between packed tokens is not supported"
    if (layers := hf_config.num_hidden_layers) < 2:
        return "this encoder has only one layer, and [MASK] must enter there to be predicted"
    kinds = {"layer": within(1, layers - 1), "mask_token_id": within(0, hf_config.vocab_size - 1)}
    return find_problem(hf_config.mask_later, object_of(kinds))
