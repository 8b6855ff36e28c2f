"""Small files, joined until they are worth a unit of work.

A unit never has text of two sources, and each of its shards counts the tokens of the whole vocabulary. So files that
are far smaller than a unit become one source together. Not handled here: cutting a source into units (plan.py).
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mlsm.common.progress import silent
from pipeline.corpus.source import Piece, Source, SourceFile

SMALL = 1 / 8  # of a unit; a smaller file is joined with others


@dataclass(frozen=True)
class SmallFiles(Source):
    """Files of one kind that are read one after the other; their documents are numbered consecutively.

    The offset of a document is the number of its file.
    """

    members: tuple[SourceFile, ...]
    _begins: list[int] = field(default_factory=lambda: [0], compare=False, repr=False)
    """The numbers of the files' first documents, as far as the files have been read."""

    @property
    def files(self) -> Sequence[SourceFile]:
        return self.members

    @property
    def name(self) -> str:
        return f"{self.files[0].name} and {len(self.files) - 1:,} more"

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256("".join(file.content_hash for file in self.files).encode()).hexdigest()

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces from the document `first_record`, which is in the file `offset` or after it, to the end."""
        for at, file in enumerate(self.files[offset:], offset):
            begin = record = self._begin(at)
            for piece in file.pieces():
                record = begin + piece.record + 1
                if record > first_record:
                    yield piece._replace(record=record - 1, offset=at)
            if len(self._begins) == at + 1:
                self._begins.append(record)

    def _begin(self, at):
        while len(self._begins) <= at:
            for _ in self.pieces(offset=len(self._begins) - 1):
                pass
        return self._begins[at]

    @property
    def first_records(self) -> Sequence[int]:
        return [self._begin(at) for at in range(len(self.files))]

    def file_at(self, offset: int) -> SourceFile:
        return self.files[offset]

    @property
    def _reach(self) -> float:
        return 1  # file

    def without_last_line_end(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        return self.files[0].without_last_line_end(pieces)


def join_small_files(
    files: Iterable[SourceFile], unit_bytes: int, progress: Callable[..., None] = silent
) -> list[Source]:
    """Sources for units of about `unit_bytes`: large files alone, small ones of a kind joined in their order.

    A joined source comes where its first file does. Whether a file is its last one follows from the file's own
    hash and size, so that it has `unit_bytes` on average. A file that is added, changed or removed thus changes the
    joined source that it is in and at most the next one (another one, too, if a second file has the same content).
    Sizes are those of the stored files, compressed or not. A file whose content an earlier small one has stays alone;
    the scan leaves it out.

    progress  called with ("scan", bytes of the small files so far, None, unit)
    """
    found: list[list[SourceFile]] = []
    begun: dict[tuple, list[SourceFile]] = {}
    known: set[str] = set()
    total = 0
    for file in files:
        size, _ = file.stamp()
        if size >= unit_bytes * SMALL or file.content_hash in known:
            found.append([file])
            continue
        known.add(file.content_hash)
        total += size
        progress("scan", total, None, unit="bytes")
        kind = type(file), type(file.path)  # files on the Hub are not joined with others
        if kind not in begun:
            found.append(begun.setdefault(kind, []))
        begun[kind].append(file)
        if int(file.content_hash[:16], 16) * unit_bytes < 2**64 * size:
            del begun[kind]
    return [SmallFiles(tuple(joined)) if len(joined) > 1 else joined[0] for joined in found]
