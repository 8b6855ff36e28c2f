"""Turn pieces of documents into windows of token ids.

    for window in windows(pieces, tokenizer, special_ids, rules):

There are two packings. `packed` fills every window with consecutive documents: [CLS] a a a [SEP] b b [SEP]. `pairs` is
that of the official code (szegedai/MLSM, pretrainer.py): two consecutive lines of a document, [CLS] A [SEP] B [SEP],
each line in one pair. Not handled here: which documents there are (documents.py), segment ids.

The tokens of a packed document are those of its whole text as one string. If a tokenizer drops white space and reads
every word by itself (as BERT's does), these are the tokens of its lines one after the other. For other tokenizers
(byte-level BPE, SentencePiece) the document is put together first; a long document is cut only at a place where the
tokenizer itself splits.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.corpus.source import PIECE_CHARACTERS, Piece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WHOLE_CHARACTERS = PIECE_CHARACTERS  # a document up to this length is tokenised as one string
MOST_CHARACTERS = 1 << 20  # a document without a place to cut is cut at this length
CONTEXT_CHARACTERS = 1024  # around a cut: on these the tokenizer must split there
CANDIDATES = 64  # number of places to try
_SINGLE_SPACE = re.compile(r"(?<=\S)\s(?=\S)")
_DROP_WHITE_SPACE = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")
_ACT_ON_WORDS = (*_DROP_WHITE_SPACE, "Punctuation", "Digits", "UnicodeScripts")
_ACT_ON_CHARACTERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "StripAccents")


class Window(NamedTuple):
    """One window.

    ids          int64 list, [CLS] … [SEP], at most `max_length` tokens
    run_starts   positions in the window at which a document's run begins; the first is 0
    run_records  that document's record number
    number       number of the window in a store of hidden states; None for a window of text
    """

    ids: list[int]
    run_starts: list[int]
    run_records: list[int]
    number: int | None = None


def windows(
    pieces: Iterable[Piece], tokenizer: "PreTrainedTokenizerFast", special_ids: Mapping[str, Any], rules: Mapping
) -> Iterator[Window]:
    """Windows of the pieces of documents.

    rules  of plan.windowing: packing, max_length, and perhaps text = "document"
    """
    cls_id, sep_id, max_length = special_ids["cls"], special_ids["sep"], rules["max_length"]
    if rules["packing"] == "pairs":
        return pair_windows(tokenise(_sentences_of_pairs(pieces), tokenizer), max_length, cls_id, sep_id)
    return packed_windows(packed_tokens(pieces, tokenizer, rules), max_length, cls_id, sep_id)


def packed_tokens(
    pieces: Iterable[Piece], tokenizer: "PreTrainedTokenizerFast", rules: Mapping
) -> Iterator[tuple[int, list[int]]]:
    """Pairs (record, token ids) of the pieces of documents; those of one record follow each other."""
    if rules.get("text") == "document":
        pieces = _documents_in_parts(pieces, tokenizer.backend_tokenizer)
    return tokenise(pieces, tokenizer)


def drops_white_space(tokenizer: "PreTrainedTokenizerFast") -> bool:
    """Whether a tokenizer drops white space first and then reads every word by itself.

    If so, the tokens of a document are the tokens of its lines in sequence.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    normalizers = _members(rules["normalizer"], "normalizers")
    first, *others = _members(rules["pre_tokenizer"], "pretokenizers") or [{"type": None}]
    return (
        all(member["type"] in _ACT_ON_CHARACTERS for member in normalizers)
        and first["type"] in _DROP_WHITE_SPACE
        and all(member["type"] in _ACT_ON_WORDS or member.get("prepend_scheme") == "always" for member in others)
    )


def _members(rule, members):
    """The parts of a rule in tokenizer.json as a flat list, nested ones included."""
    if rule is None:
        return []
    return [part for member in rule[members] for part in _members(member, members)] if members in rule else [rule]


def _documents_in_parts(pieces, backend):
    """The same documents, each as one piece, or a long one as several pieces that together give the same tokens."""
    for _, document in groupby(pieces, key=lambda piece: piece.record):
        texts, size, enough = [], 0, WHOLE_CHARACTERS + CONTEXT_CHARACTERS
        for piece in document:
            texts.append(piece.text)
            size += len(piece.text)
            while size > enough:
                text = "".join(texts)
                if not (cut := _place_to_cut(text, backend)):
                    if size <= MOST_CHARACTERS:
                        texts, enough = [text], min(2 * size, MOST_CHARACTERS)
                        break
                    cut = MOST_CHARACTERS
                yield piece._replace(text=text[:cut])
                texts, size, enough = [text[cut:]], size - cut, WHOLE_CHARACTERS + CONTEXT_CHARACTERS
        if size:
            yield piece._replace(text="".join(texts))


def _place_to_cut(text, backend):
    """A place near the end of the text at which the tokenizer splits, in any surroundings; 0 if none is found."""
    places = [match.start() for match in _SINGLE_SPACE.finditer(text, 0, len(text) - CONTEXT_CHARACTERS)]
    for place in reversed(places[-CANDIDATES:]):
        before = text[max(0, place - CONTEXT_CHARACTERS) : place]
        behind = text[place : place + CONTEXT_CHARACTERS]
        if all(parts(before) + parts(behind) == parts(before + behind) for parts in _views(backend)):
            return place
    return 0


def _views(backend):
    """Two functions of a text: one gives the parts that the model tokenises separately, the other all their tokens."""

    def pre_tokens(text):
        text = backend.normalizer.normalize_str(text) if backend.normalizer else text
        return [part for part, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]

    return pre_tokens, lambda text: backend.encode(text, add_special_tokens=False).ids


def tokenise(
    pieces: Iterable[Piece], tokenizer: "PreTrainedTokenizerFast", batch_characters: int = 1 << 20
) -> Iterator[tuple[int, list[int]]]:
    """Pairs (record, token ids) of the pieces, each tokenised by itself, in batches on all cores."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= batch_characters:
            yield from _tokenise_batch(batch, tokenizer)
            batch, characters = [], 0
    if batch:
        yield from _tokenise_batch(batch, tokenizer)


def _tokenise_batch(batch, tokenizer):
    # Call the backend itself: transformers' wrapper took a third of the time.
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    return ((piece.record, encoding.ids) for piece, encoding in zip(batch, encoded, strict=True))


def packed_windows(
    tokens: Iterable[tuple[int, list[int]]], max_length: int, cls_id: int, sep_id: int
) -> Iterator[Window]:
    """Windows filled to `max_length`; documents follow each other with [SEP] between.

    tokens   pairs (record, token ids); pairs of one document are adjacent
    Yields   Window; all but the last are full, or one token short where only a separator would have fitted
    """
    ids = [cls_id]
    starts: list[int] = []
    records: list[int] = []
    for record, piece in tokens:
        position = 0
        while position < len(piece):
            separator = bool(records) and records[-1] != record
            if len(ids) + separator > max_length - 2:  # no room for one more token and the last [SEP]
                yield Window(ids + [sep_id], starts, records)
                ids, starts, records = [cls_id], [], []
                continue
            if separator:
                ids.append(sep_id)
            if separator or not records:
                starts.append(len(ids) if records else 0)
                records.append(record)
            take = min(max_length - 1 - len(ids), len(piece) - position)
            ids.extend(piece[position : position + take])
            position += take
    if records:
        yield Window(ids + [sep_id], starts, records)


def pair_windows(
    tokens: Iterator[tuple[int, list[int]]], max_length: int, cls_id: int, sep_id: int
) -> Iterator[Window]:
    """One window for every two sentences; the longer sentence is cut until they fit.

    tokens  pairs (record, token ids): always two sentences of one record, one after the other
    """
    for (record, first), (_, second) in zip(tokens, tokens, strict=True):
        keep_first, keep_second = _longest_first(len(first), len(second), max_length - 3)
        if not first + second:  # the tokenizer drops all their characters
            continue
        yield Window([cls_id, *first[:keep_first], sep_id, *second[:keep_second], sep_id], [0], [record])


def _longest_first(first, second, room):
    """Lengths of two sentences cut to fit together: the longer one first, as `tokenizers` does with truncation=True."""
    if first + second <= room:
        return first, second
    shorter = min(first, second, room // 2)
    return (shorter, room - shorter) if first <= second else (room - shorter, shorter)


def _sentences_of_pairs(pieces):
    """Pieces of one line each; every two make a window. The rules are the official code's.

    A pair does not start with a line of less than five characters. A pair is dropped if its second line is so short, if
    its lines together have less than five words, or if the document ends.
    """
    for _, document in groupby(pieces, key=lambda piece: piece.record):
        first = None
        for line in _lines(document):
            if first is None:
                first = line if len(line.text) >= 5 else None
            else:
                if len(line.text) >= 5 and len(first.text.split()) + len(line.text.split()) >= 5:
                    yield from (first, line)
                first = None


def _lines(document):
    """The lines of a document that are not blank, without white space at their end; of long ones only the start."""
    line = ""
    for piece in document:
        first, *others = piece.text.split("\n")
        if len(line) < PIECE_CHARACTERS:
            line += first
        for following in others:
            if line.strip():
                yield piece._replace(text=line.rstrip())
            line = following
    if line.strip():
        yield piece._replace(text=line.rstrip())


def join_windows(windows: Sequence[Window]) -> dict[str, np.ndarray]:
    """Windows end to end: ids (T), lengths (W), run_starts (R), run_records (R), as int64 arrays."""
    lengths = np.array([len(window.ids) for window in windows], np.int64)
    begins = np.cumsum(lengths) - lengths
    starts = [begin + start for begin, window in zip(begins, windows, strict=True) for start in window.run_starts]
    return {
        "ids": np.concatenate([np.asarray(window.ids, np.int64) for window in windows]),
        "lengths": lengths,
        "run_starts": np.array(starts, np.int64),
        "run_records": np.concatenate([np.asarray(window.run_records, np.int64) for window in windows]),
    }
