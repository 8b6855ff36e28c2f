"""Find a task's examples: in a local directory in the published formats, or on the Hub.

    data = load_task(TASKS["mrpc"], Path("../shared/data"))
    data.train, data.evaluation["validation"], data.files     # SHA-256 of the files that were read

Not handled here: formats (formats.py), the table of tasks (tasks.py).
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from mlsm.common.disk import file_sha256
from mlsm.common.errors import DataError, describe
from mlsm.common.extras import name_extras
from mlsm.evaluation.tasks.finetuning.config import TENTH
from mlsm.evaluation.tasks.finetuning.formats import Example
from mlsm.evaluation.tasks.finetuning.tasks import TASKS, Task, TaskFile


class TaskData(NamedTuple):
    """The examples of a task."""

    name: str
    """the source's name in records: the task's name and `local`, or dataset, configuration and commit on the Hub"""
    files: dict[str, str]
    """files that were read: path below the task's directory -> SHA-256; empty for the Hub, where the commit identifies
    them
    """
    train: list[Example]
    evaluation: dict[str, list[Example]]
    """development set -> examples"""

    def facts(self) -> dict:
        """The `data` of a record."""
        n_eval = sum(map(len, self.evaluation.values()))
        return {"name": self.name, "files": self.files, "n_train": len(self.train), "n_eval": n_eval}


def load_task(task: Task, data_dir: Path | None = None, split: str = "validation") -> TaskData:
    """Load a task's examples: from the local directory if the task's files are there, otherwise from the Hub.

    data_dir  contains the task's directory (MRPC, wic, ...) or a directory `glue` with it
    split     "validation": the development sets; "test": labelled test sets, of local files only; TENTH: neither is
              read, since `hold_out_tenth` takes the evaluation from the training part
    Raises    DataError, which names the malformed file, line and format, or lists all paths that were tried
    """
    directory = None if data_dir is None else find_directory(task, data_dir)
    if split == "test" and (directory is None or not task.test):
        raise DataError(
            f"--split test: {task.name} has no labelled test set here. {_describe_test_sets()} Choose others with "
            "--tasks, or leave --split at validation."
        )
    parts = {"validation": task.evaluation, "test": task.test, TENTH: {}}[split]
    return _from_hub(task, data_dir, parts) if directory is None else _from_files(task, directory, parts)


def hold_out_tenth(task: Task, data: TaskData) -> TaskData:
    """Split the training part: train on nine tenths, and use the last tenth in place of every development set.

    The tenth is that of the distinct texts with the smallest SHA-256. So the order of a file does not matter, and
    examples with equal texts are never in both parts.

    Raises  DataError if nothing would be left to train on
    """
    train, tenth = split_tenth(task.name, data.train)
    return data._replace(train=train, evaluation=dict.fromkeys(task.evaluation, tenth))


def split_tenth(name: str, examples: list[Example]) -> tuple[list[Example], list[Example]]:
    """Split examples into nine tenths and one tenth, as described in `hold_out_tenth`."""
    texts = [json.dumps([e.first, e.second, e.targets]).encode() for e in examples]
    digests = [hashlib.sha256(text).digest() for text in texts]
    distinct = sorted(set(digests))
    held_out = set(distinct[: -(-len(distinct) // 10)])
    sides: tuple[list[Example], list[Example]] = [], []
    for digest, example in zip(digests, examples, strict=True):
        sides[digest in held_out].append(example)
    if not sides[0]:
        raise DataError(
            f"a tenth held out (by --split {TENTH}, --frozen, or for several --lr) leaves {name} nothing to train on: "
            f"it has {len(examples)} training examples of {len(distinct)} text. Increase --limit-train, or omit it."
        )
    return sides


def _describe_test_sets():
    """For an error message: which tasks have a labelled test set, and in which files."""
    known = [
        f"{name} ({' or '.join(file.names[0] for files in task.test.values() for file in files)})"
        for name, task in TASKS.items()
        if task.test
    ]
    return f"Those are read from files of --data-dir, of {' and '.join(known)}; other test sets have no public labels."


def find_directory(task: Task, data_dir: Path) -> Path | None:
    """The directory of a task's published files, if it exists. Raises DataError if --data-dir does not exist."""
    if not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir} is not a directory. Pass one that contains CoLA, MRPC, wic, ...")
    places = [parent / name for name in task.directories for parent in (data_dir, data_dir / "glue", data_dir / "GLUE")]
    return next((place for place in places if place.is_dir()), None)


def _from_files(task: Task, directory: Path, parts: dict[str, tuple[TaskFile, ...]]) -> TaskData:
    """Read the training part and `parts`, which has the alternative files of each development or test set."""
    files: dict[str, str] = {}

    def read(alternatives):
        chosen = choose_file(task, directory, alternatives)
        paths = [directory / name for name in chosen.names]
        files.update((path.relative_to(directory).as_posix(), file_sha256(path)) for path in paths)
        examples = chosen.read(paths, task.labels)
        if not examples:
            raise DataError(f"{paths[0]}: expected examples of {task.name}, found none. Fetch the file again.")
        return chosen, examples

    _, train = read(task.train)
    seen = {example[:2] for example in train} if not task.labels_words else set()
    evaluation = {}
    for name, alternatives in parts.items():
        chosen, examples = read(alternatives)
        evaluation[name] = [e for e in examples if not (chosen.drops_seen and e[:2] in seen)]
    return TaskData(f"{task.name}, local", files, train, evaluation)


def choose_file(task: Task, directory: Path, alternatives: tuple[TaskFile, ...]) -> TaskFile:
    """The first of the alternatives whose files all exist. Raises DataError if there is none."""
    for file in alternatives:
        if all((directory / name).is_file() for name in file.names):
            return file
    expected = " or ".join(" with ".join(file.names) for file in alternatives)
    raise DataError(
        f"{directory} is not complete: {task.name} needs {expected}. Download it, or pass another --data-dir."
    )


def _from_hub(task: Task, data_dir: Path | None, sets: Collection[str]) -> TaskData:
    (dataset, revision), config = task.hub.dataset, task.hub.config
    with name_extras(f"{_describe_search(task, data_dir)}, and the Hub"):
        from datasets import load_dataset
    try:
        parts = load_dataset(dataset, config, revision=revision)
        commit = _commit(parts, revision)
        train, *evaluation = ([_convert_row(task, row) for row in parts[name]] for name in ("train", *sets))
    except Exception as error:  # datasets, huggingface_hub and the HTTP library raise many classes
        raise DataError(
            f"{_describe_search(task, data_dir)}, and it cannot be fetched from the Hub ({dataset}, "
            f"{config or 'default'}, at {revision[:12]}: {describe(error)}). Pass --data-dir, or check the network."
        ) from error
    name = "/".join(filter(None, (dataset, config)))
    return TaskData(f"{name}@{commit}", {}, train, dict(zip(sets, evaluation, strict=True)))


def _convert_row(task: Task, row: dict) -> Example:
    hub = task.hub
    second = None if hub.second is None else row[hub.second]
    targets = tuple((row[f"start{n}"], row[f"end{n}"]) for n in (1, 2)) if "start1" in row else None
    return Example(row[hub.first], second, row[hub.label], targets)


def _commit(parts, revision):
    """The commit that was read, from the files' addresses; if they do not contain it, the revision."""
    addresses = parts["train"].info.download_checksums or {}
    commits = [address.partition("@")[2].partition("/")[0] for address in addresses]
    return next(filter(None, commits), revision)


def _describe_search(task, data_dir):
    places = " or ".join(task.directories)
    return f"no {task.name}: no --data-dir" if data_dir is None else f"no {task.name}: no {places} in {data_dir}"
