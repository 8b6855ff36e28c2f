"""What a store holds, byte for byte."""

import json
from pathlib import Path


def shards(store):
    """The shards that records name, name to bytes; a retry leaves replaced ones to `clean`."""
    units = Path(store) / "units"
    names = [json.loads(path.read_text())["file"] for path in units.glob("*.json")]
    return {name: (units / name).read_bytes() for name in names}
