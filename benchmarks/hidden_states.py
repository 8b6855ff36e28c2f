"""Compare stored hidden states (int8, product-quantised) with float32: size, and the codes of both.

    python -m benchmarks.hidden_states [--teacher bundled] [--layer 10] [--k 1024] [--corpus docstrings]

Without --teacher MiniLM after layer 4 and k = 1,536, over the Wikipedia text of the evaluation data. A dictionary is
learned from a uniform sample of float32 hidden states, codebooks from the same sample. Other hidden states of the same
text are coded from their float32 rows and from the stored ones: total variation of the two distributions, how often the
largest atom is the same, non-zeros. For comparison, the error of a store's 8-bit weights and the mean cosine of rows
are also printed. Nothing is timed, and no students are trained.

Shapes: N tokens, K atoms, d width.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.data import conditions, data_file, minilm_directory
from pipeline.config import LearnConfig, minibatch_size
from pipeline.dictionary import DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.executor import Inline
from pipeline.job import load_teacher, teacher_job
from pipeline.precision import total_variation
from pipeline.sample import sample_hidden
from pipeline.solvers import nonneg_lasso
from pipeline.targets.hidden import Codebook
from shards import codec
from shards.schema import LSP_OCTAVES, HiddenLayout

LAM, SEED = 0.05, 42


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--teacher", help="bundled, a directory or a Hub id; MiniLM when not given")
    parser.add_argument("--layer", type=int, default=4)
    parser.add_argument("--k", type=int, default=1536)
    parser.add_argument("--corpus", help="a file, or docstrings; Wikipedia text of the evaluation data when not given")
    parser.add_argument("--vectors", type=int, default=100_000, help="of the sample that atoms and centroids come from")
    parser.add_argument("--tokens", type=int, default=8192, help="that are compared")
    settings = parser.parse_args()
    config = LearnConfig(
        teacher=settings.teacher or str(minilm_directory()),
        layer=settings.layer,
        k=settings.k,
        corpus=settings.corpus or str(data_file("text/wiki_en_2014/wiki_en_2014_small.txt.xz")),
        max_tokens=1_000_000,
        device="cpu",
    )
    learned_Nd, compared_Nd = (
        sample_rows(config, settings.vectors, SEED),
        sample_rows(config, settings.tokens, SEED + 1),
    )
    schedule = LearningSchedule(2.0, minibatch_size(len(learned_Nd)))
    atoms_Kd = learn_dictionary(learned_Nd, DictionarySettings(settings.k, LAM, SEED), schedule).atoms_Kd
    print(json.dumps(_compare(compared_Nd, learned_Nd, atoms_Kd, Path(config.teacher).name, settings)))


def sample_rows(config, count, seed):
    """Unit-length hidden states of a uniform sample of training windows, float32."""
    job = teacher_job(replace(config, dictionary_tokens=count, seed=seed), lambda *_, **__: None)
    with tempfile.TemporaryDirectory() as place:
        (rows_Nd,) = sample_hidden(Inline(job), load_teacher(job), [(config.layer[0], Path(place))])
        rows_Nd = np.array(rows_Nd, np.float32)
    return rows_Nd / np.linalg.norm(rows_Nd, axis=1, keepdims=True)


def _compare(rows_Nd, learned_Nd, atoms_Kd, teacher, settings):
    width = rows_Nd.shape[1]
    codes, scales_N = codec.encode_hidden(rows_Nd)
    stored = {"int8": codec.decode_hidden(HiddenLayout(width, "int8", width), codes, scales_N, None).rows_Md}
    for pieces in (64, 32, 16):
        codebook = Codebook.train(learned_Nd, pieces, SEED)
        layout, marks_N = HiddenLayout(width, "pq", pieces), np.ones(len(rows_Nd), np.uint8)
        found = codec.decode_hidden(layout, codebook.encode(rows_Nd), marks_N, codebook.centroids)
        stored[f"pq{pieces}"] = found.rows_Md
    exact_NK = _distributions(rows_Nd, atoms_Kd)
    figures = {name: _figures(rows_Nd, found_Nd, exact_NK, atoms_Kd) for name, found_Nd in stored.items()}
    return {
        "benchmark": "hidden_states",
        "teacher": teacher,
        "layer": settings.layer,
        "k": settings.k,
        "width": width,
        "tokens": len(rows_Nd),
        "non_zeros": float((exact_NK > 0).sum(1).mean()),
        "weights_8_bit_total_variation": float(total_variation(_eight_bits(exact_NK), exact_NK).mean()),
        **figures,
        "conditions": conditions(),
    }


def _distributions(rows_Nd, atoms_Kd):
    codes_NK = nonneg_lasso(np.ascontiguousarray(rows_Nd), atoms_Kd, LAM, tol=1e-5).dense(len(atoms_Kd))
    return codes_NK / np.maximum(codes_NK.sum(1, keepdims=True), 1e-30)


def _figures(rows_Nd, found_Nd, exact_NK, atoms_Kd):
    lengths_N = np.maximum(np.linalg.norm(found_Nd, axis=1), 1e-30)
    found_NK = _distributions(found_Nd / lengths_N[:, None], atoms_Kd)
    variation_N = total_variation(found_NK, exact_NK)
    return {
        "cosine": float(((found_Nd * rows_Nd).sum(1) / lengths_N).mean()),
        "total_variation": float(variation_N.mean()),
        "total_variation_99": float(np.quantile(variation_N, 0.99)),
        "same_top_atom": float((found_NK.argmax(1) == exact_NK.argmax(1)).mean()),
        "non_zeros": float((found_NK > 0).sum(1).mean()),
    }


def _eight_bits(probability_NK):
    """What a store keeps of all entries."""
    row_E, atom_E = np.nonzero(probability_NK)
    nnz_N, weights_E = (probability_NK > 0).sum(1), probability_NK[row_E, atom_E]
    kept_NK = np.zeros_like(probability_NK)
    codes_E = codec.encode_weights(weights_E, nnz_N, LSP_OCTAVES)
    kept_NK[row_E, atom_E] = codec.decode_weights(codes_E, nnz_N, LSP_OCTAVES)
    return kept_NK


if __name__ == "__main__":
    main()
