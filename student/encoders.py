"""Which encoder a student is: a fresh one of a name or a Hugging Face config, or one to be trained further.

Also how it attends: over whole windows, or within each of a window's documents. Left out: head and output
matrix (model.py).

Shapes: W windows, L positions.
"""

import difflib
import hashlib
import inspect
import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig, DebertaConfig, ModernBertConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from student.config import NAMED_ENCODERS, StudentConfig, heads_of, named_size
from student.errors import RunError

logger = logging.getLogger(__name__)

# Families of which a test shows that documents packed in a window can be kept apart.
_KEEP_APART = ("bert", "roberta", "xlm-roberta", "electra", "distilbert", "deberta", "deberta-v2", "modernbert")


def build_encoder(hf_config, seed: int, continue_from: Path | None = None) -> nn.Module:
    """An encoder without pooler: freshly initialised, a function of configuration and seed alone, or loaded.

    continue_from  directory whose weights to take
    Raises         RunError where these weights do not cover the encoder or do not fit it
    """
    no_pooler = without_pooler(hf_config)
    if continue_from is not None:
        return _load_weights(continue_from, hf_config, no_pooler)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModel.from_config(hf_config, dtype=torch.float32, **no_pooler)


def attention_inputs(encoder, attention_WL, documents_WL=None) -> dict:
    """Keyword arguments that say to the encoder which positions see each other.

    attention_WL  int64, 0 at padding; None where nothing is padded
    documents_WL  int64 number of each token's document in its window, -1 at padding: attention stays within a
                  document and positions begin anew with each, so that its hidden states are those of the document
                  alone. None: windows are read as one text
    """
    if documents_WL is None:
        return {"attention_mask": attention_WL}
    config = encoder.config
    same_WLL = documents_WL[:, :, None] == documents_WL[:, None, :]    # padding sees padding: no row is empty
    positions_WL = _positions(documents_WL)
    if config.model_type in ("deberta", "deberta-v2"):
        return {"attention_mask": same_WLL, "position_ids": positions_WL}
    if config.model_type == "modernbert":
        place_L = torch.arange(documents_WL.shape[1], device=documents_WL.device)
        near_LL = (place_L[:, None] - place_L).abs() <= config.sliding_window
        masks = {"full_attention": same_WLL, "sliding_attention": same_WLL & near_LL}
        masks = {kind: _pairwise_mask(encoder, mask_WLL) for kind, mask_WLL in masks.items()}
        return {"attention_mask": masks, "position_ids": positions_WL}
    positions_WL = positions_WL + _first_position(config)
    return {"attention_mask": _pairwise_mask(encoder, same_WLL), "position_ids": positions_WL}


def without_pooler(hf_config) -> dict:
    """The argument that keeps AutoModel from adding a pooler, for families that have one."""
    model_class = MODEL_MAPPING[type(hf_config)]
    takes_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    return {"add_pooling_layer": False} if takes_pooler else {}


def encoder_config(config: StudentConfig, store):
    """The Hugging Face config of the encoder, its vocabulary, length and special ids taken from the store.

    Raises RunError where there is no such config, it is no encoder, or its tokenizer or vocabulary is another.
    """
    if config.continue_from is not None and not config.continue_from.is_dir():
        raise RunError(f"--continue-from {config.continue_from} is not a directory. Give a run or an export.")
    if config.continue_from is not None and not any(config.initial_weights.glob("*.safetensors")):
        raise RunError(
            f"--continue-from {config.initial_weights} holds no safetensors file. Others could execute code and are not"
            f" loaded: save the model again with transformers' save_pretrained."
        )
    named = named_config(config.encoder) if config.continue_from is None else None
    hf_config = _load_config(config.encoder_source, store) if named is None else named
    if config.continue_from is not None and hf_config.vocab_size != store.vocab_size:
        raise RunError(
            f"--continue-from {config.continue_from} knows {hf_config.vocab_size} tokens, the store {store.vocab_size}:"
            f" it was trained with another tokenizer. Encode a store with a teacher of that tokenizer."
        )
    hf_config.vocab_size = store.vocab_size
    _set_special_ids(hf_config, store.special_ids)
    _make_room(hf_config, store.max_length)
    if config.dropout is not None:
        _set_dropout(hf_config, config.dropout)
    if config.documents_apart:
        _check_documents_apart(hf_config)
    return hf_config


def weights_fingerprint(module: nn.Module) -> str:
    """SHA-256 over names and values of all weights, 16 hexadecimal digits."""
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(name.encode())
        state.update(np.ascontiguousarray(tensor.detach().cpu().numpy()))
    return state.hexdigest()[:16]


def _load_weights(directory: Path, hf_config, no_pooler: dict) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]):
            encoder, report = AutoModel.from_pretrained(
                directory, config=hf_config, dtype=torch.float32, output_loading_info=True, **no_pooler
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise RunError(
            f"--continue-from {directory}: its weights cannot be used ({_first_line(error)}). Give an export or"
            f" a kept checkpoint of a run whose windows are no shorter than this store's."
        ) from None
    if report["missing_keys"]:
        raise RunError(
            f"--continue-from {directory} lacks weights of the encoder:"
            f" {', '.join(sorted(report['missing_keys'])[:3])}. Give an export or a kept checkpoint of a run."
        )
    return encoder


def named_config(encoder: str):
    """The config of an encoder that needs no file and no network; None where the name is of another kind."""
    if encoder == "deberta-base":
        return _deberta_base()
    if encoder == "modernbert-base":
        return ModernBertConfig(classifier_pooling="mean")    # as in answerdotai/ModernBERT-base
    size = named_size(encoder)
    return None if size is None else _bert_config(*size)


def _deberta_base() -> DebertaConfig:
    """The config of microsoft/deberta-base, the paper's student. The class's defaults have no relative attention."""
    return DebertaConfig(
        relative_attention=True,
        max_relative_positions=-1,    # as many as positions
        pos_att_type=["c2p", "p2c"],
        position_biased_input=False,
        type_vocab_size=0,
        layer_norm_eps=1e-7,
    )


def _bert_config(layers: int, width: int) -> BertConfig:
    return BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads_of(width),
        intermediate_size=4 * width,
    )


def _load_config(encoder: str, store):
    try:
        hf_config = AutoConfig.from_pretrained(encoder)
    except (OSError, ValueError) as error:
        raise RunError(
            f"encoder {encoder}: no Hugging Face config found there ({_first_line(error)}). {_suggestion(encoder)}"
        ) from None
    decodes = hf_config.is_encoder_decoder or getattr(hf_config, "is_decoder", False)
    if type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING or decodes:
        raise RunError(
            f"encoder {encoder}: a model of type {hf_config.model_type} is no encoder for masked text. Take a"
            f" family that transformers has a masked-LM class for, like bert, roberta, deberta or modernbert."
        )
    if Path(encoder).is_dir():
        _check_tokenizer(Path(encoder), store)
    return hf_config


def _suggestion(encoder: str) -> str:
    close = difflib.get_close_matches(encoder.lower(), NAMED_ENCODERS, n=2)
    meant = f"Did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{meant}There are {', '.join(NAMED_ENCODERS)} and bert-<layers>x<width>; or give a directory with"
        f" config.json, or a Hub id (network or cache)."
    )


def _check_tokenizer(directory: Path, store) -> None:
    """Refuse an encoder directory that carries a tokenizer other than the store's."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spm.model", "tokenizer.model")
    if not any((directory / name).is_file() for name in names):
        return
    theirs = AutoTokenizer.from_pretrained(directory).get_vocab()
    ours = AutoTokenizer.from_pretrained(store.tokenizer_dir).get_vocab()
    if theirs != ours:
        raise RunError(
            f"store of another tokenizer: {directory} has a vocabulary of {len(theirs)} tokens, the store one"
            f" of {len(ours)} (or the same tokens with other ids). Encode a store with a teacher of that"
            f" tokenizer, or give the encoder's config.json alone to train it on this store's vocabulary."
        )


def _set_special_ids(hf_config, special_ids: dict) -> None:
    names = {"pad": "pad", "cls": "cls", "sep": "sep", "bos": "cls", "eos": "sep"}
    for name, source in names.items():
        if name == "pad" or getattr(hf_config, f"{name}_token_id", None) is not None:
            setattr(hf_config, f"{name}_token_id", int(special_ids[source]))


def _make_room(hf_config, max_length: int) -> None:
    """Let the position table hold the store's windows."""
    offset = _first_position(hf_config)
    room = getattr(hf_config, "max_position_embeddings", None)
    if room is not None and room < max_length + offset:
        hf_config.max_position_embeddings = max_length + offset
        logger.info("position table extended from %d to %d", room, max_length + offset)


def _first_position(hf_config) -> int:
    """RoBERTa's positions begin behind the padding id."""
    return hf_config.pad_token_id + 1 if "roberta" in hf_config.model_type else 0


def _positions(documents_WL):
    """Positions (W, L) that count from 0 in every run of equal numbers."""
    place_L = torch.arange(documents_WL.shape[1], device=documents_WL.device)
    begins_WL = torch.ones_like(documents_WL, dtype=torch.bool)
    begins_WL[:, 1:] = documents_WL[:, 1:] != documents_WL[:, :-1]
    return place_L - torch.where(begins_WL, place_L, 0).cummax(dim=1).values


def _pairwise_mask(encoder, see_WLL):
    """A mask (W, 1, L, L) as the encoder's attention takes it: SDPA a boolean one, eager attention one to add."""
    see_W1LL = see_WLL[:, None]
    if encoder.config._attn_implementation != "eager":    # SDPA, with torch's dropout or ours (dropout.py)
        return see_W1LL
    return torch.zeros(see_W1LL.shape, device=see_WLL.device).masked_fill(~see_W1LL, torch.finfo(torch.float32).min)


def _check_documents_apart(hf_config) -> None:
    if hf_config.model_type not in _KEEP_APART:
        raise RunError(
            f"--documents-apart: not known how to keep documents apart in a {hf_config.model_type} encoder."
            f" Leave it out, or take one of {', '.join(_KEEP_APART)}."
        )
    if getattr(hf_config, "conv_kernel_size", 0) > 0:
        raise RunError(
            f"--documents-apart: this {hf_config.model_type} encoder has a convolution over neighbouring tokens, which"
            f" looks across documents. Leave the option out, or set conv_kernel_size to 0 in the encoder's config.json."
        )


def _set_dropout(hf_config, rate: float) -> None:
    for name, value in hf_config.to_dict().items():
        if "dropout" in name and "classif" not in name and isinstance(value, (int, float)):
            setattr(hf_config, name, rate)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
