"""Small files, joined until they are worth a unit of work.

A unit never has text of two sources, and each of its shards counts the tokens of the whole vocabulary. So files that
are far smaller than a unit become one source together. Not handled here: cutting a source into units (plan.py).
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipeline.corpus.source import Piece, Source, SourceFile

SMALL = 1 / 8  # of a unit; a smaller file is joined with others


@dataclass(frozen=True)
class SmallFiles(Source):
    """Files of one kind, read one after the other as one source: their documents are numbered through.

    Each of its units reads the source from the file of its first document on.
    """

    members: tuple[SourceFile, ...]

    @property
    def files(self) -> Sequence[SourceFile]:
        return self.members

    @property
    def name(self) -> str:
        return f"{self.files[0].name} and {len(self.files) - 1} more"

    @cached_property
    def content_hash(self) -> str:
        return hashlib.sha256("".join(file.content_hash for file in self.files).encode()).hexdigest()

    @cached_property
    def first_records(self) -> Sequence[int]:
        return list(accumulate((_documents(file) for file in self.files[:-1]), initial=0))

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces from the document `first_record` to the end; their offset is 0."""
        at = bisect_right(self.first_records, first_record) - 1
        for start, file in zip(self.first_records[at:], self.files[at:], strict=True):
            for piece in file.pieces():
                if start + piece.record >= first_record:
                    yield piece._replace(record=start + piece.record, offset=0)

    def without_last_line_end(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        return self.files[0].without_last_line_end(pieces)


def _documents(file):
    last = -1
    for piece in file.pieces():
        last = piece.record
    return last + 1


def join_small_files(files: Iterable[SourceFile], unit_bytes: int) -> list[Source]:
    """Sources for units of about `unit_bytes`: large files alone, small ones of a kind joined in their order.

    A joined source ends after a file that its content chooses, on average after `unit_bytes`. So a file that is added,
    changed or removed changes the joined source that it is in, at most the next one as well, and none after that.
    A file whose content an earlier small one has stays alone; the scan leaves it out.
    """
    found: list[list[SourceFile]] = []
    begun: dict[type, list[SourceFile]] = {}
    known: set[str] = set()
    for file in files:
        size, _ = file.stamp()
        if size >= unit_bytes * SMALL or file.content_hash in known:
            found.append([file])
            continue
        known.add(file.content_hash)
        if type(file) not in begun:
            found.append(begun.setdefault(type(file), []))
        begun[type(file)].append(file)
        if int(file.content_hash[:16], 16) * unit_bytes < 2**64 * size:
            del begun[type(file)]
    return [SmallFiles(tuple(joined)) if len(joined) > 1 else joined[0] for joined in found]
