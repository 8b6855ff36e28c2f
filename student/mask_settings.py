"""The check of those settings of a StudentConfig that say how it masks. Imports nothing heavy.

Left out: the settings themselves (config.py), whether a table of weights goes with the store (mask_weights.py).
"""

from dataclasses import fields
from typing import TYPE_CHECKING

from common.settings import require
from student.masks.config import ADAPTIVE, UNIFORM

if TYPE_CHECKING:
    from student.config import StudentConfig

_OF_MASKS = ("mask_rate", "mask_rate_end", "mask_schedule", "mask_weights", "mask_unit", "corruption", "mask_later")


def check_masks(config: "StudentConfig") -> None:
    """Raise ValueError where a setting of the masks is out of its range, or two of them contradict each other.

    A list of one table of weights becomes that table, and uniform weights become none.
    """
    for name in ("mask_rate", "mask_rate_end"):
        require(config, name, lambda value: 0 < value < 1, "a share between 0 and 1")
    if config.mask_schedule != "linear" and config.mask_rate_end is None:
        raise ValueError(
            f"--mask-schedule {config.mask_schedule} moves the mask rate to --mask-rate-end, which is not given. Give"
            f" it, or leave the schedule out."
        )
    require(config, "mask_rate_steps", rise, "rising shares of the steps between 0 and 1")
    weights = config.mask_weights if isinstance(config.mask_weights, tuple) else (config.mask_weights,)
    if len(weights) == 1:
        object.__setattr__(config, "mask_weights", None if weights[0] == UNIFORM else weights[0])
    elif not weights:
        raise ValueError("--mask-weights needs a value.")
    elif ADAPTIVE in weights:
        raise ValueError(
            f"--mask-weights {' '.join(weights)}: adaptive weights are those of a whole run, and take no turns with"
            f" others. Give adaptive alone, or leave it out."
        )
    elif len(config.mask_weight_steps) != len(weights) - 1:
        raise ValueError(
            f"--mask-weight-steps takes a share of the steps for each of the --mask-weights but the first:"
            f" {len(weights) - 1} for {len(weights)}, found {len(config.mask_weight_steps)}."
        )
    require(config, "mask_weight_steps", rise, "rising shares of the steps between 0 and 1")
    if "domain" in weights:
        raise ValueError(
            "--mask-weights domain: these weights compare the store with a general one, or come from a list of"
            " words. Make the file first (make-mask-weights --kind domain), and give its path."
        )
    require(config, "mask_update_steps", lambda value: value >= 1, "at least 1")
    if config.positions == "all":
        _check_unmasked(config)
    if config.mask_later > 0 and config.corruption != "mask":
        raise ValueError(
            f"--mask-later {config.mask_later} is for --corruption mask alone, found {config.corruption}: a token that"
            f" stands at a masked position would tell the layers below that it is one. Leave one of them out."
        )


def _check_unmasked(config: "StudentConfig") -> None:
    """Raise ValueError if a setting says how tokens are hidden."""
    defaults = {field.name: field.default for field in fields(config)}
    for name in _OF_MASKS:
        if getattr(config, name) != defaults[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag} says how tokens are hidden, and --positions all hides none. Omit one of them.")


def rise(shares: tuple[float, ...]) -> bool:
    """Whether these are rising shares between 0 and 1, at least one."""
    return bool(shares) and all(before < after for before, after in zip((0, *shares), (*shares, 1), strict=True))
