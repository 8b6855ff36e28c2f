"""Fixtures that several parts of the suite share. No network, one text, one tiny teacher."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tiny_teacher import standard_text, tiny_teacher


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory):
    """A cache of the session's own: what is measured or fetched here neither comes from the user's nor goes there."""
    os.environ["MLSM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def english_text(tmp_path_factory):
    """A text file of docstrings of standard modules, a document each."""
    return standard_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="session")
def teacher_directory(tmp_path_factory, english_text):
    """A random 3 x 32 BERT with a WordPiece tokenizer of 600 entries."""
    return tiny_teacher(tmp_path_factory.mktemp("teacher"), english_text)


@pytest.fixture(scope="module")
def one_thread():
    """torch on one thread, in which sums always have one order, and tiny models are fastest."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
