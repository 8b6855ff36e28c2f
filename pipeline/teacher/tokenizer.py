"""A teacher's tokenizer: one that reads whole documents, and its special tokens."""

from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import TeacherError, describe
from common.model_checks import open_tokenizer, quiet_transformers
from pipeline.teacher.location import TOKENIZER_FILES, find, locate
from shards.copies import tokenizer_fingerprint  # noqa: F401 (stores compare with it, and so define it)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(name_or_path: str | Path) -> "PreTrainedTokenizerBase":
    """The fast tokenizer of a teacher or of any directory of tokenizer files.

    Reads whole documents: a truncation or padding that was saved with it (sentence-transformers do that)
    is switched off. A special token written out in a text ("[MASK]") is read as text: only the tokenizer
    itself adds specials; this lives in the object, so a saved copy goes back to the usual behaviour.
    Raises  TeacherError if there is no vocabulary, or no fast tokenizer for it
    """
    directory = locate(name_or_path)
    if not any(find(directory, TOKENIZER_FILES)):  # transformers would invent one
        raise TeacherError(
            f"{name_or_path}: no tokenizer in {directory} (expected one of {', '.join(TOKENIZER_FILES)}). "
            "Copy the files of the tokenizer that this model was trained with into that directory."
        )
    try:
        with quiet_transformers():
            tokenizer = open_tokenizer(directory, local_files_only=True)
    except Exception as error:  # a damaged file raises whatever its parser raises, Exception itself included
        raise TeacherError(
            f"{name_or_path}: the tokenizer in {directory} cannot be read: {describe(error)}. "
            "Fetch its files again, or save it once more with save_pretrained."
        ) from error
    if not tokenizer.is_fast:
        raise TeacherError(
            f"{name_or_path}: {type(tokenizer).__name__} is not a fast tokenizer, and only those are used. "
            "Take a teacher that comes with a tokenizer.json."
        )
    tokenizer.split_special_tokens = True  # tokenizer(text) sets the backend's switch anew at each call
    tokenizer.backend_tokenizer.encode_special_tokens = True  # for callers of the backend itself
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer


def special_ids(tokenizer: "PreTrainedTokenizerBase") -> dict:
    """Ids of the special tokens: a dict of "cls", "sep", "mask", "pad" (int) and "all" (sorted list).

    "all" holds every special id, [UNK] and added ones included. A tokenizer without [CLS] or [SEP] lends
    its begin- and end-of-sequence tokens.
    Raises  TeacherError naming what is missing
    """
    found = {
        "cls": tokenizer.bos_token_id if tokenizer.cls_token_id is None else tokenizer.cls_token_id,
        "sep": tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id,
        "mask": tokenizer.mask_token_id,
        "pad": tokenizer.pad_token_id,
    }
    missing = [name for name, token_id in found.items() if token_id is None]
    if missing:
        raise TeacherError(
            f"the tokenizer {tokenizer.name_or_path} has no token for {', '.join(missing)}; cls, sep, mask "
            "and pad are all needed. Use the tokenizer of a masked language model."
        )
    return found | {"all": sorted({*found.values(), *tokenizer.all_special_ids})}
