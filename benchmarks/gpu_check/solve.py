"""The items of part `solve`: what a GPU can do; the coder against teacher and FISTA; where its time goes; is it right.

The coder is `nonneg_lasso` with everything on the device, as when encoding: its checks and its questions to the device
are in its time. Rivals run in turns, after turns that warm up and compile; times are between CUDA events, medians.

Shapes: N tokens, d hidden width, K atoms.
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from transformers import BertConfig

from benchmarks.data import ROOT, quartiles
from benchmarks.gpu_check.items import Setting, Skip, item, needs_gpu
from benchmarks.lifted import LAM, LiftedTeacher, Problem, available_problem, toy_problem
from benchmarks.official_step import in_tf32
from pipeline.solvers import nonneg_lasso, prepare
from pipeline.solvers.fista import fista_steps
from pipeline.solvers.problem import kkt_violation, objective
from pipeline.solvers.proof import choose_solver

TOLERANCES = (1e-3, 1e-4)
WIDTH = 768
PRODUCT = (16_384, WIDTH, 3072)  # of a batch: tokens, width, atoms
CHECKED_TOKENS = 1024  # whose certificates and objectives are computed again, in float64 on the host
TINY_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
CHECKS = Path("tests/pipeline/solvers/cuda_checks.py")
SANITIZED = ("working_sets_grow", "few_of_real_size")  # checks that are short enough for it
CHUNKS = ("pipeline.solvers.cd_cuda.CHUNK", (1 << 12, 1 << 13, 1 << 14, 1 << 15))
JOINING_VALUES = ((32, 16), (64, 32), (96, 48))
STAGES = {  # of a kernel's name
    "select": r"select",
    "minimise": r"minimise",
    "subtract": r"subtract",
    "pack": r"pack",
    "product": r"gemm|cutlass|nvjet|xmma|cublas|::mm|sm\d+_",
}


@item("solve", 20, copy_gigabytes_per_s=4000, bf16_teraflops=650, fp16_teraflops=650, launch_microseconds=4)
def ceilings(setting: Setting) -> Iterator[dict]:
    """What a copy, matrix products of the coder's shape, and launches can reach."""
    device = setting.device
    source = torch.ones(setting.size(1 << 30, 1 << 16), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = median_seconds({"copy": lambda: target.copy_(source)}, setting)
    yield {"copy_gigabytes_per_s": 2 * source.numel() / seconds["copy"] / 1e9}  # read and written
    rows, width, atoms = setting.size(PRODUCT, (8, 16, 24))
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        left = torch.ones(rows, width, device=device, dtype=dtype)
        right = torch.ones(width, atoms, device=device, dtype=dtype)
        rivals = {name: lambda left=left, right=right: left @ right}
        if dtype == torch.float32:
            rivals["tf32"] = in_tf32(rivals[name])
        for kind, duration in median_seconds(rivals, setting).items():
            yield {f"{kind}_teraflops": 2 * rows * width * atoms / duration / 1e12}
    small = torch.zeros(1, device=device)
    count = setting.size(1000, 10)
    seconds = median_seconds({"launch": lambda: [small.add_(1) for _ in range(count)]}, setting)
    yield {"launch_microseconds": seconds["launch"] / count * 1e6}
    needs_gpu(setting)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            small.add_(1)
    yield {"launch_in_a_graph_microseconds": median_seconds({"graph": graph.replay}, setting)["graph"] / count * 1e6}


@item(
    "solve", 70, coder_vs_teacher={"predicted": "0.31 to 0.53", "wanted": 0.25, "moonshot": 0.1}, teacher_ns_a_token=320
)
def coder_vs_teacher(setting: Setting) -> Iterator[dict]:
    """The coder on real states, lifted to 768, against a random BERT-base of ten layers in bfloat16."""
    problem = states(setting, WIDTH)
    config = BertConfig(**TINY_BERT) if setting.toy else BertConfig(num_hidden_layers=10)
    dtype = torch.bfloat16 if setting.on_gpu else torch.float32
    teacher = LiftedTeacher.build(problem, config, setting.device, dtype)
    windows, length = setting.size((128, 128), (2, 8))
    ids_WL = torch.randint(teacher.vocab_size, (windows, length), generator=torch.Generator().manual_seed(0))
    ids_WL = ids_WL.to(setting.device)
    hidden_Nd = teacher(ids_WL).flatten(0, 1)  # lifted states, as many as there are tokens
    for tolerance in TOLERANCES:
        code = coder(hidden_Nd, problem, setting, tolerance)
        times = in_turns({"coder": code, "teacher": lambda: teacher(ids_WL)}, setting)
        ratios = np.array(times["coder"]) / np.array(times["teacher"])
        yield {
            f"{tolerance:g}": {
                "coder_vs_teacher": float(np.median(ratios)),
                "quartiles": quartiles(ratios),
                **{f"{name}_ns_a_token": statistics.median(t) / len(hidden_Nd) * 1e9 for name, t in times.items()},
                **quality(code(), hidden_Nd, problem),
            }
        }


@item("solve", 90, vs_fista100={"predicted": "30 to 45", "wanted": 20})
def fista(setting: Setting) -> Iterator[dict]:
    """100 FISTA steps, eager and compiled, in float32 and TF32, against the coder; the fastest counts."""
    for width in setting.size((384, WIDTH), (16, 32)):
        torch._dynamo.reset()  # shapes of the first width are not to be taken for variable
        problem = states(setting, width)
        hidden_Nd = torch.from_numpy(problem.hidden_Nd).to(setting.device, torch.float32)
        atoms_Kd = torch.from_numpy(problem.atoms_Kd).to(setting.device)
        step = 1 / torch.linalg.eigvalsh(atoms_Kd.double().T @ atoms_Kd.double())[-1].item()
        steps = setting.size(100, 3)

        def eager(hidden_Nd=hidden_Nd, atoms_Kd=atoms_Kd, step=step, steps=steps):
            return fista_steps(hidden_Nd, atoms_Kd, LAM, step, steps)

        # A step is compiled, not the loop of a hundred: that would be a hundred times as long to compile.
        one = torch.compile(fista_step, backend=setting.size("inductor", "eager"))

        def compiled(hidden_Nd=hidden_Nd, atoms_Kd=atoms_Kd, step=step, steps=steps, one=one):
            return looped(one, hidden_Nd, atoms_Kd, step, steps)

        plain = {"eager": eager, "compiled": compiled}
        rivals = plain | {f"{name}_tf32": in_tf32(work) for name, work in plain.items()}
        coders = {f"ours_{tolerance:g}": coder(hidden_Nd, problem, setting, tolerance) for tolerance in TOLERANCES}
        seconds = median_seconds(rivals | coders, setting)
        fastest = min(rivals, key=lambda name: seconds[name])
        found = {f"{name}_ns_a_token": value / len(hidden_Nd) * 1e9 for name, value in seconds.items()}
        found |= {f"vs_fista100_{name}": seconds[fastest] / seconds[name] for name in coders} | {"fastest": fastest}
        found["compiled_differs_by"] = float((compiled() - eager()).abs().max())  # the same iteration
        some = hidden_Nd[:CHECKED_TOKENS].double().cpu().numpy()
        codes_NK = eager()[:CHECKED_TOKENS].double().cpu().numpy()
        ours = quality(coders[f"ours_{TOLERANCES[0]:g}"](), hidden_Nd, problem)["mean_objective"]
        found["fista_above_ours"] = objective(some, problem.atoms_Kd, codes_NK, LAM).mean() / ours - 1
        yield {str(width): found}


@item(
    "solve", 40, ns_a_token={"predicted": "99 to 170", "its kernels": "59 to 95", "wanted": 80, "of them kernels": 60}
)
def stages(setting: Setting) -> Iterator[dict]:
    """Where the coder's time goes: its kernels by name, and what is left between them."""
    problem = states(setting, WIDTH)
    hidden_Nd = torch.from_numpy(problem.hidden_Nd).to(setting.device, torch.float32)
    code, kinds = coder(hidden_Nd, problem, setting, TOLERANCES[0]), torch.profiler.ProfilerActivity
    whole = median_seconds({"coder": code}, setting)["coder"]
    yield {"coder_ns_a_token": whole / len(hidden_Nd) * 1e9}
    activities = [kinds.CPU, kinds.CUDA] if setting.on_gpu else [kinds.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        code()
        if setting.on_gpu:
            torch.cuda.synchronize()
    kernels = sorted(device_events(profile, setting), key=lambda row: -row["microseconds"])
    found = dict.fromkeys((*STAGES, "other"), 0.0)
    for row in kernels:
        stage = next((name for name, pattern in STAGES.items() if re.search(pattern, row["kernel"])), "other")
        found[stage] += row["microseconds"] * 1e3 / len(hidden_Nd)
    busy = sum(found.values())
    yield {"stages_ns_a_token": found, "idle_ns_a_token": whole / len(hidden_Nd) * 1e9 - busy, "kernels": kernels[:20]}
    needs_gpu(setting)  # on a CPU these are torch's operations, and the coder has none


@item("solve", 110, failed={})
def cuda_checks(setting: Setting) -> Iterator[dict]:
    """The checks of the GPU's solver, on the GPU; in a toy run one of them, in the simulator."""
    names = setting.size([], ["penalty_above_every_correlation"])
    simulate = {} if setting.on_gpu else {"NUMBA_ENABLE_CUDASIM": "1"}
    run = subprocess.run(
        [sys.executable, str(CHECKS), *names], cwd=ROOT, capture_output=True, text=True, env=os.environ | simulate
    )
    if not run.stdout.strip():
        raise RuntimeError(f"cuda_checks ended with code {run.returncode}: {run.stderr.strip()[-300:]}")
    results = json.loads(run.stdout.strip().splitlines()[-1])
    failed = {name: trace.strip().splitlines()[-1] for name, trace in results.items() if trace}
    yield {"passed": len(results) - len(failed), "failed": failed}
    if failed:
        raise AssertionError(f"{len(failed)} of {len(results)} checks failed")
    needs_gpu(setting)


@item("solve", 40, best="as many tokens as there are, up to 32,768")
def sweep_chunks(setting: Setting) -> Iterator[dict]:
    """The coder's time with chunks of several sizes."""
    problem = states(setting, WIDTH)
    hidden_Nd = torch.from_numpy(problem.hidden_Nd).to(setting.device, torch.float32)
    hidden_Nd = hidden_Nd.repeat(setting.size(4, 1), 1)  # as many as the largest chunk
    code = coder(hidden_Nd, problem, setting, TOLERANCES[0])
    for value in CHUNKS[1]:
        with patch(CHUNKS[0], value):
            seconds = median_seconds({"coder": code}, setting)["coder"]
        yield {f"{value:,} tokens": seconds / len(hidden_Nd) * 1e9}
    needs_gpu(setting)  # a CPU's coder has no such chunks


@item("solve", 60, best="64 atoms, then 32")
def sweep_joining(setting: Setting) -> Iterator[dict]:
    """The coder's time with several numbers of atoms that join a working set; each compiles the kernels anew."""
    for first, later in setting.size(JOINING_VALUES, JOINING_VALUES[:1]):
        program = (
            "from pipeline.solvers import cuda_kernels as kernels\n"
            f"kernels.FIRST_JOINING, kernels.JOINING = {first}, {later}\n"
            f"from benchmarks.gpu_check import solve; solve.print_coder({setting.toy})"
        )
        with tempfile.TemporaryDirectory() as nowhere:  # kernels that are kept are found whatever these numbers are
            environment = os.environ | ({"NUMBA_CACHE_DIR": nowhere} if setting.on_gpu else {})
            command = [sys.executable, "-c", program]
            run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(run.stderr.strip().splitlines()[-1])
        yield {f"{first}, then {later}": float(run.stdout.split()[-1])}
    needs_gpu(setting)


def sanitize(setting: Setting, tool: str) -> Iterator[dict]:
    """What one tool of compute-sanitizer finds in short checks."""
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    needs_gpu(setting)
    if not Path(found).exists():
        raise Skip("there is no compute-sanitizer here")
    # Errors of the kernels alone: libraries call the CUDA API in ways that may fail.
    how = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    command = [found, *how, sys.executable, str(CHECKS), *SANITIZED]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = [line for line in run.stdout.splitlines() if line.startswith("=========")]
    yield {"said": lines[-5:]}
    if run.returncode:
        raise AssertionError(f"{tool}: {(lines or run.stderr.strip().splitlines() or ['nothing'])[-1]}")


@item("solve", 40, errors=0)
def memcheck(setting: Setting) -> Iterator[dict]:
    """Accesses outside of arrays."""
    yield from sanitize(setting, "memcheck")


@item("solve", 40, errors=0)
def racecheck(setting: Setting) -> Iterator[dict]:
    """Races in shared memory."""
    yield from sanitize(setting, "racecheck")


@item("solve", 30, errors=0)
def synccheck(setting: Setting) -> Iterator[dict]:
    """Barriers that not all threads reach."""
    yield from sanitize(setting, "synccheck")


# -- what they share ---------------------------------------------------------------------------------------


def states(setting: Setting, width: int) -> Problem:
    """The bench data, or the bundled teacher's states, at a width; in a toy run tiny made-up ones, at most 32 wide."""
    problem = toy_problem() if setting.toy else available_problem()
    width = min(width, 32) if setting.toy else width
    return problem if width == problem.hidden_Nd.shape[1] else problem.lifted(width)


def coder(hidden_Nd: torch.Tensor, problem: Problem, setting: Setting, tolerance: float) -> Callable:
    """A call that codes states that lie on the device."""
    atoms_Kd = torch.from_numpy(problem.atoms_Kd).to(setting.device)
    gram_KK = (atoms_Kd.double() @ atoms_Kd.double().T).float()
    prepared = prepare(atoms_Kd, gram_KK)
    backend = choose_solver(hidden_Nd, atoms_Kd, LAM, setting.device).backend if setting.on_gpu else "auto"
    return lambda: nonneg_lasso(hidden_Nd, atoms_Kd, LAM, gram_KK=prepared, tol=tolerance, backend=backend)


def print_coder(toy: bool) -> None:
    """Print the coder's nanoseconds a token, for a process whose kernels have other constants."""
    setting = Setting(torch.device("cuda" if torch.cuda.is_available() else "cpu"), toy)
    problem = states(setting, WIDTH)
    hidden_Nd = torch.from_numpy(problem.hidden_Nd).to(setting.device, torch.float32)
    code = coder(hidden_Nd, problem, setting, TOLERANCES[0])
    print(median_seconds({"coder": code}, setting)["coder"] / len(hidden_Nd) * 1e9)


def quality(codes, hidden_Nd: torch.Tensor, problem: Problem) -> dict:
    """Certificates of the first tokens in float64, and how sparse they are."""
    codes, some = codes.to_host(), hidden_Nd[:CHECKED_TOKENS].double().cpu().numpy()
    dense_NK = codes.dense(len(problem.atoms_Kd), 0, len(some))
    true_N = kkt_violation(some, problem.atoms_Kd, dense_NK, LAM)
    return {
        "kkt_max": float(true_N.max()),
        "certificate_error": float(np.abs(true_N - codes.kkt[: len(some)]).max()),
        "nonzeros_a_token": len(codes.values) / len(codes),
        "mean_objective": float(objective(some, problem.atoms_Kd, dense_NK, LAM).mean()),
    }


def fista_step(hidden_Nd, atoms_Kd, point_NK, codes_NK, step, factor):
    """One step of pipeline/solvers/fista.py: the next point and the next codes."""
    new_NK = torch.relu(point_NK + step * ((hidden_Nd - point_NK @ atoms_Kd) @ atoms_Kd.T - LAM))
    return new_NK + factor * (new_NK - codes_NK), new_NK


def looped(one, hidden_Nd, atoms_Kd, step, steps):
    """`fista_steps` by a compiled step; step size and momentum are tensors, so that it is compiled once."""
    point_NK = codes_NK = hidden_Nd.new_zeros(len(hidden_Nd), len(atoms_Kd))
    momentum, factors = 1.0, []
    for _ in range(steps):
        new_momentum = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        factors.append((momentum - 1) / new_momentum)
        momentum = new_momentum
    factors_S, step = torch.tensor(factors, device=hidden_Nd.device), torch.tensor(step, device=hidden_Nd.device)
    for factor in factors_S:
        point_NK, codes_NK = one(hidden_Nd, atoms_Kd, point_NK, codes_NK, step, factor)
    return codes_NK


def timed(rival: Callable, device: torch.device) -> float:
    """Seconds between two events on the stream; on a CPU, of the clock."""
    if device.type != "cuda":
        clock = time.perf_counter()
        rival()
        return time.perf_counter() - clock
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    rival()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1000


def in_turns(rivals: dict[str, Callable], setting: Setting) -> dict[str, list[float]]:
    """Seconds of every rival in every round that counts."""
    warm_up, rounds = setting.size((3, 15), (0, 2))
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for number in range(warm_up + rounds):
        for name, rival in rivals.items():
            seconds = timed(rival, setting.device)
            if number >= warm_up:
                times[name].append(seconds)
    return times


def median_seconds(rivals: dict[str, Callable], setting: Setting) -> dict[str, float]:
    """The median over the rounds, of every rival."""
    return {name: statistics.median(times) for name, times in in_turns(rivals, setting).items()}


def device_events(profile, setting: Setting) -> list[dict]:
    """Kernels, their calls and their time on the device; on a CPU torch's operations."""
    kind = torch.autograd.DeviceType.CUDA if setting.on_gpu else torch.autograd.DeviceType.CPU
    events = [event for event in profile.key_averages() if event.device_type == kind]
    spent = "self_device_time_total" if setting.on_gpu else "self_cpu_time_total"
    return [{"kernel": e.key, "calls": e.count, "microseconds": getattr(e, spent)} for e in events]
