"""The model cut off after layer l.

`Teacher` builds and loads only the embeddings and layers 1 ... l; its result equals `hidden_states[l]` of the whole
model. Two measures make this true for more families than BERT. Settings with one value per layer are cut with the
layers. And if a family ends in its own norm (ModernBERT), only l = L has that norm, since `hidden_states[l]` of a lower
layer is before it. Not handled here: the masked-LM head (masked_lm.py).

Shapes: W windows, L ids per window, d hidden width. Layers count from 1; the full model has num_layers.
"""

import copy
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_MAPPING

from mlsm.common.device import choose_device
from mlsm.common.disk import read_file
from mlsm.common.documents import accept_pairwise_mask, attention_inputs, why_not_apart
from mlsm.common.errors import EncodeError, TeacherError, describe
from mlsm.common.matrix_products import TORCH, USUAL, Shape, find_way, measure_libraries
from mlsm.common.model_checks import (
    MERGE,
    check_size,
    describe_foreign_settings,
    describe_unused_weights,
    has_adapter,
    max_positions,
    open_config,
    quiet_transformers,
    token_types,
    without_pooler,
)
from mlsm.common.paths import utf8_name
from pipeline.teacher.location import fingerprint, locate, require_weight_files

if TYPE_CHECKING:
    import numpy as np
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# Supported families: for each one, a test compares every layer of the cut model with the full one.
FAMILIES = (
    "bert",
    "camembert",
    "deberta",
    "deberta-v2",
    "distilbert",
    "electra",
    "eurobert",
    "modernbert",
    "mpnet",
    "roberta",
    "xlm-roberta",
)
FINAL_NORM = {"eurobert": "norm", "modernbert": "final_norm"}  # attribute of the model, applied after layer L
PER_LAYER_SETTINGS = ("layer_types", "mlp_layer_types")  # configuration lists with one entry per layer
CACHED_NUMBERS = 2**19  # tokens times width of a forward pass on a CPU, whose tensors then fit the cache (docs/log.md)
ROTARY = ("eurobert", "modernbert")  # families that rotate queries and keys by position and add nothing to the input
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Teacher:
    """An encoder cut off after one layer, ready to run on unmasked text.

    name           the name as it was given
    layer          l, 1 ... num_layers
    num_layers     layers of the full model
    hidden_size    d
    vocab_size     rows of the embedding; every id must be smaller
    max_positions  longest window, in tokens including the specials
    segments       number of token types with embeddings; 0 if the family has none
    fingerprint    hex sha256 of the content of configuration and weights (not of name, layer or dtype)
    dtype, device  of the computation; the result is float32 regardless of the dtype
    libraries      libraries of its linear layers on a CPU, if they are not all oneDNN
    """

    def __init__(self, name: str, layer: int, num_layers: int, model: "PreTrainedModel", fingerprint: str):
        self.name, self.layer, self.num_layers = name, layer, num_layers
        self.fingerprint = fingerprint
        self.hidden_size = model.config.hidden_size
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.max_positions = max_positions(model)
        self.segments = token_types(model.config)
        self.dtype, self.device = model.dtype, model.device
        self._model = model
        accept_pairwise_mask(model)
        self._use_libraries(USUAL)

    @classmethod
    def load(
        cls, name_or_path: str | Path, layer: int, *, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> "Teacher":
        """Load layers 1 ... layer of a teacher.

        name_or_path  a directory, "bundled", or the name of a model on the Hub (see `locate`)
        layer         1 ... L
        dtype         "float32", "bfloat16", "float16", or "auto": float16 on a GPU, float32 elsewhere. The
                      checkpoint's own dtype is never used
        device        a torch device, or "auto": the GPU if there is one
        Raises        TeacherError if the teacher is not found, does not fit or has no such layer; DeviceError
        """
        directory = locate(name_or_path)
        config = read_config(directory, name_or_path)
        _check_layer(layer, config.num_hidden_layers, name_or_path)
        device = choose_device(device)
        model = _load_cut(directory, config, layer, torch_dtype(dtype, device), name_or_path)
        return cls(
            name=str(name_or_path),
            layer=layer,
            num_layers=config.num_hidden_layers,
            model=model.to(device),
            fingerprint=fingerprint(directory, name_or_path),
        )

    def in_float32(self) -> "Teacher":
        """The same teacher, loaded once more in float32, on the same device: to measure what its dtype changes."""
        return Teacher.load(self.name, self.layer, dtype="float32", device=self.device)

    def choose_libraries(
        self, setting: str, tokens: int, length: int, decided: Mapping[str, str] | None = None
    ) -> None:
        """Choose the library of each matrix product, as `--products` says.

        tokens   largest number of tokens in a call
        length   of its windows
        decided  the choice of another process that shares its work with this one, if there is one
        """
        if decided is None and self._is_served() and setting == "auto":
            decided = measure_libraries(self._shapes(tokens, length), ["forward"])
        elif decided is None:
            decided = TORCH if setting == "torch" else {}
        self._use_libraries(decided)

    def _use_libraries(self, libraries: Mapping[str, str]) -> None:
        self.libraries = libraries if self._is_served() else USUAL
        for module in self._all_layers() if self._is_served() else ():
            if type(module) in (torch.nn.Linear, _FastLinear):  # another subclass may compute something else
                module.__class__, module.libraries = _FastLinear, libraries

    def _is_served(self) -> bool:
        return self.device.type == "cpu" and self.dtype == torch.float32

    @property
    def embeddings_Vd(self) -> "np.ndarray":
        """The teacher's input embedding of every vocabulary entry, float32, on the host."""
        return self._model.get_input_embeddings().weight.detach().float().cpu().numpy()

    def _all_layers(self) -> Iterable[torch.nn.Module]:
        return self._model.modules()

    def _shapes(self, tokens: int, length: int) -> set[Shape]:
        """Shapes of the matrix products in a forward pass, when a call reads this many tokens on a CPU."""
        layers = [module for module in self._model.modules() if isinstance(module, _FastLinear)]
        rows = min(tokens, length * self._windows_of_a_pass(length))
        return {(rows, layer.in_features, layer.out_features) for layer in layers}

    def _windows_of_a_pass(self, length: int) -> int:
        """How many windows of a length a forward pass on a CPU reads, so that its tensors fit the cache."""
        return max(1, CACHED_NUMBERS // self.hidden_size // length)

    @torch.inference_mode()
    def __call__(
        self,
        ids_WL: torch.Tensor,
        attention_WL: torch.Tensor | None = None,
        tokens_N: torch.Tensor | None = None,
        layers: Sequence[int] | None = None,
        documents_WL: torch.Tensor | None = None,
        segments_WL: torch.Tensor | None = None,
    ) -> Any:
        """Hidden states of layer l, or of several layers up to it, for all tokens or some of them.

        ids_WL        int64, token ids including [CLS], [SEP] and padding
        attention_WL  bool, True at real tokens; every window holds at least one; None if all are real. On the host:
                      what is on a GPU is waited for
        tokens_N      int64, places in ids_WL counted row by row; the others are neither converted nor returned
        layers        numbers of layers from 1 to l; only l when not given
        documents_WL  int64, number of each token's document in its window, -1 at padding: the documents are read as
                      if each stood alone (mlsm/common/documents.py). None: a window is read as one text
        segments_WL   int64, token types below `segments`, as in transformers' token_type_ids; all 0 when not given
        Returns       hidden_WLd, meaningless at padding, or hidden_Nd; float32 on self.device, in inference mode. A
                      list of them, in the order of `layers`, when these are given: the same numbers, bit for bit, as
                      those of a teacher that is cut after that layer
        Raises        ValueError on shapes that do not match or windows longer than max_positions

        On a GPU the work is queued on the current stream, from pinned arguments without waiting for the copy.
        """
        if ids_WL.ndim != 2 or (attention_WL is not None and ids_WL.shape != attention_WL.shape):
            raise ValueError(
                "ids and attention must be two matrices of one shape (windows, tokens), "
                f"found {tuple(ids_WL.shape)} and {None if attention_WL is None else tuple(attention_WL.shape)}"
            )
        if ids_WL.shape[1] > self.max_positions:
            raise ValueError(
                f"windows of {ids_WL.shape[1]} tokens, but {self.name} reads at most {self.max_positions}: "
                f"use --max-length {self.max_positions} or less"
            )
        if attention_WL is not None and bool(attention_WL.all()):
            attention_WL = None  # full windows need no mask, and attention without a mask is faster
        inputs = {"ids": ids_WL, "attention": attention_WL, "documents": documents_WL, "segments": segments_WL}
        inputs = {name: self._to_device(tensor) for name, tensor in inputs.items() if tensor is not None}
        found = [self._states(layers, **part) for part in self._parts(inputs)]
        states = [torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True)]
        chosen = [self._choose(hidden_WLd, tokens_N) for hidden_WLd in states]
        return chosen[0] if layers is None else chosen

    def _parts(self, inputs):
        """The same inputs for each forward pass: on a CPU several of few windows, elsewhere one."""
        if self.device.type != "cpu":
            return [inputs]
        size = self._windows_of_a_pass(inputs["ids"].shape[1])
        split = [tensor.split(size) for tensor in inputs.values()]
        return [dict(zip(inputs, part, strict=True)) for part in zip(*split, strict=True)]

    def _states(self, layers, ids, attention=None, documents=None, segments=None):
        """Hidden states (W, L, d) of layer l, or of each of these layers."""
        attention = None if attention is None else attention.to(torch.int64)
        inputs = {"input_ids": ids, **attention_inputs(self._model, attention, documents)}
        if segments is not None:
            inputs["token_type_ids"] = segments
        if layers is None:
            return [self._model(**inputs)[0]]
        states = self._model(**inputs, output_hidden_states=True, return_dict=True).hidden_states
        return [states[layer] for layer in layers]

    def _choose(self, hidden_WLd, tokens_N):
        if tokens_N is None:
            return hidden_WLd.float()
        return hidden_WLd.flatten(0, 1).index_select(0, self._to_device(tokens_N)).float()

    def _to_device(self, tensor):
        return tensor.to(self.device, non_blocking=True)

    def check_tokenizer(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Raise TeacherError if the tokenizer can produce an id that the teacher has no embedding for."""
        largest = max(tokenizer.get_vocab().values())
        if largest >= self.vocab_size:
            raise TeacherError(
                f"{self.name}: its embedding has {self.vocab_size} rows, but the tokenizer's ids go up to "
                f"{largest}. Use the tokenizer that was saved with this model."
            )


def read_config(directory: Path, name: str | Path) -> "PretrainedConfig":
    """The configuration of a teacher. Raises TeacherError when it cannot be read, or its family is not a tested one."""
    file = directory / "config.json"
    if not file.exists():
        remedy = "Pass the directory of a whole model."
        if (inner := directory / "0_Transformer").is_dir():  # of an old SentenceTransformer
            remedy = f"Pass {inner}."
        elif has_adapter(directory):
            remedy = MERGE
        raise TeacherError(f"{name}: no config.json in {directory}. {remedy}")
    try:
        family = json.loads(read_file(file)).get("model_type")
        if family not in FAMILIES:
            raise TeacherError(
                f"{name}: models of type {family!r} cannot be cut, since no test compares their layers with "
                f"those of the full model. Choose a teacher of a type in: {', '.join(FAMILIES)}."
            )
        config = open_config(directory, local_files_only=True)
        check_settings(config, name)
        return config
    except TeacherError:
        raise
    except Exception as error:  # transformers' checks of a configuration raise classes of their own
        raise TeacherError(
            f"{name}: {file} cannot be read: {describe(error)}. Fetch or save the model again."
        ) from error


def check_settings(config: "PretrainedConfig", name: str | Path) -> None:
    """Raise TeacherError when transformers would compute another model than the one of this configuration, or when the
    model is a decoder."""
    if trouble := describe_foreign_settings(config):
        raise TeacherError(f"{name}: {trouble}")
    if getattr(config, "is_decoder", False):
        raise TeacherError(
            f"{name}: config.json says is_decoder, so each token sees only those before it. Use an encoder, or set "
            "is_decoder to false in a copy if the model was trained as one."
        )


def check_layers(name_or_path: str | Path, layers: Iterable[int]) -> None:
    """Raise TeacherError, from its configuration alone, when the teacher lacks one of the layers."""
    config = read_config(locate(name_or_path), name_or_path)
    for layer in layers:
        _check_layer(layer, config.num_hidden_layers, name_or_path)


def check_max_length(name_or_path: str | Path, max_length: int) -> None:
    """Raise EncodeError, from its configuration alone, when the teacher cannot read windows of so many tokens."""
    config = read_config(locate(name_or_path), name_or_path)
    try:
        with torch.device("meta"):  # shapes without memory
            model = MODEL_MAPPING[type(config)](cut_config(config, 1), **without_pooler(config))
    except Exception:  # a model that cannot be built: loading it says why
        return
    if max_length > (most := max_positions(model)):
        raise EncodeError(
            f"--max-length {max_length}, but {name_or_path} reads at most {most} tokens. Use --max-length {most} or "
            "less."
        )


def check_documents_apart(name_or_path: str | Path) -> None:
    """Raise TeacherError, from its configuration alone, when the teacher cannot keep documents of a window apart."""
    if (reason := why_not_apart(read_config(locate(name_or_path), name_or_path))) is not None:
        raise TeacherError(f"--documents-apart: {reason}")


def check_reads_masks(name_or_path: str | Path) -> None:
    """Raise TeacherError, from its configuration alone, when [MASK] does not enter the teacher at its first layer."""
    setting = getattr(read_config(locate(name_or_path), name_or_path), "mask_later", None)
    if setting is not None:
        raise TeacherError(
            f"--masked: {name_or_path} was trained with --mask-later, so [MASK] enters it at a later layer "
            f"(mask_later of its config.json: {setting}), which is not supported for teachers. Use another teacher, "
            "or omit --masked."
        )


def check_position_means(name_or_path: str | Path) -> None:
    """Raise TeacherError, from its configuration alone, when the teacher adds no position embedding to its hidden
    states, so that there is nothing for --center position to subtract."""
    config = read_config(locate(name_or_path), name_or_path)
    relative = getattr(config, "position_embedding_type", None) or "absolute"
    if config.model_type in ROTARY or not getattr(config, "position_biased_input", True) or relative != "absolute":
        raise TeacherError(
            f"--center position: {name_or_path} ({config.model_type}) has relative positions, so there is nothing to "
            "centre by position. Use --center mean or none."
        )


def _check_layer(layer, num_layers, name):
    if not 1 <= layer <= num_layers:
        raise TeacherError(
            f"{name} has {num_layers} layers, no layer {layer}. Choose --layer from 1 to {num_layers} "
            "(0 would be the embeddings, which have seen no context)."
        )


def cut_config(config: "PretrainedConfig", layer: int) -> "PretrainedConfig":
    """The configuration of the model with layers 1 ... layer."""
    cut = copy.deepcopy(config)
    for setting in PER_LAYER_SETTINGS:
        if getattr(cut, setting, None) is not None:
            setattr(cut, setting, list(getattr(cut, setting))[:layer])
    cut.num_hidden_layers = layer  # DistilBERT's config class maps this to n_layers
    cut.output_hidden_states = cut.output_attentions = False  # a saved config may ask for them
    return cut


def _load_cut(directory, config, layer, dtype, name):
    """The bare encoder with layers 1 ... layer, in eval mode on the CPU, every weight from the checkpoint."""
    model_class = MODEL_MAPPING[type(config)]
    cut = cut_config(config, layer)
    model, report = load_weights(model_class, directory, cut, dtype, name, **without_pooler(config))
    check_report(report, model, name)
    if layer < config.num_hidden_layers and config.model_type in FINAL_NORM:
        setattr(model, FINAL_NORM[config.model_type], torch.nn.Identity())
    return model


def load_weights(
    model_class: type["PreTrainedModel"],
    directory: Path,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    name: str | Path,
    **options: Any,
) -> tuple["PreTrainedModel", dict]:
    """A model of transformers from safetensors, in eval mode on the CPU, and transformers' report on its weights.

    Raises  TeacherError when there are none, or they cannot be read
    """
    require_weight_files(directory, name)
    try:
        check_size(model_class, config, directory, **options)
        with quiet_transformers(), utf8_name(directory) as place:
            model, report = model_class.from_pretrained(
                place,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # check_report gives a better message
                **options,
            )
    except Exception as error:  # safetensors and transformers raise many classes, Exception itself included
        raise TeacherError(
            f"{name}: the weights in {directory} cannot be loaded: {describe(error)}. Fetch or save the model again."
        ) from error
    for parameter in model.parameters():  # DeBERTa makes some float32 in any dtype, then fails
        parameter.data = parameter.data.to(dtype)
    return model.eval(), report


def check_report(report: dict, model: "PreTrainedModel", name: str | Path) -> None:
    """Raise TeacherError when weights of the model are not the checkpoint's (they hold random numbers), or the
    checkpoint has weights of the encoder that the model does not use (it is another model).

    report, model  from `load_weights`
    """
    missing = sorted(report["missing_keys"])
    wrong_shape = sorted(key for key, *_ in report["mismatched_keys"])
    for weights, trouble in ((missing, "lacks"), (wrong_shape, "has another shape for")):
        if weights:
            examples = ", ".join(weights[:3]) + (", ..." if len(weights) > 3 else "")
            raise TeacherError(
                f"{name}: the checkpoint {trouble} {len(weights)} weights of the model in its config.json "
                f"({examples}). Use the config.json that was saved with it, or fetch the model again."
            )
    if unused := describe_unused_weights(report["unexpected_keys"], model):
        raise TeacherError(f"{name}: {unused}")


class _FastLinear(torch.nn.Linear):
    """A linear layer on a CPU, for inference, by one of `libraries` (mlsm/common/matrix_products.py)."""

    libraries: Mapping[str, str] = USUAL

    def forward(self, rows_nd):
        rows_Nd, (outputs, inputs) = rows_nd.flatten(0, -2), self.weight.shape
        multiply = find_way("forward", (len(rows_Nd), inputs, outputs), self.libraries)
        return multiply(rows_Nd, self.weight, self.bias).view(*rows_nd.shape[:-1], outputs)


def torch_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The dtype that --dtype means on a device. Raises TeacherError.

    "auto" is float16 on a GPU: its codes are closer to float32's than bfloat16's by an order of magnitude, because it
    rounds hidden states to 11 bits, not 8. Numbers beyond 65,504 overflow; batch.py refuses them.
    """
    if dtype == "auto":
        return torch.float16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise TeacherError(f"no such dtype: {dtype!r}. Use {', '.join(DTYPES)} or auto.")
    return DTYPES[dtype]
