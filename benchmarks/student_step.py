"""Tokens per second of our MLSM step over the faster form of a stock masked-LM training step on this machine.

    python -m benchmarks.student_step [--quick] [--mask-later]

Both train a BERT (6 x 256, 4 x 256, 2 x 128) on 32 windows of 128 tokens, |V| = 28,996, with gradient clipping and
fused AdamW. Stock: `BertForMaskedLM(ids, labels)`, logits over the vocabulary at every position, on a batch that lies
ready in memory. Sparse: the same modules with head and logits at masked positions only. Each races in two forms, as
it is and with its linear layers through oneDNN (`..._onednn`), since torch's own products are slow on some
processors; the faster one is `best_stock_mlm`, `best_sparse_mlm`. Ours: k = 3072, about 31 non-zeros per token,
including reading, masking and decoding the rows from a store on disk, one step ahead in a thread as the trainer does
it, with the library for each product that a run would choose, on a GPU compiled; `our_mlm` has everything of ours but
the target. The rivals take turns, so that a busy machine slows all alike, of a few steps each, of which the first is
not counted: it pays for the memory that the others took. BERT's own dropout of 0.1; 6 x 256 is compared with the
sparse rival without it too. `--quick` measures 6 x 256 alone.

`--mask-later` measures something else: our MLSM step with [MASK] entering after two thirds of the layers over our usual
one, both at a mask rate of 0.4, for BERT and a DeBERTa of 6 x 256 (`--quick`: BERT alone). At most 0.80 is the target.

Prints readable lines, then one of JSON. Left out: time to a given quality (another benchmark's claim).
"""

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import DebertaConfig

from benchmarks.data import conditions, with_quartiles
from benchmarks.stores import make_store, write_unit
from mlsm.common.device import choose_device, device_name
from shards.manifest import Plan, PlannedUnit
from shards.reader import Store
from shards.schema import LSP_OCTAVES, windows_per_block
from student.batches import Loader, pin, read_ahead, to_device
from student.config import StudentConfig
from student.encoders.build import encoder_config, named_config
from student.encoders.flops import step_flops
from student.encoders.libraries import choose_libraries
from student.encoders.linear import use_fast_linear
from student.encoders.model import build_student
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.resolve import resolve_compile, resolve_dtype
from student.train import Stepper

VOCABULARY, LSPS, LENGTH, WINDOWS = 28_996, 3072, 128, 32
SPECIAL_IDS = {"pad": 0, "unk": 100, "cls": 101, "sep": 102, "mask": 103, "all": [0, 100, 101, 102, 103]}
NON_ZEROS = 31
LATER_RATE = 0.4  # later masks pay where many tokens are masked
TURNS, STEPS = 3, 4  # of every rival, steps in a turn
ENCODERS = ("bert-6x256", "bert-4x256", "bert-2x128")
CONFIG = StudentConfig(batch_windows=WINDOWS, micro_batch=WINDOWS, max_steps=1000, lr=1e-4)
CONFIG = replace(CONFIG, dtype=resolve_dtype("auto", choose_device("auto")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--mask-later", action="store_true")
    given = parser.parse_args()
    quick, found = given.quick, {}
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory))
        if given.mask_later:
            encoders = [ENCODERS[0], *([] if quick else [write_deberta(Path(directory) / "deberta-6x256")])]
            found = {Path(encoder).name: mask_later(store, replace(CONFIG, encoder=encoder)) for encoder in encoders}
            headline = {"mask_later_vs_usual": found[ENCODERS[0]]["step_time_ratio"]}
            print(json.dumps({"benchmark": "student_step", "quick": quick} | headline | found | here()))
            return
        for encoder in ENCODERS[: 1 if quick else None]:
            found[encoder] = report(*measure(store, replace(CONFIG, encoder=encoder)), encoder)
        headline = found.pop(ENCODERS[0])
        if not quick:
            config = replace(CONFIG, encoder=ENCODERS[0], dropout=0.0)
            found["no_dropout"] = report(*measure(store, config, {"sparse_mlm": sparse_step}), "no dropout")
    print(f"our MLSM step: {headline['mlsm_vs_best_stock_mlm']:.2f} x the best stock masked-LM step, {ENCODERS[0]}")
    print(json.dumps({"benchmark": "student_step", "quick": quick} | headline | found | here()))


def measure(store, config: StudentConfig, kinds: dict | None = None) -> tuple[dict, dict]:
    """Seconds of every timed step, an array for every rival; and for each kind of rival the form that won its race."""
    rivals, fastest = {}, {}
    for name, make in (kinds or {"stock_mlm": stock_step, "sparse_mlm": sparse_step}).items():
        forms = {name: make(store, config), f"{name}_onednn": make(store, config, onednn=True)}
        race = {form: min(take_turn(step)) for form, step in forms.items()}
        fastest[f"best_{name}"] = min(race, key=lambda form: race[form])
        rivals[f"best_{name}"] = forms[fastest[f"best_{name}"]]
    rivals |= {"our_mlm": our_step(store, config, "mlm"), "mlsm": our_step(store, config, "mlsm")}
    return {name: np.array(times) for name, times in interleave(rivals).items()}, fastest


def mask_later(store, config: StudentConfig) -> dict:
    """Step times with [MASK] entering after two thirds of the layers over the usual ones, at one mask rate."""
    usual = replace(config, mask_rate=LATER_RATE)
    later = replace(usual, mask_later=round(2 * encoder_config(config, store).num_hidden_layers / 3))
    rivals, flops = {}, {}
    for name, one in (("usual", usual), ("later", later)):
        rivals[name] = our_step(store, one, "mlsm")
        flops[name] = step_flops(build_student(one, store, OBJECTIVES["mlsm"](store)), one, LENGTH)
    seconds = {name: np.array(times) for name, times in interleave(rivals).items()}
    found = {
        "layer": later.mask_later,
        "mask_rate": LATER_RATE,
        **with_quartiles("step_time_ratio", seconds["later"] / seconds["usual"], "spread"),  # step by step
        "flops_ratio": flops["later"] / flops["usual"],
        "seconds": {name: float(np.median(times)) for name, times in seconds.items()},
    }
    print(
        f"{Path(config.encoder).name}: [MASK] at layer {later.mask_later}, rate {LATER_RATE}:"
        f" {found['step_time_ratio']:.2f} of the usual step's time, {found['flops_ratio']:.2f} of its operations"
    )
    return found


def write_deberta(directory: Path) -> str:
    """Write the config of a DeBERTa of 6 x 256 into a directory; returns its name, for --encoder."""
    sizes = {"num_hidden_layers": 6, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
    DebertaConfig(**named_config("deberta-base").to_dict() | sizes).save_pretrained(directory)
    return str(directory)


def interleave(rivals: dict, turns: int = TURNS) -> dict:
    """Seconds of every counted step of every rival, taking turns; a first turn of all is warm-up."""
    seconds: dict = {name: [] for name in rivals}
    for turn in range(1 + turns):
        for name, step in rivals.items():
            found = take_turn(step)
            if turn > 0:
                seconds[name] += found
    return seconds


def take_turn(step) -> list[float]:
    """Seconds of a few steps in a row but the first."""
    seconds = []
    for number in range(STEPS):
        begun = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


def our_step(store, config: StudentConfig, objective_name: str):
    """One step as the trainer does it: batches are read one step ahead in a thread, and pinned for a GPU, for which the
    student is compiled unless `config` says otherwise."""
    where = torch.device(device())
    config = replace(config, compile=resolve_compile(config.compile, where), dtype=resolve_dtype(config.dtype, where))
    objective = OBJECTIVES[objective_name](store)
    model = build_student(config, store, objective).to(where)
    libraries = choose_libraries(config, model, store.max_length, where)
    stepper = Stepper(config, model, objective, libraries=libraries)
    loader = loader_of(store, config, objective)

    def load(number):
        batch = loader.step(config.seed, number, config.batch_windows)
        return pin(batch) if where.type == "cuda" else batch

    batches = read_ahead(load, 0, config.max_steps)

    def step(_):
        number, batch, _ = next(batches)
        with torch.random.fork_rng():
            return stepper.update(number, batch)

    return step


def stock_step(store, config: StudentConfig, onednn: bool = False, ready: bool = True):
    """One step of the usual recipe: dense logits, labels of -100 off the mask."""

    def loss(model, micro):
        labels_T = torch.full((micro.input_WL.numel(),), -100, device=micro.input_WL.device)
        labels_T = labels_T.index_copy(0, micro.where_M, micro.targets.labels_M)
        labels_WL = labels_T.view_as(micro.input_WL)
        return model(input_ids=micro.input_WL, attention_mask=micro.attention_WL, labels=labels_WL).loss

    return stock_training(store, config, loss, onednn, ready)


def sparse_step(store, config: StudentConfig, onednn: bool = False, ready: bool = True):
    """The usual recipe, but for head and logits at the masked positions only."""

    def loss(model, micro):
        read = model.bert(input_ids=micro.input_WL, attention_mask=micro.attention_WL)
        hidden_Md = read.last_hidden_state.flatten(0, 1)[micro.where_M]
        return torch.nn.functional.cross_entropy(model.cls(hidden_Md), micro.targets.labels_M)

    return stock_training(store, config, loss, onednn, ready)


def stock_training(store, config: StudentConfig, loss, onednn: bool, ready: bool):
    """A step of transformers' model by torch's AdamW."""
    where = choose_device(config.device)
    model = transformers.BertForMaskedLM(encoder_config(config, store)).to(where).train()
    if onednn:
        use_fast_linear(model)
    rates = {"lr": config.lr, "weight_decay": config.weight_decay}
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **rates)
    read = masked_batches(store, config, where, ready)

    def step(number):
        micro, _ = read(number)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=where.type == "cuda"):  # as ours does there
            found = loss(model, micro)
        found.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()

    return step


def masked_batches(store, config: StudentConfig, where: torch.device, ready: bool):
    """A function from a step's number to its batch, masked and with its own ids, which is read then; with `ready`, to
    the first one, read before."""
    loader = loader_of(store, config, OBJECTIVES["mlm"](store))

    def read(number):
        (micro,) = loader.step(config.seed, number, config.batch_windows).micro
        micro = to_device(micro, where)
        ids_T = micro.input_WL.flatten().index_copy(0, micro.where_M, micro.targets.labels_M)
        return micro, ids_T.view_as(micro.input_WL)

    first = read(0)
    return (lambda number: first) if ready else read


def loader_of(store, config: StudentConfig, objective) -> Loader:
    masking = build_masking(config, store)
    reading = {"micro_batch": config.micro_batch, "few_shapes": bool(config.compile)}
    reading |= {"mask_later": config.mask_later > 0}
    return Loader(store.split("train"), masking, objective.read_targets, **reading)


def write_store(directory: Path, vocabulary: int = VOCABULARY):
    """Two blocks of full windows: ids by Zipf's law, rows of Poisson length with falling weights."""
    rng, windows = np.random.default_rng(0), windows_per_block(LENGTH)
    files, target = make_store(directory / "store", k=LSPS, vocabulary=vocabulary, special=SPECIAL_IDS)
    unit = PlannedUnit("synthetic", "train", "synthetic", 0, 1)
    write_unit(files, target, unit.id, (block(rng, windows, vocabulary) for _ in range(2)))
    files.publish_plan(Plan({}, (unit,)))
    return Store.open(files.path)


def block(rng, windows: int, vocabulary: int) -> dict:
    """Columns of one block."""
    ids_WL = 104 + (rng.zipf(1.2, (windows, LENGTH)) - 1) % (vocabulary - 104)
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


def report(seconds: dict, fastest: dict, title: str) -> dict:
    """Print one measurement for people; returns its figures."""
    print(title)
    tokens = WINDOWS * LENGTH
    for name, times in seconds.items():
        rate, low, high = (tokens / value for value in (np.median(times), times.max(), times.min()))
        form = f", {fastest[name]}" if name in fastest else ""
        print(f"{name:18s} {rate:8.0f} tokens/s   ({low:.0f} to {high:.0f}, {len(times)} steps{form})")
    figures: dict = dict(fastest)
    pairs = [(ours, rival) for ours in ("mlsm", "our_mlm") for rival in fastest]
    for name, rival in [*pairs, ("mlsm", "our_mlm")]:
        figures |= with_quartiles(f"{name}_vs_{rival}", seconds[rival] / seconds[name], "spread")  # step by step
    figures["tokens_per_second"] = {name: tokens / float(np.median(times)) for name, times in seconds.items()}
    return figures


def here() -> dict:
    """The conditions, with device and threads."""
    return conditions() | {"device": device_name(device()), "threads": torch.get_num_threads()}


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
