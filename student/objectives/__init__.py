"""The objectives: what a student learns at a masked token. One file per objective, and here their list.

    OBJECTIVES["mlsm"](store)            # the objective itself, for training; imports its file now
    OBJECTIVES["mlsm"].kinds             # a fact for settings, help, studies and comparisons

To add an objective, write its file (docs/add-an-objective.md) and add its row below: choices, help,
validation, labels and default stores follow from the row. The facts are here and not in the classes because --help and
`compare` read them, and importing torch takes seconds.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shards.schema import KINDS

if TYPE_CHECKING:
    from student.objectives.base import Objective


@dataclass(frozen=True, kw_only=True)
class Facts:
    """The facts about an objective that do not depend on a store."""

    name: str
    """its file has this name, with underscores"""
    cls: str
    """name of the class in that file"""
    target: str
    """what is learned about a predicted token, for --help"""
    label: str
    """its name in tables and figures"""
    kinds: tuple[str, ...]
    """kinds of store that it learns from, the plainest first: encode-<kind> makes them"""
    lsps: bool = False
    """whether it has an output for every LSP"""
    vocabulary: bool = False
    """whether it has an output for every token: `untied` is for these"""
    words: bool = False
    """whether its students predict words without a probe (regress also does with kappa, but no study uses this)"""
    all_positions: bool = False
    """whether it learns only stored targets, which follow from the context, so that `positions` may be all"""
    several_stores: bool = False
    """whether it can learn from several stores at once, which requires that its outputs are only LSPs"""
    kappa: float | None = None
    """the usual weight of predicting words relative to its other target; None: there is no such weight"""
    settings: tuple[str, ...] = ()
    """settings of its own, fields of StudentConfig that other objectives refuse; its class has an attribute for each"""

    def load(self) -> "type[Objective]":
        """The class. Imports its file."""
        return getattr(import_module(f"student.objectives.{self.name.replace('-', '_')}"), self.cls)

    def __call__(self, *args: Any, **settings: Any) -> "Objective":
        """The objective on a store; arguments as of an Objective."""
        return self.load()(*args, **settings)


_ALL = (
    Facts(
        name="mlsm",
        cls="Mlsm",
        target="its stored LSP distribution",
        label="MLSM",
        kinds=("lsp",),
        lsps=True,
        all_positions=True,
        settings=("target_temperature",),
        several_stores=True,
    ),
    Facts(name="mlm", cls="Mlm", target="its identity", label="MLM", kinds=KINDS, vocabulary=True, words=True),
    Facts(
        name="kd",
        cls="Kd",
        target="the teacher's stored distribution over the vocabulary",
        label="KD",
        kinds=("logits",),
        vocabulary=True,
        words=True,
        all_positions=True,
    ),
    Facts(
        name="mtl",
        cls="Mtl",
        target="LSPs and identity",
        label="MLSM+MLM",
        kinds=("lsp",),
        lsps=True,
        vocabulary=True,
        words=True,
        settings=("target_temperature",),
        kappa=1.0,
    ),
    Facts(
        name="hard-mlsm",
        cls="HardMlsm",
        target="only the largest of its stored LSPs",
        label="hard MLSM",
        kinds=("lsp",),
        lsps=True,
        all_positions=True,
        several_stores=True,
    ),
    Facts(
        name="naive-mlsm",
        cls="NaiveMlsm",
        target="mlsm at the cost of mtl",
        label="naive MLSM",
        kinds=("lsp",),
        lsps=True,
        vocabulary=True,
        all_positions=True,
        settings=("target_temperature",),
    ),
    Facts(
        name="supersense",
        cls="Supersense",
        target="its lexicographer files in WordNet (no teacher)",
        label="supersenses",
        kinds=KINDS,
        settings=("wordnet",),
    ),
    Facts(
        name="type",
        cls="TypeAverage",
        target="the average LSP distribution of all its occurrences in the training text",
        label="LSPs by type",
        kinds=("lsp",),
        lsps=True,
    ),
    Facts(
        name="regress",
        cls="Regress",
        target="the teacher's hidden state",
        label="hidden states",
        kinds=("hidden",),
        all_positions=True,
        kappa=0.0,
        settings=("regress_loss",),
    ),
    Facts(
        name="recon",
        cls="Recon",
        target="the hidden state that its stored LSP distribution rebuilds",
        label="rebuilt hidden states",
        kinds=("lsp",),
        all_positions=True,
    ),
)
OBJECTIVES = {facts.name: facts for facts in _ALL}
OWN_SETTINGS = tuple(dict.fromkeys(name for facts in _ALL for name in facts.settings))  # of any objective
USUAL_OBJECTIVE = {"lsp": "mlsm", "hidden": "regress", "logits": "kd", "ids": "mlm"}  # of each kind of store

LSP_OBJECTIVES = tuple(facts.name for facts in _ALL if facts.lsps)
OVER_VOCABULARY = tuple(facts.name for facts in _ALL if facts.vocabulary)
WITHOUT_WORDS = tuple(facts.name for facts in _ALL if not facts.words)
OF_LSP_STORES = tuple(facts.name for facts in _ALL if facts.kinds == ("lsp",))
WITHOUT_TARGETS = tuple(facts.name for facts in _ALL if "ids" in facts.kinds)


def is_untied(settings: dict) -> bool:
    """Whether a run gave the vocabulary its own output matrix; `settings` as in `StudentConfig.identity`. Objectives
    that also learn LSPs record when it is tied, the others when it is not."""
    if OBJECTIVES[settings["objective"]].lsps:
        return not settings.get("tied", False)
    return settings.get("untied", False)
