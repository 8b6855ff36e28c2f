"""A trained student as files that any `transformers` user can load.

    config.json, model.safetensors   for AutoModel; mlm, known family: for AutoModelForMaskedLM too
    lsp_head.safetensors             mlsm: head and output matrix, see the card
    tokenizer ...                    the store's copy
    README.md                        model card: objective, lineage, held-out figures, how to load

Left out: pushing to the Hub.
"""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM
from transformers.utils import logging as transformers_logging

from student.objectives import OBJECTIVES, Objective

# Where a family's masked-LM model keeps (dense, norm) of its head. Its decoder is get_output_embeddings().
HEAD_LAYOUTS = {
    "bert": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "deberta": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "deberta-v2": ("cls.predictions.transform.dense", "cls.predictions.transform.LayerNorm"),
    "distilbert": ("vocab_transform", "vocab_layer_norm"),
    "electra": ("generator_predictions.dense", "generator_predictions.LayerNorm"),
    "modernbert": ("head.dense", "head.norm"),
    "roberta": ("lm_head.dense", "lm_head.layer_norm"),
    "xlm-roberta": ("lm_head.dense", "lm_head.layer_norm"),
}


def export_student(model, directory: Path, objective: str, store, lineage: dict) -> None:
    """Write a student into an existing directory.

    lineage  what the card tells: settings, steps, tokens, held_out, baseline (dicts of JSON values)
    """
    stock = stock_model(model) if objective == "mlm" else None
    with _no_bars():
        (stock or model.encoder).save_pretrained(directory)
    if objective == "mlsm":
        save_file(lsp_head_tensors(model), directory / "lsp_head.safetensors")
    shutil.copytree(store.tokenizer_dir, directory, dirs_exist_ok=True)
    card = _card(objective, store, lineage, stock is not None, model.encoder.config.model_type)
    (directory / "README.md").write_text(card, encoding="utf-8")


def stock_model(model):
    """The student as its family's *ForMaskedLM; None where that family's layout is not known.

    The weights are copies; the output matrix is tied to the embeddings as in the student.
    """
    config = model.encoder.config
    layout = HEAD_LAYOUTS.get(config.model_type)
    if layout is None or not getattr(config, "legacy", True):    # DeBERTa's newer head is laid out otherwise
        return None
    with torch.random.fork_rng(devices=[]):     # the weights it is born with are all replaced
        stock = AutoModelForMaskedLM.from_config(config, dtype=torch.float32)
    dense, norm = (stock.get_submodule(name) for name in layout)
    stock.base_model.load_state_dict(model.encoder.state_dict(), strict=True)
    dense.load_state_dict(model.head.dense.state_dict(), strict=True)
    norm.load_state_dict(model.head.norm.state_dict(), strict=True)
    with torch.no_grad():
        stock.get_output_embeddings().bias.copy_(model.output_bias_K)
    return stock.eval()


def lsp_head_tensors(model) -> dict:
    """Head and output matrix of an mlsm student: dense.*, norm.*, output.weight (k, d), output.bias (k)."""
    tensors = {f"{name}": tensor for name, tensor in model.head.state_dict().items()}
    tensors |= {"output.weight": model.output_matrix, "output.bias": model.output_bias_K}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@contextmanager
def _no_bars():
    """Keep save_pretrained from drawing a progress bar of its own."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _card(objective: str, store, lineage: dict, stock: bool, family: str) -> str:
    sections = [
        f"---\nlibrary_name: transformers\ntags: [{objective}, masked-latent-semantic-modeling]\n---",
        _title(OBJECTIVES[objective], family, lineage["settings"].get("continue_from")),
        "## Loading\n\n" + _loading(objective, stock, family),
        "## Held-out text\n\n" + _figures(lineage),
        "## How it was made\n\n" + _settings(lineage),
        f"Store: target `{store.target_id}`, plan `{store.plan_id}`. Its settings:\n\n"
        + _json_block(store.settings),
    ]
    return "\n\n".join(sections) + "\n"


def _title(objective: type[Objective], family: str, continued: str | None) -> str:
    start = "from scratch" if continued is None else f"further, from `{continued}`,"
    return f"# {family} encoder pre-trained with {objective.name.upper()}\n\nTrained {start} by {objective.learns}."


def _loading(objective: str, stock: bool, family: str) -> str:
    auto_class = "AutoModelForMaskedLM" if stock else "AutoModel"
    lines = [
        f"```python\nfrom transformers import {auto_class}, AutoTokenizer",
        f'model, tokenizer = {auto_class}.from_pretrained(PATH), AutoTokenizer.from_pretrained(PATH)\n```',
    ]
    if stock:
        lines.append("\n`AutoModel` loads the encoder alone.")
    elif objective == "mlm":
        lines.append(f"\nThe masked-LM head is not exported: the layout of {family} heads is not known here.")
    if objective == "mlsm":
        lines.append(
            "\nA pooler that `AutoModel` adds is newly initialised; none was trained. `lsp_head.safetensors`"
            " maps the last hidden state of a masked token to LSP logits: `norm(activation(dense(h))) @"
            " output.weight.T + output.bias`, with the activation and norm epsilon of the encoder's config."
        )
    return "\n".join(lines)


def _figures(lineage: dict) -> str:
    if not lineage["held_out"]:
        return "None: the store has no held-out windows, or none was evaluated."
    rows = [
        f"| {name} | {value:.4f} | {_or_blank(lineage['baseline'].get(name))} |"
        for name, value in lineage["held_out"].items()
    ]
    header = ["| figure (loss in nats per token) | student | constant prediction |", "|---|---|---|"]
    return "\n".join(header + rows)


def _settings(lineage: dict) -> str:
    steps = f"{lineage['step']} optimiser steps, {lineage['tokens']} real tokens. Settings:"
    return f"{steps}\n\n{_json_block(lineage['settings'])}"


def _json_block(value) -> str:
    return f"```json\n{json.dumps(value, indent=1, sort_keys=True, default=str)}\n```"


def _or_blank(value) -> str:
    return "" if value is None else f"{value:.4f}"
