"""The operations of encoding a store: the teacher on whole windows, and the solver or the teacher's head.

    store_flops(Store.open("runs/stores/..."))

They are counted once, however many runs share the store. Not counted: the dictionary (pretraining.dictionary_flops, a
few thousandths of a per cent), students (mlsm/evaluation/lineage.py).
"""

from mlsm.evaluation.studies.flops.encoders import EncoderShape
from mlsm.evaluation.studies.flops.pretraining import teacher_flops
from mlsm.evaluation.studies.flops.solver import correlation_flops, fista_flops, solver_flops
from shards.reader import Store


def store_flops(store: Store) -> float:
    """Operations of encoding a store; 0 for a store of token ids. Raises FlopsError if there is no such teacher."""
    if store.kind == "ids":
        return 0.0
    teacher = EncoderShape.find(store.settings["teacher_name"])
    report, length = store.report(), store.max_length
    if store.kind == "hidden":
        return teacher_flops(teacher, store.settings["layer"], report["windows"], length)
    if store.kind == "lsp":
        coded = report["coded_tokens"] + report["empty_codes"], store.k, teacher.width
        solver = store.settings.get("solver", {"name": "cd"})
        if solver["name"] == "nearest":
            coding = correlation_flops(*coded)
        else:
            coding = fista_flops(*coded, solver["steps"]) if solver["name"] == "fista" else solver_flops(*coded)
        return teacher_flops(teacher, store.settings["layer"], report["windows"], length) + coding
    passes = store.settings.get("masked_passes", 1)  # passes of the encoder; the head reads each token once
    whole = passes * teacher_flops(teacher, teacher.layers, 1, length) + teacher.head(length, store.k)
    return whole * report["windows"]
