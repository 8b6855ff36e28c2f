"""Pseudo-log-likelihoods: ln p of every token of a sentence, with that token masked.

    scorer = Scorer(model, tokenizer)
    scores = scorer.score(["Cats sleep."])      # one float32 array of ln p, in nats, per sentence

`original` is Salazar et al. 2020 (arXiv:1910.14659); `within-word-l2r` also masks the later tokens of the same word
(Kauf and Ivanova 2023, arXiv:2305.10588). Every token takes one row of a batch. Three things save time without changing
scores. Equal sentences and equal masked rows are computed once (a pair that differs in one word shares the row in which
this word is masked). A batch has rows of one length, so nothing is padded. The last layer, the head and the softmax
compute only the masked position. On a CPU every thread has its own batches and a copy of the model with shared weights.
Two threads on one product of this size would wait for each other, especially on a busy machine. With one thread per
batch, the scores do not depend on the number of threads. Common beginnings of sentences cannot be shared, because the
model is bidirectional.

Not handled here: finding and loading models (models.py), comparing scores (score.py, blimp/evaluate.py).

Shapes: W rows, L positions, V vocabulary, d hidden width, R requests (a row and a token whose probability is wanted).
"""

import copy
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from mlsm.common.errors import ScoringError
from mlsm.common.model_checks import max_positions
from pipeline.solvers.onednn import one_thread
from pipeline.teacher import special_ids
from student.encoders.deberta import adapt_deberta
from student.encoders.last_layer import LastLayer
from student.encoders.linear import use_fast_linear
from student.encoders.mask_later import MaskLater
from student.probe import ProbedLspModel

# Limits of a batch. On a CPU more tokens are not faster. The logits are float32, and their exponentials need the same
# memory again.
BATCH_TOKENS = {"cpu": 1024, "cuda": 32_768}
MOST_LOGITS = {"cpu": 2**23, "cuda": 2**27}
_CHECKED_LENGTH, _AGREEMENT = 7, 1e-3  # positions; largest difference, relative to the largest logit


class EncodedSentence(NamedTuple):
    """One tokenised sentence."""

    ids: list[int]
    """special tokens included"""
    places: list[int]
    """positions of its own tokens"""
    words: list[int | None]
    """number of the word at every position of `ids`"""


class StockMaskedLm:
    """Any *ForMaskedLM of transformers; computes the logits of one position per row.

    Its head gets only the hidden states of these positions. This is correct for heads that process each position
    separately, which is tested once; for other heads the logits of all positions are computed. If the config says so,
    [MASK] enters the encoder at the same layer as in training (student/encoders/mask_later.py).
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model.eval()
        self.device = model.device
        self.room = max_positions(model)
        self._mask_later = MaskLater(model.base_model)
        rows = model.get_input_embeddings().num_embeddings
        ids_WL = torch.arange(2 * _CHECKED_LENGTH, device=self.device).view(2, -1) % rows
        where_W = torch.tensor([1, _CHECKED_LENGTH - 2], device=self.device)
        expected_WV = self._compute_whole(ids_WL, where_W)
        self.vocabulary = expected_WV.shape[1]
        self._make_fast()
        self.is_gathered = True
        self.is_gathered = self._agrees(ids_WL, where_W, expected_WV)

    def logits(self, ids_WL: Tensor, where_W: Tensor) -> Tensor:
        """Logits (W, V) at position where_W of every row of ids; no row is padded."""
        return self._compute_gathered(ids_WL, where_W) if self.is_gathered else self._compute_whole(ids_WL, where_W)

    def twin(self) -> "StockMaskedLm":
        """A copy with the same weights, for another thread."""
        return _copy_sharing_weights(self, self._model)

    def logits_of_a_row(self, length: int) -> int:
        """How many logits a row of this length needs."""
        return self.vocabulary if self.is_gathered else self.vocabulary * length

    def _make_fast(self) -> None:
        encoder = self._model.base_model
        adapt_deberta(encoder)
        use_fast_linear(self._model)
        self._last_layer = LastLayer(encoder)
        self._where = None
        encoder.register_forward_hook(self._gather)

    def _gather(self, encoder, args, output):
        """The head's input: (W, 1, d), or (W, d) if the last layer computed only these positions."""
        if self._where is not None:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[self._where][:, None]
        return output

    def _compute_gathered(self, ids_WL: Tensor, where_W: Tensor) -> Tensor:
        rows, length = ids_WL.shape
        flat_W = torch.arange(rows, device=ids_WL.device) * length + where_W
        if self._last_layer.restrict(flat_W, 1):
            try:
                return self._read(ids_WL)
            finally:
                self._last_layer.release()
        self._where = flat_W
        try:
            return self._read(ids_WL)[:, 0]
        finally:
            self._where = None

    def _read(self, ids_WL: Tensor) -> Tensor:
        self._mask_later.pack(ids_WL)
        try:
            return self._model(input_ids=ids_WL).logits
        finally:
            self._mask_later.release()

    def _compute_whole(self, ids_WL: Tensor, where_W: Tensor) -> Tensor:
        with torch.inference_mode():
            logits_WLV = self._read(ids_WL)
        return logits_WLV[torch.arange(len(ids_WL), device=ids_WL.device), where_W]

    def _agrees(self, ids_WL, where_W, expected_WV) -> bool:
        with torch.inference_mode():
            try:
                found_WV = self._compute_gathered(ids_WL, where_W)
            except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
                return False
        within = _AGREEMENT * expected_WV.abs().max()
        return found_WV.shape == expected_WV.shape and bool((found_WV - expected_WV).abs().max() <= within)


class ProbedMaskedLm:
    """A ProbedLspModel (student/probe.py) with the same interface."""

    def __init__(self, model: ProbedLspModel):
        self._probed = model.probed.eval()
        self.device = model.probed.probe_Vk.device
        self.vocabulary = len(model.probed.probe_Vk)
        self.room = max_positions(model.probed.encoder)

    def logits(self, ids_WL: Tensor, where_W: Tensor) -> Tensor:
        """Logits (W, V) at position where_W of every row of ids."""
        rows, length = ids_WL.shape
        flat_W = torch.arange(rows, device=ids_WL.device) * length + where_W
        return self._probed(ids_WL, None, flat_W, most_masked=1)

    def twin(self) -> "ProbedMaskedLm":
        """A copy with the same weights, for another thread."""
        return _copy_sharing_weights(self, self._probed, self._probed.student)

    def logits_of_a_row(self, length: int) -> int:
        """How many logits a row of this length needs."""
        return self.vocabulary


MaskedLm = StockMaskedLm | ProbedMaskedLm


def _copy_sharing_weights(owner, *modules):
    """Copy an object that owns modules; the modules' weights and buffers are shared, not copied."""
    tensors = (tensor for module in modules for tensor in (*module.parameters(), *module.buffers()))
    return copy.deepcopy(owner, {id(tensor): tensor for tensor in tensors})


class Scorer:
    """Scores sentences with one model.

    model         a StockMaskedLm or ProbedMaskedLm
    tokenizer     the model's fast tokenizer
    metric        original or within-word-l2r
    batch_tokens  most tokens in a forward pass; by default BATCH_TOKENS of the model's device
    """

    def __init__(
        self,
        model: MaskedLm,
        tokenizer: PreTrainedTokenizerFast,
        metric: str = "original",
        batch_tokens: int | None = None,
    ):
        lanes = torch.get_num_threads() if model.device.type == "cpu" else 1
        self._models = [model, *(model.twin() for _ in range(lanes - 1))]
        self.tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._hides_rest_of_word = metric == "within-word-l2r"
        if self._hides_rest_of_word and len(set(tokenizer("a a", add_special_tokens=False).word_ids())) == 1:
            raise ScoringError(
                f"--metric {metric}: this tokenizer does not say where words begin (it calls a whole sentence one "
                "word). Use --metric original."
            )
        self._batch_tokens = batch_tokens or BATCH_TOKENS[model.device.type]
        self._most_logits = MOST_LOGITS[model.device.type]

    def score(self, sentences: list[str]) -> list[np.ndarray]:
        """ln p of the tokens of every sentence, float32, in nats; their sum is the sentence's score."""
        distinct = list(dict.fromkeys(sentences))
        scores = dict(zip(distinct, self._score_tokens(self.encode(distinct)), strict=True))
        return [scores[sentence] for sentence in sentences]

    def encode(self, sentences: list[str]) -> list[EncodedSentence]:
        """Tokenise sentences with the tokenizer's special tokens, or with [CLS] and [SEP] if it adds none."""
        wanted = {"return_special_tokens_mask": True, "return_attention_mask": False}
        batch = self.tokenizer(sentences, **wanted, verbose=False)  # `room` says what is too long
        rows = zip(
            batch["input_ids"], batch["special_tokens_mask"], map(batch.word_ids, range(len(sentences))), strict=True
        )
        encoded = [self._encode_one(*row) for row in rows]
        longest = max(encoded, key=lambda sentence: len(sentence.ids), default=None)
        if longest is not None and len(longest.ids) > self._models[0].room:
            raise ScoringError(
                f"a sentence of {len(longest.ids)} tokens ({sentences[encoded.index(longest)][:30]!r}...): this model "
                f"reads at most {self._models[0].room}. Shorten it, or use a model that reads more."
            )
        return encoded

    def _encode_one(self, ids, added, words) -> EncodedSentence:
        if not any(added):
            ids, words = [self._special["cls"], *ids, self._special["sep"]], [None, *words, None]
            added = [1, *added, 1]
        return EncodedSentence(ids, [place for place, extra in enumerate(added) if not extra], words)

    def _mask(self, sentence: EncodedSentence, place: int) -> tuple[int, ...]:
        """The row in which a token is masked, with the other tokens that the metric masks along with it."""
        stop, word = place + 1, sentence.words[place]
        while self._hides_rest_of_word and word is not None and sentence.words[stop : stop + 1] == [word]:
            stop += 1
        return (*sentence.ids[:place], *[self._special["mask"]] * (stop - place), *sentence.ids[stop:])

    def _score_tokens(self, encoded: list[EncodedSentence]) -> list[np.ndarray]:
        numbers: dict[tuple, int] = {}  # (row, place) -> its number
        requests = []  # for every token: its row's number, its id
        for sentence in encoded:
            for place in sentence.places:
                row = numbers.setdefault((self._mask(sentence, place), place), len(numbers))
                requests.append((row, sentence.ids[place]))
        found_R = self._log_probabilities(list(numbers), np.array(requests, np.int64).reshape(-1, 2))
        return np.split(found_R, np.cumsum([len(sentence.places) for sentence in encoded])[:-1])

    def _log_probabilities(self, rows, requests_R2) -> np.ndarray:
        """ln p for every request. Batches have rows of one length, shortest rows first."""
        lengths = np.array([len(ids) for ids, _ in rows])
        order = np.argsort(lengths, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        by_rank = np.argsort(rank[requests_R2[:, 0]], kind="stable")
        ranks_R, tokens_R = rank[requests_R2[by_rank, 0]], requests_R2[by_rank, 1]
        found_R = np.empty(len(by_rank), np.float32)

        def compute(model, start, stop):
            first, last = np.searchsorted(ranks_R, [start, stop])
            batch = [rows[number] for number in order[start:stop]]
            found_R[by_rank[first:last]] = _scores(model, batch, ranks_R[first:last] - start, tokens_R[first:last])

        self._in_lanes(compute, deque(self._batches(lengths[order])))
        return found_R

    def _in_lanes(self, compute, spans: deque) -> None:
        """Run compute(model, start, stop) for all spans, in as many threads as there are model copies."""
        if len(self._models) == 1:
            with torch.inference_mode():
                _work(compute, self._models[0], spans)
            return
        with ThreadPoolExecutor(len(self._models)) as pool:
            try:
                for lane in [pool.submit(_work_alone, compute, model, spans) for model in self._models]:
                    lane.result()
            finally:
                spans.clear()  # after an error or Ctrl-C the other threads end after their current batch

    def _batches(self, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
        """Spans (start, stop) of rows sorted by length: each of one length, within the limits of tokens and logits."""
        start = 0
        while start < len(lengths):
            length = int(lengths[start])
            budgets = self._batch_tokens // length, self._most_logits // self._models[0].logits_of_a_row(length)
            of_this_length = int(np.searchsorted(lengths, length, side="right"))
            stop = min(start + max(1, min(budgets)), of_this_length)
            yield start, stop
            start = stop


def _work_alone(compute, model, spans: deque) -> None:
    with one_thread(), torch.inference_mode():
        _work(compute, model, spans)


def _work(compute, model, spans: deque) -> None:
    while True:
        try:
            span = spans.popleft()
        except IndexError:
            return
        compute(model, *span)


def _scores(model: MaskedLm, rows, row_R, token_R) -> np.ndarray:
    """ln p for requests in rows of one length."""
    ids_WL = torch.tensor([ids for ids, _ in rows], device=model.device)
    where_W = torch.tensor([place for _, place in rows], device=model.device)
    logits_WV = model.logits(ids_WL, where_W).float()
    row_R, token_R = (torch.from_numpy(numbers).to(model.device) for numbers in (row_R, token_R))
    scores_R = logits_WV[row_R, token_R] - logits_WV.logsumexp(1)[row_R]
    return scores_R.cpu().numpy()
