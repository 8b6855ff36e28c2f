"""Word-sense disambiguation with any model's own hidden states, by the method of choose-layer.

Encoding a layer needs a dictionary. A student has none for its own layers, and its teacher's does not fit them. So a
small dictionary is learned from the layer's vectors of a sample of SemCor's annotated words, without their senses. The
number of atoms, the penalty and the seed are the same for every model. The rest is as in choose-layer: codes, sums by
synset, NPMI with zeros kept (`npmi0`), and the first sense if there is no evidence. The layer that is best on
semeval2007 is chosen; the score is the F1 on the other four sets together. Layer 0 is not used, because it has no
context.

Shapes: n vectors, d width.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mlsm.common.disk import file_sha256
from mlsm.common.errors import ModelError, WsdDataError
from mlsm.common.progress import silent
from mlsm.evaluation.studies.word_senses.choose_layer import WordVectors, diagnose_layer
from mlsm.evaluation.studies.word_senses.data import WsdData
from mlsm.evaluation.studies.word_senses.framework import SEMCOR, data_files
from mlsm.evaluation.studies.word_senses.word_vectors import Centers, Readings
from mlsm.evaluation.tasks.frozen.features import FeatureExtractor
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.learning import ALGORITHM
from pipeline.teacher import special_ids

ATOMS = 1_536
LAM = 0.05
SAMPLE = 50_000  # number of vectors from which the dictionary is learned
TOLERANCE = 1e-3
TUNING = "semeval2007"
VARIANT = "raw-npmi0"
BATCH_TOKENS = 8_192  # per forward pass


def check_reads_senses(encoder: FeatureExtractor) -> None:
    """Raise ModelError or TeacherError if an encoder's layers or tokenizer are no use for word senses."""
    if not any(layer > 0 for layer in encoder.layers):
        raise ModelError("word senses need a layer that has seen context: use a --layer of at least 1.")
    special_ids(encoder.tokenizer)


class Senses:
    """Word senses as a measure (measures.Measure): the five test sets of Raganato et al. 2017, with SemCor."""

    def __init__(self, data_dir: Path | None):
        root = data_dir and (data_dir / "wsd" if (data_dir / "wsd").is_dir() else data_dir)
        if root is None or (root == data_dir and not (root / SEMCOR.parent).is_dir()):
            raise WsdDataError(
                "--frozen reads wsd from files: pass a --data-dir that contains a directory `wsd` (mlsm docs "
                "word-senses), or choose other --tasks."
            )
        files = data_files(root)
        self._data = WsdData.read(root, silent)
        digests = {file.relative_to(root).as_posix(): file_sha256(file) for file in files}
        self._questions = len(self._data.groups["ALL"])
        counts = {"n_train": self._data.training, "n_eval": self._questions}
        self.data: dict[str, Any] = {"name": "wsd, local", "files": digests} | counts
        self.settings: dict[str, Any] = {
            "dictionary": {"k": ATOMS, "lam": LAM, "vectors": SAMPLE, "seed": 0, "algorithm": ALGORITHM},
            "variant": VARIANT,
            "tolerance": TOLERANCE,
        }
        self.total = sum(len(sentence.instances) > 0 for sentence in self._data.sentences)

    def score(self, encoder: FeatureExtractor, place: Path, report: Callable[[int], None]) -> tuple[list[dict], dict]:
        """See Measure."""
        layers = [layer for layer in encoder.layers if layer > 0]
        special = special_ids(encoder.tokenizer)
        text = Readings(self._data.sentences, encoder.tokenizer, special, encoder.max_length)

        def report_texts(tokens, of):
            report(self.total * tokens // max(1, of))

        centers: Centers = {layer: (layer, None) for layer in layers}
        vectors = WordVectors(place, text, encoder.teacher, centers, BATCH_TOKENS, special["pad"], report_texts)
        vectors.make()
        vectors.device = torch.device("cpu")  # the solver's, so that scores do not depend on a GPU
        found = [self._diagnose(vectors, layer) for layer in layers]
        best = max(found, key=lambda one: one["tuning"])
        tuning = int(self._data.groups[TUNING].sum())
        counts = {"tuning": tuning, "test": self._questions - tuning}
        figures = [{"metric": f"f1_{part}", "value": best[part], "n": n} for part, n in counts.items()]
        return figures, {"wsd": {"layer": best["layer"], "layers": found}}

    def _diagnose(self, vectors, layer) -> dict:
        """A layer's F1 on the tuning set and on the other sets."""
        rows_nd = np.concatenate(list(vectors.layer(layer)))[np.argsort(vectors.word_of_row)]
        sample_nd = rows_nd[: self._data.training]
        if len(sample_nd) > SAMPLE:
            chosen = np.random.default_rng(0).choice(len(sample_nd), SAMPLE, replace=False)
            sample_nd = sample_nd[np.sort(chosen)]
        sample_nd = sample_nd[np.any(sample_nd != 0, axis=1)]  # a word that the tokenizer drops has a zero vector
        atoms = min(ATOMS, len(sample_nd) // 2)
        dictionary = learn_dictionary(sample_nd, DictionarySettings(k=atoms, lam=LAM, seed=0), LearningSchedule())
        found = diagnose_layer(vectors, layer, dictionary.atoms_Kd, self._data, LAM, TOLERANCE)
        right_Q = found.right[VARIANT]
        is_tuning = self._data.groups[TUNING]
        return {"layer": layer, "tuning": float(right_Q[is_tuning].mean()), "test": float(right_Q[~is_tuning].mean())}
