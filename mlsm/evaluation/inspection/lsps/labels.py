"""Names of LSPs (WordNet synsets and lexicographer files) from a word-sense diagnostic, if one has run.

    labels = find_labels(dictionary fingerprint, None, near=Path("runs"))

choose-layer writes <output>/diagnostics/*/layer-*-k*/labels.json: {"dictionary": fingerprint, "layer", "k", "lsps": [{
"synsets": [{"synset", "lemmas", "lexname", "npmi", "mass"}, …], "lexnames": [[name, share], …]}, …]}. Labels belong to
one dictionary: those of another would name other LSPs, so the fingerprint decides. Not handled here: making them.
"""

import json
from pathlib import Path

from mlsm.common.disk import read_file
from mlsm.common.errors import InspectionError
from mlsm.common.invocation import program
from mlsm.common.json_checks import Number, Text, find_problem, object_of

PATTERNS = ("labels.json", "layer-*-k*/labels.json", "*/layer-*-k*/labels.json", "diagnostics/*/layer-*-k*/labels.json")
_SYNSET = object_of({"synset": str, "lemmas": list[str], "lexname": str, "npmi": Number, "mass": Number})
_LSP = object_of({"synsets": list[_SYNSET], "lexnames": list[tuple[str, Number]]})  # type: ignore[valid-type]
_FILE = object_of({"dictionary": Text, "lsps": list[_LSP]})  # type: ignore[valid-type]


def find_labels(fingerprint: str | None, k: int, diagnostic: Path | None, near: Path) -> list[dict] | None:
    """The labels of a dictionary's k LSPs, None when there are none.

    diagnostic  directory that the user named, which must have labels: a diagnostic, one of its layers, or the directory
                that `diagnostics` is in
    near        the directory to look into instead, if none was named
    Returns     list with one entry per LSP, from the file that was written last
    Raises      InspectionError if the directory that was named has none for this dictionary
    """
    found = []
    for path in {path for pattern in PATTERNS for path in (diagnostic or near).glob(pattern)}:
        kept = _read(path)
        if kept and kept["dictionary"] == fingerprint and len(kept["lsps"]) == k:
            found.append((path.stat().st_mtime_ns, str(path), kept["lsps"]))
    if diagnostic is not None and not found:
        raise InspectionError(
            f"--diagnostic {diagnostic} has no labels.json of this dictionary "
            f"({(fingerprint or 'unknown')[:12]}). Run the diagnostic with it:  {program()} choose-layer --help"
        )
    return max(found)[2] if found else None


def _read(path):
    try:
        kept = json.loads(read_file(path))
        json.dumps(kept, ensure_ascii=False).encode()  # ValueError on a lone surrogate, which JSON can contain
        return kept if find_problem(kept, _FILE) is None else None
    except (OSError, ValueError, RecursionError):
        return None  # of another version, or half copied: labels are a help, not a condition


def shorten(label: dict | None) -> str:
    """A label in a few words: the first synset's lemmas and lexicographer file, else the first file; "" without any."""
    if not label:
        return ""
    for synset in label.get("synsets", [])[:1]:
        return f"{', '.join(synset['lemmas'][:3])} · {synset['lexname']}"
    return "".join(name for name, _ in label.get("lexnames", [])[:1])
