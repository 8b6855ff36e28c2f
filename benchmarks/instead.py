r"""Alternatives to a student: its teacher cut after two layers, and a static embedding table made from the teacher.

    pip install --no-deps model2vec==0.10.0 skeletoken==0.6.1
    python -m benchmarks.instead score TEACHER --work DIR --output docs/studies/second/instead
    taskset -c 0 python -m benchmarks.instead time TEACHER --work DIR --models EXPORT ... | tail -1 > RECORD.json

`score` makes both, in DIR/models. It writes their records of `finetune --frozen` into OUTPUT/evaluations and fine-tunes
all but the table with the settings of the recipe study-2; what has a record there is not scored again. `time` needs an
otherwise idle machine. It measures how long the table takes to make. For all models and the teacher it measures, in
turns, sentences per second on one core from text to vector.

teacher-2-layers  the embeddings and first two layers of the teacher, loadable with any tool
static-table      Model2Vec's way (MinishLab, the real package): the teacher reads every token of the vocabulary on its
                  own; the mean of its states is reduced to 256 dimensions by PCA and weighted by the token's rarity
                  (SIF). Of nine settings (256 dimensions, 384, no PCA; SIF 1e-3, 1e-4, none) this one, the package's
                  default, is the best on STS-B's training examples. Computed in float32.

The static table is measured by the code that measures students (`StaticTable`). A text is its mean as the package
computes it. A word is the mean of its tokens, concatenated with those of both neighbours, since a table has no context
and a student has. For word senses, every occurrence of a word has the same vector.

A student that begins with the teacher's own layers is made by our commands, and given as one of --models:

    mlsm train-student --store HIDDEN --objective regress --regress-loss mse --positions all --max-steps 2000 \
        --batch-windows 16 --continue-from DIR/models/teacher-2-layers --run-dir DIR/models/from-teacher

Parameters are those of what encodes text (AutoModel without pooler; the table); megabytes are these in float32. Prints
JSON as its last line.

Shapes: T words, V pieces, d width.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.data import conditions, data_directory, require, spread
from mlsm.common.disk import file_sha256
from mlsm.common.durable import publish_directory
from mlsm.common.model_checks import without_pooler
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.lineage import lineage
from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.tasks.finetuning.config import FROZEN_EXAMPLES, FROZEN_LENGTH, FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.suite import finetune
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from mlsm.evaluation.tasks.finetuning.trials import Candidate
from mlsm.evaluation.tasks.frozen.features import FeatureExtractor, WordFeatures
from mlsm.evaluation.tasks.frozen.measures import read_measure
from mlsm.evaluation.tasks.frozen.suite import facts_of, record_scores
from pipeline.teacher import load_tokenizer, read_config
from shards.copies import TOKENIZER_FILES, tokenizer_fingerprint, write_files

CUT, TABLE = "teacher-2-layers", "static-table"
LAYERS, DIMENSIONS, SIF = 2, 256, 1e-4
MEASURES = ("conll2003", "stsb", "wsd")
ROUNDS, BATCH = 7, 32


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("score", "time"))
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--work", type=Path, required=True, help="directory for the models")
    parser.add_argument("--models", type=Path, nargs="*", default=(), help="exports of students")
    parser.add_argument("--output", type=Path, help="of score: directory for the records")
    given = parser.parse_args()
    torch.set_num_threads(1)
    cut, table = given.work / "models" / CUT, given.work / "models" / TABLE
    if not cut.is_dir():
        publish_directory(cut, lambda place: cut_teacher(given.teacher, place), replace=False)
    if not table.is_dir():
        publish_directory(table, lambda place: distil(given.teacher).save_pretrained(str(place)), replace=False)
    if given.what == "score":
        if given.output is None:
            parser.error("score writes records: --output DIRECTORY")
        common = {"frozen": True, "tasks": MEASURES, "data_dir": data_directory(), "output": given.output}
        encoders = {"models": (str(cut), *map(str, given.models)), "device": "cpu"}
        finetune(FinetuneConfig(**encoders, **common))
        score_table(
            StaticTable(open_table(table), given.teacher), table, FinetuneConfig(models=(str(table),), **common)
        )
        study = read_study("study-2")
        alike = {"max_length": study.window, "segments": "never", "data_dir": data_directory(), "output": given.output}
        finetune(FinetuneConfig(**encoders, **alike, **study.common["finetune"]))
        places = [cut, table, *given.models]
        found = {records.shown_name(place): {"parameters": count(place, table)} for place in places}
    else:
        found = time_all(given.teacher, cut, table, given.models)
    for facts in found.values():
        facts["megabytes"] = 4 * facts["parameters"] / 1e6
    print(json.dumps({"benchmark": "instead", "what": given.what, "models": found, **conditions("model2vec")}))


def cut_teacher(teacher, place):
    """Write the teacher's first layers with its tokenizer, as transformers loads them."""
    pooler = without_pooler(read_config(teacher, teacher))
    AutoModel.from_pretrained(teacher, num_hidden_layers=LAYERS, **pooler).save_pretrained(place)
    files = {name: (teacher / name).read_bytes() for name in TOKENIZER_FILES if (teacher / name).is_file()}
    write_files(place, files)


def distil(teacher):
    """The static table, by Model2Vec."""
    distill = require("model2vec.distill", "--no-deps model2vec==0.10.0 skeletoken==0.6.1")
    model, tokenizer = AutoModel.from_pretrained(teacher), AutoTokenizer.from_pretrained(teacher)
    settings = {"pca_dims": DIMENSIONS, "sif_coefficient": SIF, "quantize_to": "float32", "device": "cpu"}
    return distill.distill_from_model(model, tokenizer, **settings)


def open_table(place):
    """The table of a directory, as the package loads it."""
    package = require("model2vec", "--no-deps model2vec==0.10.0 skeletoken==0.6.1")
    return package.StaticModel.from_pretrained(place, force_download=False)


def count(place, table):
    """Parameters of what encodes text."""
    if place == table:
        return open_table(table).embedding.size
    model = AutoModel.from_pretrained(place, **without_pooler(read_config(place, place)))
    return sum(parameter.numel() for parameter in model.parameters())


# -- scores ----------------------------------------------------------------------------------------------


class StaticTable(FeatureExtractor):
    """A static table as the frozen measures read an encoder: of one layer, which has seen no context.

    static     as `open_table`: its pieces are entries of the tokenizer's vocabulary
    tokenizer  directory of the teacher's, which cuts text as the table's own does
    """

    def __init__(self, static, tokenizer):
        self.static, self.tokenizer = static, load_tokenizer(tokenizer)
        self.layers, self.max_length = (1,), FROZEN_LENGTH
        self.teacher = Rows(static, self.tokenizer)

    def words(self, sentences, report):
        """Every word with its neighbours, zeros beyond the ends of a sentence: all are read."""
        different = sorted({word for words in sentences for word in words})
        vectors_Nd = self.static.encode(different, normalize=False, use_multiprocessing=False).astype(np.float32)
        number = {word: row for row, word in enumerate(different)}
        ends_2d = np.zeros((1, vectors_Nd.shape[1]), np.float32)
        found = []
        for words in sentences:
            rows_Td = np.concatenate([ends_2d, vectors_Nd[[number[word] for word in words]], ends_2d])
            found.append(np.hstack([rows_Td[1:-1], rows_Td[:-2], rows_Td[2:]]))
        report(len(sentences))
        return WordFeatures(np.concatenate(found), [np.ones(len(words), bool) for words in sentences])

    def means(self, texts, report):
        """The package's own vectors of texts."""
        vectors_Nd = self.static.encode(texts, use_multiprocessing=False).astype(np.float32)
        report(len(texts))
        return vectors_Nd


class Rows:
    """The table as a teacher of one layer: the state of a token is its row, zeros for one that the table lacks."""

    name, layer, device = TABLE, 1, torch.device("cpu")

    def __init__(self, static, tokenizer):
        self.hidden_size = static.embedding.shape[1]
        self.rows_Vd = torch.zeros(len(tokenizer), self.hidden_size)
        ids = tokenizer.convert_tokens_to_ids(list(static.tokens))
        self.rows_Vd[ids] = torch.from_numpy(np.asarray(static.embedding, np.float32))
        self.rows_Vd[tokenizer.unk_token_id] = 0  # the package leaves unknown pieces out

    def __call__(self, ids_WL, attention_WL=None, tokens_N=None, layers=None):
        """As of pipeline.teacher.Teacher."""
        rows = self.rows_Vd[ids_WL]
        rows = rows if tokens_N is None else rows.flatten(0, 1)[tokens_N]
        return rows if layers is None else [rows]


def score_table(encoder, place, settings):
    """Write the records of the table that are missing, as `finetune --frozen` does those of encoders."""
    content = {
        "weights": records.weights_sha256(place),
        "config": file_sha256(place / "config.json"),  # of a package's own, which transformers cannot read
        "tokenizer": tokenizer_fingerprint(load_tokenizer(place)),
    }
    candidate = Candidate(place, {"model": TABLE, "path": str(place)} | content | lineage(place), None)
    for task in settings.chosen_tasks():
        if records.path_of(
            settings.output, candidate.facts | {"suite": "frozen", "task": task, "seed": None}
        ).is_file():
            continue
        measure = read_measure(task, settings.data_dir, FROZEN_EXAMPLES)
        facts = facts_of(candidate, measure, settings, FROZEN_LENGTH)
        if "words" in facts["settings"]:
            facts["settings"] |= {"words": "mean of the pieces, of a word and both neighbours"}
        record_scores(encoder, candidate, task, measure, facts, settings, silent)


# -- times -----------------------------------------------------------------------------------------------


def time_all(teacher, cut, table, students):
    """Sentences per second of every model, and seconds that making the table took."""
    texts = [example.first for example in load_task(TASKS["stsb"], data_directory()).evaluation["validation"]]
    began = time.perf_counter()
    distil(teacher)
    making = time.perf_counter() - began
    places = [teacher, cut, table, *students]
    found = {records.shown_name(place): {"parameters": count(place, table)} for place in places}
    encoders = {records.shown_name(place): table_reader(place) if place == table else reader(place) for place in places}
    lengths = [len(ids) for ids in load_tokenizer(teacher)(texts)["input_ids"]]
    rates = {name: [] for name in encoders}
    for number in range(1 + ROUNDS):  # the first warms up
        for name, encode in encoders.items():
            began = time.perf_counter()
            encode(texts)
            if number > 0:
                rates[name].append(len(texts) / (time.perf_counter() - began))
    for name, several in rates.items():
        found[name]["sentences_per_second"] = spread(several)
        found[name] |= {"sentences": len(texts), "mean_tokens": statistics.fmean(lengths), "batch": BATCH, "threads": 1}
    found[CUT]["making_seconds"], found[TABLE]["making_seconds"] = 0.0, making
    return found


def table_reader(place):
    """A function from texts to vectors."""
    static = open_table(place)
    return lambda texts: static.encode(texts, batch_size=BATCH, use_multiprocessing=False)


def reader(place):
    """The same of an encoder: batches of about equal length, the mean over tokens, as sentence-transformers does."""
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModel.from_pretrained(place, **without_pooler(read_config(place, place))).eval()

    @torch.inference_mode()
    def encode(texts):
        order = sorted(range(len(texts)), key=lambda row: -len(texts[row]))
        vectors = []
        for start in range(0, len(order), BATCH):
            batch = [texts[row] for row in order[start : start + BATCH]]
            inputs = tokenizer(batch, padding=True, truncation=True, max_length=FROZEN_LENGTH, return_tensors="pt")
            real_WL1 = inputs["attention_mask"][..., None].float()
            states_WLd = model(**inputs).last_hidden_state
            vectors.append((states_WLd * real_WL1).sum(1) / real_WL1.sum(1))
        return torch.cat(vectors)[np.argsort(order)]

    return encode


if __name__ == "__main__":
    main()
