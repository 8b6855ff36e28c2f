"""MLSM students in plain transformers: every export with LSPs or a probe holds a copy of this file.

    model = AutoModel.from_pretrained(PATH, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(PATH)
    tokens, distributions_Tk = model.lsp("The bank raised its rates.", tokenizer)

    words = AutoModelForMaskedLM.from_pretrained(PATH, trust_remote_code=True)    # of a probe

LSPs are latent semantic properties. The encoder is the one that AutoModel loads without trust_remote_code; the head
maps its last hidden states to logits of the k LSPs. Needs torch, transformers (5.23 or newer) and safetensors alone.
Not handled here: the masked-LM head of an export (AutoModelForMaskedLM loads it without this file), what the LSPs mean
(the package mlsm shows it).

Shapes: W windows, L positions, T tokens of a text without special ones, d hidden width, k LSPs, V vocabulary.
"""

import inspect
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.activations import ACT2FN
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput, cached_file, can_return_tuple

HEAD_FILE, CONFIG_FILE = "lsp_head.safetensors", "lsp_config.json"  # of the first store's LSPs
PROBE_FILE = "probe.safetensors"  # one matrix: (V, k) on distributions over LSPs, or (V, d) on hidden states
SOFTMAX_PROBE, HIDDEN_PROBE = "probe.weight", "hidden_probe.weight"  # its name there
_HUB_SETTINGS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def head_files(head: int) -> tuple[str, str]:
    """The names of the files of the LSPs of a student's first store, second, ...: weights and facts."""
    return (HEAD_FILE, CONFIG_FILE) if head == 1 else (f"lsp_head_{head}.safetensors", f"lsp_config_{head}.json")


class PredictionHead(nn.Module):
    """Dense, activation, norm: what stands between encoder and output matrix in BERT's relatives.

    Its sizes and its activation are those of the encoder's family.
    """

    def __init__(self, config: PretrainedConfig, embedding_width: int):
        super().__init__()
        bias = getattr(config, "classifier_bias", True)  # ModernBERT has none
        norm_bias = getattr(config, "norm_bias", True)
        self.dense = nn.Linear(config.hidden_size, embedding_width, bias=bias)
        named = [getattr(config, name, None) for name in ("classifier_activation", "hidden_act", "activation")]
        self.activation = ACT2FN[next((name for name in named if isinstance(name, str)), "gelu")]
        set_to = [getattr(config, name, None) for name in ("layer_norm_eps", "norm_eps")]
        epsilon = next((value for value in set_to if value is not None), 1e-12)
        self.norm = nn.LayerNorm(embedding_width, eps=epsilon, bias=norm_bias)

    def forward(self, hidden_Md: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(hidden_Md)))


class LspHead(PredictionHead):
    """The same with the output layer behind it; its weights are named as in lsp_head.safetensors."""

    def __init__(self, config: PretrainedConfig, embedding_width: int, lsps: int):
        super().__init__(config, embedding_width)
        self.output = nn.Linear(embedding_width, lsps)

    def forward(self, hidden_Md: Tensor) -> Tensor:
        return self.output(super().forward(hidden_Md))


@dataclass
class MlsmOutput(ModelOutput):
    """The encoder's output, and the logits of the LSPs."""

    last_hidden_state: Tensor | None = None
    """(W, L, d)"""
    lsp_logits: Tensor | None = None
    """(W, L, k): their softmax is the predicted distribution. Trained at positions that hold the mask token; at all
    positions of unmasked text if `positions` in lsp_config.json is all"""
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class MlsmModel(PreTrainedModel):
    """Encoder, prediction head and LSP output of a student.

    encoder  without a pooler
    tensors  of lsp_head.safetensors: dense.*, norm.*, output.weight (k, d), output.bias (k)
    facts    what lsp_config.json holds
    """

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # which of them it is, the encoder has settled
    supports_gradient_checkpointing = True  # if the encoder does

    def __init__(self, encoder: PreTrainedModel, tensors: dict[str, Tensor], facts: dict):
        super().__init__(encoder.config)
        lsps, embedding_width = tensors["output.weight"].shape
        self.encoder, self.facts = encoder, facts
        self.head = LspHead(encoder.config, embedding_width, lsps)
        self.head.load_state_dict(tensors)
        self.head.to(encoder.device, encoder.dtype)
        self.eval()

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, *args: Any, head: int = 1, **kwargs: Any) -> "MlsmModel":
        """Load an export, in evaluation mode.

        source  directory or Hub id
        head    of a student of several stores: the store whose LSPs are predicted, counted from 1
        kwargs  as of AutoModel.from_pretrained, but for output_loading_info
        """
        try:
            head_file, config_file = (_find(source, name, kwargs) for name in head_files(head))
        except OSError as error:
            if head == 1:
                raise
            file, _ = head_files(head)
            raise OSError(f"{source}: no {file}; `head` counts a student's stores from 1. ({error})") from error
        encoder = _load_encoder(source, *args, **kwargs)
        return cls(encoder, load_file(head_file), json.loads(Path(config_file).read_text(encoding="utf-8")))

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write encoder, head and this file, for `from_pretrained`; not a decoder of words, or a probe, of the export.

        kwargs  as of the encoder's save_pretrained, but for push_to_hub, by which the encoder would push itself without
                the head, and state_dict, in which it would look for its own names
        Raises  TypeError on these two
        """
        _save_encoder(self.encoder, save_directory, kwargs, AutoModel="MlsmModel")
        save_head(self.head, self.facts, save_directory)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, but with strict=False raises RuntimeError if `state_dict` has no weight of this model."""
        if not strict:
            _require_weights(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the encoder."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings of the encoder, as `resize_token_embeddings` does."""
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> MlsmOutput:
        """Hidden states and LSP logits of all positions; arguments as of the encoder."""
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        logits_WLk = self.head(outputs.last_hidden_state)
        return MlsmOutput(
            outputs.last_hidden_state, logits_WLk, outputs.get("hidden_states"), outputs.get("attentions")
        )

    @torch.no_grad()
    def lsp(self, text: str, tokenizer: PreTrainedTokenizerBase, batch_windows: int = 32) -> tuple[list[str], Tensor]:
        """The LSP distribution of every token of a text, as in training: the token is masked for it, or if `positions`
        in lsp_config.json is all, the text is read as it is.

        Returns  tokens without special ones; float32 distributions (T, k) on the CPU, of which every row sums to one
        Raises   TypeError if `text` is not one string; ValueError if it is longer than the student reads
        """
        if not isinstance(text, str):
            raise TypeError(f"expected one text, a string, found {type(text).__name__}. Call this once for each text.")
        ids, special = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], self.facts["special_ids"]
        if len(ids) + 2 > (room := self.facts["max_length"]):
            raise ValueError(f"a text of {len(ids)} tokens: this student reads at most {room - 2}. Cut it.")
        input_1L = torch.tensor([[special["cls"], *ids, special["sep"]]])
        if self.facts["positions"] == "all":
            input_1L = input_1L.to(self.device)
            (logits_Lk,) = self(input_1L, torch.ones_like(input_1L), return_dict=True).lsp_logits
            return tokenizer.convert_ids_to_tokens(ids), logits_Lk[1:-1].float().softmax(dim=1).cpu()
        where_T, inputs_TL = torch.arange(len(ids)), input_1L.repeat(len(ids), 1)
        inputs_TL[where_T, where_T + 1] = special["mask"]
        rows = [torch.empty(0, self.facts["lsps"])]
        for start in range(0, len(ids), batch_windows):
            batch_WL = inputs_TL[start : start + batch_windows].to(self.device)
            inputs = {"input_ids": batch_WL, "attention_mask": torch.ones_like(batch_WL)}
            hidden_WLd = self.encoder(**inputs, return_dict=True).last_hidden_state
            places_W = torch.arange(start, start + len(batch_WL), device=self.device)
            hidden_Wd = hidden_WLd[places_W - start, places_W + 1]
            rows.append(self.head(hidden_Wd).float().softmax(dim=1).cpu())
        return tokenizer.convert_ids_to_tokens(ids), torch.cat(rows)


class MlsmForMaskedLM(PreTrainedModel):
    """A frozen student with the linear probe that predicts words from its outputs.

    encoder  without a pooler
    probe    the matrix: (V, k) on the softmax of the head's logits, or (V, d) on hidden states; tokens that are added
             to the embeddings have no logits
    head     of the former, None of the latter
    facts    what lsp_config.json holds; empty without a head
    """

    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # which of them it is, the encoder has settled
    supports_gradient_checkpointing = True  # if the encoder does

    accepts_loss_kwargs = False  # the loss is the mean over a batch, and Trainer divides it by the batches of a step

    def __init__(self, encoder: PreTrainedModel, probe: Tensor, head: LspHead | None = None, facts: dict | None = None):
        super().__init__(encoder.config)
        self.encoder, self.head, self.facts = encoder, head, facts or {}
        self.probe = nn.Linear(probe.shape[1], probe.shape[0], bias=False)
        self.probe.load_state_dict({"weight": probe})
        self.probe.to(encoder.device, encoder.dtype)
        self.eval()

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike, *args: Any, **kwargs: Any) -> "MlsmForMaskedLM":
        """Load the export of a probe, in evaluation mode.

        source  directory or Hub id
        kwargs  as of AutoModelForMaskedLM.from_pretrained, but for output_loading_info
        """
        ((name, probe),) = load_file(_find(source, PROBE_FILE, kwargs)).items()
        if name == HIDDEN_PROBE:
            return cls(_load_encoder(source, *args, **kwargs), probe)
        student = MlsmModel.from_pretrained(source, *args, **kwargs)
        return cls(student.encoder, probe, student.head, student.facts)

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Write encoder, head, probe and this file, for `from_pretrained`; kwargs as of MlsmModel."""
        of_lsps = {} if self.head is None else {"AutoModel": "MlsmModel"}
        _save_encoder(self.encoder, save_directory, kwargs, AutoModelForMaskedLM="MlsmForMaskedLM", **of_lsps)
        if self.head is not None:
            save_head(self.head, self.facts, save_directory)
        name = HIDDEN_PROBE if self.head is None else SOFTMAX_PROBE
        save_file({name: self.probe.weight.contiguous()}, Path(save_directory) / PROBE_FILE)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As torch's, but with strict=False raises RuntimeError if `state_dict` has no weight of this model."""
        if not strict:
            _require_weights(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def get_input_embeddings(self) -> nn.Module:
        """The token embeddings of the encoder."""
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the token embeddings of the encoder, as `resize_token_embeddings` does."""
        self.encoder.set_input_embeddings(value)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Logits (W, L, V) of all positions, trained at those that hold the mask token.

        labels  int (W, L), -100 at tokens that do not count: their mean cross-entropy in nats is the output's `loss`
        kwargs  as of the encoder
        """
        outputs = self.encoder(input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **kwargs)
        read = outputs.last_hidden_state
        if self.head is not None:
            read = self.head(read).float().softmax(dim=-1).to(read.dtype)
        logits_WLV = self.probe(read)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits_WLV.flatten(0, 1).float(), labels.flatten())
        return MaskedLMOutput(loss, logits_WLV, outputs.get("hidden_states"), outputs.get("attentions"))


def _hub(kwargs: dict) -> dict:
    return {name: kwargs[name] for name in _HUB_SETTINGS if name in kwargs}


def _find(source: str | os.PathLike, name: str, kwargs: dict) -> str:
    return cached_file(source, name, **_hub(kwargs))


def _require_weights(model: PreTrainedModel, state_dict: Mapping[str, Any]) -> None:
    """Raises RuntimeError if the state dict has no weight of the model.

    Trainer loads a checkpoint's model.safetensors with strict=False. Here this file holds only the encoder, under stock
    names, so torch would load nothing, and Trainer would continue with other weights.
    """
    weights = model.state_dict()
    if weights.keys().isdisjoint(state_dict):
        raise RuntimeError(
            f"expected weights of {type(model).__name__}, found none of its {len(weights)}. Nothing was loaded. Trainer"
            " cannot resume from a checkpoint of this model, nor restore the best one. Load that checkpoint with"
            " from_pretrained(CHECKPOINT, trust_remote_code=True)."
        )


def _load_encoder(source: str | os.PathLike, *args: Any, **kwargs: Any) -> PreTrainedModel:
    kwargs.pop("trust_remote_code", None)  # the encoder needs no code but transformers'
    config = kwargs.pop("config", None) or AutoConfig.from_pretrained(source, **_hub(kwargs))
    encoder_class = MODEL_MAPPING[type(config)]
    if "add_pooling_layer" in inspect.signature(encoder_class.__init__).parameters:
        kwargs["add_pooling_layer"] = False  # none was trained
    return encoder_class.from_pretrained(source, *args, config=config, **kwargs)


def _save_encoder(encoder: PreTrainedModel, directory: str | os.PathLike, kwargs: dict, **classes: str) -> None:
    """Write the encoder and this file, and name in config.json the classes of this file that load what is saved."""
    if refused := [name for name in ("push_to_hub", "state_dict") if kwargs.get(name)]:
        raise TypeError(f"save_pretrained takes no {refused[0]} here. To push all of it: model.push_to_hub(ID)")
    encoder.save_pretrained(directory, **kwargs)
    shutil.copy(__file__, directory)
    config_file = Path(directory) / "config.json"
    config = json.loads(config_file.read_text(encoding="utf-8"))
    config["auto_map"] = {name: f"{Path(__file__).stem}.{found}" for name, found in classes.items()}
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def save_head(head: LspHead, facts: dict, directory: str | os.PathLike) -> None:
    """Write the LSP head of a student into its export, with the facts of lsp_config.json."""
    head_file, config_file = (Path(directory) / name for name in head_files(1))
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, head_file)
    config_file.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
