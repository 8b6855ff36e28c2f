"""The LSPs of a store as a page that opens from disk (pages.py), and what it shows as data.

    write(view, Path("lsps"))       # then open lsps/index.html

Every text is stored once: tokens that are in several contexts, names of related LSPs, words. Weights have the digits
that are shown. What is called packed is a string of numbers (pages.pack):

    name, teacher, facts   of the store, and of the probe; counted: tokens in which pairs of LSPs were counted
    texts      distinct strings by number: tokens with the space before them, words. Those of the tokens come first, the
               most frequent ones before the others, so that their numbers are short
    passages   packed: the text of every token that is in any context, in the order of the store
    runs       packed: which of them follow one another in a window. Of each run 2 × its tokens, plus 1 if contexts
               continue from the run before it; by how much its window is above that of the run before it; the
               position of its first token
    reach      tokens of a context to either side; name_words: typical words that name an LSP
    lsps       lists with an entry for each LSP
      tokens, weight, clarity, information, nats, positional    numbers
      profile     packed: percent of the highest part
      typical     packed: text, share in thousandths
      co_firing   packed: LSP, NPMI in hundredths, tokens with both
      nearest     packed: LSP, 100 + cosine in hundredths
      marks       packed: the tokens of its contexts that have it, as by how much each is above the one before in
                  passages, and its weight there in thousandths
      top         packed: places in marks of the tokens where it is heaviest
      tenths      packed: least and largest weight in thousandths, how many contexts, their places in marks
      edits       packed, with a probe: place in marks, the LSP's probability in thousandths, and three lists: how many
                  words, of each its text, its probability in thousandths, 1 for the token itself
    factor     of the last of those lists
    labels, senses     by LSP; none without the word-sense diagnostic
    words      packed, for the search: text, occurrences, how many LSPs, of each its number and its mean weight in
               thousandths

Not handled here: what is shown (view.py), the directory (pages.py), how it is shown (static/view.js).

Shapes: N sampled tokens, S of them in contexts.
"""

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np

from mlsm.common.text import printable
from mlsm.evaluation.inspection.lsps import words
from mlsm.evaluation.inspection.lsps.contexts import REACH
from mlsm.evaluation.inspection.lsps.labels import shorten
from mlsm.evaluation.inspection.lsps.pages import pack, publish_pages
from mlsm.evaluation.inspection.lsps.sample import Sample
from mlsm.evaluation.inspection.lsps.view import NAME_WORDS, StoreView

MOST_WORDS = 20_000
LEAST_COUNT = 3  # occurrences of a word that is listed
WORD_LSPS = 8
LEAST_WEIGHT = 0.0005  # of an LSP of a word: less is shown as 0


def write(view: StoreView, directory: Path, edits: dict | None = None) -> dict:
    """Write the page of a StoreView; it appears as a whole. Returns what was written.

    edits  what editing.edit_sample found with a probe, and the probe's name: {"probe", "factor", "lsps"}
    """
    facts = view.facts() | {"probe": edits and edits["probe"]}
    return {"html": str(directory), **facts, **publish_pages(directory, lambda: _make_data(view, facts, edits))}


class _Texts(dict[str, int]):
    """Numbers of distinct strings, by when they were first asked for."""

    def __missing__(self, text):
        return self.setdefault(text, len(self))


def _make_data(view, facts, edits):
    k, shown = facts["k"], [view.shown_tokens(lsp) for lsp in range(facts["k"])]
    shown = [(top, tenths, np.concatenate([top, *(some for *_, some in tenths)])) for top, tenths in shown]
    tokens_S = _tokens_of_contexts(view.sample, np.concatenate([tokens for *_, tokens in shown]))
    pieces = _pieces(view, tokens_S)
    texts = _Texts((text, number) for number, (text, _) in enumerate(Counter(pieces).most_common()))
    lsps: dict[str, list] = {}
    for lsp, (top, tenths, tokens) in enumerate(shown):
        marked, weights = _marks(view, lsp, tokens)
        columns = _figures(view.figures(lsp), texts) | {
            "marks": pack(_alternate(np.diff(np.searchsorted(tokens_S, marked), prepend=0), _thousandths(weights))),
            "top": pack(np.searchsorted(marked, top)),
            "tenths": pack(
                chain.from_iterable(
                    (*_thousandths([least, largest]), len(some), *np.searchsorted(marked, some))
                    for least, largest, some in tenths
                )
            ),
        }
        if edits:
            columns["edits"] = pack(_edits(edits["lsps"][lsp], marked, texts))
        for name, value in columns.items():
            lsps.setdefault(name, []).append(value)
        view.progress("pages", lsp + 1, k, unit="LSPs")
    teacher = "/".join(Path(str(facts["teacher_name"])).parts[-2:])  # not the path to it: pages are passed on
    said = ("k", "layer", "lam", "sampled", "tokens", "coded", "dead", "labelled", "probe")
    return {
        "kind": "text",
        "name": printable(Path(facts["store"]).name),
        "teacher": printable(teacher),
        "facts": {name: facts[name] for name in said},
        "counted": view.counted_together,
        "reach": REACH,
        "name_words": NAME_WORDS,
        "factor": edits and edits["factor"],
        "lsps": lsps,
        "labels": [shorten(view.label(lsp)) for lsp in range(k)] if view.labels else None,
        "senses": [_senses(view.label(lsp)) for lsp in range(k)] if view.labels else None,
        "words": pack(_frequent_words(view, texts)),
        "runs": pack(_runs(view.sample, tokens_S)),
        "passages": pack(texts[piece] for piece in pieces),
        "texts": [printable(text) for text in texts],  # last: the others ask for their numbers
    }


def _thousandths(shares):
    return np.rint(1000 * np.asarray(shares)).astype(np.int64)


def _alternate(*columns):
    """The first number of every column, then the second of every one, and so on."""
    return np.stack(columns, axis=1).ravel()


# -- contexts -------------------------------------------------------------------------------------------------


def _tokens_of_contexts(sample: Sample, tokens: np.ndarray) -> np.ndarray:
    """The sampled tokens that are in the context of any of some tokens, rising."""
    first, last = sample.bounds(tokens, REACH)
    change = np.bincount(first, minlength=len(sample) + 1) - np.bincount(last, minlength=len(sample) + 1)
    return np.flatnonzero(np.cumsum(change))


def _starts_anew(sample, tokens_S):
    """Whether the context breaks before each token, because another text starts or tokens are left out; bool (S)."""
    return (np.diff(tokens_S, prepend=-2) > 1) | np.isin(tokens_S, sample.text_starts)


def _pieces(view, tokens_S):
    """The texts of the tokens. A context that starts with one leaves out the space before it."""
    parts = np.split(tokens_S, np.flatnonzero(_starts_anew(view.sample, tokens_S))[1:])
    return [piece for part in parts for piece in view.vocabulary.pieces(view.sample.ids_N[part])]


def _runs(sample, tokens_S):
    """The numbers of `runs`, as the module says."""
    anew_S, position_S = _starts_anew(sample, tokens_S), sample.position_N[tokens_S]
    starts = np.flatnonzero(anew_S | (np.diff(position_S, prepend=-1) != 1))  # a mask token of the text is no sample
    tokens = np.diff(np.append(starts, len(tokens_S)))
    windows = np.diff(sample.window_N[tokens_S[starts]], prepend=0)
    return _alternate(2 * tokens + (~anew_S[starts]).astype(int), windows, position_S[starts])


def _marks(view, lsp, tokens):
    """The tokens in the contexts of some that have an LSP, rising, and its weights there."""
    first, last = view.sample.bounds(np.sort(tokens), REACH)
    having, weights = view.entries.tokens(lsp), view.entries.weights(lsp)
    context = np.searchsorted(first, having, side="right") - 1  # the last that has started: none ends later
    inside = (context >= 0) & (having < last[context])
    return having[inside], weights[inside]


# -- figures and words ----------------------------------------------------------------------------------------


def _figures(figures, texts):
    """The columns of `lsps`, from StoreView.figures."""
    profile = np.array(figures["profile"])
    return related(figures) | {
        "tokens": figures["tokens"],
        "weight": round(figures["mean_weight"], 4),
        "clarity": round(figures["clarity"], 6),  # more than is shown: the list is sorted by it
        "information": round(figures["information"], 6),
        "nats": round(figures["position_nats"], 3),
        "positional": int(figures["positional"]),
        "profile": pack(np.rint(100 * profile / max(profile.max(), 1e-30)).astype(int)),
        "typical": pack(chain.from_iterable((texts[text], round(1000 * share)) for text, share in figures["typical"])),
    }


def related(figures: dict) -> dict[str, str]:
    """The columns co_firing and nearest of an LSP, from a view."""
    firing = ((other["lsp"], round(100 * other["npmi"]), other["support"]) for other in figures["co_firing"])
    near = ((other["lsp"], round(100 + 100 * other["cosine"])) for other in figures["nearest"])
    return {"co_firing": pack(chain.from_iterable(firing)), "nearest": pack(chain.from_iterable(near))}


def _senses(label):
    """A label as [[[lemmas, synset, lexicographer file, NPMI], ...], [[lexicographer file, share], ...]]."""
    if not label:
        return [[], []]
    synsets = [[s["lemmas"], s["synset"], s["lexname"], round(s["npmi"], 2)] for s in label["synsets"]]
    return [synsets, [[name, round(share, 2)] for name, share in label["lexnames"]]]


def _edits(examples, marked, texts):
    for example in examples:
        yield from (np.searchsorted(marked, example["token"]), round(1000 * example["probability"]))
        for found in example["words"]:
            yield len(found)
            for word, probability, own in found:
                yield from (texts[word], round(1000 * probability), int(own))


def _frequent_words(view, texts):
    """The numbers of `words`, the most frequent word first."""
    counts = view.words.counts_U
    numbers = range(min(MOST_WORDS, int((counts >= LEAST_COUNT).sum())))
    lsps_CT, weights_CT = words.profiles(view.sample, view.words, numbers, WORD_LSPS)
    for number, lsps, weights in zip(numbers, lsps_CT, weights_CT, strict=True):
        listed = weights >= LEAST_WEIGHT
        yield from (texts[view.words.texts[number]], counts[number], listed.sum())
        yield from _alternate(lsps[listed], _thousandths(weights[listed]))
