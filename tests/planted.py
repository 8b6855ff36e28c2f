"""Vectors with a dictionary that is known."""

import numpy as np


def unit_rows(array):
    return (array / np.linalg.norm(array, axis=1, keepdims=True)).astype(np.float32)


def planted(vectors=3000, width=24, atoms=40, seed=0):
    """Vectors that are sums of three of the planted atoms with a little noise, and these atoms."""
    rng = np.random.default_rng(seed)
    truth = unit_rows(rng.normal(size=(atoms, width)))
    chosen = np.array([rng.choice(atoms, 3, replace=False) for _ in range(vectors)])
    hidden = (rng.uniform(0.3, 1, (vectors, 3, 1)) * truth[chosen]).sum(1)
    return unit_rows(hidden + 0.01 * rng.normal(size=(vectors, width))), truth
