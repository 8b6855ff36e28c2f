"""Sentences per second of evaluate-blimp over minicons, on the same sentences with the same threads.

    pip install --no-deps minicons==0.3.39 wonderwords
    python -m benchmarks.blimp

A random BERT of 6 x 384 with bert-base-uncased's vocabulary of 30,522, float32, on 50 pairs of each of seven BLiMP
paradigms; in every round both score one paradigm, in turns. minicons scores with its own `sequence_score` and the
fastest batch size of 1, 2, 8 and 32. Version 0.3.39 calls batch_encode_plus, which transformers 5 has removed, so the
benchmark adds it to the tokenizer. `vs_minicons` is the median over the rounds, with minimum and maximum.
`cpu_vs_minicons` is the same for processor time in all threads, which other processes hardly change. `memory` is the
peak memory added by scoring, in MiB. `difference` is the largest difference of any token's ln p.

Needs $MLSM_DATA/data or ../shared/data. Without minicons, only our own speed is measured. GPUs are not measured.
"""

import statistics
import time
from importlib.util import find_spec

import numpy as np
import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks.data import conditions, data_directory, forget_peak, memory_mb, report, with_range
from mlsm.evaluation.tasks.blimp.data import read, subset
from mlsm.evaluation.tasks.scoring.scorer import Scorer, StockMaskedLm
from pipeline.teacher import load_tokenizer

PAIRS, ROUNDS, BATCH_SIZES, TRIED = 50, 7, (1, 2, 8, 32), 32  # the last: sentences to find the best batch size with


def main():
    data = data_directory()
    tokenizer = load_tokenizer(data / "bert_base_uncased_tokenizer")
    paradigms = read(data / "blimp")
    chosen = paradigms[:: len(paradigms) // ROUNDS][:ROUNDS]
    rounds = [[s for pair in subset(paradigm, PAIRS).pairs for s in pair] for paradigm in chosen]
    ours = Scorer(StockMaskedLm(random_bert(len(tokenizer))), tokenizer).score
    ours(rounds[0][:TRIED])
    before = memory_mb("VmRSS")
    forget_peak()
    timed(ours, rounds[0])
    result = {"benchmark": "blimp", "memory": memory_mb("VmHWM") - before}
    if find_spec("minicons") is None:
        print("minicons is not installed, so nothing is compared: pip install --no-deps minicons==0.3.39 wonderwords")
        rows = [{"ours": timed(ours, sentences)[1:]} for sentences in rounds]
        packages = ()
    else:
        theirs, batch_size = minicons(random_bert(len(tokenizer)), tokenizer, rounds[0][:TRIED])
        rows = [compare(ours, theirs, sentences) for sentences in rounds]
        packages = ("minicons",)
        result |= {"minicons_batch_size": batch_size, "difference": max(row["difference"] for row in rows)}
        result |= over_minicons(rows)
        result["minicons_sentences_per_second"] = rate(rows, "minicons")
    result |= {"sentences_per_second": rate(rows, "ours"), "rounds": ROUNDS, "sentences": 2 * PAIRS}
    result |= {"threads": torch.get_num_threads(), **conditions(*packages)}
    report(result)


def random_bert(vocabulary):
    """A BERT of 6 x 384, always the same."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536}
    return BertForMaskedLM(BertConfig(vocab_size=vocabulary, **sizes)).eval()


def minicons(model, tokenizer, sentences):
    """A function that scores sentences with minicons, and its batch size: the fastest on these sentences."""
    from minicons.scorer import MaskedLMScorer

    type(tokenizer).batch_encode_plus = lambda self, *args, **kwargs: self(*args, **kwargs)
    scorer = MaskedLMScorer(model, "cpu", tokenizer=tokenizer)

    def score(sentences, size):
        batches = (sentences[start : start + size] for start in range(0, len(sentences), size))
        return [row.numpy() for batch in batches for row in scorer.sequence_score(batch, reduction=lambda row: row)]

    score(sentences, 1)
    seconds = {size: timed(lambda given, size=size: score(given, size), sentences)[1] for size in BATCH_SIZES}
    best = min(seconds, key=seconds.get)
    return lambda sentences: score(sentences, best), best


def compare(ours, theirs, sentences):
    """Wall and processor seconds of both on the same sentences, one after the other, and how far they are apart."""
    our_scores, *our_seconds = timed(ours, sentences)
    their_scores, *their_seconds = timed(theirs, sentences)
    difference = max(float(np.abs(a - b).max()) for a, b in zip(our_scores, their_scores, strict=True))
    return {"ours": our_seconds, "minicons": their_seconds, "difference": difference}


def timed(score, sentences):
    """Scores, wall seconds, processor seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    scores = score(sentences)
    return scores, time.perf_counter() - wall, time.process_time() - cpu


def over_minicons(rows):
    """How many times our time minicons took, by the clock and by the processor."""
    found = {}
    for clock, name in enumerate(("vs_minicons", "cpu_vs_minicons")):
        found |= with_range(name, [row["minicons"][clock] / row["ours"][clock] for row in rows])
    return found


def rate(rows, name):
    return 2 * PAIRS / statistics.median(row[name][0] for row in rows)


if __name__ == "__main__":
    main()
