"""What a command says when it is done: its result and settings to lines of text, which cli.py prints.

    text = encoding(reports, settings)

One function a verb, named by cli.VERBS. Left out: doing anything, and errors (cli.py).
"""

import shlex
from pathlib import Path
from textwrap import indent

from common.invocation import program


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
    if settings.hidden is not None:
        report = reports[0]
        lines.append(f"\nTo encode text with it, name the model of these vectors, {report['width']} wide, and a layer:")
        given = f"encode-lsp --dictionary {report['dictionary']}"
        lines.append(f"  {program()} {given} --teacher ... --layer ... --corpus ...")
        return "\n".join(lines)
    lines += ["\nNext:", *(f"  {program()} {_encoding_with(report, settings)}" for report in reports)]
    return "\n".join(lines)


def _encoding_with(report, settings):
    """The command line that encodes the corpus a dictionary is of, with this dictionary and the same settings."""
    from pipeline.config import EncodeConfig, plain
    from recipes.reading import recipe_settings

    of_recipe = recipe_settings(settings.recipe, "encode-lsp", EncodeConfig, False) if settings.recipe else {}
    usual = plain(EncodeConfig(**of_recipe))
    now = plain(settings) | {"layer": [report["layer"]], "k": [report["k"]]}
    always = {"layer"} if settings.recipe else {"teacher", "layer", "corpus"}
    words = ["encode-lsp", *(["--recipe", settings.recipe] if settings.recipe else [])]
    for name in [name for name in now if name in usual and name != "k"]:    # the dictionary says how many atoms it has
        if name in always or now[name] != usual[name]:
            words += _flag(name, now[name])
    return shlex.join(map(str, [*words, "--dictionary", report["dictionary"]]))


def _flag(name, value):
    """A setting as words of a command line."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{'' if value else 'no-'}{flag}"]
    return [f"--{flag}", *(value if isinstance(value, list) else ["None" if value is None else value])]


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
    lines += corpus_lines(reports[0].get("corpus"))
    objective = {"lsp": [], "ids": ["--objective", "mlm"], "logits": ["--objective", "kd"]}[reports[0]["kind"]]
    stores = [shlex.join(["train-student", "--store", report["store"], *objective]) for report in reports]
    return "\n".join([*lines, "\nNext:", *(f"  {program()} {words}" for words in stores)])


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
    return "\n".join(["\nAn estimate:", table([*rows, ("measured", measured)]), *corpus_lines(report.get("corpus"))])


def corpus_lines(corpus):
    """What the scan of the text counted, in all and by file, from `Job.describe_corpus`; nothing for None."""
    if corpus is None:
        return []
    listed = corpus["files_listed"]
    one = f"{listed[0]['file']}" if corpus["files"] == 1 else f"{corpus['files']:,} files"
    cut = ", before --max-tokens" if corpus["max_tokens"] else ""
    lines = [f"\nThe text{cut}: {one}: {_documents(corpus)}"]
    if corpus["files"] > 1:
        rows = [(entry["file"], _documents(entry)) for entry in listed]
        rest = {name: corpus[name] - sum(entry[name] for entry in listed) for name in listed[0] if name != "file"}
        others = corpus["files"] - len(listed)
        lines.append(table(rows + ([(f"{others:,} others", _documents(rest))] if others else [])))
    if corpus["paragraphs"] is not None:
        lines.append(
            f"  An empty line ends a document, so that a text file has {corpus['paragraphs']:,.0f} of them on average. "
            "If each file is one text, such as a novel, give --document-boundary file --held-out-by file."
        )
    return lines


def _documents(counts):
    left_out = {"duplicates": "duplicates left out", "too_short": "too short", "invalid": "not UTF-8"}
    more = [f"{counts[name]:,} {words}" for name, words in left_out.items() if counts[name]]
    documents = "document" if counts["documents"] == 1 else "documents"
    return ", ".join([f"{counts['documents']:,} {documents}", f"{counts['held_out_documents']:,} held out", *more])


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
            rows.append(_optimality(report))
    return rows


def _optimality(report):
    if solver := report.get("solver"):
        words = f"not optimal: {solver['steps']} FISTA steps leave KKT violations up to {report['max_kkt']:.2g}"
        return "exactness", words
    return "exactness", f"no KKT violation above {report['max_kkt']:.2g}"


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
        probe = shlex.join(["train-probe", "--student", result["run"], "--store", result["store"]])
        lines.append(f"\nNext, words from its LSPs:\n  {program()} {probe}")
    if store.settings.get("teacher_name") == "bundled":
        lines += [
            "\nThis was the demonstration: a small teacher, a small corpus. The real thing, with your text:\n",
            f"  {program()} encode-lsp --recipe paper --corpus 'wikipedia/*.txt.gz'",
            "\nThen the line that it prints: a student trained on that store has the paper's settings, too.",
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
    return rows + _held_out_rows(result["objective"], result["held_out"], result["baseline"])


def _held_out_rows(objective, figures, baseline):
    if not figures:
        return [("held out", "nothing: the corpus has no held-out windows")]
    from student.objectives import OBJECTIVES

    objective, loss = OBJECTIVES[objective], figures["loss"]
    plain = _side(loss, baseline["loss"], objective.reference)
    by_position = baseline.get("loss_by_position")    # a run of an earlier version has none
    if by_position is None:
        rows = [(objective.loss_name, f"{loss:.4f} nats per masked token, {plain}")]
    else:
        headline = _side(loss, by_position, objective.reference_by_position)
        rows = [(objective.loss_name, f"{loss:.4f} nats per masked token, {headline}"), ("", plain)]
    if "accuracy" in figures:
        guess = f" (most frequent token: {baseline['accuracy']:.1%})" if "accuracy" in baseline else ""
        accuracy = f"{figures['accuracy']:.1%} of masked tokens{guess}, perplexity {figures['perplexity']:.1f}"
        rows.append(("held-out accuracy", accuracy))
    return rows


def _side(loss, baseline, reference):
    """How far a loss is from that of a baseline."""
    improvement = 1 - loss / baseline if baseline else 0.0
    return f"{abs(improvement):.1%} {'below' if improvement >= 0 else 'ABOVE'} the {baseline:.4f} of {reference}"


def duration(seconds):
    """Seconds as minutes or hours, for people."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
