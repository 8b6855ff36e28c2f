"""What the pages of the first study say (docs/studies/first*.md) follows from the records committed with it."""

import csv
import json
import re
from pathlib import Path
from statistics import fmean

import pytest
from scipy.stats import sem, t, ttest_1samp

from mlsm.common.progress import silent
from mlsm.evaluation.comparison.compare import compare
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.evaluation.studies.protocol.description import read_study
from mlsm.evaluation.studies.protocol.facts import facts_of
from mlsm.evaluation.studies.protocol.parts import plan

DOCS = Path(__file__).resolve().parents[3] / "docs"
COMMITTED = DOCS / "studies" / "cpu"


PARTS = {  # of the study: its recipe, its records, its page
    "first": ("study-cpu", "evaluations/*", "comparison"),
    "secondary": (COMMITTED / "secondary/study.yaml", "secondary/evaluations/*", "secondary/comparison"),
    "repeated": (COMMITTED / "repeated/study.yaml", "repeated/evaluations/*", "repeated/comparison"),
}


@pytest.fixture(scope="module", params=PARTS)
def computed(tmp_path_factory, request):
    """Where the tables are computed again, and where the committed ones are."""
    recipe, records, page = PARTS[request.param]
    directory = tmp_path_factory.mktemp("study")
    described = read_study(str(recipe))
    facts = facts_of(described, plan(described, directory, None), {})
    results = [*COMMITTED.glob(records)]
    if request.param == "secondary":  # mlm reads no LSPs, so its students of the first part are those of these seeds
        results += COMMITTED.glob("evaluations/mlm-seed?-step-*")
    with pytest.MonkeyPatch.context() as patch:  # the figures of the paper, which nothing here looks at, take time
        patch.setattr("mlsm.evaluation.comparison.compare.draw_paper_figures", lambda *_: [])
        compare(CompareConfig(results=tuple(results), output=directory), silent, facts)
    return directory, COMMITTED / page


def study_text():
    """The pages of the first study, one after the other."""
    pages = (DOCS / "studies" / f"{name}.md" for name in ("first", "first-protocol", "first-explored"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", ["hypotheses", "differences", "scores", "settings"])
def test_a_table_of_the_page_follows_from_its_records(computed, name):
    rows, committed = (rows_of(place / f"report-{name}.csv") for place in computed)
    assert len(rows) == len(committed) > 0
    for row, expected in zip(rows, committed, strict=True):
        assert row.keys() == expected.keys()
        for column, value in expected.items():
            assert row[column] == value or float(row[column]) == pytest.approx(float(value), rel=1e-9, abs=1e-12)


def test_the_text_tells_the_tested_difference():
    (primary,) = (row for row in rows_of(COMMITTED / "comparison/report-hypotheses.csv") if row["role"] == "primary")
    difference, low, high = (
        f"{100 * float(primary[name]):+.2f}".replace("-", "−") for name in ("difference", "low", "high")
    )
    text = " ".join((DOCS / "studies/first.md").read_text(encoding="utf-8").split())
    assert f"{difference} points (95 % interval {low} to {high}, p = {float(primary['p']):.2f})" in text


def scores_of(records):
    """(task, arm, seed) -> mean of the figures of the finished students, in per cent; BLiMP is a task."""
    found = {}
    for path in records.glob("*/*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["step"] != 2400:
            continue
        arm = "logits" if record["model"].startswith("logits") else record["objective"]
        if record["suite"] == "blimp":
            value = record["averages"]["headline"]
        else:
            value = fmean(figure["value"] for figure in record["figures"])
        found[record["task"] if record["suite"] == "finetune" else "blimp", arm, record["run_seed"]] = 100 * value
    return found


def interval(values, digits):
    """Mean and 95 % interval as the page writes them."""
    mean, half = fmean(values), sem(values) * t.ppf(0.975, len(values) - 1)
    mean, low, high = (f"{value:+.{digits}f}".replace("-", "−") for value in (mean, mean - half, mean + half))
    return mean, f"({low} to {high})"


def test_the_text_tells_what_the_records_say_beside_it():
    """Without the library's own statistics: scipy's, on the committed records."""
    usual, higher = (scores_of(COMMITTED / name) for name in ("evaluations", "rate-1e-3"))
    text = " ".join(study_text().split())
    three = ["conll2003", "mrpc", "qnli"]

    def difference(tasks, seeds, digits=1, of=lambda task, arm, seed: usual[task, arm, seed]):
        each = [fmean(of(task, "mlsm", seed) - of(task, "mlm", seed) for task in tasks) for seed in seeds]
        return interval(each, digits)

    pairs = range(5)
    assert f"without that pair the difference is {shorten(difference(three, [0, 2, 3, 4], 2))}" in text
    assert f"Without CoNLL-2003 it is {' '.join(difference(three[1:], pairs, 2))}" in text
    assert (
        f"over all ten tasks {shorten(difference(sorted({name for name, *_ in usual} - {'blimp'}), pairs, 2))}" in text
    )
    seeds = range(3)
    best = {
        (task, arm): max((usual, higher), key=lambda rate, cell=(task, arm): sum(rate[*cell, seed] for seed in seeds))
        for task in three
        for arm in ("mlm", "mlsm")
    }
    rows = {
        "3 × 10⁻⁴ for both": difference(three, seeds),
        "10 × 10⁻⁴ for both": difference(three, seeds, of=lambda *cell: higher[cell]),
        "the better one for each arm and task, by the development sets": difference(
            three, seeds, of=lambda task, arm, seed: best[task, arm][task, arm, seed]
        ),
    }
    for name, said in rows.items():
        assert f"| {name} | {' '.join(said)} |" in text
    for rate, scores in (("3 × 10⁻⁴ | mlm", usual), ("10 × 10⁻⁴ | mlm", higher)):
        means = [
            [fmean(scores[task, arm, seed] for seed in seeds) for task in (*three, "sst2")] for arm in ("mlm", "mlsm")
        ]
        first, second = (" | ".join(f"{value:.1f}" for value in row) for row in means)
        assert f"| {rate} | {first} | | | mlsm | {second} |" in text
    mean, said = difference(["blimp"], pairs)
    assert f"a difference of {mean} points {said.removesuffix(')')}, p = 0.02 over five pairs)" in text


def shorten(said):
    """The text of an interval of two digits with bounds of one, as the page has it where they are wide."""
    mean, bounds = said
    return f"{mean} " + re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.1f}", bounds)


def test_the_tables_of_masks_are_those_of_the_records():
    scores = {("uniform", *cell): value for cell, value in scores_of(COMMITTED / "evaluations").items()}
    for path in (COMMITTED / "masks").glob("*/finetune/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        masks = record["model"].split("-")[1]  # <objective>-<masks>-seed<seed>
        cell = masks, record["task"], record["objective"], record["run_seed"]
        scores[cell] = 100 * fmean(figure["value"] for figure in record["figures"])
    held_out = {
        (row["arm"], int(row["pre-training seed"])): float(row["held-out loss"])
        for row in rows_of(COMMITTED / "masks/held-out.csv")
    }
    text = study_text()
    kinds = ("uniform", "frequency", "pmi", "later")
    each = [(arm, task) for arm in ("mlm", "mlsm") for task in ("conll2003", "mrpc")]
    for masks in kinds:
        cells = []
        for arm, task in each:
            if task == "conll2003":
                trained = arm if masks == "uniform" else f"{arm}-{masks}"
                cells.append(", ".join(f"{held_out[trained, seed]:.3f}" for seed in range(3)))
            cells.append(", ".join(f"{scores[masks, task, arm, seed]:.1f}" for seed in range(3)))
        assert f"| {masks.replace('pmi', 'PMI')} | {' | '.join(cells)} |" in text
    for masks in kinds[1:]:
        less = [
            [scores[masks, task, arm, seed] - scores["uniform", task, arm, seed] for seed in range(3)]
            for arm, task in each
        ]
        cells = [" ".join(interval(values, 1)) for values in less]
        assert f"| {masks.replace('pmi', 'PMI')} | {' | '.join(cells)} |" in text


def rates_taken(directory, grid):
    """(task, arm, seed) -> the rate of fine-tuning x 10^4 that was chosen: the best of the grid on a tenth of train."""
    taken = {}
    for path in (COMMITTED / directory).rglob("finetune/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        tried = {trial["lr"]: trial["score"] for trial in record["lr_choice"]["tried"]}
        assert sorted(tried) == grid and record["lr_choice"]["lr"] == max(tried, key=tried.get)
        taken[record["task"], record["objective"], record["run_seed"]] = round(10_000 * record["lr_choice"]["lr"])
    return taken


def test_the_table_of_chosen_rates_is_that_of_the_records():
    scores, usual, higher = (scores_of(COMMITTED / name) for name in ("chosen-rates", "evaluations", "rate-1e-3"))
    taken, pairs = rates_taken("chosen-rates", [3e-4, 1e-3, 3e-3]), range(5)
    text = " ".join(study_text().split())
    differences = {}
    for task, name in (("conll2003", "CoNLL-2003"), ("mrpc", "MRPC")):
        for arm, start in (("mlm", f"| {name} | mlm | "), ("mlsm", "| | mlsm | ")):
            cells = " | ".join(f"{scores[task, arm, pair]:.1f} ({taken[task, arm, pair]})" for pair in pairs)
            assert f"{start}{cells} | {fmean(scores[task, arm, pair] for pair in pairs):.1f} |" in text
        differences[task] = [scores[task, "mlsm", pair] - scores[task, "mlm", pair] for pair in pairs]
    assert [sum(difference < 0 for difference in each) for each in differences.values()] == [5, 4]
    assert sum(scores[cell] not in (usual[cell], higher.get(cell)) for cell in scores) == 8  # of twenty are new
    both = " ".join(interval(list(map(fmean, zip(*differences.values(), strict=True))), 1))
    first, second = (" ".join(interval(values, 1)) for values in differences.values())
    first = first.replace(" (", " points (")
    said = f"MLSM minus MLM is {first} on CoNLL-2003, {second} on MRPC and {both} on average"
    assert said in text
    gains = {cell: scores[cell] - usual[cell] for cell in scores}
    ner = [gain for (task, *_), gain in gains.items() if task == "conll2003"]
    assert f"worth {min(ner):.0f} to {max(ner):.0f} points on CoNLL-2003" in text
    mlm, mlsm = (fmean(gains["conll2003", arm, pair] for pair in pairs) for arm in ("mlm", "mlsm"))
    assert f"MLM's students gain {mlm:.0f} points on CoNLL-2003 on average and MLSM's {mlsm:.0f}" in text
    lost = sorted(-gain for (task, *rest), gain in gains.items() if task == "mrpc" and taken[task, *rest] != 3)
    assert f"fell by {lost[0]:.1f} and {lost[1]:.1f} points" in text and len(lost) == 2
    assert [taken["conll2003", arm, pair] for arm in ("mlm", "mlsm") for pair in pairs].count(30) == 7


def test_the_table_of_controls_is_that_of_the_records():
    """Two pairs, whose data and settings of fine-tuning are those of mlsm beside them."""
    scores = scores_of(COMMITTED / "rate-1e-3") | by_model("controls")
    text = " ".join(study_text().split())
    table = text[text.index("By the LSPs or by the teacher?") :]
    for arm in ("mlm", "mlsm", "cluster", "mtl", "untrained"):
        cells = " | ".join(
            ", ".join(f"{scores[task, arm, seed]:.1f}" for seed in (0, 1)) for task in ("conll2003", "mrpc")
        )
        assert re.search(rf"\| `?{arm}`?[^|]* \| {re.escape(cells)} \|", table), arm
    ahead = [scores[t, "mlsm", s] - scores[t, "cluster", s] for t in ("conll2003", "mrpc") for s in (0, 1)]
    assert f"by {min(ahead):.1f} to {max(ahead):.1f} points in both pairs on both tasks" in text


TARGETS = {
    "mlsm": "exact codes, the 32 largest entries: `mlsm`",
    "n8": "the 8 largest",
    "all": "all entries",
    "warm": "all, T = 1.479, as flat as those of FISTA",
    "fista": "the official 100 FISTA steps, all entries",
    "sampled": "exact codes, atoms drawn from hidden states, not learned",
    "weak": "exact codes of a weaker teacher",
    "mlm": "words: `mlm`",
}


def test_the_table_of_targets_is_that_of_the_records():
    scores, first = by_model("targets"), scores_of(COMMITTED / "rate-1e-3")
    text = " ".join(study_text().split())
    cells = [(task, seed) for task in ("conll2003", "mrpc") for seed in (0, 1)]
    for arm, name in TARGETS.items():
        first_task, second_task = (
            ", ".join(f"{scores[task, arm, seed]:.1f}" for seed in (0, 1)) for task in ("conll2003", "mrpc")
        )
        mean = fmean(scores[task, arm, seed] for task, seed in cells)
        figures = re.escape(f"{first_task} | {second_task} | {mean:.1f}")
        assert re.search(rf"\| {re.escape(name)} \|( [0-9.]+)? \| {figures} \|", text), arm
    means = {arm: round(fmean(scores[task, arm, seed] for task, seed in cells), 1) for arm in TARGETS}
    less = [means["mlsm"] - means[arm] for arm in TARGETS.keys() - {"mlsm", "mlm"}]
    earlier = round(fmean(first[task, "mlsm", seed] for task, seed in cells), 1)
    assert f"are {min(less):.1f} to {max(less):.1f} points below the MLSM of this table" in text
    assert f"the MLSM of the table above is also {means['mlsm'] - earlier:.1f} points below it" in text
    apart = max(abs(scores[t, "mlsm", s] - scores[t, "all", s]) for t, s in cells)
    assert f"differ by up to {apart:.1f} points" in text
    again = {arm: [scores[t, arm, s] - first[t, arm, s] for t, s in cells] for arm in ("mlm", "mlsm")}
    ner_0, ner_1, mrpc_0, mrpc_1 = (f"{value:+.1f}".replace("-", "−") for value in again["mlsm"])
    ner = f"{ner_0} and {ner_1} points on CoNLL-2003"
    assert f"trained again changes by {ner} and {mrpc_0} and {mrpc_1} on MRPC" in text
    assert f"differs by at most {max(map(abs, again['mlm'])):.1f} points" in text
    rounding = [scores[task, "rounding", 0] for task in ("conll2003", "mrpc")]
    assert f"({rounding[0]:.1f} and {rounding[1]:.1f})" in text
    assert max(abs(scores[t, "rounding", 0] - scores[t, "mlsm", 0]) for t in ("conll2003", "mrpc")) < 0.25
    sizes = [abs(value) for value in again["mlsm"]]
    assert f"differs from itself by {min(sizes):.1f} to {max(sizes):.1f} points" in text


def test_half_the_steps_and_equal_seconds_are_told_as_the_records_say():
    scores = by_model("budgets")
    text = " ".join(study_text().split())
    for arm, said in (
        ("mlm-seconds", "MLM with a schedule of 1,680 steps scores {} on CoNLL-2003 and {} on MRPC"),
        ("mlsm", "MLSM after 1,200 of its 2,400 steps scores {} on CoNLL-2003 and {} on MRPC"),
    ):
        cells = [" and ".join(f"{scores[task, arm, seed]:.1f}" for seed in (0, 1)) for task in ("conll2003", "mrpc")]
        assert said.format(*cells) in text


def test_word_senses_of_students_are_told_as_the_records_say():
    text = " ".join(study_text().split())
    for arm in ("untrained", "mlm", "mlsm"):
        tables = [rows_of(COMMITTED / f"word-senses/{arm}-seed{seed}.csv") for seed in (0, 1)]
        cells = [
            ", ".join(
                f"{100 * float(row['ALL']):.1f}"
                for table in tables
                for row in table
                if (row["layer"], row["variant"]) == (layer, variant)
            )
            for variant in ("raw-npmi0", "raw-npmi-1")
            for layer in ("1", "2")
        ]
        assert f"| {arm} | {' | '.join(cells)} |" in text


def by_arm(part):
    """(task, arm, seed) -> score of the finished models of the second part; the arm is in the name of the model."""
    found = {}
    for path in (COMMITTED / part / "evaluations").glob("*/finetune/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert record["step"] in (2400, None)  # None: the teacher
        arm = record["model"].partition("-seed")[0]
        found[record["task"], arm, record["run_seed"]] = 100 * fmean(figure["value"] for figure in record["figures"])
    return found


def test_the_secondary_hypotheses_are_told_as_the_records_say():
    scores, first = by_arm("secondary"), scores_of(COMMITTED / "evaluations")
    text = " ".join(study_text().split())
    three, others, seeds = ("conll2003", "mrpc", "qnli"), ("cluster", "sampled", "kd-masked"), range(5)
    assert scores.keys() == {(task, arm, seed) for task in three for arm in ("mlsm", *others) for seed in seeds} | {
        (task, "bundled_teacher", None) for task in three
    }

    def less(other):
        return [fmean(scores[task, "mlsm", seed] - other[task, seed] for task in three) for seed in seeds]

    def cells_of(arm, of=scores):
        return {(task, seed): of[task, arm, seed] for task in three for seed in seeds}

    differences = {other: less(cells_of(other)) for other in others}
    p_values = {other: ttest_1samp(each, 0).pvalue for other, each in differences.items()}
    ordered, holm = sorted(p_values, key=p_values.get), 0.0
    for rank, other in enumerate(ordered):  # Holm: the smallest p times three, the next times two, never falling
        holm = min(1.0, max(holm, (len(others) - rank) * p_values[other]))
        said = " ".join(interval(differences[other], 2))
        assert f"| `{other}` | {said} | {p_values[other]:.3f} | {holm:.3f} |" in text
    again, before = (
        less(cells_of("mlm", first)),
        [fmean(first[task, "mlsm", seed] - first[task, "mlm", seed] for task in three) for seed in seeds],
    )
    assert f"MLSM minus the first part's MLM is {' '.join(interval(again, 2))}" in text
    both = [fmean(pair) for pair in zip(again, before, strict=True)]
    assert f"With the mean of both dictionaries it is {' '.join(interval(both, 2))}" in text
    moved = [scores["conll2003", "mlsm", seed] - first["conll2003", "mlsm", seed] for seed in seeds]
    low, high = (f"{value:+.1f}".replace("-", "−") for value in (min(moved), max(moved)))
    assert f"by {low} to {high} points on CoNLL-2003 at this rate" in text
    assert f"{abs(fmean(moved)):.1f} ± {sem(moved) * t.ppf(0.975, 4):.1f}: seed and dictionary act together" in text
    rows = {
        "untrained": {(task, seed): first_floor(task, seed) for task in three for seed in seeds},
        "teacher": {(task, None): scores[task, "bundled_teacher", None] for task in three},
        "mlm": cells_of("mlm", first),
    } | {arm: cells_of(arm) for arm in ("mlsm", *others)}
    for arm, cells in rows.items():
        means = [fmean(value for (name, _), value in cells.items() if name == task) for task in three]
        figures = " | ".join(f"{value:.1f}" for value in (*means, fmean(means)))
        assert re.search(rf"\| `?{arm}`?[^|]* \| {re.escape(figures)} \|", text), (arm, figures)
    ceiling = fmean(rows["teacher"].values()) - fmean(rows["mlm"].values())
    page = " ".join((DOCS / "studies/first.md").read_text(encoding="utf-8").split())
    assert f"only {ceiling:.1f} points above mlm" in page
    (blimp,) = (COMMITTED / "teacher").glob("*/blimp/*.json")
    headline = 100 * json.loads(blimp.read_text(encoding="utf-8"))["averages"]["headline"]
    assert f"| {headline:.1f}% | 60%" in (DOCS.parent / "pipeline/bundled_teacher/README.md").read_text(
        encoding="utf-8"
    )


def first_floor(task, seed):
    (path,) = (COMMITTED / "evaluations").glob(f"mlm-seed{seed}-step-00000000-*/finetune/{task}-seed0.json")
    return 100 * fmean(figure["value"] for figure in json.loads(path.read_text(encoding="utf-8"))["figures"])


def test_the_repeated_comparison_is_told_as_the_records_say():
    scores, seeds = by_arm("repeated"), range(5, 10)
    taken = rates_taken("repeated", [3e-4, 1e-3, 3e-3, 1e-2])
    text = " ".join(study_text().split())
    for arm in ("mlm", "mlsm"):
        each = [scores["conll2003", arm, seed] for seed in seeds]
        cells = " | ".join(
            f"{score:.1f} ({taken['conll2003', arm, seed]})" for score, seed in zip(each, seeds, strict=True)
        )
        assert f"| {arm} | {cells} | {fmean(each):.1f} |" in text
    each = [scores["conll2003", "mlsm", seed] - scores["conll2003", "mlm", seed] for seed in seeds]
    difference, bounds = interval(each, 1)
    said = f"{difference} points {bounds.removesuffix(')')}, p = {ttest_1samp(each, 0).pvalue:.2f})"
    assert said in " ".join((DOCS / "studies/first.md").read_text(encoding="utf-8").split())


def by_model(directory):
    """(task, arm, seed) -> score of records whose arm is in the name of the model; fine-tuned as mlsm was."""
    beside, found = {}, {}
    for path in (COMMITTED / "rate-1e-3").glob("mlsm*/*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        beside[record["task"], record["run_seed"]] = {name: record[name] for name in ("data", "settings", "head")}
    for path in (COMMITTED / directory).glob("*/*/*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        task, seed = record["task"], record["run_seed"]
        assert {name: record[name] for name in ("data", "settings", "head")} == beside[task, seed]
        arm = record["model"].partition("-seed")[0] if record["step"] else "untrained"
        found[task, arm, seed] = 100 * fmean(figure["value"] for figure in record["figures"])
    return found


def test_students_of_one_seed_began_alike_and_saw_the_same_batches():
    parts = {part: rows_of(COMMITTED / part / "pairing.csv") for part in ("", "secondary", "repeated")}
    rows = [row for found in parts.values() for row in found]  # also across parts
    by_seed = {seed: [row for row in rows if row["student"].endswith(f"-seed{seed}")] for seed in range(10)}
    for alike in by_seed.values():
        assert len(alike) >= 2
        for column in ("initial_encoder", "batches_to_1680", "batches_to_2400"):
            assert len({row[column] for row in alike} - {""}) == 1
    assert len({alike[0]["batches_to_2400"] for alike in by_seed.values()}) == 10
    evaluated = {path.name.partition("-step")[0] for path in COMMITTED.glob("*/*-seed?-step-0000[12]*")}
    assert evaluated <= {row["student"] for row in parts[""]}
    for part in ("secondary", "repeated"):
        evaluated = {re.match(r".*-seed\d", path.name)[0] for path in COMMITTED.glob(f"{part}/evaluations/*-seed*")}
        assert evaluated <= {row["student"] for row in parts[part]}


def test_rules_without_a_model_stand_beside_the_students():
    rules = json.loads((COMMITTED / "simple-rules.json").read_text(encoding="utf-8"))["tasks"]
    best = {task: max(rule["mean"] for rule in found.values()) for task, found in rules.items()}
    text = study_text()
    table = text[text.index("| task | without a model | untrained |") :].split("\n\n")[0].splitlines()[2:]
    rows = {row.split("|")[1].strip(" *").split()[0].lower().replace("-", ""): row.split("|")[2:6] for row in table}
    assert {task: f" {score:.1f} " for task, score in best.items()} == {task: row[0] for task, row in rows.items()}
    beaten = {task for task, (rule, _, mlm, mlsm) in rows.items() if float(rule) > max(float(mlm), float(mlsm))}
    assert len(beaten) == 8 and {"conll2003", "mrpc", "qnli"} < beaten
    assert f'always answers "paraphrase" scores {rules["mrpc"]["constant"]["mean"]:.1f}' in " ".join(text.split())
