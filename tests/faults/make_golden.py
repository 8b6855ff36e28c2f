"""Write the golden store of a format version: run once when the format changes, never for a change of code.

python tests/faults/make_golden.py tests/faults/golden/v1
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2]), str(HERE.parent), str(HERE.parents[1] / "shards")]


def main(path):
    import numpy as np
    from make_store import SPECIAL, random_block
    from test_damage import everything

    from shards.manifest import Plan, PlannedUnit, StoreFiles, fingerprint
    from shards.schema import LSP_OCTAVES, ShardMeta
    from shards.writer import UnitWriter

    rng = np.random.default_rng(1)
    settings = {"format": 1, "kind": "lsp"}
    target = {
        "target": fingerprint(settings),
        "settings": settings,
        "lineage": {},
        "k": 32,
        "vocab_size": 64,
        "max_length": 16,
        "weight_octaves": LSP_OCTAVES,
        "special_ids": SPECIAL,
    }
    files = StoreFiles(path / "store")
    files.create(target)
    units = [PlannedUnit(f"unit{n}", split, "golden", n, n + 1) for n, split in enumerate(("train", "held_out"))]
    files.publish_plan(Plan({"max_length": 16}, tuple(units)))
    for unit in units:
        with UnitWriter(files, ShardMeta(target["target"], unit.id, 32, 64, 16)) as writer:
            writer.write_block(**random_block(rng, windows=5, max_length=16, vocab_size=64, k=32))
    (path / "content.json").write_text(json.dumps(everything(files.path), indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
