"""What a trained student has cost so far, its teacher included: the axis of the paper's figure 9.

    spent("runs/students/mlsm-...", step=50_000)["total"]

The student's operations are those that its run logged (nominal, a function of the step). Encoding is what its store
took, once: the teacher to its layer over whole windows and the solver, or for distillation the whole teacher with its
head.
Left out: the dictionary (pretraining.dictionary_flops, some thousandths of a per cent), and what a run took that this
one continues from, or that a probe reads: a probe's run is given beside its student's.
"""

import json
from pathlib import Path

from evaluation.flops.encoders import Encoder
from evaluation.flops.errors import FlopsError
from evaluation.flops.pretraining import teacher_flops
from evaluation.flops.solver import solver_flops
from shards.reader import Store


def spent(run: Path | str, step: int | None = None) -> dict[str, float]:
    """Operations of a run up to an optimiser step; not given: the last that it logged.

    Returns  step, student, encoding (of the whole store, once, however many runs share it), teacher_online (what the
             teacher would have cost in these steps without a store), total = student + encoding
    Raises   FlopsError on a directory that is no run, or a store or teacher that is not there any more
    """
    run = Path(run)
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        lines = map(json.loads, (run / "log.jsonl").read_text(encoding="utf-8").splitlines())
        last = [line for line in lines if "flops" in line][-1]
    except (OSError, ValueError, IndexError) as error:
        raise FlopsError(
            f"{run} is no run of train-student that has logged a step ({error!r}). Give its directory."
        ) from None
    step = last["step"] if step is None else step
    store = Store.open(config["operational"]["store"], config["store"]["plan"])
    student = last["flops"] / last["step"] * step
    encoding = store_flops(store)
    of_a_window = _teacher_of_a_window(store)
    return {
        "step": step,
        "student": student,
        "encoding": encoding,
        "teacher_online": of_a_window * step * config["settings"]["batch_windows"],
        "total": student + encoding,
    }


def store_flops(store: Store) -> float:
    """Operations of encoding a store. A store of token ids took none."""
    report = store.report()
    flops = _teacher_of_a_window(store) * report["windows"]
    if store.kind == "lsp":
        flops += solver_flops(report["tokens"], store.k, _teacher(store).width)
    return flops


def _teacher_of_a_window(store):
    if store.kind == "ids":
        return 0.0
    teacher, length = _teacher(store), store.max_length
    if store.kind == "lsp":
        return teacher_flops(teacher, store.settings["layer"], 1, length)
    return teacher_flops(teacher, teacher.layers, 1, length) + teacher.head(length, store.k)


def _teacher(store):
    return Encoder.find(store.settings["teacher_name"])
