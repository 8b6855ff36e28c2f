"""A store with a dictionary, of a made-up language with markup for words."""

import json

import numpy as np
import pytest
from lsp_pages import HOSTILE
from tiny_store import SPECIAL, write_store
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlsm.evaluation.inspection.lsps.view import StoreView
from pipeline.dictionary import Dictionary

WORDS = 60


@pytest.fixture(scope="session")
def hostile_store(tmp_path_factory):
    """A store of 24 LSPs under runs/stores whose corpus holds markup, with a dictionary and word-sense labels."""
    runs = tmp_path_factory.mktemp("inspected") / "runs"
    store = write_store(runs / "stores" / "lsp-<b>tiny", k=24)
    names = [f"[{name.upper()}]" for name in SPECIAL]
    names += [HOSTILE.get(number, f"w{number}") for number in range(WORDS)]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"[{name.upper()}]" for name in SPECIAL}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(store.files.tokenizer)
    atoms_Kd = np.random.default_rng(0).normal(size=(24, 16)).astype(np.float32)
    dictionary = Dictionary(atoms_Kd / np.linalg.norm(atoms_Kd, axis=1, keepdims=True), [], "made up", {})
    dictionary.save(store.files.dictionary)
    store.settings["dictionary"] = dictionary.fingerprint  # as a target of encode-lsp has it
    _write_labels(runs / "diagnostics" / "some" / "layer-3-k24", dictionary.fingerprint, 24)
    return store


@pytest.fixture
def write_labels():
    """A function that writes labels.json of a dictionary as choose-layer would."""
    return _write_labels


def _write_labels(directory, fingerprint, k):
    """LSP 3 is a bank of money, LSP 5 hostile, the others have no senses."""
    senses = [{"synsets": [], "lexnames": []} for _ in range(k)]
    senses[3] = {
        "synsets": [
            {
                "synset": "depository.n.01",
                "lemmas": ["depository", "bank"],
                "lexname": "noun.group",
                "npmi": 0.41,
                "mass": 0.3,
            }
        ],
        "lexnames": [["noun.act", 0.6], ["noun.group", 0.4]],
    }
    senses[5] = {
        "synsets": [
            {"synset": "x", "lemmas": ["<script>window.hacked=1</script>"], "lexname": "<b>", "npmi": 0.1, "mass": 1.0}
        ],
        "lexnames": [["<i>", 1.0]],
    }
    directory.mkdir(parents=True)
    content = {"dictionary": fingerprint, "teacher": "none", "layer": 3, "k": k, "lsps": senses}
    (directory / "labels.json").write_text(json.dumps(content))


@pytest.fixture(scope="session")
def hostile_view(hostile_store):
    return StoreView(hostile_store, 1_000_000)
