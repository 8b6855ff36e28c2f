"""Text sources, documents, token windows.

    sources = open_corpus("docstrings" | paths and globs, ...)
    for piece in source.pieces(start, stop, offset):   # text in pieces of at most 64 KiB
    for window in packed_windows(tokenised pieces):    # [CLS] a a a [SEP] b b [SEP]

Sources are files: text (`.txt`, anything not named otherwise), JSONL, each plain or `.gz`, `.xz`, `.bz2`.
The docstrings of the required packages are collected into such a file first. A document never has to fit in
memory: it travels in pieces cut at white space. Left out: which documents are held out and units of work
(plan.py), Parquet, Hub datasets, cleaning. (A JSON line is read whole, before its text is cut in pieces.)
"""

import ast
import bz2
import configparser
import glob
import gzip
import hashlib
import json
import lzma
import os
import platform
import sysconfig
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE_CHARACTERS = 65_536
_OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
_MINIMUM_DOCSTRING = 40  # characters; shorter ones are labels, not prose


class CorpusError(ValueError):
    """A corpus that cannot be read, or holds no text."""


class Piece(NamedTuple):
    """Part of a document. The pieces of a document follow each other and share `record`."""

    record: int
    """Number of the document in its source."""
    offset: int
    """Byte of the uncompressed source at which the document begins."""
    text: str
    """At most 64 KiB characters."""


@dataclass(frozen=True)
class _File:
    """What every source has: a path, a name, a stamp."""

    path: Path

    @property
    def name(self):
        return str(self.path)

    def stamp(self):
        """Size and time of the file: while they stay, so does its content."""
        try:
            status = self.path.stat()
        except OSError as error:
            raise CorpusError(f"{self.path}: cannot be read ({error.strerror}).") from None
        return status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class TextFile(_File):
    """A file of documents.

    path      the file
    boundary  "blank-line": an empty line ends a document; "file": the file is one document
    """

    boundary: str = "blank-line"

    def content_hash(self):
        """SHA-256 over the stored bytes and how they are cut into documents."""
        return _file_hash(self.path, self.boundary)

    def pieces(self, first_record=0, offset=0):
        """Pieces from the document `first_record`, which begins at byte `offset`, to the end."""
        record, begun, begin = first_record, False, offset
        with _reading(self.path, offset) as file:
            for position, line, fresh in _bounded_lines(file, offset):
                blank = not line.strip()
                if self.boundary == "blank-line" and fresh and blank:
                    record, begun = record + begun, False
                if blank and not begun:
                    continue
                if not begun:
                    begin, begun = position, True
                yield Piece(record, begin, line)


@dataclass(frozen=True)
class JsonLines(_File):
    """One JSON object a line; its `field` is the document."""

    field: str = "text"

    def content_hash(self):
        return _file_hash(self.path, f"jsonl:{self.field}")

    def pieces(self, first_record=0, offset=0):
        """Pieces from the line `first_record`, which begins at byte `offset`, to the end."""
        with _reading(self.path, offset) as file:
            for record, line in enumerate(file, first_record):
                text = self._text(line, record)
                for part in _parts(text if text.strip() else ""):
                    yield Piece(record, offset, part)
                offset += len(line)

    def _text(self, line, record):
        if not line.strip():
            return ""
        try:
            value = json.loads(line)
        except ValueError as error:
            raise CorpusError(
                f"{self.path}, line {record + 1}: not JSON ({error}). Expected one object a line."
            ) from None
        if not isinstance(value, dict) or not isinstance(value.get(self.field), str):
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise CorpusError(
                f"{self.path}, line {record + 1}: no text under {self.field!r} (found {found}). "
                "Name the field with --text-field."
            )
        text = value[self.field]
        if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
            raise CorpusError(f"{self.path}, line {record + 1}: the text holds a lone surrogate, which no UTF-8 has.")
        return text


def _parts(text):
    """A text in parts of at most PIECE_CHARACTERS, cut before a space where there is one."""
    while len(text) > PIECE_CHARACTERS:
        cut = max(text.rfind(" ", 1, PIECE_CHARACTERS), 0) or PIECE_CHARACTERS
        yield text[:cut]
        text = text[cut:]
    if text:
        yield text


def open_corpus(corpus, *, text_field="text", boundary="blank-line"):
    """Resolve paths and globs to sources, in sorted order without repeats.

    corpus   tuple of paths or globs (`**` allowed); a directory means every file in it
    Raises   CorpusError when something matches nothing
    """
    paths = []
    for pattern in corpus:
        found = _expand(pattern)
        if not found:
            raise CorpusError(
                f"the corpus {pattern!r} matches no file. Give a text or .jsonl file, or a glob in quotes."
            )
        paths += found
    unique = {path.resolve(): path for path in sorted(paths, reverse=True)}
    return [_source(path, text_field, boundary) for path in sorted(unique.values())]


def open_sources(config, progress):
    """The corpus of the settings as a list of sources; docstrings are collected into a file first."""
    if not config.corpus:
        raise CorpusError("no corpus given. Name files with --corpus, or leave it out for the docstrings.")
    paths = list(config.corpus)
    if "docstrings" in paths:
        paths[paths.index("docstrings")] = str(collect_docstrings(config.output / "corpora", progress))
    return open_corpus(tuple(paths), text_field=config.text_field, boundary=config.document_boundary)


def _expand(pattern):
    path = Path(pattern).expanduser()
    if path.is_dir():
        return [file for file in path.rglob("*") if file.is_file() and not _hidden(file.relative_to(path))]
    if path.is_file():
        return [path]
    return [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]


def _hidden(path):
    return any(part.startswith(".") for part in path.parts)


def _source(path, text_field, boundary):
    suffixes = [suffix for suffix in path.suffixes if suffix not in _OPENERS]
    if suffixes and suffixes[-1] in (".jsonl", ".json"):
        return JsonLines(path, text_field)
    return TextFile(path, boundary)


@contextmanager
def _reading(path, offset):
    """The uncompressed bytes of a file from an offset on; any failure to read becomes a CorpusError."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rb") as file:
            file.seek(offset)
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise CorpusError(f"{path}: cannot be read ({reason}).") from None


def _bounded_lines(file, offset):
    """Triples (byte position, text, whether it begins a line); a long line comes in parts cut at white space.

    Raises  CorpusError, with the position, on bytes that are not UTF-8
    """
    rest, fresh = b"", True
    while line := rest + (chunk := file.readline(PIECE_CHARACTERS - len(rest))):
        complete = line.endswith(b"\n") or not chunk
        cut = len(line) if complete else _cut_at_space(line)
        yield offset, _decode(line[:cut], file, offset), fresh
        offset, rest, fresh = offset + cut, line[cut:], complete


def _cut_at_space(line):
    """Where to cut a long line: at its last space, else before its last, perhaps incomplete, character."""
    space = line.rfind(b" ")
    if space > 0:
        return space
    cut = len(line) - 1
    while cut > 0 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut or len(line)


def _decode(raw, file, offset):
    try:
        return raw.decode("utf-8-sig" if offset == 0 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{getattr(file, 'name', 'input')}: not UTF-8 at byte {offset + error.start}. "
            "Convert it first, for example with: iconv -f latin1 -t utf-8"
        ) from None


def _file_hash(path, how):
    digest = hashlib.sha256(how.encode())
    try:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read ({error.strerror or error}).") from None
    return digest.hexdigest()


# -- windows ---------------------------------------------------------------------------------------------


class Window(NamedTuple):
    """One packed window.

    ids          int64 list, [CLS] … [SEP], at most `max_length` tokens
    run_starts   positions in the window at which a document's run begins; the first is 0
    run_records  that document's record number
    """

    ids: list
    run_starts: list
    run_records: list


def tokenised(pieces, tokenizer, batch_characters=1 << 20):
    """Pairs (record, token ids) of the pieces, tokenised in batches on all cores.

    A word is never cut, because pieces end at white space.
    """
    batch, characters = [], 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= batch_characters:
            yield from _tokenise(batch, tokenizer)
            batch, characters = [], 0
    if batch:
        yield from _tokenise(batch, tokenizer)


def _tokenise(batch, tokenizer):
    """The backend itself: transformers' wrapper around it took a third of the time."""
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    return ((piece.record, encoding.ids) for piece, encoding in zip(batch, encoded, strict=True))


def packed_windows(tokens, max_length, cls_id, sep_id):
    """Windows filled to `max_length`; documents follow each other with [SEP] between.

    tokens   pairs (record, token ids); pairs of one document are adjacent
    Yields   Window; all but the last are full, or one token short where only a separator would have fitted
    """
    ids, starts, records = [cls_id], [], []
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


def join_windows(windows):
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


# -- docstrings ------------------------------------------------------------------------------------------


def silent(*args, **figures):
    """Progress that nobody watches."""


def collect_docstrings(directory, progress=silent):
    """Write the docstrings of our required packages and of the standard library to one text file.

    Read with `ast`, never imported; without repeats; a document each; in the order of their hash, so that
    any beginning of the file is a fair sample. The file's name follows from the packages' versions.

    directory  where the file goes; one made earlier from the same versions is returned as it is
    Returns    Path
    """
    versions = {name: metadata.version(name) for name in required_packages()}
    versions["python"] = platform.python_version()
    tag = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(directory) / f"docstrings-{tag}.txt"
    if not path.is_file():
        _write_documents(path, _all_docstrings(progress))
    return path


def required_packages():
    """Names of the packages we require at run time, extras left out, sorted."""
    return sorted({_requirement_name(line) for line in _requirements()})


def _requirements():
    setup_cfg = Path(__file__).resolve().parent.parent / "setup.cfg"
    if setup_cfg.is_file():  # a checkout: installed or not, its own words count
        parser = configparser.ConfigParser()
        parser.read(setup_cfg, encoding="utf-8")
        return parser["options"]["install_requires"].split("\n")[1:]
    return [line for line in metadata.requires("mlsm") or [] if "extra ==" not in line]


def _requirement_name(line):
    return "".join(c if c.isalnum() or c in "-_." else " " for c in line).split()[0].lower()


def _all_docstrings(progress):
    texts = set()
    for number, path in enumerate(_python_files()):
        texts.update(_docstrings(path))
        progress("docstrings", number, None, unit="files", documents=len(texts))
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _python_files():
    standard = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    yield from (path for path in standard.rglob("*.py") if not skipped & set(path.parts[len(standard.parts) :]))
    for name in required_packages():
        files = metadata.distribution(name).files or []
        yield from (Path(file.locate()) for file in files if file.suffix == ".py")


def _docstrings(path):
    """Docstrings of a Python file, inner empty lines closed up so that each stays one document."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _definitions(tree):
        text = ast.get_docstring(node)
        if text and len(text) >= _MINIMUM_DOCSTRING and _is_text(text):
            yield "\n".join(line for line in text.splitlines() if line.strip())


def _definitions(tree):
    """Module, classes and functions of a tree; expressions, most of its nodes, are not visited."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, block, ())
            nodes += reversed(found) if isinstance(found, list) else ()


def _is_text(text):
    return text.isprintable() or not any(ord(c) < 32 and c not in "\n\t" or 0xD800 <= ord(c) < 0xE000 for c in text)


def _write_documents(path, documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=".", delete=False) as file:
        try:
            file.write("\n\n".join(documents) + "\n")
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        finally:
            Path(file.name).unlink(missing_ok=True)
