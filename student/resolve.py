"""Fill in a run's unset settings from the store, its recipe and the encoder's width.

Python and the command line get the same values, each with its origin:

    config, origins = resolve(StudentConfig(store=path, encoder="bert-2x128"), Store.open(path))
    config.max_steps, origins["max_steps"]      # 2000, "store: 4 epochs would be 262 steps, fewer than 2,000"

A setting of `config.FOLLOWING` that is None takes its value from the recipe that made the store, if that has one.
Otherwise it follows from the size of the store and the width of the encoder:

    epochs      4, as in the paper, section 4.1; more if that is less than 2,000 steps
    batch       1,024 windows, as in the paper, if these epochs then are 10,000 steps or more; else the largest power of
                two that makes them so, at least 64. Both are halved for each doubling of the windows' length beyond 512
                tokens, down to 8
    rate        1e-4, the paper's, for encoders of width 768 or more and for weights that were trained before
                (continue_from); 1e-3 up to width 256; between the two, log(rate) is linear in log(width)
    evaluation  256 held-out windows, halved as in a batch: they stay in memory with their targets
    a probe's   batch as a student's; a tenth of a student's steps, the paper's 10,000 to 100,000, and at least 1,000

The demonstration's recipe is not for weights that were trained before. Not handled here: what the settings mean
(config.py), dtype and compilation (opening.py).
"""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from mlsm.common.errors import RunError
from mlsm.recipes.reading import DEMONSTRATION, recipe_of_store, recipe_settings
from shards.reader import Store
from shards.windows import WindowReader
from student.config import FOLLOWING, OF_MASKS, ProbeConfig, ResolvedConfig, StudentConfig
from student.masks.masking import check_rate
from student.objectives import OBJECTIVES, OWN_SETTINGS, USUAL_OBJECTIVE

if TYPE_CHECKING:
    import torch

EPOCHS = 4
ENOUGH_STEPS = 10_000
LEAST_STEPS, LEAST_PROBE_STEPS = 2_000, 1_000
LONG = 512  # tokens: beyond it, the next three numbers of windows are halved for each doubling
LARGEST_BATCH, SMALLEST_BATCH, EVAL_WINDOWS = 1024, 64, 256
FEWEST = 8  # windows, however long: the GPUs of a machine can share them
SMALL_WIDTH, BASE_WIDTH = 256, 768
SMALL_RATE, BASE_RATE = 1e-3, 1e-4
MUON_FACTOR = 4  # of AdamW's rate: mlm's best in both studies' pilots is 4e-3 (docs/training.md)
_MICRO_TOKENS = {"cpu": 2048, "cuda": 16_384}  # what fits a cache; 128 windows of 128 tokens, as in the paper


class Resolved(NamedTuple):
    """Settings with all values filled in."""

    config: ResolvedConfig
    """`epochs` is None, as max_steps replaces it"""
    origins: dict[str, str]
    """setting -> where its value comes from, in words; missing settings have their defaults"""


def resolve(config: StudentConfig, store: Store) -> Resolved:
    """Fill in the unset settings for training on a store.

    If the settings have no origins, they are from Python and no recipe was named. The recipe that made the store then
    fills in those that are unset. (On the command line it also sets the encoder, the optimiser and whatever else it
    names.)

    Raises  RunError if the encoder has no config, the store has no training windows, or these cannot be cut as
            `short_windows` says
    """
    found = {name: "given" for name in (*FOLLOWING, "epochs") if getattr(config, name) is not None}
    if config.origins is None:
        changed = [field.name for field in fields(config) if getattr(config, field.name) != field.default]
        config = _apply_recipe(config, store, found)
        found = dict.fromkeys(changed, "given") | found
    else:
        found |= config.origins
    _check_short_windows(config, store)
    check_rate(config, store)
    if config.batch_windows is None or config.max_steps is None:
        config = _choose_batch_and_steps(config, store, found)
    known = cast(ResolvedConfig, config)  # from here on batch and steps are numbers
    chosen: dict[str, Any] = {}
    if config.micro_batch is None:
        on_cpu = config.device.partition(":")[0] == "cpu"
        if config.device == "auto":
            from mlsm.common.device import choose_device  # only here: torch takes seconds to import

            on_cpu = choose_device(config.device).type == "cpu"
        most = max(1, _MICRO_TOKENS["cpu" if on_cpu else "cuda"] // store.max_length)
        chosen["micro_batch"] = min(known.batch_windows, most)
    if config.lr is None:
        chosen["lr"] = _choose_rate(config, known.max_steps, store, found)
    for name in ("save_every", "eval_every"):
        if getattr(config, name) is None:
            chosen[name] = min(1000, max(50, known.max_steps // 20))
    if config.eval_windows is None:
        chosen["eval_windows"] = of_length(EVAL_WINDOWS, store.max_length)
    return Resolved(replace(known, **chosen), found)


def training_windows(store: Store) -> WindowReader:
    """The training split; RunError if it is empty."""
    windows = store.split("train")
    if len(windows) == 0:
        raise RunError("the store has no training windows: its corpus is too short. Encode more text.")
    return windows


def recipe_for(config: StudentConfig, store: Store) -> str | None:
    """The recipe whose values training on a store uses if the user names none."""
    recipe = recipe_of_store(store, verb_of(config))
    return None if recipe == DEMONSTRATION and config.continue_from is not None else recipe


def verb_of(config: StudentConfig) -> str:
    """The command that these settings belong to."""
    return "train-probe" if isinstance(config, ProbeConfig) else "train-student"


def given_values(given: Mapping[str, Any]) -> dict:
    """What is given, without None, which leaves a setting open. (A dropout of None is the encoder's own.)"""
    return {name: value for name, value in given.items() if value is not None or name == "dropout"}


def without_rivals(values: dict, given: Mapping[str, Any], kind: str | None = None) -> dict:
    """A recipe's values, without those that do not go with what is given.

    Left out are its number of steps if epochs are set, and the other way round; its learning rate if another encoder or
    optimiser is given; encoder, optimiser, rate and dropout if weights that were trained before are; the loss of
    `regress` and the weight of words if an objective without them is learned; its positions if the objective learns
    words, which must be masked, or if a setting of masks is given. If the store has no targets for its objective, the
    usual one of such a store takes its place.

    kind  of the store, if the recipe is the one that made it
    """
    length = {"epochs", "max_steps"}
    dropped = length if length & given.keys() else set()
    objective = given.get("objective") or values.get("objective")
    for name in ("encoder", "optimizer"):
        meant = values.get(name, getattr(StudentConfig, name))
        if given.get(name, meant) != meant:
            dropped = dropped | {"lr"}
    if given.get("continue_from") is not None:
        dropped = dropped | {"encoder", "optimizer", "lr", "dropout"}
    if objective is not None and objective not in OBJECTIVES:
        return values  # the settings' class says so
    if kind and "objective" in values.keys() - given.keys() and kind not in OBJECTIVES[values["objective"]].kinds:
        objective = USUAL_OBJECTIVE[kind]
        values = values | {"objective": objective}
    facts = OBJECTIVES[objective or StudentConfig.objective]
    dropped = dropped | {*OWN_SETTINGS} - {*facts.settings}
    if facts.kappa is None:
        dropped = dropped | {"kappa"}
    masks = {"kappa", *OF_MASKS} & given.keys()
    if masks or (objective and not facts.all_positions):
        dropped = dropped | {"positions"}
    return {name: value for name, value in values.items() if name not in dropped}


def rate_for_width(width: int, optimizer: str = "adamw") -> float:
    """Peak learning rate for an encoder of a width, to two digits."""
    share = math.log(width / SMALL_WIDTH) / math.log(BASE_WIDTH / SMALL_WIDTH)
    share = min(1.0, max(0.0, share))
    factor = MUON_FACTOR if optimizer == "muon" else 1
    return float(f"{factor * SMALL_RATE * (BASE_RATE / SMALL_RATE) ** share:.1e}")


def rate_for_probe(probe_input: str, max_steps: int) -> float:
    """Peak learning rate of a probe. The weights of probabilities must grow large, and AdamW changes a weight by about
    the learning rate per step."""
    return min(0.5, 100 / max_steps) if probe_input == "softmax" else 1e-3


def batch_for(windows: int, epochs: float, length: int) -> int:
    """The batch in windows, of at most so many tokens each, at which so many epochs give enough steps."""
    batch, smallest = of_length(LARGEST_BATCH, length), of_length(SMALLEST_BATCH, length)
    while batch > smallest and epochs * windows / batch < ENOUGH_STEPS:
        batch //= 2
    return batch


def of_length(windows: int, length: int) -> int:
    """So many windows; of more than LONG tokens half as many for each doubling of their length, but at least FEWEST."""
    return max(FEWEST, windows >> max(0, math.ceil(math.log2(length / LONG))))


def _check_short_windows(config: StudentConfig, store: Store) -> None:
    if config.short_windows is None:
        return
    from student.batches import store_has_pairs  # only here: it imports torch

    if store_has_pairs(store):
        raise RunError(
            f"--short-windows {config.short_windows}: the store's windows are pairs of sentences, which pieces would"
            f" tear apart. Leave it out, or encode a store with another --packing."
        )
    length = store.max_length
    if length % config.short_windows or config.short_windows == length:
        possible = [str(length // pieces) for pieces in range(2, 33) if length % pieces == 0 and length > pieces]
        advice = f"Take {' or '.join(possible[:4])}" if possible else "Encode windows of another length"
        raise RunError(
            f"--short-windows {config.short_windows} does not cut the store's windows of {length} tokens into pieces of"
            f" equal length. {advice}, or leave it out."
        )


def _apply_recipe(config: StudentConfig, store: Store, found: dict[str, str]) -> StudentConfig:
    recipe = recipe_for(config, store)
    if recipe is None:
        return config
    recipe_values = recipe_settings(recipe, verb_of(config), type(config), False)
    own = {name: getattr(config, name) for name in ("optimizer", "encoder", "continue_from")}  # a probe has only one
    values = without_rivals(recipe_values, {name: value for name, value in own.items() if value} | found)
    values = {name: value for name, value in values.items() if name in (*FOLLOWING, "epochs") and name not in found}
    found.update(dict.fromkeys(values, f"recipe {recipe}, that of the store"))
    return replace(config, **values)


def _choose_batch_and_steps(config: StudentConfig, store: Store, found: dict[str, str]) -> StudentConfig:
    windows, length = len(training_windows(store)), store.max_length
    epochs, batch = config.epochs or EPOCHS, config.batch_windows
    if batch is None:
        batch = batch_for(windows, epochs, length)
        steps = _steps(windows, epochs, batch)
        if steps < ENOUGH_STEPS:
            found["batch_windows"] = f"store: the smallest, as {epochs:g} epochs are {steps:,} steps even so"
        elif batch == of_length(LARGEST_BATCH, length):
            found["batch_windows"] = f"store: {epochs:g} epochs are {ENOUGH_STEPS:,} steps or more, as in the paper"
        else:
            at_twice = f"{epochs:g} epochs would be {_steps(windows, epochs, 2 * batch):,} steps at twice that"
            found["batch_windows"] = f"store: {at_twice}, fewer than {ENOUGH_STEPS:,}"
    if config.max_steps is not None:
        return replace(config, batch_windows=batch)
    steps = _steps(windows, epochs, batch)
    if config.epochs is not None:
        more = "; few: consider more --epochs" if steps < LEAST_STEPS else ""
        found["max_steps"] = (
            f"{config.epochs:g} epoch{'s' * (config.epochs != 1)}, {found.get('epochs', 'given')}{more}"
        )
    elif isinstance(config, ProbeConfig):
        steps, of_student = max(LEAST_PROBE_STEPS, steps // 10), max(LEAST_STEPS, steps)
        found["max_steps"] = f"store: a tenth of a student's {of_student:,}, at least {LEAST_PROBE_STEPS:,}"
    elif steps < LEAST_STEPS:
        found["max_steps"] = f"store: {epochs} epochs would be {steps:,} steps, fewer than {LEAST_STEPS:,}"
        steps = LEAST_STEPS
    else:
        found["max_steps"] = f"store: {epochs} epochs, as in the paper"
    return replace(config, batch_windows=batch, max_steps=steps, epochs=None)


def _steps(windows: int, epochs: float, batch: int) -> int:
    return max(1, math.ceil(epochs * windows / batch))


def _choose_rate(config: StudentConfig, max_steps: int, store: Store, found: dict[str, str]) -> float:
    if isinstance(config, ProbeConfig):
        found["lr"] = f"default for {config.probe_input}"
        return rate_for_probe(config.probe_input, max_steps)
    if config.continue_from is not None:
        found["lr"] = "default for weights that were trained before"
        return BASE_RATE
    from student.encoders.build import unfitted_config  # only here: transformers takes seconds to import

    width = unfitted_config(config, store).hidden_size
    found["lr"] = f"default for {config.optimizer} and width {width}"
    return rate_for_width(width, config.optimizer)


def resolve_compile(setting: bool | None, device: "torch.device") -> bool:
    """Whether a setting means that the student is compiled on a device."""
    return device.type == "cuda" if setting is None else setting


def resolve_dtype(
    name: Literal["auto", "float32", "bfloat16"], device: "torch.device"
) -> Literal["float32", "bfloat16"]:
    """The arithmetic that a dtype setting means on a device."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"
