"""Scores of baselines without a language model on the tasks of `finetune`; a useful student must beat them.

    python -m benchmarks.simple_rules [--limit-train 4000]

Training examples, development sets and metrics are those of `finetune` (`--limit-train` takes the same examples).

constant     the label that is most frequent in the training examples, for every example; for a score their mean
words        a linear model by scikit-learn's defaults: logistic regression, or ridge regression of a score. Of pairs,
             on six numbers: words of either sentence, words that both have, and these as shares of the first, of the
             second and of all. Of single sentences, on which words they have
lookup       CoNLL-2003: sequences of words that are an entity somewhere in the training sentences are that entity, the
             longest first, of the type that they have most often there

Needs $MLSM_DATA/data or ../shared/data. Scores are in per cent, each the mean of the task's metrics as in
docs/results.md, with the metrics beside it. No figure depends on time or on a random number.
"""

import argparse
import json
import re
from collections import Counter, defaultdict
from statistics import fmean

import numpy as np
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.data import conditions, data_directory
from mlsm.evaluation.tasks.finetuning.batches import take_examples
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.metrics import figures
from mlsm.evaluation.tasks.finetuning.tasks import ENTITIES, TASKS


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit-train", type=int, default=4_000, help="training examples of a task")
    settings = parser.parse_args()
    data, result = data_directory(), {"benchmark": "simple_rules", "limit_train": settings.limit_train, "tasks": {}}
    for task in TASKS.values():
        examples = load_task(task, data)
        train = take_examples(task.name, examples.train, settings.limit_train)
        gold = {part: [example.label for example in rows] for part, rows in examples.evaluation.items()}
        rules = {"lookup": lookup(train)} if task.labels_words else {"constant": constant(train), "words": words(train)}
        for name, rule in rules.items():
            predicted = {part: rule(rows) for part, rows in examples.evaluation.items()}
            found = {figure["metric"]: 100 * figure["value"] for figure in figures(task, gold, predicted)}
            result["tasks"].setdefault(task.name, {})[name] = {"mean": fmean(found.values()), **found}
            print(f"{task.name:10} {name:8} {fmean(found.values()):5.1f}  {found}")
    print(json.dumps(result | conditions("scikit-learn")))


def constant(train):
    labels = [example.label for example in train]
    said = fmean(labels) if isinstance(labels[0], float) else Counter(labels).most_common(1)[0][0]
    return lambda rows: np.full(len(rows), said)


def words(train):
    labels = [example.label for example in train]
    model = Ridge() if isinstance(labels[0], float) else LogisticRegression(max_iter=1_000)
    if train[0].second is None:
        first, read = CountVectorizer(binary=True), lambda rows: [example.first for example in rows]
    else:
        first, read = StandardScaler(), lambda rows: np.array([overlap(example) for example in rows])
    fitted = make_pipeline(first, model).fit(read(train), labels)
    return lambda rows: fitted.predict(read(rows))


def overlap(example):
    first, second = (set(re.findall(r"\w+", text.lower())) for text in (example.first, example.second))
    both = len(first & second)
    shares = [both / max(1, len(of)) for of in (first, second, first | second)]
    return [len(first), len(second), both, *shares]


def lookup(train):
    seen = defaultdict(Counter)
    for example in train:
        for start, end, kind in entities(example.label):
            seen[tuple(example.first[start:end])][kind] += 1
    longest = max(map(len, seen))

    def tag(example):
        tags, place = [0] * len(example.first), 0
        while place < len(tags):
            ends = range(min(place + longest, len(tags)), place, -1)
            end = next((end for end in ends if tuple(example.first[place:end]) in seen), None)
            if end is None:
                place += 1
                continue
            kind = seen[tuple(example.first[place:end])].most_common(1)[0][0]
            inside = ENTITIES.index(f"I-{kind}")
            tags[place:end] = [ENTITIES.index(f"B-{kind}")] + [inside] * (end - place - 1)
            place = end
        return tags

    return lambda rows: [tag(example) for example in rows]


def entities(labels):
    """(start, end, type) of the entities of a sentence's labels."""
    starts = [place for place, label in enumerate(labels) if ENTITIES[label].startswith("B-")]
    for start in starts:
        end = start + 1
        while end < len(labels) and ENTITIES[labels[end]].startswith("I-"):
            end += 1
        yield start, end, ENTITIES[labels[start]][2:]


if __name__ == "__main__":
    main()
