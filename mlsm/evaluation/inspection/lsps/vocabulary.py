"""Turns ids into readable text, and says which tokens begin a word.

    vocabulary = Vocabulary(tokenizer_dir, vocab_size)
    vocabulary.join(ids)

A token that continues a word (student/masks/words.py) is written without a space before it, and so is closing
punctuation; what the corpus had there is not in the store. A token without a letter or digit is its own word, so
that "rates" and "rates," of a byte-level vocabulary are one word. Not handled here: normalisation, which the tokenizer
has done.

Shapes: V vocabulary, T tokens.
"""

from pathlib import Path

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.errors import RunError
from student.masks.words import continuation_flags

_NO_SPACE_BEFORE, _NO_SPACE_AFTER = set(".,;:!?)]}%…"), set("([{")
_PREFIXES = ("##", "Ġ", "▁")
_SPACES = _PREFIXES[1:]


class Vocabulary:
    """The texts of a store's tokens.

    texts        list (V) of str, without the mark of a word's beginning or continuation
    continues_V  bool: continues the word before it
    is_symbol_V  bool: no letter, no digit
    """

    def __init__(self, tokenizer_dir: Path, vocab_size: int):
        self.texts = _texts(Path(tokenizer_dir), vocab_size)
        self.is_symbol_V = np.array([text != "" and not any(map(str.isalnum, text)) for text in self.texts], bool)
        try:
            self.continues_V = continuation_flags(Path(tokenizer_dir), vocab_size)
        except RunError:  # nobody knows where its words begin: every token is one
            self.continues_V = np.zeros(vocab_size, bool)
        self._tight_V = self.continues_V | np.array([text in _NO_SPACE_BEFORE for text in self.texts], bool)
        self._opening_V = np.array([text in _NO_SPACE_AFTER for text in self.texts], bool)

    def begins_word(self, ids_T: np.ndarray) -> np.ndarray:
        """Which tokens of a running text begin a word, bool (T); the first does."""
        alone_T = self.is_symbol_V[ids_T]
        begins_T = ~self.continues_V[ids_T] | alone_T
        begins_T[1:] |= alone_T[:-1]
        begins_T[:1] = True
        return begins_T

    def pieces(self, ids_T: np.ndarray) -> list[str]:
        """The tokens as strings whose concatenation is the text; all but the first with the space before them."""
        spaced_T = ~self._tight_V[ids_T]
        spaced_T[1:] &= ~self._opening_V[ids_T[:-1]]
        spaced_T[:1] = False
        return [" " * bool(spaced) + self.texts[id] for id, spaced in zip(ids_T.tolist(), spaced_T, strict=True)]

    def join(self, ids_T: np.ndarray) -> str:
        """The text of some tokens in a row."""
        return "".join(self.pieces(ids_T))


def _texts(directory, vocab_size):
    path = directory / "tokenizer.json"
    if not path.is_file():
        return [f"#{number}" for number in range(vocab_size)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(read_file(path))
    decoded = tokenizer.decode_batch([[number] for number in range(vocab_size)], skip_special_tokens=False)
    names = [tokenizer.id_to_token(number) or f"#{number}" for number in range(vocab_size)]
    return [_plain(text, name) for text, name in zip(decoded, names, strict=True)]


def _plain(text, name):
    """A token's own text; its name in the vocabulary where it has none, or only part of a character."""
    text = text.strip()
    if not text or "\ufffd" in text:
        text = name
    if name in _SPACES:  # a space on its own, before a word that continues it
        return ""
    for prefix in _PREFIXES:
        if len(text) > len(prefix):
            text = text.removeprefix(prefix)
    return text
