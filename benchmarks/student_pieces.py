"""How much time each of our replacements for code of torch and transformers saves in a training step.

    python -m benchmarks.student_pieces [--quick]

The step of `benchmarks.student_step` (MLSM, 32 windows of 128 tokens), complete, and with one replacement switched off
at a time:

    last_layer  the last layer at masked positions only (student/encoders/last_layer.py)
    linear      linear layers by the faster of torch's two libraries (linear.py): torch's own instead
    choice      the measurement of which library that is (mlsm/common/matrix_products.py): oneDNN always instead
    dropout     dropout from 16 random bits an element (dropout.py)
    deberta     DeBERTa's attention and norms from fewer operations (deberta.py)

The forms take turns. A figure is the time of a step without the piece over the time of the whole step, so 1.10 means
that the piece saves a tenth. Encoders: a BERT and a DeBERTa of 6 x 256, and a ModernBERT of 2 x 128 without dropout;
`--quick` measures the BERT alone. Prints readable lines, then one of JSON. Not measured: GPUs, where only the last
layer is replaced; packing and short windows, which are settings.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.data import quartiles
from benchmarks.student_step import CONFIG, here, interleave, our_step, write_deberta, write_store
from mlsm.common.documents import accept_pairwise_mask
from mlsm.common.matrix_products import USUAL

TURNS = 5
LEFT_OUT = {  # piece -> what is put in its place
    "last_layer": {"student.encoders.last_layer.FORWARDS": {}},
    "linear": {"student.encoders.linear._serves": lambda *_: False},
    "choice": {"benchmarks.student_step.choose_libraries": lambda *_, **__: USUAL},
    "dropout": {"student.encoders.dropout._serves": lambda *_: False},
    "deberta": {"student.encoders.model.adapt_deberta": accept_pairwise_mask},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick, found = parser.parse_args().quick, {}
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory))
        usual = ["last_layer", "linear", "choice"]
        measured = {"bert-6x256": ("bert-6x256", None, [*usual, "dropout"])}
        if not quick:
            deberta = write_deberta(Path(directory) / "deberta-6x256")
            measured["deberta-6x256"] = (deberta, None, [*usual, "dropout", "deberta"])
            measured["modernbert-2x128"] = ("modernbert-2x128", 0.0, usual)
        for name, (encoder, dropout, pieces) in measured.items():
            found[name] = measure(store, replace(CONFIG, encoder=encoder, dropout=dropout), pieces)
            for piece, one in found[name].items():
                low, high = one["spread"]
                print(f"{name:18s} without {piece:11s} {one['ratio']:.2f} of the step's time ({low:.2f} to {high:.2f})")
    print(json.dumps({"benchmark": "student_pieces", "quick": quick, "without": found} | here()))


def measure(store, config, pieces: list[str]) -> dict:
    """For each piece, the time of a step without it over that of the whole step: median and quartiles."""
    rivals = {"whole": our_step(store, config, "mlsm")}
    rivals |= {piece: without(piece, store, config) for piece in pieces}
    seconds = {name: np.array(times) for name, times in interleave(rivals, TURNS).items()}
    ratios = {piece: seconds[piece] / seconds["whole"] for piece in pieces}
    return {piece: {"ratio": float(np.median(each)), "spread": quartiles(each)} for piece, each in ratios.items()}


def without(piece: str, store, config):
    """A step of a student that was built, and is trained, without a piece."""

    def left_out():
        stack = ExitStack()
        for name, instead in LEFT_OUT[piece].items():
            stack.enter_context(patch(name, instead))
        return stack

    with left_out():
        whole = our_step(store, config, "mlsm")

    def step(number):
        with left_out():
            return whole(number)

    return step


if __name__ == "__main__":
    main()
