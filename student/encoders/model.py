"""The student: an encoder, its family's prediction head, an output matrix.

Only the hidden states of masked positions go through the head. The encoder is initialised first, from a
generator of its own, so that its weights are the same for every objective with one seed.

Not handled here: which encoder (build.py), the head's layers (modeling_mlsm.py, which exports take along), the linear
probe, saving (export.py).

Shapes: W windows, L positions, M masked tokens, d hidden width, K outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mlsm.common.device import spare_randomness
from mlsm.common.documents import attention_inputs
from mlsm.common.matrix_products import USUAL
from shards.counter import hash_u64
from shards.reader import Store
from student.config import StudentConfig
from student.encoders.build import build_encoder, encoder_config
from student.encoders.deberta import adapt_deberta
from student.encoders.flops import forward_flops
from student.encoders.last_layer import LastLayer
from student.encoders.linear import linear, use_fast_linear
from student.encoders.mask_later import MaskLater
from student.encoders.modeling_mlsm import PredictionHead
from student.objectives.base import Objective

_HEAD_PURPOSE = 0x68656164  # "head"


class Student(nn.Module):
    """Encoder, head and output matrix.

    outputs  K, the rows of the output matrix
    tied     whether the first rows of the output matrix, one for each token, are the token embedding; the student's own
             parameters are then only the rows after them, and none where K is the vocabulary
    """

    def __init__(self, encoder: nn.Module, outputs: int, *, tied: bool, seed: int):
        super().__init__()
        embedding_width = encoder.get_input_embeddings().weight.shape[1]
        self.encoder = encoder
        with spare_randomness():  # a module begins with random weights, which are replaced below
            self.head = PredictionHead(encoder.config, embedding_width).float()  # whatever torch's default type is
        self.tied = tied
        own_rows = outputs - encoder.get_input_embeddings().weight.shape[0] if tied else outputs
        self.output_Kd = nn.Parameter(torch.empty(own_rows, embedding_width, dtype=torch.float32)) if own_rows else None
        self.output_bias_K = nn.Parameter(torch.zeros(outputs, dtype=torch.float32))
        self._initialise_head(seed)
        self._last_layer, self._mask_later = LastLayer(encoder), MaskLater(encoder)
        adapt_deberta(encoder)
        # It would read every batch back from a GPU; windows without an attention mask have no padding.
        encoder.warn_if_padding_and_no_attention_mask = _warn_never
        self.libraries = USUAL  # `use_fast_linear` may set others
        use_fast_linear(self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, K) of the masked positions; for the arguments see `hidden`."""
        states_Md, parts = self.head(self.hidden(*args, **kwargs)), self._output_parts()
        biases = self.output_bias_K.split([len(part) for part in parts])
        logits = [linear(states_Md, part, bias, self.libraries) for part, bias in zip(parts, biases, strict=True)]
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)

    def hidden(
        self,
        input_WL: Tensor,
        attention_WL: Tensor | None,
        where_M: Tensor,
        documents_WL: Tensor | None = None,
        most_masked: int | None = None,
        segments_WL: Tensor | None = None,
        visible: tuple[int, int] | None = None,
    ) -> Tensor:
        """The encoder's last hidden states (M, d) at the masked positions.

        input_WL      int64 token ids
        attention_WL  int64, 0 at padding; None if nothing is padded
        where_M       int64 positions in the flattened (W L) input, ascending
        documents_WL  int64 documents to keep apart, -1 at padding; None: windows are read as one text
        most_masked   the most masked positions of a window; counted when it is not given
        segments_WL   int64 token types, 0 or 1; None: every token has type 0
        visible       of an encoder that [MASK] enters later: as of MaskLater.pack
        """
        if most_masked is None:
            most_masked = int(torch.bincount(where_M // input_WL.shape[1], minlength=1).max())
        inputs = {"input_ids": input_WL} | attention_inputs(self.encoder, attention_WL, documents_WL)
        if segments_WL is not None:
            inputs["token_type_ids"] = segments_WL
        self._mask_later.pack(input_WL, attention_WL, documents_WL, visible)
        restricted = self._last_layer.restrict(where_M, most_masked)
        try:
            hidden = self.encoder(**inputs).last_hidden_state
        finally:
            self._last_layer.release()
            self._mask_later.release()
        return hidden if restricted else hidden.flatten(0, 1)[where_M]

    def checkpoint_activations(self) -> None:
        """Let the backward pass compute the activations of all layers but the last again, instead of keeping them."""
        encoder = self.encoder
        enable = getattr(encoder, "activation_checkpointing_enable", None) or encoder.gradient_checkpointing_enable
        enable({"use_reentrant": False})  # by its newer name where transformers has it

    def training_flops(self, windows: int, length: int, masked: int) -> int:
        """Operations of a forward and backward pass over windows of a length."""
        return 3 * forward_flops(self, windows, length, masked)

    @property
    def output_shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs (d, K) of the matrix products outside linear layers."""
        return [(part.shape[1], part.shape[0]) for part in self._output_parts()]

    @property
    def output_matrix(self) -> Tensor:
        """The (K, d) output matrix; a copy where only its first rows are the token embedding."""
        parts = self._output_parts()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _output_parts(self) -> list:
        """The output matrix by rows: those of the token embedding, then the student's own."""
        embedding = [self.encoder.get_input_embeddings().weight] if self.tied else []
        return embedding + ([] if self.output_Kd is None else [self.output_Kd])

    def _initialise_head(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(int(hash_u64(_HEAD_PURPOSE, seed)))
        spread = getattr(self.encoder.config, "initializer_range", 0.02)
        nn.init.normal_(self.head.dense.weight, std=spread, generator=generator)
        if self.head.dense.bias is not None:
            nn.init.zeros_(self.head.dense.bias)
        if self.output_Kd is not None:
            nn.init.normal_(self.output_Kd, std=spread, generator=generator)


def _warn_never(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Instead of transformers' warning of a missing attention mask: nothing."""


class FrozenEncoder(Student):
    """An encoder of any student for a probe: its outputs are its last hidden states, it has no head."""

    def __init__(self, encoder: nn.Module):
        super().__init__(encoder, 0, tied=False, seed=0)
        self.head = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Hidden states (M, d) of the masked positions; arguments as of a Student."""
        return self.hidden(*args, **kwargs)


def build_student(config: StudentConfig, store: Store, objective: Objective) -> Student:
    """The untrained student of a run, float32, on the CPU."""
    encoder = build_encoder(encoder_config(config, store), config.seed, config.initial_weights)
    return Student(encoder, objective.outputs, tied=objective.tied, seed=config.seed)
