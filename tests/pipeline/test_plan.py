"""Plans: every document in one unit, units addressed by content, samples that follow from the seed."""

import json
import pickle
from types import SimpleNamespace

import pytest
from kinds import KINDS, opened, write, write_bytes

from mlsm.common.errors import CorpusError, NotUtf8Error
from mlsm.common.progress import silent
from pipeline import plan as planning
from pipeline.corpus import JsonLines, TextFile
from pipeline.corpus.documents import Selection
from pipeline.executor import Context, Inline
from pipeline.sample import WindowSample, find_candidates, sample_windows
from shards.manifest import Plan, PlannedUnit

pytestmark = pytest.mark.promise("odd, blank and no …")

SPECIAL = {"cls": 1, "sep": 2, "pad": 0, "mask": 3, "all": [0, 1, 2, 3]}
RULES = planning.windowing("tokenizer", 16)


def test_an_error_of_text_that_is_not_utf8_survives_the_way_from_a_worker():
    error = pickle.loads(pickle.dumps(NotUtf8Error("a.txt: byte 3", "Convert it")))
    assert str(error) == str(NotUtf8Error("a.txt: byte 3", "Convert it")) and error.place == "a.txt: byte 3"


def test_all_files_that_are_not_utf8_are_named_in_one_line(tmp_path):
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_bytes(b"good\n\n" * 3 + (b"bad \xff\n" * number or b"fine\n"))
    with pytest.raises(CorpusError) as caught:
        scan([TextFile(file) for file in files])
    message = str(caught.value)
    first, second = (f"{file}: not UTF-8 at byte 22" for file in files[1:])
    assert message.startswith(f"2 files: {first}; {second}. Convert them")
    assert "\n" not in message and str(files[0]) not in message
    with pytest.raises(CorpusError, match=f"^{files[1]}: not UTF-8 at byte 22. Convert it"):
        scan([TextFile(file) for file in files[:2]])


def test_parquet_files_that_are_not_utf8_are_named_in_one_line_too(tmp_path):
    for number in range(2):
        write(tmp_path, f"{number}.parquet", [b"%d" % number, b"caf\xe9"])
    with pytest.raises(CorpusError, match=r"^2 files: .*0\.parquet, row 2: .*; .*1\.parquet, row 2: .*Convert them"):
        scan([opened(path) for path in sorted(tmp_path.glob("*.parquet"))])


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


def test_a_single_document_that_is_held_out_is_named(tmp_path):
    """One of a hundred, by the hash of its text."""
    for number in range(2_000):
        (tmp_path / "one.txt").write_text(f"Document {number} is alone.")
        try:
            scan([TextFile(tmp_path / "one.txt")])
        except CorpusError as error:
            assert "by chance, its only document is among the 1 % that are held out" in str(error)
            return
    pytest.fail("none was held out")


def test_no_more_windows_of_a_unit_are_held_than_the_sample_has(tmp_path):
    """A document is one unit, and may be many gigabytes."""
    source = text_file(tmp_path / "a.txt", [" ".join(map(str, range(100, 30_000)))])
    plan = scan([source])
    (number,) = [number for number, unit in enumerate(plan.units) if unit.split == "train"]
    found = windows(plan, [source], "train")
    job = SimpleNamespace(plan=plan, windows=lambda unit: iter(found))
    whole, bounded = WindowSample(plan, 500), WindowSample(plan, 500)
    (some,) = find_candidates(Context(job), [(number, 2**64)], seed=5, most=whole.most)
    (all_of_them,) = find_candidates(Context(job), [(number, 2**64)], seed=5, most=len(found))
    bounded.add(some)
    whole.add(all_of_them)
    assert len(some) == whole.most < len(found) / 10 and bounded.windows() == whole.windows()


def test_the_dictionary_sample_is_spread_over_the_corpus_and_leaves_held_out_text_alone(sources):
    plan = scan(sources)
    by_name = {source.name: source for source in sources}

    def windows_of(unit):
        return planning.unit_windows(unit, by_name[unit.source], WordTokenizer(), SPECIAL, RULES)

    executor = Inline(SimpleNamespace(plan=plan, windows=windows_of, check_sources=silent, progress=silent))
    sample = sample_windows(executor, 2000, seed=1)
    tokens = [token for window in sample for token in window.ids if token > 3]
    assert 1500 < len(tokens) < 2200
    assert set(tokens) <= set(tokens_of(plan, sources, "train"))
    share = sum(token % 100_000 < 10_000 for token in tokens) / len(tokens)
    assert 0.4 < share < 0.6, "both files in their proportion"
    assert sample_windows(executor, 2000, seed=1) == sample
    assert sample_windows(executor, 2000, seed=2) != sample


# -- whole files held out ------------------------------------------------------------------------------------

BY_FILE = planning.windowing("tokenizer", 16, held_out_by="file")


def books(directory, count, paragraphs=120):
    """Files of many paragraphs, cut at empty lines; the tokens of file n begin at 10,000 n."""
    for book in range(count):
        text = "\n\n".join(f"{10_000 * book + n} {10_000 * book + n + 5000}" for n in range(100, 100 + paragraphs))
        (directory / f"{book:03}.txt").write_text(text)
    return [TextFile(directory / f"{book:03}.txt") for book in range(count)]


def books_of(plan, sources, split):
    by_name = {source.name: source for source in sources}
    found = [
        window
        for unit in plan.units
        if unit.split == split
        for window in planning.unit_windows(unit, by_name[unit.source], WordTokenizer(), SPECIAL, BY_FILE)
    ]
    return [token // 10_000 for window in found for token in window.ids if token > 3]


@pytest.mark.parametrize(("count", "expected"), [(3, 1), (400, range(1, 11))])
def test_whole_files_are_held_out_at_least_one(tmp_path, count, expected):
    """About one in a hundred, by content: in another order, the same ones."""
    sources = books(tmp_path, count, paragraphs=12)
    plan = planning.scan(sources, WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=50)
    held_out, train = (books_of(plan, sources, split) for split in ("held_out", "train"))
    assert not set(held_out) & set(train) and set(held_out) | set(train) == set(range(count))
    assert len(set(held_out)) == expected if isinstance(expected, int) else len(set(held_out)) in expected
    assert sorted(held_out + train) == sorted(book for book in range(count) for _ in range(24)), "nothing is lost"
    assert plan.corpus["held_out_documents"] == 12 * len(set(held_out))
    again = planning.scan(sources[::-1], WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=50)
    assert {unit.id for unit in again.units} == {unit.id for unit in plan.units}


def test_holding_out_files_makes_another_plan_and_leaves_the_other_one_as_it_was(tmp_path):
    sources = books(tmp_path, 3)
    by_document, by_file = scan(sources), planning.scan(sources, WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=1000)
    assert not {unit.id for unit in by_document.units} & {unit.id for unit in by_file.units}
    assert "held_out_by" not in by_document.windowing and by_file.windowing["held_out_by"] == "file"
    with pytest.raises(CorpusError, match="two files or more"):
        planning.scan(sources[:1] * 2, WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=1000)


def test_a_file_is_held_out_even_if_one_without_documents_has_the_lowest_hash(tmp_path):
    empty = TextFile(tmp_path / "empty.txt")
    empty.path.write_text("\n\n")
    found = [book for book in books(tmp_path, 20, paragraphs=12) if book.content_hash > empty.content_hash][:5]
    copy = text_file(tmp_path / "copy.jsonl", [])  # the documents of found[0] again: none of them is kept
    copy.path.write_text("".join(json.dumps({"text": t}) + "\n" for t in found[0].path.read_text().split("\n\n")))
    sources = [*found, JsonLines(copy.path), empty]
    plan = planning.scan(sources, WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=50)
    lowest, *others = sorted(found, key=lambda book: book.content_hash)
    assert {unit.source for unit in plan.units if unit.split == "held_out"} == {lowest.name}
    assert {unit.source for unit in plan.units if unit.split == "train"} == {book.name for book in others}
    assert (plan.corpus["documents"], plan.corpus["held_out_documents"]) == (60, 12)
    assert planning.scan(sources[::-1], None, None, BY_FILE, unit_tokens=50).corpus["held_out_documents"] == 12
    with pytest.raises(CorpusError, match="two files or more"):
        planning.scan([found[0], empty], WordTokenizer(), SPECIAL, BY_FILE, unit_tokens=50)
    with pytest.raises(CorpusError, match="no training text"):
        planning.scan([empty, text_file(tmp_path / "none.txt", [])], None, None, BY_FILE, unit_tokens=50)


# -- addresses that must not change ------------------------------------------------------------------------


def golden_sources(directory):
    texts = [f"{n} {n} {n + 100_000}\n{n + 5}" for n in range(1000, 1400)]
    (directory / "a.txt").write_text("\n\n".join(texts))
    lines = [json.dumps({"text": text}) + "\n" for text in [*texts[:150], "", "  "]]
    (directory / "b.jsonl").write_text("".join(lines).replace("1", "2"))
    return [TextFile(directory / "a.txt"), JsonLines(directory / "b.jsonl")]


@pytest.mark.promise("a duplicate changes …")
@pytest.mark.parametrize(
    ("max_tokens", "plan_id", "units"),
    [
        (None, "4479768cd14ae74bbeaab71515f790f9", ["cc030c5d", "5c635e3c", "46598f54", "d46790dd", "eb33a423"]),
        (1500, "fc90b08db1f7cc7ac1dae61f1a41c174", ["cc030c5d", "cb5afc59", "ee7f3048"]),
    ],
)
def test_stores_of_before_anything_was_left_out_are_found_again(tmp_path, max_tokens, plan_id, units):
    plan = scan(golden_sources(tmp_path), max_tokens=max_tokens, selection=Selection(duplicates=False))
    assert plan.id == plan_id and [unit.id[:8] for unit in plan.units] == units
    assert plan.as_dict()["units"][0].keys() == {"id", "split", "source", "start", "stop", "offset", "max_windows"}
    alone = scan(golden_sources(tmp_path)[:1])
    assert {unit.id[:8] for unit in alone.units} <= {"cc030c5d", "5c635e3c", "46598f54", "d46790dd"}, "no duplicates"
    assert planning.windowing("t", 128) == {"tokenizer": "t", "packing": "packed", "max_length": 128, "held_out": 0.01}


# -- documents that are left out -----------------------------------------------------------------------------


def numbers(first, count):
    return [f"{n} {n} {n + 100_000}" for n in range(first, first + count)]


def text_file(path, texts):
    path.write_text("\n\n".join(texts))
    return TextFile(path)


@pytest.mark.promise(
    "a duplicate changes the unit it is left out of and no other; a corpus without any keeps the ids of before",
    cases="1, 2",
)
def test_duplicates_are_left_out_across_files_and_only_their_unit_changes(tmp_path):
    first = text_file(tmp_path / "a.txt", numbers(1000, 300))
    unique = text_file(tmp_path / "b.txt", numbers(5000, 1000))
    before = scan([first, unique])
    repeats = numbers(5000, 1000)
    repeats[400:403] = numbers(1000, 3)  # of the other file
    repeats[700] = repeats[650]  # of its own
    doubled = text_file(tmp_path / "b.txt", repeats)
    plan = scan([first, doubled])
    again = scan([text_file(tmp_path / "c.txt", numbers(90_000, 10)), doubled])  # where 1000 to 1002 are new
    assert tokens_of(plan, [first, doubled]) == tokens_of(scan([first, doubled]), [first, doubled])
    found = sorted(tokens_of(plan, [first, doubled]))
    assert found == sorted(t for text in {*numbers(1000, 300), *repeats} for t in map(int, text.split()))
    assert plan.corpus["duplicates"] == 4 == plan.corpus["files"][doubled.name]["duplicates"]
    assert plan.corpus["files"][first.name]["duplicates"] == 0 and plan.corpus["documents"] == 1296
    ranges = [[(u.start, u.stop, u.split) for u in p.units if u.source == doubled.name] for p in (before, plan, again)]
    assert ranges[1] == ranges[2], "where a file is cut does not depend on what is left out"
    ids = [{unit.id for unit in p.units if unit.source == doubled.name} for p in (plan, again)]
    assert 1 <= len(ids[0] - ids[1]) <= 2 < len(ids[0])
    dropped = "".join(unit.dropped for unit in plan.units)
    assert "-" in dropped and plan.corpus["bytes"] == sum(map(len, {*numbers(1000, 300), *repeats})) + 1296 - 2


def test_what_is_left_out_is_part_of_the_address(tmp_path):
    texts = numbers(1000, 50)
    texts[30] = texts[10]
    source = text_file(tmp_path / "a.txt", texts)
    (one,) = [unit for unit in scan([source]).units if unit.split == "train"]
    (other,) = [u for u in scan([source], selection=Selection(duplicates=False)).units if u.split == "train"]
    assert one.dropped == "30" and other.dropped == "" and one.id != other.id
    assert (one.start, one.stop, one.offset) == (other.start, other.stop, other.offset)
    seen = []
    limited = scan([source], max_tokens=100, progress=lambda *what, **figures: seen.append(what))
    assert ("tokenize", 0, 100) in seen
    assert limited.units[0].dropped == "30", "a unit that is cut at --max-tokens still leaves it out"
    path = tmp_path / f"{limited.id}.json"
    path.write_text(json.dumps(limited.as_dict()))
    assert Plan.parse(path.read_bytes(), path) == limited


def test_a_range_of_nothing_but_duplicates_is_no_unit(tmp_path):
    sources = [text_file(tmp_path / f"{n}.txt", numbers(1000, 300) + numbers(2000 * n, n)) for n in (1, 2)]
    plan = scan(sources, unit_tokens=100)
    assert len([unit for unit in plan.units if unit.source == sources[1].name]) <= 2
    assert plan.corpus["duplicates"] == 300


def test_short_documents_are_left_out(sources, tmp_path):
    source = text_file(tmp_path / "a.txt", ["17 18", " 17 18 19 ", "17 18 19 20"] + numbers(1000, 50))
    plan = scan([source], selection=Selection(min_characters=8))
    assert plan.corpus["too_short"] == 1 and plan.corpus["documents"] == 52
    assert tokens_of(plan, [source])[:3] == [17, 18, 19] or "0" in plan.units[0].dropped
    with pytest.raises(CorpusError, match=r"0 bytes of text \(left out: 53 too_short\)"):
        scan([source], selection=Selection(min_characters=800))


NOT_UTF8 = b"17 18\n\n19 \xff\n20\n\n21 22"


@pytest.mark.parametrize("kind", ["a.txt", "a.txt.gz"])
def test_documents_that_are_not_utf8_are_left_out_or_repaired(tmp_path, kind):
    path = write_bytes(tmp_path / kind, NOT_UTF8 + "".join(f"\n\n{text}" for text in numbers(1000, 30)).encode())
    skipping = opened(path, invalid_utf8="skip")
    plan = scan([skipping], selection=Selection(invalid=True))
    assert plan.corpus["invalid"] == 1 and plan.corpus["documents"] == 32
    assert tokens_of(plan, [skipping])[:4] == [17, 18, 21, 22]
    repaired = scan([opened(path, invalid_utf8="replace")])
    assert repaired.corpus["invalid"] == 1 and repaired.corpus["documents"] == 33
    assert not {unit.id for unit in plan.units if unit.split == "train"} & {unit.id for unit in repaired.units}
    with pytest.raises(CorpusError, match="not UTF-8 at byte 10"):
        scan([opened(path)])


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_documents_in_any_kind_are_one_text(tmp_path, kind):
    """A kind is a way to store them: the same documents held out, the same tokens, all of them duplicates."""
    plain = text_file(tmp_path / "plain.txt", numbers(1000, 800))
    other = opened(write(tmp_path, kind, numbers(1000, 800)))
    one, two = scan([plain]), scan([other])
    for split in ("train", "held_out"):
        assert tokens_of(one, [plain], split) == tokens_of(two, [other], split) != []
    both = scan([plain, other])
    assert both.corpus["duplicates"] + both.corpus["repeated_sources"] * 800 == 800


@pytest.mark.parametrize("kind", KINDS)
def test_every_unit_alone_is_what_it_is_in_order(tmp_path, kind):
    """Reading on where another unit ended changes nothing."""
    source = opened(write(tmp_path, kind, numbers(1000, 1500)))
    plan = scan([source])
    assert len(plan.units) > 3

    def read(unit, source):
        return list(planning.unit_windows(unit, source, WordTokenizer(), SPECIAL, RULES))

    in_order = [read(unit, source) for unit in plan.units]
    assert in_order == [read(unit, opened(source.path)) for unit in plan.units]
    assert in_order[::-1] == [read(unit, source) for unit in plan.units[::-1]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_file_of_any_kind_is_other_units(tmp_path, kind):
    before = scan([opened(write(tmp_path, kind, numbers(1000, 200)))])
    after = scan([opened(write(tmp_path, kind, [*numbers(1000, 199), "77 77 77"]))])
    assert not {unit.id for unit in before.units} & {unit.id for unit in after.units}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if ".txt" not in kind])
def test_blank_records_are_counted_and_open_no_unit(tmp_path, kind):
    source = opened(write(tmp_path, kind, ["", "  ", *numbers(1000, 40), ""]))
    plan = scan([source])
    assert plan.corpus["blank"] == 3 and plan.corpus["documents"] == 40
    assert min(unit.start for unit in plan.units) == 2
    with pytest.raises(CorpusError, match="no training text: 1 files, 0 documents"):
        scan([opened(write(tmp_path, kind, [""] * 20))])


@pytest.mark.parametrize("dropped", [[], [0], [3, 7, 8, 9, 11], list(range(50))])
def test_ranges(dropped):
    text = planning._ranges(dropped)
    assert planning._numbers(text) == set(dropped) and len(text) < 12
    unit = PlannedUnit("id", "train", "a", 0, 99, dropped=text)
    assert PlannedUnit(**unit.as_dict()) == unit
