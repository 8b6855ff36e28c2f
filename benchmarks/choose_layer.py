"""The word-sense diagnostic of one layer against its bare teacher.

    python -m benchmarks.choose_layer

MiniLM (6 layers, 384 wide) cut after layer 5; the first 1,500 sentences of SemCor as training, the first 60 of
semeval2007 as test, so that both have the shares of the real data; 1,536 atoms learned here (not timed) from the
vectors of the annotated words, lambda 0.05. Two things are timed in turn. The first is only the forward passes, over
the same sentences in the same batches, prepared before. The second is the diagnostic from sentences to Φ and the scores
of all variants: tokenizing, batching, the passes, means over subtokens, the file of vectors, codes, NPMI, answers.
Reading the XML, Numba's compilation and naming LSPs are not timed. `diagnostic_vs_teacher` is the ratio of seconds
(target 1.5); `cpu_...` is the same of processor time in all threads, the one to read on a machine that others use.
Prints JSON as its last line.
"""

import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.data import conditions, data_file, minilm_directory, report, with_range
from mlsm.common.wordnet import WordNet
from mlsm.evaluation.studies.word_senses.choose_layer import WordVectors, diagnose_layer
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
from mlsm.evaluation.studies.word_senses.data import WsdData
from mlsm.evaluation.studies.word_senses.framework import SEMCOR, SENSE_INDEX, TEST_SETS, read_annotated
from mlsm.evaluation.studies.word_senses.word_vectors import Readings, batches
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.teacher import Teacher, load_tokenizer, special_ids

LAYER, K, LAM, REPEATS = 5, 1536, 0.05, 5
TRAINING_SENTENCES, TEST_SENTENCES = 1500, 60


def main():
    teacher, data, job = Teacher.load(minilm_directory(), LAYER), share_of_semcor(), stand_in_job()
    with tempfile.TemporaryDirectory() as directory:
        atoms_Kd, passes = prepare(Path(directory) / "learning", job, teacher, data)
        rows = [measure(Path(directory) / str(n), job, teacher, data, atoms_Kd, passes) for n in range(REPEATS + 1)][1:]
    result = {
        **with_range("diagnostic_vs_teacher", [row["diagnostic"] / row["teacher"] for row in rows]),
        **with_range("cpu_diagnostic_vs_teacher", [row["cpu_diagnostic"] / row["cpu_teacher"] for row in rows]),
        **{f"{name}_seconds": round(statistics.median(row[name] for row in rows), 3) for name in rows[0]},
        "sentences": len(data.sentences),
        "training_words": data.training,
        "k": K,
        "layer": LAYER,
        "threads": torch.get_num_threads(),
        "repeats": len(rows),
        **conditions(),
    }
    report(result)


def share_of_semcor():
    root = data_file("wsd")
    wordnet = WordNet.load(root / SENSE_INDEX)
    training = read_annotated(root, SEMCOR, wordnet)[:TRAINING_SENTENCES]
    test = read_annotated(root, TEST_SETS["semeval2007"], wordnet)[:TEST_SENTENCES]
    return WsdData.of(wordnet, training, test, *[[]] * (len(TEST_SETS) - 1))


def stand_in_job():
    """What is read of a job here."""
    tokenizer = load_tokenizer(minilm_directory())
    return SimpleNamespace(tokenizer=tokenizer, special_ids=special_ids(tokenizer), config=ChooseLayerConfig(lam=LAM))


def prepare(place, job, teacher, data):
    """Atoms, and the batches of the forward passes."""
    vectors = word_vectors(place, job, teacher, data)
    hidden_Nd = np.concatenate(list(vectors.layer(LAYER)))
    atoms_Kd = learn_dictionary(hidden_Nd, DictionarySettings(K, LAM, seed=0), LearningSchedule(epochs=2)).atoms_Kd
    pad, tokens = job.special_ids["pad"], job.config.tokens_at_once()
    return atoms_Kd, [batch for _, readings in vectors.chunks for batch in batches(readings, tokens, pad)]


def word_vectors(place, job, teacher, data):
    place.mkdir()
    text = Readings(data.sentences, job.tokenizer, job.special_ids, teacher.max_positions)
    sizes = job.config.tokens_at_once(), job.special_ids["pad"]
    vectors = WordVectors(place, text, teacher, {LAYER: (LAYER, None)}, *sizes, report=lambda tokens, of: None)
    vectors.make()
    return vectors


def measure(place, job, teacher, data, atoms_Kd, passes):
    """Seconds of the bare teacher and of the diagnostic with its parts, and those of the processor (`cpu_`)."""
    row = {}
    clock, processor = time.perf_counter(), time.process_time()
    for batch in passes:
        teacher(batch.ids_WL, batch.real_WL)
    row["teacher"], row["cpu_teacher"] = time.perf_counter() - clock, time.process_time() - processor
    clock, processor = time.perf_counter(), time.process_time()
    vectors = word_vectors(place, job, teacher, data)
    row["vectors"] = time.perf_counter() - clock
    found = diagnose_layer(vectors, LAYER, atoms_Kd, data, job.config.lam, job.config.tolerance)
    row["diagnostic"], row["cpu_diagnostic"] = time.perf_counter() - clock, time.process_time() - processor
    return row | {name.removesuffix("_seconds"): found.costs[name] for name in ("coding_seconds", "scoring_seconds")}


if __name__ == "__main__":
    main()
