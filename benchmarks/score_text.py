"""Sentences per second of score-text over minicons' batched scoring, on the same sentences with the same model.

    pip install --target minicons --no-deps minicons==0.3.39 wonderwords
    python -m benchmarks.score_text --minicons minicons [--sentences 100] [--rounds 5]

The sentences are those of STS-B's development set, captions and news of 4 to 50 words, in another part for each round;
the model is a random BERT of 6 x 384 with bert-base-uncased's vocabulary of 30,522, float32. Both score every round in
turns, minicons with the batch size of 1, 2, 8 and 32 that is fastest here, by its own `sequence_score`. `vs_minicons`
is the median of the rounds with the least and the most; `difference` the largest of any token's ln p. Beside BLiMP's
(benchmarks/blimp.py) these sentences share no masked rows, so the ratio is that of the batching and of the products
alone. score-text's files and records are left out on our side, reading sentences on both.

Needs $MLSM_DATA/data or ../shared/data. Without minicons our own rate alone, and the reason.
"""

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.blimp import compare, minicons, over_minicons, random_bert, timed
from benchmarks.data import conditions, data_directory, report
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from mlsm.evaluation.tasks.scoring.scorer import Scorer, StockMaskedLm
from pipeline.teacher import load_tokenizer

TRIED = 32  # sentences to find minicons' best batch size with


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minicons", type=Path, help="directory into which pip installed it")
    parser.add_argument("--sentences", type=int, default=100, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    settings = parser.parse_args()
    if settings.minicons is not None:
        sys.path.append(str(settings.minicons))  # behind ours, whose torch and transformers it shall use
    data = data_directory()
    tokenizer = load_tokenizer(data / "bert_base_uncased_tokenizer")
    dev = load_task(TASKS["stsb"], data).evaluation["validation"]
    texts = list(dict.fromkeys(text for example in dev for text in (example.first, example.second)))
    rounds = [texts[start :: settings.rounds][: settings.sentences] for start in range(settings.rounds)]
    ours = Scorer(StockMaskedLm(random_bert(len(tokenizer))), tokenizer).score
    ours(rounds[0][:TRIED])
    result, packages = {"benchmark": "score_text", "rounds": settings.rounds, "sentences": len(rounds[0])}, ()
    if find_spec("minicons") is None:
        result["skipped"] = "minicons is not installed: give --minicons DIR, as this file's head says"
        seconds = [timed(ours, sentences)[1] for sentences in rounds]
    else:
        theirs, result["minicons_batch_size"] = minicons(random_bert(len(tokenizer)), tokenizer, rounds[0][:TRIED])
        rows = [compare(ours, theirs, sentences) for sentences in rounds]
        seconds, packages = [row["ours"][0] for row in rows], ("minicons",)
        result |= {"difference": max(row["difference"] for row in rows)} | over_minicons(rows)
    result["sentences_per_second"] = len(rounds) * len(rounds[0]) / sum(seconds)
    result |= {"threads": torch.get_num_threads(), **conditions(*packages)}
    report(result)


if __name__ == "__main__":
    main()
