"""Plans: every document in one unit, units addressed by content, samples that follow from the seed."""

import json
from types import SimpleNamespace

import pytest

from pipeline import plan as planning
from pipeline.corpus import CorpusError, JsonLines, TextFile

SPECIAL = {"cls": 1, "sep": 2, "pad": 0, "mask": 3, "all": [0, 1, 2, 3]}
RULES = planning.windowing("tokenizer", 16)


class WordTokenizer:
    """Numbers are tokens: "17 18" becomes [17, 18]."""

    @property
    def backend_tokenizer(self):
        return self

    def encode_batch_fast(self, texts, add_special_tokens):
        return [SimpleNamespace(ids=[int(word) for word in text.split()]) for text in texts]


def scan(sources, **options):
    return planning.scan(sources, WordTokenizer(), SPECIAL, RULES, **{"unit_tokens": 1000, **options})


def windows(plan, sources, split=None):
    by_name = {source.name: source for source in sources}
    return [
        window
        for unit in plan.units
        if split in (None, unit.split)
        for window in planning.unit_windows(unit, by_name[unit.source], WordTokenizer(), SPECIAL, RULES)
    ]


def tokens_of(plan, sources, split=None):
    return [token for window in windows(plan, sources, split) for token in window.ids if token > 3]


@pytest.fixture
def sources(tmp_path):
    def text(first):
        return "\n\n".join(f"{n} {n} {n + 100_000}" for n in range(first, first + 1500))

    for name, first in (("a.txt", 1000), ("b.txt", 10_000)):
        (tmp_path / name).write_text(text(first))
    return [TextFile(tmp_path / "a.txt"), TextFile(tmp_path / "b.txt")]


def test_every_document_is_in_exactly_one_split(sources):
    plan = scan(sources)
    train, held_out = tokens_of(plan, sources, "train"), tokens_of(plan, sources, "held_out")
    numbers = [n for first in (1000, 10_000) for n in range(first, first + 1500)]
    assert sorted(train + held_out) == sorted(t for n in numbers for t in (n, n, n + 100_000))
    assert not set(train) & set(held_out)
    assert plan.corpus["documents"] == 3000
    assert plan.corpus["held_out_documents"] == len(held_out) // 3 and 10 < len(held_out) // 3 < 60
    assert len([unit for unit in plan.units if unit.split == "train"]) > 6


def test_unit_ids_follow_from_content_alone(sources, tmp_path):
    plan = scan(sources)
    moved = tmp_path / "elsewhere.txt"
    moved.write_bytes(sources[0].path.read_bytes())
    again = scan([TextFile(moved), sources[1]])
    assert [unit.id for unit in again.units] == [unit.id for unit in plan.units] and again.id == plan.id
    first = {unit.id for unit in plan.units if unit.source == sources[0].name}
    moved.write_text(moved.read_text() + "\n\n77 77")
    changed = {unit.id for unit in scan([TextFile(moved), sources[1]]).units}
    assert not first & changed and {unit.id for unit in plan.units} - first <= changed
    other_rules = planning.windowing("another tokenizer", 16)
    other = planning.scan(sources, WordTokenizer(), SPECIAL, other_rules, unit_tokens=1000)
    assert not {unit.id for unit in other.units} & {unit.id for unit in plan.units}


def test_held_out_documents_do_not_depend_on_their_file_or_unit_size(sources, tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in sources[0].path.read_text().split("\n\n")))
    one = tokens_of(scan(sources[:1]), sources[:1], "held_out")
    other = [JsonLines(lines)]
    assert tokens_of(scan(other, unit_tokens=10**6), other, "held_out") == one


def test_max_tokens_ends_at_a_window(sources):
    plan = scan(sources, max_tokens=2000)
    train = [len(window.ids) for window in windows(plan, sources, "train")]
    assert 1980 <= sum(train) < 1980 + 16
    held_out = [len(window.ids) for window in windows(plan, sources, "held_out")]
    assert 20 <= sum(held_out) < 20 + 16
    whole = scan(sources)
    assert tokens_of(whole, sources, "train")[:1000] == tokens_of(plan, sources, "train")[:1000]
    assert plan.units[0].id == whole.units[0].id, "a unit that is not cut keeps its address"


def test_record_numbers_count_from_the_unit(sources):
    plan = scan(sources)
    by_name = {source.name: source for source in sources}
    for unit in plan.units:
        found = planning.unit_windows(unit, by_name[unit.source], WordTokenizer(), SPECIAL, RULES)
        records = [record for window in found for record in window.run_records]
        assert records == sorted(records) and records[0] >= 0 and records[-1] < unit.stop - unit.start


def test_a_copy_of_a_file_counts_once(sources, tmp_path):
    copy = tmp_path / "copy.txt"
    copy.write_bytes(sources[0].path.read_bytes())
    plan = scan([*sources, TextFile(copy)])
    assert plan.id == scan(sources).id and plan.corpus["repeated_sources"] == 1


@pytest.mark.parametrize("text", ["\n\n\n", "   ", ""])
def test_a_corpus_without_text_is_refused(tmp_path, text):
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(CorpusError, match="no training text: 1 files, 0 documents"):
        scan([TextFile(tmp_path / "empty.txt")])


def test_the_dictionary_sample_is_spread_over_the_corpus_and_leaves_held_out_text_alone(sources):
    plan = scan(sources)
    by_name = {source.name: source for source in sources}

    def windows_of(unit):
        return planning.unit_windows(unit, by_name[unit.source], WordTokenizer(), SPECIAL, RULES)

    sample = planning.sample_windows(plan, windows_of, 2000, seed=1)
    tokens = [token for window in sample for token in window.ids if token > 3]
    assert 1500 < len(tokens) < 2200
    assert set(tokens) <= set(tokens_of(plan, sources, "train"))
    share = sum(token % 100_000 < 10_000 for token in tokens) / len(tokens)
    assert 0.4 < share < 0.6, "both files in their proportion"
    assert planning.sample_windows(plan, windows_of, 2000, seed=1) == sample
    assert planning.sample_windows(plan, windows_of, 2000, seed=2) != sample
