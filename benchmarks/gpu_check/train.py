"""The items of part `train`: is a GPU's training right, how fast is it, what happens when its memory is full.

Stores are synthetic (benchmarks/student_step.py): 3,072 LSPs, 28,996 tokens of vocabulary, windows of 128.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import BertConfig, DebertaConfig

from benchmarks import encode, official_step, student_step
from benchmarks.data import log_of
from benchmarks.gpu_check.items import Setting, item, needs_gpu
from benchmarks.gpu_check.solve import TINY_BERT, median_seconds, states
from benchmarks.student_step import our_step, take_turn, write_store
from mlsm.common.device import own_randomness
from mlsm.common.errors import Interrupted, TrainingError
from pipeline.dictionary import cpu as cpu_learner
from pipeline.dictionary import torch as torch_learner
from shards.reader import Store
from student.batches import pin, to_device
from student.config import StudentConfig
from student.encoders.model import Student, build_student
from student.objectives import OBJECTIVES
from student.train import Stepper, train

STEPS = 10
EXACT, IN_BFLOAT16 = 1e-4, 2e-2  # of the losses and norms of a GPU against those of a CPU in float32, relatively
MICRO_BATCHES = (128, 512)
COURSE = 24  # optimiser steps of a run of the trainer
TOO_MANY_WINDOWS = 16_384  # for any GPU, of BERT-base
LEARNED_VECTORS = 2048  # of a minibatch


@item("train", 40, float32_differs_by=EXACT, bfloat16_differs_by=IN_BFLOAT16, waits=0)
def losses(setting: Setting) -> Iterator[dict]:
    """Ten steps without dropout against a CPU's in float32, and whether the host waits for the device in between."""
    encoder, windows = setting.size(("bert-4x256", 32), ("bert-1x64", 4))
    fixed = {"encoder": encoder, "batch_windows": windows, "micro_batch": windows // 2, "dropout": 0.0, "lr": 1e-4}
    with synthetic_store() as store:
        config = StudentConfig(max_steps=100, dtype="float32", **fixed)
        expected = curve(store, config, torch.device("cpu"))
        found = curve(store, config, setting.device)
        yield {"float32_differs_by": difference(found, expected)}
        found = curve(store, replace(config, dtype="bfloat16"), setting.device)
        yield {"bfloat16_differs_by": difference(found, expected)}
        curve(store, config, setting.device, padded=True, may_wait=False)
        deberta = replace(config, dtype="bfloat16", encoder=setting.size("deberta-base", encoder))
        curve(store, deberta, setting.device, may_wait=False)
        needs_gpu(setting)
        yield {"waits": 0}


@item("train", 25, mfu_bert_base=0.3)
def mfu_bert_eager(setting: Setting) -> Iterator[dict]:
    """Rate, MFU and memory of BERT-base as it is."""
    yield from mfu(setting, "bert-12x768", compiled=False)


@item("train", 80, mfu_bert_base={"predicted": "0.38 to 0.45", "wanted": 0.4})
def mfu_bert_compiled(setting: Setting) -> Iterator[dict]:
    """The same, compiled: what a run on a GPU does."""
    yield from mfu(setting, "bert-12x768", compiled=True)


@item("train", 40, step_over_passes=1.15)
def step_parts(setting: Setting) -> Iterator[dict]:
    """What BERT-base's step adds to its forward and backward pass: with a batch that lies ready, and with one that a
    thread reads meanwhile; and the reading alone, in this thread and in another one.
    """
    encoder, windows = setting.size(("bert-12x768", 128), ("bert-1x64", 4))
    dtype = "bfloat16" if setting.on_gpu else "float32"
    sizes = {"encoder": encoder, "batch_windows": windows, "micro_batch": windows}
    with synthetic_store() as store:
        config = StudentConfig(**sizes, max_steps=1000, lr=1e-4, compile=False, dtype=dtype)
        objective = OBJECTIVES["mlsm"](store)
        stepper = Stepper(config, build_student(config, store, objective).to(setting.device), objective)
        loader, reading = student_step.loader_of(store, config, objective), our_step(store, config, "mlsm")

        def read():
            batch = loader.step(config.seed, 0, windows)
            return pin(batch) if setting.on_gpu else batch

        ready = read()
        micro = to_device(ready.micro[0], setting.device)

        def passes():
            stepper.optimizer.zero_grad(set_to_none=True)
            stepper.loss(stepper.forward(micro), micro.targets, ready.counts).backward()

        with ThreadPoolExecutor(max_workers=1) as reader:
            rivals = {
                "passes": passes,
                "read": read,
                "read_in_a_thread": lambda: reader.submit(read).result(),
                "step": lambda: stepper.update(0, ready),
                "step_and_reading": lambda: reading(0),
            }
            seconds = median_seconds(rivals, setting)
        yield {f"{name}_ms": 1000 * value for name, value in seconds.items()}
        yield {"step_over_passes": seconds["step"] / seconds["passes"]}
    needs_gpu(setting)


@item("train", 80, vs_official_step={"predicted": 1.6, "wanted": 2}, vs_official_step_ieee=2.8)
def against_official_step(setting: Setting) -> Iterator[dict]:
    """Ours against teacher and 100 FISTA steps online, by benchmarks/official_step.py."""
    with synthetic_store() as store:
        teacher, atoms_Kd = tiny_official_teacher() if setting.toy else official_step.gpu_teacher()
        for encoder in setting.size(official_step.ENCODERS, ("bert-1x64",)):
            how = setting.size({}, {"windows": 2, "turns": 1})
            yield {encoder: official_step.measure(store, encoder, teacher, atoms_Kd, **how)}
    needs_gpu(setting)


@item("train", 30, mfu_deberta_base=0.15)
def mfu_deberta_eager(setting: Setting) -> Iterator[dict]:
    """Rate, MFU and memory of DeBERTa-base as it is."""
    yield from mfu(setting, "deberta-base", compiled=False)


@item("train", 70, mfu_deberta_base={"wanted": 0.25})
def mfu_deberta_compiled(setting: Setting) -> Iterator[dict]:
    """The same, compiled."""
    yield from mfu(setting, "deberta-base", compiled=True)


@item("train", 65, encode_vs_teacher={"predicted": "0.65 to 0.75", "wanted": 0.7})
def encoding(setting: Setting) -> Iterator[dict]:
    """The whole of encode-lsp against a random BERT-base alone, by benchmarks/encode.py."""
    model = BertConfig(**TINY_BERT, vocab_size=200) if setting.toy else BertConfig(num_hidden_layers=10)
    dtype = torch.float16 if setting.on_gpu else torch.float32
    coder = encode.big_coder(states(setting, 768), model, setting.device, dtype)
    windows = encode.random_windows(coder.teacher.vocab_size, setting.size(8 * 512, 4))
    yield encode.figures(coder, [windows] * setting.size(4, 2))
    needs_gpu(setting)


@item("train", 35, atoms_differ_by=1e-3, minibatch_seconds=0.02)
def learner(setting: Setting) -> Iterator[dict]:
    """A minibatch of dictionary learning on the device against one on the CPU, from the same state.

    The update divides by how much an atom was used: a percent, hardly used, may differ by more than codes.
    """
    problem = states(setting, 768)
    hidden_Nd, atoms_Kd = problem.hidden_Nd.astype(np.float32), problem.atoms_Kd
    size = setting.size(LEARNED_VECTORS, 32)
    ours = cpu_learner.CpuLearner(atoms_Kd.copy(), 0.05, 4.0)
    theirs = torch_learner.TorchLearner(atoms_Kd, 0.05, 4.0, setting.device)
    with patch.object(cpu_learner, "KKT_TOLERANCE", 1e-4), patch.object(torch_learner, "KKT_TOLERANCE", 1e-4):
        seconds: dict[str, list[float]] = {"cpu": [], "device": []}
        for start in range(0, 3 * size, size):  # the first minibatch compiles
            for name, one in (("cpu", ours), ("device", theirs)):
                begun = time.perf_counter()
                one.step(hidden_Nd[start : start + size])
                encode.synchronise(setting.device)
                seconds[name].append(time.perf_counter() - begun)
            if start == 0:
                differs_K = np.abs(ours.atoms() - theirs.atoms()).max(axis=1)
                yield {"atoms_differ_by": float(np.quantile(differs_K, 0.99)), "at_most": float(differs_K.max())}
    yield {"minibatch_seconds": min(seconds["device"][1:]), "cpu_minibatch_seconds": min(seconds["cpu"][1:])}
    needs_gpu(setting)


@item("train", 45, data_wait_share=0.01, resumed_differs_by=EXACT)
def trainer(setting: Setting) -> Iterator[dict]:
    """A run of the trainer, and one that is interrupted half-way and resumed: rate, wait for data, the same losses."""
    encoder, windows, steps = setting.size(("bert-12x768", 128, COURSE), ("bert-1x64", 4, 4))
    with synthetic_store() as store, tempfile.TemporaryDirectory() as directory:
        often = {"save_every": steps // 2, "eval_every": 0, "checkpoints": (1.0,), "compile": False, "dtype": "float32"}
        fixed = {"store": str(store.path), "encoder": encoder, "batch_windows": windows, "micro_batch": windows}
        config = StudentConfig(**fixed, max_steps=steps, lr=1e-4, **often, run_dir=Path(directory) / "whole")
        train(config)
        whole = steps_of(config)
        counted = whole[2:]  # the first steps allocate
        yield {
            name: statistics.median(line[name] for line in counted)
            for name in ("data_wait_share", "tokens_per_second", "mfu", "peak_memory_bytes")
            if name in counted[0]
        }
        config = replace(config, run_dir=Path(directory) / "resumed")

        def stop_half_way(*_, step, **figures):
            if step == steps // 2:
                raise Interrupted("half of the steps are done", 2)

        with suppress(Interrupted):
            train(config, stop_half_way)
        train(config)
        curves = ([(line["loss"], line["grad_norm"]) for line in log] for log in (steps_of(config), whole))
        yield {"resumed_differs_by": difference(*curves)}
    needs_gpu(setting)


@item("train", 30, advice="a --micro-batch that fits, and does")
def out_of_memory(setting: Setting) -> Iterator[dict]:
    """A micro-batch that no GPU's memory holds: the error names one that fits, with which the run goes on. In a toy run
    the lack is played."""
    encoder, windows = setting.size(("bert-12x768", TOO_MANY_WINDOWS), ("bert-1x64", 8))
    with synthetic_store() as store, tempfile.TemporaryDirectory() as directory, played_lack(setting, most=2):
        once = {"max_steps": 1, "lr": 1e-4, "checkpoints": (1.0,), "save_every": 0, "eval_every": 0, "compile": False}
        once["dtype"] = "bfloat16" if setting.on_gpu else "float32"  # given, so that nothing is tried first
        fixed = {"store": str(store.path), "encoder": encoder, "batch_windows": windows}
        fixed["run_dir"] = Path(directory) / "run"
        try:
            train(StudentConfig(micro_batch=windows, **fixed, **once))
            raise AssertionError(f"a micro-batch of {windows} windows fitted")
        except TrainingError as error:
            message = str(error)
        yield {"message": message}
        advised = int(message.partition("--micro-batch ")[2].partition("--micro-batch ")[2].split()[0])
        yield {"advised": advised, "steps": train(StudentConfig(micro_batch=advised, **fixed, **once))["steps"]}
    needs_gpu(setting)


# -- what they share ---------------------------------------------------------------------------------------


def mfu(setting: Setting, encoder: str, compiled: bool) -> Iterator[dict]:
    """Tokens a second, MFU and memory of a step by the micro-batch, which is the whole batch."""
    stance = setting.size("default", "force_eager")  # the compiler would take a minute
    with synthetic_store() as store, tempfile.TemporaryDirectory() as directory, torch.compiler.set_stance(stance):
        if setting.toy:
            encoder = tiny_deberta(Path(directory)) if encoder.startswith("deberta") else "bert-1x64"
        for windows in setting.size(MICRO_BATCHES, (4,)):
            torch._dynamo.reset()
            sizes = {"encoder": encoder, "batch_windows": windows, "micro_batch": windows}
            dtype = "bfloat16" if setting.on_gpu else "float32"
            config = StudentConfig(**sizes, max_steps=1000, lr=1e-4, compile=compiled, dtype=dtype)
            step = our_step(store, config, "mlsm")
            begun = time.perf_counter()
            take_turn(step)  # compiles
            first = time.perf_counter() - begun
            if setting.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            seconds = statistics.median(time for _ in range(setting.size(4, 1)) for time in take_turn(step))
            cost = official_step.cost_of_ours(store, config, seconds)
            memory = torch.cuda.max_memory_allocated() if setting.on_gpu else None
            rate = {"tokens_per_second": windows * store.max_length / seconds, "first_steps_seconds": first}
            yield {str(windows): rate | cost | {"peak_memory_bytes": memory}}
            del step
    needs_gpu(setting)


@contextmanager
def synthetic_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as directory:
        yield write_store(Path(directory))


def curve(
    store: Store, config: StudentConfig, device: torch.device, padded: bool = False, may_wait: bool = True
) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step on a device.

    padded    whether the last tokens of the first window count as padding
    may_wait  whether the host may wait for a GPU other than for these figures; else RuntimeError names where it does
    """
    objective = OBJECTIVES["mlsm"](store)
    stepper = Stepper(config, build_student(config, store, objective).to(device), objective)
    loader, figures = student_step.loader_of(store, config, objective), []
    for number in range(STEPS):
        batch = loader.step(config.seed, number, config.batch_windows)
        if padded:
            masks = [torch.ones_like(micro.input_WL) for micro in batch.micro]
            masks[0][0, -3:] = 0
            micro = [one._replace(attention_WL=mask) for one, mask in zip(batch.micro, masks, strict=True)]
            batch = batch._replace(micro=micro)
        batch = pin(batch) if device.type == "cuda" else batch
        with own_randomness(device), nullcontext() if may_wait or number == 0 else forbidden_waits(device):
            figures.append(stepper.update(number, batch))  # libraries may wait in the first one, for their beginning
    return figures


def difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """The largest relative difference of losses and norms."""
    return float(np.abs(np.array(found) / np.array(expected) - 1).max())


@contextmanager
def forbidden_waits(device: torch.device) -> Iterator[None]:
    """Raise RuntimeError where the host waits for a GPU but by an event."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def played_lack(setting: Setting, most: int) -> Iterator[None]:
    """On a CPU let a student's forward pass fail for more windows than `most`."""
    forward = Student.forward

    def limited(self, input_WL, *rest, **counted):
        if len(input_WL) > most and not counted:  # those are counted, and not computed
            raise torch.OutOfMemoryError("CUDA out of memory. Played on a CPU")
        return forward(self, input_WL, *rest, **counted)

    with patch.object(Student, "forward", forward if setting.on_gpu else limited):
        yield


def steps_of(config: StudentConfig) -> list[dict]:
    """The lines of a run's steps."""
    return [line for line in log_of(config.run_dir) if "loss" in line]


def tiny_deberta(directory: Path) -> str:
    """The config of a DeBERTa of one layer."""
    DebertaConfig(**TINY_BERT, relative_attention=True, pos_att_type=["c2p", "p2c"]).save_pretrained(directory)
    return str(directory)


def tiny_official_teacher():
    """A BERT of one layer and atoms of its width, random."""
    torch.manual_seed(0)
    config = BertConfig(**TINY_BERT, vocab_size=student_step.VOCABULARY)
    teacher = official_step.AutoModel.from_config(config, add_pooling_layer=False).eval()
    return teacher, torch.nn.functional.normalize(torch.randn(student_step.LSPS, TINY_BERT["hidden_size"]))
