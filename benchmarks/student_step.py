"""Tokens per second of our MLSM step over the best stock masked-LM training step of this processor.

    python -m benchmarks.student_step [--quick]

Both train a BERT (6 x 256, 4 x 256, 2 x 128) on 32 windows of 128 tokens, |V| = 28,996, with gradient clipping and
fused AdamW. Stock: `BertForMaskedLM(ids, labels)`, logits over the vocabulary at every position, on a batch that lies
ready in memory. `sparse_mlm`: the same modules with head and logits at masked positions only. Each comes twice: as it
is, and with its linear layers through oneDNN (`..._onednn`), since torch's own products are slow on some processors;
`best_stock_mlm` and `best_sparse_mlm` are the faster of the two by the median. Ours: k = 3072, about 31
non-zeros per token, including reading, masking and decoding the rows from a store on disk; `our_mlm` has everything of
ours but the target. The steps are interleaved, so that a busy machine slows all alike. BERT's own dropout of 0.1;
6 x 256 is reported without it too. `--quick` measures 6 x 256 alone, in five rounds.

Prints lines for people, then one of JSON. Left out: time to a given quality (another benchmark's claim).
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from shards.manifest import Plan, PlannedUnit, StoreFiles, fingerprint
from shards.reader import Store
from shards.schema import LSP_OCTAVES, ShardMeta, windows_per_block
from shards.writer import UnitWriter
from student.config import StudentConfig
from student.encoders import encoder_config
from student.masking import build_masking
from student.model import build_student
from student.objectives import OBJECTIVES
from student.onednn import use_onednn
from student.step import Loader, Stepper

VOCABULARY, LSPS, LENGTH, WINDOWS = 28_996, 3072, 128, 32
SPECIAL_IDS = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103, "all": [0, 100, 101, 102, 103]}
NON_ZEROS = 31
WARM_UP, ROUNDS, QUICK_ROUNDS = (
    8,
    9,
    5,
)  # steps; the stock step's first six are up to 40 % slower, which would flatter us
ENCODERS = ("bert-6x256", "bert-4x256", "bert-2x128")
CONFIG = StudentConfig(batch_windows=WINDOWS, micro_batch=WINDOWS, max_steps=1000, lr=1e-4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds = QUICK_ROUNDS if quick else ROUNDS
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory))
        configs = {encoder: replace(CONFIG, encoder=encoder) for encoder in ENCODERS}
        configs["no_dropout"] = replace(CONFIG, encoder=ENCODERS[0], dropout=0.0)
        wanted = list(configs)[: 1 if quick else None]
        found = {name: report(measure(store, configs[name], rounds), name) for name in wanted}
    headline = found.pop(ENCODERS[0])
    print(f"our MLSM step: {headline['mlsm_vs_best_stock_mlm']:.2f} x the best stock masked-LM step, {ENCODERS[0]}")
    print(json.dumps({"benchmark": "student_step", "quick": quick} | headline | found | conditions()))


def measure(store, config: StudentConfig, rounds: int) -> dict:
    """Seconds of every timed step, an array for every rival."""
    rivals = {}
    for name, step in {"stock_mlm": stock_step, "sparse_mlm": sparse_step}.items():
        rivals |= {name: step(store, config), f"{name}_onednn": step(store, config, onednn=True)}
    rivals |= {"our_mlm": our_step(store, config, "mlm"), "mlsm": our_step(store, config, "mlsm")}
    return {name: np.array(times) for name, times in interleave(rivals, rounds).items()}


def interleave(rivals: dict, rounds: int = ROUNDS) -> dict:
    """Seconds of every step of every rival, taking turns; warm-up left out."""
    seconds: dict = {name: [] for name in rivals}
    for turn in range(WARM_UP + rounds):
        for name, step in rivals.items():
            begun = time.perf_counter()
            step(turn)
            if turn >= WARM_UP:
                seconds[name].append(time.perf_counter() - begun)
    return seconds


def our_step(store, config: StudentConfig, objective_name: str):
    """One step as the trainer does it, reading included and not overlapped."""
    objective = OBJECTIVES[objective_name](store)
    stepper = Stepper(config, build_student(config, store, objective).to(device()), objective)
    loader = loader_of(store, config, objective)

    def step(number):
        with torch.random.fork_rng():
            stepper.update(number, loader.step(config.seed, number, config.batch_windows))

    return step


def stock_step(store, config: StudentConfig, onednn: bool = False):
    """One step of the usual recipe: dense logits, labels of -100 off the mask."""

    def loss(model, ids_WL, where_M, labels_M):
        labels = torch.full((ids_WL.numel(),), -100, device=ids_WL.device).index_copy(0, where_M, labels_M)
        return model(input_ids=ids_WL, labels=labels.view_as(ids_WL)).loss

    return stock_training(store, config, loss, onednn)


def sparse_step(store, config: StudentConfig, onednn: bool = False):
    """The usual recipe, but for head and logits at the masked positions only."""

    def loss(model, ids_WL, where_M, labels_M):
        hidden_Md = model.bert(input_ids=ids_WL).last_hidden_state.flatten(0, 1)[where_M]
        return torch.nn.functional.cross_entropy(model.cls(hidden_Md), labels_M)

    return stock_training(store, config, loss, onednn)


def stock_training(store, config: StudentConfig, loss, onednn: bool):
    """A step of transformers' model by torch's AdamW, on one batch that lies ready."""
    model = transformers.BertForMaskedLM(encoder_config(config, store)).to(device()).train()
    if onednn:
        use_onednn(model)
    rates = {"lr": config.lr, "weight_decay": config.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **rates)
    micro = loader_of(store, config, OBJECTIVES["mlm"](store)).step(config.seed, 0, WINDOWS).micro[0]
    batch = [tensor.to(device()) for tensor in (micro.input_WL, micro.where_M, micro.targets.labels_M)]

    def step(number):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=device() == "cuda"):  # as ours does there
            found = loss(model, *batch)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()

    return step


def loader_of(store, config: StudentConfig, objective) -> Loader:
    masking = build_masking(config, store)
    return Loader(store.split("train"), masking, objective.read_targets, micro_batch=config.micro_batch)


def write_store(directory: Path):
    """Two blocks of full windows: ids by Zipf's law, rows of Poisson length with falling weights."""
    rng = np.random.default_rng(0)
    files = StoreFiles(directory / "store")
    settings = {"synthetic": "benchmarks.student_step"}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": LSPS,
        "vocab_size": VOCABULARY,
        "max_length": LENGTH,
        "special_ids": SPECIAL_IDS,
        "weight_octaves": LSP_OCTAVES,
    }
    files.create(target)
    unit = PlannedUnit("synthetic", "train", "synthetic", 0, 1)
    with UnitWriter(files, ShardMeta(target["target"], unit.id, LSPS, VOCABULARY, LENGTH)) as writer:
        for _ in range(2):
            writer.write_block(**block(rng, windows_per_block(LENGTH)))
    files.publish_plan(Plan({"synthetic": True}, (unit,)))
    return Store.open(files.path)


def block(rng, windows: int) -> dict:
    """Columns of one block."""
    ids_WL = 104 + (rng.zipf(1.2, (windows, LENGTH)) - 1) % (VOCABULARY - 104)
    ids_WL[:, 0], ids_WL[:, -1] = SPECIAL_IDS["cls"], SPECIAL_IDS["sep"]
    nnz_T = np.clip(rng.poisson(NON_ZEROS, ids_WL.size), 1, LSPS // 48)
    nnz_T[ids_WL.ravel() < 104] = 0
    row_E = np.repeat(np.arange(len(nnz_T)), nnz_T)
    first_T = np.cumsum(nnz_T) - nnz_T
    steps = np.cumsum(rng.integers(1, 49, len(row_E)))  # gaps of 1 to 48: rising, and below k within a row
    indices = steps - (steps[first_T.clip(max=len(steps) - 1)])[row_E]
    weights = np.exp2(-rng.gamma(2.0, 1.5, len(row_E)).clip(max=LSP_OCTAVES - 1))
    weights /= np.bincount(row_E, weights, len(nnz_T))[row_E]
    lengths = np.full(windows, LENGTH)
    return {
        "ids": ids_WL.ravel(),
        "lengths": lengths,
        "run_starts": np.arange(windows) * LENGTH,
        "run_records": np.arange(windows),
        "nnz": nnz_T,
        "indices": indices,
        "weights": weights,
        "tail": np.zeros(len(nnz_T)),
    }


def report(seconds: dict, title: str) -> dict:
    """Print one measurement for people; returns its figures."""
    print(title)
    tokens = WINDOWS * LENGTH
    for name, times in seconds.items():
        rate, low, high = (tokens / value for value in (np.median(times), times.max(), times.min()))
        print(f"{name:18s} {rate:8.0f} tokens/s   ({low:.0f} to {high:.0f}, {len(times)} steps)")
    figures = {}
    for name in ("stock_mlm", "sparse_mlm"):
        fastest = min((name, f"{name}_onednn"), key=lambda rival: float(np.median(seconds[rival])))
        seconds = seconds | {f"best_{name}": seconds[fastest]}
        figures[f"best_{name}"] = fastest
    pairs = [(ours, rival) for ours in ("mlsm", "our_mlm") for rival in seconds if rival not in ("mlsm", "our_mlm")]
    for name, rival in [*pairs, ("mlsm", "our_mlm")]:
        ratios = seconds[rival] / seconds[name]  # turn by turn
        figures[f"{name}_vs_{rival}"] = statistics.median(ratios)
        figures[f"{name}_vs_{rival}_spread"] = [float(np.quantile(ratios, q)) for q in (0.25, 0.75)]
    figures["tokens_per_second"] = {name: tokens / float(np.median(times)) for name, times in seconds.items()}
    return figures


def conditions() -> dict:
    """Hardware, versions and command."""
    return {
        "device": torch.cuda.get_device_name() if device() == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m benchmarks.student_step",
    }


def cpu_name() -> str:
    """The processor's model where the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return (names or [platform.machine()])[0]


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
