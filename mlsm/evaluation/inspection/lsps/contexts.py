"""Sampled tokens with the text around them, as values that JSON can hold. Only what is shown is decoded.

    context(sample, vocabulary, token)                    # plain
    lsp_contexts(sample, vocabulary, tokens, lsp)         # with the LSP's weight on every token around

A context is {"window", "position", "weight", "at", "text"}: "text" is a list of pieces [string, weight], which make up
the text; "at" counts the piece that is the token itself. Neighbours without the LSP are one piece of weight 0. A
context ends where its window or its document ends, since the teacher saw no further.

Shapes: N sampled tokens.
"""

from collections.abc import Iterable

import numpy as np

from mlsm.evaluation.inspection.lsps.sample import Sample
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary
from pipeline.solvers.parallel import kernel

REACH = 12  # tokens shown to either side


def lsp_contexts(sample: Sample, vocabulary: Vocabulary, tokens: Iterable[int], lsp: int) -> list[dict]:
    """Contexts of some tokens in which the LSP's weights are marked."""
    contexts = []
    for token in map(int, tokens):
        first, last = map(int, sample.bounds(token, REACH))
        weights = np.zeros(last - first)
        _weights_of(sample.indptr, sample.lsps_E, sample.weights_E, first, lsp, weights)
        contexts.append(_describe(sample, vocabulary, token, first, weights, float(weights[token - first])))
    return contexts


def context(sample: Sample, vocabulary: Vocabulary, token: int) -> dict:
    """The context of a token in which only itself is marked."""
    first, last = map(int, sample.bounds(token, REACH))
    return _describe(sample, vocabulary, token, first, np.zeros(last - first), 0.0)


@kernel
def _weights_of(indptr, lsps_E, weights_E, first, lsp, found):
    for i in range(len(found)):
        for entry in range(indptr[first + i], indptr[first + i + 1]):
            if lsps_E[entry] == lsp:
                found[i] = weights_E[entry]


def _describe(sample, vocabulary, token, first, weights, weight):
    ids_T = sample.ids_N[first : first + len(weights)]
    shown_T, marks_T = vocabulary.shown_at(ids_T), np.zeros(len(ids_T))
    np.maximum.at(marks_T, shown_T, weights)  # a token may have only a part of a character
    chosen = first + int(shown_T[token - first])
    pieces: list[list] = []
    at = None
    for place, (text, own) in enumerate(zip(vocabulary.pieces(ids_T), marks_T.tolist(), strict=True), start=first):
        if own == 0 and place != chosen:
            _add_plain(pieces, text, at)
            continue
        if text.startswith(" "):  # the mark is on the token, not on the space before it
            _add_plain(pieces, " ", at)
        at = len(pieces) if place == chosen else at
        pieces.append([text.lstrip(" "), own])
    return {
        "window": int(sample.window_N[token]),
        "position": int(sample.position_N[token]),
        "weight": float(weight),
        "at": at,
        "text": pieces,
    }


def _add_plain(pieces, text, at):
    """Add text without the LSP, to the last piece where that has none either and is not the token itself."""
    if pieces and pieces[-1][1] == 0 and len(pieces) - 1 != at:
        pieces[-1][0] += text
    else:
        pieces.append([text, 0.0])
