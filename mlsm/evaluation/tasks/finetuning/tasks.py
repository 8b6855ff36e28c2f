"""A table of the ten tasks: labels, files, columns, and datasets on the Hub.

A task is evaluated on its development set, as the labels of most test sets are not public. If test labels are public
and in local files, --split test evaluates on the test set. Local files are tried in the listed order: official names
first, then widely used subsets of these files. Metrics are in records.METRICS. Not handled here: reading (formats.py),
finding (data.py), scoring (metrics.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mlsm.evaluation.tasks.finetuning.config import TASKS as NAMES
from mlsm.evaluation.tasks.finetuning.formats import Example, Tsv, conll, json_pairs, wic

# Commits of datasets on the Hub. On the Hub, CoNLL-2003 is a script, which is not run. The Hub's conversion to Parquet
# has no fixed commit, so the record has the commit that was read.
GLUE = ("nyu-mll/glue", "bcdcba79d07bc864c1c254ccfcedcce55bcc9a8c")
SUPERGLUE = ("aps/super_glue", "3de24cf8022e94f4ee4b9d55a6f539891524d646")
CONLL = ("eriktks/conll2003", "refs/convert/parquet")


class TaskFile(NamedTuple):
    """One form in which a split of a task may be on disk."""

    names: tuple[str, ...]
    """relative to the task's directory"""
    read: Callable[[list[Path], tuple[str, ...]], list[Example]]
    """called with the paths of its files and the task's labels"""
    drops_seen: bool = False
    """whether examples that are also in the training part are omitted"""


class Hub(NamedTuple):
    """A task on the Hub."""

    dataset: tuple[str, str]
    """name and revision"""
    config: str | None
    first: str
    second: str | None
    label: str = "label"
    """columns; a label is its number, in the order of the task's labels"""


class Task(NamedTuple):
    """A task: its training data and how it is evaluated."""

    name: str
    directories: tuple[str, ...]
    """names of its local directory"""
    labels: tuple[str, ...]
    """as spelled in its files; empty for a score from 0 to 5"""
    hub: Hub
    train: tuple[TaskFile, ...]
    evaluation: dict[str, tuple[TaskFile, ...]]
    """development sets: name on the Hub -> files"""
    labels_words: bool = False
    """whether every word has a label"""
    test: dict[str, tuple[TaskFile, ...]] = {}
    """test sets with public labels, in the same form; read only from files"""

    @property
    def outputs(self) -> int:
        """Width of the head."""
        return max(1, len(self.labels))

    @property
    def has_pairs(self) -> bool:
        """Whether an example has two sentences."""
        return self.hub.second is not None


BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
ENTITIES = ("O", *(f"{place}-{kind}" for kind in ("PER", "ORG", "LOC", "MISC") for place in "BI"))
SENTENCES = ("sentence1", "sentence2")


def _tsv(name, *columns, **options):
    return TaskFile((name,), Tsv(*columns, **options))


def _glue(name, directory, labels, hub_columns, columns, **options):
    """A GLUE task whose train.tsv and dev.tsv have the same format."""
    hub = Hub(GLUE, name, *hub_columns)
    train, dev = (_tsv(file, *columns, **options) for file in ("train.tsv", "dev.tsv"))
    return Task(name, (directory,), labels, hub, (train,), {"validation": (dev,)})


def _mnli(part):
    """The files of a development set of MNLI: the official file, or TextFooler's 1,000 examples."""
    fooler = _tsv(f"textfooler_dev1000_{part}.tsv", 1, 2, 0, width=3)
    return _tsv(f"dev_{part}.tsv", *SENTENCES, "gold_label"), fooler


_QNLI = _tsv("train.tsv", "question", "sentence", "label")
_QQP = _tsv("train.tsv", "question1", "question2", "is_duplicate", skips_short=True)
_SUBSET, _SUBSET_DEV = TaskFile(("subset_train.json",), json_pairs), TaskFile(("subset_dev.json",), json_pairs)
_BIMPM = TaskFile(("bimpm_dev.tsv",), Tsv(1, 2, 0, width=4), drops_seen=True)

_TASKS = (
    _glue("cola", "CoLA", BINARY, ("sentence", None), (3, None, 1), width=4),
    Task(
        "conll2003", ("conll2003", "CoNLL-2003"), ENTITIES, Hub(CONLL, None, "tokens", None, "ner_tags"),
        (TaskFile(("train.txt",), conll), TaskFile(("eng.train",), conll)),
        {"validation": tuple(TaskFile((name,), conll) for name in ("dev.txt", "valid.txt", "eng.testa"))},
        labels_words=True, test={"test": tuple(TaskFile((name,), conll) for name in ("test.txt", "eng.testb"))},
    ),
    Task(
        "mnli", ("MNLI",), INFERENCE, Hub(GLUE, "mnli", "premise", "hypothesis"),
        (_tsv("train.tsv", *SENTENCES, "gold_label"), _SUBSET),
        {"validation_matched": _mnli("matched"), "validation_mismatched": _mnli("mismatched")},
    ),
    _glue("mrpc", "MRPC", BINARY, SENTENCES, ("#1 String", "#2 String", "Quality")),
    Task(
        "qnli", ("QNLI",), ENTAILMENT, Hub(GLUE, "qnli", "question", "sentence"),
        (_QNLI, _SUBSET), {"validation": (_QNLI._replace(names=("dev.tsv",)), _SUBSET_DEV)},
    ),
    Task(
        "qqp", ("QQP",), BINARY, Hub(GLUE, "qqp", "question1", "question2"),
        (_QQP, _SUBSET), {"validation": (_QQP._replace(names=("dev.tsv",)), _BIMPM, _SUBSET_DEV)},
        test={"test": (_BIMPM._replace(names=("bimpm_test.tsv",)),)},
    ),
    _glue("rte", "RTE", ENTAILMENT, SENTENCES, (*SENTENCES, "label")),
    _glue("sst2", "SST-2", BINARY, ("sentence", None), ("sentence", None, "label")),
    _glue("stsb", "STS-B", (), SENTENCES, (*SENTENCES, "score")),
    Task(
        "wic", ("wic", "WiC", "WiC_dataset"), ("F", "T"), Hub(SUPERGLUE, "wic", *SENTENCES),
        (TaskFile(("train/train.data.txt", "train/train.gold.txt"), wic),),
        {"validation": (TaskFile(("dev/dev.data.txt", "dev/dev.gold.txt"), wic),)},
    ),
)  # fmt: skip
TASKS = {task.name: task for task in _TASKS}
assert tuple(TASKS) == NAMES
