"""Show what a store holds: statistics, a document with its targets, the settings of two stores."""

from collections.abc import Sequence

from mlsm.commands._newest import stores
from mlsm.common.progress import Progress, silent
from mlsm.results import Report
from mlsm.terminal.tables import entries_name, quantity, store_rows, table
from shards.config import ShowConfig as Settings

_BARS, _WIDTH = 10, 40  # of a histogram: at most so many lines, and characters of the longest
_LINEAGE = (
    "teacher_name",
    "tokenizer_name",
    "layer",
    "k",
    "lam",
    "top_n",
    "derived_from",
    "hidden",
    "quantise",
    "width",
    "solver",
    "tolerance",
    "masked_passes",
    "dtype",
    "documents_apart",
    "segments",
)


newest = stores


def run(settings: Settings, progress: Progress = silent) -> Report:
    """What a store holds: statistics, or one document or window with its targets."""
    from mlsm.evaluation.inspection.stores import show_shards

    return Report.of(show_shards(settings))


def show(shown: dict, settings: Settings) -> str:
    """Show the view that show-shards was asked for."""
    if "differing" in shown:
        return _difference(shown)
    return _tokens(shown) if "tokens" in shown and "heading" in shown else _statistics(shown)


def _difference(shown):
    first, second = shown["stores"]
    lines = ["", f"  {first}\n  {second}\n"]
    if shown["differing"]:
        lines.append(table([(name, f"{ours}  |  {theirs}") for name, (ours, theirs) in shown["differing"].items()]))
    else:
        lines.append("The settings are equal.")
    pairs = "one plan, so windows pair exactly" if shown["same_plan"] else "different plans, so windows do not pair"
    tokens = "  |  ".join(f"{counts['tokens']:,}" for counts in shown["counts"])
    return "\n".join([*lines, f"\nTokens: {tokens}; {pairs}."])


def _tokens(shown):
    lines = [f"\n{shown['heading']}\n"]
    width = max((len(token["text"]) for token in shown["tokens"]), default=0)
    for token in shown["tokens"]:
        entries = token.get("lsps", token.get("words"))
        if entries is None:
            lines.append(f"  {token['text']}")
            continue
        shares = "  ".join(f"{label}:{weight:.3f}" for label, weight in entries) or "no code"
        more = f"  ({token['nnz']} in all, tail {token['tail']:.1%})" if token["nnz"] > len(entries) else ""
        lines.append(f"  {token['text']:<{width}}  {shares}{more}")
    return "\n".join(lines)


def _statistics(shown):
    rows = store_rows(shown["store"], shown)
    rows += [
        (
            name,
            f"{quantity(split['windows'], 'window')}, {split['tokens']:,} tokens, "
            f"{quantity(split['documents'], 'document')} in {quantity(split['units'], 'unit')}",
        )
        for name, split in shown["splits"].items()
    ]
    if "most_used" in shown:
        entry = "word" if shown["kind"] == "logits" else "atom"
        rows += [
            (f"dead {entry}s", f"{shown[f'dead_{entry}s']:,} of {shown['settings'].get('k', 0):,} have no mass"),
            (
                "entropy stored",
                f"{shown['entropy_nats']:.3f} nats per token; {shown['mean_entropy_nats']:.3f} of the average",
            ),
            ("tail", f"{shown['tail_mass']:.2%} of the mass was dropped"),
            (f"most used {entry}s", "  ".join(f"{label}:{share:.2%}" for label, share in shown["most_used"])),
        ]
    lines = ["", table(rows), "\nMade by:", table(_lineage_rows(shown))]
    if "nnz_histogram" in shown:
        lines += [f"\nTokens by {entries_name(shown)}:", histogram(shown["nnz_histogram"])]
    return "\n".join(lines)


def _lineage_rows(shown):
    settings = shown["settings"]
    rows = [(name.replace("_", " "), _write_value(settings[name])) for name in _LINEAGE if name in settings]
    if figures := {name: value for name, value in shown.get("dictionary", {}).items() if name != "settings"}:
        words = (
            f"{name.replace('_', ' ')} {value:.5g}" if isinstance(value, float | int) else str(value)
            for name, value in figures.items()
        )
        rows.append(("dictionary", ", ".join(words)))
    for entry in shown["environments"]:
        facts = ", ".join(f"{name} {value}" for name, value in entry.items() if name != "units")
        rows.append((quantity(entry["units"], "unit"), facts))
    return rows


def _write_value(value):
    """Write a setting in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    return "yes" if value is True else value


def histogram(counts: Sequence[int]) -> str:
    """Draw how many tokens have how many non-zeros, as lines with bars; counts[n] tokens have n."""
    most = max((n for n, count in enumerate(counts) if count), default=0)
    step = max(1, -(-(most + 1) // _BARS))
    sums = [(first, sum(counts[first : first + step])) for first in range(0, most + 1, step)]
    largest, total = max(1, max(count for _, count in sums)), max(1, sum(counts))
    lines = []
    for first, count in sums:
        last = min(first + step - 1, most)
        span = str(first) if first == last else f"{first} to {last}"
        lines.append(f"  {span:>9}  {count / total:6.1%}  {'#' * round(_WIDTH * count / largest)}".rstrip())
    return "\n".join(lines)
