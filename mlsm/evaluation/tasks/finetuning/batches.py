"""Tokenised examples, and batches of them in an order that does not depend on the model.

Examples are tokenised once per model and task. The order of the training examples depends only on (task, epoch), not on
the model, its tokenizer or the seed. So all runs of a task see the same batches; each is padded to about its longest
example. For evaluation, examples are sorted by length, and the predictions are put back in order. Not handled here: the
model (heads.py).

Shapes: N examples, W of a batch, L positions, T tokens of all examples.
"""

import bisect
import hashlib
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mlsm.common.model_checks import special_tokens
from mlsm.evaluation.tasks.finetuning.formats import Example
from shards.counter import permutation

_ORDER_PURPOSE = 0x66744F72  # "ftOr"
_CHOICE_PURPOSE = 0x66744368  # "ftCh"
_TOKENIZED_AT_ONCE = 10_000  # examples: the tokenizer needs kilobytes for each
IGNORED = -100  # torch's label for positions without loss
WIDTHS = 8  # batches are padded to a multiple of this, for few shapes, so that memory is reused


class EncodedExamples:
    """The tokenised examples of one split of a task.

    words_N  if words have labels: for every example, the positions of its words' first tokens, -1 for a word that was
             cut off or has no token; None if examples have labels
    labels   (N), float32 scores or int64 labels of the examples; if words have labels, (T), int64, the label of each
             word at its first token, IGNORED elsewhere
    pad_id   padding token
    cut      fraction of the examples that were longer than max_length
    """

    def __init__(
        self,
        lengths_N: Sequence[int],
        ids_T: np.ndarray,
        types_T: np.ndarray | None,
        words_N: list[np.ndarray] | None,
        labels: Sequence,
        pad_id: int,
        cut: float,
    ):
        """labels: for every example a number, or the list of its words' labels."""
        self.pad_id, self.cut = pad_id, cut
        self.starts = np.concatenate(([0], np.cumsum(lengths_N)))
        self.ids_T, self.types_T, self.words_N = ids_T, types_T, words_N
        if words_N is None:
            labels_N = np.array(labels)
            self.labels = labels_N.astype(np.float32 if labels_N.dtype.kind == "f" else np.int64)
        else:
            self.labels = np.full(len(ids_T), IGNORED)
            for start, first_tokens, of_words in zip(self.starts, words_N, labels, strict=False):
                has_token = first_tokens >= 0
                self.labels[start + first_tokens[has_token]] = np.asarray(of_words)[has_token]

    def __len__(self):
        return len(self.starts) - 1

    @property
    def unread(self) -> float | None:
        """The fraction of all words that were cut off or have no token; None if words have no labels."""
        if self.words_N is None:
            return None
        return float(np.mean(np.concatenate(self.words_N) < 0))

    @property
    def lengths_N(self) -> np.ndarray:
        """Tokens of every example."""
        return np.diff(self.starts)

    def batch(self, rows: np.ndarray, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], Tensor]:
        """Some examples as a model's inputs, padded to about the longest, and their labels.

        rows     int array of W examples
        Returns  ({"input_ids", "attention_mask", perhaps "token_type_ids"}: int64 (W, L), labels (W) or (W, L))
        """
        width = -(-self.lengths_N[rows].max() // WIDTHS) * WIDTHS
        place_L = np.arange(min(width, self.lengths_N.max()))  # never beyond the model's input length
        real_WL = place_L < self.lengths_N[rows][:, None]
        where_WL = np.where(real_WL, self.starts[rows][:, None] + place_L, 0)
        inputs = {"input_ids": np.where(real_WL, self.ids_T[where_WL], self.pad_id), "attention_mask": real_WL}
        if self.types_T is not None:
            inputs["token_type_ids"] = np.where(real_WL, self.types_T[where_WL], 0)
        inputs = {name: torch.from_numpy(array.astype(np.int64)).to(device) for name, array in inputs.items()}
        labels = self.labels[rows] if self.words_N is None else np.where(real_WL, self.labels[where_WL], IGNORED)
        return inputs, torch.from_numpy(labels).to(device)


def tokenise(
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    labels_words: bool,
    *,
    max_length: int,
    takes_types: bool,
) -> EncodedExamples:
    """Tokenise examples, cutting pairs at the longer sentence; with [CLS] and [SEP] if the tokenizer adds no special
    tokens, as the texts of stores have them.

    tokenizer    a fast tokenizer, as from pipeline.teacher.load_tokenizer
    takes_types  whether the model sees which sentence of a pair a token belongs to
    Returns      EncodedExamples
    """
    inner = tokenizer.backend_tokenizer
    inner.no_padding()
    inner.enable_truncation(max_length, strategy="longest_first")
    own_processor = inner.post_processor
    if not any(inner.encode("a").special_tokens_mask):
        inner.post_processor = _frame(tokenizer) or own_processor
    lengths_N, ids, types, words_N, cut = [], [], [], [], 0
    try:
        for begin in range(0, len(examples), _TOKENIZED_AT_ONCE):
            part = examples[begin : begin + _TOKENIZED_AT_ONCE]
            encodings = inner.encode_batch([_text(example) for example in part])
            lengths_N += [len(encoding) for encoding in encodings]
            cut += sum(bool(encoding.overflowing) for encoding in encodings)
            ids.append(_join(encoding.ids for encoding in encodings))
            types.append(_join(encoding.type_ids for encoding in encodings))
            if labels_words:
                words_N += [_first_tokens(e, example.first) for e, example in zip(encodings, part, strict=True)]
    finally:
        inner.post_processor = own_processor
        inner.no_truncation()
    return EncodedExamples(
        lengths_N,
        np.concatenate(ids),
        np.concatenate(types) if takes_types else None,
        words_N if labels_words else None,
        [example.label for example in examples],
        tokenizer.pad_token_id,
        cut / len(examples),
    )


def order(task: str, epoch: int, count: int) -> np.ndarray:
    """The order of a task's training examples in an epoch: int64 (N)."""
    return permutation(count, _ORDER_PURPOSE, task_number(task), epoch)


def take_examples(task: str, examples: list[Example], count: int | None) -> list[Example]:
    """`count` of a task's training examples, always the same ones, in order; all if count is None or larger."""
    if count is None or count >= len(examples):
        return examples
    return [examples[row] for row in sorted(permutation(len(examples), _CHOICE_PURPOSE, task_number(task))[:count])]


def order_digest(task: str, epochs: int, count: int) -> str:
    """SHA-256 of the orders of all epochs; equal if the batches are."""
    digest = hashlib.sha256()
    for epoch in range(epochs):
        digest.update(order(task, epoch, count).astype("<i8").tobytes())
    return digest.hexdigest()


def task_number(task: str) -> int:
    """A number for a task's name, the same on every machine."""
    return zlib.crc32(task.encode())


def batches_by_length(encoded: EncodedExamples, size: int) -> list[np.ndarray]:
    """Rows of evaluation batches, longest examples first: if memory does not suffice, this shows at once."""
    rows_N = np.argsort(-encoded.lengths_N, kind="stable")
    return [rows_N[begin : begin + size] for begin in range(0, len(rows_N), size)]


def _frame(tokenizer):
    """[CLS] text [SEP], [CLS] first [SEP] second [SEP]; None if there are no such tokens."""
    tokens = special_tokens(tokenizer)
    if not {"cls", "sep"} <= tokens.keys():
        return None
    cls, sep = tokens["cls"], tokens["sep"]
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in dict.fromkeys((cls, sep))]
    return TemplateProcessing([cls, "$A", sep], [cls, "$A", sep, "$B:1", f"{sep}:1"], special_tokens=ids)


def _join(lists):
    return np.concatenate([np.asarray(values, dtype=np.int32) for values in lists])


def _text(example):
    if isinstance(example.first, list):
        return " ".join(example.first)
    return example.first if example.second is None else (example.first, example.second)


def _first_tokens(encoding, words):
    """For every word, the position of the first token that has a character of it; -1 if there is none.

    A lone "▁" counts only if the word has no other token: SentencePiece puts it before a word, and the tokenizer gives
    it the place of the word's first character.
    """
    begins = np.concatenate(([0], np.cumsum([len(word) + 1 for word in words])))[:-1].tolist()
    first, tokens = np.full(len(words), -1), encoding.tokens
    for place, (begin, end) in enumerate(encoding.offsets):
        if begin == end or encoding.special_tokens_mask[place]:
            continue
        word = bisect.bisect_right(begins, end - 1) - 1  # by its end: a token may start with a space
        if first[word] < 0 or tokens[first[word]] == "▁":
            first[word] = place
    return first
