"""Read the fine-tuning tasks' files in their published formats.

There is one reader per format, such as `Tsv(...)(paths, labels)`; it returns a list of Example. Any violation of a
format raises a DataError with the file, the line and what was expected. Not handled here: which files a task has
(tasks.py), where they are, the Hub (data.py).
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mlsm.common.errors import DataError


class Example(NamedTuple):
    """One example of a task."""

    first: str | list[str]
    """a sentence; if words have labels, the list of its words"""
    second: str | None
    """the other sentence of a pair"""
    label: int | float | list[int]
    """a label's number, a score, or the numbers of the words' labels"""
    targets: tuple | None = None
    """WiC: the target's (begin, end) in characters of either sentence"""


@dataclass(frozen=True)
class Tsv:
    """Tab-separated lines without quoting: quotation marks are text (csv.QUOTE_NONE).

    first, second, label  columns: their names in the header, or numbers from 0 if there is no header
    width                 number of columns; if the file has a header, that of the header
    skips_short           whether lines with fewer columns are skipped: the published QQP files have stray line breaks
    """

    first: str | int
    second: str | int | None
    label: str | int
    width: int | None = None
    skips_short: bool = False

    def __call__(self, paths: list[Path], labels: tuple[str, ...]) -> list[Example]:
        (path,) = paths
        lines = enumerate(numbered_lines(path), 1)
        header = [] if self.width else next(lines, (1, ""))[1].split("\t")
        width = self.width or len(header)
        first, second, label = self._columns(path, header)
        examples = []
        for number, line in lines:
            fields = line.split("\t")
            if len(fields) < width and self.skips_short:
                continue
            if len(fields) != width:
                raise malformed(path, number, f"{width} tab-separated columns", f"{len(fields)}: {line[:60]!r}")
            other = None if second is None else fields[second]
            examples.append(Example(fields[first], other, label_of(fields[label], labels, path, number)))
        return examples

    def _columns(self, path: Path, header: list[str]) -> tuple[int, int | None, int]:
        """The numbers of the three columns; None if there is no second sentence."""
        names = [name for name in (self.first, self.second, self.label) if isinstance(name, str)]
        if any(name not in header for name in names):
            raise malformed(path, 1, f"a header with the columns {', '.join(names)}", f"{header[:12]}")

        def number_of(column: str | int) -> int:
            return header.index(column) if isinstance(column, str) else column

        return number_of(self.first), None if self.second is None else number_of(self.second), number_of(self.label)


def json_pairs(paths: list[Path], labels: tuple[str, ...]) -> list[Example]:
    """{"0": {"text_a", "text_b", "label"}, ...}"""
    (path,) = paths
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(entries, ensure_ascii=False).encode()  # ValueError on a lone surrogate, which JSON can contain
    except (ValueError, RecursionError) as error:
        raise malformed(path, getattr(error, "lineno", 1), "a JSON object of examples", str(error)) from None
    expected = 'an object {"0": {"text_a", "text_b", "label"}, ...}'
    if not isinstance(entries, dict):
        raise malformed(path, 1, expected, type(entries).__name__)
    examples = []
    for key, entry in entries.items():
        fields = ("text_a", "text_b", "label")
        if not isinstance(entry, dict) or not all(isinstance(entry.get(field), str) for field in fields):
            raise DataError(f"{path}: entry {key}: expected {expected}, found {entry!r:.80}.")
        label = label_of(entry["label"], labels, path, f"of entry {key}")
        examples.append(Example(entry["text_a"], entry["text_b"], label))
    return examples


def wic(paths: list[Path], labels: tuple[str, ...]) -> list[Example]:
    """<part>.data.txt: word, part of speech, i-j, two tokenised sentences; <part>.gold.txt: T or F."""
    data, gold = paths
    lines, answers = list(numbered_lines(data)), list(numbered_lines(gold))
    if len(lines) != len(answers):
        raise DataError(f"{gold}: expected {len(lines)} lines, as {data} has, found {len(answers)}. Fetch both again.")
    examples = []
    for number, (line, answer) in enumerate(zip(lines, answers, strict=True), 1):
        fields = line.split("\t")
        if len(fields) != 5:
            expected = "5 tab-separated columns: word, part of speech, index-index, sentence, sentence"
            raise malformed(data, number, expected, f"{len(fields)}: {line[:60]!r}")
        try:
            places = [int(place) for place in fields[2].split("-")]
            targets = tuple(_word_span(text, place) for text, place in zip(fields[3:], places, strict=True))
        except (ValueError, IndexError):
            raise malformed(data, number, "two word numbers like 2-6 in column 3", repr(fields[2])) from None
        examples.append(Example(fields[3], fields[4], label_of(answer.strip(), labels, gold, number), targets))
    return examples


def conll(paths: list[Path], labels: tuple[str, ...]) -> list[Example]:
    """The entities of `conll_columns`."""
    (path,) = paths
    return [
        Example(rows[0], None, [_number_of(tag, labels, path, line) for tag, line in zip(rows[3], lines, strict=True)])
        for rows, lines in conll_columns(path)
    ]


def conll_columns(path: Path) -> list[tuple[list[list[str]], list[int]]]:
    """One word per line, an empty line between sentences, -DOCSTART- between documents; IOB1 or IOB2.

    Returns  for each sentence four columns (words, parts of speech, chunks and entities, the latter two as IOB2), and
             its line numbers
    """
    sentences = []
    rows: list[tuple[int, list[str]]] = []
    for number, line in enumerate([*numbered_lines(path), ""], 1):
        fields = re.findall(r"[^ \t\r]+", line)  # a word may have a no-break space, as 10 000
        if fields and fields[0] != "-DOCSTART-":
            if len(fields) != 4:
                expected = "4 columns: word, part of speech, chunk, entity"
                raise malformed(path, number, expected, f"{len(fields)}: {line!r}")
            rows.append((number, fields))
        elif rows:
            columns = [list(column) for column in zip(*(fields for _, fields in rows), strict=True)]
            sentences.append(([*columns[:2], *map(_as_iob2, columns[2:])], [number for number, _ in rows]))
            rows = []
    return sentences


def numbered_lines(path: Path) -> list[str]:
    """The lines of a file, split only at \\n, since texts contain other separators; line ends are removed."""
    try:
        with open(path, encoding="utf-8-sig", newline="\n") as file:
            lines = file.read().split("\n")
    except UnicodeDecodeError as error:
        number = path.read_bytes()[: error.start].count(b"\n") + 1
        raise malformed(path, number, "text in UTF-8", repr(error.object[error.start : error.end])) from None
    if lines[-1] == "":
        lines.pop()
    return [line.removesuffix("\r") for line in lines]


def label_of(text: str, labels: tuple[str, ...], path: Path, line: int | str) -> int | float:
    """The number of a label; if the task has no labels, a score from 0 to 5."""
    if labels:
        return _number_of(text, labels, path, line)
    try:
        score = float(text)
    except ValueError:
        score = -1.0
    if not 0 <= score <= 5:
        raise malformed(path, line, "a score from 0 to 5", repr(text))
    return score


def _number_of(label: str, labels: tuple[str, ...], path: Path, line: int | str) -> int:
    if label not in labels:
        raise malformed(path, line, f"a label, one of {', '.join(labels)}", repr(label))
    return labels.index(label)


def malformed(path: Path, line: int | str, expected: str, found: str) -> DataError:
    """A DataError with file and line."""
    return DataError(f"{path}, line {line}: expected {expected}, found {found}. Fetch the file again.")


def _as_iob2(tags):
    """Convert tags to IOB2. In IOB1, a span starts with I- unless a span of the same type directly precedes it."""
    return [
        f"B-{tag[2:]}" if tag.startswith("I-") and previous[2:] != tag[2:] else tag
        for previous, tag in zip(["O", *tags], tags, strict=False)
    ]


def _word_span(text, place):
    words = text.split(" ")
    begin = sum(len(word) + 1 for word in words[:place])
    return begin, begin + len(words[place])
