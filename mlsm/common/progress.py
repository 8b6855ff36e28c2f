"""The callback for progress of long work: progress(stage, done, total, unit=..., **figures)."""

from collections.abc import Callable

Progress = Callable[..., None]


def silent(*args: object, **figures: object) -> None:
    """A progress callback that shows nothing."""
