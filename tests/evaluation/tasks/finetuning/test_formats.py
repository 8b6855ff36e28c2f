"""Every task's files have the number of examples in their README, and errors name the line."""

import csv
import io
import json
import math
import shutil
import sys
from types import SimpleNamespace

import pytest
from data import data_path

from mlsm.common.errors import DataError, MissingPackageError
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import hold_out_tenth, load_task
from mlsm.evaluation.tasks.finetuning.formats import Tsv, conll, conll_columns, json_pairs, wic
from mlsm.evaluation.tasks.finetuning.miniature import DEV, TRAIN
from mlsm.evaluation.tasks.finetuning.tasks import ENTITIES, TASKS

# Of the data's README: examples of training and development sets; 226 of BiMPM's 10,000 are in QQP's training part.
COUNTS = {
    "cola": (8551, 1043),
    "conll2003": (14041, 3250),
    "mnli": (8999, 1000, 1000),
    "mrpc": (3668, 408),
    "qnli": (8999, 5463),
    "qqp": (8999, 9774),
    "rte": (2490, 277),
    "sst2": (67349, 872),
    "stsb": (5749, 1500),
    "wic": (5428, 638),
}


@pytest.mark.parametrize("name", TASKS)
def test_real_files_have_the_counts_of_their_readme(name):
    data = load_task(TASKS[name], data_path("glue").parent)
    assert (len(data.train), *map(len, data.evaluation.values())) == COUNTS[name]
    assert data.files and all(len(digest) == 64 for digest in data.files.values())
    assert data.facts()["n_eval"] == sum(COUNTS[name][1:])


def test_real_labels_mean_what_the_task_says():
    """Counts of labels that are published: MRPC's paraphrases, CoLA's acceptable, WiC's balance, CoNLL's entities."""
    directory = data_path("glue").parent
    labels = {name: [e.label for e in load_task(TASKS[name], directory).train] for name in ("mrpc", "cola", "wic")}
    assert (sum(labels["mrpc"]), sum(labels["cola"]), sum(labels["wic"])) == (2474, 6023, 2714)
    train = load_task(TASKS["conll2003"], directory).train
    begun = [ENTITIES[label] for example in train for label in example.label if ENTITIES[label][0] == "B"]
    counts = {kind: begun.count(f"B-{kind}") for kind in ("LOC", "MISC", "ORG", "PER")}
    assert counts == {"LOC": 7140, "MISC": 3438, "ORG": 6321, "PER": 6600}


def test_wic_targets_are_the_words_in_question():
    pairs = [
        [text[slice(*span)].lower() for text, span in zip(example[:2], example.targets, strict=True)]
        for example in load_task(TASKS["wic"], data_path("glue").parent).train
    ]
    assert all(" " not in word and word for pair in pairs for word in pair)
    alike = sum(first[:2] == second[:2] for first, second in pairs)  # but come and came
    assert alike > 0.95 * len(pairs)


@pytest.mark.parametrize("name", TASKS)
def test_miniatures_are_whole(miniatures, name):
    data = load_task(TASKS[name], miniatures)
    assert len(data.train) == TRAIN and all(len(part) == DEV for part in data.evaluation.values())


def test_a_quotation_mark_is_text(tmp_path):
    rows = [["sentence", "label"], ['" a film', "1"], ['a "good" one\x85 \u2028 here', "0"]]
    file = tmp_path / "train.tsv"
    file.write_text("\ufeff" + "".join("\t".join(row) + "\r\n" for row in rows), newline="")
    read = Tsv("sentence", None, "label")([file], ("0", "1"))
    oracle = csv.reader(io.StringIO("\n".join("\t".join(row) for row in rows)), delimiter="\t", quoting=csv.QUOTE_NONE)
    assert [[example.first, str(example.label)] for example in read] == list(oracle)[1:]


def test_short_lines_are_left_out_where_upstream_has_them(tmp_path):
    file = tmp_path / "train.tsv"
    file.write_text("q\tl\nwhy\t1\nbroken\nhow\t0\n")
    assert [e.label for e in Tsv("q", None, "l", skips_short=True)([file], ("0", "1"))] == [1, 0]
    with pytest.raises(DataError, match=r"train.tsv, line 3: expected 2 tab-separated columns, found 1"):
        Tsv("q", None, "l")([file], ("0", "1"))


IOB1 = "-DOCSTART- -X- O O\n\nA X X I-LOC\nB X X B-LOC\nC X X I-LOC\nD X X I-ORG\nE X X O\nF X X I-ORG\n\n\nG X X O"


def test_iob1_becomes_iob2(tmp_path):
    (tmp_path / "eng.train").write_text(IOB1)
    first, second = conll([tmp_path / "eng.train"], ENTITIES)
    assert [ENTITIES[label] for label in first.label] == ["B-LOC", "B-LOC", "I-LOC", "B-ORG", "O", "B-ORG"]
    assert second == (["G"], None, [0], None)


MALFORMED = [
    (Tsv(0, None, 1, width=2), ("0", "1"), "a\t1\nb\t2\n", "line 2: expected a label, one of 0, 1, found '2'"),
    (Tsv(0, None, 1, width=2), (), "a\t6\n", "line 1: expected a score from 0 to 5, found '6'"),
    (Tsv(0, None, 1, width=2), (), "a\tnan\n", "line 1: expected a score"),
    (Tsv("text", None, "label"), ("0",), "text\tlabels\n", "line 1: expected a header with the columns text, label"),
    (Tsv("text", None, "label"), ("0",), "", "line 1: expected a header"),
    (json_pairs, ("0",), '{"0": {"text_a": "x",', "line 1: expected a JSON object"),
    pytest.param(json_pairs, ("0",), "[" * 200_000, "line 1: expected a JSON object", id="deep"),
    (json_pairs, ("0",), r'{"0": {"text_a": "\ud800", "text_b": "y", "label": "0"}}', "surrogates not allowed"),
    (json_pairs, ("0",), "[]", "line 1: expected an object"),
    (json_pairs, ("0",), '{"7": {"text_a": "x", "label": "0"}}', "entry 7: expected an object"),
    (json_pairs, ("0",), '{"7": {"text_a": 7, "text_b": "y", "label": "0"}}', "entry 7: expected an object"),
    (json_pairs, (), '{"7": {"text_a": "x", "text_b": "y", "label": null}}', "entry 7: expected an object"),
    (conll, ENTITIES, "A X X O\nB X X\n", "line 2: expected 4 columns"),
    (conll, ENTITIES, "A X X B-DATE\n", "line 1: expected a label"),
]


@pytest.mark.parametrize(("read", "labels", "text", "message"), MALFORMED)
def test_what_is_malformed_is_said_with_its_line(tmp_path, read, labels, text, message):
    (tmp_path / "file").write_text(text)
    with pytest.raises(DataError) as caught:
        read([tmp_path / "file"], labels)
    assert f"{tmp_path}/file, " in str(caught.value).replace("file: ", "file, ") and message in str(caught.value)


def test_broken_bytes_are_said_with_their_line(tmp_path):
    (tmp_path / "file").write_bytes(b"a\t1\nb\xff\t0\n")
    with pytest.raises(DataError, match="line 2: expected text in UTF-8"):
        Tsv(0, None, 1, width=2)([tmp_path / "file"], ("0", "1"))


@pytest.mark.parametrize(
    ("data", "gold", "message"),
    [
        ("go\tV\t0-1\tgo on\tthey go\n", "T\nF\n", "expected 1 lines"),
        ("go\tV\t0-1\tgo on\n", "T\n", "line 1: expected 5 tab-separated"),
        ("go\tV\t0-9\tgo on\tthey go\n", "T\n", "line 1: expected two word numbers"),
        ("go\tV\t0-1\tgo on\tthey go\n", "yes\n", "line 1: expected a label, one of F, T"),
    ],
)
def test_wic_says_what_is_wrong(tmp_path, data, gold, message):
    (tmp_path / "data").write_text(data)
    (tmp_path / "gold").write_text(gold)
    with pytest.raises(DataError, match=message):
        wic([tmp_path / "data", tmp_path / "gold"], ("F", "T"))


def test_a_missing_file_is_named_with_all_its_names(miniatures, tmp_path):
    (tmp_path / "MNLI").mkdir()
    (tmp_path / "MNLI" / "train.tsv").write_bytes((miniatures / "glue/MNLI/train.tsv").read_bytes())
    with pytest.raises(DataError, match=r"mnli needs dev_matched.tsv or textfooler_dev1000_matched.tsv"):
        load_task(TASKS["mnli"], tmp_path)
    with pytest.raises(DataError, match="is not a directory"):
        load_task(TASKS["mnli"], tmp_path / "nowhere")


def test_without_files_and_network_one_line_says_where_was_looked(tmp_path):
    with pytest.raises(DataError) as caught:
        load_task(TASKS["wic"], tmp_path)
    said = str(caught.value)
    assert f"no wic or WiC or WiC_dataset in {tmp_path}" in said and "aps/super_glue" in said and "\n" not in said


def test_without_datasets_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingPackageError, match="pip install"):
        load_task(TASKS["rte"])


class Rows(list):
    """What stands in for a dataset of the Hub's."""

    info = SimpleNamespace(download_checksums={"hf://datasets/some/name@abc123/train.parquet": {}})


@pytest.mark.parametrize("name", TASKS)
def test_the_hub_gives_what_the_files_give(miniatures, monkeypatch, name):
    """Columns as the Hub's pages show them; labels there are numbers, in the order of the task's labels."""
    task, calls = TASKS[name], []
    local = load_task(task, miniatures)

    def row(example):
        columns = {task.hub.first: example.first, task.hub.second: example.second, task.hub.label: example.label}
        spans = enumerate(example.targets or (), 1)
        return columns | {f"{end}{n}": at for n, span in spans for end, at in zip(("start", "end"), span, strict=True)}

    def load_dataset(dataset, config, revision):
        calls.append((dataset, config, revision))
        parts = {"train": local.train} | local.evaluation
        return {part: Rows(map(row, examples)) for part, examples in parts.items()}

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    hub = load_task(task)
    assert calls == [(*task.hub.dataset[:1], task.hub.config, task.hub.dataset[1])]
    assert hub.train == local.train and hub.evaluation == local.evaluation
    assert hub.name.endswith("@abc123") and not hub.files


def test_subset_files_that_overlap_lose_what_was_trained_on(tmp_path):
    directory = tmp_path / "QQP"
    directory.mkdir()
    pair = {"text_a": "why", "text_b": "how", "label": "1"}
    (directory / "subset_train.json").write_text(json.dumps({"0": pair}))
    (directory / "bimpm_dev.tsv").write_text("1\twhy\thow\t5\n0\twho\twhat\t6\n")
    data = load_task(TASKS["qqp"], tmp_path)
    assert [example.first for example in data.evaluation["validation"]] == ["who"]


# -- test sets ----------------------------------------------------------------------------------------------


def test_a_labelled_test_set_takes_the_place_of_the_development_set(miniatures, tmp_path):
    shutil.copytree(miniatures / "conll2003", tmp_path / "conll2003")
    sentence = "-DOCSTART- -X- -X- O\n\nParis NNP I-NP B-LOC\nsleeps VBZ I-VP O\n"
    (tmp_path / "conll2003" / "test.txt").write_text(sentence)
    task = TASKS["conll2003"]
    data, usual = load_task(task, tmp_path, "test"), load_task(task, tmp_path)
    assert [len(part) for part in data.evaluation.values()] == [1] and set(data.files) == {"train.txt", "test.txt"}
    assert data.train == usual.train and "test.txt" not in usual.files


def test_pairs_of_the_training_part_are_no_test_of_qqp(tmp_path):
    (tmp_path / "QQP").mkdir()
    pairs = {"0": {"text_a": "a?", "text_b": "b?", "label": "1"}, "1": {"text_a": "c?", "text_b": "d?", "label": "0"}}
    (tmp_path / "QQP" / "subset_train.json").write_text(json.dumps(pairs))
    (tmp_path / "QQP" / "bimpm_test.tsv").write_text("1\ta?\tb?\t0\n0\te?\tf?\t1\n")
    (part,) = load_task(TASKS["qqp"], tmp_path, "test").evaluation.values()
    assert [(example.first, example.second) for example in part] == [("e?", "f?")]


@pytest.mark.parametrize("directory", [True, False])
def test_a_task_without_test_labels_is_refused_and_the_hub_not_asked(miniatures, monkeypatch, directory):
    monkeypatch.setattr("mlsm.evaluation.tasks.finetuning.data._from_hub", None)
    known = r"wic has no labelled test set here.*conll2003 \(test.txt or eng.testb\) and qqp"
    with pytest.raises(DataError, match=known):
        load_task(TASKS["wic"], miniatures if directory else None, "test")
    with pytest.raises(DataError, match=r"conll2003 needs test.txt or eng.testb"):
        load_task(TASKS["conll2003"], miniatures, "test")


def test_records_of_test_sets_lie_apart():
    settings = FinetuneConfig(models=("m",), split="test")
    assert settings.apply_smoke().output == settings.output / "test"
    assert FinetuneConfig(models=("m",)).apply_smoke().output == settings.output
    tenth = FinetuneConfig(models=("m",), split="train-tenth").apply_smoke()
    assert tenth.output == settings.output / "train-tenth"
    with pytest.raises(ValueError, match="--smoke has only miniature development sets, found --split test"):
        FinetuneConfig(smoke=True, split="test").apply_smoke()


# -- a held-out tenth of train ------------------------------------------------------------------------------


def test_a_tenth_of_the_training_texts_is_held_out_whatever_their_order(miniatures, tmp_path):
    shutil.copytree(miniatures / "glue" / "MNLI", tmp_path / "MNLI")
    for file in (tmp_path / "MNLI").glob("dev_*"):
        file.unlink()
    task = TASKS["mnli"]
    data = load_task(task, tmp_path, "train-tenth")
    assert set(data.files) == {"train.tsv"} and not data.evaluation
    split = hold_out_tenth(task, data)
    matched, mismatched = split.evaluation.values()
    assert matched == mismatched and sorted(split.train + matched) == sorted(data.train)
    texts = [{example[:2] for example in side} for side in (split.train, matched)]
    assert not texts[0] & texts[1] and len(texts[1]) == math.ceil(len(texts[0] | texts[1]) / 10)
    again = hold_out_tenth(task, data._replace(train=data.train[::-1]))
    assert again.train == split.train[::-1] and again.evaluation["validation_matched"] == matched[::-1]


def test_examples_of_one_text_stay_on_one_side(miniatures):
    task = TASKS["rte"]
    data = load_task(task, miniatures, "train-tenth")
    twice = hold_out_tenth(task, data._replace(train=data.train * 2))
    once = hold_out_tenth(task, data)
    assert twice.train == once.train * 2 and twice.evaluation["validation"] == once.evaluation["validation"] * 2
    with pytest.raises(DataError, match="leaves rte nothing to train on.*Increase --limit-train"):
        hold_out_tenth(task, data._replace(train=data.train[:1]))


def test_a_word_may_have_a_no_break_space(tmp_path):
    file = tmp_path / "eng.train"
    file.write_text("10\u00a0000 CD I-NP O\n東京\u3000都\tNNP I-NP I-LOC\r\n\n", encoding="utf-8", newline="")
    ((columns, numbers),) = conll_columns(file)
    assert columns == [["10\u00a0000", "東京\u3000都"], ["CD", "NNP"], ["B-NP", "I-NP"], ["O", "B-LOC"]]
    assert numbers == [1, 2]
