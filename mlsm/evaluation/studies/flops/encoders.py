"""Operations of one encoder's forward pass: by formula for the families known here, else measured.

A multiplication and an addition count as two operations. Only matrix products are counted, as calflops and torch's
counter do; norms, activations and softmax would add about 1 %. Tests compare the formulas with measured counts. Not
handled here: other families (DeBERTa-v2, ModernBERT ...), which are measured.

Shapes: L positions, d hidden width, e width of embeddings.
"""

import copy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mlsm.common.errors import FlopsError, describe
from mlsm.common.model_checks import open_config, without_pooler

if TYPE_CHECKING:
    from transformers import PretrainedConfig


BERT_FAMILY = ("bert", "roberta", "xlm-roberta", "electra", "distilbert")
CASED_VOCABULARY, BASE_WIDTH = 28_996, 768  # of bert-base-cased, the paper's teacher


class Products(NamedTuple):
    """Operations of a forward pass."""

    linear: int
    """products with weights at every position, as counted by calflops"""
    attention: int
    """scores, weighted means, and DeBERTa's products with relative positions; 0 if measured, as part of `linear`"""

    @property
    def total(self) -> int:
        """All operations."""
        return self.linear + self.attention


class EncoderShape:
    """An encoder, described by its Hugging Face configuration.

    name       as the user wrote it
    hf_config  its configuration
    """

    def __init__(self, name: str, hf_config: "PretrainedConfig"):
        self.name, self.config = name, hf_config
        self.layers, self.width = hf_config.num_hidden_layers, hf_config.hidden_size
        self.embedding_width = getattr(hf_config, "embedding_size", self.width)

    @classmethod
    def find(cls, name: str) -> "EncoderShape":
        """Find an encoder: a name that train-student knows, `bundled`, a directory or a Hub id.

        Raises FlopsError if there is none; ValueError if no encoder of the size in the name can be built.
        """
        from student.encoders.build import named_config

        return cls(name, named_config(name) or _load_config(name))

    @property
    def vocabulary(self) -> int:
        """Size of its vocabulary; a named encoder has no vocabulary and gets the size of bert-base-cased's."""
        from student.encoders.build import named_config

        return CASED_VOCABULARY if named_config(self.name) else self.config.vocab_size

    @property
    def is_analytic(self) -> bool:
        """Whether there is a formula for its family."""
        family = self.config.model_type
        deberta = family == "deberta" and not getattr(self.config, "talking_head", False)
        return family in BERT_FAMILY or deberta

    def cut(self, layers: int) -> "EncoderShape":
        """The encoder with only its first `layers` layers. Raises FlopsError if it has fewer."""
        if not 1 <= layers <= self.layers:
            raise FlopsError(f"{self.name} has {self.layers} layers, no layer {layers}. Choose 1 to {self.layers}.")
        from pipeline.teacher import cut_config

        return EncoderShape(self.name, cut_config(self.config, layers))

    def forward(self, windows: int, length: int) -> Products:
        """Operations of a forward pass over whole windows, at every position, without head."""
        if not self.is_analytic:
            return Products(self.measure(windows, length), 0)
        d, positions = self.width, windows * length
        is_distilbert = self.config.model_type == "distilbert"
        feed_forward = self.config.hidden_dim if is_distilbert else self.config.intermediate_size
        weights = self.layers * (4 * d * d + 2 * d * feed_forward)
        if self.embedding_width != d:
            weights += self.embedding_width * d
        attention = self.layers * positions * 2 * 2 * length * d
        return Products(2 * positions * weights, attention + self._relative_positions(windows, length))

    def head(self, tokens: float, outputs: int) -> float:
        """Operations of the prediction head at some tokens: its dense d x e layer, the e x outputs matrix."""
        return 2 * tokens * self.embedding_width * (self.width + outputs)

    def measure(self, windows: int, length: int) -> int:
        """The same as forward().total, counted by torch on tensors without data, with eager attention and no pooler."""
        import torch
        from transformers import AutoModel

        from student.encoders.flops import count_operations

        roomy = _with_room(self.config, length)
        with torch.device("meta"):
            model = AutoModel.from_config(roomy, attn_implementation="eager", **without_pooler(roomy))
        return count_operations(model.eval(), input_ids=(windows, length))

    def _relative_positions(self, windows: int, length: int) -> int:
        """DeBERTa's c2p and p2c scores (He et al. 2021, section 3.1): 2 L positions, projected once a batch."""
        config = self.config
        if config.model_type != "deberta" or not config.relative_attention:
            return 0
        reach = config.max_relative_positions
        table = 2 * min(length, reach if reach >= 1 else config.max_position_embeddings)
        directions = len({"c2p", "p2c"} & set(config.pos_att_type or ()))
        one = 2 * windows * length * table * self.width + 2 * table * self.width**2
        return self.layers * directions * one


def _with_room(hf_config, length):
    """The configuration with positions for windows of this length, whose lookup costs no operations."""
    roomy = copy.deepcopy(hf_config)
    if getattr(roomy, "max_position_embeddings", None) and roomy.model_type != "deberta":
        roomy.max_position_embeddings = max(roomy.max_position_embeddings, length + 2)
    return roomy


def measure_head(encoder: EncoderShape, tokens: int, outputs: int) -> int:
    """Operations of the student's own head and output matrix at a number of tokens."""
    import torch
    from torch import nn

    from student.encoders.flops import count_operations
    from student.encoders.modeling_mlsm import PredictionHead

    with torch.device("meta"):
        head = PredictionHead(encoder.config, encoder.embedding_width)
        module = nn.Sequential(head, nn.Linear(encoder.embedding_width, outputs))
        return count_operations(module, input=torch.empty(tokens, encoder.width))


def measure_student(encoder: EncoderShape, windows: int, length: int, masked: int, outputs: int) -> int:
    """Operations of the forward pass that train-student does: last layer and head at masked positions only."""
    from student.encoders.build import build_encoder
    from student.encoders.flops import forward_flops
    from student.encoders.model import Student

    student = Student(build_encoder(_with_room(encoder.config, length), seed=0), outputs, tied=False, seed=0)
    return forward_flops(student, windows, length, masked)


def _load_config(name: str):
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    from pipeline.teacher import locate

    try:
        place = locate(name) if name == "bundled" or Path(name).is_dir() else name
        config = open_config(place)
    except Exception as error:  # transformers raises many classes for a damaged configuration
        raise FlopsError(
            f"{name}: no configuration found there ({describe(error)}). Pass a named encoder such as bert-base or "
            "bert-6x384, a directory with config.json, or a Hub id (network or cache)."
        ) from None
    if type(config) not in MODEL_MAPPING or config.is_encoder_decoder:
        raise FlopsError(f"{name}: a model of type {config.model_type} is not an encoder. Use a BERT-like model.")
    return config
