"""Cut a corpus into fixed units of work, before any work is done.

A unit is a range of a source's records, about `unit_tokens` tokens of text; it becomes one shard. One scan hashes each
source, decides by content which documents are held out and which are dropped, and cuts the units. A unit's id follows
from the tokenizer, the windowing, the source's bytes, the record range and the dropped records. So the output does not
depend on the number of workers, on retries or on order, and an LSP store and an ids store of one plan pair exactly. The
cuts do not depend on dropped documents: if a new earlier file contains a text, only the unit from which that text is
now dropped changes. Not handled here: encoding a unit (encode.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from mlsm.common.errors import CorpusError, NotUtf8Error
from mlsm.common.progress import silent
from pipeline.corpus import windows as packing
from pipeline.corpus.documents import DEFAULT_SELECTION, Seen, Selection, documents, split_key_of, take_head
from pipeline.corpus.source import Source
from pipeline.corpus.windows import Window
from shards.manifest import Plan, PlannedUnit, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

HELD_OUT_SHARE = 0.01
NAMED_FILES = 20  # most files that the error about UTF-8 names
BYTES_PER_TOKEN = 4  # of English text; only sizes the units, which need not be exact


def windowing(
    tokenizer_fingerprint: str | None,
    max_length: int,
    packing: str = "packed",
    *,
    whole_documents: bool = False,
    held_out_by: str = "document",
) -> dict:
    """The rules that turn text into windows: a plan consists of these and the corpus.

    whole_documents  packed documents are tokenised as one string instead of line by line
    held_out_by      "document", or "file": all documents of a file are in one split
    """
    rules: dict[str, Any] = {
        "tokenizer": tokenizer_fingerprint,
        "packing": packing,
        "max_length": max_length,
        "held_out": HELD_OUT_SHARE,
    }
    if whole_documents and packing == "packed":
        rules["text"] = "document"
    if held_out_by != "document":  # only if not usual, so that plans keep their ids
        rules["held_out_by"] = held_out_by
    return rules


def scan(
    sources: Sequence[Source],
    tokenizer: "PreTrainedTokenizerFast | None",
    special_ids: Mapping[str, Any] | None,
    rules: dict,
    *,
    unit_tokens: int,
    max_tokens: int | None = None,
    selection: Selection = DEFAULT_SELECTION,
    progress: Callable[..., None] = silent,
) -> Plan:
    """Cut the sources into units.

    sources       of several with equal content only the first is used
    tokenizer     it and special_ids are only needed for max_tokens
    rules         of `windowing`
    unit_tokens   about this many tokens per unit
    max_tokens    stop at the window that reaches it, 99 % of it from training and 1 % from held-out
                  documents; None takes everything and does not tokenise
    selection     which documents are left out
    progress      called with (stage, done bytes, None, unit)
    Raises        CorpusError when there is no document, or no training document, or whole files are to be held out and
                  only one has documents
    """
    files_held_out = _files_held_out({source.content_hash for source in sources}) if _is_by_file(rules) else None
    units, hashes, counts = _cut(sources, rules, unit_tokens, selection, files_held_out, progress)
    if files_held_out and counts["documents"] and not counts["held_out_documents"]:  # the files to hold out have none
        with_text = {hashes[name] for name, found in counts["files"].items() if found["documents"]}
        units, hashes, counts = _cut(sources, rules, unit_tokens, selection, _files_held_out(with_text), progress)
    if not any(unit.split == "train" for unit in units):
        if counts["documents"] and counts["documents"] == counts["held_out_documents"]:
            all_of_them = "its only document is" if counts["documents"] == 1 else "all of its documents are"
            raise CorpusError(
                f"the corpus has no training text: by chance, {all_of_them} among the 1 % that are held out. Add text."
            )
        raise CorpusError(
            f"the corpus has no training text: {len(counts['files'])} files, {counts['documents']} documents, "
            f"{counts['bytes']:,} bytes of text{_left_out(counts)}. Check --corpus and the document boundaries."
        )
    if max_tokens is not None:
        by_name = {source.name: source for source in sources}
        units = _limit(units, by_name, hashes, tokenizer, special_ids, rules, max_tokens, progress)
    return Plan(rules, tuple(units), counts)


def _cut(sources, rules, unit_tokens, selection, files_held_out, progress):
    """Read all sources once. Returns their units, the content hash of each source by its name, and the counts.

    files_held_out  content hashes of the files that are held out; None if documents are
    """
    counts = {"sources": len(sources), "repeated_sources": 0, **_no_documents(), "files": {}}
    units, hashes, seen = [], {}, Seen()
    faulty: list[NotUtf8Error] = []
    known: set[str] = set()  # content hashes of files
    for source in sources:
        content, contents = source.content_hash, {file.content_hash for file in source.files}
        if contents <= known:
            counts["repeated_sources"] += 1
            continue
        hashes[source.name] = content
        known |= contents
        split = files_held_out and ("held_out" if content in files_held_out else "train")
        found = {file.name: _no_documents() for file in source.files}
        try:
            for span in _spans(source, unit_tokens * BYTES_PER_TOKEN, selection, seen, found, split):
                units.append(_unit(rules, source, content, span))
                progress("scan", counts["bytes"] + _total(found, "bytes"), None, unit="bytes")
        except NotUtf8Error as error:  # raised later, for all files together
            faulty += [error] if len(source.files) == 1 else _not_utf8(source.files)
            continue
        for name in _no_documents():
            counts[name] += _total(found, name)
        if len(found) > 1:  # records are numbered by source
            for number, (name, first) in enumerate(zip(found, source.first_records, strict=True)):
                found[name] |= {"source": source.name, "number": number, "first_record": first}
        counts["files"] |= found
        progress("scan", counts["bytes"], None, unit="bytes", documents=counts["documents"])
    if faulty:
        raise _join_errors(faulty)
    return units, hashes, counts


def _total(found, name):
    return sum(counts[name] for counts in found.values())


def _not_utf8(files):
    """The error of each file that is not UTF-8, with its first place."""
    for file in files:
        try:
            for _ in file.pieces():
                pass
        except NotUtf8Error as error:
            yield error


def _join_errors(errors):
    """One error for all files that are not UTF-8, each with its first place."""
    if len(errors) == 1:
        return errors[0]
    places = "; ".join(error.place for error in errors[:NAMED_FILES])
    more = f"; and {len(errors) - NAMED_FILES} more" if len(errors) > NAMED_FILES else ""
    remedies = {error.remedy.replace("Convert it", "Convert them") for error in errors}
    several = "Convert each from its encoding, for example with iconv, or extract its text if it is a PDF or an archive"
    remedy = remedies.pop() if len(remedies) == 1 else several
    return NotUtf8Error(f"{len(errors)} files: {places}{more}", remedy)


def _no_documents():
    """Counts of the documents that are used, with their bytes, and of the dropped ones by their first reason.

    `invalid` counts every document that is not UTF-8, whether it is dropped or repaired.
    """
    names = ("documents", "held_out_documents", "bytes", "blank", "invalid", "too_short", "duplicates")
    return dict.fromkeys(names, 0)


def _left_out(counts):
    reasons = [f"{counts[name]} {name}" for name in ("invalid", "too_short", "duplicates") if counts[name]]
    return f" (left out: {', '.join(reasons)})" if reasons else ""


def unit_windows(
    unit: PlannedUnit,
    source: Source,
    tokenizer: "PreTrainedTokenizerFast",
    special_ids: Mapping[str, Any],
    rules: Mapping,
) -> Iterator[Window]:
    """The windows of one unit; record numbers count from the unit's first."""
    pieces = _unit_pieces(unit, source, _is_by_file(rules))
    if rules.get("text") == "document":
        pieces = source.without_last_line_end(pieces)
    windows = packing.windows(pieces, tokenizer, special_ids, rules)
    for window in islice(windows, unit.max_windows):
        yield window._replace(run_records=[record - unit.start for record in window.run_records])


def unit_texts(unit: PlannedUnit, source: Source) -> Iterator[str]:
    """The text of one unit in pieces, for uses that need no windows."""
    return (piece.text for piece in _unit_pieces(unit, source))


def _unit_pieces(unit, source, of_one_split=False):
    """The pieces of a unit's documents; with `of_one_split` all documents of its file are in its split."""
    dropped = _numbers(unit.dropped)
    pieces = source.between(unit.start, unit.stop, unit.offset, reader=unit.split)
    for record, document in groupby(pieces, key=itemgetter(0)):
        if record - unit.start not in dropped:
            if of_one_split:
                yield from document
            else:
                yield from _if_of_split(document, unit.split)


def _if_of_split(document, split):
    """The pieces of a document, or nothing if it belongs to the other split."""
    head = take_head(document)
    if _split(split_key_of("".join([piece.text for piece in head]))) == split:
        yield from chain(head, document)


def _split(key):
    """`held_out` for one document in a hundred, chosen by 64 bits of its content."""
    return "held_out" if key < HELD_OUT_SHARE * 2**64 else "train"


def _is_by_file(rules):
    return rules.get("held_out_by") == "file"


def _files_held_out(contents):
    """Those content hashes whose files are held out: about one file in a hundred, those with the lowest hashes.

    The lowest is always among them.

    Raises  CorpusError when all the files have one content
    """
    if len(contents) < 2:
        raise CorpusError(
            "--held-out-by file needs two files or more with text, one to hold out and one to train on, but the corpus "
            "has one. Add files, or keep --held-out-by document."
        )
    return {content for content in contents if _split(int(content[:16], 16)) == "held_out"} or {min(contents)}


def _spans(source, unit_bytes, selection, seen, found, split_of_all):
    """Record ranges of a source that contain documents, a dict each, in the order in which they get full.

    found         counts of documents to add to, by the names of the source's files
    split_of_all  the split of all its documents; None if each document's content decides
    """
    open_spans: dict[str, dict] = {}
    for document in documents(source.pieces()):
        reason = selection.refusal(document, seen)
        counts = found[source.file_at(document.offset).name]
        counts["invalid"] += document.invalid and reason != "invalid"
        if reason is not None:
            counts[reason] += 1
        if not document.characters:
            continue
        split = split_of_all or _split(document.split_key)
        if split in open_spans and open_spans[split]["bytes"] >= unit_bytes:
            yield from _worth_a_unit(open_spans.pop(split))
        span = open_spans.setdefault(split, _new_span(split, document))
        span["bytes"] += document.bytes  # also of dropped documents
        span["stop"] = document.record + 1
        if reason is not None:
            span["dropped"].append(document.record - span["start"])
            continue
        span["documents"] += 1
        counts["documents"] += 1
        counts["held_out_documents"] += split == "held_out"
        counts["bytes"] += document.bytes
    for split in ("train", "held_out"):
        if split in open_spans:
            yield from _worth_a_unit(open_spans[split])


def _new_span(split, document):
    return {
        "split": split,
        "start": document.record,
        "offset": document.offset,
        "bytes": 0,
        "documents": 0,
        "dropped": [],
    }


def _worth_a_unit(span):
    if span["documents"]:
        yield span | {"dropped": _ranges(span["dropped"])}


def _ranges(numbers):
    """Write ascending numbers as text: 3,7-9."""
    parts = []
    for _, pairs in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in pairs]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(parts)


def _numbers(ranges):
    """The set of numbers in a text that `_ranges` wrote."""
    parts = [part.partition("-") for part in ranges.split(",") if part]
    return {number for first, _, last in parts for number in range(int(first), int(last or first) + 1)}


def _unit(rules, source, content, span, max_windows=None):
    address = {
        "windowing": rules,
        "content": content,
        "start": span["start"],
        "stop": span["stop"],
        "split": span["split"],
        "max_windows": max_windows,
    }
    if span["dropped"]:  # only if any, so that units keep their ids
        address["dropped"] = span["dropped"]
    return PlannedUnit(
        fingerprint(address),
        span["split"],
        source.name,
        span["start"],
        span["stop"],
        span["offset"],
        max_windows,
        span["dropped"],
    )


def _limit(units, sources, hashes, tokenizer, special_ids, rules, max_tokens, progress):
    """Keep units up to the window that reaches the split's part of max_tokens."""
    left = {"train": max_tokens * (1 - HELD_OUT_SHARE), "held_out": max_tokens * HELD_OUT_SHARE}
    kept = []
    for unit in units:
        if left[unit.split] <= 0:
            continue
        progress("tokenize", max_tokens - round(sum(max(0.0, part) for part in left.values())), max_tokens)
        source = sources[unit.source]
        found = unit_windows(unit, source, tokenizer, special_ids, rules)
        for number, window in enumerate(found, start=1):
            left[unit.split] -= len(window.ids)
            if left[unit.split] <= 0:
                unit = _unit(rules, source, hashes[unit.source], asdict(unit), max_windows=number)
                break
        kept.append(unit)
    return kept
