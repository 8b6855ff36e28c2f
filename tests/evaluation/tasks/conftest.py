import pytest
from tiny_families import tiny_model
from tiny_store import write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random BERT of 64 tokens, whose words are w0, w1, ..."""
    directory = tmp_path_factory.mktemp("models") / "tiny-bert"
    tiny_model("bert", "masked-lm", num_hidden_layers=2).save_pretrained(directory)
    write_tokenizer(directory, 59)
    return directory
