"""For distillation: the n most probable entries of the teacher's vocabulary distribution at every token.

    teacher = MaskedLm.load("google-bert/bert-base-cased")
    target = Logits(config, teacher, special_ids)

The whole masked language model reads the unmasked text, as in the official code. So no token's distribution depends on
which tokens a student masks. It is the softmax of the logits over the head's whole vocabulary, at temperature 1, in
float32. Among equal logits the lower ids are kept. The tail is summed from the dropped logits themselves, since 1 minus
the kept mass would be rounding noise if the tail is small.

With --masked the model reads the text seven times, with disjoint masks. Every coded token is masked in exactly one
pass, and its distribution is from this pass: what the model predicts from the context, without seeing the token. In
each pass one token in seven is masked, 14.3 %, close to the 15 % of masked language modelling. Which pass masks a token
follows from its window's ids and its place among the coded tokens, so it depends on no other window. The student's own
masks are different.

All logits of a batch would take a gigabyte, so the head runs on chunks of the coded tokens. Every chunk has the same
number of rows, and copies fill up the last one: matrix products of another shape may round differently, and then the
bytes would depend on which windows failed. Not handled here: the model (teacher/masked_lm.py), learning from these
distributions (student/).

Shapes: W windows, L window length, N coded tokens, n of them hidden in one pass, C tokens of a chunk, d hidden width,
V entries of the vocabulary, n of them kept.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch

from mlsm.common.errors import EncodeError
from pipeline.batch import Hidden, InputFormat, TeacherBatch, not_finite
from pipeline.config import EncodeLogitsConfig
from pipeline.job import Job, fit_teacher, name_of_dtype
from pipeline.targets.distributions import MOST_ENTRIES, Distributions, columns_of
from pipeline.teacher.masked_lm import HEAD_ROWS, MaskedLm
from shards.counter import permutation
from shards.files import StoreFiles
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES

LOGITS_BYTES = 2**27  # of one chunk in float32; their softmax takes as much again, so 256 MiB in all
COMPARED_TOKENS = 128  # tokens per product when two precisions are compared: three tables of logits
PASSES = 7  # passes of a masked reading
_PURPOSE = 0x6C674D61  # "lgMa"


@dataclass(frozen=True)
class MostProbable:
    """The n most probable entries of N tokens.

    ids_Nn      int32, increasing in each row
    weights_Nn  float32, probabilities under the softmax over the whole vocabulary; 0 if they underflow
    tail_N      float32, probability of all other entries

    Tensors on the teacher's device.
    """

    ids_Nn: torch.Tensor
    weights_Nn: torch.Tensor
    tail_N: torch.Tensor


class Logits:
    """The teacher's most probable words at every token.

    Raises  EncodeError when more entries are to be kept than there are
    """

    work = "head"

    def __init__(self, config: EncodeLogitsConfig, teacher: MaskedLm, special_ids: dict):
        self.config, self.teacher, self.layer = config, teacher, teacher.layer
        self.environment: dict = {}
        self._mask_id = special_ids["mask"] if config.masked else None
        if config.top_n != "all" and config.top_n > teacher.vocabulary:
            raise EncodeError(
                f"--top-n {config.top_n}, but {teacher.name} has a vocabulary of {teacher.vocabulary}. "
                f"Use --top-n {teacher.vocabulary} or less."
            )
        self.top_n = min(MOST_ENTRIES, teacher.vocabulary) if config.top_n == "all" else config.top_n
        fitting = LOGITS_BYTES // (4 * teacher.vocabulary)
        self._chunk = max(1, min(HEAD_ROWS, config.tokens_at_once(), fitting))

    @staticmethod
    def load_teacher(job: Job) -> MaskedLm:
        teacher = MaskedLm.load(job.config.teacher, dtype=job.config.dtype, device=job.config.device)
        fit_teacher(job, teacher)
        return teacher

    @classmethod
    def open(cls, job: Job, teacher: MaskedLm, files: StoreFiles, settings: dict) -> Self:
        return cls(job.config, teacher, job.special_ids)

    def describe_store(self, job: Job) -> tuple[str, dict]:
        teacher = self.teacher
        settings = {
            "kind": "logits",
            "format": FORMAT_VERSION,
            "windowing": job.rules,
            "teacher": teacher.fingerprint,
            "k": teacher.vocabulary,
            "top_n": self.top_n,
            "octaves": LOGITS_OCTAVES,
            "dtype": name_of_dtype(teacher),
        } | InputFormat.of(self.config, teacher).settings()
        name = f"logits-{Path(teacher.name).name}"
        if self.config.masked:  # only if masked, so that stores keep their names
            settings["masked_passes"], name = PASSES, f"{name}-masked"
        lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
        return name, job.target_json(settings, lineage, teacher.vocabulary, LOGITS_OCTAVES)

    def save_copies(self, files: StoreFiles) -> None:
        pass

    def prepare(self) -> None:
        pass

    @staticmethod
    def states(teacher: MaskedLm, batch: TeacherBatch, targets: Sequence["Logits"]) -> list[Hidden]:
        (target,) = targets
        if target._mask_id is None:
            rows_Nd = teacher(batch.ids_WL, batch.real_WL, batch.tokens_N, **batch.extra_inputs)
        else:
            rows_Nd = masked_rows(teacher, batch, target._mask_id)
        return [Hidden(teacher.layer, rows_Nd, (~rows_Nd.isfinite().all(1)).sum())]

    def code(self, rows_Nd: torch.Tensor) -> MostProbable:
        place = {"device": rows_Nd.device}
        ids_Nn = torch.empty((len(rows_Nd), self.top_n), dtype=torch.int32, **place)
        weights_Nn = torch.empty(ids_Nn.shape, dtype=torch.float32, **place)
        tail_N, log_sum_N = (torch.empty(len(rows_Nd), dtype=torch.float32, **place) for _ in range(2))
        for start in range(0, len(rows_Nd), self._chunk):
            rows_Cd = rows_Nd[start : start + self._chunk]
            filling = rows_Cd[:1].expand(self._chunk - len(rows_Cd), -1)
            found = most_probable(self.teacher.logits(torch.cat([rows_Cd, filling])), self.top_n)
            for whole, part in zip((ids_Nn, weights_Nn, tail_N, log_sum_N), found, strict=True):
                whole[start : start + self._chunk] = part[: len(rows_Cd)]
        if count := int((~log_sum_N.isfinite()).sum()):
            raise not_finite(self.teacher, f"{self.teacher.name}: the logits of {count} tokens")
        return MostProbable(ids_Nn, weights_Nn, tail_N)

    def tensors(self, codes: MostProbable) -> tuple:
        return codes.ids_Nn, codes.weights_Nn, codes.tail_N

    def columns(self, codes: MostProbable | None, batch: TeacherBatch) -> dict[str, np.ndarray]:
        if codes is None:
            return columns_of(None, batch)
        ids_Nn, weights_Nn, tail_N = (tensor.cpu().numpy() for tensor in self.tensors(codes))
        kept_Nn = weights_Nn > 0
        indptr = np.concatenate([np.zeros(1, np.int64), kept_Nn.sum(1)]).cumsum()
        rows = Distributions(indptr, ids_Nn[kept_Nn], weights_Nn[kept_Nn], tail_N, int((tail_N > 0).sum()))
        return columns_of(rows, batch)

    def variation(self, rows_Nd: torch.Tensor, exact_Nd: torch.Tensor, exact_teacher: MaskedLm) -> np.ndarray:
        pairs = zip(rows_Nd.split(COMPARED_TOKENS), exact_Nd.split(COMPARED_TOKENS), strict=True)
        parts = [
            self.teacher.logits(rows_nd).softmax(1).sub_(exact_teacher.logits(exact_nd).softmax(1)).abs_().sum(1) / 2
            for rows_nd, exact_nd in pairs
        ]
        return torch.cat(parts).cpu().double().numpy()


# -- the most probable entries -----------------------------------------------------------------------------


def most_probable(logits_CV: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The n most probable entries of each row under a softmax over the whole row; among equal logits, the lower ids.

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
    """Ids of the n largest of each row. Of several equal ones, topk returns any. So one more than n is requested: the
    choice matters only if that one equals the last of the n."""
    values_Cm, ids_Cm = logits_CV.topk(min(n + 1, logits_CV.shape[1]), dim=1)
    ids_Cn, last_C = ids_Cm[:, :n], values_Cm[:, n - 1]
    tied = torch.nonzero(values_Cm[:, -1] == last_C).flatten() if values_Cm.shape[1] > n else ()
    if len(tied):
        ids_Cn[tied] = _lower_ids_first(logits_CV[tied], ids_Cn[tied], last_C[tied], values_Cm[tied, :n])
    return ids_Cn


def _lower_ids_first(logits_CV, ids_Cn, last_C, values_Cn):
    """The n largest of each row; among entries equal to the last one, the lowest ids are chosen."""
    larger_C = (values_Cn > last_C[:, None]).sum(1)  # certain; they come first
    row_E, id_E = torch.nonzero(logits_CV == last_C[:, None], as_tuple=True)
    first_C = torch.searchsorted(row_E, torch.arange(len(last_C), device=row_E.device))
    place_E = larger_C[row_E] + torch.arange(len(row_E), device=row_E.device) - first_C[row_E]
    kept = place_E < ids_Cn.shape[1]
    ids_Cn[row_E[kept], place_E[kept]] = id_E[kept]
    return ids_Cn


# -- masked reading ----------------------------------------------------------------------------------------


def assign_passes(ids_WL: np.ndarray, tokens_N: np.ndarray) -> np.ndarray:
    """The pass, 0 to PASSES - 1, in which each coded token is hidden: int64 (N).

    tokens_N  places in ids_WL counted row by row, increasing
    """
    windows, counts = np.unique(tokens_N // ids_WL.shape[1], return_counts=True)
    orders = [
        permutation(count, _PURPOSE, zlib.crc32(np.ascontiguousarray(ids_WL[window], "<i8").tobytes()))
        for window, count in zip(windows, counts, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.int64), *orders]) % PASSES


@torch.inference_mode()
def masked_rows(teacher: "MaskedLm", batch: TeacherBatch, mask_id: int) -> torch.Tensor:
    """Hidden states (N, d) of a batch's coded tokens, each from the pass that masks it; in the form of `Teacher`.

    All passes have the shape of the batch, so a window's states do not depend on the other windows.
    """
    pass_N = torch.from_numpy(assign_passes(batch.ids_WL.numpy(), batch.tokens_N.numpy()))
    places, rows = [], []
    for number in pass_N.unique().tolist() or [0]:
        place_n = (pass_N == number).nonzero().flatten()
        tokens_n, ids_WL = batch.tokens_N[place_n], batch.ids_WL.clone()
        ids_WL.view(-1)[tokens_n] = mask_id
        places.append(place_n)
        rows.append(teacher(ids_WL, batch.real_WL, tokens_n, **batch.extra_inputs))
    back_N = torch.cat(places).argsort()
    return torch.cat(rows).index_select(0, back_N.to(rows[0].device))
