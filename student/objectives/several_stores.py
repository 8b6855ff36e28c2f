"""Several stores of one plan as the targets of one student: two layers of a teacher, or two teachers of one tokenizer.

    stores = [first, *open_beside(first, ["runs/stores/lsp-..."])]
    objective = build_objective("mlsm", stores, weights=(1.0, 0.5))

The output matrix has a block of k rows for each store, in the order of the stores. The loss is the weighted sum of the
stores' losses. Each store's loss is that of a run on this store alone: on the block's logits, divided by the number of
tokens that have a code in this store. The plan decides the order of windows and the masked tokens, so a batch is that
of a run on any one of the stores. Not handled here: what is learned from one store (objectives/).

Shapes: M masked tokens, K outputs, T loss terms, one for each store.
"""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mlsm.common.errors import RunError, StoreError
from shards.manifest import differing
from shards.reader import Store, plan_of
from shards.windows import WindowReader
from student.objectives import OBJECTIVES
from student.objectives.base import MaskedTokens, Objective


def build_objective(name: str, stores: Sequence[Store], weights: Sequence[float] = (), **settings: Any) -> Objective:
    """The objective of a run.

    stores    one, or several of one plan
    weights   of several stores: what each one's loss is multiplied with
    settings  of an Objective
    """
    parts = [OBJECTIVES[name](store, **settings) for store in stores]
    return parts[0] if len(parts) == 1 else SeveralStores(parts, stores, weights)


class SeveralTargets(NamedTuple):
    """The targets of the same tokens from several stores."""

    counts: tuple[int, ...]
    """number of non-empty rows, per store"""
    of_stores: tuple
    """the targets from each store"""


class SeveralStores(Objective):
    """One objective learned from several stores at once, with a block of outputs for each store.

    Held-out figures of the first store end in `_1`, of the second in `_2`; `loss` is the weighted sum.

    parts  one objective per store, whose outputs are all LSPs
    """

    def __init__(self, parts: Sequence[Objective], stores: Sequence[Store], weights: Sequence[float]):
        first = parts[0]
        self.parts, self.stores, self.other_stores = parts, stores, tuple(stores[1:])
        self.name = first.name
        self.learns = f"{first.learns}, of {len(stores)} stores at once"
        self.term_weights = tuple(float(weight) for weight in weights)
        self.outputs = sum(part.outputs for part in parts)
        self.lsp_columns = slice(0, self.outputs)
        self.facts = {
            "stores": [
                {"target": store.target_id, "weight": weight} | part.facts
                for part, store, weight in zip(parts, stores, self.term_weights, strict=True)
            ]
        }
        self._beside: dict[str, list[WindowReader]] = {}  # split -> the other stores' readers

    def heads(self, store: Store) -> list[tuple[slice, Store]]:
        """The block of outputs of every store."""
        widths = [part.outputs for part in self.parts]
        starts = [sum(widths[:number]) for number in range(len(widths))]
        blocks = [slice(start, start + width) for start, width in zip(starts, widths, strict=True)]
        return list(zip(blocks, self.stores, strict=True))

    def readers(self, windows: WindowReader) -> list[WindowReader]:
        """The readers of a split: the first store's, with those of the same split in the other stores.

        Raises  StoreError if their numbers of windows and tokens differ, which are equal in stores of one plan
        """
        if windows.split not in self._beside:
            assert windows.split is not None, "training reads one split"
            others = [store.split(windows.split) for store in self.other_stores]
            for other in others:
                if (len(other), other.tokens) != (len(windows), windows.tokens):
                    raise StoreError(
                        f"{other.store.path} and {windows.store.path} have the same plan, but their split "
                        f"{windows.split} has {len(other):,} and {len(windows):,} windows, {other.tokens:,} and "
                        f"{windows.tokens:,} tokens: one of them is damaged. Check both with verify-shards --full."
                    )
            self._beside[windows.split] = others
        return [windows, *self._beside[windows.split]]

    def digest(self, windows: WindowReader) -> str:
        """Hexadecimal SHA-256 over the hashes of all stores' shards of a split."""
        return hashlib.sha256("".join(reader.digest for reader in self.readers(windows)).encode()).hexdigest()

    def read_targets(self, masked: MaskedTokens) -> SeveralTargets:
        found = [
            part.read_targets(masked._replace(windows=reader))
            for part, reader in zip(self.parts, self.readers(masked.windows), strict=True)
        ]
        return SeveralTargets(sum((targets.counts for targets in found), ()), tuple(found))

    def loss_sums(self, logits_MK: Tensor, targets: SeveralTargets) -> Tensor:
        return torch.cat([part.loss_sums(*read) for part, *read in self._of_stores(logits_MK, targets)])

    def token_losses(self, logits_MK: Tensor, targets: SeveralTargets) -> tuple[Tensor, Tensor]:
        found = [part.token_losses(*read) for part, *read in self._of_stores(logits_MK, targets)]
        losses, carries = zip(*found, strict=True)
        return torch.cat(losses), torch.cat(carries)

    def measure(self, logits_MK: Tensor, targets: SeveralTargets) -> dict:
        return _join([part.measure(*read) for part, *read in self._of_stores(logits_MK, targets)])

    def _of_stores(self, logits_MK, targets):
        """The objective, the block of outputs and the targets of every store."""
        blocks = logits_MK.split([part.outputs for part in self.parts], dim=1)
        return zip(self.parts, blocks, targets.of_stores, strict=True)

    def figures(self, sums: dict, counts: tuple) -> dict:
        means = []
        for number, (part, count) in enumerate(zip(self.parts, counts, strict=True), 1):
            own = {name.removesuffix(f"_{number}"): sums[name] for name in sums if name.endswith(f"_{number}")}
            means.append(part.figures(own, (count,)))
        return self._add_loss(means)

    def baseline(self, train: WindowReader, held_out: list[SeveralTargets], directory: Path | None = None) -> dict:
        """The baselines of every store, and the weighted sum of their losses."""
        return self._add_loss(
            [
                part.baseline(reader, [targets.of_stores[number] for targets in held_out], directory)
                for number, (part, reader) in enumerate(zip(self.parts, self.readers(train), strict=True))
            ]
        )

    def _add_loss(self, figures: list[dict]) -> dict:
        """The figures of all stores, with the weighted sums of their losses."""
        losses = [name for name in ("loss", "loss_by_position") if name in figures[0]]
        pairs = list(zip(self.term_weights, figures, strict=True))
        return {name: sum(weight * found[name] for weight, found in pairs) for name in losses} | _join(figures)


def _join(figures: list[dict]) -> dict:
    """Figures of several stores in one dict: kl becomes kl_1, and kl_by_position becomes kl_1_by_position."""
    joined = {}
    for number, found in enumerate(figures, 1):
        for name, value in found.items():
            base, by_position, _ = name.partition("_by_position")
            joined[f"{base}_{number}{by_position}"] = value
    return joined


def open_beside(first: Store, places: Sequence[str]) -> list[Store]:
    """Open the other stores, each restricted to the plan of the first.

    Raises  RunError if a store has no such plan, with the differences, or is named twice; the errors of Store.open
    """
    opened: list[Store] = []
    for place in places:
        other, plan_named = Store.open(place), plan_of(place)[1]
        if plan_named is None and other.plan_id != first.plan_id:  # it may have grown since, and still have the plan
            with suppress(StoreError):
                other = Store.open(place, first.plan_id)
        if other.plan_id != first.plan_id or _reading(other) != _reading(first):
            windowing = differing(other.plan.windowing, first.plan.windowing)
            tokens = windowing or differing(_reading(other), _reading(first))
            what = (
                f"their windows differ: there {tokens}"
                if tokens
                else "they contain different text, or the same in another order"
            )
            raise RunError(
                f"{other.path} does not have the plan of {first.path} ({other.plan_id[:12]} and "
                f"{first.plan_id[:12]}): {what}. All targets of a run must be for the same windows: encode the same "
                "corpus with the same tokenizer and window settings, or name a plan that all of the stores have, "
                f"--store {first.path}/plans/<plan>.json ..."
            )
        if other.target_id in [store.target_id for store in (first, *opened)]:
            raise RunError(f"{other.path} is named twice in --store. Increase its --store-weights instead.")
        opened.append(other)
    return opened


def _reading(store: Store) -> dict:
    """The settings of a store that decide how a student reads its windows."""
    return {"vocabulary": store.vocab_size, "max_length": store.max_length, "special_ids": store.special_ids}
