"""A table of mask weights: how often each token is masked relative to others, and which are masked as a whole.

    table = read_table(Path("runs/mask-weights/frequency-1a2b3c4d5e6f.npz"))
    table.check_fits(store)
    table.weights_V[ids]      # 2 is twice as often as 1; only ratios count

A run is named after the content of its table, not its path. Not handled here: how weights are made (weights.py), how
they decide a mask (masking.py).

Shapes: V vocabulary, C collocations, W windows, L positions of a window.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from mlsm.common.arrays import read_npz
from mlsm.common.durable import appearing_whole
from mlsm.common.errors import RunError
from mlsm.common.invocation import program
from mlsm.common.text import shell_quote
from shards.counter import hash_u64
from shards.manifest import fingerprint
from shards.reader import Store

LONGEST = 5  # most tokens in a collocation
_NO_TOKEN = -1  # fills up shorter collocations


@dataclass(frozen=True)
class MaskTable:
    """Weights and collocations for one vocabulary.

    kind             how they were made: frequency, common, domain, pmi or adaptive
    vocabulary       fingerprint of the tokens and their ids
    weights_V        float32, finite, at least 0; the mean of a few equal ones is exact
    collocations_C5  int32 ids, two to five in a row, then -1
    origin           what they were made from and with which settings, JSON; not part of the content
    """

    kind: str
    vocabulary: str
    weights_V: np.ndarray
    collocations_C5: np.ndarray
    origin: str = ""

    @cached_property
    def name(self) -> str:
        """Kind, and 16 digits of a hash of the content."""
        content = hashlib.sha256(self.weights_V.astype("<f4").tobytes())
        content.update(self.collocations_C5.astype("<i4").tobytes())
        return f"{self.kind} {content.hexdigest()[:16]}"

    def check_fits(self, store: Store) -> None:
        """Raises RunError if the table is for another vocabulary than the store's."""
        if (len(self.weights_V), self.vocabulary) != (store.vocab_size, vocabulary_fingerprint(store)):
            raise RunError(
                f"--mask-weights: the table {self.name} has another vocabulary than {store.path}. Make one for this "
                f"store:  {program()} make-mask-weights {shell_quote(store.path)}"
            )

    def continues_collocation(self, ids_WL: np.ndarray, runs_WL: np.ndarray) -> np.ndarray:
        """Tokens that are in a collocation after its first one, bool (W, L).

        runs_WL  numbers of the stretches that collocations must not leave; 0 if nothing is masked

        Text is cut from left to right; at each place the longest collocation that starts there is used.
        """
        width = ids_WL.shape[1]
        longest_WL = np.ones(ids_WL.shape, np.int64)
        for length, keys_C in self._keys.items():
            starts = max(0, width - length + 1)
            together_WS = (runs_WL[:, :starts] > 0) & (runs_WL[:, :starts] == runs_WL[:, length - 1 :])
            keys_WS = ngram_keys([ids_WL[:, ahead : ahead + starts] for ahead in range(length)])
            place_WS = np.minimum(keys_C.searchsorted(keys_WS), len(keys_C) - 1)
            longest_WL[:, :starts][together_WS & (keys_C[place_WS] == keys_WS)] = length
        continues_WL = np.zeros(ids_WL.shape, bool)
        end_W = np.zeros(len(ids_WL), np.int64)  # end of the last collocation found
        for position in range(width):
            inside_W = position < end_W
            end_W = np.where(inside_W, end_W, position + longest_WL[:, position])
            continues_WL[:, position] = inside_W
        return continues_WL

    @cached_property
    def _keys(self) -> dict[int, np.ndarray]:
        """Length -> sorted keys of the collocations of that length."""
        sizes_C = (self.collocations_C5 != _NO_TOKEN).sum(axis=1)
        columns = {length: self.collocations_C5[sizes_C == length, :length].T for length in range(2, LONGEST + 1)}
        return {length: np.sort(ngram_keys(list(ids))) for length, ids in columns.items() if ids.size}


def ngram_keys(columns: list[np.ndarray]) -> np.ndarray:
    """64 bits for each n-gram, uint64 of the columns' shape; two n-grams collide with a probability of only 2^-64.

    columns  the first ids, the second ids and so on
    """
    return hash_u64(len(columns), *columns)


def vocabulary_fingerprint(store: Store) -> str:
    """A fingerprint of the tokens of a store's tokenizer, with their ids."""
    return fingerprint(store.load_tokenizer().get_vocab())


def write_table(path: Path, table: MaskTable) -> None:
    """Write a table as a .npz file, replacing any file there."""
    with appearing_whole(path) as file:
        np.savez_compressed(
            file,
            weights=table.weights_V,
            collocations=table.collocations_C5,
            kind=np.array(table.kind),
            vocabulary=np.array(table.vocabulary),
            origin=np.array(table.origin),
        )


def holds_table(path: Path, name: str) -> bool:
    """Whether a file holds the table with this name."""
    try:
        return read_table(path).name == name
    except RunError:
        return False


def read_table(path: Path) -> MaskTable:
    """Read a table that `write_table` wrote. Raises RunError if there is no such file, or if it is not a table."""
    try:
        found = read_npz(path)
    except (OSError, ValueError) as error:
        raise RunError(
            f"--mask-weights: {path} cannot be read ({error}). Expected a file of make-mask-weights, frequency, common,"
            f" pmi or uniform; a run keeps a copy of its own in mask_weights.npz."
        ) from None
    weights_V, collocations_C5 = found.get("weights"), found.get("collocations")
    texts = [found.get(name) for name in ("kind", "vocabulary", "origin")]
    if (
        weights_V is None
        or collocations_C5 is None
        or any(text is None or text.dtype.kind != "U" or text.ndim for text in texts)
        or (weights_V.dtype, weights_V.ndim) != (np.float32, 1)
        or not (np.isfinite(weights_V).all() and (weights_V >= 0).all())
        or (collocations_C5.dtype, collocations_C5.shape[1:]) != (np.int32, (LONGEST,))
        or not ((collocations_C5 >= _NO_TOKEN) & (collocations_C5 < len(weights_V))).all()
    ):
        raise RunError(
            f"--mask-weights: {path} is not a table of weights and collocations as make-mask-weights writes it. Make "
            "it again, or pass another file."
        )
    kind, vocabulary, origin = map(str, texts)
    return MaskTable(kind, vocabulary, weights_V, collocations_C5, origin)
