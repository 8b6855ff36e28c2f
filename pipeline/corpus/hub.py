"""Files of a dataset on the Hugging Face Hub, pinned to a commit and streamed.

    hf://datasets/wikimedia/wikipedia/20231101.en/*.parquet               as `datasets`, pandas and DuckDB write it
    hf://datasets/wikimedia/wikipedia@<branch, tag or commit>/20231101.en  a directory: the corpora in it

First the revision is resolved to a commit, which is part of each source's name and so of the plan. The Hub has the hash
of each file, so the scan downloads no file to hash it. Files are streamed (from Parquet only the text column) and kept
only in memory. Not handled here: copies on disk (make them by `hf download`; Parquet files then have the same units),
datasets that are a script.
"""

import io
import re
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import BinaryIO
from urllib.parse import unquote

from mlsm.common.errors import CorpusError
from pipeline.corpus.source import SUFFIXES, is_hidden, suffix_of

PREFIX = "hf://datasets/"
_FORM = re.compile(r"([^/@*]+/[^/@*]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?")
_BUFFER = 1 << 20  # bytes read at once; the Hub's own file object fetches more


@dataclass(frozen=True)
class HubFile:
    """A file of a dataset at a commit, with the part of Path's interface that sources use."""

    dataset: str
    commit: str
    path: str
    size: int = field(compare=False)
    sha256: str = field(compare=False)
    """SHA-256 of its bytes; for small files that are in git itself, the git blob's id."""

    def __str__(self):
        return f"{PREFIX}{self.dataset}@{self.commit}/{self.path}"

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.path).suffix

    @property
    def suffixes(self) -> Sequence[str]:
        return PurePosixPath(self.path).suffixes

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the path. Local files are also sorted by these, so a copy on disk has the same order."""
        return PurePosixPath(self.path).parts

    def stat(self) -> SimpleNamespace:
        """A file at a commit never changes."""
        return SimpleNamespace(st_size=self.size, st_mtime_ns=0, st_ctime_ns=0, st_dev=0, st_ino=0)

    def open(self, mode: str) -> BinaryIO:
        """Open the file for random access to its bytes; any failure to read them is an OSError."""
        from huggingface_hub import HfFileSystem

        with _failures_as_os_error():
            return io.BufferedReader(_Stream(HfFileSystem().open(str(self), mode)), _BUFFER)


class _Stream(io.RawIOBase):
    """The Hub's file object; errors of any HTTP library become OSErrors."""

    def __init__(self, file):
        self._file = file

    def readable(self):
        return True

    def seekable(self):
        return True

    def readinto(self, buffer):
        with _failures_as_os_error():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, position, whence=io.SEEK_SET):
        return self._file.seek(position, whence)

    def tell(self):
        return self._file.tell()

    def close(self):
        self._file.close()
        super().close()


def hub_files(pattern: str) -> list[HubFile]:
    """The files of a dataset that a `hf://datasets/` pattern names.

    Raises  CorpusError when the pattern cannot be read, names nothing, or the Hub cannot be reached
    """
    form = _FORM.fullmatch(pattern.removeprefix(PREFIX))
    if form is None:
        raise CorpusError(f"{pattern}: expected {PREFIX}<owner>/<name>[@<revision>]/<file, directory or glob>.")
    dataset, revision, path = form[1], unquote(form[2] or "main"), (form[3] or "").strip("/")
    try:
        _compile_glob(path)
    except ValueError as error:
        raise CorpusError(f"{pattern}: {error}.") from None
    try:
        with _failures_as_os_error():
            commit, entries = _listing(dataset, revision, path)
    except FileNotFoundError as error:
        raise CorpusError(f"{pattern}: {error}") from None
    except OSError as error:
        raise CorpusError(
            f"{pattern}: the Hugging Face Hub cannot be reached ({error}). Connect to it, or download the files "
            "elsewhere and pass them with --corpus."
        ) from None
    if not entries:
        raise CorpusError(f"{pattern}: the dataset has no such text, JSON lines or Parquet file at commit {commit}.")
    return [
        HubFile(dataset, commit, entry.path, entry.size, entry.lfs.sha256 if entry.lfs else entry.blob_id)
        for entry in entries
    ]


def _listing(dataset, revision, path):
    """Pair (commit, files of it that the path names: one, a directory's, or a glob's)."""
    from huggingface_hub import HfApi, RepoFile
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    api = HfApi()
    try:
        commit = api.dataset_info(dataset, revision=revision).sha
        list_files = partial(api.list_repo_tree, dataset, recursive=True, repo_type="dataset", revision=commit)
        if any(character in path for character in "*?["):
            above_wildcards = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
            fits = _compile_glob(path)
            found = [entry for entry in list_files(above_wildcards or None) if fits(entry.path)]
        else:
            found = api.get_paths_info(dataset, [path], repo_type="dataset", revision=commit) if path else []
            if not any(isinstance(entry, RepoFile) for entry in found):
                named = ((entry, PurePosixPath(entry.path)) for entry in list_files(path or None))
                found = [entry for entry, name in named if suffix_of(name) in SUFFIXES and not is_hidden(name)]
        return commit, [entry for entry in found if isinstance(entry, RepoFile)]
    except EntryNotFoundError:
        return commit, []
    except (RepositoryNotFoundError, RevisionNotFoundError):  # also for gated repositories
        raise FileNotFoundError(
            "no such dataset or revision on the Hub, or none that you may read. Check the name or log in: hf auth login"
        ) from None


def _compile_glob(pattern: str) -> Callable:
    from fsspec.utils import glob_translate

    return re.compile(glob_translate(pattern)).match


@contextmanager
def _failures_as_os_error():
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # of the HTTP library, which differs between versions of huggingface_hub
        raise OSError(" ".join(str(error).split()) or type(error).__name__) from error
