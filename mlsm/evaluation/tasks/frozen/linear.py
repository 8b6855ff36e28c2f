"""Fit linear models to features: choose the penalty on a tuning split, then fit to all training examples.

    said, chosen = tune_and_fit(x_ND, y_N, tuning=400, score=score, others=[blocks(dev_MD), blocks(test_MD)])

scikit-learn's LogisticRegression (lbfgs, float32) for labels,

    1/2 ||w||^2 + C * sum of cross-entropies,

and Ridge for scores, ||y - x w||^2 + alpha ||w||^2, on features that are standardised by the training examples of the
fit. Both problems are convex, so nothing depends on a seed. Penalties are tried from the strongest to the weakest; each
fit starts from the previous solution. The search stops when PATIENCE penalties after the best have scored below it,
because the F1 of spans may fall once and rise again.

Shapes: N examples, the tuning split last; M others; D features.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C. Of 10 only untrained encoders would gain (docs/finetuning.md)
RIDGE_PENALTIES = (1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1.0)  # alpha
PATIENCE = 2  # penalties
MOST_ITERATIONS = 400  # of lbfgs
TOLERANCE = 1e-4  # of lbfgs: largest slope of the mean loss. At 1e-3 it stops before rare tags are learned


def tune_and_fit(
    x_ND: np.ndarray,
    y_N: np.ndarray,
    tuning: int,
    score: Callable[[np.ndarray], float],
    others: Sequence[Iterable[np.ndarray]],
) -> tuple[list[np.ndarray], dict]:
    """Choose a penalty, fit, and predict.

    y_N      int64 labels, or float scores
    tuning   number of examples in the tuning split, the last ones
    score    scores predictions of the tuning split; of equal scores the stronger penalty is chosen
    others   features of other examples, each in blocks of rows, of which one is in memory at a time
    Returns  predictions for the tuning split by the chosen model, fitted to the rest, and for each of `others` by the
             model fitted to all; {"penalty": C or alpha, "tried": [[penalty, score], ...], "converged": whether the
             last fit converged}
    """
    is_score = y_N.dtype.kind == "f"
    rest, held_out = slice(None, len(y_N) - tuning), slice(len(y_N) - tuning, None)
    if not is_score and len(np.unique(y_N[rest])) == 1:  # for example if inputs are cut short
        constant = [np.full(sum(map(len, blocks)), y_N[0]) for blocks in others]
        return [np.full(tuning, y_N[0]), *constant], {"penalty": None, "tried": [], "converged": True}
    scaler = StandardScaler().fit(x_ND[rest])
    x_rest, x_held_out = scaler.transform(x_ND[rest]), scaler.transform(x_ND[held_out])
    model = Ridge() if is_score else LogisticRegression(warm_start=True, max_iter=MOST_ITERATIONS, tol=TOLERANCE)
    tried: list[list[float]] = []
    best: dict[str, Any] = {}
    below = 0
    for penalty in RIDGE_PENALTIES if is_score else INVERSE_PENALTIES:
        model.set_params(**{"alpha" if is_score else "C": penalty})
        _fit(model, x_rest, y_N[rest])
        said = model.predict(x_held_out)
        value = score(said)
        tried.append([penalty, value])
        if not best or value > best["value"]:
            best, below = {"penalty": penalty, "value": value, "said": said}, 0
        elif value < best["value"]:
            below += 1
        if below == PATIENCE:
            break
    del x_rest, x_held_out
    scaler = StandardScaler().fit(x_ND)
    if not is_score and len(np.unique(y_N)) > len(model.classes_):  # a label that only the tuning split has
        model = LogisticRegression(max_iter=MOST_ITERATIONS, tol=TOLERANCE)
    model.set_params(**{"alpha" if is_score else "C": best["penalty"]})
    converged = _fit(model, scaler.transform(x_ND), y_N)
    predictions = [np.concatenate([model.predict(scaler.transform(rows)) for rows in blocks]) for blocks in others]
    return [best["said"], *predictions], {"penalty": best["penalty"], "tried": tried, "converged": converged}


def _fit(model, x_ND, y_N) -> bool:
    """Fit a model; whether it converged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # n_iter_ says the same
        model.fit(x_ND, y_N)
    return isinstance(model, Ridge) or int(np.max(model.n_iter_)) < MOST_ITERATIONS
