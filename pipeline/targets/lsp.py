"""Turn hidden states into distributions over latent semantic properties: normalised sparse codes over atoms.

The default number of stored entries per distribution follows from the dictionary. A learned dictionary records which
share of the mass n entries had on its held-out vectors (`kept_mass` of its facts). Without --top-n, the smallest n of
CHOICES that reached LEAST_MASS is used. If a dictionary has no such record, or is used with another penalty or solver
than it was learned with, n follows from its width. Both depend only on the dictionary and the settings, so that the
same command finds the same store again.

On a GPU the solver is tested on the first rows that are coded (solvers/proof.py). The store's first unit fixes it, and
every unit's record names it. Not handled here: the solver (solvers/), how a code becomes a distribution
(distributions.py).

Shapes: N coded tokens, d hidden width, K atoms.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import torch

from mlsm.common.errors import EncodeError, ShardError, StoreError
from pipeline.batch import Hidden, InputFormat, TeacherBatch, add_amounts, center_on, centred_rows
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.job import Job, load_teacher, name_of_dtype
from pipeline.precision import total_variation
from pipeline.solvers import nonneg_lasso, onednn, prepare, proof
from pipeline.solvers.nearest import nearest_atoms
from pipeline.solvers.parallel import one_blas_thread
from pipeline.solvers.problem import Codes
from pipeline.stores import keep_copy
from pipeline.targets.distributions import columns_of, distributions
from shards import copies
from shards.files import StoreFiles
from shards.schema import FORMAT_VERSION

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

# The solver's tolerance when precisions are compared, small so that its own error is not visible.
COMPARED_TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
CHOICES = (32, 48, 64, 96, 128, 192, 255)  # 255 is the most that the shard format holds
_JUDGED = 256  # tokens: that so many have no code is the penalty's doing
LEAST_MASS = 0.98  # on held-out vectors; the aim is 0.97 on new text, where up to 0.01 less is kept
BY_WIDTH = ((256, 32), (512, 48), (1024, 64), (np.inf, 96))  # (up to this width, so many) at the usual penalty
USUAL_LAM, FISTA_TIMES = 0.05, 3  # codes of 100 FISTA steps have more than twice the non-zeros


class Lsp:
    """Distributions over the LSPs of one layer and dictionary."""

    work = "solver"

    def __init__(self, config: EncodeConfig, teacher: "Teacher", layer: int, dictionary: Dictionary):
        self.config, self.teacher, self.layer, self.dictionary = config, teacher, layer, dictionary
        asked = config.solver_backend if config.solver == "cd" else config.solver
        self._by_trial = asked == "auto" and proof.is_needed(teacher.device)
        self._backend: str | None = None if self._by_trial else "cpu" if asked == "auto" else asked
        self._begun_with: str | None = None  # solver of the store's first unit
        self._is_settled = True  # whether later commands keep the solver
        self.environment: dict = {}
        if self._backend == "cpu":
            self.environment["correlations"] = _correlations()
        elif self._backend == "torch":
            self.environment["solver_backend"] = "torch"
        self.top_n = entries_kept(config, dictionary)
        self._uncoded: int | None = 0  # tokens so far if none has a code; None: some has

    @staticmethod
    def load_teacher(job: Job) -> "Teacher":
        return load_teacher(job)

    @classmethod
    def open(cls, job: Job, teacher: "Teacher", files: StoreFiles, settings: dict) -> Self:
        dictionary = Dictionary.load(files.dictionary)
        copies.check_dictionary(files, dictionary.fingerprint)
        target = cls(job.config, teacher, settings["layer"], dictionary)
        if target._by_trial:
            target._begun_with = recorded_backend(files)
        return target

    def describe_store(self, job: Job) -> tuple[str, dict]:
        config, dictionary, k = self.config, self.dictionary, len(self.dictionary.atoms_Kd)
        settings = {
            "kind": "lsp",
            "format": FORMAT_VERSION,
            "windowing": job.rules,
            "teacher": self.teacher.fingerprint,
            "layer": self.layer,
            "dictionary": dictionary.fingerprint,
            "k": k,
            "lam": config.lam,
            "top_n": self.top_n,
            "dtype": name_of_dtype(self.teacher),
        }
        name = f"lsp-{Path(self.teacher.name).name}-l{self.layer}-k{k}"
        if (atoms := dictionary.settings.get("atoms")) is not None:
            name = f"{name}-{atoms}"
        if config.solver == "fista":
            settings["solver"] = {"name": "fista", "steps": config.solver_steps}
        elif config.solver == "nearest":
            settings["solver"], name = {"name": "nearest"}, f"{name}-nearest"
            del settings["lam"]  # `nearest` has no penalty
        else:
            settings["tolerance"] = config.tolerance  # FISTA has no tolerance
        if dictionary.center is not None:  # only if centred, so that stores keep their names
            settings["center"] = dictionary.centering
        settings |= InputFormat.of(config, self.teacher).settings()
        if job.stored is not None:
            settings["hidden"] = job.stored.identity()
            quantise = job.stored.identity()["quantise"]
            name = f"{name}-of-{quantise['name']}{quantise.get('bytes', '')}"
        lineage = {
            "teacher_name": self.teacher.name,
            "teacher_layers": self.teacher.num_layers,
            "dictionary_settings": dictionary.settings,
        }
        return name, job.target_json(settings, lineage, k)

    def save_copies(self, files: StoreFiles) -> None:
        keep_copy(files.dictionary, lambda: copies.read_dictionary(files), self.dictionary.save)

    @staticmethod
    def states(teacher: "Teacher", batch: TeacherBatch, targets: Sequence["Lsp"]) -> list[Hidden]:
        return centred_rows(teacher, batch, [(target.layer, target._center_Pd) for target in targets])

    def prepare(self) -> None:
        self._center_Pd = center_on(self.teacher.device, self.dictionary)
        self._prepared = _prepare_atoms(self.teacher.device, self.dictionary.atoms_Kd, self._backend)

    def _prove(self, rows_Nd):
        """Choose a GPU's solver by a test on these rows; if none is right there, the CPU codes."""
        atoms_Kd, lam = self.dictionary.atoms_Kd, self.config.lam
        choice = proof.choose_solver(rows_Nd, atoms_Kd, lam, rows_Nd.device, begun_with=self._begun_with)
        self._backend, self._is_settled = choice.backend, choice.keep
        if self._backend == "cpu":
            self._prepared = _prepare_atoms(torch.device("cpu"), atoms_Kd, "cpu")

    def code(self, rows_Nd: torch.Tensor, tolerance: float | None = None) -> Codes:
        if self._backend is None and len(rows_Nd):
            self._prove(rows_Nd)
        atoms_Kd, gram_KK = self._prepared
        config = self.config
        if config.solver == "nearest":
            return nearest_atoms(rows_Nd, atoms_Kd)
        how = {"gram_KK": gram_KK, "tol": tolerance or config.tolerance, "backend": self._backend or "torch"}
        if config.solver == "fista":
            how = {"backend": "fista", "steps": config.solver_steps, "tol": None}
        if self._backend == "cpu" and rows_Nd.is_cuda:
            codes = nonneg_lasso(rows_Nd.cpu().numpy(), atoms_Kd, config.lam, **how)
            parts = (codes.indptr, codes.indices, codes.values, codes.kkt)
            return Codes(*(torch.from_numpy(part).to(rows_Nd.device) for part in parts))
        return nonneg_lasso(rows_Nd if rows_Nd.is_cuda else rows_Nd.numpy(), atoms_Kd, config.lam, **how)

    def tensors(self, codes: Codes) -> tuple:
        return codes.indptr, codes.indices, codes.values, codes.kkt

    def columns(self, codes: Codes | None, batch: TeacherBatch) -> dict[str, np.ndarray]:
        if codes is None:
            return columns_of(None, batch)
        if self._by_trial and self._backend is not None:
            batch.block.facts["solver_backend"] = self._backend
            if not self._is_settled:
                batch.block.facts["solver_unsettled"] = True
            if self._backend == "cpu":
                batch.block.facts["correlations"] = _correlations()
        rows, statistics = distributions(codes, self.top_n), batch.block.statistics
        tokens, empty = len(rows), int((np.diff(rows.indptr) == 0).sum())
        add_amounts(statistics, {"empty_codes": empty})
        if self.config.solver != "nearest":
            largest = float(codes.kkt.max()) if tokens else 0.0
            statistics["max_kkt"] = max(statistics.get("max_kkt", 0.0), largest)
        if self._uncoded is not None:
            self._uncoded = self._uncoded + tokens if empty == tokens else None
            if self._uncoded is not None and self._uncoded >= _JUDGED:
                raise EncodeError(
                    f"--lam {self.config.lam} leaves every one of the first {self._uncoded:,} tokens with an empty"
                    f" code, at layer {self.layer} and k {len(self.dictionary.atoms_Kd)}. Use a smaller one; 0.05 is"
                    " usual."
                )
        return columns_of(rows, batch)

    def variation(self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: "Teacher") -> np.ndarray:
        tolerance = min(self.config.tolerance, COMPARED_TOLERANCE[rows_Nd.device.type])
        count = len(self.dictionary.atoms_Kd)
        return total_variation(*(self.code(rows, tolerance).to_host().dense(count) for rows in (rows_Nd, exact_Nd)))


def recorded_backend(files: StoreFiles) -> str | None:
    """The solver that the records of a store name, the first by the ids of their units; None if none is named. One that
    was taken because a trial ran out of time or memory is not kept: the next command tries again."""
    for path in sorted(files.units.glob("*.json")):
        try:
            record = files.record(path.stem)
        except (ShardError, StoreError):  # verify-shards reports these
            continue
        made = {} if record is None or record.environment.get("solver_unsettled") else record.environment
        if (backend := made.get("solver_backend")) is not None:
            return str(backend)
    return None


def _correlations():
    return "bfloat16" if onednn.multiplies_bfloat16() else "float32"


def _prepare_atoms(device, atoms_Kd, backend):
    """Atoms and their Gram matrix in the solver's form."""
    with one_blas_thread():  # how a product is cut up for threads changes how its sums round
        gram_KK = atoms_Kd @ atoms_Kd.T
        if device.type == "cpu":
            return atoms_Kd, prepare(atoms_Kd, gram_KK) if backend == "cpu" else gram_KK
    atoms_Kd = torch.from_numpy(atoms_Kd).to(device)
    prepared = prepare(atoms_Kd, gram_KK)
    torch.cuda.synchronize(device)  # once here, so that no stream has to wait later
    return atoms_Kd, prepared


# -- entries kept ------------------------------------------------------------------------------------------


def entries_kept(config: EncodeConfig, dictionary: "Dictionary") -> int | Literal["all"]:
    """The entries of each token's distribution that a store keeps: by --top-n, else by the dictionary."""
    if config.solver == "nearest":
        return 1
    if config.top_n is not None:
        return config.top_n
    if _knows_mass(config, dictionary):
        enough = (n for n in CHOICES if _mass(dictionary, n) >= LEAST_MASS)
        return next(enough, CHOICES[-1])
    usual = next(n for width, n in BY_WIDTH if dictionary.atoms_Kd.shape[1] <= width)
    wanted = usual * max(1.0, USUAL_LAM / config.lam) * (FISTA_TIMES if config.solver == "fista" else 1)
    return next((n for n in CHOICES if n >= wanted), CHOICES[-1])


def expected_mass(config: EncodeConfig, dictionary: "Dictionary") -> float | None:
    """The average share of the mass that is expected to be kept; None if the dictionary has no record of it."""
    kept = entries_kept(config, dictionary)
    return _mass(dictionary, CHOICES[-1] if kept == "all" else kept) if _knows_mass(config, dictionary) else None


def _knows_mass(config, dictionary):
    return (
        config.solver == "cd"
        and dictionary.settings.get("lam") == config.lam
        and isinstance(dictionary.best.get("kept_mass"), dict)
    )


def _mass(dictionary, n):
    """Interpolate the table linearly. This is a lower bound, as the share rises ever more slowly."""
    table = {int(number): mass for number, mass in dictionary.best["kept_mass"].items()}
    numbers = [0, *sorted(table)]
    return float(np.interp(n, numbers, [0.0, *(table[number] for number in numbers[1:])]))
