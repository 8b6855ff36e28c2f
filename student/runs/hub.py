"""Directories of a run as revisions of a Hub repository.

Branches are pushed first and main last: after an interrupted push main is as before, and the same command continues.
Files of an earlier export that the new one lacks, such as an LSP head, are removed. All other files stay.

Only the last part of local paths in lineage.json is pushed, as on the model card. The file itself keeps whole paths,
because evaluations use them to find teachers and stores on this machine. Not handled here: what is in the directories
(export.py), which directories are pushed (export_run.py).
"""

import json
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple, cast

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError

from mlsm.common.disk import read_file
from mlsm.common.errors import RunError
from mlsm.common.json_checks import parse_json
from mlsm.common.paths import utf8
from mlsm.common.text import without_directories
from student.runs.export import LINEAGE_FILE, is_export_file

PRIVATE_FILES = ["resume/*", "state.json"]  # files of a checkpoint that only resuming needs
_REFUSED = (401, 403)
_HttpError = cast(type[Exception], HfHubHTTPError.__bases__[0])  # of httpx or httpx2, whichever huggingface_hub uses


class Revision(NamedTuple):
    """The content of one branch."""

    branch: str
    directory: Path
    message: str

    def contents(self) -> dict[str, Path | bytes]:
        """The files to push: the name of each to the file, or to the bytes that are pushed instead of it."""
        paths = [path for path in sorted(self.directory.rglob("*")) if path.is_file()]
        names = {path.relative_to(self.directory).as_posix(): path for path in paths}
        found: dict[str, Path | bytes] = {
            name: path for name, path in names.items() if not any(fnmatch(name, pattern) for pattern in PRIVATE_FILES)
        }
        if LINEAGE_FILE in found:
            lineage = without_directories(parse_json(read_file(names[LINEAGE_FILE]), names[LINEAGE_FILE]))
            found[LINEAGE_FILE] = utf8(json.dumps(lineage, indent=1, ensure_ascii=False) + "\n")
        return found

    def files(self) -> dict[str, int]:
        """Names of the files that are pushed, with their bytes."""
        return {
            name: len(content) if isinstance(content, bytes) else content.stat().st_size
            for name, content in self.contents().items()
        }


def push(
    repository: str, revisions: list[Revision], *, private: bool, progress: Callable[..., None], api: Any = None
) -> str:
    """Create the repository if need be and upload every revision; returns its address.

    api     huggingface_hub.HfApi, or a stand-in
    Raises  RunError if the Hub refuses or cannot be reached, or a directory holds a link; ShardError if a
            lineage.json is damaged
    """
    api = api or HfApi()
    for revision in revisions:
        if links := [path for path in sorted(revision.directory.rglob("*")) if path.is_symlink()]:
            raise RunError(
                f"{links[0]} is a link, and what it leads to might not be for others. Nothing was pushed. Put the file"
                f" itself there, or remove the link."
            )
    contents = [revision.contents() for revision in revisions]
    try:
        address = str(api.create_repo(repository, private=private, exist_ok=True))
        for number, revision in enumerate(revisions):
            progress("push", number, len(revisions), unit="revisions", branch=revision.branch)
            if revision.branch != "main":
                api.create_branch(repository, branch=revision.branch, exist_ok=True)
            files = [CommitOperationAdd(name, content) for name, content in contents[number].items()]
            there = api.list_repo_files(repository, revision=revision.branch)
            stale = [name for name in there if name not in contents[number] and is_export_file(name)]
            changes = [*files, *map(CommitOperationDelete, stale)]
            api.create_commit(repository, changes, commit_message=revision.message, revision=revision.branch)
    except (_HttpError, OSError, ValueError, RuntimeError) as error:  # includes huggingface_hub's own errors
        raise RunError(f"not pushed to {repository}: {_reason(error)} Then the same command pushes again.") from error
    progress("push", len(revisions), len(revisions), unit="revisions")
    return address


def _reason(error: Exception) -> str:
    """The cause of an error, and what to do."""
    said = (" ".join(str(error).split()) or type(error).__name__).rstrip(".")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in _REFUSED or type(error).__name__ == "LocalTokenNotFoundError":
        return f"the Hub needs a token with write access ({said}). Log in:  hf auth login   or set HF_TOKEN."
    if status == 404 or type(error).__name__ == "HFValidationError":
        return f"{said}. Check the name, like someone/student."
    if status == 429 or (status or 0) >= 500:
        return f"the Hub refuses for now ({said}). Try later."
    if status is not None or isinstance(error, ValueError | RuntimeError):
        return f"{said}."
    return f"the Hub cannot be reached ({said}). Check the network, and that HF_HUB_OFFLINE is not set."
