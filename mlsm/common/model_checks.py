"""Check that transformers computes the model that a checkpoint was trained as, and can load its tokenizer.

If a checkpoint has unknown settings or unused weights, transformers at most warns and computes a different model. These
functions find both by their names, so that code that loads a model can refuse it. Weights missing from a checkpoint are
not handled here: the loading report of transformers lists them.
"""

import errno
import inspect
import json
import math
import re
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations, count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.common.disk import kind_of_file, open_to_read, read_file
from mlsm.common.errors import describe
from mlsm.common.invocation import program
from mlsm.common.paths import utf8_name
from mlsm.common.text import shell_quote

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Model families whose checkpoints were published with their own code before transformers included that code.
TAKEN_OVER = {"eurobert": ("configuration_eurobert", "modeling_eurobert")}
EXPORTED = "modeling_mlsm"  # the code in our own exports, which adds LSPs to what transformers computes
ADAPTER = "adapter_config.json"
MERGE = "Merge it into the model first (merge_and_unload of peft), and save that without the adapter."
# Buffers that older versions of transformers saved; every model recomputes them.
BUFFERS = ("position_ids", "token_type_ids", "rotary_emb.inv_freq", "rotary_emb.original_inv_freq")
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
MOST_BUFFERS = 1 << 24  # values that every model computes, such as positions
MOST_TOKEN_IDS = 1 << 24  # ten times the largest existing vocabulary
MOST_LABELS = 100_000  # four times the classes of the largest published classifiers
MOST_LAYERS = 1_024  # of a model whose weight files are small or elsewhere
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer", "encoder_layers", "decoder_layers")
_LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")


def describe_foreign_settings(config: "PretrainedConfig") -> str | None:
    """Name the setting of a config.json for which transformers would compute another model; None if there is none.

    config  a configuration of transformers
    """
    positions = getattr(config, "position_embedding_type", None)
    if positions not in (None, "absolute"):
        return (
            f"config.json asks for position_embedding_type {positions!r}, which transformers no longer computes: it "
            "would use absolute positions instead. Use a model with absolute positions."
        )
    spread = getattr(config, "initializer_range", 0.0)
    if not (isinstance(spread, int | float) and 0 <= spread < math.inf):
        return (
            f"config.json has initializer_range {spread!r}, expected a number of at least 0, by which new weights are "
            "drawn. Correct it."
        )
    if getattr(config, "quantization_config", None) is not None:
        return (
            "config.json says that the weights are quantised (quantization_config), and such weights are not read. Use "
            "the model as it was before, or load it with transformers, call its dequantize(), and save that."
        )
    named = getattr(config, "auto_map", None) or {}
    entries = [
        str(entry) for entry in _flat(named.values() if isinstance(named, dict) else [named]) if entry is not None
    ]
    known = (EXPORTED, *TAKEN_OVER.get(config.model_type, ()))  # in an entry such as `owner/name--modeling_x.XModel`
    own = [entry for entry in entries if entry.rpartition("--")[2].partition(".")[0] not in known]
    if own:
        return (
            f"config.json names code of its own (auto_map: {', '.join(own[:3])}), which is not run, and transformers' "
            f"own {config.model_type} may be a different model. Use a model without auto_map; if you know that this "
            "one is plain, remove auto_map from a copy of its config.json."
        )
    return None


def _flat(values):
    for value in values:
        yield from value if isinstance(value, list | tuple) else (value,)


def refuse_irregular(directory: str | Path) -> None:
    """Raise OSError if a model's directory has a pipe, a socket or a device, on which libraries would wait.

    directory  or, if there is no such directory, the name of a model on the Hub
    """
    for path in sorted(Path(directory).iterdir()) if Path(directory).is_dir() else ():
        status = path.stat() if path.exists() else path.lstat()
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise OSError(errno.EINVAL, f"it is {kind_of_file(status)}, not a file", str(path))


def refuse_references(source: str | Path, revision: str | None = None) -> None:
    """Raise ValueError if a file of a model has transformers read another one, inside its directory or outside.

    A fingerprint would not notice that file, or its content, a private one, would be taken for a vocabulary.

    source  a directory, or the name of a model on the Hub, of which files that are not yet in its cache are not checked
    """
    config, tokenizer, index = (
        _values(source, name, revision) for name in ("config.json", TOKENIZER_CONFIG, WEIGHTS_INDEX)
    )
    if "configuration_files" in config:
        raise ValueError("config.json leaves its settings to other files (configuration_files), which are not read")
    named = [name for name in ("vocab", "merges") if isinstance(tokenizer.get(name), str)]
    named += [name for name in ("init_inputs", "gguf_file") if tokenizer.get(name)]
    if named:
        raise ValueError(
            f"{TOKENIZER_CONFIG} names files or arguments of its own ({', '.join(named)}), which are not read"
        )
    parts = index.get("weight_map")
    for part in parts.values() if isinstance(parts, dict) else ():
        if isinstance(part, str) and Path(part).name != part:
            raise ValueError(f"{WEIGHTS_INDEX} names {part!r}, which is not a file of this directory")


def _values(source, name, revision):
    """The object in a JSON file; {} if the file is missing or holds something else, which its reader reports."""
    file: object = Path(source) / name
    if not Path(source).is_dir():
        from huggingface_hub import try_to_load_from_cache

        with suppress(ValueError):  # not a name on the Hub
            file = try_to_load_from_cache(str(source), name, revision=revision)
    try:
        values = json.loads(read_file(Path(file))) if isinstance(file, str | Path) and Path(file).is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}


def has_adapter(source: str | Path) -> bool:
    """Whether a model's directory has an adapter of peft, alone or beside the model."""
    return (Path(source) / ADAPTER).is_file()


def open_config(source: str | Path, **options: Any) -> "PretrainedConfig":
    """Read a model's configuration with transformers' AutoConfig; code in the model's directory is not run.

    source   a directory or the name of a model on the Hub
    options  of AutoConfig.from_pretrained
    Raises   whatever transformers raises for a damaged file, always an Exception; ValueError if the file describes more
             layers than its weights can belong to, since transformers would allocate all of them, or if there is an
             adapter, which transformers would add to the weights where peft is installed
    """
    from transformers import AutoConfig  # here, because the rest of this file is quick to import

    refuse_irregular(source)
    refuse_references(source)
    if has_adapter(source):
        raise ValueError(f"{ADAPTER} is there, and whether libraries apply an adapter depends on them. {MERGE}")
    if (file := Path(source) / "config.json").is_file():
        check_counts(json.loads(read_file(file)), Path(source))
    config = AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    if not Path(source).is_dir():
        refuse_references(source, options.get("revision"))  # now that it is downloaded
    return config


def check_counts(values: object, directory: Path) -> None:
    """Raise ValueError if a config.json has more layers than the weights allow, or more labels than any known model."""
    if not isinstance(values, dict):
        return
    for name in ("num_labels", "id2label", "label2id"):
        found = values.get(name)
        count = len(found) if isinstance(found, dict) else found
        if isinstance(count, int | float) and count > MOST_LABELS:
            raise ValueError(f"config.json has {count:,} labels ({name}); at most {MOST_LABELS:,} are expected")
    for name in _LAYERS:
        layers = values.get(name)
        if isinstance(layers, int | float) and layers > MOST_LAYERS and layers > (most := _tensors(directory)):
            raise ValueError(f"config.json says {layers:,} layers ({name}), and the weights are {most:,} tensors")
    for inner in values.values():
        check_counts(inner, directory)


def open_tokenizer(directory: str | Path, **options: Any) -> "PreTrainedTokenizerBase":
    """Load a directory's tokenizer with transformers' AutoTokenizer, without dropout; code in the directory is not run.

    options  of AutoTokenizer.from_pretrained
    Raises   whatever transformers and tokenizers raise for a damaged file, always an Exception
    """
    from transformers import AutoTokenizer  # here, because the rest of this file is quick to import

    refuse_irregular(directory)
    refuse_references(directory)
    _check_token_ids(Path(directory))
    with catch_panics(), utf8_name(directory) as place:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False, **options)
    if not Path(directory).is_dir():
        refuse_references(directory, options.get("revision"))  # now that it is downloaded
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    if model is not None and getattr(model, "dropout", None):  # of BPE: it splits words at random
        model.dropout = None
    return tokenizer


@contextmanager
def catch_panics() -> Iterator[None]:
    """Turn a panic of a Rust library, which is not a subclass of Exception, into a RuntimeError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(describe(error)) from None


def _check_token_ids(directory):
    """Raise ValueError if a tokenizer.json has a token id of MOST_TOKEN_IDS or more.

    The tokenizers library allocates memory for every id up to the largest, and aborts the process if memory runs out.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    values = json.loads(read_file(file))
    model = values.get("model") if isinstance(values, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    ids += [added.get("id") for added in values.get("added_tokens") or [] if isinstance(added, dict)] if model else []
    if largest := max((id for id in ids if isinstance(id, int) and id >= MOST_TOKEN_IDS), default=None):
        raise ValueError(f"tokenizer.json has a token id of {largest:,}; at most {MOST_TOKEN_IDS - 1:,} is expected")


def describe_unfit_tokenizer(tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel") -> str | None:
    """Why a model cannot read a tokenizer's output; None if it can.

    All ids that the tokenizer can produce, including those it adds around a text, must have token embeddings. Its
    segment ids must have segment embeddings.
    """
    try:
        with catch_panics():
            pair = tokenizer("a", "\ue000", return_token_type_ids=True, verbose=False)  # in hardly any vocabulary
            largest = max([*tokenizer.get_vocab().values(), *pair["input_ids"]], default=-1)
            segment = max(pair["token_type_ids"], default=0)
    except Exception as error:  # tokenizers may raise any, even Exception itself
        return f"the tokenizer cannot read a text ({describe(error)})."
    known = model.get_input_embeddings().num_embeddings
    if largest >= known:
        return f"the tokenizer's ids go up to {largest}, but the model has {known} words."
    segments = getattr(model.config, "type_vocab_size", 0)
    if segment >= max(2, segments):
        return f"the tokenizer's segments go up to {segment}, but the model has {segments}."
    return None


def describe_special_tokens(tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Why the special tokens of a tokenizer cannot be used; None if they can.

    Two tokens must not share an id. transformers gives a special token that is not in the vocabulary the id
    `len(vocabulary)`, which an ordinary word has if the ids have gaps. One token must not have two roles, except that
    the padding token may also be the token that ends a text (as in EuroBERT). A special token must not be a word that
    occurs in texts.
    """
    tokens_of: dict[int, list[str]] = {}
    for token, number in tokenizer.get_vocab().items():
        tokens_of.setdefault(number, []).append(token)
    for number, same in sorted(tokens_of.items()):
        if len(same) > 1:
            first, second = sorted(same)[:2]
            return f"the tokens {first!r} and {second!r} have the same id, {number}."
    tokens = special_tokens(tokenizer)
    for (role, token), (other, other_token) in combinations(tokens.items(), 2):
        if token == other_token and (role, other) != ("sep", "pad"):
            return f"the tokens for {role} and {other} are the same, {token!r}."
    for role, token in tokens.items():
        word = token.removeprefix("\u2581").removeprefix("\u0120")
        if not word.isalnum():
            continue
        read = tokenizer(f"a {word} a", add_special_tokens=False, split_special_tokens=True, verbose=False)
        if tokenizer.convert_tokens_to_ids(token) in read["input_ids"]:
            return f"the token for {role} is an ordinary word, {word!r}, which texts contain."
    return None


def lsp_tokens(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The ids of the tokens [MASK-0], [MASK-1], ... in this order; empty if there are none.

    The official MLSM code adds them to a tokenizer, one for each LSP. The output layer of such a checkpoint predicts
    words and LSPs, each with its own softmax.
    """
    vocabulary = tokenizer.get_vocab()
    return list(takewhile(lambda id: id is not None, (vocabulary.get(f"[MASK-{i}]") for i in count())))


def describe_unsplit(tokenizer: "PreTrainedTokenizerBase", directory: str | Path) -> str | None:
    """Say that a model with this tokenizer gives no word probabilities: it is a checkpoint of the official code."""
    if lsps := lsp_tokens(tokenizer):
        return (
            f"{directory} is a checkpoint of the official MLSM code: one output layer predicts words and "
            f"{len(lsps):,} LSPs, so its probabilities of words are not those that it learned. Split it, and use the "
            f"export:  {program()} import-student {shell_quote(directory)}"
        )
    return None


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> dict[str, str]:
    """Tokens by role (cls, sep, mask, pad, unk), without roles that no token has. If a tokenizer has no [CLS] or [SEP],
    its begin- and end-of-sequence tokens are used.
    """
    found = {
        "cls": tokenizer.bos_token if tokenizer.cls_token is None else tokenizer.cls_token,
        "sep": tokenizer.eos_token if tokenizer.sep_token is None else tokenizer.sep_token,
        "mask": tokenizer.mask_token,
        "pad": tokenizer.pad_token,
        "unk": tokenizer.unk_token,
    }
    return {role: str(token) for role, token in found.items() if token is not None}


def without_pooler(config: "PretrainedConfig") -> dict:
    """The argument that keeps AutoModel from adding a pooler, for families that have one."""
    parameters = inspect.signature(_bare_class(config).__init__).parameters
    return {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}


def token_types(config: "PretrainedConfig") -> int:
    """How many segments (token types) an encoder with this configuration can distinguish; 0 if it has none."""
    forward = getattr(_bare_class(config), "forward", None)  # of a family of several models there is none
    takes_them = forward is not None and "token_type_ids" in inspect.signature(forward).parameters
    return getattr(config, "type_vocab_size", 0) if takes_them else 0


def _bare_class(config):
    from transformers import MODEL_MAPPING  # here, because the rest of this file is quick to import

    return MODEL_MAPPING[type(config)]


def max_positions(model: "PreTrainedModel") -> float:
    """The longest input of a transformers model, with or without a head: number of tokens including special ones."""
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    if table is None:  # relative or rotary positions
        return getattr(model.config, "max_position_embeddings", None) or math.inf
    # RoBERTa and similar models number positions from padding_idx + 1
    offset = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - offset


def check_size(
    model_class: type | tuple[type, ...], config: "PretrainedConfig", directory: str | Path, **options: Any
) -> None:
    """Raise ValueError if a config.json describes more parameters than the weight files have bytes.

    transformers would allocate the parameters and initialise them at random before it reports that they are missing.

    model_class, config, options  a class of transformers, and the arguments to build it with
    directory                     has model.safetensors, an index of several files, or a checkpoint's
                                  student.safetensors; without these files nothing is compared
    """
    import torch  # here, because the rest of this file is quick to import

    directory = Path(directory)
    refuse_irregular(directory)
    size = sum(file.stat().st_size for file in weight_files(directory))
    if not size:
        return
    build: Callable = model_class[0] if isinstance(model_class, tuple) else model_class  # the largest of several
    check_counts(config.to_dict(), directory)
    with torch.device("meta"):  # shapes without memory
        model = build(config, **options)
    parameters, buffers = (sum(values.numel() for values in found()) for found in (model.parameters, model.buffers))
    if parameters > size:
        raise ValueError(f"config.json describes {parameters:,} parameters, and the weights have {size:,} bytes")
    if buffers > size + MOST_BUFFERS:
        raise ValueError(f"config.json describes buffers of {buffers:,} values, and the weights have {size:,} bytes")


def weight_files(directory: Path, whole: Iterable[str] = (WEIGHTS, "student.safetensors")) -> list[Path]:
    """The safetensors files that transformers or our code would load; empty if one of them is missing.

    whole  names of files that hold all weights; without such a file, the parts in the index are taken
    """
    try:
        names = {name for name in whole if (directory / name).is_file()}
        if not names:
            names = set(json.loads(read_file(directory / WEIGHTS_INDEX))["weight_map"].values())
        files = [directory / name for name in sorted(names)]
        return files if all(file.is_file() for file in files) else []
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def load_tensors(file: str | Path) -> dict:
    """Tensors by name of a safetensors file."""
    from safetensors.torch import load_file  # here, because the rest of this file is quick to import

    file = Path(file)
    open_to_read(file).close()  # refuses a pipe, for which reading would wait
    with utf8_name(file.parent) as place:
        return load_file(place / file.name)


def _tensors(directory):
    """Count the tensors in a directory's weight files, from the files' headers."""
    count = 0
    for file in weight_files(directory):
        with open_to_read(file) as opened, suppress(ValueError, RecursionError):
            length = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(length)) if length < file.stat().st_size else {}
            count += len(header) if isinstance(header, dict) else 0
    return count


def unused_encoder_weights(unexpected: Iterable[str], model: "PreTrainedModel") -> list[str]:
    """Names of encoder weights in the checkpoint that the model does not use; sorted.

    Ignored: weights of heads, of a pooler and of layers above the model's last, and buffers of older versions.

    unexpected  names, as in the loading report of transformers
    model       of transformers, with a head or without
    """
    encoder = model.base_model
    parts = {name for name, _ in encoder.named_children()} - {"pooler"}
    found = []
    for name in unexpected:
        path = name.removeprefix(f"{encoder.base_model_prefix}.")
        layer = _LAYER.search(path)
        above = layer is not None and int(layer[1]) >= encoder.config.num_hidden_layers
        if path.partition(".")[0] in parts and not above and not path.endswith(BUFFERS):
            found.append(name)
    return sorted(found)


def describe_unused_weights(unexpected: Iterable[str], model: "PreTrainedModel") -> str | None:
    """What `unused_encoder_weights` found, in a sentence; None if nothing."""
    if not (names := unused_encoder_weights(unexpected, model)):
        return None
    examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return (
        f"the checkpoint holds {len(names)} weights that a {model.config.model_type} encoder of transformers has no "
        f"place for ({examples}), so transformers would compute a different model. Use a model that was saved by "
        "transformers; adapters must be merged first (merge_and_unload of peft)."
    )


_verbosity_lock = threading.Lock()
_verbosities: list[tuple[int, bool, bool]] = []  # as each block under way found them; the first are the caller's


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from drawing progress bars and from listing unused weights, until the last such block ends.

    A teacher that is cut after a layer leaves many weights unused, and an encoder leaves those of a head.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars
    from transformers.utils import logging

    with _verbosity_lock:
        bars, hub_bars = logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
        _verbosities.append((logging.get_verbosity(), bars, hub_bars))
        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        yield
    finally:
        with _verbosity_lock:
            verbosity, bars, hub_bars = _verbosities.pop()
            if not _verbosities:
                logging.set_verbosity(verbosity)
                if bars:
                    logging.enable_progress_bar()
                if not hub_bars:  # transformers' switch also switches the Hub's
                    disable_progress_bars()
