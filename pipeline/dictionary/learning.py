"""Online dictionary learning: the atoms that make non-negative codes of hidden states sparse and exact.

    dictionary = learn_dictionary(hidden_Nd, DictionarySettings(k=3072, lam=0.05, seed=0))

Mairal et al. 2009 (Online dictionary learning for sparse coding), algorithm 1 with the minibatches, the forgetting and
the replacement of unused atoms of section 3.4. Nearly equal atoms are also replaced (near.py), just before an
evaluation, so the returned atoms, which were evaluated, have none if the vectors allow it. This module has the order of
the work, the evaluation on held-out vectors, and the stopping rule; the learners do the minibatches (cpu.py, torch.py).
Memory is bounded by A, the Gram matrix and, in an evaluation, its cosines (K x K each), and 16 bytes per vector, for
(memory-mapped) input of any length; k-means needs 64 vectors per atom in addition. Random numbers follow from (seed,
epoch): equal input and thread count give equal atoms, interrupted or not.
Not handled here: the codes themselves (solvers/), where the vectors come from (sample.py), the files (atoms.py).

Shapes: N training vectors, n of a minibatch, H held-out vectors, d width, K atoms.
"""

import itertools
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm.common import faiss_gpu
from mlsm.common.device import choose_device
from mlsm.common.progress import silent
from pipeline.config import minibatch_size
from pipeline.dictionary.atoms import Dictionary
from pipeline.dictionary.checkpoint import Checkpoint
from pipeline.dictionary.cpu import CpuLearner
from pipeline.dictionary.near import cosines, far_rows, near_atoms
from pipeline.dictionary.torch import TorchLearner
from pipeline.dictionary.vectors import TrainingVectors
from pipeline.solvers import proof
from pipeline.solvers.problem import Codes, objective

# Raise this number when equal settings and vectors give other atoms: it is part of dictionaries' names (learn.py), and
# older checkpoints are ignored. 2: nearly equal atoms are replaced.
ALGORITHM = 2
FORGETTING = 4.0  # minibatch s weighs (s / t) ** FORGETTING at minibatch t
KMEANS_ITERATIONS = 2  # ten take five times as long for a gain of 0.2 % after two passes
KMEANS_VECTORS_PER_ATOM = 64
CLUSTER_ITERATIONS = 25  # iterations of k-means if its centroids are the atoms
KEPT = (8, 16, 24, 32, 48, 64, 96, 128, 192, 255)  # entries of a distribution whose mass is recorded
SMALLEST_VARIANCE = 1e-6  # of unit-length held-out vectors; below it is only rounding
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DictionarySettings:
    """The settings of the dictionary to learn.

    k     number of atoms
    lam   penalty of the codes, in units of a correlation
    seed  seed of the held-out split, the first atoms and the order
    init  the first atoms: "sample", k of the vectors; "kmeans", spherical k-means by faiss
    atoms  "learned", or a control without learning: "sampled", the first atoms of "sample"; "clusters", the centroids
           of a k-means with more iterations
    """

    k: int
    lam: float
    seed: int
    init: str = "sample"
    atoms: str = "learned"


@dataclass(frozen=True)
class LearningSchedule:
    """How long learning continues, and with which minibatches and evaluations.

    epochs           largest number of passes over the vectors
    batch            vectors of a minibatch; None: minibatch_size of all vectors
    min_improvement  learning stops when the held-out objective falls by less than this, relative, twice in a row
    evaluate_every   largest number of vectors between evaluations; at least one evaluation per epoch
    """

    epochs: float = 2.0
    batch: int | None = None
    min_improvement: float = 3e-4
    evaluate_every: int = 65_536


USUAL_SCHEDULE = LearningSchedule()


def learn_dictionary(
    hidden_Nd: np.ndarray | str | Path,
    settings: DictionarySettings,
    schedule: LearningSchedule = USUAL_SCHEDULE,
    *,
    held_out_Hd: np.ndarray | None = None,
    device: str = "cpu",
    checkpoint: str | Path | None = None,
    progress: Callable = silent,
) -> Dictionary:
    """Learn atoms from hidden states; rows are scaled to unit length as they are read.

    hidden_Nd    float16, float32 or float64: an array, a memory-mapped array or the path of a .npy file
    held_out_Hd  vectors for evaluation; default: up to 2,048, at most a tenth, set aside by the seed
    device       "cpu", "cuda", or "auto": CUDA where torch sees it
    checkpoint   directory in which to keep the state, at evaluations, at most once a minute. If an interrupted call is
                 repeated, it continues from there and ends with the same bits. The state stays at the end, so nothing
                 is lost before the dictionary is saved: remove it then. Other settings or vectors start from scratch;
                 a change in few of the vectors may go unnoticed (TrainingVectors.identity)
    progress     called as progress("dictionary", vectors, most vectors, unit="vectors", **figures)
    Returns      Dictionary with the atoms of the evaluation with the lowest objective
    Raises       DeviceError; ValueError if k exceeds the training vectors, on NaN or infinity (naming rows), shapes
    """
    vectors = TrainingVectors(hidden_Nd, held_out_Hd, settings.seed)
    batch = schedule.batch
    if batch is None:
        batch = minibatch_size(len(vectors) + (len(vectors.held_out_Hd) if held_out_Hd is None else 0))
    request = _request(settings, schedule, batch)
    _check(request, vectors)
    return _Learning(vectors, request, _device(device), progress).run(checkpoint)


def _request(settings: DictionarySettings, schedule: LearningSchedule, batch: int) -> dict:
    """The settings as dictionary.json and the checkpoint hold them; names and order are part of these formats."""
    atoms = (
        {} if settings.atoms == "learned" else {"atoms": settings.atoms}
    )  # only if not usual, so that dictionaries keep their names
    return {
        "k": settings.k,
        "lam": settings.lam,
        "seed": settings.seed,
        "epochs": schedule.epochs,
        "init": settings.init,
        "batch": batch,
        "forgetting": FORGETTING,
        "min_improvement": schedule.min_improvement,
        "evaluate_every": schedule.evaluate_every,
        **atoms,
    }


def _check(settings, vectors):
    k, count = settings["k"], len(vectors)
    for name in ("k", "batch"):
        if not isinstance(settings[name], int | np.integer):
            raise ValueError(f"{name} must be a whole number; found {settings[name]!r}")
    if not 1 <= k <= count:
        raise ValueError(
            f"k = {k:,} atoms need at least as many training vectors; found {count:,}, with "
            f"{len(vectors.held_out_Hd):,} more held out. Use a smaller k or more vectors."
        )
    if (
        np.ndim(vectors.held_out_Hd) != 2
        or vectors.held_out_Hd.shape[1] != vectors.width
        or len(vectors.held_out_Hd) == 0
    ):
        raise ValueError(
            f"held-out vectors must have shape (H, {vectors.width}) with H >= 1; found {np.shape(vectors.held_out_Hd)}"
        )
    for name in ("lam", "epochs", "batch", "evaluate_every"):
        if not 0 < settings[name] < math.inf:
            raise ValueError(f"{name} must be positive and finite; found {settings[name]}")
    if settings["init"] not in ("sample", "kmeans"):
        raise ValueError(f"init must be 'sample' or 'kmeans'; found {settings['init']!r}")
    if settings.get("atoms", "sampled") not in ("sampled", "clusters"):
        raise ValueError(f"atoms must be 'learned', 'sampled' or 'clusters'; found {settings['atoms']!r}")


def _device(device):
    if device == "cpu":
        return device
    if choose_device(device).type == "cpu":
        return "cpu"
    return "cuda" if device == "auto" else device  # unchanged, because checkpoints record it so


class _Learning:
    """The loop over minibatches: where it is, and when to evaluate, save and stop."""

    def __init__(self, vectors, settings, device, progress):
        self.vectors, self.settings, self.device, self.progress = vectors, settings, device, progress
        self.total = int(np.ceil(settings["epochs"] * len(vectors)))
        self.evaluations = int(np.ceil(self.total / min(settings["evaluate_every"], len(vectors))))
        self.done = 0
        self.evaluation = _Evaluation(vectors.held_out_Hd, settings["lam"])
        self.backend: str | None = None  # of nonneg_lasso on a GPU, after its test
        self.is_settled = True  # whether a checkpoint keeps it

    def run(self, checkpoint=None):
        """Resume from the checkpoint or start; returns the Dictionary. Atoms of controls need no learning."""
        if "atoms" in self.settings:
            self.learner = self._make_learner(_initial_atoms(self.vectors, self.settings, self.device))
            self.evaluation.add(self.learner, 0, 0.0)
            return self._finish(f"{self.settings['atoms']}: not learned")
        if checkpoint is not None:
            checkpoint = Checkpoint(
                checkpoint,
                {
                    "algorithm": ALGORITHM,
                    "settings": self.settings,
                    "vectors": self.vectors.identity(),
                    "device": self.device,
                },
            )
        self._restore(checkpoint and checkpoint.load())
        stopped = self.evaluation.stop_reason(self.settings["min_improvement"])
        while stopped is None and self.done < self.total:
            evaluated = self._minibatch()
            if checkpoint and evaluated:
                checkpoint.save_if_due(self._state)
            stopped = self.evaluation.stop_reason(self.settings["min_improvement"])
        if checkpoint:
            checkpoint.save(*self._state())
        if stopped is None:
            stopped = f"epochs: {self.settings['epochs']:g} passes over {len(self.vectors):,} vectors are done"
        return self._finish(stopped)

    def _finish(self, stopped):
        settings = self.settings | {"vectors": len(self.vectors), "held_out": len(self.vectors.held_out_Hd)}
        settings |= self._backend_record()
        return Dictionary(self.evaluation.best_atoms_Kd, self.evaluation.history, stopped, settings)

    def _minibatch(self):
        """One step and, at regular intervals, an evaluation; returns whether there was one."""
        hidden_nd = self.vectors.minibatch(self.done, min(self.settings["batch"], self.total - self.done))
        self.learner.step(hidden_nd)
        self.done += len(hidden_nd)
        due = self.done * self.evaluations >= self.total * (len(self.evaluation.history) + 1)
        if due:
            replaced = self.learner.replace_near(hidden_nd)
            is_short = len(hidden_nd) < self.settings["batch"]
            if is_short:  # the last minibatch of an epoch may have too few vectors, even one
                replaced += self.learner.replace_near(self._recent())
            self.evaluation.add(self.learner, self.done, self.done / len(self.vectors), replaced)
            if is_short and (self.learner.uses_K == 0).sum() > len(hidden_nd):
                hidden_nd = self._recent()
            self.learner.replace_unused(hidden_nd)
        self.progress("dictionary", self.done, self.total, unit="vectors", **self.evaluation.figures())
        return due

    def _recent(self):
        """The last vectors of this epoch, as many as a full minibatch has, or all of the epoch so far."""
        epoch = (self.done - 1) // len(self.vectors)
        start = max(epoch * len(self.vectors), self.done - self.settings["batch"])
        return self.vectors.minibatch(start, self.done - start)

    def _state(self):
        """Arrays and facts that _restore continues from."""
        evaluation = self.evaluation
        return (
            {**self.learner.state(), "best_atoms_Kd": evaluation.best_atoms_Kd},
            {"done": self.done, "history": evaluation.history, "best_objective": evaluation.best_objective}
            | (self._backend_record() if self.is_settled else {}),
        )

    def _backend_record(self):
        """The solver that a GPU uses, for the checkpoint and for dictionary.json; a CPU has only one."""
        return {} if self.backend is None else {"solver_backend": self.backend}

    def _restore(self, state):
        """Set the learner up from a state, or from scratch if there is none."""
        if state is None:
            self.learner = self._make_learner(_initial_atoms(self.vectors, self.settings, self.device))
            return
        arrays, facts = state
        self.learner = self._make_learner(arrays["atoms_Kd"], facts.get("solver_backend"))
        self.learner.restore(arrays)
        self.done, self.evaluation.history = facts["done"], facts["history"]
        self.evaluation.best_objective = facts["best_objective"]
        self.evaluation.best_atoms_Kd = arrays["best_atoms_Kd"]
        logger.info("dictionary: continuing after %s of %s vectors", f"{self.done:,}", f"{self.total:,}")

    def _make_learner(self, atoms_Kd, begun_with=None):
        """The learner of the device. On a GPU its solver is first tested on some of the vectors (solvers/proof.py).

        begun_with  the solver of the checkpoint
        """
        lam = self.settings["lam"]
        if self.device == "cpu":
            return CpuLearner(atoms_Kd, lam, FORGETTING)
        device = torch.device(self.device)
        if proof.is_needed(device):
            rows_Nd = self.vectors.sample(min(proof.ROWS, len(self.vectors)))
            choice = proof.choose_solver(rows_Nd, atoms_Kd, lam, device, begun_with=begun_with)
            self.backend, self.is_settled = choice.backend, choice.keep
        return TorchLearner(atoms_Kd, lam, FORGETTING, device, self.backend or "auto")


def _initial_atoms(vectors, settings, device):
    k, kind = settings["k"], settings.get("atoms", settings["init"])
    if kind in ("sample", "sampled"):
        return _without_near_ones(vectors.sample(k), vectors, whole_sample=kind == "sampled")
    import faiss

    hidden_nd = vectors.sample(KMEANS_VECTORS_PER_ATOM * k)
    iterations = CLUSTER_ITERATIONS if kind == "clusters" else KMEANS_ITERATIONS
    kmeans = faiss.Kmeans(
        hidden_nd.shape[1],
        k,
        niter=iterations,
        spherical=True,
        seed=settings["seed"],
        min_points_per_centroid=1,
        max_points_per_centroid=KMEANS_VECTORS_PER_ATOM,
    )
    products = iterations * k * hidden_nd.size
    kmeans.index = faiss_gpu.place(kmeans.index, torch.device(device), products=products)
    kmeans.train(hidden_nd)
    centroids_Kd = np.ascontiguousarray(kmeans.centroids)
    return centroids_Kd if kind == "clusters" else _without_near_ones(centroids_Kd, vectors)


def _without_near_ones(atoms_Kd, vectors, whole_sample=False):
    """The atoms, with sampled vectors replacing those that are zeros or nearly equal to an earlier one.

    whole_sample  whether to search all of the sample for others, not only as many vectors as there are atoms: learning
                  replaces the near atoms that are left, but a sample that is not learned keeps them
    """
    k, given_up = len(atoms_Kd), np.flatnonzero(~atoms_Kd.any(1)).tolist()
    given_up += near_atoms(atoms_Kd @ atoms_Kd.T, np.zeros(k))
    for skip in itertools.count(k, k):
        spare_Kd = vectors.sample(k, skip=skip) if given_up else atoms_Kd[:0]
        rows = far_rows(spare_Kd, np.delete(atoms_Kd, given_up, axis=0), len(given_up))
        atoms_Kd[given_up[: len(rows)]] = spare_Kd[rows]
        given_up = given_up[len(rows) :]
        if not whole_sample or len(spare_Kd) == 0:
            return atoms_Kd


def kept_mass(codes: Codes) -> dict[str, float]:
    """The mean share of a code's sum that its n largest entries hold, for each n of KEPT; empty codes are ignored."""
    rows = [np.sort(codes.values[start:stop])[::-1] for start, stop in itertools.pairwise(codes.indptr) if stop > start]
    shares = [np.cumsum(row, dtype=np.float64) / row.sum(dtype=np.float64) for row in rows]
    return {str(n): float(np.mean([share[min(n, len(share)) - 1] for share in shares] or [1.0])) for n in KEPT}


class _Evaluation:
    """Held-out figures over time, and the best atoms so far."""

    def __init__(self, held_out_Hd, lam):
        self.held_out_Hd, self.lam, self.history = held_out_Hd, lam, []
        self.variance = float(held_out_Hd.var(0, dtype=np.float64).sum())
        self.best_objective = np.inf
        self.best_atoms_Kd: Any = None  # an array after the first evaluation

    def add(self, learner, vectors, epoch, replaced=0):
        """Code the held-out vectors with the learner's atoms. Before any step, atoms that this does not use are dead.

        replaced  how many atoms were nearly equal to another one, and were replaced before this evaluation
        """
        atoms_Kd, codes = learner.atoms(), learner.code(self.held_out_Hd)
        uses_K = learner.uses_K if vectors else np.bincount(codes.indices, minlength=len(atoms_Kd))
        value = float(objective(self.held_out_Hd, atoms_Kd, codes, self.lam).mean())
        squared_residual = 2 * (value - self.lam * codes.values.sum(dtype=np.float64) / len(codes))
        explained = float(1 - squared_residual / self.variance) if self.variance > SMALLEST_VARIANCE else None
        self.history.append(
            {
                "vectors": vectors,
                "epoch": round(epoch, 4),
                "objective": value,
                "nnz": len(codes.values) / len(codes),
                "explained_variance": explained,
                "dead_atoms": int((uses_K == 0).sum()),
                "near_atoms": replaced,
                "largest_cosine": float(cosines(learner.gram()).max()),
                "kept_mass": kept_mass(codes),
            }
        )
        if value < self.best_objective:
            self.best_objective, self.best_atoms_Kd = value, atoms_Kd

    def stop_reason(self, min_improvement):
        """The reason to stop, or None."""
        recent = [entry["objective"] for entry in self.history[-3:]]
        slow = [after > before * (1 - min_improvement) for before, after in itertools.pairwise(recent)]
        if slow == [True, True]:
            return f"converged: the held-out objective fell by less than {min_improvement:.2%} twice in a row"
        return None

    def figures(self):
        """The latest figures, for progress."""
        last = self.history[-1] if self.history else {}
        return {name: last[name] for name in last if name not in ("vectors", "epoch", "kept_mass")}
