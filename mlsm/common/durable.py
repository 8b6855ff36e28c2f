"""Files and directories that appear whole or not at all, and survive a power cut once they have appeared.

    with appearing_whole(path) as file:              # replaces a file
        file.write(...)
    publish_json(path, value)                        # never replaces one
    publish_directory(path, fill)

All of them do the same: write under a unique temporary name in the same directory, fsync, give the file its final name
by rename (or by link, which never replaces), and fsync the directory. A failure changes nothing and leaves no temporary
file. A kill leaves at most a temporary file, recognisable by its name (disk.temporary_name). Files are written with
plain writes, never through a memory map: on a full disk a write raises OSError, but a map kills the process. Nothing is
written through a link below a directory that `disk.follow_no_links_below` names. The calls themselves, and how they
avoid following links, are in disk.py.
"""

import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mlsm.common import disk
from mlsm.common.errors import PlaceError, WriteError
from mlsm.common.paths import utf8

# errors of link(2) on a file system without hard links
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


@contextmanager
def appearing_whole(path: Path) -> Iterator[BinaryIO]:
    """A buffered binary file to write to. It gets its name if the block succeeds; otherwise nothing is left."""
    with _temporary(path) as temporary:
        file = io.BufferedWriter(disk.create(temporary))
        try:
            with naming(path):
                yield file
                file.flush()
                disk.fsync(file)
        except BaseException:
            with suppress(OSError):  # closing tries once more to write what could not be written
                disk.close(file)
            raise
        disk.close(file)
        _rename(temporary, path, sync=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an error of the file system that names no file, such as that of a full disk, name this one."""
    try:
        yield
    except OSError as error:
        if error.errno in REMEDIES and error.filename is None:
            error.filename = str(path)
        raise


def replace_bytes(path: Path, content: bytes, sync: bool = True) -> None:
    """Write a file's content under a final name, replacing any file there.

    sync  whether the file must survive a power cut once it has its name
    """
    with _written(path, content, sync) as temporary:
        _rename(temporary, path, sync)


def replace_json(path: Path, value: object, allow_nan: bool = False) -> None:
    """Write JSON under a final name, replacing any file there."""
    replace_bytes(path, _json_bytes(value, allow_nan))


def publish_json(path: Path, value: object, withdraw: bool = False, allow_nan: bool = False) -> bool:
    """Write JSON under a final name, unless that name exists; for the result and `withdraw` see `publish`."""
    if os.path.lexists(path):  # nothing to write, so a finished store may be on a read-only disk
        disk.fsync_path(path.parent)  # whoever wrote it may have been killed before this
        return False
    with _written(path, _json_bytes(value, allow_nan)) as temporary:
        return publish(temporary, path, withdraw)


def publish(temporary: Path, final: Path, withdraw: bool = False) -> bool:
    """Give a written and fsynced file its final name, unless that name exists.

    withdraw  whether to remove the name again if a step after the link failed, so that the file may not survive a power
              cut
    Returns   True if this call published it, False if the name already existed; the temporary file is gone either way
    """
    written = os.stat(temporary)
    try:
        disk.link(temporary, final)
        published = True
    except FileExistsError:
        published = False
    except OSError as error:
        raise explain_link(error, final) from error
    try:
        with suppress(FileNotFoundError):  # a worker that ends has removed its temporary files
            disk.unlink(temporary)
        disk.fsync_path(final.parent)
    except OSError:
        if published and withdraw:
            with suppress(OSError):
                if os.path.samestat(os.stat(final), written):  # no other process has replaced it meanwhile
                    disk.unlink(final)
        raise
    return published


def check_links(directory: Path) -> None:
    """Refuse a directory on a file system without hard links, before long work whose result needs them.

    Raises  WriteError; OSError if nothing can be written there
    """
    make_directories(directory)
    with _written(directory / "links", b"", sync=False) as one, _temporary(directory / "links") as other:
        try:
            disk.link(one, other)
        except OSError as error:
            raise explain_link(error, directory) from error


def explain_link(error: OSError, final: Path) -> OSError:
    """The error to raise for a failed hard link: a WriteError if the file system has no hard links, else the same
    error."""
    if error.errno is None or error.errno not in _NO_LINKS:
        return error
    return WriteError(
        f"{final} could not be written: this disk does not support hard links ({os.strerror(error.errno)}), which are "
        "needed to name a finished file without replacing another. Nothing was changed. Choose a directory on "
        "another disk; FAT, exFAT and some network and FUSE file systems have no hard links."
    )


def publish_directory(
    final: Path,
    fill: Callable[[Path], object],
    replace: bool = True,
    carry: Callable[[Path, Path], object] | None = None,
) -> None:
    """Create a directory in one step: `fill(path)` fills it under a temporary name, then it is fsynced and renamed.
    Its files may be read and written by those whom the umask allows, also if a library made them for their owner only.

    replace  whether an existing directory is replaced; otherwise it is kept, and that is no error
    carry    called as carry(old, new) before a directory is replaced, after it was moved aside: copies what should be
             kept into the new one, without changing the old one, which is then removed. After a kill in between, the
             old one is in .<name>.replaced, where no `clean` removes it, and the next call puts it back first
    Raises   PlaceError if `final` exists and is not a directory, is a mount point, is a link that may not be replaced,
             or next to a .<name>.replaced; OSError
    A failure changes nothing and leaves no temporary directory.
    """
    if os.path.ismount(final):
        raise PlaceError(f"{final} is a mount point, whose place no finished directory can take. Name one inside it.")
    if final.is_symlink() and not replace:
        raise PlaceError(f"{final} is a link, and a directory is to be written there. Name the one that it leads to.")
    make_directories(final.parent)
    if carry is not None and not os.path.lexists(final):
        with suppress(FileNotFoundError):
            disk.rename(_aside(final), final)
    with _temporary(final) as temporary:
        disk.mkdir(temporary)
        usual = os.stat(temporary).st_mode & 0o666  # what the umask leaves of a file's permissions
        fill(temporary)
        for path in temporary.rglob("*"):
            disk.allow(path, usual)  # safetensors allows its files to their owner only
            disk.fsync_path(path)
        disk.fsync_path(temporary)
        try:
            disk.rename(temporary, final)
        except OSError as error:
            if error.errno == errno.ENOTDIR and not final.is_dir():
                kind = disk.kind_of_file(os.lstat(final))
                raise PlaceError(f"{final} is {kind}, and a directory is to be written there. Move it.") from None
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            if replace:
                _replace_directory(temporary, final, carry)
        disk.fsync_path(final.parent)


def _replace_directory(temporary: Path, final: Path, carry: Callable[[Path, Path], object] | None) -> None:
    replaced = disk.temporary_name(final.parent, final.name)
    aside = replaced if carry is None else _aside(final)
    if carry is not None and os.path.lexists(aside):
        raise PlaceError(
            f"{aside} is left from a command that was killed while it replaced {final}, and may hold files of yours."
            f" Nothing was changed. Move those that {final.name} lacks into it, and remove {aside}."
        )
    try:
        disk.rename(final, aside)
        if carry is not None:
            carry(aside, temporary)
        disk.rename(temporary, final)
    except BaseException:  # also on Ctrl-C: otherwise the old one would be removed with the other temporaries
        if not final.exists() and aside.exists():
            disk.rename(aside, final)
        raise
    if carry is not None:
        disk.rename(aside, replaced)
    disk.discard(replaced)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


@contextmanager
def refuse_what_is_in_the_way() -> Iterator[None]:
    """Wrap code that writes a command's outputs, as a context manager or as a decorator.

    Raises  PlaceError, which names the path, if there is a directory where a file is to be written, or a file or
            something else where a directory is to be made. The calls of disk.py raise OSError then, which callers with
            a fallback expect
    """
    try:
        yield
    except (IsADirectoryError, NotADirectoryError) as error:
        path = Path(os.fsdecode(error.filename2 or error.filename or ""))
        if isinstance(error, IsADirectoryError):
            place, wanted = path, "a file"
        else:  # the highest part that is not a directory
            above = [place for place in (path, *path.parents) if place.exists() and not place.is_dir()]
            place, wanted = (above or [path])[-1], "a directory"
        if not place.exists():
            raise  # another process moved it meanwhile
        raise PlaceError(
            f"{place} is {disk.kind_of_file(os.stat(place))}, and {wanted} is to be written there. Move it elsewhere,"
            " or choose another output directory."
        ) from error


REMEDIES = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "Make room")
REMEDIES |= {errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or name a place on another file system"}
REMEDIES |= dict.fromkeys((errno.EACCES, errno.EPERM), "Check its permissions, or name another place")
REMEDIES |= dict.fromkeys((errno.EROFS, errno.ENOTDIR), "Name another place")
"""what a user can do about an error of the file system, by its number"""


def remedy_for(error: Exception) -> str:
    """What a user can do about a failed write. A library's error without a number is that of a full disk."""
    return REMEDIES.get(getattr(error, "errno", None) or errno.ENOSPC, "Mend that")


def make_directories(path: Path) -> None:
    """Make a directory and its parents, so that each survives a power cut."""
    if not disk.is_directory(path):
        make_directories(path.parent)
        with suppress(FileExistsError):
            disk.mkdir(path)
        disk.fsync_path(path.parent)


@contextmanager
def _temporary(path):
    """A temporary name next to `path`. At the end, a file with this name is removed."""
    temporary = disk.temporary_name(path.parent, path.name)
    try:
        yield temporary
    finally:
        disk.discard(temporary)


@contextmanager
def _written(path, content, sync=True):
    """A temporary file next to `path` with the content."""
    with _temporary(path) as temporary:
        file = disk.create(temporary)
        try:
            disk.write(file, content)
            if sync:
                disk.fsync(file)
        finally:
            disk.close(file)
        yield temporary


def _rename(temporary, path, sync):
    disk.rename(temporary, path)
    if sync:
        disk.fsync_path(path.parent)


def _json_bytes(value, allow_nan):
    return utf8(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=allow_nan) + "\n")
