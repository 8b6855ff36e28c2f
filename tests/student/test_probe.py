import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_exports import ATTENTION, IDS, WHERE, exported
from tiny_store import curve, log_of, write_store
from transformers import AutoModel, AutoModelForMaskedLM

from mlsm.cli.settings import parse
from mlsm.commands import load
from mlsm.common.durable import replace_json
from mlsm.common.errors import RunError
from mlsm.evaluation.tasks.scoring.models import load as load_scored
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import weights_fingerprint
from student.encoders.stock import HEAD_LAYOUTS
from student.lsp_model import LspModel
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.probe import ProbedLspModel, ProbedStudent, merge, probe_task, train_probe
from student.resolve import rate_for_probe
from student.runs.identity import find_description
from student.train import train


@pytest.fixture
def probing(lsp_store, settings, tmp_path):
    """Settings of a probe that takes a second, on the export of a student."""
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    settings = {name: value for name, value in settings.items() if name != "encoder"}
    return settings | {"student": str(export), "store": str(lsp_store.path), "lr": 0.05}


def probed(encoder, store, probe_input, directory):
    """A probe as if trained, of a student as if trained."""
    _, export = exported(encoder, Mlsm(store), store, directory)
    model = ProbedStudent(LspModel.from_pretrained(export).student, store.vocab_size, probe_input)
    with torch.no_grad():
        model.probe_Vk.normal_(generator=torch.Generator().manual_seed(2))
    return model


def by_definition(model, where):
    """The probe's logits, from the student's outputs."""
    outputs = model.student(IDS, ATTENTION, where)
    if model.probe_input == "softmax":
        outputs = outputs.softmax(dim=1)
    return outputs @ model.probe_Vk.T


@pytest.mark.parametrize("probe_input", ["softmax", "logits"])
def test_a_probe_is_one_matrix_on_a_frozen_student(probe_input, lsp_store, tmp_path):
    model = probed("bert-2x32", lsp_store, probe_input, tmp_path / "export").train()
    assert not model.student.training
    assert [name for name, _ in model.named_parameters()] == ["probe_Vk"] == list(model.state_dict())
    logits = model(IDS, ATTENTION, WHERE)
    assert torch.allclose(logits, by_definition(model, WHERE), atol=1e-6)
    logits.sum().backward()
    assert model.probe_Vk.grad is not None
    assert all(weight.grad is None for weight in model.student.parameters())
    assert next(model.to(torch.float64).student.parameters()).dtype == torch.float64  # it moves along


def test_a_logits_probe_merges_into_a_stock_model_with_the_same_scores(family, lsp_store, tmp_path):
    model = probed(family, lsp_store, "logits", tmp_path / "export")
    merge(model).save_pretrained(tmp_path / "merged")
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "merged")
    theirs = stock(input_ids=IDS, attention_mask=ATTENTION).logits
    ours = by_definition(model, torch.arange(32)).view(2, 16, -1)
    real = ATTENTION.bool()
    assert theirs.shape == ours.shape == (2, 16, lsp_store.vocab_size)
    assert torch.allclose(theirs[real], ours[real], atol=1e-4)
    assert torch.equal(theirs[real].argmax(dim=1), ours[real].argmax(dim=1))
    assert ours.std() > 0.1  # as scores that can differ


@pytest.mark.parametrize(("probe_input", "lr"), [("softmax", 0.3), ("logits", 0.05)])
def test_a_trained_probe_predicts_better_than_frequencies_and_its_export_scores_alike(
    probe_input, lr, lsp_store, settings, tmp_path
):
    student = train(StudentConfig(store=lsp_store.path, **settings | {"max_steps": 60, "lr": 5e-3}))
    changes = {"max_steps": 60, "lr": lr, "run_dir": tmp_path / "probe", "student": student["run"]}
    settings = {name: value for name, value in settings.items() if name != "encoder"}
    stages = set()
    result = train_probe(
        ProbeConfig(probe_input=probe_input, **settings | changes), lambda stage, *args, **rest: stages.add(stage)
    )
    assert stages == {"train-probe"}
    assert result["improvement"] > 0.05 and result["store"] == str(lsp_store.path)
    assert result["parameters"] == lsp_store.vocab_size * lsp_store.k
    export, last = Path(result["export"]), tmp_path / "probe" / "checkpoints" / "step-00000060"
    assert {path.name for path in last.parent.iterdir()} == {f"step-{step:08d}" for step in (6, 15, 30, 60)}
    assert list(load_file(last / "resume" / "student.safetensors")) == ["probe_Vk"]
    source = LspModel.from_pretrained(student["run"]).student
    model = ProbedStudent(source, lsp_store.vocab_size, probe_input)
    model.load_state_dict(load_file(last / "resume" / "student.safetensors"))
    ours = by_definition(model, torch.arange(32)).view(2, 16, -1)
    loader = ProbedLspModel if probe_input == "softmax" else AutoModelForMaskedLM
    theirs = loader.from_pretrained(export)(IDS, attention_mask=ATTENTION).logits
    real = ATTENTION.bool()
    if probe_input == "softmax":
        half = loader.from_pretrained(export).bfloat16()(IDS, attention_mask=ATTENTION).logits
        assert torch.allclose(half[real].float(), ours[real], atol=0.1)
    assert torch.allclose(theirs[real], ours[real], atol=1e-4)
    assert torch.equal(theirs[real].argmax(dim=1), ours[real].argmax(dim=1))
    assert weights_fingerprint(LspModel.from_pretrained(export).student) == weights_fingerprint(source)
    assert AutoModel.from_pretrained(export).config.hidden_size == 32
    before, *_ = (export / "README.md").read_text().split("```python\nimport mlsm\n")
    assert before.rstrip().endswith("needs the package `mlsm`:")
    lineage = json.loads((export / "lineage.json").read_text())
    assert lineage["student"]["objective"] == "mlsm" and lineage["student"]["step"] == 60


@pytest.mark.parametrize("objective", [Mlm, Mlsm])
def test_a_probe_of_hidden_states_reads_any_student_and_is_scored(objective, lsp_store, probing, tmp_path):
    """The oracle: transformers' last hidden state times the matrix, for a student with LSPs and one without."""
    _, export = exported("bert-2x32", objective(lsp_store), lsp_store, tmp_path / "student")
    changes = {"student": str(export), "probe_input": "hidden"}
    result = train_probe(ProbeConfig(**probing | changes))
    assert result["parameters"] == lsp_store.vocab_size * 32
    out = probing["run_dir"] / "export"
    matrix = load_file(out / "probe.safetensors")["hidden_probe.weight"]
    assert matrix.abs().sum() > 0
    stock = AutoModel.from_pretrained(export, add_pooling_layer=False).eval()
    with torch.no_grad():
        hidden = stock(IDS, attention_mask=ATTENTION).last_hidden_state
    ours = ProbedLspModel.from_pretrained(out)(IDS, attention_mask=ATTENTION).logits
    real = ATTENTION.bool()
    torch.testing.assert_close(ours[real], (hidden @ matrix.T)[real], rtol=1e-4, atol=1e-5)
    scored, _ = load_scored(out, torch.device("cpu"))
    logits = scored.logits(IDS[:1], torch.tensor([3]))
    torch.testing.assert_close(logits, ours[:1, 3], rtol=1e-4, atol=1e-5)
    with pytest.raises(RunError, match="is a probe; pass the student that it probes"):
        train_probe(ProbeConfig(**probing | changes | {"student": str(out), "run_dir": tmp_path / "second"}))
    assert "last hidden states" in (out / "README.md").read_text()
    (out / "probe.safetensors").write_bytes((out / "probe.safetensors").read_bytes()[:-100])
    with pytest.raises(RunError, match=r"cannot be loaded: one of its files is damaged.*SafetensorError"):
        ProbedLspModel.from_pretrained(out)


def test_a_killed_probe_resumes_bit_for_bit(probing, tmp_path, train_until_killed):
    unbroken = ProbeConfig(**probing | {"run_dir": tmp_path / "unbroken"})
    train_probe(unbroken)
    killed = ProbeConfig(**probing)
    train_until_killed(killed, 5)
    steps = []
    train_probe(killed, lambda *args, step, **figures: steps.append(step))
    assert steps == [4, 5, 6, 7, 8]
    assert curve(unbroken.run_dir) == curve(killed.run_dir)
    ours, theirs = (load_file(run.run_dir / "export" / "probe.safetensors") for run in (unbroken, killed))
    assert torch.equal(ours["probe.weight"], theirs["probe.weight"])


def test_another_student_is_another_run(probing, lsp_store, tmp_path):
    train_probe(ProbeConfig(**probing))
    _, other = exported("bert-1x32", Mlsm(lsp_store), lsp_store, tmp_path / "other")
    with pytest.raises(RunError, match="holds another run"):
        train_probe(ProbeConfig(**probing | {"student": str(other)}))
    moved = Path(probing["student"]).rename(tmp_path / "moved")
    assert train_probe(ProbeConfig(**probing | {"student": str(moved)}))["finished_before"]


def test_masks_and_batches_are_those_of_an_mlm_student(probing, ids_store, settings, tmp_path):
    """A probe reads any store of the tokenizer; here one without LSPs."""
    train_probe(ProbeConfig(**probing | {"store": str(ids_store.path)}))
    train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"run_dir": tmp_path / "mlm"}))
    probe, mlm = log_of(probing["run_dir"]), log_of(tmp_path / "mlm")
    assert [line["batch"] for line in probe.values()] == [line["batch"] for line in mlm.values()]


def test_without_names_the_newest_student_and_its_store_are_taken(lsp_store, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = {name: value for name, value in settings.items() if name not in ("run_dir", "encoder")}
    probe = ProbeConfig(**settings)
    with pytest.raises(RunError, match="no finished student with LSP.*train-student"):
        train_probe(probe)
    for changes in ({"objective": "mtl"}, {"seed": 2}, {"objective": "mlm"}):
        train(StudentConfig(store=lsp_store.path, encoder="bert-2x32", **settings | changes))
    result = train_probe(probe)
    (run,) = Path("runs/probes").iterdir()
    assert run.name.startswith("softmax-mlsm-bert-2x32-seed2-") and result["run"] == str(run)
    assert result["encoder"].startswith("mlsm-bert-2x32-seed2-")


def test_what_does_not_belong_together_is_one_clear_line(probing, lsp_store, ids_store, tmp_path, monkeypatch):
    def refused(**changes):
        with pytest.raises(RunError) as caught:
            train_probe(ProbeConfig(**probing | changes))
        assert "\n" not in str(caught.value) and not probing["run_dir"].exists()
        return str(caught.value)

    other = write_store(tmp_path / "other", k=0, words=50)
    assert "store of another tokenizer" in refused(store=str(other.path))
    assert "Name a store" in refused(store=None)
    _, mlm = exported("bert-2x32", Mlm(ids_store), ids_store, tmp_path / "mlm")
    assert "no lsp_head" in refused(student=str(mlm))
    config = Path(probing["student"]) / "lsp_config.json"
    config.write_text(config.read_text().replace('"max_length": 16', '"max_length": 12'))
    assert "windows of 16 tokens" in refused()
    config.write_text(config.read_text().replace('"max_length": 12', '"max_length": 16'))
    monkeypatch.delitem(HEAD_LAYOUTS, "bert")
    assert "Use --probe-input softmax" in refused(probe_input="logits")
    assert train_probe(ProbeConfig(**probing))["steps"] == 8


@pytest.mark.parametrize("apart", [True, False])
def test_a_student_of_separate_documents_is_read_so_or_a_warning_says_it(apart, probing, caplog):
    lineage = Path(probing["student"]) / "lineage.json"
    lineage.write_text(json.dumps(json.loads(lineage.read_text()) | {"settings": {"documents_apart": not apart}}))
    train_probe(ProbeConfig(**probing | {"documents_apart": apart}))
    theirs, ours = ("without", "with") if apart else ("with", "without")
    assert f"student was trained {theirs} --documents-apart, the probe is {ours}:" in caplog.text
    caplog.clear()
    train_probe(ProbeConfig(**probing | {"documents_apart": not apart, "run_dir": probing["run_dir"] / "2"}))
    assert "documents-apart" not in caplog.text


@pytest.mark.parametrize("probe_input", ["softmax", "logits"])
def test_a_probe_is_not_probed(probe_input, probing, tmp_path):
    train_probe(ProbeConfig(**probing | {"probe_input": probe_input}))
    for source in (probing["run_dir"], probing["run_dir"] / "export"):
        with pytest.raises(RunError, match="is a probe; pass the student that it probes"):
            train_probe(ProbeConfig(**probing | {"student": str(source), "run_dir": tmp_path / "second"}))
    assert not (tmp_path / "second").exists()


def test_a_student_that_is_not_there_or_not_finished_is_said_to_be_so(probing, lsp_store, settings, monkeypatch):
    def refused(student):
        with pytest.raises(RunError) as caught:
            train_probe(ProbeConfig(**probing | {"student": str(student), "store": None, "run_dir": None}))
        return str(caught.value)

    run = settings["run_dir"]
    monkeypatch.chdir(run.parent)
    for mistyped in (run / "nothing", "./nothing", "runs/students/nothing", "export/nothing", "nothing/"):
        assert f"no such directory: {mistyped}" in refused(mistyped)
    for on_the_hub in ("someone/student", "student"):
        assert "name a store with its tokenizer" in refused(on_the_hub)
    with pytest.raises(RunError, match="is not a directory, and not a repository"):
        LspModel.from_pretrained("someone/student")
    train(StudentConfig(store=lsp_store.path, **settings))
    (run / "export").rename(run.parent / "taken")
    writes = f"or pass the directory that this writes:  mlsm export-student {run}"
    assert f"{run} has no export; run its command again, {writes}" in refused(run)


def test_a_task_without_a_student_is_refused(lsp_store):
    with pytest.raises(RunError, match="no student given.*--student"):
        probe_task(ProbeConfig(), lsp_store)


def test_a_store_recorded_relative_to_another_directory_is_asked_for(lsp_store, settings, probing, monkeypatch):
    run = settings["run_dir"]
    train(StudentConfig(store=lsp_store.path, **settings))
    description = find_description(run)
    description["operational"]["store"] = lsp_store.path.name
    replace_json(run / "config.json", description)
    probe = probing | {"student": str(run), "run_dir": run.parent / "probe", "store": None}
    monkeypatch.chdir(run.parent)
    with pytest.raises(RunError, match=f"trained on {lsp_store.path.name}, relative to another directory.*--store"):
        train_probe(ProbeConfig(**probe))
    description["operational"]["store"] = str(run / "moved")
    replace_json(run / "config.json", description)
    with pytest.raises(RunError, match="moved, which is not there: name that store with --store"):
        train_probe(ProbeConfig(**probe))
    description["operational"]["store"] = lsp_store.path.name
    replace_json(run / "config.json", description)
    monkeypatch.chdir(lsp_store.path.parent)
    assert train_probe(ProbeConfig(**probe))["steps"] == 8


def test_a_multi_task_student_is_probed_at_its_lsps(lsp_store, probing, tmp_path):
    student, export = exported("bert-2x32", Mtl(lsp_store), lsp_store, tmp_path / "mtl")
    train_probe(ProbeConfig(**probing | {"student": str(export), "probe_input": "logits"}))
    stock = AutoModelForMaskedLM.from_pretrained(probing["run_dir"] / "export")
    probe = load_file(probing["run_dir"] / "checkpoints" / "step-00000008" / "resume" / "student.safetensors")
    expected = student(IDS, ATTENTION, WHERE)[:, lsp_store.vocab_size :] @ probe["probe_Vk"].T
    theirs = stock(IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[WHERE]
    assert torch.allclose(theirs, expected, atol=1e-4)


def test_only_a_softmax_probe_is_a_probed_lsp_model(probing):
    train_probe(ProbeConfig(**probing | {"probe_input": "logits"}))
    for source in (probing["student"], probing["run_dir"]):
        with pytest.raises(RunError, match="no softmax probe.*AutoModelForMaskedLM"):
            ProbedLspModel.from_pretrained(source)


def test_settings_of_a_probe():
    with pytest.raises(ValueError, match="--probe-input takes one of softmax, logits, hidden, found 'lsp'"):
        ProbeConfig(probe_input="lsp")
    with pytest.raises(ValueError, match="--max-steps"):
        ProbeConfig(max_steps=0)
    assert [rate_for_probe(name, 10_000) for name in ("softmax", "logits", "hidden")] == [0.01, 0.001, 0.001]
    assert [rate_for_probe("softmax", steps) for steps in (500, 10)] == [0.2, 0.5]
    with pytest.raises(TypeError):
        ProbeConfig(encoder="bert-2x32")
    assert ProbeConfig(student="here").identity() == ProbeConfig(student="there", device="cpu").identity()
    assert ProbeConfig(probe_input="logits").identity() != ProbeConfig().identity()


def test_what_a_probe_has_not_is_neither_a_flag_nor_a_setting_of_a_recipe(tmp_path, capsys):
    fixed = {"objective": "kd", "kappa": "2", "encoder": "bert-2x32", "continue-from": "x", "dropout": "0.1"}
    with pytest.raises(SystemExit):
        parse(load("train-probe"), ["--help"])
    shown = capsys.readouterr().out
    assert "--student" in shown and not [name for name in fixed if f"--{name}" in shown]
    for name, value in fixed.items():
        for flag in ([f"--{name}", value], [f"--{name}={value}"]):
            with pytest.raises(ValueError, match=f"there is no flag --{name}"):
                parse(load("train-probe"), flag)
        recipe = tmp_path / "mine.yaml"
        recipe.write_text(f"train-probe: {{{name}: {value}}}\n")
        with pytest.raises(ValueError, match=f"has no setting {name}"):
            parse(load("train-probe"), [], str(recipe))
    settings = parse(load("train-probe"), ["--lr", "0.5"]).settings
    assert (settings.objective, settings.encoder, settings.dropout, settings.lr) == ("mlm", "", None, 0.5)


@pytest.mark.parametrize("family", ["deberta", "deberta-v2"], indirect=True)
def test_a_deberta_student_of_documents_apart_is_read_as_it_was_trained(family, lsp_store, settings, tmp_path):
    """Its embeddings must not be multiplied with a mask of pairs, which fits by chance where width equals length."""
    _, export = exported(str(family), Mlsm(lsp_store), lsp_store, tmp_path / "export")
    apart = {"documents_apart": True, "store": str(lsp_store.path), "max_steps": 2, "lr": 0.05}
    settings = {name: value for name, value in settings.items() if name != "encoder"}
    assert train_probe(ProbeConfig(**settings | apart | {"student": str(export)}))["steps"] == 2
