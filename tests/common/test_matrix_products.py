"""Which library computes a product: every way gives the product, and what was measured is kept."""

import json

import pytest
import torch
from preloaded import run_python

import mlsm.common.matrix_products
from mlsm.common.matrix_products import TORCH, USUAL, WAYS, find_way, measure_libraries
from mlsm.common.onednn import available

pytestmark = pytest.mark.skipif(not available(), reason="this torch lacks the operator, so there is nothing to choose")
WIDE = (2000, 256, 512)  # a product worth measuring


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "products.json"


@pytest.fixture
def timed(monkeypatch):
    """The products that were timed; torch's weight gradients are the fastest."""
    calls = []

    def fastest(operation, *shape):
        calls.append((operation, *shape))
        return "torch" if operation == "weight_gradient" else "onednn"

    monkeypatch.setattr(mlsm.common.matrix_products, "_fastest", fastest)
    return calls


def factors(operation, N, d, K):
    generator = torch.Generator().manual_seed(1)
    rows, weight, gradient = (torch.randn(*shape, generator=generator) for shape in ((N, d), (K, d), (N, K)))
    bias = torch.randn(K, generator=generator)
    return {
        "forward": ((rows, weight, bias), rows.double() @ weight.double().t() + bias.double()),
        "input_gradient": ((gradient, weight), gradient.double() @ weight.double()),
        "weight_gradient": ((gradient, rows), gradient.double().t() @ rows.double()),
    }[operation]


@pytest.mark.parametrize("shape", [(1, 3, 5), (70, 48, 80), (300, 129, 64)], ids=str)
@pytest.mark.parametrize(("operation", "way"), [(operation, way) for operation, ways in WAYS.items() for way in ways])
def test_every_way_gives_the_product(operation, way, shape):
    arguments, expected = factors(operation, *shape)
    assert torch.allclose(WAYS[operation][way](*arguments).double(), expected, atol=1e-4, rtol=1e-4)


def test_the_gradient_of_a_part_of_the_outputs_takes_the_kernel_of_a_whole_one():
    """Its rows lie apart, for which oneDNN has no vectorised kernel on some processors; its sums then differ, too."""
    gradient_NK, rows_Nd = torch.randn(96, 96 + 32), torch.randn(96, 64)
    part = gradient_NK[:, :96]
    compute = WAYS["weight_gradient"]["onednn_transposed"]
    assert torch.equal(compute(part, rows_Nd), compute(part.contiguous(), rows_Nd))


def test_what_is_not_named_is_onednns():
    libraries = {"weight_gradient 256 256 512": "torch", "forward 256 256 512": "a way of a later version"}
    assert find_way("weight_gradient", (200, 256, 512), libraries) is WAYS["weight_gradient"]["torch"]
    assert find_way("weight_gradient", (300, 256, 512), libraries) is WAYS["weight_gradient"]["onednn"]
    assert find_way("forward", (200, 256, 512), libraries) is WAYS["forward"]["onednn"]
    assert find_way("forward", (200, 256, 512), USUAL) is WAYS["forward"]["onednn"]
    assert all(find_way(operation, (9, 9, 9), TORCH) is ways["torch"] for operation, ways in WAYS.items())


def test_a_real_measurement_names_ways():
    found = measure_libraries([WIDE])
    assert all(way in WAYS[name.split()[0]] and way != "onednn" for name, way in found.items())


def test_what_was_measured_is_looked_up_next_time(timed, cache):
    assert measure_libraries([WIDE]) == {"weight_gradient 4096 256 512": "torch"}
    assert sorted(timed) == sorted((operation, 4096, 256, 512) for operation in WAYS)
    timed.clear()
    assert measure_libraries([WIDE, (3000, 256, 512)]) == {"weight_gradient 4096 256 512": "torch"}
    assert not timed
    assert measure_libraries([(2000, 256, 1024)]) == {"weight_gradient 4096 256 1024": "torch"}
    assert {shape[3] for shape in timed} == {1024}
    assert len(next(iter(json.loads(cache.read_text()).values()))) == 6


@pytest.mark.parametrize(
    ("setting", "precision"),
    [
        ("torch.set_float32_matmul_precision('medium')", "medium"),
        ("torch.backends.fp32_precision = 'bf16'", "medium"),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", "highest"),
        ("torch.backends.mkldnn.matmul.fp32_precision = 'ieee'", "highest"),
    ],
)
def test_callers_may_let_torch_round_in_any_of_its_ways(setting, precision):
    """In a process of its own: torch refuses to be asked again once a caller has used both of its interfaces."""
    code = f"import torch; {setting}; from mlsm.common.matrix_products import _machine; print(_machine())"
    run = run_python(["-c", code])
    assert run.stdout.strip().endswith(f"precision {precision}"), run.stdout + run.stderr


def test_the_number_of_threads_changes_nothing_and_stays(monkeypatch, one_thread):
    used = []
    monkeypatch.setattr(
        mlsm.common.matrix_products, "_fastest", lambda *_: used.append(torch.get_num_threads()) or "onednn"
    )
    torch.set_num_threads(2)
    measure_libraries([WIDE])
    assert used == [1, 1, 1] and torch.get_num_threads() == 2
    torch.set_num_threads(1)
    measure_libraries([WIDE])
    assert len(used) == 3


def test_products_that_take_no_time_are_not_measured(timed):
    assert measure_libraries([(2000, 32, 64), (1, 9, 9)]) == {} and not timed


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b'{"machine": 7}', b'{"machine": {"forward 1 2 3": ["x"]}}', b"[" * 100_000, b"\xff"],
    ids=["empty", "list", "cut", "number", "ways", "deep", "bytes"],
)
def test_a_damaged_cache_is_measured_again(timed, cache, content):
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert measure_libraries([WIDE]) == {"weight_gradient 4096 256 512": "torch"}
    assert len(timed) == 3


def test_an_unknown_way_in_the_cache_is_measured_again(timed, cache):
    measure_libraries([WIDE])
    cache.write_text(cache.read_text().replace('"torch"', '"a way of another version"'))
    timed.clear()
    assert measure_libraries([WIDE]) == {"weight_gradient 4096 256 512": "torch"}
    assert [operation for operation, *_ in timed] == ["weight_gradient"]


def test_a_cache_that_cannot_be_written_costs_only_time(timed, cache, monkeypatch):
    cache.parent.write_text("a file in its place")
    assert measure_libraries([WIDE]) == {"weight_gradient 4096 256 512": "torch"}
    timed.clear()
    measure_libraries([WIDE])
    assert len(timed) == 3


def test_without_the_operator_everything_is_torchs(timed, monkeypatch):
    monkeypatch.setattr(mlsm.common.matrix_products, "available", lambda: False)
    assert measure_libraries([WIDE]) == {} and not timed
    assert find_way("forward", WIDE, USUAL) is WAYS["forward"]["torch"]


def test_where_nobody_has_a_home_it_is_measured_again(timed, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(mlsm.common.machine, "cache_directory", homeless)
    measure_libraries([WIDE])
    measure_libraries([WIDE])
    assert len(timed) == 6


def test_large_vocabularies_are_timed_at_a_smaller_size(monkeypatch):
    sizes = []
    ways = {"onednn": lambda rows, weight, bias: sizes.append((*rows.shape, len(weight))) or torch.zeros(1)}
    monkeypatch.setitem(WAYS, "forward", ways)
    mlsm.common.matrix_products._fastest("forward", 4096, 1024, 250_000)
    assert set(sizes) == {(256, 1024, 2**15)}
