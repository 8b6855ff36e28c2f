"""Documents for the scan of a corpus: whole, one at a time, each with the reason for leaving it out, if any.

    for document in documents(pieces): reason = selection.refusal(document)

A document is identified by the SHA-256 of its text without white space at its ends, in any file or kind of file. Not
handled here: near duplicates, quality, language: tools such as DataTrove do that better (docs/corpora.md).
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

_RECENT = 1 << 17  # most keys in the Python set; then they become an array
_RATIO = 8  # arrays are merged until each is this many times as long as the next: few to search, few merges


class Document(NamedTuple):
    """What the scan records about a document; a blank one has no characters."""

    record: int
    offset: int
    bytes: int
    """Size of its text in UTF-8."""
    characters: int
    """Length without white space at its ends."""
    split_key: int
    """64 bits of the hash of its first characters, which decide whether it is held out."""
    key: int
    """64 other bits of the hash of its whole text."""
    invalid: bool
    """Whether something in it was not UTF-8."""


@dataclass(frozen=True)
class Selection:
    """The rules for leaving out documents."""

    invalid: bool = False
    """Whether to leave out documents that are not UTF-8."""
    min_characters: int = 0
    duplicates: bool = True
    """Whether to leave out documents with the same text as an earlier one that was kept."""

    @classmethod
    def of(cls, config: TextConfig) -> "Selection":
        """The rules in the settings."""
        return cls(config.invalid_utf8 == "skip", config.min_characters, not config.keep_duplicates)

    def refusal(self, document: Document, seen: "Seen") -> str | None:
        """The scan's name for the reason to leave out a document, or None. Documents that stay are added to `seen`."""
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
    """The documents that consist of these pieces, in order; only the start of one document is in memory at a time."""
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
    """Read the first pieces of a document, enough to decide whether it is held out."""
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
