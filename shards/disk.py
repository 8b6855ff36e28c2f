"""The file-system calls of the commit protocol, one function each, and the temporaries that wait for a name.

    file = disk.create(temporary)
    disk.write(file, raw)

What the shards package writes goes through these names (`disk.link(...)`, never an imported `link`), so that a
test can stand in for any of them: record their order, raise at the i-th, kill the process at the i-th. None does
more than it says. Files are unbuffered: an error of the disk comes from the call that met it, and closing a file
writes nothing. Left out: in which order they are called (manifest.py, writer.py).
"""

import atexit
import os
import shutil
import uuid
from pathlib import Path

CALLS = ("create", "write", "fsync", "close", "link", "unlink", "rename", "mkdir", "fsync_path")
_temporaries = set()


def create(path):
    """Open a new file for writing."""
    return open(path, "xb", buffering=0)


def write(file, raw):
    """Write all of it; the system may take a part at a time."""
    raw = memoryview(raw)
    while len(raw):
        raw = raw[file.write(raw) :]


def fsync(file):
    os.fsync(file.fileno())


def close(file):
    file.close()


def link(old, new):
    """A second name for a file; FileExistsError if there is one of that name."""
    os.link(old, new)


def unlink(path):
    os.unlink(path)
    _temporaries.discard((os.getpid(), path))


def rename(old, new):
    """Replaces a file, or an empty directory, that has the new name."""
    os.rename(old, new)
    _temporaries.discard((os.getpid(), old))


def mkdir(path):
    os.mkdir(path)


def fsync_path(path):
    """Make a file's bytes, or a directory's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_name(directory, stem):
    """A name no other process uses; it begins with a dot, so that no reader takes it for finished.

    Until `discard` it is remembered: what an interruption left behind goes when the process ends, unless it is
    killed. There is no moment between two instructions at which Ctrl-C could leave a file for good.
    """
    path = Path(directory) / f".{stem}.{os.getpid()}.{uuid.uuid4().hex[:12]}.tmp"
    _temporaries.add((os.getpid(), path))
    return path


def discard(temporary):
    """Remove a temporary, file or directory, if it still has its name. Never raises OSError."""
    if (os.getpid(), temporary) not in _temporaries:
        return
    try:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            unlink(temporary)
    except FileNotFoundError:
        pass
    except OSError:
        return  # the error that led here tells more; the end of the process tries again
    _temporaries.discard((os.getpid(), temporary))


@atexit.register
def discard_all():
    """Remove the temporaries of this process: at its end, or when nobody wants any more what it is about to write."""
    for process, path in list(_temporaries):
        if process == os.getpid():  # a forked child owns none of its parent's
            discard(path)
