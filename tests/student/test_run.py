import errno
import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from faulty_disk import raising_at
from tiny_store import write_store

from mlsm.common.disk import temporary_name
from mlsm.common.errors import RunError, StoreError, WriteError
from student.config import StudentConfig
from student.resolve import resolve_dtype
from student.runs.directory import Run
from student.runs.identity import default_name, find_description, run_identity
from student.train import train


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.promise("12 changed λ, layer …")
def test_the_directory_of_another_run_is_refused_and_untouched(ids_store, settings):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(config)
    before = contents(config.run_dir)
    other = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"lr": 0.5, "seed": 9})
    with pytest.raises(RunError, match=r"lr \(there 0.001, now 0.5\), seed \(there 1, now 9\)"):
        train(other)
    assert contents(config.run_dir) == before


def test_another_store_is_refused(ids_store, lsp_store, settings, tmp_path):
    train(StudentConfig(store=ids_store.path, objective="mlm", **settings))
    with pytest.raises(RunError, match="store target"):
        train(StudentConfig(store=lsp_store.path, objective="mlm", **settings))
    grown = write_store(tmp_path / "grown", k=0, train_windows=160)
    with pytest.raises(RunError, match="store plan"):
        train(StudentConfig(store=grown.path, objective="mlm", **settings))


def refused_and_untouched(config, message):
    before = contents(config.run_dir)
    with pytest.raises(RunError, match=message) as caught:
        train(config)
    assert "\n" not in str(caught.value) and contents(config.run_dir) == before


def test_a_store_of_another_k_another_teacher_or_another_tokenizer_is_refused(lsp_store, settings, tmp_path):
    """Resuming: the plan, and with it every batch, is the same for another k."""
    train(StudentConfig(store=lsp_store.path, **settings))
    wider = write_store(tmp_path / "wider", k=32)
    assert wider.plan_id == lsp_store.plan_id
    for other in (wider, write_store(tmp_path / "logits", k=72, kind="logits")):
        objective = "kd" if other.kind == "logits" else "mlsm"
        config = StudentConfig(store=other.path, objective=objective, **settings)
        refused_and_untouched(config, f"store target .there {lsp_store.target_id}, now {other.target_id}.*in a study: ")
    other_words = write_store(tmp_path / "words", k=24, words=50)
    refused_and_untouched(StudentConfig(store=other_words.path, **settings), "store target.*store plan.*--run-dir")


def test_an_unfinished_store_is_refused_before_anything_is_written(settings, tmp_path):
    store = write_store(tmp_path / "store", k=24)
    next(store.files.units.glob("train-*.json")).unlink()
    for path in (store.path, store.path / "plans" / f"{store.plan_id}.json"):
        with pytest.raises(StoreError, match="unfinished: 1 of 2 units.*encoding command.*finished units are kept"):
            train(StudentConfig(store=path, **settings))
    assert not settings["run_dir"].exists()


def test_an_encoder_of_another_tokenizer_is_refused_before_anything_is_written(lsp_store, settings, tmp_path):
    other = write_store(tmp_path / "other", k=24, words=50)
    exported = train(StudentConfig(store=other.path, **settings | {"run_dir": tmp_path / "first"}))["export"]
    for changes in ({"continue_from": Path(exported)}, {"encoder": exported}):
        with pytest.raises(RunError, match="another tokenizer.*Encode a store with a teacher that has that tokenizer"):
            train(StudentConfig(store=lsp_store.path, **settings | changes))
    assert not settings["run_dir"].exists()


@pytest.mark.parametrize("name", ["thesis.tex", ".mine.tmp"])
def test_a_directory_of_something_else_is_refused_and_untouched(ids_store, settings, name):
    settings["run_dir"].mkdir()
    (settings["run_dir"] / name).write_text("mine")
    with pytest.raises(RunError, match="holds no student run"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings))
    assert [path.name for path in settings["run_dir"].iterdir()] == [name]


def test_a_run_killed_before_its_first_file_begins_anew(ids_store, settings):
    settings["run_dir"].mkdir()
    temporary_name(settings["run_dir"], "config.json").write_text("{")
    assert train(StudentConfig(store=ids_store.path, objective="mlm", **settings))["steps"] == 8
    assert not list(settings["run_dir"].glob(".*"))


def test_a_finished_run_that_was_moved_says_where_it_is(ids_store, settings, tmp_path):
    train(StudentConfig(store=ids_store.path, objective="mlm", **settings))
    moved = settings["run_dir"].rename(tmp_path / "moved")
    result = train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"run_dir": moved}))
    assert result["finished_before"] and result["export"] == str(moved / "export")


def test_a_grown_store_names_the_plan_with_which_the_run_goes_on(settings, tmp_path, caplog):
    caplog.set_level("INFO")
    store = write_store(tmp_path / "store", k=0)
    train(StudentConfig(store=store.path, objective="mlm", **settings))
    write_store(tmp_path / "store", k=0, train_windows=160)
    with pytest.raises(
        RunError, match="It read another plan of this store, and continues with --store (.*json)"
    ) as caught:
        train(StudentConfig(store=store.path, objective="mlm", **settings))
    plan = str(caught.value).rpartition(" ")[2]
    assert caplog.text.count("has 2 plans. The text of") == 1
    assert train(StudentConfig(store=plan, objective="mlm", **settings))["finished_before"]


@pytest.mark.parametrize("length", [{}, {"max_steps": None, "epochs": 8}])
def test_an_unfinished_run_of_a_store_that_has_grown_is_named(settings, tmp_path, caplog, monkeypatch, length):
    """In the default directory, where the same command starts a new run, perhaps of other steps."""
    monkeypatch.chdir(tmp_path)
    store = write_store(tmp_path / "store", k=0)
    given = {"objective": "mlm", **settings, "run_dir": None, **length}

    def stop(*_, **figures):
        if figures.get("step") == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(StudentConfig(store=store.path, **given), stop)
    (begun,) = tmp_path.glob("runs/students/*")
    other = write_store(tmp_path / "other", k=0, train_windows=120)
    train(StudentConfig(store=other.path, **given))
    assert "is unfinished" not in caplog.text  # that store does not have the plan
    write_store(tmp_path / "store", k=0, train_windows=160)
    assert train(StudentConfig(store=store.path, **given))["run"] != str(begun.relative_to(tmp_path))
    (said,) = [line for line in caplog.text.splitlines() if f"{begun.name} is unfinished" in line]
    plan = said.rpartition(" ")[2]
    assert train(StudentConfig(store=plan, **given))["run"] == str(begun.relative_to(tmp_path))


def test_another_k_is_named(settings, tmp_path):
    stores = [write_store(tmp_path / str(k), k=k) for k in (24, 48)]
    train(StudentConfig(store=stores[0].path, **settings))
    with pytest.raises(RunError, match=r"store k \(there 24, now 48\)"):
        train(StudentConfig(store=stores[1].path, **settings))


def test_the_precision_that_auto_stood_for_stays(ids_store, settings):
    """A run begun on a CPU in float32 is not continued in bfloat16 on a GPU, unless asked to by no name."""
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    train(config)
    assert find_description(config.run_dir)["settings"]["dtype"] == "float32"
    assert resolve_dtype("auto", torch.device("cuda", 0)) == "bfloat16"
    train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"dtype": "float32"}))
    with pytest.raises(RunError, match=r"dtype \(there float32, now bfloat16\)"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"dtype": "bfloat16"}))


def test_operational_settings_may_change(ids_store, settings):
    train(StudentConfig(store=ids_store.path, objective="mlm", **settings))
    changed = settings | {"micro_batch": 3, "save_every": 1, "keep_last": 3}
    changed |= {"activation_checkpointing": True}
    assert train(StudentConfig(store=ids_store.path, objective="mlm", **changed))["finished_before"]


def test_a_store_and_its_plan_are_found_again_from_another_directory(ids_store, settings, monkeypatch):
    monkeypatch.chdir(ids_store.path.parent)
    for place in (ids_store.path.name, f"{ids_store.path.name}/plans/{ids_store.plan_id}.json"):
        output = settings["run_dir"] / place.replace("/", "-")
        run = Run(StudentConfig(store=place, objective="mlm", run_dir=output), ids_store, {})
        assert find_description(run.directory)["operational"]["store"] == str(ids_store.path.parent / place)


def test_names_of_runs_tell_them_apart(ids_store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def name(**changes):
        config = StudentConfig(objective="mlm", **changes)
        return default_name(config, run_identity(config, ids_store, {}))

    assert name().startswith("mlm-bert-12x768-seed42-")
    assert len({name(), name(seed=1), name(lr=0.1)}) == 3
    assert name() == name(micro_batch=1)
    assert name(encoder="models/tiny/config.json").startswith("mlm-tiny-seed42-")
    run = Run(StudentConfig(objective="mlm"), ids_store, {})
    assert run.directory.parts[:2] == ("runs", "students") and run.config_file.exists()


def test_of_two_processes_that_begin_a_run_the_first_decides(ids_store, tmp_path):
    """How a machine's products are chosen differs between two trials, and a run keeps what it started with."""
    config = StudentConfig(objective="mlm", run_dir=tmp_path / "run")

    def choose_late():
        Run(config, ids_store, {}, choose_libraries=lambda: {"4x4x4": "torch"})
        return {"8x8x8": "torch"}

    with pytest.raises(RunError, match="another process has just begun"):
        Run(config, ids_store, {}, choose_libraries=choose_late)
    assert Run(config, ids_store, {}).libraries == {"4x4x4": "torch"}


def test_a_log_on_a_full_disk_is_one_clear_line(ids_store, tmp_path):
    run = Run(StudentConfig(objective="mlm", run_dir=tmp_path / "run"), ids_store, {})
    run.log({"step": 1})
    for call in (0, 1):  # the file is opened, then written
        with (
            raising_at(call, errno.ENOSPC),
            pytest.raises(WriteError, match="log.jsonl could not be written.*No space left.*Make room"),
        ):
            run.log({"step": 2})


def test_a_long_log_is_not_read_into_memory(ids_store, tmp_path):
    run = Run(StudentConfig(objective="mlm", run_dir=tmp_path / "run"), ids_store, {})
    run.log_file.write_text("".join(f'{{"step": {step}, "loss": 7.25}}\n' for step in range(20_000)))
    tracemalloc.start()
    try:
        run.drop_log_after(9_999)
        assert tracemalloc.get_traced_memory()[1] < 400_000  # of 600,000 bytes; Python 3.14 needs 270,000
    finally:
        tracemalloc.stop()
    assert run.log_file.read_text() == "".join(f'{{"step": {step}, "loss": 7.25}}\n' for step in range(10_000))


def test_a_log_line_cut_by_a_kill_is_dropped(ids_store, tmp_path):
    run = Run(StudentConfig(objective="mlm", run_dir=tmp_path / "run"), ids_store, {})
    run.log_file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    run.drop_log_after(2)
    assert [json.loads(line)["step"] for line in run.log_file.read_text().splitlines()] == [1, 2]
