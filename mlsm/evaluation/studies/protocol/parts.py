"""The parts of a study, each a command of this package, in the order in which they are run.

    for part in plan(study, directory, data):
        part.run(progress)

The order leads to the first conclusion early. First come the stores of the primary hypothesis, then its pairs of
students seed by seed, each evaluated as soon as it is trained. Then come the models compared with them, the secondary
hypotheses, and the rest. With a section `frozen`, the frozen measures are evaluated first and all others last. A part
has no state of its own: its command finds finished work and continues from there, so a killed study is resumed by
running it again. Not handled here: what parts cost (costs.py), printing them as command lines (printing.py).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mlsm.common.errors import StudyError
from mlsm.evaluation.studies.protocol.description import SETTINGS, PlannedArm, StoreRecipe, Study
from mlsm.evaluation.studies.word_senses.choose_layer import choose_layer
from mlsm.evaluation.tasks.blimp.evaluate import evaluate_blimp
from mlsm.evaluation.tasks.finetuning.suite import finetune
from pipeline.commands import encode_hidden, encode_ids, encode_logits, encode_lsp
from shards.derive import derive_shards
from student.config import StudentConfig
from student.objectives import LSP_OBJECTIVES, WITHOUT_WORDS
from student.probe import train_probe
from student.train import train

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "encode-lsp": encode_lsp,
    "encode-ids": encode_ids,
    "encode-logits": encode_logits,
    "encode-hidden": encode_hidden,
    "derive-shards": derive_shards,
    "train-student": train,
    "train-probe": train_probe,
    "finetune": finetune,
    "evaluate-blimp": evaluate_blimp,
    "choose-layer": choose_layer,
}


@dataclass(frozen=True)
class Made:
    """A directory that another part makes; its name ends with digits of a hash of its content."""

    pattern: Path
    part: str
    """the part that makes it"""

    def find(self) -> Path:
        """The directory. Raises StudyError if none or several match."""
        matching = self.pattern.parent.glob(self.pattern.name)  # also matches temporaries, whose names end differently
        found = sorted(path for path in matching if re.search("-[0-9a-f]{12}$", path.name))
        if not found:
            raise StudyError(f"there is no {self.pattern} yet. Run first:  --only {self.part}")
        if len(found) > 1:
            raise StudyError(
                f"{len(found)} directories match {self.pattern}, perhaps made with other settings. Move away those "
                f"that the study should not use, or choose another --output: {', '.join(p.name for p in found)}"
            )
        return found[0]


class Part(NamedTuple):
    """One command of a study."""

    name: str
    verb: str
    values: dict[str, Any]
    """its settings by field; a value of class Made is replaced by its directory when the part is run"""
    needs: tuple[str, ...] = ()
    """names of the parts that it needs"""

    def settings(self) -> Any:
        """The settings of the command. Raises StudyError if a part that it needs has not been run."""
        values = {name: value.find() if isinstance(value, Made) else value for name, value in self.values.items()}
        return SETTINGS[self.verb](**values)

    def run(self, progress: Callable[..., None]) -> Any:
        """Run the command, which may find its work finished. Returns and raises what the command does."""
        return FUNCTIONS[self.verb](self.settings(), progress)


class StudyPlan(NamedTuple):
    """The parts of a study."""

    parts: list[Part]
    first: int
    """how many of them the primary hypothesis needs"""
    left_out: list[str]
    """one sentence for each thing that cannot be done here"""


def plan(study: Study, directory: Path, data: Path | None) -> StudyPlan:
    """List the parts of a study in order.

    directory  for everything that the study makes
    data       directory of evaluation data; None if there is none
    """
    planner = _Planner(study, directory, data)
    primary = [study.arms[name] for name in study.primary]
    parts: dict[str, Part] = {}
    _add(parts, planner.stores({arm.store for arm in primary if not study.stores[arm.store].each_seed}))
    for seed in study.seeds:
        for arm in primary:
            _add(parts, planner.student(arm, seed))
    if study.composite is not None:  # the first conclusion needs its anchors
        _add(parts, planner.models())
        lower = study.arms[study.composite.untrained]
        for seed in lower.seeds:
            _add(parts, planner.student(lower, seed))
    first = len(parts)
    _add(parts, planner.models())
    _add(parts, planner.layers())
    named = [study.arms[name] for pair in study.secondary for name in pair]
    for arm in (*named, *study.arms.values()):
        for seed in arm.seeds:
            _add(parts, planner.student(arm, seed))
    for arm in (*primary, *named, *study.arms.values()):
        for seed in arm.seeds:
            _add(parts, planner.later(arm, seed))
    _add(parts, planner.models_later())
    return StudyPlan(list(parts.values()), first, list(dict.fromkeys(planner.left_out)))


def find_diagnostic(parts: Iterable[Part]) -> Path | None:
    """The result of choose-layer, None if there is none yet. Raises StudyError if there are several."""
    for part in parts:
        if part.verb == "choose-layer":
            found = sorted(Path(part.values["output"], "diagnostics").glob("*/result.json"))
            if len(found) > 1:
                raise StudyError(
                    f"there are {len(found)} results of {part.name}, perhaps made with other settings. Move away those"
                    f" that the study should not use, or choose another --output: {', '.join(map(str, found))}"
                )
            return found[0] if found else None
    return None


def _add(parts: dict[str, Part], more: Iterable[Part]) -> None:
    for part in more:
        if parts.setdefault(part.name, part) != part:
            raise StudyError(
                f"two parts of the study are called {part.name}: the names of its arms and the directory names of its "
                "models must differ. Rename an arm, or the directory of a model."
            )


def _predicts_words(model: str) -> bool:
    """Whether a model has a head over its vocabulary, by its config.json; True where there is none, as on the Hub."""
    try:
        architectures = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["architectures"]
        return any(name.endswith(("ForMaskedLM", "ForPreTraining", "LMHeadModel")) for name in architectures)
    except (OSError, ValueError, KeyError, TypeError):
        return True


class _Planner:
    """Plans the parts of one study; parts without data are omitted, with a sentence in `left_out`."""

    def __init__(self, study: Study, directory: Path, data: Path | None):
        self.study, self.directory, self.data = study, directory, data
        self.left_out: list[str] = []
        common = study.common
        self.tunes, self.probes = common.get("finetune"), common.get("train-probe")
        self.frozen = common.get("frozen")
        if data is None and self.tunes is not None:
            self.left_out.append(
                "Fine-tuning uses built-in miniature data, so the scores mean nothing: no directory of evaluation "
                "data was given (--data-dir or $MLSM_DATA)."
            )
        if data is None and self.frozen is not None:
            self.frozen = None
            self.left_out.append("The frozen measures are not run: no directory of evaluation data was given.")
        self.blimp, self.senses = self._with_data("evaluate-blimp", "blimp"), self._with_data("choose-layer", "wsd")

    def _with_data(self, verb: str, folder: str) -> dict[str, Any] | None:
        """The settings of a command that reads a folder of the data; None if it is not to be run, or cannot be."""
        settings = self.study.common.get(verb)
        if settings is None or (self.data is not None and (self.data / folder).is_dir()):
            return settings
        where = "no directory of evaluation data was given" if self.data is None else f"{self.data} has no {folder}"
        self.left_out.append(f"{verb} is not run: {where}.")
        return None

    def stores(self, names: Iterable[str], seed: int | None = None) -> Iterator[Part]:
        """The parts that make some stores, each after the stores that it is made from.

        seed  the dictionary's seed, for stores that are made for every seed
        """
        for recipe in (self.study.stores[name] for name in sorted(names)):
            yield from self.stores(recipe.before)
            values: dict[str, Any] = {"output": self._place(recipe, seed)}
            if recipe.each_seed:
                values["seed"] = seed
            if recipe.of is not None:
                values["store"] = self._made_store(self.study.stores[recipe.of], None, None)
            if recipe.hidden is not None:
                values["hidden"] = self._made_store(self.study.stores[recipe.hidden], None, None)
            if recipe.dictionary is not None:
                ((_, layer, k),) = recipe.choices()  # --dictionary fits only one layer and k
                other = self.study.stores[recipe.dictionary]
                place = self._place(other, None) / "dictionaries"
                which = f"*-l{'*' if layer is None else layer}-k{k}-*"
                values["dictionary"] = Made(place / which, name_of(other))
            needs = tuple(name_of(self.study.stores[name]) for name in recipe.before)
            yield Part(name_of(recipe, seed), recipe.verb, recipe.settings | values, needs)

    def student(self, arm: PlannedArm, seed: int) -> Iterator[Part]:
        """A student with its store and its first evaluations: the frozen measures, or all if there are none."""
        yield from self.stores({arm.store}, seed)
        name = arm.student(seed)
        run, recipe = self.directory / "students" / name, self.study.stores[arm.store]
        train = Part(
            f"train-student/{name}",
            "train-student",
            arm.settings | {"store": self._made_store(recipe, arm.layer, arm.k, seed), "seed": seed, "run_dir": run},
            (name_of(recipe, seed),),
        )
        yield train
        if self.frozen is not None:
            yield from self._frozen(name, run, (train.name,), self._step(arm))
        else:
            yield from self.later(arm, seed)

    def later(self, arm: PlannedArm, seed: int) -> Iterator[Part]:
        """The other evaluations of a student: fine-tuning and BLiMP; students that predict no words are scored with a
        probe.
        """
        if arm.name not in self.study.tuned:
            return
        name = arm.student(seed)
        run, recipe = self.directory / "students" / name, self.study.stores[arm.store]
        needs, step = (f"train-student/{name}",), self._step(arm)
        yield from self._fine_tuning(name, run, needs, step)
        objective = arm.settings.get("objective", StudentConfig.objective)
        if objective not in WITHOUT_WORDS:  # other students predict words themselves
            yield from self._minimal_pairs(name, run, needs, step)
        if objective in LSP_OBJECTIVES and self.probes is not None and self.blimp is not None:
            for source in ("softmax", "logits"):
                probe = self.directory / "probes" / f"{source}-{name}"
                store = self._made_store(recipe, arm.layer, arm.k, seed)
                values = {"probe_input": source, "student": str(run), "store": store, "seed": seed, "run_dir": probe}
                part = Part(f"train-probe/{probe.name}", "train-probe", self.probes | values, needs)
                yield part
                yield from self._minimal_pairs(probe.name, probe, (part.name,), step)

    def models(self) -> Iterator[Part]:
        """The first evaluations of the models that are compared with the students: as of students."""
        if self.frozen is None:
            yield from self.models_later()
        for model in self.study.models:
            yield from self._frozen(Path(model).name, model, ())

    def models_later(self) -> Iterator[Part]:
        """Their other evaluations. A model that predicts no words is not scored on BLiMP."""
        for model in self.study.models:
            name = Path(model).name
            yield from self._fine_tuning(name, model, ())
            if _predicts_words(model):
                yield from self._minimal_pairs(name, model, ())
            elif self.blimp is not None:
                self.left_out.append(f"{name} is not scored on BLiMP: by its config.json it does not predict words.")

    def layers(self) -> Iterator[Part]:
        """The word-sense diagnostic of the teacher."""
        if self.senses is not None:
            assert self.data is not None
            # next to the store, so that dictionaries are learned only once
            recipe, seed = self.study.stores[self.study.arms[self.study.primary[0]].store], self.study.seeds[0]
            values = {"data_dir": self.data / "wsd", "output": self._place(recipe, seed)}
            needs = (name_of(recipe, seed),)
            yield Part("choose-layer", "choose-layer", self.senses | values, needs)

    def _frozen(self, name, model, needs, step=None):
        if self.frozen is not None:
            alike = {"max_length": self.study.window}
            of = {"models": (str(model),), "step": step, "data_dir": self.data, "output": self.directory}
            yield Part(f"frozen/{name}", "finetune", alike | self.frozen | of, needs)

    def _fine_tuning(self, name, model, needs, step=None):
        if self.tunes is not None:
            # The same for all models; by default both would depend on the models of one command.
            alike = {"max_length": self.study.window, "segments": "never"}
            where = {"smoke": True} if self.data is None else {"data_dir": self.data}
            of = {"models": (str(model),), "step": step, "output": self.directory}
            values = alike | self.tunes | where | of
            yield Part(f"finetune/{name}", "finetune", values, needs)

    def _minimal_pairs(self, name, model, needs, step=None):
        if self.blimp is not None:
            assert self.data is not None
            where = {"data_dir": self.data / "blimp", "output": self.directory}
            values = self.blimp | {"models": (str(model),), "step": step} | where
            yield Part(f"evaluate-blimp/{name}", "evaluate-blimp", values, needs)

    def _step(self, arm: PlannedArm) -> str | None:
        """Choose which checkpoints of an arm's students and their probes are evaluated."""
        return "all" if arm.name in self.study.curves else None

    def _place(self, recipe: StoreRecipe, seed: int | None) -> Path:
        return self.directory / "stores" / recipe.named(seed)

    def _made_store(self, recipe: StoreRecipe, layer: int | None, k: int | None, seed: int | None = None) -> Made:
        which = "*"
        if recipe.verb == "encode-lsp" and (layer, k) != (None, None):
            # the name may have more before the digits, such as the origin of the atoms
            which = f"lsp-*-l{'*' if layer is None else layer}-k{k}-*"
        elif recipe.verb == "encode-hidden" and layer is not None:
            # all of what follows the layer: a teacher's name may have "-l6-", too
            is_pq = recipe.settings.get("quantise") == "pq"
            quantised = f"-pq{recipe.settings.get('bytes') or 64}" if is_pq else ""
            which = f"hidden-*-l{layer}{quantised}-{'[0-9a-f]' * 12}"
        return Made(self._place(recipe, seed) / "stores" / which, name_of(recipe, seed))


def name_of(recipe: StoreRecipe, seed: int | None = None) -> str:
    """The name of the part that makes a store; for a store that is made for every seed, with that seed."""
    return f"{recipe.verb}/{recipe.named(seed)}"
