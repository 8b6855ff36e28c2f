"""Names of files that are not UTF-8, such as a corpus from an older system.

Python carries their bytes as lone surrogates. This project's JSON files store them as escapes, which become the same
surrogates when they are read (`utf8`). Rust libraries refuse such names, so they get the path of a temporary link
(`utf8_name`). Not handled here: showing them (text.py).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def utf8(json_text: str) -> bytes:
    """Encode JSON as UTF-8. Lone surrogates, which UTF-8 cannot encode, become JSON escapes; all else is unchanged."""
    return json_text.encode("utf-8", "backslashreplace")


@contextmanager
def utf8_name(directory: str | Path) -> Iterator[Path]:
    """A path to a directory for libraries that require UTF-8: the directory's own path, or a temporary link."""
    try:
        os.fspath(directory).encode()
        is_utf8 = True
    except UnicodeEncodeError:
        is_utf8 = False
    if is_utf8:
        yield Path(directory)
        return
    with TemporaryDirectory(prefix="mlsm-") as place:
        link = Path(place) / "link"
        link.symlink_to(Path(directory).absolute(), target_is_directory=True)
        yield link
