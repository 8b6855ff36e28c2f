"""Names of files that are not UTF-8, such as a corpus from an older system.

Python carries their bytes as lone surrogates. The JSON files of this project hold these as escapes, which become the
same surrogates when they are read (`utf8`). Rust libraries refuse such names, so they are given a link of another name
(`utf8_name`). Not handled here: showing them (text.py).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def utf8(json_text: str) -> bytes:
    """JSON as bytes. Lone surrogates, which UTF-8 lacks, become JSON's escapes for them; all else is as it was."""
    return json_text.encode("utf-8", "backslashreplace")


@contextmanager
def utf8_name(directory: str | Path) -> Iterator[Path]:
    """A path to a directory whose name is UTF-8, for libraries that want that: its own, or a temporary link."""
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
