"""supersense: WordNet's lexicographer files. The oracles are plain loops over the lines of a sense index."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from data import data_path
from masked_half import mask_half
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModel, PreTrainedTokenizerFast

from mlsm.commands.train_student import show as training
from mlsm.common.errors import RunError, WsdDataError
from mlsm.common.wordnet import LEXNAMES, WordNet
from student.config import StudentConfig
from student.objectives import OBJECTIVES
from student.objectives.supersense import Supersense, supersense_table
from student.runs.identity import find_description
from student.train import train

INDEX = """\
dog%1:05:00:: 02084071 1 42
dog%1:18:01:: 10114209 2 0
dog%2:38:00:: 02001858 1 2
big%3:00:01:: 01382086 1 263
big%5:00:00:important:00 01275562 2 20
ing%1:07:00:: 00000001 1 0
cls%1:07:00:: 00000002 1 0
ice_cream%1:13:00:: 07614500 1 2
"""
DOG = {"noun.animal": 1 / 3, "noun.person": 1 / 3, "verb.motion": 1 / 3}


def shares_by_hand(text, lines):
    """Supersense -> its share, from the lines of a sense index."""
    keys = [line.split("%")[1] for line in lines if line.split("%")[0] == text.strip().lower()]
    found = Counter(LEXNAMES[int(key.split(":")[1])] for key in keys)
    return {name: count / found.total() for name, count in found.items()}


def shares_of(row_S):
    return {LEXNAMES[column]: pytest.approx(float(row_S[column])) for column in row_S.nonzero()[0]}


class FakeStore:
    """A store, as far as the table asks it, whose vocabulary is [CLS], [UNK], then the given tokens."""

    path = "store"

    special = {"cls_token": "[CLS]", "unk_token": "[UNK]"}

    def __init__(self, directory, model, tokens, splits, decodes):
        self.vocabulary = {token: id for id, token in enumerate([*self.special.values(), *tokens])}
        tokenizer = Tokenizer(model(self.vocabulary))
        tokenizer.pre_tokenizer, tokenizer.decoder = splits, decodes
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **self.special).save_pretrained(directory)
        self.tokenizer_dir, self.vocab_size = directory, len(self.vocabulary) + 3  # a few ids without a token
        self.special_ids = {"all": [0, 1]}

    def load_tokenizer(self):
        return PreTrainedTokenizerFast.from_pretrained(self.tokenizer_dir)


def wordpiece(directory, tokens):
    def model(vocabulary):
        return models.WordPiece(vocabulary, unk_token="[UNK]")

    return FakeStore(directory, model, tokens, pre_tokenizers.Whitespace(), decoders.WordPiece())


def byte_level(directory, tokens):
    def model(vocabulary):
        return models.BPE(vocabulary, [])

    return FakeStore(directory, model, tokens, pre_tokenizers.ByteLevel(), decoders.ByteLevel())


@pytest.fixture
def index(tmp_path):
    (tmp_path / "wordnet").mkdir()
    (tmp_path / "wordnet" / "index.sense").write_text(INDEX)
    return tmp_path / "wordnet" / "index.sense"


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (wordpiece, {"dog": DOG, "Dog": DOG, "##dog": {}, "ing": {"noun.attribute": 1.0}, "##ing": {}, "dogs": {}}),
        (byte_level, {"Ġdog": DOG, "ĠDOG": DOG, "dog": {}, "Ġbig": {"adj.all": 1.0}, "ing": {}, "Ġdogs": {}}),
    ],
)
def test_rows_are_the_synsets_of_tokens_that_begin_a_word(tmp_path, index, kind, rows):
    store = kind(tmp_path / "tokenizer", rows)
    table_VS = supersense_table(index, store)
    assert table_VS.shape == (store.vocab_size, 45) and table_VS.dtype == np.float32
    assert {token: shares_of(table_VS[id]) for token, id in store.vocabulary.items()} == rows | {
        "[CLS]": {},
        "[UNK]": {},
    }
    assert not table_VS[len(store.vocabulary) :].any()
    assert np.array_equal(supersense_table(index.parent, store), table_VS), "the directory that holds the file will do"


def test_a_special_token_has_no_row_though_it_is_a_lemma(tmp_path, index):
    store = wordpiece(tmp_path / "tokenizer", ["dog", "cls"])
    store.special_ids["all"].append(store.vocabulary["cls"])
    assert not supersense_table(index, store)[store.vocabulary["cls"]].any()


def test_the_real_wordnet_line_by_line():
    path = data_path("wsd/wordnet3.0/index.sense")
    words, wordnet = ("dog", "run", "big", "in", "well", "the"), WordNet.load(path)
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.split("%")[0] in words]
    found = {word: Counter(wordnet.supersenses(word)) for word in words}
    for word, counts in found.items():
        shares = {name: count / counts.total() for name, count in counts.items()}
        assert shares == pytest.approx(shares_by_hand(word, lines))
    dog = {"noun.animal": 1, "noun.person": 3, "noun.food": 1, "noun.artifact": 2, "verb.motion": 1}
    assert found["dog"] == dog  # as the names of its synsets say: dog, frump, cad, frank, pawl, andiron, chase ...
    assert not found["the"] and found["in"]


def test_loss_and_gradient_are_those_of_the_dense_formula_over_tokens_with_a_row(ids_store, needed_by):
    objective = Supersense(ids_store, **needed_by("supersense"))
    micro = mask_half(ids_store, objective)
    targets, ids_M = micro.targets, micro.ids_M
    lines = objective.wordnet.read_text().splitlines()
    logits = (3 * torch.randn((len(ids_M), 45), generator=torch.Generator().manual_seed(0))).requires_grad_()
    log_q_MS = F.log_softmax(logits.double(), dim=1)
    expected, coded = torch.zeros((), dtype=torch.float64), 0
    for id, log_q_S in zip(ids_M.tolist(), log_q_MS, strict=True):
        shares = shares_by_hand(ids_store.load_tokenizer().convert_ids_to_tokens(id), lines)
        coded += bool(shares)
        for name, share in shares.items():
            expected = expected + share * (math.log(share) - log_q_S[LEXNAMES.index(name)])
    assert 0 < coded < len(ids_M) and targets.counts == (coded,)
    (loss,) = objective.loss_sums(logits, targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert torch.allclose(gradient, torch.autograd.grad(expected, logits)[0], atol=1e-5)
    assert not gradient[targets.coded_M == 0].any()
    assert objective.figures(objective.measure(logits.detach(), targets), targets.counts) == {
        "loss": pytest.approx(expected.item() / coded, rel=1e-5)
    }


def test_the_baseline_is_the_average_row_of_the_text(ids_store, needed_by):
    objective = Supersense(ids_store, **needed_by("supersense"))
    lines, windows = objective.wordnet.read_text().splitlines(), ids_store.split("train")
    tokenizer, sums, with_row, ordinary = ids_store.load_tokenizer(), Counter(), 0, 0
    read = windows.read(np.arange(len(windows)))
    for id in read.ids[read.documents >= 0].tolist():
        shares = shares_by_hand(tokenizer.convert_ids_to_tokens(id), lines)
        with_row, ordinary = with_row + bool(shares), ordinary + (id not in ids_store.special_ids["all"])
        for name, share in shares.items():
            sums[name] += share
    log_q = {name: math.log((sums[name] + 1 / 45) / (with_row + 1)) for name in LEXNAMES}
    micro = mask_half(ids_store, objective)
    targets, ids_M = micro.targets, micro.ids_M
    rows = [shares_by_hand(tokenizer.convert_ids_to_tokens(id), lines) for id in ids_M.tolist()]
    expected = sum(share * (math.log(share) - log_q[name]) for row in rows for name, share in row.items())
    found = objective.baseline(windows, [targets])
    assert found == {"loss": pytest.approx(expected / sum(map(bool, rows)), rel=1e-5)}
    assert objective.facts == {"tokens_with_supersenses": pytest.approx(with_row / ordinary)}
    none = np.zeros(ids_store.vocab_size, np.int64)
    bare = SimpleNamespace(store=ids_store, ordinary_counts=lambda: none)  # a text of special tokens alone
    assert objective.baseline(bare, [targets])["loss"] > 0 and objective.facts == {"tokens_with_supersenses": 0.0}


def test_a_run_is_named_after_what_its_wordnet_says_of_the_vocabulary(ids_store, needed_by, settings, tmp_path):
    changes = {"store": str(ids_store.path), "objective": "supersense"} | needed_by("supersense")
    result = train(StudentConfig(**settings | changes))
    kept = find_description(settings["run_dir"])
    assert kept["operational"]["wordnet"] == str(changes["wordnet"])
    start = json.loads((settings["run_dir"] / "log.jsonl").read_text().splitlines()[0])
    assert 0 < start["targets"]["tokens_with_supersenses"] < 1
    export = settings["run_dir"] / "export"
    lineage = json.loads((export / "lineage.json").read_text())
    assert lineage["settings"]["wordnet"] == kept["settings"]["wordnet"] and len(kept["settings"]["wordnet"]) == 16
    assert AutoModel.from_pretrained(export).config.hidden_size == 32
    assert not {"lsp_head.safetensors", "lsp_config.json"} & {path.name for path in export.iterdir()}
    assert "train-probe" not in training(result, StudentConfig(**settings | changes)), "which reads LSPs"

    lines = changes["wordnet"].read_text().splitlines()
    other = tmp_path / "index.sense"
    other.write_text("\n".join([*reversed(lines), "zebra%1:05:00:: 02391049 1 1"]))  # says the same of w0, w1, ...
    assert train(StudentConfig(**settings | changes | {"wordnet": other}))["finished_before"]
    other.write_text("\n".join(lines[1:]))
    with pytest.raises(RunError, match=r"holds another run, which differs in wordnet \(there \w{16}, now \w{16}\)"):
        train(StudentConfig(**settings | changes | {"wordnet": other}))


def test_what_does_not_go_together_is_one_clear_line(ids_store, index, tmp_path):
    with pytest.raises(ValueError, match="--objective supersense needs --wordnet, WordNet's index.sense"):
        StudentConfig(objective="supersense")
    with pytest.raises(ValueError, match="--wordnet .* is only for --objective supersense, found mlm. Omit it"):
        StudentConfig(objective="mlm", wordnet=index)
    with pytest.raises(RunError, match="no token of .* is a word of .*index.sense") as caught:
        supersense_table(index, ids_store)  # whose words are w0, w1, ...
    assert "\n" not in str(caught.value)
    with pytest.raises(
        RunError, match=r"--wordnet: .*nowhere cannot be read \(No such file.*prepare-data wsd provides it"
    ):
        supersense_table(tmp_path / "nowhere", ids_store)
    index.write_text(INDEX.replace("1:18:01", "1:one"))
    with pytest.raises(WsdDataError, match="index.sense, line 2: expected a sense key"):
        supersense_table(index, ids_store)
    index.write_text(INDEX)
    store = byte_level(tmp_path / "tokenizer", ["dog"])
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(RunError, match="--objective supersense: cannot tell where words begin"):
        supersense_table(index, store)


def test_an_objective_without_its_table_still_says_what_an_export_needs(ids_store):
    objective = OBJECTIVES["supersense"](ids_store)
    assert (objective.outputs, objective.heads(ids_store), objective.tied) == (45, [], False)
