"""Sort models into arms for comparison. The models of an arm agree in all but a few settings.

    sort_into_arms(models, {"step"})                  # the checkpoints of one pre-training run
    sort_into_arms(models, {"run_seed", "step"})      # one way to pre-train, with its seeds and checkpoints
    find_arms(models, study).arm("mlsm at 50%")       # the report's arms: by a study's names, or by settings

Models agree as far as their records say (identity.py). The models of a report's arm may differ in pre-training seed and
step; a probe belongs to the arm of its student, for its BLiMP scores. The floor is an untrained encoder and the ceiling
is the teacher. They are shown next to the arms but are not tested. Not handled here: tests (effects.py).
"""

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import isclose
from pathlib import Path
from statistics import fmean
from typing import Any

from mlsm.evaluation.comparison.config import StudyFacts
from mlsm.evaluation.comparison.identity import KEPT, differences
from mlsm.evaluation.comparison.models import OBJECTIVES, Model, mean_score, sort_key, tasks_of
from mlsm.evaluation.lineage import UNTRAINED

Seed = int | None  # of a pre-training run; None: unknown
Runs = Mapping[str, tuple[str, ...]]  # name of an arm -> names of its runs

CHECKPOINTS = frozenset({"step"})  # settings in which models of one pre-training run differ
PRETRAINING = frozenset({"run_seed", "step"})  # settings in which models of one pre-training condition differ
_STEP = re.compile(r"-step-\d{8}\b.*")  # the end of a checkpoint's name
_SHORT = {
    "objective": "{}",
    "encoder": "{}",
    "teacher": "of {}",
    "layer": "l {}",
    "k": "k {}",
    "lambda": "λ {}",
    "kappa": "κ {}",
    "run_seed": "run seed {}",
}


@dataclass(frozen=True, eq=False)
class Arm:
    """Models under one name that differ only in a few settings."""

    name: str
    models: tuple[Model, ...]

    @property
    def label(self) -> str:
        """The arm's name; with `label` and `facts` an arm can be compared like a model."""
        return self.name

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the arm's first model."""
        return self.models[0].facts

    @property
    def fractions(self) -> list[float]:
        """The fractions of pre-training at which its checkpoints were fine-tuned, in order."""
        return sorted({fraction_of(model) for model in self.models if model.trainings})

    @property
    def by_seed(self) -> dict[Seed, Model]:
        """{pre-training seed: the first of the models of that seed}, in the order of seeds."""
        return _one_a_seed(self.models)

    def at(self, fraction: float = 1.0) -> "Arm":
        """The arm's fine-tuned models after a fraction of pre-training, one per seed, to compare with another arm."""
        found = [model for model in self.models if model.trainings and isclose(fraction_of(model), fraction)]
        name = self.name if fraction == 1 else f"{self.name} at {100 * fraction:.4g}%"
        return Arm(name, tuple(_one_a_seed(found).values()))

    def on_blimp(self) -> "Arm":
        """The arm's finished models with BLiMP scores, one per seed: scored with the model's own head if there is one,
        else with its finished probe that comes first by name.
        """
        found = [model for model in self.models if model.blimp and fraction_of(model) == 1]
        return Arm(self.name, tuple(_one_a_seed(sorted(found, key=_in_order_of_probes)).values()))

    def average(self, tasks: Collection[str]) -> float | None:
        """Mean score over tasks, of its finished models that have all these tasks; None if there are no tasks or
        models.
        """
        models = [model for model in self.at().models if tasks and tasks_of(model) >= set(tasks)]
        return fmean(mean_score(model, tasks) for model in models) if models else None


def _in_order_of_probes(model: Model) -> tuple:
    """Sort key: students first, then probes by name; of one probe, its last checkpoint first."""
    return is_probe(model), _STEP.sub("", model.label), -(model.facts["flops"]["pretraining"] or 0)


def _one_a_seed(models: Sequence[Model]) -> dict[Seed, Model]:
    first = {model.facts["run_seed"]: model for model in reversed(models)}
    return {seed: first[seed] for seed in sorted(first, key=lambda seed: (seed is None, seed))}


def fraction_of(model: Model) -> float:
    """The fraction of pre-training that a model has completed; 1 if unknown, or if the model was never trained."""
    fraction = model.facts["fraction"]
    return 1.0 if fraction is None or model.facts["objective"] == UNTRAINED else fraction


def is_probe(model: Model) -> bool:
    """Whether a model is a probe on top of a student."""
    return "probe" in (model.facts["identity"] or {})


# -- by settings ------------------------------------------------------------------------------------------


def sort_into_arms(models: Iterable[Model], may_differ: Collection[str], with_probes: bool = False) -> list[Arm]:
    """Sort models into arms whose models agree in all known settings of pre-training except those in `may_differ`.

    A model of unknown origin is its own arm. An arm is named after its objective and the settings that distinguish it
    from other arms of that objective.
    with_probes  whether a probe belongs to the arm of its student
    """
    groups: list[list[Model]] = []
    for model in sorted(models, key=sort_key):
        known = (group for group in groups if _agree(group[0], model, may_differ, with_probes))
        if (home := next(known, None)) is not None:
            home.append(model)
        else:
            groups.append([model])
    for group in groups:
        group.sort(key=is_probe)  # students first: the arm is named after its first model
    return [Arm(name, tuple(group)) for name, group in zip(_tell_apart(groups, may_differ), groups, strict=True)]


def _agree(model: Model, other: Model, may_differ: Collection[str], with_probes: bool) -> bool:
    if model.facts["objective"] is None or other.facts["objective"] is None:
        return False
    found = differences([model, other])
    beyond = [name for name in found.beyond({*may_differ, KEPT}) if not (with_probes and name.startswith("probe "))]
    return not beyond and len(found.unknown) != 1


def _tell_apart(groups: Sequence[Sequence[Model]], may_differ: Collection[str]) -> list[str]:
    """Name arms after the settings in which they differ. If names are equal, the first model's name is added."""
    names = []
    for group in groups:
        first = group[0]
        objective = first.facts["objective"]
        rivals = [other[0] for other in groups if other[0].facts["objective"] == objective]
        found = differences(rivals)
        parts = [
            _SHORT.get(name, f"{name} {{}}").format(value)
            for name, values in found.settings.items()
            for value, labels in values.items()
            if first.label in labels and name not in (*may_differ, KEPT)
        ]
        if first.label in found.unknown and len(found.unknown) < len(rivals):
            parts.append("other settings unknown")
        known = OBJECTIVES.get(objective, objective)
        names.append(", ".join([known, *parts]) if known else first.label)
    return [
        f"{name} ({group[0].label})" if names.count(name) > 1 else name
        for name, group in zip(names, groups, strict=True)
    ]


# -- of the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arms:
    """Everything that the report compares.

    floors   the untrained models, an arm for each encoder
    ceiling  the teacher; None if there are no records of one
    notes    sentences on models that are replaced by another model or left out
    planned  names of the study's arms, also of those without records
    """

    arms: list[Arm]
    floors: list[Arm]
    ceiling: Arm | None
    notes: list[str]
    planned: Collection[str] = ()

    def arm(self, name: str) -> Arm | None:
        """The arm with this name, with all its checkpoints. If the study plans no arm of this name, the only arm
        with an objective of this name.
        """
        named = [arm for arm in self.arms if arm.name == name]
        if not named and name not in self.planned:
            named = [arm for arm in self.arms if arm.facts["objective"] == name]
        return named[0] if len(named) == 1 else None

    def both(self, name: str, other: str) -> tuple[Arm, Arm] | None:
        """Two arms by name; None if one of them does not exist."""
        one, two = self.arm(name), self.arm(other)
        return None if one is None or two is None else (one, two)

    def at(self, name: str) -> Arm | None:
        """The models that a hypothesis names: an arm's finished models, or its checkpoints at an earlier point."""
        if (arm := self.arm(name)) is not None:
            return arm.at()
        base, _, percent = name.rpartition(" at ")
        if (arm := self.arm(base)) is None:
            return None
        return next((arm.at(fraction) for fraction in arm.fractions if percent == f"{100 * fraction:.4g}%"), None)

    def floor_of(self, arm: Arm) -> Arm | None:
        """The untrained models with an arm's encoder; None if there are none."""
        return next((floor for floor in self.floors if floor.facts["encoder"] == arm.facts["encoder"]), None)

    def with_ends(self) -> list[Arm]:
        """The arms between floors and ceiling."""
        return [*self.floors, *self.arms, *([self.ceiling] if self.ceiling else [])]


def find_arms(models: Sequence[Model], study: StudyFacts | None = None) -> Arms:
    """Sort models into a study's arms, or into arms by their settings; floor and ceiling are kept separate."""
    named: Runs = study.arms if study else {}
    teachers = _find_teachers(models, {model.facts["teacher"] for model in models} - {None})
    floors = _floors([model for model in models if model.facts["objective"] == UNTRAINED])
    planned = list(chain.from_iterable(named.values()))  # a planned arm may also be a teacher
    ceiling = [
        model for model in models if model.label in teachers and not any(_is_run(model.label, run) for run in planned)
    ]
    apart = {model.label for floor in floors for model in floor.models} | {model.label for model in ceiling}
    between = [model for model in models if model.label not in apart]
    arms = _sort_by_name(between, named) if named else sort_into_arms(between, PRETRAINING, with_probes=True)
    notes = [note for arm in (*floors, *arms) for note in (*_name_doubles(arm), *_name_unfinished(arm))]
    return Arms(arms, floors, Arm("ceiling", tuple(ceiling)) if ceiling else None, notes, named.keys())


def is_in_recipe(name: str, study: StudyFacts) -> bool:
    """Whether a model's name is that of an arm's run, or of a model that the study evaluates besides the arms."""
    return any(_is_run(name, run) for run in (*chain.from_iterable(study.arms.values()), *study.models))


def leave_out_others(models: Sequence[Model], study: StudyFacts) -> tuple[list[Model], list[str]]:
    """Leave out the models of arms that were removed from a study's recipe, or renamed in it. Floor and ceiling stay,
    and all models if the study names no arms.

    Returns  the other models, and a sentence on those that are left out
    """
    if not study.arms:
        return list(models), []
    known = find_arms(models, study)
    shown = {model.label for arm in known.with_ends() if arm not in known.arms for model in arm.models}
    shown |= {model.label for model in models if is_in_recipe(model.label, study)}
    others = dict.fromkeys(_STEP.sub("", model.label) for model in models if model.label not in shown)
    chosen = [model for model in models if model.label in shown]
    return chosen, [f"Not in the recipe, so not shown: {', '.join(others)}."] if others else []


def _floors(untrained: Sequence[Model]) -> list[Arm]:
    """Untrained models as one arm for each encoder."""
    by_encoder: dict[str, list[Model]] = {}
    for model in untrained:
        by_encoder.setdefault(model.facts["encoder"], []).append(model)
    names = {encoder: "floor" if len(by_encoder) == 1 else f"floor, {encoder}" for encoder in by_encoder}
    return [Arm(names[encoder], tuple(group)) for encoder, group in by_encoder.items()]


def _sort_by_name(models: Sequence[Model], named: Runs) -> list[Arm]:
    """The arms that a study names, in its order; each other model becomes its own arm."""
    groups: dict[str, list[Model]] = {name: [] for name in named}
    for model in models:
        found = (name for name, runs in named.items() if any(_is_run(model.label, run) for run in runs))
        groups.setdefault(next(found, model.label), []).append(model)
    return [Arm(name, tuple(sorted(group, key=is_probe))) for name, group in groups.items() if group]


def _is_run(name, run):
    """Whether a model's name is that of this run's export or of one of its checkpoints."""
    return name == run or name.startswith((f"{run}-step-", f"{run} ("))


def _find_teachers(models, names):
    """Labels of the models that others name as their teacher: by their path. Models without a lineage also by their
    label or, since a teacher may be elsewhere by now, by the last part of the path, if only one model has that.
    """
    stock = [model for model in models if model.facts["objective"] is None]
    found = set()
    for name in names:
        known = [model for model in models if os.path.abspath(model.facts["path"]) == os.path.abspath(name)]
        known += [model for model in stock if _is_called(model, name)]
        alike = [model for model in stock if _may_be(model, name)]
        found |= {model.label for model in known or (alike if len(alike) == 1 else ())}
    return found


def _is_called(model, name):
    path = Path(model.facts["path"])
    names = {model.label, model.label.rpartition("/")[2], str(path), {"bundled_teacher": "bundled"}.get(path.name)}
    return name in names or path.resolve() == Path(name).resolve()


def _may_be(model, name):
    if "/" in model.label and name.count("/") == 1:  # two ids of the Hub that differ
        return False
    return Path(name).name in {model.label.rpartition("/")[2], Path(model.facts["path"]).name}


def _name_doubles(arm):
    scored = [
        (arm.at(part), [model for model in arm.models if model.trainings and isclose(fraction_of(model), part)])
        for part in arm.fractions
    ]
    of_words = [model for model in arm.models if model.blimp and fraction_of(model) == 1 and not is_probe(model)]
    scored.append((arm.on_blimp(), of_words))
    firsts = [(model.label, shown.by_seed[model.facts["run_seed"]].label) for shown, of in scored for model in of]
    for label, first in dict.fromkeys(firsts):
        if label != first:
            yield f"{label} has the same arm, seed and step as {first}, which is shown instead."


def _name_unfinished(arm):
    for seed in dict.fromkeys(model.facts["run_seed"] for model in arm.models):
        reached = [fraction_of(model) for model in arm.models if model.trainings and model.facts["run_seed"] == seed]
        if reached and (most := max(reached)) < 1 and not isclose(most, 1):
            yield (
                f"{arm.name}, pre-training seed {seed}, is fine-tuned only after {100 * most:.4g} % of its steps, so "
                "it is not compared with finished students."
            )
