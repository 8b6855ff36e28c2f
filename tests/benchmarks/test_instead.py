"""The static table is measured as an encoder that has seen no context, and the cut teacher is the teacher."""

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from benchmarks.instead import LAYERS, StaticTable, cut_teacher, reader
from pipeline.teacher import Teacher, load_tokenizer


class Static:
    """A stand-in for Model2Vec's StaticModel: a row for each piece but the special ones, texts as means of unit length
    unless told otherwise (the real one is compared in `test_the_real_package_agrees`)."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        special = set(tokenizer.all_special_tokens) - {tokenizer.unk_token}
        self.tokens = [token for token in tokenizer.get_vocab() if token not in special]
        self.embedding = np.random.default_rng(0).normal(size=(len(self.tokens), 4)).astype(np.float32)
        self.row = {token: row for row, token in enumerate(self.tokens)}

    def encode(self, texts, normalize=True, use_multiprocessing=False):
        found = []
        for text in texts:
            tokens = [token for token in self.tokenizer.tokenize(text) if token != self.tokenizer.unk_token]
            mean = self.embedding[[self.row[token] for token in tokens]].mean(0) if tokens else np.zeros(4, np.float32)
            found.append(mean / max(np.linalg.norm(mean), 1e-32) if normalize else mean)
        return np.array(found)


@pytest.fixture(scope="module")
def table(teacher_directory):
    return StaticTable(Static(load_tokenizer(teacher_directory)), teacher_directory)


def ignore(_):
    pass


def test_a_word_is_the_mean_of_its_pieces_between_its_neighbours(table):
    words = [["return", "objects", "list"], ["file"]]
    found = table.words(words, ignore)
    alone = {word: table.static.encode([word], normalize=False)[0] for sentence in words for word in sentence}
    nothing = np.zeros(4, np.float32)
    wanted = [
        [alone["return"], nothing, alone["objects"]],
        [alone["objects"], alone["return"], alone["list"]],
        [alone["list"], alone["objects"], nothing],
        [alone["file"], nothing, nothing],
    ]
    assert np.allclose(found.states_TD, [np.concatenate(row) for row in wanted])
    assert [read.tolist() for read in found.read_N] == [[True] * 3, [True]]


def test_a_state_is_the_row_of_its_token_whatever_stands_around(table):
    ids_WL = torch.tensor(table.tokenizer(["the list", "list the"])["input_ids"])
    (states,) = table.teacher(ids_WL, layers=[1])
    assert states.shape == (*ids_WL.shape, 4)
    assert torch.equal(states[0, 1], states[1, 2]) and torch.equal(states[0, 2], states[1, 1])
    assert not states[:, 0].any() and not states[:, -1].any()  # [CLS] and [SEP] have no row
    assert torch.equal(table.teacher(ids_WL, tokens_N=torch.tensor([1, 6])), states.flatten(0, 1)[[1, 6]])
    mean, text = states[0].mean(0).numpy(), table.means(["the list"], ignore)[0]
    assert mean @ text == pytest.approx(np.linalg.norm(mean) * np.linalg.norm(text))


def test_the_real_package_agrees(teacher_directory):
    """Its own vectors of texts point where the means of the rows do: its pieces are the tokenizer's."""
    distill = pytest.importorskip("model2vec.distill", reason="only this benchmark needs model2vec")
    model, tokenizer = AutoModel.from_pretrained(teacher_directory), AutoTokenizer.from_pretrained(teacher_directory)
    static = distill.distill_from_model(model, tokenizer, device="cpu", pca_dims=8, quantize_to="float32")
    table = StaticTable(static, teacher_directory)
    for text in ("The object returns a list.", "file, or the 3 names of it"):
        mean = table.teacher(torch.tensor([table.tokenizer(text)["input_ids"]]))[0].mean(0).numpy()
        own = table.means([text], ignore)[0]
        assert mean @ own == pytest.approx(np.linalg.norm(mean) * np.linalg.norm(own), rel=1e-5)


def test_the_cut_teacher_is_its_first_layers(teacher_directory, tmp_path):
    cut_teacher(teacher_directory, tmp_path)
    ids_WL = torch.tensor([load_tokenizer(tmp_path)("The object returns a list.")["input_ids"]])
    with torch.no_grad():
        found = AutoModel.from_pretrained(tmp_path)(input_ids=ids_WL).last_hidden_state
    assert torch.allclose(found, Teacher.load(teacher_directory, LAYERS)(ids_WL), atol=1e-6)
    texts = ["a longer text with words", "short", "the object returns"]
    one_by_one = torch.cat([reader(tmp_path)([text]) for text in texts])
    assert torch.allclose(reader(tmp_path)(texts), one_by_one, atol=1e-5)
