"""Choose a teacher's layer by word-sense disambiguation with the LSPs of each."""

from mlsm.common.progress import Progress, silent
from mlsm.evaluation.studies.word_senses.config import DEVELOPMENT, EXPECTED, HEADLINE, LEAST_COVERAGE
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import columns, duration, table

RECIPES = True


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Choose the layer of a teacher to encode, by word-sense disambiguation with every layer's LSPs."""
    from mlsm.evaluation.studies.word_senses.choose_layer import choose_layer

    return Report.of(choose_layer(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show the scores of every layer and the layer to choose."""
    first = result["first_sense"]
    lines = [f"\nThe diagnostic {'was finished already' if result['finished_before'] else 'is finished'}.\n"]
    lines += _lines(result)
    lines.append(
        f"\n  first sense: {first['ALL']:.1%} on ALL, {first[DEVELOPMENT]:.1%} on {DEVELOPMENT}; "
        f"{result['counts']['ALL']:,} words"
    )
    share = result["counts"]["training_words"] / EXPECTED["training"]
    if share < 1:
        lines.append(
            f"  Learned from {result['counts']['training_words']:,} annotated words, {share:.1%} of SemCor's "
            f"{EXPECTED['training']:,}: the results cannot be compared with published ones."
        )
    if not result["conclusive"]:
        lines.append(
            f"\nNo layer is recommended: below {LEAST_COVERAGE:.0%} of SemCor most of its senses have too few "
            "examples, so F1 reflects their number more than the LSPs. "
            + ("Use all of SemCor, without --limit-train. " if settings.limit_train else "")
            + "With annotated text of your own, look at how many examples each sense has."
        )
    elif max(best["f1"] for best in result["recommended"]) <= first["ALL"]:
        lines.append("  No layer is above it: LSPs of this teacher and these dictionaries distinguish senses poorly.")
    for best in result["recommended"]:
        cheap, where = best["cheapest_not_worse"], f" at k = {best['k']}" if len(result["recommended"]) > 1 else ""
        verdict = "Recommended" if result["conclusive"] else "Best here"
        lines.append(
            f"\n{verdict}{where}:  --layer {best['layer']}  (F1 {best['f1']:.1%}, standard error "
            f"{best['standard_error']:.1%})"
        )
        if result["conclusive"] and cheap["layer"] != best["layer"]:
            lines.append(
                f"Cheapest layer not significantly worse:  {cheap['layer']}  (F1 {cheap['f1']:.1%}, "
                f"McNemar p = {cheap['p']:.2f})"
            )
    rows = [("time", duration(result["seconds"])), ("files", f"{result['directory']}: {', '.join(result['files'])}")]
    return "\n".join([*lines, "", table(rows)])


def _lines(result):
    header = ("layer", "k", "F1 ALL", DEVELOPMENT, "back-off", "best on " + DEVELOPMENT, "F1 ALL", "non-zeros", "cost")
    rows = []
    for entry in result["layers"]:
        scores, best = entry["scores"][HEADLINE], entry["best_on_development"]
        rows.append(
            (
                str(entry["layer"]),
                f"{entry['k']:,}",
                f"{entry['f1']:.1%}",
                f"{scores[DEVELOPMENT]:.1%}",
                f"{scores['back_off']:.1%}",
                best["variant"],
                f"{best['f1']:.1%}",
                f"{entry['costs']['nnz_per_word']:.1f}",
                f"{entry['costs']['relative_encoding']:.2f}",
            )
        )
    return columns(header, rows, align=">")
