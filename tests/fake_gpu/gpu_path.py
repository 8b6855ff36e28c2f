"""What `device="cuda:1"` does, on GPUs that are not there (fake_gpu.py); a child of test_gpu_path.py.

Trains with every objective, encodes a small text with dictionary learning, fine-tunes, and scores frozen states; then
trains and encodes again with faults planted. Prints as its last line a JSON object: by the name of each run, its error,
operations that mixed devices, waits for a GPU, and events waited for. The waits and events of a training run are those
of the steps in WATCHED; evaluation and saving follow the last step. The waits of encoding are those of the teacher's
thread. Evaluations also say what they scored, here and on the CPU.
"""

import json
import os
import tempfile
import traceback
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

os.environ.pop("LD_PRELOAD")  # loaded; what this process starts does not need it

import torch
from fake_gpu import EVENTS, MIXED, WAITS, fake_gpus
from tiny_store import write_store
from tiny_teacher import lsp_settings, standard_text, tiny_teacher
from transformers import BertConfig, ModernBertConfig

from mlsm.evaluation import records
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures
from mlsm.evaluation.tasks.finetuning.suite import finetune
from pipeline.commands import encode_lsp
from pipeline.encode import Coder
from pipeline.solvers import proof
from pipeline.teacher.cut import Teacher
from student.config import StudentConfig
from student.objectives import OBJECTIVES
from student.train import Stepper, train

GPU = "cuda:1"
WATCHED = (2, 3)  # steps, counted from 1; there is another one
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
ENCODERS = {"bert": BertConfig(**SIZE), "modernbert": ModernBertConfig(**SIZE)}
STORES = {
    "lsp": {"k": 24},
    "recon": {"k": 24, "atoms": True},
    "kd": {"k": 72, "kind": "logits"},
    "regress": {"k": 0, "kind": "hidden"},
}


def watch(work, fault=nullcontext):
    """What happens on the GPUs while `work()` is done, perhaps with a fault."""
    for counter in (EVENTS, MIXED, WAITS):
        counter.clear()
    error, found = None, {}
    try:
        with fake_gpus(), fault():
            found = work()
    except Exception:
        error = traceback.format_exc(limit=-8)
    return {"error": error, "mixed": MIXED.copy(), "waits": WAITS.copy(), "events": EVENTS.copy()} | found


def read_number(tensor):
    tensor.sum().item()
    return tensor


# -- training ----------------------------------------------------------------------------------------------------


def prepare_training(place):
    """A function of an objective and an encoder that trains; it returns waits and events after the first step."""
    stores = {name: write_store(place / name, **how).path for name, how in STORES.items()}
    (place / "senses").write_text("".join(f"w{word}%1:{word % 45:02}:00:: {word} 1 0\n" for word in range(5, 61)))
    for name, config in ENCODERS.items():
        config.save_pretrained(place / name)

    def run(objective, encoder):
        settings = {
            "batch_windows": 8,
            "micro_batch": 4,
            "max_steps": WATCHED[-1] + 1,
            "dtype": "bfloat16",
            "compile": False,
        }
        settings |= {"eval_windows": 8, "eval_every": 0, "save_every": 0, "checkpoints": ()}
        settings |= {"wordnet": place / "senses"} if objective == "supersense" else {}
        settings |= {"store": stores.get(objective, stores["lsp"]), "encoder": place / encoder, "objective": objective}
        so_far = {}

        def note(stage, done, total, *, step=0, **figures):
            so_far.setdefault(step, (WAITS.copy(), EVENTS.copy()))

        train(StudentConfig(**settings, device=GPU, run_dir=Path(tempfile.mkdtemp(dir=place)) / "run"), note)
        waits, events = (last - first for first, last in zip(so_far[WATCHED[0] - 1], so_far[WATCHED[-1]], strict=True))
        return {"waits": waits, "events": events}

    return run


def change_logits(change):
    plain = Stepper.loss
    return lambda: patch.object(Stepper, "loss", lambda self, logits_MK, *rest: plain(self, change(logits_MK), *rest))


TRAINING_FAULTS = {
    "reads a number": change_logits(read_number),
    "indexes with a mask": change_logits(lambda logits_MK: logits_MK * logits_MK[logits_MK.isnan()].sum()),
    "does not pin a batch": lambda: patch("student.train.pin", lambda batch: batch),
    "does not move a batch": lambda: patch("student.train.to_device", lambda batch, device: batch),
    "names no stream": lambda: patch("torch.cuda.current_stream", lambda device: None),
}


def check_training(place):
    run = prepare_training(place)
    pairs = [*((objective, "bert") for objective in OBJECTIVES), ("mlsm", "modernbert"), ("mlm", "modernbert")]
    found = {f"{objective}, {encoder}": watch(partial(run, objective, encoder)) for objective, encoder in pairs}
    return found | {
        f"training {what}": watch(partial(run, "mlsm", "bert"), fault) for what, fault in TRAINING_FAULTS.items()
    }


# -- encoding ----------------------------------------------------------------------------------------------------


def read_states(self, *arguments, plain=Coder.states):
    found = plain(self, *arguments)
    read_number(found[0].rows_Nd)
    return found


ENCODING_FAULTS = {
    "reads a number": lambda: patch.object(Coder, "states", read_states),
    "does not move the input": lambda: patch.object(Teacher, "_to_device", lambda self, tensor: tensor),
}


def check_encoding(place):
    text = standard_text(place, documents=60)
    usual = {"teacher": tiny_teacher(place, text), "text": text, "device": GPU, "dtype": "float32"}
    usual |= {"solver_backend": "torch", "batch_tokens": 512}

    def run(output, **how):
        [report] = encode_lsp(lsp_settings(place, output=place / output, **usual, **how))
        waits = {wait: count for wait, count in WAITS.items() if wait.startswith("stage teach: ")}
        return {"tokens": report["new_tokens"], "quarantined": report["quarantined"], "waits": waits}

    choice = proof.SolverChoice("torch", "plain torch", ("torch",), {}, True)
    with patch.object(proof, "choose_solver", lambda *arguments, **how: choice):  # the real one tries them on the GPU
        learning = {"dictionary": None, "k": (48,), "dictionary_tokens": 1024}
        found = {"encode-lsp": watch(partial(run, "store", **learning))}
        return found | {f"encoding {what}": watch(partial(run, what), fault) for what, fault in ENCODING_FAULTS.items()}


# -- evaluation --------------------------------------------------------------------------------------------------


def check_evaluation(place):
    text = standard_text(place, documents=60)
    usual = {"models": (str(tiny_teacher(place, text)),)}
    data = write_miniatures(place / "tasks")
    ways = {
        "finetune": FinetuneConfig(**usual, data_dir=data, tasks=("mrpc", "stsb", "conll2003"), epochs=1),
        "frozen": FinetuneConfig(**usual, data_dir=data, tasks=("sst2", "conll2003"), frozen=True),
    }

    def run(config, device):
        output = Path(tempfile.mkdtemp(dir=place))
        finetune(replace(config, device=device, output=output))
        return {"scores": [record["figures"] for record in records.read([output / "evaluations"])]}

    found = {}
    for name, config in ways.items():
        found[name] = watch(partial(run, config, GPU)) | {"on the CPU": run(config, "cpu")["scores"]}
    return found


CHECKS = (check_training, check_encoding, check_evaluation)

if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {}
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as place:
            found |= check(Path(place))
    print(json.dumps(found))
