"""The tools over stores as a person uses them: STORE without a flag, exit codes, JSON."""

import json
import shutil
from pathlib import Path
from unittest import mock

import pytest
from http_store import serving
from preloaded import run_command
from tiny_store import write_store

from mlsm import __main__ as cli
from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common.disk import temporary_name
from mlsm.common.errors import EXIT_INPUT, EXIT_STORE
from mlsm.evaluation.inspection.stores import show_shards
from shards.config import ShowConfig

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def place(tmp_path):
    """A directory with one store under ./runs."""
    write_store(tmp_path / "runs" / "stores" / "lsp-tiny", k=24)
    return tmp_path


def mlsm(place, *arguments, code=0):
    return run_command(arguments, cwd=place, code=code)


def test_verify_ends_with_3_on_damage_and_says_how_to_repair(place):
    store = Path("runs/stores/lsp-tiny")
    assert "The store is whole" in mlsm(place, "verify-shards", store, "--full").stdout
    shard = next((place / store / "units").glob("*.tar"))
    raw = bytearray(shard.read_bytes())
    raw[5000] ^= 1
    shard.write_bytes(raw)
    assert "The store is whole" in mlsm(place, "verify-shards").stdout  # the quick look does not read it
    run = mlsm(place, "verify-shards", "--full", code=3)
    for words in ("is damaged: 1 place in 1 unit", shard.name, "block 000000", f"verify-shards {store} --repair"):
        assert words in run.stdout
    report = json.loads(mlsm(place, "verify-shards", store, "--repair", "--json", code=3).stdout)
    assert len(report["repaired"]) == 2 and len(report["commands"]) == 1
    run = mlsm(place, "verify-shards", store)
    assert "unfinished" in run.stdout and "Missing:" in run.stdout and "encode-lsp" in run.stdout
    where = f"moved or renamed: the last command above looks for {place}/runs/stores/*-{report['target'][:12]}"
    assert where in run.stdout
    at_its_place = (place / store).rename(place / f"{store}-{report['target'][:12]}")
    run = mlsm(place, "verify-shards", at_its_place)
    assert "Missing:" in run.stdout and "moved or renamed" not in run.stdout
    assert "is not a store: there is no such directory" in mlsm(place, "verify-shards", "nowhere", code=2).stderr


def test_show_derive_and_clean(place):
    run = mlsm(place, "show-shards")
    assert "dead atoms" in run.stdout and "(the only finished one)" in run.stdout and "recipe" not in run.stderr
    assert len(json.loads(mlsm(place, "show-shards", "--window", 1, "--json").stdout)["tokens"]) > 5
    assert "Pass only one of them" in mlsm(place, "show-shards", "--window", 1, "--document", 1, code=2).stderr
    run = mlsm(place, "derive-shards", "--top-n", 2, "runs/stores/lsp-tiny")
    assert "mass kept" in run.stdout and "train-student --store runs/stores/lsp-tiny-n2-" in run.stdout
    derived = next((place / "runs" / "stores").glob("*-n2-*"))
    assert "was finished already" in mlsm(place, "derive-shards", "runs/stores/lsp-tiny", "--top-n", 2).stdout
    shutil.rmtree(derived / "plans")
    mlsm(place, "derive-shards", "runs/stores/lsp-tiny", "--top-n", 2)
    with mock.patch("os.getpid", lambda: 4999999):  # of no process
        left = temporary_name(derived / "units", "unit")
    left.write_bytes(b"x")
    assert "Nothing to remove" in mlsm(place, "clean").stdout and left.exists()
    assert "1 bytes would be freed" in mlsm(place, "clean", "runs", "--dry-run", "--all").stdout and left.exists()
    assert "1 bytes freed" in mlsm(place, "clean", "--all").stdout and not left.exists()


def test_what_a_command_chose_by_itself_is_said_with_the_result(place, monkeypatch, capsys):
    """Which, of how many; and a derived store changes nothing of what the next command takes."""
    monkeypatch.chdir(place)

    def says(*arguments):
        assert cli.run(list(arguments)) == 0
        return capsys.readouterr()

    assert "the newest" not in says("derive-shards", "runs/stores/lsp-tiny", "--top-n", "2").out
    assert len(list(Path("runs/stores").iterdir())) == 2
    first = "store runs/stores/lsp-tiny (the newest finished one of 2; name another one to use it instead)"
    assert says("show-shards").out.splitlines()[0] == first
    said = says("verify-shards", "--json")
    assert json.loads(said.out)["store"] == "runs/stores/lsp-tiny" and first in said.err
    verb = load("train-student")
    parsed = parse(verb, [])
    fitting = first.replace("of 2", "of 2 that fit")
    assert parsed.choice == fitting and parsed.settings.store == "runs/stores/lsp-tiny"
    write_store(Path("runs/stores/ids-later"), k=0)
    assert says("show-shards").out.startswith("store runs/stores/ids-later (the newest finished one of 3;")
    assert parse(verb, []).choice == fitting  # 2 are of LSPs
    shutil.rmtree("runs/stores/lsp-tiny")
    choice = parse(verb, []).choice
    assert "lsp-tiny-n2-" in choice and choice.endswith("(the only finished one that fits)"), "the other is of ids"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show-shards", "nowhere"),
        ("train-student", "--store", "nowhere"),
        ("train-student", "--objective", "kd"),
        ("show-shards", "--document", "999999"),
        ("show-shards", "--window", "999999"),
        ("derive-shards", "--top-n", "255"),
    ],
)
def test_what_is_not_there_is_bad_input(place, monkeypatch, arguments):
    monkeypatch.chdir(place)
    with pytest.raises(ValueError) as caught:
        cli.run(list(arguments))
    assert cli.exit_code(caught.value) == EXIT_INPUT


def test_a_store_that_lost_its_target_is_damaged(place):
    (place / "runs" / "stores" / "lsp-tiny" / "target.json").unlink()
    with pytest.raises(ValueError, match="no target.json") as caught:
        show_shards(ShowConfig(store=str(place / "runs" / "stores" / "lsp-tiny")))
    assert cli.exit_code(caught.value) == EXIT_STORE


def test_a_store_behind_a_url(place, monkeypatch):
    monkeypatch.setenv("MLSM_CACHE", str(place / "cache"))
    with serving(place / "runs" / "stores") as web:
        url = f"{web.url}/lsp-tiny"
        assert "The store is whole" in mlsm(place, "verify-shards", url, "--full").stdout
        shown = json.loads(mlsm(place, "show-shards", url, "--json").stdout)
        assert shown == json.loads(
            json.dumps(show_shards(ShowConfig(store=str(place / "runs" / "stores" / "lsp-tiny"))))
        ) | {"store": url}
        shard = next((place / "runs" / "stores" / "lsp-tiny" / "units").glob("*.tar"))
        shard.write_bytes(shard.read_bytes()[:-600])
        run = mlsm(place, "verify-shards", url, code=3)
        assert shard.name in run.stdout and "Next, where the store was made" in run.stdout
