"""The LSPs of a text: the teacher's, as encode-lsp would store them, and a student's predictions.

    rows = teacher_lsps(store, text)
    tokens = compare_tokens(load_student("runs/students/..."), text, rows)

The teacher reads the text as it is. The student reads it once for every token, with that token masked, which is what it
was trained for; if it learned from all tokens, it reads the text once as it is. A mask token in the text is read as one
by both: the teacher says nothing of it, the student does. Their distance is KL(teacher || student) in nats, the
training loss at that token less the teacher's entropy.

Shapes: T tokens of the text without special ones, d hidden width, K LSPs.
"""

import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from mlsm.common.errors import InspectionError, RunError, TeacherError
from mlsm.evaluation.inspection.lsps.sample import largest_weights
from pipeline.batch import center_on, centred_rows, make_batch
from pipeline.dictionary import Dictionary
from pipeline.solvers import nonneg_lasso
from pipeline.solvers.nearest import nearest_atoms
from pipeline.targets.distributions import Distributions, distributions
from shards.codec import SparseRows
from shards.copies import check_dictionary
from shards.reader import Store, is_url
from student.masks.words import token_names

EMBEDDED_AT_ONCE = 256
SHOWN = 5  # LSPs of a token
OF_THIS_STORE = "Pass the store that the student was trained from."
logger = logging.getLogger(__name__)

if TYPE_CHECKING:  # they import transformers
    from pipeline.teacher import Teacher
    from student.lsp_model import LspModel


class TextRows(NamedTuple):
    """A text's tokens, by name, with the teacher's distributions, in CSR form; a mask token has an empty row."""

    ids_T: np.ndarray
    texts: list[str]
    rows: SparseRows

    def row(self, token: int) -> tuple[np.ndarray, np.ndarray]:
        """LSPs and weights of a token."""
        entries = slice(self.rows.indptr[token], self.rows.indptr[token + 1])
        return self.rows.indices[entries], self.rows.weights[entries]


def teacher_lsps(store: Store, text: str, teacher: str | None = None) -> TextRows:
    """The LSPs of every token of a text, by the store's teacher, dictionary and solver.

    Hidden states are those of the teacher also if the store's were quantised (--hidden), so its LSPs may differ.

    teacher  its present location; None: the one in the store
    Returns  TextRows
    Raises   InspectionError when the text is too long or empty, or the teacher is not the store's; TeacherError; those
             of `load_store_dictionary`
    """
    dictionary = load_store_dictionary(store)
    tokenizer, ids_T = _read(store, text)
    framed_T = np.array([store.special_ids["cls"], *ids_T, store.special_ids["sep"]])
    batch = make_batch(framed_T, np.array([len(framed_T)]), 1, store.max_length, store.special_ids)
    with torch.inference_mode():
        encoder = load_store_teacher(store, teacher)
        (hidden,) = centred_rows(encoder, batch, [(encoder.layer, center_on(encoder.device, dictionary))])
        hidden_Nd = hidden.rows_Nd.float().numpy()
    rows = _spread_over_all(code_rows(store, dictionary, hidden_Nd), batch.coded_T[1:-1])
    return TextRows(ids_T, token_names(tokenizer, ids_T.tolist()), rows)


def code_rows(store: Store, dictionary: Dictionary, hidden_Nd: np.ndarray) -> Distributions:
    """The LSPs of unit-length hidden states, found and cut off as those in the store were."""
    settings = store.settings
    solver, how = settings.get("solver"), {"tol": settings.get("tolerance")}
    if solver and solver["name"] == "nearest":
        codes = nearest_atoms(hidden_Nd, dictionary.atoms_Kd)
    else:
        how |= {"backend": solver["name"], "steps": solver["steps"]} if solver else {}
        codes = nonneg_lasso(hidden_Nd, dictionary.atoms_Kd, settings["lam"], **how)
    return distributions(codes, settings["top_n"])


def _read(store, text):
    tokenizer = store.load_tokenizer()  # which knows "[MASK]", unlike an encoder's
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not 0 < len(ids) <= store.max_length - 2:
        most = store.max_length - 2
        raise InspectionError(f"--text has {len(ids)} tokens; expected 1 to {most}, one window. Give another text.")
    return tokenizer, np.array(ids, np.int64)


def load_store_dictionary(store: Store) -> Dictionary:
    """The dictionary of a store's LSPs.

    Raises  DictionaryError if it is missing or damaged, StoreError if it is not the one that the store names
    """
    dictionary = Dictionary.load(store.files.dictionary)
    check_dictionary(store.files, dictionary.fingerprint)
    return dictionary


def load_store_teacher(store: Store, place: str | None) -> "Teacher":
    """The teacher of a store, cut after its layer, in its precision; `place` is its location, if it was moved.

    Raises  InspectionError when it is another teacher; TeacherError
    """
    from pipeline.teacher import Teacher, locate

    settings = store.settings
    if place is None:
        try:
            locate(settings["teacher_name"])
        except TeacherError as error:
            raise TeacherError(
                f"{store.path} names a teacher that is not available here: {error} Pass the present location of that "
                "model with --teacher."
            ) from error
    teacher = Teacher.load(place or settings["teacher_name"], settings["layer"], dtype=settings["dtype"])
    if teacher.fingerprint != settings["teacher"]:
        raise InspectionError(
            f"{teacher.name} is not the teacher of {store.path}: its weights are {teacher.fingerprint[:12]}, expected "
            f"{settings['teacher'][:12]}. Pass the location of that model with --teacher."
        )
    return teacher


def load_judge(
    store: Store, words: list[str], judge: str | None = None, teacher: str | None = None
) -> tuple[str, np.ndarray]:
    """The judge of words in the intruder test: an encoder or, by default, the input embeddings of a store's teacher.

    words    the texts of the vocabulary
    teacher  the present location of the store's; None: the one in the store
    Returns  (the judge's name, a vector for each word)
    Raises   InspectionError when it is another teacher; TeacherError
    """
    if judge is not None:
        return judge, embed(judge, words)
    loaded = load_store_teacher(store, teacher)
    embeddings_Vd = loaded.embeddings_Vd[: len(words)]  # some models have more rows than their tokenizer has ids
    return f"input embeddings of the teacher {loaded.fingerprint[:12]}", embeddings_Vd


def embed(place: str, texts: list[str]) -> np.ndarray:
    """A vector for every text, read alone: the mean of the last hidden states of an encoder, float32 (texts, d).

    So do sentence encoders such as MiniLM. Special tokens count, padding does not; a text without a token has zeros.
    Raises TeacherError
    """
    from pipeline.teacher import Teacher, load_tokenizer, locate, read_config

    tokenizer = load_tokenizer(place)
    encoder = Teacher.load(place, read_config(locate(place), place).num_hidden_layers)
    parts = []
    for start in range(0, len(texts), EMBEDDED_AT_ONCE):
        read = tokenizer(texts[start : start + EMBEDDED_AT_ONCE], padding=True, return_tensors="pt")
        is_real_WL = read["attention_mask"].bool()
        hidden_WLd = encoder(read["input_ids"], is_real_WL).masked_fill(~is_real_WL[:, :, None], 0)
        parts.append((hidden_WLd.sum(1) / is_real_WL.sum(1, keepdim=True).clamp(min=1)).numpy())
    return np.concatenate(parts)


def _spread_over_all(rows, coded_T):
    """Rows of the coded tokens to rows of all; those that are stored sum to one, as a reader decodes them."""
    nnz_T = np.zeros(len(coded_T), np.int64)
    nnz_T[coded_T] = np.diff(rows.indptr)
    tail_T = np.zeros(len(coded_T), np.float32)
    tail_T[coded_T] = rows.tail
    weights = rows.weights / np.repeat(1 - tail_T, nnz_T)
    return SparseRows(np.concatenate(([0], np.cumsum(nnz_T))), rows.indices, weights, tail_T)


def kind_of_source(source: str | Path) -> str:
    """What is at a path: a store, a dictionary or a student. Anything else counts as a store; its reader refuses it."""
    path = Path(os.path.expanduser(source))
    if is_url(source) or (path / "target.json").is_file():
        return "store"
    if (path / "atoms.npy").is_file() or (path / "dictionary.json").is_file():
        return "dictionary"
    signs = ("export", "checkpoints", "log.jsonl", "lsp_config.json", "config.json")
    return "student" if any((path / sign).exists() for sign in signs) else "store"


def load_student(source: str, fingerprint: str | None = None, k: int | None = None) -> "LspModel":
    """The LSP outputs of a student; for a student of several stores, the outputs for the given dictionary.

    fingerprint, k  of the dictionary with which the LSPs are compared
    Raises          InspectionError if the student has none of that dictionary
    """
    from student.lsp_model import LspModel

    model, head = LspModel.from_pretrained(source), 1
    while fingerprint is not None and model.facts.get("dictionary") not in (None, fingerprint):
        head += 1
        try:
            model = LspModel.from_pretrained(source, head=head)
        except RunError:
            break  # there are no more outputs: these are refused below
    check_same_lsps(source, model.facts, fingerprint, k, OF_THIS_STORE)
    return model


def check_same_lsps(source: str, facts: dict, fingerprint: str | None, k: int | None, remedy: str) -> None:
    """Raises InspectionError if a student's LSPs are not those of a store; warns if its export does not say.

    facts           of the student's outputs
    fingerprint, k  of the store's dictionary; None if there is no store
    """
    found = facts.get("dictionary")
    if fingerprint is not None and found is not None and found != fingerprint:
        raise InspectionError(
            f"{source} predicts LSPs of dictionary {found[:12]}, but the store's are of {fingerprint[:12]}: their "
            f"numbers mean different things. {remedy}"
        )
    if k is not None and facts["lsps"] != k:
        raise InspectionError(f"{source} predicts {facts['lsps']:,} LSPs, and the store has {k:,}. {remedy}")
    if fingerprint is not None and found is None:
        logger.warning(
            "%s does not say from which dictionary its LSPs are. Whether their numbers mean the same as the store's is"
            " not known: compare them only if you know it.",
            source,
        )


def compare_tokens(model: "LspModel | None", text: str, teacher: TextRows | None = None) -> list[dict]:
    """Every token of a text with its largest LSPs: the teacher's, the student's, and their distance.

    model, teacher  LspModel and TextRows, one of them possibly None
    Returns         list of dicts: "text", and "teacher" and "student", lists of [lsp, weight], "kl" in nats (None if
                    one of the two says nothing)
    """
    predicted = model.lsp([text])[0] if model else None
    names = teacher.texts if teacher else []
    if model and predicted:
        ids = model.tokenizer.convert_tokens_to_ids(predicted.tokens)
        names = token_names(model.tokenizer, ids)
        if teacher and list(ids) != teacher.ids_T.tolist():
            raise InspectionError(
                f"the student's tokenizer cuts the text into other tokens than the store's. {OF_THIS_STORE}"
            )
    tokens: list[dict] = [{"text": name} for name in names]
    for t, token in enumerate(tokens):
        if teacher:
            token["teacher"] = largest_weights(*teacher.row(t), SHOWN)
        if predicted:
            q_K = predicted.distributions_Tk[t].numpy().astype(np.float64)
            token["student"] = largest_weights(np.arange(len(q_K)), q_K, SHOWN)
            token["kl"] = _divergence(*teacher.row(t), q_K) if teacher else None
    return tokens


def _divergence(lsps, weights, q_K):
    """KL(P || Q) in nats of a sparse P; None for an empty one."""
    if not len(lsps):
        return None
    p = weights.astype(np.float64)
    return float((p * (np.log(p) - np.log(np.maximum(q_K[lsps], math.ulp(0.0))))).sum())
