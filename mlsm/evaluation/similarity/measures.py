"""Similarity measures: between all rows of two arrays, and from token similarities to one number per text pair.

    overlap(P_NK, Q_MK)                                 # (N, M)
    matched_similarity(overlap(P_NK, Q_MK))             # one number, for texts of N and M tokens

Distributions over LSPs have rows that sum to one; a row of zeros is a token without a code, and has similarity 0 to all
others. Not handled here: where vectors come from (sources.py), what is compared with what (scores.py).

Shapes: N, M tokens; K LSPs; d width of vectors.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist


def cosine(a_Nd: np.ndarray, b_Md: np.ndarray) -> np.ndarray:
    """Cosines (N, M), from -1 to 1; 0 if one row is all zeros."""
    return _unit(a_Nd) @ _unit(b_Md).T


def jensen_shannon(p_NK: np.ndarray, q_MK: np.ndarray) -> np.ndarray:
    """1 - JSD / ln 2, (N, M): 1 for equal distributions, 0 for those that share nothing (Lin 1991).

    JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2, in nats.
    """
    distance_NM = cdist(p_NK.astype(np.float64), q_MK.astype(np.float64), "jensenshannon")  # the square root of the JSD
    distance_NM[np.isnan(distance_NM)] = 0  # equal rows, whose JSD may be below 0 by rounding
    coded_NM = np.outer(p_NK.any(1), q_MK.any(1))
    return np.where(coded_NM, 1 - distance_NM**2 / np.log(2), 0.0)


def overlap(p_NK: np.ndarray, q_MK: np.ndarray) -> np.ndarray:
    """Weighted overlap, sum of min(p, q) / sum of max(p, q), (N, M) (Ruzicka 1958); 0 for two rows of zeros."""
    distance_NM = cdist(p_NK.astype(np.float64), q_MK.astype(np.float64), "cityblock")
    total_NM = p_NK.sum(1, dtype=np.float64)[:, None] + q_MK.sum(1, dtype=np.float64)
    most_NM = total_NM + distance_NM  # twice the sum of max(p, q)
    return np.clip((total_NM - distance_NM) / np.where(most_NM > 0, most_NM, 1), 0, 1)


def best_pairs(similarity_NM: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The one-to-one pairs of tokens with the largest sum of similarities: rows and columns, min(N, M) of each."""
    return linear_sum_assignment(similarity_NM, maximize=True)


def matched_similarity(similarity_NM: np.ndarray) -> float:
    """Similarity of two texts from their best pairs of tokens: twice the sum of their similarities over N + M. An
    unpaired token counts as similarity 0.
    """
    return float(2 * similarity_NM[best_pairs(similarity_NM)].sum() / sum(similarity_NM.shape))


def greedy_f1(similarity_NM: np.ndarray) -> float:
    """BERTScore's F1 (Zhang et al. 2020): each token is compared with its most similar token, and the means of both
    sides are combined by their harmonic mean. Tokens are not weighted by frequency.
    """
    recall, precision = similarity_NM.max(1).mean(), similarity_NM.max(0).mean()
    return float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def _unit(rows_Nd):
    rows_Nd = rows_Nd.astype(np.float64)
    norms_N = np.linalg.norm(rows_Nd, axis=1, keepdims=True)
    return rows_Nd / np.where(norms_N > 0, norms_N, 1)
