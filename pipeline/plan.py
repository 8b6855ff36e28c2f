"""A corpus cut into fixed units of work, before any work is done.

One scan hashes each source, decides by content which documents are held out, and cuts record ranges of
about `unit_tokens` tokens. A unit's id follows from the tokenizer, the windowing, the source's bytes and the
record range alone, so the output does not depend on the worker count, on retries or on order, and an LSP
store and an ids store of one plan pair exactly. Left out: encoding a unit (encode.py).
"""

import hashlib
from heapq import heappush, heapreplace
from itertools import chain, groupby, islice

from pipeline.corpus import PIECE_CHARACTERS, CorpusError, packed_windows, silent, tokenised
from shards.counter import hash_u64
from shards.manifest import Plan, PlannedUnit, fingerprint

HELD_OUT_SHARE = 0.01
BYTES_PER_TOKEN = 4  # of English text; only sizes the units, which need not be exact


def windowing(tokenizer_fingerprint, max_length):
    """What turns text into windows, the part of a plan that is not the corpus."""
    return {
        "tokenizer": tokenizer_fingerprint,
        "packing": "packed",
        "max_length": max_length,
        "held_out": HELD_OUT_SHARE,
    }


def scan(sources, tokenizer, special_ids, rules, *, unit_tokens, max_tokens=None, progress=silent):
    """Cut the sources into units.

    sources       readers from corpus.py; of those with equal content the first counts
    rules         dict of `windowing`
    unit_tokens   about this many tokens a unit
    max_tokens    stop at the window that reaches it, 99 % of it from training and 1 % from held-out
                  documents; None takes everything and does not tokenise
    progress      called with (stage, done bytes, None, unit)
    Returns       Plan
    Raises        CorpusError when there is no document, or no training document
    """
    counts = {"sources": len(sources), "repeated_sources": 0, "documents": 0, "held_out_documents": 0, "bytes": 0}
    units, hashes = [], {}
    for source in sources:
        content = source.content_hash()
        if content in hashes.values():
            counts["repeated_sources"] += 1
            continue
        hashes[source.name] = content
        for span in _spans(source, unit_tokens * BYTES_PER_TOKEN, counts):
            units.append(_unit(rules, source, content, span))
        progress("scan", counts["bytes"], None, unit="bytes", documents=counts["documents"])
    if not any(unit.split == "train" for unit in units):
        raise CorpusError(
            f"the corpus has no training text: {len(sources)} files, {counts['documents']} documents, "
            f"{counts['bytes']:,} bytes of text. Check --corpus and the document boundaries."
        )
    if max_tokens is not None:
        units = _limit(units, {s.name: s for s in sources}, hashes, tokenizer, special_ids, rules, max_tokens)
    return Plan(rules, tuple(units), counts)


def unit_windows(unit, source, tokenizer, special_ids, max_length):
    """The windows of one unit; record numbers count from the unit's first."""
    pieces = (
        piece
        for piece, held_out in _labelled(_until(source.pieces(unit.start, unit.offset), unit.stop))
        if held_out == (unit.split == "held_out")
    )
    windows = packed_windows(tokenised(pieces, tokenizer), max_length, special_ids["cls"], special_ids["sep"])
    for window in islice(windows, unit.max_windows):
        yield window._replace(run_records=[record - unit.start for record in window.run_records])


def sample_windows(plan, windows_of, tokens, seed):
    """A uniform sample of training windows that holds at least `tokens` coded tokens, if the plan has them.

    windows_of  function from a unit to its windows
    Returns     list of windows in the order of their hash
    """
    sample = WindowSample(plan, tokens)
    for unit in plan.units:
        if unit.split == "train":
            sample.add(candidates(unit, windows_of(unit), seed, sample.bound))
    return sample.windows()


def candidates(unit, windows, seed, bound):
    """A unit's windows with a hash below a bound: triples (hash, (unit's id, number in the unit), window).

    The hash is counter-based, of (seed, unit, number).
    """
    for number, window in enumerate(windows):
        value = int(hash_u64(seed, int(unit.id[:16], 16), number))
        if value < bound:
            yield value, (unit.id, number), window


class WindowSample:
    """The windows of a plan with the smallest hashes, so that they follow from the plan and the seed alone, in
    whatever order units are added. Memory: the sample.

    tokens  coded tokens that the sample shall hold
    """

    def __init__(self, plan, tokens):
        self._tokens, self._heap = tokens, []  # (-hash, place, window): largest hash first
        self._wanted = -(-tokens // max(1, plan.windowing["max_length"] // 2))  # half-filled ones would still do

    @property
    def bound(self):
        """Hashes from this on cannot be among the smallest."""
        return -self._heap[0][0] if len(self._heap) == self._wanted else 2**64

    def add(self, found):
        """Add what `candidates` gives."""
        for value, place, window in found:
            if len(self._heap) < self._wanted:
                heappush(self._heap, (-value, place, window))
            elif value < self.bound:
                heapreplace(self._heap, (-value, place, window))

    def windows(self):
        """Those of the smallest hashes that hold the tokens, in the order of their hash."""
        chosen, total = [], 0
        for _, _, window in sorted(self._heap, reverse=True):
            if total >= self._tokens:
                break
            chosen.append(window)
            total += len(window.ids) - 2
        return chosen


def _until(pieces, stop):
    for piece in pieces:
        if piece.record >= stop:
            return
        yield piece


def _labelled(pieces):
    """Pairs (piece, held out); a document's first 64 Ki characters decide."""
    for _, document in groupby(pieces, key=lambda piece: piece.record):
        head = _head(document)
        held_out = _is_held_out("".join(piece.text for piece in head))
        yield from ((piece, held_out) for piece in chain(head, document))


def _head(document):
    """Take the first pieces of a document, as many as decide whether it is held out."""
    head, characters = [], 0
    for piece in document:
        head.append(piece)
        characters += len(piece.text)
        if characters >= PIECE_CHARACTERS:
            break
    return head


def _is_held_out(text):
    digest = hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def _spans(source, unit_bytes, counts):
    """Record ranges [split, start, stop, offset] of a source, in the order in which they are full."""
    open_spans, last = {}, -1
    for piece, held_out in _labelled(source.pieces()):
        split = "held_out" if held_out else "train"
        if piece.record != last:
            last = piece.record
            counts["documents"] += 1
            counts["held_out_documents"] += held_out
            if split in open_spans and open_spans[split]["bytes"] >= unit_bytes:
                yield open_spans.pop(split)
            open_spans.setdefault(split, {"split": split, "start": last, "offset": piece.offset, "bytes": 0})
        size = len(piece.text.encode("utf-8", "surrogatepass"))
        counts["bytes"] += size
        open_spans[split]["bytes"] += size
        open_spans[split]["stop"] = last + 1
    yield from (open_spans[split] for split in ("train", "held_out") if split in open_spans)


def _unit(rules, source, content, span, max_windows=None):
    address = {
        "windowing": rules,
        "content": content,
        "start": span["start"],
        "stop": span["stop"],
        "split": span["split"],
        "max_windows": max_windows,
    }
    return PlannedUnit(
        fingerprint(address),
        span["split"],
        source.name,
        span["start"],
        span["stop"],
        span["offset"],
        max_windows,
    )


def _limit(units, sources, hashes, tokenizer, special_ids, rules, max_tokens):
    """Keep units up to the window that reaches the split's part of max_tokens."""
    left = {"train": max_tokens * (1 - HELD_OUT_SHARE), "held_out": max_tokens * HELD_OUT_SHARE}
    kept = []
    for unit in units:
        if left[unit.split] <= 0:
            continue
        source = sources[unit.source]
        found = unit_windows(unit, source, tokenizer, special_ids, rules["max_length"])
        for number, window in enumerate(found, start=1):
            left[unit.split] -= len(window.ids)
            if left[unit.split] <= 0:
                span = {"split": unit.split, "start": unit.start, "stop": unit.stop, "offset": unit.offset}
                unit = _unit(rules, source, hashes[unit.source], span, max_windows=number)
                break
        kept.append(unit)
    return kept
