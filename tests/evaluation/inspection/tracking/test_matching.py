"""Correlations against numpy.corrcoef; planted permutations, splits, merges and new LSPs are found again."""

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment
from scipy.sparse import csr_array

from mlsm.evaluation.inspection.lsps.sample import Sample
from mlsm.evaluation.inspection.tracking.correlation import LEAST_TOKENS, Activations, correlate_lsps
from mlsm.evaluation.inspection.tracking.matching import AFTER, BEFORE, GAIN, match_lsps

TOKENS, LSPS, OF_A_TOKEN = 12_000, 200, 8


def planted(seed=0, lsps=LSPS, tokens=TOKENS):
    """Rows of some LSPs a token, the first LSPs far more often than the last; the weights of a row sum to one."""
    rng = np.random.default_rng(seed)
    rates_K = 1 / (10 + np.arange(lsps))
    keys_NK = rng.exponential(size=(tokens, lsps)) / rates_K  # the smallest are drawn without replacement
    dense_NK = np.zeros((tokens, lsps))
    chosen = np.argpartition(keys_NK, OF_A_TOKEN, axis=1)[:, :OF_A_TOKEN]
    np.put_along_axis(dense_NK, chosen, rng.gamma(2, size=chosen.shape), axis=1)
    return dense_NK / dense_NK.sum(1, keepdims=True)


def noisy(dense_NK, noise, seed=1):
    """A share of the entries goes to LSPs drawn at random; so planted pairs correlate at about 1 - noise."""
    rng, moved_NK = np.random.default_rng(seed), dense_NK.copy()
    token_E, lsp_E = np.nonzero(dense_NK)
    goes_E = rng.random(len(token_E)) < noise
    token_E, lsp_E = token_E[goes_E], lsp_E[goes_E]
    moved_NK[token_E, lsp_E] = 0
    other_E = rng.permutation(lsp_E)  # as often as they were, but elsewhere
    moved_NK[token_E, other_E] = dense_NK[token_E, lsp_E]
    return moved_NK


def sample_of(dense_NK):
    rows, none = csr_array(dense_NK.astype(np.float32)), np.zeros(len(dense_NK), np.int32)
    entries = (rows.indptr.astype(np.int64), rows.indices.astype(np.uint16), rows.data)
    return Sample(none, none, none, none, *entries, k=dense_NK.shape[1], of=len(dense_NK))


def both(first_NK, second_NJ, least=0.3):
    first, second = Activations(sample_of(first_NK)), Activations(sample_of(second_NJ))
    return first, second, correlate_lsps(first, second, least)


def matched(first_NK, second_NJ, matching="hungarian"):
    return match_lsps(*both(first_NK, second_NJ), kept_from=0.7, matching=matching)


def test_correlations_are_those_of_numpy():
    first_NK, second_NJ = planted(0, 300, 6_000), noisy(planted(0, 300, 6_000), 0.5)[:, :290]
    first_NK[:, 7] = 0
    first_NK[: LEAST_TOKENS - 1, 7] = 1  # too rare
    second_NJ[:, 11] = 0.25  # the same on every token
    first, second, found = both(first_NK, second_NJ, least=0.1)
    with np.errstate(invalid="ignore"):
        r_KJ = np.corrcoef(first_NK.astype(np.float32), second_NJ.astype(np.float32), rowvar=False)[:300, 300:]
    r_KJ[7], r_KJ[:, 11] = -np.inf, -np.inf
    assert first.is_rare.nonzero()[0].tolist() == [7] and second.is_rare.nonzero()[0].tolist() == [11]
    assert len(found.r_P) == (r_KJ >= 0.1).sum() > 250
    assert np.allclose(found.r_P, r_KJ[found.first_P, found.second_P], atol=1e-9)
    alive = np.arange(300) != 7
    assert np.array_equal(found.best_K[alive], r_KJ.argmax(1)[alive]) and found.best_K[7] == -1
    assert np.allclose(found.best_r_K[alive], r_KJ.max(1)[alive], atol=1e-9)
    assert np.array_equal(np.delete(found.best_J, 11), np.delete(r_KJ.argmax(0), 11)) and found.best_J[11] == -1
    expected = np.cov(second_NJ[:, [3, 5, 8]].astype(np.float32), rowvar=False, ddof=0)
    assert np.allclose(second.covariances(np.array([3, 5, 8])), expected, atol=1e-12)


@pytest.mark.parametrize("shift", [1, 2_999, 5_000])
def test_chance_is_the_correlation_with_tokens_moved_on(shift):
    first_NK, second_NJ = planted(0, 40, 5_999), noisy(planted(0, 40, 5_999), 0.5)
    first, second, pairs = both(first_NK, second_NJ, least=0.02)
    found = correlate_lsps(first.rotate(shift), second, 0.02)
    _, _, expected = both(np.roll(first_NK, shift, axis=0), second_NJ, least=0.02)
    assert len(expected.r_P) > 20 and pairs.r_P.max() > 0.4 > 0.1 > expected.r_P.max()
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("matching", ["hungarian", "mutual-best"])
@pytest.mark.parametrize(("noise", "state"), [(0.0, "kept"), (0.3, None), (0.5, "drifted")])
def test_a_planted_permutation_is_found(matching, noise, state):
    first_NK, order = planted(), np.random.default_rng(9).permutation(LSPS)
    second_NK = noisy(first_NK, noise)[:, order]
    where = np.argsort(order)  # LSP i of the first is where[i] of the second
    r_K = np.array([np.corrcoef(first_NK[:, i], second_NK[:, where[i]])[0, 1] for i in range(LSPS)])
    assert abs(np.median(r_K) - (1 - noise)) < 0.06, "the noise is as large as it is called"
    found = matched(first_NK, second_NK, matching)
    right = [into.tolist() == [where[i]] for i, into in enumerate(found.into)]
    assert np.mean(right) >= 0.95
    assert state is None or np.mean([one == state for one in found.states]) >= 0.95
    assert np.allclose(found.r_K[right], r_K[right], atol=1e-6)


def test_what_is_only_noise_is_not_matched():
    found = matched(planted(0), planted(5))
    assert set(found.states) == {"vanished"} and set(found.states_after) == {"appeared"}


def test_splits_and_merges_are_found_and_no_others():
    """LSPs 0 to 19 become two each; pairs of 20 to 59 become one; 60 to 79 go, and others come in their place."""
    rng, first_NK = np.random.default_rng(3), planted()
    other_NK = planted(5)
    half_N20 = rng.random((TOKENS, 20)) < rng.uniform(0.35, 0.65, 20)
    noised_NK = noisy(first_NK, 0.1)
    parts = [noised_NK[:, :20] * half_N20, noised_NK[:, :20] * ~half_N20]
    merged_N20 = noised_NK[:, 20:60:2] + noised_NK[:, 21:60:2]
    second_NJ = np.concatenate([*parts, merged_N20, other_NK[:, 60:80], noised_NK[:, 80:]], axis=1)
    found = matched(first_NK, second_NJ)
    states = np.array(found.states)
    assert np.mean(states[:20] == "split") >= 0.95 and np.mean(states[20:60] == "merged") >= 0.95
    assert (states[60:80] == "vanished").all() and (states[80:] == "kept").mean() >= 0.95
    assert np.mean([sorted(found.into[i].tolist()) == [i, 20 + i] for i in range(20)]) >= 0.95
    assert np.mean([found.into[i].tolist() == [40 + (i - 20) // 2] for i in range(20, 60)]) >= 0.95
    after = np.array(found.states_after)
    assert np.mean(after[:40] == "split") >= 0.95 and np.mean(after[40:60] == "merged") >= 0.95
    assert (after[60:80] == "appeared").all() and np.mean(after[80:] == "kept") >= 0.95
    whole, sums = first_NK[:, 3], second_NJ[:, found.into[3]].sum(1)
    assert found.r_K[3] == pytest.approx(np.corrcoef(whole, sums)[0, 1], abs=1e-6)
    assert set(states) <= set(BEFORE) and set(after) <= set(AFTER)


@pytest.mark.parametrize(
    ("shares", "parts"),
    [((0.95, 0.05), 1), ((0.8, 0.2), 2), ((0.5, 0.45, 0.05), 2), ((0.5, 0.3, 0.2), 3)],
)
def test_a_part_that_adds_little_is_no_part(shares, parts):
    """LSP 0 becomes several, with shares of its tokens; each gain in correlation is recomputed by numpy."""
    rng, first_NK = np.random.default_rng(4), planted()
    part_N = rng.choice(len(shares), TOKENS, p=shares)
    pieces_NJ = [first_NK[:, 0] * (part_N == number) for number in range(len(shares))]
    sums_JN = np.cumsum(pieces_NJ, axis=0)
    gains = np.diff([np.corrcoef(first_NK[:, 0], sum_N)[0, 1] for sum_N in sums_JN])
    assert [gain > GAIN for gain in gains] == [number < parts for number in range(1, len(shares))]
    second_NJ = np.concatenate([np.stack(pieces_NJ, axis=1), first_NK[:, 1:]], axis=1)
    found = match_lsps(*both(first_NK, second_NJ, least=0.1), kept_from=0.7, matching="hungarian")
    assert found.states[0] == ("split" if parts > 1 else "kept")
    assert found.into[0].tolist() == list(range(parts))
    expected = ["split"] * parts if parts > 1 else ["kept"]
    assert found.states_after[: len(shares)] == expected + ["appeared"] * (len(shares) - parts)
    assert found.r_K[0] == pytest.approx(np.corrcoef(first_NK[:, 0], sums_JN[parts - 1])[0, 1], abs=1e-6)


def test_the_assignment_has_the_largest_sum():
    """Of pairs that correlate enough, as over the whole matrix at once; mutual best has less where LSPs overlap."""
    rng = np.random.default_rng(2)
    shared_NK = planted(tokens=3_000)[:, :60]
    first_NK = shared_NK + 0.8 * shared_NK[:, rng.permutation(60)]
    second_NK = shared_NK + 0.8 * shared_NK[:, rng.permutation(60)]
    first, second, pairs = both(first_NK, second_NK, least=0.2)
    found = match_lsps(first, second, pairs, kept_from=1.0, matching="hungarian")  # nothing is a sum of others exactly
    r_KK = np.corrcoef(first_NK, second_NK, rowvar=False)[:60, 60:]
    r_KK[r_KK < 0.2] = 0
    best = r_KK[linear_sum_assignment(r_KK, maximize=True)].sum()
    mutual = match_lsps(first, second, pairs, kept_from=1.0, matching="mutual-best")
    assert np.nansum(found.r_K) == pytest.approx(best, abs=1e-4)
    assert np.nansum(mutual.r_K) < best - 0.1
    assert len({int(into[0]) for into in found.into if len(into)}) == sum(len(into) for into in found.into)
