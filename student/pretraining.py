"""Pre-training in a loop of your own: a collator and a model for transformers.Trainer, accelerate and Lightning.

    train, held = LspWindows(store), LspWindows(store, "held_out")                 # shards/torch_dataset.py
    model = LspForPreTraining.from_encoder("bert-6x256", store)
    collator = LspCollator(store, mask_rate=0.15, seed=42)
    Trainer(model, args, train_dataset=train, eval_dataset=held, data_collator=collator).train()
    model.export("export")                                                         # the files of train-student

Masks, first weights, head and loss are those of train-student (objective mlsm). The mask of a window is a function of
(seed, epoch, window), so it does not depend on rank, worker or batch. Held-out windows have the mask that train-student
evaluates with, regardless of the seed. Every tensor of a batch starts with the batch and has a shape that follows from
the store and the mask rate, so accelerate can split batches and join them. Not handled here: other objectives,
schedules of masks and their weights (see train.py), weights that are sharded over processes (FSDP, DeepSpeed's stage
3).

Shapes: B windows, L positions, M the most masked positions of a window, N the most entries of a token, T masked tokens
of a batch, k LSPs.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from mlsm.common.durable import publish_directory
from mlsm.common.errors import RunError
from mlsm.common.model_checks import token_types, without_pooler
from shards.codec import pad_rows
from shards.reader import Store, open_store
from shards.schema import MAX_ENTRIES
from shards.torch_dataset import WindowTensors
from student.batches import Loader, store_has_pairs
from student.config import MaskUnit, ResolvedConfig, StudentConfig
from student.encoders.model import Student, build_student
from student.held_out import MASK_SEED
from student.masks.masking import build_masking, check_rate
from student.objectives.mlsm import Mlsm
from student.runs.export import check_export_place, export_student, writing

NO_TARGET = -100  # a label that carries no loss, as everywhere in transformers: Trainer counts the others


class LspCollator:
    """Masks windows and reads the targets of the masked tokens only.

    store      the store of the windows
    mask_rate, seed, mask_unit, corruption    as of train-student
    Raises     ValueError on settings that make no sense; RunError when the store holds no LSPs

    A batch is a dict of tensors:

    input_ids, attention_mask   int64 (B, L): what the student sees, padded to the store's longest window
    token_type_ids              int64 (B, L), of a store of sentence pairs: 0 in the first sentence, 1 in the second
    positions                   int64 (B, M): the masked positions, ascending, then -1
    labels                      int64 (B, M): the tokens that are masked there; -100 if there is no target
    lsp_indices, lsp_weights    int64 and float32 (B, M, N): their distributions, then entries of weight 0
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        mask_rate: float = 0.15,
        seed: int = 42,
        mask_unit: MaskUnit = "token",
        corruption: str = "mask",
    ):
        self.store = open_store(store)
        masks: dict[str, Any] = {"mask_rate": mask_rate, "seed": seed, "mask_unit": mask_unit, "corruption": corruption}
        config = StudentConfig(max_steps=1, **masks)
        check_rate(config, self.store)
        self.seed, self.masking = seed, build_masking(cast(ResolvedConfig, config), self.store)
        self.objective = Mlsm(self.store)
        self.most_masked = int(np.rint(mask_rate * self.store.max_length))
        top_n = self.store.settings.get("top_n")
        self.most_entries = min(self.store.k, top_n if isinstance(top_n, int) else MAX_ENTRIES)

    def __call__(self, items: Sequence[WindowTensors]) -> dict[str, Tensor]:
        """The batch of these windows. Raises ValueError if they are not all windows of one split of the store."""
        windows = _reader_of(items, self.store)
        loader = Loader(
            windows,
            self.masking,
            self.objective.read_targets,
            micro_batch=len(items),
            segments=store_has_pairs(self.store),
            by_token=True,
        )
        numbers_B, epochs_B = (np.array([getattr(item, name) for item in items]) for name in ("number", "epoch"))
        seed = self.seed if windows.split == "train" else MASK_SEED
        (micro,) = loader.load(numbers_B, epochs_B, seed, self.masking.rate).micro
        input_BL, targets = micro.input_WL, micro.targets
        counts_B = np.bincount(micro.where_M.numpy() // input_BL.shape[1], minlength=len(items))
        row_E, index_E = np.divmod(targets.entries_E.numpy(), self.store.k)
        entries_T = np.bincount(row_E, minlength=len(micro.where_M))
        label_T = np.where(entries_T > 0, cast(Tensor, micro.ids_M).numpy(), NO_TARGET)

        def by_window(values_T: np.ndarray, fill: int = 0) -> Tensor:
            return torch.from_numpy(pad_rows(counts_B, values_T, self.most_masked, fill))

        pairs = {} if micro.segments_WL is None else {"token_type_ids": micro.segments_WL}
        return {
            "input_ids": input_BL,
            "attention_mask": torch.ones_like(input_BL) if micro.attention_WL is None else micro.attention_WL,
            **pairs,
            "positions": by_window(micro.where_M.numpy() % input_BL.shape[1], -1),
            "labels": by_window(label_T, NO_TARGET),
            "lsp_indices": by_window(pad_rows(entries_T, index_E, self.most_entries)),
            "lsp_weights": by_window(pad_rows(entries_T, targets.weights_E.numpy(), self.most_entries)),
        }


def _reader_of(items, store):
    """The reader that all these windows are from."""
    if strange := next((item for item in items if not isinstance(item, WindowTensors)), None):
        raise ValueError(
            f"LspCollator needs windows from mlsm.LspWindows, found {type(strange).__name__}. Pass an mlsm.LspWindows "
            "as dataset."
        )
    windows = items[0].windows
    if any(item.windows is not windows for item in items):
        raise ValueError(
            "a batch has windows of several datasets. Use one LspWindows for each split, and a loader for each."
        )
    if (windows.store.target_id, windows.store.plan_id) != (store.target_id, store.plan_id):
        raise ValueError(
            f"the windows are from {windows.store.path}, the collator is for {store.path}. Open both on the same store."
        )
    return windows


class LspConfig(PretrainedConfig):
    """The parts of an LspForPreTraining.

    encoder   the encoder's configuration
    lsps      k
    store     path of the store that it learned from
    target    fingerprint of that store's targets, which decides what the LSPs are
    plan      fingerprint of the plan of its text
    settings  for the card of an export: encoder by name, seed, dropout
    """

    model_type = "mlsm-pretraining"
    sub_configs = {"encoder": AutoConfig}

    def __init__(
        self,
        encoder: PretrainedConfig | dict | None = None,
        lsps: int = 0,
        store: str = "",
        target: str = "",
        plan: str = "",
        settings: dict | None = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)  # first: it sets the attention of sub-configurations to its own, which is none
        if isinstance(encoder, dict):
            encoder = AutoConfig.for_model(**encoder)
        self.encoder, self.lsps, self.settings = encoder, lsps, settings or {}
        self.store, self.target, self.plan = store, target, plan


@dataclass
class LspOutput(ModelOutput):
    """The output of an LspForPreTraining."""

    loss: Tensor | None = None
    """nats per masked token that has a target"""
    logits: Tensor | None = None
    """(B, M, k) at the positions that were given; where these are -1, they mean nothing"""


class LspForPreTraining(PreTrainedModel):
    """The model that train-student trains, as a transformers model: maps LspCollator batches to loss and logits.

    Trainer saves it with `save_pretrained` and resumes from that; `from_pretrained` loads such a checkpoint.
    """

    config_class = LspConfig
    base_model_prefix = "student"
    accepts_loss_kwargs = True  # Trainer then passes how many labels the whole effective batch has
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = True  # the encoder has chosen

    def __init__(self, config: LspConfig, student: Student | None = None):
        super().__init__(config)
        if student is None:
            if config.encoder is None:
                raise RunError(
                    "not a checkpoint that Trainer saved of an LspForPreTraining. mlsm.LspModel loads exports, and "
                    "mlsm.train_student(continue_from=...) trains them further."
                )
            encoder = AutoModel.from_config(config.encoder, **without_pooler(config.encoder))
            student = Student(encoder, config.lsps, tied=False, seed=0).to(encoder.dtype)
        self.student = student
        config.encoder = student.encoder.config
        self._has_segments = token_types(config.encoder) >= 2
        self.store: Store | None = None
        if next(student.parameters()).device.type != "meta":  # there, transformers loads or makes the weights itself
            for module in student.modules():
                module._is_hf_initialized = True
        self.post_init()

    @classmethod
    def from_encoder(
        cls,
        encoder: str | os.PathLike[str],
        store: Store | str | os.PathLike[str],
        *,
        seed: int = 42,
        dropout: float | None = None,
    ) -> "LspForPreTraining":
        """An untrained student for a store's LSPs, with the first weights of `train-student --seed`.

        encoder  see train-student: bert-6x256, a directory, a Hub id, ... Its configuration is read, not its weights
        dropout  of the encoder; None: what its config says
        Raises   RunError when the store holds no LSPs, or does not fit the encoder
        """
        store = open_store(store)
        objective = Mlsm(store)
        config = StudentConfig(encoder=os.path.expanduser(encoder), seed=seed, dropout=dropout)
        student = build_student(config, store, objective)
        settings = {"encoder": config.encoder, "seed": seed, "dropout": dropout}
        known = {"store": str(store.path), "target": store.target_id, "plan": store.plan_id, "settings": settings}
        model = cls(LspConfig(student.encoder.config, lsps=objective.outputs, **known), student)
        model.store = store
        return model

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        positions: Tensor | None = None,
        labels: Tensor | None = None,
        lsp_indices: Tensor | None = None,
        lsp_weights: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
    ) -> LspOutput:
        """The logits whose softmax is Q and, if there are labels, KL(P || Q) per masked token with a target.

        positions           None: all; the logits are then (B, L, k)
        num_items_in_batch  what the sum over tokens is divided by: the labels of the whole effective batch, which
                            Trainer counts; None: those of this batch
        The other arguments are as an LspCollator makes them.
        Raises              RunError in a replica of torch.nn.DataParallel
        """
        if getattr(self, "_is_replica", False):
            raise RunError(
                "one process trains on several GPUs (torch.nn.DataParallel), which this model does not support. Start"
                " one process per GPU: torchrun --nproc-per-node GPUS SCRIPT, or use one GPU: CUDA_VISIBLE_DEVICES=0."
            )
        windows, length = input_ids.shape
        if positions is None:
            positions = torch.arange(length, device=input_ids.device).expand(windows, length)
        first_B1 = torch.arange(0, windows * length, length, device=input_ids.device)[:, None]
        where_BM = first_B1 + positions.cummax(dim=1).values.clamp(min=0)  # after the last position, that one again
        logits_BMk = self.student(
            input_ids,
            attention_mask,
            where_BM.flatten(),
            most_masked=positions.shape[1],
            segments_WL=token_type_ids if self._has_segments else None,
        ).view(*positions.shape, self.config.lsps)
        if labels is None or lsp_indices is None or lsp_weights is None:
            return LspOutput(logits=logits_BMk)
        coded_BM = labels != NO_TARGET
        p_BMN = lsp_weights * coded_BM[..., None]
        log_q_BMN = logits_BMk.float().log_softmax(dim=2).gather(2, lsp_indices)
        divergence = (torch.xlogy(p_BMN, p_BMN) - p_BMN * log_q_BMN).sum()
        count = coded_BM.sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
        return LspOutput(loss=divergence / count.clamp(min=1), logits=logits_BMk)

    def export(
        self,
        directory: str | os.PathLike[str],
        *,
        store: Store | str | os.PathLike[str] | None = None,
        lineage: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the files of an export of train-student, whole or not at all. Only the first of several processes does.

        directory  new, or an earlier export, which is replaced
        store      where the store is now, if it is no longer where it was
        lineage    what the model card and comparisons should report about the run: step (optimiser steps), tokens,
                   flops, held_out and baseline (figures by name), settings (added to the model's own)
        Raises     TypeError at another name in lineage; RunError if the directory has other files, or the store is not
                   the one of this model; WriteError if the files cannot be written
        """
        if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
            return
        known = dict(lineage or {})
        unknown: dict[str, Any] = {"step": None, "tokens": None, "flops": None, "held_out": {}, "baseline": {}}
        if strange := known.keys() - unknown.keys() - {"settings"}:
            raise TypeError(f"lineage has no {', '.join(sorted(strange))}. It has: {', '.join(unknown)}, settings.")
        of = store or self.store or self.config.store
        of = of if isinstance(of, Store) else Store.open(of, self.config.plan)
        if (of.target_id, of.plan_id) != (self.config.target, self.config.plan):
            raise RunError(
                f"{of.path} is not the store that this model learned from: its target and plan are {of.target_id} and"
                f" {of.plan_id}, expected {self.config.target} and {self.config.plan}. Pass that store as store=."
            )
        segments = {"segments": True} if self._has_segments and store_has_pairs(of) else {}
        settings = {"objective": "mlsm", **self.config.settings, **segments, **known.pop("settings", {})}

        def write(new: Path) -> None:
            export_student(self.student, new, Mlsm(of), of, {**unknown, **known, "settings": settings})

        place = Path(directory).expanduser()
        check_export_place(place, "Nothing was changed. Choose another directory.")
        with writing(place):
            publish_directory(place, write)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The token embeddings of the encoder."""
        return self.student.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: torch.nn.Module) -> None:
        """Replace the token embeddings of the encoder, as `resize_token_embeddings` does."""
        self.student.encoder.set_input_embeddings(value)
