"""How many entries of a distribution are kept by default, and which share of its mass these are expected to hold.

A learned dictionary records which share of the mass n entries held on its held-out vectors (`kept_mass` of its facts).
Without --top-n, the smallest n of CHOICES that held LEAST_MASS is used. If a dictionary has no such record, or is used
with another penalty or solver than it was learned with, n follows from its width. Both depend only on the dictionary
and the settings, so that the same command finds the same store again.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from pipeline.config import EncodeConfig
    from pipeline.dictionary import Dictionary

CHOICES = (32, 48, 64, 96, 128, 192, 255)  # 255 is the most that the shard format holds
LEAST_MASS = 0.98  # of held-out vectors; the aim is 0.97 of new text, which keeps up to 0.01 less
BY_WIDTH = ((256, 32), (512, 48), (1024, 64), (np.inf, 96))  # up to which width how many, at the usual penalty
USUAL_LAM, FISTA_TIMES = 0.05, 3  # codes of 100 FISTA steps have more than twice the non-zeros


def entries_kept(config: "EncodeConfig", dictionary: "Dictionary") -> int | Literal["all"]:
    """The entries of each token's distribution that a store keeps: as --top-n says, else by the dictionary."""
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


def expected_mass(config: "EncodeConfig", dictionary: "Dictionary") -> float | None:
    """The share of the mass that is expected to be kept, on average; None if the dictionary has no record of it."""
    kept = entries_kept(config, dictionary)
    return _mass(dictionary, CHOICES[-1] if kept == "all" else kept) if _knows_mass(config, dictionary) else None


def _knows_mass(config, dictionary):
    return (
        config.solver == "cd"
        and dictionary.settings.get("lam") == config.lam
        and isinstance(dictionary.best.get("kept_mass"), dict)
    )


def _mass(dictionary, n):
    """Between two numbers of the table, by a straight line: too little, as the share rises ever more slowly."""
    table = {int(number): mass for number, mass in dictionary.best["kept_mass"].items()}
    numbers = [0, *sorted(table)]
    return float(np.interp(n, numbers, [0.0, *(table[number] for number in numbers[1:])]))
