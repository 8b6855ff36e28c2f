"""The description of a study, read from its recipe.

    study = read_study("study-demo")
    study.arms["mlsm"].seeds    # (0, 1, 2)

Like any recipe, a study's recipe has sections with the common settings of every command. It also has a section `study`
with its question, the hypotheses, the stores to make, and the arms. An arm is one pre-training condition; for each of
its seeds one student is trained. Arms differ only in their store and in the settings under their names, so a comparison
of two arms measures only that difference.

If a setting takes one value but the recipe has a list, there is an arm for each value: `kappa: [0.1, 1]` makes the arms
mtl-kappa0.1 and mtl-kappa1. A store with several layers or k is encoded in one pass of the teacher and becomes several
arms, one for each. A store with `seed: each` is made once for every seed of its arms, with a dictionary of that seed.
The commands and their order are in parts.py.
"""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from mlsm.common.errors import StudyError
from mlsm.common.invocation import program
from mlsm.common.settings import plain_hint
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.records import FROZEN
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
from mlsm.evaluation.tasks.blimp.config import BlimpConfig
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.recipes.reading import convert_section, read_recipe
from pipeline.config import (
    FROM_STORE,
    CorpusConfig,
    DictionaryConfig,
    EncodeConfig,
    EncodeHiddenConfig,
    EncodeIdsConfig,
    EncodeLogitsConfig,
)
from shards.config import DeriveConfig
from student.config import ProbeConfig, StudentConfig
from student.objectives import OBJECTIVES

STORES: dict[str, type] = {
    "encode-lsp": EncodeConfig,
    "encode-ids": EncodeIdsConfig,
    "encode-logits": EncodeLogitsConfig,
    "encode-hidden": EncodeHiddenConfig,
    "derive-shards": DeriveConfig,
}
TRAININGS = ("train-student", "train-probe")
SETTINGS: dict[str, type] = STORES | {
    "train-student": StudentConfig,
    "train-probe": ProbeConfig,
    "finetune": FinetuneConfig,
    "evaluate-blimp": BlimpConfig,
    "choose-layer": ChooseLayerConfig,
}
# `frozen`: for finetune --frozen, in addition to fine-tuning; `compare`: for the report, not a part
SECTIONS = SETTINGS | {"frozen": FinetuneConfig, "compare": CompareConfig}
OF_STUDY = (
    *("title", "question", "primary", "planned", "secondary", "seeds", "learned-by", "curves", "models", "stores"),
    *("arms", "tuned", "composite", "explored"),
)
FIXED = {  # defaults would depend on store, recipe or encoder
    "train-student": ("max_steps", "batch_windows", "lr", "dropout"),
    "train-probe": ("max_steps", "batch_windows"),
}
# set by the study, which expects the records of finetune where they are without --smoke and --split
CHOSEN_HERE = (
    *("store", "output", "run_dir", "models", "student", "data_dir", "step", "dry_run"),
    *("seed", "probe_input", "smoke", "split", "hidden", "frozen", "results", "diagnostic"),
)
# Objective -> the command that makes its store, for objectives that learn more than words:
NEEDED = {name: f"encode-{facts.kinds[0]}" for name, facts in OBJECTIVES.items() if len(facts.kinds) == 1}
OF_PROBES = ("softmax-", "logits-")  # a probe is named so, after its student
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")  # of stores and arms; used in directories, patterns and makefiles


class StoreRecipe(NamedTuple):
    """A store to make, or several stores in one pass of the teacher."""

    name: str
    verb: str
    """the command that makes it"""
    settings: dict[str, Any]
    """settings of that command, by field"""
    of: str | None = None
    """the store that it is derived from"""
    dictionary: str | None = None
    """the store whose dictionary it is encoded with"""
    hidden: str | None = None
    """the store of hidden states that is encoded or quantised instead of text"""
    each_seed: bool = False
    """whether it is made for every seed, with a dictionary of that seed"""

    @property
    def before(self) -> tuple[str, ...]:
        """The names of the stores that it is made from."""
        return tuple(name for name in (self.of, self.dictionary, self.hidden) if name is not None)

    def named(self, seed: int | None) -> str:
        """Its name, with the seed if it is made for every seed."""
        return f"{self.name}-seed{seed}" if self.each_seed else self.name

    def choices(self) -> Iterator[tuple[str, int | None, int | None]]:
        """For every store that it makes: the suffix of its arms' names, the layer, and k (for LSPs)."""
        if self.verb not in ("encode-lsp", "encode-hidden"):
            yield "", None, None
            return
        layers, ks = (self.settings.get(name, getattr(DictionaryConfig, name)) for name in ("layer", "k"))
        if self.hidden is not None:
            layers = (None,)  # the hidden states' layer, which `*` matches
        for layer, k in product(layers, ks if self.verb == "encode-lsp" else (None,)):
            suffix = (f"-l{layer}" if len(layers) > 1 else "") + (f"-k{k}" if len(ks) > 1 else "")
            yield suffix, layer, k


class PlannedArm(NamedTuple):
    """A pre-training condition."""

    name: str
    store: str
    layer: int | None
    k: int | None
    settings: dict[str, Any]
    """settings of train-student, by field: the common ones and the arm's own"""
    seeds: tuple[int, ...]

    def student(self, seed: int) -> str:
        """The name of a seed's student: of its run and, when it is finished, of its model in records."""
        return f"{self.name}-seed{seed}"


class Composite(NamedTuple):
    """The score of a student that the hypotheses are about: a mean over frozen measures,

    100 * (score - untrained) / (teacher - untrained).
    """

    measures: tuple[str, ...]
    """tasks and metrics of `finetune --frozen`, such as `conll2003/entities`"""
    part: str
    """the split: `test`, or dev if a task has no test set; `tuning` in a pilot"""
    untrained: str
    """the arm whose checkpoints of step 0 are the lower anchor"""
    teacher: str
    """the model that is the upper anchor, one of the study's `models`"""
    margin: float | None
    """the margin of the equivalence test of the primary arms; None: no such test"""


class Study(NamedTuple):
    """A study as described in its recipe."""

    title: str
    question: str
    primary: tuple[str, str]
    """names of two arms: the hypothesis is that the first is better"""
    secondary: tuple[tuple[str, str], ...]
    """further hypotheses, tested by Holm's method; all other comparisons are exploratory"""
    learned_by: str | None
    """an arm: a task is part of the tested means only if this arm is above its untrained students on it; None: all
    tasks are
    """
    curves: tuple[str, ...]
    """arms whose kept checkpoints are all evaluated; for other arms only the finished students are"""
    models: tuple[str, ...]
    """models that are evaluated in addition to the students, such as the teacher"""
    stores: dict[str, StoreRecipe]
    arms: dict[str, PlannedArm]
    common: dict[str, dict[str, Any]]
    """settings of compare, and of those of frozen, finetune, evaluate-blimp, train-probe and choose-layer that are to
    be run
    """
    tuned: tuple[str, ...]
    """the arms that are fine-tuned and take part in BLiMP"""
    composite: Composite | None = None
    """the score that is tested; None: the mean fine-tuning scores, in the report"""
    planned: bool = True
    """whether the primary comparison was fixed before its scores were seen; else it is exploratory"""
    explored: tuple[tuple[str, str], ...] = ()
    """comparisons on the composite that are shown as exploratory, with intervals and without p values"""

    @property
    def window(self) -> int:
        """The length of the students' windows in tokens; it is the same for all stores."""
        encoded = [recipe.settings for recipe in self.stores.values() if recipe.of is None and recipe.hidden is None]
        return min(settings.get("max_length", CorpusConfig.max_length) for settings in encoded)

    @property
    def seeds(self) -> tuple[int, ...]:
        """Pre-training seeds of the primary comparison."""
        return self.seeds_of(self.primary)

    def seeds_of(self, hypothesis: tuple[str, str]) -> tuple[int, ...]:
        """Pre-training seeds of a comparison: those that both arms have."""
        better, than = (self.arms[name].seeds for name in hypothesis)
        return tuple(seed for seed in better if seed in than)


def read_study(recipe: str) -> Study:
    """Read a study's recipe.

    recipe  name of one that comes with the package, or path of a YAML file
    Raises  ValueError if it is not readable or a setting does not fit; StudyError if arms, stores and hypotheses do not
            fit together
    """
    path, sections = read_recipe(recipe)
    own = sections.pop("study", None)
    if own is None:
        raise StudyError(
            f"recipe {path} has no section `study`, so it does not describe a study. `mlsm help study` lists those "
            "that do"
        )
    _check_names(path, "study", own, OF_STUDY)
    _check_names(path, "a study's recipe", sections, tuple(SECTIONS))
    for name in ("title", "question", "primary", "seeds", "stores", "arms"):
        if not own.get(name):
            raise StudyError(
                f"recipe {path}: study has no {name}. {program()} docs study describes the sections of a study."
            )
    own = _give_shape(path, own)
    common = {verb: section or {} for verb, section in sections.items()}
    stores = dict(_read_stores(path, own["stores"], common))
    _check_order(path, stores)
    arms: dict[str, PlannedArm] = {}
    for arm in _read_arms(path, own, stores, common):
        if arms.setdefault(arm.name, arm) is not arm:
            raise StudyError(f"recipe {path}: two arms are called {arm.name}. Rename one of them.")
    converted = {verb: _convert(path, verb, common[verb]) for verb in common if verb not in (*STORES, "train-student")}
    pairs = [own["primary"], *own["secondary"], *own["explored"]]
    named = [("a comparison", pair) for pair in pairs] + [(f"`{name}`", own[name]) for name in ("tuned", "curves")]
    for where, names in named:
        if unknown := [name for name in names if name not in arms]:
            raise StudyError(f"recipe {path}: {unknown[0]} of {where} is not an arm. The arms are: {', '.join(arms)}")
    hypotheses = [own["primary"], *own["secondary"]]
    for number, pair in enumerate(hypotheses):
        if any(set(pair) == set(other) for other in hypotheses[:number]):
            raise StudyError(f"recipe {path}: the hypothesis {' and '.join(pair)} is given twice. Remove one.")
    study = Study(
        title=str(own["title"]),
        question=str(own["question"]),
        primary=own["primary"],
        secondary=own["secondary"],
        learned_by=own["learned-by"],
        curves=own["curves"],
        models=own["models"],
        stores=stores,
        arms=arms,
        common=converted,
        tuned=own["tuned"] or tuple(arms),
        composite=own["composite"],
        planned=own["planned"],
        explored=own["explored"],
    )
    _check_composite(path, study)
    if study.learned_by is not None:
        learner = arms.get(study.learned_by)
        if learner is None or study.learned_by not in study.curves or 0 not in learner.settings.get("checkpoints", ()):
            raise StudyError(
                f"recipe {path}: only tasks in which the arm `learned-by` is above its untrained student are counted, "
                f"so this arm must be among `curves` and have `checkpoints: [0, ...]`; found {study.learned_by!r}"
            )
    for pair in pairs:
        if not study.seeds_of(pair):
            raise StudyError(
                f"recipe {path}: the arms {' and '.join(pair)} have no seed in common, so they form no pair."
            )
    return study


def _give_shape(path: Path, own: Mapping) -> dict[str, Any]:
    """Normalise the section `study`: lists become tuples, texts strings, and missing entries are empty."""
    shaped = dict(own)
    for name in ("stores", "arms"):
        if not isinstance(own[name], Mapping):
            raise StudyError(f"recipe {path}: study {name} must be a mapping of names to settings, found {own[name]!r}")
        for called, settings in own[name].items():
            if not NAME.fullmatch(str(called)):
                raise StudyError(
                    f"recipe {path}: study {name}: {called!r} is not a valid name. A name has only letters, digits "
                    "and . _ + -, and starts with a letter or a digit."
                )
            if not isinstance(settings, Mapping | None):
                raise StudyError(
                    f"recipe {path}: study {name}: {called} must be a mapping of settings, found {settings!r}"
                )
        shaped[name] = {str(called): dict(settings or {}) for called, settings in own[name].items()}
    shaped["composite"] = _read_composite(path, own.get("composite"))
    for name in ("curves", "models", "tuned"):
        shaped[name] = tuple(os.path.expandvars(str(one)) for one in _list(path, name, own.get(name)))
    learner = own.get("learned-by")
    shaped["learned-by"] = None if learner is None else str(learner)
    shaped["seeds"] = _read_seeds(path, "study", own["seeds"])
    shaped["planned"] = own.get("planned", True)
    if type(shaped["planned"]) is not bool:
        raise StudyError(f"recipe {path}: study planned must be true or false, found {shaped['planned']!r}")
    shaped["primary"] = _read_pair(path, own["primary"])
    for name in ("secondary", "explored"):
        shaped[name] = tuple(_read_pair(path, pair) for pair in _list(path, name, own.get(name)))
    if shaped["explored"] and shaped["composite"] is None:
        raise StudyError(f"recipe {path}: `explored` compares arms on the composite: add a section `composite`.")
    return shaped


def _read_pair(path: Path, pair: object) -> tuple[str, str]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise StudyError(f"recipe {path}: a comparison must name two arms, [better, than], found {pair!r}")
    if pair[0] == pair[1]:
        raise StudyError(f"recipe {path}: a comparison must name two different arms, found {pair!r}")
    return str(pair[0]), str(pair[1])


def _read_composite(path: Path, described: object) -> Composite | None:
    if described is None:
        return None
    _check_names(path, "study composite", described, Composite._fields)
    assert isinstance(described, Mapping)
    measures = _list(path, "composite measures", described.get("measures"))
    known = [f"{task}/{metric}" for task, metrics in FROZEN.items() for metric in metrics]
    if unknown := [measure for measure in measures if measure not in known]:
        raise StudyError(f"recipe {path}: no frozen measure is called {unknown[0]!r}. There are: {', '.join(known)}")
    if not measures or len(set(measures)) < len(measures):
        raise StudyError(f"recipe {path}: study composite must have different measures, found {measures!r}")
    part, margin = described.get("part", "test"), described.get("margin")
    if part not in ("test", "tuning"):
        raise StudyError(f"recipe {path}: study composite part must be `test` or `tuning`, found {part!r}")
    if margin is not None and (type(margin) not in (int, float) or not 0 < margin < 100):
        raise StudyError(f"recipe {path}: study composite margin must be a number of points above 0, found {margin!r}")
    for name in ("untrained", "teacher"):
        if not isinstance(described.get(name), str):
            raise StudyError(f"recipe {path}: study composite must name its {name}, found {described.get(name)!r}")
    return Composite(tuple(measures), part, described["untrained"], os.path.expandvars(described["teacher"]), margin)


def _check_composite(path: Path, study: Study) -> None:
    """Raise StudyError if the composite's measures or anchors are not among what the study evaluates."""
    composite = study.composite
    if composite is None:
        return
    if "frozen" not in study.common:
        raise StudyError(f"recipe {path}: a composite is a mean of frozen measures: add a section `frozen`.")
    chosen = FinetuneConfig(**study.common["frozen"]).chosen_tasks()
    if missing := [measure for measure in composite.measures if measure.split("/")[0] not in chosen]:
        raise StudyError(f"recipe {path}: {missing[0]} of the composite is not among the tasks of `frozen`.")
    if composite.teacher not in study.models:
        raise StudyError(
            f"recipe {path}: the composite's teacher {composite.teacher} is not one of the study's models."
        )
    arm = study.arms.get(composite.untrained)
    if arm is None or composite.untrained not in study.curves or 0 not in arm.settings.get("checkpoints", ()):
        raise StudyError(
            f"recipe {path}: the composite's lower anchor must be an arm of `curves` with `checkpoints: [0, ...]`, "
            f"found {composite.untrained!r}"
        )


def _list(path: Path, name: str, value: object) -> list:
    if not isinstance(value, list | None):
        raise StudyError(f"recipe {path}: study {name} must be a list, found {value!r}. Write [{value}].")
    return value or []


def _read_seeds(path: Path, where: str, value: object) -> tuple[int, ...]:
    seeds = value if isinstance(value, list) else []
    if not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds) or len(set(seeds)) < len(seeds):
        raise StudyError(
            f"recipe {path}: {where}: seeds must be different whole numbers of at least 0, such as [0, 1, 2], found "
            f"{value!r}"
        )
    return tuple(seeds)


def _read_stores(path: Path, described: Mapping, common: Mapping) -> Iterator[tuple[str, StoreRecipe]]:
    for name, own in described.items():
        own = dict(own)
        verb = own.pop("command", "encode-lsp")
        if not isinstance(verb, str) or verb not in STORES:
            raise StudyError(f"recipe {path}: store {name}: {verb} does not make stores. These do: {', '.join(STORES)}")
        of, dictionary, hidden = own.pop("store", None), own.pop("dictionary", None), own.pop("hidden", None)
        each_seed = own.get("seed") == "each"
        if each_seed:
            del own["seed"]
            if verb != "encode-lsp" or dictionary is not None:
                raise StudyError(
                    f"recipe {path}: store {name}: `seed: each` is only for encode-lsp, which learns a dictionary "
                    "with that seed."
                )
        for other in (of, dictionary, hidden):
            if other is not None and (not isinstance(other, str) or other not in described):
                raise StudyError(f"recipe {path}: store {name} needs {other}, which is not a store of the study.")
        if dictionary is not None and verb != "encode-lsp":
            raise StudyError(f"recipe {path}: store {name}: `dictionary` is only for encode-lsp, found {verb}.")
        if (of is None) == (verb == "derive-shards"):
            raise StudyError(f"recipe {path}: store {name}: `store` is only for derive-shards, which requires it.")
        if hidden is not None and (
            verb not in ("encode-lsp", "encode-hidden") or described[hidden].get("command") != "encode-hidden"
        ):
            raise StudyError(
                f"recipe {path}: store {name}: `hidden` must name a store of encode-hidden, and is only for "
                "encode-lsp or encode-hidden"
            )
        section = common.get(verb, {}) | own
        if hidden is not None:  # text and teacher come from that store
            section = {
                key: value for key, value in section.items() if key in own or key.replace("-", "_") not in FROM_STORE
            }
        settings = _convert(path, verb, section)
        yield name, StoreRecipe(name, verb, settings, of, dictionary, hidden, each_seed)


def _check_order(path: Path, stores: Mapping[str, StoreRecipe]) -> None:
    """Raise StudyError if a store is made from itself, or from an entry that makes several stores."""
    for recipe in stores.values():
        _check_acyclic(path, stores, recipe, (recipe.name,))
        if each := [name for name in recipe.before if stores[name].each_seed]:
            raise StudyError(
                f"recipe {path}: store {recipe.name}: {each[0]} is made for every seed, and only arms can use such a "
                "store."
            )
        of = recipe.of or recipe.hidden
        several = recipe if recipe.dictionary is not None else stores[of] if of is not None else None
        if several is not None and len(list(several.choices())) > 1:
            raise StudyError(
                f"recipe {path}: store {recipe.name}: {several.name} has several layers or values of k, which do not "
                f"fit one dictionary or one derived store. Give {several.name} one layer and one k."
            )


def _check_acyclic(path: Path, stores: Mapping[str, StoreRecipe], recipe: StoreRecipe, seen: tuple[str, ...]) -> None:
    for name in recipe.before:
        if name in seen:
            raise StudyError(f"recipe {path}: store {seen[0]} is made from itself: {' from '.join([*seen, name])}.")
        _check_acyclic(path, stores, stores[name], (*seen, name))


def _read_arms(path: Path, own: Mapping, stores: Mapping, common: Mapping) -> Iterator[PlannedArm]:
    for name, described in own["arms"].items():
        described = dict(described)
        seeds = _read_seeds(path, f"arm {name}", described.pop("seeds")) if "seeds" in described else own["seeds"]
        store = described.pop("store", None)
        if not isinstance(store, str) or store not in stores:
            raise StudyError(f"recipe {path}: arm {name}: store {store} is not among {', '.join(stores)}")
        for suffix, values in _variants(StudentConfig, described):
            settings = _convert(path, "train-student", common.get("train-student", {}) | values)
            objective, maker = settings.get("objective", StudentConfig.objective), _maker_of(stores, store)
            if NEEDED.get(objective, maker) != maker:
                raise StudyError(
                    f"recipe {path}: arm {name}: objective {objective} learns from a store of {NEEDED[objective]}, but"
                    f" {store} is one of {maker}."
                )
            choices = list(stores[store].choices())
            if objective not in NEEDED:  # learns only the words, which are the same for every layer and k
                choices = [("", *choices[0][1:])]
            for of_store, layer, k in choices:
                arm = f"{name}{of_store}{suffix}"
                if not NAME.fullmatch(arm):
                    raise StudyError(
                        f"recipe {path}: {arm!r} cannot be the name of an arm. Write its values as separate arms."
                    )
                if arm.startswith(OF_PROBES):
                    raise StudyError(
                        f"recipe {path}: {arm!r} cannot be the name of an arm, since the names of probes begin with "
                        f"{' and '.join(OF_PROBES)}. Rename the arm."
                    )
                yield PlannedArm(arm, store, layer, k, settings, seeds)


def _maker_of(stores: Mapping[str, StoreRecipe], name: str) -> str:
    """The command that originally made a store's content, also for a derived store."""
    of = stores[name].of
    return stores[name].verb if of is None else _maker_of(stores, of)


def _variants(settings_class: type, described: Mapping) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of values, for settings that have a list although the command takes one value."""
    hints = {field.name: plain_hint(field.type) for field in dataclasses.fields(settings_class)}
    varied = []
    for name, value in described.items():
        hint = hints.get(str(name).replace("-", "_"))
        takes_several = any(get_origin(kind) is tuple for kind in (hint, *get_args(hint)))
        if isinstance(value, list) and not takes_several:
            varied.append(name)
    for values in product(*(described[name] for name in varied)):
        chosen = dict(zip(varied, values, strict=True))
        yield "".join(f"-{name}{value}" for name, value in chosen.items()), {**described, **chosen}


def _convert(path: Path, verb: str, section: Mapping) -> dict[str, Any]:
    """The settings of a command by field, after a check together with the defaults of the others."""
    settings = convert_section(dict(section), verb, SECTIONS[verb], path)
    if open_ones := [field for field in FIXED.get(verb, ()) if settings.get(field) is None]:
        raise StudyError(
            f"recipe {path}: {verb} lacks {', '.join(open_ones)}. A study must set them itself: otherwise they follow "
            "from the store or the encoder, and may differ between arms."
        )
    if "corpus" in settings:
        settings["corpus"] = tuple(map(os.path.expandvars, settings["corpus"]))  # $MLSM_DATA
    if settings.get("teacher") is not None:
        settings["teacher"] = os.path.expandvars(settings["teacher"])
    if settings.get("k", ...) is None:
        del settings["k"]
    for name in CHOSEN_HERE:
        if name in settings and not (name == "seed" and verb not in TRAININGS):
            raise StudyError(f"recipe {path}: {verb}: the study itself sets {name.replace('_', '-')}. Leave it out.")
    if verb == "frozen":
        settings["frozen"] = True
    try:
        SECTIONS[verb](**settings)
    except ValueError as error:
        raise ValueError(f"recipe {path}, {verb}: {error}") from None
    return settings


def _check_names(path: Path, what: str, found: Any, known: tuple[str, ...]) -> None:
    if not isinstance(found, Mapping):
        raise StudyError(f"recipe {path}: {what} must be a mapping of names to values, found {found!r}")
    if unknown := sorted(str(name) for name in found if name not in known):
        raise StudyError(f"recipe {path}: {what} has no {', '.join(unknown)}. It has: {', '.join(known)}")
