"""What a student has cost, from its run's directory: its log, its store, its teacher."""

import json

import pytest

from evaluation.flops.encoders import Encoder, FlopsError
from evaluation.flops.lineage import spent
from evaluation.flops.solver import solver_flops
from pipeline.config import EncodeConfig, EncodeIdsConfig, EncodeLogitsConfig
from pipeline.encode import encode_ids, encode_logits, encode_lsp
from shards.reader import Store
from student.config import StudentConfig
from student.trainer import train

COMMANDS = {
    "mlsm": (encode_lsp, EncodeConfig, {"layer": (2,), "k": (40,), "lam": 0.1, "dictionary_tokens": 2_000}),
    "kd": (encode_logits, EncodeLogitsConfig, {}),
    "mlm": (encode_ids, EncodeIdsConfig, {}),
}


@pytest.fixture(params=COMMANDS)
def trained(request, tmp_path, english_text, teacher_directory):
    """A run of four steps of five windows, and its store."""
    encode, settings, more = COMMANDS[request.param]
    source = "tokenizer" if request.param == "mlm" else "teacher"
    more = more | {source: str(teacher_directory)} | ({} if request.param == "mlm" else {"device": "cpu"})
    (report,) = encode(settings(corpus=(str(english_text),), max_length=32, max_tokens=8_000, output=tmp_path, **more))
    config = StudentConfig(
        store=report["store"], objective=request.param, encoder="bert-1x32", max_steps=4, batch_windows=5,
        micro_batch=5, eval_every=0, save_every=0, device="cpu", output=tmp_path / "run",
    )  # fmt: skip
    return train(config), Store.open(report["store"]), Encoder.find(str(teacher_directory))


def test_student_encoding_and_what_online_would_cost(trained):
    result, store, teacher = trained
    found, half = spent(result["run"]), spent(result["run"], step=2)
    assert found["student"] == 2 * half["student"] == result["flops"] and found["step"] == 4
    windows, tokens = store.report()["windows"], store.report()["tokens"]
    of_a_window, coding = {
        "lsp": (teacher.cut(2).measured(1, 32), solver_flops(tokens, 40, 32)),
        "logits": (teacher.measured(1, 32) + 32 * 2 * 32 * (32 + store.k), 0),
        "ids": (0, 0),
    }[store.kind]
    assert found["encoding"] == half["encoding"] == of_a_window * windows + coding
    assert found["teacher_online"] == of_a_window * 4 * 5 == 2 * half["teacher_online"]
    assert found["total"] == found["student"] + found["encoding"]


def test_what_is_no_run_says_so(tmp_path):
    with pytest.raises(FlopsError, match="no run of train-student"):
        spent(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({}))
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(FlopsError, match="no run of train-student"):
        spent(tmp_path)
