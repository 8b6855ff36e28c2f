"""Find files by name in a directory and in the archives there.

    with Sources(Path("downloads")) as sources:
        file = sources.find("CoLA/train.tsv")      # a File, or None
        for chunk in file.chunks(): ...

A file is found by the end of its path, in any directory or archive; an archive counts as a directory with its name.
Archives within archives are not opened. Files are read in chunks. A file is refused if it is larger, or was compressed
more, than any published file. Not handled here: what to look for (see sets.py).
"""

import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, Self

from mlsm.common import disk
from mlsm.common.errors import DataError, describe

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
LARGEST = 2**30  # bytes of a file; SemCor, one of the largest, has 39 million
MOST_IN_MEMORY = 2**26  # bytes of a file that is converted
MOST_COMPRESSED = 200  # times; text becomes ten times smaller, a bomb a thousand times
BOMB = 2**24  # bytes: a smaller file does no harm, however well it was compressed
CHUNK = 2**20
LONGEST_NAME = 2**16  # bytes of a long name or of other facts before a file in a tar archive, which Python reads whole
_BEFORE_A_FILE = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE
)  # fmt: skip
# errors of damaged archives; RuntimeError if a password is needed or Python lacks the compression method
DAMAGE = (zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, OSError, RuntimeError)


class _TarHeader(tarfile.TarInfo):
    """Refuses what is read before a file if it is much longer than any name."""

    def _proc_member(self, archive):  # what `tarfile` says can be overridden; Python 3.14 no longer calls `frombuf`
        if self.type in _BEFORE_A_FILE and self.size > LONGEST_NAME:
            raise tarfile.ReadError(f"a name or header of {self.size:,} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]  # typeshed lacks it


class ArchivedFile(NamedTuple):
    """One file of a source."""

    path: PurePosixPath
    """its directories (and archives) and its name"""
    where: str
    """its name in messages"""
    size: int
    """bytes"""
    stored: int
    """its compressed bytes in a zip file; otherwise its size"""
    open: Callable[[], IO[bytes]]

    def chunks(self, largest: int | None = None) -> Iterator[bytes]:
        """Read the content in parts.

        largest  most bytes; LARGEST by default
        Raises   DataError if it is damaged, encrypted, compressed too strongly, or larger than any published file
        """
        largest, count = LARGEST if largest is None else largest, 0
        if self.size > BOMB and self.size > MOST_COMPRESSED * self.stored:
            raise DataError(
                f"{self.where} expands from {self.stored:,} to {self.size:,} bytes, more than any published file. "
                "Remove it."
            )
        try:
            with self.open() as file:
                while chunk := file.read(CHUNK):
                    count += len(chunk)
                    if max(count, self.size) > largest:  # `size` is what the archive claims
                        break
                    yield chunk
        except DAMAGE as error:
            raise DataError(f"{self.where} cannot be read ({describe(error)}). Fetch it again.") from None
        if max(count, self.size) > largest:
            raise DataError(
                f"{self.where} has {max(count, self.size):,} bytes, more than any published file. Remove it."
            )

    def read(self) -> bytes:
        """The whole content, at most MOST_IN_MEMORY bytes. Raises the errors of `chunks`."""
        return b"".join(self.chunks(min(LARGEST, MOST_IN_MEMORY)))

    def sha256(self) -> str:
        """The hash of the content. Raises the same errors as `chunks`."""
        digest = hashlib.sha256()
        for chunk in self.chunks():
            digest.update(chunk)
        return digest.hexdigest()


class Sources:
    """All files below a directory, including those in its archives, or all files of one archive."""

    def __init__(self, source: Path):
        """Raises DataError if there is no such directory or archive, or an archive cannot be read."""
        if not source.exists():
            raise DataError(f"--from {source} does not exist. Pass the directory that contains the published files.")
        if not source.is_dir() and not source.name.lower().endswith((".zip", *TARS)):
            raise DataError(f"--from {source} is neither a directory nor an archive (.zip, {', '.join(TARS)}).")
        self._open = ExitStack()
        self.files: list[ArchivedFile] = []
        root = source.absolute().parent
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            name = PurePosixPath(path.absolute().relative_to(root))
            is_hidden = any(part.startswith(".") for part in path.relative_to(source).parts)  # as of a killed command
            if is_hidden or not path.is_file():
                continue
            try:
                if path.name.lower().endswith(".zip"):
                    archive = self._open.enter_context(zipfile.ZipFile(path))
                    for member in archive.infolist():
                        if not member.is_dir() and not member.filename.startswith("__MACOSX/"):
                            inner = name.with_suffix("") / member.filename
                            where, opens = f"{path}, {member.filename}", partial(archive.open, member)
                            self.files.append(ArchivedFile(inner, where, member.file_size, member.compress_size, opens))
                elif path.name.lower().endswith(TARS):
                    self._add_tar(path, name)
                else:
                    size = path.stat().st_size
                    self.files.append(ArchivedFile(name, str(path), size, size, partial(disk.open_to_read, path)))
            except DAMAGE as error:
                self._open.close()
                raise DataError(f"{path} cannot be read ({describe(error)}). Fetch it again.") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def find(self, *names: str) -> ArchivedFile | None:
        """Find a file by the end of its path; of several names, the first that exists.

        Raises  DataError if several differ in content, or one cannot be read
        """
        for name in names:
            parts = PurePosixPath(name).parts
            found = [file for file in self.files if file.path.parts[-len(parts) :] == parts]
            if found:
                first, *others = sorted(found, key=lambda file: (len(file.path.parts), file.path))
                if other := next((file for file in others if file.sha256() != first.sha256()), None):
                    raise DataError(
                        f"{first.where} and {other.where} are both {name}, and differ. Name the directory of one."
                    )
                return first
        return None

    def _add_tar(self, path, name):
        archive = self._open.enter_context(tarfile.open(path, tarinfo=_TarHeader))  # noqa: SIM115 (closed with the others)

        def opened(member: tarfile.TarInfo) -> IO[bytes]:
            file = archive.extractfile(member)
            assert file is not None, "of a regular file there is one"
            return file

        for member in archive:
            if member.isfile():
                inner = name.with_name(name.name.partition(".tar")[0].removesuffix(".tgz")) / member.name
                where = f"{path}, {member.name}"
                self.files.append(ArchivedFile(inner, where, member.size, member.size, partial(opened, member)))
