"""Write the golden store of a format version: run once when the format changes, never for a change of code.

python tests/faults/make_golden.py tests/faults/golden/v1               # of LSPs
python tests/faults/make_golden.py tests/faults/golden/v1-int8 int8     # of hidden states; v1-pq pq as well
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[1] / "shards")]


def main(path, quantise=None):
    import numpy as np
    from make_store import SPECIAL, hidden_settings, keep_codebook, random_block, random_hidden
    from test_damage import everything

    from shards.files import StoreFiles
    from shards.manifest import Plan, PlannedUnit, fingerprint
    from shards.schema import LSP_OCTAVES, ShardMeta
    from shards.writer import UnitWriter

    rng = np.random.default_rng(1)
    settings, codebook = hidden_settings(quantise) if quantise else ({"format": 1, "kind": "lsp"}, None)
    k = 0 if quantise else 32
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": k,
        "vocab_size": 64,
        "max_length": 16,
        "weight_octaves": LSP_OCTAVES,
        "special_ids": SPECIAL,
    }
    files = StoreFiles(path / "store")
    files.create(target)
    if codebook is not None:
        keep_codebook(files, codebook)
    units = [PlannedUnit(f"unit{n}", split, "golden", n, n + 1) for n, split in enumerate(("train", "held_out"))]
    files.publish_plan(Plan({"max_length": 16}, tuple(units)))
    for unit in units:
        with UnitWriter(files, ShardMeta.of_unit(target, unit.id)) as writer:
            block = random_block(rng, windows=5, max_length=16, vocab_size=64, k=k)
            if quantise:
                stored, rows = random_hidden(rng, block["ids"], codebook=codebook)
                block |= stored
                writer.sums["hidden_sum"] += rows.sum(0, dtype=np.float64)
                writer.sums["hidden_squares"] += (rows.astype(np.float64) ** 2).sum(0)
            writer.write_block(**block)
    (path / "content.json").write_text(json.dumps(everything(files.path), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
