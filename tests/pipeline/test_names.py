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
    atoms_Kd = (rng.integers(-4, 5, (20, 128)) / 64).astype(np.float32)  # the same bits on every processor
    Dictionary(atoms_Kd, [], "made up", {}).save(directory / "dictionary")
    (directory / "codebook").mkdir()
    np.save(directory / "vectors.npy", rng.integers(-4, 5, (500, 16)).astype(np.float32))
    np.save(directory / "codebook" / "centroids.npy", rng.integers(-4, 5, (16, 256, 8)).astype(np.float32))
    return directory


HIDDEN = "hidden-bundled-l1-1d46b11640b8"  # the store of hidden states that others are made from
STEMS = [
    "c3424e766126c720520a9633f623af4b",
    "2c8a2482ff2bc05c911a85ac60d5495c",
    "2e5a50f8f539aaea57096d730eedcc17",
    "89b35db69c9e2729bdf7759e41ef073b",
]
FEW = {"max_tokens": 300, "batch_tokens": 256}  # which name no store, only its plan or nothing
NAMES = [
    (encode_ids, {}, "ids-L32-b7410077aa66"),
    (encode_ids, {"packing": "pairs"}, "ids-L32-d34beac0844c"),
    (encode_ids, {"held_out_by": "file", "max_tokens": 2000}, "ids-L32-659739a23047"),
    (encode_logits, {"top_n": 8} | FEW, "logits-bundled-440c2bd9de98"),
    (encode_logits, {"top_n": 8, "masked": True} | FEW, "logits-bundled-masked-a91e74040a5e"),
    (encode_logits, {"top_n": "all", "documents_apart": True} | FEW, "logits-bundled-41d4c61e22d3"),
    (encode_hidden, {"layer": 1}, "hidden-bundled-l1-1d46b11640b8"),
    (encode_hidden, {"layer": 1, "dtype": "bfloat16"}, "hidden-bundled-l1-5922b51e9b7a"),
    (
        encode_hidden,
        {"layer": 1, "quantise": "pq", "bytes": 16, "codebook": "codebook"},
        "hidden-bundled-l1-pq16-9c38c3e7b2a0",
    ),
    (encode_lsp, {"layer": 1, "dictionary": "dictionary"}, "lsp-bundled-l1-k20-c9f5fae3828c"),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "lam": 0.1, "top_n": 4, "tolerance": 1e-3},
        "lsp-bundled-l1-k20-a81d23e28e91",
    ),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "solver": "fista", "solver_steps": 9},
        "lsp-bundled-l1-k20-90415fef5f5f",
    ),
    (
        encode_lsp,
        {"layer": 1, "dictionary": "dictionary", "solver": "nearest"},
        "lsp-bundled-l1-k20-nearest-e61d41362e57",
    ),
    (encode_lsp, {"layer": 1, "dictionary": "dictionary", "packing": "pairs"}, "lsp-bundled-l1-k20-ffd84f72dcd1"),
    (encode_lsp, {"hidden": "hidden", "dictionary": "dictionary"}, "lsp-bundled-l1-k20-of-int8-0b135f0aff1f"),
    (
        encode_hidden,
        {"hidden": "hidden", "quantise": "pq", "bytes": 16, "codebook": "codebook"},
        "hidden-bundled-l1-pq16-3c8ae9e2092e",
    ),
    (learn_dictionary, {"layer": 1, "k": 8, "dictionary_tokens": 500}, "bundled-l1-k8-2ed509c15027"),
    (
        learn_dictionary,
        {"layer": 1, "k": 8, "dictionary_tokens": 500, "center": "mean", "atoms": "sampled"},
        "bundled-l1-k8-sampled-30cdfce6844f",
    ),
    (
        learn_dictionary,
        {"layer": 1, "k": 8, "dictionary_tokens": 500, "packing": "pairs"},
        "bundled-l1-k8-dc0c9b11f571",
    ),
    (learn_dictionary, {"hidden": "hidden", "k": 8, "dictionary_tokens": 500}, "bundled-l1-k8-9fe3910c978b"),
    (learn_dictionary, {"hidden": "vectors.npy", "k": 8}, "vectors-k8-3720b7c6d0fe"),
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
