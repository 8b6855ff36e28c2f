"""Measure how similar texts are by their LSPs, and which they share; zero-shot on STS-B and WiC."""

from mlsm.commands._newest import lsp_stores
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.evaluation.similarity.config import SimilarityConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import columns, table
from mlsm.terminal.training import how_it_reads

BY_POSITION = ("texts_a", "texts_b", "store")
newest = lsp_stores


def run(settings: Settings, progress: Progress = silent) -> Report:
    """How alike texts are by their LSPs, pair by pair: `similarity("A cat.", "A dog.", store)` has them as `pairs`.

    store  a store of LSPs, or a student that predicts them; with tasks="stsb" instead of texts: tables
    """
    from mlsm.evaluation.similarity.compare import compare_texts

    return Report.of(compare_texts(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show pairs or tables, and what read the texts."""
    if "store" in result:
        who = [("store", result["store"]), ("teacher", f"{result['teacher_name']}, layer {result['layer']}")]
    else:
        who = [("student", f"{result['student']}, {how_it_reads(result['positions'])}")]
    parts = [_pair(pair) for pair in result.get("pairs", ())] + [_table(found) for found in result.get("tables", ())]
    cut = [f"Texts that were cut to a window: {result['cut']:,}"] if result["cut"] else []
    lsps = [row[0] for pair in result.get("pairs", ()) for row in pair["shared"]]
    hint = [f"What the measures are:  {program()} docs similarity"] if "pairs" in result else []
    if lsps and "store" in result:
        hint = [*hint, f"One of them in full:  {program()} show-lsp {shell_quote(result['store'])} --lsp {lsps[0]}"]
    return "\n\n".join(["\n" + table(who), *parts, *cut, *hint])


def _pair(pair):
    lines = [f"A  {pair['a']}", f"B  {pair['b']}", ""]
    lines.append(table([(name, f"{score:6.3f}") for name, score in pair["scores"].items()]))
    rows = [
        (lsp, f"{share:.3f}", f"{in_a:.3f}", f"{in_b:.3f}", words) for lsp, share, in_a, in_b, words in pair["shared"]
    ]
    names = ("LSP", "shared", "in A", "in B", "typical words")
    shown = len(names) if any(row[-1] for row in rows) else len(names) - 1  # LSPs of a student alone have no words
    lines += ["", "LSPs that both have:" if rows else "They share no LSP."]
    lines += columns(names[:shown], [row[:shown] for row in rows]) if rows else []
    matches = [
        (first, second, f"{score:.3f}", "–" if lsp is None else lsp) for first, second, score, lsp in pair["matches"]
    ]
    return "\n".join([*lines, "", "Tokens, paired:", *columns(("A", "B", "overlap", "LSP"), matches)])


def _table(found):
    count = found["data"]["n_eval"]
    names: tuple[str, ...]
    rows: list[tuple[str, ...]]
    if found["task"] == "stsb":
        title = f"STS-B, {count:,} pairs of the development set; correlation with the human scores × 100"
        names = ("measure", "Spearman", "95 % interval", "Pearson")
        rows = [
            (row["measure"], f"{100 * row['spearman']:.1f}", _interval(row), f"{100 * row['pearson']:.1f}")
            for row in found["rows"]
        ]
    else:
        title = (
            f"WiC, {count:,} pairs of the development set; accuracy in %, threshold chosen on the training set"
            f" (the larger class: {100 * found['majority']:.1f})"
        )
        names = ("measure", "accuracy", "95 % interval", "training set", "threshold")
        rows = [
            (row["measure"], f"{100 * row['accuracy']:.1f}", _interval(row), f"{100 * row['train']:.1f}",
             f"{row['threshold']:.3f}")
            for row in found["rows"]
        ]  # fmt: skip
    return "\n".join([title, *columns(names, rows)])


def _interval(row):
    return f"{100 * row['low']:.1f} to {100 * row['high']:.1f}"
