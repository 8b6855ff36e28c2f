"""The file-system calls by which files appear whole, one function each, and the temporaries that wait for a name.

    file = disk.create(temporary)
    disk.write(file, raw)

What this project writes goes through these names (`disk.link(...)`, never an imported `link`), so that a test can stand
in for any of them: record their order, raise at the i-th, kill the process at the i-th. None does more than it says.
Files are unbuffered: an error of the disk comes from the call that met it, and closing a file writes nothing. Files are
opened for reading here too, by `open_to_read`, which never waits for a pipe.
Left out: in which order they are called (durable.py, shards/writer.py).
"""

import atexit
import errno
import hashlib
import os
import re
import shutil
import stat
import uuid
from io import FileIO, IOBase
from pathlib import Path

CALLS = ("create", "write", "fsync", "close", "link", "unlink", "rename", "mkdir", "fsync_path")
OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # errors that say nothing of the file that was opened
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_TEMPORARY_NAME = re.compile(r"\.(?P<rest>.+\.(?P<pid>\d+)\.[0-9a-f]{6})(?P<check>[0-9a-f]{6})\.tmp")
_temporaries: set[tuple[int, Path]] = set()


def create(path: str | Path) -> FileIO:
    """Open a new file for writing."""
    return open(path, "xb", buffering=0)


def write(file: FileIO, raw: bytes | bytearray | memoryview) -> None:
    """Write all of it; the system may take a part at a time."""
    raw = memoryview(raw)
    while len(raw):
        raw = raw[file.write(raw) :]


def fsync(file: IOBase) -> None:
    os.fsync(file.fileno())


def close(file: IOBase) -> None:
    file.close()


def open_to_read(path: str | Path) -> FileIO:
    """A regular file, or a link that ends at one, open for reading.

    Raises  OSError, of whatever has the name and is no file: a pipe is not waited for, a device not touched
    """
    _refuse_irregular(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_irregular(status, path):
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of_file(status)}, not a file", str(path))


def kind_of_file(status: os.stat_result) -> str:
    """What kind of thing a status is of, in words."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def read_file(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises as `open_to_read`."""
    with open_to_read(path) as file:
        return file.readall()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal. Raises OSError, also of what is no file."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link(old: Path, new: Path) -> None:
    """A second name for a file; FileExistsError if there is one of that name."""
    os.link(old, new)


def unlink(path: Path) -> None:
    os.unlink(path)
    _temporaries.discard((os.getpid(), path))


def rename(old: Path, new: Path) -> None:
    """Replaces a file, or an empty directory, that has the new name."""
    os.rename(old, new)
    _temporaries.discard((os.getpid(), old))


def mkdir(path: Path) -> None:
    os.mkdir(path)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(directory: str | Path, stem: str) -> Path:
    """A name no other process uses; it begins with a dot, so that no reader takes it for finished.

    Until `discard` it is remembered: what an interruption left behind goes when the process ends, unless it is
    killed. There is no moment between two instructions at which Ctrl-C could leave a file for good.
    """
    rest = f"{stem}.{os.getpid()}.{uuid.uuid4().hex[:6]}"
    path = Path(directory) / f".{rest}{_check_digits(rest)}.tmp"
    _temporaries.add((os.getpid(), path))
    return path


def writer_of_temporary(name: str) -> int | None:
    """The id of the process that `temporary_name` made a name for; None if the name only looks like such a one.

    The last six digits follow from the rest, so that a file of somebody else's does not count by accident.
    """
    found = _TEMPORARY_NAME.fullmatch(name)
    return int(found["pid"]) if found and found["check"] == _check_digits(found["rest"]) else None


def _check_digits(rest):
    return hashlib.sha256(b"mlsm " + os.fsencode(rest)).hexdigest()[:6]


def discard(temporary: Path) -> None:
    """Remove a temporary, file or directory, if it still has its name. Never raises OSError."""
    if (os.getpid(), temporary) not in _temporaries:
        return
    try:
        if temporary.is_dir() and not temporary.is_symlink():
            shutil.rmtree(temporary)
        else:
            unlink(temporary)
    except FileNotFoundError:
        pass
    except OSError:
        return  # the error that led here tells more; the end of the process tries again
    _temporaries.discard((os.getpid(), temporary))


@atexit.register
def discard_all() -> None:
    """Remove the temporaries of this process: when it ends, or when what it is about to write is no longer wanted."""
    for process, path in list(_temporaries):
        if process == os.getpid():  # those of a parent that forked this process are not ours
            discard(path)
