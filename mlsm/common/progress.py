"""The callback that long work reports to: progress(stage, done, total, unit=..., **figures), often the command
line's."""

from collections.abc import Callable

Progress = Callable[..., None]


def silent(*args: object, **figures: object) -> None:
    """A progress callback that shows nothing."""
