"""Names for LSPs in WordNet: the synsets and lexicographer files whose words use them.

A synset's place in an LSP's list is its part of the mutual information of synsets and LSPs, Φ_ij PMI_ij: NPMI alone
would put synsets first that were seen once, Φ alone the most frequent ones. Left out: Φ (sense_scores.py).
"""

import numpy as np

SYNSETS, LEXNAMES, LEMMAS = 5, 3, 5  # most of each that an LSP is given


def name_lsps(phi, npmi, synsets, wordnet):
    """Labels of all LSPs.

    phi, npmi  CSR (S, K) with the same cells;  synsets  names of the S rows
    Returns    list of K dicts: synsets (synset, lemmas, lexname, npmi, mass: its share of the column of Φ) and
               lexnames ([lexname, share of the column])
    """
    phi, npmi = phi.tocsc(), npmi.tocsc()
    total = phi.sum()
    lexnames = np.array([wordnet.lexname(synset) for synset in synsets])
    return [
        _label(phi.data[cells], npmi.data[cells], phi.indices[cells], total, synsets, lexnames, wordnet)
        for cells in map(slice, phi.indptr[:-1], phi.indptr[1:])
    ]


def _label(mass_s, npmi_s, rows_s, total, synsets, lexnames, wordnet):
    share_s = mass_s / mass_s.sum() if len(mass_s) else mass_s
    information_s = npmi_s * -np.log(mass_s / total) * mass_s
    best = [i for i in np.argsort(-information_s, kind="stable")[:SYNSETS] if npmi_s[i] > 0]
    files, file_of_s = np.unique(lexnames[rows_s], return_inverse=True)
    file_shares = np.bincount(file_of_s, share_s, len(files))
    return {
        "synsets": [
            {
                "synset": synsets[rows_s[i]],
                "lemmas": wordnet.lemmas(synsets[rows_s[i]])[:LEMMAS],
                "lexname": str(lexnames[rows_s[i]]),
                "npmi": round(float(npmi_s[i]), 4),
                "mass": round(float(share_s[i]), 4),
            }
            for i in best
        ],
        "lexnames": [[str(files[i]), round(float(file_shares[i]), 4)]
                     for i in np.argsort(-file_shares, kind="stable")[:LEXNAMES]],
    }  # fmt: skip
