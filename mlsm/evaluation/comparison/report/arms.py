"""Who is compared with whom: models sorted into arms, one way to pre-train each, with its seeds and checkpoints.

    found = find_arms(models, study)
    found.contestant("mlsm at 50%").models      # {pre-training seed: Model}

An arm's models differ in the pre-training seed and the step alone, as far as their records say; a probe belongs to the
arm of its student, for its BLiMP scores. The floor is an untrained encoder, the ceiling the teacher: they are shown
beside the arms, and are in no test. Left out: tests (effects.py).
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from typing import NamedTuple

from mlsm.evaluation.comparison.identity import KEPT, groups
from mlsm.evaluation.comparison.models import Model, name_groups
from mlsm.evaluation.comparison.report.facts import StudyFacts

Seed = int | None  # of a pre-training; None: unknown


class Contestant(NamedTuple):
    """Checkpoints of equal progress of one arm: those that are scored against another's."""

    name: str
    models: Mapping[Seed, Model]


@dataclass(frozen=True)
class Arm:
    """One way to pre-train: its models, of all seeds and steps, its probes among them."""

    name: str
    models: tuple[Model, ...]

    @property
    def fractions(self) -> list[float]:
        """How far its fine-tuned checkpoints were pre-trained, of 1, in order."""
        return sorted({fraction_of(model) for model in self.models if model.trainings})

    def at(self, fraction: float = 1.0) -> Contestant:
        """Its fine-tuned models of a progress, by seed; of several of one seed the first."""
        found = [model for model in self.models if model.trainings and isclose(fraction_of(model), fraction)]
        name = self.name if fraction == 1 else f"{self.name} at {100 * fraction:.4g}%"
        return Contestant(name, _by_seed(found))

    def scored_on_blimp(self) -> dict[Seed, Model]:
        """Its finished models with BLiMP scores, by seed: the model's own head where it has one, else a probe, the
        first by name, after all of its steps."""
        found = [model for model in self.models if model.blimp and fraction_of(model) == 1]
        return _by_seed(sorted(found, key=_in_order_of_probes))


def _in_order_of_probes(model):
    """Students first, then probes by name; of one probe, all of whose models are of the finished student, the last."""
    name = re.sub(r"-step-\d{8}\b.*", "", model.label)
    return is_probe(model), name, -(model.facts["flops"]["pretraining"] or 0)


def _by_seed(models):
    """{pre-training seed: the first of the models of that seed}, in the order of seeds."""
    first = {model.facts["run_seed"]: model for model in reversed(models)}
    return {seed: first[seed] for seed in sorted(first, key=lambda seed: (seed is None, seed))}


class Found(NamedTuple):
    """All that is compared.

    floor, ceiling  None where there are no records of one
    notes           sentences on models of which the page uses another
    """

    arms: list[Arm]
    floor: Arm | None
    ceiling: Arm | None
    notes: list[str]

    def arm(self, name: str) -> Arm | None:
        """The arm of a name, or the only one of the objective of this name."""
        named = [arm for arm in self.arms if arm.name == name]
        named = named or [arm for arm in self.arms if arm.models[0].facts["objective"] == name]
        return named[0] if len(named) == 1 else None

    def contestant(self, name: str) -> Contestant | None:
        """The models that a hypothesis names: an arm's finished ones, or those of an earlier progress of it."""
        if (arm := self.arm(name)) is not None:
            return arm.at()
        base, _, percent = name.rpartition(" at ")
        if (arm := self.arm(base)) is None:
            return None
        return next((arm.at(fraction) for fraction in arm.fractions if percent == f"{100 * fraction:.4g}%"), None)


def fraction_of(model: Model) -> float:
    """How far a model was pre-trained, of 1; what does not say so, or was never trained, counts as finished."""
    return model.facts["fraction"] or 1.0


def is_probe(model: Model) -> bool:
    """Whether a model is a probe on top of a student."""
    return "probe" in (model.facts["identity"] or {})


def find_arms(models: Sequence[Model], study: StudyFacts | None = None) -> Found:
    """Sort models into arms, in their order; floor and ceiling apart."""
    floor = [model for model in models if _is(model, study and study.floor, study) or _is_untrained(model, study)]
    teachers = {model.facts["teacher"] for model in models} - {None}
    ceiling = [
        model for model in models if _is(model, study and study.ceiling, study) or _is_teacher(model, teachers, study)
    ]
    apart = {model.label for model in (*floor, *ceiling)}
    by_arm: dict[str, list[Model]] = {name: [] for name in (study.arms if study else ())}
    for model in models:
        if model.label not in apart:
            by_arm.setdefault(_arm_of(model, study), []).append(model)
    by_arm = {name: group for name, group in by_arm.items() if group}
    for group in by_arm.values():
        group.sort(key=is_probe)  # so that an arm is named after a student
    names = list(by_arm) if study and study.arms else _tell_apart(by_arm)
    arms = [Arm(name, tuple(group)) for name, group in zip(names, by_arm.values(), strict=True)]
    ends = [Arm(name, tuple(group)) if group else None for name, group in (("floor", floor), ("ceiling", ceiling))]
    return Found(arms, ends[0], ends[1], [note for arm in arms for note in _name_doubles(arm)])


def _is(model, name, study):
    """Whether a model is the one of this name, or of the arm of this name."""
    return name is not None and (_is_run(model, name) or any(_is_run(model, run) for run in study.arms.get(name, ())))


def _is_run(model, run):
    """Whether a model is this run's export or one of its checkpoints."""
    return model.label == run or model.label.startswith((f"{run}-step-", f"{run} ("))


def _is_untrained(model, study):
    return not (study and study.floor) and model.facts["step"] == 0


def _is_teacher(model, teachers, study):
    if (study and study.ceiling) or model.facts["objective"] is not None:
        return False
    path = Path(model.facts["path"])
    names = {model.label, model.label.rpartition("/")[2], str(path), {"bundled_teacher": "bundled"}.get(path.name)}
    return bool(names & teachers)


def _arm_of(model, study):
    """Text that is equal for models of one arm: the study's name of it, or all settings but for seed and step."""
    for name, runs in (study.arms if study else {}).items():
        if any(_is_run(model, run) for run in runs):
            return name
    if (study and study.arms) or model.facts["objective"] is None:
        return model.label
    own = [values for group, values in groups(model.facts).items() if group != "probe"]
    known = {name: value for values in own for name, value in values.items() if name not in ("run_seed", "step", KEPT)}
    return json.dumps(known, sort_keys=True)


def _tell_apart(by_arm):
    """The arms' names, from what their settings differ in; of equal ones each with its first model."""
    names = name_groups(list(by_arm.values()), ("run_seed", "step", KEPT))
    return [
        f"{name} ({group[0].label})" if names.count(name) > 1 else name
        for name, group in zip(names, by_arm.values(), strict=True)
    ]


def _name_doubles(arm):
    for fraction in arm.fractions:
        used = arm.at(fraction).models
        for model in arm.models:
            first = used.get(model.facts["run_seed"])
            if model.trainings and isclose(fraction_of(model), fraction) and model is not first:
                yield f"{model.label} is of the same arm, seed and step as {first.label}, which is shown instead."
