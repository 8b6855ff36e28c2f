"""Names for LSPs in WordNet: the synsets and lexicographer files whose words use them.

An LSP's synsets are sorted by their contribution to the mutual information of synsets and LSPs, Φ_ij PMI_ij. With NPMI
only, synsets seen once would come first; with Φ only, the most frequent ones. Lexicographer files are sorted in the
same way, because with Φ only, adj.all would come first for two LSPs in five. Not handled here: Φ (sense_scores.py).

Shapes: S synsets, K LSPs, s synsets of one LSP, F lexicographer files.
"""

import numpy as np
from scipy import sparse

from mlsm.common.wordnet import WordNet

SYNSETS, LEXNAMES, LEMMAS = 5, 3, 5  # at most so many per LSP


def name_lsps(phi: sparse.csr_array, npmi: sparse.csr_array, synsets: list[str], wordnet: WordNet) -> list[dict]:
    """Labels of all LSPs.

    phi, npmi  CSR (S, K) with the same cells;  synsets  names of the S rows
    Returns    list of K dicts: synsets (synset, lemmas, lexname, npmi, mass: its share of the column of Φ) and
               lexnames ([lexname, share of the column], the most informative first)
    """
    phi, npmi = phi.tocsc(), npmi.tocsc()
    total = phi.sum()
    files, file_of_S = np.unique([wordnet.lexname(synset) for synset in synsets], return_inverse=True)
    usual_F = np.bincount(file_of_S[phi.indices], phi.data, len(files)) / (total or 1)
    found = []
    for cells in map(slice, phi.indptr[:-1], phi.indptr[1:]):
        mass_s, rows_s = phi.data[cells], phi.indices[cells]
        share_s = mass_s / mass_s.sum() if len(mass_s) else mass_s
        share_F = np.bincount(file_of_S[rows_s], share_s, len(files))
        found.append(
            {
                "synsets": _synsets(mass_s, npmi.data[cells], rows_s, share_s, total, synsets, wordnet),
                "lexnames": [[str(files[i]), round(float(share_F[i]), 4)] for i in _files(share_F, usual_F)],
            }
        )
    return found


def _files(share_F, usual_F):
    """Numbers of the most informative files, by share · ln(share / share in all of Φ)."""
    there = np.flatnonzero(share_F)
    information = share_F[there] * np.log(share_F[there] / usual_F[there])
    return there[np.argsort(-information, kind="stable")[:LEXNAMES]]


def _synsets(mass_s, npmi_s, rows_s, share_s, total, synsets, wordnet):
    information_s = npmi_s * -np.log(mass_s / total) * mass_s
    best = [i for i in np.argsort(-information_s, kind="stable")[:SYNSETS] if npmi_s[i] > 0]
    return [
        {
            "synset": synsets[rows_s[i]],
            "lemmas": wordnet.lemmas(synsets[rows_s[i]])[:LEMMAS],
            "lexname": wordnet.lexname(synsets[rows_s[i]]),
            "npmi": round(float(npmi_s[i]), 4),
            "mass": round(float(share_s[i]), 4),
        }
        for i in best
    ]
