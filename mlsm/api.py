"""The commands as functions: `mlsm.encode_lsp(teacher=..., layer=10)` is `mlsm encode-lsp --teacher ... --layer 10`.

Each function takes the settings of its command as keyword arguments (`mlsm help encode-lsp` lists them), or one
settings object (`mlsm.EncodeConfig`). It also takes two more arguments:

    recipe    name of a recipe, or a YAML file, whose settings apply where no argument is given. Unlike on the command
              line, no recipe applies by itself, except that training takes steps, batch size and learning rate from the
              one that made its store
    progress  True shows progress on stderr, as the command line does; a function is called as progress(stage, done,
              total, unit=..., **figures)

All raise ValueError for an invalid setting, TypeError for an unknown one, and the errors in mlsm/common/errors.py: the
class says what went wrong, the message what to do next. If no store, student or run is named, the function uses the
newest one that fits, as on the command line, and logs which.

The functions are made from the files of mlsm/commands/; type checkers read their signatures in mlsm/__init__.pyi, which
tests/stub.py writes.
"""

import inspect
import logging
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from os import PathLike, fspath
from typing import Any

from mlsm.cli.flags import meant_by
from mlsm.cli.settings import make_settings, take_recipe
from mlsm.commands import Command, load
from mlsm.commands._newest import choose_newest
from mlsm.common.extras import name_extras
from mlsm.common.progress import silent
from mlsm.common.settings import is_word, plain_hint, settable
from mlsm.terminal.process import is_follower
from mlsm.terminal.progress import Progress

logger = logging.getLogger("mlsm")
_dtypes_lock = threading.Lock()
_dtypes: list[Any] = []  # torch's default type as each call under way found it; the first is the caller's own


def function_of(name: str) -> Callable[..., Any]:
    """Make the function of a command: function_of("encode-lsp")(layer=10)."""
    command = load(name)

    def function(*given: Any, **settings: Any) -> Any:
        return _run(command, given, settings)

    function.__name__ = function.__qualname__ = command.python_name
    function.__module__ = "mlsm"
    function.__doc__ = docstring_of(command)
    function.__signature__ = _signature(command)  # type: ignore[attr-defined]
    return function


def docstring_of(command: Command) -> str:
    """The docstring of a command's function."""
    return (
        f"{inspect.getdoc(command.run)}\n\nSettings: `mlsm help {command.name}`. Raises ValueError for a setting that "
        "does not fit, TypeError for an unknown one."
    )


def _signature(command: Command) -> inspect.Signature:
    """The signature shown by help() and notebook editors: the settings with their types and defaults."""
    kind = inspect.Parameter
    defaults = {name: field.default for name, field in settable(command.settings).items()}
    types = {name: plain_hint(field.type) for name, field in settable(command.settings).items()}
    parameters = [kind("config", kind.POSITIONAL_OR_KEYWORD, default=None, annotation=command.settings | None)]
    if command.by_position:
        parameters = []
    for name in (*command.by_position, *_more(command), *(name for name in types if name not in command.by_position)):
        how = kind.POSITIONAL_OR_KEYWORD if name in command.by_position else kind.KEYWORD_ONLY
        parameters.append(kind(name, how, default=defaults.get(name), annotation=types.get(name, kind.empty)))
    return inspect.Signature(parameters, return_annotation=inspect.signature(command.run).return_annotation)


def _more(command: Command) -> list[str]:
    """The parameters that are no settings."""
    return ["recipe", "progress"] if command.recipes else ["progress"]


@contextmanager
def _float32_by_default(torch: Any) -> Iterator[None]:
    """Set torch's default type, which all threads share, until the last of the calls under way ends."""
    with _dtypes_lock:
        _dtypes.append(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        with _dtypes_lock:
            found = _dtypes.pop()
            if not _dtypes:
                torch.set_default_dtype(found)


@contextmanager
def _own_modes() -> Iterator[None]:
    """Undo modes of torch and NumPy that a caller set: under autocast results differ, but their names would not."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    with ExitStack() as stack:
        if numpy is not None:
            stack.enter_context(numpy.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        if torch is not None:
            for kind in ("cpu", "cuda"):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(_float32_by_default(torch))
        yield


def _run(command: Command, given: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise RuntimeError(
            f"mlsm.{command.python_name} was called while a worker imported the script. Call it below "
            'if __name__ == "__main__": in the script.'
        )
    progress = settings.pop("progress", None)
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"{command.python_name}: progress takes True or a function, found {progress!r}")
    recipe = settings.pop("recipe", None) if command.recipes else None
    if "config" in settings:
        given = (settings.pop("config"), *given)
    if len(given) > len(command.by_position) and given[0] is None:
        given = given[1:]
    config = given[0] if given and isinstance(given[0], command.settings) else None
    if config is None:
        if len(given) > len(command.by_position):
            words = [name for name, field in settable(command.settings).items() if is_word(field)]
            path = fspath(given[0]) if isinstance(given[0], str | PathLike) else ""
            is_short = 0 < len(path) < 60 and not command.by_position
            such = f", such as {words[0]}={path!r}" if words and is_short else ""
            raise TypeError(
                f"{command.python_name} takes its settings as keyword arguments{such}, or one "
                f"{command.settings.__name__}; found {type(given[0]).__name__}"
            )
        by_position = dict(zip(command.by_position, given, strict=False))
        if twice := by_position.keys() & settings.keys():
            raise TypeError(f"{command.python_name} got {', '.join(sorted(twice))} twice")
        config = _configure(command, by_position | settings, recipe)
    elif settings or recipe is not None or len(given) > 1:
        raise TypeError(f"{command.python_name}: pass a settings object or keyword arguments, not both")
    config, choice = choose_newest(command, config)
    if choice is not None:
        logger.info("%s", choice)
    with name_extras(f"mlsm.{command.python_name}"), _own_modes():
        if progress is not True:
            return command.run(config, progress or silent)
        with Progress(None if command.trains and is_follower() else sys.stderr) as shown:
            return command.run(config, shown)


def _configure(command: Command, settings: dict[str, Any], recipe: Any) -> Any:
    """Make the settings object from a recipe's values, overridden by keyword arguments."""
    fields = settable(command.settings)
    for unknown in settings.keys() - fields.keys():
        meant = meant_by(unknown, [*fields, *_more(command)])
        hint = f" Did you mean {meant}?" if meant else f" It has: {', '.join(fields)}."
        raise TypeError(f"{command.python_name} has no setting {unknown!r}.{hint}")
    recipe = None if recipe is None else str(recipe)
    values, settings = take_recipe(command, settings, recipe)
    if recipe is None:
        return command.settings(**settings)
    origins = dict.fromkeys(values.keys() - settings.keys(), f"recipe {recipe}")
    return make_settings(command, values | settings, recipe, origins)


def read_records(paths: str | PathLike[str] | Iterable[str | PathLike[str]]) -> list[dict[str, Any]]:
    """Read and check the evaluation records in files and directories. Raises RecordError, which names what is wrong."""
    from mlsm.evaluation import records

    return records.read([paths] if isinstance(paths, str | PathLike) else paths)
