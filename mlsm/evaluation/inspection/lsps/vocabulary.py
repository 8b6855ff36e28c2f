"""Turns ids into readable text, and says which tokens begin a word.

    vocabulary = Vocabulary(tokenizer_dir, vocab_size)
    vocabulary.join(ids)

A token that continues a word (student/masks/words.py) is written without a space before it, and so is closing
punctuation; what the corpus had there is not in the store. A token without a letter, digit or accent is its own word,
so that "rates" and "rates," of a byte-level vocabulary are one word. So is each token of a script without spaces. A
line feed is shown as ↵, a tab as ⇥, spaces in a token of their own as ␣. Tokens that have a part of a character each,
as in byte-level vocabularies, are read together.

Shapes: V vocabulary, T tokens.
"""

import unicodedata
from pathlib import Path

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.errors import RunError
from student.masks.words import UNSPACED, continuation_flags, token_texts

_NO_SPACE_BEFORE, _NO_SPACE_AFTER = set(".,;:!?)]}%…"), set("([{")
_JOINERS = ("\u200c", "\u200d")  # ZWNJ and ZWJ, which Persian and others write inside words


class Vocabulary:
    """The texts of a store's tokens.

    texts        list (V) of str, without the mark of a word's beginning or continuation; the bytes, such as \\xc3, of a
                 token that has only a part of a character
    continues_V  bool: continues the word before it
    is_symbol_V  bool: no letter, digit or accent
    """

    def __init__(self, tokenizer_dir: Path, vocab_size: int):
        self._tokenizer = _load(tokenizer_dir)
        self._decoded: dict[tuple[int, ...], str] = {}  # texts of tokens with parts of characters
        self.texts, self._is_partial_V = _texts(self._tokenizer, vocab_size)
        self.is_symbol_V = np.array([_is_symbol(text) for text in self.texts], bool) & ~self._is_partial_V
        try:
            self.continues_V = continuation_flags(tokenizer_dir, vocab_size)
        except RunError:  # nobody knows where its words begin: every token is one
            self.continues_V = np.zeros(vocab_size, bool)
        self._knows_words = bool(self.continues_V.any())
        self._unspaced_V = np.array([UNSPACED.match(text) is not None for text in self.texts], bool)
        self._is_empty_V = np.array([text == "" for text in self.texts], bool)
        self._tight_V = self.continues_V | np.array([text in _NO_SPACE_BEFORE for text in self.texts], bool)
        self._opening_V = np.array([text in _NO_SPACE_AFTER for text in self.texts], bool)

    def begins_word(self, ids_T: np.ndarray) -> np.ndarray:
        """Which tokens of a running text begin a word, bool (T); the first does."""
        alone_T = self.is_symbol_V[ids_T]
        begins_T = ~self.continues_V[ids_T] | alone_T
        begins_T[1:] |= alone_T[:-1] | self._unspaced_V[ids_T[1:]] & ~self._is_empty_V[ids_T[:-1]]
        for first, stop, text in self._characters(ids_T):
            follows_space = first > 0 and self._is_empty_V[ids_T[first - 1]]
            begins_T[first] |= _is_symbol(text) or UNSPACED.match(text) is not None and not follows_space
            begins_T[first + 1 : stop] = False
            begins_T[stop : stop + 1] |= _is_symbol(text)
        begins_T[:1] = True
        return begins_T

    def pieces(self, ids_T: np.ndarray) -> list[str]:
        """The tokens as strings whose concatenation is the text; all but the first with the space before them."""
        spaced_T = ~self._tight_V[ids_T]
        spaced_T[1:] &= ~self._opening_V[ids_T[:-1]]
        spaced_T[:1] = False
        texts = [self.texts[id] for id in ids_T.tolist()]
        for first, stop, text in self._characters(ids_T):
            texts[first:stop] = [text, *[""] * (stop - first - 1)]
        return [" " * bool(spaced) + text for text, spaced in zip(texts, spaced_T, strict=True)]

    def shown_at(self, ids_T: np.ndarray) -> np.ndarray:
        """The place of the piece that has the text of each token, int64 (T): its own, or that of the first token of its
        characters.
        """
        places_T = np.arange(len(ids_T))
        for first, stop, _ in self._characters(ids_T):
            places_T[first:stop] = first
        return places_T

    def _characters(self, ids_T):
        """Tokens that have parts of characters, as few together as have whole ones: triples (first place, place after
        the last, text)."""
        is_partial_T = self._is_partial_V[ids_T]
        splits = np.diff(is_partial_T.astype(np.int8), prepend=0, append=0)
        for begin, end in zip(np.flatnonzero(splits > 0).tolist(), np.flatnonzero(splits < 0).tolist(), strict=True):
            first = begin
            for stop in range(begin + 1, end + 1):
                text = self._decode(tuple(ids_T[first:stop].tolist()))
                is_cut = stop == end or self._knows_words and not self.continues_V[ids_T[stop]]
                if "\ufffd" not in text or is_cut:
                    yield first, stop, text
                    first = stop

    def _decode(self, ids):
        if ids not in self._decoded:
            self._decoded[ids] = self._tokenizer.decode(list(ids), skip_special_tokens=False).strip()
        return self._decoded[ids]

    def join(self, ids_T: np.ndarray) -> str:
        """The text of some tokens in a row."""
        return "".join(self.pieces(ids_T))

    def normalised(self, text: str) -> str:
        """A text as the tokenizer changes it before it looks for tokens, such as to lower case without accents."""
        normalizer = self._tokenizer and self._tokenizer.normalizer
        return normalizer.normalize_str(text).replace("▁", " ").strip() if normalizer else text


def _load(directory):
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_buffer(read_file(path))


def _texts(tokenizer, vocab_size):
    """The texts of all tokens, and which of them have only a part of a character, bool (V)."""
    if tokenizer is None:
        return [f"#{number}" for number in range(vocab_size)], np.zeros(vocab_size, bool)
    texts, _, is_partial = token_texts(tokenizer, range(vocab_size))
    return texts, np.array(is_partial, bool)


def _is_symbol(text):
    """Whether a text is its own word. Half of a character, or a joiner, belongs to the word before it."""
    if text in ("", *_JOINERS):
        return False
    return "\ufffd" not in text and not any(unicodedata.category(one)[0] in "LNM" for one in text)
