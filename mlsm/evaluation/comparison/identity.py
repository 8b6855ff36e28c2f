"""Find the settings of pre-training in which models differ, besides those that a comparison studies.

    found = differences(models)
    found.settings                 # {"lr": {"0.0001": ["a", "b"], "0.001": ["c"]}}
    found.sentence({"layer"})      # "The models differ in layer and also in lr (0.0001: a, b; 0.001: c)."

A record's identity (mlsm/evaluation/lineage.py) is sorted into groups of settings, and two models are compared on the
groups that both have. So necessary consequences of the objective are not differences: an mlm student has no layer, k or
dictionary, a kd student's top-n counts tokens and not LSPs, and only mtl and regress have kappa. A key missing from an
identity has its default value. A dictionary's fingerprint follows from the layer, k and its other settings, so it
counts as a difference only between models that agree in all of these.

A model without identity, such as a stock model, is compared on the few fields of its record. Unknown settings are
reported as unknown, never as equal. Fine-tuning settings are not compared here: they decide which scores are paired
(models.py).
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlsm.evaluation.lineage import UNTRAINED, WITHOUT_TARGETS
from student.config import UNNAMED
from student.masks.config import ADAPTIVE
from student.objectives import OF_LSP_STORES, OVER_VOCABULARY, is_untied

Groups = dict[str, dict[str, Any]]  # group -> name of a setting -> its value

KEPT = "mass kept of targets"
SAME_MASS = 0.01  # smaller differences of the mean mass kept are ignored
UNKNOWN = "unknown"
_OF_TEACHER = ("dtype", "documents_apart", "segments")  # target settings that lsp and logits stores share
_SKIPPED = (
    "kind",
    "format",
    "windowing",
    "teacher",
    "teacher_name",
    "teacher_layers",
    "tokenizer_name",
    "derived_from",
    "dictionary_settings",
)
_DEFAULTS: Groups = {  # values of absent keys
    "run": UNNAMED | {"segments": False, "mask_weights": "uniform", "wordnet": None},
    "teacher": {"teacher documents_apart": False, "teacher segments": False},
    "lsp": {"solver": "cd", "dictionary atoms": "learned", "hidden": None},
    "logits": {"logits masked_passes": 0},
}
_NAMES = {"lam": "lambda", "seed": "run_seed"}
_FOLLOW_FROM = {  # a setting is not named if it differs only along with these
    "dictionary": (
        "layer",
        "k",
        "lambda",
        "plan",
        "teacher",
        "teacher fingerprint",
        "teacher dtype",
        "teacher documents_apart",
        "teacher segments",
    ),
    "tolerance": ("solver",),  # FISTA has no tolerance
    "mask_update_steps": ("mask_weights",),  # only adaptive masks have it
    "mask_weight_steps": ("mask_weights",),  # only alternating tables have it
    "wordnet": ("objective",),  # only supersense has it
    "regress_loss": ("objective",),  # only regress has it
    "short_share": ("short_windows",),  # only runs that start with pieces of windows have it
    "decay_share": ("schedule",),  # only wsd has it
    "mask_rate_steps": ("mask_schedule",),  # only steps have it
    "store_weights": ("other_targets",),  # only students of several stores have them
}


class HasOrigin(Protocol):
    """Something that can be compared: a models.Model, or an arms.Arm through its first model."""

    @property
    def label(self) -> str:
        """The name of the model or arm."""

    @property
    def facts(self) -> dict:
        """The fields of a record that say where it comes from."""


@dataclass(frozen=True)
class Differences:
    """What differs between some models.

    settings   for the settings that differ: name -> {value as text: labels of the models that have it}
    unknown    labels of the models whose settings are not all recorded
    own_masks  labels of the models whose masks followed their own loss; they share their masked tokens with no other
               model
    """

    settings: dict[str, dict[str, list[str]]]
    unknown: list[str]
    own_masks: list[str] = field(default_factory=list)

    def beyond(self, studied: Collection[str]) -> list[str]:
        """Names of the settings that differ and are not studied."""
        return [name for name in self.settings if name not in studied]

    def sentence(self, studied: Collection[str]) -> str:
        """A sentence for a caption: whether the models differ only in the studied settings."""
        found = [name for name in sorted(studied) if name in self.settings]
        what, said = " and ".join(found or sorted(studied)), []
        if others := self.beyond(studied):
            values = {
                name: "; ".join(f"{value}: {_some(labels)}" for value, labels in self.settings[name].items())
                for name in others
            }
            named = ", ".join(f"{name} ({values[name]})" for name in others)
            said.append(f"The models differ in {what} and also in {named}.")
        if self.unknown:
            said.append(
                f"Other differences of {_some(self.unknown)} are unknown: the records do not contain all settings of "
                "pre-training."
            )
        return " ".join([*(said or [f"The models differ only in {what}."]), *self.on_masks])

    @property
    def on_masks(self) -> list[str]:
        """A sentence if masks followed a model's loss, otherwise nothing."""
        if not self.own_masks:
            return []
        return [
            f"The masks of {_some(self.own_masks)} followed the model's own loss (mask_weights {ADAPTIVE}), so no "
            "other model has the same masks: pairs with such a model are not paired in masks."
        ]

    @property
    def alone(self) -> bool:
        """Whether at most one thing differs and nothing is unknown."""
        return len(self.settings) <= 1 and not self.unknown


def differences(models: Sequence[HasOrigin]) -> Differences:
    """What differs between some models."""
    sorted_settings = {model.label: groups(model.facts) for model in models}
    known = {model.label: _is_whole(model.facts["identity"]) for model in models}
    # Settings that these models do not have are known to be absent. For an untrained student only the origin of its
    # weights matters.
    lacks = {model.label for model in models if known[model.label] and model.facts["objective"] != UNTRAINED}
    found: dict[str, dict[str, list[str]]] = {}
    for group in dict.fromkeys(group for of_model in sorted_settings.values() for group in of_model):
        having = {label: of_model[group] for label, of_model in sorted_settings.items() if group in of_model}
        for name in dict.fromkeys(name for values in having.values() for name in values):
            values = {label: values.get(name) for label, values in having.items() if name in values or label in lacks}
            if name == KEPT:
                _add_mass(found, values, models)
            elif len({_canonical(value) for value in values.values()}) > 1:
                found[name] = _by_text(values)
    of_teachers = [of_model["teacher"] for of_model in sorted_settings.values() if "teacher" in of_model]
    if "teacher fingerprint" not in found and all(values.get("teacher fingerprint") for values in of_teachers):
        found.pop("teacher", None)  # one teacher under several names or paths
    for name, of_name in _FOLLOW_FROM.items():
        causes = [values for other, values in found.items() if other in of_name or other.startswith(f"{name} ")]
        if name in found and _follows(found[name], causes):
            del found[name]
    runs = {label: of_model.get("run", {}) for label, of_model in sorted_settings.items()}
    own_masks = [label for label, run in runs.items() if run.get("mask_weights") == ADAPTIVE]
    return Differences(found, [label for label, is_known in known.items() if not is_known], own_masks)


def _is_whole(identity: dict | None) -> bool:
    """Whether all settings are known. An export of a training loop of the user's own names only some."""
    return identity is not None and {"lr", "max_steps"} <= identity["settings"].keys()


def _follows(by_text, causes):
    """Whether models that agree in all causes also agree in a setting. Arguments are {value as text: labels}."""
    found: dict[tuple[str, ...], set[str]] = {}  # values of the causes -> values of the setting
    for value, labels in by_text.items():
        for label in labels:
            of_causes = tuple(cause for values in causes for cause, having in values.items() if label in having)
            found.setdefault(of_causes, set()).add(value)
    return all(len(values) == 1 for values in found.values())


def groups(facts: dict) -> Groups:
    """The settings of a model's pre-training: {group: {name: value}}; empty if the model's origin is unknown."""
    identity, objective = facts["identity"], facts["objective"]
    if identity is None:
        return _of_record(facts) if objective else {}
    settings, target = identity["settings"], identity["target_settings"]
    run = {_NAMES.get(name, name): value for name, value in settings.items() if name not in ("kappa", "tied", "untied")}
    usual = _DEFAULTS["run"] if _is_whole(identity) else {}
    found = {
        "run": usual | run | {"objective": objective, "step": facts["step"]},
        "text": {"plan": identity["plan"]} | {f"window {name}": v for name, v in identity["windowing"].items()},
    }
    if others := identity.get("other_targets"):  # a student of several stores; below are settings of the first
        named = {"teacher_name": "teacher", "layer": "layer", "k": "k", "lam": "lambda", "target": "target"}
        found["run"]["other_targets"] = [
            ", ".join(f"{name} {text(other[key])}" for key, name in named.items() if other.get(key) is not None)
            for other in others
        ]
    if objective == UNTRAINED:  # its weights depend only on these
        kept = {"objective", "step", "encoder", "run_seed", *found["text"]} - {"plan"}
        found = {group: {name: values[name] for name in values if name in kept} for group, values in found.items()}
    if objective == "mtl" or settings.get("kappa"):
        found["words beside"] = {"kappa": settings.get("kappa")}
    if objective in OVER_VOCABULARY:
        found["words"] = {"tied": not is_untied(settings | {"objective": objective})}
    if objective not in WITHOUT_TARGETS:
        names = {"teacher": target.get("teacher_name"), "teacher fingerprint": target.get("teacher")}
        shared = {f"teacher {name}": target[name] for name in _OF_TEACHER if name in target}
        found["teacher"] = _DEFAULTS["teacher"] | names | shared
        found |= _of_targets(objective, target, identity["tail"])
    if "probe" in identity:
        found["probe"] = {f"probe {name}": value for name, value in identity["probe"]["settings"].items()}
    return found


def _of_record(facts: dict) -> Groups:
    """The settings in a record without an identity."""
    found = {"run": {name: facts[name] for name in ("objective", "encoder", "run_seed", "step")}}
    if facts["kappa"] is not None:
        found["words beside"] = {"kappa": facts["kappa"]}
    if facts["objective"] not in WITHOUT_TARGETS:
        found["teacher"] = {"teacher": facts["teacher"]}
    if facts["objective"] in OF_LSP_STORES:
        found["lsp"] = {name: facts[name] for name in ("layer", "k", "lambda", "dictionary")}
    return found


def _of_targets(objective: str | None, target: dict, tail: dict | None) -> Groups:
    own = {name: value for name, value in target.items() if name not in (*_SKIPPED, *_OF_TEACHER)}
    if target.get("kind") == "hidden":
        return {"hidden": {f"hidden {name}": value for name, value in own.items()}}
    kept = {KEPT: tail["mass_kept"] if tail else UNKNOWN}
    if objective not in OF_LSP_STORES:
        return {"logits": _DEFAULTS["logits"] | {f"logits {name}": value for name, value in own.items()} | kept}
    learned = target.get("dictionary_settings", {})
    dictionary = {f"dictionary {name}": value for name, value in learned.items() if name not in ("k", "lam")}
    own = {_NAMES.get(name, name): value for name, value in own.items()}
    return {"lsp": _DEFAULTS["lsp"] | own | dictionary | kept}


def _add_mass(found: dict[str, dict[str, list[str]]], values: dict[str, Any], models: Sequence[HasOrigin]) -> None:
    """Add the mean mass kept if it differs, or if it is unknown and the targets differ."""
    identities = [model.facts["identity"] for model in models if model.label in values]
    targets = {identity["target"] for identity in identities if identity}
    numbers = [value for value in values.values() if isinstance(value, float | int)]
    is_whole = len(numbers) == len(values)
    same = is_whole and max(numbers) - min(numbers) < SAME_MASS
    if len(targets) > 1 and not same:
        found[KEPT] = _by_text(
            {label: value if value == UNKNOWN or value is None else f"{value:.1%}" for label, value in values.items()}
        )


def _by_text(values: dict[str, Any]) -> dict[str, list[str]]:
    shown = {label: text(value) for label, value in values.items()}
    if len(set(shown.values())) == 1 and len({_canonical(value) for value in values.values()}) > 1:
        shown = {label: str(value) for label, value in values.items()}  # those were equal only when shortened
    texts: dict[str, list[str]] = {}
    for label, said in shown.items():
        texts.setdefault(said, []).append(label)
    return texts


def text(value: object) -> str:
    """A setting's value as text: fingerprints by their first eight digits."""
    if value is None:
        return "not set"
    if isinstance(value, str):
        return value[:8] if re.fullmatch(r"[0-9a-f]{16,}", value) else value
    return f"{value:g}" if isinstance(value, float) else _canonical(value)


def _canonical(value):
    return json.dumps(value, sort_keys=True)


def _some(labels):
    return ", ".join(labels) if len(labels) <= 4 else f"{', '.join(labels[:3])} and {len(labels) - 3} more"
