"""Text files: documents between empty lines, or one document per file.

A byte order mark at the start is dropped, and CRLF becomes a line feed. All other characters stay, even NUL, which
BERT's tokenizers drop. Not handled here: compression (source.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeline.corpus.source import PIECE_CHARACTERS, Piece, SourceFile, reading, stored_hash


@dataclass(frozen=True)
class TextFile(SourceFile):
    """A file of documents.

    boundary  "blank-line": an empty line ends a document; "file": the file is one document
    """

    boundary: str = "blank-line"

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the stored bytes and the rule for cutting them into documents."""
        return stored_hash(self.path, self.boundary)

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces, one per line, from the document `first_record`, which begins at byte `offset`, to the end."""
        record, begun, begin = first_record, False, offset
        with reading(self.path, offset) as file:
            for position, line, is_whole, invalid in self._lines(file, offset):
                if line.isspace() or not line:
                    if is_whole and self.boundary == "blank-line":
                        record, begun = record + begun, False
                    if not begun:
                        continue
                elif not begun:
                    begin, begun = position, True
                yield Piece(record, begin, line, invalid)

    def without_last_line_end(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The same documents, without the line feed after each one's last line."""
        record = -1
        ends: list[str] = []
        for piece in pieces:
            if piece.record != record:
                record, ends = piece.record, []
            body = piece.text.rstrip("\n")
            if body:
                yield piece._replace(text="".join([*ends, body]))
                ends = []
            ends.append(piece.text[len(body) :])

    def _lines(self, file, offset):
        """(byte position, text, whether it is a whole line, whether it was invalid); long lines in parts."""
        rest, fresh = b"", True
        while line := rest + file.readline(PIECE_CHARACTERS - len(rest)):
            complete = line.endswith(b"\n") or len(line) < PIECE_CHARACTERS  # short without a line feed: the file's end
            size = len(line) if complete else _cut_at_space(line)
            line, rest = line[:size], line[size:]
            text, invalid = self.decode(line, offset, "utf-8" if offset else "utf-8-sig")
            yield offset, text[:-2] + "\n" if line.endswith(b"\r\n") else text, fresh and complete, invalid
            offset, fresh = offset + size, complete


def _cut_at_space(line):
    """Where to cut a long line: at the last space, else the last tab, after a word; else before its last character,
    which may be incomplete."""
    for space in (line.rfind(b" "), line.rfind(b"\t")):
        if line[: max(0, space)].strip():
            return space
    cut = len(line) - 1
    while cut > 0 and line[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut or len(line)
