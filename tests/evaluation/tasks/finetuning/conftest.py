import pytest
from tiny_teacher import tiny_teacher
from tokenizers import normalizers
from transformers import AutoTokenizer

from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures


@pytest.fixture(scope="session")
def miniatures(tmp_path_factory):
    """All ten tasks in miniature, in their upstream formats."""
    return write_miniatures(tmp_path_factory.mktemp("miniatures"))


@pytest.fixture(scope="session")
def other_directory(tmp_path_factory, english_text):
    """A BERT as wide as the tiny teacher, with two layers, other weights and a tokenizer of lower case."""
    directory = tiny_teacher(tmp_path_factory.mktemp("other"), english_text, layers=2, seed=1)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.save_pretrained(directory)
    return directory.rename(directory.with_name("other"))


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    """Sums, and so bits, depend on the number of threads."""
