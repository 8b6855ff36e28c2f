"""What earlier versions left on disk is opened, read, continued and found again by today's code, or refused.

Each directory here that has an expected.json is of one version; make_artefacts.py wrote it, at that version's commit.
The same commands are given again, in a copy. Compared bit for bit on every machine: names, fingerprints, ids of units,
the tokens in them, order and masks of batches, and every file that was finished before. With a tolerance: what
comes from sums of floating-point numbers, which differ between kinds of CPU (teacher and solver, hence stored weights
of units encoded now; losses of steps trained now). On the kind of machine that made the files these are compared bit
for bit too, where one thread computes (`make test` sets that).

A change of behaviour that a version's work must not be mixed with is said once, in CHANGED.
"""

import contextlib
import io
import json
import shlex
import shutil
from pathlib import Path

import make_artefacts
import numpy as np
import pytest
from make_artefacts import before_training, describe, give, give_and_name, made

import cli
from shards.reader import Store
from shards.verify import verify

HERE = Path(__file__).resolve().parent
VERSIONS = {file.parent.name: json.loads(file.read_text()) for file in sorted(HERE.glob("*/expected.json"))}
TV_OF_A_TOKEN, TV_ON_AVERAGE = 0.05, 0.002  # a solver that stops one pass earlier or later; 8-bit weights are 0.005
WITHIN = 0.998  # of the tokens; where atoms are nearly collinear, two codes within the tolerance may share few of them
MEASURED = ("model", "weights", "task", "seed", "head", "figures", "wall")  # of a record of a fine-tuning
LOSS = {"rel": 2e-4, "abs": 2e-6}
pytestmark = pytest.mark.usefixtures("one_thread")  # in which all was made: the order of sums is part of a result

# What has changed on purpose, by version:
#   runs      name of a killed run -> the flags with which its command continues it. Without them the command must
#             say so (an error, or a line that names these flags), and the killed run stays as it is
#   stores    kinds of which the same command now makes another store; the earlier one stays as it is
#   flags     verb -> flags that its defaults of then need now, when something is learned anew
#   solver    that the solver's arithmetic is another since: rows of its stores are near, but not the same bits
#   learning  that dictionaries learned anew are other ones, with other names: those of then have to be given
#   finetune  the flags with which its command finds its records. Without them, if there are any, it must refuse these,
#             naming the setting that differs
CHANGED = {
    "1837c65": {
        "runs": {
            "mtl": ["--untied"],  # their output matrices are tied by default since
            "naive-mlsm": ["--untied"],
            "pairs": ["--segments", "never"],  # students of pairs are told segments since
        },
        "solver": True,  # starts from rounded correlations; the same KKT tolerance over all atoms, in float32
        "learning": True,  # nearly equal atoms are replaced since 2026-11-24
        "stores": {"pairs"},  # teachers of pairs are told segments since
        # Types go only where they were trained since; training warms up and clips since.
        "finetune": ["--segments", "always", "--warmup", "0", "--grad-clip", "0"],
        "flags": {  # the sample's size decides on the minibatch since
            "encode-lsp": ["--dictionary-batch", "2048"],
            "learn-dictionary": ["--dictionary-batch", "2048"],
        },
    },
}


def each(section, without=None):
    """(version, name) of all entries of a section of expected.json, but for those that have changed."""
    return [
        pytest.param(version, name, id=f"{version}-{name}")
        for version, expected in VERSIONS.items()
        for name in (expected[section] if isinstance(expected[section], dict) else range(len(expected[section])))
        if without is None or name not in CHANGED[version][without]
    ]


def changed(section):
    return [
        pytest.param(version, name, id=f"{version}-{name}")
        for version, values in CHANGED.items()
        for name in values[section]
    ]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Function from a version and the name of a tree: puts its ./runs beside the material and goes there."""

    def put(version, tree):
        for path in (HERE / "material").iterdir():
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
        shutil.copytree(HERE / version / tree, tmp_path / "runs")
        for path in tmp_path.rglob("*"):
            if path.suffix in (".json", ".yaml") and make_artefacts.ROOT in (text := path.read_text()):
                path.write_text(text.replace(make_artefacts.ROOT, str(tmp_path)))
        monkeypatch.chdir(tmp_path)
        return VERSIONS[version]

    return put


def files(*directories):
    """Path to content of all files, but for what a command that finds its work finished may write again."""
    return {
        str(path): path.read_bytes()
        for directory in directories
        for path in sorted(Path(directory).rglob("*"))
        if path.is_file() and not (path.suffix == ".yaml" and path.parent.name == "plans")
    }


def words(command, version):
    """A command of a version as a list, with the flags that its defaults of then need now."""
    given = shlex.split(command)
    return [*given, *CHANGED[version]["flags"].get(given[0], [])]


def on_its_dictionary(then, version):
    """The command of a store of LSPs with the dictionary of then, which the same command would learn otherwise now."""
    target = Path(then["store"], "target.json")
    wanted = json.loads(target.read_text())["settings"].get("dictionary")
    command = words(then["command"], version)
    if not CHANGED[version]["learning"] or wanted is None or "--dictionary" in command:
        return command
    known = {
        json.loads(path.read_text())["fingerprint"]: path.parent for path in Path("runs").glob("*/*/dictionary.json")
    }
    return [*command, "--dictionary", str(known[wanted])]


def say(command, places):
    """What a command writes to the terminal; an error's message, too."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = cli.run([word.format(**places) for word in command])
        except (ValueError, OSError) as error:  # what cli.main says in one line, with an exit code
            return 2, said.getvalue() + str(error)
    return code, said.getvalue()


def is_same_machine(expected):
    return expected["machine"] == make_artefacts.machine()


# -- stores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "kind"), each("stores"))
def test_a_finished_store_opens_is_whole_and_is_read(version, kind, place):
    then = place(version, "finished")["stores"][kind]
    report = verify(then["store"], full=True)
    assert not (report["damaged"] or report["missing"] or report["stray"] or report["commands"])
    assert describe(Path(then["store"])) == then["made"]  # bit for bit: nothing is computed
    store = Store.open(then["store"])
    for split in ("train", "held_out"):
        windows = store.split(split)
        batch, place_N = everything(windows)
        assert len(windows) == sum(record.windows for record in store.iter_records(split))
        assert np.bincount(batch.ids[place_N], minlength=store.vocab_size).tolist() == windows.token_counts().tolist()
        if store.k:
            dense_Nk, tail_N = rows(windows)
            has_row = dense_Nk.any(1)
            assert has_row.mean() > 0.8 and np.allclose(dense_Nk[has_row].sum(1), 1, atol=1e-5)
            assert (tail_N >= 0).all() and (tail_N < 1).all()


@pytest.mark.parametrize(("version", "kind"), each("stores", without="stores"))
def test_an_interrupted_encoding_is_finished_in_its_store_as_it_would_have_been(version, kind, place):
    expected = place(version, "unfinished")
    then, before, there = expected["stores"][kind], files("runs"), made().keys()
    assert sorted(path.name for path in Path(then["store"], "units").iterdir()) == then["finished_when_interrupted"]
    give(on_its_dictionary(then, version), {})
    assert made().keys() == there, "no other store or dictionary"
    assert before.items() <= files("runs").items(), "what was finished stays as it was"
    assert_same_store(version, kind, then["made"], expected)
    if kind != "ids":
        assert_rows_near(
            version, Store.open(then["store"]), Store.open(HERE / version / "finished" / in_runs(then["store"]))
        )


@pytest.mark.parametrize(("version", "kind"), each("stores"))
def test_the_command_that_verify_shards_names_finishes_a_store(version, kind, place):
    """From the settings that the version kept beside the plan."""
    expected = place(version, "unfinished")
    then, there = expected["stores"][kind], made().keys()
    (command,) = verify(then["store"])["commands"]
    give(shlex.split(command)[1:], {})
    assert made().keys() == there and not verify(then["store"], full=True)["missing"]
    assert_same_store(version, kind, then["made"], expected)


@pytest.mark.parametrize(("version", "kind"), each("stores", without="stores"))
def test_the_same_request_finds_the_finished_store_and_its_dictionary(version, kind, place):
    then, before = place(version, "finished")["stores"][kind], files("runs")
    give(on_its_dictionary(then, version), {})
    assert files("runs") == before


@pytest.mark.parametrize(("version", "kind"), each("stores", without="stores"))
def test_a_corpus_that_has_grown_adds_to_the_store(version, kind, place):
    expected = place(version, "finished")
    then, before, there = expected["stores"][kind], files("runs"), made().keys()
    give(words(then["grown"], version), {})
    assert made().keys() == there and before.items() <= files("runs").items()
    assert_same_store(version, kind, then["made_grown"], expected)
    assert not verify(then["store"], full=True)["damaged"]
    assert describe(f"{then['store']}/plans/{then['made']['plan']}.json") == then["made"], "its first plan is readable"


@pytest.mark.parametrize("tree", ["unfinished", "finished"])
@pytest.mark.parametrize(("version", "kind"), changed("stores"))
def test_a_changed_target_is_a_new_store_and_the_earlier_one_stays(version, kind, tree, place):
    then = place(version, tree)["stores"][kind]
    before, there = files("runs"), made().keys()
    give(words(then["command"], version), {})
    (new,) = (path for path in made().keys() - there if path.startswith("runs/stores/"))
    assert before.items() <= files("runs").items() and files(then["store"]).keys() <= before.keys()
    assert describe(Path(new))["target"] != then["made"]["target"]
    same_text = [
        {name: unit["text"] for name, unit in units.items()}
        for units in (describe(Path(new))["units"], then["made"]["units"])
    ]
    assert describe(Path(new))["plan"] == then["made"]["plan"] and same_text[0] == same_text[1], "they pair"


def assert_same_store(version, kind, then, expected):
    """The store has the plan, the units and the text that the version gave it; ids, and rows on its machine, bit for
    bit."""
    now = describe(Path(expected["stores"][kind]["store"]))
    if kind != "ids" and (CHANGED[version]["solver"] or not is_same_machine(expected)):
        now, then = without_rows(now), without_rows(then)
    assert now == then and list(now["units"]) == list(then["units"])


def without_rows(described):
    units = {name: unit | {"shard": None} for name, unit in described["units"].items()}
    return described | {"units": units}


def assert_rows_near(version, store, other):
    """Of another solver both are as far from the exact rows as a tolerance of 1e-3 allows, 0.0067 on average."""
    within, average = (0.9, 0.02) if CHANGED[version]["solver"] else (WITHIN, TV_ON_AVERAGE)
    for split in ("train", "held_out"):
        (dense_Nk, tail_N), (other_Nk, other_tail_N) = rows(store.split(split)), rows(other.split(split))
        apart_N = 0.5 * np.abs(dense_Nk - other_Nk).sum(1)
        assert np.quantile(apart_N, within) < TV_OF_A_TOKEN and apart_N.mean() < average
        assert np.quantile(np.abs(tail_N - other_tail_N), within) < TV_OF_A_TOKEN


def everything(windows):
    """All windows of a split, and the places of their tokens."""
    batch = windows.read(np.arange(len(windows)))
    return batch, np.nonzero(batch.documents >= 0)


def rows(windows):
    """All stored rows of a split: dense (N, k), and tail (N,)."""
    batch, (window_N, position_N) = everything(windows)
    found = windows.targets(batch, window_N, position_N)
    dense_Nk = np.zeros((len(window_N), windows.store.k), np.float32)
    dense_Nk[np.repeat(np.arange(len(window_N)), np.diff(found.indptr)), found.indices] = found.weights
    return dense_Nk, found.tail


def in_runs(path):
    return Path(path).relative_to("runs")


# -- dictionaries --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_a_dictionary_whose_learning_was_killed_is_learned_otherwise_and_its_checkpoint_stays(version, place):
    assert CHANGED[version]["learning"]
    then, before = place(version, "learning")["learning"], files("runs")
    code, said = say(words(then["command"], version), {})
    assert code == 0 and "going on after" not in said
    (learned,) = Path("runs/dictionaries").glob("teacher-*")
    assert learned.name.rpartition("-")[0] == Path(then["dictionary"]).name.rpartition("-")[0]
    assert learned.name != Path(then["dictionary"]).name and before.items() <= files("runs").items()
    history = json.loads((learned / "dictionary.json").read_text())["history"]
    assert [entry["vectors"] for entry in history] == [entry["vectors"] for entry in then["history"]]
    assert history[-1]["objective"] == pytest.approx(then["history"][-1]["objective"], rel=0.05)


# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "name"), each("runs"))
def test_a_killed_run_continues_from_its_checkpoint_to_the_same_end(version, name, place):
    expected = place(version, "finished")
    then, runs = expected["runs"][name], make_artefacts.all_runs()
    others = files(*(runs - {then["run"]}), "runs/stores", "runs/dictionaries")
    flags = CHANGED[version]["runs"].get(name, [])
    give([*shlex.split(then["command"]), *flags], expected["places"])
    assert make_artefacts.all_runs() == runs, "no other run"
    assert files(*(runs - {then["run"]}), "runs/stores", "runs/dictionaries") == others
    log = [json.loads(line) for line in Path(then["run"], "log.jsonl").read_text().splitlines()]
    starts = [line for line in log if line.get("event") == "start"]
    assert [start["step"] for start in starts] == [0, 5]
    now = make_artefacts.outcome(then["run"])
    assert (now["steps"], now["batches"]) == (then["steps"], then["batches"]), "order and masks, bit for bit"
    assert now["losses"][:5] == then["losses"][:5], "bit for bit: logged then"
    assert now["losses"][5:] == pytest.approx(then["losses"][5:], **LOSS)
    for figure in ("parameters", "tokens"):
        assert now["figures"][figure] == then["figures"][figure]
    for figure in ("held_out", "baseline"):
        later = ("accuracy", "loss_by_position", "kl_by_position")  # the latter two are of after 1837c65
        now_it, then_it = (
            {key: value for key, value in outcome["figures"][figure].items() if key not in later}
            for outcome in (now, then)
        )
        assert now_it == pytest.approx(then_it, **LOSS)  # accuracy may jump by a token where two scores are near
    if is_same_machine(expected):
        now["figures"]["baseline"] = {
            name: value for name, value in now["figures"]["baseline"].items() if not name.endswith("_by_position")
        }
        assert now.items() <= then.items()
        assert starts[0]["initial_encoder"] == starts[1]["initial_encoder"], "the same seed, the same weights"


@pytest.mark.parametrize(("version", "name"), changed("runs"))
def test_a_killed_run_that_would_train_otherwise_now_is_not_passed_over_in_silence(version, name, place):
    expected = place(version, "finished")
    then = expected["runs"][name]
    before, flags = files(then["run"]), shlex.join(CHANGED[version]["runs"][name])
    command = shlex.split(then["command"])
    _, said = say(command, expected["places"])
    assert flags in said and files(then["run"]) == before
    code, said = say([*command, "--output", then["run"]], expected["places"])
    assert code == 2 and "holds another run" in said and flags in said and files(then["run"]) == before


@pytest.mark.parametrize("version", VERSIONS)
def test_a_finished_run_is_found(version, place):
    expected = place(version, "finished")
    then, before = expected["finished"], files("runs")
    code, said = say(shlex.split(then["command"]), expected["places"])
    assert code == 0 and then["run"] in said and files("runs") == before


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "number"), each("names"))
def test_equal_settings_have_the_names_and_fingerprints_that_they_had(version, number, place):
    expected = place(version, "finished")
    case = expected["names"][number]
    made_now = give_and_name(words(case["command"], version), expected["places"])
    if CHANGED[version]["learning"] and case["command"].startswith("learn-dictionary"):
        assert made_now.keys().isdisjoint(case["made"])
        stems = ({path.rpartition("-")[0] for path in names} for names in (made_now, case["made"]))
        assert next(stems) == next(stems) != set()
        return
    assert made_now == case["made"] != {}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_demonstrations_student_has_the_name_that_it_had(version, place):
    """The command, on a store beside which the version's bare `encode-lsp --layer 10` has left its settings.

    The store is a tiny one: its own fingerprints are in the golden name, the bundled teacher's are not. The
    demonstration has trained another student since 2026-11-23, and has another text since 2026-11-24, so the earlier
    student is asked for by the recipe and its settings.
    """
    expected = place(version, "finished")
    then, store = expected["demonstration"], Path(expected["places"]["lsp"])
    for path in [*store.parent.iterdir()]:
        if path != store:
            shutil.rmtree(path)
    shutil.rmtree("runs/students")
    (plan,) = (store / "plans").glob("*.yaml")
    plan.write_text(json.dumps(then["kept"]))
    command = [*shlex.split(then["train"]), "--recipe", "quickstart"]
    command += ["--encoder", "bert-2x128", "--optimizer", "adamw", "--lr", "1e-3"]
    assert give_and_name(command, {}) == then["made"]
    give(command, {}, before_training())
    assert make_artefacts.all_runs() == then["made"].keys() | expected_probes(expected)


def expected_probes(expected):
    return {run["run"] for run in expected["runs"].values() if run["run"].startswith("runs/probes/")}


# -- evaluations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_records_are_read_and_compared(version, place):
    place(version, "finished")
    records = [json.loads(path.read_text()) for path in sorted(Path("runs").glob("**/evaluations/**/*.json"))]
    assert {record["suite"] for record in records} == {"finetune", "blimp"}
    code, said = say(["compare", "runs/smoke/evaluations", "runs/evaluations", "--json"], {})
    assert code == 0
    compared = json.loads(said[said.index("{") : said.rindex("}") + 1])
    assert compared["records"] == len(records)
    assert {model["model"] for model in compared["models"]} == {record["model"] for record in records}


@pytest.mark.parametrize("version", VERSIONS)
def test_records_of_a_fine_tuning_stay_and_are_not_mixed(version, place):
    expected = place(version, "finished")
    before, flags, command = files("runs"), CHANGED[version]["finetune"], shlex.split(expected["finetune"])
    if flags:
        code, said = say(command, expected["places"])
        assert code == 2 and "was made with other settings" in said and flags[0].removeprefix("--") in said
        assert files("runs") == before
    code, said = say([*command, *flags], expected["places"])
    assert code == 0, said
    after = files("runs")
    assert after.keys() == before.keys()
    for path in before:  # a record may have been told more of itself, in a later format, but not measured again
        if "/finetune/" in path:
            now, then = json.loads(after[path]), json.loads(before[path])
            assert [now[name] for name in MEASURED] == [then[name] for name in MEASURED]
        else:
            assert after[path] == before[path]
