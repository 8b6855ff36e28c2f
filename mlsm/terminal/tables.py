"""Parts that several views share: tables, formatted numbers, facts about a store."""

from collections.abc import Iterable, Sequence

from rich.cells import cell_len

LONGEST_LIST = 50


def table(rows: Sequence[tuple[str, object]]) -> str:
    """Lay out pairs (name, value) in two columns."""
    return "\n".join(columns(None, rows))


def columns(names: Sequence[object] | None, rows: Iterable[Sequence[object]], align: str = "<") -> list[str]:
    """Align rows of cells in columns, to the right with ">", under their names if they have any. Returns lines."""
    cells = [[str(cell) for cell in row] for row in ([names] if names else []) + list(rows)]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    # a character of a wide script takes two places
    return [
        "  "
        + "  ".join(f"{c:{align}{width - cell_len(c) + len(c)}}" for c, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]


def long_list(title: str, entries: Sequence[str], most: int = LONGEST_LIST) -> list[str]:
    """List entries under a title, shortened if there are more than `most`; nothing if there are none. Returns lines."""
    if not entries:
        return []
    more = [f"... and {len(entries) - most:,} more (--json lists all)"] if len(entries) > most else []
    return [f"\n{title}:", *(f"  {entry}" for entry in [*entries[:most], *more])]


def duration(seconds: float) -> str:
    """Format seconds with units, because 1:27 may be minutes or hours."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"


def size(number: int) -> str:
    """Format bytes in decimal units: 22.0 MB."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= unit:
            return f"{number / unit:,.1f} {name}"
    return f"{number:,} bytes"


def quantity(number: int, thing: str) -> str:
    """Format a count with its noun: 1 unit, 2,000 units. The plural must end in s."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def store_rows(path: object, report: dict) -> list[tuple[str, object]]:
    """List facts about a store, from `Store.report`. Returns pairs for `table`."""
    rows: list[tuple[str, object]] = [
        ("store", path),
        (
            "tokens",
            f"{report['tokens']:,} in {quantity(report['windows'], 'window')} of "
            f"{quantity(report['documents'], 'document')}",
        ),
        (
            "bytes per token",
            f"{report['bytes_per_token']:.1f} ({report['bytes']:,} in all, {quantity(report['units'], 'shard')})",
        ),
    ]
    for stage in ("teacher", "solver", "head"):
        if seconds := report[f"{stage}_seconds"]:
            name = "stored states" if stage == "teacher" and report.get("from_stored") else stage
            rows.append((name, f"{report['tokens'] / seconds:,.0f} tokens/s"))
    if "cosine" in report:
        rows.append(
            ("fidelity", f"cosine {report['cosine']:.5f} to the teacher's states; {report['coded_tokens']:,} tokens")
        )
    if (effect := report.get("dtype_effect")) and "tv" not in effect:
        rows.append(
            ("precision", "hidden states differ by {hidden:.2%} from float32; over {tokens:,} tokens".format(**effect))
        )
    if "nnz_per_token" in report:
        empty = f", {report['empty_codes']:,} tokens without a code" if report["empty_codes"] else ""
        rows.append((entries_name(report), f"{report['nnz_per_token']:.1f} per token{empty}"))
        cut = report.get("truncated_tokens") and report["kind"] == "lsp"  # in stores of logits every token is truncated
        more = f"; {report['truncated_tokens']:,} tokens have more non-zeros than are stored" if cut else ""
        rows.append(("mass kept", f"{report['mass_kept']:.1%}{more}"))
        if fidelity := report.get("fidelity"):
            words = (
                "KL(stored || {of}) {kl:.4f} nats, total variation {tv:.4f}, tail {tail:.4f}; over {tokens:,} tokens"
            )
            rows.append(("fidelity", words.format(**fidelity)))
        if effect := report.get("dtype_effect"):
            words = (
                "against float32: total variation {tv:.4f}, hidden states differ by {hidden:.2%}; over {tokens:,} "
                "tokens"
            )
            rows.append(("precision", words.format(**effect)))
        if "max_kkt" in report:
            solver, worst = report.get("solver"), f"{report['max_kkt']:.2g}"
            rows.append(
                (
                    "exactness",
                    f"no KKT violation above {worst}"
                    if solver is None
                    else f"not optimal: {solver['steps']} FISTA steps leave KKT violations up to {worst}",
                )
            )
        elif (report.get("solver") or {}).get("name") == "nearest":
            rows.append(("codes", "the nearest atom of each token, with weight 1"))
    return rows


def entries_name(report: dict) -> str:
    """The name of a store's entries. Those of logits are not called non-zeros, because a softmax has no zeros."""
    return "entries stored" if report["kind"] == "logits" else "non-zeros stored"


def sparkline(profile_B: Sequence[float]) -> str:
    """Draw a profile with block characters; the highest bar is full."""
    bars = "▁▂▃▄▅▆▇█"
    highest = max(*map(float, profile_B), 1e-30)
    return "".join(bars[min(int(value / highest * len(bars)), len(bars) - 1)] for value in profile_B)
