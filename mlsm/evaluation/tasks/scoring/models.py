"""The models that can be scored, and how they are loaded.

    model, tokenizer = load(Path("runs/students/<run>/export"), torch.device("cpu"))

Stock masked language models, exports with a masked-LM head (objectives mlm, kd and mtl, and logits probes), and softmax
probes of an MLSM student. All are in float32 and in evaluation mode. Not handled here: finding models
(mlsm/evaluation/models.py), scoring (scorer.py).
"""

from pathlib import Path

import torch
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from mlsm.common.device import spare_randomness
from mlsm.common.errors import ModelError, describe
from mlsm.common.invocation import program
from mlsm.common.model_checks import (
    check_size,
    describe_foreign_settings,
    describe_unsplit,
    describe_unused_weights,
    open_config,
    quiet_transformers,
)
from mlsm.common.text import shell_quote
from mlsm.evaluation.models import load_fitting_tokenizer
from mlsm.evaluation.tasks.scoring.scorer import MaskedLm, ProbedMaskedLm, StockMaskedLm
from student.encoders.mask_later import mask_later_of
from student.encoders.modeling_mlsm import HEAD_FILE, PROBE_FILE
from student.probe import ProbedLspModel
from student.runs.export import LINEAGE_FILE


def load(directory: Path, device: torch.device) -> tuple[MaskedLm, PreTrainedTokenizerFast]:
    """Load a model for scorer.Scorer, and its tokenizer.

    Raises  ModelError if it is not a masked language model; the message says how an MLSM student becomes one
    """
    model: MaskedLm
    if (directory / PROBE_FILE).is_file():
        probed = ProbedLspModel.from_pretrained(directory).to(device)
        model, encoder = ProbedMaskedLm(probed), probed.probed.encoder
    else:
        stock = _load_stock(directory).to(device)
        model, encoder = StockMaskedLm(stock), stock
    tokenizer = load_fitting_tokenizer(directory, encoder)
    if trouble := describe_unsplit(tokenizer, directory):
        raise ModelError(trouble)
    largest = max(tokenizer.get_vocab().values())
    if largest >= model.vocabulary:
        raise ModelError(
            f"{directory}: the tokenizer's ids go up to {largest}, but the model has {model.vocabulary} words. Use a "
            "model with the tokenizer that it was trained with."
        )
    return model, tokenizer


def check_family(directory: Path) -> PretrainedConfig:
    """The configuration of a model. Raises ModelError if transformers has no masked language model of its type."""
    try:
        config = open_config(directory, local_files_only=True)
    except Exception as error:  # transformers raises many classes for a damaged file
        raise ModelError(
            f"{directory} does not contain a model: {describe(error)}. Pass the directory of a model."
        ) from None
    if type(config) not in MODEL_FOR_MASKED_LM_MAPPING or getattr(config, "is_decoder", False):
        raise ModelError(
            f"{directory} is a model of type {config.model_type}, for which transformers has no masked language "
            "model. Use one that AutoModelForMaskedLM loads."
        )
    if trouble := describe_foreign_settings(config):
        raise ModelError(f"{directory}: {trouble}")
    try:
        mask_later_of(config)
    except ValueError as error:
        raise ModelError(f"{directory}: {error}. Export or download the model again.") from None
    return config


def _load_stock(directory: Path) -> PreTrainedModel:
    """The *ForMaskedLM of a directory, float32, every weight from its files."""
    config = check_family(directory)
    model_class = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
    try:
        check_size(model_class, config, directory)
        with quiet_transformers(), spare_randomness():
            model, report = model_class.from_pretrained(
                directory,
                config=config,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
    except Exception as error:  # safetensors and transformers raise many classes, even Exception itself
        raise ModelError(
            f"{directory}: its weights cannot be loaded: {describe(error)}. Use a model saved as safetensors."
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise ModelError(_explain_missing_head(directory, missing))
    if trouble := describe_unused_weights(report["unexpected_keys"], model):
        raise ModelError(f"{directory}: {trouble}")
    return model


def _explain_missing_head(directory: Path, missing: list[str]) -> str:
    """Explain why a model with missing weights cannot predict words, and what to do."""
    predicts_lsps = (directory / HEAD_FILE).is_file()
    if predicts_lsps or (directory / LINEAGE_FILE).is_file():
        run = directory.parent if directory.name == "export" else directory
        return (
            f"{directory} predicts {'LSPs, not' if predicts_lsps else 'no'} words: it has no masked-LM head. Train a "
            f"probe, and score its run:  {program()} train-probe --student {shell_quote(run)}"
            f"{'' if predicts_lsps else ' --probe-input hidden'}"
        )
    return (
        f"{directory} has no whole masked-LM head: its weights lack "
        f"{missing[0]}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}. Use a model saved as a masked "
        "language model."
    )
