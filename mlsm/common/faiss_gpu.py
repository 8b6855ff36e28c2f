"""Use faiss on a GPU, if its GPU build is installed and gave the same results there as on the CPU.

    kmeans.index = place(kmeans.index, device, products=...)        # on the GPU, or unchanged

The packages faiss-cpu and faiss-gpu install into the same directory, so only one of them can be installed; faiss-gpu
computes on both. A CUDA error in faiss ends the process, and a wheel may lack code for a GPU. So a child process tries
faiss once (proofs.py): it compares a k-means run and a search with those on the CPU. Not handled here: product
quantisation and indices in half precision, which stay on the CPU.

    python -m mlsm.common.faiss_gpu DIRECTORY       # the child: reads task.json there, writes report.jsonl
"""

import importlib.util
import json
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common import proofs

WORTH = 3 * 10**11  # multiplications; for fewer, a CPU takes a few seconds, as long as a GPU needs to initialise
SECONDS = 60.0  # time limit of the child
TRIAL = "mlsm.common.faiss_gpu"
ROWS, WIDTH, CENTROIDS, NEIGHBOURS, ITERATIONS = 20_000, 384, 512, 8, 5  # the sizes of the trial
CLOSE = 1e-3  # relative difference of objectives, and of cosines: float32 rounds at 1e-6, TF32 at 5e-4
logger = logging.getLogger(__name__)


class FaissAnswer(NamedTuple):
    """The result of a trial: whether faiss is right on the GPU, the reason in a sentence, and measurements ("cpu",
    "gpu")."""

    right: bool
    line: str
    trials: Mapping[str, Mapping[str, Any]]


def place(index: Any, device: torch.device, *, products: int) -> Any:
    """Move a flat faiss index to the GPU `device` if faiss gives correct results there; else return it unchanged.

    products  how many multiplications the caller will need
    """
    if products < WORTH or not is_possible(device) or not prove_faiss(device).right:
        return index
    return on_gpu(index, device)


def is_possible(device: torch.device) -> bool:
    """Whether faiss is installed, as a build for GPUs, and sees this device."""
    if importlib.util.find_spec("faiss") is None:
        return False
    import faiss

    has_gpu = device.type == "cuda" and hasattr(faiss, "StandardGpuResources")
    return has_gpu and faiss.get_num_gpus() > (device.index or 0)


def on_gpu(index: Any, device: torch.device) -> Any:
    """Move an index to a GPU, without regard to any trial."""
    import faiss

    return faiss.index_cpu_to_gpus_list(index, gpus=[device.index or 0])


def prove_faiss(device: torch.device, *, fresh: bool = False) -> FaissAnswer:
    """The stored result for this GPU; if there is none, or with `fresh`, the result of a new trial in a child
    process."""
    import faiss

    key = proofs.key_of(device, f"faiss {faiss.__version__}")

    def find() -> FaissAnswer | None:
        kept = proofs.recall(key)
        return FaissAnswer(**kept) if kept is not None and kept.keys() == set(FaissAnswer._fields) else None

    def prove() -> FaissAnswer:
        child = proofs.run_child(TRIAL, {"device": str(device)}, SECONDS)
        answer = judge_faiss(child.found, child.trouble)
        gpu = child.found.get("gpu")  # {}: faiss also ends its process if memory runs out
        if gpu and not gpu.get("lacks_memory") and not child.passing:
            proofs.keep(key, answer._asdict())
        logger.info("faiss on %s: %s", proofs.device_facts(device)["device"], answer.line)
        return answer

    return proofs.known_or_proven(find, prove, fresh=fresh)


def judge_faiss(trials: Mapping[str, Mapping[str, Any]], trouble: str | None) -> FaissAnswer:
    """Decide from a child's measurements. A pure function: the same measurements give the same answer."""
    cpu, gpu = (trials.get(name) for name in ("cpu", "gpu"))
    if not cpu or not gpu:
        fault = f"the child process failed ({trouble or 'it reported nothing'})"
    elif "error" in gpu:
        fault = gpu["error"]
    elif not np.isclose(gpu["objective"], cpu["objective"], rtol=CLOSE):
        fault = f"its k-means reached {gpu['objective']:.6g}, and {cpu['objective']:.6g} on the CPU"
    elif not np.allclose(gpu["cosines"], cpu["cosines"], atol=CLOSE):
        fault = "it found other neighbours than the CPU"
    else:
        times = ", ".join(f"{1e3 * trials[name]['seconds']:.3g} ms on the {name.upper()}" for name in ("gpu", "cpu"))
        return FaissAnswer(True, f"it is right ({times})", trials)
    return FaissAnswer(False, f"it cannot be used, so the CPU is: {fault}", trials)


def main(directory: Path) -> None:
    """Run k-means and a search on the CPU and on the GPU, and report each as it ends."""
    import faiss

    device = torch.device(json.loads((directory / proofs.TASK).read_text())["device"])
    torch.zeros(1, device=device)  # fails if only one process may use the GPU: then nothing is stored
    rows_Nd = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    rows_Nd[:, : WIDTH // 4] *= 4  # so that some directions have more neighbours than others
    rows_Nd /= np.linalg.norm(rows_Nd, axis=1, keepdims=True)
    for name in ("cpu", "gpu"):
        proofs.report(directory, name, {})
        try:
            kmeans = faiss.Kmeans(WIDTH, CENTROIDS, niter=ITERATIONS, spherical=True, seed=1)
            if name == "gpu":
                kmeans.index = on_gpu(kmeans.index, device)
            begun = time.perf_counter()
            objective = kmeans.train(rows_Nd)
            cosines, _ = kmeans.index.search(rows_Nd[:: ROWS // CENTROIDS], NEIGHBOURS)
            seconds = time.perf_counter() - begun
            facts = {"objective": float(objective), "cosines": cosines.mean(0).tolist(), "seconds": seconds}
        except Exception as error:  # any error of a library or driver is a result
            facts = proofs.failure(error)
        proofs.report(directory, name, facts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
