"""Find the tokens of a vocabulary that continue a word, from the tokenizer's own file, and write tokens as text.

Three ways of marking words are supported. WordPiece (and BPE like it) puts a prefix, "##", before pieces that continue
a word. Byte-level BPE writes the space before a word as "Ġ", SentencePiece as "▁"; tokens without this mark continue a
word, so punctuation belongs to the word before it. A vocabulary of whole words needs no marks, if the tokenizer splits
text at spaces. Not handled here: languages without spaces, where a "word" found this way is a whole clause
(held_out.py warns of it).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlsm.common.disk import read_file
from mlsm.common.errors import RunError, describe

_BYTE_LEVEL_SPACES = ("Ġ", "Ċ", "ĉ", "č")  # space, line feed, tab, carriage return in GPT-2's alphabet of bytes
_SENTENCEPIECE_SPACE = "▁"
LONE_SPACES = ("Ġ", _SENTENCEPIECE_SPACE)  # tokens of a space alone, before a word that continues it
# The bytes that GPT-2's alphabet writes as the characters from number 256 up; every other byte is written as itself.
_OTHER_BYTES = [*range(33), *range(127, 161), 173]
# Thai to Lao, Burmese, Khmer, kana and Han: scripts without spaces between words, whose tokens are taken for words.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\U00020000-\U0003ffff]"
)
_SPLITS_AT_SPACES = r'"(Whitespace(Split)?|BertPreTokenizer|CharDelimiterSplit)"|"String": " "'


def continuation_flags(tokenizer_dir: Path, vocab_size: int) -> np.ndarray:
    """Whether each id continues the word before it, bool (V); added tokens and ids without a token do not.

    Raises RunError if the tokenizer cannot be read or its way of marking words is not supported
    """
    tokenizer = _tokenizer_json(Path(tokenizer_dir))
    try:
        continues = _rule(tokenizer, tokenizer_dir)
        vocabulary = tokenizer["model"]["vocab"]  # Unigram lists its tokens as [token, score]
        is_mapping = isinstance(vocabulary, dict)
        pairs = vocabulary.items() if is_mapping else ((row[0], id) for id, row in enumerate(vocabulary))
        ids = {id for token, id in pairs if continues(token)}
        ids -= {added["id"] for added in tokenizer.get("added_tokens", ())}
    except (LookupError, TypeError, AttributeError) as error:
        raise RunError(
            f"--mask-unit word: {tokenizer_dir}/tokenizer.json is not a valid tokenizer ({describe(error)}) and does "
            "not show where words begin. Use --mask-unit token or span."
        ) from None
    return np.isin(np.arange(vocab_size), [id for id in ids if type(id) is int])


def _rule(tokenizer: dict, tokenizer_dir: Path):
    """A function: does this token continue a word?"""
    model = tokenizer["model"]
    if prefix := model.get("continuing_subword_prefix"):
        return lambda token: token.startswith(prefix)
    parts = {kind: json.dumps(tokenizer.get(kind), ensure_ascii=False) for kind in ("normalizer", "pre_tokenizer")}
    if model["type"] == "WordLevel" and re.search(_SPLITS_AT_SPACES, parts["pre_tokenizer"]):
        return lambda token: False  # else its tokens may be characters
    if '"ByteLevel"' in parts["pre_tokenizer"]:
        return lambda token: not token.startswith(_BYTE_LEVEL_SPACES)
    if '"Metaspace"' in parts["pre_tokenizer"] or _SENTENCEPIECE_SPACE in parts["normalizer"]:
        return lambda token: not token.startswith(_SENTENCEPIECE_SPACE)
    raise RunError(
        f"--mask-unit word: cannot tell where words begin in the vocabulary of {tokenizer_dir} (a {model['type']} "
        "model; expected WordPiece, byte-level BPE, SentencePiece or whole words). Use --mask-unit token or span."
    )


def _tokenizer_json(tokenizer_dir: Path) -> dict:
    path = tokenizer_dir / "tokenizer.json"
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"--mask-unit word: {path} cannot be read ({type(error).__name__}), so it is unknown where words begin. "
            "Use --mask-unit token or span."
        ) from None


def token_names(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The names of tokens in lists that are printed: their texts, with the "##" of a piece that continues a word.

    tokenizer  of tokenizers or transformers
    """
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(tokenizer, "id_to_token"):  # written in Python: its tokens cannot be decoded one by one
        return tokenizer.convert_ids_to_tokens(list(ids))
    texts, names, _ = token_texts(tokenizer, ids)
    mark = _continuation_mark(tokenizer)
    return [name if mark and name.startswith(mark) else text or "␣" for text, name in zip(texts, names, strict=True)]


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], list[str], list[bool]]:
    """The texts of tokens, without the mark of a word's beginning or continuation; their names in the vocabulary; which
    have only a part of a character. The text of such a part is its bytes, such as \\xc3.

    tokenizer  of tokenizers
    """
    decoded = tokenizer.decode_batch([[number] for number in ids], skip_special_tokens=False)
    names = [tokenizer.id_to_token(number) or f"#{number}" for number in ids]
    is_partial = ["\ufffd" in text and "\ufffd" not in name for text, name in zip(decoded, names, strict=True)]
    mark = _continuation_mark(tokenizer)
    if tokenizer.decoder is None and not mark:
        decoded = [re.sub("[Ġ▁]", " ", text) for text in decoded]
    texts = [
        _bytes_of(name) if partial else _plain(text, name, mark)
        for text, name, partial in zip(decoded, names, is_partial, strict=True)
    ]
    return texts, names, is_partial


def _continuation_mark(tokenizer):
    return getattr(tokenizer.model, "continuing_subword_prefix", None) or ""


def _bytes_of(name):
    """A part of a character, whose bytes are written in GPT-2's alphabet or, by SentencePiece, as <0xC3>."""
    if name.startswith("<0x") or any(ord(one) >= 256 + len(_OTHER_BYTES) for one in name):
        return name
    numbers = [_OTHER_BYTES[ord(one) - 256] if ord(one) >= 256 else ord(one) for one in name]
    return bytes(numbers).decode("utf-8", "backslashreplace").strip()


def _plain(text, name, mark):
    """A token's own text; a sign for white space; its name in the vocabulary where it has no text."""
    plain = text.strip()
    if not plain and name in LONE_SPACES:  # a space on its own, before a word that continues it
        return ""
    if text.isspace():
        return "↵" if set(text) & set("\n\r") else "⇥" if "\t" in text else "␣"
    return plain.removeprefix(mark) or plain or name
