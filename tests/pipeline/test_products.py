"""Which library computes the teacher's products: chosen once, handed to workers, told in the records."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel

import pipeline.teacher.cut
from mlsm.common.matrix_products import TORCH, USUAL
from mlsm.common.onednn import available
from pipeline.commands import encode_logits, encode_lsp
from pipeline.config import EncodeConfig, EncodeIdsConfig, EncodeLogitsConfig
from pipeline.teacher import Teacher
from shards.reader import Store

pytestmark = pytest.mark.skipif(not available(), reason="this torch lacks the operator, so there is nothing to choose")


@pytest.fixture
def measured(monkeypatch):
    """What was asked to be measured; the answer is torch's own library for everything."""
    asked: list = []

    def measure(shapes, operations):
        asked.append((sorted(shapes), operations))
        return dict(TORCH)

    monkeypatch.setattr(pipeline.teacher.cut, "measure_libraries", measure)
    return asked


@pytest.fixture
def settings(english_text, teacher_directory, tmp_path):
    return {
        "teacher": str(teacher_directory),
        "corpus": (str(english_text),),
        "max_length": 32,
        "max_tokens": 3000,
        "batch_tokens": 512,
        "device": "cpu",
        "output": tmp_path / "runs",
    }


def test_with_torchs_own_products_it_is_the_full_model_bit_for_bit(teacher_directory):
    ids = torch.randint(5, 600, (4, 16), generator=torch.Generator().manual_seed(0))
    teacher = Teacher.load(teacher_directory, 2)
    assert teacher.libraries == USUAL
    usual = teacher(ids)
    teacher.choose_libraries("torch", 100, 10)
    assert teacher.libraries == TORCH
    full = AutoModel.from_pretrained(teacher_directory, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = full(ids, output_hidden_states=True).hidden_states[2]
    assert torch.equal(teacher(ids), expected)
    assert torch.allclose(usual, expected, atol=1e-5)
    teacher.choose_libraries("onednn", 100, 10)
    assert torch.equal(teacher(ids), usual)


def test_what_was_decided_elsewhere_is_not_measured_again(teacher_directory, measured):
    teacher = Teacher.load(teacher_directory, 2)
    teacher.choose_libraries("auto", 100, 10, {"forward 4096 32 32": "torch"})
    assert teacher.libraries == {"forward 4096 32 32": "torch"} and not measured
    teacher.choose_libraries("auto", 100, 10)
    assert teacher.libraries == TORCH
    assert measured == [([(100, 32, 32), (100, 32, 64), (100, 64, 32)], ["forward"])]


@pytest.mark.parametrize(("windows", "length"), [(20, 10), (9, 25), (3, 60), (2, 100)])
def test_the_products_measured_are_those_of_a_full_pass(teacher_directory, measured, monkeypatch, windows, length):
    """Also if windows do not divide the tokens of a pass, or one window is longer."""
    monkeypatch.setattr(pipeline.teacher.cut, "CACHED_NUMBERS", 64 * 32)  # the teacher is 32 wide: 64 tokens
    teacher = Teacher.load(teacher_directory, 2)
    teacher.choose_libraries("auto", 1000, length)
    computed = []
    monkeypatch.setattr(pipeline.teacher.cut, "find_way", lambda _, shape, __: computed.append(shape) or F.linear)
    teacher(torch.randint(5, 600, (windows, length)))
    ((shapes, _),) = measured
    assert set(computed[: 6 * 2]) == set(shapes)  # six products in each of two layers


def test_low_precision_has_nothing_to_choose(teacher_directory, measured):
    teacher = Teacher.load(teacher_directory, 2, dtype="bfloat16")
    teacher.choose_libraries("auto", 100, 10)
    assert teacher.libraries == USUAL and not measured


def test_records_say_what_was_not_onednns(settings, measured):
    config = EncodeConfig(**settings, layer=(2,), k=(24,), lam=0.1, dictionary_tokens=1000)
    (report,) = encode_lsp(config)
    assert products_in(report) == [dict(TORCH)] and measured
    (usual,) = encode_lsp(replace(config, products="onednn", output=config.output / "other"))
    assert products_in(usual) == [None]
    assert len(measured) == 1
    (again,) = encode_lsp(replace(config, products="onednn"))  # how, not what: the same store
    assert again["store"] == report["store"]


def test_so_do_those_of_logits(settings, measured):
    (report,) = encode_logits(EncodeLogitsConfig(**settings | {"teacher": "bundled", "max_tokens": 600}))
    assert products_in(report) == [dict(TORCH)]


def test_a_command_without_a_teacher_has_no_such_setting():
    assert not hasattr(EncodeIdsConfig, "products")


def products_in(report) -> list:
    found = [record.environment.get("products") for record in Store.open(report["store"]).records("train")]
    return [one for number, one in enumerate(found) if one not in found[:number]]
