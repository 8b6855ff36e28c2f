"""How the product is written: annotations that mypy (`make lint`) can check."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("mlsm", "pipeline", "shards", "student")
FILES = [ROOT / "cli.py", *(path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py")))]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def public_functions(body, inside_class=False):
    """Public functions and methods, `__init__` and `__call__` among them, each with its parameters but for self."""
    for node in body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from public_functions(node.body, inside_class=True)
        elif isinstance(node, FUNCTIONS) and (not node.name.startswith("_") or node.name in ("__init__", "__call__")):
            arguments = node.args
            named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
            parameters = [argument for argument in named if argument is not None]
            yield (
                node,
                parameters[1:]
                if inside_class and parameters[:1] and parameters[0].arg in ("self", "cls")
                else parameters,
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_are_annotated(path):
    missing = []
    for function, parameters in public_functions(ast.parse(path.read_text(encoding="utf-8")).body):
        missing += [f"{function.name}: {parameter.arg}" for parameter in parameters if parameter.annotation is None]
        if function.returns is None and function.name != "__init__":
            missing.append(f"{function.name}: its result")
    assert not missing
