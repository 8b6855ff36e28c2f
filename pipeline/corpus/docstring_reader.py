"""The docstrings of Python files, read with `ast` and never imported: a program of its own, so that each core runs one.

    python docstring_reader.py < paths.json > texts.json        # JSON lists of texts

It imports the standard library alone. Left out: which files, and the corpus that becomes of them (docstrings.py).
"""

import ast
import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

_MINIMUM_DOCSTRING = 40  # characters; shorter ones are labels, not prose


def docstrings_of(path: str | Path) -> Iterator[str]:
    """Docstrings of a Python file, inner empty lines closed up so that each stays one document."""
    try:
        tree = ast.parse(Path(path).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in _definitions(tree):
        text = ast.get_docstring(node)
        if text and len(text) >= _MINIMUM_DOCSTRING and _is_text(text):
            yield "\n".join(line for line in text.splitlines() if line.strip())


def _definitions(tree):
    """Module, classes and functions of a tree; expressions, most of its nodes, are not visited."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found = getattr(node, block, ())
            nodes += reversed(found) if isinstance(found, list) else ()


def _is_text(text):
    return text.isprintable() or not any(ord(c) < 32 and c not in "\n\t" or 0xD800 <= ord(c) < 0xE000 for c in text)


if __name__ == "__main__":
    gc.disable()  # it would look through every tree again and again: a fifth of the time
    json.dump([text for path in json.load(sys.stdin) for text in docstrings_of(path)], sys.stdout)
