"""Turn a student into its family's *ForMaskedLM, and give a student the head of such a model.

    stock_model(model, objective)              # None if transformers has no class for it
    copy_head(model, directory, columns)       # --continue-head

Not handled here: files other than the weights (export.py), the encoder of a model on disk (build.py).

Shapes: V vocabulary, K outputs, d width of the head's output.
"""

import copy
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM, PretrainedConfig, PreTrainedModel

from mlsm.common.device import spare_randomness
from mlsm.common.errors import RunError, describe
from mlsm.common.model_checks import quiet_transformers
from mlsm.common.paths import utf8_name
from student.encoders.model import Student
from student.objectives.base import Objective

# Where a family's masked-LM model keeps (dense, norm) of its head. Its decoder is get_output_embeddings().
HEAD_LAYOUTS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "camembert": ("lm_head.dense", "lm_head.layer_norm"),
    "deberta": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "deberta-v2": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "distilbert": ("vocab_transform", "vocab_layer_norm"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    "modernbert": ("head.dense", "head.norm"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm"),
    "xlm-roberta": ("lm_head.dense", "lm_head.layer_norm"),
}

# Families whose masked-LM head computes gelu, whatever the config's hidden_act is.
_ALWAYS_GELU = ("camembert", "electra", "roberta", "xlm-roberta")


def stock_model(model: Student, objective: Objective) -> PreTrainedModel | None:
    """The student as its family's *ForMaskedLM; None if its outputs are not tokens, or there is no `has_known_head`.

    The weights are copies; the output matrix is tied to the embeddings if it is in the student.
    """
    columns = objective.token_columns
    if columns is None or not has_known_head(model.encoder.config):
        return None
    matrix_Vd = None if model.tied else model.output_matrix[columns]
    return masked_lm(model, matrix_Vd, model.output_bias_K[columns])


def has_known_head(config: PretrainedConfig) -> bool:
    """Whether the layout of the family's *ForMaskedLM is known, and its head computes what a student's does. DeBERTa's
    newer head has no decoder of its own.
    """
    return config.model_type in HEAD_LAYOUTS and getattr(config, "legacy", True) and not ignores_activation(config)


def ignores_activation(config: PretrainedConfig) -> bool:
    """Whether the head of the family's *ForMaskedLM computes gelu, but that of a student another activation."""
    return config.model_type in _ALWAYS_GELU and config.hidden_act != "gelu"


def masked_lm(model: Student, matrix_Vd: Tensor | None, bias_V: Tensor) -> PreTrainedModel:
    """Encoder and head of a student with an output layer over the vocabulary, as its family's *ForMaskedLM.

    matrix_Vd  the decoder; None to tie it to the embeddings
    """
    config = copy.deepcopy(model.encoder.config)
    config.tie_word_embeddings = matrix_Vd is None
    if hasattr(config, "decoder_bias"):  # a ModernBERT may have none, but every student has
        config.decoder_bias = True
    with spare_randomness():  # its random weights are all replaced
        stock = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    dense, norm = (stock.get_submodule(name) for name in HEAD_LAYOUTS[config.model_type])
    stock.base_model.load_state_dict(model.encoder.state_dict(), strict=True)
    dense.load_state_dict(model.head.dense.state_dict(), strict=True)
    norm.load_state_dict(model.head.norm.state_dict(), strict=True)
    with torch.no_grad():
        for bias in _decoder_biases(stock, len(bias_V)):
            bias.copy_(bias_V)
        if matrix_Vd is not None:
            stock.get_output_embeddings().weight.copy_(matrix_Vd)
    return stock.eval()


def copy_head(model: Student, directory: Path, token_columns: slice | None) -> None:
    """Give a student whose encoder is that of a directory's model the prediction head of that model, too.

    token_columns  the outputs that are the vocabulary, which get the model's biases and, if the student is not tied,
                   its decoder; None: there are none
    Raises         RunError if the model has no such head, a head of another layout, or a decoder for which a tied
                   student has no place
    """
    config = model.encoder.config
    problem = f"transformers' {config.model_type} head has another layout, or another activation"
    if has_known_head(config):
        try:
            with spare_randomness(), quiet_transformers(), utf8_name(directory) as place:
                stock, report = AutoModelForMaskedLM.from_pretrained(
                    place, config=config, dtype=torch.float32, output_loading_info=True, use_safetensors=True
                )
            problem = "its head's weights are not in the files" if report["missing_keys"] else ""
        except Exception as error:  # safetensors and transformers raise many classes, Exception itself included
            problem = describe(error)
    if problem:
        raise RunError(
            f"--continue-head: {directory} has no prediction head that can be used ({problem}). Give the export of a "
            "run of mlm, kd or mtl or another masked language model, or omit --continue-head: the head is then "
            "reinitialised."
        )
    dense, norm = (stock.get_submodule(name) for name in HEAD_LAYOUTS[config.model_type])
    model.head.dense.load_state_dict(dense.state_dict())
    model.head.norm.load_state_dict(norm.state_dict())
    if token_columns is None:
        return
    decoder = stock.get_output_embeddings()
    if model.tied and not torch.equal(decoder.weight, stock.get_input_embeddings().weight):
        raise RunError(
            f"--continue-head: the output matrix of {directory} is not its token embedding, as that of the student is."
            " Pass --untied, which gives mlm, kd and mtl a matrix of their own, or omit --continue-head."
        )
    with torch.no_grad():
        if not model.tied:
            model.output_matrix[token_columns] = decoder.weight
        if decoder.bias is not None:  # a ModernBERT may have none
            model.output_bias_K[token_columns] = decoder.bias


def _decoder_biases(stock, vocabulary: int):
    """The decoder's bias and its aliases: an untied model holds copies, which older transformers tie on loading."""
    decoder = stock.get_output_embeddings()
    parents = [module for module in stock.modules() if decoder in module.children()]
    biases = [decoder.bias, *(getattr(parent, "bias", None) for parent in parents)]
    return [bias for bias in biases if isinstance(bias, Tensor) and bias.shape == (vocabulary,)]
