"""A teacher's tokenizer: one that reads whole documents, and its special tokens."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from mlsm.common.disk import read_file
from mlsm.common.errors import TeacherError, describe
from mlsm.common.model_checks import describe_special_tokens, open_tokenizer, quiet_transformers, special_tokens
from pipeline.teacher.location import INSTALL_SENTENCEPIECE, TOKENIZER_FILES, find, locate, needs_sentencepiece

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPAIR = (
    "Use the complete tokenizer files that the model was trained with. In a tokenizer of your own, give each of [PAD], "
    "[UNK], [CLS], [SEP] and [MASK] an id that no other token has, as train-tokenizer does."
)


def load_tokenizer(name_or_path: str | Path) -> "PreTrainedTokenizerBase":
    """The fast tokenizer of a teacher or of any directory of tokenizer files.

    It reads whole documents: a saved truncation or padding (as in sentence-transformers) is switched off. A special
    token that is written in a text ("[MASK]") is read as text; only the tokenizer itself adds special tokens. (Unigram
    tokenizers, such as XLM-R's, have "<mask>" and the like in their vocabulary and still find them in text.) This is a
    state of the object, so a saved copy behaves as usual again.
    Raises  TeacherError if there is no vocabulary or no fast tokenizer for it, if it lacks a special token, or if
            sentencepiece is needed and missing
    """
    directory = locate(name_or_path)
    if not any(find(directory, TOKENIZER_FILES)):  # transformers would make one up
        raise TeacherError(
            f"{name_or_path}: no tokenizer in {directory} (expected one of {', '.join(TOKENIZER_FILES)}). "
            "Copy the files of the tokenizer that this model was trained with into that directory."
        )
    if needs_sentencepiece(directory):  # transformers would ask for tiktoken, or make a vocabulary up
        (model, *_) = sorted(path.name for path in find(directory, TOKENIZER_FILES))
        raise TeacherError(
            f"{name_or_path}: the tokenizer in {directory} ({model}) needs sentencepiece:  {INSTALL_SENTENCEPIECE}"
        )
    try:
        with quiet_transformers():
            tokenizer = open_tokenizer(directory, local_files_only=True)
        missing = _missing_tokens(tokenizer, directory)
    except Exception as error:  # a damaged file raises whatever its parser raises, Exception itself included
        raise TeacherError(
            f"{name_or_path}: the tokenizer in {directory} cannot be read: {describe(error)}. "
            "Fetch its files again, or save it once more with save_pretrained."
        ) from error
    if not tokenizer.is_fast:
        raise TeacherError(
            f"{name_or_path}: {type(tokenizer).__name__} is not a fast tokenizer, and only those are supported. Use a "
            "teacher that comes with a tokenizer.json."
        )
    if missing:
        raise TeacherError(
            f"{name_or_path}: the vocabulary in {directory} lacks {', '.join(missing)}; transformers would add an id, "
            f"which may be that of a word. {_REPAIR}"
        )
    tokenizer.split_special_tokens = True  # tokenizer(text) sets the backend's switch again at each call
    tokenizer.init_kwargs.pop("split_special_tokens", None)  # else save_pretrained would save it
    tokenizer.backend_tokenizer.encode_special_tokens = True  # for callers of the backend itself
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Ids of the special tokens: a dict of "cls", "sep", "mask", "pad" (int) and "all" (sorted list).

    "all" has every special id, including [UNK] and added ones. If a tokenizer has no [CLS] or [SEP], its begin- and
    end-of-sequence tokens are used.
    Raises  TeacherError naming what is missing, or which tokens share an id
    """
    tokens = special_tokens(tokenizer)
    if missing := [role for role in ("cls", "sep", "mask", "pad") if role not in tokens]:
        raise TeacherError(
            f"the tokenizer {tokenizer.name_or_path} has no token for {', '.join(missing)}; cls, sep, mask "
            "and pad are all needed. Use the tokenizer of a masked language model."
        )
    if problem := describe_special_tokens(tokenizer):
        raise TeacherError(f"the tokenizer {tokenizer.name_or_path}: {problem} {_REPAIR}")
    found = {role: tokenizer.convert_tokens_to_ids(token) for role, token in tokens.items() if role != "unk"}
    return found | {"all": sorted({*found.values(), *tokenizer.all_special_ids})}


def _missing_tokens(tokenizer, directory):
    """Special tokens that the files of a directory give no id. SentencePiece models are not read."""
    file, names = directory / "tokenizer.json", set()
    if file.is_file():
        content = json.loads(read_file(file))
        vocabulary = content["model"]["vocab"]  # a dict, or pairs of token and score
        names |= {*vocabulary} if isinstance(vocabulary, dict) else {token for token, _ in vocabulary}
        names |= {added["content"] for added in content.get("added_tokens") or []}
    elif (directory / "vocab.txt").is_file():
        names |= {*read_file(directory / "vocab.txt").decode().splitlines()}
    else:
        return []
    if (file := directory / "added_tokens.json").is_file():
        names |= {*json.loads(read_file(file))}
    if (file := directory / "tokenizer_config.json").is_file():
        listed = json.loads(read_file(file)).get("added_tokens_decoder") or {}
        names |= {added["content"] for added in listed.values()}
    return [token for role, token in special_tokens(tokenizer).items() if role != "unk" and token not in names]
