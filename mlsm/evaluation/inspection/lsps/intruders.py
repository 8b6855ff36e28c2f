"""How interpretable an LSP is, by a test of word intrusion (Chang et al., NIPS 2009) with embeddings as the judge.

    test = IntruderTest(sample, by_lsp(sample), vocabulary, embeddings_Vd)
    test.lsp(7).auc             # 1: the judge finds every intruder; 0.5: the words are no closer than chance
    summarise_judged([test.lsp(lsp) for lsp in range(sample.k)])

The members of an LSP are the TOP different entries of the vocabulary among the tokens where it is heaviest; case makes
no difference. One after another they are taken out and an intruder is put in their place. The judge compares which of
the two is closer to the other members, by its mean cosine; the detection AUC is the share of comparisons that the
member wins, ties counting half. Embeddings lose their mean over the entries that take part: what all share says
nothing.

So that nothing else gives the intruder away, it is matched to the member whose place it takes: it is of the same class
(whole word, beginning of a longer word, continuation, symbol) and about as frequent in the sample. For each member
there are NEAR intruders that are a little more frequent and NEAR that are a little less, all within a factor of
MOST_APART; a member without them stays among the others, but is not taken out. Intruders are entries on which the LSP
is weaker, on average, than on all tokens. The judge sees the entry alone: neither its position nor its context. If an
LSP's tokens were drawn at random, member and intruder would be exchangeable and the AUC 0.5.

Two simple judges are reported in addition. One sees only the frequency of an entry, and should be near 0.5. The other
sees only its spelling (the cosine of its character n-grams, one to three of them with the word's ends, weighted by
tf-idf): it says what LSPs reach by endings and capitals alone.

An AUC above 0.5 alone does not show that learning helped. Hidden states of like words are alike, so random directions
have it too, and the figure is to be compared with that of such a dictionary (docs/sparse-coding.md, Controls). Not
handled here: what an LSP says about a word in only some contexts; judges other than embeddings.

Shapes: N sampled tokens, V vocabulary, d width of the embeddings, K LSPs, M members, T members taken out, I intruders,
U entries that are members or intruders.
"""

from typing import NamedTuple

import numpy as np

from mlsm.evaluation.inspection.lsps.sample import SEED, Entries, Sample
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary

TOP = 12  # members of an LSP
LEAST_TAKEN_OUT = 5  # of them, for an LSP to be judged
LEAST_COUNT = 5  # occurrences in the sample of an entry that takes part
NEAR = 5
MOST_APART = 2.0
RESAMPLES = 1000
_WHOLE, _BEGINNING, _CONTINUATION, _SYMBOL = range(4)


class Judged(NamedTuple):
    """The test's result for one LSP.

    auc           detection AUC; None for an LSP with too few members
    interval      2.5 and 97.5 per cent of its bootstrap over the members that were taken out; None without one
    by_frequency, by_spelling  the AUC of judges that see only that; None without one
    members       ids, the one with the heaviest token first
    """

    auc: float | None
    interval: tuple[float, float] | None
    by_frequency: float | None
    by_spelling: float | None
    members: list[int]


class IntruderTest:
    """The test for the LSPs of a sample.

    embeddings_Vd  the judge's vector of every entry of the vocabulary
    """

    def __init__(self, sample: Sample, entries: Entries, vocabulary: Vocabulary, embeddings_Vd: np.ndarray):
        from sklearn.feature_extraction.text import TfidfVectorizer

        size = len(vocabulary.texts)
        self._sample, self._entries = sample, entries
        self._counts_V = np.bincount(sample.ids_N, minlength=size)
        self._takes_part_V = self._counts_V >= LEAST_COUNT
        self._class_V = _classes(sample, vocabulary, self._counts_V)
        _, self._folded_V = np.unique([text.casefold() for text in vocabulary.texts], return_inverse=True)
        self._tie_V = np.random.default_rng(SEED).random(size)  # the order of ids is often alphabetical
        centred = embeddings_Vd - embeddings_Vd[self._takes_part_V].mean(0)
        self._units_Vd = centred / np.maximum(np.linalg.norm(centred, axis=1, keepdims=True), 1e-12)
        self._log_counts_V = np.log(np.maximum(self._counts_V, 1))
        by_ngrams = TfidfVectorizer(analyzer="char_wb", ngram_range=(1, 3), lowercase=False, dtype=np.float32)
        self._spelling_VG = by_ngrams.fit_transform(vocabulary.texts)

    def lsp(self, lsp: int) -> Judged:
        """Judge one LSP."""
        tokens, weights = self._entries.heaviest_first(lsp)
        ids = self._sample.ids_N[tokens]
        mass_V = np.bincount(ids, weights, len(self._counts_V))
        is_weak_V = mass_V * len(self._sample) < mass_V.sum() * self._counts_V  # weaker than on all tokens
        ids = ids[self._takes_part_V[ids]]
        _, first = np.unique(self._folded_V[ids], return_index=True)
        members_M = ids[np.sort(first)[:TOP]]
        places, intruders = [], []
        allowed_V = self._takes_part_V & is_weak_V & ~np.isin(self._folded_V, self._folded_V[members_M])
        for place, member in enumerate(members_M):
            matched = self._match(member, allowed_V)
            if len(matched):
                places.append(place)
                intruders.append(matched)
        if len(places) < LEAST_TAKEN_OUT:
            return Judged(None, None, None, None, members_M.tolist())
        place_T, intruder_TI = np.array(places), np.array(intruders)
        ids_U, at = np.unique(np.concatenate([members_M, intruder_TI.ravel()]), return_inverse=True)
        at_M, at_TI = at[: len(members_M)], at[len(members_M) :].reshape(intruder_TI.shape)
        units_Ud, spelling_UG, log_counts_U = self._units_Vd[ids_U], self._spelling_VG[ids_U], self._log_counts_V[ids_U]
        won_T = _share_won(units_Ud @ units_Ud.T, at_M, place_T, at_TI)
        by_frequency_T = _share_won(-np.abs(log_counts_U[:, None] - log_counts_U), at_M, place_T, at_TI)
        by_spelling_T = _share_won((spelling_UG @ spelling_UG.T).toarray(), at_M, place_T, at_TI)
        rng = np.random.default_rng([SEED, lsp])
        means = rng.choice(won_T, (RESAMPLES, len(won_T))).mean(1)
        low, high = (float(bound) for bound in np.quantile(means, [0.025, 0.975]))
        controls = float(by_frequency_T.mean()), float(by_spelling_T.mean())
        return Judged(float(won_T.mean()), (low, high), *controls, members_M.tolist())

    def _match(self, member, allowed_V):
        """The intruders for a member, int64 (2 NEAR); none where too few are as frequent."""
        others = np.flatnonzero(allowed_V & (self._class_V == self._class_V[member]))
        order = others[np.lexsort((self._tie_V[others], self._counts_V[others]))]
        counts, own = self._counts_V[order], (self._counts_V[member], self._tie_V[member])
        above = int(((counts > own[0]) | ((counts == own[0]) & (self._tie_V[order] > own[1]))).sum())
        at = len(order) - above
        chosen = order[max(0, at - NEAR) : at + NEAR]
        ratio = np.abs(self._log_counts_V[chosen] - self._log_counts_V[member])
        whole = at >= NEAR and above >= NEAR and ratio.max() <= np.log(MOST_APART)
        return chosen if whole else chosen[:0]


def _classes(sample, vocabulary, counts_V):
    """The class of every entry; one that begins a word is a whole word if most of its occurrences are."""
    begins_N = vocabulary.begins_word(sample.ids_N)
    goes_on_N = np.append(~begins_N[1:] & (np.diff(sample.window_N) == 0), False)
    goes_on_V = np.bincount(sample.ids_N[goes_on_N], minlength=len(counts_V))
    class_V = np.where(2 * goes_on_V > counts_V, _BEGINNING, _WHOLE)
    class_V[vocabulary.continues_V] = _CONTINUATION
    class_V[vocabulary.is_symbol_V] = _SYMBOL
    return class_V


def _share_won(likeness_UU, members_M, place_T, intruder_TI):
    """For each member left out in turn, the share of its intruders that are less similar to the other members."""
    others_TM = np.arange(len(members_M)) != place_T[:, None]
    own_T = np.where(others_TM, likeness_UU[members_M[place_T, None], members_M], 0).sum(1)
    foreign_TI = np.where(others_TM[:, None], likeness_UU[intruder_TI[:, :, None], members_M], 0).sum(2)
    return ((own_T[:, None] > foreign_TI) + 0.5 * (own_T[:, None] == foreign_TI)).mean(1)


def summarise_judged(judged: list[Judged]) -> dict:
    """Means over the judged LSPs, that of the AUC with a bootstrap interval over LSPs; None if none is judged."""
    aucs = np.array([one.auc for one in judged if one.auc is not None])
    if not len(aucs):
        return {"judged": 0, "auc": None, "interval": None, "by_frequency": None, "by_spelling": None}
    rng = np.random.default_rng(SEED)
    means = [rng.choice(aucs, len(aucs)).mean() for _ in range(RESAMPLES)]
    controls = {
        name: float(np.mean([getattr(one, name) for one in judged if one.auc is not None]))
        for name in ("by_frequency", "by_spelling")
    }
    interval = np.quantile(means, [0.025, 0.975]).tolist()
    return {"judged": len(aucs), "auc": float(aucs.mean()), "interval": interval, **controls}
