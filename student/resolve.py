"""What a run's open settings are on a store, and where each value comes from: one answer for Python and for cli.py.

    config, origins = resolve(StudentConfig(store=path, encoder="bert-2x128"), Store.open(path))
    config.max_steps, origins["max_steps"]      # 2000, "store: 4 epochs would be 262 steps, fewer than 2,000"

Settings of `config.FOLLOWING` that are None are those of the recipe that made the store, if it says something of them;
otherwise they follow from the size of the store and the width of the encoder:

    epochs      4, as in the paper, section 4.1; more where that is less than 2,000 steps
    batch       1,024 windows, the paper's, where these epochs are 10,000 steps or more; else the largest power of two
                that makes them so, at least 64
    rate        1e-4, the paper's, for encoders of width 768 or more and for weights that were trained before
                (continue_from); 1e-3 up to width 256; between the two, log(rate) is linear in log(width)
    a probe's   batch as a student's; a tenth of a student's steps, the paper's 10,000 to 100,000, and at least 1,000

The demonstration's recipe is not for weights that were trained before. Left out: what the settings mean (config.py).
"""

import math
from dataclasses import replace
from typing import NamedTuple

from common.errors import RunError
from recipes.reading import DEMONSTRATION, recipe_of_store, recipe_settings
from student.config import FOLLOWING, StudentConfig
from student.probe_config import ProbeConfig

EPOCHS = 4
ENOUGH_STEPS = 10_000
LEAST_STEPS, LEAST_PROBE_STEPS = 2_000, 1_000
LARGEST_BATCH, SMALLEST_BATCH = 1024, 64
SMALL_WIDTH, BASE_WIDTH = 256, 768
SMALL_RATE, BASE_RATE = 1e-3, 1e-4
_MICRO_TOKENS = {"cpu": 4096, "cuda": 16_384}  # the latter: 128 windows of 128 tokens, as in the paper


class Resolved(NamedTuple):
    """Settings with nothing left open."""

    config: StudentConfig
    """without `epochs`, which are steps now"""
    origins: dict[str, str]
    """setting -> where its value comes from, in words; a setting that is not named has its default"""


def resolve(config: StudentConfig, store, origins: dict[str, str] | None = None) -> Resolved:
    """Settle what the settings leave open, for training on a store.

    store    an open Store
    origins  where the values come from that are not open; with it, a recipe has been applied already (cli.py). None:
             the settings are from Python, and the recipe that made the store is applied here to those that are open,
             if its encoder is the one of the settings. (On the command line the recipe gives the encoder, too.)
    Raises   RunError where the encoder has no config, or the store has no training windows
    """
    given = {name: "given" for name in (*FOLLOWING, "epochs") if getattr(config, name) is not None}
    found = dict(given if origins is None else origins)
    if origins is None:
        config = _with_recipe(config, store, found)
    if config.batch_windows is None or config.max_steps is None:
        config = _with_batch_and_steps(config, len(training_windows(store)), found)
    if config.micro_batch is None:
        most = max(1, _MICRO_TOKENS[_device_kind(config.device)] // store.max_length)
        config = replace(config, micro_batch=min(config.batch_windows, most))
    config = _with_rate(config, store, found)
    for name in ("save_every", "eval_every"):
        if getattr(config, name) is None:
            config = replace(config, **{name: min(1000, max(50, config.max_steps // 20))})
    return Resolved(config, found)


def training_windows(store):
    """The training split; RunError where it is empty."""
    windows = store.split("train")
    if len(windows) == 0:
        raise RunError("the store has no training windows: its corpus is too short. Encode more text.")
    return windows


def recipe_for(config: StudentConfig, store) -> str | None:
    """The recipe that training on a store starts from where none is named."""
    recipe = recipe_of_store(store, verb_of(config))
    return None if recipe == DEMONSTRATION and config.continue_from is not None else recipe


def verb_of(config: StudentConfig) -> str:
    """The command that these settings are of."""
    return "train-probe" if isinstance(config, ProbeConfig) else "train-student"


def without_rivals(values: dict, given) -> dict:
    """A recipe's values without its number of steps, or of epochs, where the other one is given."""
    length = {"epochs", "max_steps"}
    return {name: value for name, value in values.items() if name not in length or not length & set(given)}


def rate_for_width(width: int) -> float:
    """Peak learning rate for an encoder of a width, to two digits."""
    share = math.log(width / SMALL_WIDTH) / math.log(BASE_WIDTH / SMALL_WIDTH)
    share = min(1.0, max(0.0, share))
    return float(f"{SMALL_RATE * (BASE_RATE / SMALL_RATE) ** share:.1e}")


def batch_for(windows: int, epochs: float) -> int:
    """The batch in windows at which so many epochs give enough steps."""
    batch = LARGEST_BATCH
    while batch > SMALLEST_BATCH and epochs * windows / batch < ENOUGH_STEPS:
        batch //= 2
    return batch


def _with_recipe(config, store, found):
    recipe = recipe_for(config, store)
    if recipe is None:
        return config
    recipe_values = recipe_settings(recipe, verb_of(config), type(config), False)
    if config.encoder != recipe_values.get("encoder", config.encoder):
        return config  # a rate and a length for another encoder would be an accident
    values = without_rivals(recipe_values, found)
    values = {name: value for name, value in values.items() if name in (*FOLLOWING, "epochs") and name not in found}
    found.update(dict.fromkeys(values, f"recipe {recipe}, which made the store"))
    return replace(config, **values)


def _with_batch_and_steps(config, windows, found):
    epochs = config.epochs or EPOCHS
    if config.batch_windows is None:
        batch = batch_for(windows, epochs)
        steps = _steps(windows, epochs, batch)
        if steps < ENOUGH_STEPS:
            found["batch_windows"] = f"store: the smallest, as {epochs:g} epochs are {steps:,} steps even so"
        elif batch == LARGEST_BATCH:
            found["batch_windows"] = f"store: {epochs:g} epochs are {ENOUGH_STEPS:,} steps or more, as in the paper"
        else:
            steps = f"{epochs:g} epochs would be {_steps(windows, epochs, 2 * batch):,} steps at twice that"
            found["batch_windows"] = f"store: {steps}, fewer than {ENOUGH_STEPS:,}"
        config = replace(config, batch_windows=batch)
    if config.max_steps is not None:
        return config
    steps = _steps(windows, epochs, config.batch_windows)
    if config.epochs is not None:
        found["max_steps"] = f"{config.epochs:g} epochs, {found.get('epochs', 'given')}"
    elif isinstance(config, ProbeConfig):
        steps, of_student = max(LEAST_PROBE_STEPS, steps // 10), max(LEAST_STEPS, steps)
        found["max_steps"] = f"store: a tenth of a student's {of_student:,}, at least {LEAST_PROBE_STEPS:,}"
    elif steps < LEAST_STEPS:
        found["max_steps"] = f"store: {epochs} epochs would be {steps:,} steps, fewer than {LEAST_STEPS:,}"
        steps = LEAST_STEPS
    else:
        found["max_steps"] = f"store: {epochs} epochs, as in the paper"
    return replace(config, max_steps=steps, epochs=None)


def _steps(windows, epochs, batch):
    return max(1, math.ceil(epochs * windows / batch))


def _with_rate(config, store, found):
    if config.lr is not None:
        return config
    if isinstance(config, ProbeConfig):
        found["lr"] = f"default for {config.probe_input}"
        return config.with_rate()
    if config.continue_from is not None:
        found["lr"] = "default for weights that were trained before"
        return replace(config, lr=BASE_RATE)
    from student.encoders import unfitted_config  # only here: transformers takes seconds to import

    width = unfitted_config(config, store).hidden_size
    found["lr"] = f"default for width {width}"
    return replace(config, lr=rate_for_width(width))


def _device_kind(device: str) -> str:
    if device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return "cpu" if device.partition(":")[0] == "cpu" else "cuda"
