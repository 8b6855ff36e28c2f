"""What the command line says to somebody who does not know it yet: help, defaults, other programs' spellings."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_store import write_store

from mlsm import __main__ as cli
from mlsm.cli.flags import read_flags
from mlsm.cli.help import GROUPS, TITLES
from mlsm.cli.settings import parse
from mlsm.commands import load, names
from mlsm.common.settings import flag_of, settable

ROOT = Path(__file__).resolve().parent.parent


def test_the_list_of_commands_fits_the_terminal(capsys, monkeypatch):
    for width in (70, 100, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        assert cli.run(["--help"]) == 0
        shown = capsys.readouterr().out
        listed = [line for line in shown.splitlines() if re.match(r"  [a-z-]+ {2}| {21}\S", line)]
        assert len(listed) >= len(names()) and max(map(len, listed)) < width
        assert all(f"  {name} " in shown for name in names())


def test_a_new_command_is_one_file(tmp_path):
    """Its flags, help and Python function follow; that it is described in docs/commands.md is test_docs.py's."""
    for room in ("mlsm", "pipeline", "shards", "student"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__", "pages", "bundled*"))
    (tmp_path / "mlsm" / "commands" / "count_words.py").write_text(TOY)
    for words, told in (
        (["--help"], "count-words        Count the words of a text"),
        (["count-words", "--help"], "--twice, --no-twice"),
        (["count-words", "a b", "--twice"], "6 words"),
        (["count-words", "a b", "--json"], '"words": 3'),
        (["count-words", "a", "--twise"], "Did you mean --twice?"),
    ):
        run = subprocess.run([sys.executable, "-m", "mlsm", *words], cwd=tmp_path, capture_output=True, text=True)
        assert told in run.stdout + run.stderr
    code = "import mlsm; print(mlsm.count_words(text='a b')['words'], mlsm.count_words.__doc__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout.startswith("3 Count words.\n\nSettings: `mlsm help count-words`."), run.stderr


def test_help_needs_no_pipeline():
    code = "import sys; sys.modules['pipeline'] = None; from mlsm.commands import load_all; print(*load_all())"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "train-student" in run.stdout.split() and "encode-lsp" not in run.stdout.split(), run.stderr


TOY = '''
"""Count the words of a text."""

from dataclasses import dataclass

from mlsm.common.progress import Progress, silent
from mlsm.common.settings import Positional, check
from mlsm.results import Report


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Words are what blanks separate."""

    text: Positional[str]
    """The text."""
    twice: bool = False
    """Count every word twice."""

    def __post_init__(self):
        check(self)


def run(settings: Settings, progress: Progress = silent) -> Report:
    """Count words."""
    return Report.of({"words": (1 + settings.twice) * len(settings.text)})


def show(report: dict, settings: Settings) -> str:
    """Show the number."""
    return f"{report['words']} words"
'''.lstrip()


@pytest.mark.parametrize("name", names())
def test_what_a_command_works_on_is_a_setting_of_it(name):
    command = load(name)
    assert command.newest is None or command.works_on in settable(command.settings)


HUGGING_FACE = {
    "learning_rate": "--lr",
    "per_device_train_batch_size": "--micro-batch",
    "output_dir": "--run-dir",
    "bf16": "--dtype bfloat16",
    "num_train_epochs": "--epochs",
}


@pytest.mark.parametrize("hyphen", "-_")
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_spellings_of_hugging_face_are_answered_with_ours(name, hyphen):
    flag = f"--{name.replace('_', hyphen)}"
    for words in ([flag, "3"], [f"{flag}=3"], ["--seed", "1", flag]):
        meant = f"there is no flag {flag}\\. Did you mean {HUGGING_FACE[name]}\\? All flags"
        with pytest.raises(ValueError, match=meant):
            parse(load("train-student"), words)


def test_underscores_and_hyphens_are_one():
    settings = load("finetune").settings
    for words in (["--data_dir", "a_b", "x", "y"], ["--data-dir=a_b", "x", "y"], ["x", "--data-dir", "a_b", "y"]):
        assert read_flags(settings, words) == {"data_dir": Path("a_b"), "models": ("x", "y")}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {}),
        (["--layer", "4", "8"], {"layer": (4, 8)}),
        (["--max-tokens", "None", "--output", "None"], {"max_tokens": None, "output": Path("None")}),
        (["--max-tokens", "1_000", "--lam=1e-2", "--top-n", "all"], {"max_tokens": 1000, "lam": 0.01, "top_n": "all"}),
        (["--dry-run", "--no-keep-duplicates"], {"dry_run": True, "keep_duplicates": False}),
        (["--seed", "-1"], {"seed": -1}),
    ],
)
def test_only_what_is_given_is_read(words, given):
    assert read_flags(load("encode-lsp").settings, words) == given


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layer", "4", "--layer=8"], "--layer is given twice. Write all its values after one --layer: --layer A B."),
        (["--max_tokens", "4", "--max-tokens", "5"], "--max-tokens is given twice."),
        (["--dry-run", "--no-dry-run"], "--dry-run is given twice."),
    ],
)
def test_a_flag_that_is_given_twice_is_refused(words, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        read_flags(load("encode-lsp").settings, words)
    with pytest.raises(ValueError, match="--recipe is given twice"):
        cli.run(["encode-lsp", "--recipe", "paper", "--recipe=quickstart"])
    for words in (["--recipe="], ["--recipe", ""]):  # an empty $VARIABLE, which once meant no recipe at all
        with pytest.raises(ValueError, match="--recipe needs a value, found an empty one"):
            cli.run(["train-student", *words])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train-student", "--recpie", "a.yaml"], "there is no flag --recpie. Did you mean --recipe? All flags"),
        (["train-student", "--config", "a.yaml"], "Did you mean --recipe?"),
        (["encode-lsp", "--jsno"], "Did you mean --json?"),
        (["encode-lsp", "--json=1"], "--json is a switch and takes no value. All flags"),
        (["encode-lsp", "--dbug"], "Did you mean --debug?"),
        (["show-shards", "--recipe", "a.yaml"], "there is no flag --recipe. All flags"),
        (["train-student", "--lr="], "--lr takes a number or null, found ''. All flags"),
        (["train-student", "--no-compile=1"], "--compile is a switch and takes no value, found '1'. All flags"),
        (["train-student", "--recipe", "nowhere.yaml"], "recipe nowhere.yaml cannot be read: No such file"),
    ],
)
def test_mistakes_are_answered_in_sentences(words, told):
    with pytest.raises(ValueError, match=re.escape(told)):
        cli.run(words)


def test_an_empty_recipe_is_said_to_be_empty(tmp_path):
    (tmp_path / "r.yaml").write_text("")
    with pytest.raises(ValueError, match=r"r.yaml has no section for train-student. It is empty"):
        cli.run(["train-student", "--recipe", str(tmp_path / "r.yaml")])


def test_an_option_before_the_command(capsys):
    assert cli.run(["--json", "show-shards"]) == 2
    assert "--json stands before the command. Write the command first" in capsys.readouterr().err


def test_help_of_a_command_has_two_spellings(capsys):
    """The flag names the advanced flags, which the command describes."""
    shown = []
    for words in (["help", "encode-lsp"], ["encode-lsp", "--help"], ["encode-lsp", "-h"]):
        with pytest.raises(SystemExit) as end:
            cli.run(words)
        assert end.value.code == 0
        shown.append(capsys.readouterr().out)
    whole, brief, short = shown
    assert brief == short and "Largest KKT violation" in whole and "Largest KKT violation" not in brief
    assert "help encode-lsp describes them" in brief and " --tolerance " in brief and len(brief) < 0.6 * len(whole)
    assert cli.run(["help"]) == 0 and "mlsm help COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "meant"), [("trian-student", "train-student"), ("encode_lsp", "encode-lsp"), ("show", "show-lsp")]
)
def test_a_misspelt_command_gets_a_suggestion(word, meant, capsys):
    for words in ([word, "--seed", "1"], ["help", word]):
        assert cli.run(words) == 2
        assert f"no command {word!r}. Did you mean {meant}? There are: " in capsys.readouterr().err


def help_of(capsys, verb, *words, recipe=None):
    with pytest.raises(SystemExit):
        parse(load(verb), [*words, "--help"], recipe)
    return " ".join(capsys.readouterr().out.split())


def test_help_has_groups_with_the_usual_flags_first(capsys):
    shown = help_of(capsys, "encode-lsp")
    places = [shown.index(f"{TITLES[group]}{' (' if group == 'advanced' else ':'}") for group in GROUPS]
    assert places == sorted(places)
    for earlier, later in (("--corpus", "--output"), ("--layer", "--lam"), ("--device", "--tolerance")):
        assert shown.index(f" {earlier} ") < shown.index(f" {later} ")


def test_help_shows_the_defaults_in_force(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = help_of(capsys, "encode-lsp")
    assert "Each number gets its own store. (quickstart: 1024)" in shown
    assert "(quickstart: 2000000)" in shown
    assert "Defaults marked quickstart come from the recipe quickstart" in shown
    own = help_of(capsys, "encode-lsp", "--corpus", "a.txt")
    assert "unset: 3,072, or those of --dictionary" in own and "Each number gets its own store. (default" not in own
    assert "(default: 128)" in own and "Defaults marked" not in own
    paper = help_of(capsys, "train-student", recipe="paper")
    assert "(paper: 100000" in paper and "recipe paper" in paper
    store = write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24)
    (store.files.plans / f"{store.plan_id}.yaml").write_text('{"encode-lsp": {}, "recipe": "paper"}')
    monkeypatch.chdir(tmp_path)
    assert help_of(capsys, "train-student").replace(", that of the store", "") == paper


@pytest.mark.parametrize("verb", names())
def test_every_setting_is_described(verb, capsys):
    settings = load(verb).settings
    shown = help_of(capsys, verb)
    for field in settable(settings).values():
        if field.type is not bool:
            assert flag_of(field) in shown
    assert dataclasses.is_dataclass(settings)


HELP_OF_ALL = """
import contextlib, sys
from mlsm import __main__ as cli

for name in cli.names():
    with contextlib.suppress(SystemExit):
        cli.run([name, "--help"])
print("heavy:", sorted({"torch", "transformers", "scipy", "numba"} & set(sys.modules)))
"""


def test_no_help_loads_a_model_library(tmp_path):
    """Not even where it opens a store, and a student's, to show the defaults in force."""
    store = write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24)
    (store.files.plans / f"{store.plan_id}.yaml").write_text('{"encode-lsp": {}, "recipe": "paper"}')
    student = tmp_path / "runs" / "students" / "one"
    (student / "export").mkdir(parents=True)
    (student / "export" / "lsp_head.safetensors").touch()
    described = {"settings": {}, "store": {}, "operational": {"store": str(store.path)}, "architecture": {}}
    (student / "config.json").write_text(json.dumps(described))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", HELP_OF_ALL], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.stdout.endswith("heavy: []\n"), run.stdout[-200:] + run.stderr
    assert run.stdout.count("recipe paper, that of the store") == 2  # of train-student and of train-probe
