"""The command match-entropy: find the temperature and the penalty that give a store's targets a wanted entropy.

    found = match_entropy(MatchEntropyConfig(store="runs/stores/lsp-...", against="runs/stores/lsp-...-fista"))
    found["temperature"], found["lam"], found["lam_flags"]

Exact codes are sharper than those of the official code's 100 FISTA steps (docs/sparse-coding.md). Does a student gain
from flat targets or from their values? To test this, two other kinds of targets get the same mean entropy: exact codes
with a temperature (train-student --target-temperature), and exact codes with a smaller penalty (encode-lsp --lam).

The entropy is that of the distribution that a student learns: a token's stored entries, renormalised to one. Tokens
without entries are ignored, and all entropies are for the same sample of tokens. To find the penalty, the sample's
hidden states are coded again, which needs the teacher and the store's dictionary. The penalty is for that dictionary
and that number of entries, so a store with it needs the flags `lam_flags`: encode-lsp would learn another dictionary
for another penalty. This module does not encode that store (encode-lsp does), and does not say which targets train
best.

Shapes: N tokens, d hidden width, W windows.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
from scipy.optimize import brentq

from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.sample import open_alike, sample_tokens
from mlsm.evaluation.inspection.lsps.texts import load_store_dictionary, load_store_teacher
from mlsm.evaluation.studies.targets.config import MatchEntropyConfig
from pipeline.batch import center_on, centred_rows, make_batch
from pipeline.solvers import nonneg_lasso, prepare
from pipeline.targets.distributions import distributions
from shards.codec import SparseRows
from student.objectives.sparse_rows import temper

TEMPERATURES = 1 / 32, 32.0
PENALTIES = 1e-3, 0.9
NEAR = 1e-3  # relative tolerance of the solutions


def match_entropy(config: MatchEntropyConfig, progress: Callable[..., None] = silent) -> dict:
    """Find the temperature and the penalty of a MatchEntropyConfig.

    progress  called as progress(stage, done, total, unit=..., **figures)
    Returns   dict for JSON: store, against (None if a number was given), tokens (sampled, with a code), entropy_nats
              of the store's targets, wanted_nats; temperature and lam (if one is None, `unreachable`, name -> sentence,
              says why), with temperature_nats and lam_nats, their entropies; lam_flags, the flags of encode-lsp that
              make a store of that entropy, if all others are those of the store
    Raises    InspectionError, TeacherError, StoreError, ShardError; EncodeError on a hidden state that is not finite
    """
    assert config.store is not None, "the command line or Python has chosen one"
    store, *others = open_alike([config.store, *([] if config.against is None else [config.against])])
    rows, coded_W = _sample(store, config, progress)
    wanted = config.entropy
    for other in others:
        wanted = entropy(_sample(other, config, progress)[0])
    assert wanted is not None, "one of the two is given"
    result: dict[str, Any] = {
        "store": str(store.path),
        "against": config.against,
        "tokens": int((np.diff(rows.indptr) > 0).sum()),
        "entropy_nats": entropy(rows),
        "wanted_nats": wanted,
    }

    def tempered(temperature: float) -> float:
        return entropy(replace(rows, weights=temper(rows, temperature)))

    found = {"temperature": _solve(tempered, 1.0, TEMPERATURES, wanted, rises=True)}
    if "solver" in store.settings:
        name = store.settings["solver"]["name"]
        found["lam"] = (
            f"the store's solver is {name}; a penalty can only be searched for with exact codes (--solver cd)"
        )
    elif "hidden" in store.settings:
        found["lam"] = (
            "the store's codes are of quantised hidden states (--hidden), but this command codes those of the teacher"
        )
    else:
        progress("load teacher", 0, None)
        recode = _recode(store, coded_W, config, progress)
        found["lam"] = _solve(recode, store.settings["lam"], PENALTIES, wanted, rises=False)
    for name, answer in found.items():
        value, nats = (None, None) if isinstance(answer, str) else answer
        result |= {name: value, f"{name}_nats": nats}
    if result["lam"] is not None:
        flags = ("--dictionary", store.files.dictionary, "--lam", f"{result['lam']:.4g}")
        result["lam_flags"] = [str(word) for word in (*flags, "--top-n", store.settings["top_n"])]
    return result | {"unreachable": {name: answer for name, answer in found.items() if isinstance(answer, str)}}


def _solve(
    measure: Callable[[float], float], start: float, limits: tuple[float, float], wanted: float, rises: bool
) -> tuple[float, float] | str:
    """Find the argument at which `measure` is the wanted entropy. Returns it and the value, or a sentence if none is
    found.

    start  start of the search, which proceeds by factors of two, and at last to the limit
    rises  whether the measure rises with its argument
    """
    value, found = start, measure(start)
    factor = 2.0 if (wanted > found) == rises else 0.5
    while True:
        beyond = min(max(value * factor, limits[0]), limits[1])
        if (beyond - value) * (factor - 1) <= 0:  # at the limit already
            return f"at {value:g} the mean entropy is {found:.3f} nats, not counting entries that are not stored"
        reached = measure(beyond)
        if (found - wanted) * (reached - wanted) <= 0:
            break
        value, found = beyond, reached
    low, high = sorted((math.log(value), math.log(beyond)))
    solved = math.exp(brentq(lambda x: measure(math.exp(x)) - wanted, low, high, xtol=NEAR))
    return solved, measure(solved)


def entropy(rows: SparseRows) -> float:
    """Mean entropy of the non-empty sparse rows, in nats; the weights of each of these rows sum to one."""
    weights_E = rows.weights[rows.weights > 0].astype(np.float64)  # a weight may become 0 at a low temperature
    return float(-(weights_E @ np.log(weights_E)) / max(1, int((np.diff(rows.indptr) > 0).sum())))


def _sample(store, config, progress):
    """Targets of a sample of the store's tokens, and the numbers of the windows that have any: not those in quarantine,
    at which the teacher fails."""
    found = sample_tokens(store, config.samples, progress)
    if not found.coded:
        raise InspectionError(f"{store.path}: none of {len(found):,} sampled tokens has a code. Increase --samples.")
    rows = SparseRows(found.indptr, found.lsps_E, found.weights_E, np.zeros(len(found), np.float32))
    return rows, np.unique(found.window_N[np.diff(found.indptr) > 0])


def _recode(store, windows_W, config, progress):
    """Make a function from the penalty to the mean entropy of these windows' codes, with the store's other settings."""
    dictionary = load_store_dictionary(store)
    hidden_Nd = _hidden_states(store, dictionary, windows_W, config, progress)
    atoms_Kd = dictionary.atoms_Kd
    gram_KK, codings = prepare(atoms_Kd, atoms_Kd @ atoms_Kd.T), count(1)

    def measure(lam):
        tolerance = min(store.settings["tolerance"], lam / 10)
        codes = nonneg_lasso(hidden_Nd, atoms_Kd, float(lam), gram_KK=gram_KK, tol=tolerance)
        rows = distributions(codes, store.settings["top_n"])
        whole_E = np.repeat(1 - rows.tail, np.diff(rows.indptr))
        found = entropy(SparseRows(rows.indptr, rows.indices, rows.weights / whole_E, rows.tail))
        progress("penalty", next(codings), None, unit="codings", lam=float(lam), entropy=found)
        return found

    return measure


def _hidden_states(store, dictionary, windows_W, config, progress):
    """Unit-length hidden states (N, d) of the tokens in these windows, computed from the store's ids."""
    settings, teacher = store.settings, load_store_teacher(store, config.teacher)
    reader, parts = store.split("train"), []
    size = max(1, 8192 // store.max_length)
    for start in range(0, len(windows_W), size):
        windows = reader.read(windows_W[start : start + size])
        real_WL = windows.documents >= 0
        batch = make_batch(
            windows.ids[real_WL],
            real_WL.sum(1),
            len(real_WL),
            store.max_length,
            store.special_ids,
            documents_T=windows.documents[real_WL] if settings.get("documents_apart") else None,
            segments=settings.get("segments", False),
        )
        (hidden,) = centred_rows(teacher, batch, [(settings["layer"], center_on(teacher.device, dictionary))])
        hidden.check(teacher)
        parts.append(hidden.rows_Nd.float().numpy())
        progress("teacher", min(start + size, len(windows_W)), len(windows_W), unit="windows")
    return np.concatenate(parts)
