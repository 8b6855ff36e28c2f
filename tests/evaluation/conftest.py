"""A store with a dictionary: English that a tiny teacher coded."""

import pytest

from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from shards.reader import Store


@pytest.fixture(scope="session")
def coded_store(tmp_path_factory, english_text, teacher_directory):
    """A store of 48 LSPs of layer 2 of the tiny teacher, in windows of 32 tokens of English."""
    settings = EncodeConfig(
        teacher=str(teacher_directory),
        layer=(2,),
        corpus=(str(english_text),),
        k=48,
        lam=0.1,
        max_length=32,
        max_tokens=10_000,
        unit_tokens=5_000,
        dictionary_tokens=3_000,
        batch_tokens=2048,
        device="cpu",
        output=tmp_path_factory.mktemp("coded") / "runs",
    )
    return Store.open(encode_lsp(settings)[0]["store"])
