"""Pieces that several views share: rows of facts, seconds for people, what a store holds."""


def table(rows):
    """Lay out pairs (name, value) in two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def paths(made, settings):
    """List the directories that a command has made."""
    return "\n".join(map(str, made))


def duration(seconds):
    """Write seconds as minutes or hours, for people."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def store_rows(path, report):
    """List what a store holds, from `Store.report`. Returns pairs for `table`."""
    rows = [
        ("store", path),
        (
            "tokens",
            f"{report['tokens']:,} in {report['windows']:,} windows of {report['documents']:,} documents",
        ),
        (
            "bytes per token",
            f"{report['bytes_per_token']:.1f} ({report['bytes']:,} in all, {report['units']} shards)",
        ),
    ]
    for stage in ("teacher", "solver", "head"):
        if seconds := report[f"{stage}_seconds"]:
            rows.append((stage, f"{report['tokens'] / seconds:,.0f} tokens/s"))
    if "nnz_per_token" in report:
        empty = f", {report['empty_codes']:,} tokens without a code" if report["empty_codes"] else ""
        rows.append((entries_name(report), f"{report['nnz_per_token']:.1f} per token{empty}"))
        cut = report.get("truncated_tokens") and report["kind"] == "lsp"  # of logits every token is cut
        more = f"; {report['truncated_tokens']:,} tokens have more non-zeros than are stored" if cut else ""
        rows.append(("mass kept", f"{report['mass_kept']:.1%}{more}"))
        if fidelity := report.get("fidelity"):
            words = "KL(stored || {of}) {kl:.4f} nats, total variation {tv:.4f}, tail {tail:.4f}; of {tokens:,} tokens"
            rows.append(("fidelity", words.format(**fidelity)))
        if effect := report.get("dtype_effect"):
            words = "against float32: total variation {tv:.4f}, hidden states {hidden:.2%} apart; of {tokens:,} tokens"
            rows.append(("precision", words.format(**effect)))
        if "max_kkt" in report:
            solver, worst = report.get("solver"), f"{report['max_kkt']:.2g}"
            rows.append(("exactness", f"no KKT violation above {worst}" if solver is None else
                         f"not optimal: {solver['steps']} FISTA steps leave KKT violations up to {worst}"))
    return rows


def entries_name(report):
    """Name the entries of a store's rows. Those of logits are not called non-zeros, for a softmax has no zeros."""
    return "entries stored" if report["kind"] == "logits" else "non-zeros stored"
