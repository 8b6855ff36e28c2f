"""What a study withholds from comparisons until all of its planned seeds are scored.

A file `withheld.json` beside the records names the two arms of the primary hypothesis. Looking at their scores while
seeds are missing invites to stop when the answer pleases, so `compare` refuses records that have such a file.
"""

from collections.abc import Iterable
from pathlib import Path

from mlsm.common import disk
from mlsm.common.durable import make_directories, replace_json
from mlsm.common.errors import ComparisonError

NAME = "withheld.json"


def keep_withheld(records: Path, primary: tuple[str, str] | None) -> None:
    """Note beside the records that the primary hypothesis is withheld, or with None that it no longer is."""
    if primary is not None:
        make_directories(records)
        replace_json(records / NAME, {"primary": primary})
    elif (records / NAME).exists():
        disk.unlink(records / NAME)


def refuse_withheld(results: Iterable[Path]) -> None:
    """Raise ComparisonError where the records, of more than one model, are of a study that is not through."""
    models: dict[Path, set[str]] = {}  # below a directory that withholds
    for path in map(Path.resolve, results):
        for place in (path, *path.parents):
            if (place / NAME).exists():
                models.setdefault(place, set()).update(path.relative_to(place).parts[:1] or ("all", "of them"))
    for directory, names in models.items():
        if len(names) > 1:
            raise ComparisonError(
                f"{directory} has the records of a study whose primary hypothesis is withheld until all of its seeds"
                f" are scored. Finish the study; or, to look at single models, give the directory of one at a time."
            )
