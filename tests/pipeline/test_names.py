"""Names of finished work for settings of every day: they are how a command finds what it has made, so none may change.

The values are those of the code that made format 1. A dictionary is given, so no arithmetic has a part in them.
"""

import numpy as np
import pytest

from pipeline.config import EncodeConfig, EncodeIdsConfig
from pipeline.dictionary import Dictionary
from pipeline.encode import encode_ids, encode_lsp
from shards.copies import codebook_fingerprint
from shards.manifest import fingerprint
from shards.reader import Store

TEXT = "\n\n".join(f"The bank of river {n} was steep, and its water was cold." for n in range(40))


def test_fingerprints_of_values():
    assert fingerprint({"b": [1, 0.05, None, True], "a": "\u00e9"}) == "e596f89900bfe3b172ecfc57686e442e"
    assert codebook_fingerprint(np.arange(2 * 256 * 2, dtype=np.float32).reshape(2, 256, 2))[:12] == "878a2576a34f"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    place = tmp_path_factory.mktemp("names")
    (place / "text.txt").write_text(TEXT)
    atoms_Kd = np.eye(24, 128, dtype=np.float32)
    Dictionary(atoms_Kd, [], "enough", {"k": 24}).save(place / "dictionary")
    return {"corpus": (str(place / "text.txt"),), "output": place / "runs", "teacher": "bundled"}, place / "dictionary"


def test_a_store_of_lsps_keeps_its_name(settings):
    given, dictionary = settings
    report = encode_lsp(EncodeConfig(**given, layer=2, dictionary=dictionary, dtype="float32"))[0]
    store = Store.open(report["store"])
    assert store.path.name == "lsp-bundled-l2-k24-ee330181bf70" and store.plan_id == "68f36e53479c0dab32a413647c9a4250"


def test_a_store_of_ids_keeps_its_name(settings):
    given = {name: settings[0][name] for name in ("corpus", "output")}
    report = encode_ids(EncodeIdsConfig(**given, tokenizer="bundled"))[0]
    assert Store.open(report["store"]).path.name == "ids-L128-a608794a1e4b"
