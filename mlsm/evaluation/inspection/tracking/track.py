"""The command track: follow LSPs through several stores of one plan, from each store to the next.

    summary = track(TrackConfig(stores=("runs/stores/lsp-before", "runs/stores/lsp-after")))
    summary["steps"][0]["counts"]["kept"]

It writes, into its --output:

    tracking.json   the returned summary, and for every step a record of every LSP
    lsps.csv        the records, one per row: LSPs of the older store, and those that appear in the newer one
    paths.csv       the LSPs that occur in the first store, and the number of each in every later store, step by step
    tracking.svg    (.png, .csv) fractions of the states, and how well LSPs correlate with the nearest one

The stores must hold the same windows, and the sampled tokens are compared one by one. Not handled here: the
correlations (correlation.py), the states (matching.py), the figure (figure.py). Two samples are in memory at a time.

Shapes: K LSPs of a store, J of the next.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_json
from mlsm.common.errors import InspectionError
from mlsm.common.progress import silent
from mlsm.evaluation.inspection.lsps import words
from mlsm.evaluation.inspection.lsps.sample import open_alike, sample_tokens
from mlsm.evaluation.inspection.lsps.vocabulary import Vocabulary
from mlsm.evaluation.inspection.tracking.config import TrackConfig
from mlsm.evaluation.inspection.tracking.correlation import LEAST_TOKENS, Activations, correlate_lsps
from mlsm.evaluation.inspection.tracking.figure import draw_tracking
from mlsm.evaluation.inspection.tracking.matching import AFTER, BEFORE, GAIN, Matches, match_lsps
from mlsm.evaluation.plots import drawn, save_table

NAME_WORDS = 3
KEPT_FROM = 0.7  # least correlation of a matched LSP that is kept and not drifted, and of splits and merges
MATCHED_FROM = 0.3  # correlation below which two LSPs do not match
SHIFTS = 5  # rotations from which chance is measured; odd, so that the median of the counts is one of them
COLUMNS = (
    "from",
    "to",
    "lsp",
    "state",
    "into",
    "correlation",
    "chance",
    "nearest",
    "nearest_correlation",
    "density",
    "density_into",
    "words",
    "words_into",
)


def track(config: TrackConfig, progress: Callable[..., None] = silent) -> dict:
    """Follow the LSPs of a TrackConfig's stores.

    progress  called as progress(stage, done, total, unit=..., **figures)
    Returns   dict for JSON: stores (facts of each), tokens, thresholds; steps, one for each two stores in a row: counts
              by state, counts_after, median_correlation of LSPs matched one to one, chance (how many LSPs reach
              MATCHED_FROM if tokens do not correspond, the median over SHIFTS rotations, and the largest such
              correlation); surviving (LSPs of the first store that can be followed to each, step by step), files
    Raises    InspectionError if the stores do not hold LSPs of the same tokens; StoreError, ShardError
    """
    stores = open_alike(config.stores)
    stores[0].read_tokenizer()  # raises StoreError if the tokenizer was changed
    older = Activations(sample_tokens(stores[0], config.samples, progress))
    found = words.find_words(older.sample, Vocabulary(stores[0].tokenizer_dir, stores[0].vocab_size))
    older_names = _names(older, found)
    facts, steps, records = [_facts(stores[0], older)], [], []
    paths = [np.where(older.is_rare, -1, np.arange(older.sample.k))]
    for number, store in enumerate(stores[1:]):
        newer = Activations(sample_tokens(store, config.samples, progress))
        _check_tokens(stores[number], older.sample, store, newer.sample)
        newer_names = _names(newer, found)
        pairs = correlate_lsps(older, newer, MATCHED_FROM, progress)
        chance = _chance(older, newer, progress)
        matches = match_lsps(older, newer, pairs, KEPT_FROM, config.matching)
        steps.append(_step(matches, chance))
        own = _records(matches, pairs, chance, (older, older_names), (newer, newer_names))
        records += [{"from": number, "to": number + 1} | record for record in own]
        main_K = np.array([into[0] if len(into) else -1 for into in matches.into])
        paths.append(np.where(paths[-1] < 0, -1, main_K[paths[-1]]))
        facts.append(_facts(store, newer))
        older, older_names = newer, newer_names
    summary: dict[str, Any] = {
        "stores": facts,
        "tokens": len(older.sample),
        "matching": config.matching,
        "thresholds": {
            "kept_from": KEPT_FROM,
            "matched_from": MATCHED_FROM,
            "gain": GAIN,
            "least_tokens": LEAST_TOKENS,
        },
        "steps": steps,
        "surviving": [int((path >= 0).sum()) for path in paths],
    }
    return summary | {"files": _write(config, summary, records, paths, progress)}


def _check_tokens(first, sample, store, other):
    """Raise InspectionError unless two samples are of the same tokens in the same places."""
    columns = ("ids_N", "window_N", "position_N")
    if not all(np.array_equal(getattr(sample, name), getattr(other, name)) for name in columns):
        raise InspectionError(
            f"{store.path} and {first.path} have the same plan but different tokens: one of them is damaged, or their "
            "tokenizers differ. Check both with verify-shards --full."
        )


def _names(activations, found):
    """The most typical words of every LSP."""
    typical = (words.typical(activations.entries, found, lsp, NAME_WORDS) for lsp in range(activations.sample.k))
    return [" · ".join(found.texts[number] or "␣" for number, _ in own) for own in typical]


def _facts(store, activations):
    names = ("teacher_name", "layer", "lam", "top_n")
    return {
        "store": str(store.path),
        "k": store.k,
        **{name: store.settings.get(name) for name in names},
        "dictionary": store.settings.get("dictionary"),
        "rare": int(activations.is_rare.sum()),
    }


class _Chance(NamedTuple):
    """Correlations if tokens do not correspond.

    lsps            LSPs of the older store that reach MATCHED_FROM, the median over the rotations
    best_K, best_J  float64, the largest correlation of each LSP of the older and of the newer store with any of the
                    other over all rotations; -inf for a rare one
    """

    lsps: int
    best_K: np.ndarray
    best_J: np.ndarray


def _chance(older: Activations, newer: Activations, progress: Callable[..., None]) -> _Chance:
    """Correlate two stores after rotations of the older one, spread over the sample."""
    counts = []
    best_K, best_J = np.full(older.sample.k, -np.inf), np.full(newer.sample.k, -np.inf)
    for number in range(1, SHIFTS + 1):
        rotated = older.rotate(len(older.sample) * number // (SHIFTS + 1))
        found = correlate_lsps(rotated, newer, MATCHED_FROM, progress)
        counts.append(len(np.unique(found.first_P)))
        best_K, best_J = np.maximum(best_K, found.best_r_K), np.maximum(best_J, found.best_r_J)
    return _Chance(int(np.median(counts)), best_K, best_J)


def _step(matches: Matches, chance: _Chance) -> dict:
    one_to_one = [r for r, state in zip(matches.r_K, matches.states, strict=True) if state in ("kept", "drifted")]
    return {
        "counts": {state: matches.states.count(state) for state in BEFORE},
        "counts_after": {state: matches.states_after.count(state) for state in AFTER},
        "median_correlation": float(np.median(one_to_one)) if one_to_one else None,
        "chance": {
            "lsps": chance.lsps,
            "largest": max(0.0, float(chance.best_K.max(initial=0.0))),
        },
    }


def _records(matches, pairs, chance, older, newer):
    """A dict with all COLUMNS except the stores, for every LSP of the older store and for those that appear in the
    newer.
    """
    (before, names), (after, names_after) = older, newer
    density_K = before.entries.counts / max(1, before.sample.coded)
    density_J = after.entries.counts / max(1, after.sample.coded)
    for lsp, (state, into) in enumerate(zip(matches.states, matches.into, strict=True)):
        yield {
            "lsp": lsp,
            "state": state,
            "into": into.tolist(),
            "correlation": float(matches.r_K[lsp]) if len(into) else None,
            "chance": None if before.is_rare[lsp] else float(chance.best_K[lsp]),
            **_nearest(pairs.best_K[lsp], pairs.best_r_K[lsp]),
            "density": float(density_K[lsp]),
            "density_into": [float(density_J[other]) for other in into],
            "words": names[lsp],
            "words_into": [names_after[other] for other in into],
        }
    for other in np.flatnonzero(np.array(matches.states_after) == "appeared").tolist():
        yield {
            "lsp": None,
            "state": "appeared",
            "into": [other],
            "correlation": None,
            "chance": float(chance.best_J[other]),
            **_nearest(pairs.best_J[other], pairs.best_r_J[other]),
            "density": None,
            "density_into": [float(density_J[other])],
            "words": "",
            "words_into": [names_after[other]],
        }


def _nearest(lsp, r):
    """The LSP of the other store with the highest correlation; None for an LSP that is too rare."""
    found = lsp >= 0
    return {"nearest": int(lsp) if found else None, "nearest_correlation": float(r) if found else None}


@refuse_what_is_in_the_way()
def _write(config, summary, records, paths, progress):
    """Write the files of an --output. Returns their paths."""
    progress("files", 0, None)
    make_directories(config.output)
    rows = [[_cell(record[name]) for name in COLUMNS] for record in records]
    table = save_table(config.output / "lsps.csv", COLUMNS, rows)
    followed = np.stack(paths, axis=1)
    followed = followed[followed[:, 0] >= 0]
    header = [f"store_{number}" for number in range(len(paths))]
    ways = save_table(
        config.output / "paths.csv", header, [["" if lsp < 0 else lsp for lsp in path] for path in followed.tolist()]
    )
    figure = drawn(draw_tracking, summary, records, config.output)
    files = [config.output / "tracking.json", table, ways, *figure]
    replace_json(files[0], summary | {"lsps": records})
    return [str(path) for path in files]


def _cell(value):
    """A value as text for CSV: numbers in six digits; lists joined by blanks, lists of words by bars."""
    if isinstance(value, list):
        texts = [_cell(part) for part in value]
        return (" | " if value and isinstance(value[0], str) else " ").join(map(str, texts))
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value
