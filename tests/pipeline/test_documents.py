"""Which documents count: the scan's view of them against plain strings, duplicates against a Python set."""

import hashlib
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import KINDS, opened, write

from pipeline.corpus import documents as module
from pipeline.corpus.documents import DEFAULT_SELECTION, Document, Seen, Selection, documents
from pipeline.corpus.source import PIECE_CHARACTERS, Piece, parts


def digest_key(text):
    return int.from_bytes(hashlib.sha256(text.strip().encode()).digest()[8:16], "big")


@given(st.lists(st.text(st.sampled_from(" \nab€"), max_size=12), min_size=1, max_size=8), st.integers(1, 9))
def test_a_document_is_its_text_however_it_is_cut(texts, size):
    """Heads of a few characters instead of 64 Ki, so that small texts have a rest."""
    pieces = [
        Piece(record, record * 10, text[at : at + size])
        for record, text in enumerate(texts)
        for at in range(0, max(1, len(text)), size)
    ]
    original, module.PIECE_CHARACTERS = module.PIECE_CHARACTERS, 4
    try:
        found = list(documents(pieces))
    finally:
        module.PIECE_CHARACTERS = original
    for record, (document, text) in enumerate(zip(found, texts, strict=True)):
        assert (document.record, document.offset, document.bytes) == (record, record * 10, len(text.encode()))
        assert document.characters == len(text.strip()) and not document.invalid
        assert document.key == digest_key(text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_document_has_the_same_key_in_every_kind(tmp_path, kind):
    text = " ".join(f"wörd{n}" for n in range(30_000))
    assert len(text) > 3 * PIECE_CHARACTERS
    (found,) = documents(opened(write(tmp_path, kind, [text])).pieces())
    assert found.key == digest_key(text) and found.characters == len(text)


def test_text_that_is_invalid_far_behind_is_noticed():
    pieces = [Piece(0, 0, part) for part in parts("word " * 50_000)] + [Piece(0, 0, "\ufffd", True)]
    (found,) = documents(pieces)
    assert found.invalid and documents([Piece(0, 0, "fine")]).__next__().invalid is False


def document(**given):
    plain = {"record": 0, "offset": 0, "bytes": 9, "characters": 9, "split_key": 0, "key": 1, "invalid": False}
    return Document(**plain | given)


def test_the_first_reason_counts_and_what_is_left_out_is_not_seen():
    strict = Selection(invalid=True, min_characters=5)
    seen = Seen()
    assert strict.refusal(document(characters=0, invalid=True), seen) == "blank"
    assert strict.refusal(document(characters=2, invalid=True), seen) == "invalid"
    assert strict.refusal(document(characters=4), seen) == "too_short"
    assert strict.refusal(document(characters=5), seen) is None, "the three before it were not seen"
    assert strict.refusal(document(characters=5), seen) == "duplicates"
    assert Selection(duplicates=False).refusal(document(invalid=True), seen) is None
    assert DEFAULT_SELECTION.refusal(document(key=2), seen) is None


@settings(max_examples=20)
@given(st.lists(st.integers(0, 60), max_size=300), st.integers(1, 9))
def test_seen_is_a_set(keys, recent):
    original, module._RECENT = module._RECENT, recent
    try:
        seen, known = Seen(), set()
        for key in [key << 58 | key for key in keys]:
            assert seen.add(key) == (key not in known)
            known.add(key)
    finally:
        module._RECENT = original


def test_seen_takes_about_16_bytes_a_key(monkeypatch):
    monkeypatch.setattr(module, "_RECENT", 1 << 8)
    dice = random.Random(0)
    tracemalloc.start()
    seen = Seen()
    count = 30_000
    assert all(seen.add(dice.getrandbits(64)) for _ in range(count))
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert now < 10 * count + 60_000 and peak < 20 * count + 60_000 and len(seen._arrays) < 9
