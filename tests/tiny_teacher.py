"""A tiny random BERT with a real WordPiece tokenizer, English text from the standard library, random atoms."""

import ast
import sysconfig
from pathlib import Path

import numpy as np

from pipeline.config import EncodeConfig
from pipeline.corpus import TextFile
from pipeline.dictionary import Dictionary
from pipeline.tokenizer import train_tokenizer


def standard_text(directory, documents=2000):
    """A text file with docstrings of a few standard modules, a document each."""
    standard = Path(sysconfig.get_path("stdlib"))
    texts: dict[str, None] = {}
    for text in (text for path in sorted(standard.glob("*.py")) for text in docstrings_of(path)):
        if len(texts) == documents:
            break
        texts[text] = None
    path = Path(directory) / "text.txt"
    path.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return path


def docstrings_of(path):
    """Docstrings of a Python file of at least 40 characters, each without empty lines."""
    nodes = [ast.parse(path.read_bytes())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 40:
                yield "\n".join(line for line in text.splitlines() if line.strip())
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, block, ())
            nodes += reversed(found) if isinstance(found, list) else ()


def tiny_teacher(directory, text, *, layers=3, width=32, vocab_size=600, seed=0):
    """Save a random BertModel and its tokenizer; returns the directory."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    texts = (piece.text for piece in TextFile(text).pieces())
    directory = Path(directory) / "tiny"
    train_tokenizer(texts, vocab_size=vocab_size).save_pretrained(directory)
    config = BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=128,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertForMaskedLM(config).save_pretrained(directory)
    return directory


def random_dictionary(k=48, width=32):
    """A dictionary of k random atoms of unit length; they fit the tiny teacher."""
    atoms_Kd = np.random.default_rng(0).normal(size=(k, width)).astype(np.float32)
    return Dictionary(atoms_Kd / np.linalg.norm(atoms_Kd, axis=1, keepdims=True), [], "test", {})


def lsp_settings(directory, teacher, text, output, *, atoms=48, **settings):
    """Settings of encode-lsp with a dictionary of so many random atoms, which is saved in the directory."""
    random_dictionary(atoms).save(Path(directory) / "dictionary")
    usual = {"layer": (2,), "lam": 0.1, "top_n": 8, "max_length": 32, "batch_tokens": 2048, "device": "cpu"}
    paths = {"teacher": str(teacher), "corpus": (str(text),), "dictionary": Path(directory) / "dictionary"}
    return EncodeConfig(**usual | paths | settings, output=output)
