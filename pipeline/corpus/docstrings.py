"""The docstrings of the required packages and of the standard library as a corpus: the demonstration's text.

    path = collect_docstrings(directory)        # one text file, made once for the installed versions

Left out: reading one of their files (docstring_reader.py), and reading the text that comes out (source.py).
"""

import configparser
import hashlib
import json
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from subprocess import run

from common.durable import make_directories, replace_bytes
from common.errors import CorpusError
from common.progress import silent
from pipeline.corpus import docstring_reader

FILES_AT_ONCE = 250  # of one process: some seconds of work


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
    make_directories(path.parent)
    texts: set[str] = set()
    files = [str(file) for file in _python_files()]
    parts = [files[first : first + FILES_AT_ONCE] for first in range(0, len(files), FILES_AT_ONCE)]
    pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))  # each thread waits for a process
    try:
        for number, found in enumerate(pool.map(_read_elsewhere, parts), 1):
            texts.update(found)
            progress("docstrings", min(number * FILES_AT_ONCE, len(files)), len(files), unit="files")
    finally:
        pool.shutdown(cancel_futures=True)  # an interruption waits for what is being read, not for all the rest
    ordered = sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())
    replace_bytes(path, ("\n\n".join(ordered) + "\n").encode())
    return path


def _read_elsewhere(files: list[str]) -> list[str]:
    """The docstrings of some files, read by a process of its own."""
    utf8 = ["-X", "utf8"] if sys.flags.utf8_mode else []
    command = [sys.executable, *utf8, "-P", "-W", "ignore", str(Path(docstring_reader.__file__))]
    done = run(command, input=json.dumps(files), capture_output=True, text=True)
    if done.returncode != 0:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise CorpusError(f"the docstrings of {files[0]} and the next files cannot be read: {why}")
    return json.loads(done.stdout)


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
