"""Settings follow from the material, never from the demonstration; one check for flags, YAML and Python."""

import io
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from preloaded import run_command
from tiny_store import write_store

import mlsm
from mlsm import __main__ as cli
from mlsm.api import _configure
from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.commands.learn_dictionary import show as dictionaries
from mlsm.commands.train_student import show as training
from mlsm.common.errors import RunError
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.recipes.reading import read_recipe, recipe_of_store, recipe_to_keep
from mlsm.terminal.encoding import encoding
from mlsm.terminal.progress import Progress
from pipeline.config import EncodeConfig, EncodeIdsConfig, LearnConfig
from shards.config import ShowConfig
from shards.reader import Store
from student.config import ProbeConfig, StudentConfig
from student.resolve import batch_for, rate_for_width, resolve, without_rivals
from student.runs.directory import Run
from student.task import student_task


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """A store of one's own text: 150 windows for training, no recipe."""
    return write_store(tmp_path_factory.mktemp("own") / "runs" / "stores" / "lsp-own", k=24)


def keep_recipe(store, recipe):
    """Let the store say that this recipe made it."""
    path = store.files.plans / f"{store.plan_id}.yaml"
    path.write_text(json.dumps({"encode-lsp": {"layer": [3]}, "recipe": recipe}))
    return Store.open(store.path)


def printed(capsys, *argv):
    """What --print-config shows of a command, its settings by name."""
    assert cli.run([*map(str, argv), "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)[argv[0]]


def test_a_secret_with_a_space_is_not_printed(capsys):
    shown = printed(capsys, "encode-lsp", "--hidden", "http://to ken@host/hidden-states-of-a-store")
    assert shown["hidden"] == "http://host/hidden-states-of-a-store"


# -- by size -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "length", "batch"),
    [(25_800_000, 128, 1024), (2_560_000, 512, 1024), (2_559_999, 128, 512), (4_177, 512, 64)]
    + [(160_000, 8192, 64), (159_999, 8192, 32), (65, 8192, 8), (65, 1_000_000, 8), (5_000_000, 513, 512)],
)
def test_the_batch_is_the_largest_at_which_four_epochs_are_ten_thousand_steps(windows, length, batch):
    assert batch_for(windows, 4, length) == batch


@pytest.mark.parametrize(("length", "windows", "batch"), [(None, 256, 64), (1024, 128, 32), (8192, 16, 8)])
def test_long_windows_are_fewer_in_evaluations_and_batches(length, windows, batch, own, monkeypatch):
    if length is not None:
        monkeypatch.setattr(own, "max_length", length)
    config, _ = resolve(StudentConfig(store=own.path, encoder="bert-1x32", device="cpu"), own)
    assert (config.eval_windows, config.batch_windows) == (windows, batch)
    given, _ = resolve(replace(StudentConfig(store=own.path, device="cpu"), eval_windows=7), own)
    assert given.eval_windows == 7


def test_the_rate_falls_with_the_width():
    assert [rate_for_width(width) for width in (32, 128, 256, 768, 1024)] == [1e-3, 1e-3, 1e-3, 1e-4, 1e-4]
    between = [rate_for_width(width) for width in (256, 384, 512, 640, 768)]
    assert between == sorted(between, reverse=True) and between[2] == pytest.approx(2.3e-4)
    assert [rate_for_width(width, "muon") for width in (128, 768)] == [4e-3, 4e-4]


def test_own_text_is_not_trained_as_the_demonstration(own, capsys):
    shown = printed(capsys, "train-student", "--store", own.path, "--encoder", "deberta-base")
    assert (shown["max_steps"], shown["batch_windows"], shown["lr"], shown["dropout"]) == (2000, 64, 1e-4, 0.1)
    assert shown["warmup"] == 0.02 and shown["micro_batch"] <= shown["batch_windows"] and shown["save_every"] == 100
    small = printed(capsys, "train-student", "--store", own.path, "--encoder", "bert-2x128", "--epochs", 20)
    assert (small["max_steps"], small["lr"], small["epochs"]) == (47, 1e-3, None)  # 20 x 150 / 64
    probe = resolve(ProbeConfig(store=own.path), own).config
    assert (probe.max_steps, probe.batch_windows, probe.lr) == (1000, 64, 0.1)


def test_python_and_flags_mean_the_same(own, capsys):
    shown = printed(capsys, "train-student", "--store", own.path, "--encoder", "bert-2x128")
    config, origins = resolve(StudentConfig(store=own.path, encoder="bert-2x128"), own)
    assert {name: value for name, value in shown.items() if name != "dropout"} == {
        name: value for name, value in config.to_json().items() if name != "dropout"
    }
    assert origins["max_steps"] == "store: 4 epochs would be 10 steps, fewer than 2,000"
    assert origins["lr"] == "default for adamw and width 128"
    assert origins["encoder"] == "given" and "objective" not in origins
    assert origins["batch_windows"] == "store: the smallest, as 4 epochs are 10 steps even so"


@pytest.mark.parametrize(
    "name", ["kappa", "mask_weights", "mask_rate_end", "max_steps", "epochs", "lr", "batch_windows"]
)
def test_none_leaves_a_setting_to_the_named_recipe(name, own, capsys):
    command, recipe = load("train-student"), "small-encoder"
    assert _configure(command, {name: None}, recipe) == _configure(command, {}, recipe)
    flags = ["train-student", "--recipe", recipe, "--store", own.path]
    assert printed(capsys, *flags, f"--{name.replace('_', '-')}", "None") == printed(capsys, *flags)


def test_epochs_and_steps_are_one_thing(own):
    with pytest.raises(ValueError, match="--epochs 2 and --max-steps 9 both set the length of the run"):
        StudentConfig(epochs=2, max_steps=9)
    with pytest.raises(ValueError, match="--epochs 2 and --max-steps 9"):
        parse(load("train-student"), ["--store", str(own.path), "--epochs", "2", "--max-steps", "9"])


def test_settings_that_follow_and_the_same_settings_given_are_one_run(own, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    left_open = resolve(StudentConfig(store=own.path, encoder="bert-2x128"), own).config
    given = StudentConfig(store=own.path, encoder="bert-2x128", max_steps=2000, batch_windows=64, lr=1e-3)
    assert left_open.identity() == resolve(given, own).config.identity()
    directories = set()
    for dropout in (None, 0.1, 0.2):
        config = replace(left_open, dropout=dropout)
        directories.add(Run(config, own, student_task(config, own).architecture).directory)
    assert len(directories) == 2  # 0.1 is BERT's own


# -- by recipe ---------------------------------------------------------------------------------------------


def test_a_store_of_a_recipe_is_trained_by_that_recipe(tmp_path, capsys):
    store = keep_recipe(write_store(tmp_path / "store", k=24), "paper")
    shown = printed(capsys, "train-student", "--store", store.path)
    assert (shown["encoder"], shown["max_steps"], shown["batch_windows"]) == ("deberta-base", 100_000, 1024)
    assert printed(capsys, "train-student", "--store", store.path, "--lr", "3e-4")["lr"] == 3e-4
    assert printed(capsys, "train-student", "--store", store.path, "--epochs", 64)["max_steps"] == 10
    assert printed(capsys, "train-student", "--store", store.path, "--recipe", "quickstart")["max_steps"] == 500
    config, origins = resolve(StudentConfig(store=store.path, encoder="deberta-base"), store)
    assert config.max_steps == 100_000 and origins["max_steps"] == "recipe paper, that of the store"


def test_the_demonstrations_store_keeps_the_demonstrations_settings(tmp_path, capsys, monkeypatch):
    store = keep_recipe(write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24), "quickstart")
    monkeypatch.chdir(tmp_path)
    bare, named = printed(capsys, "train-student"), printed(capsys, "train-student", "--store", store.path)
    assert bare["max_steps"] == named["max_steps"] == 500 and bare["dropout"] == 0.0 and bare["lr"] == 8e-3
    assert bare["encoder"] == "modernbert-2x128" and bare["store"].endswith("runs/stores/lsp-tiny")


@pytest.mark.parametrize(
    ("teacher", "corpus", "recipe"),
    [
        ("bundled", "bundled", "quickstart"),
        ("bundled", "a.txt", None),
        ("bundled", "docstrings", None),  # the text of earlier versions
        ("google-bert/bert-base-cased", "bundled", None),
    ],
)
def test_the_demonstrations_material_counts_as_its_own_whoever_encoded_it(teacher, corpus, recipe):
    made = {"encode-lsp": {"teacher": teacher, "corpus": [corpus], "layer": [4]}, "recipe": None}  # as of a study
    store = SimpleNamespace(command=made, settings={"teacher_name": teacher})
    assert recipe_of_store(store, "train-student") == recipe


@pytest.mark.parametrize("recipe", [5, True, ["paper"], {"paper": 1}])
def test_a_recipe_that_is_no_name_is_none(recipe, tmp_path):
    store = keep_recipe(write_store(tmp_path / "store", k=24), recipe)
    assert resolve(StudentConfig(store=store.path), store).config.max_steps == 2000


def test_a_recipe_of_ones_own_is_kept_as_a_path_and_only_taken_where_it_is_named(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text("encode-lsp: {}\ntrain-student: {max-steps: 7}\n")
    settings = parse(load("encode-lsp"), [], str(mine)).settings
    assert settings.recipe == recipe_to_keep(str(mine)) == str(mine)
    store = keep_recipe(write_store(tmp_path / "store", k=24), str(mine))
    assert resolve(StudentConfig(store=store.path), store).config.max_steps == 2000
    assert parse(load("train-student"), ["--store", str(store.path)]).settings.max_steps != 7
    named = parse(load("train-student"), ["--store", str(store.path)], str(mine))
    assert named.settings.max_steps == 7


def test_what_a_named_recipe_leaves_open_is_printed_too(own, tmp_path, capsys):
    mine = tmp_path / "mine.yaml"
    mine.write_text("train-student: {encoder: bert-2x128, epochs: 20}\n")
    shown = printed(capsys, "train-student", "--recipe", mine, "--store", own.path)
    given = printed(capsys, "train-student", "--encoder", "bert-2x128", "--epochs", 20, "--store", own.path)
    assert shown == given and shown["max_steps"] == 47


@pytest.mark.parametrize("names_the_store", [True, False])
def test_the_stores_recipe_does_not_fill_in_what_a_named_recipe_leaves_open(names_the_store, tmp_path, monkeypatch):
    """Neither on the command line nor in Python, also if the store is the newest one."""
    store = keep_recipe(write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24), "paper")
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("train-student: {encoder: bert-2x128, epochs: 20}\n")
    seen = []

    def stop(*arguments):
        seen.append(resolve(*arguments))
        raise RunError("seen enough")

    monkeypatch.setattr("student.opening.resolve", stop)
    named = {"store": str(store.path)} if names_the_store else {}
    with pytest.raises(RunError, match="seen enough"):
        cli.run(["train-student", "--recipe", "mine.yaml", *(f"--{name}={value}" for name, value in named.items())])
    with pytest.raises(RunError, match="seen enough"):
        mlsm.train_student(recipe="mine.yaml", **named)
    by_flags, by_python = seen
    assert by_flags.config == by_python.config and by_python.config.batch_windows == 64, "not the paper's 1,024"
    assert (
        by_flags.origins["max_steps"]
        == by_python.origins["max_steps"]
        == "20 epochs, recipe mine.yaml; few: consider more --epochs"
    )


def test_trained_weights_are_never_trained_by_the_demonstration(tmp_path):
    store = keep_recipe(write_store(tmp_path / "store", k=24), "quickstart")
    config, _ = resolve(StudentConfig(store=store.path, continue_from="somewhere"), store)
    assert (config.max_steps, config.lr) == (2000, 1e-4)


@pytest.mark.parametrize("named", [None, "small-encoder"])
def test_a_recipes_rate_is_not_for_weights_that_were_trained_before(named, tmp_path):
    """small-encoder has 0.008 for Muon and new weights: eighty times what trained ones get."""
    store = keep_recipe(write_store(tmp_path / "store", k=24), "small-encoder")
    parsed = parse(load("train-student"), ["--store", str(store.path), "--continue-from", "somewhere"], named)
    python = StudentConfig(store=store.path, continue_from="somewhere", positions="all")
    for config in (resolve(parsed.settings, store).config, resolve(python, store).config):
        assert (config.lr, config.optimizer, config.dropout) == (1e-4, "adamw", None)
        assert (config.positions, config.batch_windows) == ("all", 16), "the rest is the recipe's"
    new = parse(load("train-student"), ["--store", str(store.path)], named).settings
    assert (new.lr, new.optimizer) == (0.008, "muon")


STUDIES_OF_THE_PAPER = ("paper-layers", "paper-k", "paper-kappa", "paper-objectives")


@pytest.mark.parametrize("recipe", ["paper", "scaled-up", *STUDIES_OF_THE_PAPER])
def test_the_recipes_have_the_papers_settings(recipe):
    """Sections 4.1 and 4.3.2 of the paper; lambda, weight decay, clipping and micro-batches are not in it."""
    _, sections = read_recipe(recipe)
    encode, train = (
        {key.replace("-", "_"): value for key, value in sections[name].items()}
        for name in ("encode-lsp", "train-student")
    )
    large = recipe == "scaled-up"
    assert encode["max_length"] == (256 if large else 128) and encode["dictionary_tokens"] == 2_000_000
    assert encode["teacher"] == "google-bert/bert-base-cased" and encode["lam"] == 0.05
    assert (encode["layer"] in (10, [10])) == (recipe != "paper-layers")
    assert (encode["k"] == 3072) == (recipe != "paper-k")
    assert encode.get("top_n") == (None if large else "all")
    assert train["encoder"] == ("bert-12x768" if large else "deberta-base")
    assert train["max_steps"] == (200_000 if large else 100_000)
    assert train["batch_windows"] == (4096 if large else 1024)
    assert (train["lr"], train["warmup"], train["mask_rate"]) == (1e-4, 0.02, 0.15)
    if tune := sections.get("finetune"):
        assert (tune["lr"], tune["epochs"], tune["batch"], tune["seeds"], tune["tasks"]) == (2e-5, 3, 32, 5, "all")
    if recipe == "paper-layers":
        assert encode["layer"] == [2, 4, 6, 8, 9, 10, 11, 12]
    if recipe == "paper-k":
        assert encode["k"] == [768, 1536, 3072, 6144, 12288]


def test_the_checkpoints_of_the_recipes_are_those_of_the_figures():
    def shares(recipe):
        return parse(load("train-student"), [], recipe)[0].checkpoints

    assert shares("paper") == (0.1, 0.25, 0.5, 1.0) and shares("scaled-up") == (0.1, 0.2, 0.25, 0.5, 1.0)


# -- own text needs a teacher ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("encode-lsp", "teacher"),
        ("encode-logits", "teacher"),
        ("learn-dictionary", "teacher"),
        ("choose-layer", "teacher"),
        ("encode-ids", "tokenizer"),
    ],
)
def test_own_text_without_a_teacher_is_refused(verb, name, tmp_path):
    choices = f"a.txt is your own text, but no --{name} is given. Pass a Hub id.*a directory or, .*, --{name} bundled"
    with pytest.raises(ValueError, match=choices):
        parse(load(verb), ["--corpus", "a.txt"])
    for flags in (["--corpus", "a.txt", f"--{name}", "bundled"], [f"--{name}", "some/where"]):
        settings = parse(load(verb), flags).settings
        assert getattr(settings, name) == flags[-1] and getattr(settings, "recipe", None) is None
    (tmp_path / "r.yaml").write_text(f"{verb}: {{corpus: [b.txt]}}\n")
    with pytest.raises(ValueError, match="b.txt is your own text"):
        parse(load(verb), [], str(tmp_path / "r.yaml"))
    assert getattr(parse(load(verb), [f"--{name}", "x"], str(tmp_path / "r.yaml")).settings, name) == "x"


def test_own_text_without_a_teacher_is_refused_in_python():
    with pytest.raises(ValueError, match="no --teacher is given"):
        EncodeConfig(corpus=("a.txt",))
    with pytest.raises(ValueError, match="--corpus http://host/a.txt is your own"):
        EncodeConfig(corpus=("http://me:hunter2@host/a.txt",))
    with pytest.raises(ValueError, match="no --tokenizer is given"):
        EncodeIdsConfig(corpus=("a.txt",))
    assert EncodeConfig().teacher == EncodeIdsConfig().tokenizer == "bundled"
    assert LearnConfig(hidden="a.npy", corpus="a.txt").hidden == "a.npy"


# -- one check ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EncodeConfig(packing="pair"), "--packing takes one of packed, pairs, found 'pair'. Did you mean"),
        (lambda: EncodeConfig(dtype="fp16"), "float16, found 'fp16'. Did you mean float16?"),
        (lambda: EncodeConfig(max_tokens="1000"), "--max-tokens takes a whole number or null, found '1000', a text"),
        (lambda: EncodeConfig(layer=(2, 2.5)), "--layer takes a list, each a whole number, found"),
        (lambda: EncodeConfig(corpus=3), "--corpus takes a list, each a text"),
        (lambda: StudentConfig(lr="1e-3"), "--lr takes a number or null, found '1e-3', a text. Omit"),
        (lambda: StudentConfig(max_steps=2.5), "--max-steps takes a whole number or null, found 2.5"),
        (lambda: StudentConfig(documents_apart=1), "--documents-apart takes a switch, true or false, found 1"),
        (lambda: StudentConfig(objective="mlsmm"), "found 'mlsmm'. Did you mean mlsm?"),
        (lambda: StudentConfig(mask_rate=2), "--mask-rate must be a share between 0 and 1, found 2"),
        (lambda: StudentConfig(seed=True), "--seed takes a whole number, found True"),
        (
            lambda: ProbeConfig(probe_input="softmx"),
            "--probe-input takes one of softmax, logits, hidden, found 'softmx'.",
        ),
        (lambda: FinetuneConfig(tasks=("colla",)), "Did you mean cola?"),
        (lambda: ShowConfig(store=3), "STORE takes a text"),
        (lambda: ShowConfig(top_n=0), "--top-n must be at least 1, found 0"),
    ],
)
def test_python_is_checked_as_flags_are(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_python_may_give_one_for_a_list_and_text_for_a_path():
    config = EncodeConfig(corpus="wiki.txt", teacher="bundled", layer=7, k=[5, 6], output="there")
    assert (config.corpus, config.layer, config.k, config.output) == (("wiki.txt",), (7,), (5, 6), Path("there"))
    student = StudentConfig(
        store=Path("store"), checkpoints=0.5, track="wandb", max_steps=1e3, objective="mtl", kappa=2
    )
    assert (student.store, student.checkpoints, student.track) == ("store", (0.5,), ("wandb",))
    assert student.max_steps == 1000 and type(student.max_steps) is int
    assert type(student.kappa) is int  # as given: its JSON names runs of before the check


@pytest.mark.parametrize(
    ("verb", "flag", "meant"),
    [
        ("train-student", "--learning-rate", "--lr"),
        ("train-student", "--batch-size", "--batch-windows"),
        ("train-student", "--num-train-epochs", "--epochs"),
        ("encode-lsp", "--max-seq-length", "--max-length"),
        ("finetune", "--batch-size", "--batch"),
        ("train-student", "--mask-rte", "--mask-rate"),
    ],
)
def test_a_flag_of_another_program_is_understood(verb, flag, meant):
    with pytest.raises(ValueError, match=f"{flag}.* Did you mean {meant}\\?"):
        parse(load(verb), [flag, "3"])


# -- settings that a command does not have, JSON, progress -------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "flag", "value"),
    [
        *(("train-tokenizer", flag, "9") for flag in ("--max-tokens", "--max-length", "--unit-tokens", "--seed")),
        ("train-tokenizer", "--packing", "pairs"),
        ("train-tokenizer", "--held-out-by", "file"),
        ("encode-ids", "--seed", "1"),
        ("encode-logits", "--seed", "1"),
    ],
)
def test_a_command_has_no_flag_that_means_nothing_to_it(verb, flag, value):
    with pytest.raises(ValueError, match=rf"{flag}.*All flags:"):
        parse(load(verb), [flag, value])


def test_a_setting_that_a_store_kept_and_the_command_no_longer_has_is_passed_over(tmp_path):
    (tmp_path / "plans").mkdir()
    kept = {"encode-ids": {"seed": None, "tokenizer": "bundled", "corpus": ["bundled"]}}
    for name in ("plans/0a.yaml", "of-a-user.yaml"):
        (tmp_path / name).write_text(json.dumps(kept))
    settings = parse(load("encode-ids"), [], str(tmp_path / "plans/0a.yaml")).settings
    assert settings.recipe == "quickstart" and settings.tokenizer == "bundled"
    with pytest.raises(ValueError, match="encode-ids has no setting seed"):
        parse(load("encode-ids"), [], str(tmp_path / "of-a-user.yaml"))


def test_encoding_answers_in_json_and_keeps_its_recipe(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("\n\n".join(f"Document {n} has a few words, all short." for n in range(300)))
    (tmp_path / "mine.yaml").write_text("encode-ids: {tokenizer: bundled, max-tokens: 2_000, max-length: 32}\n")
    line = ["encode-ids", "--corpus", "a.txt", "--recipe", str(tmp_path / "mine.yaml"), "--json"]
    assert cli.run(line) == 0
    (report,) = json.loads(capsys.readouterr().out)
    store = Store.open(report["store"])
    assert store.command["recipe"] == str(tmp_path / "mine.yaml") and "encode-ids" in store.command
    assert store.command["encode-ids"]["max_tokens"] == 2_000
    assert cli.run(line[:3] + ["--tokenizer", "bundled", "--max-tokens", "2000", "--max-length", "32"]) == 0
    assert Store.open(report["store"]).command["recipe"] == store.command["recipe"], "found by flags, it keeps its own"
    assert "train-student --store runs/stores/ids-L32" in capsys.readouterr().out


def test_progress_lines_read_as_people_write():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.SECONDS_BETWEEN_LINES = 0
        progress("scan", 0, 4_000, unit="bytes", documents=0)
        progress._began -= 100
        progress("scan", 1_000, 4_000, unit="bytes", documents=88_880, nnz=23.876543, loss=12345.6)
    line = stream.getvalue().splitlines()[-1]
    left = "(4 min 59 s|5 min 00 s) left"
    figures = "documents 88,880, nnz 23.88, loss 12,346"
    assert re.fullmatch(f"scan: 1,000 of 4,000 bytes, {left}, 10 bytes/s, {figures}", line), line


# -- next ------------------------------------------------------------------------------------------------


def next_lines(text):
    """The command lines that a summary advises, without the program."""
    lines = text.partition("\nNext")[2].partition("\n\n")[0].splitlines()[1:]
    return [shlex.split(line)[2:] for line in lines if line.startswith("  python cli.py ")]  # as sys.argv has it


def report_of(store):
    return store.report() | {"store": str(store.path), "finished_before": True, "new_units": 0, "quarantined": 0}


def test_every_next_line_is_a_command_that_does_the_right_thing(own, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["cli.py"])
    ids = write_store(tmp_path / "a store" / "ids", k=0)  # a name that needs quotes
    logits = write_store(tmp_path / "logits", k=72, kind="logits")
    reported = [[report_of(own)], [report_of(ids)], [report_of(logits)], [report_of(own), report_of(own)]]
    lines = [line for reports in reported for line in next_lines(encoding(reports, SimpleNamespace()))]
    assert [line[line.index("--store") + 1] for line in lines] == [
        str(store.path) for store in (own, ids, logits, own, own)
    ]
    for line in lines:
        shown = printed(capsys, *line)
        assert shown["max_steps"] == 2000 and shown["lr"] == 1e-4  # bert-base
        StudentConfig(**shown)

    fake = {"finished_before": True, "store": str(own.path), "plan": own.plan_id, "run": "runs/students/mine",
            "encoder": "bert-2x128", "objective": "mlsm", "parameters": 1, "steps": 1, "tokens": 1, "held_out": {},
            "tokens_per_second": 1, "seconds_to_first_step": 1, "baseline": {}, "improvement": None,
            "export": "runs/students/mine/export"}  # fmt: skip
    (probe,) = next_lines(training(fake, StudentConfig()))
    assert probe == ["train-probe", "--student", "runs/students/mine", "--store", str(own.path)]


@pytest.mark.parametrize("flags", [[], ["--layer", "3", "--corpus", "my text.txt", "--teacher", "some/where"]])
def test_the_next_line_of_a_dictionary_encodes_what_it_was_learned_from(flags, monkeypatch):
    monkeypatch.setattr("sys.argv", ["cli.py"])
    settings = parse(load("learn-dictionary"), [*flags, "--min-characters", "5"]).settings
    report = {
        "dictionary": "runs/dictionaries/d-1",
        "layer": settings.layer[0],
        "k": 64,
        "width": 8,
        "dead_atoms": 0,
        "objective": 0.1,
        "explained_variance": 0.5,
        "nnz": 3.0,
        "vectors": 9,
        "epoch": 1.0,
        "stopped": "so",
        "finished_before": False,
    }
    (line,) = next_lines(dictionaries([report], settings))
    encode = parse(
        load("encode-lsp"),
        line[1:] if "--recipe" not in line else line[3:],
        line[2] if "--recipe" in line else None,
    ).settings
    for name in ("corpus", "teacher", "layer", "min_characters", "max_tokens", "max_length", "unit_tokens"):
        assert getattr(encode, name) == getattr(settings, name)
    assert encode.dictionary == Path("runs/dictionaries/d-1") and encode.recipe == settings.recipe


@pytest.mark.parametrize(
    ("recipe", "encoder", "optimizer", "steps", "rate"),
    [
        ("quickstart", "modernbert-2x128", "muon", 500, 8e-3),
        ("quickstart", "modernbert-2x128", "adamw", 500, 1e-3),
        ("quickstart", "bert-12x768", "muon", 500, 4e-4),
        ("paper", "deberta-base", "muon", 100_000, 4e-4),  # the recipe names no optimiser: it means AdamW
    ],
)
def test_a_recipes_rate_goes_with_its_encoder_and_optimiser_from_python_too(
    recipe, encoder, optimizer, steps, rate, tmp_path
):
    """The demonstration's rate is for Muon and its own 2 x 128 encoder."""
    store = keep_recipe(write_store(tmp_path / "store", k=24), recipe)
    found = resolve(StudentConfig(store=store.path, encoder=encoder, optimizer=optimizer), store).config
    assert (found.max_steps, found.lr) == (steps, rate)


def test_a_recipes_rate_goes_with_its_encoder_and_optimiser():
    values = {"encoder": "bert-2x128", "optimizer": "muon", "lr": 8e-3, "max_steps": 500}
    assert "lr" not in without_rivals(values, {"optimizer": "adamw"})
    assert "lr" not in without_rivals(values, {"encoder": "bert-6x256"})
    assert without_rivals(values, {"optimizer": "muon"}) == without_rivals(values, {}) == values
    assert "lr" not in without_rivals({"lr": 1e-4}, {"optimizer": "muon"})


# -- recipes and settings that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"encode-ids: " + b"[" * 20_000, "nested too deep"),
        (b"encode-ids:\n  corpus: caf\xe9.txt\n", "not UTF-8 .*at byte 25.*iconv"),
        (b"encode-ids:\n  corpus: 2026-13-45\n", "not readable as YAML"),
        (b"encode-ids:\n  corpus: &a [x]\n  y: &b [*a, *a]\n  z: [*b, *b]\n", r"\*a in line 3 is an alias within an"),
        (b"encode-ids: &a\n  corpus: *a\n", r"\*a in line 2 is an alias within an anchored value. Write out"),
        (b"encode-ids:\n  corpus: a\n  corpus: b\n", "corpus is given twice, again in line 3"),
        (b"encode-ids:\n  max-tokens: 2\n  max_tokens: 3\n", "max-tokens is given twice, also as max_tokens"),
        (b'encode-ids:\n  corpus: "a\\0b"\n', "encode-ids: --corpus must not contain a NUL character, found 'a.x00b'"),
    ],
)
def test_a_recipe_that_cannot_be_read_is_one_line_that_names_it(content, message, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    run = run_command(["encode-ids", "--recipe", path, "--output", tmp_path])
    assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr
    assert re.search(f"recipe {re.escape(str(path))}.*{message}", run.stderr), run.stderr


@pytest.mark.parametrize(
    "given", [{"corpus": "a\0b"}, {"corpus": ["a", "b\0"]}, {"tokenizer": "\0"}, {"output": Path("a\0b")}]
)
def test_a_nul_character_in_a_setting_names_the_setting(given):
    with pytest.raises(ValueError, match=f"--{next(iter(given))} must not contain a NUL character, found"):
        mlsm.encode_ids(**given)
