"""The mean hidden state that --center subtracts before rows are scaled to unit length.

    sums = HiddenSums(width)
    sums.add(position_n, rows_nd)           # raw hidden states, chunk by chunk
    center = sums.center("position")
    rows_Nd = center.subtract_from(rows_Nd, position_N)

Hidden states of a trained encoder share a large common part, and another large part depends on the position in the
window (Cai et al. 2021, Isotropy in the contextual embedding space). If rows are scaled to unit length with both parts,
atoms and the distributions that a student learns represent these two instead of the token.

`mean` is the mean of all sampled tokens. `position` has one mean for every position p, shrunk towards that of all:

    (n m_p + a m) / (n + a),    a = variance within positions / variance between them

which is the usual estimate of random effects (one-way analysis of variance; Searle, Casella and McCulloch 1992, chapter
3), with n the tokens at p. Positions with fewer than LEAST_TOKENS tokens, and those beyond the last one, have the mean
of all. Positions are counted as the teacher counts them. Not handled here: where the hidden states come from
(batch.py).

Shapes: N tokens, P positions, d hidden width.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from mlsm.common.disk import read_file
from mlsm.common.durable import appearing_whole
from mlsm.common.errors import CenteringError
from shards.members import read_array

LEAST_TOKENS = 100  # that a position must have to get its own mean
MOST_LEFT_OUT = 0.1  # largest share of sampled tokens at positions without a mean


@dataclass(frozen=True, eq=False)
class Center:
    """The means that are subtracted from hidden states.

    rows_Pd  float32; row p belongs to position p, and the last row to every later position as well; for `mean` it is
             the only one
    record   its entry in dictionary.json: kind ("mean" or "position"), tokens that it was estimated from, and for
             `position` how many positions have a mean of their own and the pseudo-count a
    """

    rows_Pd: np.ndarray
    record: dict

    @property
    def kind(self) -> str:
        return self.record["kind"]

    def subtract_from(self, rows_Nd: np.ndarray, position_N: np.ndarray) -> np.ndarray:
        """Rows minus the mean of their positions, as arrays."""
        return rows_Nd - self.rows_Pd[np.minimum(position_N, len(self.rows_Pd) - 1)]

    def save(self, directory: Path) -> None:
        """Write center.json, then center.npy."""
        with appearing_whole(Path(directory) / "center.json") as file:
            file.write(json.dumps(self.record).encode())
        with appearing_whole(Path(directory) / "center.npy") as file:
            np.save(file, self.rows_Pd)

    @classmethod
    def load(cls, directory: Path, record: dict | None = None) -> Self:
        """Read center.npy, and center.json unless the record is given. Raises OSError or ValueError if that fails."""
        rows_Pd = read_array("center.npy", read_file(Path(directory) / "center.npy"), 2).copy()
        record = record or json.loads(read_file(Path(directory) / "center.json"))
        if not isinstance(record, dict) or record.get("kind") not in ("mean", "position"):
            raise ValueError("the record of its centre names neither mean nor position")
        return cls(rows_Pd, record)


def centred_unit_rows(
    rows_Nd: torch.Tensor, center_Pd: torch.Tensor | None, position_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the mean of their positions from rows and scale them to unit length, in place; tensors on one device.

    center_Pd, position_N  None: nothing is subtracted
    Returns  rows_Nd, and how many rows are not finite (a tensor without axes)
    """
    if center_Pd is not None and position_N is not None:
        rows_Nd -= center_Pd[position_N.clamp(max=len(center_Pd) - 1)]
    norms_N = torch.linalg.vector_norm(rows_Nd, dim=1, keepdim=True)
    not_finite = (~norms_N.isfinite()).sum()
    rows_Nd /= norms_N.clamp_(min=1e-12)
    return rows_Nd, not_finite


class HiddenSums:
    """Sums of raw hidden states, by position, in float64."""

    def __init__(self, width: int):
        self.sums_Pd, self.tokens_P, self.squares_P = np.zeros((0, width)), np.zeros(0), np.zeros(0)

    def add(self, position_n: np.ndarray, rows_nd: np.ndarray) -> None:
        """Add rows (n, d) at positions int (n)."""
        if not len(rows_nd):
            return
        more = int(position_n.max()) + 1 - len(self.tokens_P)
        if more > 0:
            self.sums_Pd = np.concatenate([self.sums_Pd, np.zeros((more, self.sums_Pd.shape[1]))])
            self.tokens_P = np.concatenate([self.tokens_P, np.zeros(more)])
            self.squares_P = np.concatenate([self.squares_P, np.zeros(more)])
        rows_nd = rows_nd.astype(np.float64)
        order = np.argsort(position_n, kind="stable")
        positions, starts = np.unique(position_n[order], return_index=True)
        self.sums_Pd[positions] += np.add.reduceat(rows_nd[order], starts)
        self.tokens_P += np.bincount(position_n, minlength=len(self.tokens_P))
        self.squares_P[positions] += np.add.reduceat((rows_nd[order] ** 2).sum(1), starts)

    def center(self, kind: str, least_tokens: int = LEAST_TOKENS) -> Center:
        """The Center of all rows that were added.

        kind    "mean" or "position"
        Raises  CenteringError when too many tokens are at positions of fewer than `least_tokens`
        """
        tokens = int(self.tokens_P.sum())
        mean_d = self.sums_Pd.sum(0) / max(tokens, 1)
        if kind == "mean":
            return Center(mean_d[None].astype(np.float32), {"kind": kind, "tokens": tokens})
        own_P = self.tokens_P >= least_tokens
        left_out = 1 - self.tokens_P[own_P].sum() / max(tokens, 1)
        if left_out > MOST_LEFT_OUT:
            raise CenteringError(
                f"--center position needs {least_tokens} tokens at every position, but {left_out:.0%} of the "
                f"{tokens:,} sampled ones are at positions with fewer. Use more --dictionary-tokens or more text, or "
                "--center mean."
            )
        pseudo_count = self._pseudo_count(own_P)
        rows_Pd = np.repeat(mean_d[None], len(own_P) + 1, axis=0)
        tokens_p = self.tokens_P[own_P, None]
        rows_Pd[:-1][own_P] = (self.sums_Pd[own_P] + pseudo_count * mean_d) / (tokens_p + pseudo_count)
        record = {"kind": kind, "tokens": tokens, "positions": int(own_P.sum()), "pseudo_count": float(pseudo_count)}
        return Center(rows_Pd.astype(np.float32), record)

    def _pseudo_count(self, own_P):
        """Variance within positions divided by the variance between them; very large if positions do not differ."""
        tokens_p, sums_pd = self.tokens_P[own_P], self.sums_Pd[own_P]
        count, tokens = len(tokens_p), tokens_p.sum()
        means_pd, mean_d = sums_pd / tokens_p[:, None], sums_pd.sum(0) / tokens
        between = float((tokens_p * ((means_pd - mean_d) ** 2).sum(1)).sum())
        within = (self.squares_P[own_P].sum() - float((tokens_p * (means_pd**2).sum(1)).sum())) / max(tokens - count, 1)
        variance = (between - (count - 1) * within) / max(tokens - (tokens_p**2).sum() / tokens, 1e-12)
        return within / variance if variance > 1e-12 * within else 1e12
