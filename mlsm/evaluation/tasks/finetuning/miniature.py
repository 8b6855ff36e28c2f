"""Miniature data for all ten tasks in their published formats, for `--smoke` and the tests.

The sentences are from a small grammar, and the labels follow from the sentences. The files are the same every time.
Scores on these tasks say nothing about language; they only show that the code works.
"""

from collections.abc import Sequence
from pathlib import Path

from shards.counter import hash_u64

TRAIN, DEV = 64, 16  # examples

NAMES = ("Anna", "Bruno", "Clara", "David", "Elena", "Felix")
CITIES = ("Berlin", "Lisbon", "Oslo", "Prague", "Vienna", "Zurich")
FIRMS = ("Acme", "Globex", "Initech", "Umbra")
VERBS = ("visits", "likes", "paints", "leaves", "studies", "films")
GOOD, BAD = ("charming", "bright", "warm", "witty"), ("dull", "clumsy", "tired", "bleak")
NOUNS = ("film", "story", "scene", "play")


def write_miniatures(directory: Path) -> Path:
    """Write all tasks below a directory, which can then be used as --data-dir. Returns the directory."""
    for name, header in _HEADERS.items():
        for part in ("train", "dev"):
            rows = [_row(name, part, number) for number in range(_count(part))]
            lines = ["\t".join(fields) for fields in ([header, *rows] if header else rows)]
            _write(directory / "glue" / name / f"{part}.tsv", lines)
    _write_mnli(directory / "glue" / "MNLI")
    _write_wic(directory / "wic")
    _write_conll(directory / "conll2003")
    return directory


class Dice:
    """Pseudo-random choices, determined by a task, a split and an example's number."""

    def __init__(self, task: str, part: str, number: int):
        self.number, self._thrown = number, 0
        self._keys = (*task.encode(), *part.encode(), number)

    def one(self, choices: Sequence[str]) -> str:
        """One of some choices."""
        self._thrown += 1
        return choices[int(hash_u64(*self._keys, self._thrown) % len(choices))]

    def two(self, choices: Sequence[str]) -> tuple[str, str]:
        """Two different ones."""
        first = self.one(choices)
        return first, self.one([choice for choice in choices if choice != first])


def _count(part):
    return TRAIN if part == "train" else DEV


def _write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _pair(dice, same):
    """A sentence, and the same with another word order or another city."""
    name, verb, (city, other) = dice.one(NAMES), dice.one(VERBS), dice.two(CITIES)
    return f"{name} {verb} {city} .", f"It is {city if same else other} that {name} {verb} ."


_HEADERS: dict[str, tuple[str, ...]] = {  # if train.tsv and dev.tsv have the same format; CoLA has no header
    "CoLA": (),
    "SST-2": ("sentence", "label"),
    "MRPC": ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
    "QQP": ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
    "QNLI": ("index", "question", "sentence", "label"),
    "RTE": ("index", "sentence1", "sentence2", "label"),
    "STS-B": (
        *("index", "genre", "filename", "year", "old_index", "source1", "source2"),
        *("sentence1", "sentence2", "score"),
    ),
}


def _row(task: str, part: str, number: int) -> tuple[str, ...]:
    """The columns of one example; every second example has the positive label."""
    dice, positive = Dice(task, part, number), number % 2
    entailment = "entailment" if positive else "not_entailment"
    match task:
        case "CoLA":
            words = [dice.one(NAMES), dice.one(VERBS), dice.one(CITIES), "."]
            return "mini", str(positive), "" if positive else "*", " ".join(words if positive else words[::-1])
        case "SST-2":
            return f"a {dice.one(GOOD if positive else BAD)} {dice.one(NOUNS)} . ", str(positive)
        case "MRPC":
            return str(positive), str(number), str(number + 1), *_pair(dice, positive)
        case "QQP":
            first, second = (text.replace(" .", " ?") for text in _pair(dice, positive))
            return str(number), "1", "2", f"Why: {first}", f"Why: {second}", str(positive)
        case "QNLI":
            name, verb = dice.one(NAMES), dice.one(VERBS)
            answer = f"{name if positive else 'Nobody'} {verb} {dice.one(CITIES)} ."
            return str(number), f"What is it that {name} {verb} ?", answer, entailment
        case "RTE":
            return str(number), *_pair(dice, positive), entailment
        case "STS-B":
            score = number % 3
            first, same = _pair(dice, True)
            second = (f"A {dice.one(BAD)} {dice.one(NOUNS)} .", _pair(dice, False)[1], same)[score]
            return str(number), "g", "f", "y", "0", "s", "s", first, second, f"{2.5 * score:.3f}"
    raise KeyError(task)


def _write_mnli(directory):
    labels = ("entailment", "neutral", "contradiction")
    header = "index\tsentence1\tsentence2\tgold_label"
    for part in ("train", "dev_matched", "dev_mismatched"):
        lines = []
        for number in range(_count(part)):
            dice, kind = Dice("MNLI", part, number), number % 3
            first, same = _pair(dice, True)
            second = (same, f"A {dice.one(GOOD)} {dice.one(NOUNS)} .", f"It is not so : {first}")[kind]
            lines.append(f"{number}\t{first}\t{second}\t{labels[kind]}")
        _write(directory / f"{part}.tsv", [header, *lines])


def _write_wic(directory):
    for part in ("train", "dev"):
        lines, gold = [], []
        for number in range(_count(part)):
            dice, same = Dice("wic", part, number), number % 2
            verb = dice.one(VERBS)
            second = f"In {dice.one(CITIES)} {dice.one(NAMES)} {verb} {'Oslo' if same else 'nothing'} ."
            lines.append(f"{verb}\tV\t1-3\t{dice.one(NAMES)} {verb} {dice.one(CITIES)} .\t{second}")
            gold.append("T" if same else "F")
        _write(directory / part / f"{part}.data.txt", lines)
        _write(directory / part / f"{part}.gold.txt", gold)


def _write_conll(directory):
    for part in ("train", "dev"):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for number in range(_count(part)):
            dice = Dice("conll2003", part, number)
            tagged = [(dice.one(NAMES), "NNP I-NP B-PER"), (dice.one(NAMES), "NNP I-NP I-PER"), ("of", "IN I-PP O")]
            tagged += [(dice.one(FIRMS), "NNP I-NP B-ORG"), (dice.one(VERBS), "VBZ I-VP O")]
            tagged += [(dice.one(CITIES), "NNP I-NP B-LOC"), (".", ". O O")]
            lines += [*(f"{word} {tags}" for word, tags in tagged), ""]
        _write(directory / f"{part}.txt", lines)
