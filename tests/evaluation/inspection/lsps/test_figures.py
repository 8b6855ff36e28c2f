"""Figures of LSPs against dense brute force on a store that a tiny teacher coded."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers.normalizers import BertNormalizer

from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps import statistics, words
from mlsm.evaluation.inspection.lsps.neighbours import TokenIndex, nearest_atoms
from mlsm.evaluation.inspection.lsps.sample import Sample
from mlsm.evaluation.inspection.lsps.view import StoreView


@pytest.fixture(scope="module")
def view(coded_store):
    return StoreView(coded_store, 10**6)


@pytest.fixture(scope="module")
def dense_NK(view):
    sample = view.sample
    rows = np.zeros((len(sample), sample.k))
    for token in range(len(sample)):
        lsps, weights = sample.row(token)
        rows[token, lsps] = weights
    return rows


def test_tokens_without_a_code_do_not_count(hostile_view):
    """Of the made-up language, every seventh word has none."""
    sample = hostile_view.sample
    coded = sample.ids_N % 7 != 0
    assert sample.coded == coded.sum() < len(sample)
    for lsp in (0, 5, 23):
        having = [coded[t] and lsp in (i % 24, i * 5 % 24, i * 11 % 24) for t, i in enumerate(sample.ids_N.tolist())]
        assert hostile_view.densities[lsp] == pytest.approx(sum(having) / coded.sum())


def test_densities_are_shares_of_the_tokens_with_a_code(view, dense_NK):
    coded = dense_NK.any(1).sum()
    assert view.densities == pytest.approx((dense_NK > 0).sum(0) / coded)
    assert view.sample.coded == coded
    overview = view.overview(48)
    assert overview["dead"] == (dense_NK.sum(0) == 0).sum()
    listed = [row["lsp"] for row in overview["rows"]]
    assert listed == sorted(np.flatnonzero(dense_NK.any(0)), key=lambda lsp: (-view.clarity[lsp], lsp))
    assert (view.clarity[listed] == 0).sum() > 1  # which are by number
    assert overview["rows"][0]["clarity"] == view.clarity.max() > 0


def test_the_heaviest_tokens_one_of_a_document_and_of_a_context(view, dense_NK):
    sample = view.sample
    left_out = 0
    for lsp in range(0, sample.k, 6):
        expected = []
        for token in view.entries.heaviest_first(lsp)[0].tolist():
            around = sample.ids_N[max(0, token - 4) : token + 5].tolist()
            known = [sample.ids_N[max(0, other - 4) : other + 5].tolist() for other in expected]
            documents = [sample.document_N[other] for other in expected]
            if len(expected) < 20 and sample.document_N[token] not in documents and around not in known:
                expected.append(token)
            else:
                left_out += 1
        found = statistics.top_tokens(sample, view.entries.heaviest_first(lsp)[0])
        assert [token for token in found.tolist() if token in expected] == expected
        assert found.tolist() == expected or len(expected) < 20
    assert left_out > 100


def test_of_a_few_novels_contexts_are_more_than_documents(view):
    """With --document-boundary file a corpus of three novels has three documents, which once meant three contexts."""
    novels = replace(view.sample, document_N=np.arange(len(view.sample)) * 3 // len(view.sample))
    heaviest = view.entries.heaviest_first(3)[0]
    found = statistics.top_tokens(novels, heaviest).tolist()
    places = [heaviest.tolist().index(token) for token in found]
    assert len(found) == 20 and places == sorted(places)
    assert len(set(novels.window_N[found].tolist())) == 20 and set(novels.document_N[found].tolist()) == {0, 1, 2}


def test_first_of_each_document_and_of_other_windows_where_documents_are_few():
    documents, windows = np.array([0, 0, 0, 1, 1, 1, 1]), np.array([5, 5, 6, 7, 8, 8, 9])
    for evenly in (True, False):
        assert statistics.first_of_each(documents, windows, 2, evenly).tolist() == [0, 3]
        assert statistics.first_of_each(documents, windows, 4, evenly).tolist() == [0, 2, 3, 4]
        assert statistics.first_of_each(documents, windows, 20, evenly).tolist() == [0, 2, 3, 4, 6]
        assert statistics.first_of_each(documents[:0], windows[:0], 6, evenly).tolist() == []
    windows = np.array([9, 9, 3, 8, 1, 7, 2])  # in order of merit, not of the text
    assert statistics.first_of_each(documents * 0, windows, 4, evenly=False).tolist() == [0, 2, 3, 4]
    assert statistics.first_of_each(documents * 0, windows, 4, evenly=True).tolist() == [0, 2, 3, 5]


def test_boilerplate_is_shown_once(view):
    count = len(view.sample)
    repeating = replace(view.sample, ids_N=np.arange(count, dtype=np.int32) % 10, document_N=np.arange(count))
    assert statistics.top_tokens(repeating, np.arange(100, 400)).tolist() == list(range(100, 110))
    assert statistics.top_tokens(repeating, np.array([0, 10, 20, 30])).tolist() == [0, 10]  # 0 has no text before it


def test_quantile_samples_lie_in_their_tenth(view, dense_NK):
    checked = 0
    for lsp in range(view.sample.k):
        weights = np.sort(dense_NK[dense_NK[:, lsp] > 0, lsp])[::-1]
        tenths = statistics.quantile_samples(*view.entries.heaviest_first(lsp), lsp)
        assert len(tenths) == (min(10, len(weights)) if len(set(weights)) > 1 else 0)
        for expected, (least, largest, tokens) in zip(np.array_split(weights, 10), tenths, strict=False):
            assert (least, largest) == pytest.approx((expected[-1], expected[0]))
            assert len(set(tokens.tolist())) == len(tokens) == min(3, len(expected))
            assert all(least <= dense_NK[token, lsp] * 1.000001 and dense_NK[token, lsp] <= largest for token in tokens)
            checked += 1
    assert checked > 200


def test_co_firing_is_npmi_with_support(view, dense_NK):
    has = dense_NK > 0
    together, total = statistics.FiringTogether(view.sample), view.counted_together
    counts_KK = np.array([together.count(lsp) for lsp in range(view.sample.k)])
    assert np.array_equal(counts_KK, has.T.astype(int) @ has) and total == has.any(1).sum()
    assert np.array_equal(together.own_K, counts_KK.diagonal())
    shown = 0
    for lsp in range(view.sample.k):
        expected = {}
        for other in range(view.sample.k):
            both = int((has[:, lsp] & has[:, other]).sum())
            if other != lsp and both >= statistics.LEAST_SUPPORT:
                p_both, p_one, p_other = both / total, has[:, lsp].sum() / total, has[:, other].sum() / total
                expected[other] = (np.log(p_both / (p_one * p_other)) / -np.log(p_both), both)
        best = sorted((other for other in expected if expected[other][0] > 0), key=lambda o: (-expected[o][0], o))[:8]
        found = statistics.co_firing(counts_KK[lsp], together.own_K, total, lsp, 8)
        assert [other for other, *_ in found] == best
        for other, npmi, support in found:
            assert (npmi, support) == pytest.approx(expected[other])
            shown += 1
    assert shown > 50


def test_two_lsps_that_are_never_apart_have_npmi_one():
    both, own = np.array([50, 50, 5]), np.array([50, 50, 60])
    assert statistics.co_firing(both, own, 200, 0, 8) == [(1, pytest.approx(1.0), 50)]
    on_all = np.full(2, 200)
    assert statistics.co_firing(on_all, on_all, 200, 0, 8) == []  # no information


def test_counts_of_pairs_need_no_table_of_all_pairs():
    """Of a million LSPs it would have a trillion places."""
    lsps = np.array([7, 900_000, 7, 900_000, 7], np.int32)
    rows = np.array([0, 2, 4, 5, 5]), lsps, np.ones(5, np.float32)
    together = statistics.FiringTogether(Sample(*np.zeros((4, 4), np.int64), *rows, 1_000_000, 4))
    counts = together.count(900_000)
    assert together.tokens == 3 and np.flatnonzero(counts).tolist() == [7, 900_000]
    assert counts[[7, 900_000]].tolist() == [2, 2] and together.own_K[7] == 3


def test_words_and_their_profiles(view, dense_NK):
    sample, found = view.sample, view.words
    tokens = np.array(view.vocabulary.texts)[sample.ids_N]
    assert found.counts_U.sum() <= len(sample) and (np.diff(found.counts_U) <= 0).all()
    assert len(set(found.texts)) == len(found.texts)
    number = found.texts.index("the")
    own = found.word_N == number
    alone = [t for t in np.flatnonzero(tokens == "the") if not _is_continued(view, t)]
    assert np.flatnonzero(own).tolist() == alone and found.counts_U[number] == len(alone)
    longer = next(i for i in range(len(found.texts)) if found.tokens_U[i] == 3 * found.counts_U[i])
    for number in (found.texts.index("the"), longer):
        mean_K = dense_NK[found.word_N == number].mean(0)
        lsps_CT, weights_CT = words.profiles(sample, found, [number], 5)
        some = weights_CT[0] > 0
        assert weights_CT[0] == pytest.approx(np.sort(mean_K)[::-1][:5])
        assert mean_K[lsps_CT[0][some]] == pytest.approx(weights_CT[0][some])
        shown = view.word(found.texts[number].upper())
        if len(shown["forms"]) == 1:
            assert [row["weight"] for row in shown["lsps"][:3]] == pytest.approx(np.sort(mean_K)[::-1][:3])
    joined = {view.vocabulary.join(sample.ids_N[found.word_N == longer][:3])}
    assert joined == {found.texts[longer]}


def test_a_word_is_found_as_the_tokenizer_changes_it(view, monkeypatch):
    """An uncased tokenizer takes accents away."""
    with pytest.raises(InspectionError, match="'thé' is not among"):
        view.word("thé")
    monkeypatch.setattr(view.vocabulary._tokenizer, "normalizer", BertNormalizer())
    assert view.word("thé")["count"] == view.word("the")["count"]
    composed = replace(view.words, texts=["caf\u00e9"])
    assert composed.find("CAFE\u0301") == composed.find("caf\u00e9") == [0]


def _is_continued(view, token):
    """Whether the token is part of a longer word: the next one begins with ##, in its window and document."""
    sample = view.sample
    if token + 1 == len(sample) or sample.window_N[token + 1] != sample.window_N[token]:
        return False
    begins = view.vocabulary.begins_word(sample.ids_N[token : token + 2])
    return not begins[1] and sample.document_N[token + 1] == sample.document_N[token]


def test_typical_words_are_parts_of_the_divergence(view, dense_NK):
    word_N, usual = view.words.word_N, np.bincount(view.words.word_N) / len(view.sample)
    for lsp in range(0, view.sample.k, 7):
        share = np.bincount(word_N, dense_NK[:, lsp], len(usual)) / max(1e-30, dense_NK[:, lsp].sum())
        parts = {i: share[i] * np.log(share[i] / usual[i]) for i in np.flatnonzero(share)}
        expected = sorted(parts, key=lambda i: -parts[i])[:8]
        found = words.typical(view.entries, view.words, lsp, 8)
        assert [parts[i] for i, _ in found] == pytest.approx([parts[i] for i in expected])
        assert all(value == pytest.approx(share[i]) for i, value in found)


def test_nearest_atoms_by_cosine(view):
    atoms = view.dictionary.atoms_Kd.astype(np.float64)
    unit = atoms / np.maximum(1e-12, np.linalg.norm(atoms, axis=1, keepdims=True))
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    found, values = nearest_atoms(view.dictionary.atoms_Kd, 8)
    assert values == pytest.approx(np.sort(cosines, 1)[:, ::-1][:, :8], abs=1e-5)
    assert np.take_along_axis(cosines, found, 1) == pytest.approx(values, abs=1e-5)
    equal, _ = nearest_atoms(np.ones((4, 3), np.float32), 3)
    assert equal.shape == (4, 3)


def test_tokens_of_a_profile_are_those_of_brute_force(view, dense_NK):
    atoms = view.dictionary.atoms_Kd.astype(np.float64)
    gram = atoms @ atoms.T
    index = TokenIndex(view.sample, view.dictionary.atoms_Kd, silent)
    norms = np.sqrt(np.einsum("nk,kj,nj->n", dense_NK, gram, dense_NK).clip(1e-12))
    for token in (5, 500, 4000):
        cosines = dense_NK @ gram @ dense_NK[token] / (norms * norms[token])
        found, values = index.search(*view.sample.row(token), 20)
        assert values == pytest.approx(np.sort(cosines)[::-1][:20], abs=1e-4)
        assert cosines[found] == pytest.approx(values, abs=1e-4) and values[0] == pytest.approx(1, abs=1e-4)
    place = f"{view.sample.window_N[500]}:{view.sample.position_N[500]}"
    similar = view.similar_to_stored(place)
    shown = similar["similar"]
    assert similar["indexed"] == view.sample.coded and 5 < len(shown) <= 20
    assert all(f"{context['window']}:{context['position']}" != place for context in shown)
    assert [context["cosine"] for context in shown] == sorted((c["cosine"] for c in shown), reverse=True)


def test_contexts_are_the_text_with_its_weights(view, dense_NK):
    lsp = int(np.argmax(view.densities))
    for shown in view.lsp(lsp)["top"]:
        token = int(
            np.flatnonzero((view.sample.window_N == shown["window"]) & (view.sample.position_N == shown["position"]))[0]
        )
        first, last = view.sample.bounds(token, 12)
        assert "".join(text for text, _ in shown["text"]) == view.vocabulary.join(view.sample.ids_N[first:last])
        marks = [weight for text, weight in shown["text"] if weight]
        around = dense_NK[first:last, lsp]
        assert marks == pytest.approx([weight for weight in around if weight], abs=6e-5)
        text, weight = shown["text"][shown["at"]]
        assert text == view.vocabulary.texts[view.sample.ids_N[token]]
        assert weight == shown["weight"] == pytest.approx(dense_NK[token, lsp], abs=6e-5)
        assert len(set(view.sample.document_N[first:last])) == 1 and len(set(view.sample.window_N[first:last])) == 1
