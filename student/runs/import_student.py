"""Convert checkpoints of the official MLSM code into exports of this package.

    import_student(ImportStudentConfig(model="checkpoints/100000"))    # {"export": "runs/exports/100000", ...}

`pretrainer.py` of szegedai/MLSM (commit ed9a781) adds a token [MASK-i] for each of the k atoms to the tokenizer,
resizes the model, and saves it as a *ForMaskedLM. Its output layer then has V + k rows: V words, then k LSPs. In
training the two parts have separate softmaxes: one over the last k logits (LSPs), one over the first V (words).
Stock programs take one softmax over all rows, which was never trained. So the checkpoint is split here:

    encoder       without the k rows of its token embeddings, which no text uses
    LSP head      dense and norm of the checkpoint's head, and the last k rows of its output layer
    word head     the first V rows, only if they were trained (--mlm_weight above 0). If they were not, their biases are
                  all zero, as they were when training began; such a student is exported as our mlsm students are
    tokenizer     without the tokens [MASK-i]

Not handled here: ELECTRA's replaced token detection (--rtd) and symbols of a knowledge base (--kb_file), which are not
LSPs; the origin of the LSPs (the checkpoint names neither dictionary nor teacher).

Shapes: V words, k LSPs, R rows of the output layer, d width of the head's output.
"""

import copy
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from huggingface_hub import ModelCardData, snapshot_download
from torch import Tensor
from transformers import MODEL_FOR_MASKED_LM_MAPPING, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from mlsm.common.device import spare_randomness
from mlsm.common.disk import file_sha256, open_to_read, read_file
from mlsm.common.durable import publish_directory
from mlsm.common.errors import ModelError, RunError, describe
from mlsm.common.json_checks import parse_json
from mlsm.common.model_checks import (
    BUFFERS,
    describe_foreign_settings,
    describe_special_tokens,
    describe_unused_weights,
    load_tensors,
    lsp_tokens,
    max_positions,
    open_config,
    open_tokenizer,
    quiet_transformers,
    special_tokens,
)
from mlsm.common.paths import utf8, utf8_name
from mlsm.common.progress import silent
from mlsm.common.text import code_span, markdown_text, printable
from shards.copies import TOKENIZER_FILES, write_files
from shards.manifest import MAX_WIDTH
from student.encoders.modeling_mlsm import LspHead, save_head
from student.encoders.stock import HEAD_LAYOUTS, has_known_head, ignores_activation
from student.runs.config import ImportStudentConfig
from student.runs.export import (
    LINEAGE_FILE,
    LSP_LOADING,
    as_trained,
    auto_loading,
    check_export_place,
    lsps_in_transformers,
    write_code,
    writing,
)
from student.runs.export_run import EXPORTS

_HUB_FILES = ["config.json", "*.safetensors", "*.safetensors.index.json", "pytorch_model*", *TOKENIZER_FILES]
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the file, or with .index.json for several files
_REMEDY = "Give a checkpoint that pretrainer.py of szegedai/MLSM saved with --dict_file."


class _Parts(NamedTuple):
    """A checkpoint of the official code, split."""

    stock: PreTrainedModel
    """the *ForMaskedLM over the V words"""
    head: LspHead
    predicts_words: bool
    """whether the rows of the words were trained as outputs"""


def import_student(config: ImportStudentConfig, progress: Callable[..., None] = silent) -> dict:
    """Split a checkpoint of the official code into encoder, LSP head and word head, and write these as an export.

    Returns  model, export, family, words (V), lsps (k), predicts_words, max_length
    Raises   ModelError if it is not such a checkpoint or cannot be read; RunError if the output is in use; WriteError
    """
    assert config.model is not None  # the settings refuse it
    output = config.output or EXPORTS / Path(os.path.abspath(config.model)).name
    check_export_place(output)
    directory = _find(config.model)
    hf_config = _read_config(directory)
    weights = _read_weights(directory)
    tokenizer, tokenizer_files, words, named = _read_tokenizer(directory)
    parts = _split(directory, hf_config, weights, words, named)
    room = max_positions(parts.stock)
    if config.max_length > room:
        raise ModelError(f"{directory} reads at most {room} tokens. Give --max-length, at most that.")
    facts = {
        "lsps": parts.head.output.out_features,
        "max_length": config.max_length,
        "special_ids": _special_ids(directory, tokenizer),
        "positions": "masked",
        "dictionary": None,
        "store": None,
    }
    report = {
        "model": config.model,
        "export": str(output),
        "family": hf_config.model_type,
        "words": words,
        "lsps": facts["lsps"],
        "predicts_words": parts.predicts_words,
        "max_length": config.max_length,
    }
    read = [directory / "config.json", *_weight_files(directory)]
    imported = {"model": config.model, "sha256": {path.name: file_sha256(path) for path in read}}
    lineage = {
        "objective": "mtl" if parts.predicts_words else "mlsm",
        "imported": imported,
        "store": {"windowing": {"max_length": config.max_length}},
    }

    if config.output is None and (output / LINEAGE_FILE).is_file():  # names may be steps, equal in all runs
        held = parse_json(read_file(output / LINEAGE_FILE), output / LINEAGE_FILE).get("imported") or {}
        if held.get("sha256") != imported["sha256"]:
            raise RunError(
                f"{output} holds an export of {held.get('model', 'something else')}. Nothing was changed. Give another"
                f" --output."
            )

    def write(place: Path) -> None:
        with quiet_transformers():
            (parts.stock if parts.predicts_words else parts.stock.base_model).save_pretrained(place)
        save_head(parts.head, facts, place)
        write_files(place, as_trained(tokenizer_files, config.max_length, segments=False))
        write_code(place)
        (place / LINEAGE_FILE).write_bytes(utf8(json.dumps(lineage, indent=1, sort_keys=True) + "\n"))
        (place / "README.md").write_text(_card(report), encoding="utf-8")

    with writing(output):
        publish_directory(output, write)
    return report


def _find(model: str) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except Exception as error:  # the error classes differ between huggingface_hub's versions
        raise ModelError(
            f"no such checkpoint: {model} is not a directory, and neither the Hub nor its cache has it"
            f" ({type(error).__name__}). {_REMEDY}"
        ) from error


def _read_config(directory: Path) -> PretrainedConfig:
    """The checkpoint's configuration. Raises ModelError if it names code or its family's head is not supported."""
    try:
        config = open_config(directory)
    except Exception as error:  # transformers raises many classes for a damaged one
        raise ModelError(f"{directory} holds no model: {describe(error)}. {_REMEDY}") from None
    if trouble := describe_foreign_settings(config):
        raise ModelError(f"{directory}: {trouble}")
    if "ForPreTraining" in str(config.architectures):
        raise ModelError(f"{directory} was trained to find replaced tokens (--rtd): it has no LSPs. {_REMEDY}")
    if ignores_activation(config):
        raise ModelError(
            f"{directory}: its hidden_act is {config.hidden_act}, and the head of a {config.model_type} always computes"
            f" gelu, so its LSPs cannot be split off."
        )
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or not has_known_head(config):
        known = ", ".join(sorted(HEAD_LAYOUTS))
        raise ModelError(
            f"{directory} is a {config.model_type}, whose masked-LM head is not known here. Known are those of {known}."
        )
    config.output_hidden_states = False  # the official code sets it if a student is its own teacher
    return config


def _weight_files(directory: Path) -> list[Path]:
    """The checkpoint's weight files: safetensors if there are any, else pickles."""
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return [directory / name]
        index = directory / f"{name}.index.json"
        if index.is_file():
            listed = parse_json(read_file(index), index).get("weight_map", {}).values()
            return [directory / Path(part).name for part in sorted(set(listed))]
    raise ModelError(f"{directory} has no weights: expected {' or '.join(_WEIGHTS)}. {_REMEDY}")


def _read_weights(directory: Path) -> dict[str, Tensor]:
    """All tensors by name, float32. Only tensors are read from a pickle: code in it is not run."""
    weights: dict[str, Tensor] = {}
    for path in _weight_files(directory):
        try:
            if path.suffix == ".safetensors":
                weights |= load_tensors(path)
            else:
                with open_to_read(path) as file:
                    weights |= torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # of torch, pickle and safetensors, of many classes
            raise ModelError(
                f"{path} cannot be read as weights: {describe(error)}. Fetch it again; a pickle that holds more than"
                f" tensors is not loaded."
            ) from error
    tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor)}
    return {name: tensor.float() for name, tensor in tensors.items() if not name.endswith(BUFFERS)}


def _read_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerBase, dict[str, bytes], int, int]:
    """Remove the tokens of the LSPs; returns the tokenizer, its files, V, and the number of removed tokens.

    Raises  ModelError if these tokens are not the last ones
    """
    try:
        tokenizer = open_tokenizer(directory)
    except Exception as error:  # of tokenizers and transformers, of many classes
        raise ModelError(f"{directory}: its tokenizer cannot be read: {describe(error)}. {_REMEDY}") from None
    ids = lsp_tokens(tokenizer)
    words = max(tokenizer.get_vocab().values()) + 1 - len(ids)
    if ids != list(range(words, words + len(ids))):
        raise ModelError(
            f"{directory}: expected the tokens [MASK-0], [MASK-1], ... of the LSPs to have the last ids of the"
            f" tokenizer, in this order, from {words} on. {_REMEDY}"
        )
    with TemporaryDirectory() as temporary, utf8_name(temporary) as place:
        tokenizer.save_pretrained(place)
        files = {name: (Path(place) / name) for name in TOKENIZER_FILES}
        contents = {name: read_file(path) for name, path in files.items() if path.is_file()}
        for name in contents:
            if name.endswith(".json") and name != "vocab.json":
                value = _without_lsps(json.loads(contents[name]))
                contents[name] = utf8(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
                (Path(place) / name).write_bytes(contents[name])
        rest = open_tokenizer(place)
    kept = {token: number for token, number in tokenizer.get_vocab().items() if number < words}
    if trouble := describe_special_tokens(rest):
        raise ModelError(f"{directory}: {trouble} {_REMEDY}")
    if rest.get_vocab() != kept:
        raise ModelError(f"{directory}: its tokenizer cannot be had without the tokens [MASK-i]. {_REMEDY}")
    return rest, contents, words, len(ids)


def _without_lsps(value: Any) -> Any:
    """A JSON value without the entries of lists and objects that name a token [MASK-i], as value or key."""
    if isinstance(value, Mapping):
        return {name: _without_lsps(part) for name, part in value.items() if not _names_lsp(name, part)}
    if isinstance(value, list):
        return [_without_lsps(part) for part in value if not _names_lsp(None, part)]
    return value


def _names_lsp(name: str | None, part: Any) -> bool:
    content = part.get("content") if isinstance(part, Mapping) else part
    return any(isinstance(text, str) and re.fullmatch(r"\[MASK-\d+\]", text) is not None for text in (name, content))


def _split(directory: Path, config: PretrainedConfig, weights: dict[str, Tensor], words: int, named: int) -> _Parts:
    model_class = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    config = copy.deepcopy(config)
    config.vocab_size = words
    with torch.device("meta"):
        shape = model_class(config)
    decoder = next(name for name, module in shape.named_modules() if module is shape.get_output_embeddings())
    embedding = next(name for name, module in shape.named_modules() if module is shape.get_input_embeddings())
    bias_names = [f"{decoder}.bias", f"{decoder.rpartition('.')[0]}.bias"]
    embeddings = weights.get(f"{embedding}.weight")
    matrix_Rd = weights.get(f"{decoder}.weight", embeddings)
    if matrix_Rd is None or embeddings is None:
        raise ModelError(f"{directory}: its weights have no token embeddings, {embedding}.weight. {_REMEDY}")
    declared = sum(parameter.numel() for parameter in shape.parameters())
    found = sum(tensor.numel() for tensor in weights.values())
    if declared > 2 * found:  # before memory is allocated for them
        raise ModelError(
            f"{directory}: its config.json describes a model of {declared:,} parameters, but its weights have"
            f" {found:,}. {_REMEDY}"
        )
    rows = len(matrix_Rd)
    bias_R = next((weights[name] for name in bias_names if len(weights.get(name, ())) == rows), torch.zeros(rows))
    lsps = rows - words
    if lsps <= 0:
        raise ModelError(
            f"{directory}: its output layer has {rows:,} rows for the {words:,} words of its tokenizer, so none for"
            f" LSPs. A plain masked language model needs no import. {_REMEDY}"
        )
    if named != lsps or lsps > MAX_WIDTH:
        raise ModelError(
            f"{directory}: its output layer has {rows:,} rows, expected {words:,} words and one of each of the"
            f" {named:,} tokens [MASK-i], which are {words + named:,}. {_REMEDY}"
        )
    if not bias_R[words:].any():
        raise ModelError(
            f"{directory}: the biases of the {lsps:,} rows after the words are all zero, so these were not trained."
            f" {_REMEDY}"
        )
    if len(embeddings) not in (words, rows):
        raise ModelError(
            f"{directory}: its token embeddings have {len(embeddings):,} rows, expected {words:,} or {rows:,}."
            f" {_REMEDY}"
        )
    of_words = {name: tensor for name, tensor in weights.items() if name not in (f"{decoder}.weight", *bias_names)}
    of_words |= {f"{embedding}.weight": embeddings[:words], f"{decoder}.weight": matrix_Rd[:words]}
    of_words |= {name: bias_R[:words].clone() for name in bias_names if name in shape.state_dict()}  # two if untied
    config.tie_word_embeddings = torch.equal(embeddings[:words], matrix_Rd[:words])
    stock = _load_words(directory, model_class, config, of_words)
    dense, norm = (stock.get_submodule(name) for name in HEAD_LAYOUTS[config.model_type])
    head = LspHead(stock.config, matrix_Rd.shape[1], lsps)
    head.load_state_dict(
        {f"dense.{name}": tensor for name, tensor in dense.state_dict().items()}
        | {f"norm.{name}": tensor for name, tensor in norm.state_dict().items()}
        | {"output.weight": matrix_Rd[words:], "output.bias": bias_R[words:]}
    )
    return _Parts(stock.eval(), head, predicts_words=bool(bias_R[:words].any()))


def _load_words(directory: Path, model_class: Any, config: PretrainedConfig, weights: dict) -> PreTrainedModel:
    """The *ForMaskedLM of V words, loaded by transformers, which also accepts older names of weights."""
    try:
        with quiet_transformers(), spare_randomness():
            stock, report = model_class.from_pretrained(
                None, config=config, state_dict=weights, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:  # transformers raises many classes
        raise ModelError(
            f"{directory}: its weights do not fit its config.json: {describe(error)}. {_REMEDY}"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(f"{directory}: its weights lack {', '.join(missing[:3])}. {_REMEDY}")
    if trouble := describe_unused_weights(report["unexpected_keys"], stock):
        raise ModelError(f"{directory}: {trouble}")
    return stock


def _special_ids(directory: Path, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    tokens = special_tokens(tokenizer)
    if lacking := [role for role in ("pad", "cls", "sep", "mask") if role not in tokens]:
        raise ModelError(f"{directory}: its tokenizer has no token for {', '.join(lacking)}. {_REMEDY}")
    return {role: int(tokenizer.convert_tokens_to_ids(tokens[role])) for role in ("pad", "cls", "sep", "mask")}


def _card(report: dict) -> str:
    predicts_words, title = report["predicts_words"], f"{report['family']} encoder pre-trained with MLSM, imported"
    is_on_hub = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", report["model"]) and not Path(report["model"]).is_dir()
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="fill-mask" if predicts_words else "feature-extraction",
        tags=["mlsm", "masked-latent-semantic-modeling"],
        base_model=report["model"] if is_on_hub else None,
        model_name=title,
    )
    source = report["model"] if is_on_hub else Path(report["model"]).name
    words = (
        "The words have biases, so they were trained as outputs, here or in the model that training began with."
        if predicts_words
        else "The rows of the words were not trained (their biases are zero), so they were left out."
    )
    sections = [
        f"---\n{printable(data.to_yaml())}\n---",
        f"# {markdown_text(title)}\n\nA checkpoint of the official MLSM code (szegedai/MLSM), {code_span(source)},"
        f" split by `mlsm import-student`: its one output layer has {report['words']:,} rows of words and"
        f" {report['lsps']:,} of latent semantic properties (LSPs). {words} The checkpoint"
        f" does not say which dictionary and teacher the LSPs are from. Its licence is that of the checkpoint.",
        f"## Loading\n\n{auto_loading('AutoModelForMaskedLM' if predicts_words else 'AutoModel')}\n\n{LSP_LOADING}",
        f"## With transformers only\n\n{lsps_in_transformers('masked')}",
    ]
    return "\n\n".join(sections) + "\n"
