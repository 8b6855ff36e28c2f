"""What a store costs and how fast it is, against the targets: the four benchmarks of shards in one.

    python -m benchmarks.shards

Bytes and divergence (shard_bytes), packing (pack), reading, opening and growth over 10^3 to 10^5 units (shard_reader),
checking (verify), each in a process of its own, one after the other. Every target stands beside its figure. Prints JSON
as its last line.
"""

import json
import operator
import subprocess
import sys

from benchmarks.data import ROOT

PARTS = ("shard_bytes", "pack", "shard_reader", "verify")
TARGETS = {
    "bytes_per_token": (operator.le, 72),
    "kl_quantisation": (operator.le, 1e-4),
    "pack_tokens_per_second": (operator.ge, 1_000_000),
    "read_tokens_per_second": (operator.ge, 8_000_000),
    "verify_bytes_per_second": (operator.ge, 800e6),
    "pack_vs_npz": (operator.ge, 0.8),
    "read_vs_raw": (operator.ge, 0.5),
    "verify_vs_hash_alone": (operator.ge, 0.7),
    "anonymous_memory_mb_100000_units": (operator.le, 300),
    "open_seconds_10000_units": (operator.le, 2),
}


def main():
    result = {}
    for part in PARTS:
        found = run(part)
        result |= {name: value for name, value in found.items() if name not in result}
    result["read_tokens_per_second"] = result["read_tokens_per_second_batch_1024"]
    for name, (holds, target) in TARGETS.items():
        verdict = "met" if holds(result[name], target) else "MISSED"
        print(f"{name:<44} {result[name]:<24.6g} target {target:g}: {verdict}")
    print(json.dumps(result))


def run(part):
    """The JSON of one benchmark's last line."""
    command = [sys.executable, "-m", f"benchmarks.{part}"]
    lines = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    return json.loads(lines[-1])


if __name__ == "__main__":
    main()
