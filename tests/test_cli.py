"""The command line as a person uses it: real processes, exit codes, one clear line for an error."""

import itertools
import json
import os
import re
import resource
import shlex
import textwrap
from pathlib import Path

import numpy as np
import pytest
import yaml
from preloaded import Preloaded, Python, run_python

from mlsm.cli.settings import parse
from mlsm.commands import load
from shards.verify import verify

ROOT = Path(__file__).resolve().parent.parent


def mlsm(*arguments, cwd=ROOT, check=None, process=Preloaded, **environment):
    """Run `python cli.py …`; `check` is the expected exit code."""
    run = run_python([ROOT / "cli.py", *arguments], process, cwd=cwd, env=os.environ | environment)
    if check is not None:
        assert run.returncode == check, run.stdout + run.stderr
    return run


def error_line(run):
    """The last line of standard error; it must be the only one that speaks of the error."""
    lines = [line for line in run.stderr.splitlines() if line.startswith("mlsm: error:")]
    assert len(lines) == 1 and "Traceback" not in run.stderr, run.stderr
    return lines[0]


def test_help_answers_in_under_a_second():
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = mlsm("--help", check=0, process=Python)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 1.0  # of a processor: others may be busy
    assert all(verb in run.stdout for verb in ("encode-lsp", "train-student", "--recipe", "resumes"))


VERBS = (
    "encode-lsp",
    "train-student",
    "train-probe",
    "learn-dictionary",
    "encode-ids",
    "encode-logits",
    "train-tokenizer",
    "choose-layer",
)


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_explains_its_flags(verb):
    run = mlsm(verb, "--help", check=0)
    assert (
        "--recipe" in run.stdout and ("--output" in run.stdout or "--run-dir" in run.stdout) and "--json" in run.stdout
    )


TOOLS = (
    "export-student",
    "evaluate-blimp",
    "finetune",
    "compare",
    "show-lsp",
    "derive-shards",
    "export-store",
    "verify-shards",
    "show-shards",
    "clean",
)


@pytest.mark.parametrize("verb", TOOLS)
def test_tools_take_a_path_and_no_recipe(verb):
    run = mlsm(verb, "--help", check=0)
    assert re.search(rf"usage: .* {verb} \[[A-Z]+( \.\.\.)?\] \[FLAGS\]", run.stdout) and "--recipe" not in run.stdout


def test_flags_beat_the_recipe_and_the_recipe_beats_defaults():
    run = mlsm("encode-lsp", "--layer", "2", "4", "--k", "99", "--print-config", check=0)
    settings = yaml.safe_load(run.stdout)["encode-lsp"]
    assert settings["layer"] == [2, 4] and settings["k"] == [99] and settings["max_tokens"] == 2_000_000


def test_own_material_is_not_cut_to_the_demonstration():
    run = mlsm("encode-lsp", "--corpus", "a.txt", "--teacher", "bundled", "--print-config", check=0)
    settings = yaml.safe_load(run.stdout)["encode-lsp"]
    assert settings["max_tokens"] is None and settings["k"] == [3072]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("max-tokens: 1e6", 1_000_000),  # YAML reads a string
        ("layer: 1e1", (10,)),
        ("top-n: all", "all"),
        ("max-tokens: 1.5", "--max-tokens takes a whole number or null, found 1.5"),
        ("max-tokens: some", "--max-tokens takes a whole number or null, found 'some'"),
        ("layer: [2, 2.5]", "--layer takes a list, each a whole number, found [2, 2.5]"),
        ("max-length: null", "--max-length takes a whole number, found None"),
        ("teacher: [bundled]", "--teacher takes a text"),
        ("packing: boxed", "--packing takes one of packed, pairs, found 'boxed'"),
    ],
)
def test_a_recipe_has_the_types_of_the_settings(tmp_path, line, found):
    (tmp_path / "r.yaml").write_text(f"encode-lsp: {{{line}}}\n")
    name = line.partition(":")[0].replace("-", "_")
    try:
        settings = parse(load("encode-lsp"), [], str(tmp_path / "r.yaml")).settings
    except ValueError as error:
        assert found in str(error)
    else:
        assert getattr(settings, name) == found and type(getattr(settings, name)) is type(found)


@pytest.mark.parametrize(("verb", "recipe"), [("encode-lsp", "quickstart"), ("train-tokenizer", None)])
def test_only_a_recipe_that_says_something_is_named(verb, recipe):
    assert parse(load(verb), []).recipe == recipe


@pytest.mark.parametrize("recipe", ["quickstart", "paper", "scaled-up"])
@pytest.mark.parametrize("verb", ["encode-lsp", "encode-logits", "train-student", "train-probe"])
def test_bundled_recipes_resolve(recipe, verb):
    mlsm(verb, "--recipe", recipe, "--print-config", check=0)


@pytest.mark.parametrize(("verb", "flag"), [("encode-lsp", "--k"), ("train-probe", "--max-steps")])
def test_a_printed_configuration_is_a_recipe(tmp_path, verb, flag):
    first = mlsm(verb, flag, "77", "--print-config", check=0).stdout
    (tmp_path / "mine.yaml").write_text(first)
    again = mlsm(verb, "--recipe", tmp_path / "mine.yaml", "--print-config", check=0).stdout
    assert again == first


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["encode"], 2, "no command 'encode'. Did you mean encode-lsp? There are: encode-lsp"),
        (["trian_student"], 2, "no command 'trian_student'. Did you mean train-student?"),
        (["help", "clena"], 2, "Did you mean clean?"),
        (["xyz"], 2, "no command 'xyz'. There are: encode-lsp"),
        (["train-student", "--lr"], 2, "--lr needs a value."),
        (["encode-lsp", "--recipe"], 2, "--recipe needs a value."),
        (["train-probe", "--student", "nosuch"], 2, "there is no nosuch here"),
        (["study", "--recipe", "study-demo", "--only"], 2, "--only needs a value."),
        (["train-student", "store"], 2, "unexpected word 'store'."),
        (["encode-lsp", "--recipe", "nope"], 2, "no recipe 'nope'. There are: paper, paper-k, paper-kappa"),
        (["encode-lsp", "--top-n", "300"], 2, "between 1 and 255"),
        (["encode-logits", "--top-n", "0"], 2, "or be `all`, found 0"),
        (["encode-lsp", "--corpus", "/nowhere/x.txt", "--teacher", "bundled"], 2, "matches no file"),
        (["encode-lsp", "--teacher", "/nowhere/model"], 2, "/nowhere/model"),
        (["encode-lsp", "--teacher", "nobody/no-such-model"], 2, "nobody/no-such-model"),
        (["train-student", "--store", "/nowhere/store"], 2, "is not a store"),
        (["train-student", "--mask-rate", "2"], 2, "between 0 and 1"),
        (["train-student", "--objective", "mlsmm"], 2, "recon, found 'mlsmm'. Did you mean mlsm?"),
        (["train-student", "--mask-rte", "2"], 2, "there is no flag --mask-rte. Did you mean --mask-rate?"),
        (["train-probe"], 2, "no finished student with LSP"),
        (["export-student"], 2, "no run with a checkpoint"),
        (["export-student", "--step", "half"], 2, "found half"),
        (["export-student", "/nowhere/run"], 2, "is not a run with checkpoints"),
    ],
)
def test_mistakes_give_one_clear_line(tmp_path, arguments, code, message):
    run = mlsm(*arguments, cwd=tmp_path, check=code)
    assert message in error_line(run)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.npy", "missing.npy is not a file. Write one with: numpy.save"),
        ("text.npy", "text.npy is not a .npy file"),
        ("objects.npy", "cannot be read as numbers"),
        ("cut.npy", "cannot be read as numbers"),
        ("flat.npy", "must have shape (N, d); found (90,)"),
        ("whole.npy", "must be float16, float32, float64; found int64"),
        ("nan.npy", "nan.npy: vectors: NaN or infinity in row 3, 70; leave them out"),
        ("few.npy", "k = 95 atoms need at least as many training vectors; found 90"),
        ("none.npy", "found 0"),
    ],
)
def test_vectors_that_cannot_be_used(vector_files, name, message):
    run = mlsm("learn-dictionary", "--hidden", name, "--k", "95", cwd=vector_files, check=2)
    assert message in error_line(run)
    assert not list(vector_files.glob("runs/dictionaries/.*"))


@pytest.fixture(scope="module")
def vector_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("vectors")
    hidden = np.random.default_rng(0).normal(size=(100, 8))
    holed = hidden.copy()
    holed[[3, 70], 2] = np.nan
    arrays = {"flat": hidden[:90, 0], "whole": np.ones((90, 8), int), "nan": holed, "few": hidden, "none": hidden[:0]}
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    np.save(directory / "objects.npy", np.array([{}, 1], object), allow_pickle=True)
    (directory / "text.npy").write_text("no numbers")
    (directory / "cut.npy").write_bytes((directory / "few.npy").read_bytes()[:-100])
    return directory


def test_a_dictionary_of_a_file_of_vectors(vector_files):
    command = ["learn-dictionary", "--hidden", "few.npy", "--k", "20", "--lam", "0.1"]
    run = mlsm(*command, cwd=vector_files, check=0)
    for words in ("is finished", "runs/dictionaries/few-k20-", "20 of width 8", "held out", "non-zeros", "stopped"):
        assert words in run.stdout
    assert "encode-lsp --dictionary runs/dictionaries/few-k20-" in run.stdout and "recipe" not in run.stderr
    assert " --lam 0.1 --teacher ..." in run.stdout, "encode-lsp's own penalty is another"
    assert "was finished already" in mlsm(*command, cwd=vector_files, check=0).stdout
    paper = mlsm(*command, "--recipe", "paper", cwd=vector_files, check=0)  # its teacher and corpus are not looked at
    assert "was finished already" in paper.stdout


def test_an_unknown_setting_in_a_recipe_is_named(tmp_path):
    (tmp_path / "r.yaml").write_text("encode-lsp: {kay: 5}\n")
    run = mlsm("encode-lsp", "--recipe", tmp_path / "r.yaml", check=2)
    assert "has no setting kay" in error_line(run)


def test_an_unknown_flag_is_a_usage_error():
    run = mlsm("encode-lsp", "--kay", "5", check=2)
    assert "kay" in run.stderr + run.stdout and "Traceback" not in run.stderr


def test_debug_shows_the_traceback():
    run = mlsm("encode-lsp", "--corpus", "/nowhere/x.txt", "--teacher", "bundled", "--debug")
    assert run.returncode == 2 and "Traceback" in run.stderr and "CorpusError" in run.stderr


def test_help_of_a_command_shows_the_defaults_of_a_recipe():
    assert "(paper: 3072)" in mlsm("help", "encode-lsp", "--recipe", "paper").stdout


def changed(command, *others):
    """The command with other values of some of its flags."""
    command = list(command)
    for flag, value in zip(others[::2], others[1::2], strict=True):
        command[command.index(flag) + 1] = value
    return command


@pytest.fixture(scope="module")
def session(tmp_path_factory, english_text, teacher_directory):
    """A directory in which the two commands have run, and what they printed."""
    directory = tmp_path_factory.mktemp("session")
    encode = ["encode-lsp", "--teacher", teacher_directory, "--layer", "2", "--corpus", english_text, "--k", "48"]
    encode += ["--lam", "0.1", "--max-length", "32", "--max-tokens", "30000", "--dictionary-tokens", "5000"]
    train = ["train-student", "--encoder", "bert-1x32", "--max-steps", "20", "--batch-windows", "8"]
    train += ["--micro-batch", "8", "--eval-windows", "8", "--lr", "1e-3"]
    outputs = [mlsm(*command, cwd=directory, check=0) for command in (encode, train)]
    return directory, encode, train, outputs


def test_the_two_commands_end_with_a_summary(session):
    directory, _, _, (encoded, trained) = session
    for words in ("store", "tokens/s", "bytes per token", "non-zeros stored", "mass kept", "train-student"):
        assert words in encoded.stdout
    assert "--encoder modernbert-2x128" in encoded.stdout, "without a recipe the student would be a BERT-base"
    for words in ("held-out KL", "below", "exported to", "import AutoModel", "(the only finished one that fits)"):
        assert words in trained.stdout
    store = next((directory / "runs" / "stores").iterdir())
    assert f"show-lsp {store.relative_to(directory)} --html lsps\n" in trained.stdout


def test_the_last_line_says_what_the_student_predicts(session):
    directory, *_, (_, trained) = session
    command = shlex.split(trained.stdout.splitlines()[-1])
    said = mlsm(*command[command.index("show-lsp") :], cwd=directory, check=0).stdout
    assert "Typical words, of" in said and "every token masked in turn" in said


def test_the_printed_lines_load_the_student(session):
    directory, *_, (_, trained) = session
    printed = trained.stdout.partition("Load it:\n\n")[2].splitlines()
    lines = textwrap.dedent("\n".join(itertools.takewhile(lambda line: line[:2].isspace() or not line, printed)))
    code = "\n".join([lines, "import torch", "print(model(torch.tensor([[2, 7, 3]])).last_hidden_state.shape)"])
    run = run_python(["-c", code], cwd=directory)
    assert run.returncode == 0 and "from transformers import AutoModel" in code, run.stderr
    assert "[1, 3, 32]" in run.stdout


def test_a_probe_of_the_student_and_an_export_of_the_run(session):
    directory, _, train, _ = session
    probe = ["train-probe", *train[3:], "--probe-input", "logits"]
    run = mlsm(*probe, cwd=directory, check=0)
    assert "parameters on the logits of mlsm-bert-1x32-seed42-" in run.stdout and "the student's own" in run.stderr
    for words in (
        "held-out loss",
        "from transformers import AutoModelForMaskedLM",
        " evaluate-blimp runs/probes/logits-mlsm-",
    ):
        assert words in run.stdout
    student = next((directory / "runs" / "students").iterdir())
    push = ["--step", "5", "--push-to-hub", "someone/student"]
    planned = mlsm("export-student", student, *push, "--dry-run", cwd=directory, check=0).stdout
    assert "step-00000005" in planned and "main" in planned and not (directory / "runs" / "exports").exists()
    exported = mlsm("export-student", "--json", cwd=directory, check=0)
    report = json.loads(exported.stdout)
    assert report["step"] == 20 and "logits-mlsm-" in report["export"]
    assert (directory / report["export"] / "lsp_head.safetensors").is_file()


def test_running_again_reports_that_it_is_finished(session):
    directory, encode, train, _ = session
    assert "was finished already" in mlsm(*encode, cwd=directory, check=0).stdout
    assert "was finished already" in mlsm(*train, cwd=directory, check=0).stdout


def test_another_seed_reuses_the_store_and_starts_within_seconds(session):
    directory, _, train, _ = session
    mlsm(*train, "--seed", "1", cwd=directory, check=0)
    runs = sorted((directory / "runs" / "students").iterdir())
    files = ("result.json", "config.json")
    results, configs = ([json.loads((run / name).read_text()) for run in runs] for name in files)
    assert len(results) == 2 and configs[0]["store"] == configs[1]["store"]
    assert all(result["seconds_to_first_step"] < 10 for result in results)


def test_a_run_whose_last_files_were_lost_finishes_again(session):
    directory, _, train, _ = session
    run_directory = next((directory / "runs" / "students").iterdir())
    (run_directory / "result.json").unlink()
    seed = json.loads((run_directory / "config.json").read_text())["settings"]["seed"]
    run = mlsm(*train, "--seed", seed, cwd=directory, check=0)
    assert "is finished" in run.stdout and "continuing from" in run.stderr
    assert (run_directory / "result.json").is_file()


def test_a_corpus_without_held_out_text_still_ends_well(session, tmp_path):
    directory, encode, train, _ = session
    (tmp_path / "few.txt").write_text("\n\n".join(f"Document {n} of a few words." for n in range(20)))
    few = changed(encode, "--corpus", tmp_path / "few.txt", "--k", "8")
    mlsm(*few, cwd=tmp_path, check=0)
    run = mlsm(*train, cwd=tmp_path, check=0)
    assert "no held-out windows" in run.stdout


def test_numbers_without_a_dot_in_a_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("train-student: {lr: 1e-4}\nencode-lsp: [1]\n")
    assert "expected a mapping" in error_line(mlsm("encode-lsp", "--recipe", tmp_path / "r.yaml", check=2))
    (tmp_path / "r.yaml").write_text("train-student: {lr: 1e-4}\n")
    run = mlsm("train-student", "--recipe", tmp_path / "r.yaml", "--print-config", cwd=tmp_path, check=0)
    assert yaml.safe_load(run.stdout)["train-student"]["lr"] == 1e-4


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("max-steps: 1e3", None),
        ("checkpoints: [0.5, '1']", None),
        ("checkpoints: [a]", "--checkpoints takes a list, each a number, found ['a']"),
        ("documents-apart: maybe", "--documents-apart takes a switch, true or false, found 'maybe'"),
        ("max-steps: yes", "--max-steps takes a whole number or null, found True"),
    ],
)
def test_types_in_a_recipe(tmp_path, setting, message):
    (tmp_path / "r.yaml").write_text(f"train-student: {{{setting}}}\n")
    run = mlsm(
        "train-student", "--recipe", tmp_path / "r.yaml", "--print-config", cwd=tmp_path, check=2 if message else 0
    )
    if message:
        assert message in error_line(run)
    else:
        found = yaml.safe_load(run.stdout)["train-student"]
        assert found["max_steps"] in (1000, None) and found["checkpoints"][-1] == 1.0


def test_real_weights_are_not_trained_with_the_demonstrations_rates(tmp_path):
    run = mlsm("train-student", "--continue-from", tmp_path, "--print-config", cwd=tmp_path, check=0)
    settings = yaml.safe_load(run.stdout)["train-student"]
    assert settings["max_steps"] is settings["lr"] is settings["dropout"] is None  # they follow from the store


def test_a_follower_leaves_errors_that_all_meet_to_the_first_process(tmp_path):
    arguments = ("train-student", "--lr", "x")
    first, second = ({"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank} for rank in "01")
    assert "--lr takes a number" in error_line(mlsm(*arguments, cwd=tmp_path, check=2, **first))
    assert mlsm(*arguments, cwd=tmp_path, check=2, process=Python, **second).stderr == ""


@pytest.mark.parametrize("rank", ["1", "", "x"])
def test_only_training_is_silent_in_a_process_of_a_launcher(tmp_path, rank):
    """A shell inside a cluster's worker inherits such variables."""
    launcher = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
    assert "faq" in mlsm("docs", cwd=tmp_path, check=0, **launcher).stdout
    assert "is not a store" in error_line(mlsm("show-shards", "nowhere", cwd=tmp_path, check=2, **launcher))
    alone = launcher | {"WORLD_SIZE": "1"}
    assert "is not a store" in error_line(mlsm("train-student", "--store", "nowhere", cwd=tmp_path, check=2, **alone))


def test_an_unfinished_store_is_said_to_be_so(session, tmp_path):
    import shutil

    store = next((session[0] / "runs" / "stores").iterdir())
    copy = tmp_path / "runs" / "stores" / store.name
    shutil.copytree(store, copy)
    next((copy / "units").glob("*.json")).unlink()
    run = mlsm("train-student", cwd=tmp_path, check=3)
    assert "unfinished: 1 of" in error_line(run) and "encoding command" in error_line(run)


def test_the_command_that_verify_shards_names_repairs_the_store(session):
    """Run from another directory, after a unit was damaged and removed, it makes the very bytes again."""
    import shlex

    directory, *_ = session
    store = next((directory / "runs" / "stores").iterdir())
    shard = next((store / "units").glob("*.tar"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    report = json.loads(mlsm("verify-shards", store, "--repair", "--json", check=3).stdout)
    assert not shard.exists() and "--recipe" in report["commands"][0]
    words = shlex.split(report["commands"][0])
    mlsm(*words[words.index("encode-lsp") :], check=0)
    assert shard.read_bytes() == whole
    mlsm("verify-shards", store, "--full", check=0)
    for name in ("tokenizer", "dictionary"):
        (store / name).rename(store / "away")
        (damage,) = verify(store)["damaged"]
        assert damage["file"] == name and re.search("missing|has no vocabulary", damage["problem"])
        (store / "away").rename(store / name)


def test_a_student_output_of_another_run_is_refused(session):
    directory, _, train, _ = session
    run_directory = next((directory / "runs" / "students").iterdir())
    run = mlsm(*changed(train, "--lr", "5e-4"), "--run-dir", run_directory, cwd=directory, check=2)
    assert "lr" in error_line(run)
