"""The files of each evaluation set, where they are published, and the published number of examples.

A part is a directory of the layout that an evaluation reads; SETS lists the parts of each set. Files have their
published names and are found by the end of their paths. Not handled here: finding and writing (prepare.py).
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from mlsm.common.errors import DataError
from mlsm.common.wordnet import WordNet
from mlsm.evaluation.studies.word_senses.framework import SEMCOR, SENSE_INDEX, TEST_SETS, data_files, read_annotated
from mlsm.evaluation.tasks.blimp import data as blimp
from mlsm.evaluation.tasks.finetuning.data import find_directory, load_task
from mlsm.evaluation.tasks.finetuning.tasks import TASKS

Contents = dict[str, bytes]  # file name, relative to the directory of a part -> content


class Way(NamedTuple):
    """One form in which a part is published."""

    files: Mapping[str, tuple[str, ...]]
    """name in the layout -> names under which the file is published; the first that exists is used"""
    convert: Callable[[Contents], Contents] | None = None
    """converts the published files to those of the layout, in memory; None: no conversion"""
    optional: tuple[str, ...] = ()
    """names in the layout that may be absent"""


class LayoutDirectory(NamedTuple):
    """A directory of the layout."""

    directory: str
    ways: tuple[Way, ...]
    """in order of preference"""
    count_examples: Callable[[Path], dict[str, int]]
    """reads the examples like the evaluation, and raises the same errors"""
    expected: dict[str, int]
    """published numbers of examples"""
    published: str
    """where it is published, and under which terms if they are strict"""


def _count_task(name):
    def count(root: Path) -> dict[str, int]:
        task = TASKS[name]
        data, directory = load_task(task, root), find_directory(task, root)
        counts = {"train": len(data.train)} | {part: len(examples) for part, examples in data.evaluation.items()}
        tests = [file for files in task.test.values() for alternative in files for file in alternative.names]
        if directory is not None and any((directory / file).exists() for file in tests):
            counts |= {part: len(found) for part, found in load_task(task, root, "test").evaluation.items()}
        return counts

    return count


def _glue(name, archive, *counts, files=("train.tsv", "dev.tsv")):
    directory = TASKS[name].directories[0]
    way = Way({file: (f"{directory}/{file}",) for file in files})
    expected = dict(zip(("train", *TASKS[name].evaluation), counts, strict=True))
    where = f"https://dl.fbaipublicfiles.com/glue/data/{archive}"
    return LayoutDirectory(f"glue/{directory}", (way,), _count_task(name), expected, where)


def _decode(name, raw):
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{name}, line {line}: not UTF-8 ({error.reason}). Fetch the file again.") from None


def split_paraphrases(published: Contents) -> Contents:
    """MRPC as GLUE splits it: the training file of MSR's corpus, without the pairs whose ids are in the development
    set. Raises DataError if a line is malformed, or if a pair of the development set is missing.
    """
    # split only at \n: texts may contain other separators, at which splitlines() would also split
    texts = {name: _decode(name, raw).replace("\r", "").strip("\n").split("\n") for name, raw in published.items()}
    header, *lines = texts["msr_paraphrase_train.txt"]
    ids = {tuple(line.split("\t")) for line in texts["dev_ids.tsv"]}
    parts: dict[str, list[str]] = {"train.tsv": [header], "dev.tsv": [header]}
    for number, line in enumerate(lines, 2):
        fields = line.split("\t")
        if len(fields) != 5:
            raise DataError(
                f"msr_paraphrase_train.txt, line {number}: expected 5 tab-separated columns, found {len(fields)}. "
                "Fetch the file again."
            )
        is_dev = tuple(fields[1:3]) in ids
        ids.discard(tuple(fields[1:3]))
        parts["dev.tsv" if is_dev else "train.tsv"].append(line)
    if ids:
        raise DataError(
            f"dev_ids.tsv: the pair {' '.join(min(ids))} is not in msr_paraphrase_train.txt. Expected two ids per "
            "line, each pair of them from that file."
        )
    return {name: ("\n".join(rows) + "\n").encode() for name, rows in parts.items()}


def _count_senses(root: Path) -> dict[str, int]:
    data_files(root / "wsd")
    wordnet = WordNet.load(root / "wsd" / SENSE_INDEX)

    def instances(folder):
        return sum(len(sentence.instances) for sentence in read_annotated(root / "wsd", folder, wordnet))

    return {"SemCor": instances(SEMCOR), "test sets": sum(map(instances, TEST_SETS.values()))}


def _count_pairs(root: Path) -> dict[str, int]:
    paradigms = blimp.read(root / "blimp")
    return {"paradigms": len(paradigms), "pairs": sum(len(paradigm.pairs) for paradigm in paradigms)}


_PARAPHRASES = {
    "msr_paraphrase_train.txt": ("msr_paraphrase_train.txt",),
    "dev_ids.tsv": ("mrpc_dev_ids.tsv", "MRPC/dev_ids.tsv", "dev_ids.tsv"),
}
_MRPC = _glue("mrpc", "", 3668, 408)
_SENSES = {
    f"{folder}{end}": (f"{folder.parent.name}/{folder.name}{end}",)
    for folder in (SEMCOR, *TEST_SETS.values())
    for end in (".data.xml", ".gold.key.txt")
}
_CONLL = {"train.txt": "train", "dev.txt": "testa", "test.txt": "testb"}

SETS = {
    "blimp": (
        LayoutDirectory(
            "blimp",
            (Way({f"{name}.jsonl": (f"data/{name}.jsonl", f"{name}.jsonl") for name in blimp.PARADIGMS}),),
            _count_pairs, {"paradigms": 67, "pairs": 67_000},
            "https://github.com/alexwarstadt/blimp, its directory data",
        ),
    ),
    "wsd": (
        LayoutDirectory(
            "wsd", (Way(_SENSES | {str(SENSE_INDEX): ("index.sense",)}),), _count_senses,
            {"SemCor": 226_036, "test sets": 7_253},
            "http://lcl.uniroma1.it/wsdeval (WSD_Evaluation_Framework.zip) and, for index.sense, "
            "https://wordnet.princeton.edu (WordNet-3.0.tar.gz) or Debian's package wordnet-sense-index",
        ),
    ),
    "glue": (
        _glue("cola", "CoLA.zip", 8551, 1043),
        _glue(
            "mnli", "MNLI.zip", 392_702, 9815, 9832, files=("train.tsv", "dev_matched.tsv", "dev_mismatched.tsv")
        ),
        _MRPC._replace(
            ways=(*_MRPC.ways, Way(_PARAPHRASES, split_paraphrases)),
            published="https://dl.fbaipublicfiles.com/senteval/senteval_data/msr_paraphrase_train.txt and "
            "https://dl.fbaipublicfiles.com/glue/data/mrpc_dev_ids.tsv",
        ),
        _glue("qnli", "QNLIv2.zip", 104_743, 5463),
        _glue("qqp", "QQP-clean.zip", 363_846, 40_430),
        _glue("rte", "RTE.zip", 2490, 277),
        _glue("sst2", "SST-2.zip", 67_349, 872),
        _glue("stsb", "STS-B.zip", 5749, 1500),
    ),
    "wic": (
        LayoutDirectory(
            "wic",
            (Way({f"{part}/{part}.{kind}.txt": (f"{part}/{part}.{kind}.txt", f"{part}.{kind}.txt")
                  for part in ("train", "dev") for kind in ("data", "gold")}),),
            _count_task("wic"), {"train": 5428, "validation": 638}, "https://pilehvar.github.io/wic (WiC_dataset.zip)",
        ),
    ),
    "conll": (
        LayoutDirectory(
            "conll2003",
            (
                Way({name: (f"eng.{part}",) for name, part in _CONLL.items()}, optional=("test.txt",)),
                Way({name: (name, *(["valid.txt"] if name == "dev.txt" else [])) for name in _CONLL},
                    optional=("test.txt",)),
            ),
            _count_task("conll2003"), {"train": 14_041, "validation": 3250, "test": 3453},
            "https://www.clips.uantwerpen.be/conll2003/ner, to be joined with Reuters' corpus RCV1, which NIST gives "
            "out for research (https://trec.nist.gov/data/reuters/reuters.html)",
        ),
    ),
}  # fmt: skip
