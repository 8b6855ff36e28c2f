"""The public API: quick to import, complete, with typed results, and a clear error if another package shadows ours."""

import inspect
import os
import re
import subprocess
import sys
import typing
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from made_beside import models_made_during
from planted import unit_rows
from stub import stub
from tiny_store import write_store

import mlsm
import student.train
from mlsm.commands import names
from mlsm.evaluation.comparison.config import CompareConfig
from mlsm.results import EncodedStore, Evaluated, TrainedStudent

ROOT = Path(__file__).resolve().parent.parent
SIZES = {"max_steps": 4, "batch_windows": 8, "micro_batch": 8, "eval_windows": 8}
TINY = SIZES | {"encoder": "bert-1x32", "device": "cpu"}


def python(code, cwd, path=str(ROOT)):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})


def test_the_import_is_light_and_quick(tmp_path):
    heavy = "torch numpy transformers yaml mlsm.__main__ pipeline student shards evaluation"
    code = (
        "import sys, time; began = time.process_time(); import mlsm; seconds = time.process_time() - began\n"
        f"print(sorted(set(sys.modules) & set({heavy!r}.split())), seconds < 0.2, seconds)"
    )
    run = python(code, tmp_path)
    assert run.stdout.startswith("[] True"), run.stdout + run.stderr


def test_every_public_name_is_there():
    assert {name.replace("_", "-") for name in mlsm.COMMANDS} == set(names())
    assert {
        "Store",
        "LspDataset",
        "LspModel",
        "LspForPreTraining",
        "nonneg_lasso",
        "encode_lsp",
        "train_student",
    } <= set(mlsm.__all__)
    assert all(getattr(mlsm, name).__doc__ for name in mlsm.__all__)
    assert {name for name in dir(mlsm) if not name.startswith("__")} == set(mlsm.__all__)
    written = (ROOT / "mlsm" / "__init__.pyi").read_text(encoding="utf-8")
    assert written == stub(), "run: python tests/stub.py"
    ways = ("from {} import {} as {}\n", "\ndef {2}(", "\nclass {2}(")
    assert all(any(way.format(mlsm.HOME.get(name), name, name) in written for way in ways) for name in mlsm.__all__)
    with pytest.raises(AttributeError, match="no attribute 'encode'. It has: .*encode_lsp"):
        mlsm.encode  # noqa: B018


def test_results_stand_for_their_paths(tmp_path):
    store = write_store(tmp_path / "store", k=24)
    np.save(tmp_path / "d.npy", unit_rows(np.random.default_rng(0).normal(size=(6, 4))))
    imported = mlsm.import_dictionary(file=tmp_path / "d.npy", output=tmp_path)
    assert (
        mlsm.EncodeConfig(dictionary=imported).dictionary == Path(imported.dictionary)
        and len(imported.open().atoms_Kd) == 6
    )
    made = mlsm.make_mask_weights(kind="frequency", store=store.path, output=tmp_path / "table")
    evaluated = Evaluated.of({"output": str(tmp_path / "runs"), "made": 2})
    assert CompareConfig(results=evaluated).results == (tmp_path / "runs" / "evaluations",)
    assert CompareConfig(results=[evaluated]).results == (tmp_path / "runs" / "evaluations",)
    trained = mlsm.train_student(store=store.path, mask_weights=made, run_dir=tmp_path / "run", **TINY)
    assert trained.steps == 4 and made.tokens > 0


def test_the_module_is_the_command_line(tmp_path):
    for flags in (["--help"], ["help", "clean"], ["encode-lsp", "--print-config"]):
        said = []
        for command in (["-m", "mlsm"], [str(ROOT / "cli.py")]):
            run = subprocess.run(
                [sys.executable, *command, *flags],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            assert run.returncode == 0, run.stderr
            said.append(run.stdout.replace(f"python {ROOT / 'cli.py'}", "python -m mlsm"))
        assert said[0] == said[1]


@pytest.mark.parametrize("name", ["pipeline", "student", "shards"])
@pytest.mark.parametrize("is_package", [True, False])
def test_a_package_that_shadows_ours_is_named(name, is_package, tmp_path):
    other = tmp_path / "elsewhere" / (f"{name}/__init__.py" if is_package else f"{name}.py")
    other.parent.mkdir(parents=True)
    other.write_text("")
    run = python("import mlsm", tmp_path, os.pathsep.join([str(tmp_path / "elsewhere"), str(ROOT)]))
    line = run.stderr.splitlines()[-1]
    assert run.returncode == 1 and f"its own package `{name}`" in line and str(other) in line
    assert f"put the right one first:  PYTHONPATH={ROOT}" in line
    assert python("import mlsm", tmp_path, os.pathsep.join([str(ROOT), str(tmp_path / "elsewhere")])).returncode == 0


def test_a_folder_of_that_name_is_no_shadow(tmp_path):
    (tmp_path / "student").mkdir()
    assert python("import mlsm; mlsm.StudentConfig()", tmp_path).returncode == 0


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: mlsm.train_student(learning_rate=3), "no setting 'learning_rate'. Did you mean lr?"),
        (lambda: mlsm.encode_lsp(bf16=True), "no setting 'bf16'. Did you mean dtype bfloat16?"),
        (lambda: mlsm.clean(qqq=1), "no setting 'qqq'. It has: path"),
        (lambda: mlsm.encode_lsp(mlsm.EncodeConfig(), layer=3), "a settings object or keyword arguments, not both"),
        (lambda: mlsm.clean(progress=1), "clean: progress takes True or a function, found 1"),
    ],
)
def test_settings_that_do_not_exist(call, words):
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


def test_settings_are_checked_as_flags_are():
    with pytest.raises(ValueError, match="--lr takes a number or null, found 'fast'"):
        mlsm.train_student(store="x", lr="fast")
    with pytest.raises(ValueError, match="no recipe 'nope'"):
        mlsm.encode_lsp(recipe="nope")


def test_encode_and_train(tmp_path, monkeypatch, caplog, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("\n\n".join(f"Document {n} has a few words, all short." for n in range(300)))
    material = {"corpus": "a.txt", "tokenizer": "bundled", "max_length": 32, "unit_tokens": 2000}
    (estimate,) = mlsm.encode_ids(**material, dry_run=True)
    assert estimate.tokens > 1000 and repr(estimate).startswith("Estimate(tokens=")
    (store,) = mlsm.encode_ids(**material)
    assert repr(store).startswith(f"EncodedStore(store={store.store!r}, kind='ids', tokens={store.tokens}, windows=")
    assert store["units"] == store.report["units"] > 0 and Path(store) == Path(store.store)
    capsys.readouterr()
    mlsm.encode_ids(**material, output="again", progress=True)
    assert re.search(r"^encode: [\d,]+ of [\d,]+ tokens", capsys.readouterr().err, re.MULTILINE)
    assert store.open().plan.units and mlsm.encode_ids(**material)[0].finished_before
    calls = []
    student = mlsm.train_student(store=store, objective="mlm", progress=lambda *how, **_: calls.append(how), **TINY)
    assert student.steps == 4 and student.report["run"] == os.fspath(student) and calls
    assert mlsm.export_student(run=student, output="there").export == "there"
    with caplog.at_level("INFO", "mlsm"):
        assert mlsm.train_student(objective="mlm", **TINY).finished_before
    assert f"store {store.store} (the only finished one that fits)" in caplog.text


@contextmanager
def float64_by_default():
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("mode", "objective"),
    [
        (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "mlsm"),
        (torch.no_grad, "mlsm"),
        (torch.inference_mode, "mlsm"),
        (float64_by_default, "mlm"),
    ],
    ids=["autocast", "no_grad", "inference_mode", "float64"],
)
def test_the_modes_of_a_caller_change_no_result(mode, objective, tmp_path):
    store = write_store(tmp_path / "store", k=24).path
    plain = mlsm.train_student(store=store, objective=objective, run_dir=tmp_path / "a", **TINY)
    with mode():
        within = mlsm.train_student(store=store, objective=objective, run_dir=tmp_path / "b", **TINY)
        assert mode is not torch.no_grad or not torch.is_grad_enabled()
    assert within.held_out_loss == plain.held_out_loss


def test_numpy_does_not_raise_because_its_caller_asked_for_that(tmp_path):
    store, seen = write_store(tmp_path / "store", k=24).path, []
    with np.errstate(all="raise"):
        mlsm.train_student(
            store=store, run_dir=tmp_path / "a", progress=lambda *_, **__: seen.append(np.geterr()["under"]), **TINY
        )
        assert set(seen) == {"ignore"} and np.geterr()["under"] == "raise"


def test_a_model_that_another_thread_makes_changes_no_student(tmp_path, monkeypatch):
    store = write_store(tmp_path / "store", k=24).path
    plain = mlsm.train_student(store=store, run_dir=tmp_path / "a", **TINY)
    with models_made_during(monkeypatch, student.train, "to_device") as made:
        beside = mlsm.train_student(store=store, run_dir=tmp_path / "b", **TINY)
    assert len(made) >= TINY["max_steps"] and beside.held_out_loss == plain.held_out_loss


def test_texts_that_are_none_are_not_left_out():
    with pytest.raises(ValueError, match="--texts-a takes"):
        mlsm.similarity(None, ["a"], "runs/stores/x")


def test_a_script_without_a_guard_is_told(tmp_path):
    (tmp_path / "script.py").write_text(
        "import multiprocessing, mlsm\n"
        "mlsm.clean(path='.')\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "    child.start()\n"
        "    child.join()\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "script.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert 'mlsm.clean was called while a worker imported the script. Call it below if __name__ == "__main__"' in (
        ended.stderr
    )


def test_results_are_equal_only_to_themselves():
    one, other = TrainedStudent.of({"run": "r"}), TrainedStudent.of({"run": "r"})
    assert one == one and one != other and len({one, other}) == 2
    atoms = mlsm.Dictionary(np.eye(3, dtype=np.float32), [], "test", {})
    assert atoms in [atoms] and len({atoms}) == 1


def test_a_recipe_stands_behind_the_arguments(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("student.train.train", lambda config, progress: seen.append(config) or {})
    mlsm.train_student(recipe="paper", store="s", lr=3e-4)
    mlsm.train_student(recipe="paper", store="s", epochs=2)
    (by_steps, by_epochs) = seen
    assert (by_steps.max_steps, by_steps.lr, by_steps.encoder) == (100_000, 3e-4, "deberta-base")
    assert (by_epochs.max_steps, by_epochs.epochs) == (None, 2)


def test_tools_over_a_store(tmp_path):
    store = EncodedStore.of({"store": str(write_store(tmp_path / "lsp-tiny", k=24).path)})
    found = mlsm.verify_shards(store=store, full=True)
    assert found.whole and found.units > 0 and found["stray"] == []
    assert mlsm.show_shards(store=store)["store"] == store.store
    derived = mlsm.derive_shards(store=store, top_n=2)
    assert derived.kind == "lsp" and derived.store != store.store
    exported = mlsm.export_store(store=derived, output=tmp_path / "parquet")
    assert exported["store"] == derived.store and exported["splits"]["train"]["windows"] > 0
    assert "removed=<0 entries>" in repr(mlsm.clean(path=tmp_path))
    assert len(mlsm.LspDataset(derived, seed=1)) == len(mlsm.LspWindows(derived)) > 0


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        (mlsm.LspModel.from_pretrained, "source"),
        (mlsm.ProbedLspModel.from_pretrained, "source"),
        (mlsm.Store.open, "path"),
        (mlsm.LspDataset.__init__, "store"),
        (mlsm.LspWindows.__init__, "store"),
        (mlsm.LspCollator.__init__, "store"),
        (mlsm.LspForPreTraining.from_encoder, "store"),
    ],
)
def test_a_result_is_no_type_error_where_a_path_is_expected(function, argument):
    """As in the examples of docs/python.md: a TrainedStudent is neither a str nor a Path, but is PathLike."""
    assert issubclass(TrainedStudent, os.PathLike)
    assert {str, os.PathLike[str]} <= set(typing.get_args(inspect.signature(function).parameters[argument].annotation))


def test_settings_from_columns_ranges_and_generators(tmp_path):
    texts = (tmp_path / name for name in ("a.txt", "b.txt"))
    config = mlsm.EncodeConfig(layer=range(1, 3), lam=0.1, k=np.array([16, 32]), corpus=texts, teacher="bundled")
    assert (config.layer, config.k) == ((1, 2), (16, 32)) and all(isinstance(k, int) for k in config.k)
    assert config.corpus == (str(tmp_path / "a.txt"), str(tmp_path / "b.txt"))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: mlsm.train_student(objective="mslm"), ValueError, "--objective takes one of .*Did you mean mlm?"),
        (lambda: mlsm.train_student(objective="MLM", recipe="quickstart"), ValueError, "--objective takes one of"),
        (lambda: mlsm.show_shards(store=["a"]), ValueError, "Pass the only entry of this list instead"),
        (lambda: mlsm.train_student(mlsm.EncodeConfig()), TypeError, "one StudentConfig; found EncodeConfig"),
        (lambda: mlsm.train_student(config=3), TypeError, "one StudentConfig; found int"),
        (
            lambda: mlsm.import_dictionary("d.npy"),
            TypeError,
            "arguments, such as file='d.npy', or one ImportConfig; found str",
        ),
    ],
)
def test_a_slip_is_named(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_other_names_of_splits(tmp_path):
    Path(tmp_path / "a.txt").write_text("\n\n".join(f"Document {n} has a few words." for n in range(300)))
    (store,) = mlsm.encode_ids(corpus=tmp_path / "a.txt", tokenizer="bundled", max_length=32, output=tmp_path / "runs")
    for read in (
        lambda: mlsm.LspWindows(store, "test"),
        lambda: mlsm.LspWindows(store, None),
        lambda: mlsm.Store.open(store).urls("validation"),
    ):
        with pytest.raises(ValueError, match="a split is train or held_out, found"):
            read()


def test_a_tilde_is_expanded_where_a_dictionary_is_saved(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    mlsm.Dictionary(np.eye(3, dtype=np.float32), [], "test", {}).save("~/atoms")
    assert mlsm.Dictionary.load(tmp_path / "atoms").atoms_Kd.shape == (3, 3)
