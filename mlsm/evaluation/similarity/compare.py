"""The command `similarity`: compare the user's texts and show which LSPs they share, or make the tables of
zero_shot.py.

    compare_texts(SimilarityConfig(store="runs/stores/lsp-...", texts_a=("A cat sat.",), texts_b=("A dog lay.",)))

The LSPs that two texts share: an LSP's share is the smaller of its weights in the two mean distributions. The shares
sum to 1 - L1 / 2, where L1 is the distance of the distributions. Tokens are paired by their weighted overlap.

Shapes: K LSPs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.evaluation.similarity.config import SimilarityConfig
from mlsm.evaluation.similarity.measures import best_pairs, overlap
from mlsm.evaluation.similarity.scores import mean_distribution, text_scores
from mlsm.evaluation.similarity.sources import TeacherSource, Tokens, open_source
from mlsm.evaluation.similarity.zero_shot import evaluate_table
from shards.config import store_of
from student.masks.words import token_names

MOST_SHARED = 8


def compare_texts(config: SimilarityConfig, progress: Callable[..., None] = silent) -> dict:
    """Compute what the settings ask for.

    Returns  facts of the model that read the texts; cut, the number of texts that were longer than it reads; `tables`
             (zero_shot.py), or `pairs`: {"a", "b", "scores": {measure: number}, "matches": [[token, token, overlap,
             LSP], ...], "shared": [[LSP, share, weight in a, in b, typical words], ...]}
    Raises   InspectionError, StoreError, DictionaryError, TeacherError, RunError, DataError
    """
    progress("load model", 0, None)
    source = open_source(str(store_of(config)), config.teacher)
    found: dict[str, Any] = source.facts()
    if config.tasks:
        found["tables"] = [evaluate_table(source, task, config.data_dir, progress) for task in config.tasks]
        return found | {"cut": source.cut}
    progress("read texts", 0, None)
    pairs: list[dict[str, Any]] = [
        {
            "a": a,
            "b": b,
            "scores": text_scores(first, second, source.atoms_Ke),
            **_explain(first, second, source.tokenizer),
        }
        for a, b, first, second in zip(
            config.texts_a, config.texts_b, source.read(config.texts_a), source.read(config.texts_b), strict=True
        )
    ]
    view = None
    if isinstance(source, TeacherSource) and config.samples:
        view = StoreView(source.store, config.samples, None, progress)
    for pair in pairs:
        for row in pair["shared"]:
            row.append(view.name(row[0]) if view else "")
    return found | {"pairs": pairs, "cut": source.cut}


def _explain(a: Tokens, b: Tokens, tokenizer: Any) -> dict[str, list[list]]:
    """The best-matching pairs of tokens, in the order of the first text, and the LSPs in both texts."""
    similarity = overlap(a.lsps_TK, b.lsps_TK)
    matches = []
    names_a, names_b = (token_names(tokenizer, tokenizer.convert_tokens_to_ids(text.names)) for text in (a, b))
    for first, second in zip(*best_pairs(similarity), strict=True):
        common_K = np.minimum(a.lsps_TK[first], b.lsps_TK[second])
        lsp = int(common_K.argmax()) if common_K.any() else None
        matches.append([names_a[first], names_b[second], float(similarity[first, second]), lsp])
    p_K, q_K = mean_distribution(a), mean_distribution(b)
    common_K = np.minimum(p_K, q_K)
    most = [int(lsp) for lsp in np.argsort(-common_K, kind="stable")[:MOST_SHARED] if common_K[lsp] > 0]
    return {"matches": matches, "shared": [[lsp, *(float(w_K[lsp]) for w_K in (common_K, p_K, q_K))] for lsp in most]}
