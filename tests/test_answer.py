"""Pages on the second study agree with its records, withheld results stay hidden, a complete study fills each cell."""

import csv
import json
import math
import random
import re
import shutil
from itertools import product
from statistics import fmean, stdev

import pytest
from scipy import stats
from tiny_records import a_record, digest, store

from docs.answer import (
    MEASURES,
    PAGES,
    ROOT,
    ROWS,
    SECOND,
    SPEEDS,
    answer,
    blocks,
    draw,
    make_page,
    read,
    read_composed,
)
from mlsm.evaluation.studies.protocol.description import read_study

UNTRAINED = {"conll2003/entities": 20.0, "conll2003/pos": 60.0, "conll2003/chunks": 50.0}
TEACHER = {"conll2003/entities": 70.0, "conll2003/pos": 90.0, "conll2003/chunks": 80.0}
OTHERS = {"wsd/f1": 62.5, "stsb/cosine": 59.75, "stsb/cosine_last": 48.25}
F1 = {1: 66.4, 2: 67.8, 3: 68.9, 4: 69.3, 5: 69.0, 6: 69.2}  # as choose-layer found with another sample
SCREENED = {f"mlsm-l{n}": share for n, share in enumerate((0.70, 0.72, 0.76, 0.75, 0.77, 0.73), 1)}
SCREENED |= {"k1536": 0.70, "k384": 0.65, "n8": 0.71}
METRICS = {"conll2003": ("entities", "pos", "chunks"), "stsb": ("cosine", "cosine_last"), "wsd": ("f1",)}


@pytest.fixture(scope="module", autouse=True)
def places():
    """Names for what the recipes read from the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLSM_MINILM", "somewhere/all-minilm-l6-v2")
        patch.setenv("MLSM_DATA", "data")
        yield


@pytest.fixture(scope="module")
def told(places):
    return answer()


def cells(table):
    """The rows of a table of Markdown: first cell -> cells by title."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {row[0]: dict(zip(head[-len(row) + 1 :], row[1:], strict=True)) for row in rows}


@pytest.mark.parametrize("page", PAGES)
def test_a_page_says_what_the_records_say(page, told):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- made by docs/answer.py: " in text
    assert make_page(text, blocks(told, page)) == text, "write the tables again:  python docs/answer.py"


def test_the_figure_is_that_of_the_records(told, tmp_path):
    draw(told, tmp_path / "contrasts")
    for name in ("contrasts.csv", "contrasts.svg"):  # the drawing itself depends on the version of matplotlib
        assert (tmp_path / name).is_file() == (SECOND / name).is_file(), "draw it again:  python docs/answer.py"
    if (SECOND / "contrasts.csv").is_file():
        made, committed = ((place / "contrasts.csv").read_text() for place in (tmp_path, SECOND))
        assert made == committed


@pytest.mark.parametrize("name", sorted({file.name[:-9] for file in SECOND.glob("instead/evaluations/*")}))
def test_what_one_could_take_instead_has_the_scores_of_its_records(name, told):
    """Read as JSON, without the functions of the page."""
    found = {}
    for file in SECOND.glob(f"instead/evaluations/{name}-*/frozen/*.json"):
        record = json.loads(file.read_text())
        for figure in record["figures"]:
            metric, _, part = figure["metric"].rpartition("_")
            if part == ("dev" if record["task"] == "stsb" else "test"):
                found[f"{record['task']}/{metric}"] = f"{100 * figure['value']:.1f}"
        if record["task"] == "stsb":
            found["stsb/cosine_last"] = f"{100 * record['chosen']['cosine']['layers'][-1]['dev']:.1f}"
    row = cells(blocks(told, "docs/results.md")["front"])[ROWS[name]]
    frozen = {key: title for key, title in MEASURES.items() if not key.startswith("tuned ")}
    assert {title: row[title] for title in frozen.values()} == {frozen[key]: found[key] for key in frozen}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("task", ["conll2003", "sst2"])
def test_fine_tuned_scores_are_the_means_of_their_records(name, task, told):
    """Read as JSON, without the functions of the page."""
    arm = "mlm" if name == "untrained" else name
    step = {"mlm": "-step-00008350", "untrained": "-step-00000000"}.get(name, "")
    of_model = re.compile(rf"{arm}(-seed\d+{step})?-[0-9a-f]{{8}}")
    files = SECOND.glob(f"*/evaluations/*/finetune/{task}-*.json")
    files = [file for file in files if of_model.fullmatch(file.parts[-3])]
    if not files:
        pytest.skip("not fine-tuned yet")
    scores = [100 * figure["value"] for file in files for figure in json.loads(file.read_text())["figures"]]
    front = cells(blocks(told, "docs/results.md")["front"])
    row = front.get(ROWS[name]) or front[f"{ROWS[name]} (`{name}`)"]
    assert row[MEASURES[f"tuned {task}"]] == f"{fmean(scores):.1f}"


PAIRED = [  # task, arms, and what docs/results.md says of their difference
    ("conll2003", "mlsm", "mlm", "+0.3 in F1 on entities (95 % interval −0.9 to +1.6)"),
    ("sst2", "mlsm", "mlm", "2.4 in accuracy on sentiment (−0.1 to +4.8)"),
    ("sst2", "mlm", "untrained", "(+1.2; −2.3 to +4.7)"),
    ("sst2", "mlsm", "untrained", "(+3.6; 2.4 to 4.8)"),
    ("conll2003", "mlsm-visible-l3", "mlsm", "−0.6 on entities (−3.7 to +2.5)"),
    ("sst2", "mlsm-visible-l3", "mlsm", "−0.6 on sentiment (−2.7 to +1.6)"),
    ("conll2003", "mlsm-visible-l3", "mlm", "(−0.3; −2.9 to +2.4)"),
    ("sst2", "mlsm-visible-l3", "mlm", "(+1.8; +0.8 to +2.8;"),
    ("conll2003", "regress-visible-l3", "mlm", "2.7 less on entities (1.2 to 4.3)"),
    ("sst2", "regress-visible-l3", "mlm", "3.2 less on sentiment (1.1 to 5.4)"),
    ("conll2003", "regress-visible-l3", "mlsm-visible-l3", "3.0 (1.5 to 4.5)"),
    ("sst2", "regress-visible-l3", "mlsm-visible-l3", "1.4 less (−0.01 to +2.9)"),
    ("conll2003", "regress-visible-l3-pq64", "regress-visible-l3",
     "0.6 more on entities than those of int8 (−1.5 to +2.7)"),
    ("sst2", "regress-visible-l3-pq64", "regress-visible-l3", "(−0.03; −1.8 to +1.8)"),
]  # fmt: skip


@pytest.mark.parametrize(("task", "one", "other", "said"), PAIRED)
def test_differences_after_fine_tuning_are_those_of_the_records(task, one, other, said):
    """Four pairs, Student's t. Read as JSON."""
    differences = [fine_tuned(one, seed, task) - fine_tuned(other, seed, task) for seed in range(4)]
    interval = stats.ttest_1samp(differences, 0).confidence_interval()
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    assert said in text
    found = [number.replace("−", "-") for number in re.findall(r"[−+]?\d+\.\d+", said)]
    for number, exact in zip(found, (fmean(differences), *interval), strict=True):
        digits = len(number.partition(".")[2])
        assert abs(float(number)) == abs(round(exact, digits)), (said, exact)


def test_the_readme_says_the_same_leads():
    leads = [
        fmean(fine_tuned("regress-visible-l3", seed, task) - fine_tuned("mlm", seed, task) for seed in range(4))
        for task in ("conll2003", "sst2")
    ]
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "{:.1f} ahead of words on entities, {:.1f} on sentiment".format(*leads) in text


def fine_tuned(arm, seed, task):
    """The score of one student, in percent."""
    step = {"mlm": "-step-00008350", "untrained": "-step-00000000"}.get(arm, "")
    model = f"{'mlm' if arm == 'untrained' else arm}-seed{seed}{step}-????????"
    [file] = SECOND.glob(f"main/evaluations/{model}/finetune/{task}-*.json")
    return 100 * json.loads(file.read_text())["figures"][0]["value"]


def test_sentence_vectors_are_those_of_the_trials():
    """Four pairs of the pilot's length, and the table of the page. Read as JSON."""

    def recorded(student, seed, task):
        [file] = SECOND.glob(f"pilot/evaluations/{student.format(seed)}-????????/frozen/{task}.json")
        return json.loads(file.read_text())

    def similarity(student, seed):
        """Spearman's correlation of the last layer's means on the development set, times 100."""
        return 100 * recorded(student, seed, "stsb")["chosen"]["cosine"]["layers"][-1]["dev"]

    def tuning(student, seed):
        found = {figure["metric"]: figure["value"] for figure in recorded(student, seed, "conll2003")["figures"]}
        return [found[f"{measure}_tuning"] for measure in ("entities", "pos", "chunks")]

    def composite(student, seed):
        untrained = (tuning(arms["untrained"], seed) for seed in range(100, 104))
        of_untrained = map(fmean, zip(*untrained, strict=True))
        scales = zip(tuning(student, seed), of_untrained, tuning("all-minilm-l6-v2", None), strict=True)
        return fmean(100 * (score - floor) / (teacher - floor) for score, floor, teacher in scales)

    arms = {
        "hidden states of layer 6, all tokens": "regress-visible-l6-lr0.008-seed{}",
        "masked words": "mlm-lr0.004-seed{}-step-00002000",
        "untrained": "mlm-lr0.004-seed{}-step-00000000",
    }
    page = (ROOT / "docs/small-encoder.md").read_text(encoding="utf-8")
    scores = {name: [similarity(student, seed) for seed in range(100, 104)] for name, student in arms.items()}
    for name, found in scores.items():
        assert f"| {name} | 4 | {fmean(found):.1f} ± {stdev(found):.1f} |" in page
    of_words = [composite(arms["masked words"], seed) for seed in range(100, 104)]
    assert f"| {fmean(of_words):.1f} ± {stdev(of_words):.1f} |" in page
    of_states = composite(arms["hidden states of layer 6, all tokens"], 100)
    assert f"| {of_states:.1f} (one student) |" in page
    lsps = similarity("mlsm-visible-l6-lr0.008-seed{}", 100)
    assert f"| LSPs of layer 6, all tokens | 1 | {lsps:.1f} |" in page
    ours, words, _ = scores.values()
    differences = [one - other for one, other in zip(ours, words, strict=True)]
    low, high = stats.ttest_1samp(differences, 0).confidence_interval()
    assert f"{fmean(differences):.1f} ahead of words ({low:.1f} to {high:.1f}; four of four pairs)" in page
    assert f"they score {fmean(ours):.1f}, students of words {fmean(words):.1f}" in " ".join(
        (ROOT / "README.md").read_text(encoding="utf-8").split()
    )


# -- a whole study that is made up --------------------------------------------------------------------------


def shares(arm, seed):
    """Where a student lies between the anchors: arms differ by a hundredth, seeds by two, with some noise."""
    names = sorted(read_study("study-2").arms)
    return 0.4 + names.index(arm) / 100 + seed / 50 + random.Random(f"{arm} {seed}").uniform(-0.02, 0.02)


def between(share):
    return {key: low + share * (TEACHER[key] - low) for key, low in UNTRAINED.items()} | OTHERS


def frozen(name, scores, counts="test"):
    """The frozen records of a model, in which other parts than the one that counts are misleading."""
    made = []
    for task, metrics in METRICS.items():
        part = "dev" if task == "stsb" else counts
        figures = [
            {"metric": f"{metric}_{one}", "value": scores[f"{task}/{metric}"] / 100 if one == part else 0.01, "n": 9}
            for metric in metrics
            for one in (part, "test" if part == "tuning" else "tuning")
        ]
        fields = {"suite": "frozen", "task": task, "seed": None, "figures": figures, "settings": {"frozen": True}}
        made.append(a_record(name, "cola", 0, [0.0]) | fields | {"weights": digest(name), "chosen": {}})
    return made


@pytest.fixture(scope="module")
def whole(tmp_path_factory, places):
    """A study whose every student is scored, with what one could take instead, and times."""
    second, study = tmp_path_factory.mktemp("whole") / "second", read_study("study-2")
    shutil.copytree(SECOND / "pilot" / "evaluations", second / "pilot" / "evaluations")
    made = frozen("all-minilm-l6-v2", TEACHER | OTHERS)
    for arm in study.arms.values():
        for seed in arm.seeds:
            ending = "-step-00008350" if arm.name == "mlm" else ""
            made += frozen(f"{arm.name}-seed{seed}{ending}", between(shares(arm.name, seed)))
    for seed in range(8):
        made += frozen(f"mlm-seed{seed}-step-00000000", between((seed - 3.5) / 100))
        made.append(a_record(f"mlm-seed{seed}-step-00008350", "sst2", 0, [0.6]))
    made += frozen("mlm-4x256-seed0-step-00000000", between(0.1))
    store(second / "main", made)
    store(second / "instead", frozen("teacher-2-layers", between(0.9)) + frozen("static-table", between(0.1)))
    ends, made = read_composed(read("study-2-screen"), second / "pilot"), []
    low = {key: fmean(one[key] for one in ends.untrained.values()) for key in ends.teacher}
    for seed, (arm, share) in product(range(100, 104), SCREENED.items()):
        way = share + (seed - 101.5) / 1_000
        scores = {key: one + way * (ends.teacher[key] - one) for key, one in low.items()}
        made += frozen(f"{arm}-seed{seed}", scores | OTHERS, "tuning")
    store(second / "screen", made)
    (second / "screen" / "diagnostics" / "minilm").mkdir(parents=True)
    layers = [{"layer": layer, "f1": f1 / 100} for layer, f1 in F1.items()]
    (second / "screen" / "diagnostics" / "minilm" / "result.json").write_text(json.dumps({"layers": layers}))
    of_one = {"parameters": 4_000_000, "megabytes": 16.0, "sentences_per_second": {"median": 1234.0}}
    times = dict.fromkeys(("mlm-seed0", "all-minilm-l6-v2", "teacher-2-layers"), of_one)
    times["static-table"] = of_one | {"making_seconds": 720.0, "megabytes": 30.2}
    (second / "instead" / "times.json").write_text(json.dumps({"models": times}))
    rates = {"encoding_tokens_per_second": 5e3, "training_tokens_per_second": 2e4, "fixed_seconds": 360.0}
    rates |= {"hours": 1.25, "bytes_per_token": 390.4}
    facts = {"cpu": "a processor", "threads": 1, "date": "2026-11-26"}
    (second / "instead" / "rates.json").write_text(json.dumps({"arms": {"regress": rates}} | facts))
    (second / "instead" / "stores.json").write_text(json.dumps({"bytes_per_token": {"mlsm": 74.9}}))
    return second


def test_a_whole_study_fills_every_cell(whole):
    front = cells(blocks(answer(whole), "docs/results.md")["front"])
    assert list(front) == [
        f"{what} (`{name}`)" if name.startswith(("mlm", "mlsm", "regress", "type")) else what
        for name, what in ROWS.items()
        if name != "from-teacher"
    ]
    regress = front[f"{ROWS['regress']} (`regress`)"]
    composites = [100 * shares("regress", seed) for seed in range(8)]
    assert regress["composite"] == f"{fmean(composites):.1f} ± {stdev(composites):.1f}" and regress["seeds"] == "8"
    assert regress["entities"] == f"{20 + 0.5 * fmean(composites):.1f}" and regress["sentence similarity"] == "48.2"
    assert regress["sentiment, fine-tuned"] == "–"
    assert front[f"{ROWS['mlm']} (`mlm`)"]["sentiment, fine-tuned"] == "60.0"
    assert front[ROWS["untrained"]]["composite"].startswith("0.0 ±")
    assert front[ROWS["untrained-4x256"]]["composite"] == "10.0"
    assert front[ROWS["all-minilm-l6-v2"]]["composite"] == "100.0"
    assert front[ROWS["teacher-2-layers"]]["composite"] == "90.0"
    costs = cells(blocks(answer(whole), "README.md")["front"])
    regress = costs[f"{ROWS['regress']} (`regress`)"]
    assert regress["sentences/s"] == "1,234" and regress["MB"] == "16" and regress["hours to make"] == "1.2"
    assert (
        regress["bytes per token stored"] == "390"
        and costs[f"{ROWS['mlsm']} (`mlsm`)"]["bytes per token stored"] == "75"
    )
    assert costs[ROWS["static-table"]]["hours to make"] == "0.2"
    speeds = cells(blocks(answer(whole), "docs/results.md")["speeds"])
    assert list(speeds) == [SPEEDS[name] for name in ("all-minilm-l6-v2", "mlm", "teacher-2-layers", "static-table")]
    assert speeds["student, 2 × 128"] == {"sentences/s": "1,234", "MB": "16"}


def test_the_contrasts_are_scipys(whole):
    made = blocks(answer(whole), "docs/results.md")
    table = cells(made["contrasts"])
    one, other = ([100 * shares(name, seed) for seed in range(8)] for name in ("mlsm", "regress"))
    test = stats.ttest_rel(one, other)
    interval = test.confidence_interval()
    low, high = (f"{value:+.1f}".replace("-", "−") for value in (interval.low, interval.high))
    difference = f"{fmean(one) - fmean(other):+.1f}".replace("-", "−")
    row = table["mlsm − regress"]
    assert row["planned"] == "primary" and row["seeds"] == row["dictionaries"] == "8"
    assert (row["difference"], row["95 % interval, paired"]) == (difference, f"{low} to {high}")
    halves = stats.ttest_rel(*([value / 2 for value in values] for values in (one, other))).confidence_interval()
    bounds = " to ".join(f"{value:+.1f}".replace("-", "−") for value in (halves.low, halves.high))
    half = f"{fmean(one) / 2 - fmean(other) / 2:+.1f}".replace("-", "−")
    assert cells(made["measures"])["mlsm − regress"]["entities"] == f"{half} ({bounds})"
    sentences = made["verdict"].splitlines()
    assert f"{difference} points of the composite** (95 % interval {low} to {high}" in sentences[0]
    assert [one.partition(":")[0] for one in sentences] == [
        "- **LSPs − hidden states (`mlsm` − `regress`)",
        "- **LSPs − hidden states in 64 bytes (`mlsm` − `regress-pq64`)",
        "- **LSPs − words (`mlsm` − `mlm`)",
        "- **LSPs − average LSPs of the word (`mlsm` − `type`)",
    ]
    assert [name for name, row in table.items() if row["planned"] == "secondary (Holm)"] == [
        "mlsm − regress-pq64", "mlsm − mlm", "mlsm − type",
    ]  # fmt: skip
    assert table["mlsm − type"]["seeds"] == "4" and table["regress-pq64 − regress"]["dictionaries"] == "–"
    assert "mlm-untied − mlm" not in table  # of two pairs
    pilot = table["mlsm − regress, pilot: 4.1 M tokens"]  # as docs/studies/second/protocol.md has it
    assert pilot["planned"] == "no" and pilot["difference"] == "−1.3"


def test_the_screen_relates_word_senses_to_students(whole):
    made = blocks(answer(whole), "docs/word-senses.md")
    layers = cells(made["layers"])
    assert layers["2"] == {"F1 of word senses": "67.8", "composite of students": "72.0 ± 0.1", "seeds": "4"}
    assert list(layers) == [str(layer) for layer in F1]
    rho = stats.spearmanr([*F1.values()], [SCREENED[f"mlsm-l{layer}"] for layer in F1]).statistic
    half = 1.959963984540054 * math.sqrt((1 + rho**2 / 2) / 3)
    low, high = (math.tanh(math.atanh(rho) + side * half) for side in (-1, 1))
    said = f"over the 6 layers: {rho:+.2f} (95 % interval {low:+.2f} to {high:+.2f})".replace("-", "−")
    assert made["layers"].endswith(said + ".") and 0 < rho < 1
    sizes = cells(made["sizes"])
    above = {store: row["above `k` = 1,536 with 32 entries, seed by seed"] for store, row in sizes.items()}
    assert above["k = 384"] == "−5.0, −5.0, −5.0, −5.0" and above["8 entries"] == "+1.0, +1.0, +1.0, +1.0"
    assert sizes["k = 384"]["composite of students"].startswith("65.0 ±") and above["4 entries"] == "–"


def test_a_screen_without_students_says_so(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "second")
    shutil.rmtree(tmp_path / "second" / "screen")
    made = blocks(answer(tmp_path / "second"), "docs/word-senses.md")
    assert "not trained yet" in made["layers"]


def test_the_rates_give_the_hours_of_a_text(whole):
    made = blocks(answer(whole), "docs/small-encoder.md")["rates"]
    hours = [f"{size * 1e6 / 3600 * (1 / 5e3 + 1 / 2e4) + 0.1:.1f} h" for size in (10, 35, 100)]
    assert [cells(made)["`regress`"][f"{size} million tokens"] for size in (10, 35, 100)] == hours
    assert "a processor, 1 thread(s), 2026-11-26" in made


def test_the_figure_has_a_row_for_each_contrast(whole, tmp_path):
    told = answer(whole)
    draw(told, tmp_path / "contrasts")
    with (tmp_path / "contrasts.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["contrast"] for row in rows] == [one["label"] for one in told["contrasts"]]
    assert float(rows[0]["difference"]) == pytest.approx(told["contrasts"][0]["difference"])
    assert "contrasts.svg" in blocks(told, "README.md")["figure"]


@pytest.mark.parametrize("missing", ["regress-seed5-*", "mlm-seed3-step-00000000-*"])
def test_what_is_withheld_is_in_no_table(missing, whole, tmp_path):
    second = tmp_path / "second"
    shutil.copytree(whole, second)
    (gone,) = (second / "main" / "evaluations").glob(missing)
    shutil.rmtree(gone)
    told = answer(second)
    for page in PAGES:
        made = blocks(told, page)
        names = cells(made["front"])
        assert not any("(`mlsm`)" in name or "(`regress`)" in name for name in names)
        assert any("(`mlm`)" in name for name in names) and ROWS["teacher-2-layers"] in names
        assert "are scored: `mlsm` and `regress`," in made["front"]
        contrasts = [name for name in cells(made["contrasts"]) if "pilot" not in name]
        shown = {arm for name in contrasts for arm in name.split(" − ")}
        assert not shown & {"mlsm", "regress"} and ("mlm" in shown) == ("mlm" not in missing)
        assert "withheld" in made["contrasts"]
        assert "withheld until all seeds" in made["verdict"] and "contrasts.svg" not in made["figure"]
    assert draw(told, tmp_path / "contrasts") == []


def test_an_unknown_mark_is_an_error():
    with pytest.raises(KeyError):
        make_page("<!-- made by docs/answer.py: nothing -->\nold\n<!-- end -->\n", {"front": "new"})
