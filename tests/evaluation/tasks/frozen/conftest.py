import pytest

from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures


@pytest.fixture(scope="session")
def miniatures(tmp_path_factory):
    """All ten tasks in miniature, CoNLL-2003 with a test set."""
    directory = write_miniatures(tmp_path_factory.mktemp("miniatures"))
    conll = directory / "conll2003"
    (conll / "test.txt").write_text((conll / "dev.txt").read_text().replace("Anna", "Hanna"))
    return directory


@pytest.fixture(autouse=True)
def on_one_thread(one_thread):
    """Sums, and so bits, depend on the number of threads."""
