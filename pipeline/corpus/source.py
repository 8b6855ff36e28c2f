"""What every source is: a file of documents, which are read in pieces.

    for piece in source.pieces(first_record, offset):            # to the end of the file
    for piece in source.between(start, stop, offset, reader):    # goes on where the reader's last call ended

A document never has to fit in memory: it travels in pieces of at most 64 Ki characters, cut at white space. Left
out: what a file's bytes mean (text.py, json_lines.py, parquet.py), files on the Hub (hub.py).
"""

import atexit
import bz2
import gzip
import hashlib
import io
import lzma
import re
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from common.errors import CorpusError, NotUtf8Error

PIECE_CHARACTERS = 65_536
COMPRESSED = (".gz", ".xz", ".bz2", ".zst")
JSON_LINES = (".jsonl", ".json", ".ndjson", ".jsonlines")
KINDS = (".txt", ".parquet", *JSON_LINES)  # taken from a directory; others, such as README.md, only by name
_BUFFER = 1 << 18  # bytes read at once
_SURROGATES = re.compile("[\ud800-\udfff]")


class Piece(NamedTuple):
    """Part of a document. The pieces of a document follow each other and share `record`."""

    record: int
    """Number of the document in its source."""
    offset: int
    """Where to open the source for this document: byte of the uncompressed file, or row group."""
    text: str
    """At most 64 KiB characters; empty when the whole document is blank, for kinds that number blank documents."""
    invalid: bool = False
    """Whether U+FFFD stands for something that was not UTF-8."""


_standing = {}  # reader to (source, next piece, iterator) where it stands: one open file a reader, however many sources
atexit.register(_standing.clear)


@dataclass(frozen=True)
class Source:
    """What sources have in common.

    path          a Path, or a HubFile, which answers like one
    invalid_utf8  "strict": text that is not UTF-8 raises CorpusError; anything else: it becomes U+FFFD
    """

    path: Path
    invalid_utf8: str = field(default="strict", kw_only=True)

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

    def between(self, start, stop, offset, reader):
        """Pieces of the records from `start`, at `offset`, to before `stop`.

        reader  any key; calls with the same one share an open file, so that reading ranges in their order costs
                one pass, also where nothing can be sought (a compressed file)
        """
        source, waiting, pieces = _standing.pop(reader, (None, None, None))
        if source is not self or waiting.record > start or offset - waiting.offset > self._reach:
            waiting, pieces = None, self.pieces(start, offset)  # lets go of the old ones, which closes their file
        for piece in chain([waiting] if waiting else [], pieces):
            if piece.record >= stop:
                _standing[reader] = self, piece, pieces
                return
            if piece.record >= start:
                yield piece

    @property
    def _reach(self):
        """How far ahead in the file reading on is cheaper than opening it anew."""
        return float("inf") if self.path.suffix in COMPRESSED else 1 << 20

    def without_last_line_end(self, pieces):
        """The pieces of documents as their texts are; a kind whose documents end with the end of a line drops that."""
        return pieces

    def decode(self, raw, position, encoding="utf-8"):
        """Pair (text, whether anything was replaced) of bytes that are at the byte `position` of the file."""
        try:
            return raw.decode(encoding), False
        except UnicodeDecodeError as error:
            if self.invalid_utf8 == "strict":
                place = f"{self.path}: not UTF-8 at byte {position + error.start}"
                raise NotUtf8Error(place, "Convert it, for example with: iconv -f latin1 -t utf-8") from None
        return raw.decode(encoding, "replace"), True

    def without_surrogates(self, text, where):
        """Pair (text, whether a surrogate was replaced) of a text that may hold what no UTF-8 has."""
        try:
            text.encode()
            return text, False
        except UnicodeEncodeError:
            if self.invalid_utf8 == "strict":
                place = f"{self.path}, {where}: the text holds a lone surrogate, which no UTF-8 has"
                raise NotUtf8Error(place, "Remove it") from None
        return _SURROGATES.sub("\ufffd", text), True


@contextmanager
def reading(path, offset=0):
    """The uncompressed bytes of a file from an offset on; any failure to read becomes a CorpusError."""
    try:
        if path.suffix in COMPRESSED and not path.stat().st_size:
            raise EOFError("the file is empty")  # gzip and zstd would take it for an empty text
        with path.open("rb") as stored, _uncompressed(stored, path.suffix) as file:
            _advance(file, offset)
            yield file
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise unreadable(path, error) from None


def unreadable(path, error):
    """The CorpusError of a failure to read."""
    return CorpusError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).")


def _uncompressed(stored, suffix):
    if suffix == ".zst":
        import pyarrow  # unlike zstandard's reader it notices a file that was cut

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(stored, "r"), "zstd"), _BUFFER)
    opener = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(suffix)
    return io.BufferedReader(opener(stored), _BUFFER) if opener else stored


def _advance(file, offset):
    if file.seekable():
        file.seek(offset)
        return
    while offset and (read := len(file.read(min(offset, _BUFFER)))):
        offset -= read


def stored_hash(path, how):
    """SHA-256 over how a file is cut into documents and its stored bytes; over their hash where the Hub knows it."""
    digest = hashlib.sha256(how.encode())
    if known := getattr(path, "sha256", None):
        digest.update(f":{known}".encode())
        return digest.hexdigest()
    with stored(path) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def stored(path):
    """The bytes of a file as they are; any failure to read becomes a CorpusError."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise unreadable(path, error) from None


def parts(text):
    """A text in parts of at most PIECE_CHARACTERS, cut before a space where there is one."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        space = text.rfind(" ", start + 1, start + PIECE_CHARACTERS)
        cut = space if space > 0 else start + PIECE_CHARACTERS
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def kind_of(path):
    """The suffix that says what a file holds, in small letters: the last that is not of a compression; "" for none."""
    kinds = [suffix.lower() for suffix in path.suffixes if suffix not in COMPRESSED]
    return kinds[-1] if kinds else ""
