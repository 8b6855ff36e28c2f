"""Make the tables and the figure on the quality of students, from the committed records of the second study.

    python docs/answer.py       # writes them into the PAGES, and draws the figure

A table is in a page between `<!-- made by docs/answer.py: NAME -->` and `<!-- end -->`. tests/test_answer.py
compares the pages with the records, and tries the same functions on a made-up complete study. The primary arms are in
no table and no figure until all planned seeds of both, and of the untrained students, are scored (`compose` decides);
a line says so. After that, the same command fills the cells.

    docs/studies/second/main      the students and their teacher
    docs/studies/second/pilot     the teacher, while main has no record of it; the pilot's five pairs
    docs/studies/second/screen    students of each layer's LSPs, and the layers' word senses (of choose-layer); the
                                  ends of their composite are in pilot
    docs/studies/second/instead   what one could take instead (python -m benchmarks.instead), in records of the same
                                  measures; times.json and rates.json of a quiet machine; stores.json, how large
                                  stores of LSPs became (--dry-run expects a tenth more). Without a file, its columns
                                  are left off
    docs/studies/mpnet            choose-layer on MPNet: with all of SemCor, and with a part of it on a quiet machine

The composite of any model is that of the study: 0 is the mean of the untrained students, 100 the teacher.
Not handled here: what is tested and how (mlsm/evaluation/studies/protocol/composite.py), other pages.
"""

import json
import os
import re
import sys
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mlsm.evaluation import records  # noqa: E402
from mlsm.evaluation.comparison.conclusion import FEWEST_PAIRS, p_value  # noqa: E402
from mlsm.evaluation.comparison.figures import (  # noqa: E402
    CONTRASTS_HEADER,
    draw_contrasts,
    explain_contrasts,
)
from mlsm.evaluation.comparison.significance import interval as t_interval  # noqa: E402
from mlsm.evaluation.plots import save_figure, write_caption  # noqa: E402
from mlsm.evaluation.similarity.zero_shot import correlation  # noqa: E402
from mlsm.evaluation.studies.protocol.composite import anchors_of, compose, composite_of, ends_of, points_of  # noqa: E402
from mlsm.evaluation.studies.protocol.composite import read_scores as read_composed  # noqa: E402
from mlsm.evaluation.studies.protocol.description import Study, read_study  # noqa: E402
from mlsm.evaluation.studies.word_senses.conclusions import draw_layers  # noqa: E402

SECOND, MPNET = ROOT / "docs" / "studies" / "second", ROOT / "docs" / "studies" / "mpnet"
TEACHER = "all-minilm-l6-v2"
PAGES = (
    "README.md",
    "docs/results.md",
    "docs/small-encoder.md",
    "docs/sparse-coding.md",
    "docs/word-senses.md",
    "docs/studies/layers-and-lsps.md",
    "docs/studies/second/by-measure.md",
)
SIMILARITY = "stsb/cosine_last"  # what `sentence-transformers` returns
MEASURES = {
    "conll2003/entities": "entities",
    "conll2003/pos": "parts of speech",
    "conll2003/chunks": "chunks",
    "wsd/f1": "word senses",
    SIMILARITY: "sentence similarity",
    "tuned conll2003": "entities, fine-tuned",
    "tuned sst2": "sentiment, fine-tuned",
}
ROWS = {  # arm or model -> what it is
    TEACHER: "the teacher, MiniLM 6 × 384",
    "mlm": "masked words",
    "mlsm": "LSPs, masked tokens",
    "mlsm-l3": "layer 3's LSPs, masked tokens",
    "regress": "hidden states, masked tokens",
    "regress-pq64": "hidden states in 64 bytes, masked tokens",
    "type": "average LSPs of masked words",
    "mlsm-visible": "LSPs, all tokens",
    "mlsm-visible-l3": "layer 3's LSPs, all tokens",
    "regress-visible": "hidden states, all tokens",
    "regress-visible-l3": "layer 3's hidden states, all tokens",
    "regress-visible-l3-pq64": "layer 3's hidden states in 64 bytes, all tokens",
    "mlm-equal-hours": "masked words, as many hours as layer 3's LSPs",
    "mlm-4x256-lr0.002": "4 × 256: masked words",
    "mlm-4x256": "4 × 256: masked words, default learning rate",
    "mlsm-visible-l3-4x256": "4 × 256: layer 3's LSPs, all tokens",
    "regress-visible-l3-4x256": "4 × 256: layer 3's hidden states, all tokens",
    "untrained": "untrained student",
    "untrained-4x256": "4 × 256: untrained student",
    "teacher-2-layers": "instead: the teacher cut after two layers",
    "static-table": "instead: static table of the teacher (Model2Vec)",
    "from-teacher": "instead: the two layers, trained on the hidden states",
}
USUAL_SIZE = "k1536"
SIZES = {  # arms of the screen
    USUAL_SIZE: "k = 1,536, 32 entries (that of the study)",
    "k384": "k = 384",
    "k6144": "k = 6,144",
    "n4": "4 entries",
    "n8": "8 entries",
}
LIKE = {"from-teacher": "teacher-2-layers"}  # of one architecture, so as fast and as large
UNTRAINED = {"untrained": "mlm", "untrained-4x256": "mlm-4x256"}  # the arm whose students were scored at step 0
LARGER = ("mlm-4x256", "mlm-4x256-lr0.002", "mlsm-visible-l3-4x256", "regress-visible-l3-4x256", "untrained-4x256")
COSTS = ("sentences/s", "MB", "hours to make", "bytes per token stored")
SHORT_WITHOUT = (
    *("seeds", "entities", "parts of speech", "chunks", "word senses"),
    *("type", "mlsm-l3", "regress-pq64", "mlsm-visible", "regress-visible"),
    *("from-teacher", *LARGER),
)
TARGETS = {  # arms of the planned contrasts -> what their students learn
    "mlm": "words",
    "mlsm": "LSPs",
    "regress": "hidden states",
    "regress-pq64": "hidden states in 64 bytes",
    "type": "average LSPs of the word",
}
SPEEDS = {  # a model of each architecture -> the architecture
    TEACHER: "the teacher, MiniLM 6 × 384",
    "mlm": "student, 2 × 128",
    "mlm-4x256": "larger student, 4 × 256",
    "teacher-2-layers": "instead: the teacher cut after two layers",
    "static-table": "instead: static table of the teacher (Model2Vec)",
}
UNTIL = "all seeds of both arms and of the untrained students are scored"
PILOT = ("mlsm-l4-lr0.008", "regress-mse-lr0.008")


# -- what the records say ------------------------------------------------------------------------------------


def answer(second: Path = SECOND) -> dict:
    """Everything that the tables show.

    Returns  study; found (of `compose`); hidden (arms); models (name -> seeds, composites, measures, all in
             points); students (arm -> seed -> measure -> points); contrasts (label, dictionaries, and of `compose`)
    """
    study = read("study-2")
    found = compose(study, second / "main")
    hidden = {name for name in study.primary if not found["arms"].get(name)}
    scores = read_scores(second)
    models = {name: model for name in ROWS if name not in hidden and (model := describe(name, study, scores, found))}
    return {
        "study": study,
        "found": found,
        "hidden": sorted(hidden),
        "models": models,
        "students": {name: students_of(name, study, scores) for name in study.arms if name not in hidden},
        "contrasts": [*main_contrasts(study, found, hidden), *pilot_contrast(second)],
        "screen": screen(second),
        "times": read_json(second / "instead" / "times.json").get("models", {}),
        "rates": read_json(second / "instead" / "rates.json"),
        "bytes": read_json(second / "instead" / "stores.json").get("bytes_per_token", {}),
    }


def read(recipe: str) -> Study:
    """A study of this teacher, wherever it and its data lie."""
    os.environ.setdefault("MLSM_MINILM", TEACHER)
    os.environ.setdefault("MLSM_DATA", "data")
    study = read_study(recipe)
    assert study.composite is not None
    return study._replace(composite=study.composite._replace(teacher=TEACHER))


def read_json(file: Path) -> dict:
    """The JSON record of a benchmark, {} if it has not been run yet."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def read_scores(second: Path) -> dict[str, dict[str, float]]:
    """Model -> measure -> points, of frozen records; on dev if a task has no test set. And "tuned TASK", on dev.

    The teacher's are those of the main part if it has them.
    """
    places = [second / "pilot" / "evaluations", second / "instead" / "evaluations", second / "main" / "evaluations"]
    patterns = [f"{TEACHER}-*/frozen/*.json", "*/*/*.json", "*/*/*.json"]
    found: dict[str, dict[str, float]] = {}
    tuned: dict[tuple[str, str], list[float]] = {}
    for place, pattern in zip(places, patterns, strict=True):
        files = sorted(place.glob(pattern))
        for record in records.read(files) if files else []:
            scores = found.setdefault(record["model"], {})
            if record["suite"] == "finetune":
                points = fmean(100 * figure["value"] for figure in record["figures"])
                tuned.setdefault((record["model"], record["task"]), []).append(points)
            elif record["suite"] == "frozen":
                scores |= {f"{record['task']}/{name}": value for name, value in points_of(record, "test").items()}
    for (model, task), several in tuned.items():
        found[model][f"tuned {task}"] = fmean(several)
    return found


def students_of(name: str, study: Study, scores: dict) -> dict[int, dict[str, float]]:
    """The scores of an arm's students, or of the untrained ones, by seed; {} for what is not an arm."""
    arm = study.arms.get(UNTRAINED.get(name, name))
    if arm is None:
        return {}
    step = 0 if name in UNTRAINED else arm.settings["max_steps"]
    names = {seed: (f"{arm.name}-seed{seed}", f"{arm.name}-seed{seed}-step-{step:08}") for seed in arm.seeds}
    both = {
        seed: (scores.get(plain, {}) if step else {}) | scores.get(full, {}) for seed, (plain, full) in names.items()
    }
    return {seed: one for seed, one in both.items() if one}


def describe(name: str, study: Study, scores: dict, found: dict) -> dict | None:
    """A row of the front table: means over the seeds that are scored, None if no seed is."""
    is_student = name in UNTRAINED or name in study.arms
    students = [*students_of(name, study, scores).values()] if is_student else [scores[name]] if name in scores else []
    if not students:
        return None
    measures = {key: fmean(one[key] for one in students if key in one) for key in {*chain(*students)}}
    anchors = found["anchors"]
    composites = []
    if anchors["untrained_seeds"] == len(study.arms["mlm"].seeds) and anchors["teacher"] is not None:
        ends = ends_of(anchors)
        composites = [composite_of(one, ends) for one in students if ends.keys() <= one.keys()]
    return {"seeds": len(students) if is_student else 0, "composites": composites, "measures": measures}


def main_contrasts(study: Study, found: dict, hidden: set[str]) -> list[dict]:
    """The contrasts that may be shown, hypotheses first; none of two pairs, whose interval says nothing."""
    rows = []
    for one in found["contrasts"]:
        if "paired" in one and len(one["seeds"]) >= FEWEST_PAIRS and not hidden & {*one["pair"]}:
            stores = [study.stores[study.arms[name].store] for name in one["pair"]]
            dictionaries = len(one["seeds"]) if any(store.each_seed for store in stores) else 0
            rows.append(one | {"label": " − ".join(one["pair"]), "dictionaries": dictionaries})
    return rows


def pilot_contrast(second: Path) -> list[dict]:
    """mlsm − regress in the pilot: a quarter of the text, tuning splits, five seeds of which one chose the settings."""
    study = read("study-2-pilot")
    assert study.composite is not None
    measures = tuple(measure for measure in study.composite.measures if measure.startswith("conll2003/"))
    study = study._replace(primary=PILOT, composite=study.composite._replace(measures=measures))
    contrasts = compose(study, second / "pilot")["contrasts"]
    label = "mlsm − regress, pilot: 4.1 M tokens"
    return [
        one | {"label": label, "role": "not planned", "dictionaries": len(one["seeds"])}
        for one in contrasts[:1]
        if "paired" in one
    ]


def screen(second: Path) -> dict:
    """The students of the screen.

    Returns  composites (arm -> seed -> its composite, for scored seeds), f1 (layer -> word-sense F1 of its LSPs), in
             points
    """
    study = read("study-2-screen")
    anchors, students = (read_composed(study, second / part) for part in ("pilot", "screen"))
    diagnosed = [read_json(file) for file in sorted((second / "screen").glob("diagnostics/*/result.json"))]
    f1 = {layer["layer"]: 100 * layer["f1"] for result in diagnosed for layer in result["layers"]}
    ends = ends_of(anchors_of(anchors))
    composites = {
        arm: {seed: composite_of(one, ends) for seed, one in of.items()} for arm, of in students.students.items() if of
    }
    return {"composites": composites, "f1": f1}


# -- tables ---------------------------------------------------------------------------------------------------


def front_table(told: dict, short: bool) -> str:
    """One row for each way to get an encoder.

    short  with the costs, but without the measures and the arms by which a reader decides least
    """
    left_out = SHORT_WITHOUT if short else COSTS
    rows = [["", "seeds", "composite", *MEASURES.values(), *COSTS]]
    for name, what in ROWS.items():
        model = told["models"].get(name)
        if model is None or name in left_out:
            continue
        cost = told["rates"].get("arms", {}).get(name, {})
        making = told["times"].get(name, {}).get("making_seconds")
        hours = cost.get("hours", None if making is None else making / 3600)
        rows.append(
            [
                f"{what}" + (f" (`{name}`)" if name in told["study"].arms else ""),
                str(model["seeds"] or "–"),
                mean(model["composites"]),
                *(number(model["measures"].get(key), 1) for key in MEASURES),
                *speed_of(name, told),
                number(hours, 1),
                number(told["bytes"].get(name, cost.get("bytes_per_token")), 0),
            ]
        )
    filled = [
        column
        for column, title in enumerate(rows[0])
        if column == 0 or (title not in left_out and any(row[column] != "–" for row in rows[1:]))
    ]
    return markdown([[row[column] for column in filled] for row in rows]) + "\n" + notes(told, short)


def notes(told: dict, short: bool) -> str:
    """What is not in the table, and why; the short table names only what is withheld."""
    lines = []
    missing = [name for name in ROWS if name not in told["models"] and name not in told["hidden"]]
    if told["hidden"]:
        names = " and ".join(f"`{name}`" for name in told["hidden"])
        lines.append(f"Withheld until {UNTIL}: {names}, and every comparison with one of them.")
    if missing and not short:
        lines.append(f"Not scored yet: {', '.join(f'`{name}`' for name in missing)}.")
    if short and not told["times"]:
        lines.append("Sentences per second and sizes are not measured yet.")
    return "\n" + "\n".join(lines) if lines else ""


def speed_of(name: str, told: dict) -> list[str]:
    """Sentences per second and MB of a model; of a student those of any student of its architecture."""
    if name in (*told["study"].arms, *UNTRAINED):
        timed = {model.startswith(LARGER): facts for model, facts in told["times"].items() if model not in ROWS}
        times = timed.get(name in LARGER, {})
    else:
        times = told["times"].get(LIKE.get(name, name), {})
    return [number(times.get("sentences_per_second", {}).get("median"), 0), number(times.get("megabytes"), 0)]


def speeds_table(told: dict) -> str:
    """Speed and size by architecture."""
    rows = [["", *COSTS[:2]], *([what, *speed_of(name, told)] for name, what in SPEEDS.items())]
    return markdown([row for row in rows if row[1] != "–"])


def contrasts_table(told: dict) -> str:
    """One row for each contrast that may be shown."""
    rows = [["contrast", "planned", "seeds", "dictionaries", "difference", "95 % interval, paired", "unpaired", "p"]]
    for one in told["contrasts"]:
        adjusted = one["paired"].get("p_adjusted")
        p = one["paired"]["p"] if adjusted is None else adjusted
        rows.append(
            [
                one["label"],
                {"primary": "primary", "secondary": "secondary (Holm)", "not planned": "no"}[one["role"]],
                str(len(one["seeds"])),
                str(one["dictionaries"] or "–"),
                number(one["difference"], 1, sign=True),
                *(interval(one[kind]) for kind in ("paired", "unpaired")),
                p_value(p) if one["role"] != "not planned" else "–",
            ]
        )
    lines = [markdown(rows)]
    if told["hidden"]:
        names = " or ".join(f"`{name}`" for name in told["hidden"])
        lines.append(f"\nContrasts with {names} in the main part are withheld, too.")
    return "\n".join(lines)


def by_measure_table(told: dict) -> str:
    """The same contrasts in each frozen measure's own points, those outside of the composite included."""
    measures = [key for key in MEASURES if not key.startswith("tuned ")]
    rows = [["contrast", "seeds", *(MEASURES[key] for key in measures)]]
    for one in told["contrasts"]:
        if "pair" not in one or not all(name in told["students"] for name in one["pair"]):
            continue  # of the pilot
        first, second = (told["students"][name] for name in one["pair"])
        row = [one["label"], str(len(one["seeds"]))]
        for key in measures:
            if not all(key in scores[seed] for scores in (first, second) for seed in one["seeds"]):
                row.append("–")
                continue
            found = t_interval([first[seed][key] - second[seed][key] for seed in one["seeds"]])
            bounds = interval({"low": found.low, "high": found.high})
            row.append(f"{number(found.mean, 1, sign=True)} ({bounds})")
        rows.append(row)
    return markdown(rows)


def verdict(told: dict) -> str:
    """Each planned contrast that may be shown in a sentence, the primary one first."""
    first, second = told["study"].primary
    planned = [row for row in told["contrasts"] if row["role"] != "not planned"]
    if not any(row["role"] == "primary" for row in planned):
        return f"**`{first}` − `{second}`:** withheld until {UNTIL}."
    return "\n".join(map(sentence, planned))


def sentence(row: dict) -> str:
    """A planned contrast as an item of a list."""
    targets, arms = (
        " − ".join(names) for names in ((TARGETS[arm] for arm in row["pair"]), (f"`{arm}`" for arm in row["pair"]))
    )
    paired, name = row["paired"], f"{targets} ({arms})"
    how = " by Holm’s method" if "p_adjusted" in paired else ""
    facts = f"95 % interval {interval(paired)}, p {p_value(paired.get('p_adjusted', paired['p']))}{how}"
    found = f"**{name}: {number(row['difference'], 1, sign=True)} points of the composite**"
    found += f" ({facts}, {len(row['seeds'])} pairs)"
    if margin := row.get("equivalence"):
        verb = "are" if margin["equivalent"] else "are not shown to be"
        found += f": the two {verb} equivalent within {margin['margin']:g} points (90 % interval {interval(margin)})"
    return f"- {found}."


def rates_table(told: dict) -> str:
    """Hours of the recipe small-encoder, by the rates of rates.json."""
    rates = told["rates"].get("arms", {})
    if not rates:
        return "The rates are not measured on a quiet machine yet: `python -m benchmarks.small_encoder` does it."
    millions = (f"{size} million tokens" for size in (10, 35, 100))
    rows = [["", "bytes per token stored", "encoding, tokens/s", "training, tokens/s", *millions]]
    for name, arm in rates.items():
        encoding, training = arm["encoding_tokens_per_second"], arm["training_tokens_per_second"]
        token = 1 / encoding + 1 / training
        hours = [(size * 1e6 * token + arm["fixed_seconds"]) / 3600 for size in (10, 35, 100)]
        size = told["bytes"].get(name, arm["bytes_per_token"])
        figures = (number(value, 0) for value in (size, encoding, training))
        rows.append([f"`{name}`", *figures, *(f"{h:.1f} h" for h in hours)])
    cpu, threads, date = (told["rates"][key] for key in ("cpu", "threads", "date"))
    return f"{markdown(rows)}\n\nMeasured rates: {cpu}, {threads} thread(s), {date}."


def layers_table(told: dict) -> str:
    """Word-sense F1 of each layer's LSPs, and the composite of the students that learn them."""
    f1, composites = told["screen"]["f1"], told["screen"]["composites"]
    both = {layer: [*composites[f"mlsm-l{layer}"].values()] for layer in sorted(f1) if f"mlsm-l{layer}" in composites}
    if not both:
        return "The students of the layers are not trained yet."
    rows = [["layer", "F1 of word senses", "composite of students", "seeds"]]
    rows += [[str(layer), number(f1[layer], 1), mean(of), str(len(of))] for layer, of in both.items()]
    if len(both) < 4:
        return markdown(rows)
    found = correlation([f1[layer] for layer in both], np.array([fmean(of) for of in both.values()]))
    bounds = f"{number(found['low'], 2, sign=True)} to {number(found['high'], 2, sign=True)}"
    return (
        f"{markdown(rows)}\n\nSpearman's correlation over the {len(both)} layers: "
        f"{number(found['spearman'], 2, sign=True)} (95 % interval {bounds})."
    )


def sizes_table(told: dict) -> str:
    """Composites of students of stores with other k or fewer entries, and how far they are from the usual ones."""
    composites = told["screen"]["composites"]
    usual = composites.get(USUAL_SIZE, {})
    rows = [["store", "composite of students", "seeds", "above `k` = 1,536 with 32 entries, seed by seed"]]
    for arm, store in SIZES.items():
        of = composites.get(arm, {})
        above = [number(of[seed] - usual[seed], 1, sign=True) for seed in sorted(of.keys() & usual.keys())]
        rows.append([store, mean([*of.values()]), str(len(of)), "–" if arm == USUAL_SIZE else ", ".join(above) or "–"])
    return markdown(rows)


def mpnet_layers(mpnet: Path) -> dict:
    """What `choose-layer` found of MPNet's layers, with the costs of a run on a quiet machine."""
    result, quiet = (read_json(mpnet / name) for name in ("result.json", "quiet.json"))
    costs = {layer["layer"]: layer["costs"] for layer in quiet["layers"]}
    for layer in result["layers"]:
        for name in ("encoding_microseconds", "relative_encoding"):
            layer["costs"][name] = costs[layer["layer"]][name]
    return result | {"teacher": result["teacher"] | {"name": "MPNet"}}


def senses_table(mpnet: Path) -> str:
    """Word senses by MPNet's layers."""
    result = mpnet_layers(mpnet)
    best = max(result["layers"], key=lambda layer: layer["f1"])
    sets = ("ALL", "semeval2007", "senseval3", "senseval2", "semeval2013", "semeval2015")
    parts = dict(zip(sets, sets, strict=True)) | {"NOUN": "N", "VERB": "V", "ADJ": "A", "ADV": "R"}
    rows = [["layer", *parts.values(), "back-off", "best", "non-zeros", "µs per token"]]
    rows.append(["first sense", *(number(100 * result["first_sense"][part], 1) for part in parts), "", "", "", ""])
    for layer in result["layers"]:
        scores, chosen = layer["scores"][result["headline"]], layer["best_on_development"]
        name, all_words, *others = (str(layer["layer"]), *(number(100 * scores[part], 1) for part in parts))
        if layer is best:
            name, all_words = f"**{name}**", f"**{all_words}**"
        variant = f"{number(100 * chosen['f1'], 1)} (`{chosen['variant']}`)"
        figures = number(layer["costs"]["nnz_per_word"], 0), number(layer["costs"]["encoding_microseconds"], 0)
        rows.append([name, all_words, *others, number(100 * scores["back_off"], 1), variant, *figures])
    return markdown(rows)


def mean(values: list[float]) -> str:
    """Mean and standard deviation, as pages write them."""
    spread = f" ± {stdev(values):.1f}" if len(values) > 1 else ""
    return f"{number(fmean(values), 1)}{spread}" if values else "–"


def markdown(rows: list[list[str]]) -> str:
    """A table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])


def number(value: float | None, digits: int, sign: bool = False) -> str:
    """A number as pages write it, a dash for none."""
    return "–" if value is None else f"{value:{'+' if sign else 'z'},.{digits}f}".replace("-", "−")


def interval(of: dict) -> str:
    """The bounds of an interval."""
    return f"{number(of['low'], 1, sign=True)} to {number(of['high'], 1, sign=True)}"


# -- figures --------------------------------------------------------------------------------------------------


def draw(told: dict, stem: Path) -> list[Path]:
    """The forest plot: every contrast that may be shown, with planned ones filled. Returns [] if none is planned."""
    contrasts: list[dict[str, Any]] = told["contrasts"]
    if not any(one["role"] != "not planned" for one in contrasts):
        return []
    margin = told["study"].composite.margin
    figure, rows = draw_contrasts(contrasts, margin)
    write_caption(figure, explain_contrasts(margin))
    return save_figure(figure, stem, CONTRASTS_HEADER, rows, png=False)


def figure_line(told: dict) -> str:
    """The Markdown of the figure, "" while no planned contrast may be shown."""
    planned = [one for one in told["contrasts"] if one["role"] != "not planned"]
    if not planned:
        return ""
    found = [
        f"{' − '.join(one['pair'])} {number(one['difference'], 1, sign=True)} ({interval(one['paired'])})"
        for one in planned
        if "paired" in one
    ]
    said = f"Planned: {'; '.join(found)}" if found else "Planned contrasts are withheld"
    return (
        f"![Differences of arms in points of the composite, with 95 % intervals. {said}](studies/second/contrasts.svg)"
    )


# -- pages -------------------------------------------------------------------------------------------------------


def blocks(told: dict, page: str) -> dict[str, str]:
    """The content between the marks of a page."""
    return {
        "verdict": verdict(told),
        "front": front_table(told, short=page == "README.md"),
        "speeds": speeds_table(told),
        "contrasts": contrasts_table(told),
        "measures": by_measure_table(told),
        "figure": figure_line(told),
        "rates": rates_table(told),
        "layers": layers_table(told),
        "senses": senses_table(MPNET),
        "sizes": sizes_table(told),
    }


def make_page(text: str, made: dict[str, str]) -> str:
    """The page's text with new content between its marks. KeyError on a mark that is not known."""
    pattern = re.compile(r"(<!-- made by docs/answer\.py: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
    return pattern.sub(lambda mark: f"{mark[1]}{made[mark[2]]}\n{mark[3]}", text)


if __name__ == "__main__":
    told = answer()
    draw(told, SECOND / "contrasts")
    layers = mpnet_layers(MPNET)
    draw_layers(layers, layers["layers"][0]["k"], MPNET / "layers", png=False)
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        (ROOT / page).write_text(make_page(text, blocks(told, page)), encoding="utf-8")
