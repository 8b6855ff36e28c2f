"""The command show-lsp: the view that was asked for of a store, a dictionary or a student.

    result = show(ShowLspConfig(store="runs/stores/lsp-...", word="bank"), progress)

Every result says in "view" which one it is; mlsm/commands/show_lsp.py prints it. Not handled here: the views of a store
(view.py).

Shapes: K LSPs, d hidden width.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from mlsm.common.errors import InspectionError, RequestError, StoreError
from mlsm.common.invocation import program
from mlsm.common.text import printable
from mlsm.evaluation.inspection.lsps import pages, statistics, text_pages, texts, vector_pages
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig
from mlsm.evaluation.inspection.lsps.labels import find_labels, shorten
from mlsm.evaluation.inspection.lsps.neighbours import describe_nearest, nearest_atoms, scale_to_unit
from mlsm.evaluation.inspection.lsps.sample import require_lsps
from mlsm.evaluation.inspection.lsps.texts import kind_of_source
from mlsm.evaluation.inspection.lsps.vectors import VectorView
from mlsm.evaluation.inspection.lsps.view import StoreView
from mlsm.evaluation.records import shown_name
from pipeline.dictionary import Dictionary
from shards.config import store_of
from shards.reader import Store, finished_stores

OVERVIEW_ROWS = 16
NAMED_BY = 300_000  # tokens that are read to name the LSPs of a text
NAMED_OF_A_TOKEN = 2
CLOSEST_PAIRS = 10
INTRUDER_ROWS = 8  # that are shown of the best and of the worst LSPs
HEAVIEST_OF_A_ROW = 3


def show(settings: ShowLspConfig, progress: Callable[..., None]) -> dict:
    """The result of `mlsm show-lsp`, as a dict that JSON can hold.

    Raises  InspectionError if what was asked for does not exist; StoreError, DictionaryError, TeacherError, RunError
    """
    kind = kind_of_source(store_of(settings))
    if kind == "dictionary":
        return _dictionary(settings, progress)
    if settings.vectors is not None:
        raise InspectionError(f"--vectors goes with a dictionary:  {program()} show-lsp DICTIONARY --vectors FILE")
    return _student(settings, progress) if kind == "student" else _store(settings, progress)


# -- a store ----------------------------------------------------------------------------------------------


def _store(settings, progress):
    if settings.html is not None:
        pages.refuse_foreign_pages(settings.html)
    store = Store.open(settings.store)
    require_lsps(store)
    if settings.text is not None and settings.similar_to is None:
        progress("read text", 0, None)
        return _text(settings, store, progress)
    _refuse_unknown(settings, store.k)
    if settings.html is not None:
        return {"view": "pages", **_pages(settings, store, progress)}
    view = StoreView(store, settings.samples, settings.diagnostic, progress)
    if settings.lsp:
        return {"view": "lsps", **view.facts(), "lsps": [view.lsp(lsp) for lsp in settings.lsp]}
    if settings.intruders:
        return {"view": "intruders", **_intruders(settings, view, progress)}
    if settings.word is not None:
        return {"view": "word", **view.word(settings.word)}
    if settings.text is not None:
        return {"view": "similar", **_similar_to_text(settings, view)}
    if settings.similar_to is not None:
        return {"view": "similar", **view.similar_to_stored(settings.similar_to)}
    return {"view": "overview", **view.overview(OVERVIEW_ROWS)}


def _pages(settings, store, progress):
    if settings.student is None:
        return text_pages.write(StoreView(store, settings.samples, settings.diagnostic, progress), settings.html)
    from mlsm.evaluation.inspection.lsps.editing import edit_sample, load_probe_of

    probe = load_probe_of(settings.student, store)  # what does not belong together is refused before the store is read
    view = StoreView(store, settings.samples, settings.diagnostic, progress)
    edits = {"probe": printable(shown_name(Path(settings.student))), **edit_sample(*probe, view)}
    return text_pages.write(view, settings.html, edits)


def _intruders(settings, view, progress):
    from scipy.stats import mannwhitneyu

    store, others = view.store, [Store.open(place) for place in settings.against]
    for other in others:
        require_lsps(other)
        windowings = [one.settings.get("windowing", {}) for one in (store, other)]
        if other.vocab_size != store.vocab_size or windowings[0].get("tokenizer") != windowings[1].get("tokenizer"):
            raise InspectionError(
                f"{other.path} has another tokenizer than {store.path}: one judge cannot compare their words. Pass "
                "stores with the same tokenizer"
            )
    progress("load judge", 0, None)
    judge, embeddings_Vd = texts.load_judge(store, view.vocabulary.texts, settings.judge, settings.teacher)
    judged = [view.judge(embeddings_Vd) | {"p": None}]
    own = [row["auc"] for row in judged[0]["lsps"] if row["auc"] is not None]
    for other in others:
        found = StoreView(other, settings.samples, None, progress).judge(embeddings_Vd)
        aucs = [row["auc"] for row in found["lsps"] if row["auc"] is not None]
        judged.append(found | {"p": float(mannwhitneyu(own, aucs).pvalue) if own and aucs else None})
    return {"judge": judge, "samples": settings.samples, "shown": INTRUDER_ROWS, "dictionaries": judged}


def _text(settings, store, progress):
    fingerprint = store.settings.get("dictionary")
    if settings.factors:
        from mlsm.evaluation.inspection.lsps.editing import edit, newest_probe

        probe = settings.student or newest_probe(fingerprint)
        edited = edit(probe, settings.text, settings.factors, fingerprint, store.k)
        lsps = {lsp for position in edited["positions"] for lsp, *_ in position["lsps"] + position["edited"]}
        return {"view": "edit", **edited, **_named(settings, store, lsps, progress)}
    student = texts.load_student(settings.student, fingerprint, store.k) if settings.student else None
    rows = texts.teacher_lsps(store, settings.text, settings.teacher)
    tokens = texts.compare_tokens(student, settings.text, rows)
    return {
        "view": "text",
        "text": settings.text,
        "student": settings.student,
        "positions": student.facts["positions"] if student else None,
        **_named(settings, store, _heaviest(tokens), progress),
        "tokens": tokens,
    }


def _heaviest(tokens):
    """The LSPs of a text that are named."""
    return {
        lsp for token in tokens for name in ("teacher", "student") for lsp, _ in token.get(name, [])[:NAMED_OF_A_TOKEN]
    }


def _named(settings, store, lsps, progress):
    """Facts of a store and what some of its LSPs stand for, by a small sample."""
    view = StoreView(store, min(settings.samples, NAMED_BY), settings.diagnostic, progress)
    return {**view.facts(), "names": [[lsp, view.name(lsp), shorten(view.label(lsp))] for lsp in sorted(lsps)]}


def _similar_to_text(settings, view):
    rows = texts.teacher_lsps(view.store, settings.text, settings.teacher)
    number = settings.similar_to
    if not (number.isdecimal() and int(number) < len(rows.texts)):
        numbered = " ".join(f"{i}:{token}" for i, token in enumerate(rows.texts))
        raise InspectionError(
            f"--similar-to with --text is the number of one of its tokens, found {number!r}; they are {numbered}"
        )
    return view.similar(rows.texts[int(number)], *rows.row(int(number)))


# -- a dictionary -----------------------------------------------------------------------------------------


def _dictionary(settings, progress):
    if settings.vectors is not None:
        return _vectors(settings, progress)
    _refuse(settings, "a dictionary", ("word", "text", "similar_to", "html", "intruders"))
    path = Path(os.path.expanduser(settings.store))
    dictionary = Dictionary.load(path)
    k = len(dictionary.atoms_Kd)
    _refuse_unknown(settings, k)
    labels = find_labels(dictionary.fingerprint, k, settings.diagnostic, path.resolve().parent.parent)
    near = nearest_atoms(dictionary.atoms_Kd, statistics.NEIGHBOURS)
    norms_K = np.linalg.norm(dictionary.atoms_Kd, axis=1)
    figures = {name: value for name, value in dictionary.report().items() if value == value}  # NaN is no JSON
    return {
        "view": "dictionary",
        "dictionary": str(path),
        **figures,
        **_atoms(near, norms_K),
        "lsps": [_atom(lsp, near, norms_K, labels) for lsp in settings.lsp],
    }


def _vectors(settings, progress):
    _refuse(settings, "a dictionary", ("word", "text", "student", "similar_to", "diagnostic", "intruders"))
    if settings.html is not None:
        pages.refuse_foreign_pages(settings.html)
    dictionary = Dictionary.load(settings.store)
    _refuse_unknown(settings, len(dictionary.atoms_Kd))
    view = VectorView(dictionary, settings.vectors, settings.samples, progress)
    if settings.html is not None:
        return {"view": "vectors", **vector_pages.write(view, settings.html)}
    if settings.lsp:
        return {"view": "vectors", **view.facts(), "rows": [view.lsp(lsp) for lsp in settings.lsp]}
    return {"view": "vectors", **view.overview(OVERVIEW_ROWS, HEAVIEST_OF_A_ROW)}


def _atoms(near, norms_K):
    """Figures of all atoms, and the pairs that are closest."""
    found_Kn, cosines_Kn = near
    atoms = np.repeat(np.arange(len(found_Kn)), found_Kn.shape[1])
    once = atoms < found_Kn.ravel()
    order = np.argsort(-cosines_Kn.ravel()[once], kind="stable")[:CLOSEST_PAIRS]
    pairs = zip(atoms[once][order], found_Kn.ravel()[once][order], cosines_Kn.ravel()[once][order], strict=True)
    nearest_K = cosines_Kn[:, :1].ravel()  # of a single atom, none
    return {
        "norms": np.quantile(norms_K, [0, 0.5, 1]).tolist(),
        **({"nearest_cosines": np.quantile(nearest_K, [0, 0.5, 1]).tolist()} if len(nearest_K) else {}),
        "closest": [[int(first), int(second), float(cosine)] for first, second, cosine in pairs],
    }


def _atom(lsp, near, norms_K, labels):
    label = labels[lsp] if labels else None
    return {
        "lsp": lsp,
        "norm": float(norms_K[lsp]),
        "label": shorten(label),
        "senses": label,
        "nearest": describe_nearest(near, lsp),
    }


# -- a student --------------------------------------------------------------------------------------------


def _student(settings, progress):
    _refuse(settings, "a student", ("word", "similar_to", "html", "student", "teacher", "diagnostic", "intruders"))
    if settings.factors:
        from mlsm.evaluation.inspection.lsps.editing import edit

        return {"view": "edit", **edit(settings.store, settings.text, settings.factors)}
    model = texts.load_student(settings.store)
    if settings.text is not None:
        tokens = texts.compare_tokens(model, settings.text)
        store = _store_of(model)
        return {
            "view": "text",
            "text": settings.text,
            "student": str(settings.store),
            "positions": model.facts["positions"],
            **(_named(settings, store, _heaviest(tokens), progress) if store else {}),
            "tokens": tokens,
        }
    _refuse_unknown(settings, len(model.student.output_matrix))
    outputs_Kd = scale_to_unit(model.student.output_matrix.detach().float().numpy())
    near = nearest_atoms(outputs_Kd, statistics.NEIGHBOURS)
    norms_K = np.linalg.norm(model.student.output_matrix.detach(), axis=1)
    return {
        "view": "student",
        "student": str(settings.store),
        "k": len(norms_K),
        "width": outputs_Kd.shape[1],
        "dictionary": model.facts.get("dictionary"),
        "trained_from": model.facts.get("store"),
        "positions": model.facts["positions"],
        "mask_token": model.tokenizer.mask_token,
        **_atoms(near, norms_K),
        "lsps": [_atom(lsp, near, norms_K, None) for lsp in settings.lsp],
    }


def _store_of(model):
    """The newest finished store under runs/stores that has the dictionary of a student's LSPs, or None."""
    with suppress(RequestError, StoreError):  # no store is there, or only damaged ones
        for store in map(Store.open, finished_stores(kinds=["lsp"])):
            if store.settings.get("dictionary") == model.facts.get("dictionary", ""):
                return store
    return None


def _refuse_unknown(settings, k):
    if unknown := [lsp for lsp in settings.lsp if not 0 <= lsp < k]:
        raise InspectionError(f"there is no LSP {unknown[0]}: they are numbered from 0 to {k - 1}")


def _refuse(settings, what, names):
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(settings, name) not in (None, False)]
    if given:
        raise InspectionError(
            f"{settings.store} is {what}, which {given[0]} cannot be used with. Pass a store instead."
        )
