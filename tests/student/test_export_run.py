import json
import re
import resource
import shutil
import textwrap
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from tiny_exports import ATTENTION, IDS, WHERE, exported, scrambled
from transformers import AutoModel, BertConfig

from mlsm.commands.export_student import show as show_export
from mlsm.common.durable import replace_json
from mlsm.common.errors import PlaceError, RunError, WriteError
from mlsm.evaluation.lineage import lineage
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import encoder_config
from student.encoders.model import build_student
from student.lsp_model import LspModel
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.probe import ProbedLspModel, train_probe
from student.runs import export_run as exporting
from student.runs.config import ExportConfig
from student.runs.directory import Run
from student.runs.export import check_export_place
from student.runs.export_run import export_run
from student.runs.identity import find_description
from student.train import train

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


class Stopped(Exception):
    pass


def stop_after(step):
    def progress(*args, step=0, **figures):
        if step == last:
            raise Stopped

    last = step
    return progress


def files(directory):
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def finished(lsp_store, settings):
    """A run with kept checkpoints at 1, 2, 4 and 8."""
    config = StudentConfig(store=lsp_store.path, **settings)
    train(config)
    return config.run_dir


def test_the_latest_checkpoint_of_a_finished_run_is_its_export(finished, tmp_path):
    report = export_run(ExportConfig(run=finished, output=tmp_path / "out"))
    assert report == {
        "run": str(finished),
        "step": 8,
        "kept": True,
        "export": str(tmp_path / "out"),
        "dry_run": False,
    }
    assert files(tmp_path / "out") == files(finished / "export")
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "out", finished / "export"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert export_run(ExportConfig(run=finished, output=tmp_path / "out")) == report  # again, for a second push


def test_a_step_can_be_named(finished, tmp_path):
    export_run(ExportConfig(run=finished, step="2", output=tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "lineage.json").read_text())["step"] == 2
    with pytest.raises(RunError, match="no whole checkpoint 3; those there are: 1, 2, 4, 8"):
        export_run(ExportConfig(run=finished, step="3", output=tmp_path / "other"))
    cut = finished / "checkpoints" / "step-00000004" / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-9])
    with pytest.raises(RunError, match="no whole checkpoint 4"):
        export_run(ExportConfig(run=finished, step="4", output=tmp_path / "other"))
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("objective", ["mlsm", "mtl", "mlm", "supersense"])
def test_a_checkpoint_of_an_unfinished_run_exports_as_if_it_were_kept(
    objective, lsp_store, needed_by, settings, tmp_path
):
    BertConfig(**SIZE).save_pretrained(tmp_path / "encoder")
    settings |= {"store": lsp_store.path, "objective": objective, "encoder": str(tmp_path / "encoder")}
    settings |= needed_by(objective)
    kept = StudentConfig(**settings | {"checkpoints": (0.75,), "run_dir": tmp_path / "kept"})
    train(kept)
    unfinished = StudentConfig(**settings | {"checkpoints": (1.0,)})
    with pytest.raises(Stopped):
        train(unfinished, stop_after(7))
    shutil.rmtree(tmp_path / "encoder")  # all that is needed is inside the run and its store
    report = export_run(ExportConfig(run=unfinished.run_dir, output=tmp_path / "out"))
    expected = kept.run_dir / "checkpoints" / "step-00000006"
    assert report["step"] == 6 and not report["kept"]
    names = files(tmp_path / "out")
    assert names == {name for name in files(expected) if "resume" not in name and name != "state.json"}
    for name in names - {"README.md", "lineage.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes(), name
    ours, theirs = (json.loads((path / "lineage.json").read_text()) for path in (tmp_path / "out", expected))
    evaluation = {name: theirs[name] for name in ("held_out", "held_out_step")}
    assert ours | evaluation == theirs  # the other run was evaluated at that step
    assert ours["held_out_step"] < theirs["held_out_step"] == 6
    cards = [(path / "README.md").read_text() for path in (tmp_path / "out", expected)]
    assert "Measured after step" not in cards[1]
    assert ours["held_out"] == {} or f"Measured after step {ours['held_out_step']}, the last" in cards[0]


def test_its_lineage_and_card_say_what_those_of_a_kept_one_do(lsp_store, settings, tmp_path):
    """Where its training began, and the arithmetic of the run, which config.json holds beside the settings."""
    _, start = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "start")
    settings |= {"store": lsp_store.path, "continue_from": start, "products": "torch", "max_steps": 4, "keep_last": 9}
    kept = StudentConfig(**settings | {"checkpoints": (0.75,), "run_dir": tmp_path / "kept"})
    for config in (kept, StudentConfig(**settings | {"checkpoints": (1.0,)})):
        train(replace(config, eval_every=3))
        export_run(ExportConfig(run=config.run_dir, step="3", output=config.run_dir.with_suffix(".out")))
    ours, theirs = settings["run_dir"].with_suffix(".out"), tmp_path / "kept.out"
    lineages = [json.loads((path / "lineage.json").read_text()) for path in (ours, theirs)]
    assert lineages[0] == lineages[1]
    assert lineages[0]["continued_from"] == str(start) and lineages[0]["products"] == {"all": "torch"}
    card = (ours / "README.md").read_text()
    assert card == (theirs / "README.md").read_text() and "Trained further, from `start`" in card


@pytest.mark.parametrize("checkpoint", ["latest", "3"])
def test_licence_and_languages_are_on_the_card_where_they_are_given(checkpoint, lsp_store, settings, tmp_path):
    """Of a checkpoint that is kept (the last one), and of one that is not."""
    train(StudentConfig(store=lsp_store.path, **settings | {"max_steps": 4, "checkpoints": (1.0,), "keep_last": 2}))
    request = {"run": settings["run_dir"], "step": checkpoint}
    export_run(ExportConfig(**request, output=tmp_path / "plain"))
    export_run(ExportConfig(**request, output=tmp_path / "said", license="apache-2.0", language=("no", "en")))
    plain, said = (ModelCard.load(tmp_path / name / "README.md") for name in ("plain", "said"))
    assert plain.data.license is None and plain.data.language is None
    assert said.data.license == "apache-2.0" and said.data.language == ["no", "en"] and said.text == plain.text
    rest = {name: value for name, value in said.data.to_dict().items() if name not in ("license", "language")}
    assert rest == plain.data.to_dict()


@pytest.mark.parametrize("terms", [{"license": "a: b"}, {"license": "x\ny"}, {"language": ("english",)}])
def test_terms_that_the_hub_does_not_know_are_refused(terms):
    with pytest.raises(ValueError, match="--license is an identifier|--language takes codes"):
        ExportConfig(**terms)


def test_the_encoder_is_built_from_the_words_of_the_run(family, lsp_store, tmp_path):
    objective = Mtl(lsp_store)
    config = StudentConfig(encoder=str(family), objective="mtl", store=str(lsp_store.path), run_dir=tmp_path / "run")
    Run(config, lsp_store, encoder_config(config, lsp_store).to_diff_dict())
    trained = scrambled(build_student(config, lsp_store, objective))
    built = exporting._task(config.run_dir, find_description(config.run_dir), [lsp_store], config.run_dir).build()
    built.load_state_dict(trained.state_dict(), strict=True)
    assert torch.equal(built.eval()(IDS, ATTENTION, WHERE), trained(IDS, ATTENTION, WHERE))
    assert built.encoder.config.to_diff_dict() == trained.encoder.config.to_diff_dict()


def test_a_further_trained_student_needs_no_weights_to_begin_with(lsp_store, settings, tmp_path):
    _, start = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "start")
    settings |= {"store": lsp_store.path, "continue_from": start, "checkpoints": (1.0,)}
    with pytest.raises(Stopped):
        train(StudentConfig(**settings), stop_after(4))
    shutil.rmtree(start)
    report = export_run(ExportConfig(run=settings["run_dir"], output=tmp_path / "out"))
    assert report["step"] == 3
    described = find_description(settings["run_dir"])["settings"]
    assert json.loads((tmp_path / "out" / "lineage.json").read_text())["settings"] == described
    weights = load_file(settings["run_dir"] / "checkpoints" / "step-00000003" / "resume" / "student.safetensors")
    loaded = LspModel.from_pretrained(tmp_path / "out").student.state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)


def test_the_lineage_of_a_further_trained_student_says_which_weights_it_began_with(lsp_store, settings, tmp_path):
    _, start = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "start")
    train(StudentConfig(**settings | {"store": lsp_store.path, "continue_from": start, "max_steps": 2}))
    export, described = settings["run_dir"] / "export", find_description(settings["run_dir"])["settings"]
    known = json.loads((export / "lineage.json").read_text())
    assert known["settings"] == described and known["continued_from"] == str(start)
    assert described["continue_from"] == lineage(export)["identity"]["settings"]["continue_from"] != str(start)
    card = (export / "README.md").read_text()
    assert "Trained further, from `start`" in card and str(start.parent) not in card
    assert lineage(export)["identity"]["settings"] == described | {"dropout": 0.1}  # left open: the encoder's own


def test_an_unfinished_probe_is_exported_with_its_student(lsp_store, settings, tmp_path):
    _, student = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "student")
    settings = {name: value for name, value in settings.items() if name != "encoder"}
    settings |= {"store": str(lsp_store.path), "student": str(student), "checkpoints": (1.0,)}
    with pytest.raises(Stopped):
        train_probe(ProbeConfig(**settings), stop_after(4))
    export_run(ExportConfig(run=settings["run_dir"], output=tmp_path / "out"))
    probe = load_file(settings["run_dir"] / "checkpoints" / "step-00000003" / "resume" / "student.safetensors")
    model = ProbedLspModel.from_pretrained(tmp_path / "out")
    assert torch.equal(model.probed.probe_Vk, probe["probe_Vk"])
    shutil.rmtree(student)
    exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "student")  # the same again
    head = student / "lsp_head.safetensors"
    head.write_bytes(head.read_bytes()[:-4] + b"\1\1\1\1")
    with pytest.raises(RunError, match="no longer the student"):
        export_run(ExportConfig(run=settings["run_dir"], output=tmp_path / "other"))


def test_what_cannot_be_exported_is_one_clear_line(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    with pytest.raises(RunError, match="in use and holds no export"):
        export_run(ExportConfig(run=finished, output=tmp_path / "mine"))
    assert files(tmp_path / "mine") == {"thesis.tex"}
    with pytest.raises(RunError, match="not a run with checkpoints"):
        export_run(ExportConfig(run=finished / "export"))
    with pytest.raises(RunError, match="no run with a checkpoint under"):
        export_run(ExportConfig())
    with pytest.raises(ValueError, match="found half"):
        ExportConfig(step="half")


@pytest.mark.parametrize("mine", [".git/HEAD", "notes.txt", "resume/student.safetensors"])
def test_an_export_with_more_in_it_is_not_replaced(mine, finished, tmp_path):
    out = ExportConfig(run=finished, output=tmp_path / "out")
    export_run(out)
    (tmp_path / "out" / mine).parent.mkdir(exist_ok=True)
    (tmp_path / "out" / mine).write_text("mine")
    with pytest.raises(RunError, match=f"what no export writes: {mine.split('/')[0]}\\. Nothing was changed"):
        export_run(out)
    assert (tmp_path / "out" / mine).read_text() == "mine"


@pytest.mark.parametrize("place", [".", "export", "checkpoints/new", "checkpoints/step-00000002", "../link/export"])
def test_an_output_in_a_run_is_refused(place, finished):
    (finished.parent / "link").symlink_to(finished)
    before = files(finished)
    with pytest.raises(RunError, match="is inside the run"):
        export_run(ExportConfig(run=finished, output=finished / place))
    assert files(finished) == before


def test_every_file_of_every_export_can_be_replaced(family, lsp_store, tmp_path):
    for objective in (Mlsm(lsp_store), Mtl(lsp_store)):
        _, export = exported(family, objective, lsp_store, tmp_path / objective.name)
        check_export_place(export)


def test_a_checkpoint_that_the_run_replaces_meanwhile(finished, tmp_path, monkeypatch):
    read_file = exporting.read_file

    def gone(path):
        shutil.rmtree(path.parent)
        return read_file(path)

    monkeypatch.setattr(exporting, "read_file", gone)
    with pytest.raises(RunError, match="while it was read. Run the same command again"):
        export_run(ExportConfig(run=finished, output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_of_training_that_the_run_replaces_meanwhile(lsp_store, settings, tmp_path, monkeypatch):
    config = StudentConfig(store=lsp_store.path, **settings | {"checkpoints": (), "save_every": 2})
    with pytest.raises(Stopped):
        train(config, stop_after(5))

    def gone(path, model):
        shutil.rmtree(path)
        return load_weights(path, model)

    load_weights = exporting.load_weights
    monkeypatch.setattr(exporting, "load_weights", gone)
    with pytest.raises(RunError, match="while it was read. Run the same command again"):
        export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out"))


def test_without_names_the_newest_run_goes_to_runs_exports(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        train(StudentConfig(store=lsp_store.path, **settings | {"run_dir": None, "seed": seed}))
    (export,) = [export_run(ExportConfig())["export"]]
    assert export.startswith("runs/exports/mlsm-bert-2x32-seed2-") and export.endswith("-step-00000008")
    assert export_run(ExportConfig())["export"] == export  # the same run again
    assert AutoModel.from_pretrained(export)(IDS).last_hidden_state.shape == (2, 16, 32)


def test_runs_of_one_name_do_not_replace_each_others_exports(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for study, seed in (("one", 1), ("other", 2)):
        train(StudentConfig(store=lsp_store.path, **settings | {"run_dir": f"{study}/mlsm-seed0", "seed": seed}))
    first = export_run(ExportConfig(run=Path("one/mlsm-seed0")))["export"]
    before = files(Path(first))
    with pytest.raises(RunError, match="holds an export of another run. Nothing was changed. Give another --output"):
        export_run(ExportConfig(run=Path("other/mlsm-seed0")))
    assert files(Path(first)) == before
    (tmp_path / "file").touch()
    with pytest.raises(PlaceError, match="file is a file, and a directory is to be written there"):
        export_run(ExportConfig(run=Path("one/mlsm-seed0"), output=tmp_path / "file" / "out"))


@pytest.fixture
def unfinished(lsp_store, settings):
    """A run that was stopped after step 3, whose checkpoint is not kept."""
    config = StudentConfig(store=lsp_store.path, **settings | {"checkpoints": (1.0,)})
    with pytest.raises(Stopped):
        train(config, stop_after(4))
    return config.run_dir


@contextmanager
def files_of_at_most(size):
    """Writing more into a file fails, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 20_000])
@pytest.mark.parametrize(("run", "dry_run"), [("finished", False), ("unfinished", False), ("unfinished", True)])
def test_a_full_disk_is_one_clear_line_and_leaves_nothing(run, dry_run, size, request, tmp_path):
    run, out = request.getfixturevalue(run), tmp_path / "exports" / "out"
    out.parent.mkdir()
    config = ExportConfig(run=run, output=out, push_to_hub="someone/student" if dry_run else None, dry_run=dry_run)
    with files_of_at_most(size), pytest.raises(WriteError) as caught:
        export_run(config)
    message = str(caught.value)
    assert "\n" not in message and message.count("File too large") == 1
    assert "Raise the limit of file sizes" in message or "Make room" in message  # of an error without a number
    assert dry_run != message.startswith(f"{out} could not be written: ")
    assert not list(out.parent.iterdir())


def test_a_full_disk_while_a_kept_checkpoint_is_copied_has_one_reason(finished, tmp_path, monkeypatch):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device", "a")

    monkeypatch.setattr("student.runs.export_run.write_files", full)
    with pytest.raises(WriteError, match=r"out could not be written: \[Errno 28\] No space left on device: 'a'\. Noth"):
        export_run(ExportConfig(run=finished, output=tmp_path / "out"))


def test_the_baseline_is_of_the_windows_that_the_student_was_measured_on(lsp_store, settings, tmp_path):
    """Resumed with other --eval-windows, a run logs another baseline before it evaluates again."""
    config = StudentConfig(store=lsp_store.path, **settings)
    with pytest.raises(Stopped):
        train(config, stop_after(3))  # measured at step 2, saved at 3
    found = []
    for windows in (None, 3, 5):
        if windows is not None:
            with pytest.raises(Stopped):
                train(replace(config, eval_windows=windows), stop_after(3))
        export_run(ExportConfig(run=config.run_dir, output=tmp_path / "out"))
        found.append(json.loads((tmp_path / "out" / "lineage.json").read_text()))
    kept = json.loads((config.run_dir / "checkpoints" / "step-00000002" / "lineage.json").read_text())
    assert [(one["step"], one["held_out_step"]) for one in found] == [(3, 2)] * 3
    assert [one["baseline"] for one in found] == [kept["baseline"]] * 3 and kept["baseline"]
    logged = [
        line["baseline"]
        for line in map(json.loads, (config.run_dir / "log.jsonl").read_text().splitlines())
        if "baseline" in line
    ]
    assert logged[0] == kept["baseline"] != logged[-1]


def test_without_a_log_there_is_no_baseline(unfinished, tmp_path):
    (unfinished / "log.jsonl").unlink()
    assert export_run(ExportConfig(run=unfinished, output=tmp_path / "out"))["step"] == 3
    assert json.loads((tmp_path / "out" / "lineage.json").read_text())["baseline"] == {}


def test_a_store_that_the_run_names_from_elsewhere_can_be_named(unfinished, lsp_store, ids_store, tmp_path):
    description = find_description(unfinished)
    description["operational"]["store"] = "stores/far"
    replace_json(unfinished / "config.json", description)
    with pytest.raises(RunError, match="trained on stores/far, relative to another directory.*--store"):
        export_run(ExportConfig(run=unfinished, output=tmp_path / "out"))
    with pytest.raises(ValueError, match="has no plan|is not the store of"):
        export_run(ExportConfig(run=unfinished, output=tmp_path / "out", store=str(ids_store.path)))
    assert not (tmp_path / "out").exists()
    export_run(ExportConfig(run=unfinished, output=tmp_path / "out", store=str(lsp_store.path)))
    assert LspModel.from_pretrained(tmp_path / "out").facts["lsps"] == lsp_store.k


def test_a_dry_run_lists_what_a_checkpoint_that_is_not_kept_would_be(unfinished, tmp_path):
    config = ExportConfig(run=unfinished, output=tmp_path / "out", push_to_hub="someone/student", dry_run=True)
    (row,) = export_run(config)["revisions"]
    assert not (tmp_path / "out").exists()
    export_run(replace(config, dry_run=False, push_to_hub=None))
    there = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert row == {"branch": "main", "directory": str(tmp_path / "out"), "files": there} and len(there) > 5


@pytest.mark.parametrize("objective", ["mlsm", "mlm"])
def test_the_summary_has_the_lines_of_the_card_which_load_the_export(objective, lsp_store, settings, tmp_path):
    train(StudentConfig(store=lsp_store.path, **settings | {"objective": objective, "checkpoints": (1.0,)}))
    config = ExportConfig(run=settings["run_dir"], output=tmp_path / "o'ut")
    summary = show_export(export_run(config), config)
    loading = summary.partition("Load it:")[2]
    names = {}
    exec(textwrap.dedent(loading.replace("The bank raised its rates.", "w1 w2")), names)
    assert names["model"].config.hidden_size == 32 and names["tokenizer"].vocab_size == lsp_store.vocab_size
    assert ("lsps" in names) == (objective == "mlsm")
    section = (tmp_path / "o'ut" / "README.md").read_text().partition("\n## Loading\n")[2].partition("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert code
    for line in "".join(code).splitlines():
        assert f"  {line.replace('PATH', repr(str(config.output)))}\n" in loading + "\n"
    dry = replace(config, dry_run=True)
    assert "Load it" not in show_export(export_run(dry), dry)
