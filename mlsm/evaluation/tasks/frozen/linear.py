"""Linear models of features: the penalty is chosen on a tuning split, then all training examples are fitted.

    said, chosen = tune_and_fit(x_ND, y_N, tuning=400, score=score, others=[dev_MD, test_MD])

scikit-learn's LogisticRegression (lbfgs, float32) for labels,

    1/2 ||w||^2 + C * sum of cross-entropies,

and Ridge for scores, ||y - x w||^2 + alpha ||w||^2, each on features that are standardised by the examples it is fitted
to. Both problems are convex, so nothing depends on a seed. Penalties are tried from the strongest to the weakest, each
fit starting from the one before, until PATIENCE of them in a row score below the best: F1 of spans may fall once and
rise again.

Shapes: N examples, the tuning split last; M others; D features.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

INVERSE_PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # C. Weaker ones change no slope by TOLERANCE, so no prediction
RIDGE_PENALTIES = (1e6, 1e5, 1e4, 1e3, 1e2, 1e1, 1.0)  # alpha
PATIENCE = 2  # penalties
MOST_ITERATIONS = 400  # of lbfgs
TOLERANCE = 1e-4  # of lbfgs: largest slope of the mean loss. At 1e-3, rare tags are hardly learned before it stops


def tune_and_fit(
    x_ND: np.ndarray,
    y_N: np.ndarray,
    tuning: int,
    score: Callable[[np.ndarray], float],
    others: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], dict]:
    """Choose a penalty, and predict.

    y_N      int64 labels, or float scores
    tuning   how many of the last examples are the tuning split
    score    what predictions of the tuning split are worth; of equal scores the stronger penalty is chosen
    Returns  predictions of the tuning split by the model that was chosen, fitted to the rest, and of every one of
             `others` by the model fitted to all; {"penalty": C or alpha, "tried": [[penalty, score], ...],
             "converged": whether the last fit did}
    """
    is_score = y_N.dtype.kind == "f"
    rest, held_out = slice(None, len(y_N) - tuning), slice(len(y_N) - tuning, None)
    if not is_score and len(np.unique(y_N[rest])) == 1:  # of input that is cut short, say
        constant = [np.full(count, y_N[0]) for count in (tuning, *map(len, others))]
        return constant, {"penalty": None, "tried": [], "converged": True}
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
    predictions = [model.predict(scaler.transform(x_MD)) for x_MD in others]
    return [best["said"], *predictions], {"penalty": best["penalty"], "tried": tried, "converged": converged}


def _fit(model, x_ND, y_N) -> bool:
    """Fit a model; whether it converged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which says what n_iter_ does
        model.fit(x_ND, y_N)
    return isinstance(model, Ridge) or int(np.max(model.n_iter_)) < MOST_ITERATIONS
