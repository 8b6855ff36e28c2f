"""Test whether this machine's GPU computes correctly, and how fast (doctor --gpu).

    prove_gpu()     # {"gpu": {...}, "solver": {...}, "training": {...}}; the results are kept for later commands

The solvers code hidden states of the bundled teacher, mapped to the width of BERT-base by a matrix with orthonormal
rows, so that inner products do not change. BERT-base is trained for a few steps on the bundled text. Not handled here:
what is tried and how it is judged (pipeline/solvers/proof.py, student/proof.py), the table (mlsm/commands/doctor.py).

Shapes: N tokens, d hidden width, K atoms.
"""

import lzma
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from mlsm.common import faiss_gpu, proofs
from mlsm.common.device import choose_device
from mlsm.common.errors import DeviceError
from mlsm.common.progress import silent

WIDTH, ATOMS, LAM = 768, 3072, 0.05
LAYER, LENGTH = 8, 128  # of the bundled teacher; tokens per window
TOKENS = 60_000  # of the store for the trial of training


def prove_gpu(progress: Callable[..., None] = silent, device: str = "auto", encoder: str = "bert-base") -> dict:
    """Test solvers and training on the first GPU, and discard earlier results for it.

    encoder  of the student in the trial of training
    Returns  gpu: its name, driver and versions; solver, training and, if faiss is a GPU build, faiss: line, right,
             trials
    Raises   DeviceError if there is no GPU
    """
    where = choose_device(device)
    if where.type != "cuda" and device == "auto":
        raise DeviceError("doctor --gpu: torch finds no GPU here, so there is nothing to prove. The CPU is used.")
    with proofs.alone():
        proofs.forget(where)
    progress("prove the solvers", 0, None)
    report = {"gpu": proofs.device_facts(where), "solver": _prove_solver(where)}
    progress("prove training", 0, None)
    report["training"] = _prove_training(where, encoder)
    if faiss_gpu.is_possible(where):
        progress("prove faiss", 0, None)
        answer = faiss_gpu.prove_faiss(where, fresh=True)
        report["faiss"] = {"line": answer.line, "right": ["gpu"] * answer.right, "trials": dict(answer.trials)}
    return report


def _prove_solver(device):
    from pipeline.solvers import proof

    rows_Nd = lift(bundled_states(ATOMS + proof.ROWS), WIDTH)
    choice = proof.choose_solver(rows_Nd[ATOMS:], rows_Nd[:ATOMS], LAM, device, fresh=True)
    return {"line": choice.line, "right": list(choice.right), "trials": dict(choice.trials)}


def _prove_training(device, encoder):
    from pipeline.commands import encode_ids
    from pipeline.config import EncodeIdsConfig
    from shards.reader import Store
    from student import proof
    from student.config import StudentConfig
    from student.resolve import resolve
    from student.task import student_task

    with tempfile.TemporaryDirectory(prefix="mlsm-doctor-") as place:
        text = EncodeIdsConfig(max_tokens=TOKENS, max_length=LENGTH, output=Path(place))
        store = Store.open(encode_ids(text)[0]["store"])
        asked = StudentConfig(store=str(store.path), objective="mlm", encoder=encoder, device=str(device))
        object.__setattr__(asked, "origins", {})  # the demonstration's recipe does not apply
        settled = resolve(asked, store).config
        task = student_task(settled, store)
        choice = proof.find_arithmetic(asked, settled, store, task, student_task, device, fresh=True)
    exact, trials = choice.trials.get("float32") or {}, {}
    for name, trial in choice.trials.items():
        differs = {"differs": proof.deviation(trial, exact)} if "losses" in trial and "losses" in exact else {}
        trials[name] = {**trial, **differs}
    return {"line": choice.line, "right": list(choice.right), "trials": trials}


def bundled_states(count: int) -> np.ndarray:
    """Unit-length hidden states of the bundled teacher on the bundled text, in random order: float32 (count, 144)."""
    from pipeline.corpus import BUNDLED_TEXT
    from pipeline.teacher import Teacher, load_tokenizer, special_ids

    tokenizer, teacher = load_tokenizer("bundled"), Teacher.load("bundled", LAYER)
    special = special_ids(tokenizer)
    windows = -(-count // (LENGTH - 2))
    with lzma.open(BUNDLED_TEXT, "rt", encoding="utf-8") as file:
        text = file.read(12 * LENGTH * windows)  # more than enough characters
    ids = tokenizer.encode(text, add_special_tokens=False)[: (LENGTH - 2) * windows]
    inner_WL = torch.tensor(ids).view(windows, LENGTH - 2)
    ends = [torch.full((windows, 1), special[name]) for name in ("cls", "sep")]
    ids_WL = torch.cat([ends[0], inner_WL, ends[1]], dim=1)
    rows_Nd = teacher(ids_WL)[:, 1:-1].reshape(-1, teacher.hidden_size)[:count].float()
    rows_Nd = torch.nn.functional.normalize(rows_Nd, dim=1).numpy()
    return np.random.default_rng(0).permutation(rows_Nd)


def lift(rows_Nd: np.ndarray, width: int) -> np.ndarray:
    """Map unit rows into a wider space without changing inner products: float32 (N, width), norms at most 1."""
    basis = np.random.default_rng(0).normal(size=(width, rows_Nd.shape[1]))
    lifted = rows_Nd.astype(np.float64) @ np.linalg.qr(basis)[0].T
    return (lifted / (np.linalg.norm(lifted, axis=1, keepdims=True) * (1 + 1e-7))).astype(np.float32)
