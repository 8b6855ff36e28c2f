"""faiss on a GPU, simulated: children that are right, crash, hang, fail or compute wrongly, and callers."""

import importlib.util
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from preloaded import SUBPROCESS

from mlsm.common import faiss_gpu, proofs
from mlsm.evaluation.inspection.lsps.neighbours import nearest_atoms
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary

sys.path.append(str(Path(__file__).resolve().parent))  # where a child finds planted_faiss.py
CPU = torch.device("cpu")


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    """A build for GPUs by name, and small trials; returns the indices that were put on the "GPU"."""
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("MLSM_PLANTED", "right")
    monkeypatch.setattr(faiss_gpu, "TRIAL", "planted_faiss")
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    monkeypatch.setattr(faiss_gpu, "is_possible", lambda device: True)
    monkeypatch.setattr(faiss_gpu, "WORTH", 1000)
    placed = []

    def to_gpus(index, gpus):
        assert gpus == [0]
        placed.append(index)
        return index

    monkeypatch.setattr(faiss, "index_cpu_to_gpus_list", to_gpus, raising=False)
    return placed


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("right", "it is right"),
        ("crash", "SIGABRT"),
        ("fail", "no kernel image"),
    ],
)
def test_it_is_used_only_if_a_child_found_it_right(stand_in, monkeypatch, caplog, does, says):
    monkeypatch.setenv("MLSM_PLANTED", does)
    index = faiss.IndexFlatIP(4)
    with caplog.at_level("INFO", "mlsm"):
        assert faiss_gpu.place(index, CPU, products=1000) is index
    assert len(stand_in) == (does == "right")
    (said,) = caplog.messages
    assert says in said
    monkeypatch.setattr(faiss_gpu, "TRIAL", "absent")
    assert faiss_gpu.prove_faiss(CPU).right == (does == "right"), "it is kept"
    assert faiss_gpu.prove_faiss(CPU, fresh=True).right is False


@pytest.mark.parametrize(("does", "kept"), [("fail", True), ("lack_memory", False), ("crash", False)])
def test_what_may_be_a_lack_of_memory_is_not_kept(stand_in, monkeypatch, does, kept):
    """faiss ends its process on an error of CUDA, whatever it is."""
    monkeypatch.setenv("MLSM_PLANTED", does)
    assert not faiss_gpu.prove_faiss(CPU).right
    monkeypatch.setenv("MLSM_PLANTED", "right")
    assert faiss_gpu.prove_faiss(CPU).right != kept


@pytest.mark.parametrize(
    ("gpu", "fault"),
    [
        ({}, None),
        ({"cosines": [0.9, 0.7]}, "other neighbours"),
        ({"objective": 5.1}, "its k-means reached 5.1, and 5 on the CPU"),
        ({"objective": float("nan")}, "its k-means reached nan"),
    ],
)
def test_other_results_are_wrong(gpu, fault):
    trial = {"objective": 5.0, "cosines": [0.9, 0.8], "seconds": 0.1}
    answer = faiss_gpu.judge_faiss({"cpu": trial, "gpu": trial | gpu}, None)
    assert answer.right == (fault is None) and (fault or "it is right") in answer.line


def test_little_work_stays_on_the_cpu(stand_in):
    faiss_gpu.place(faiss.IndexFlatIP(4), CPU, products=999)
    assert stand_in == []


def test_without_a_build_for_gpus_there_is_nothing_to_try():
    assert not faiss_gpu.is_possible(CPU)
    if not hasattr(faiss, "StandardGpuResources"):
        assert not faiss_gpu.is_possible(torch.device("cuda", 0))


def test_without_faiss_there_is_nothing_to_try(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not faiss_gpu.is_possible(torch.device("cuda", 0))


def test_kmeans_and_neighbours_ask_for_it(stand_in):
    vectors_Nd = np.random.default_rng(0).normal(size=(600, 16)).astype(np.float32)
    settings = DictionarySettings(k=8, lam=0.05, seed=0, init="kmeans")
    dictionary = learn_dictionary(vectors_Nd, settings, LearningSchedule(epochs=1))
    assert [index.d for index in stand_in] == [16]
    near, _ = nearest_atoms(dictionary.atoms_Kd, 3)
    assert near.shape == (8, 3) and len(stand_in) == 2
