"""The commands that encode a store's missing units again, and its damaged ones after their removal.

Not handled here: what is damaged (verify.py).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mlsm.common.errors import StoreError
from mlsm.common.invocation import program
from mlsm.common.text import shell_join
from shards import copies
from shards.files import StoreFiles
from shards.manifest import Plan
from shards.schema import kind_of


def repair_commands(files: StoreFiles, target: Mapping, plans: Iterable[Plan], damaged: Iterable[Mapping]) -> list[str]:
    """The commands that encode missing units, and damaged units after their removal."""
    units = {entry["unit"] for entry in damaged} - {None}
    of_store = any(entry["unit"] is None and not entry["file"].startswith("plans/") for entry in damaged)
    spoilt = {
        Path(entry["file"]).stem
        for entry in damaged
        if entry["file"].startswith("plans/") and entry["file"].endswith(".json")
    }
    wanted: dict[str, list[str]] = {plan_id: [] for plan_id in sorted(spoilt)}
    for plan in plans:
        lacking = {unit.id for unit in files.missing_units(plan)} | units
        if of_store or plan.id in spoilt or lacking & {unit.id for unit in plan.units}:
            wanted[plan.id] = sorted(
                file for source in {unit.source for unit in plan.units} for file in plan.files_of(source)
            )
    return list(dict.fromkeys(encoding_command(files, target, *plan) for plan in wanted.items()))


def encoding_command(files: StoreFiles, target: Mapping, plan_id: str, sources: list[str]) -> str:
    """The command line that encodes a plan's missing units of this store.

    If the command line wrote the store, the settings are in plans/<plan>.yaml. Otherwise they follow from the target
    and from the names of the sources in the plan; then it is unknown how the text was cut into units.
    """
    settings, lineage = target["settings"], target["lineage"]
    output = ["--output", files.path.absolute().parent.parent]
    if "derived_from" in settings:
        found = sorted(files.path.absolute().parent.glob(f"*-{settings['derived_from'][:12]}"))
        source = _with_plan(found[0], plan_id) if found else f"<the store of target {settings['derived_from']}>"
        return _line("derive-shards", source, "--top-n", settings.get("top_n", "<n>"), *output)
    verb = f"encode-{kind_of(target)}"
    recipe = files.plans / f"{plan_id}.yaml"
    has_recipe = bool(files.command(plan_id))
    if "hidden" in settings or kind_of(target) == "hidden":
        output = _of_hidden(files, settings, plan_id, has_recipe) + output
    own = ["--layer", settings["layer"]] if "layer" in settings else []
    with suppress(StoreError):  # no advice with another dictionary: it would make another target
        if "dictionary" in settings and copies.read_dictionary(files):
            own += ["--dictionary", files.dictionary.absolute()]
    packing = settings.get("windowing", {}).get("packing")
    if has_recipe:
        if "dtype" in settings:  # the recipe may have auto, which depends on the machine
            own += ["--dtype", settings["dtype"]]
        return _line(verb, "--recipe", recipe.absolute(), *own, *output)
    flags = {"teacher": lineage.get("teacher_name"), "tokenizer": lineage.get("tokenizer_name")}
    flags |= {name: settings.get(name) for name in ("lam", "top_n", "tolerance", "dtype")}
    flags["max_length"] = target["max_length"]
    if solver := settings.get("solver"):
        flags |= {"solver": solver["name"], "solver_steps": solver.get("steps")}
    own += ["--documents-apart"] if settings.get("documents_apart") else []
    own += ["--masked"] if settings.get("masked_passes") else []
    flags["packing"] = None if packing == "packed" else packing
    flags["held_out_by"] = settings.get("windowing", {}).get("held_out_by")
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value is not None]
    corpus = [] if "hidden" in settings else ["--corpus", *(sources or ["<the same text>"])]
    return _line(verb, *given, *own, *output, *corpus)


def _of_hidden(files, settings, plan_id, has_recipe):
    """Flags for the store of hidden states that a store was made from, and for the store's own quantisation.

    has_recipe  whether the command names a recipe, which says where that store was
    """
    flags = []
    if source := settings.get("hidden"):
        digits = source["target"][:12]
        found = sorted(files.path.absolute().parent.glob(f"*-{digits}"))
        if found:
            flags += ["--hidden", _with_plan(found[0], plan_id)]
        elif not has_recipe:
            flags += ["--hidden", f"<the store of target {source['target']}>"]
    if settings.get("kind") == "hidden" and settings["quantise"]["name"] == "pq":
        flags += ["--quantise", "pq", "--bytes", settings["quantise"]["bytes"]]
        with suppress(StoreError):  # no advice with another codebook: it would make another target
            copies.read_codebook(files)
            flags += ["--codebook", files.codebook.absolute()]
    return flags


def _with_plan(source, plan_id):
    """A store with the plan that it shares with what was made from it; the store alone if it lacks the plan."""
    plan = source / "plans" / f"{plan_id}.json"
    return plan if plan.is_file() else source


def _line(*words):
    return f"{program()} " + shell_join(map(str, words))
