"""What a large vocabulary costs: the MLSM step, whose output is k wide, beside masked-LM steps.
And how many students pay for the encoding.

    python -m benchmarks.vocabulary

BERT 6 x 256 on 32 windows of 128 tokens, k = 3,072, with V = 28,996 and 250,000 words: seconds of a step of ours (mlsm,
and mlm by the same code) and of transformers' modules with logits at masked positions only, which is the stronger stock
form at these sizes, with torch's products or oneDNN's, whichever is faster (benchmarks.student_step). All steps update
the token embedding, V x 256, which is the larger part of them at 250,000.

What a store costs is measured beside it: `encode` of benchmarks.encode, MiniLM after layer 5. A run of E epochs gains E
times the difference of a step's time a token, so `students_to_pay_at_E` runs of E epochs take as long with encoding as
the same number of masked-LM runs without; below 1 the first run has paid. The dictionary, a minute or two, is left out.
`..._vs_stock` is against the stock form.
Quality is not compared. Prints JSON as its last line.
"""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.data import conditions, minilm_directory
from benchmarks.encode import measure as measure_encoding
from benchmarks.encode import minilm_coder, real_windows
from benchmarks.student_step import CONFIG, LENGTH, VOCABULARY, WINDOWS, measure, sparse_step, write_store
from pipeline.teacher import load_tokenizer

VOCABULARIES = (VOCABULARY, 250_000)
EPOCHS = (1, 4, 10)


def main() -> None:
    coder = minilm_coder()
    runs = real_windows(load_tokenizer(minilm_directory()), coder.special_ids, 1)[:3]
    with tempfile.TemporaryDirectory() as directory:
        rates = [measure_encoding(run, coder, Path(directory) / f"encode{i}")["encode"] for i, run in enumerate(runs)]
        encode_us = 1e6 / statistics.median(rates[1:])
        found = {f"V={size}": of_vocabulary(size, encode_us, Path(directory) / str(size)) for size in VOCABULARIES}
    print(json.dumps({"benchmark": "vocabulary", "encode_us_per_token": encode_us, **found, **conditions()}))


def of_vocabulary(size: int, encode_us: float, directory: Path) -> dict:
    """Microseconds a token of each step, and how many students a store must serve."""
    store = write_store(directory, size)
    seconds, fastest = measure(store, replace(CONFIG, encoder="bert-6x256"), {"sparse_mlm": sparse_step})
    cost = {name: 1e6 * statistics.median(times) / (WINDOWS * LENGTH) for name, times in seconds.items()}
    found: dict = {"us_per_token": cost, **fastest}
    for rival, name in (("our_mlm", ""), ("best_sparse_mlm", "_vs_stock")):
        found[f"mlsm_vs_{rival}"] = cost[rival] / cost["mlsm"]
        gain = cost[rival] - cost["mlsm"]
        for epochs in EPOCHS:
            found[f"students_to_pay_at_{epochs}{name}"] = encode_us / (epochs * gain) if gain > 0 else None
    print(f"V = {size:,}: " + ", ".join(f"{name} {value:.1f} us" for name, value in cost.items()))
    return found


if __name__ == "__main__":
    main()
