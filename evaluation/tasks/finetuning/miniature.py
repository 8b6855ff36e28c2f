"""Miniature data of all ten tasks, written in their upstream formats: what `--smoke` and the tests train on.

Sentences of a small grammar of our own, with labels that follow from them. The same files every time.
Left out: any claim about language; a model that learns these tasks has shown that the machinery works.
"""

from pathlib import Path

from shards.counter import hash_u64

TRAIN, DEV = 64, 16  # examples

NAMES = ("Anna", "Bruno", "Clara", "David", "Elena", "Felix")
CITIES = ("Berlin", "Lisbon", "Oslo", "Prague", "Vienna", "Zurich")
FIRMS = ("Acme", "Globex", "Initech", "Umbra")
VERBS = ("visits", "likes", "paints", "leaves", "studies", "films")
GOOD, BAD = ("charming", "bright", "warm", "witty"), ("dull", "clumsy", "tired", "bleak")
NOUNS = ("film", "story", "scene", "play")


def write_miniatures(directory):
    """Write all tasks below a directory, which then serves as --data-dir. Returns it."""
    directory = Path(directory)
    for name, (header, row) in _TABLES.items():
        for part in ("train", "dev"):
            lines = [row(Dice(name, part, number)) for number in range(_count(part))]
            _write(directory / "glue" / name / f"{part}.tsv", ["\t".join(fields) for fields in [*header, *lines]])
    _write_mnli(directory / "glue" / "MNLI")
    _write_wic(directory / "wic")
    _write_conll(directory / "conll2003")
    return directory


class Dice:
    """Choices that follow from a task, a part and the number of an example."""

    def __init__(self, task, part, number):
        self.number, self._thrown = number, 0
        self._keys = (*task.encode(), *part.encode(), number)

    def one(self, choices):
        """One of some choices."""
        self._thrown += 1
        return choices[int(hash_u64(*self._keys, self._thrown) % len(choices))]

    def two(self, choices):
        """Two different ones."""
        first = self.one(choices)
        return first, self.one([choice for choice in choices if choice != first])


def _count(part):
    return TRAIN if part == "train" else DEV


def _write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def _says(dice):
    return f"{dice.one(NAMES)} {dice.one(VERBS)} {dice.one(CITIES)} ."


def _pair(dice, same):
    """A sentence, and the same with another word order or another city."""
    name, verb, (city, other) = dice.one(NAMES), dice.one(VERBS), dice.two(CITIES)
    return f"{name} {verb} {city} .", f"It is {city if same else other} that {name} {verb} ."


def _cola(dice):
    words, fine = _says(dice).split(), dice.number % 2
    return "mini", str(fine), "" if fine else "*", " ".join(words if fine else words[::-1])


def _sst2(dice):
    fine = dice.number % 2
    return f"a {dice.one(GOOD if fine else BAD)} {dice.one(NOUNS)} . ", str(fine)


def _mrpc(dice):
    same = dice.number % 2
    return str(same), str(dice.number), str(dice.number + 1), *_pair(dice, same)


def _qqp(dice):
    same = dice.number % 2
    first, second = (text.replace(" .", " ?") for text in _pair(dice, same))
    return str(dice.number), "1", "2", f"Why: {first}", f"Why: {second}", str(same)


def _qnli(dice):
    same, name, verb = dice.number % 2, dice.one(NAMES), dice.one(VERBS)
    answer = f"{name if same else 'Nobody'} {verb} {dice.one(CITIES)} ."
    return str(dice.number), f"What is it that {name} {verb} ?", answer, _entails(same)


def _rte(dice):
    same = dice.number % 2
    return str(dice.number), *_pair(dice, same), _entails(same)


def _entails(same):
    return "entailment" if same else "not_entailment"


def _stsb(dice):
    score = dice.number % 3
    first, same = _pair(dice, True)
    second = (f"A {dice.one(BAD)} {dice.one(NOUNS)} .", _pair(dice, False)[1], same)[score]
    return str(dice.number), "g", "f", "y", "0", "s", "s", first, second, f"{2.5 * score:.3f}"


_TABLES = {
    "CoLA": ([], _cola),
    "SST-2": ([("sentence", "label")], _sst2),
    "MRPC": ([("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")], _mrpc),
    "QQP": ([("id", "qid1", "qid2", "question1", "question2", "is_duplicate")], _qqp),
    "QNLI": ([("index", "question", "sentence", "label")], _qnli),
    "RTE": ([("index", "sentence1", "sentence2", "label")], _rte),
    "STS-B": (
        [("index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2", "score")],
        _stsb,
    ),
}


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
            tagged = [(dice.one(NAMES), "B-PER"), (dice.one(NAMES), "I-PER"), ("of", "O"), (dice.one(FIRMS), "B-ORG")]
            tagged += [(dice.one(VERBS), "O"), (dice.one(CITIES), "B-LOC"), (".", "O")]
            lines += [*(f"{word} X X {tag}" for word, tag in tagged), ""]
        _write(directory / f"{part}.txt", lines)
