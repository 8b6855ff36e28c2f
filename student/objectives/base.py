"""The base class of objectives: the interface that the training loop uses.

An objective says which stores it learns from, how many outputs it has, which targets it reads, its loss terms
*summed* over tokens, and what a constant prediction would score. The trainer divides every sum by the count of its
term over the whole effective batch, so that a mean does not depend on micro-batches or ranks. Losses are in nats,
except those of objectives that learn vectors (vectors.py).
Not handled here: the objectives themselves, and one objective on several stores at once (several_stores.py).

Shapes: M masked tokens, K outputs, V vocabulary, k LSPs, T loss terms.
"""

import logging
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from mlsm.common.errors import RunError
from mlsm.common.invocation import program
from shards.codec import HiddenRows, SparseRows
from shards.reader import Store
from shards.windows import WindowBatch, WindowReader
from student.objectives import OBJECTIVES

logger = logging.getLogger(__name__)

_HOLDS = {
    "ids": "token ids only",
    "lsp": "LSP distributions",
    "logits": "a teacher's distributions over its vocabulary (encode-logits)",
    "hidden": "a teacher's hidden states (encode-hidden)",
}


class MaskedTokens(NamedTuple):
    """M masked tokens of the windows in `read`: read.ids[window_M, position_M]."""

    windows: WindowReader
    read: WindowBatch
    window_M: np.ndarray
    position_M: np.ndarray

    def ids(self) -> np.ndarray:
        """Their token ids, int64 (M)."""
        return self.read.ids[self.window_M, self.position_M].astype(np.int64)

    def rows(self) -> SparseRows:
        """Their distributions as the store keeps them."""
        return self.windows.targets(self.read, self.window_M, self.position_M)

    def hidden(self) -> HiddenRows:
        """Their hidden states as the store keeps them."""
        return self.windows.hidden(self.read, self.window_M, self.position_M)


class Objective:
    """The part that all objectives share.

    kappa     weight of predicting words relative to the other target of mtl and regress, None: the usual one; the other
              objectives ignore it
    untied    whether the vocabulary, if it has outputs, has output rows of its own
    settings  its own (Facts.settings): each becomes the attribute of its name
    Raises    RunError if the store does not hold what the objective needs; TypeError at a setting of another objective
    """

    name: str
    tied = False
    """whether the first outputs are the vocabulary, with the token embedding as their rows of the output matrix"""
    term_weights: tuple[float, ...] = (1.0,)
    """the loss is the sum over terms of weight x (summed loss / count)"""
    learns: str
    """a description of the training objective, for model cards"""
    loss_name: str
    """name of its held-out loss"""
    reference: str
    """description of the constant prediction that `baseline` scores"""
    reference_by_position: str | None = None
    """description of the prediction that is constant at each position, if `baseline` scores one"""
    reference_by_type: str | None = None
    """description of the prediction that is constant for each token id, if `baseline` scores one"""
    unit = "nats per predicted token"
    """unit of the loss, for people"""
    guess = "most frequent token"
    """what the baseline's accuracy always predicts, if there is one"""
    outputs: int
    token_columns: slice | None = None
    """the outputs that are logits of the vocabulary, if any"""
    lsp_columns: slice | None = None
    """the outputs that are logits of the LSPs, if any"""
    other_stores: tuple[Store, ...] = ()
    """stores that it learns from in addition to the first one (several_stores.py)"""

    def __init__(
        self,
        store: Store,
        kappa: float | None = None,
        *,
        untied: bool = False,
        **settings: Any,
    ):
        if store.kind not in self.kinds:
            raise RunError(
                f"objective {self.name} needs a store of {_HOLDS[self.kinds[0]]}, but {store.path} contains "
                f"{_HOLDS[store.kind]}. Make one:  {program()} encode-{self.kinds[0]}   or train with another "
                "--objective."
            )
        if "ids" not in self.kinds and not any(one.statistics["coded_tokens"] for one in store.iter_records()):
            raise RunError(
                f"{store.path}: no token has a target, as of text that the teacher's tokenizer does not know. Encode "
                "other text, or use a teacher that knows its script."
            )
        facts = OBJECTIVES[self.name]
        if foreign := settings.keys() - {*facts.settings}:
            raise TypeError(f"objective {self.name} has no setting {', '.join(sorted(foreign))}")
        vars(self).update(settings)
        self.kappa, self.untied = kappa if kappa is not None else facts.kappa or 0.0, untied
        self.facts: dict = {}  # facts about the targets, for the log
        self.set_up(store)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of store that it learns from."""
        return OBJECTIVES[self.name].kinds

    def set_up(self, store: Store) -> None:
        """Set the attributes that depend on the store, at least `outputs`."""
        raise NotImplementedError

    def _check_mass(self, store: Store, enough: float, of: str) -> None:
        """Note how much of the distributions the store keeps, and warn if it is little.

        of  what these distributions are and what happens to the rest of them, for the warning
        """
        kept = self.facts["mass_kept"] = store.report()["mass_kept"]
        if kept < enough:
            logger.warning(
                "%s keeps %.1f %% of %s; at least %.0f %% is advised: encode-%s with a larger --top-n",
                store.path,
                100 * kept,
                of,
                100 * enough,
                store.kind,
            )

    def heads(self, store: Store) -> list[tuple[slice, Store]]:
        """The outputs that are logits of LSPs, with the store that these LSPs are from: one pair for each store."""
        return [] if self.lsp_columns is None else [(self.lsp_columns, store)]

    def prepare(self, train: WindowReader, directory: Path | None) -> None:
        """Compute from the training split what targets need in addition to the store's rows, before the first batch.

        directory  where it may be kept for other runs; None: nowhere
        """

    def identity(self) -> dict:
        """What the targets depend on in addition to settings and stores, by names of settings. It is part of a run's
        identity."""
        return {}

    def digest(self, windows: WindowReader) -> str:
        """A key of the bytes that a split's targets are read from: it changes when they change."""
        return windows.digest

    def read_targets(self, masked: MaskedTokens) -> Any:
        """Targets of these tokens, such as SparseTargets (mlsm.py). Their `counts` are tokens, one number per term."""
        raise NotImplementedError

    def loss_sums(self, logits_MK: Tensor, targets: Any) -> Tensor:
        """Every term's loss summed over tokens: float32 (T)."""
        raise NotImplementedError

    def token_losses(self, logits_MK: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        """Every term's loss of each token, float32 (T, M), and whether the token carries it, (T, M) of 0 and 1.

        No gradient is computed. The sums over tokens are `loss_sums` and the targets' counts.
        """
        raise NotImplementedError

    def measure(self, logits_MK: Tensor, targets: Any) -> dict:
        """Held-out figures summed over tokens: name -> scalar tensor."""
        raise NotImplementedError

    def figures(self, sums: dict, counts: tuple) -> dict:
        """The means of the sums from `measure`, as plain numbers, including `loss`."""
        return {name: float(total) / max(counts[0], 1) for name, total in sums.items()}

    def baseline(self, train: WindowReader, held_out: list, directory: Path | None = None) -> dict:
        """The figures of a constant prediction, learned from the training split, on the held-out targets.

        Figures with names in `_by_position` are of a prediction that is constant at each position of the window, those
        in `_by_type` of one that is constant for each token id. An objective has at most one of the two.

        directory  where averages by position are kept for the next run; None: not kept
        """
        raise NotImplementedError


def smoothed_mean(train_windows: WindowReader, outputs: int) -> np.ndarray:
    """Average stored distribution of a split, smoothed by one uniform token; float64 (outputs)."""
    tokens = train_windows.tokens
    return (train_windows.mean_distribution() * tokens + 1 / outputs) / (tokens + 1)


def with_perplexity(figures: dict, cross_entropy: str) -> dict:
    """Add the perplexity of a cross-entropy, capped at exp(700), beyond which exp overflows."""
    return figures | {"perplexity": math.exp(min(figures[cross_entropy], 700.0))}
