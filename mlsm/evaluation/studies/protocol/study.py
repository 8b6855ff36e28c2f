"""The command `study`: run all parts of a study from its recipe, one after the other, and write the report.

    study(StudyConfig(recipe="study-demo"), progress)

It first reports what the parts will cost, then runs them in the order of parts.py. After the parts of the primary
hypothesis, and again at the end, the models are compared and the report is written. Every part is one of our commands,
which skips finished work and continues where it was interrupted; so does the study. A part is the work of one commit of
this code (cells.py). Before a student is trained, its store must have the same plan as the first store: otherwise two
arms would not have the same batches and masks. Not handled here: the description of a study (description.py), its parts
(parts.py), the page (mlsm/evaluation/comparison).
"""

import difflib
import glob
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from mlsm.common.errors import MlsmError, StudyError
from mlsm.common.progress import silent
from mlsm.evaluation import records
from mlsm.evaluation.comparison.compare import compare, keep_withheld
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.comparison.intruders import read_judgements
from mlsm.evaluation.studies.protocol.cells import at_work, state_of, this_commit
from mlsm.evaluation.studies.protocol.composite import compose
from mlsm.evaluation.studies.protocol.config import StudyConfig
from mlsm.evaluation.studies.protocol.costs import Cost, costs, is_finished, is_made
from mlsm.evaluation.studies.protocol.description import Study, read_study
from mlsm.evaluation.studies.protocol.facts import facts_of, find_changes, keep_costs, keep_plan, kept_costs
from mlsm.evaluation.studies.protocol.parts import Part, StudyPlan, find_diagnostic, plan
from mlsm.evaluation.studies.protocol.printing import as_make, as_slurm, compare_line
from mlsm.evaluation.studies.protocol.students import write_students
from pipeline.commands import ADDED_LATER, select_settings
from pipeline.config import FROM_STORE, PLACES
from shards.reader import Store
from student.config import UNNAMED, StudentConfig
from student.masks.config import ADAPTIVE, KINDS, UNIFORM

# Of a run's settings: recorded by content, or added by its task.
NOT_COMPARED = {"continue_from", "segments", "other_targets", "wordnet"}
DIGITS = "????????"  # of the weights or a step, in the name of a model's records
OF_THE_MACHINE = {"output", "teacher", "tokenizer", "device", "batch_tokens"}  # settings of an encoding
logger = logging.getLogger(__name__)


def study(settings: StudyConfig, progress: Callable[..., None] = silent) -> dict:
    """Run the unfinished parts of a study.

    progress  called as progress(stage, done, total, unit=..., **figures)
    Returns   title, question, directory, parts (name, seconds and bytes expected, finished before, state and commit),
              left_out (sentences on parts that cannot be run here), composite (of `compose`; None if the recipe has
              none), changed (of `find_changes`), comparison (the result of `compare`, None if nothing has been
              evaluated), tables (the command that prints it; None while the primary hypothesis is withheld), students
              (of `write_students`), quarantined (store, and the number of its documents that could not be coded, if
              there are any). With print_commands only `commands`; with dry_run nothing is done
    Raises    StudyError, ValueError before anything is done, and the errors of the parts' commands
    """
    described = read_study(settings.recipe)
    planned = plan(described, settings.directory, settings.data)
    chosen = choose_parts(planned.parts, settings.only)
    if settings.print_commands is not None:
        keep_plan(described, settings)
        _judge(described, settings.directory)  # so that `compare` withholds what the study withholds
        lines = as_make if settings.print_commands == "make" else as_slurm
        return {"commands": lines(chosen, settings)}
    expected = list(costs(chosen, planned.parts, kept_costs(settings.directory, planned.parts), progress))
    kept = {}
    if not settings.dry_run:
        keep_plan(described, settings)
        kept = keep_costs(expected, settings.directory, planned.parts)
    found: dict[str, Any] = {
        "title": described.title,
        "question": described.question,
        "directory": str(settings.directory),
        "parts": _with_states(expected, settings.directory),
        "left_out": planned.left_out,
        "composite": None,
        "changed": find_changes(described, settings),
        "comparison": None,
        "students": [],
    }
    if settings.dry_run:
        return found | {"composite": _compose(described, settings.directory)}
    if costly := [cost for cost in expected if not cost.finished]:
        hours, gigabytes = sum(cost.seconds for cost in costly) / 3600, sum(cost.bytes for cost in costly) / 1e9
        logger.info("%d parts are left, about %.2g hours and %.2g GB", len(costly), hours, gigabytes)
    for sentence in planned.left_out:
        logger.warning("%s", sentence)
    read_judgements(described.common.get("compare", {}).get("intruders", ()))  # raises errors now, not at the end
    _judge(described, settings.directory)
    last_of_primary = planned.parts[planned.first - 1]
    plan_id, commit = _plan_of_students(planned, settings.evaluations), this_commit()
    quarantined: list[dict] = []
    for number, part in enumerate(chosen, 1):
        if _is_kept_by_records(part, planned.parts):
            _refuse_other_records(part, settings.evaluations)
            logger.info(
                "part %d of %d: %s was finished, but its student or store is gone", number, len(chosen), part.name
            )
            continue
        logger.info("part %d of %d: %s", number, len(chosen), part.name)
        if part.verb == "train-student":
            plan_id = _check_pairing(part, plan_id)
        # A finished part is also run: its command checks whether it was made with these settings. One that encodes
        # would make another store instead.
        _refuse_other_settings(part)
        with nullcontext() if is_finished(part, planned.parts) else at_work(settings.directory, part.name, commit):
            made = part.run(_name_stages(progress, part.name))
        if part.verb == "choose-layer":
            find_diagnostic(planned.parts)  # raises here, not at the end, if there is another, of other settings
        if part.verb.startswith("encode-"):
            quarantined += [{name: one[name] for name in ("store", "quarantined")} for one in made]
        if part is last_of_primary and part is not chosen[-1]:
            composite = _judge(described, settings.directory)
            _compare(settings, described, planned, kept, composite, progress)  # the first conclusion
    done = [
        cost._replace(finished=is_finished(part, planned.parts)) for cost, part in zip(expected, chosen, strict=True)
    ]
    composite = _judge(described, settings.directory)
    is_withheld = composite is not None and composite["withheld"]
    hidden = described.primary if is_withheld else ()
    return found | {
        "parts": _with_states(done, settings.directory),
        "students": write_students(described, planned.parts, settings.directory / "students.csv", hidden),
        "quarantined": [one for one in quarantined if one["quarantined"]],
        "composite": composite,
        "comparison": _compare(settings, described, planned, kept, composite, progress),
        "tables": None if is_withheld else compare_line(_comparison(settings, described, planned)),
    }


def _refuse_other_settings(part: Part) -> None:
    """Raise StudyError if the stores of a part that encodes were made with other settings than its own.

    Of paths only the last part is compared, of teacher and tokenizer nothing: a study may continue on another machine.
    """
    if not part.verb.startswith("encode-"):
        return
    settings = part.settings()
    own = select_settings(settings)
    known = {field.name: field.default for field in fields(settings)} | ADDED_LATER  # what a store leaves out
    compared = known.keys() - OF_THE_MACHINE - (FROM_STORE if getattr(settings, "hidden", None) else set())
    for file in sorted(Path(part.values["output"]).glob("stores/*/plans/*.yaml")):
        made = yaml.safe_load(file.read_text(encoding="utf-8")).get(part.verb)
        for name in sorted((own.keys() | made.keys()) & compared) if made else ():
            found, wanted = (_last_parts(kept.get(name, known[name]), name) for kept in (made, own))
            if name == "k" and wanted is None:
                continue  # it is that of the dictionary
            if not (set(found) <= set(wanted) if name in ("layer", "k") else found == wanted):
                raise StudyError(
                    f"{part.name}: {file.parents[1]} was made with {name.replace('_', '-')} {found}, and the recipe "
                    f"says {wanted}. Nothing was changed. Use the settings that it was made with, or another --output."
                )


def _refuse_other_records(part: Part, evaluations: Path) -> None:
    """Raise StudyError if the records of a student that is gone are of one that was trained with other settings."""
    if part.verb != "train-student":
        return
    name = Path(part.values["run_dir"]).name
    wanted = StudentConfig(**part.values | {"store": str(part.values["store"])}).identity()
    for pattern in (f"{name}-{DIGITS}", f"{name}-step-{DIGITS}-{DIGITS}"):
        for file in sorted(evaluations.glob(f"{pattern}/*/*.json")):
            trained = records.read_file(file)["identity"]["settings"]
            for setting in sorted((wanted.keys() | trained.keys()) - NOT_COMPARED):
                asked, found = (identity.get(setting, UNNAMED.get(setting)) for identity in (wanted, trained))
                if setting in ("compile", "dtype") and asked in (None, "auto"):  # they follow from the machine
                    continue
                if setting == "mask_weights":  # recorded with their content, of which a recipe says nothing
                    asked, found = _kinds_of(asked), _kinds_of(found)
                if asked != found:
                    raise StudyError(
                        f"{part.name}: {file.parents[1]} has records of a student with {setting.replace('_', '-')} "
                        f"{found}, and the recipe says {asked}. Nothing was changed. Use the settings that it was "
                        "trained with, or another --output."
                    )


def _kinds_of(tables: Any) -> str:
    """The kinds of tables of mask weights, such as `frequency`; files are all of one kind."""
    listed = tables if isinstance(tables, list | tuple) else [tables]
    kinds = [str(table).partition(" ")[0] for table in listed]
    return " ".join(kind if kind in (*KINDS, UNIFORM, ADAPTIVE, "None") else "file" for kind in kinds)


def _last_parts(value: Any, name: str) -> Any:
    if name not in PLACES or value is None:
        return value
    return [Path(one).name for one in ((value,) if isinstance(value, str) else value)]


def _is_kept_by_records(part: Part, parts: list[Part]) -> bool:
    """Whether a part is finished but cannot be checked, because its files, or those it was made from, are gone."""
    origins = [other for other in parts if other.name in part.needs]
    return is_finished(part, parts) and not all(is_made(one, parts) for one in (part, *origins))


def _with_states(expected: Iterable[Cost], directory: Path) -> list[dict]:
    states = [(cost, state_of(directory, cost.part, cost.finished)) for cost in expected]
    return [cost._asdict() | {"state": state.name, "commit": state.commit} for cost, state in states]


def _judge(described: Study, directory: Path) -> dict | None:
    """Compute the composites, and write next to the records whether the primary hypothesis is withheld."""
    found = _compose(described, directory)
    if found is not None:
        keep_withheld(directory / "evaluations", described.primary if found["withheld"] else None)
    return found


def _compose(described: Study, directory: Path) -> dict | None:
    return None if described.composite is None else compose(described, directory)


def choose_parts(parts: list[Part], only: tuple[str, ...]) -> list[Part]:
    """The parts whose names match some pattern; all if there is none. Raises StudyError if a pattern matches
    nothing."""
    names = [part.name for part in parts]
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0)
            raise StudyError(
                f"--only {pattern}: no part has this name. The nearest of {len(names)} are: {', '.join(near)}. "
                "--dry-run lists them all."
            )
    return [part for part in parts if not only or any(fnmatch(part.name, pattern) for pattern in only)]


def _plan_of_students(planned: StudyPlan, evaluations: Path) -> str | None:
    """The plan of the first student's store, or if that is gone of a scored student's; None if there is neither."""
    students = [part for part in planned.parts if part.verb == "train-student"]
    with suppress(MlsmError):
        return Store.open(students[0].settings().store).plan.id
    for part in students:
        for file in evaluations.glob(f"{glob.escape(part.name.partition('/')[2])}-*/*/*.json"):
            if plan_id := (records.read_file(file)["identity"] or {}).get("plan"):
                return plan_id
    return None


def _check_pairing(part: Part, plan_id: str | None) -> str:
    """The plan of a student's store; StudyError if an earlier student's store has another one."""
    store = part.settings().store
    own = Store.open(store).plan.id
    if plan_id not in (None, own):
        raise StudyError(
            f"{part.name}: the store {store} has another plan than those of the study's other students, so batches and "
            "masks would differ. All stores of the study need the same corpus, tokenizer, windows and max-tokens."
        )
    return own


def _name_stages(progress, part):
    """Wrap the callback to add the part's name to its stages, so that each part has its own progress bars."""
    return lambda stage, *args, **kwargs: progress(f"{part}: {stage}", *args, **kwargs)


def _compare(
    settings: StudyConfig, described: Study, planned: StudyPlan, kept: dict, composite: dict | None, progress
) -> dict | None:
    """Compare everything evaluated so far, and write the report. Returns None if nothing was evaluated."""
    if not any(settings.evaluations.glob("*/*/*.json")):
        return None
    facts = facts_of(described, planned, kept, composite, find_changes(described, settings))
    return compare(_comparison(settings, described, planned), progress, facts).as_report()


def _comparison(settings: StudyConfig, described: Study, planned: StudyPlan) -> CompareConfig:
    """The settings for comparing everything that was evaluated."""
    return CompareConfig(
        results=(settings.evaluations,),
        output=settings.directory / "comparison",
        diagnostic=find_diagnostic(planned.parts),
        **described.common.get("compare", {}),
    )
