"""Show what LSPs stand for: tokens, contexts, neighbours, senses; of a word, a text; as pages to browse.

One function per view. Not handled here: the pages (mlsm/evaluation/inspection/lsps/text_pages.py).
"""

from pathlib import Path

from mlsm.commands._newest import lsp_stores
from mlsm.common.invocation import program
from mlsm.common.progress import Progress, silent
from mlsm.common.text import shell_quote
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig as Settings
from mlsm.results import Report
from mlsm.terminal.tables import columns, sparkline, table
from mlsm.terminal.training import how_it_reads

newest = lsp_stores

_ORDER = """
The easiest to recognise. Clarity is high if several whole words say much about an LSP and belong together: the
information from its second to twelfth word, times the mean cosine of these words."""


def run(settings: Settings, progress: Progress = silent) -> Report:
    """What LSPs stand for: of a store, a word, a text; with html="lsps" as pages to browse."""
    from mlsm.evaluation.inspection.lsps.show import show as find

    return Report.of(find(settings, progress))


def show(result: dict, settings: Settings) -> str:
    """Show any of the views."""
    return _VIEWS[result["view"]](result)


def _facts(result):
    read = f"{result['sampled']:,} tokens, {result['coded']:,} with a code; the store's training text has "
    read += f"{result['tokens']:,}, special tokens included"
    dead = f"{result['k']:,}" + (f", {result['dead']:,} of them not in the sample" if result["dead"] else "")
    return [*_source(result), ("LSPs", dead), ("sample", read)]


def _source(result):
    return [("store", result["store"]), ("teacher", f"{result['teacher_name']}, layer {result['layer']}")]


def _overview(result):
    deciles = result["density_deciles"]
    spread = (("density", f"median {deciles[5]:.2%}, from {deciles[0]:.2%} to {deciles[10]:.2%} of the tokens"),)
    positional = f"{result['positional']:,} LSPs, {result['positional_mass']:.1%} of the mass (marked *)"
    rows = [
        (
            row["lsp"],
            f"{row['clarity']:.3f}",
            f"{row['density']:.2%}",
            f"{row['mean_weight']:.3f}",
            _profile(row),
            row["words"],
            row["label"],
        )
        for row in result["rows"]
    ]
    lines = ["", table([*_facts(result), *spread, ("positional", positional)]), _ORDER]
    names = ("LSP", "clarity", "density", "weight", "over the window", "typical words", "senses" * result["labelled"])
    lines += columns(names, rows)
    if not result["labelled"]:
        lines.append(f"\nNo word-sense labels: no diagnostic has run with this dictionary ({program()} choose-layer).")
    return "\n".join([*lines, *_next(result["store"], result["rows"])])


def _profile(row):
    """Draw an LSP's weight from the first positions of the window to the last, with a star if the LSP is positional."""
    return sparkline(row["profile"]) + "*" * row["positional"]


def _next(store, rows):
    lsp = rows[0]["lsp"] if rows else 0
    words = rows[0]["words"].split() if rows else []
    word = next((word for word in words if word.isalnum()), None) or next(iter(words), "bank")
    shown = [
        ("--html lsps", "all of them as pages; then open lsps/index.html"),
        (f"--lsp {lsp}", "one in full"),
        (f"--word {shell_quote(word)}", "the LSPs of a word"),
        ('--text "The bank raised its rates."', "those of a text"),
        ("--similar-to 0:5", "tokens with the profile of window 0's token 5"),
    ]
    width = max(len(flags) for flags, _ in shown)
    return [
        "\nNext:",
        *(f"  {program()} show-lsp {shell_quote(store)} {flags:<{width}}  # {what}" for flags, what in shown),
    ]


def _lsps(result):
    return "\n\n".join(["\n" + table(_facts(result)), *(_lsp(lsp) for lsp in result["lsps"])])


def _lsp(lsp):
    title = f"LSP {lsp['lsp']}" + (f"  ({lsp['label']})" if lsp["label"] else "")
    words = " · ".join(f"{word} {share:.1%}" for word, share in lsp["typical"])
    positional = "; it follows the position" if lsp["positional"] else ""
    over_the_window = f"{_profile(lsp)}  {lsp['position_nats']:.3f} nats by the position{positional}"
    rows = [
        ("density", f"{lsp['density']:.2%}, {lsp['tokens']:,} tokens; mean weight {lsp['mean_weight']:.3f}"),
        ("typical words", words or "none"),
        ("over the window", over_the_window),
        ("clarity", f"{lsp['clarity']:.3f}"),
        ("information", f"{lsp['information']:.4f} nats per token by the word"),
    ]
    head = "\nHeaviest:" if lsp["quantiles"] else "\nAll its weights are equal. Some of its tokens, at random:"
    if not lsp["tokens"]:
        head = "\nNone of the sampled tokens has this LSP."
    lines = [title, table(rows), *_senses(lsp["senses"]), head, *map(_context, lsp["top"])]
    lines += _co_firing(lsp["co_firing"], "tokens") + _nearest(lsp["nearest"])
    if lsp["quantiles"]:
        lines.append("\nFrom every tenth of its weights:")
    return "\n".join([*lines, *(_context(context) for tenth in lsp["quantiles"] for context in tenth["samples"][:1])])


def _senses(senses):
    if not senses or not (senses["synsets"] or senses["lexnames"]):
        return []
    rows = [
        (sense["synset"], sense["lexname"], f"NPMI {sense['npmi']:.2f}", ", ".join(sense["lemmas"]))
        for sense in senses["synsets"]
    ]
    files = ", ".join(f"{name} {share:.0%}" for name, share in senses["lexnames"])
    return ["\nWord senses:", *columns(None, rows), f"  lexicographer files: {files}"]


def _co_firing(rows, what):
    return [
        "\nFires together with:",
        *(
            f"  {row['lsp']:>5}  NPMI {row['npmi']:.2f}  {row['support']:>7,} {what}  {row.get('words', '')}".rstrip()
            for row in rows
        ),
    ]


def _nearest(rows):
    lines = [f"  {other['lsp']:>5}  cosine {other['cosine']:.2f}  {other.get('words', '')}".rstrip() for other in rows]
    return ["\nNearest atoms:", *lines] if lines else []


def _context(context, figure="weight"):
    return f"  {context[figure]:.3f}  {_quote(context)}"


def _quote(context):
    """Write a token in its context, with its window and position."""
    text = "".join(f"«{piece or '␣'}»" if i == context["at"] else piece for i, (piece, _) in enumerate(context["text"]))
    return f"{' '.join(text.split())}   {context['window']}:{context['position']}"


def _word(result):
    forms = ", ".join(f"{form} {count:,}" for form, count in result["forms"])
    rows = [
        (row["lsp"], f"{row['weight']:.3f}", f"{row['share']:.0%}", row["words"], row["label"])
        for row in result["lsps"]
    ]
    lines = ["", table([*_facts(result), ("word", f"{result['word']}, {result['count']:,} times ({forms})")]), ""]
    lines += columns(("LSP", "mean weight", "of its tokens", "typical words", "senses" * result["labelled"]), rows)
    occurrences = [f"  {_quote(context)}\n      {_weights(context['lsps'])}" for context in result["contexts"]]
    return "\n".join([*lines, "\nSome occurrences:", *occurrences])


def _weights(lsps):
    return "  ".join(f"{lsp}:{weight:.3f}" for lsp, weight in lsps) or "no code"


def _intruders(result):
    first, *others = result["dictionaries"]
    rows = [*_facts(first), ("judge", result["judge"])]
    if not first["judged"]:
        return "\n".join(["", table(rows), "\nNo LSP has enough words that can be matched. Read more --samples"])
    detected = f"with an AUC of {first['auc']:.3f} ({_interval(first)}), the mean of {first['judged']:,} LSPs"
    controls = f"{first['by_frequency']:.3f} by frequency only, {first['by_spelling']:.3f} by spelling only"
    lines = ["", table([*rows, ("detected", detected), ("controls", controls)])]
    if others:
        lines.append("\nThe mean AUC of each store; p of a Mann-Whitney test of its LSPs against those of the first:")
        cells = []
        for one in result["dictionaries"]:
            settings = (Path(one["store"]).name, one["layer"], one["k"], one["lam"], one["judged"])
            blind = [f"{one[name]:.3f}" if one["judged"] else "–" for name in ("auc", "by_spelling", "by_frequency")]
            p = f"{one['p']:.2g}" if one["p"] is not None else "–"
            cells.append((*settings, blind[0], _interval(one), *blind[1:], p))
        heads = ("store", "layer", "k", "λ", "judged", "AUC", "95 %", "by spelling", "by frequency", "p")
        lines += columns(heads, cells)
    known = sorted((row for row in first["lsps"] if row["auc"] is not None), key=lambda row: -row["auc"])
    for title, shown in (("easiest to tell", known[: result["shown"]]), ("hardest", known[-result["shown"] :])):
        cells = [(row["lsp"], f"{row['auc']:.2f}", _interval(row, 2), " · ".join(row["words"])) for row in shown]
        lines += [f"\nIntruders {title}:", *columns(("LSP", "AUC", "95 %", "words"), cells)]
    return "\n".join(lines)


def _interval(judged, digits=3):
    return " to ".join(f"{bound:.{digits}f}" for bound in judged["interval"] or ()) or "–"


def _similar(result):
    own = [f"  {lsp:>5}  {weight:.3f}  {words}" for lsp, weight, words in result["lsps"]]
    found = [_context(context, "cosine") for context in result["similar"]]
    searched = f"\nTokens most like it, of {result['indexed']:,} that were compared; cosine, text, WINDOW:TOKEN:"
    return "\n".join(["", table(_facts(result)), f"\nThe token {result['token']!r} has:", *own, searched, *found])


def _text(result):
    both = "teacher" in result["tokens"][0] and "student" in result["tokens"][0]
    names = [name for name in ("teacher", "student") if name in result["tokens"][0]]
    rows = []
    for number, token in enumerate(result["tokens"]):
        distance = ["–" if token["kl"] is None else f"{token['kl']:.3f}"] if both else []
        rows.append((number, token["text"], *distance, *(_weights(token[name]) for name in names)))
    facts = _source(result) if "store" in result else []
    if result.get("student"):
        facts.append(("student", f"{result['student']}, {how_it_reads(result['positions'])}"))
    lines = ["", table(facts), "", *columns(("", "token", *["KL (nats)"] * both, *names), rows)]
    known = [token["kl"] for token in result["tokens"] if token.get("kl") is not None]
    if known:
        lines.append(f"\nMean KL(teacher || student): {sum(known) / len(known):.3f} nats")
    if "names" in result:
        lines += _names(result)
    return "\n".join(lines)


def _edit(result):
    factors = ", ".join(f"{lsp} × {factor:g}" if factor else f"{lsp} taken out" for lsp, factor in result["factors"])
    facts = _source(result) if "store" in result else []
    lines = ["", table([*facts, ("probe", result["student"]), ("edited", factors)])]
    for position in result["positions"]:
        own = f", probability {_change(*position['own'])}" if position["own"] else ""
        edited = "  ".join(f"{lsp}: {_change(*probabilities)}" for lsp, *probabilities in position["edited"])
        lines += [
            f"\n{position['position']} {position['token']}{own}; KL(before || after) {position['kl']:.3f} nats",
            f"  LSPs    {_weights(position['lsps'])}",
            f"  edited  {edited}",
        ]
        for name in ("before", "after", "gain", "lose"):
            words = [(word, [f"{p:.3f}" for p in found]) for word, *found in position[name]]
            visible = [
                f"{word} {' → '.join(found)}" for word, found in words if len(found) == 1 or found[0] != found[1]
            ]
            lines.append(f"  {name:<7} {'  '.join(visible) or 'none in three digits'}")
    if "names" in result:
        lines += _names(result)
    return "\n".join(lines)


def _change(before, after):
    return f"{before:.3f} → {after:.3f}"


def _names(result):
    """Say what LSPs of a text stand for."""
    title = f"\nTypical words, of {result['sampled']:,} tokens of the store, and word senses:"
    return [title, *columns(None, result["names"])]


def _pages(result):
    rows = [*_facts(result), ("pages", f"{result['files']:,} files, {result['bytes'] / 1e6:,.1f} MB")]
    if result["probe"]:
        rows.append(("probe", f"{result['probe']}, for its predictions with and without each LSP"))
    return "\n".join(["\nThe pages are written.", table(rows), f"\nOpen:  {result['html']}/index.html"])


def _vectors(result):
    facts = [
        ("vectors", result["vectors"]),
        ("LSPs", f"{result['k']:,}, {result['dead']:,} of them not in the sample"),
        ("sample", f"{result['sampled']:,} of {result['of']:,} vectors read, {result['coded']:,} with a code"),
    ]
    if result["images"] is not None:
        facts.append(("images", f"{result['images']:,}, {' × '.join(map(str, result['grid']))} patches each"))
    if "html" in result:
        return f"\nThe pages are written.\n{table(facts)}\n\nOpen:  {result['html']}/index.html"
    where = "image:row,column" if result["images"] is not None else "row of the file"
    rows = [
        (row["lsp"], f"{row['density']:.2%}", f"{row['mean_weight']:.3f}", "  ".join(map(_vector, row["top"])))
        for row in result["rows"]
    ]
    lines = ["", table(facts), "", *columns(("LSP", "density", "weight", f"heaviest: {where}, weight"), rows)]
    for row in (row for row in result["rows"] if "nearest" in row):
        lines += [f"\nLSP {row['lsp']}", *_co_firing(row["co_firing"], "vectors"), *_nearest(row["nearest"])]
    return "\n".join(lines)


def _vector(vector):
    place = f"{vector['name']}:{vector['at'][0]},{vector['at'][1]}" if "at" in vector else vector["row"]
    return f"{place} {vector['weight']:.3f}"


def _dictionary(result):
    rows = [("dictionary", result["dictionary"]), ("atoms", f"{result['k']:,} of width {result['width']}")]
    names = (
        "objective",
        "explained_variance",
        "nnz",
        "dead_atoms",
        "near_atoms",
        "largest_cosine",
        "vectors",
        "stopped",
    )
    rows += [(name.replace("_", " "), _number(result[name])) for name in names if result.get(name) is not None]
    return "\n".join(["", table(rows + _geometry(result)), *_closest(result), *map(_atom, result["lsps"])])


def _student(result):
    rows = [
        ("student", result["student"]),
        ("LSP outputs", f"{result['k']:,} of width {result['width']}"),
        ("dictionary", result["dictionary"]),
        ("trained from", result["trained_from"]),
    ]
    word = "bank" if result["positions"] == "all" else result["mask_token"]
    hint = f'\nNext:  {program()} show-lsp {shell_quote(result["student"])} --text "The {word} raised its rates."'
    return "\n".join(["", table(rows + _geometry(result)), *_closest(result), *map(_atom, result["lsps"]), hint])


def _number(value):
    return f"{value:,.5g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _geometry(result):
    spans = {"norms": "norms", "nearest": "nearest_cosines"}
    return [
        (title, "from {:.3f} to {:.3f}, median {:.3f}".format(*(result[name][i] for i in (0, 2, 1))))
        for title, name in spans.items()
        if name in result
    ]


def _closest(result):
    if result["lsps"]:
        return []
    pairs = [f"  {first:>5}  {second:>5}  cosine {cosine:.3f}" for first, second, cosine in result["closest"]]
    return ["\nClosest pairs (--lsp N for an atom's neighbours):", *pairs]


def _atom(atom):
    title = f"\nLSP {atom['lsp']}" + (f"  ({atom['label']})" if atom["label"] else "")
    return "\n".join(
        [title, table([("norm", f"{atom['norm']:.3f}")]), *_senses(atom["senses"]), *_nearest(atom["nearest"])]
    )


_VIEWS = {
    "overview": _overview,
    "lsps": _lsps,
    "word": _word,
    "similar": _similar,
    "intruders": _intruders,
    "text": _text,
    "edit": _edit,
    "pages": _pages,
    "vectors": _vectors,
    "dictionary": _dictionary,
    "student": _student,
}
