"""The command prepare-data: convert evaluation data as published to the layout that the evaluations read.

    report = prepare_data(PrepareDataConfig(dataset="glue", from_=Path("downloads"), output=Path("data")))
    report["parts"], report["missing"]

Every part is written to a temporary directory, read there in the same way as by its evaluation, and only then given its
name. So every part in the layout can be evaluated on. An existing part is not replaced: if its files are equal, it is
done; otherwise this is an error. Nothing is downloaded here (finetune and evaluate-blimp take from the Hub what
--data-dir lacks).
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping

from mlsm.common import disk
from mlsm.common.disk import file_sha256
from mlsm.common.durable import make_directories, publish_directory, refuse_what_is_in_the_way
from mlsm.common.errors import DataError, MlsmError
from mlsm.common.progress import silent
from mlsm.evaluation.preparation.archives import ArchivedFile, Sources
from mlsm.evaluation.preparation.config import PrepareDataConfig
from mlsm.evaluation.preparation.sets import SETS, LayoutDirectory


def prepare_data(settings: PrepareDataConfig, progress: Callable[..., None] = silent) -> dict:
    """Find, write, check and publish the parts of a set.

    Returns  dataset, output, parts (directory, files, counts, expected, finished_before), missing (directory, lacks,
             published)
    Raises   DataError if no file of the set is found, an archive is damaged, or a directory has other content; the
             evaluation's own errors for files that it cannot read
    """
    assert settings.dataset is not None and settings.from_ is not None  # checked by the settings
    parts, missing, failures = [], [], []
    wanted = SETS[settings.dataset]
    with Sources(settings.from_) as sources:
        for done, part in enumerate(wanted):
            progress("preparing", done, len(wanted), unit="parts")
            try:
                found, lacks = _collect(part, sources)
                if found is not None:
                    parts.append(_publish(part, found, settings.output))
                elif (settings.output / part.directory).is_dir():
                    counts = part.count_examples(settings.output)
                    parts.append(_report(part, settings.output / part.directory, counts, True))
                else:
                    missing.append({"directory": part.directory, "lacks": lacks, "published": part.published})
            except MlsmError as error:  # the other parts are of use without it
                failures.append(error)
    if failures:
        also = f" {len(failures) - 1} more of its sets cannot be prepared." if len(failures) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{also}")
    if not parts:
        lacking = missing[0]
        raise DataError(
            f"--from {settings.from_}: contains no {', '.join(lacking['lacks'][:3])}, unpacked or in an archive. "
            f"{lacking['directory']} is published at {lacking['published']}."
        )
    return {"dataset": settings.dataset, "output": str(settings.output), "parts": parts, "missing": missing}


def _collect(part: LayoutDirectory, sources: Sources) -> tuple[Mapping[str, bytes | ArchivedFile] | None, list[str]]:
    """The files of a part (or their new content), from the first published form whose files are all there. Otherwise
    None, and the missing files of the form that is nearest to complete.
    """
    lacking = []
    for way in part.ways:
        found = {name: sources.find(*names) for name, names in way.files.items()}
        lacks = [way.files[name][0] for name, file in found.items() if file is None and name not in way.optional]
        if not lacks:
            there = {name: file for name, file in found.items() if file is not None}
            if way.convert is None:
                return there, []
            return way.convert({name: file.read() for name, file in there.items()}), []
        lacking.append((len(lacks) / len(way.files), lacks))
    return None, min(lacking)[1]


@refuse_what_is_in_the_way()
def _publish(part, contents, output):
    make_directories(output)
    final = output / part.directory
    finished_before = final.is_dir()
    staging = disk.temporary_name(output, "prepare-data")
    staged = staging / part.directory
    try:
        for name, raw in contents.items():
            path = staged / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "wb") as file:
                file.writelines([raw] if isinstance(raw, bytes) else raw.chunks())
        try:
            counts = part.count_examples(staging)
        except MlsmError as error:
            raise type(error)(_as_published(str(error), staged, contents)) from None
        if not finished_before:
            publish_directory(final, lambda place: shutil.copytree(staged, place, dirs_exist_ok=True), replace=False)
    finally:
        disk.discard(staging)
    for name, raw in contents.items():
        expected = hashlib.sha256(raw).hexdigest() if isinstance(raw, bytes) else raw.sha256()
        if (final / name).is_file() and file_sha256(final / name) == expected:
            continue
        why = f"its {name} differs from the one" if os.path.lexists(final / name) else f"it lacks the {name} that is"
        raise DataError(f"{final} exists, and {why} in --from. Remove the directory, or choose another --output.")
    return _report(part, final, counts, finished_before)


def _as_published(message, staged, contents):
    """An error about a file that was read in the temporary directory, with the name of the published one."""
    for name, raw in contents.items():
        published = raw.where if isinstance(raw, ArchivedFile) else f"{name}, made from the published files"
        message = message.replace(str(staged / name), published)
    return message


def _report(part, directory, counts, finished_before):
    files = sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())
    return {
        "directory": str(directory),
        "files": files,
        "counts": counts,
        "expected": part.expected,
        "finished_before": finished_before,
    }
