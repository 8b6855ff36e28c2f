"""A bounded sample of a store's tokens with their LSPs, and the same entries sorted by LSP.

    sample = sample_tokens(store, tokens=2_000_000)
    entries = by_lsp(sample)
    entries.tokens(7), entries.weights(7)

The sample is the beginning of one epoch's order (shards/reader.py): some of the windows of up to 64 blocks drawn from
the whole split, so that a store of any size costs the reading of 64 blocks and the memory of the sample, about 14 bytes
an entry (0.7 GB for two million tokens of 25 LSPs). Equal stores give equal samples. Not handled here: what is made of
it (statistics.py), and text (vocabulary.py): ids stay ids until something is shown.

Shapes: N sampled tokens, without [CLS], [SEP] and padding; E entries; K LSPs.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mlsm.common.errors import InspectionError, StoreError
from pipeline.solvers.parallel import kernel
from shards.manifest import differing
from shards.reader import Store, plan_of

SEED = 0
TOKENS_AT_ONCE = 65_536  # of windows that are read together


@dataclass(frozen=True)
class Sample:
    """Tokens in the order of the split, with their LSP distributions in CSR form.

    ids_N       int32
    window_N    int64, number of the window in the split
    position_N  int32, place in the window, [CLS] counted
    document_N  int64, equal where tokens are of one document
    indptr      int64 (N + 1);  lsps_E uint16 or int32, rising in a row;  weights_E float32, a filled row sums to 1
    k           LSPs
    of          tokens of the whole split, special ones included
    """

    ids_N: np.ndarray
    window_N: np.ndarray
    position_N: np.ndarray
    document_N: np.ndarray
    indptr: np.ndarray
    lsps_E: np.ndarray
    weights_E: np.ndarray
    k: int
    of: int

    def __len__(self):
        return len(self.ids_N)

    @cached_property
    def coded(self) -> int:
        """The number of tokens that have a code, which densities are shares of."""
        return int((np.diff(self.indptr) > 0).sum())

    def row(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """LSPs and weights of a sampled token."""
        entries = slice(self.indptr[token], self.indptr[token + 1])
        return self.lsps_E[entries], self.weights_E[entries]

    def rows(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rows of some tokens in CSR form: indptr, LSPs, weights."""
        nnz = np.diff(self.indptr)[tokens]
        indptr = np.concatenate(([0], np.cumsum(nnz)))
        chosen = np.arange(indptr[-1]) + np.repeat(self.indptr[tokens] - indptr[:-1], nnz)
        return indptr, self.lsps_E[chosen], self.weights_E[chosen]

    @cached_property
    def text_starts(self) -> np.ndarray:
        """The first token of every part of a document in a window, and the number of all tokens: int64."""
        window, document = self.window_N, self.document_N
        new = (window[1:] != window[:-1]) | (document[1:] != document[:-1])
        return np.concatenate(([0], np.flatnonzero(new) + 1, [len(self)]))

    def bounds(self, tokens: int | np.ndarray, reach: int) -> tuple[np.ndarray, np.ndarray]:
        """First and last + 1 of the sampled tokens around one or several: of its window and document, `reach` to either
        side."""
        part = np.searchsorted(self.text_starts, tokens, side="right") - 1
        starts, ends = self.text_starts[part], self.text_starts[part + 1]
        return np.maximum(np.subtract(tokens, reach), starts), np.minimum(np.add(tokens, reach + 1), ends)

    def spread(self, count: int) -> np.ndarray:
        """Numbers of at most `count` tokens, evenly over the sample."""
        return np.arange(0, len(self), max(1, -(-len(self) // count)))


def require_lsps(store: Store) -> None:
    """Raise InspectionError when the store holds no LSPs."""
    if store.kind != "lsp":
        raise InspectionError(f"{store.path} contains {store.kind}, not LSPs. Pass a store made by encode-lsp.")


def open_alike(places: Sequence[str]) -> list[Store]:
    """Open stores of LSPs of the same tokens, each seen through the plan of the first.

    Raises  InspectionError if one holds no LSPs, or other windows; StoreError
    """
    stores: list[Store] = []
    for place in places:
        store = Store.open(place)
        require_lsps(store)
        first = stores[0] if stores else store
        if plan_of(place)[1] is None and store.plan_id != first.plan_id:  # a plan may have grown since
            with suppress(StoreError):
                store = Store.open(place, first.plan_id)
        if store.plan_id != first.plan_id or store.vocab_size != first.vocab_size:
            windowing = differing(store.plan.windowing, first.plan.windowing)
            what = (
                f"there {windowing}"
                if windowing
                else "they contain different text or tokens, or the same in another order"
            )
            raise InspectionError(
                f"{store.path} and {first.path} do not hold the same windows: {what}. Encode the same corpus with the "
                "same tokenizer and window settings, or name a plan that both have:  "
                f"{first.path}/plans/<plan>.json"
            )
        stores.append(store)
    return stores


def sample_tokens(store: Store, tokens: int, progress: Callable[..., None]) -> Sample:
    """Sample windows of the training split of a store of LSPs that hold about this many tokens, or all of them.

    Raises  StoreError when it has no training windows
    """
    reader = store.split("train")
    if not len(reader):
        raise StoreError(f"{store.path}: the training split has no windows. Encode more text.")
    windows = min(len(reader), -(-tokens * len(reader) // reader.tokens))
    chosen = np.sort(reader.order(SEED, 0, 0, windows))
    parts = []
    at_once = max(1, TOKENS_AT_ONCE // store.max_length)
    for start in range(0, windows, at_once):
        parts.append(_read(store, reader, chosen[start : start + at_once]))
        progress("sample", min(start + at_once, windows), windows, unit="windows")
    nnz = np.concatenate([part.pop("nnz") for part in parts])
    columns = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    return Sample(**columns, indptr=np.concatenate(([0], np.cumsum(nnz))), k=store.k, of=reader.tokens)


def _read(store, reader, windows):
    batch = reader.read(windows)
    frame = [store.special_ids[name] for name in ("cls", "sep", "pad", "mask")]
    window, position = np.nonzero((batch.documents >= 0) & ~np.isin(batch.ids, frame))
    rows = reader.targets(batch, window, position)
    return {
        "ids_N": batch.ids[window, position],
        "window_N": windows[window],
        "position_N": position.astype(np.int32),
        "document_N": reader.document_keys(batch)[window, position],
        "nnz": np.diff(rows.indptr),
        "lsps_E": rows.indices.astype(np.uint16 if store.k <= 1 << 16 else np.int32),
        "weights_E": rows.weights,
    }


@dataclass(frozen=True)
class Entries:
    """The sample's entries sorted by LSP, tokens rising.

    starts  int64 (K + 1);  tokens_E int32;  weights_E float32
    """

    starts: np.ndarray
    tokens_E: np.ndarray
    weights_E: np.ndarray

    def tokens(self, lsp: int) -> np.ndarray:
        """Sampled tokens that have the LSP, rising."""
        return self.tokens_E[self.starts[lsp] : self.starts[lsp + 1]]

    def weights(self, lsp: int) -> np.ndarray:
        """The LSP's weights at these tokens."""
        return self.weights_E[self.starts[lsp] : self.starts[lsp + 1]]

    def heaviest_first(self, lsp: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and weights of an LSP by falling weight, equal weights in a random order that is always the same.

        In the order of the store, equal weights would show only the beginning of the corpus. Positive floats are in the
        order of their bits, and one array of integers sorts three times as fast as an index.
        """
        shuffled = np.random.default_rng([SEED, lsp]).permutation(self.counts[lsp])
        weights, tokens = self.weights(lsp)[shuffled], self.tokens(lsp)[shuffled]
        keys = (~weights.view(np.uint32)).astype(np.uint64) << np.uint64(32)
        order = (np.sort(keys | np.arange(len(keys), dtype=np.uint64)) & np.uint64(0xFFFFFFFF)).astype(np.int64)
        return tokens[order], weights[order]

    @cached_property
    def counts(self) -> np.ndarray:
        """Tokens that have each LSP, int64 (K)."""
        return np.diff(self.starts)

    @cached_property
    def mean_weights(self) -> np.ndarray:
        """Mean weight of each LSP over the tokens that have it, float64 (K); 0 for an LSP that none has."""
        if not len(self.weights_E):
            return np.zeros(len(self.counts))
        starts = np.minimum(self.starts[:-1], len(self.weights_E) - 1)  # an empty last LSP begins after the end
        sums = np.add.reduceat(self.weights_E, starts, dtype=np.float64)
        return np.where(self.counts > 0, sums / np.maximum(1, self.counts), 0.0)


def by_lsp(sample: Sample) -> Entries:
    """Sort the sample's entries by LSP."""
    starts = np.concatenate(([0], np.cumsum(np.bincount(sample.lsps_E, minlength=sample.k), dtype=np.int64)))
    tokens_E, weights_E = np.empty(len(sample.lsps_E), np.int32), np.empty(len(sample.lsps_E), np.float32)
    _sort(sample.indptr, sample.lsps_E, sample.weights_E, starts[:-1].copy(), tokens_E, weights_E)
    return Entries(starts, tokens_E, weights_E)


def largest_weights(lsps: np.ndarray, weights: np.ndarray, top: int = 5) -> list[list]:
    """The largest weights of one token as pairs [LSP, weight]; among equal weights, the lower LSP comes first."""
    order = np.argsort(-weights, kind="stable")[:top]
    return [[int(lsps[i]), float(weights[i])] for i in order]


@kernel
def _sort(indptr, lsps_E, weights_E, next_K, tokens_E, sorted_E):
    for token in range(len(indptr) - 1):
        for entry in range(indptr[token], indptr[token + 1]):
            place = next_K[lsps_E[entry]]
            tokens_E[place], sorted_E[place] = token, weights_E[entry]
            next_K[lsps_E[entry]] = place + 1
