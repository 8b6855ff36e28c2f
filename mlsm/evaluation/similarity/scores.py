"""Compute every measure for two texts, or for a word in two contexts: {name: number}.

    text_scores(a, b, source.atoms_Ke)      # a, b: Tokens of sources.py
    word_scores(word_at(a, 5, 9), word_at(b, 0, 4), source.atoms_Ke)

Measures on LSPs: `reconstruction`, the cosine of the sums of the LSPs' vectors, weighted by the distributions;
`jensen-shannon` and `overlap` of the distributions themselves. For texts each is computed twice: on the mean
distribution over tokens, and with the best one-to-one matching of tokens. Baselines: the cosine of hidden states (for
texts, of the mean over tokens), BERTScore's F1 on them, and the overlap of the texts' tokens as strings.

Shapes: N, M tokens of two texts, K LSPs, d width of a hidden state, e of an LSP's vector.
"""

from collections import Counter

import numpy as np

from mlsm.evaluation.similarity.measures import cosine, greedy_f1, jensen_shannon, matched_similarity, overlap
from mlsm.evaluation.similarity.sources import Tokens


def lsp_similarities(p_NK: np.ndarray, q_MK: np.ndarray, atoms_Ke: np.ndarray) -> dict[str, np.ndarray]:
    """The similarities of distributions by every LSP measure, {measure: (N, M)}."""
    return {
        "reconstruction": cosine(p_NK @ atoms_Ke, q_MK @ atoms_Ke),
        "jensen-shannon": jensen_shannon(p_NK, q_MK),
        "overlap": overlap(p_NK, q_MK),
    }


def text_scores(a: Tokens, b: Tokens, atoms_Ke: np.ndarray) -> dict[str, float]:
    """Compare two texts by every measure; all are 0 if one has only special tokens."""
    counts_a, counts_b = Counter(a.names), Counter(b.names)
    spelt = sum((counts_a & counts_b).values()) / max(1, sum((counts_a | counts_b).values()))
    p_1K, q_1K = mean_distribution(a)[None], mean_distribution(b)[None]
    scores = {f"{name}, mean": float(s[0, 0]) for name, s in lsp_similarities(p_1K, q_1K, atoms_Ke).items()}
    of_tokens = lsp_similarities(a.lsps_TK, b.lsps_TK, atoms_Ke)
    both = bool(a.names and b.names)
    scores |= {f"{name}, matching": matched_similarity(s_NM) if both else 0.0 for name, s_NM in of_tokens.items()}
    for layer, hidden_Nd in a.hidden.items():
        hidden_Md = b.hidden[layer]
        sums_1d = hidden_Nd.sum(0, keepdims=True), hidden_Md.sum(0, keepdims=True)  # as the means, up to scale
        scores[f"{layer}, mean"] = float(cosine(*sums_1d)[0, 0])
        scores[f"{layer}, BERTScore"] = greedy_f1(cosine(hidden_Nd, hidden_Md)) if both else 0.0
    return scores | {"spelling, overlap": spelt}


def word_scores(a: Tokens, b: Tokens, atoms_Ke: np.ndarray) -> dict[str, float]:
    """Compare two words, each given as one row, by every measure."""
    scores = {name: float(s[0, 0]) for name, s in lsp_similarities(a.lsps_TK, b.lsps_TK, atoms_Ke).items()}
    return scores | {layer: float(cosine(hidden, b.hidden[layer])[0, 0]) for layer, hidden in a.hidden.items()}


def word_at(tokens: Tokens, begin: int, end: int) -> Tokens:
    """The word at these characters of a text, as one row: the mean distribution of its tokens and the sum of their
    hidden states. Zeros if the word has no tokens.
    """
    inside = [place for place, (first, last) in enumerate(tokens.spans) if first < end and last > begin]
    one = tokens._replace(lsps_TK=tokens.lsps_TK[inside], names=[tokens.names[place] for place in inside])
    hidden = {layer: rows_Td[inside].sum(0, keepdims=True) for layer, rows_Td in tokens.hidden.items()}
    return Tokens(["".join(one.names)], [(begin, end)], mean_distribution(one)[None], hidden)


def mean_distribution(tokens: Tokens) -> np.ndarray:
    """The mean (K,) of the distributions of the tokens that have one; zeros if none has."""
    sums_K = tokens.lsps_TK.sum(0)
    return sums_K / max(sums_K.sum(), np.finfo(np.float32).tiny)
