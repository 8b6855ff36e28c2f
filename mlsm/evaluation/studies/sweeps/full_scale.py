"""What a sweep costs in the paper's setting: operations, and hours of a GPU at an assumed share of its peak.

The paper's sweeps: eight layers of BERT-base at k = 3072 (its table 1), five k at one layer (its table 2); DeBERTa-base
students, 100,000 updates of 1,024 x 128 tokens. Every window is counted as encoded once and used once: the most that
encoding can cost. A corpus that a run reads E times costs 1/E of it. Left out: data loading, evaluation.
"""

from mlsm.common.errors import SweepError
from mlsm.evaluation.studies.flops.config import CountFlopsConfig
from mlsm.evaluation.studies.flops.pretraining import (
    Setting,
    dictionary_flops,
    pretraining_flops,
    student_flops,
    teacher_flops,
)
from mlsm.evaluation.studies.flops.solver import solver_flops

LAYERS = (2, 4, 6, 8, 9, 10, 11, 12)
SIZES = (768, 1536, 3072, 6144, 12288)
MFU = 0.4  # assumed share of a GPU's peak


def full_scale(over: str, gpu: str) -> dict:
    """The paper's sweep over `layer` or `k`: operations by part, and hours of `gpu` at MFU.

    Returns  values of what is varied; flops: teacher_shared (one pass to the deepest layer), teacher_apart (a pass for
             each store), solver, dictionaries, students, and the totals shared, apart, online (the official way:
             teacher and FISTA in every step of every student); hours of the totals
    Raises   SweepError on a GPU whose peak is not known
    """
    import torch

    from student.encoders.flops import named_peak

    peak = named_peak(gpu, torch.bfloat16)
    if peak is None:
        raise SweepError(f"--gpu {gpu!r}: its peak is not known here. Give CUDA's name of one, such as 'NVIDIA H200'.")
    by_layer = {layer: CountFlopsConfig(layer=layer) for layer in LAYERS}
    configs = by_layer if over == "layer" else {k: CountFlopsConfig(k=k) for k in SIZES}
    flops = _flops([Setting.of(config) for config in configs.values()])
    hours = {name: flops[name] / (peak * MFU) / 3600 for name in ("shared", "apart", "online")}
    return {"over": over, "values": list(configs), "flops": flops, "hours": hours, "gpu": gpu}


def full_scale_lines(scale: dict) -> list[str]:
    """What the paper's sweep costs, teacher passes shared, apart, and online."""
    flops, hours = scale["flops"], scale["hours"]
    varied = f"{scale['over']} {', '.join(f'{value:,}' for value in scale['values'])}"
    lines = [
        f"At full scale (the paper's setting, {varied}),",
        f"on one {scale['gpu']} at {MFU:.0%} of its bfloat16 peak throughout:",
    ]
    for name, how in (
        ("shared", f"one teacher pass for all stores ({flops['teacher_shared']:.1e} of teacher)"),
        ("apart", f"a teacher pass for each store ({flops['teacher_apart']:.1e} of teacher)"),
        ("online", "the official way, teacher and 100 FISTA steps in training"),
    ):
        lines.append(f"  {flops[name]:.2e} FLOPs, {hours[name]:>7,.0f} hours: {how}")
    lines.append(
        f"  Of these {len(scale['values'])} students {flops['students']:.1e}, coding {flops['solver']:.1e}, "
        f"dictionaries {flops['dictionaries']:.1e}."
    )
    return [*lines, "  Every window is encoded once and read once, the most that encoding can cost."]


def _flops(settings):
    paper = CountFlopsConfig()
    windows = paper.steps * paper.batch_windows
    batches = windows / paper.windows
    layers = [setting.layer for setting in settings]
    sample = paper.dictionary_tokens, paper.dictionary_epochs

    def teacher(layer):
        return teacher_flops(settings[0].teacher, layer, windows, paper.length)

    parts = {
        "teacher_shared": teacher(max(layers)),
        "teacher_apart": sum(map(teacher, layers)),
        "solver": sum(solver_flops(windows * paper.length, one.k, one.teacher.width) for one in settings),
        "dictionaries": sum(dictionary_flops(one, *sample) for one in settings),
        "students": batches * sum(sum(student_flops(one, f"mlsm-{one.layer}").values()) for one in settings),
    }
    same = parts["solver"] + parts["dictionaries"] + parts["students"]
    return parts | {
        "shared": parts["teacher_shared"] + same,
        "apart": parts["teacher_apart"] + same,
        "online": batches * sum(pretraining_flops(one, f"mlsm-{one.layer}")["total"] for one in settings)
        + parts["dictionaries"],
    }
