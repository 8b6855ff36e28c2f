"""The teacher's distribution over its vocabulary at every token, its n most probable entries: for distillation.

    teacher = MaskedLm.load("google-bert/bert-base-cased")
    coder = LogitsCoder(teacher, [Output(teacher.layer, None)], config, special_ids)

The whole masked language model reads the unmasked text, as in the official code: so no token's distribution depends on
which tokens a student masks. With --masked it reads the text with one token in seven hidden, seven times, and a
token's distribution is that of the pass in which it is hidden (masked.py). It is the softmax of the logits over the
head's whole vocabulary, at temperature 1, in float32. Among equal logits the lower ids are kept. The tail is summed
from the dropped logits themselves, since 1 minus the kept mass is rounding noise where it is small.

Logits of a batch would take a gigabyte, so the head runs on chunks of the coded tokens. Every chunk has the same
number of rows, the last one filled up with copies: matrix products of another shape may round otherwise, and then
the bytes would depend on which windows failed. Left out: the model (teacher/masked_lm.py), what is learned from this
(the student's part), what stages and failures are (coder.py, failures.py).

Shapes: N coded tokens, C tokens of a chunk, d hidden width, V entries of the vocabulary, n kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from common.errors import EncodeError
from pipeline.coding.batch import Batch, Output
from pipeline.coding.coder import TeacherCoder
from pipeline.coding.distributions import MOST_ENTRIES, Distributions
from pipeline.coding.hidden import Hidden, not_finite
from pipeline.coding.masked import masked_rows
from pipeline.config import EncodeLogitsConfig
from pipeline.teacher.masked_lm import HEAD_ROWS

if TYPE_CHECKING:
    from pipeline.teacher import Teacher
    from pipeline.teacher.masked_lm import MaskedLm

LOGITS_BYTES = 2**27  # of one chunk in float32; their softmax takes as much again, so 256 MiB in all
COMPARED_TOKENS = 128  # of one product, where two precisions are compared: three tables of this many logits


@dataclass(frozen=True)
class MostProbable:
    """The n most probable entries of N tokens.

    ids_Nn      int32, increasing in each row
    weights_Nn  float32, probabilities under the softmax over the whole vocabulary; 0 where they underflow
    tail_N      float32, probability of all other entries

    Tensors on the teacher's device; after `to_host` NumPy arrays.
    """

    ids_Nn: torch.Tensor
    weights_Nn: torch.Tensor
    tail_N: torch.Tensor

    def to_host(self) -> "MostProbable":
        return MostProbable(*(tensor.cpu().numpy() for tensor in (self.ids_Nn, self.weights_Nn, self.tail_N)))


def most_probable(logits_CV: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The n most probable entries of each row under a softmax over all of it; of equal logits the lower ids.

    logits_CV  float32; is overwritten
    Returns    ids_Cn int64, increasing; weights_Cn; tail_C; log_sum_C, not finite where the logits are not
    """
    ids_Cn = _largest(logits_CV, n).sort(dim=1).values
    kept_Cn = logits_CV.gather(1, ids_Cn)
    logits_CV.scatter_(1, ids_Cn, -torch.inf)
    rest_C = logits_CV.logsumexp(1)
    log_sum_C = torch.logaddexp(kept_Cn.logsumexp(1), rest_C)
    return ids_Cn, (kept_Cn - log_sum_C[:, None]).exp_(), (rest_C - log_sum_C).exp_(), log_sum_C


def _largest(logits_CV, n):
    """Ids of the n largest of each row. Which of several equal ones topk takes is anybody's guess, so one more than n
    is asked for: only where it equals the last one does the choice matter."""
    values_Cm, ids_Cm = logits_CV.topk(min(n + 1, logits_CV.shape[1]), dim=1)
    ids_Cn, last_C = ids_Cm[:, :n], values_Cm[:, n - 1]
    tied = torch.nonzero(values_Cm[:, -1] == last_C).flatten() if values_Cm.shape[1] > n else ()
    if len(tied):
        ids_Cn[tied] = _lower_ids_first(logits_CV[tied], ids_Cn[tied], last_C[tied], values_Cm[tied, :n])
    return ids_Cn


def _lower_ids_first(logits_CV, ids_Cn, last_C, values_Cn):
    """The n largest of each row, the places of those equal to the last one filled from the lowest id on."""
    larger_C = (values_Cn > last_C[:, None]).sum(1)  # they come first
    row_E, id_E = torch.nonzero(logits_CV == last_C[:, None], as_tuple=True)
    first_C = torch.searchsorted(row_E, torch.arange(len(last_C), device=row_E.device))
    place_E = larger_C[row_E] + torch.arange(len(row_E), device=row_E.device) - first_C[row_E]
    kept = place_E < ids_Cn.shape[1]
    ids_Cn[row_E[kept], place_E[kept]] = id_E[kept]
    return ids_Cn


def entries_kept(top_n: int | Literal["all"], teacher: "MaskedLm") -> int:
    """How many entries of a token --top-n means for a teacher's vocabulary. Raises EncodeError when it has fewer."""
    if top_n == "all":
        return min(MOST_ENTRIES, teacher.vocabulary)
    if top_n > teacher.vocabulary:
        raise EncodeError(
            f"--top-n {top_n}, but {teacher.name} has a vocabulary of {teacher.vocabulary}. "
            f"Use --top-n {teacher.vocabulary} or less."
        )
    return top_n


class LogitsCoder(TeacherCoder):
    """Blocks of windows to blocks with the vocabulary distribution of every token.

    outputs  one Output, of the teacher's last layer and without a dictionary
    Raises   EncodeError when more entries are to be kept than there are
    """

    WORK = "head"
    config: EncodeLogitsConfig
    teacher: "MaskedLm"

    def __init__(self, teacher: "MaskedLm", outputs: Sequence[Output], config: EncodeLogitsConfig, special_ids: dict):
        super().__init__(teacher, outputs, config, special_ids)
        self._top_n = entries_kept(config.top_n, teacher)
        fitting = LOGITS_BYTES // (4 * teacher.vocabulary)
        self._chunk = max(1, min(HEAD_ROWS, config.batch_tokens, fitting))

    def read_states(self, teacher: "Teacher", batch: Batch, outputs: Sequence[int]) -> dict[int, Hidden]:
        if self.config.masked:
            rows_Nd = masked_rows(teacher, batch, self.special_ids["mask"])
        else:
            rows_Nd = teacher(batch.ids_WL, batch.real_WL, batch.tokens_N, **batch.reading)
        return dict.fromkeys(outputs, Hidden(teacher.layer, rows_Nd, (~rows_Nd.isfinite().all(1)).sum()))

    def measure_variation(
        self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: "MaskedLm", output: int
    ) -> np.ndarray:
        pairs = zip(rows_Nd.split(COMPARED_TOKENS), exact_Nd.split(COMPARED_TOKENS), strict=True)
        parts = [
            self.teacher.logits(rows_nd).softmax(1).sub_(exact_teacher.logits(exact_nd).softmax(1)).abs_().sum(1) / 2
            for rows_nd, exact_nd in pairs
        ]
        return torch.cat(parts).cpu().double().numpy()

    def _code(self, rows_Nd, output):
        place = {"device": rows_Nd.device}
        ids_Nn = torch.empty((len(rows_Nd), self._top_n), dtype=torch.int32, **place)
        weights_Nn = torch.empty(ids_Nn.shape, dtype=torch.float32, **place)
        tail_N, log_sum_N = (torch.empty(len(rows_Nd), dtype=torch.float32, **place) for _ in range(2))
        for start in range(0, len(rows_Nd), self._chunk):
            rows_Cd = rows_Nd[start : start + self._chunk]
            filling = rows_Cd[:1].expand(self._chunk - len(rows_Cd), -1)
            found = most_probable(self.teacher.logits(torch.cat([rows_Cd, filling])), self._top_n)
            for whole, part in zip((ids_Nn, weights_Nn, tail_N, log_sum_N), found, strict=True):
                whole[start : start + self._chunk] = part[: len(rows_Cd)]
        if count := int((~log_sum_N.isfinite()).sum()):
            raise not_finite(self.teacher, f"{self.teacher.name}: the logits of {count} tokens")
        return MostProbable(ids_Nn, weights_Nn, tail_N)

    def _arrays(self, codes):
        return codes.ids_Nn, codes.weights_Nn, codes.tail_N

    def _rows(self, codes, block):
        codes = codes.to_host() if isinstance(codes.tail_N, torch.Tensor) else codes
        kept_Nn = codes.weights_Nn > 0
        indptr = np.concatenate([np.zeros(1, np.int64), kept_Nn.sum(1)]).cumsum()
        truncated = int((codes.tail_N > 0).sum())
        return Distributions(indptr, codes.ids_Nn[kept_Nn], codes.weights_Nn[kept_Nn], codes.tail_N, truncated)
