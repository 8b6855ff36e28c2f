"""The order of the list: planted LSPs stand where a reader wants them, and the score is that of plain loops."""

from collections import Counter, defaultdict
from math import log

import numpy as np
import pytest
from scipy import sparse

from mlsm.evaluation.inspection.lsps.clarity import LEAST_TOKENS, clarity
from mlsm.evaluation.inspection.lsps.sample import Sample, by_lsp
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.evaluation.inspection.lsps.words import Words

FAMILY = [
    "father",
    "Mother",
    "mother",
    "wife",
    "brother",
    "son",
    "sister",
    "child",
    "daughter",
    "uncle",
    "aunt",
    "heir",
]
ANIMALS = ["dog", "cat", "cow", "horse", "sheep", "goat", "pig", "hen", "goose", "duck", "mouse", "fox"]
MIXED = ["table", "seven", "green", "run", "cloud", "vote", "iron", "song", "lake", "tax", "wheel", "noon"]
FILLERS = [f"filler{chr(97 + i)}" for i in range(26)]
NUMBERS = [str(number) for number in range(1900, 1930)]
LETTERS = list("bcdefghjklmn")
PIECES = [f"un{one}" for one in ANIMALS]  # words of two tokens
CLEAN, ONE_WORD, COMMA, NUMBER, LETTER, PIECE, RARE, UNRELATED, EVERYWHERE = range(9)
THEMES, WIDTH = 6, 32
K = EVERYWHERE + 1 + THEMES
PLANTED = {
    CLEAN: FAMILY,
    ONE_WORD: ["glacier"],
    COMMA: [","],
    NUMBER: NUMBERS,
    LETTER: LETTERS,
    PIECE: PIECES,
    UNRELATED: MIXED,
}


@pytest.fixture(scope="module")
def planted():
    """A sample, its words, and atoms. Every word has a theme, an LSP; those of a list have one theme, but for MIXED."""
    rng = np.random.default_rng(0)
    theme = {}
    for number, words in enumerate([FAMILY, ANIMALS, NUMBERS, LETTERS, PIECES]):
        theme |= dict.fromkeys(words, number)
    theme |= {word: number % THEMES for number, word in enumerate([*MIXED, *FILLERS, ",", "glacier"])}
    lists = [*PLANTED.values(), ANIMALS, *[FILLERS] * 8]
    texts, word_N, ids_N, rows, rare = list(theme), [], [], [], 0
    for _ in range(9000):
        word = rng.choice(lists[rng.integers(len(lists))])
        lsps = {EVERYWHERE: 0.1, EVERYWHERE + 1 + theme[word]: rng.uniform(0.2, 0.6)}
        lsps |= {lsp: rng.uniform(0.5, 1) for lsp, words in PLANTED.items() if word in words}
        if word in ANIMALS and rare < LEAST_TOKENS - 1:
            lsps[RARE], rare = 1.0, rare + 1
        for piece in range(1 + (word in PIECES)):
            ids_N.append(2 * texts.index(word) + piece)
            word_N.append(word)
            rows.append({lsp: weight / sum(lsps.values()) for lsp, weight in lsps.items()})
    dense_NK = np.array([[row.get(lsp, 0) for lsp in range(K)] for row in rows])
    atoms_Kd = np.linalg.qr(rng.normal(size=(WIDTH, K)))[0].T.astype(np.float32)
    return sample_of(np.array(ids_N), dense_NK), words_of(word_N, set(PIECES)), atoms_Kd


def sample_of(ids_N, dense_NK):
    tokens, rows = np.arange(len(ids_N), dtype=np.int32), sparse.csr_array(dense_NK)
    lsps_E, weights_E = rows.indices.astype(np.uint16), rows.data.astype(np.float32)
    places = (tokens // 50, tokens % 50, tokens // 50)
    return Sample(ids_N, *places, rows.indptr.astype(np.int64), lsps_E, weights_E, dense_NK.shape[1], len(tokens))


def words_of(word_N, in_two):
    counts = {word: count // (1 + (word in in_two)) for word, count in Counter(word_N).most_common()}
    texts = sorted(counts, key=lambda word: -counts[word])
    number = {word: place for place, word in enumerate(texts)}
    return Words(
        texts, np.array([counts[word] for word in texts]), np.array([number[word] for word in word_N], np.int32)
    )


def test_a_group_of_words_that_belong_together_comes_first(planted):
    sample, words, atoms_Kd = planted
    found = clarity(by_lsp(sample), words, atoms_Kd)
    order = sorted(range(EVERYWHERE + 1), key=lambda lsp: (-found[lsp], lsp))
    assert order[:2] == [CLEAN, UNRELATED] and found[CLEAN] > 3 * found[UNRELATED]
    assert found[[COMMA, NUMBER, LETTER, PIECE, RARE]].tolist() == [0] * 5
    assert found[[ONE_WORD, EVERYWHERE]].max() < 0.05 * found[CLEAN]


def test_the_rare_one_would_be_clear_on_one_token_more(planted):
    sample, words, atoms_Kd = planted
    assert by_lsp(sample).counts[RARE] == LEAST_TOKENS - 1
    token = next(
        t for t in range(len(sample)) if words.texts[words.word_N[t]] in ANIMALS and RARE not in sample.row(t)[0]
    )
    dense_NK = sparse.csr_array((sample.weights_E, sample.lsps_E, sample.indptr), (len(sample), K)).toarray()
    dense_NK[token, RARE] = 0.5
    found = clarity(by_lsp(sample_of(sample.ids_N, dense_NK)), words, atoms_Kd)
    assert found[RARE] > found[UNRELATED]


def test_one_character_is_a_word_where_most_words_have_one(planted):
    sample, words, atoms_Kd = planted
    short = {word: chr(0x4E00 + number) for number, word in enumerate(dict.fromkeys([*FILLERS, *FAMILY, *MIXED]))}
    chinese = Words([short.get(word, word) for word in words.texts], words.counts_U, words.word_N)
    found = clarity(by_lsp(sample), chinese, atoms_Kd)
    assert found[CLEAN] > found[UNRELATED] > found[NUMBER] == 0 and found[LETTER] > 0


def test_the_score_is_that_of_plain_loops(planted, coded_store):
    view = StoreView(coded_store, 10**6)
    for sample, words, atoms_Kd in (planted, (view.sample, view.words, view.dictionary.atoms_Kd)):
        expected = plain_clarity(sample, words, atoms_Kd)
        assert clarity(by_lsp(sample), words, atoms_Kd) == pytest.approx(expected, rel=1e-3, abs=2e-6)
        assert sum(score > 1e-3 for score in expected) > 2
    assert view.clarity == pytest.approx(expected, rel=1e-3, abs=2e-6)
    view = StoreView(coded_store, 10**6)
    view.dictionary = None  # words are then compared by their LSPs
    expected = plain_clarity(view.sample, view.words, np.eye(48))
    assert view.clarity == pytest.approx(expected, rel=1e-3, abs=2e-6)


def plain_clarity(sample, words, atoms_Kd):
    """Token by token, as the module says it; for texts in which most words have several characters."""
    length, tokens = Counter(words.word_N.tolist()), defaultdict(list)
    for token, number in enumerate(words.word_N.tolist()):
        text = words.texts[number].casefold()
        if length[number] == words.counts_U[number] and len(text) > 1 and any(map(str.isalpha, text)):
            tokens[text].append(token)
    tokens = {text: some for text, some in tokens.items() if len(some) >= 5}
    rows = [dict(zip(*map(np.ndarray.tolist, sample.row(token)), strict=True)) for token in range(len(sample))]
    scores = []
    for lsp in range(sample.k):
        having = [row[lsp] for row in rows if lsp in row]
        if len(having) < 100:
            scores.append(0.0)
            continue
        told = {}
        for text, some in tokens.items():
            share = sum(rows[token].get(lsp, 0) ** 2 for token in some) / sum(weight**2 for weight in having)
            if share > 0:
                told[text] = share * log(share / (len(some) / len(sample)))
        best = sorted((text for text in told if told[text] > 0), key=lambda text: -told[text])[:12]
        states = {text: without(lsp, [rows[token] for token in some], atoms_Kd) for text, some in tokens.items()}
        middle = sum(states.values()) / len(states)
        unit = [(states[text] - middle) / np.linalg.norm(states[text] - middle) for text in best]
        cosines = [one @ other for place, one in enumerate(unit) for other in unit[:place]]
        closeness = sum(cosines) / len(cosines) if cosines else 0
        scores.append(sum(told[text] for text in best[1:]) * max(0, closeness))
    return scores


def without(lsp, rows, atoms_Kd):
    """The mean hidden state that some codes reconstruct, without an LSP."""
    mean = np.zeros(len(atoms_Kd))
    for row in rows:
        for other, weight in row.items():
            mean[other] += (other != lsp) * weight / len(rows)
    return mean @ atoms_Kd.astype(np.float64)
