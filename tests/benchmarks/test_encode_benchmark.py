"""The encoding benchmark's measurement runs on the tiny teacher: it stays in step with the stages it drives."""

import pytest
from tiny_teacher import random_dictionary

from pipeline.config import EncodeConfig
from pipeline.corpus import Window
from pipeline.encode import Coder
from pipeline.targets.lsp import Lsp
from pipeline.teacher import Teacher, load_tokenizer, special_ids


def test_a_measurement_of_a_few_windows(teacher_directory, tmp_path, monkeypatch):
    from benchmarks import encode

    teacher, special = Teacher.load(teacher_directory, 2), special_ids(load_tokenizer(teacher_directory))
    monkeypatch.setattr(encode, "MAX_LENGTH", 32)
    config = EncodeConfig(layer=2, lam=0.1, top_n=8, max_length=32, batch_tokens=256)
    coder = Coder(teacher, [Lsp(config, teacher, 2, random_dictionary())], config, special)
    ids = [special["cls"], *range(5, 35), special["sep"]]
    row = encode.measure([Window(ids, [0], [0])] * 20, coder, tmp_path / "store")
    assert row["encode"] > 0 and row["teacher"] > 0 and row["solver"] > 0 and row["nnz"] == pytest.approx(8, abs=8)
