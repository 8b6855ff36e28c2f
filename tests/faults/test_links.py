"""Nothing is written, and nothing of a user's is read, through links, pipes and devices that somebody else put into a
store, a run or an output directory. The root itself may be a link: that is its user's choice."""

import json
import logging
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from test_foreign_stores import named_store, within_seconds
from tiny_store import write_store

from mlsm import __main__ as cli
from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common import disk
from mlsm.common.arrays import read_npz
from mlsm.common.durable import make_directories, publish_directory, publish_json, replace_bytes, replace_json
from mlsm.common.errors import InspectionError, PlaceError, RunError, TeacherError
from mlsm.common.workplaces import workplace
from mlsm.evaluation.inspection.lsps import vector_pages
from mlsm.evaluation.plots import save_table
from mlsm.recipes.reading import recipe_of_store, recipe_settings
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.imported import ImportConfig, import_dictionary
from pipeline.teacher import read_config
from shards.derive import derive
from shards.reader import Store
from shards.verify import verify
from student.config import StudentConfig
from student.objectives.position_marginals import position_marginals
from student.resolve import resolve
from student.train import train

pytestmark = pytest.mark.promise(
    "links to a user's files, pipes and devices in place of any file or directory that a command writes in or reads: "
    "refused at once, by name, and nothing outside is changed",
    cases="65",
)
SECRET = "of the user"


@pytest.fixture
def home(tmp_path):
    """A directory of the user's own, which must stay as it is."""
    directory = tmp_path / "home"
    (directory / "below").mkdir(parents=True)
    (directory / "notes.txt").write_text(SECRET)
    yield directory
    found = {path.relative_to(directory).as_posix() for path in directory.rglob("*")}
    assert found == {"below", "notes.txt"} and (directory / "notes.txt").read_text() == SECRET


CALLS = {
    "create": lambda place: disk.create(place / "new"),
    "append": lambda place: disk.append(place / "new"),
    "mkdir": lambda place: disk.mkdir(place / "new"),
    "unlink": lambda place: disk.unlink(place / "notes.txt"),
    "remove": lambda place: disk.remove(place / "below"),
    "rename": lambda place: disk.rename(place / "notes.txt", place / "other"),
    "link": lambda place: disk.link(place / "notes.txt", place / "other"),
    "fsync_path": lambda place: disk.fsync_path(place / "notes.txt"),
    "make_directories": lambda place: make_directories(place / "new" / "newer"),
    "replace_bytes": lambda place: replace_bytes(place / "notes.txt", b"!"),
    "replace_json": lambda place: replace_json(place / "notes.txt", {}),
    "publish_json": lambda place: publish_json(place / "new", {}),
    "publish_directory": lambda place: publish_directory(place / "below", lambda new: None),
    "workplace": lambda place: workplace(place / "new", files=()).__enter__(),
}


@pytest.mark.parametrize("where", [".", "below"])
@pytest.mark.parametrize("call", CALLS)
def test_no_call_follows_a_link_below_a_root(call, where, home, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    disk.follow_no_links_below(root)
    (root / "units").symlink_to(home if where == "." else tmp_path)
    place = root / "units" if where == "." else root / "units" / "home"
    with pytest.raises(PlaceError, match="units is a link, and no link is followed inside"):
        CALLS[call](place)


def test_the_root_itself_may_be_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    disk.follow_no_links_below(tmp_path / "runs")
    make_directories(tmp_path / "runs" / "stores" / "one")
    replace_bytes(tmp_path / "runs" / "stores" / "one" / "file", b"1")
    with disk.append(tmp_path / "runs" / "stores" / "one" / "file") as file:
        file.write(b"2")
    assert (tmp_path / "disk" / "stores" / "one" / "file").read_bytes() == b"12"


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "link to a device", "directory"])
def test_only_files_are_appended_to(kind, home, tmp_path):
    path = tmp_path / "log"
    {
        "link": lambda: path.symlink_to(home / "notes.txt"),
        "dangling link": lambda: path.symlink_to(home / "new.txt"),
        "pipe": lambda: os.mkfifo(path),
        "link to a device": lambda: path.symlink_to("/dev/full"),
        "directory": path.mkdir,
    }[kind]()
    with within_seconds(5), pytest.raises(PlaceError, match=f"{path} is a"):
        disk.append(path)


def test_a_lock_that_leads_to_a_file_of_the_user_is_not_emptied(home, tmp_path):
    place = tmp_path / "place"
    place.mkdir()
    (place / "lock").symlink_to(home / "notes.txt")
    with pytest.raises(PlaceError, match="lock is a link"):
        workplace(place, files=()).__enter__()
    (place / "lock").unlink()
    os.link(home / "notes.txt", place / "lock")
    with workplace(place, files=()):
        assert (home / "notes.txt").read_text() == SECRET


# -- stores and outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dictionaries", "stores"])
def test_an_output_with_links_is_not_written_through(name, home, tmp_path):
    output = tmp_path / "runs"
    output.mkdir()
    (output / name).symlink_to(home)
    with pytest.raises(PlaceError, match=f"{name} is a link"):
        if name == "dictionaries":
            np.save(tmp_path / "atoms.npy", np.eye(4, 8))
            import_dictionary(ImportConfig(file=tmp_path / "atoms.npy", output=output, orientation="rows"))
        else:
            derive(named_store(tmp_path / "store").path, 2, output=output)


@pytest.mark.parametrize("name", ["units", "plans"])
def test_a_store_with_links_is_not_written_through(name, home, tmp_path):
    source = named_store(tmp_path / "store").path
    made = Path(derive(source, 2, output=tmp_path / "runs")["store"])
    shutil.rmtree(made / name)
    (made / name).symlink_to(home)
    with pytest.raises(PlaceError, match=f"{name} is a link"):
        derive(source, 2, output=tmp_path / "runs")


def test_repair_removes_nothing_through_a_link(home, tmp_path):
    store = write_store(tmp_path / "store", k=24)
    shutil.copytree(store.path / "units", home / "below", dirs_exist_ok=True)
    shutil.rmtree(store.path / "units")
    (store.path / "units").symlink_to(home / "below")
    before = sorted((home / "below").iterdir())
    for path in before:
        path.write_bytes(b"{")
    verify(store.path, repair=True)
    assert sorted((home / "below").iterdir()) == before
    for path in before:
        path.unlink()


def test_pictures_that_are_links_are_not_shown(home, tmp_path):
    (tmp_path / "vectors" / "pictures").mkdir(parents=True)
    (tmp_path / "vectors" / "pictures" / "0.jpg").symlink_to(home / "notes.txt")
    with pytest.raises(InspectionError, match="is a link, which is not followed"):
        vector_pages._read_picture(tmp_path / "vectors", "pictures/0.jpg")
    (tmp_path / "vectors" / "pictures" / "0.jpg").unlink()
    os.mkfifo(tmp_path / "vectors" / "pictures" / "0.jpg")
    with within_seconds(5), pytest.raises(InspectionError, match="a pipe"):
        vector_pages._read_picture(tmp_path / "vectors", "pictures/0.jpg")
    shutil.rmtree(tmp_path / "vectors" / "pictures")
    (tmp_path / "vectors" / "pictures").symlink_to(home)
    with pytest.raises(InspectionError, match="pictures is a link"):
        vector_pages._read_picture(tmp_path / "vectors", "pictures/notes.txt")


# -- runs --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """(settings, directory) of a run that was stopped after step 2 of 3."""
    place = tmp_path_factory.mktemp("begun")
    store = write_store(place / "store", k=24)
    settings = {"encoder": "bert-1x16", "max_steps": 3, "batch_windows": 12, "micro_batch": 12, "seed": 1}
    settings |= {"eval_windows": 8, "save_every": 1, "eval_every": 0, "device": "cpu", "store": store.path}

    def stop(*_, step, **__):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(StudentConfig(**settings, run_dir=place / "run"), stop)
    return settings, place / "run"


@pytest.fixture
def run(begun, tmp_path):
    settings, directory = begun
    return StudentConfig(**settings, run_dir=shutil.copytree(directory, tmp_path / "run"))


def test_damaged_lines_of_a_log_reach_no_file_of_the_user(run, home):
    """They are copied word for word: into a shell's start file, for instance, they would be run."""
    (run.run_dir / "log.jsonl").write_text("touch ~/was-run\n" + (run.run_dir / "log.jsonl").read_text())
    (run.run_dir / "log.damaged").symlink_to(home / "notes.txt")
    train(run)
    assert (run.run_dir / "log.damaged").read_text() == "touch ~/was-run\n"
    assert not (run.run_dir / "log.damaged").is_symlink()


@pytest.mark.parametrize("name", ["log.jsonl", "lock", "export", "checkpoints", "config.json", "result.json"])
def test_a_run_with_links_writes_through_none(name, run, home):
    path = run.run_dir / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.symlink_to(home if name in ("export", "checkpoints") else home / "new.txt")
    try:
        train(run)
    except (RunError, PlaceError) as error:
        assert str(path) in str(error)
    assert not path.exists() or not path.is_symlink() or name == "checkpoints"


def test_averages_by_position_are_kept_in_no_other_place(begun, home, tmp_path):
    windows = Store.open(begun[0]["store"]).split("train")
    expected = position_marginals(windows)
    (tmp_path / ".marginals").symlink_to(home)
    assert (position_marginals(windows, tmp_path / ".marginals") == expected).all()
    (tmp_path / ".marginals").unlink()
    position_marginals(windows, tmp_path / ".marginals")
    [file] = (tmp_path / ".marginals").iterdir()
    file.unlink()
    os.mkfifo(file)
    with within_seconds(20):
        assert (position_marginals(windows, tmp_path / ".marginals") == expected).all()
    assert read_npz(file)


@pytest.mark.parametrize("name", ["", "tensorboard", "tensorboard.step", "id", "tensorboard/x", "wandb/settings"])
def test_trackers_are_led_nowhere_else(name, run, home):
    pytest.importorskip("accelerate")
    pytest.importorskip("tensorboard")
    path = run.run_dir / "tracking" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if name == "wandb/settings":
        path.write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    else:
        path.symlink_to(home if "." not in name else home / "notes.txt")
    with pytest.raises((RunError, PlaceError), match=str(path)):
        train(replace(run, track=("tensorboard",)))


# -- pipes and devices -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_teacher_with_a_pipe_or_device_is_refused_at_once(name, make, teacher_directory, tmp_path):
    teacher = shutil.copytree(teacher_directory, tmp_path / "teacher")
    (teacher / name).unlink()
    make(teacher / name)
    with within_seconds(20), pytest.raises(TeacherError, match=r"it is a (pipe|device), not a file"):
        read_config(teacher, "teacher")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_a_recipe_that_is_no_file_is_refused_at_once(make, tmp_path, capsys):
    make(tmp_path / "recipe.yaml")
    with within_seconds(20), pytest.raises(SystemExit) as ended:
        cli.main(["train-student", "--recipe", str(tmp_path / "recipe.yaml")])
    assert ended.value.code == 2
    assert re.search("recipe.yaml cannot be read: it is a (pipe|device), not a file", capsys.readouterr().err)


# -- recipes of stores -------------------------------------------------------------------------------------


def test_a_store_names_no_recipe_file(tmp_path, caplog):
    hostile = tmp_path / "hostile.yaml"
    hostile.write_text(f"train-student: {{max-steps: 7, output: {tmp_path / 'home'}}}\n")
    store = write_store(tmp_path / "store", k=24)
    for recipe in (str(hostile), "../../hostile.yaml", "./hostile.yml", "a/../paper"):
        store.files.plans.joinpath(f"{store.plan_id}.yaml").write_text(json.dumps({"recipe": recipe}))
        store = Store.open(store.path)
        with caplog.at_level(logging.WARNING):
            assert recipe_of_store(store, "train-student") is None
        assert f"recipe file {recipe}, but recipe files are not reused" in caplog.text
        assert resolve(StudentConfig(store=store.path), store).config.max_steps == 2000
        parsed = parse(load("train-student"), ["--store", str(store.path)])
        assert parsed.settings.run_dir is None and parsed.recipe is None


def test_the_settings_of_a_store_connect_to_no_scheduler_and_write_nowhere_else(tmp_path):
    """`verify-shards` prints a command with this recipe; a scheduler sends pickles to its clients."""
    path = tmp_path / "plans" / f"{'0' * 32}.yaml"
    path.parent.mkdir()
    hostile = {"scheduler": "tcp://elsewhere:8786", "workers": 4, "output": "/home", "k": 24}
    path.write_text(json.dumps({"encode-lsp": hostile}))
    assert recipe_settings(str(path), "encode-lsp", EncodeConfig, True) == {"k": (24,)}


def test_only_a_recipe_that_is_asked_for_says_where_to_write(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"train-student": {"run-dir": "elsewhere", "max-steps": 7}}))
    assert recipe_settings(str(path), "train-student", StudentConfig, False) == {"max_steps": 7}
    asked = recipe_settings(str(path), "train-student", StudentConfig, True)
    assert asked == {"max_steps": 7, "run_dir": Path("elsewhere")}


# -- tables ------------------------------------------------------------------------------------------------


def test_no_cell_of_a_table_is_a_formula(tmp_path):
    formulas = ["=cmd|'/C calc'!A0", "+1+2", "-1+2", "@SUM(A1)", "\t=1", "\r=1", "-model"]
    plain = ["-1.5", "+3", "-1e-05", "a=b", "", None, -1.5, 3]
    path = save_table(tmp_path / "table.csv", ["=header", "x"], [[cell, 0] for cell in formulas + plain])
    import csv

    with open(path, newline="") as file:
        cells = [row[0] for row in csv.reader(file)]
    assert cells[0] == "'=header" and cells[1:8] == ["'" + cell.replace("\r", "\n") for cell in formulas]
    assert cells[8:] == ["-1.5", "+3", "-1e-05", "a=b", "", "", "-1.5", "3"]


def test_a_dictionary_is_saved_below_a_link_that_its_user_chose(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    Dictionary(np.eye(4, 8, dtype=np.float32), [], "made up", {}).save(tmp_path / "link" / "d")
    assert (tmp_path / "disk" / "d" / "atoms.npy").is_file()
