"""Documents as the scan sees them: whole, one at a time, with the reason why one may be left out.

    for document in documents(pieces): reason = selection.refusal(document)

A document is known by the SHA-256 of its text without the white space at its ends, whatever file or kind of file it
is in. Not handled here: near duplicates, quality, language: tools such as DataTrove do that better (docs/corpora.md).
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from pipeline.config import TextConfig
from pipeline.corpus.source import PIECE_CHARACTERS, Piece

_RECENT = 1 << 17  # keys in a Python set, before they join an array
_RATIO = 8  # arrays are merged until each is this many times as long as the next: few to search, few merges


class Document(NamedTuple):
    """What the scan records about a document; a blank one has no characters."""

    record: int
    offset: int
    bytes: int
    """Of its text in UTF-8."""
    characters: int
    """Without white space at its ends."""
    split_key: int
    """64 bits of its beginning's hash, which decide whether it is held out."""
    key: int
    """64 other bits of the hash of its whole text."""
    invalid: bool
    """Whether something in it was not UTF-8."""


@dataclass(frozen=True)
class Selection:
    """The documents to leave out."""

    invalid: bool = False
    """Those that are not UTF-8."""
    min_characters: int = 0
    duplicates: bool = True
    """Those whose text an earlier one has that was not left out."""

    @classmethod
    def of(cls, config: TextConfig) -> "Selection":
        """The documents that the settings leave out."""
        return cls(config.invalid_utf8 == "skip", config.min_characters, not config.keep_duplicates)

    def refusal(self, document: Document, seen: "Seen") -> str | None:
        """Why a document is left out, as the scan counts it, or None; the documents that stay are added to `seen`."""
        if not document.characters:
            return "blank"
        if self.invalid and document.invalid:
            return "invalid"
        if document.characters < self.min_characters:
            return "too_short"
        if self.duplicates and not seen.add(document.key):
            return "duplicates"
        return None


DEFAULT_SELECTION = Selection()


class Seen:
    """A set of 64-bit keys in 8 bytes each, 16 while two arrays are merged: sorted arrays of growing lengths.

    Among n different texts, two share a key with a probability of n^2 / 2^65: 0.03 % at 100 million.
    """

    def __init__(self):
        self._recent: set[int] = set()
        self._arrays: list[np.ndarray] = []

    def add(self, key: int) -> bool:
        """Add a key; False if it was there."""
        wanted = np.uint64(key)
        if key in self._recent or any(_holds(array, wanted) for array in self._arrays):
            return False
        self._recent.add(key)
        if len(self._recent) == _RECENT:
            self._merge()
        return True

    def _merge(self):
        merged = np.sort(np.fromiter(self._recent, np.uint64, len(self._recent)))
        self._recent.clear()
        while self._arrays and len(self._arrays[-1]) < _RATIO * len(merged):
            merged = np.concatenate((self._arrays.pop(), merged))
            merged.sort(kind="stable")
        self._arrays.append(merged)


def _holds(array, key):
    at = array.searchsorted(key)
    return at < len(array) and array[at] == key


def documents(pieces: Iterable[Piece]) -> Iterator[Document]:
    """The documents that the pieces make up, in their order; only the beginning of one is in memory at a time."""
    for record, group in groupby(pieces, key=itemgetter(0)):
        head = take_head(group)
        text = "".join([piece.text for piece in head])
        size, stripped = len(text.encode()), text.strip()
        digest = hashlib.sha256(stripped.encode()).digest()
        split_key, key = _bits(digest, 0), _bits(digest, 8)
        characters, invalid = len(stripped), any(piece.invalid for piece in head)
        if len(text) >= PIECE_CHARACTERS:
            whole = _Whole(text)
            for piece in group:
                whole.add(piece.text)
                invalid = invalid or piece.invalid
            size, characters, key = whole.bytes, whole.characters, whole.key
        yield Document(record, head[0].offset, size, characters, split_key, key, invalid)


def take_head(pieces: Iterator[Piece]) -> list[Piece]:
    """Take the first pieces of a document, as many as decide whether it is held out."""
    head, characters = [], 0
    for piece in pieces:
        head.append(piece)
        characters += len(piece.text)
        if characters >= PIECE_CHARACTERS:
            break
    return head


def split_key_of(text: str) -> int:
    """The 64 bits of a document's beginning that decide whether it is held out."""
    return _bits(hashlib.sha256(text.strip().encode()).digest(), 0)


def _bits(digest, at):
    return int.from_bytes(digest[at : at + 8], "big")


class _Whole:
    """Size and key of a document that is longer than its head."""

    def __init__(self, text):
        self.bytes, self.characters = 0, 0
        self._digest, self._blank = hashlib.sha256(), []
        self.add(text)

    def add(self, text):
        self.bytes += len(text.encode())
        body = text.rstrip()
        tail = text[len(body) :]
        if not self.characters:
            body = body.lstrip()
        if not body:
            self._blank.append(tail)
            return
        whole = "".join([*self._blank, body]) if self.characters else body
        self._digest.update(whole.encode())
        self.characters += len(whole)
        self._blank = [tail]

    @property
    def key(self):
        return _bits(self._digest.digest(), 8)
