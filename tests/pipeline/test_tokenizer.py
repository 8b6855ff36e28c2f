"""A tokenizer is trained on the documents that a plan of the same settings would take."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.errors import CorpusError
from common.progress import silent
from pipeline.config import TokenizerConfig
from pipeline.tokenizer import run


def vocabulary(path, **settings):
    (directory,) = run(TokenizerConfig(corpus=(str(path),), output=path.parent, vocab_size=600, **settings), silent)
    return Tokenizer.from_file(str(Path(directory) / "tokenizer.json")).get_vocab()


def test_documents_that_are_left_out_teach_no_words(tmp_path):
    path = tmp_path / "a.txt"
    plain = [f"plain words of document {n} are here" for n in range(200)]
    odd = ["repeated text about zebras"] * 300 + ["quagga"] * 300
    path.write_bytes("\n\n".join(plain + odd).encode() + b"\n\ninvalid \xff yaks yaks yaks yaks" * 3)
    with pytest.raises(CorpusError, match="not UTF-8"):
        vocabulary(path)
    assert {"plain", "yaks"} <= vocabulary(path, invalid_utf8="replace").keys()
    skipped = vocabulary(path, invalid_utf8="skip", min_characters=10)
    assert "plain" in skipped and not {"yaks", "zebras", "quagga"} & skipped.keys()
    assert "zebras" in vocabulary(path, invalid_utf8="skip", keep_duplicates=True)
