"""Facts for the report that come from the study, not from records: hypotheses, arms, costs, parts not run.

Costs are stored in <output>/costs.json when they are first estimated, since finished parts are not measured again. A
hash of the settings is stored with each: if the recipe changes, the cost is measured again. The plan of the tests is
stored in <output>/plan.json at every start before the first evaluation is recorded, so the report can name later
changes. A study that was scored before this file existed has none, and its changes are not known. Not handled here: the
page (mlsm/evaluation/comparison), and the estimates (costs.py).
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_json
from mlsm.common.json_checks import Count, Number, find_problem, object_of
from mlsm.common.json_lines import read_json_lines
from mlsm.evaluation.comparison.config import Spent, StudyFacts
from mlsm.evaluation.comparison.curves import quiet_step_seconds
from mlsm.evaluation.comparison.identity import text
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.costs import Cost, is_finished, name_in_records
from mlsm.evaluation.studies.protocol.description import NEEDED, OF_PROBES, TRAININGS, PlannedArm, Study
from mlsm.evaluation.studies.protocol.parts import Made, Part, StudyPlan, name_of
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from student.config import StudentConfig
from student.runs.identity import read_or_none

KEPT = "costs.json"
PLAN = "plan.json"
MINIATURE = (
    "All models were fine-tuned on built-in miniature data, because no evaluation data was available: the "
    "scores mean nothing, and neither does the conclusion."
)
COST = object_of({"seconds": Number, "bytes": Count, "settings": str})  # of a part, as stored
PLACES = ("output", "run_dir", "models", "student")  # settings that only say where a part's files are


def kept_costs(directory: Path, parts: Iterable[Part]) -> dict[str, dict]:
    """The stored estimates of those parts that still have the settings that were measured: part -> seconds and bytes.

    parts  all parts of the study, in order
    """
    kept, hashes = _stored(directory), _hash_settings(parts)
    return {name: kept[name] for name, found in hashes.items() if name in kept and kept[name]["settings"] == found}


@refuse_what_is_in_the_way()
def keep_costs(costs: Iterable[Cost], directory: Path, parts: Iterable[Part]) -> dict[str, dict]:
    """Store the estimates of unfinished parts, which are the stored ones if there are any. Returns as `kept_costs`."""
    parts = list(parts)
    hashes = _hash_settings(parts)
    new = {
        cost.part: {"seconds": cost.seconds, "bytes": cost.bytes, "settings": hashes[cost.part]}
        for cost in costs
        if not cost.finished
    }
    make_directories(directory)
    replace_json(directory / KEPT, _stored(directory) | new)
    return kept_costs(directory, parts)


def _stored(directory: Path) -> dict[str, dict]:
    return read_or_none(directory / KEPT, _are_costs) or {}


def _hash_settings(parts: Iterable[Part]) -> dict[str, str]:
    """For every part, a hash of its settings without places and of those of the parts that it needs, such as of the
    student that it evaluates: its cost depends on all of them.
    """
    found: dict[str, str] = {}
    for part in parts:  # each comes after those that it needs
        own = [(k, str(v)) for k, v in sorted(part.values.items()) if k not in PLACES and not isinstance(v, Made)]
        content = repr([part.verb, own, [found[name] for name in part.needs]])
        found[part.name] = hashlib.sha256(content.encode()).hexdigest()[:16]
    return found


def _are_costs(found: object) -> bool:
    return isinstance(found, dict) and all(find_problem(cost, COST) is None for cost in found.values())


@refuse_what_is_in_the_way()
def keep_plan(study: Study, settings: StudyConfig) -> None:
    """Store what the study tests, as long as no evaluation is recorded."""
    if not any(settings.evaluations.glob("*/*/*.json")):
        make_directories(settings.directory)
        replace_json(settings.directory / PLAN, _plan_of(study))


def find_changes(study: Study, settings: StudyConfig) -> str:
    """A sentence on what was changed in the plan of the tests after the first scores; empty if nothing was."""
    file, now = settings.directory / PLAN, _plan_of(study)
    if not file.exists():
        return ""
    was = read_or_none(file, lambda found: isinstance(found, dict) and found.keys() == now.keys())
    if was is None or not isinstance(was["seeds"], dict):
        return f"It is unknown what was changed after the first scores: {file} cannot be read."
    changed = [f"{name} (was {_shown(was[name])})" for name in now if name != "seeds" and was[name] != now[name]]
    by_seeds: dict[tuple[str, str], list[str]] = {}  # (how they were changed, seeds) -> arms
    for how, one, other in (("added", now["seeds"], was["seeds"]), ("removed", was["seeds"], now["seeds"])):
        changed += [f"arm {arm} ({how})" for arm in one if arm not in other]
        for arm in one.keys() & other.keys():
            if seeds := [seed for seed in one[arm] if seed not in other[arm]]:
                by_seeds.setdefault((how, _shown(seeds)), []).append(arm)
    changed += [
        f"seeds {seeds} of {', '.join(sorted(arms))} ({how})" for (how, seeds), arms in sorted(by_seeds.items())
    ]
    return f"Changed after the first scores: {', '.join(changed)}." if changed else ""


def _plan_of(study: Study) -> dict[str, Any]:
    """What the study tests, as it is stored."""
    composite = study.composite
    return {
        "primary": " > ".join(study.primary),
        "planned": study.planned,
        "secondary": list(map(" > ".join, study.secondary)),
        "learned-by": study.learned_by,
        "measures": composite and list(composite.measures),
        "part": composite and composite.part,
        "margin": composite and composite.margin,
        "seeds": {arm.name: list(arm.seeds) for arm in study.arms.values()},
    }


def _shown(value: Any) -> str:
    """A value of the plan as text."""
    return (", ".join(map(str, value)) or "none") if isinstance(value, list) else text(value)


def facts_of(
    study: Study,
    planned: StudyPlan,
    kept: dict[str, dict],
    composite: Mapping[str, Any] | None = None,
    changed: str = "",
) -> StudyFacts:
    """The facts for the report.

    kept       of `keep_costs`
    composite  of `compose`; None if the recipe has none
    changed    of `find_changes`
    """
    named = {name for pair in (study.primary, *study.secondary) for name in pair}
    explored = [name for name in study.arms if name not in named]
    not_run = [*planned.left_out, *_not_run(planned.parts)]
    arms = {  # an arm's students and their probes
        name: tuple(f"{probe}{arm.student(seed)}" for seed in arm.seeds for probe in ("", *OF_PROBES))
        for name, arm in study.arms.items()
    }
    accounts = {name: _account(study, arm, kept) for name, arm in study.arms.items()}
    tuning = (part.values for part in planned.parts if part.name.startswith("finetune/"))
    tuned = next((values for values in tuning if not values.get("smoke")), None)  # all have the same tasks
    return StudyFacts(
        title=study.title,
        question=study.question,
        primary=study.primary,
        planned=study.planned,
        secondary=study.secondary,
        exploratory=(f"Also planned, without a hypothesis: {', '.join(explored)}.",) if explored else (),
        arms=arms,
        models=tuple(name for model in study.models for name in (name_in_records(model), Path(model).name)),
        seeds=study.seeds,
        tasks=() if tuned is None else tuple(FinetuneConfig(tasks=tuned.get("tasks", ("all",))).chosen_tasks()),
        learned_by=study.learned_by,
        seeds_of={pair: study.seeds_of(pair) for pair in study.secondary},
        parts=tuple(_spent(part, kept.get(part.name)) for part in planned.parts),
        accounts={name: account for name, account in accounts.items() if account is not None},
        warning=MINIATURE if any(part.values.get("smoke") for part in planned.parts) else "",
        not_run=tuple(not_run),
        composite=composite,
        changed=changed,
    )


def _not_run(parts: list[Part]) -> list[str]:
    """Sentences that list the unfinished parts that can run now, and count those that wait for them."""
    missing = {part.name: part for part in parts if not is_finished(part, parts)}
    ready = [name for name, part in missing.items() if missing.keys().isdisjoint(part.needs)]
    if not ready:
        return []
    waiting = len(missing) - len(ready)
    return [f"Not run yet: {', '.join(ready)}{f'; and {waiting} parts that depend on these' if waiting else ''}."]


def _account(study: Study, arm: PlannedArm, kept: dict[str, dict]) -> dict[str, float] | None:
    """The cost of an arm in addition to its own training; None if it was not estimated."""
    if arm.settings.get("objective", StudentConfig.objective) not in NEEDED:
        return {}  # it needs only ids, whatever else its store has
    recipes = [study.stores[name] for name in dict.fromkeys(_with_those_before(study, arm.store))]
    costs = [kept.get(name_of(one, arm.seeds[0])) for one in recipes]  # other seeds cost the same
    known = [cost["seconds"] for cost in costs if cost is not None]
    return {"encoding": sum(known)} if len(known) == len(costs) else None


def _with_those_before(study: Study, store: str) -> Iterator[str]:
    yield store
    for before in study.stores[store].before:
        yield from _with_those_before(study, before)


def _spent(part: Part, expected: dict | None) -> Spent:
    measured = None
    if part.verb in TRAININGS:
        with suppress(OSError):
            lines, _ = read_json_lines(Path(part.values["run_dir"]) / "log.jsonl")
            step = quiet_step_seconds(lines)
            measured = step and step * max(line["step"] for line in lines)
    return Spent(
        name=part.name,
        predicted_seconds=expected["seconds"] if expected else None,
        measured_seconds=measured,
        bytes=(expected["bytes"] or None) if expected else None,
    )
