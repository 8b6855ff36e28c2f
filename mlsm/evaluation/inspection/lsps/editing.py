"""The words that a probe predicts when LSPs are removed from its student's prediction, or amplified in it.

    result = edit("runs/probes/<run>", "The [MASK] raised its rates.", {230: 0.0, 17: 3.0})
    edit_sample(*load_probe_of("runs/probes/<run>", store), StoreView(store, tokens=2_000_000))    # each LSP, for pages

At a masked position the student predicts a distribution q over LSPs, and a softmax probe P the words softmax(P q). With
a factor f_i for every LSP, 0 for one that is taken out and 1 for those that are not named, the words become

    softmax(P q'),   q'_i = f_i q_i / sum_j f_j q_j

q' sums to one, as everything does that the probe was trained on: what is taken from one LSP goes to the others in
proportion. Not handled here: a logits probe, whose matrix its export has merged with the student's; what the teacher
says.

Shapes: T tokens of the text, M masked ones of them, k LSPs, V vocabulary; W windows, L positions.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from scipy.special import rel_entr
from torch.nn.utils.rnn import pad_sequence

from mlsm.common.disk import read_file
from mlsm.common.errors import InspectionError
from mlsm.common.invocation import program
from mlsm.evaluation.inspection.lsps.contexts import context
from mlsm.evaluation.inspection.lsps.sample import largest_weights
from mlsm.evaluation.inspection.lsps.statistics import top_tokens
from mlsm.evaluation.inspection.lsps.texts import check_same_lsps
from mlsm.evaluation.inspection.lsps.view import StoreView
from shards.reader import Store
from student.config import ProbeConfig
from student.encoders.modeling_mlsm import CONFIG_FILE, PROBE_FILE
from student.lsp_model import LspModel
from student.masks.words import token_names
from student.probe import ProbedStudent, load_probe

WORDS = 8  # of a list
EXAMPLES = 4  # contexts on the page of an LSP
EXAMPLE_WORDS = 5
AMPLIFIED = 3.0  # what the probability of a page's LSP is multiplied with
EDITED_AT_ONCE = 64  # contexts
OF_THIS_STORE = "Pass a probe of a student that was trained from the store."


def edit(
    source: str, text: str, factors: dict[int, float], fingerprint: str | None = None, store_k: int | None = None
) -> dict:
    """The words at masked positions of a text before and after an edit of the LSPs.

    source       a softmax probe: a finished run, an export or a Hub id
    text         its mask tokens are predicted; without one every token is masked in turn
    factors      factor for an LSP's probability, {LSP: factor}, at least one
    fingerprint  of the dictionary that the LSP numbers refer to, if known
    store_k      how many LSPs it has, if known
    Returns      {"student", "text", "factors": [[LSP, factor], ...], "positions": a dict for every masked position}:
                 position       the token's number in the text
                 token          the text's token there
                 lsps           the largest of the prediction as pairs [LSP, probability], before the edit
                 edited         [LSP, probability before, after] of the edited ones
                 own            the probability of the token itself before and after; None for a mask token
                 before, after  the most probable words as pairs [word, probability]
                 gain, lose     the words whose probability rises or falls most: [word, before, after]
                 kl             KL(before || after) of the words in nats: how much the edit changes
    Raises       InspectionError if the probe has other LSPs, or nothing is left of a prediction; RunError if
             there is no such probe; ValueError if the text is too long
    """
    probed, model = load_probe(source)
    k = model.facts["lsps"]
    check_same_lsps(source, model.facts, fingerprint, store_k, OF_THIS_STORE)
    if unknown := [lsp for lsp in factors if not 0 <= lsp < k]:
        raise InspectionError(f"there is no LSP {unknown[0]}: the student's are numbered from 0 to {k - 1}")
    (predicted,) = model.lsp([text], masking="each")  # as the probe was trained
    if not predicted.tokens:
        raise InspectionError("--text has no token. Pass a text, with the mask token in place of each word to predict.")
    mask = model.tokenizer.mask_token
    positions = [t for t, token in enumerate(predicted.tokens) if token == mask] or range(len(predicted.tokens))
    before_Mk = predicted.distributions_Tk[list(positions)].double()
    before_Mk /= before_Mk.sum(dim=1, keepdim=True)  # float32 sums to one up to rounding
    factors_k = torch.ones(k, dtype=torch.float64)
    factors_k[list(factors)] = torch.tensor(list(factors.values()), dtype=torch.float64)
    after_Mk = before_Mk * factors_k
    left_M1 = after_Mk.sum(dim=1, keepdim=True)
    if not (left_M1 > 0).all():
        raise InspectionError("--scale removes every LSP that the student predicts: nothing is left to read.")
    after_Mk /= left_M1
    tokenizer = model.tokenizer
    names = token_names(tokenizer, range(len(probed.probe_Vk)))
    before_MV, after_MV = probed.words(before_Mk).numpy(), probed.words(after_Mk).numpy()
    described = []
    for m, t in enumerate(positions):
        id = tokenizer.convert_tokens_to_ids(predicted.tokens[t])
        own = None if predicted.tokens[t] == mask else id
        described.append(
            {
                "position": t,
                "token": names[id],
                "lsps": largest_weights(np.arange(k), before_Mk[m].numpy()),
                "edited": [[lsp, float(before_Mk[m, lsp]), float(after_Mk[m, lsp])] for lsp in factors],
                **_describe_words(before_MV[m], after_MV[m], names, own),
            }
        )
    entries = [[lsp, factor] for lsp, factor in factors.items()]
    return {"student": str(source), "text": text, "factors": entries, "positions": described}


def _describe_words(before_V, after_V, names, own):
    """The result of `edit` for the words at one position; `own` is the id of the token that was masked there, or
    None."""
    change_V = after_V - before_V
    rising = np.argsort(-change_V, kind="stable")
    most_probable = {"before": before_V, "after": after_V}
    most_changed = {
        "gain": [word for word in rising[:WORDS] if change_V[word] > 0],
        "lose": [word for word in rising[::-1][:WORDS] if change_V[word] < 0],
    }
    return {
        "own": None if own is None else [float(before_V[own]), float(after_V[own])],
        **{
            name: [[names[word], probability] for word, probability in largest_weights(np.arange(len(p_V)), p_V, WORDS)]
            for name, p_V in most_probable.items()
        },
        **{
            name: [[names[word], float(before_V[word]), float(after_V[word])] for word in words]
            for name, words in most_changed.items()
        },
        "kl": float(rel_entr(before_V, after_V).sum()),
    }


def load_probe_of(source: str, store: Store) -> tuple[ProbedStudent, LspModel]:
    """A softmax probe whose student predicts the LSPs of a store and reads its windows.

    source  a finished run, an export or a Hub id
    Raises  InspectionError if LSPs, tokens or windows are others; RunError if there is no such probe
    """
    probed, model = load_probe(source)
    check_same_lsps(source, model.facts, store.settings.get("dictionary"), store.k, OF_THIS_STORE)
    if model.tokenizer.get_vocab() != store.load_tokenizer().get_vocab():
        raise InspectionError(f"{source} has another tokenizer than {store.path}. {OF_THIS_STORE}")
    if model.facts["max_length"] < store.max_length:
        raise InspectionError(
            f"{source} reads windows of at most {model.facts['max_length']} tokens, those of {store.path} have up to"
            f" {store.max_length}. {OF_THIS_STORE}"
        )
    return probed, model


def edit_sample(probed: ProbedStudent, model: LspModel, view: StoreView) -> dict:
    """For every LSP of a store, the words predicted with and without it at some tokens where it is heaviest.

    The token is masked, and the student reads its document as far as that is in its window: what `edit` would say of
    that text.
    probed, model  see `load_probe_of`
    Returns        {"factor": AMPLIFIED, "lsps": by LSP a list of contexts, the heaviest first}; a context is that of
                   contexts.py with
                   token        its number in the sample
                   probability  of the LSP, as the student predicts it
                   words        three lists of [word, probability, whether it is the token itself]: as predicted,
                                without the LSP, and with its probability multiplied by the factor
    """
    sample, vocabulary, special = view.sample, view.vocabulary, model.facts["special_ids"]
    is_part_V = vocabulary.continues_V & ~vocabulary.is_symbol_V
    names = ["-" * bool(is_part) + text for is_part, text in zip(is_part_V, vocabulary.texts, strict=True)]
    heaviest = [top_tokens(sample, view.entries.heaviest_first(lsp)[0], EXAMPLES) for lsp in range(sample.k)]
    places = [(lsp, int(token)) for lsp, tokens in enumerate(heaviest) for token in tokens]
    by_lsp: list[list[dict]] = [[] for _ in heaviest]
    for start in range(0, len(places), EDITED_AT_ONCE):
        part, rows, masked = places[start : start + EDITED_AT_ONCE], [], []
        for _, token in part:
            first, last = map(int, sample.bounds(token, view.store.max_length))
            rows.append(torch.tensor([special["cls"], *sample.ids_N[first:last].tolist(), special["sep"]]))
            masked.append(1 + token - first)
            rows[-1][masked[-1]] = special["mask"]
        input_WL = pad_sequence(rows, batch_first=True, padding_value=special["pad"])
        attention_WL = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        each_W = torch.arange(len(part))
        with torch.no_grad():
            where_W = each_W * input_WL.shape[1] + torch.tensor(masked)
            logits_Wk = model.student(input_WL, attention_WL, where_W).double()
        own = each_W, torch.tensor([lsp for lsp, _ in part])
        found = []
        for factor in (1.0, 0.0, AMPLIFIED):
            edited_Wk = logits_Wk.clone()
            edited_Wk[own] += math.log(factor) if factor else -math.inf  # softmax(z + ln f) is f q, summing to one
            found.append(probed.words(edited_Wk.softmax(dim=1)).topk(EXAMPLE_WORDS))
        probabilities = logits_Wk.softmax(dim=1)[own].tolist()
        for w, (lsp, token) in enumerate(part):
            words = [
                [
                    [names[word], p, word == int(sample.ids_N[token])]
                    for word, p in zip(top.indices[w].tolist(), top.values[w].tolist(), strict=True)
                ]
                for top in found
            ]
            example = context(sample, vocabulary, token)
            by_lsp[lsp].append(example | {"token": token, "probability": probabilities[w], "words": words})
        view.progress("words", start + len(part), len(places), unit="contexts")
    return {"factor": AMPLIFIED, "lsps": by_lsp}


def newest_probe(fingerprint: str | None) -> str:
    """The newest finished softmax probe of a dictionary's LSPs. Raises InspectionError if there is none."""
    root = Path(ProbeConfig.root)
    found = sorted(root.glob(f"*/export/{PROBE_FILE}"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for path in found:
        config = path.with_name(CONFIG_FILE)  # a probe of hidden states has none
        if config.is_file() and json.loads(read_file(config)).get("dictionary") == fingerprint:
            return str(path.parent.parent)
    raise InspectionError(
        f"no finished softmax probe of a student of these LSPs under {root}: a probe turns LSPs into words. Train one,"
        f" {program()} train-probe (which needs a student: {program()} train-student), or name one with --student."
    )
