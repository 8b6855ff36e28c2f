"""Keep the documents of a packed window apart: the model reads each as if it were alone in the window.

    model(ids_WL, **attention_inputs(model, attention_WL, documents_WL))

A packed window is [CLS] a a a [SEP] b b [SEP]. [CLS] belongs to the first document, and every [SEP] to the document
before it. Attention stays within a document, and positions start again with each document. So a document's hidden
states equal those of a forward pass over only its own tokens. With --documents-apart, the teacher (pipeline/) and the
student (student/) both read windows this way. Not handled here: which tokens belong to which document (shards/), and
whether to keep them apart.

Shapes: W windows, L positions.
"""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Model families for which a test shows that documents packed in a window can be kept apart.
KEEP_APART = (
    "bert",
    "camembert",
    "roberta",
    "xlm-roberta",
    "electra",
    "distilbert",
    "deberta",
    "deberta-v2",
    "eurobert",
    "modernbert",
    "mpnet",
)


def attention_inputs(
    encoder: "PreTrainedModel",
    attention_WL: torch.Tensor | None,
    documents_WL: torch.Tensor | None = None,
    places_WL: torch.Tensor | None = None,
) -> dict:
    """Keyword arguments that tell the encoder which positions attend to each other.

    attention_WL  int64, 0 at padding; None if nothing is padded
    documents_WL  int64 number of each token's document in its window, -1 at padding: attention stays within a
                  document and positions start again with each, so that its hidden states are those of the document
                  alone. None: windows are read as one text
    places_WL     int64 places of the tokens in their windows, if some tokens of the windows are left out: ModernBERT's
                  local attention uses them. The returned positions then do not count the omitted tokens. None: 0, 1, 2
                  and so on
    """
    if documents_WL is None:
        if attention_WL is None or not attention_WL.is_cuda or encoder.config.model_type not in KEEP_APART:
            return {"attention_mask": attention_WL}  # some families read no mask over pairs: ESM, Longformer, XLM
        return {"attention_mask": padding_mask(encoder, attention_WL)}
    config = encoder.config
    same_WLL = documents_WL[:, :, None] == documents_WL[:, None, :]  # padding attends to padding, so no row is empty
    positions_WL = positions_in_documents(documents_WL)
    if config.model_type in ("deberta", "deberta-v2"):
        return {"attention_mask": same_WLL, "position_ids": positions_WL}
    if config.model_type == "modernbert":
        return {"attention_mask": _masks_by_kind(encoder, same_WLL, places_WL), "position_ids": positions_WL}
    positions_WL = positions_WL + first_position(encoder)
    return {"attention_mask": _pairwise_mask(encoder, same_WLL), "position_ids": positions_WL}


def padding_mask(
    encoder: "PreTrainedModel", attention_WL: torch.Tensor, places_WL: torch.Tensor | None = None
) -> "torch.Tensor | dict[str, torch.Tensor]":
    """The attention mask that transformers would make for padding, without reading from the device.

    transformers checks every mask for padding, and for that the host must wait for the GPU.

    places_WL  see `attention_inputs`
    """
    if encoder.config.model_type in ("deberta", "deberta-v2"):
        return attention_WL  # these do not check the mask
    real_W1L = attention_WL[:, None].bool()
    if encoder.config.model_type == "modernbert":
        return _masks_by_kind(encoder, real_W1L, places_WL)
    return _pairwise_mask(encoder, real_W1L)


def why_not_apart(config: "PretrainedConfig") -> str | None:
    """Why documents cannot be kept apart in an encoder of this Hugging Face config; None if they can."""
    if config.model_type not in KEEP_APART:
        return (
            f"documents cannot be kept apart in a {config.model_type} encoder. Omit the option, or use one of "
            f"{', '.join(KEEP_APART)}."
        )
    if getattr(config, "conv_kernel_size", 0) > 0:
        return (
            f"this {config.model_type} encoder has a convolution over neighbouring tokens, which looks across "
            "documents. Omit the option, or set conv_kernel_size to 0 in the encoder's config.json."
        )
    return None


def accept_pairwise_mask(encoder: "PreTrainedModel") -> None:
    """Let DeBERTa and DeBERTa-v2 accept an attention mask over pairs of positions; other families already do.

    They multiply the embeddings of padding by the mask's zeros, and a mask over pairs has no such zeros.
    """
    if encoder.config.model_type in ("deberta", "deberta-v2"):
        encoder.embeddings.register_forward_pre_hook(_without_pairwise_mask, with_kwargs=True)


def first_position(encoder: "PreTrainedModel") -> int:
    """The position id of a text's first token: RoBERTa and similar models start after the padding id."""
    table = getattr(getattr(encoder.base_model, "embeddings", None), "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return 0 if padding is None else padding + 1


def _without_pairwise_mask(embeddings, args, kwargs):
    mask = kwargs.get("mask")
    return args, kwargs | {"mask": None if mask is not None and mask.dim() == 3 else mask}


def positions_in_documents(documents_WL: torch.Tensor) -> torch.Tensor:
    """Positions of tokens, int64 (W, L), counted from 0 in every run of equal document numbers."""
    place_L = torch.arange(documents_WL.shape[1], device=documents_WL.device)
    begins_WL = torch.ones_like(documents_WL, dtype=torch.bool)
    begins_WL[:, 1:] = documents_WL[:, 1:] != documents_WL[:, :-1]
    return place_L - torch.where(begins_WL, place_L, 0).cummax(dim=1).values


def _masks_by_kind(encoder, see_WLL, places_WL=None):
    """ModernBERT's two masks, for layers with global and with local attention. Every position attends to itself, also
    padding, so no row is empty.
    """
    if places_WL is None:
        places_WL = torch.arange(see_WLL.shape[2], device=see_WLL.device)[None]
    distance_WLL = (places_WL[:, :, None] - places_WL[:, None, :]).abs()
    near_WLL = (see_WLL | (distance_WLL == 0)) & (distance_WLL <= encoder.config.sliding_window)
    masks = {"full_attention": see_WLL, "sliding_attention": near_WLL}
    return {kind: _pairwise_mask(encoder, mask_WLL) for kind, mask_WLL in masks.items()}


def _pairwise_mask(encoder, see_WLL):
    """A mask (W, 1, L, L) in the form that the encoder's attention needs: boolean for SDPA, additive for eager
    attention.
    """
    see_W1LL = see_WLL[:, None]
    if encoder.config._attn_implementation != "eager":  # SDPA, with torch's dropout or ours (dropout.py)
        return see_W1LL
    added_W1LL = torch.zeros(see_W1LL.shape, dtype=encoder.dtype, device=see_WLL.device)
    return added_W1LL.masked_fill(~see_W1LL, torch.finfo(encoder.dtype).min)
