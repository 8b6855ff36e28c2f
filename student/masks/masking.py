"""Which tokens a student must predict, and what it sees in their place.

Both follow from (seed, epoch, window id, position) and the mask rate only, through counter-based hashes. So resuming
needs no state, all objectives mask the same tokens, and codes, other windows and micro-batches have no effect. Units:

    token  exactly round(rate x maskable) positions of a window, those with the smallest hash. So full windows have
           equal counts (static shapes), and the mask of a lower rate is a subset of that of a higher one
    word   whole words in the order of the hash of their first position. A word that would exceed round(rate x maskable)
           tokens is skipped; later words that still fit are masked
    span   stretches of geometric length (SpanBERT, Joshi et al. 2020, section 3.1: p = 0.2, at most 10 tokens, 3.8 on
           average) in the order of their hash until exactly round(rate x maskable) positions are masked, the last
           stretch cut. As in SpanBERT, a stretch extends forward from its first token, so the first tokens after a
           special one are masked less often. It may start inside a word. As with tokens, the mask of a lower rate is a
           subset of that of a higher one

With a table of weights (table.py) the order is that of an exponential race: where u is the hash as a number between 0
and 1 and w the weight, the unit with the smallest -ln(1 - u) / w comes first. Each unit is then drawn among those that
are left with probability in proportion to w (Efraimidis and Spirakis 2006), as by NumPy's `choice` without replacement;
w is the mean weight of the unit's tokens. With equal weights the order is that of the hashes, bit for bit. A table may
also hold collocations. They are units themselves, or join the words that they overlap.

Not handled here: which tokens begin a word (words.py), where weights come from (weights.py).

Shapes: W windows, L positions of a window, V vocabulary, M masked tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np

from mlsm.common.errors import RunError
from shards.counter import hash_u64
from shards.reader import Store
from shards.windows import WindowBatch
from student.config import ResolvedConfig, StudentConfig
from student.masks.config import corruption_shares
from student.masks.table import MaskTable
from student.masks.words import continuation_flags

_PURPOSE = 0x6D61736B  # "mask": keeps these hashes apart from those of order and dropout
_LENGTH_PURPOSE = 0x7370616E  # "span"
_FATE_PURPOSE = 0x66617465  # "fate": mask token, random token or unchanged
_TOKEN_PURPOSE = 0x746F6B65  # "toke": which random token
_LAST = np.uint64(2**64 - 1)

Epoch = int | np.ndarray  # one for all windows, or one for each window

SPAN_P, LONGEST_SPAN = Fraction(1, 5), 10
_SHARES = [SPAN_P * (1 - SPAN_P) ** length for length in range(LONGEST_SPAN)]
_UP_TO = [sum(_SHARES[: length + 1]) / sum(_SHARES) for length in range(LONGEST_SPAN - 1)]
_SPAN_CUTS = np.array([int(share * 2**64) for share in _UP_TO], np.uint64)  # exact: logarithms differ between machines
_LN2 = 0xB17217F7D1C / 2**44  # cut to 44 bits, so that small multiples are exact
_ATANH = [1 / (2 * power + 1) for power in range(17)]  # coefficients of atanh(s) / s in powers of s^2


def no_table(step: int) -> MaskTable | None:
    """No table at any step: all tokens have the same weight."""
    return None


@dataclass(frozen=True)
class Masking:
    """How a run masks the windows of a store.

    special_ids  the store's: `mask`, and `all` ids that are never masked and never used as random replacements
    rate         share of a window's maskable tokens at step 0. It moves to rate_end (None: it stays) by the last of
                 max_steps, as the schedule says
    corruption   mask: always the mask token; such as 80-10-10: in 80 % the mask token, in 10 % a random token that is
                 not special, in 10 % the token itself (BERT, Devlin et al. 2019, section 3.1); none: nothing is hidden
    unit         token, word or span
    continues_V  which ids continue a word; only needed for words
    schedule     linear, cosine or steps; with steps the rate changes by equal amounts at rate_steps (shares of the run)
    table_at     optimiser step, counted from 0 -> weights and collocations; None: all tokens have the same weight
    """

    special_ids: dict
    vocab_size: int
    rate: float
    rate_end: float | None = None
    max_steps: int = 1
    corruption: str = "mask"
    unit: str = "token"
    continues_V: np.ndarray = field(default_factory=lambda: np.zeros(0, bool))
    schedule: str = "linear"
    rate_steps: tuple[float, ...] = ()
    table_at: Callable[[int], MaskTable | None] = no_table

    @property
    def final_rate(self) -> float:
        """The mask rate of held-out windows, always the same, so that the figures of a run can be compared."""
        return self.rate if self.rate_end is None else self.rate_end

    def rate_at(self, step: int) -> float:
        """The rate of an optimiser step, counted from 0."""
        if self.rate_end is None or self.max_steps == 1:
            return self.rate
        done = step / (self.max_steps - 1)
        if self.schedule == "cosine":  # rounded, since math libraries differ in a cosine's last digit
            done = round((1 - math.cos(math.pi * done)) / 2, 12)
        elif self.schedule == "steps":
            done = sum(step >= share * self.max_steps for share in self.rate_steps) / len(self.rate_steps)
        return (1 - done) * self.rate + done * self.rate_end

    def choose(
        self,
        read: WindowBatch,
        window_ids_W: np.ndarray,
        *,
        seed: int,
        epoch: Epoch,
        rate: float,
        table: MaskTable | None = None,
    ) -> np.ndarray:
        """The tokens to predict.

        table    weights of the tokens and collocations; None: all tokens have the same weight
        Returns  bool (W, L)
        """
        maskable_WL = maskable_positions(read.ids, read.lengths, self.special_ids["all"])
        counted: dict[str, Any] = {"seed": seed, "epoch": epoch, "rate": rate}
        if table is not None:
            counted["weights_WL"] = table.weights_V[read.ids].astype(np.float64)
        has_collocations = table is not None and len(table.collocations_C5) > 0
        if self.unit == "token" and not has_collocations:
            return choose_mask(maskable_WL, window_ids_W, **counted)
        begins_WL = begins_run(maskable_WL, read.documents)
        if self.unit == "span":
            return choose_spans(maskable_WL, begins_WL, window_ids_W, **counted)
        assert self.unit in ("token", "word"), self.unit
        runs_WL = np.cumsum(begins_WL, axis=1) * maskable_WL
        begins_WL |= maskable_WL & ~self.continues_V[read.ids] if self.unit == "word" else maskable_WL
        if table is not None and has_collocations:
            begins_WL &= ~table.continues_collocation(read.ids, runs_WL)
        return choose_words(maskable_WL, begins_WL, window_ids_W, **counted)

    def corrupt(
        self, ids_WL: np.ndarray, mask_WL: np.ndarray, window_ids_W: np.ndarray, *, seed: int, epoch: Epoch
    ) -> np.ndarray:
        """The student's input: int64 (W, L), the ids with replacements at the chosen positions."""
        input_WL = ids_WL.astype(np.int64)
        if self.corruption == "none":
            return input_WL
        if self.corruption == "mask":
            input_WL[mask_WL] = self.special_ids["mask"]
            return input_WL
        window_M, position_M = np.nonzero(mask_WL)
        epoch_M = np.broadcast_to(epoch, len(ids_WL))[window_M]
        keys = seed, epoch_M, np.asarray(window_ids_W)[window_M], position_M
        fate_M = hash_u64(_FATE_PURPOSE, *keys)
        ordinary = np.setdiff1d(np.arange(self.vocab_size), self.special_ids["all"])
        random_M = ordinary[hash_u64(_TOKEN_PURPOSE, *keys) % np.uint64(len(ordinary))]
        masked, random, _ = corruption_shares(self.corruption)
        shown_M = np.where(fate_M < _share_of_uint64(masked + random), random_M, input_WL[mask_WL])
        input_WL[mask_WL] = np.where(fate_M < _share_of_uint64(masked), self.special_ids["mask"], shown_M)
        return input_WL


def _share_of_uint64(percent: int) -> np.uint64:
    return np.uint64(min(2**64 * percent // 100, 2**64 - 1))


def take_turns(tables: Sequence[MaskTable | None], config: ResolvedConfig) -> Callable[[int], MaskTable | None]:
    """Optimiser step, counted from 0 -> the table used then. Every table but the first starts at a share of the steps,
    at exactly the step at which a mask rate with `mask_schedule` steps would change."""
    shares = config.mask_weight_steps if len(tables) > 1 else ()
    return lambda step: tables[sum(step >= share * config.max_steps for share in shares)]


def check_rate(config: StudentConfig, store: Store) -> None:
    """Raise RunError if the mask rate is so low that no token of a window is masked."""
    if (rate := max(config.predicted)) * store.max_length < 0.5:
        raise RunError(
            f"--mask-rate {rate:g} masks none of a window's {store.max_length} tokens. It is a share, such as 0.15."
        )


def build_masking(
    config: ResolvedConfig, store: Store, table_at: Callable[[int], MaskTable | None] = no_table
) -> Masking:
    """The masking of a run. Raises RunError if the unit is word and the store's tokenizer does not mark words."""
    is_by_words = config.mask_unit == "word"
    unmasked = config.positions == "all"  # then these settings have their defaults (config.py)
    return Masking(
        store.special_ids,
        store.vocab_size,
        1.0 if unmasked else config.mask_rate,
        config.mask_rate_end,
        config.max_steps,
        "none" if unmasked else config.corruption,
        config.mask_unit,
        continuation_flags(store.tokenizer_dir, store.vocab_size) if is_by_words else np.zeros(0, bool),
        config.mask_schedule,
        config.mask_rate_steps,
        table_at,
    )


def maskable_positions(ids_WL: np.ndarray, lengths_W: np.ndarray, special_ids: Sequence[int]) -> np.ndarray:
    """Positions that may be masked: real tokens that are not special.

    ids_WL       integer token ids
    lengths_W    real tokens of each window
    special_ids  ids that are never masked
    Returns      bool (W, L)
    """
    ids_WL = np.asarray(ids_WL)
    real_WL = np.arange(ids_WL.shape[1]) < np.asarray(lengths_W)[:, None]
    return real_WL & ~np.isin(ids_WL, np.asarray(special_ids))


def begins_run(maskable_WL: np.ndarray, documents_WL: np.ndarray) -> np.ndarray:
    """Where stretches of maskable tokens of one document begin, bool (W, L)."""
    follows_WL = np.zeros_like(maskable_WL)
    follows_WL[:, 1:] = maskable_WL[:, :-1] & (documents_WL[:, 1:] == documents_WL[:, :-1])
    return maskable_WL & ~follows_WL


def choose_mask(
    maskable_WL: np.ndarray,
    window_ids_W: np.ndarray,
    *,
    seed: int,
    epoch: Epoch,
    rate: float,
    weights_WL: np.ndarray | None = None,
) -> np.ndarray:
    """Choose exactly round(rate x maskable) positions of every window.

    maskable_WL   bool
    window_ids_W  integers; a window's mask depends on its own id only, not on its neighbours
    rate          share of the maskable positions
    weights_WL    float64 from 0, of every position; None: equal ones
    Returns       bool (W, L)
    """
    hashes_WL = _hashes(_PURPOSE, maskable_WL, window_ids_W, seed, epoch)
    return _first_in_order(_race(hashes_WL, weights_WL), maskable_WL, rate)


def choose_spans(
    maskable_WL: np.ndarray,
    begins_WL: np.ndarray,
    window_ids_W: np.ndarray,
    *,
    seed: int,
    epoch: Epoch,
    rate: float,
    weights_WL: np.ndarray | None = None,
) -> np.ndarray:
    """Mask the same number of positions by spans. One span starts at each maskable position and never leaves its run.

    begins_WL  bool, the first position of each run; a run is a stretch of maskable tokens that spans do not leave

    Going through spans in the order of their hash is the same as ordering positions by the smallest hash of the spans
    that cover them.
    """
    hashes_WL = _hashes(_PURPOSE, maskable_WL, window_ids_W, seed, epoch)
    lengths_WL = span_lengths(_hashes(_LENGTH_PURPOSE, maskable_WL, window_ids_W, seed, epoch))
    runs_WL = np.cumsum(begins_WL, axis=1) * maskable_WL
    reach = [  # (n, whether the span that begins at each position covers the n-th after it)
        (ahead, (lengths_WL[:, :-ahead] > ahead) & (runs_WL[:, :-ahead] == runs_WL[:, ahead:]))
        for ahead in range(1, min(LONGEST_SPAN, hashes_WL.shape[1]))
    ]
    if weights_WL is not None:
        totals_WL, sizes_WL = weights_WL.copy(), np.ones(weights_WL.shape)
        for ahead, reaches_WL in reach:
            totals_WL[:, :-ahead] += weights_WL[:, ahead:] * reaches_WL
            sizes_WL[:, :-ahead] += reaches_WL
        hashes_WL = _race(hashes_WL, totals_WL / sizes_WL)
    keys_WL = hashes_WL.copy()
    for ahead, reaches_WL in reach:
        np.minimum(keys_WL[:, ahead:], hashes_WL[:, :-ahead], out=keys_WL[:, ahead:], where=reaches_WL)
    return _first_in_order(keys_WL, maskable_WL, rate)


def words(maskable_WL: np.ndarray, begins_WL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The number of each position's word in its window, int64 (W, L), and the size of each word of a window by its
    number, int64 (W, L): its maskable tokens."""
    word_WL = np.cumsum(begins_WL, axis=1) - 1
    sizes_WL = np.zeros(maskable_WL.shape, np.int64)
    np.add.at(sizes_WL, (np.arange(len(maskable_WL))[:, None], word_WL), maskable_WL)
    return word_WL, sizes_WL


def choose_words(
    maskable_WL: np.ndarray,
    begins_WL: np.ndarray,
    window_ids_W: np.ndarray,
    *,
    seed: int,
    epoch: Epoch,
    rate: float,
    weights_WL: np.ndarray | None = None,
) -> np.ndarray:
    """Whole words, at most round(rate x maskable) tokens of a window.

    begins_WL  bool, maskable positions at which a word starts; it ends before the next one, or with its run
    """
    word_WL, sizes_WL = words(maskable_WL, begins_WL)
    hashes_WL = _hashes(_PURPOSE, begins_WL, window_ids_W, seed, epoch)
    rows_W1 = np.arange(len(maskable_WL))[:, None]
    if weights_WL is not None:
        totals_WL = np.zeros(maskable_WL.shape)
        np.add.at(totals_WL, (rows_W1, word_WL), weights_WL * maskable_WL)
        weights_WL = (totals_WL / np.maximum(sizes_WL, 1))[rows_W1, word_WL]
    # First positions in their order, then all others:
    order_WL = np.argsort(_race(hashes_WL, weights_WL), axis=1, kind="stable")
    ordered_WL = word_WL[rows_W1, order_WL]
    fits_WL = _fill(sizes_WL[rows_W1, ordered_WL], begins_WL.sum(axis=1), budget(maskable_WL, rate))
    chosen_WL = np.zeros_like(maskable_WL)
    window_C, place_C = np.nonzero(fits_WL)
    chosen_WL[window_C, ordered_WL[window_C, place_C]] = True
    return maskable_WL & chosen_WL[rows_W1, word_WL]


def span_lengths(hashes: np.ndarray) -> np.ndarray:
    """Lengths from the geometric distribution, restricted to 1 to LONGEST_SPAN."""
    return 1 + np.searchsorted(_SPAN_CUTS, hashes, side="right")


def exponential(hashes: np.ndarray) -> np.ndarray:
    """Exponential variates -ln(1 - u), float64 above 0, where the hash is in the u-th part of its range.

    It never falls as the hash rises, and has the same bits on every machine: it uses only exact and correctly rounded
    operations, each of them monotone. A library's logarithm guarantees neither.
    """
    left = 2.0**52 - 0.5 - (hashes >> np.uint64(12)).astype(np.float64)  # (1 - u) 2^52, exact
    mantissa, exponent = np.frexp(left)
    s = (1 - mantissa) / (1 + mantissa)  # -ln(mantissa) = 2 atanh(s), between 0 and ln 2
    series = np.zeros_like(s)
    for coefficient in reversed(_ATANH):
        series = series * (s * s) + coefficient
    return (52 - exponent) * _LN2 + np.minimum(2 * s * series, _LN2)


def _race(hashes_WL, weights_WL):
    """Sort keys of the positions of each window, uint64: ranks in the order of (exponential variate / weight, hash), or
    without weights the hashes, which give that order. Positions that are not wanted come last in both cases."""
    if weights_WL is None:
        return hashes_WL
    with np.errstate(divide="ignore", over="ignore"):  # a weight of 0 comes after all others
        arrivals_WL = exponential(hashes_WL) / np.where(hashes_WL == _LAST, 0, weights_WL)
    places_WL = np.empty_like(hashes_WL)
    order_WL = np.lexsort((hashes_WL, arrivals_WL))
    np.put_along_axis(places_WL, order_WL, np.arange(hashes_WL.shape[1], dtype=np.uint64)[None], axis=1)
    return places_WL


def _hashes(purpose, wanted_WL, window_ids_W, seed, epoch):
    """One hash per position; the largest number at positions that need none."""
    windows_W1, epochs_W1 = np.asarray(window_ids_W)[:, None], np.broadcast_to(epoch, len(wanted_WL))[:, None]
    hashes_WL = hash_u64(purpose, seed, epochs_W1, windows_W1, np.arange(wanted_WL.shape[1]))
    return np.where(wanted_WL, np.minimum(hashes_WL, _LAST - np.uint64(1)), _LAST)


def budget(maskable_WL: np.ndarray, rate: float) -> np.ndarray:
    """How many positions of each window to mask, int64 (W): round(rate x maskable)."""
    return np.rint(rate * maskable_WL.sum(axis=1)).astype(np.int64)


def _first_in_order(keys_WL, maskable_WL, rate):
    """Choose round(rate x maskable) positions in the order of (key, position)."""
    order_WL = np.argsort(keys_WL, axis=1, kind="stable")
    taken_WL = np.arange(keys_WL.shape[1]) < budget(maskable_WL, rate)[:, None]
    mask_WL = np.zeros_like(maskable_WL)
    np.put_along_axis(mask_WL, order_WL, taken_WL, axis=1)
    return mask_WL


def _fill(sizes_WL, counts_W, budget_W):
    """Go through the first counts_W sizes of each row and accept those that fit into the remaining budget; bool."""
    left_W = budget_W.copy()
    fits_WL = np.zeros(sizes_WL.shape, bool)
    for place in range(counts_W.max(initial=0)):
        size_W = sizes_WL[:, place]
        fits_WL[:, place] = (place < counts_W) & (size_W <= left_W)
        left_W -= size_W * fits_WL[:, place]
        if not left_W.any():
            break
    return fits_WL
