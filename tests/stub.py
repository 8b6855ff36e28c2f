"""What editors and type checkers read of `import mlsm`: mlsm/__init__.pyi, made from the commands and the public names.

    python tests/stub.py    # writes it

Each command is a function whose keyword arguments are its settings, with their types and defaults; a setting that takes
several values takes one as well, and a path or a text whatever names a file, a result of another command among them.
test_mlsm.py compares the file with what this makes, so that it cannot fall behind.
"""

import dataclasses
import inspect
import sys
import typing
from importlib import import_module
from pathlib import Path
from types import NoneType, UnionType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import mlsm  # noqa: E402
from mlsm.api import docstring_of  # noqa: E402
from mlsm.commands import Command, load_all  # noqa: E402
from mlsm.common.settings import plain_hint, settable  # noqa: E402

HEAD = """\
# Written by tests/stub.py from mlsm/commands/: change those files, and run it again.

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

{imports}

_Progress = Callable[..., object] | bool | None
_PathOrText = str | PathLike[str]

COMMANDS: list[str]
HOME: dict[str, str]
__all__: list[str]
"""


def stub() -> str:
    """Write the text of mlsm/__init__.pyi."""
    commands = load_all()
    functions = [_function(command) for command in sorted(commands.values())]
    imports = {(module, name) for name, module in mlsm.HOME.items()}
    for command in commands.values():
        imports.add((command.settings.__module__, command.settings.__name__))
    lines = [f"from {module} import {name} as {_exported(name)}" for module, name in sorted(imports)]
    settings = {name: module for name, module in mlsm.HOME.items() if name.endswith("Config")}
    classes = [_class(getattr(import_module(module), name)) for name, module in settings.items()]
    return "\n".join([HEAD.format(imports="\n".join(lines)), *classes, *functions])


def _exported(name: str) -> str:
    """The name of an imported class in the stub: `as` the same name exports it. Settings are written out below."""
    return name if name in mlsm.HOME and not name.endswith("Config") else f"_{name}"


def _class(settings: type) -> str:
    """A settings class that takes what its command's function takes. Its attributes have the types of the fields."""
    name, fields = settings.__name__, settable(settings).values()
    listed = "".join(f"        {_parameter(field)},\n" for field in fields)
    init = f"    def __init__(\n        self,\n        *,\n{listed}    ) -> None: ...\n"
    return f"class {name}(_{name}):\n{_docstring(inspect.getdoc(settings) or '')}\n{init}"


def _function(command: Command) -> str:
    fields = settable(command.settings)
    ours = _exported(command.settings.__name__)
    if command.by_position:
        first, *others = (_parameter(fields[name]) for name in command.by_position)
        lines = [first.replace(" = ", f" | {ours} = ", 1), *others, "*"]
    else:
        lines = [f"config: {ours} | None = None", "*"]
    lines += ["recipe: _PathOrText | None = None"] * command.recipes + ["progress: _Progress = None"]
    lines += [_parameter(field) for name, field in fields.items() if name not in command.by_position]
    returned = _spell(_returned(command)).replace("_PathOrText", "str")
    listed = "".join(f"    {line},\n" for line in lines)
    return f"def {command.python_name}(\n{listed}) -> {returned}:\n{_docstring(docstring_of(command))}"


def _docstring(text: str) -> str:
    indented = text.replace("\n", "\n    ").replace("    \n", "\n")
    return f'    """{indented}' + "\n    " * ("\n" in text) + '"""\n'


def _parameter(field: dataclasses.Field) -> str:
    return f"{field.name}: {_spell(field.type)}" + _default(field)


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        value = str(field.default) if isinstance(field.default, Path) else field.default
        return f" = {value!r}".replace("'", '"')
    return "" if field.default_factory is dataclasses.MISSING else " = ..."


def _spell(hint: object) -> str:
    """Write a type as the functions take it."""
    hint, kinds = plain_hint(hint), typing.get_args(plain_hint(hint))
    match typing.get_origin(hint):
        case typing.Literal:
            return f"Literal[{', '.join(map(repr, kinds))}]".replace("'", '"')
        case origin if origin is tuple:
            return f"{_spell(kinds[0])} | Sequence[{_spell(kinds[0])}]"
        case origin if origin is list:
            return f"list[{_spell(kinds[0])}]"
        case origin if origin in (typing.Union, UnionType):
            return " | ".join(dict.fromkeys(" | ".join(map(_spell, kinds)).split(" | ")))
    return {NoneType: "None", str: "_PathOrText", Path: "_PathOrText", typing.Any: "Any"}.get(hint) or hint.__name__


def _returned(command: Command) -> object:
    return inspect.signature(command.run).return_annotation


if __name__ == "__main__":
    (ROOT / "mlsm" / "__init__.pyi").write_text(stub(), encoding="utf-8")
