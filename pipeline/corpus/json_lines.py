"""JSON lines: one object per line with the document in one of its fields, as Dolma and DataTrove write them.

`null`, blank texts and blank lines are blank documents, which still get a number. No character of a text is changed. A
line is read whole before its text is cut into pieces. Only here a document's length costs memory, about six times its
bytes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from mlsm.common.errors import CorpusError
from pipeline.corpus.source import Piece, SourceFile, parts, reading, stored_hash

_OF_A_LINE = "Expected one object per line. If this is the last line, the file may have been cut off."
_OF_AN_ARRAY = "Expected one object per line, which this makes of an array:  jq -c '.[]'"


@dataclass(frozen=True)
class JsonLines(SourceFile):
    """One JSON object per line; its `field` is the document."""

    field: str = "text"

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 over the stored bytes and the field's name."""
        return stored_hash(self.path, f"jsonl:{self.field}")

    def pieces(self, first_record: int = 0, offset: int = 0) -> Iterator[Piece]:
        """Pieces from the line `first_record`, which begins at byte `offset`, to the end."""
        with reading(self.path, offset) as file:
            for record, line in enumerate(file, first_record):
                text, invalid = self._text(line, record, offset)
                for part in parts(text) if text.strip() else ("",):
                    yield Piece(record, offset, part, invalid)
                offset += len(line)

    def _text(self, raw, record, offset):
        where = f"line {record + 1}"
        line, replaced = self.decode(raw, offset, "utf-8" if offset else "utf-8-sig")
        if not line.strip():
            return "", replaced
        try:
            value = json.loads(line, parse_int=float)  # float, as int() refuses more than 4,300 digits
        except (ValueError, RecursionError) as error:
            hint = _OF_AN_ARRAY if line.startswith("[") else _OF_A_LINE
            raise CorpusError(f"{self.path}, {where}: not JSON ({error}). {hint}") from None
        if isinstance(value, list):
            raise CorpusError(f"{self.path}, {where}: an array. {_OF_AN_ARRAY}")
        text = value.get(self.field, value) if isinstance(value, dict) else value
        if text is None:
            return "", replaced
        if not isinstance(value, dict) or not isinstance(text, str):
            kind = "a number" if isinstance(text, float) else type(text).__name__  # integers are read as float
            found = sorted(value) if isinstance(value, dict) and text is value else kind
            raise CorpusError(
                f"{self.path}, {where}: no text under {self.field!r} (found {found}). Name the field with "
                "--text-field, or if only this line lacks it, remove the line."
            )
        text, surrogates = self.without_surrogates(text, where)
        return text, replaced or surrogates
