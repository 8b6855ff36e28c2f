"""The file-system calls that write files, one function each, and the names of temporary files.

    file = disk.create(temporary)
    disk.write(file, raw)

All files of this project are written through these functions, called as `disk.link(...)`, never through an imported
`link`. So a test can replace any of them: to record their order, to raise at the i-th call, or to kill the process
there. Files are unbuffered: a disk error is raised by the call that caused it, and closing a file writes nothing. Files
are also opened for reading here, by `open_to_read`, which never waits for a pipe.

A store, a run or an output directory may come from someone else, and any directory or file in it may be a link to the
user's own files. `follow_no_links_below(root)` names such a directory. From then on, all calls reach files below it
from an open descriptor of the root, one path component at a time. They open no component that is a link (openat with
O_NOFOLLOW, the others with dir_fd), so nothing can be exchanged between a check and its use. The root itself may be a
link or be reached through links, because the user chose it. The last component is not followed either: files are
created, linked, renamed or removed by name, and `append` refuses whatever is not a regular file. Files written by other
libraries go into a new directory, which then gets its name. Not handled here: the order of the calls (durable.py,
shards/writer.py).
"""

import atexit
import errno
import hashlib
import os
import re
import shutil
import stat
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO, IOBase
from pathlib import Path

from mlsm.common.errors import PlaceError, WriteError

CALLS = ("create", "append", "write", "fsync", "close", "link", "unlink", "rename", "mkdir", "fsync_path")
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_OF_THE_MACHINE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}
_OF_THE_FILE = {None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG}
_NOT_OF_DIRECTORIES = {errno.EINVAL, errno.ENOTSUP}  # of fsync, on some network and FUSE file systems
_TEMPORARY_NAME = re.compile(r"\.(?P<rest>.+\.(?P<pid>\d+)\.[0-9a-f]{6})(?P<check>[0-9a-f]{6})\.tmp")
_DIRECTORY = os.O_DIRECTORY | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)  # O_PATH needs no permission to list
_temporaries: set[tuple[int, Path]] = set()
_roots: set[Path] = set()
_ended = False
_naming = threading.Lock()  # held while a name appears, so that none does after `end_writing`
os.register_at_fork(after_in_child=_naming._at_fork_reinit)  # type: ignore[attr-defined]  # another thread may hold it


def follow_no_links_below(root: str | Path) -> None:
    """Stop this process from following links when it writes below a directory, which need not exist yet."""
    _roots.add(_absolute(root))


@contextmanager
def directory(path: str | Path, root: str | Path | None = None) -> Iterator[int]:
    """A descriptor of a directory, to pass as dir_fd to system calls.

    root    below which no link is followed; by default the nearest of `follow_no_links_below`
    Raises  PlaceError if something below the root is a link or not a directory; OSError
    """
    whole = _absolute(path)
    top = _absolute(root or next((place for place in (whole, *whole.parents) if place in _roots), whole))
    descriptor, here = os.open(top, _DIRECTORY), top
    try:
        for part in whole.relative_to(top).parts:
            here = here / part
            try:
                below = os.open(part, _DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise _not_entered(here, top, descriptor) from None
                raise OSError(error.errno, error.strerror, str(here)) from None
            left, descriptor = descriptor, below
            os.close(left)  # last: a signal handler may raise after it, when the number may be another file's
        yield descriptor
    finally:
        os.close(descriptor)


def _absolute(path: str | Path) -> Path:
    """The absolute path, links not resolved. Fails only for a relative path whose working directory is gone."""
    return Path(path) if os.path.isabs(path) else Path.cwd() / path


def _not_entered(path, root, parent):
    status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(status.st_mode):
        return PlaceError(
            f"{path} is a link, and no link is followed inside {root}. Nothing was changed. Replace the link by what"
            f" it leads to, or remove it."
        )
    return PlaceError(
        f"{path} is {kind_of_file(status)}, and a directory is expected there. Nothing was changed. Move it elsewhere."
    )


@contextmanager
def _parent(path):
    """The descriptor of a path's directory, and the path's name in it."""
    path = Path(path)
    with directory(path.parent) as descriptor:
        yield descriptor, path.name


def is_directory(path: str | Path) -> bool:
    """Whether the directory exists; raises the other errors of `directory`."""
    try:
        with directory(path):
            return True
    except FileNotFoundError:
        return False


def create(path: str | Path) -> FileIO:
    """Open a new file for writing."""
    with _parent(path) as (parent, name), _named(path), _naming:
        _refuse_after_the_end()
        return open(path, "xb", buffering=0, opener=lambda _, flags: os.open(name, flags, 0o666, dir_fd=parent))


def append(path: str | Path, make: bool = True) -> FileIO:
    """Open a file for writing at its end.

    make    whether to create the file if it does not exist
    Raises  PlaceError if the name belongs to a link, a pipe or something else that is not a file; OSError
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | (os.O_CREAT if make else 0)
    with _parent(path) as (parent, name), _named(path):
        with suppress(FileNotFoundError):
            _refuse_place(os.stat(name, dir_fd=parent, follow_symlinks=False), path)
        return _checked(
            open(path, "ab", buffering=0, opener=lambda *_: os.open(name, flags, 0o666, dir_fd=parent)),
            _refuse_place,
            path,
        )


def _checked(file, refuse, path):
    """Return the file, unless it must be refused. Only the object closes its descriptor: a signal handler may raise
    after any call, and a number closed twice may already belong to another file.
    """
    try:
        refuse(os.fstat(file.fileno()), path)
    except BaseException:
        file.close()
        raise
    return file


def _refuse_place(status, path):
    if not stat.S_ISREG(status.st_mode):
        raise PlaceError(f"{path} is {kind_of_file(status)}, and a file is expected there. Move it elsewhere.")


def write(file: FileIO, raw: bytes | bytearray | memoryview) -> None:
    """Write all bytes; the system may accept only a part per call."""
    raw = memoryview(raw)
    while len(raw):
        raw = raw[file.write(raw) :]


def fsync(file: IOBase) -> None:
    os.fsync(file.fileno())


def close(file: IOBase) -> None:
    file.close()


def open_to_read(path: str | Path) -> FileIO:
    """Open a regular file, or a link to one, for reading.

    Raises  OSError, also if the path is not a file: it does not wait for a pipe or touch a device
    """
    _refuse_irregular(os.stat(path), path)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    return _checked(open(path, "rb", buffering=0, opener=lambda *_: os.open(path, flags)), _refuse_irregular, path)


def _refuse_irregular(status, path):
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {kind_of_file(status)}, not a file", str(path))


def is_of_the_machine(error: Exception) -> bool:
    """Whether a failed read is not the file's fault: too many open files, no memory, no room on disk for a copy."""
    return isinstance(error, WriteError) or getattr(error, "errno", None) in _OF_THE_MACHINE


def is_of_the_file(error: OSError) -> bool:
    """Whether a failed read is the file's fault: it is missing, is not a file or cannot be unpacked.

    Other errors (too many open files, an unreachable server, a disk's read error, missing permissions) may pass while
    the file is whole.
    """
    return error.errno in _OF_THE_FILE


def kind_of_file(status: os.stat_result) -> str:
    """The kind of file that a status describes, in words."""
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")


def read_file(path: str | Path) -> bytes:
    """All bytes of a regular file. Raises the errors of `open_to_read`."""
    with open_to_read(path) as file:
        return file.readall()


def read_below(root: str | Path, path: str | Path) -> bytes:
    """All bytes of a regular file below a directory, without following links on the way. Raises OSError, PlaceError."""
    with directory(Path(path).parent, root) as parent, _named(path):
        name = Path(path).name
        descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    with open(descriptor, "rb", buffering=0) as file:
        _refuse_irregular(os.fstat(descriptor), path)
        return file.readall()


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal. Raises OSError, also for anything that is not a file."""
    with open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def link(old: Path, new: Path) -> None:
    """Give a file a second name. Raises FileExistsError if that name exists."""
    with _parent(old) as (place, name), _parent(new) as (other_place, other), _named(old, new), _naming:
        _refuse_after_the_end()
        os.link(name, other, src_dir_fd=place, dst_dir_fd=other_place, follow_symlinks=False)


def unlink(path: Path) -> None:
    with _parent(path) as (parent, name), _named(path):
        os.unlink(name, dir_fd=parent)
    _temporaries.discard((os.getpid(), path))


def rename(old: Path, new: Path) -> None:
    """Rename a file or directory. A file, or an empty directory, with the new name is replaced."""
    with _parent(old) as (place, name), _parent(new) as (other_place, other), _named(old, new):
        os.rename(name, other, src_dir_fd=place, dst_dir_fd=other_place)
    _temporaries.discard((os.getpid(), old))


def mkdir(path: Path) -> None:
    with _parent(path) as (parent, name), _named(path), _naming:
        _refuse_after_the_end()
        os.mkdir(name, dir_fd=parent)


def fsync_path(path: Path) -> None:
    """Make a file's bytes, or a directory's names, survive a power cut; the latter if the file system can."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if _roots.isdisjoint(_absolute(path).parents):
        descriptor = os.open(path, flags)
    else:
        with _parent(path) as (parent, name), _named(path):
            descriptor = os.open(name, flags | os.O_NOFOLLOW, dir_fd=parent)
    try:
        with _named(path):
            os.fsync(descriptor)
    except OSError as error:
        if not (error.errno in _NOT_OF_DIRECTORIES and stat.S_ISDIR(os.fstat(descriptor).st_mode)):
            raise
    finally:
        os.close(descriptor)


def allow(path: Path, permissions: int) -> None:
    """Add the permissions that a regular file lacks. Does nothing to a link, or if the disk refuses."""
    with _parent(path) as (parent, name), _named(path):
        if not stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            return
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent)
    try:
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
        if permissions & ~mode:
            with suppress(PermissionError):  # of a disk that has no permissions
                os.fchmod(descriptor, mode | permissions)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a file, a link, or a directory with all that is in it. FileNotFoundError if there is none."""
    with _parent(path) as (parent, name), _named(path):
        if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=parent)  # follows no links, wherever they are
        else:
            os.unlink(name, dir_fd=parent)


def rmdir(path: Path) -> None:
    """Remove an empty directory."""
    with _parent(path) as (parent, name), _named(path):
        os.rmdir(name, dir_fd=parent)


@contextmanager
def _named(*paths):
    """Put the whole paths into the message of an OSError from a call with a descriptor."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise PlaceError(f"{paths[-1]} is a link, which is not followed. Move it elsewhere.") from None
        first, *second = map(str, paths)
        raise OSError(error.errno, error.strerror, first, None, *second) from None


def _refuse_after_the_end():
    if _ended:
        raise OSError(errno.ECANCELED, "this process is ending")


def temporary_name(directory: str | Path, stem: str) -> Path:
    """A name that no other process uses. It starts with a dot, so that readers do not take the file for a finished one.

    The name is remembered until `discard`. When the process ends, files with remembered names are removed, unless it is
    killed. So Ctrl-C at any moment leaves no file behind.
    """
    rest = f"{stem}.{os.getpid()}.{uuid.uuid4().hex[:6]}"
    path = Path(directory) / f".{rest}{_check_digits(rest)}.tmp"
    _temporaries.add((os.getpid(), path))
    return path


def writer_of_temporary(name: str) -> int | None:
    """The id of the process that `temporary_name` made a name for; None if the name only looks similar.

    The last six digits are a checksum of the rest, so that another program's file is not recognised by accident.
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
            remove(temporary)
        else:
            unlink(temporary)
    except FileNotFoundError:
        pass
    except (OSError, PlaceError):
        return  # the error that led here is more informative; it is tried again when the process ends
    _temporaries.discard((os.getpid(), temporary))


def remove_leftovers(directory: Path) -> None:
    """Remove temporaries, files and directories, that a killed process left in a directory."""
    for path in directory.glob(".*.tmp"):
        if writer_of_temporary(path.name) is not None:  # others may be the user's
            remove(path)


@atexit.register
def discard_all() -> None:
    """Remove the temporary files that this process has made."""
    for process, path in list(_temporaries):
        if process == os.getpid():  # a forked child does not remove its parent's
            discard(path)


def end_writing() -> None:
    """Remove the temporary files of this process and let it make no more, because it may be killed from now on.

    A thread that is about to make a file gets OSError. Without that, its file would appear after its name was forgotten
    here, and nothing would remove it.
    """
    global _ended
    with _naming:
        _ended = True
    discard_all()
