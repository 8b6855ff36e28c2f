"""Speed and quality of sparse coding on one GPU, against the teacher that it follows and FISTA.

    python -m benchmarks.gpu_coding

Written without a GPU: no GPU has run it yet. On a machine without one it says so and stops; its parts have run
on a CPU at toy sizes (tests/pipeline/solvers/test_gpu_benchmark.py).

- gpu_coder_vs_teacher  time to code tokens / time of the teacher's forward pass over the same tokens. The teacher
                        is BERT-base cut at layer 10 (random weights, bfloat16, SDPA) on windows of 128 random ids;
                        its unit-length states are coded with 3072 atoms learned from other states of it. Random
                        weights give states that are poorer than real ones, so nonzeros_per_token is reported, and
                        the coder's rate on real states too (below).
- gpu_vs_fista100       time of 100 FISTA steps, as in the official code, with TF32 allowed / time of ours, on the
                        bench data (8,192 states of width 384, 3072 atoms, lambda 0.05), KKT violation 1e-3

Rivals run in turn in every round, after rounds that warm up and compile; times are between CUDA events, medians
over rounds, ratios are taken within a round. Gaps: mean objective in float64 over bench/reference.json, minus 1.
Inputs are on the GPU already and the dictionary is prepared there, as when encoding; codes stay there.
"""

import json
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch

from benchmarks.data import conditions
from benchmarks.lifted import bench_problem
from pipeline.solvers import nonneg_lasso, prepare
from pipeline.solvers.fista import fista_steps
from pipeline.solvers.problem import kkt_violation, objective

WARM_UP, ROUNDS = 3, 15
LAM, TOL = 0.05, 1e-3
PAPER = SimpleNamespace(config={}, layer=10, windows=128, length=128, atoms=3072, training_vectors=65_536)


def main():
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; torch finds none here")
    device = torch.device("cuda")
    result = {
        "benchmark": "gpu_coding",
        **coder_against_teacher(device, PAPER),
        **coder_against_fista(device, *bench_problem()),
        "rounds": ROUNDS,
        "warm_up": WARM_UP,
        "gpu": torch.cuda.get_device_name(device),
        "cuda": torch.version.cuda,
        **conditions("numba-cuda"),
    }
    show(result)
    print(json.dumps(result))


# -- against the teacher -----------------------------------------------------------------------------------


def coder_against_teacher(device, setting):
    """The coder and the teacher on the same tokens; `setting` as PAPER."""
    teacher = random_teacher(device, setting)
    states_Nd = unit_states(teacher, random_ids(teacher, setting, setting.training_vectors // setting.length, seed=1))
    atoms_Kd = learned_atoms(states_Nd, setting.atoms, device)
    ids_WL = random_ids(teacher, setting, setting.windows, seed=2)
    hidden_Nd, coder = unit_states(teacher, ids_WL), Coder(atoms_Kd)
    times = measure({"coder": lambda: coder(hidden_Nd), "teacher": lambda: teacher(ids_WL)}, device)
    quality = coder.quality(hidden_Nd)
    return {
        "gpu_coder_vs_teacher": ratio(times, "coder", "teacher"),
        **rates(times, len(hidden_Nd)),
        "teacher_states_nonzeros_per_token": quality["nonzeros_per_token"],
        "teacher_states_kkt_max": quality["kkt_max"],
    }


def random_teacher(device, setting):
    from transformers import BertConfig, BertModel

    from pipeline.teacher import Teacher

    torch.manual_seed(0)
    config = BertConfig(**{"num_hidden_layers": setting.layer, **setting.config}, attn_implementation="sdpa")
    model = BertModel(config, add_pooling_layer=False).to(device, torch.bfloat16).eval()
    return Teacher("random", setting.layer, setting.layer, model, fingerprint="")


def random_ids(teacher, setting, windows, seed):
    generator = torch.Generator().manual_seed(seed)
    ids_WL = torch.randint(teacher.vocab_size, (max(1, windows), setting.length), generator=generator)
    return ids_WL.to(teacher.device)


@torch.inference_mode()
def unit_states(teacher, ids_WL):
    parts = [teacher(ids_wL).flatten(0, 1) for ids_wL in ids_WL.split(64)]  # full windows: no mask to look into
    return torch.nn.functional.normalize(torch.cat(parts), dim=1)


def learned_atoms(states_Nd, count, device):
    from pipeline.dictionary import DictionarySettings, learn_dictionary

    dictionary = learn_dictionary(states_Nd.cpu().numpy(), DictionarySettings(count, LAM, seed=0))
    return torch.as_tensor(dictionary.atoms_Kd, device=device)


# -- against FISTA -----------------------------------------------------------------------------------------


def coder_against_fista(device, exact_Nd, atoms_Kd, optimum):
    """Both on the same tokens; exact_Nd is float64."""
    hidden_Nd = torch.as_tensor(exact_Nd, dtype=torch.float32, device=device)
    coder = Coder(torch.as_tensor(atoms_Kd, device=device))
    step = 1 / torch.linalg.eigvalsh(coder.atoms_Kd.T @ coder.atoms_Kd)[-1].item()

    def fista():
        torch.backends.cuda.matmul.allow_tf32 = True
        codes_NK = fista_steps(hidden_Nd, coder.atoms_Kd, LAM, step, 100)
        torch.backends.cuda.matmul.allow_tf32 = False
        return codes_NK

    times = measure({"ours": lambda: coder(hidden_Nd), "fista100": fista}, device)
    exact_atoms, some = coder.atoms_Kd.cpu().numpy(), slice(0, 1024)
    fista_N = objective(exact_Nd[some], exact_atoms, fista()[some].double().cpu().numpy(), LAM)
    ours_N = objective(exact_Nd, exact_atoms, coder.codes(hidden_Nd), LAM)
    return {
        "gpu_vs_fista100": ratio(times, "fista100", "ours"),
        **rates(times, len(hidden_Nd)),
        "gpu_relative_objective_gap": float(ours_N.mean() / optimum - 1),
        "fista100_relative_objective_gap": float(fista_N.mean() / ours_N[some].mean() - 1),
        **coder.quality(hidden_Nd),
    }


# -- what both share ---------------------------------------------------------------------------------------


class Coder:
    """Our solver with one dictionary, prepared once, as when encoding; its checks are in its time."""

    def __init__(self, atoms_Kd):
        self.atoms_Kd = atoms_Kd
        self.prepared = prepare(atoms_Kd, (atoms_Kd.double() @ atoms_Kd.double().T).float())

    def __call__(self, hidden_Nd):
        return nonneg_lasso(hidden_Nd, self.atoms_Kd, LAM, gram_KK=self.prepared, tol=TOL)

    def codes(self, hidden_Nd):
        """Codes as NumPy arrays."""
        return self(hidden_Nd).to_host()

    def quality(self, hidden_Nd, tokens=2048):
        """Certificate in float64 of the first tokens, and how sparse they are."""
        hidden_Nd = hidden_Nd[:tokens]
        codes = self.codes(hidden_Nd)
        true_N = kkt_violation(hidden_Nd.cpu().numpy(), self.atoms_Kd.cpu().numpy(), codes, LAM)
        return {
            "kkt_max": float(true_N.max()),
            "certificate_error": float(np.abs(true_N - codes.kkt).max()),
            "nonzeros_per_token": len(codes.values) / len(codes),
        }


def measure(rivals, device):
    """Seconds of every rival in every round that counts."""
    times = {name: [] for name in rivals}
    for round_number in range(WARM_UP + ROUNDS):
        for name, rival in rivals.items():
            seconds = timed(rival, device)
            if round_number >= WARM_UP:
                times[name].append(seconds)
    return times


def timed(rival, device):
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


def ratio(times, numerator, denominator):
    """Median and quartiles of the ratios of the rounds."""
    ratios = np.array(times[numerator]) / np.array(times[denominator])
    return {"median": float(np.median(ratios)), "quartiles": [float(np.quantile(ratios, q)) for q in (0.25, 0.75)]}


def rates(times, tokens):
    return {f"{name}_tokens_per_s": tokens / float(np.median(values)) for name, values in times.items()}


def show(result):
    print(
        f"coder / teacher    {result['gpu_coder_vs_teacher']['median']:.2f} of the teacher's time: "
        f"{result['coder_tokens_per_s']:,.0f} against {result['teacher_tokens_per_s']:,.0f} tokens/s, "
        f"{result['teacher_states_nonzeros_per_token']:.1f} non-zeros a token"
    )
    print(
        f"FISTA 100 / ours   {result['gpu_vs_fista100']['median']:.1f} times as long: "
        f"{result['fista100_tokens_per_s']:,.0f} against {result['ours_tokens_per_s']:,.0f} tokens/s, "
        f"{result['fista100_relative_objective_gap']:.1e} against {result['gpu_relative_objective_gap']:.1e} above "
        f"the optimum; ours with KKT violations up to {result['kkt_max']:.1e}"
    )


if __name__ == "__main__":
    main()
