"""Parquet files: a row is a document, in the column that --text-field names.

A unit opens its file at a row group; a few rows are in memory at a time, and no other column is read. Null
and blank rows are blank documents and keep their number. Not handled here: nested columns, partitioned tables (their
directory names are ignored).
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from mlsm.common.errors import CorpusError, NotUtf8Error
from pipeline.corpus.source import Piece, SourceFile, parts, stored, stored_hash, unreadable

# Most rows and bytes per batch; bytes from the row group's average. Few rows, because a small file can repeat one long
# text in all of them, by a dictionary or by prefixes: its sizes do not tell.
_ROWS, _BYTES = 8, 16 << 20
_PAGE_BUFFER = 1 << 20  # bytes of a column that are read at once, however large the row group


@dataclass(frozen=True)
class Parquet(SourceFile):
    """A Parquet file; its column `field` holds the documents."""

    field: str = "text"

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the column's name and the file's own SHA-256, which the Hub knows of its files."""
        own = getattr(self.path, "sha256", None) or stored_hash(self.path, "")
        return hashlib.sha256(f"parquet:{self.field}:{own}".encode()).hexdigest()

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces from the row `first_record`, which is in the row group `offset`, to the end."""
        with self._open() as file:
            rows = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
            begin = sum(rows[:offset])
            for group in range(offset, len(rows)):
                skip = min(rows[group], max(0, first_record - begin))
                for record, raw in enumerate(self._column(file, group, skip), begin + skip):
                    yield from self._document(raw, record, group)
                begin += rows[group]

    @property
    def _reach(self) -> float:
        return 1  # row group

    @contextmanager
    def _open(self):
        import pyarrow
        from pyarrow.parquet import ParquetFile

        with stored(self.path) as raw:
            try:
                file = ParquetFile(raw, buffer_size=_PAGE_BUFFER)
                self._check_column(file.schema_arrow)
                yield file
            except pyarrow.ArrowException as error:
                raise unreadable(self.path, error) from None

    def _check_column(self, schema):
        if self.field not in schema.names:
            raise CorpusError(
                f"{self.path}: no column {self.field!r} (found {', '.join(schema.names)}). Name it with --text-field."
            )
        kind = str(schema.field(self.field).type)
        if "string" not in kind or "<" in kind.removeprefix("dictionary<"):
            raise CorpusError(f"{self.path}: column {self.field!r} holds {kind}, not text. Name one with --text-field.")

    def _column(self, file, group, skip):
        """Values of the column in a row group after the first `skip`, as bytes or None."""
        import pyarrow

        for batch in file.iter_batches(self._rows(file, group), [group], [self.field], use_threads=False):
            column = batch.column(0)
            if skip < len(column):
                if pyarrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                yield from (value.as_py() for value in column[skip:].cast(pyarrow.large_binary()))
            skip = max(0, skip - len(column))

    def _rows(self, file, group):
        """Rows per batch: fewer if rows are long."""
        found = file.metadata.row_group(group)
        columns = (found.column(i) for i in range(found.num_columns))
        size = sum(c.total_uncompressed_size for c in columns if c.path_in_schema == self.field)
        return max(1, min(_ROWS, found.num_rows * _BYTES // max(1, size)))

    def _document(self, raw, record, group):
        try:
            text, invalid = self.decode(raw or b"", 0)
        except NotUtf8Error as error:
            place = f"{self.path}, row {record + 1}{error.place.removeprefix(self.name)}"
            raise NotUtf8Error(place, error.remedy) from None
        for part in parts(text) if text.strip() else ("",):
            yield Piece(record, group, part, invalid)
