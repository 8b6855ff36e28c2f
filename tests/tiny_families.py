"""Tiny random models of every teacher family, windows for them, and what a test does to a checkpoint."""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

LAYERS, VOCABULARY, POSITIONS = 5, 64, 40  # ModernBERT: global attention in layers 1 and 4, else local
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
    "pad_token_id": 1,
}
RELATIVE = {"relative_attention": True, "position_biased_input": False, "pos_att_type": ["c2p", "p2c"]}
DISTILBERT_NAMES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}
CLS_SEP = {"bos_token_id": 2, "eos_token_id": 3}
PECULIARITIES = {
    "deberta": RELATIVE,
    "deberta-v2": RELATIVE
    | {"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_buckets": 8, "conv_kernel_size": 3},
    "electra": {"embedding_size": 16},
    "eurobert": CLS_SEP | {"num_key_value_heads": 2, "head_dim": 8, "mask_token_id": 4},
    "modernbert": CLS_SEP | {"cls_token_id": 2, "sep_token_id": 3, "local_attention": 8},
}
LAYOUTS = {"bare": AutoModel, "masked-lm": AutoModelForMaskedLM}


def tiny_model(family, layout="bare", **settings):
    sizes = SIZES | PECULIARITIES.get(family, {}) | settings
    if family == "distilbert":
        sizes = {DISTILBERT_NAMES.get(name, name): value for name, value in sizes.items()}
    torch.manual_seed(0)
    model = LAYOUTS[layout].from_config(AutoConfig.for_model(family, **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a skipped one shows
            parameter.normal_(0.0, 0.2)
    return model


def windows(length=24):
    """Three windows of ids, once without padding and once with some."""
    ids = torch.randint(5, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(1))
    full = torch.ones(3, length, dtype=torch.bool)
    padded = full.clone()
    padded[1, length // 3 :] = padded[2, length // 2 :] = False
    return [(ids, full), (torch.where(padded, ids, 1), padded)]


def edit_weights(directory, edit):
    weights = load_file(directory / "model.safetensors")
    save_file(edit(weights), directory / "model.safetensors", metadata={"format": "pt"})
