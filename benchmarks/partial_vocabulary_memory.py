"""Peak memory of fine-tuning with the token embeddings that a task uses, over fine-tuning with all of them.

    python -m benchmarks.partial_vocabulary_memory [--tasks cola mrpc ...]

A BERT of 4 x 256 with random weights, as memory does not depend on them, and MiniLM's vocabulary of 30,522 tokens is
fine-tuned on each task of $MLSM_DATA/data (or ../shared/data) as a user would do it: 20 optimiser steps of 32 examples
of at most 128 tokens, then the scores of the development set. All texts of the task decide which tokens are kept. Each
training is a process of its own. On a CPU (under Linux), its peak of resident memory, loading included, is counted
from what the process has after a training of one step on miniature data, so that libraries do not count;
`whole_process_ratio` counts from nothing. On a GPU it is the peak of its tensors.

`peak_memory_ratio` is the median over tasks; at most 0.6 is the target. Step times mean something only where nothing
else runs. Prints readable lines, then one of JSON. Left out: other models (what can be gained is the vocabulary's
share of the memory), other batches and lengths (what activations take is not saved).
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from benchmarks.data import conditions, data_file, minilm_directory, with_range

TASKS = {"cola": "glue/CoLA", "conll2003": "conll2003", "mrpc": "glue/MRPC", "rte": "glue/RTE", "sst2": "glue/SST-2"}
TASKS |= {"stsb": "glue/STS-B", "wic": "wic"}  # those that are there as a whole
SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}
SETTINGS = {"seeds": 1, "max_steps": 20, "batch": 32, "max_length": 128, "lr": 5e-4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--measure", choices=("whole", "partial"), help=argparse.SUPPRESS)  # in a process of its own
    given = parser.parse_args()
    data_dirs = {task: data_file(TASKS[task]) for task in given.tasks}
    if given.measure:
        (task,) = given.tasks
        print(json.dumps(measure(task, data_dirs[task].parent, given.measure == "partial")))
        return
    found = {}
    for task in given.tasks:
        whole, partial = (run_apart(task, kind) for kind in ("whole", "partial"))
        found[task] = {
            "peak_memory_ratio": partial["added"] / whole["added"],
            "whole_process_ratio": partial["peak"] / whole["peak"],
            "step_time_ratio": partial["step_seconds"] / whole["step_seconds"],
            "equal_figures": partial["figures"] == whole["figures"],
            "whole": whole,
            "partial": partial,
        }
        print(
            f"{task:<10} {partial['rows']:6,} of {whole['rows']:,} rows   {whole['added'] / 2**20:4.0f} ->"
            f" {partial['added'] / 2**20:4.0f} MiB: {found[task]['peak_memory_ratio']:.2f}   step time"
            f" {found[task]['step_time_ratio']:.2f}   figures {'equal' if found[task]['equal_figures'] else 'differ'}"
        )
    ratios = [measured["peak_memory_ratio"] for measured in found.values()]
    result = {
        "benchmark": "partial_vocabulary_memory",
        **with_range("peak_memory_ratio", ratios, "range"),
        "equal_figures": all(measured["equal_figures"] for measured in found.values()),
        "tasks": found,
        **conditions(),
    }
    print(f"median of the tasks: {result['peak_memory_ratio']:.2f}")
    print(json.dumps(result))


def run_apart(task: str, kind: str) -> dict:
    """What `measure` finds in a process of its own. This one stays small: a child begins with its parent's peak."""
    command = [sys.executable, "-m", "benchmarks.partial_vocabulary_memory", "--measure", kind, "--tasks", task]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def measure(task: str, data_dir: Path, partial: bool) -> dict:
    """Bytes, rows, seconds of a step and figures of one training."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from mlsm.common.device import choose_device
    from mlsm.evaluation import records
    from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
    from mlsm.evaluation.tasks.finetuning.heads import Backbone
    from mlsm.evaluation.tasks.finetuning.suite import finetune
    from student.memory import forget_peak, peak_memory

    device = choose_device("auto")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        torch.manual_seed(0)
        tokenizer = AutoTokenizer.from_pretrained(minilm_directory())
        tokenizer.save_pretrained(directory / "bert-4x256")
        BertModel(BertConfig(vocab_size=len(tokenizer), **SIZES)).save_pretrained(directory / "bert-4x256")
        settings = SETTINGS | {"tasks": (task,), "output": directory}
        if not partial:
            Backbone.keep_rows = lambda self, *used: None  # type: ignore[method-assign]
        finetune(FinetuneConfig(smoke=True, **settings | {"max_steps": 1}))
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)  # freed memory that glibc keeps would hide what comes
        forget_peak(device)
        before = peak_memory(device)
        finetune(FinetuneConfig(models=(str(directory / "bert-4x256"),), data_dir=data_dir, **settings))
        (record,) = records.read([directory / "evaluations"])
    cost = record["cost"]
    return {
        "peak": cost["peak_memory_bytes"],
        "added": cost["peak_memory_bytes"] - before,
        "rows": cost["embedding_rows"],
        "step_seconds": cost["step_seconds"],
        "figures": record["figures"],
    }


if __name__ == "__main__":
    main()
