"""Tiny learnable stores on disk for the student's tests, written by the project's own writer.

A language of 60 words in windows of 16: a word mostly decides the next one, its three LSPs, and what a teacher says.
"""

import json

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from shards.codec import encode_hidden
from shards.copies import dictionary_fingerprint
from shards.files import StoreFiles
from shards.manifest import Plan, PlannedUnit, fingerprint
from shards.reader import Store
from shards.schema import LSP_OCTAVES, ShardMeta
from shards.writer import UnitWriter

WORDS = 60
LENGTH = 16
WIDTH = 12  # of hidden states and atoms
SPECIAL = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
CHECKPOINT_STATE = {  # as a run on some store has it in state.json, without step and files
    **{"tokens": 0, "seconds": 0.0, "flops": 0, "held_out": {}, "held_out_step": 0},
    **{"run": "r", "plan": "p", "target": "t", "shards": "s", "environment": {}},
}


def write_store(
    path,
    *,
    k,
    kind=None,
    tail=0.01,
    words=WORDS,
    train_windows=150,
    held_out_windows=20,
    pairs=False,
    bare=7,
    atoms=False,
):
    """Write a store and open it; equal arguments but k, kind, tail and bare give the same plan.

    kind   "logits" for a teacher's distributions: k is the width of its head, tail what every other row drops;
           "hidden" for hidden states, with k = 0
    atoms  whether the store has a dictionary
    bare   every so-manyth word has no LSPs
    pairs  windows of sentence pairs: the fifth token after [CLS] is a [SEP]
    """
    rng = np.random.default_rng(0)
    files = StoreFiles(path)
    special_ids = SPECIAL | {"all": sorted(SPECIAL.values())}
    settings = {"teacher": "none", "layer": 3, "k": k, "words": words} | ({"kind": kind, "tail": tail} if kind else {})
    settings |= {"width": WIDTH, "quantise": {"name": "int8"}} if kind == "hidden" else {}
    atoms_Kd = np.random.default_rng(1).normal(size=(k, WIDTH)).astype(np.float32)
    settings |= {"dictionary": dictionary_fingerprint(atoms_Kd)} if atoms else {}
    settings |= {"bare": bare} if bare != 7 else {}
    vocab_size = len(SPECIAL) + words
    target = {
        "settings": settings,
        "target": fingerprint(settings),
        "lineage": {},
        "k": k,
        "vocab_size": vocab_size,
        "max_length": LENGTH,
        "special_ids": special_ids,
        "weight_octaves": LSP_OCTAVES,
    }
    files.create(target)
    write_tokenizer(files.tokenizer, words)
    if atoms:
        files.dictionary.mkdir()
        np.save(files.dictionary / "atoms.npy", atoms_Kd)
        record = {"format": 1, "fingerprint": settings["dictionary"], "shape": [k, WIDTH], "stopped": "made up"}
        (files.dictionary / "dictionary.json").write_text(json.dumps(record | {"settings": {}, "history": []}))
    units = []
    for split, windows in {"train": train_windows, "held_out": held_out_windows}.items():
        unit = PlannedUnit(f"{split}-{windows}-{words}", split, "made up", 0, windows)
        meta = ShardMeta.of_unit(target, unit.id)
        with UnitWriter(files, meta) as writer:
            for count in np.diff([*range(0, windows, 64), windows]):
                columns = block(rng, count, words)
                if pairs:
                    columns["ids"][columns["run_starts"] + 5] = SPECIAL["sep"]
                rows = {}
                if kind == "hidden":
                    rows = hidden_rows(columns["ids"], words, bare, writer.sums)
                elif kind or k:
                    rows = logits_rows(columns["ids"], words, tail) if kind else lsp_rows(columns["ids"], k, bare)
                writer.write_block(**columns | rows)
        units.append(unit)
    files.publish_plan(Plan({"length": LENGTH} | ({"packing": "pairs"} if pairs else {}), tuple(units)))
    return Store.open(path)


def block(rng, windows, words):
    """Windows of 10 to 16 tokens, [CLS] word ... word [SEP]; most words follow from the one before."""
    lengths = rng.integers(10, LENGTH + 1, windows)
    lengths[::2] = LENGTH
    ids = np.concatenate([sentence(rng, length, words) for length in lengths])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    return {"ids": ids, "lengths": lengths, "run_starts": starts, "run_records": np.arange(windows)}


def sentence(rng, length, words):
    chain = [int(rng.integers(words))]
    for _ in range(length - 3):
        follows = (3 * chain[-1] + 1) % words
        chain.append(follows if rng.random() < 0.9 else int(rng.integers(words)))
    return np.array([SPECIAL["cls"], *(np.array(chain) + len(SPECIAL)), SPECIAL["sep"]])


def lsp_rows(ids, k, bare=7):
    """Three LSPs for a word, decided by the word; special tokens and every `bare`-th word have none."""
    nnz, indices, weights = [], [], []
    for token in ids:
        empty = token < len(SPECIAL) or token % bare == 0
        row = [] if empty else sorted({int(token) % k, int(token) * 5 % k, int(token) * 11 % k})
        nnz.append(len(row))
        indices += row
        weights += list(np.array([0.5, 0.3, 0.2][: len(row)]) / sum([0.5, 0.3, 0.2][: len(row)]))
    return {
        "nnz": np.array(nnz),
        "indices": np.array(indices),
        "weights": np.array(weights),
        "tail": np.zeros(len(ids), np.float32),
    }


def logits_rows(ids, words, tail):
    """A teacher that mostly sees the word or its neighbour; every third time also one behind the vocabulary.

    Special tokens have no row; odd words drop the tail.
    """
    nnz, indices, weights, tails = [], [], [], []
    for token in ids.tolist():
        row = {} if token < len(SPECIAL) else teacher_says(token, words)
        nnz.append(len(row))
        tails.append(tail if row and token % 2 else 0.0)
        indices += row
        weights += [weight * (1 - tails[-1]) for weight in row.values()]
    return {
        "nnz": np.array(nnz),
        "indices": np.array(indices),
        "weights": np.array(weights),
        "tail": np.array(tails, np.float32),
    }


def hidden_rows(ids, words, bare, sums):
    """A unit vector decided by the word and the one before; special tokens and every `bare`-th word have none."""
    vectors = np.random.default_rng(2).normal(size=(2, len(SPECIAL) + words, WIDTH)) + 1
    rows = vectors[0][ids] + 0.5 * vectors[1][np.roll(ids, 1)]
    coded = (ids >= len(SPECIAL)) & (ids % bare != 0)
    rows *= (coded / np.linalg.norm(rows, axis=1))[:, None]
    sums["hidden_sum"] += rows.sum(axis=0)
    sums["hidden_squares"] += (rows**2).sum(axis=0)
    codes, scales = encode_hidden(rows.astype(np.float32))
    return {"hidden": codes, "marks": scales}


def teacher_says(token, words):
    """{token: probability}, by increasing token."""
    neighbour = len(SPECIAL) + (token - len(SPECIAL) + 1) % words
    behind = {len(SPECIAL) + words + 2: 0.1} if token % 3 == 0 else {}
    said = {token: 0.7 - sum(behind.values()), neighbour: 0.3} | behind
    return dict(sorted(said.items()))


def write_tokenizer(directory, words, step=1):
    """A tokenizer of the words w0, w1, ...; with step -1 the same words have their ids in the opposite order."""
    names = [f"[{name.upper()}]" for name in SPECIAL] + [f"w{number}" for number in range(words)[::step]]
    tokenizer = Tokenizer(models.WordLevel({name: id for id, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def log_of(run):
    """Lines of training steps in a run's log, by step."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if "loss" in line}


def curve(run):
    """What must not depend on interruptions in a run's log, by step; times do."""
    names = ("loss", "grad_norm", "lr", "tokens", "batch", "held_out")
    return {step: {name: line.get(name) for name in names} for step, line in log_of(run).items()}
