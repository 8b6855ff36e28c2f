"""Build a student's encoder: a new one from a name or a Hugging Face config, or one to be trained further.

Not handled here: head and output matrix (model.py), how documents of a window are kept apart
(mlsm/common/documents.py).
"""

import difflib
import hashlib
import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModel,
    BertConfig,
    DebertaConfig,
    ModernBertConfig,
    PretrainedConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from mlsm.common.device import spare_randomness
from mlsm.common.documents import why_not_apart
from mlsm.common.errors import RunError, describe
from mlsm.common.invocation import program
from mlsm.common.model_checks import (
    check_size,
    describe_foreign_settings,
    describe_unused_weights,
    open_config,
    open_tokenizer,
    quiet_transformers,
    without_pooler,
)
from mlsm.common.paths import utf8_name
from mlsm.common.text import shell_quote
from shards.reader import Store
from student.config import StudentConfig
from student.encoders.mask_later import set_mask_later

logger = logging.getLogger(__name__)

BERT_SIZES = {  # layers and width; the small ones are those of Turc et al. 2019 (arXiv:1908.08962)
    "bert-tiny": (2, 128),
    "bert-mini": (4, 256),
    "bert-small": (4, 512),
    "bert-medium": (8, 512),
    "bert-base": (12, 768),
}
NAMED_ENCODERS = (*BERT_SIZES, "deberta-base", "modernbert-base")

# Families whose position table is read from the row after the padding id's, as RoBERTa's is (fairseq's convention). A
# test compares the list with all families that transformers has.
_POSITIONS_BEHIND_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "longformer",
    "luke",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)


def build_encoder(hf_config: PretrainedConfig, seed: int, continue_from: Path | None = None) -> nn.Module:
    """An encoder without pooler: loaded, or initialised as a function of only configuration and seed.

    continue_from  directory whose weights to take
    Raises         RunError if these weights do not cover the encoder or do not fit it
    """
    if continue_from is not None:
        return _continue(continue_from, hf_config)
    with spare_randomness():
        torch.default_generator.manual_seed(seed)
        return AutoModel.from_config(hf_config, dtype=torch.float32, **without_pooler(hf_config))


def load_weights(
    source: str | Path, hf_config: PretrainedConfig, revision: str | None = None
) -> tuple[nn.Module, dict]:
    """An encoder without pooler from safetensors, float32, and transformers' report on its weights.

    Code and pickles in the source are not run. Raises many classes, those of safetensors and transformers.
    """
    no_pooler = without_pooler(hf_config)
    check_size(MODEL_MAPPING[type(hf_config)], hf_config, source, **no_pooler)
    with spare_randomness(), quiet_transformers(), utf8_name(source) as place:
        return AutoModel.from_pretrained(
            place,
            revision=revision,
            config=hf_config,
            dtype=torch.float32,
            output_loading_info=True,
            use_safetensors=True,
            trust_remote_code=False,
            **no_pooler,
        )


def encoder_config(config: StudentConfig, store: Store) -> PretrainedConfig:
    """The Hugging Face config of the encoder, with the store's vocabulary, window length and special ids.

    Raises RunError if there is no such config, if it is not for an encoder, or if its tokenizer or vocabulary differs
    from the store's.
    """
    hf_config = unfitted_config(config, store)
    fit_config(hf_config, store.vocab_size, store.special_ids, store.max_length)
    if config.dropout is not None:
        for name in _dropout_names(hf_config):
            setattr(hf_config, name, config.dropout)
    set_mask_later(hf_config, config.mask_later, int(store.special_ids["mask"]))
    if config.documents_apart and (reason := why_not_apart(hf_config)) is not None:
        raise RunError(f"--documents-apart: {reason}")
    can_compute_again = getattr(MODEL_MAPPING[type(hf_config)], "supports_gradient_checkpointing", False)
    if config.activation_checkpointing and not can_compute_again:
        raise RunError(
            f"--activation-checkpointing: transformers cannot compute the layers of a {hf_config.model_type} encoder "
            "a second time. Omit it, and use a smaller --micro-batch if memory runs out."
        )
    return hf_config


def fit_config(hf_config: PretrainedConfig, vocab_size: int, special_ids: Mapping[str, int], max_length: int) -> None:
    """Give a configuration a tokenizer's vocabulary and special ids (pad, cls, sep, mask), and room for its windows."""
    hf_config.vocab_size = vocab_size
    for name, source in {"pad": "pad", "cls": "cls", "sep": "sep", "mask": "mask", "bos": "cls", "eos": "sep"}.items():
        if name == "pad" or getattr(hf_config, f"{name}_token_id", None) is not None:
            setattr(hf_config, f"{name}_token_id", int(special_ids[source]))
    _make_room(hf_config, max_length)


def unfitted_config(config: StudentConfig, store: Store) -> PretrainedConfig:
    """The Hugging Face config of the encoder as it is, before it is fitted to the store. Raises the errors of
    `encoder_config`."""
    if config.continue_from is not None and not config.continue_from.is_dir():
        raise RunError(
            f"--continue-from {config.continue_from} is not a directory. Pass a run or an export. A run that was begun "
            "from one needs it until it is finished."
        )
    weights = config.initial_weights
    if weights is not None and not any(weights.glob("*.safetensors")):
        if (weights / "checkpoints").is_dir():
            raise RunError(
                f"--continue-from {weights} is an unfinished run. Finish it, or pass one of its kept checkpoints or "
                f"the export of another checkpoint:  {program()} export-student {shell_quote(weights)}"
            )
        raise RunError(
            f"--continue-from {weights} has no safetensors file. Other formats could execute code and are not loaded: "
            "save the model again with transformers' save_pretrained."
        )
    named = named_config(config.encoder) if config.continue_from is None else None
    hf_config = _load_config(config.encoder_source, store) if named is None else named
    if config.continue_from is not None and hf_config.vocab_size > store.vocab_size:
        raise RunError(
            f"--continue-from {config.continue_from} has {hf_config.vocab_size} rows of word vectors, more than the "
            f"{store.vocab_size} tokens of the store's tokenizer. If the tokenizer is the same, cut the rows with "
            f"transformers: model.resize_token_embeddings({store.vocab_size}), then model.save_pretrained."
        )
    if config.continue_from is not None and hf_config.vocab_size != store.vocab_size:
        raise RunError(
            f"--continue-from {config.continue_from} has {hf_config.vocab_size} tokens, but the store has "
            f"{store.vocab_size}: it was trained with another tokenizer. Encode a store with a teacher that has that "
            "tokenizer."
        )
    return hf_config


def own_dropout(hf_config: PretrainedConfig) -> float | None:
    """The dropout of a config, ignoring a pooler's; None if it has no dropout or several different ones."""
    rates = {getattr(hf_config, name) for name in _dropout_names(hf_config) if "pooler" not in name}
    return float(rates.pop()) if len(rates) == 1 else None


def weights_fingerprint(module: nn.Module) -> str:
    """SHA-256 over names and values of all weights, 16 hexadecimal digits."""
    state = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        state.update(name.encode())
        state.update(tensor.detach().cpu().numpy().tobytes())
    return state.hexdigest()[:16]


def _continue(directory: Path, hf_config: PretrainedConfig) -> nn.Module:
    try:
        encoder, report = load_weights(directory, hf_config)
    except Exception as error:  # safetensors and transformers raise many classes, Exception itself included
        raise RunError(
            f"--continue-from {directory}: its weights cannot be used ({describe(error)}). Pass an export or a kept "
            "checkpoint of a run whose windows are at least as long as this store's."
        ) from None
    if report["missing_keys"]:
        raise RunError(
            f"--continue-from {directory} lacks weights of the encoder: "
            f"{', '.join(sorted(report['missing_keys'])[:3])}. Pass an export or a kept checkpoint of a run."
        )
    if trouble := describe_unused_weights(report["unexpected_keys"], encoder):
        raise RunError(f"--continue-from {directory}: {trouble}")
    return encoder


def named_config(encoder: str) -> PretrainedConfig | None:
    """The config of an encoder that needs no file and no network; None for other names."""
    if encoder == "deberta-base":
        return _deberta_base()
    if encoder == "modernbert-base":
        return ModernBertConfig(classifier_pooling="mean")  # as in answerdotai/ModernBERT-base
    size = named_size(encoder)
    if size is None:
        return None
    return _modernbert_config(*size) if encoder.startswith("modernbert-") else _bert_config(*size)


def named_size(encoder: str) -> tuple[int, int] | None:
    """(layers, width) of a name like bert-2x128, modernbert-2x128 or bert-base; None for other names.

    Raises ValueError if such a size cannot be built.
    """
    if encoder in BERT_SIZES:
        return BERT_SIZES[encoder]
    match = re.fullmatch(r"(?:modern)?bert-(\d+)x(\d+)", encoder)
    if match is None:
        return None
    layers, width = int(match[1]), int(match[2])
    parts = heads_of(width) * (2 if encoder.startswith("modern") else 1)  # its positions turn pairs of a head's values
    if layers < 1 or width < 2 or width % parts:
        raise ValueError(
            f"encoder {encoder}: needs at least one layer and a width that is divisible by {parts} "
            f"({heads_of(width)} heads, one per 64). Use a multiple of 64, like bert-2x128 or bert-12x768."
        )
    return layers, width


def heads_of(width: int) -> int:
    """Attention heads of a named size: one for every 64 of width, at least two."""
    return max(2, width // 64)


def _deberta_base() -> DebertaConfig:
    """The config of microsoft/deberta-base, the paper's student. By default the class has no relative attention."""
    return DebertaConfig(
        relative_attention=True,
        max_relative_positions=-1,  # as many as positions
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


def _modernbert_config(layers: int, width: int) -> ModernBertConfig:
    """ModernBERT-base at another size. Narrow matrices start with larger weights, so products are equally large."""
    return ModernBertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=heads_of(width),
        intermediate_size=width * 3 // 2,
        initializer_range=0.02 * (768 / width) ** 0.5,
        classifier_pooling="mean",
    )


def _load_config(encoder: str, store: Store) -> PretrainedConfig:
    try:
        hf_config = open_config(encoder)
    except Exception as error:  # of a config.json that is damaged, transformers raises many classes
        raise RunError(
            f"encoder {encoder}: no Hugging Face config found there. {_suggestion(encoder)} Cause: {describe(error)}"
        ) from None
    decodes = hf_config.is_encoder_decoder or getattr(hf_config, "is_decoder", False)
    if type(hf_config) not in MODEL_FOR_MASKED_LM_MAPPING or decodes:
        raise RunError(
            f"encoder {encoder}: a model of type {hf_config.model_type} is not an encoder for masked text. Use a "
            "family for which transformers has a masked-LM class, like bert, roberta, deberta or modernbert."
        )
    if trouble := describe_foreign_settings(hf_config):
        raise RunError(f"encoder {encoder}: {trouble}")
    if hasattr(hf_config, "auto_map"):  # code in one of our exports, which is not part of the encoder
        del hf_config.auto_map
    if Path(encoder).is_dir():
        _check_tokenizer(Path(encoder), store)
    return hf_config


def _suggestion(encoder: str) -> str:
    _, _, size = encoder.partition("-")
    sized = [f"{family}-{size}" for family in ("bert", "modernbert")] if re.fullmatch(r"\d+x\d+", size) else []
    close = difflib.get_close_matches(encoder.lower(), [*NAMED_ENCODERS, *sized], n=1)
    meant = f"Did you mean {close[0]}? " if close else ""
    return (
        f"{meant}There are {', '.join(NAMED_ENCODERS)}, bert-<layers>x<width> and modernbert-<layers>x<width>; or give"
        f" a directory with config.json, or a Hub id (network or cache)."
    )


def vocabulary_of(directory: str | Path) -> dict[str, int]:
    """Tokens to ids of the tokenizer in a directory. Raises RunError if it cannot be loaded."""
    try:
        return open_tokenizer(directory).get_vocab()
    except Exception as error:  # of transformers and tokenizers, of many classes
        raise RunError(f"{directory}: its tokenizer cannot be loaded ({describe(error)}). Copy it again.") from None


def _check_tokenizer(directory: Path, store: Store) -> None:
    """Refuse an encoder directory that carries a tokenizer other than the store's."""
    names = ("tokenizer.json", "vocab.txt", "vocab.json", "spm.model", "tokenizer.model")
    if not any((directory / name).is_file() for name in names):
        return
    theirs, ours = vocabulary_of(directory), store.load_tokenizer().get_vocab()
    if theirs != ours:
        raise RunError(
            f"store of another tokenizer: {directory} has a vocabulary of {len(theirs)} tokens, the store one of "
            f"{len(ours)} (or the same tokens with other ids). Encode a store with a teacher that has that tokenizer, "
            "or pass only the encoder's config.json to train it on this store's vocabulary."
        )


def _make_room(hf_config: PretrainedConfig, max_length: int) -> None:
    """Extend the position table if it is too short for the store's windows."""
    offset = _first_position(hf_config)
    room = getattr(hf_config, "max_position_embeddings", None)
    if room is not None and room < max_length + offset:
        hf_config.max_position_embeddings = max_length + offset
        logger.info("position table extended from %d to %d", room, max_length + offset)


def _first_position(hf_config: PretrainedConfig) -> int:
    """The row of the position table that belongs to the first token of a window."""
    if hf_config.model_type == "mpnet":
        return 2  # these families always use padding id 1, whatever the configuration says
    return hf_config.pad_token_id + 1 if hf_config.model_type in _POSITIONS_BEHIND_PADDING else 0


def _dropout_names(hf_config: PretrainedConfig) -> list[str]:
    return [
        name
        for name, value in hf_config.to_dict().items()
        if "dropout" in name
        and "classif" not in name
        and isinstance(value, (int, float))
        and not isinstance(value, bool)  # ESM's token_dropout is a switch
    ]
