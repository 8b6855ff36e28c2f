"""How long the recipe small-encoder takes here, and its rivals: tokens per second of encoding and of training.

    taskset -c 0 python -m benchmarks.small_encoder TEACHER TEXT ... | tail -1 > docs/studies/second/instead/rates.json

Needs an idle machine, and about a quarter of an hour. Encoding is what `--dry-run` of each command measures on the
text (its dictionary, if one is learned, counts as fixed seconds); training is the median of the later half of STEPS
steps on a small store. Settings are the recipe's, but for objective, positions and store. These are those of the
second study's arms: `regress` learns hidden states as int8, `regress-pq64` the same in 64 bytes, `mlsm` and `type`
LSPs, all of layer 4, `mlm` ids; `-visible` is `--positions all`, `-l3` the recipe's layer 3. Hours of a text of N
tokens, read once:

    N / encoding_tokens_per_second + N / training_tokens_per_second + fixed_seconds

`hours` is that of the second study's 17.3 million tokens. docs/answer.py makes tables of the record. Prints JSON as its
last line.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch

from benchmarks.data import conditions, log_of
from mlsm.recipes.reading import recipe_settings
from pipeline.commands import encode_hidden, encode_ids, encode_lsp
from pipeline.config import EncodeConfig, EncodeHiddenConfig, EncodeIdsConfig
from student.config import StudentConfig
from student.train import train

STORES = {  # arm -> the command that encodes its store, what differs from the recipe
    "regress": (encode_hidden, EncodeHiddenConfig, {"layer": (4,)}),
    "regress-l3": (encode_hidden, EncodeHiddenConfig, {}),
    "regress-pq64": (encode_hidden, EncodeHiddenConfig, {"layer": (4,), "quantise": "pq"}),
    "mlsm": (encode_lsp, EncodeConfig, {"layer": (4,)}),
    "mlsm-l3": (encode_lsp, EncodeConfig, {}),
    "mlm": (encode_ids, EncodeIdsConfig, {}),
}
STUDENTS = {  # arm -> its store, objective, positions
    "regress": ("regress", "regress", "masked"),
    "regress-visible": ("regress", "regress", "all"),
    "regress-visible-l3": ("regress-l3", "regress", "all"),
    "regress-pq64": ("regress-pq64", "regress", "masked"),
    "mlsm": ("mlsm", "mlsm", "masked"),
    "mlsm-visible": ("mlsm", "mlsm", "all"),
    "mlsm-visible-l3": ("mlsm-l3", "mlsm", "all"),
    "type": ("mlsm", "type", "masked"),
    "mlm": ("mlm", "mlm", "masked"),
}
RECIPE, STUDY_TOKENS = "small-encoder", 17_300_000
TOKENS, STEPS, SAMPLE = 300_000, 120, 20_000  # of the small stores; the sample of their dictionary


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("teacher")
    parser.add_argument("text", nargs="+")
    given = parser.parse_args()
    arms = {}
    with tempfile.TemporaryDirectory() as place:
        encoded = {name: encode_store(name, given, Path(place) / name) for name in STORES}
        for name, (store, objective, positions) in STUDENTS.items():
            arms[name] = measure(objective, positions, *encoded[store], Path(place) / f"run-{name}")
            print(name, arms[name])
    threads = {"threads": torch.get_num_threads()}
    print(json.dumps({"benchmark": "small_encoder", "arms": arms, **threads, **conditions()}))


def encode_store(name, given, output):
    """What --dry-run measures for the study's text, and a small store."""
    encode, settings, changes = STORES[name]
    if name == "mlm":
        values = {"tokenizer": given.teacher}
    else:
        values = recipe_settings(RECIPE, encode.__name__.replace("_", "-"), settings, True)
        values |= {"teacher": given.teacher, "device": "cpu"}
    values |= {"corpus": tuple(given.text), "output": output, **changes}
    whole = encode(settings(**values, dry_run=True, max_tokens=STUDY_TOKENS))[0]
    small = {"dictionary_tokens": SAMPLE} if encode is encode_lsp else {}
    return whole, encode(settings(**values | small, max_tokens=TOKENS))[0]["store"]


def measure(objective, positions, whole, store, run):
    """The rates of an arm.

    whole  of --dry-run
    """
    values = recipe_settings(RECIPE, "train-student", StudentConfig, True)
    values |= {"objective": objective, "positions": positions}
    if objective != "regress":
        del values["regress_loss"]
    values |= {"epochs": None, "max_steps": STEPS, "eval_every": 0, "save_every": 0, "device": "cpu"}
    train(StudentConfig(store=str(store), run_dir=run, **values))
    rates = [line["tokens_per_second"] for line in log_of(run) if line["step"] > STEPS // 2]
    found = {
        "encoding_tokens_per_second": whole["tokens_per_second"],
        "training_tokens_per_second": statistics.median(rates),
        "training_spread": [min(rates), max(rates)],
        "fixed_seconds": whole.get("learning_seconds", 0.0),
        "bytes_per_token": whole["bytes_per_token"],
    }
    rate = 1 / found["encoding_tokens_per_second"] + 1 / found["training_tokens_per_second"]
    return found | {"hours": (STUDY_TOKENS * rate + found["fixed_seconds"]) / 3600}


if __name__ == "__main__":
    main()
