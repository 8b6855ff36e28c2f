"""Text sources, documents, token windows.

    sources = open_corpus(paths, globs and Hub names, ...)
    for piece in source.between(start, stop, offset, reader):          # documents in pieces of at most 64 KiB
    for window in windows(pieces, tokenizer, special_ids, rules):      # [CLS] a a a [SEP] b b [SEP]

Sources are files: text (`.txt`, anything not named otherwise), JSON lines and Parquet, the first two also as `.gz`,
`.xz`, `.bz2`, `.zst`; here or in a dataset on the Hub. Small files are joined to one source. `bundled` names the sample
of English Wikipedia in this package (bundled_text/README.md). Not handled here: which documents are held out and units
of work (plan.py), cleaning (docs/corpora.md).
"""

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from mlsm.common.errors import CorpusError
from mlsm.common.invocation import program
from mlsm.common.text import redacted
from pipeline.config import TextConfig
from pipeline.corpus.hub import PREFIX, HubFile, hub_files
from pipeline.corpus.json_lines import JsonLines
from pipeline.corpus.parquet import Parquet
from pipeline.corpus.small_files import join_small_files
from pipeline.corpus.source import ARCHIVES, COMPRESSED, JSON_LINES, SUFFIXES, SourceFile, suffix_of
from pipeline.corpus.text import TextFile
from pipeline.corpus.windows import Window, join_windows

BUNDLED_TEXT = Path(__file__).parents[1] / "bundled_text" / "wikipedia-en-2014.txt.xz"

__all__ = [
    "BUNDLED_TEXT",
    "JsonLines",
    "Parquet",
    "TextFile",
    "Window",
    "join_small_files",
    "join_windows",
    "open_corpus",
    "open_sources",
]


def open_corpus(
    corpus: Sequence[str],
    *,
    text_field: str = "text",
    boundary: str = "blank-line",
    invalid_utf8: str = "strict",
    output: Path | None = None,
) -> list[SourceFile]:
    """Resolve paths and globs to sources, in sorted order without repeats.

    corpus        paths, globs (`**` allowed) or hf://datasets/...; a directory means the text, JSON lines and Parquet
                  files in it, as their names say, or if there is none, those whose names have no suffix, as
                  WikiExtractor writes them. Linked directories are followed, each once, hidden files left out
    output        directory of results: its files are left out if it lies below a directory or a glob's fixed part
    invalid_utf8  "strict", or anything else to read on (Source)
    Raises        CorpusError when a name is empty or matches nothing, or the Hub cannot be reached
    """
    local: list[Path] = []
    remote: list[HubFile] = []
    for pattern in corpus:
        if not pattern:  # Path("") is the working directory
            raise CorpusError(
                "--corpus: one of its names is empty, as that of a shell variable without a value is. Name a file, a "
                "directory or a glob."
            )
        if pattern.startswith(PREFIX):
            remote += hub_files(pattern)
            continue
        found = expand(pattern, output, _files_of)
        if not found and Path(pattern).expanduser().is_dir():
            raise CorpusError(
                f"the directory {pattern} has no file that ends in {', '.join(sorted(SUFFIXES))}, and none without an "
                f"ending. To read others as text, pass a glob in quotes, such as '{pattern.rstrip('/')}/*.md'."
            )
        if not found:
            raise CorpusError(
                f"the corpus {redacted(repr(pattern))} matches no file. Pass a text, .jsonl or .parquet file, a glob "
                f"in quotes, or {PREFIX}<owner>/<name>/<files>; {program()} docs corpora says where to find the usual "
                "corpora."
            )
        local += found
    unique = {path.resolve(): path for path in sorted(local, key=_normal, reverse=True)}
    remote = sorted(set(remote), key=lambda file: (file.dataset, file.commit, file.parts))
    files = (*sorted(unique.values(), key=_normal), *remote)  # in any spelling of the paths the same order
    return [_open(file, text_field, boundary, invalid_utf8) for file in files]


def open_sources(config: TextConfig) -> list[SourceFile]:
    """The corpus of the settings as a list of sources; `bundled` is the text in this package."""
    if not config.corpus:
        raise CorpusError("no corpus given. Name files with --corpus, or omit it to use the bundled text.")
    if "bundled" in config.corpus and not BUNDLED_TEXT.is_file():
        raise CorpusError(
            f"the bundled text is missing: there is no file {BUNDLED_TEXT}. Reinstall this package, or name files "
            "with --corpus."
        )
    return open_corpus(
        [str(BUNDLED_TEXT) if name == "bundled" else name for name in config.corpus],
        text_field=config.text_field,
        boundary=config.document_boundary,
        invalid_utf8=config.invalid_utf8,
        output=config.output,
    )


def _normal(path):
    """The absolute path without `..`; links keep their names."""
    return Path(os.path.abspath(path))


def expand(pattern: str, output: Path | None, files_of: Callable[[Path], list[Path]]) -> list[Path]:
    """The files that a file's name, a glob or a directory names, without those of results below it.

    output    directory of results
    files_of  the files of one match, which may be a directory
    """
    path = Path(pattern).expanduser()
    if path.exists():
        above, matched = path, [path]
    else:
        above = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
        matched = _glob(path)
    found = [file for match in matched for file in files_of(match)]
    if output is not None and above.resolve() in output.resolve().parents:
        results = output.resolve()
        places = {file: (file.resolve(), file.parent.resolve() / file.name) for file in found}  # of a link: both ends
        found = [file for file in found if all(results not in place.parents for place in places[file])]
    for file in found:
        if _is_broken_link(file):
            raise CorpusError(f"{file}: a link to {os.readlink(file)}, which does not exist. Mend or remove it.")
    return found


def _files_of(path):
    """The file itself, or the files of a directory that are read."""
    if not path.is_dir():
        return [path] if path.is_file() or _is_broken_link(path) else []
    found = list(walk(path))
    return [file for file in found if suffix_of(file) in SUFFIXES] or [file for file in found if not file.suffix]


def walk(directory: Path) -> Iterator[Path]:
    """The files below a directory that are not hidden."""
    for _, files in _directories(directory):
        yield from files


def _directories(top: Path, passes_errors: bool = False) -> Iterator[tuple[Path, list[Path]]]:
    """A directory and those below it that are not hidden, with the files in each.

    Links are followed, but each directory is entered once, by the first of its paths: two links in each of n
    directories would make 2^n paths.

    passes_errors  whether directories that cannot be read are left out
    """
    entered, waiting = set(), [top]
    while waiting:
        directory = waiting.pop()
        if (place := directory.resolve()) in entered:
            continue
        entered.add(place)
        try:
            entries = sorted(entry for entry in directory.iterdir() if not entry.name.startswith("."))
        except OSError:
            if passes_errors:
                continue
            raise
        below = [entry for entry in entries if entry.is_dir()]
        yield directory, [entry for entry in entries if entry.is_file() or _is_broken_link(entry)]
        waiting += reversed(below)


def _glob(path: Path) -> list[Path]:
    """What a glob matches, as glob.glob finds it, but `**` enters each directory once, and at the end matches files."""
    if "**" not in path.parts:
        return [Path(name) for name in glob.glob(str(path))]
    at = path.parts.index("**")
    above, below = Path(*path.parts[:at]), path.parts[at + 1 :]
    tops = [Path(name) for name in glob.glob(str(above)) if os.path.isdir(name)]
    found = [each for top in tops for each in _directories(top, passes_errors=True)]
    if not below:
        return [file for _, files in found for file in files]
    return [match for directory, _ in found for match in _glob(Path(glob.escape(str(directory)), *below))]


def _is_broken_link(path):
    return path.is_symlink() and not path.exists()


def _open(path, text_field, boundary, invalid_utf8):
    kind = suffix_of(path)
    if kind in ARCHIVES:
        raise CorpusError(f"{path}: an archive, not a text. Unpack it and name the files that were in it.")
    if kind == ".parquet":
        if path.suffix.lower() in COMPRESSED:
            raise CorpusError(f"{path}: Parquet compresses itself and is not read inside {path.suffix}. Unpack it.")
        return Parquet(path, text_field, invalid_utf8=invalid_utf8)
    if kind in JSON_LINES:
        return JsonLines(path, text_field, invalid_utf8=invalid_utf8)
    return TextFile(path, boundary, invalid_utf8=invalid_utf8)
