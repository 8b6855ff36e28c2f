"""Which encoder a student is: a fresh one of a size or a Hugging Face config, or one to be trained further.

Left out: head and output matrix (model.py).
"""

import hashlib
import inspect
import logging
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from student.config import StudentConfig, heads_of, named_size
from student.errors import RunError

logger = logging.getLogger(__name__)


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
        raise RunError(f"--continue-from {config.continue_from} is not a directory. Give an export of a run.")
    size = named_size(config.encoder_source)
    hf_config = _load_config(config.encoder_source, store) if size is None else _bert_config(*size)
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
            f"encoder {encoder}: no Hugging Face config found there ({_first_line(error)}). Give a named"
            f" size like bert-6x256, a directory with config.json, or a Hub id (network or cache)."
        ) from None
    if type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING or hf_config.is_encoder_decoder:
        raise RunError(
            f"encoder {encoder}: a model of type {hf_config.model_type} is no encoder for masked text. Take a"
            f" family that transformers has a masked-LM class for, like bert, roberta, deberta or modernbert."
        )
    if Path(encoder).is_dir():
        _check_tokenizer(Path(encoder), store)
    return hf_config


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
    """Let the position table hold the store's windows. RoBERTa's positions begin behind the padding id."""
    offset = hf_config.pad_token_id + 1 if "roberta" in hf_config.model_type else 0
    room = getattr(hf_config, "max_position_embeddings", None)
    if room is not None and room < max_length + offset:
        hf_config.max_position_embeddings = max_length + offset
        logger.info("position table extended from %d to %d", room, max_length + offset)


def _set_dropout(hf_config, rate: float) -> None:
    for name, value in hf_config.to_dict().items():
        if "dropout" in name and "classif" not in name and isinstance(value, (int, float)):
            setattr(hf_config, name, rate)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
