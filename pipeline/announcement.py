"""What a command of stage A announces before its work: each setting that decides the result, and where it comes from.

    logger.info(announcement("encode-lsp", job, teacher, dictionary))

Not handled here: what an encoding costs (estimate.py).
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from common.text import settings_table
from pipeline.coding.kept import LEAST_MASS, entries_kept, expected_mass
from pipeline.config import DictionaryConfig
from pipeline.job import Job

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.dictionary import Dictionary
    from pipeline.teacher import Teacher

_SHOWN = ("corpus", "teacher", "tokenizer", "layer", "k", "lam", "dictionary_tokens", "dictionary", "top_n", "dry_run")


def announcement(
    command: str,
    job: Job,
    teacher: "Teacher | None" = None,
    dictionary: "Dictionary | None" = None,
    lacking: "Sequence[Path]" = (),
) -> str:
    """The block of lines.

    dictionary  the one that the settings name, if they name one
    lacking     directories of the dictionaries that are not there yet
    """
    config, found = job.config, job.plan.corpus
    text = f"{', '.join(config.corpus)}: {found['documents']:,} documents, about {job.expected_tokens:,} tokens"
    rows: list[tuple[str, object, str | None]] = [("text", text, _origin(config, "corpus"))]
    if teacher is None:
        rows.append(("tokenizer", config.tokenizer, _origin(config, "tokenizer")))
    else:
        depth, width = teacher.num_layers, teacher.hidden_size
        rows.append(("teacher", f"{teacher.name}: {depth} layers of width {width}", _origin(config, "teacher")))
    if hasattr(config, "layer"):
        rows.append(("layer", _join(config.layer), _origin(config, "layer")))
    if hasattr(config, "lam"):
        rows += _dictionary_rows(config, dictionary, lacking)
    if hasattr(config, "top_n"):
        rows.append(_top_n_row(config, dictionary))
    others = [
        f"{field.name.replace('_', '-')} {_join(getattr(config, field.name))} ({config.origins[field.name]})"
        for field in fields(config)
        if field.name in config.origins and field.name not in _SHOWN
    ]
    return settings_table(command, [*rows, *([("also", ", ".join(others), None)] if others else [])])


def _top_n_row(config, dictionary):
    """How many entries of a token are kept, and which share of the mass they are expected to hold."""
    if config.top_n is None and dictionary is None:
        return ("n", f"the fewest entries that hold {LEAST_MASS:.0%} of the mass on held-out vectors", "default")
    kept = config.top_n if dictionary is None else entries_kept(config, dictionary)
    what = "all entries, at most 255 per token" if kept == "all" else f"the {kept} largest entries per token"
    mass = None if dictionary is None else expected_mass(config, dictionary)
    expected = "" if mass is None else f", with {mass:.1%} of the mass on held-out vectors"
    return ("n", what + expected, "default" if config.top_n is None else _origin(config, "top_n"))


def _dictionary_rows(config, dictionary, lacking):
    penalty = ("lambda", f"{config.lam:g}", _origin(config, "lam"))
    if dictionary is not None:
        k = ("k", f"{len(dictionary.atoms_Kd):,}", "dictionary")
        return [k, penalty, ("dictionary", config.dictionary, _origin(config, "dictionary"))]
    many = "a dictionary" if len(lacking) == 1 else f"{len(lacking)} dictionaries"
    sample = f"at most {config.dictionary_tokens:,} vectors, to learn {many}"
    return [
        ("k", ", ".join(f"{k:,}" for k in config.k), _origin(config, "k")),
        penalty,
        ("sample", sample if lacking else "none: all dictionaries are there", _origin(config, "dictionary_tokens")),
    ]


def _origin(config: Any, name: str) -> str:
    """Where the value of a setting comes from; a caller in Python gives settings without origins."""
    if name in config.origins:
        return config.origins[name]
    default = type(config).__dataclass_fields__[name].default
    if default is None:  # until it is settled: the demonstration's own, or k (pipeline/config.py)
        default = DictionaryConfig.k if name == "k" else "bundled"
    is_default = getattr(config, name) == default
    return "default" if is_default else "given"


def _join(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
