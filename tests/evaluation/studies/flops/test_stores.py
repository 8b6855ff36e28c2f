"""The cost of a store, from its teacher's measured forward passes and the solver's operations."""

import pytest

from mlsm.evaluation.studies.flops.encoders import EncoderShape
from mlsm.evaluation.studies.flops.solver import solver_flops
from mlsm.evaluation.studies.flops.stores import store_flops
from pipeline.commands import encode_ids, encode_logits, encode_lsp
from pipeline.config import EncodeConfig, EncodeIdsConfig, EncodeLogitsConfig
from shards.reader import Store

COMMANDS = {
    "lsp": (encode_lsp, EncodeConfig, {"layer": (2,), "k": (40,), "lam": 0.1, "dictionary_tokens": 2_000}),
    "logits": (encode_logits, EncodeLogitsConfig, {}),
    "masked": (encode_logits, EncodeLogitsConfig, {"masked": True}),
    "ids": (encode_ids, EncodeIdsConfig, {}),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_teacher_and_solver_or_head(kind, tmp_path, english_text, teacher_directory):
    encode, settings, more = COMMANDS[kind]
    source = {"tokenizer": str(teacher_directory)} if kind == "ids" else {"teacher": str(teacher_directory)}
    common = {"corpus": (str(english_text),), "max_length": 32, "max_tokens": 8_000, "output": tmp_path}
    (report,) = encode(settings(**common, **source, **more))
    store, teacher = Store.open(report["store"]), EncoderShape.find(str(teacher_directory))
    report = store.report()
    windows = report["windows"]
    counts_V = sum(store.split(split).token_counts() for split in {unit.split for unit in store.plan.units})
    counts_V[store.special_ids["all"]] = 0
    coded = int(counts_V.sum())  # specials are not
    expected = {
        "lsp": teacher.cut(2).measure(1, 32) * windows + solver_flops(coded, 40, 32),
        "logits": (teacher.measure(1, 32) + 32 * 2 * 32 * (32 + store.k)) * windows,
        "masked": (7 * teacher.measure(1, 32) + 32 * 2 * 32 * (32 + store.k)) * windows,
        "ids": 0,
    }
    assert store_flops(store) == expected[kind]
