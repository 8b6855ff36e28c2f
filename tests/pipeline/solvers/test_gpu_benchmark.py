"""benchmarks/gpu_coding.py: its parts on a CPU at toy sizes, and what it says without a GPU."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import gpu_coding

TINY_BERT = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8, "vocab_size": 50}
TOY = SimpleNamespace(config=TINY_BERT, layer=1, windows=1, length=4, atoms=6, training_vectors=60)


def test_the_parts_run_at_toy_size(monkeypatch, capsys):
    monkeypatch.setattr(gpu_coding, "WARM_UP", 0)
    monkeypatch.setattr(gpu_coding, "ROUNDS", 1)
    rng = np.random.default_rng(0)
    hidden, atoms = rng.normal(size=(3, 8)), rng.normal(size=(9, 8))
    hidden, atoms = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (hidden, atoms))
    device = torch.device("cpu")
    result = gpu_coding.coder_against_teacher(device, TOY)
    result |= gpu_coding.coder_against_fista(device, hidden, atoms.astype(np.float32), 0.3)
    gpu_coding.show(result)
    assert result["gpu_coder_vs_teacher"]["median"] > 0 and result["gpu_vs_fista100"]["median"] > 0
    assert result["kkt_max"] <= 1.01 * gpu_coding.TOL and result["certificate_error"] < 1e-5
    assert "FISTA 100 / ours" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="this benchmark needs a CUDA GPU; torch finds none here"):
        gpu_coding.main()
