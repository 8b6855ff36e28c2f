"""Train one student for every layer of a teacher, or every k, from stores that one teacher pass has made.

    result = sweep(SweepConfig(layer=(4, 8), max_steps=100))
    result["rows"][0]["improvement"]

All stores have one plan and all students one seed, so batches, masks, dropout and the encoders' initial weights are
identical; with several k the heads differ, by their size. Encoding and training resume by themselves, and a finished
part is not done again: after any interruption the same command goes on. Left out: fine-tuning (finetune), the
diagnostic (choose-layer).
"""

import json
import logging
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

from mlsm.common.durable import appearing_whole, make_directories
from mlsm.common.errors import SweepError
from mlsm.common.progress import silent
from mlsm.evaluation.comparison.identity import SAME_MASS
from mlsm.evaluation.plots import drawn, new_figure, save_figure, save_table, write_caption
from mlsm.evaluation.studies.flops.encoders import Encoder
from mlsm.evaluation.studies.flops.stores import store_flops
from mlsm.evaluation.studies.sweeps.config import SweepConfig
from mlsm.evaluation.studies.sweeps.full_scale import full_scale, full_scale_lines
from mlsm.evaluation.studies.word_senses.conclusions import read_result
from pipeline.teacher import locate
from shards.manifest import fingerprint
from shards.reader import Store
from student.config import StudentConfig
from student.resolve import resolve

logger = logging.getLogger(__name__)
COLUMNS = (
    "layer",
    "k",
    "mass_kept",
    "held_out_kl",
    "marginal_kl",
    "improvement",
    "tokens_per_second",
    "student_flops",
    "encoding_flops",
    "f1",
    "intruder_auc",
    "intruder_low",
    "intruder_high",
    "intruder_by_spelling",
)


def sweep(settings: SweepConfig, progress: Callable[..., None] = silent) -> dict:
    """Encode, train a student on every store, compare them.

    progress  called as progress(stage, done, total, unit=..., **figures)
    Returns   over (`layer` or `k`), parts, full_scale, directory, finished_before, caption (`caption_of`), and rows:
              layer, k, store, run, mass_kept (mean probability of a coded token that top-n kept), held_out_kl and
              marginal_kl (nats), improvement (share below the marginal), tokens_per_second, student_flops,
              encoding_flops (of this store alone), f1 (the diagnostic's, a share, or None), intruder_auc with its
              interval from intruder_low to intruder_high and intruder_by_spelling (None without --intruders or where no
              LSP can be judged), quarantined (documents of the store that could not be coded) and finished_before.
              With --intruders also judge, samples and dictionaries, as of show-lsp --intruders, but for single LSPs.
              With --dry-run only over, parts and full_scale
    Raises    SweepError, ValueError before anything is done, and what encode_lsp and train raise
    """
    parts = list(product(settings.layer, settings.k))
    if len(parts) == 1:
        raise SweepError(
            "a sweep needs several --layer or several --k. The demonstrations: --recipe sweep-layers, --recipe sweep-k."
        )
    scale = full_scale(settings.over, settings.gpu)
    f1_of = _diagnostic(settings.diagnostic, settings.teacher, parts) if settings.diagnostic else {}
    Encoder.find(settings.encoder)  # raises ValueError now, not hours later
    if settings.judge:
        locate(settings.judge)
    begun = {"over": settings.over, "parts": [{"layer": layer, "k": k} for layer, k in parts], "full_scale": scale}
    if settings.dry_run:
        return begun | {"dry_run": True}
    for line in full_scale_lines(scale):
        logger.info(line)
    rows, judgement = _rows(settings, parts, f1_of, progress)
    directory = settings.output / "sweeps" / f"{settings.over}-{fingerprint([row['run'] for row in rows])[:8]}"
    result = begun | {
        "rows": rows,
        "directory": str(directory),
        "caption": caption_of(settings, rows),
        "finished_before": all(row["finished_before"] for row in rows),
        **judgement,
    }
    _write(result, directory)
    return result


def _rows(settings, parts, f1_of, progress):
    from pipeline.commands import encode_lsp
    from student.train import train

    reports = encode_lsp(settings.encoding(), progress)
    judgement = _judge(settings, parts, reports, progress) if settings.intruders else {}
    rows = []
    for place, ((layer, k), report) in enumerate(zip(parts, reports, strict=True)):
        trained = train(_student(settings, layer, k, report), _name_stages(progress, f"l{layer} k{k}"))
        row = _row(layer, k, report, trained) | {"f1": f1_of.get((layer, k))}
        judged = judgement["dictionaries"][place] if judgement else {"auc": None, "interval": None, "by_spelling": None}
        low, high = judged["interval"] or (None, None)
        row |= {"intruder_auc": judged["auc"], "intruder_low": low, "intruder_high": high}
        rows.append(row | {"intruder_by_spelling": judged["by_spelling"]})
    return rows, judgement


def _judge(settings, parts, reports, progress):
    """How interpretable the LSPs of each store are, by one judge."""
    from mlsm.evaluation.inspection.lsps.config import LspConfig
    from mlsm.evaluation.inspection.lsps.texts import load_judge
    from mlsm.evaluation.inspection.lsps.view import StoreView

    judge, dictionaries = None, []
    for (layer, k), report in zip(parts, reports, strict=True):
        store = Store.open(report["store"], report["plan"])
        view = StoreView(store, LspConfig.samples, None, _name_stages(progress, f"l{layer} k{k}"))
        if judge is None:  # all stores are of one teacher
            judge, embeddings_Vd = load_judge(store, view.vocabulary.texts, settings.judge, settings.teacher)
        judged = view.judge(embeddings_Vd)
        dictionaries.append({name: value for name, value in judged.items() if name != "lsps"})
    return {"judge": judge, "samples": LspConfig.samples, "dictionaries": dictionaries}


def _student(settings, layer, k, report):
    """The settings of one student, its run named by what it is trained on, and how."""
    store = Store.open(report["store"], report["plan"])
    config = resolve(settings.training(report["store"]), store, {}).config
    what = fingerprint([config.identity(), Path(report["store"]).name, report["plan"]])[:8]
    return StudentConfig(**config.to_json() | {"run_dir": settings.output / "students" / f"sweep-l{layer}-k{k}-{what}"})


def _name_stages(progress, part):
    """The callback with the name of a part added to its stages, so that each part has bars of its own."""
    return lambda stage, *args, **kwargs: progress(f"{stage} {part}", *args, **kwargs)


def _row(layer, k, report, trained):
    return {
        "layer": layer,
        "k": k,
        "store": report["store"],
        "run": trained["run"],
        "mass_kept": report["mass_kept"],
        "held_out_kl": trained["held_out_loss"],
        "marginal_kl": trained["baseline_loss"],
        "improvement": trained["improvement"],
        "tokens_per_second": trained["tokens_per_second"],
        "student_flops": trained["flops"],
        "encoding_flops": store_flops(Store.open(report["store"], report["plan"])),
        "quarantined": report["quarantined"],
        "finished_before": report["finished_before"] and trained.get("already_finished", False),
    }


def _diagnostic(path, teacher, parts):
    """(layer, k) to F1, from a result of choose-layer. Raises SweepError where it has none of these parts."""
    from pipeline.teacher import teacher_fingerprint

    found = read_result(path)
    if found.fingerprint != teacher_fingerprint(teacher):
        raise SweepError(
            f"--diagnostic {path} is of the teacher {found.teacher}, not {teacher}. Give both the same --teacher."
        )
    if not found.f1.keys() & set(parts):
        has = ", ".join(f"layer {layer} k {k}" for layer, k in sorted(found.f1))
        raise SweepError(f"--diagnostic {path} has {has or 'no layer'}, none of this sweep's. Give both the same --k.")
    return found.f1


def _write(result, directory):
    """sweep.json, sweep.csv, and sweep.svg and .png."""
    make_directories(directory)
    with appearing_whole(directory / "sweep.json") as file:
        file.write((json.dumps(result, indent=1) + "\n").encode())
    table = COLUMNS, [[row[name] for name in COLUMNS] for row in result["rows"]]
    save_table(directory / "sweep.csv", *table)
    drawn(_draw, result["over"], result["rows"], result["caption"], directory / "sweep", *table)


def _kept(settings):
    return "the default number of entries" if settings.top_n is None else f"--top-n {settings.top_n}"


def caption_of(settings: SweepConfig, rows: list[dict]) -> str:
    """Whether students differ in what is varied alone, as they do unless top-n cuts their targets differently."""
    kept = [row["mass_kept"] for row in rows]
    if max(kept) - min(kept) < SAME_MASS:
        return f"The students differ in {settings.over} alone."
    each = ", ".join(f"{row['mass_kept']:.1%} at {row[settings.over]}" for row in rows)
    return (
        f"The students differ in {settings.over} and in how much of the targets' mass {_kept(settings)} keeps: "
        f"{each}. With --top-n all nothing is cut."
    )


def _draw(over, rows, caption, stem, *table):
    shown = {"improvement": "held-out KL, % below the marginal"}
    shown |= {
        name: label
        for name, label in (
            ("f1", "word-sense F1 on ALL, % (choose-layer)"),
            ("intruder_auc", "intruders detected, % (AUC)"),
        )
        if any(row[name] is not None for row in rows)
    }
    figure, axes = new_figure(width=len(shown), columns=len(shown))
    panels = axes if len(shown) > 1 else [axes]
    values = [row[over] for row in rows]
    for panel, (name, label) in zip(panels, shown.items(), strict=True):
        panel.plot(values, _percent(rows, name), marker="o")
        panel.set_ylabel(label)
    for panel in panels:
        panel.set_xlabel("layer of the teacher" if over == "layer" else "k")
        panel.set_xscale("log" if over == "k" else "linear")
        panel.set_xticks(values, map(str, values))
        panel.minorticks_off()
    write_caption(figure, caption)
    return save_figure(figure, stem, *table)


def _percent(rows, name):
    """Shares in per cent, NaN where there is none: a gap in a line."""
    return [math.nan if row[name] is None else 100 * row[name] for row in rows]
