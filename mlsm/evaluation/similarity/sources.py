"""Turn texts into tokens with LSPs and hidden states, with a store's teacher and dictionary or with a student.

    source = open_source("runs/stores/lsp-...")
    for tokens in source.read(["The bank raised its rates."]):
        tokens.names, tokens.lsps_TK, tokens.hidden["layer 10"]

A teacher reads the unmasked text. A student reads it as in training: once per token with that token masked, or once as
it is if it learned from all tokens. Its hidden states are those of the unmasked text. [CLS] and [SEP] are omitted; for
a teacher all special tokens are, also [UNK] and a [MASK] in the text, because stores have no codes for them. A text
longer than a window is cut, and `cut` counts these texts.

Shapes: T tokens of a text, N of a batch, K LSPs, d width of a hidden state, e of an LSP's vector.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array

from mlsm.common.errors import InspectionError
from mlsm.evaluation.inspection.lsps.sample import require_lsps
from mlsm.evaluation.inspection.lsps.texts import (
    code_rows,
    kind_of_source,
    load_store_dictionary,
    load_store_teacher,
    load_student,
)
from pipeline.batch import center_on, make_batch, raw_rows
from pipeline.dictionary.centering import centred_unit_rows
from shards.reader import Store, is_url

BATCH = 64  # texts in a forward pass


class Tokens(NamedTuple):
    """The tokens of one text."""

    names: list[str]
    """as the vocabulary has them"""
    spans: list[tuple[int, int]]
    """its characters in the text (begin, end)"""
    lsps_TK: np.ndarray
    """float32 distributions; the row of a token without a code is zero"""
    hidden: dict[str, np.ndarray]
    """by layer: float32 (T, d)"""


class TeacherSource:
    """Read texts with a store's teacher: the LSPs are those that the store would have.

    atoms_Ke  the LSPs' vectors: the dictionary's
    cut       how many texts were longer than a window
    """

    def __init__(self, store: Store, teacher: str | None = None):
        from pipeline.teacher import Teacher

        require_lsps(store)
        self.store, self.cut = store, 0
        self._dictionary = load_store_dictionary(store)
        self.atoms_Ke = self._dictionary.atoms_Kd
        teacher_to_layer = load_store_teacher(store, teacher)
        layer, last = teacher_to_layer.layer, teacher_to_layer.num_layers
        whole = {"layer": last, "dtype": store.settings["dtype"]}
        self._teacher = Teacher.load(teacher_to_layer.name, **whole) if last > layer else teacher_to_layer
        self._layer, self._numbers = layer, sorted({layer, last})
        self._center_Pd = center_on(self._teacher.device, self._dictionary)
        self.tokenizer = store.load_tokenizer()

    def facts(self) -> dict:
        """Facts about the model that reads the texts."""
        names = ("teacher_name", "layer", "lam", "top_n", "dictionary")
        settings = {name: self.store.settings.get(name) for name in names}
        return {"store": str(self.store.path), "k": self.store.k, **settings}

    def read(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of every text, in order. Raises InspectionError on a text without tokens."""
        read = [_tokenise(self.tokenizer, text, self.store.max_length - 2) for text in texts]
        self.cut += sum(end is not None for _, _, end in read)
        order = sorted(range(len(texts)), key=lambda number: len(read[number][0]))
        found: dict[int, Tokens] = {}
        for start in range(0, len(order), BATCH):
            numbers = order[start : start + BATCH]
            found.update(zip(numbers, self._read_batch([read[number][:2] for number in numbers]), strict=True))
        return [found[number] for number in range(len(texts))]

    def _read_batch(self, texts: list) -> Iterator[Tokens]:
        special = self.store.special_ids
        framed = [[special["cls"], *ids, special["sep"]] for ids, _ in texts]
        lengths = np.array([len(ids) for ids in framed])
        batch = make_batch(np.concatenate(framed), lengths, len(framed), int(lengths.max()), special)
        rows = raw_rows(self._teacher, batch, self._numbers)
        hidden = {f"layer {number}": rows_Nd.cpu().numpy().copy() for number, rows_Nd in rows.items()}
        coded, _ = centred_unit_rows(rows[self._layer].clone(), self._center_Pd, batch.position_N)
        codes = code_rows(self.store, self._dictionary, coded.cpu().numpy())
        lsps_NK = csr_array((codes.weights, codes.indices, codes.indptr), (len(codes), self.store.k)).toarray()
        lsps_NK /= np.maximum(lsps_NK.sum(1, keepdims=True), 1e-12)  # without the tail, as stores decode rows
        first = 0
        for (ids, spans), is_coded in zip(texts, np.split(batch.coded_T, np.cumsum(lengths)[:-1]), strict=True):
            places = np.flatnonzero(is_coded[1:-1])
            rows_of_text = slice(first, first + len(places))
            first += len(places)
            names = self.tokenizer.convert_ids_to_tokens([ids[place] for place in places])
            states = {name: rows_Nd[rows_of_text] for name, rows_Nd in hidden.items()}
            yield Tokens(names, [spans[place] for place in places], lsps_NK[rows_of_text], states)


class StudentSource:
    """Read texts with a student: its predictions for every token from the context.

    atoms_Ke  the LSPs' vectors: the rows of its output matrix
    cut       how many texts were longer than a window
    """

    def __init__(self, source: str):
        self._model = load_student(source)
        self.tokenizer = self._model.tokenizer
        self.source, self.cut = source, 0
        self.atoms_Ke = self._model.student.output_matrix.detach().float().numpy()

    def facts(self) -> dict:
        """Facts about the model that reads the texts."""
        known = self._model.facts
        facts = {
            "dictionary": known.get("dictionary"),
            "trained_from": known.get("store"),
            "positions": known["positions"],
        }
        return {"student": self.source, "k": len(self.atoms_Ke), **facts}

    def read(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of every text, in order. Raises InspectionError on a text without tokens."""
        special, room = self._model.facts["special_ids"], self._model.facts["max_length"] - 2
        found = []
        for text in texts:
            ids, spans, end = _tokenise(self.tokenizer, text, room)
            self.cut += end is not None
            while end is not None:  # one character may be several tokens: the cut must not separate them
                text = text[:end].rstrip()
                ids, spans, end = _tokenise(self.tokenizer, text, room)
            (predicted,) = self._model.lsp([text])
            with torch.inference_mode():
                ids_1L = torch.tensor([[special["cls"], *ids, special["sep"]]])
                (states_Ld,) = self._model.student.encoder(input_ids=ids_1L).last_hidden_state
            hidden = {"last layer": states_Ld[1:-1].numpy()}
            found.append(Tokens(predicted.tokens, spans, predicted.distributions_Tk.numpy(), hidden))
        return found


def open_source(source: str, teacher: str | None = None) -> "TeacherSource | StudentSource":
    """Open the model that reads texts: a store's teacher, or a student.

    teacher  where the store's teacher is now, if it was moved
    Raises   InspectionError, StoreError, DictionaryError, TeacherError, RunError
    """
    kind = kind_of_source(source)
    if kind == "dictionary":
        raise InspectionError(f"{source} is a dictionary. Pass a store that was made with it, or a student.")
    if kind == "store" and (is_url(source) or os.path.exists(os.path.expanduser(source))):
        return TeacherSource(Store.open(source), teacher)
    if teacher is not None:
        raise InspectionError(f"--teacher applies only to stores, and {source} is not a store. Omit it.")
    return StudentSource(source)


def _tokenise(tokenizer, text: str, room: int) -> tuple[list[int], list[tuple[int, int]], int | None]:
    """A text's first `room` ids without special ones, their characters in the text, and the first character of the
    token that is left out, None if there is none.
    """
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = read["input_ids"], read["offset_mapping"]
    if not ids:
        raise InspectionError(f"the text {text[:60]!r} has no tokens. Pass another text.")
    return ids[:room], spans[:room], spans[room][0] if len(ids) > room else None
