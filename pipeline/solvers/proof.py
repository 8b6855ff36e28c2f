"""Which solver a GPU gets: the CUDA kernels or plain torch, tried on the run's own rows before either is trusted.

    choice = choose_solver(hidden_Nd, atoms_Kd, lam, device)       # .backend: "cuda", "torch" or "cpu"; .line: why

For every new combination of GPU, driver, library versions, our kernels, class of shapes and lam, a child process codes
some thousand rows with both and with the CPU's solver (trial.py). Where both are right the faster one is used. A child
that crashes, hangs or finds wrong codes costs one line and means plain torch; where plain torch itself was found wrong,
the CPU's cores code. The answer is kept in the user's cache (mlsm/common/proofs.py), so all that is paid once.

All backends certify codes of the same problem to the same tolerance, so that the choice is no part of what a store or
a dictionary is. It is kept all the same: `choose_solver` is told what a store or a checkpoint was begun with.
Not handled here: the solvers themselves, what keeps the choice (targets/lsp.py, dictionary/learning.py).

Shapes: N tokens, d hidden width, K atoms.
"""

import functools
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common import proofs
from mlsm.common.invocation import program
from pipeline.solvers.problem import Array

ROWS = 4096  # that are coded; fewer are repeated
SECONDS = 120.0  # of the child
TOLERANCE = 1e-4  # encode-lsp's default, and the smallest that a GPU reaches
ROUNDING = 2e-5  # what float32 may add to a violation, or a certificate be below it
UNFINISHED = 1e-3  # share of tokens that may keep a violation above the tolerance
DIFFERS = 0.02  # mean total variation from the CPU's distributions; two codes at the tolerance differ by about 0.001
USUAL_LAM = 0.05  # below it the tolerance weighs more beside lam, and two right codes differ more in proportion
TRIAL = "pipeline.solvers.trial"
KERNELS = ("cd_cuda.py", "cuda_*.py", "active_set_torch.py", "tensors.py", "trial.py")
NAMES = {"cuda": "the CUDA kernels", "torch": "plain torch", "cpu": "the CPU"}
logger = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()  # what this process has said
_proven: dict[str, "SolverChoice"] = {}  # what it has proven, also where that is not kept for others


class SolverChoice(NamedTuple):
    """What a GPU codes with.

    backend  of nonneg_lasso
    line     why, in a sentence
    right    the backends that were found right
    trials   name of a backend -> what was measured of it
    keep     whether the answer holds the next time; not where the child lacked memory or time or never began, or codes
             are empty
    """

    backend: str
    line: str
    right: tuple[str, ...]
    trials: Mapping[str, Mapping[str, Any]]
    keep: bool = True


def is_needed(device: torch.device) -> bool:
    """Whether a device has more than one solver, none of which is trusted from the start: a GPU."""
    return device.type == "cuda"


def decide_solver(
    trials: Mapping[str, Mapping[str, Any]], trouble: str | None, lam: float, passing: bool = False
) -> SolverChoice:
    """Choose by what a child measured. Pure: the same measurements give the same choice.

    trials   name of a solver -> its measurements (trial.py); {} where the child did not end it
    trouble  how the child ended, where that was not by itself
    passing  whether that says nothing about the GPU (proofs.Child)
    """
    if passing and not trials.get("torch"):  # {}: it was begun
        trials = {name: trial for name, trial in trials.items() if name != "torch"}
    faults = {name: find_solver_fault(trials.get(name), trouble, lam) for name in ("torch", "cuda")}
    right = tuple(name for name, fault in faults.items() if fault is None)
    keep = "torch" in trials and not passing and not any(trial.get("lacks_memory") for trial in trials.values())
    keep = keep and trials.get("cpu", {}).get("nonzeros", 1) > 0  # codes that are all empty prove little
    if len(right) == 2:
        backend = min(right, key=lambda name: trials[name]["seconds"])  # plain torch where they are equal
        times = ", ".join(f"{NAMES[name]} {_milliseconds(trials[name])}" for name in ("cuda", "torch"))
        why = f"both solvers are right, and this one is faster ({times} for {trials['torch']['tokens']:,} rows)"
    elif right:
        (backend,) = right
        (wrong,) = faults.keys() - right
        why = f"{NAMES[wrong]} cannot be used: {faults[wrong]}"
    elif "torch" not in trials or trials["torch"].get("lacks_memory"):
        backend, why = "torch", f"nothing could be tried: {faults['torch']}"
    else:
        backend = "cpu"
        why = f"neither {NAMES['cuda']} ({faults['cuda']}) nor {NAMES['torch']} ({faults['torch']}) can be used"
    return SolverChoice(backend, f"{NAMES[backend]}: {why}", right, trials, keep)


def find_solver_fault(trial: Mapping[str, Any] | None, trouble: str | None, lam: float) -> str | None:
    """What speaks against a solver, by its measurements; None if it is right."""
    if trial is None:
        return f"its turn did not come, as the child process failed ({trouble or 'it reported nothing'})"
    if not trial:
        return f"the child process failed while it ran ({trouble or 'it reported nothing'})"
    if "error" in trial:
        return trial["error"]
    numbers = [trial[name] for name in ("kkt", "certificate_error", "gap", "seconds", "weight")]
    if not np.isfinite(numbers).all():
        return "it found codes that are no numbers"
    if trial["unfinished"] > UNFINISHED * trial["tokens"]:
        return f"it left {trial['unfinished']:,} of {trial['tokens']:,} rows above the tolerance"
    if trial["certificate_error"] > ROUNDING:
        return f"it certified codes whose violation is larger by {trial['certificate_error']:.2g}"
    if trial["kkt"] > TOLERANCE + ROUNDING:
        return f"wrong codes: a KKT violation of {trial['kkt']:.2g}, where {TOLERANCE:g} is allowed"
    reach = TOLERANCE + ROUNDING  # the gap of codes with such violations: see duality_gap
    if trial["gap"] > (reach / lam) ** 2 / 2 + 2 * reach * trial["weight"] + 1e-6:
        return f"wrong codes: a duality gap of {trial['gap']:.2g}"
    if trial.get("differs", 0.0) > DIFFERS * max(1.0, USUAL_LAM / lam):
        return f"wrong codes: a total variation of {trial['differs']:.2g} from those of the CPU"
    return None


def prove_solvers(hidden_Nd: Array, atoms_Kd: Array, lam: float, device: torch.device) -> SolverChoice:
    """Try the solvers on these rows in a child process, whatever was kept.

    hidden_Nd  unit rows
    """
    hidden_Nd, atoms_Kd = (_as_numpy(array) for array in (hidden_Nd[:ROWS], atoms_Kd))
    hidden_Nd = np.resize(hidden_Nd, (ROWS, hidden_Nd.shape[1]))
    logger.info("trying the solvers of this GPU, for %.0f minutes at most", SECONDS / 60)
    task = {"lam": float(lam), "tol": TOLERANCE, "device": str(device)}
    child = proofs.run_child(TRIAL, task, SECONDS, hidden_Nd=hidden_Nd, atoms_Kd=atoms_Kd)
    return decide_solver(child.found, child.trouble, lam, child.passing)


def choose_solver(
    hidden_Nd: Array,
    atoms_Kd: Array,
    lam: float,
    device: torch.device,
    *,
    begun_with: str | None = None,
    fresh: bool = False,
) -> SolverChoice:
    """The solver of a GPU for rows like these; what is known is looked up, else proven now and kept.

    begun_with  the backend that the store or checkpoint was begun with, which stays if it is right here
    fresh       prove it again, whatever was kept
    Says (logs) in one line what is used and why, and warns where this GPU cannot go on with that backend
    """
    key = key_of(device, atoms_Kd.shape[1], len(atoms_Kd), lam)

    def prove() -> SolverChoice:
        proven = prove_solvers(hidden_Nd, atoms_Kd, lam, device)
        if proven.trials.get("cpu", {}).get("nonzeros", 1) > 0:  # codes that are all empty say nothing of other rows
            _proven[key] = proven
        if proven.keep:
            proofs.keep(key, proven._asdict())
        return proven

    choice = proofs.known_or_proven(lambda: _recall(key) or _proven.get(key), prove, fresh=fresh)
    if begun_with is not None and begun_with != choice.backend:
        if begun_with in choice.right or begun_with == "cpu":
            choice = choice._replace(backend=begun_with, line=f"{NAMES[begun_with]}, as this work was begun with it")
            _say(key, choice, device)
            return choice
        logger.warning(
            "sparse coding was begun with %s, which cannot be used here; it continues, to the same tolerance, with %s",
            NAMES.get(begun_with, begun_with),
            choice.line,
        )
        _said.add((key, choice.line))
    else:
        _say(key, choice, device)
    return choice


def _say(key, choice, device):
    """Log what is used, once in a process; where nothing was found right, as a warning."""
    if (key, choice.line) not in _said:
        level = logging.INFO if choice.right else logging.WARNING
        again = "" if "cuda" in choice.right else f". {program()} doctor --gpu tries again, and prints what to report"
        logger.log(level, "sparse coding on %s uses %s%s", proofs.device_facts(device)["device"], choice.line, again)
    _said.add((key, choice.line))


def kept_backend(device: torch.device, width: int, atoms: int, lam: float) -> str | None:
    """The backend that was proven on this GPU for rows of a width, so many atoms and a lam; None where none was."""
    found = _recall(key_of(device, width, atoms, lam))
    return None if found is None else found.backend


def _recall(key) -> SolverChoice | None:
    found = proofs.recall(key)
    if found is None or found.keys() != set(SolverChoice._fields) or found["backend"] not in NAMES:
        return None
    return SolverChoice(**found | {"right": tuple(found["right"])})


def key_of(device: torch.device, width: int, atoms: int, lam: float) -> str:
    """What an answer depends on: GPU, driver, libraries, kernels, the class of shapes, and lam to one digit."""
    problem = f"d <= {_power_of_two(width)}, k <= {_power_of_two(atoms)}, lam {lam:.1g}"
    return proofs.key_of(device, f"solvers {kernels_digest()}", problem)


@functools.cache
def kernels_digest() -> str:
    """The hash of the files that compute on a GPU, 12 hexadecimal digits."""
    found, here = hashlib.sha256(), Path(__file__).parent
    for file in sorted(file for pattern in KERNELS for file in here.glob(pattern)):
        found.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:12]


def _power_of_two(number):
    return 1 << max(0, number - 1).bit_length()


def _milliseconds(trial):
    return f"{1e3 * trial['seconds']:.3g} ms"


def _as_numpy(array):
    if isinstance(array, torch.Tensor):
        array = array.detach().float().cpu().numpy()
    return np.ascontiguousarray(array, np.float32)
