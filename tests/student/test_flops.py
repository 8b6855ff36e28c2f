"""Operations counted by running nothing, against formulas, and the figures that come of them."""

from pathlib import Path

import pytest
import torch
from tiny_store import log_of
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoModel, FlaubertConfig, IBertConfig, LongformerConfig, ModernBertConfig, XLMConfig

import student.encoders.flops
from student.config import StudentConfig
from student.encoders.build import build_encoder, encoder_config
from student.encoders.deberta import adapt_deberta
from student.encoders.flops import count_operations, forward_flops, named_peak, peak_flops, step_flops
from student.encoders.model import Student
from student.memory import peak_memory
from student.meter import Meter, share_of_baseline
from student.train import train

W, L = 8, 16
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def encoder(name, store):
    return build_encoder(encoder_config(StudentConfig(encoder=str(name)), store), seed=0)


def bert_formula(layers, width, windows, length):
    """Four products with d x d, two with d x 4d, and per head scores and averages, over all positions."""
    a_position = 2 * 12 * width**2 + 2 * 2 * length * width
    return layers * windows * length * a_position


def deberta_formula(layers, width, windows, length):
    """BERT's, and scores against 2 L relative positions in two directions; their two projections once a layer."""
    relative = windows * length * 2 * 2 * (2 * length) * width + 2 * 2 * (2 * length) * width**2
    return bert_formula(layers, width, windows, length) + layers * relative


def test_the_papers_student_costs_what_the_paper_says(ids_store):
    """3.02e12 for 128 x 128 tokens, without head; a bare DebertaConfig has less."""
    with torch.device("meta"):
        deberta = AutoModel.from_config(encoder_config(StudentConfig(encoder="deberta-base"), ids_store))
    adapt_deberta(deberta)
    flops = count_operations(deberta, input_ids=(128, 128))
    assert flops == deberta_formula(12, 768, 128, 128)
    assert flops == pytest.approx(3.02e12, rel=2e-3)


@pytest.mark.parametrize("windows", [1, W])
def test_bert_is_counted_with_its_attention(ids_store, windows):
    bert = encoder("bert-3x64", ids_store)
    assert bert.config._attn_implementation == "sdpa"
    assert count_operations(bert, input_ids=(windows, L)) == bert_formula(3, 64, windows, L)


def test_local_attention_counts_as_it_is_computed(ids_store, tmp_path):
    """With a mask, and so over all pairs; the fused kernel of the CPU would have been counted as nothing."""
    ModernBertConfig(**SIZE).save_pretrained(tmp_path)
    a_position = 2 * (4 * 32**2 + 3 * 32 * 48) + 2 * 2 * L * 32
    found = count_operations(encoder(tmp_path, ids_store), input_ids=(W, L))
    assert found == pytest.approx(2 * W * L * a_position, rel=2e-4)  # 5.17: the rotation too


LOOKING = {  # families that look at values in their forward pass, which tensors without content refuse
    "longformer": LongformerConfig(**SIZE, attention_window=8, max_position_embeddings=40),
    "xlm": XLMConfig(emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=40),
    "flaubert": FlaubertConfig(emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=40),
    "ibert": IBertConfig(**SIZE, max_position_embeddings=40),
}


@pytest.mark.parametrize("name", LOOKING)
def test_encoders_that_look_at_values_train_and_are_counted(name, ids_store, settings, tmp_path):
    LOOKING[name].save_pretrained(tmp_path / name)
    own = {"objective": "mlm", "encoder": str(tmp_path / name), "max_steps": 2, "dropout": 0.0}
    result = train(StudentConfig(store=ids_store.path, **settings | own))
    assert Path(result["export"]).is_dir()
    random = torch.get_rng_state()
    found = count_operations(encoder(tmp_path / name, ids_store), input_ids=(W, L))
    assert torch.equal(torch.get_rng_state(), random)
    whole = bert_formula(2, 32, W, L)  # of which the feed-forward part is narrower here, and Longformer's window is 16
    assert whole / 2 < found < 2 * whole
    student = Student(encoder(tmp_path / name, ids_store), 24, tied=False, seed=0)
    assert forward_flops(student, W, L, W) == found + 2 * W * 32 * (32 + 24)  # with head and output matrix


def test_an_encoder_that_is_computed_counts_as_one_that_is_not(ids_store, monkeypatch):
    bert = encoder("bert-3x64", ids_store)
    whole = Student(encoder("bert-3x64", ids_store), 24, tied=False, seed=0)
    counted = forward_flops(whole, W, L, 3 * W)

    def refuse(**how):
        raise DataDependentOutputException(None)

    monkeypatch.setattr(student.encoders.flops, "FakeTensorMode", refuse)
    assert count_operations(bert, input_ids=(W, L)) == bert_formula(3, 64, W, L)
    assert forward_flops(whole, W, L, 3 * W) == counted


def test_head_and_output_matrix_count_where_something_is_masked(ids_store):
    student = Student(encoder("bert-3x64", ids_store), 24, tied=False, seed=0)
    weights = [weight.clone() for weight in student.parameters()]
    few, more = (forward_flops(student, W, L, masked) for masked in (W, 3 * W))
    last_layer = 2 * 64 * 64 + 2 * 64 * 4 * 64 + 2 * L * 64  # query, output; feed-forward; scores, values
    assert more - few == 2 * W * 2 * (last_layer + 64 * 64 + 64 * 24)
    assert forward_flops(student, W, L, W * L) - few == (L - 1) * W * 2 * (last_layer + 64 * 64 + 64 * 24)
    assert all(torch.equal(old, new) for old, new in zip(weights, student.parameters(), strict=True))
    assert {weight.device.type for weight in student.parameters()} == {"cpu"}


def test_a_step_is_three_forward_passes_over_all_windows(ids_store):
    student = Student(encoder("bert-3x64", ids_store), 24, tied=False, seed=0)
    counts = [
        step_flops(student, StudentConfig(batch_windows=12, micro_batch=micro, mask_rate=0.5), L)
        for micro in (12, 5, 4, 100)
    ]
    assert counts == [3 * forward_flops(student, 12, L, 12 * 7)] * 4


def test_peaks_are_known_or_absent():
    assert named_peak("NVIDIA H100 80GB HBM3", torch.bfloat16) == 989.5e12
    assert named_peak("NVIDIA H100 PCIe", torch.bfloat16) == 756.5e12
    assert named_peak("NVIDIA H200", torch.bfloat16) == 989.5e12
    assert named_peak("NVIDIA A100-SXM4-80GB", None) == 19.5e12
    assert named_peak("Tesla T4", None) == 8.1e12
    unknown = ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA GH200 480GB", "T400"]
    assert [named_peak(name, torch.bfloat16) for name in unknown] == [None] * 4
    assert named_peak("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert peak_flops(torch.device("cpu"), None) is None


def test_figures_of_a_step():
    given = {"steps": 3, "tokens": 100, "seconds": 2.0, "waited": 0.5}
    figures = Meter(1000, 4000.0, torch.device("cpu")).figures(**given)
    assert figures.pop("peak_memory_bytes") > 10_000_000
    assert figures == {
        "tokens_per_second": 50,
        "data_wait_seconds": 0.5,
        "data_wait_share": 0.25,
        "flops": 3000,
        "flops_per_second": 500,
        "mfu": 0.125,
    }
    assert "mfu" not in Meter(1000, None, torch.device("cpu")).figures(**given)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel's own figure is Linux's")
def test_peak_memory_is_in_bytes():
    before = peak_memory(torch.device("cpu"))
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    kernel = 1024 * int(line.split()[1])
    assert before <= 1.01 * kernel and kernel <= 1.01 * peak_memory(torch.device("cpu"))


def test_share_of_the_baseline():
    assert share_of_baseline({"loss": 3.0}, {"loss": 4.0}) == 0.75
    assert share_of_baseline({}, {"loss": 4.0}) is None


def test_the_log_has_the_figures_and_they_survive_a_resume(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"eval_every": 4})

    def stop(*args, step, **figures):
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(config, stop)
    result, log = train(config), log_of(config.run_dir)
    assert [line["flops"] / log[1]["flops"] for line in log.values()] == list(range(1, 9))
    assert result["flops"] == log[8]["flops"]
    for line in log.values():
        assert 0 <= line["data_wait_share"] < 1 and line["flops_per_second"] > 0
        assert line["peak_memory_bytes"] > 10**7 and "mfu" not in line
    assert log[4]["held_out_vs_baseline"] == log[4]["held_out"]["loss"] / result["baseline_loss"]
