"""Supersenses as targets: WordNet's broad classes of a masked token, regardless of its context.

A supersense is one of WordNet's 45 lexicographer files, such as noun.animal or verb.motion (Ciaramita & Johnson 2003);
SenseBERT predicts them at masked words (Levine et al. 2020). The target of a token is a row of a table by token id: its
text, in lower case, is looked up as a lemma, and each of the lemma's synsets, of any part of speech, adds an equal part
to its lexicographer file. The official MLSM code learns these distributions where the file of `--kb_file` is missing.

Special tokens and tokens that continue a word (words.py) have no row, nor do tokens whose text is not a lemma. A token
that starts a longer word has the row of its own text ("un" of "un ##happy" is the United Nations). Not handled here:
morphology ("dogs" has no row: the sense index lacks the exceptions that NLTK looks up), frequencies of senses, and the
sense that a word has in its context.

Shapes: V vocabulary, S supersenses.
"""

import hashlib
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy import sparse

from mlsm.common.errors import RunError
from mlsm.common.wordnet import LEXNAMES, WordNet
from shards.reader import Store
from student.masks.words import continuation_flags
from student.objectives.token_tables import TokenTable


def supersense_table(wordnet: Path, store: Store) -> np.ndarray:
    """The share of each supersense among the synsets of each token, float32 (V, S); rows without a synset are zero.

    wordnet  the file index.sense, or the directory that holds it
    Raises   RunError if it cannot be read, if the words of the store's tokenizer cannot be told from its tokens, or if
             no token is a lemma; WsdDataError if the file holds something else
    """
    file = wordnet / "index.sense" if wordnet.is_dir() else wordnet
    try:
        senses = WordNet.load(file)
    except OSError as error:
        raise RunError(
            f"--wordnet: {file} cannot be read ({error.strerror}). Expected WordNet's sense index, index.sense; "
            "prepare-data wsd provides it as wordnet3.0/index.sense."
        ) from None
    try:
        continues_V = continuation_flags(store.tokenizer_dir, store.vocab_size)
    except RunError:
        raise RunError(
            f"--objective supersense: cannot tell where words begin in the vocabulary of {store.path}, so it is "
            "unknown which tokens are words of WordNet. Use a store with another tokenizer, or another --objective."
        ) from None
    tokenizer, place = store.load_tokenizer(), {name: column for column, name in enumerate(LEXNAMES)}
    shares_VS = np.zeros((store.vocab_size, len(LEXNAMES)), np.float32)
    for id in np.setdiff1d(np.flatnonzero(~continues_V), store.special_ids["all"]).tolist():
        if found := senses.supersenses(tokenizer.decode([id]).strip().lower()):
            counts_S = np.bincount([place[name] for name in found], minlength=len(LEXNAMES))
            shares_VS[id] = counts_S / len(found)
    if not shares_VS.any():
        raise RunError(
            f"--objective supersense: no token of {store.path} is a word of {file}. Expected a tokenizer for the "
            "language of that WordNet. Use another --wordnet, or another --objective."
        )
    return shares_VS


class Supersense(TokenTable):
    """KL(P || Q) to the distribution P over supersenses of the token's text; a token without a row carries no loss."""

    name = "supersense"
    learns = "predicting the supersenses of masked tokens (the lexicographer files of their synsets in WordNet)"
    loss_name, reference = "held-out KL", "the average distribution over supersenses"
    coverage = "tokens_with_supersenses"
    wordnet: Path | None = None  # index.sense or its directory

    def set_up(self, store: Store) -> None:
        self.outputs, self._store = len(LEXNAMES), store

    @cached_property
    def table_VK(self) -> sparse.csr_array:
        """The table that `supersense_table` makes from the objective's `wordnet`; an export needs none."""
        assert self.wordnet is not None, "the settings have refused that"
        return sparse.csr_array(supersense_table(self.wordnet, self._store))

    def identity(self) -> dict:
        """A run is identified by the table's content, not the file's path: 16 digits of its hash."""
        return {"wordnet": hashlib.sha256(self.table_VK.toarray().astype("<f4").tobytes()).hexdigest()[:16]}
