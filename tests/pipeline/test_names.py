"""Equal settings keep the names of what they made: directories, units and plans, pinned as golden names.

A name holds the digits of a fingerprint over settings and content. So a change of these names means that finished work
is not found again. Dictionaries and codebooks that commands learn are named by their settings; those that stores are
made with are fixed here, since what is learned depends on the processor in its last bits.
"""

from pathlib import Path

import numpy as np
import pytest

from pipeline.commands import encode_hidden, encode_ids, encode_logits, encode_lsp
from pipeline.config import EncodeConfig, EncodeHiddenConfig, EncodeIdsConfig, EncodeLogitsConfig, LearnConfig
from pipeline.dictionary import Dictionary
from pipeline.learn import learn_dictionary
from shards.copies import codebook_fingerprint
from shards.manifest import fingerprint

TEXT = "\n\n".join(
    f"Document {n} names the river, the bank and the number {n * n}.\nIt has two lines." for n in range(60)
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("names")
    (directory / "text.txt").write_text(TEXT)
    (directory / "more.txt").write_text(TEXT.replace("river", "sea"))
    rng = np.random.default_rng(0)
    atoms_Kd = (rng.integers(-4, 5, (20, 144)) / 64).astype(np.float32)  # the same bits on every processor
    Dictionary(atoms_Kd, [], "made up", {}).save(directory / "dictionary")
    (directory / "codebook").mkdir()
    np.save(directory / "vectors.npy", rng.integers(-4, 5, (500, 16)).astype(np.float32))
    np.save(directory / "codebook" / "centroids.npy", rng.integers(-4, 5, (16, 256, 9)).astype(np.float32))
    return directory


HIDDEN = "hidden-bundled-l1-60d0dc78e6fe"  # the store of hidden states that others are made from
STEMS = [
    "a9e2c3d60b8d3d323f6c9490f06dc878",
    "597292450ae1a7a393d567914cae67dd",
    "944e8af49a1f9a1a17f0edb830cca45d",
    "95f71108661bc20e560ee9baf874bb22",
]
FEW = {"max_tokens": 300, "batch_tokens": 256}  # which name no store, only its plan or nothing
NAMES = [
    (encode_ids, {}, "ids-L32-40ac628bb1c2"),
    (encode_ids, {"packing": "pairs"}, "ids-L32-762ce78eace0"),
    (encode_ids, {"held_out_by": "file", "max_tokens": 2000}, "ids-L32-b7ba8549274e"),
    (encode_logits, {"top_n": 8} | FEW, "logits-bundled-08524bf13ba3"),
    (encode_logits, {"top_n": 8, "masked": True} | FEW, "logits-bundled-masked-ce1de8336363"),
    (encode_logits, {"top_n": "all", "documents_apart": True} | FEW, "logits-bundled-5edf2e43b9fb"),
    (encode_hidden, {"layer": 1}, "hidden-bundled-l1-60d0dc78e6fe"),
    (encode_hidden, {"layer": 1, "dtype": "bfloat16"}, "hidden-bundled-l1-5dcbf33313b5"),
    (
        encode_hidden,
        {"layer": 1, "quantise": "pq", "bytes": 16, "codebook": "codebook"},
        "hidden-bundled-l1-pq16-5d1ece48babf",
    ),
    (encode_lsp, {"layer": 1, "dictionary": "dictionary"}, "lsp-bundled-l1-k20-b831c95edce9"),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "lam": 0.1, "top_n": 4, "tolerance": 1e-3},
        "lsp-bundled-l1-k20-f6e1e8d81767",
    ),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "solver": "fista", "solver_steps": 9},
        "lsp-bundled-l1-k20-6ab10f0df9b7",
    ),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "solver": "nearest"},
        "lsp-bundled-l1-k20-nearest-8764c2582be4",
    ),
    (encode_lsp, {"layer": 1, "dictionary": "dictionary", "packing": "pairs"}, "lsp-bundled-l1-k20-0f1e313d706a"),
    (encode_lsp, {"hidden": "hidden", "dictionary": "dictionary"}, "lsp-bundled-l1-k20-of-int8-7ce8e09b31a4"),
    (
        encode_hidden,
        {"hidden": "hidden", "quantise": "pq", "bytes": 16, "codebook": "codebook"},
        "hidden-bundled-l1-pq16-ebddda151bbe",
    ),
    (learn_dictionary, {"layer": 1, "k": 8, "dictionary_tokens": 500}, "bundled-l1-k8-200bd9052b6c"),
    (
        learn_dictionary,
        {"layer": 1, "k": 8, "dictionary_tokens": 500, "center": "mean", "atoms": "sampled"},
        "bundled-l1-k8-sampled-dade175e748b",
    ),
    (
        learn_dictionary,
        {"layer": 1, "k": 8, "dictionary_tokens": 500, "packing": "pairs"},
        "bundled-l1-k8-5a61b36e58b0",
    ),
    (learn_dictionary, {"hidden": "hidden", "k": 8, "dictionary_tokens": 500}, "bundled-l1-k8-e13c05e4d055"),
    (learn_dictionary, {"hidden": "vectors.npy", "k": 8}, "vectors-k8-167cbcd8a106"),
]
CONFIGS = {
    encode_ids: EncodeIdsConfig,
    encode_logits: EncodeLogitsConfig,
    encode_hidden: EncodeHiddenConfig,
    encode_lsp: EncodeConfig,
    learn_dictionary: LearnConfig,
}


def name_of(place, command, settings):
    """The name of the directory that a command makes."""
    settings = settings | {name: place / settings[name] for name in ("dictionary", "codebook") if name in settings}
    how = {"output": place / "runs"}
    if command is not encode_ids:
        how["device"] = "cpu"
    if "hidden" not in settings:
        corpus = (str(place / "text.txt"), str(place / "more.txt"))
        how |= {"corpus": corpus, "max_length": 32, "unit_tokens": 1500}
        how["tokenizer" if command is encode_ids else "teacher"] = "bundled"
    elif settings["hidden"] == "hidden":
        (settings["hidden"],) = map(str, (place / "runs" / "stores").glob(HIDDEN))
    else:
        settings["hidden"] = str(place / settings["hidden"])
    (report,) = command(CONFIGS[command](**how | settings))
    return Path(report["store" if "store" in report else "dictionary"]).name


def test_names_stay(place):
    assert [(command, settings, name_of(place, command, settings)) for command, settings, _ in NAMES] == NAMES


def test_units_and_plans_keep_their_names(place):
    files = sorted((place / "runs" / "stores").glob(f"{NAMES[0][2]}/*/*"))
    assert [file.stem for file in files if file.parent.name in ("units", "plans") and file.suffix == ".json"] == STEMS


def test_fingerprints_of_values_stay():
    assert fingerprint({"b": [1, 0.05, None, True], "a": "\u00e9"}) == "e596f89900bfe3b172ecfc57686e442e"
    assert codebook_fingerprint(np.arange(2 * 256 * 2, dtype=np.float32).reshape(2, 256, 2))[:12] == "878a2576a34f"
