"""What a command says when it is done: its result and settings to lines of text, which cli.py prints.

    text = encoding(reports, settings)

One function a verb, named by cli.VERBS. Left out: doing anything, and errors (cli.py).
"""

import sys
from pathlib import Path
from textwrap import indent


def command():
    """How this program was called: installed or from the checkout."""
    return "mlsm" if Path(sys.argv[0]).stem == "mlsm" else "python cli.py"


def table(rows):
    """Pairs (name, value) as two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def paths(made, settings):
    """Commands that make directories."""
    return "\n".join(map(str, made))


def dictionaries(reports, settings):
    """The summary of learn-dictionary."""
    lines = []
    for report in reports:
        lines.append(f"\nThe dictionary {'was finished already' if report['finished_before'] else 'is finished'}.")
        lines.append(table(_dictionary_rows(report)))
    given = f"{command()} encode-lsp --dictionary {reports[0]['dictionary']}"
    if settings.hidden is not None:
        lines.append(f"\nNext:  {given}")
        lines.append(f"       with --teacher and --layer of these vectors, {reports[0]['width']} wide, and a --corpus")
    else:
        next_command = f"{command()} encode-lsp with the flags of this command"
        lines.append(f"\nNext:  {next_command}, which finds it; for another corpus:")
        lines.append(f"       {given}")
    return "\n".join(lines)


def _dictionary_rows(report):
    """What a dictionary holds, from `Dictionary.report`."""
    return [
        ("dictionary", report["dictionary"]),
        ("atoms", f"{report['k']:,} of width {report['width']}, {report['dead_atoms']:,} of them dead"),
        ("held out", f"objective {report['objective']:.5f}, {report['explained_variance']:.1%} of variance explained"),
        ("non-zeros", f"{report['nnz']:.1f} a vector"),
        ("learned", f"from {report['vectors']:,} vectors, {report['epoch']:.2g} passes"),
        ("stopped", report["stopped"]),
    ]


def encoding(reports, settings):
    """The summary of encode-lsp, encode-ids, encode-logits and derive-shards."""
    if getattr(settings, "dry_run", False):
        return estimated(reports[0])
    lines = []
    for report in reports:
        lines.append(f"\nThe store {'was finished already' if report['finished_before'] else 'is finished'}.")
        lines.append(table(store_rows(report["store"], report) + _run_rows(report)))
    flags = {"lsp": "", "ids": " --objective mlm", "logits": " --objective kd"}[reports[0]["kind"]]
    if len(reports) > 1 or settings.output != Path("runs"):
        flags += f" --store {reports[0]['store']}"
    return "\n".join([*lines, f"\nNext:  {command()} train-student{flags}"])


def estimated(report):
    """What --dry-run found out."""
    rows = [
        ("tokens", f"about {report['tokens']:,} in {report['units']:,} units"),
        ("bytes", f"about {report['bytes']:,} ({report['bytes_per_token']:.1f} per token and store)"),
        ("disk", f"{report['disk_free']:,} bytes are free" + (": TOO FEW" * (report["bytes"] > report["disk_free"]))),
        ("time", f"about {duration(report['seconds'])} at {report['tokens_per_second']:,.0f} tokens/s in one process"),
    ]
    if report.get("lacking"):
        time = duration(report["learning_seconds"])
        rows.append(("dictionaries", f"{report['lacking']} to be learned before, about {time}"))
    measured = f"from {report['measured_tokens']:,} tokens of the corpus, encoded just now; nothing was kept"
    return "\n".join(["\nAn estimate:", table([*rows, ("measured", measured)])])


def store_rows(path, report):
    """What a store holds, from `Store.report`."""
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
        rows.append(("mass kept", f"{report['mass_kept']:.1%}"))
        if fidelity := report.get("fidelity"):
            words = "KL(stored || {of}) {kl:.4f} nats, total variation {tv:.4f}, tail {tail:.4f}; of {tokens:,} tokens"
            rows.append(("fidelity", words.format(**fidelity)))
        if "max_kkt" in report:
            rows.append(("exactness", f"no KKT violation above {report['max_kkt']:.2g}"))
    return rows


def entries_name(report):
    """What the entries of a store's rows are called: a softmax has no zeros."""
    return "entries stored" if report["kind"] == "logits" else "non-zeros stored"


def _run_rows(report):
    rows = [("dictionary", report["dictionary"])] if "dictionary" in report else []
    if report["new_units"]:
        rate = report["new_tokens"] / report["seconds"]
        rows.append(("this run", f"{report['new_tokens']:,} tokens in {duration(report['seconds'])} ({rate:,.0f}/s)"))
    return rows


def training(result, settings):
    """The summary of train-student: the store it read, the student, how to load it."""
    from shards.reader import Store

    store = Store.open(result["store"], result["plan"])
    lines = [
        f"\nThe student {'was finished already' if result['already_finished'] else 'is finished'}.",
        table(store_rows(store.path, store.report()) + _student_rows(result)),
        _how_to_load(result["export"]),
    ]
    if result["objective"] in ("mlsm", "naive-mlsm"):
        lines.append(f"\nWords from its LSPs:  {command()} train-probe --student {result['run']}")
    if store.settings.get("teacher_name") == "bundled":
        lines += [
            "\nThis was the demonstration: a small teacher, a small corpus. The real thing, with your text:\n",
            f"  {command()} encode-lsp --recipe paper --corpus 'wikipedia/*.txt.gz'",
            f"  {command()} train-student --recipe paper",
        ]
    return "\n".join(lines)


def probing(result, settings):
    """The summary of train-probe: what it predicts, how to load it."""
    matrix = f"{result['parameters']:,} parameters on the {settings.probe_input} of {result['encoder']}"
    rows = [("store", result["store"]), ("probe", matrix), *_trained_rows(result)]
    return "\n".join([
        f"\nThe probe {'was finished already' if result['already_finished'] else 'is finished'}.",
        table([*rows, ("run", result["run"]), ("exported to", result["export"])]),
        _how_to_load(result["export"]),
    ])


def exported(report, settings):
    """What export-student wrote, or would write, and pushed."""
    verb = "would be" if report["dry_run"] else "is"
    rows = [("run", report["run"]), ("checkpoint", f"step {report['step']:,}"), ("export", report["export"])]
    lines = [f"\nThe checkpoint {verb} exported.", table(rows)]
    if not report["dry_run"]:
        lines.append(_how_to_load(report["export"]))
    if "revisions" in report:
        lines.append(f"\nTo {report['address'] or report['repository']} {verb} pushed:")
        lines.append(table([(row["branch"], _files_of(row)) for row in report["revisions"]]))
    return "\n".join(lines)


def _how_to_load(export):
    """The card's lines that load an export."""
    from student.export import loading_code

    return "\nLoad it:\n\n" + indent(loading_code(Path(export)).strip(), "  ")


def _files_of(revision):
    files = revision["files"]
    return f"{len(files)} files, {sum(files.values()):,} bytes of {revision['directory']}"


def _student_rows(result):
    student = f"{result['encoder']}, objective {result['objective']}, {result['parameters']:,} parameters"
    rows = [("student", student), *_trained_rows(result)]
    return rows + [("run", result["run"]), ("student exported to", result["export"])]


def _trained_rows(result):
    first_step = result["seconds_to_first_step"]  # None when the last process had no step left to do
    rows = [
        (
            "trained",
            f"{result['steps']:,} steps, {result['tokens']:,} tokens, {result['tokens_per_second']:,.0f} tokens/s"
            + (f", first step {first_step:.1f} s after loading" if first_step else ""),
        ),
    ]
    return rows + _held_out_rows(result["objective"], result["held_out"], result["baseline"], result["improvement"])


def _held_out_rows(objective, figures, baseline, improvement):
    if not figures:
        return [("held out", "nothing: the corpus has no held-out windows")]
    from student.objectives import OBJECTIVES

    name, reference = OBJECTIVES[objective].loss_name, OBJECTIVES[objective].reference
    improvement = improvement or 0.0
    side = f"{abs(improvement):.1%} {'below' if improvement >= 0 else 'ABOVE'}"
    rows = [(name, f"{figures['loss']:.4f} nats per masked token, {side} the {baseline['loss']:.4f} of {reference}")]
    if "accuracy" in figures:
        guess = f" (most frequent token: {baseline['accuracy']:.1%})" if "accuracy" in baseline else ""
        accuracy = f"{figures['accuracy']:.1%} of masked tokens{guess}, perplexity {figures['perplexity']:.1f}"
        rows.append(("held-out accuracy", accuracy))
    return rows


def duration(seconds):
    """Seconds as minutes or hours, for people."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
