"""The student: a Hugging Face encoder, fresh or to be trained further, its family's prediction head, an output matrix.

Only the hidden states of masked positions go through the head. The encoder is initialised first, from a
generator of its own, so that its weights are the same for every objective with one seed.

Left out: the linear probe, saving (export.py).

Shapes: W windows, L positions, M masked tokens, d hidden width, K outputs.
"""

import hashlib
import inspect
import logging
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer, BertConfig
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

from shards.counter import hash_u64
from student.config import StudentConfig, heads_of, named_size
from student.errors import RunError

logger = logging.getLogger(__name__)

_HEAD_PURPOSE = 0x68656164  # "head"


class PredictionHead(nn.Module):
    """Dense, activation, norm: what stands between encoder and output matrix in BERT's relatives.

    Its sizes and its activation are those of the encoder's family.
    """

    def __init__(self, config, embedding_width: int):
        super().__init__()
        bias = getattr(config, "classifier_bias", True)      # ModernBERT has none
        norm_bias = getattr(config, "norm_bias", True)
        self.dense = nn.Linear(config.hidden_size, embedding_width, bias=bias)
        self.activation = ACT2FN[_head_activation(config)]
        self.norm = nn.LayerNorm(embedding_width, eps=_head_epsilon(config), bias=norm_bias)

    def forward(self, hidden_Md):
        return self.norm(self.activation(self.dense(hidden_Md)))


class Student(nn.Module):
    """Encoder, head and output matrix.

    tied  whether the output matrix is the token embedding (then K is the vocabulary)
    """

    def __init__(self, encoder: nn.Module, outputs: int, *, tied: bool, seed: int):
        super().__init__()
        embedding_width = encoder.get_input_embeddings().weight.shape[1]
        self.encoder = encoder
        with torch.random.fork_rng(devices=[]):    # modules are born with random weights, replaced below
            self.head = PredictionHead(encoder.config, embedding_width)
        self.output_Kd = None if tied else nn.Parameter(torch.empty(outputs, embedding_width))
        self.output_bias_K = nn.Parameter(torch.zeros(outputs))
        self._initialise_head(seed)

    def forward(self, input_WL, attention_WL, where_M):
        """Logits (M, K) of the masked positions.

        input_WL      int64 token ids
        attention_WL  int64, 0 at padding; None where nothing is padded
        where_M       int64 positions in the flattened (W L) input
        """
        hidden_WLd = self.encoder(input_ids=input_WL, attention_mask=attention_WL).last_hidden_state
        hidden_Md = hidden_WLd.flatten(0, 1)[where_M]
        return F.linear(self.head(hidden_Md), self.output_matrix, self.output_bias_K)

    @property
    def output_matrix(self):
        """The (K, d) output matrix."""
        return self.encoder.get_input_embeddings().weight if self.output_Kd is None else self.output_Kd

    def _initialise_head(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(int(hash_u64(_HEAD_PURPOSE, seed)))
        spread = getattr(self.encoder.config, "initializer_range", 0.02)
        nn.init.normal_(self.head.dense.weight, std=spread, generator=generator)
        if self.head.dense.bias is not None:
            nn.init.zeros_(self.head.dense.bias)
        if self.output_Kd is not None:
            nn.init.normal_(self.output_Kd, std=spread, generator=generator)


def build_student(config: StudentConfig, store, objective) -> Student:
    """The untrained student of a run, float32, on the CPU."""
    encoder = build_encoder(encoder_config(config, store), config.seed, config.continue_from)
    return Student(encoder, objective.outputs, tied=objective.tied, seed=config.seed)


def build_encoder(hf_config, seed: int, continue_from: Path | None = None) -> nn.Module:
    """An encoder without pooler: freshly initialised, a function of configuration and seed alone, or loaded.

    continue_from  directory whose weights to take
    Raises         RunError where these weights do not cover the encoder or do not fit it
    """
    model_class = MODEL_MAPPING[type(hf_config)]
    takes_pooler = "add_pooling_layer" in inspect.signature(model_class.__init__).parameters
    no_pooler = {"add_pooling_layer": False} if takes_pooler else {}
    if continue_from is not None:
        return _load_weights(continue_from, hf_config, no_pooler)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return AutoModel.from_config(hf_config, dtype=torch.float32, **no_pooler)


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


def _head_activation(config) -> str:
    for name in ("classifier_activation", "hidden_act", "activation"):
        if isinstance(getattr(config, name, None), str):
            return getattr(config, name)
    return "gelu"


def _head_epsilon(config) -> float:
    for name in ("layer_norm_eps", "norm_eps"):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return 1e-12


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
