"""Read a store's copies of tokenizer, dictionary and codebook, and check that they are those of its target.

    contents = read_tokenizer(files)          # name to bytes; StoreError unless it is the target's tokenizer
    write_files(directory, contents)

A store is used without the teacher's directory, so it contains the tokenizer and the atoms. Before a copy is used or
passed on, it is compared with the fingerprint in target.json: with another tokenizer token ids would mean other words,
and with other atoms LSPs would mean something else.
Only named regular files are read: no code (`.py`), no links out of the store, and no `auto_map` entries, for which
transformers would run code. The bytes that were read are compared, and the same bytes are written to an export.
Not handled here: making the copies (pipeline/stores.py), how a dictionary was learned (pipeline/dictionary/).
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, NotRequired, TypedDict

import numpy as np
from msgspec import Meta

from mlsm.common import disk
from mlsm.common.errors import ShardError, StoreError, WriteError
from mlsm.common.json_checks import Count, Digest, Number, find_problem, parse_json
from mlsm.common.model_checks import describe_special_tokens, open_tokenizer, special_tokens
from mlsm.common.paths import utf8_name
from shards.files import StoreFiles
from shards.members import read_array

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spm.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
DICTIONARY_FILES = ("atoms.npy", "dictionary.json", "center.npy")  # the last if hidden states are centred
CODEBOOK_FILES = ("centroids.npy",)
SPECIAL_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
_VOCABULARIES = {
    "tokenizer.json",
    "vocab.txt",
    "vocab.json",
    "tokenizer.model",
    "spm.model",
    "spiece.model",
    "sentencepiece.bpe.model",
}
_MOST_BYTES = 1 << 30  # size limit of one such file


class _Evaluation(TypedDict):
    objective: Number
    near_atoms: NotRequired[Count]
    largest_cosine: NotRequired[Number]
    kept_mass: NotRequired[dict[Annotated[str, Meta(pattern=r"\A[0-9]{1,3}\Z")], Number]]


class _DictionaryFile(TypedDict):
    format: Count
    fingerprint: Digest
    shape: tuple[Annotated[int, Meta(ge=1)], Annotated[int, Meta(ge=1)]]
    stopped: str
    settings: dict
    history: list[_Evaluation]


def parse_dictionary(raw: bytes, where: object) -> dict:
    """The values of a dictionary.json. Raises ShardError, naming `where` and the field."""
    values = parse_json(raw, where)
    if problem := find_problem(values, _DictionaryFile):
        raise ShardError(f"{where}: {problem}")
    return values


def dictionary_fingerprint(atoms_Kd: np.ndarray, center: tuple[str | None, np.ndarray] | None = None) -> str:
    """Hexadecimal SHA-256 over shape and bytes of a dictionary's atoms, float32, and of its centre if it has one.

    center  (kind, rows_Pd): what is subtracted from hidden states before they are coded (dictionary/centering.py)
    """
    digest = hashlib.sha256(repr(atoms_Kd.shape).encode())
    digest.update(np.ascontiguousarray(atoms_Kd, "<f4").data)
    if center is not None:
        kind, rows_Pd = center
        digest.update(repr(("center", kind, rows_Pd.shape)).encode())
        digest.update(np.ascontiguousarray(rows_Pd, "<f4").data)
    return digest.hexdigest()


def codebook_fingerprint(codebook: np.ndarray) -> str:
    """Hexadecimal SHA-256 over shape and bytes of the centroids of product-quantised hidden states."""
    digest = hashlib.sha256(repr(codebook.shape).encode())
    digest.update(np.ascontiguousarray(codebook, "<f4").data)
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hexadecimal SHA-256 of a fast tokenizer's behaviour: rules, vocabulary and roles of special tokens.

    A saved and reloaded copy has the same fingerprint in any directory. Truncation and padding are ignored, because
    they are options of a call.
    """
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    rules.pop("truncation", None)
    rules.pop("padding", None)
    roles = {role: getattr(tokenizer, f"{role}_token_id") for role in SPECIAL_ROLES}
    canonical = json.dumps([rules, roles], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def read_tokenizer(files: StoreFiles) -> dict[str, bytes]:
    """The files of a store's tokenizer, name to bytes; empty if the target names no tokenizer and there are none.

    files   StoreFiles
    Raises  StoreError when it is not the tokenizer that the target names, or cannot be read
    """
    target, directory = files.target(), files.tokenizer
    expected = target["settings"].get("windowing", {}).get("tokenizer")
    contents = _read(files, directory, TOKENIZER_FILES)
    if "tokenizer_config.json" in contents:
        contents["tokenizer_config.json"] = without_code(contents["tokenizer_config.json"], directory)
    if expected is None:
        return contents
    if not _VOCABULARIES & contents.keys():
        raise StoreError(
            f"{directory} has no vocabulary; it should contain the tokenizer of the stored token ids. "
            f"{files.restore_hint()}"
        )
    with foreign_errors(files):
        found, largest, special, problem = _identity(tuple(contents.items()))
    if found != expected:
        raise StoreError(
            f"{directory} is not the tokenizer of this store: its fingerprint is {found[:12]}, target.json names "
            f"{expected[:12]}. {files.restore_hint()} If that does not help, this release of transformers reads the "
            "files differently from the one that made the store."
        )
    if problem:
        raise StoreError(
            f"{directory}: {problem} The stored token ids are ambiguous. Correct the tokenizer that the text was "
            "encoded with, and encode again, which makes another store."
        )
    if wrong := [role for role, number in special.items() if target["special_ids"].get(role, number) != number]:
        raise StoreError(
            f"{files.target_file}: field special_ids: another id for {', '.join(wrong)} than the store's tokenizer has."
            " Encode again elsewhere."
        )
    if largest >= target["vocab_size"]:
        raise StoreError(
            f"{files.target_file} names a vocabulary of {target['vocab_size']}, its tokenizer has token "
            f"{largest}. Encode again elsewhere."
        )
    return contents


@contextmanager
def foreign_errors(files: StoreFiles) -> Iterator[None]:
    """Turn any error in loading a store's tokenizer into a StoreError, except those of this machine.

    The tokenizer's parser is written in Rust: a panic there raises something that is not an Exception.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError, WriteError):
        raise
    except BaseException as error:
        problem = " ".join(str(error).split())[:200]
        raise StoreError(
            f"{files.tokenizer} cannot be loaded as a tokenizer ({problem}). {files.restore_hint()}"
        ) from None


def read_dictionary(files: StoreFiles) -> dict[str, bytes]:
    """The files of a store's dictionary, name to bytes; empty if the target names no dictionary and there are none.

    files   StoreFiles
    Raises  StoreError when the atoms are not those that the target names, or cannot be read
    """
    expected, directory = files.target()["settings"].get("dictionary"), files.dictionary
    contents = _read(files, directory, DICTIONARY_FILES)
    if expected is None:
        return contents
    try:
        _require_files(contents, directory, ("atoms.npy", "dictionary.json"))
        record = parse_dictionary(contents["dictionary.json"], directory / "dictionary.json")
        center = None
        if "center" in record:
            _require_files(contents, directory, ("center.npy",))
            entry = record["center"]  # any value: its kind is part of the fingerprint
            kind = entry.get("kind") if isinstance(entry, dict) else None
            center = kind, read_array(directory / "center.npy", contents["center.npy"], 2)
        found = dictionary_fingerprint(read_array(directory / "atoms.npy", contents["atoms.npy"], 2), center)
    except ShardError as error:
        raise StoreError(f"{error}. {files.restore_hint()}") from None
    check_dictionary(files, found)
    if record["fingerprint"] != found:
        raise StoreError(
            f"{directory}/dictionary.json is of other atoms ({record['fingerprint'][:12]}). {files.restore_hint()}"
        )
    return contents


def read_atoms(files: StoreFiles) -> np.ndarray:
    """The atoms of a store's dictionary, float32 (k, d). Raises StoreError like `read_dictionary`, or without one."""
    contents = read_dictionary(files)
    if "atoms.npy" not in contents:
        raise StoreError(f"{files.path} has no dictionary: its target names none. Use a store that encode-lsp made.")
    return read_array(files.dictionary / "atoms.npy", contents["atoms.npy"], 2)


def _require_files(contents, directory, names):
    for name in names:
        if name not in contents:
            raise ShardError(f"{directory / name} is missing")


def check_dictionary(files: StoreFiles, found: str) -> None:
    """Raise StoreError unless the atoms with the fingerprint `found` are those that the store's target names."""
    expected = files.target()["settings"].get("dictionary")
    if expected not in (None, found):
        raise StoreError(
            f"{files.dictionary} is not the dictionary of this store: its fingerprint is {found[:12]}, target.json "
            f"names {expected[:12]}. {files.restore_hint()}"
        )


def read_codebook(files: StoreFiles) -> dict[str, bytes]:
    """The file of a store's codebook, name to bytes; empty if the target names none.

    files   StoreFiles
    Raises  StoreError when its centroids are not those that the target names, or cannot be read
    """
    expected = files.target()["settings"].get("quantise", {}).get("codebook")
    if expected is None:
        return {}
    contents = _read(files, files.codebook, CODEBOOK_FILES)
    try:
        _require_files(contents, files.codebook, CODEBOOK_FILES)
        found = codebook_fingerprint(_centroids(files, contents))
    except ShardError as error:
        raise StoreError(f"{error}. {files.restore_hint()}") from None
    if found != expected:
        raise StoreError(
            f"{files.codebook} is not the codebook of this store: its fingerprint is {found[:12]}, target.json names "
            f"{expected[:12]}. {files.restore_hint()}"
        )
    return contents


def load_codebook(files: StoreFiles) -> np.ndarray:
    """The centroids of a store whose target names a codebook, float32 (b, 256, d / b). Raises the errors of
    `read_codebook`."""
    return _centroids(files, read_codebook(files)).copy()


def _centroids(files, contents):
    """The array of a codebook, which must be of the shape that the target states."""
    settings, path = files.target()["settings"], files.codebook / "centroids.npy"
    pieces = settings["quantise"]["bytes"]
    found = read_array(path, contents["centroids.npy"], 3)
    if found.shape != (pieces, 256, settings["width"] // pieces):
        raise ShardError(f"{path} holds centroids of shape {found.shape}, other than the stored hidden states need")
    return found


def load_tokenizer(contents: Mapping[str, bytes]) -> "PreTrainedTokenizerBase":
    """The tokenizer in these files (name to bytes), loaded by AutoTokenizer without running their code.

    Raises  WriteError if a temporary copy of them cannot be written, and the errors of AutoTokenizer
    """
    with ExitStack() as stack:
        try:
            directory = stack.enter_context(TemporaryDirectory(prefix="mlsm-tokenizer-"))
            write_files(Path(directory), contents)
        except OSError as error:
            raise WriteError(
                f"a temporary copy of the tokenizer could not be written: {error.strerror}. TMPDIR names another "
                "directory for temporary files."
            ) from None
        return open_tokenizer(directory, local_files_only=True)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: str | Path) -> None:
    """Save a tokenizer into a directory, by transformers.

    Raises  OSError if a file cannot be written, even if the tokenizers library raises a plain Exception for it
    """
    try:
        with utf8_name(directory) as place:
            tokenizer.save_pretrained(place)
    except Exception as error:
        if isinstance(error, OSError) or not (found := re.search(r"\(os error (\d+)\)", str(error))):
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(directory)) from error


def write_files(directory: str | Path, contents: Mapping[str, bytes]) -> None:
    """Write files, name to bytes, into an existing directory."""
    for name, raw in contents.items():
        (Path(directory) / name).write_bytes(raw)


def without_code(raw: bytes, where: object) -> bytes:
    """The bytes of a JSON file of transformers without its entry that names code to load; otherwise unchanged.

    Raises  StoreError when they are not JSON
    """
    try:
        values = parse_json(raw, where)
    except ShardError as error:
        raise StoreError(f"{error}. Run the encoding command again, which restores it.") from None
    if not isinstance(values, dict) or "auto_map" not in values:
        return raw
    values.pop("auto_map")
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


@lru_cache(maxsize=4)
def _identity(contents):
    """Four facts about a tokenizer, given as pairs (name, bytes): its fingerprint, its largest token id, the ids of its
    special tokens by role, and the problem with these ids, if any."""
    tokenizer = load_tokenizer(dict(contents))
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{type(tokenizer).__name__} is not a fast tokenizer")
    largest = max(tokenizer.get_vocab().values(), default=-1)
    special = {role: tokenizer.convert_tokens_to_ids(token) for role, token in special_tokens(tokenizer).items()}
    return tokenizer_fingerprint(tokenizer), largest, special, describe_special_tokens(tokenizer)


def _read(files, directory, names):
    """The existing ones of these files, name to bytes. Raises StoreError if one is not a file, or is outside the
    store."""
    root, found = os.path.realpath(directory.parent), {}
    for name in names:
        path = directory / name
        if not os.path.lexists(path):
            continue
        real = os.path.realpath(path)
        if os.path.commonpath([root, real]) != root:
            raise StoreError(
                f"{path} is a link to {real}, outside the store, and is not followed. Replace it by the file itself, "
                f"or remove it. {files.restore_hint()}"
            )
        try:
            with disk.open_to_read(real) as file:
                size = os.fstat(file.fileno()).st_size
                raw = file.readall() if size <= _MOST_BYTES else b""
        except OSError as error:
            if disk.is_of_the_machine(error):
                raise
            raise StoreError(f"{path} cannot be read: {error.strerror}. {files.restore_hint()}") from None
        if size > _MOST_BYTES:
            raise StoreError(f"{path} has {size:,} bytes, more than any such file needs. {files.restore_hint()}")
        found[name] = raw
    return found


# Directory name -> function that reads a store's copy, and raises StoreError if it is not the target's.
READERS = {"tokenizer": read_tokenizer, "dictionary": read_dictionary, "codebook": read_codebook}
