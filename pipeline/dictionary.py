"""Online dictionary learning: the atoms that make non-negative codes of hidden states sparse and exact.

    dictionary = learn_dictionary(hidden_Nd, k=3072, lam=0.05, seed=0)
    dictionary.save("atoms")

Mairal et al. 2009 (Online dictionary learning for sparse coding), algorithm 1 with the minibatches, the
forgetting and the replacement of unused atoms of section 3.4: code a minibatch, add its codes to A = sum a a'
and B = sum h a' after scaling these down, then one pass of block coordinate descent over the atoms, each
projected on the unit ball. Memory is bounded by A (K x K) and 8 bytes a vector, whatever the length of the
(memory-mapped) input. Randomness comes from (seed, epoch): equal input and thread count give equal atoms.
Left out: the codes themselves (solvers/), the GPU, where the vectors come from (encode.py).

Shapes: N training vectors, n of a minibatch, H held-out vectors, d width, K atoms.
"""

import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.solvers import nonneg_lasso
from pipeline.solvers.parallel import kernel, one_blas_thread, run_in_threads, thread_count
from pipeline.solvers.problem import objective

FORMAT = 1
HELD_OUT_VECTORS = 2048         # at most a tenth of the vectors
ATOMS_PER_UPDATE = 64           # atoms whose common term is one matrix product
KMEANS_ITERATIONS = 10
KMEANS_VECTORS_PER_ATOM = 64
KKT_TOLERANCE = 1e-2            # of codes that only train: 1e-3 costs 20 % more time for the same objective


class DictionaryError(ValueError):
    """A stored dictionary that cannot be used."""


def silent(*args, **figures):
    """Progress that nobody watches."""


@dataclass(frozen=True)
class Dictionary:
    """Atoms with how they came about.

    atoms_Kd  float32, row norms <= 1
    history   one dict of held-out figures for each evaluation: vectors, epoch, objective, nnz (per vector),
              explained_variance, dead_atoms (unused since the evaluation before, then replaced)
    stopped   why learning ended
    settings  what it was asked for
    """

    atoms_Kd: np.ndarray
    history: list
    stopped: str
    settings: dict

    @property
    def fingerprint(self):
        """sha256 over shape and bytes of the atoms, hexadecimal."""
        digest = hashlib.sha256(repr(self.atoms_Kd.shape).encode())
        digest.update(np.ascontiguousarray(self.atoms_Kd, "<f4"))
        return digest.hexdigest()

    def save(self, directory):
        """Write atoms.npy and dictionary.json into a new directory, which appears whole or not at all.

        Raises DictionaryError if the directory already holds something else.
        """
        directory = Path(directory)
        temporary = directory.with_name(f".{directory.name}.{time.time_ns()}.tmp")
        temporary.mkdir(parents=True)
        record = {"format": FORMAT, "fingerprint": self.fingerprint, "shape": list(self.atoms_Kd.shape),
                  "stopped": self.stopped, "settings": self.settings, "history": self.history}
        _write(temporary / "atoms.npy", lambda file: np.save(file, self.atoms_Kd))
        _write(temporary / "dictionary.json", lambda file: file.write(json.dumps(record, indent=1).encode()))
        try:
            temporary.rename(directory)
        except OSError as error:
            shutil.rmtree(temporary)
            if not _holds(directory, self.fingerprint):
                raise DictionaryError(f"{directory} exists and is not this dictionary. Save to another "
                                      "directory, or remove that one.") from error

    @classmethod
    def load(cls, directory):
        """Read what `save` wrote. Raises DictionaryError if it is not there or damaged."""
        directory = Path(directory)
        try:
            record = json.loads((directory / "dictionary.json").read_text())
            dictionary = cls(np.load(directory / "atoms.npy", allow_pickle=False), record["history"],
                             record["stopped"], record["settings"])
            found, expected = dictionary.fingerprint, record["fingerprint"]
        except FileNotFoundError as error:
            raise DictionaryError(f"{directory} is not a dictionary: it has no {Path(error.filename).name}. "
                                  "Make one with: mlsm learn-dictionary") from error
        except (OSError, ValueError, EOFError, KeyError, TypeError) as error:
            raise DictionaryError(f"{directory} is damaged ({error}). Copy or learn it again.") from error
        if found != expected:
            raise DictionaryError(f"{directory} is damaged: atoms.npy has sha256 {found[:12]}, "
                                  f"dictionary.json says {expected[:12]}. Copy or learn it again.")
        return dictionary


def _write(path, write):
    with open(path, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def _holds(directory, fingerprint):
    try:
        return Dictionary.load(directory).fingerprint == fingerprint
    except DictionaryError:
        return False


def learn_dictionary(hidden_Nd, k, lam, *, seed, held_out_Hd=None, epochs=2.0, init="sample", batch=2048,
                     forgetting=4.0, min_improvement=3e-4, evaluate_every=65_536, progress=silent):
    """Learn k atoms from hidden states; rows are scaled to unit length as they are read.

    hidden_Nd        float16 or float32, an array, a memory-mapped array or the path of a .npy file
    k, lam           number of atoms; penalty of the codes, in units of a correlation
    seed             of the split, the initialisation and the order
    held_out_Hd      vectors to judge by; default: up to 2,048, at most a tenth, set aside by the seed
    epochs           most passes over the vectors
    init             "sample": k of the vectors; "kmeans": spherical k-means by faiss
    batch            vectors of a minibatch
    forgetting       minibatch s weighs (s / t) ** forgetting at minibatch t
    min_improvement  stop when the held-out objective falls by less than this, relative, twice in a row
    evaluate_every   most vectors between evaluations, which come at least once an epoch
    progress         called as progress("dictionary", vectors, most vectors, unit="vectors", **figures)
    Returns          Dictionary, the evaluated state with the lowest held-out objective
    Raises           ValueError if k exceeds the training vectors, on NaN or infinity (naming rows), shapes
    """
    settings = {"k": k, "lam": lam, "seed": seed, "epochs": epochs, "init": init, "batch": batch,
                "forgetting": forgetting, "min_improvement": min_improvement,
                "evaluate_every": evaluate_every}
    vectors = _Vectors(hidden_Nd, held_out_Hd, seed)
    _check(settings, vectors)
    learner = _Learner(_initial_atoms(vectors, k, init, seed), lam, forgetting)
    evaluation = _Evaluation(vectors.held_out_Hd, lam)
    return _learn(learner, vectors, evaluation, settings, progress)


def _check(settings, vectors):
    k, count = settings["k"], len(vectors)
    if not 1 <= k <= count:
        raise ValueError(f"k = {k:,} atoms need at least as many training vectors; found {count:,}, with "
                         f"{len(vectors.held_out_Hd):,} more held out. Use a smaller k or more vectors.")
    if np.ndim(vectors.held_out_Hd) != 2 or vectors.held_out_Hd.shape[1] != vectors.width \
            or len(vectors.held_out_Hd) == 0:
        raise ValueError(f"held-out vectors must have shape (H, {vectors.width}) with H >= 1; found "
                         f"{np.shape(vectors.held_out_Hd)}")
    for name in ("lam", "epochs", "batch", "evaluate_every"):
        if not settings[name] > 0:
            raise ValueError(f"{name} must be positive; found {settings[name]}")
    if settings["init"] not in ("sample", "kmeans"):
        raise ValueError(f"init must be 'sample' or 'kmeans'; found {settings['init']!r}")


def _learn(learner, vectors, evaluation, settings, progress):
    """The loop over minibatches: returns the Dictionary."""
    total = int(np.ceil(settings["epochs"] * len(vectors)))
    evaluations = int(np.ceil(total / min(settings["evaluate_every"], len(vectors))))
    done, stopped = 0, None
    while stopped is None:
        hidden_nd = vectors.minibatch(done, min(settings["batch"], total - done))
        learner.step(hidden_nd)
        done += len(hidden_nd)
        if done * evaluations >= total * (len(evaluation.history) + 1):      # equal stretches of the whole
            evaluation.add(learner, done, done / len(vectors))
            stopped = evaluation.stop_reason(settings["min_improvement"])
            learner.replace_unused(hidden_nd)
        if stopped is None and done >= total:
            stopped = f"epochs: {settings['epochs']:g} passes over {len(vectors):,} vectors are done"
        progress("dictionary", done, total, unit="vectors", **evaluation.figures())
    settings = settings | {"vectors": len(vectors), "held_out": len(vectors.held_out_Hd)}
    return Dictionary(evaluation.best_atoms_Kd, evaluation.history, stopped, settings)


class _Vectors:
    """Training vectors in an order that follows from (seed, epoch), and held-out ones."""

    def __init__(self, hidden_Nd, held_out_Hd, seed):
        if isinstance(hidden_Nd, str | os.PathLike):
            hidden_Nd = np.load(hidden_Nd, mmap_mode="r", allow_pickle=False)
        if np.ndim(hidden_Nd) != 2:
            raise ValueError(f"training vectors must have shape (N, d); found {np.shape(hidden_Nd)}")
        self.hidden_Nd, self.seed, self.epoch = hidden_Nd, seed, -1
        count, self.width = hidden_Nd.shape
        if held_out_Hd is None:
            held_out = min(HELD_OUT_VECTORS, max(1, count // 10))
            chosen = np.random.default_rng([seed, 0]).permutation(count)[:held_out]
            self.train_rows = np.setdiff1d(np.arange(count), chosen, assume_unique=True)
            self.held_out_Hd = self._unit_rows(chosen)
        else:
            self.train_rows = np.arange(count)
            self.held_out_Hd = _unit_length(held_out_Hd, np.arange(len(held_out_Hd)))

    def __len__(self):
        return len(self.train_rows)

    def minibatch(self, start, length):
        """Unit-length vectors start to start + length of the endless order; ends at an epoch's end."""
        epoch, place = divmod(start, len(self))
        if epoch != self.epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.seed, 1, epoch]).permutation(self.train_rows)
        return self._unit_rows(self.order[place:place + length])

    def sample(self, count):
        """`count` distinct training vectors."""
        return self._unit_rows(np.random.default_rng([self.seed, 2]).permutation(self.train_rows)[:count])

    def _unit_rows(self, rows):
        rows = np.sort(rows)            # neighbours on disk together
        return _unit_length(self.hidden_Nd[rows], rows)


def _unit_length(hidden_nd, row_numbers):
    hidden_nd = np.asarray(hidden_nd, np.float32)
    norms_n = np.linalg.norm(hidden_nd, axis=1, keepdims=True)
    if not np.isfinite(norms_n).all():
        bad = row_numbers[~np.isfinite(norms_n[:, 0])]
        raise ValueError(f"training vectors: NaN or infinity in row {', '.join(map(str, bad[:10]))}; "
                         "leave them out")
    return hidden_nd / np.maximum(norms_n, 1e-12)


def _initial_atoms(vectors, k, init, seed):
    if init == "sample":
        return vectors.sample(k)
    import faiss

    hidden_nd = vectors.sample(KMEANS_VECTORS_PER_ATOM * k)
    kmeans = faiss.Kmeans(hidden_nd.shape[1], k, niter=KMEANS_ITERATIONS, spherical=True, seed=seed,
                          min_points_per_centroid=1, max_points_per_centroid=KMEANS_VECTORS_PER_ATOM)
    kmeans.train(hidden_nd)
    return np.ascontiguousarray(kmeans.centroids)


class _Evaluation:
    """Held-out figures over time, and the best atoms so far."""

    def __init__(self, held_out_Hd, lam):
        self.held_out_Hd, self.lam, self.history = held_out_Hd, lam, []
        self.variance = float(held_out_Hd.var(0, dtype=np.float64).sum())
        self.best_objective, self.best_atoms_Kd = np.inf, None

    def add(self, learner, vectors, epoch):
        """Code the held-out vectors with the learner's atoms."""
        codes = nonneg_lasso(self.held_out_Hd, learner.atoms_Kd, self.lam, gram_KK=learner.gram_KK)
        value = float(objective(self.held_out_Hd, learner.atoms_Kd, codes, self.lam).mean())
        squared_residual = 2 * (value - self.lam * codes.values.sum(dtype=np.float64) / len(codes))
        self.history.append({"vectors": vectors, "epoch": round(epoch, 4), "objective": value,
                             "nnz": len(codes.values) / len(codes),
                             "explained_variance": float(1 - squared_residual / max(self.variance, 1e-12)),
                             "dead_atoms": int((learner.uses_K == 0).sum())})
        if value < self.best_objective:
            self.best_objective, self.best_atoms_Kd = value, learner.atoms_Kd.copy()

    def stop_reason(self, min_improvement):
        """Why to stop, or None."""
        recent = [entry["objective"] for entry in self.history[-3:]]
        if len(recent) == 3 and all(after > before * (1 - min_improvement)
                                    for before, after in zip(recent, recent[1:], strict=False)):
            return f"converged: the held-out objective fell by less than {min_improvement:.2%} twice in a row"
        return None

    def figures(self):
        """The latest figures, for progress."""
        last = self.history[-1] if self.history else {}
        return {name: last[name] for name in last if name not in ("vectors", "epoch")}


class _Learner:
    """Atoms and the sums that they are updated from."""

    def __init__(self, atoms_Kd, lam, forgetting):
        k, _ = atoms_Kd.shape
        self.atoms_Kd, self.gram_KK = atoms_Kd, atoms_Kd @ atoms_Kd.T
        self.lam, self.forgetting = lam, forgetting
        self.code_code_KK = np.zeros((k, k), np.float32)            # A of the paper
        self.code_hidden_Kd = np.zeros_like(atoms_Kd)               # B of the paper, transposed
        self.uses_K = np.zeros(k, np.int64)                         # since the last evaluation
        self.steps = 0

    def step(self, hidden_nd):
        """Code a minibatch and update the atoms."""
        codes = nonneg_lasso(hidden_nd, self.atoms_Kd, self.lam, gram_KK=self.gram_KK, tol=KKT_TOLERANCE)
        self.uses_K += np.bincount(codes.indices, minlength=len(self.uses_K))
        self.steps += 1
        keep = (1 - 1 / self.steps) ** self.forgetting
        self._accumulate(hidden_nd, codes, np.float32(keep))
        with one_blas_thread():
            self._update_atoms()
            self.gram_KK = self.atoms_Kd @ self.atoms_Kd.T

    def _accumulate(self, hidden_nd, codes, keep):
        """Each thread owns a range of atoms, so that the order of summation does not depend on threads."""
        threads = thread_count()
        bounds = np.linspace(0, len(self.atoms_Kd), 4 * threads + 1).astype(int)
        ranges = zip(bounds[:-1], bounds[1:], strict=True)

        def work():
            for first, last in ranges:
                _add_codes(self.code_code_KK, self.code_hidden_Kd, hidden_nd, codes.indptr, codes.indices,
                           codes.values, keep, first, last)

        run_in_threads(work, threads)

    def _update_atoms(self):
        """One pass of block coordinate descent (algorithm 2): d_j += (b_j - a_j D) / a_jj, projected.

        For ATOMS_PER_UPDATE atoms at a time b - a D is one matrix product; inside such a group the kernel
        corrects it for the atoms that moved already, so the result is that of one atom after the other.
        """
        for first in range(0, len(self.atoms_Kd), ATOMS_PER_UPDATE):
            group = slice(first, first + ATOMS_PER_UPDATE)
            descent_gd = self.code_hidden_Kd[group] - self.code_code_KK[group] @ self.atoms_Kd
            _descend_group(self.atoms_Kd[group], descent_gd, self.code_code_KK[group, group])

    def replace_unused(self, hidden_nd):
        """Put the worst reconstructed vectors of a minibatch in the place of atoms without a use."""
        unused = np.flatnonzero(self.uses_K == 0)[:len(hidden_nd)]
        self.uses_K[:] = 0
        if len(unused) == 0:
            return
        codes = nonneg_lasso(hidden_nd, self.atoms_Kd, self.lam, gram_KK=self.gram_KK, tol=KKT_TOLERANCE)
        worst = np.argsort(-objective(hidden_nd, self.atoms_Kd, codes, self.lam), kind="stable")[:len(unused)]
        self.atoms_Kd[unused] = hidden_nd[worst]
        self.code_code_KK[unused] = self.code_code_KK[:, unused] = 0
        self.code_hidden_Kd[unused] = 0
        self.gram_KK = self.atoms_Kd @ self.atoms_Kd.T


@kernel
def _add_codes(code_code_KK, code_hidden_Kd, hidden_nd, indptr, indices, values, keep, first, last):
    """A = keep A + sum a a', B = keep B + sum h a', for the rows first to last of both."""
    for j in range(first, last):
        for i in range(code_code_KK.shape[1]):
            code_code_KK[j, i] *= keep
        for i in range(code_hidden_Kd.shape[1]):
            code_hidden_Kd[j, i] *= keep
    for n in range(len(hidden_nd)):
        for entry in range(indptr[n], indptr[n + 1]):
            j, value = indices[entry], values[entry]
            if j < first or j >= last:
                continue
            for other in range(indptr[n], indptr[n + 1]):
                code_code_KK[j, indices[other]] += value * values[other]
            for i in range(hidden_nd.shape[1]):
                code_hidden_Kd[j, i] += value * hidden_nd[n, i]


@kernel
def _descend_group(atoms_gd, descent_gd, code_code_gg):
    """Update some atoms in turn; descent_gd is b - a D for the atoms as they come in."""
    for j in range(len(atoms_gd)):
        curvature = code_code_gg[j, j]
        if curvature <= np.float32(1e-10):          # not used lately: nothing to learn from
            continue
        squared = np.float32(0)
        for i in range(atoms_gd.shape[1]):
            new = atoms_gd[j, i] + descent_gd[j, i] / curvature
            squared += new * new
        scale = 1 / np.sqrt(max(squared, np.float32(1)))
        for i in range(atoms_gd.shape[1]):
            change = (atoms_gd[j, i] + descent_gd[j, i] / curvature) * scale - atoms_gd[j, i]
            atoms_gd[j, i] += change
            descent_gd[j, i] = change
        for later in range(j + 1, len(atoms_gd)):
            for i in range(atoms_gd.shape[1]):
                descent_gd[later, i] -= code_code_gg[later, j] * descent_gd[j, i]
