"""The base of all sources: a file of documents, or several, which are read in pieces.

    for piece in source.pieces(first_record, offset):            # to the end of the file
    for piece in source.between(start, stop, offset, reader):    # continues where the reader's last call ended

A document need not fit in memory: it is read in pieces of at most 64 Ki characters, cut at white space. Not
handled here: what a file's bytes mean (text.py, json_lines.py, parquet.py), several files (small_files.py), files on
the Hub (hub.py).
"""

import atexit
import bz2
import gzip
import hashlib
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import PurePath
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from mlsm.common.errors import CorpusError, NotUtf8Error

PIECE_CHARACTERS = 65_536
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines")
ARCHIVES = (".tar", ".tgz", ".tbz2", ".txz", ".zip", ".7z", ".rar")
SUFFIXES = (".txt", ".parquet", *JSON_LINES)  # of files used in a directory; others must be named
_BUFFER = 1 << 18  # bytes read at once
_STORED_AT_ONCE = 1 << 15  # bytes of an .xz or .bz2 file; those after a stream's end are copied for each of its streams
_OTHER_FORMATS = {  # first bytes: remedy
    b"%PDF": "A PDF: extract its text first, for example with pdftotext",
    b"PK\x03\x04": "A zip archive, such as .zip, .docx, .epub or .odt: extract its text first",
    b"PAR1": "A Parquet file: its name must end in .parquet",
    b"\x1f\x8b": "Compressed with gzip: its name must end in .gz",
    b"\xfd7zXZ": "Compressed with xz: its name must end in .xz",
    b"\x28\xb5\x2f\xfd": "Compressed with zstd: its name must end in .zst",
}
_SURROGATES = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """Part of a document. The pieces of a document follow each other and share `record`."""

    record: int
    """Number of the document in its source."""
    offset: int
    """Where to open the source for this document: byte of the uncompressed file, row group, or number of a file."""
    text: str
    """At most 64 Ki characters; empty when the whole document is blank, for kinds that number blank documents."""
    invalid: bool = False
    """Whether U+FFFD replaces something that was not UTF-8."""


class StoredFile(Protocol):
    """The interface of a file that sources use: a Path, or a HubFile, which behaves like one."""

    @property
    def suffix(self) -> str: ...
    @property
    def suffixes(self) -> Sequence[str]: ...
    def stat(self) -> Any: ...
    def open(self, mode: Literal["rb"], /) -> BinaryIO: ...


class Source:
    """The base class of what documents are read from: a file, or small files, one after the other."""

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def files(self) -> "Sequence[SourceFile]":
        raise NotImplementedError

    @property
    def first_records(self) -> Sequence[int]:
        """The number of each file's first document."""
        raise NotImplementedError

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the content and how it is cut into documents. The files are read once for it."""
        raise NotImplementedError

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces from the document `first_record`, for which the source is opened at `offset`, to the end."""
        raise NotImplementedError

    def file_at(self, offset: int) -> "SourceFile":
        """The file that a document is in, for which the source is opened at `offset`."""
        raise NotImplementedError

    def between(self, start: int, stop: int, offset: int, reader: Hashable) -> Iterator[Piece]:
        """Pieces of the records from `start`, at `offset`, to before `stop`.

        reader  any key. Calls with the same key share an open file, so that reading ranges in order needs one pass,
                even over a compressed file, in which seeking is impossible
        """
        mark = _bookmarks.pop(reader, None)
        if mark and mark.source is self and mark.piece.record <= start and offset - mark.piece.offset <= self._reach:
            waiting, pieces = [mark.piece], mark.pieces
        else:
            waiting, pieces = [], self.pieces(start, offset)
        del mark  # closes its file unless a read continues from there
        for piece in chain(waiting, pieces):
            if piece.record >= stop:
                _bookmarks[reader] = _Bookmark(self, piece, pieces)
                return
            if piece.record >= start:
                yield piece

    @property
    def _reach(self) -> float:
        """The distance in offsets up to which reading ahead is cheaper than opening the source again."""
        return 0

    def without_last_line_end(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """The pieces unchanged; sources whose documents end with a line feed override this to drop it."""
        return pieces


@dataclass(frozen=True)
class SourceFile(Source):
    """The base class of the kinds of files.

    invalid_utf8  "strict": text that is not UTF-8 raises CorpusError; anything else: it becomes U+FFFD
    """

    path: StoredFile
    invalid_utf8: str = field(default="strict", kw_only=True)

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def files(self) -> "Sequence[SourceFile]":
        return (self,)

    @property
    def first_records(self) -> Sequence[int]:
        return (0,)

    def file_at(self, offset: int) -> "SourceFile":
        return self

    def stamp(self) -> tuple[int, int]:
        """Size and time of the file: if they are unchanged, its content is assumed to be unchanged."""
        status = self._status()
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self, stamp: tuple[int, int]) -> None:
        """Raise CorpusError if the file no longer has this stamp."""
        if self.stamp() != stamp:
            raise CorpusError(
                f"{self.name} changed while it was read. Run the command again when nothing writes to it any more."
            )

    def identity(self) -> tuple[int, int, int]:
        """The file's identity and the time of its last change, which programs, unlike the time in `stamp`, cannot set.

        Renaming or new permissions change it as well, so a command that reads for days compares `stamp` instead.
        """
        status = self._status()
        return status.st_dev, status.st_ino, status.st_ctime_ns

    def _status(self) -> os.stat_result:
        try:
            return self.path.stat()
        except OSError as error:
            raise CorpusError(f"{self.path}: cannot be read ({error.strerror}).") from None

    @property
    def _reach(self) -> float:
        return float("inf") if self.path.suffix.lower() in COMPRESSED else 1 << 20

    def decode(self, raw: bytes, position: int, encoding: str = "utf-8") -> tuple[str, bool]:
        """Pair (text, whether anything was replaced) of bytes that begin at the byte `position` of the file."""
        try:
            return raw.decode(encoding), False
        except UnicodeDecodeError as error:
            if self.invalid_utf8 == "strict":
                place = f"{self.path}: not UTF-8 at byte {position + error.start}"
                raise NotUtf8Error(place, how_to_read(raw if position == 0 else self._start())) from None
        return raw.decode(encoding, "replace"), True

    def _start(self):
        with reading(self.path) as file:
            return file.read(8)

    def without_surrogates(self, text: str, where: str) -> tuple[str, bool]:
        """Pair (text, whether a lone surrogate was replaced) of a text; UTF-8 has no surrogates."""
        try:
            text.encode()
            return text, False
        except UnicodeEncodeError:
            if self.invalid_utf8 == "strict":
                place = f"{self.path}, {where}: the text holds a lone surrogate, which no UTF-8 has"
                raise NotUtf8Error(place, "Remove it") from None
        return _SURROGATES.sub("\ufffd", text), True


class _Bookmark(NamedTuple):
    """The place where a reader stopped: a piece that it has not received yet, and the pieces after it."""

    source: Source
    piece: Piece
    pieces: Iterator[Piece]


_bookmarks: dict[Hashable, _Bookmark] = {}  # reader -> its only open file, for any number of sources
atexit.register(_bookmarks.clear)


@contextmanager
def reading(path: StoredFile, offset: int = 0) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a file from an offset on; any failure to read becomes a CorpusError."""
    try:
        if path.suffix.lower() in COMPRESSED and not path.stat().st_size:
            raise EOFError("the file is empty")  # gzip and zstd would accept it as an empty text
        with path.open("rb") as stored, _uncompressed(stored, path) as file:
            if file.seekable():
                file.seek(offset)
            else:
                while offset and (read := len(file.read(min(offset, _BUFFER)))):
                    offset -= read
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, error) from None


def unreadable(path: StoredFile, error: Exception) -> CorpusError:
    """The CorpusError of a failure to read."""
    return CorpusError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).")


def _uncompressed(stored: BinaryIO, path: StoredFile) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".zst":
        import pyarrow  # unlike zstandard's reader, it detects a truncated file

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd"), _BUFFER)
    if suffix == ".gz":
        return io.BufferedReader(gzip.open(stored), _BUFFER)
    decompressors: dict[str, Callable] = {".xz": lzma.LZMADecompressor, ".bz2": bz2.BZ2Decompressor}
    return io.BufferedReader(_Streams(stored, decompressors[suffix]), _BUFFER) if suffix in decompressors else stored


class _Streams(io.RawIOBase):
    """The text of an .xz or .bz2 file of one or more streams, with or without zero bytes between them.

    lzma.open and bz2.open would take everything after such padding, or from a damaged stream header on, for garbage and
    end there without an error.
    """

    def __init__(self, stored, new_decompressor):
        self._stored, self._new = stored, new_decompressor
        self._decompressor = new_decompressor()

    def readable(self):
        return True

    def readinto(self, buffer):
        data = b""
        while not data:
            raw = b""
            if self._decompressor.eof:
                raw = self._decompressor.unused_data.lstrip(b"\0")
                while not raw and (block := self._stored.read(_STORED_AT_ONCE)):
                    raw = block.lstrip(b"\0")
                if not raw:
                    return 0
                self._decompressor = self._new()
            elif self._decompressor.needs_input:
                raw = self._stored.read(_STORED_AT_ONCE)
                if not raw:
                    raise EOFError("the file ends before its last stream does")
            data = self._decompressor.decompress(raw, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def stored_hash(path: StoredFile, how: str) -> str:
    """SHA-256 over how a file is cut into documents and its stored bytes, or their hash if the Hub has it."""
    digest = hashlib.sha256(how.encode())
    if known := getattr(path, "sha256", None):
        digest.update(f":{known}".encode())
        return digest.hexdigest()
    with stored(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def stored(path: StoredFile) -> Iterator[BinaryIO]:
    """The bytes of a file as they are; any failure to read becomes a CorpusError."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def parts(text: str) -> Iterator[str]:
    """A text in parts of at most PIECE_CHARACTERS, cut before a space if there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        space = text.rfind(" ", start + 1, start + PIECE_CHARACTERS)
        cut = space if space > 0 else start + PIECE_CHARACTERS
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def is_hidden(path: PurePath) -> bool:
    """Whether a file, or a directory above it, has a name that begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


def suffix_of(path: StoredFile | PurePath) -> str:
    """The suffix of a file's format in lower case: the last one that is not a compression's; "" if there is none."""
    kinds = [kind for suffix in path.suffixes if (kind := suffix.lower()) not in COMPRESSED]
    return kinds[-1] if kinds else ""


def how_to_read(start: bytes) -> str:
    """What to do about a file that is not UTF-8, by its first bytes."""
    for first, remedy in _OTHER_FORMATS.items():
        if start.startswith(first):
            return remedy
    encoding = "utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "latin1"
    return f"Convert it, for example with: iconv -f {encoding} -t utf-8"
