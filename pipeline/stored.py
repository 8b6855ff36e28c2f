"""A store of hidden states that replaces text and teacher for encode-lsp, learn-dictionary and encode-hidden, when
--hidden names one.

    stored = StoredHidden.open("runs/stores/hidden-...", "cpu")
    config = stored.settle(config)                 # its windows and layer in the settings; ValueError if they differ
    for window in stored.windows(unit): ...        # with their numbers, by which `read` finds their hidden states

The windows are those of the store's plan, so a store that is coded from them pairs with it. Windows that its records
name as failed have no hidden states, and fail again. Not handled here: uses of the states (batch.py, sample.py),
--hidden with a .npy file (learn.py).

Shapes: W windows, N coded tokens, d hidden width.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from mlsm.common.device import choose_device
from mlsm.common.errors import RequestError
from mlsm.common.invocation import program
from mlsm.common.text import redacted, words_of
from pipeline.config import FROM_STORE
from pipeline.corpus import Window
from shards.manifest import PlannedUnit
from shards.reader import Store, is_url, plan_of
from shards.windows import WindowReader


class _Records(NamedTuple):
    """What the store's records say, read once, so that all of it is of the same encoding."""

    windows: WindowReader
    """the windows of both splits, numbered in plan order"""
    shards: dict[str, str]
    """unit -> sha256 of its shard"""
    failed: dict[str, dict[int, str]]
    """unit -> the windows without states, by their number in it, with the reason"""


def names_a_store(hidden: str) -> bool:
    """Whether --hidden names a store, and not a file of vectors."""
    place, plan = plan_of(hidden)
    return is_url(hidden) or plan is not None or Path(place).is_dir()


class StoredHidden:
    """The hidden states of one plan of a store. It has a Teacher's interface, and can be sent to other processes.

    Raises  StoreError when there is no such store; RequestError when it holds something else
    """

    libraries = None  # no matrix products, so no libraries

    def __init__(self, path: str, plan_id: str | None, device: str):
        self._path = path if is_url(path) else str(Path(path).absolute())
        self._plan_id, self._device = plan_id, device
        if self.store.hidden is None:
            raise RequestError(
                f"--hidden {redacted(path)} is a store of {self.store.kind}, not of hidden states. Make one:  "
                f"{program()} encode-hidden"
            )
        self._plan_id = self.store.plan_id
        settings, width = self.store.settings, self.store.hidden.width
        self.name = settings.get("teacher_name", self.store.path)
        self.fingerprint, self.layer, self.num_layers = (
            settings["teacher"],
            settings["layer"],
            settings["teacher_layers"],
        )
        self.hidden_size, self.segments = width, 2 if settings.get("segments") else 0
        self.dtype, self.device = getattr(torch, settings["dtype"]), choose_device(device)

    @classmethod
    def open(cls, hidden: str, device: str) -> "StoredHidden":
        return cls(*plan_of(hidden), device)  # type: ignore[arg-type]  # of a text a text

    def __reduce__(self) -> tuple:
        return StoredHidden, (self._path, self._plan_id, self._device)

    @cached_property
    def store(self) -> Store:
        return Store.open(self._path, self._plan_id)

    @cached_property
    def _read(self) -> "_Records":
        shards, failed = {}, {}

        def noted():
            for record in self.store.iter_records():
                shards[record.unit] = record.sha256
                windows = ((window, entry["reason"]) for entry in record.quarantined for window in entry["windows"])
                failed[record.unit] = dict(windows)
                yield record

        return _Records(WindowReader(self.store, noted(), None), shards, failed)

    def identity(self) -> dict:
        """The settings of a store that was made from this one."""
        return {"target": self.store.target_id, "quantise": self.store.fingerprinted["quantise"]}

    def settle(self, config: Any) -> Any:
        """The settings of a command, with text and teacher filled in from the store; a recipe's are ignored.

        Raises  ValueError if a setting of the user's own contradicts the store or would have no effect
        """
        settings, windowing = self.store.settings, self.store.plan.windowing
        own = {
            "layer": (self.layer,),
            "max_length": self.store.max_length,
            "packing": windowing["packing"],
            "held_out_by": windowing.get("held_out_by", "document"),
            "documents_apart": settings.get("documents_apart", False),
            "dtype": settings["dtype"],
        }
        settled = copy(config)
        for field in fields(config):
            name, value = field.name, getattr(config, field.name)
            if name not in FROM_STORE:
                continue
            known, origin = {"teacher": self.name} | own, config.origins.get(name)
            if origin not in (None, "flag"):  # a recipe's value, which is for commands that read text
                value = field.default
            fitting = [known.get(name, field.default)]
            if origin != "flag":  # it may not have been given at all
                fitting.append(field.default)
            if value not in fitting:
                found = f", whose {name.replace('_', '-')} is {words_of(known[name])}" if name in known else ""
                raise ValueError(
                    f"--{name.replace('_', '-')} {words_of(value)} applies only when a teacher reads text; --hidden "
                    f"takes windows and hidden states from {redacted(self._path)}{found}. Omit it."
                )
            object.__setattr__(settled, name, own.get(name, value))
        origins = {name: origin for name, origin in config.origins.items() if name not in FROM_STORE}
        object.__setattr__(settled, "origins", origins | dict.fromkeys(("corpus", "teacher", "layer"), "store"))
        if config.batch_tokens is not None and config.batch_tokens < self.store.max_length:
            raise ValueError(
                f"--batch-tokens {config.batch_tokens} is less than one window of {self.store.max_length} tokens."
            )
        return settled

    # -- instead of text ------------------------------------------------------------------------------

    @cached_property
    def tokens(self) -> int:
        return self._read.windows.tokens

    def windows(self, unit: PlannedUnit) -> Iterator[Window]:
        """The windows of a planned unit, with their numbers."""
        return (Window(*found) for found in self._read.windows.windows_of_unit(unit.id))

    def failures(self, unit: PlannedUnit) -> dict[int, str]:
        """The windows of a unit that have no hidden states, by their number in it, with the reason."""
        return self._read.failed[unit.id]

    def sha256(self, unit: PlannedUnit) -> str:
        """The identity of the shard that holds a unit; it changes when the unit is encoded again."""
        return self._read.shards[unit.id]

    # -- instead of a teacher -------------------------------------------------------------------------

    def read(self, batch: Any, number_W: np.ndarray) -> torch.Tensor:
        """The stored states of a TeacherBatch's coded tokens, float32 (N, d) on the host; NaN at those that have none.

        number_W  the numbers of the batch's windows, as `windows` gives them
        """
        length = batch.ids_WL.shape[1]
        tokens_N = batch.tokens_N.numpy()
        found = self._read.windows.hidden_at(number_W[tokens_N // length], tokens_N % length)
        found.rows_Md[~found.coded_M] = np.nan  # detected like a teacher's NaN
        return torch.from_numpy(found.rows_Md)

    def __call__(self, ids_WL: torch.Tensor, real_WL: Any, tokens_N: torch.Tensor, **extra: Any) -> torch.Tensor:
        """The states in a batch, copied to the device."""
        rows_Nd: torch.Tensor = extra["rows_Nd"]
        return rows_Nd.to(self.device, copy=True)
