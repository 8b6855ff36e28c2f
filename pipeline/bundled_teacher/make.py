"""The steps of making the bundled teacher that no command does; docs/log.md has its trials (2026-11-27).

    python pipeline/bundled_teacher/make.py start STORE DIRECTORY     first weights, from a store of hidden states
    python pipeline/bundled_teacher/make.py deepen EXPORT DIRECTORY LAYER ...   copies of these layers of a trained one
    python pipeline/bundled_teacher/make.py head EXPORT OTHER DIRECTORY   an export without a head, with another's head
    python pipeline/bundled_teacher/make.py pack EXPORT               the files next to this one
    python pipeline/bundled_teacher/make.py overlap DATA TEXT ...     what it has read of the evaluation sets in DATA

Shapes: V vocabulary, d values of a stored hidden state, w width.
"""

import json
import lzma
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from safetensors.torch import save
from scipy import sparse
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel

from shards.reader import Store

WIDTH, HEADS, FIRST_LAYERS = 144, 4, 4
LENGTH = 128  # tokens of a window
PRIOR = 5  # occurrences that the mean of all tokens counts as, in the mean of each word
SPREAD = 0.2  # standard deviation of the first word embeddings, so that a step of AdamW's changes them little
WINDOWS_AT_ONCE = 512
GRAM = 8  # words in a row that two texts hardly share by chance
EVALUATION_SETS = {
    "word senses": "wsd/Evaluation_Datasets/ALL/*.xml",
    "BLiMP": "blimp/data/*.jsonl",
    "STS-B, dev": "glue/STS-B/dev.tsv",
    "CoLA, MRPC, QNLI, RTE, SST-2, dev": "glue/*[!B]/dev.tsv",
    "WiC": "wic/*/*.data.txt",
    "CoNLL-2003, test": "conll2003/test.txt",
}


def start(store: Path, directory: Path) -> None:
    """Write a BERT of few layers whose word embeddings are the main directions of each word's mean hidden state."""
    opened = Store.open(store)
    torch.manual_seed(0)
    model = BertForMaskedLM(_config(FIRST_LAYERS, opened.vocab_size))
    model.get_input_embeddings().weight.data.copy_(_word_embeddings(opened))
    model.save_pretrained(directory)
    for name, content in opened.read_tokenizer().items():
        (directory / name).write_bytes(content)


def _config(layers: int, words: int) -> BertConfig:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 4 * WIDTH}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(vocab_size=words, num_hidden_layers=layers, max_position_embeddings=LENGTH, **sizes, **no_dropout)


def _word_embeddings(store: Store) -> Tensor:
    """Principal components of the words' mean hidden states, a word weighing as much as it occurs: float32 (V, w)."""
    sums_Vd, counts_V = _sums_by_word(store)
    means_Vd = sums_Vd / (counts_V + PRIOR)[:, None]
    _, _, directions_dd = np.linalg.svd(np.sqrt(counts_V)[:, None] * means_Vd, full_matrices=False)
    components_Vw = means_Vd @ directions_dd[:WIDTH].T
    return torch.from_numpy(components_Vw * (SPREAD / components_Vw[counts_V > 0].std())).float()


def _sums_by_word(store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Sums of the centred, standardised hidden states of unit length of each word (V, d), and their numbers (V)."""
    train = store.split("train")
    mean_d, deviation_d = train.hidden_statistics()
    sums_Vd, counts_V = np.zeros((store.vocab_size, len(mean_d))), np.zeros(store.vocab_size)
    for first in range(0, len(train), WINDOWS_AT_ONCE):
        windows = train.read(np.arange(first, min(first + WINDOWS_AT_ONCE, len(train))))
        window_N, position_N = np.nonzero(windows.documents >= 0)
        rows = train.hidden(windows, window_N, position_N)
        states_Nd = (rows.rows_Md - mean_d) / deviation_d
        states_Nd *= (rows.coded_M / np.linalg.norm(states_Nd, axis=1))[:, None]
        ids_N = windows.ids[window_N, position_N]
        places = (ids_N, np.arange(len(ids_N)))
        sums_Vd += sparse.csr_array((np.ones(len(ids_N)), places), shape=(len(sums_Vd), len(ids_N))) @ states_Nd
        counts_V += np.bincount(ids_N, rows.coded_M, len(counts_V))
    return sums_Vd, counts_V


def deepen(export: Path, directory: Path, order: list[int]) -> None:
    """Write a BERT whose layers are copies of the trained ones with these numbers (stacking: Gong et al. 2019)."""
    torch.manual_seed(0)  # of the masked-LM head, which an export without one lacks
    trained = BertForMaskedLM.from_pretrained(export)
    weights = {name: weight for name, weight in trained.state_dict().items() if ".layer." not in name}
    for new, old in enumerate(order):
        layer = trained.bert.encoder.layer[old].state_dict()
        weights |= {f"bert.encoder.layer.{new}.{name}": weight for name, weight in layer.items()}
    model = BertForMaskedLM(_config(len(order), trained.config.vocab_size))
    model.load_state_dict(weights)
    model.save_pretrained(directory)


def head(export: Path, other: Path, directory: Path) -> None:
    """Write the BERT of an export of hidden states alone, with the masked-LM head of another export."""
    model = BertForMaskedLM.from_pretrained(other)
    model.bert.load_state_dict(BertModel.from_pretrained(export, add_pooling_layer=False).state_dict())
    model.save_pretrained(directory)


def pack(export: Path) -> None:
    """Write the model next to this file, its matrices in float8 (e4m3), and its tokenizer."""
    model, here = BertForMaskedLM.from_pretrained(export), Path(__file__).parent
    weights = {
        name: weight.data.to(torch.float8_e4m3fn) if weight.dim() == 2 else weight.data
        for name, weight in model.named_parameters()  # without the decoder's matrix, which is that of the words
    }
    model.config.save_pretrained(here)
    (here / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (here / name).write_bytes((export / name).read_bytes())


def overlap(data: Path, texts: list[Path]) -> None:
    """Print how many 8-grams of each evaluation set the texts contain, and in how many of its sentences these are."""
    known = np.unique(
        np.concatenate([_grams(lzma.decompress(path.read_bytes()).decode().split("\n")) for path in texts])
    )
    for name, pattern in EVALUATION_SETS.items():
        sentences = [_grams([sentence]) for path in sorted(data.glob(pattern)) for sentence in _sentences(path)]
        found = [known[np.searchsorted(known[:-1], grams)] == grams for grams in sentences]
        of_all, shared = sum(map(len, found)), sum(int(of_sentence.sum()) for of_sentence in found)
        touched = sum(bool(of_sentence.any()) for of_sentence in found)
        print(f"{name}: {shared:,} of {of_all:,} 8-grams, in {touched:,} of {len(found):,} sentences")


def _grams(lines: Iterable[str]) -> np.ndarray:
    """Hashes of the words in a row of each line, in lower case without punctuation; int64."""
    weights_G = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, GRAM)
    found = [np.empty(0, np.int64)]
    for line in lines:
        words = [hash(word) for word in re.findall(r"\w+", line.lower())]
        if len(words) >= GRAM:
            found.append(sliding_window_view(np.array(words, np.int64), GRAM) @ weights_G)
    return np.concatenate(found)


def _sentences(path: Path) -> Iterator[str]:
    """Sentences of a file in one of the sets' formats."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".xml":
        for sentence in ElementTree.fromstring(text).iter("sentence"):
            yield " ".join(word.text or "" for word in sentence)
    elif path.suffix == ".jsonl":
        for line in text.splitlines():
            yield from (value for key, value in json.loads(line).items() if key.startswith("sentence_"))
    elif path.parent.name == "conll2003":
        yield from (" ".join(line.split(" ")[0] for line in block.splitlines()) for block in text.split("\n\n"))
    else:
        yield from (field for line in text.splitlines() for field in line.split("\t") if len(field.split()) > 1)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["start", store, directory]:
            start(Path(store), Path(directory))
        case ["deepen", export, directory, *order]:
            deepen(Path(export), Path(directory), [int(layer) for layer in order])
        case ["head", export, other, directory]:
            head(Path(export), Path(other), Path(directory))
        case ["pack", export]:
            pack(Path(export))
        case ["overlap", data, *texts]:
            overlap(Path(data), [Path(text) for text in texts])
        case _:
            sys.exit(__doc__)
