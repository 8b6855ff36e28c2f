"""The announcement of a stage A command before its work: each setting that affects the result, and its origin.

    logger.info(announcement("encode-lsp", job, teacher, dictionary))

Notes on stores of nearly the same settings, and warnings, follow it. Not handled here: what an encoding costs
(estimate.py).
"""

import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mlsm.common.text import also_row, redacted, settings_table, words_of
from pipeline.config import DictionaryConfig
from pipeline.corpus_summary import describe_corpus
from pipeline.dictionary import Dictionary
from pipeline.job import Job, name_of_dtype
from pipeline.targets.logits import PASSES
from pipeline.targets.lsp import LEAST_MASS, entries_kept, expected_mass
from pipeline.teacher import Teacher
from shards.files import StoreFiles

logger = logging.getLogger(__name__)

_SHOWN = ("corpus", "teacher", "tokenizer", "layer", "k", "lam", "dictionary_tokens", "dictionary", "top_n", "dry_run")


def announcement(
    command: str,
    job: Job,
    teacher: Teacher | None = None,
    dictionary: Dictionary | None = None,
    lacking: Sequence[Path] = (),
) -> str:
    """The block of lines.

    dictionary  the one that the settings name, if they name one
    lacking     directories of the dictionaries that do not exist yet
    """
    config, found = job.config, job.plan.corpus
    named = ", ".join(config.corpus) if job.stored is None else f"that of {redacted(config.hidden)}"
    documents, tokens = f"{found['documents']:,} documents", f"about {job.expected_tokens:,} tokens"
    text = f"{named}: {tokens} of {documents}" if config.max_tokens else f"{named}: {documents}, {tokens}"
    rows: list[tuple[str, object, str | None]] = [("text", text, _origin(config, "corpus"))]
    if teacher is None:
        rows.append(("tokenizer", config.tokenizer, _origin(config, "tokenizer")))
    else:
        depth, width = teacher.num_layers, teacher.hidden_size
        rows.append(("teacher", f"{teacher.name}: {depth} layers of width {width}", _origin(config, "teacher")))
    if hasattr(config, "layer"):
        rows.append(("layer", words_of(config.layer), _origin(config, "layer")))
    if hasattr(config, "lam"):
        rows += _dictionary_rows(config, dictionary, lacking)
    if hasattr(config, "top_n"):
        rows.append(_top_n_row(config, dictionary))
    table = settings_table(command, rows + also_row(config, config.origins, _SHOWN))
    return "\n".join([table, *("  " + line for line in describe_corpus(job)["advice"])])


def _top_n_row(config, dictionary):
    """How many entries of a token are kept, and which share of the mass they are expected to hold."""
    if getattr(config, "solver", None) == "nearest":
        return ("n", "one entry per token: its nearest atom", _origin(config, "solver"))
    if config.top_n is None and dictionary is None:
        return ("n", f"the fewest entries that hold {LEAST_MASS:.0%} of the mass on held-out vectors", "default")
    kept = config.top_n if dictionary is None else entries_kept(config, dictionary)
    what = "all entries, at most 255 per token" if kept == "all" else f"the {kept} largest entries per token"
    mass = None if dictionary is None else expected_mass(config, dictionary)
    expected = "" if mass is None else f", with {mass:.1%} of the mass on held-out vectors"
    return ("n", what + expected, "default" if config.top_n is None else _origin(config, "top_n"))


def _dictionary_rows(config, dictionary, lacking):
    learns = dictionary is None and config.atoms == "learned"
    has_penalty = learns or getattr(config, "solver", None) != "nearest"
    penalty = [("lambda", f"{config.lam:g}", _origin(config, "lam"))] if has_penalty else []
    if dictionary is not None:
        k = ("k", f"{len(dictionary.atoms_Kd):,}", "dictionary")
        return [k, *penalty, ("dictionary", config.dictionary, _origin(config, "dictionary"))]
    many = "a dictionary" if len(lacking) == 1 else f"{len(lacking)} dictionaries"
    sample = f"at most {config.dictionary_tokens:,} vectors, to learn {many}"
    return [
        ("k", ", ".join(f"{k:,}" for k in config.k), _origin(config, "k")),
        *penalty,
        ("sample", sample if lacking else "none: all dictionaries exist", _origin(config, "dictionary_tokens")),
    ]


def _origin(config: Any, name: str) -> str:
    """The origin of a setting's value; settings from Python have no origins."""
    if name in config.origins:
        return config.origins[name]
    default = type(config).__dataclass_fields__[name].default
    if default is None:  # filled in later: the demonstration's own, or k (pipeline/config.py)
        default = DictionaryConfig.k if name == "k" else "bundled"
    is_default = getattr(config, name) == default
    return "default" if is_default else "given"


# -- notes and warnings ------------------------------------------------------------------------------------


def mention_other_tolerance(stores: Path, target_json: Mapping) -> None:
    """Log when a new store with this target.json differs from an existing one only in the solver's tolerance."""
    if any(stores.glob(f"*-{target_json['target'][:12]}")):
        return
    wanted = {name: value for name, value in target_json["settings"].items() if name != "tolerance"}
    for path in sorted(stores.glob("*/target.json")):
        try:
            found = dict(StoreFiles(path.parent).target()["settings"])
        except ValueError:  # ignore a damaged store
            continue
        tolerance = found.pop("tolerance", None)
        if tolerance is not None and found == wanted:
            logger.info(
                "a new store: %s differs only in the solver's tolerance, %g instead of %g; --tolerance %g would add "
                "to it",
                path.parent,
                tolerance,
                target_json["settings"]["tolerance"],
                tolerance,
            )


def mention_kept_mass(config: Any, layer: int, dictionary: Dictionary) -> None:
    """Log how many entries of each token are kept, the reason, and the share of the mass that they should have."""
    kept, mass = entries_kept(config, dictionary), expected_mass(config, dictionary)
    if config.solver == "nearest":
        return
    logger.info(
        "layer %d, k %d: %s entries of each token are kept at most (%s), %s",
        layer,
        len(dictionary.atoms_Kd),
        255 if kept == "all" else kept,
        "by default" if config.top_n is None else f"--top-n {kept}",
        "the share of the mass is not known in advance; --dry-run measures it"
        if mass is None
        else f"with {mass:.1%} of the mass, by the dictionary's held-out vectors",
    )


def point_to_other_dtypes(job: Job, teacher: Teacher, kind: str) -> None:
    """Log which stores of this teacher and text `--dtype auto` does not continue, as they have another dtype."""
    if job.config.dtype != "auto":
        return
    passes = PASSES if getattr(job.config, "masked", False) else None
    wanted = {"kind": kind, "teacher": teacher.fingerprint, "windowing": job.rules, "masked_passes": passes}
    found: dict[str, Path] = {}
    for path in sorted((job.config.output / "stores").glob("*/target.json")):
        with suppress(ValueError, KeyError):  # a target that this program did not write
            settings = StoreFiles(path.parent).target()["settings"]
            if all(settings.get(name) == value for name, value in wanted.items()) and "derived_from" not in settings:
                found.setdefault(settings["dtype"], path.parent)
    ours = name_of_dtype(teacher)
    if ours not in found:
        for dtype, store in found.items():
            logger.info(
                "the teacher computes in %s, so this is a new store, not %s, whose dtype is %s: --dtype %s would add "
                "to that one",
                ours,
                store,
                dtype,
                dtype,
            )


def warn_of_empty_codes(report: Mapping, lam: float) -> None:
    """Warn when most tokens of a store have an empty code."""
    share = report["empty_codes"] / max(1, report["empty_codes"] + report["coded_tokens"])
    if share > 0.5:
        warnings.warn(
            f"{share:.1%} of the tokens have an empty code at --lam {lam} and will contribute no loss "
            f"({report['store']}). Use a smaller --lam; 0.05 is usual.",
            stacklevel=2,
        )
