"""How much faster a student trains with `--dtype bfloat16` on this processor, and how the loss changes.

    python -m benchmarks.precision

`mlsm_bf16_vs_f32_step` is how many times as many tokens a second the step of benchmarks.student_step (BERT 6 x 256)
takes in bfloat16 as in float32, in turns. The loss: a BERT 2 x 128 is trained for STEPS steps on English Wikipedia,
encoded with MiniLM (benchmarks.whole_run), in float32, in bfloat16, and in float32 with another seed, which says how
much a run's loss means. Compared are held-out losses, in nats, at each quarter of the run. Needs a processor that
multiplies bfloat16 (AVX512-BF16 or AMX) to be worth anything. Prints readable lines, then one of JSON.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, log_of, with_quartiles
from benchmarks.student_step import CONFIG, interleave, our_step, write_store
from benchmarks.whole_run import encode
from mlsm.common.onednn import multiplies_bfloat16
from student.config import StudentConfig
from student.train import train

TOKENS, STEPS, TURNS = 400_000, 300, 4


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        synthetic = write_store(Path(directory))
        config = replace(CONFIG, encoder="bert-6x256")
        forms = {dtype: our_step(synthetic, replace(config, dtype=dtype), "mlsm") for dtype in ("float32", "bfloat16")}
        seconds = {name: np.array(times) for name, times in interleave(forms, TURNS).items()}
        store = encode(Path(directory), TOKENS)
        curves = {
            name: curve(store, Path(directory) / name, dtype, seed)
            for name, dtype, seed in (
                ("float32", "float32", 1),
                ("bfloat16", "bfloat16", 1),
                ("other_seed", "float32", 2),
            )
        }
    for name, losses in curves.items():
        print(f"{name:<12}", "  ".join(f"step {step}: {loss:.4f}" for step, loss in losses.items()))

    def differences(name):
        return [losses - curves["float32"][step] for step, losses in curves[name].items()]

    result = {
        "benchmark": "precision",
        **with_quartiles("mlsm_bf16_vs_f32_step", seconds["float32"] / seconds["bfloat16"], "spread"),
        "held_out_nats_bf16_minus_f32": differences("bfloat16"),
        "held_out_nats_other_seed_minus_f32": differences("other_seed"),
        "held_out_nats": curves,
        "multiplies_bfloat16": multiplies_bfloat16(),
        **conditions(),
    }
    print(json.dumps(result))


def curve(store, output: Path, dtype: str, seed: int) -> dict:
    """Held-out loss by step."""
    sizes = {"encoder": "bert-2x128", "batch_windows": 32, "micro_batch": 32, "lr": 1e-3, "max_steps": STEPS}
    often = {"eval_every": STEPS // 4, "save_every": 0, "checkpoints": (1.0,), "device": "cpu"}
    train(StudentConfig(store=str(store.path), run_dir=output, dtype=dtype, seed=seed, **sizes, **often))
    return {line["step"]: line["held_out"]["loss"] for line in log_of(output) if "held_out" in line}


if __name__ == "__main__":
    main()
