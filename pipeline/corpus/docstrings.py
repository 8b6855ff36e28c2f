"""The docstrings of the required packages and of the standard library as a corpus: the demonstration's text.

    path = collect_docstrings(directory)        # one text file, made once for the installed versions

Read with `ast`, never imported. Left out: reading that file (text.py).
"""

import ast
import configparser
import hashlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from common.durable import replace_bytes
from common.progress import silent

_MINIMUM_DOCSTRING = 40  # characters; shorter ones are labels, not prose


def collect_docstrings(directory: str | Path, progress: Callable[..., None] = silent) -> Path:
    """Write the docstrings of our required packages and of the standard library to one text file, and return its path.

    Each is a document and comes once. They are in the order of their hash, so that any beginning of the file is a fair
    sample. The file's name follows from the packages' versions.

    directory  where the file goes; one made earlier from the same versions is returned as it is
    """
    versions = {name: metadata.version(name) for name in required_packages()}
    versions["python"] = platform.python_version()
    tag = hashlib.sha256(json.dumps(versions, sort_keys=True).encode()).hexdigest()[:12]
    path = Path(directory) / f"docstrings-{tag}.txt"
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    texts: set[str] = set()
    for number, source in enumerate(_python_files()):
        texts.update(_docstrings(source))
        progress("docstrings", number, None, unit="files", documents=len(texts))
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    replace_bytes(path, ("\n\n".join(ordered) + "\n").encode())
    return path


def required_packages() -> list[str]:
    """Names of the packages we require at run time, extras left out, sorted."""
    words = ("".join(c if c.isalnum() or c in "-_." else " " for c in line).split() for line in _requirements())
    return sorted({name.lower() for name, *_ in words})


def _requirements() -> list[str]:
    setup_cfg = Path(__file__).resolve().parents[2] / "setup.cfg"
    if setup_cfg.is_file():  # a checkout, whose own list counts, whatever version is installed
        parser = configparser.ConfigParser()
        parser.read(setup_cfg, encoding="utf-8")
        return parser["options"]["install_requires"].split("\n")[1:]
    return [line for line in metadata.requires("mlsm") or [] if "extra ==" not in line]


def _python_files() -> Iterator[Path]:
    standard = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    yield from (path for path in standard.rglob("*.py") if not skipped & set(path.parts[len(standard.parts) :]))
    for name in required_packages():
        files = metadata.distribution(name).files or []
        yield from (Path(file.locate()) for file in files if file.suffix == ".py")


def _docstrings(path):
    """Docstrings of a Python file, inner empty lines closed up so that each stays one document."""
    try:
        tree = ast.parse(path.read_bytes())
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
