"""The whole way at the size that users have: a teacher of 12 x 768, k = 3,072, real text.

    python -m benchmarks.real_teachers mpnet DIRECTORY
    python -m benchmarks.real_size DIRECTORY [--quick]

First `encode-lsp` runs as a user starts it: English Wikipedia, layer 10, its own dictionary, learned from a sample of
32,768 tokens. It gives the split of the time, the peak memory of the process, and the store that the students read.
Then, on new text, in turns, tokens per second of

    teacher      our cut teacher alone, float32; teacher_bfloat16 the same by `--dtype bfloat16`
    encode       our path from windows to a shard (benchmarks.encode), with either dtype
    stock        transformers' model with the same layers, on the same full windows, 8 in a pass; torch's own products;
                 with either dtype
    sentences    the ordinary way to get hidden states: the whole model with `output_hidden_states`, sentences sorted by
                 length, tokenised before, padded in batches of 32
    spams, fista the ordinary ways to code them: SPAMS (LARS, positive, float32, all cores, its Gram matrix given), 100
                 FISTA steps in torch (its step size given), fista_onednn the same with oneDNN's products

and seconds of one training step of a student BERT 6 x 256 from the store (ours), and in the official way, with teacher
and FISTA online: all of stock modules, either with torch's products or with oneDNN's, whichever is faster here. FISTA
codes masked positions alone. From these follow

    encode_vs_teacher         encoding over the bare teacher
    teacher_vs_stock          our cut teacher over transformers' same layers; bfloat16 likewise
    encode_vs_ordinary        encoding over sentences and SPAMS, whose times a token are added; what is ordinary or
                              online is float32 also where ours is bfloat16
    targets_vs_online_at_E    time of targets: encoding once over teacher and FISTA at each of E epochs
    run_vs_official_at_E      encoding once and E epochs of our steps over E epochs of the official way's

and what bfloat16 does to the codes: the mean total variation of the distributions against float32's, solved to 1e-5.
--quick takes half the turns. Prints JSON as its last line.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers

from benchmarks.data import ROOT, SPAMS_REQUIREMENT, conditions, data_file, report, require, spread
from benchmarks.encode import MAX_LENGTH, coder_of, measure
from benchmarks.official_step import cut_model, fista_by_onednn, official_step
from benchmarks.sparse_coding import spams_lasso
from benchmarks.student_step import our_step
from benchmarks.whole_run import timed
from pipeline.corpus import open_corpus
from pipeline.corpus.windows import packed_windows, tokenise
from pipeline.precision import total_variation
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.fista import STEPS as STEPS_OF_FISTA
from pipeline.solvers.fista import fista_steps
from pipeline.solvers.parallel import thread_count
from pipeline.teacher import Teacher, load_tokenizer, special_ids
from shards.reader import Store
from student.config import StudentConfig

LAYER, K, LAM = 10, 3072, 0.05
TEXT = "text/wiki_en_2014/wiki_en_2014_small.txt.xz"
NEW_TEXT = "text/wiki_en_2014/wiki_en_2014_heldout.txt.xz"
TOKENS, DICTIONARY_TOKENS = 40_000, 32_768
WINDOWS, SENTENCES, BATCH = 64, 192, 32  # of one turn
STOCK_WINDOWS = 8  # of a pass: the fastest of 4, 8, 16, 32 and 64, all of one turn at once being the slowest
SPAMS_TOKENS, FISTA_TOKENS, COMPARED_TOKENS = 2048, 614, 2048  # 614 are masked in 32 windows
TURNS, STEPS, WARM_UP = 4, 6, 2
EPOCHS = (1, 4, 10)
MASKED = 0.15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("teacher", type=Path, help="directory of a teacher with at least 10 layers")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    turns = TURNS // 2 if arguments.quick else TURNS
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as directory:
        store, encoding = encode_as_a_user(arguments.teacher, Path(directory))
        rates, variation = measure_encoding(arguments.teacher, store, turns, Path(directory))
        seconds = measure_steps(arguments.teacher, store, STEPS // 2 if arguments.quick else STEPS)
    result = {
        "benchmark": "real_size",
        "teacher": arguments.teacher.name,
        "layer": LAYER,
        "k": K,
        **ratios(rates, seconds),
        "total_variation_bfloat16": variation,
        "tokens_per_s": {name: spread(values) for name, values in rates.items()},
        "us_per_token_of_a_step": {name: spread(values) for name, values in seconds.items()},
        "encode_lsp": encoding,
        "threads": thread_count(),
        **conditions("spams-bin"),
    }
    report(result)


def encode_as_a_user(teacher: Path, directory: Path) -> tuple[Store, dict]:
    """The store of `encode-lsp`, and what the process took."""
    settings = {
        "teacher": teacher,
        "layer": LAYER,
        "k": K,
        "corpus": data_file(TEXT),
        "max-tokens": TOKENS,
        "dictionary-tokens": DICTIONARY_TOKENS,
        "device": "cpu",
        "output": directory,
    }
    command = [sys.executable, ROOT / "cli.py", "encode-lsp"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    store = Store.open(next((directory / "stores").iterdir()))
    tokens = len(store.split("train")) * store.max_length
    busy = {
        name: sum(record.environment.get(name, 0.0) for record in store.records())
        for name in ("teacher_seconds", "solver_seconds", "distributions_seconds")
    }
    return store, {"seconds": wall, **busy, "tokens": tokens, "peak_memory_mb": peak}


def measure_encoding(teacher: Path, store: Store, turns: int, directory: Path) -> tuple[dict, float]:
    """Tokens per second of each way in each turn after the first, and what bfloat16 does to the codes."""
    tokenizer = load_tokenizer(str(teacher))
    special = special_ids(tokenizer)
    (text,) = open_corpus([str(data_file(NEW_TEXT))])
    pieces = packed_windows(tokenise(text.pieces(), tokenizer), MAX_LENGTH, special["cls"], special["sep"])
    windows = list(islice(pieces, WINDOWS))
    atoms_Kd = np.load(store.files.dictionary / "atoms.npy")
    models = {dtype: Teacher.load(str(teacher), LAYER, dtype=dtype) for dtype in ("float32", "bfloat16")}
    models["float32"].choose_libraries("auto", WINDOWS * MAX_LENGTH, MAX_LENGTH)
    coders = {dtype: coder_of(model, atoms_Kd, special) for dtype, model in models.items()}
    ids_WL = torch.tensor([window.ids for window in windows])
    hidden_Nd = {name: states(model, ids_WL) for name, model in models.items()}
    codes = {name: exact_codes(rows_Nd[:COMPARED_TOKENS], atoms_Kd) for name, rows_Nd in hidden_Nd.items()}
    variation = float(total_variation(codes["float32"], codes["bfloat16"]).mean())
    ways = ordinary_ways(teacher, tokenizer, text, ids_WL, hidden_Nd["float32"], atoms_Kd)
    rates: dict = {}
    for turn in range(turns + 1):
        found = {}
        for dtype, coder in coders.items():
            ending = "" if dtype == "float32" else f"_{dtype}"
            one = measure(windows, coder, directory / f"{dtype}-{turn}")
            found |= {f"{name}{ending}": one[name] for name in ("teacher", "encode")}
        for name, way in ways.items():
            begun = time.perf_counter()
            found[name] = way() / (time.perf_counter() - begun)
        for name, rate in found.items() if turn > 0 else ():
            rates.setdefault(name, []).append(rate)
    return rates, variation


def states(model: Teacher, ids_WL: torch.Tensor) -> np.ndarray:
    """Unit-length hidden states, float32."""
    return F.normalize(model(ids_WL[: COMPARED_TOKENS // MAX_LENGTH]).flatten(0, 1)).numpy()


def exact_codes(rows_Nd: np.ndarray, atoms_Kd: np.ndarray) -> np.ndarray:
    """Exact codes, dense (N, K); `total_variation` makes them distributions."""
    return nonneg_lasso(rows_Nd, atoms_Kd, LAM, tol=1e-5).dense(len(atoms_Kd), dtype=np.float32)


def ordinary_ways(teacher: Path, tokenizer, text, ids_WL, hidden_Nd, atoms_Kd) -> dict:
    """Functions that return how many tokens they read or coded."""
    require("spams", SPAMS_REQUIREMENT)
    whole = transformers.AutoModel.from_pretrained(teacher).eval()
    cut, half = cut_model(teacher, LAYER), cut_model(teacher, LAYER, torch.bfloat16)
    sentences = list(
        islice((s.strip() for piece in text.pieces() for s in piece.text.split(". ") if s.strip()), SENTENCES)
    )
    sentences.sort(key=len)  # alike in length, so that little is padded
    batches = [
        tokenizer(
            sentences[start : start + BATCH], padding=True, truncation=True, max_length=MAX_LENGTH, return_tensors="pt"
        )
        for start in range(0, len(sentences), BATCH)
    ]
    rows_dN, atoms_dK = np.asfortranarray(hidden_Nd[:SPAMS_TOKENS].T), np.asfortranarray(atoms_Kd.T)
    gram_KK = np.asfortranarray(atoms_Kd @ atoms_Kd.T)
    exact_Kd = torch.from_numpy(atoms_Kd.astype(np.float64))
    step = 1 / torch.linalg.eigvalsh(exact_Kd.T @ exact_Kd)[-1].item()
    masked_Nd = torch.from_numpy(hidden_Nd[:FISTA_TOKENS])

    @torch.inference_mode()
    def stock(model):
        for batch in ids_WL.split(STOCK_WINDOWS):
            model(input_ids=batch)
        return ids_WL.numel()

    @torch.inference_mode()
    def read_sentences():
        count = 0
        for batch in batches:
            real_WL = batch["attention_mask"].bool()
            read = whole(
                input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], output_hidden_states=True
            )
            count += len(read.hidden_states[LAYER][real_WL])
        return count

    def by_spams():
        correlations_KN = np.asfortranarray(atoms_dK.T @ rows_dN)
        spams_lasso(rows_dN, LAM, Q=gram_KK, q=correlations_KN)
        return rows_dN.shape[1]

    @torch.inference_mode()
    def by_fista(solve):
        solve(masked_Nd, torch.from_numpy(atoms_Kd), LAM, step, STEPS_OF_FISTA)
        return FISTA_TOKENS

    return {
        "stock": partial(stock, cut),
        "stock_bfloat16": partial(stock, half),
        "sentences": read_sentences,
        "spams": by_spams,
        "fista": partial(by_fista, fista_steps),
        "fista_onednn": partial(by_fista, fista_by_onednn),
    }


def measure_steps(teacher: Path, store: Store, steps: int) -> dict:
    """Microseconds a token of the steps of both ways."""
    windows = 32
    config = StudentConfig(encoder="bert-6x256", batch_windows=windows, micro_batch=windows, max_steps=1000, lr=5e-4)
    online = cut_model(teacher, LAYER), torch.from_numpy(np.load(store.files.dictionary / "atoms.npy"))
    ways = {
        "ours": our_step(store, config, "mlsm"),
        "official": official_step(store, config, *online, ready=False),
        "official_onednn": official_step(store, config, *online, onednn=True, ready=False),
    }
    found: dict = {name: [] for name in ways}
    for number in range(WARM_UP + steps):  # in turns
        for name, step in ways.items():
            seconds = timed(step, range(number, number + 1))
            found[name] += [1e6 * one / (windows * store.max_length) for one in seconds] if number >= WARM_UP else []
    return found


def ratios(rates: dict, steps: dict) -> dict:
    """The figures that the docstring lists: medians, in microseconds a token."""
    cost = {name: 1e6 / statistics.median(values) for name, values in rates.items()}
    teacher = min(cost["stock"], cost["teacher"])  # the official way's, in its favour
    online = teacher + MASKED * min(cost["fista"], cost["fista_onednn"])
    ours = statistics.median(steps["ours"])
    official = min(statistics.median(steps[name]) for name in ("official", "official_onednn"))
    found: dict = {}
    for ending in ("", "_bfloat16"):
        encode = cost[f"encode{ending}"]
        found[f"encode_vs_teacher{ending}"] = cost[f"teacher{ending}"] / encode
        found[f"teacher_vs_stock{ending}"] = cost[f"stock{ending}"] / cost[f"teacher{ending}"]
        found[f"encode_vs_ordinary{ending}"] = (cost["sentences"] + cost["spams"]) / encode
        for epochs in EPOCHS:
            found[f"targets_vs_online_at_{epochs}{ending}"] = encode / (epochs * online)
            found[f"run_vs_official_at_{epochs}{ending}"] = (encode + epochs * ours) / (epochs * official)
    return found


if __name__ == "__main__":
    main()
