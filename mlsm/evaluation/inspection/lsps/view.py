"""The LSPs of a store: what `mlsm show-lsp STORE` answers, as dicts that JSON can hold.

    view = StoreView(Store.open(path), tokens=2_000_000)
    view.overview(), view.lsp(7), view.word("bank"), view.similar(...)

What one answer needs is computed when it is first needed and kept: the sample, its entries by LSP, its words, how often
LSPs fire together, the atoms' neighbours. Densities are shares of the sampled tokens that have a code. Not handled
here: the terminal (mlsm/commands/show_lsp.py), the pages (text_pages.py), the teacher and the student (texts.py).

Shapes: K LSPs, d hidden width.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np

from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps import statistics, words
from mlsm.evaluation.inspection.lsps.clarity import clarity
from mlsm.evaluation.inspection.lsps.contexts import context, lsp_contexts
from mlsm.evaluation.inspection.lsps.intruders import IntruderTest, summarise_judged
from mlsm.evaluation.inspection.lsps.labels import find_labels, shorten
from mlsm.evaluation.inspection.lsps.neighbours import TokenIndex, describe_nearest, nearest_atoms
from mlsm.evaluation.inspection.lsps.positions import PositionProfiles, position_profiles, word_information
from mlsm.evaluation.inspection.lsps.sample import largest_weights, sample_tokens
from mlsm.evaluation.inspection.lsps.texts import load_store_dictionary
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary
from pipeline.dictionary import Dictionary
from shards.reader import Store, is_url

TYPICAL_WORDS = 8
NAME_WORDS = 3
WORD_LSPS = 10
WORD_CONTEXTS = 6
SIMILAR_TOKENS = 20


class StoreView(statistics.SampleView):
    """The LSPs of a store.

    diagnostic  directory that must have labels; None: labels are searched for next to the store
    """

    def __init__(
        self, store: Store, tokens: int, diagnostic: Path | None = None, progress: Callable[..., None] = silent
    ):
        self.store, self.progress = store, progress
        self.sample = sample_tokens(store, tokens, progress)
        self.fingerprint = store.settings.get("dictionary")
        self._diagnostic = diagnostic
        self._typical: dict[int, list[list]] = {}

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of its tokens."""
        self.store.read_tokenizer()  # raises StoreError if it is another one
        return Vocabulary(self.store.tokenizer_dir, self.store.vocab_size)

    @cached_property
    def words(self) -> words.Words:
        """The words of the vocabulary, found in the sample."""
        return words.find_words(self.sample, self.vocabulary)

    @cached_property
    def dictionary(self) -> Dictionary | None:
        """The atoms; None in a store without them."""
        if self.fingerprint is None and not self.store.files.dictionary.is_dir():
            return None
        return load_store_dictionary(self.store)

    @cached_property
    def labels(self) -> list[dict] | None:
        """Labels by LSP; None if no diagnostic has run."""
        if self._diagnostic is None and is_url(self.store.path):
            return None
        near = Path(self.store.path).resolve().parent.parent
        return find_labels(self.fingerprint, self.store.k, self._diagnostic, near)

    @cached_property
    def _nearest(self):
        return nearest_atoms(self.dictionary.atoms_Kd, statistics.NEIGHBOURS) if self.dictionary else None

    @cached_property
    def profiles(self) -> PositionProfiles:
        """The LSPs over the positions of the window."""
        return position_profiles(self.sample)

    @cached_property
    def information(self) -> np.ndarray:
        """The information that the word gives about each LSP beyond its positions, in nats per token: float64 (K)."""
        return word_information(self.sample, self.profiles, self.store.vocab_size)

    @cached_property
    def clarity(self) -> np.ndarray:
        """How easily a reader recognises each LSP by its words (clarity.py), which orders lists: float64 (K)."""
        atoms_Kd = self.dictionary.atoms_Kd if self.dictionary else np.eye(self.sample.k, dtype=np.float32)
        return clarity(self.entries, self.words, atoms_Kd)

    def facts(self) -> dict:
        """The store's facts, and how much of it was read."""
        settings = self.store.settings
        names = ("teacher_name", "layer", "lam", "top_n")
        return {
            "store": str(self.store.path),
            "k": self.sample.k,
            **{name: settings.get(name) for name in names},
            "sampled": len(self.sample),
            "coded": self.sample.coded,
            "tokens": self.sample.of,
            "dead": int((self.entries.counts == 0).sum()),
            "labelled": self.labels is not None,
        }

    def row(self, lsp: int) -> dict:
        """An LSP in one line of a table."""
        return {
            "lsp": lsp,
            "clarity": float(self.clarity[lsp]),
            "density": float(self.densities[lsp]),
            "mean_weight": float(self.entries.mean_weights[lsp]),
            "words": self.name(lsp),
            "label": shorten(self.label(lsp)),
            "information": float(self.information[lsp]),
            "positional": bool(self.profiles.positional_K[lsp]),
            "position_nats": float(self.profiles.nats_K[lsp]),
            "profile": [round(float(value), 3) for value in self.profiles.profile_KB[lsp]],
        }

    def label(self, lsp: int) -> dict | None:
        """The label of an LSP; None if it has none."""
        return self.labels[lsp] if self.labels else None

    def name(self, lsp: int) -> str:
        """The most typical words of an LSP, separated by dots because a word may be a comma."""
        return " · ".join(text for text, _ in self.typical(lsp)[:NAME_WORDS])

    def typical(self, lsp: int) -> list[list]:
        """The typical words of an LSP, each with its share of the LSP's mass."""
        if lsp not in self._typical:
            found = words.typical(self.entries, self.words, lsp, TYPICAL_WORDS)
            self._typical[lsp] = [[self.words.texts[number] or "␣", share] for number, share in found]
        return self._typical[lsp]

    # -- views -------------------------------------------------------------------------------------------

    def overview(self, rows: int) -> dict:
        """Facts, deciles of the density, how many LSPs are positional, and the clearest ones, in order."""
        alive = np.flatnonzero(self.entries.counts)
        shown = alive[np.argsort(-self.clarity[alive], kind="stable")][:rows]
        deciles = np.quantile(self.densities, np.linspace(0, 1, 11)).tolist()
        positional_K, mass_K = self.profiles.positional_K, self.entries.counts * self.entries.mean_weights
        return {
            **self.facts(),
            "density_deciles": deciles,
            "positional": int(positional_K.sum()),
            "positional_mass": float(mass_K[positional_K].sum() / max(mass_K.sum(), 1e-30)),
            "rows": [self.row(int(lsp)) for lsp in shown],
        }

    def lsp(self, lsp: int) -> dict:
        """Everything of one LSP."""
        top, tenths = self.shown_tokens(lsp)
        return {
            **self.figures(lsp),
            "top": self._contexts(top, lsp),
            "quantiles": [
                {"from": least, "to": largest, "samples": self._contexts(some, lsp)} for least, largest, some in tenths
            ],
        }

    def shown_tokens(self, lsp: int) -> tuple[np.ndarray, list[tuple[float, float, np.ndarray]]]:
        """The sampled tokens whose contexts are shown of an LSP: the heaviest, and `statistics.quantile_samples`."""
        tokens, weights = self.entries.heaviest_first(lsp)
        return statistics.top_tokens(self.sample, tokens), statistics.quantile_samples(tokens, weights, lsp)

    def figures(self, lsp: int) -> dict:
        """Everything of one LSP without its contexts."""
        return {
            **self.row(lsp),
            "tokens": int(self.entries.counts[lsp]),
            "typical": self.typical(lsp),
            "senses": self.label(lsp),
            "co_firing": self._named(self.co_firing(lsp)),
            "nearest": self._named(describe_nearest(self._nearest, lsp)) if self._nearest else [],
        }

    def _contexts(self, tokens, lsp):
        return lsp_contexts(self.sample, self.vocabulary, tokens, lsp)

    def _named(self, rows):
        return [row | {"words": self.name(row["lsp"])} for row in rows]

    def word(self, word: str) -> dict:
        """The LSPs of a word over its sampled occurrences, regardless of its case; see words.py. A word that is not
        found is looked for as the tokenizer changes it.
        """
        numbers = self.words.find(word) or self.words.find(self.vocabulary.normalised(word))
        if not numbers:
            raise InspectionError(
                f"the word {word!r} is not among the {len(self.sample):,} sampled tokens. Try another form of it, more "
                "--samples, or --text with the word in a sentence. In scripts without spaces, a word is a token."
            )
        tokens = np.flatnonzero(np.isin(self.words.word_N, numbers))
        return {
            "word": word,
            **self.facts(),
            "count": int(self.words.counts_U[numbers].sum()),
            "forms": [[self.words.texts[number], int(self.words.counts_U[number])] for number in numbers],
            "lsps": self._lsps_of(tokens),
            "contexts": self._occurrences(tokens),
        }

    def _lsps_of(self, tokens):
        """The mean distribution over some tokens, and the share of them that have each LSP."""
        _, lsps_E, weights_E = self.sample.rows(tokens)
        mass_K = np.bincount(lsps_E, weights_E, self.sample.k)
        having_K = np.bincount(lsps_E, minlength=self.sample.k)
        largest = np.argsort(-mass_K, kind="stable")[:WORD_LSPS]
        return [
            {
                **self.row(int(lsp)),
                "weight": float(mass_K[lsp] / len(tokens)),
                "share": float(having_K[lsp] / len(tokens)),
            }
            for lsp in largest
            if mass_K[lsp] > 0
        ]

    def _occurrences(self, tokens):
        """Some occurrences, evenly over the sample: one per document, or more if there are few documents."""
        documents, windows = self.sample.document_N[tokens], self.sample.window_N[tokens]
        first = statistics.first_of_each(documents, windows, WORD_CONTEXTS, evenly=True)
        first = first[:: max(1, len(first) // WORD_CONTEXTS)][:WORD_CONTEXTS]
        return [
            {**context(self.sample, self.vocabulary, int(token)), "lsps": largest_weights(*self.sample.row(token))}
            for token in tokens[first]
        ]

    def judge(self, embeddings_Vd: np.ndarray) -> dict:
        """How interpretable the LSPs are by a test of intruders (intruders.py), each and all together.

        embeddings_Vd  the judge's vector of every entry of the vocabulary
        Returns        facts, the store's target, what `summarise_judged` returns, and lsps: a dict for each LSP
        """
        test, judged = IntruderTest(self.sample, self.entries, self.vocabulary, embeddings_Vd), []
        for lsp in range(self.sample.k):
            judged.append(test.lsp(lsp))
            self.progress("intruders", lsp + 1, self.sample.k, unit="LSPs")
        rows = [
            {
                "lsp": lsp,
                "auc": one.auc,
                "interval": one.interval and list(one.interval),
                "by_frequency": one.by_frequency,
                "by_spelling": one.by_spelling,
                "words": [self.vocabulary.texts[member] for member in one.members],
            }
            for lsp, one in enumerate(judged)
        ]
        return {**self.facts(), "target": self.store.target_id, **summarise_judged(judged), "lsps": rows}

    # -- tokens by their profile --------------------------------------------------------------------------

    def similar_to_stored(self, place: str) -> dict:
        """Tokens like the stored one at WINDOW:TOKEN."""
        window, position = _place(place)
        reader = self.store.split("train")
        if not 0 <= window < len(reader):
            raise InspectionError(f"--similar-to {place}: the training split has {len(reader):,} windows, from 0 on")
        batch = reader.read(np.array([window]))
        if not 0 <= position < batch.lengths[0]:
            raise InspectionError(f"--similar-to {place}: that window has {batch.lengths[0]} tokens, from 0 on")
        rows = reader.targets(batch, np.zeros(1, np.int64), np.array([position]))
        text = self.vocabulary.texts[batch.ids[0, position]]
        return self.similar(text, rows.indices, rows.weights, leave_out=(window, position))

    def similar(
        self, text: str, lsps: np.ndarray, weights: np.ndarray, leave_out: tuple[int, int] | None = None
    ) -> dict:
        """Sampled tokens whose LSPs are most like these, one of a document, or more if there are few documents."""
        if not len(lsps):
            raise InspectionError(
                f"the token {text!r} has no LSPs: it is special, or its code is empty. Choose another token."
            )
        if self.dictionary is None:
            raise InspectionError(
                f"{self.store.path} has no dictionary, which is needed to compare LSPs. Copy the store again."
            )
        index = TokenIndex(self.sample, self.dictionary.atoms_Kd, self.progress)
        sample = self.sample
        near = [
            (int(token), float(cosine))
            for token, cosine in zip(*index.search(lsps, weights, 5 * SIMILAR_TOKENS), strict=True)
            if (sample.window_N[token], sample.position_N[token]) != leave_out
        ]
        tokens = np.array([token for token, _ in near], np.int64)
        documents, windows = sample.document_N[tokens], sample.window_N[tokens]
        shown = statistics.first_of_each(documents, windows, SIMILAR_TOKENS, evenly=False)
        return {
            "token": text,
            **self.facts(),
            "indexed": len(index.tokens),
            "lsps": [[lsp, weight, self.name(lsp)] for lsp, weight in largest_weights(lsps, weights)],
            "similar": [
                {
                    **context(sample, self.vocabulary, token),
                    "cosine": cosine,
                    "lsps": largest_weights(*sample.row(token)),
                }
                for token, cosine in (near[place] for place in shown[:SIMILAR_TOKENS])
            ],
        }


def _place(text):
    window, colon, position = text.partition(":")
    if not (colon and window.isdecimal() and position.isdecimal()):
        raise InspectionError(f"--similar-to is WINDOW:TOKEN, two numbers as the views print them, found {text!r}")
    return int(window), int(position)
