"""Files by name, in a directory and in the archives that lie there.

    with Sources(Path("downloads")) as sources:
        file = sources.find("CoLA/train.tsv")      # a File, or None
        raw = file.read()

A file is found by the end of its path, whatever directories or archives it lies in; an archive counts as a directory of
its name. Archives within archives are not opened, and nothing is unpacked: what is found is read into memory, up to a
size that no published file has. Left out: what to look for (sets.py).
"""

import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Self

from common.errors import DataError, describe

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LARGEST = 2**30  # bytes of a file that is read; SemCor, one of the largest, has 39 million
# what damaged archives raise; RuntimeError those that need a password, or are compressed in a way that Python lacks
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


class File(NamedTuple):
    """One file of a source."""

    path: PurePosixPath
    """its directories, archives among them, and its name"""
    where: str
    """what a message calls it"""
    size: int
    """bytes"""
    load: Callable[[], bytes]

    def read(self) -> bytes:
        """What it holds. Raises DataError where it is damaged, encrypted or larger than anything published."""
        if self.size > LARGEST:
            raise DataError(f"{self.where} has {self.size:,} bytes, more than any published file. Remove it.")
        try:
            return self.load()
        except DAMAGE as error:
            raise DataError(f"{self.where} cannot be read ({describe(error)}). Fetch it again.") from None


class Sources:
    """All files below a directory, those in its archives included, or all files of one archive."""

    def __init__(self, source: Path):
        """Raises DataError where there is no such directory or archive, or an archive cannot be read."""
        if not source.exists():
            raise DataError(f"--from {source} does not exist. Give the directory in which the published files lie.")
        if not source.is_dir() and not source.name.lower().endswith((".zip", *TARS)):
            raise DataError(f"--from {source} is neither a directory nor an archive (.zip, {', '.join(TARS)}).")
        self._open = ExitStack()
        self.files: list[File] = []
        root = source.absolute().parent
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            name = PurePosixPath(path.absolute().relative_to(root))
            if not path.is_file() or path.name.startswith("."):
                continue
            try:
                if path.name.lower().endswith(".zip"):
                    archive = self._open.enter_context(zipfile.ZipFile(path))
                    for member in archive.infolist():
                        if not member.is_dir() and not member.filename.startswith("__MACOSX/"):
                            inner = name.with_suffix("") / member.filename
                            where, load = f"{path}, {member.filename}", partial(archive.read, member)
                            self.files.append(File(inner, where, member.file_size, load))
                elif path.name.lower().endswith(TARS):
                    self._add_tar(path, name)
                else:
                    self.files.append(File(name, str(path), path.stat().st_size, path.read_bytes))
            except DAMAGE as error:
                self._open.close()
                raise DataError(f"{path} cannot be read ({describe(error)}). Fetch it again.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def find(self, *names: str) -> File | None:
        """The file whose path ends with the first of the names that there is.

        Raises  DataError where several differ in content, or one cannot be read
        """
        for name in names:
            parts = PurePosixPath(name).parts
            found = [file for file in self.files if file.path.parts[-len(parts) :] == parts]
            if found:
                first, *others = sorted(found, key=lambda file: (len(file.path.parts), file.path))
                if other := next((file for file in others if file.read() != first.read()), None):
                    raise DataError(
                        f"{first.where} and {other.where} are both {name}, and differ. Name the directory of one."
                    )
                return first
        return None

    def _add_tar(self, path, name):
        archive = self._open.enter_context(tarfile.open(path))  # noqa: SIM115 (closed with the others)

        def read(member: tarfile.TarInfo) -> bytes:
            file = archive.extractfile(member)
            assert file is not None, "of a regular file there is one"
            return file.read()

        for member in archive:
            if member.isfile():
                inner = name.with_name(name.name.partition(".tar")[0].removesuffix(".tgz")) / member.name
                self.files.append(File(inner, f"{path}, {member.name}", member.size, partial(read, member)))
