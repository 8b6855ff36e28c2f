"""Exports used by people who do not have this package: with transformers alone, and with sentence-transformers."""

import hashlib
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from tiny_exports import ATTENTION, IDS, LINEAGE, exported, scrambled
from transformers import AutoModel, AutoTokenizer, Trainer, TrainingArguments

from mlsm.common.errors import RunError
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import encoder_config
from student.encoders.model import build_student
from student.encoders.modeling_mlsm import MlsmForMaskedLM, MlsmModel
from student.lsp_model import LspModel
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.probe import ProbedLspModel, probe_task
from student.runs import checkpoint
from student.runs.config import ExportConfig
from student.runs.export import CODE_FILE, KNOWN_CODE, export_student
from student.runs.export_run import export_run
from student.train import train

OURS = ("cli", "mlsm", "pipeline", "shards", "student")
ALONE = """
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OURS:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Refuse())
for name in OURS:
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"{name} can be imported")

import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

torch.set_num_threads(1)
for path in sys.argv[1:]:
    export, found = Path(path), {}
    inputs = torch.load(export.parent / "inputs.pt")
    stock = AutoModel.from_pretrained(export).eval()
    model, tokenizer = AutoModel.from_pretrained(export, trust_remote_code=True), AutoTokenizer.from_pretrained(export)
    assert type(stock).__module__.startswith("transformers.") and type(model).__name__ == "MlsmModel"
    assert type(AutoModel.from_pretrained(export)) is type(stock)  # a process that ran the code still has both
    assert not model.training
    with torch.no_grad():
        output = model(**inputs, output_hidden_states=True)
        found["stock"], found["states"] = stock(**inputs).last_hidden_state, output.last_hidden_state
        found["logits"], found["layers"] = output.lsp_logits, torch.tensor(len(output.hidden_states))
        for name, text in {"three": "w1 w2 w3", "none": "", "many": " ".join(["w5", "w9"] * 7)}.items():
            tokens, found[name] = model.lsp(text, tokenizer, batch_windows=4)
            assert tokens == text.split()
        try:
            model.lsp("w1 " * 15, tokenizer)
        except ValueError as error:
            assert "at most 14" in str(error)
        else:
            raise SystemExit("a text of 15 tokens was read")
        try:
            model.lsp(["w1", "w2"], tokenizer)
        except TypeError as error:
            assert "expected one text" in str(error)
        else:
            raise SystemExit("two texts were read as one")
        model.save_pretrained(export.parent / "again")
        again = AutoModel.from_pretrained(export.parent / "again", trust_remote_code=True)
        found["again"] = again(**inputs).lsp_logits
        if (export / "lsp_head_2.safetensors").exists():
            second = AutoModel.from_pretrained(export, trust_remote_code=True, head=2)
            found["second"] = second(**inputs).lsp_logits
            try:
                AutoModel.from_pretrained(export, trust_remote_code=True, head=3)
            except OSError as error:
                assert "no lsp_head_3.safetensors; `head` counts a student's stores from 1" in str(error)
            else:
                raise SystemExit("a student of two stores has a third head")
        model.resize_token_embeddings(model.config.vocab_size + 2)
        assert torch.equal(model(**inputs).lsp_logits, found["logits"])
    if stock.supports_gradient_checkpointing:
        model.gradient_checkpointing_enable()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, export.parent / "found.safetensors")
"""


PROBES_ALONE = """
from transformers import AutoModelForMaskedLM, Trainer, TrainingArguments, pipeline

for path in sys.argv[1:]:
    export, found = Path(path), {}
    inputs = torch.load(export.parent / "inputs.pt")
    model = AutoModelForMaskedLM.from_pretrained(export, trust_remote_code=True)
    assert type(model).__name__ == "MlsmForMaskedLM" and not model.training
    again = export.parent / "again"
    model.save_pretrained(again)
    AutoTokenizer.from_pretrained(export).save_pretrained(again)
    for name, place in {"logits": export, "again": again}.items():
        with torch.no_grad():
            found[name] = AutoModelForMaskedLM.from_pretrained(place, trust_remote_code=True)(**inputs).logits
        filled = pipeline("fill-mask", model=str(place), trust_remote_code=True, device="cpu")("w1 [MASK] w3", top_k=3)
        found[name + " filled"] = torch.tensor([row["token"] for row in filled])
        found[name + " scores"] = torch.tensor([row["score"] for row in filled])
    labels = torch.full_like(inputs["input_ids"], -100)
    labels[0, 1:3] = inputs["input_ids"][0, 1:3]
    loss = model(**inputs, labels=labels).loss  # Trainer needs it, and without it evaluates nothing and says nothing
    expected = -found["logits"][0, [1, 2]].log_softmax(-1)[[0, 1], labels[0, 1:3]].mean()
    assert torch.isclose(loss, expected) and loss.requires_grad
    arguments = TrainingArguments(str(export.parent / "trainer"), report_to=[], use_cpu=True)
    assert not Trainer(model, arguments).model_accepts_loss_kwargs  # else it does not divide by the batches of a step
    if (export / "lsp_head.safetensors").exists():  # the student of a probe can be saved without the probe
        AutoModel.from_pretrained(export, trust_remote_code=True).save_pretrained(export.parent / "student")
        AutoModel.from_pretrained(export.parent / "student", trust_remote_code=True)
        assert "MaskedLM" not in (export.parent / "student" / "config.json").read_text()
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, export.parent / "found.safetensors")
"""


PROBES_ALONE = ALONE.partition("for path in sys.argv")[0] + PROBES_ALONE


def run_alone(exports, place, program=ALONE):
    """What the program above finds for each export; it sees neither this checkout nor an installed copy of it."""
    torch.save({"input_ids": IDS, "attention_mask": ATTENTION}, place / "inputs.pt")
    for export in exports:
        (export.parent / "inputs.pt").write_bytes((place / "inputs.pt").read_bytes())
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(place / "modules"), "OMP_NUM_THREADS": "1"}
    program = f"OURS = {OURS!r}\n{program}"
    command = [sys.executable, "-P", "-c", program, *map(str, exports)]
    run = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return [load_file(export.parent / "found.safetensors") for export in exports]


@pytest.fixture(scope="module")
def alone(families, lsp_store, tmp_path_factory):
    """Exports by name and what one process finds for each: every family's of mlsm, and of mtl, whose model.safetensors
    is a masked language model; and one with a second head."""
    place = tmp_path_factory.mktemp("alone")
    cases = [(path, objective) for path in families.iterdir() for objective in (Mlsm(lsp_store), Mtl(lsp_store))]
    exports = {}
    for encoder, objective in [*cases, ("bert-2x32", Mlsm(lsp_store))]:
        name = f"{Path(encoder).name}-{objective.name}"
        (place / name).mkdir()
        exports[name] = exported(encoder, objective, lsp_store, place / name / "export")[1]
    several = exports["bert-2x32-mlsm"]
    tensors = load_file(several / "lsp_head.safetensors")
    tensors["output.bias"] += torch.arange(lsp_store.k)  # a head that differs, as that of another store does
    save_file(tensors, several / "lsp_head_2.safetensors")
    (several / "lsp_config_2.json").write_bytes((several / "lsp_config.json").read_bytes())
    found = run_alone(exports.values(), place)
    return {name: (export, tensors) for (name, export), tensors in zip(exports.items(), found, strict=True)}


def assert_equal_to_ours(found, export):
    ours, real = LspModel.from_pretrained(export), ATTENTION.bool()
    with torch.no_grad():
        assert torch.allclose(found["logits"][real], ours(IDS, ATTENTION)[real], atol=1e-5)
    assert torch.equal(found["states"][real], found["stock"][real])
    assert torch.equal(found["again"], found["logits"]) and int(found["layers"]) == 3
    for name, text in {"three": "w1 w2 w3", "none": "", "many": " ".join(["w5", "w9"] * 7)}.items():
        (expected,) = ours.lsp(text)
        assert torch.allclose(found[name], expected.distributions_Tk, atol=1e-6)


def test_transformers_alone_gives_what_our_own_model_gives(family, alone):
    for objective in ("mlsm", "mtl"):
        export, found = alone[f"{family.name}-{objective}"]
        assert_equal_to_ours(found, export)


def test_transformers_alone_predicts_the_words_that_a_probe_does(families, lsp_store, tmp_path):
    exports = {}
    for family, probe_input in product(families.iterdir(), ("softmax", "hidden")):
        name = f"{family.name}-{probe_input}"
        _, student = exported(family, Mlsm(lsp_store), lsp_store, tmp_path / f"student of {name}")
        settings = ProbeConfig(student=str(student), store=str(lsp_store.path), probe_input=probe_input, lr=0.1)
        task = probe_task(settings, lsp_store)
        model = task.build()
        with torch.no_grad():
            model.probe_Vk.normal_(generator=torch.Generator().manual_seed(2))
        exports[name] = tmp_path / name / "export"
        exports[name].mkdir(parents=True)
        task.export(model, exports[name], task.objective, lsp_store, LINEAGE)
    for export, found in zip(exports.values(), run_alone(exports.values(), tmp_path, PROBES_ALONE), strict=True):
        ours, real = ProbedLspModel.from_pretrained(export), ATTENTION.bool()
        with torch.no_grad():
            expected = ours(IDS, ATTENTION).logits[real]
            ids = torch.tensor([ours.tokenizer("w1 [MASK] w3")["input_ids"]])
            words = ours(ids).logits.softmax(dim=2)[ids == ours.tokenizer.mask_token_id][0].topk(3)
        for name in ("logits", "again"):
            assert torch.allclose(found[name][real], expected, atol=1e-4)
            assert torch.equal(found[f"{name} filled"], words.indices)
            assert torch.allclose(found[f"{name} scores"], words.values, atol=1e-5)
        card = ModelCard.load(export / "README.md")
        assert card.data.pipeline_tag == "fill-mask"
        assert "AutoModelForMaskedLM.from_pretrained(PATH, trust_remote_code=True)" in card.text


def test_it_is_saved_whole_or_not_at_all(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    model = MlsmModel.from_pretrained(export)
    for name, value in {"push_to_hub": True, "state_dict": model.state_dict()}.items():
        with pytest.raises(TypeError, match=f"takes no {name} here"):
            model.save_pretrained(tmp_path / "saved", **{name: value})
    assert not (tmp_path / "saved").exists()


def probed(student):
    """A masked LM of a student's LSPs, as if trained."""
    probe_Vk = torch.randn(64, 24, generator=torch.Generator().manual_seed(2))
    return MlsmForMaskedLM(student.encoder, probe_Vk, student.head, student.facts)


def trainer_of(model, directory, **settings):
    arguments = TrainingArguments(
        str(directory), max_steps=2, save_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, **settings
    )
    rows = [{"input_ids": IDS[0], "labels": IDS[0]}] * 4
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def test_trainer_that_would_load_no_weight_is_an_error(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    trained = probed(MlsmModel.from_pretrained(export))
    trainer_of(trained, tmp_path / "run").train()
    expected = f"expected weights of MlsmForMaskedLM, found none of its {len(trained.state_dict())}.*from_pretrained"
    resumed = trainer_of(probed(MlsmModel.from_pretrained(export)), tmp_path / "run")
    with pytest.raises(RuntimeError, match=expected):
        resumed.train(resume_from_checkpoint=True)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1}
    with pytest.raises(RuntimeError, match=expected):
        trainer_of(probed(MlsmModel.from_pretrained(export)), tmp_path / "best", **best).train()
    checkpoint = MlsmForMaskedLM.from_pretrained(tmp_path / "run" / "checkpoint-2").state_dict()  # as the error advises
    assert all(torch.equal(weight, checkpoint[name]) for name, weight in trained.state_dict().items())


def test_state_of_other_names_is_an_error_and_any_other_loads_as_in_torch(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    student = MlsmModel.from_pretrained(export)
    student.save_pretrained(tmp_path / "saved")
    for model in (student, probed(student)):
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        with pytest.raises(RuntimeError, match=f"expected weights of {type(model).__name__}, found none"):
            model.load_state_dict(saved, strict=False)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(saved)
    part = {"head.output.bias": torch.arange(24.0)}
    assert len(student.load_state_dict(part, strict=False).missing_keys) == len(student.state_dict()) - 1
    assert torch.equal(student.head.output.bias, part["head.output.bias"])
    outer = torch.nn.ModuleList([student])
    assert len(outer.load_state_dict({}, strict=False).missing_keys) == len(student.state_dict())
    fresh = MlsmModel.from_pretrained(export)
    fresh.load_state_dict(student.state_dict())
    assert torch.equal(fresh.head.output.bias, part["head.output.bias"])


@pytest.mark.parametrize("positions", ["masked", "all"])
def test_without_return_dict_outputs_are_tuples_as_of_stock_models(positions, lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    student, tokenizer = MlsmModel.from_pretrained(export), AutoTokenizer.from_pretrained(export)
    student.facts["positions"] = positions
    for model in (student, probed(student)):
        labels = {} if model is student else {"labels": IDS}
        with torch.no_grad():
            expected = model(IDS, ATTENTION, **labels)
            found = [model(IDS, ATTENTION, return_dict=False, **labels)]
            _, lsps = student.lsp("w1 w2 w3", tokenizer)
            model.config.return_dict = False
            found.append(model(IDS, ATTENTION, **labels))
            assert type(model(IDS, ATTENTION, return_dict=True)) is type(expected)
            assert torch.equal(student.lsp("w1 w2 w3", tokenizer)[1], lsps)
            model.config.return_dict = True
        for output in found:
            assert type(output) is tuple and len(output) == len(expected.to_tuple()) == 2
            assert all(torch.equal(*pair) for pair in zip(output, expected.to_tuple(), strict=True))


def test_of_several_stores_each_head_can_be_had(alone):
    export, found = alone["bert-2x32-mlsm"]
    with torch.no_grad():
        expected = LspModel.from_pretrained(export, head=2)(IDS, ATTENTION)
    assert torch.allclose(found["second"], expected, atol=1e-5)
    assert not torch.allclose(found["second"], found["logits"], atol=1e-1)


def test_the_code_that_is_exported_is_known_to_later_versions(lsp_store, ids_store, tmp_path):
    """Whoever changes modeling_mlsm.py adds its hash: checkpoints with the earlier file are still exported."""
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    code = (export / CODE_FILE).read_bytes()
    assert hashlib.sha256(code).hexdigest() == KNOWN_CODE[-1]
    assert json.loads((export / "config.json").read_text())["auto_map"] == {"AutoModel": "modeling_mlsm.MlsmModel"}
    _, without = exported("bert-2x32", Mlm(ids_store), ids_store, tmp_path / "without")
    assert not (without / CODE_FILE).exists() and "auto_map" not in (without / "config.json").read_text()


def test_where_mask_enters_later_there_is_no_code(lsp_store, tmp_path):
    config = StudentConfig(encoder="bert-2x32", mask_later=1)
    model = scrambled(build_student(config, lsp_store, Mlsm(lsp_store)))
    lineage = {"settings": {}, "step": 1, "tokens": 1, "flops": 1, "held_out": {}, "baseline": {}}
    export_student(model, tmp_path, Mlsm(lsp_store), lsp_store, lineage)
    assert not (tmp_path / CODE_FILE).exists() and "auto_map" not in (tmp_path / "config.json").read_text()
    assert "With transformers only" not in (tmp_path / "README.md").read_text()


def test_an_encoder_that_is_trained_further_has_no_code(lsp_store, ids_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    for source in ({"continue_from": export}, {"encoder": str(export)}):
        assert not hasattr(encoder_config(StudentConfig(**source, lr=1e-3), ids_store), "auto_map")


@pytest.mark.promise(
    "a kept checkpoint of a foreign run that holds other code, names other code, or has a file next to its "
    "export: not exported, not pushed",
    cases="1, 3, 2",
)
def test_other_code_in_a_checkpoint_is_not_exported(lsp_store, settings, tmp_path):
    run = train(StudentConfig(store=lsp_store.path, **settings | {"max_steps": 2}))["run"]
    kept = Path(run) / "checkpoints" / "step-00000002"
    request = ExportConfig(run=Path(run), output=tmp_path / "out")
    export_run(request)
    assert (tmp_path / "out" / CODE_FILE).read_bytes() == (kept / CODE_FILE).read_bytes()
    (kept / CODE_FILE).write_text("raise SystemExit\n")
    state = json.loads((kept / "state.json").read_text())
    state["files"][CODE_FILE] = hashlib.sha256((kept / CODE_FILE).read_bytes()).hexdigest()
    (kept / "state.json").write_text(json.dumps(state | {"checksum": checkpoint._checksum(state)}))
    before = (tmp_path / "out" / CODE_FILE).read_bytes()
    with pytest.raises(RunError, match=f"{CODE_FILE} is not the code that .* nothing was exported"):
        export_run(ExportConfig(run=Path(run), output=tmp_path / "out", step="2"))
    assert (tmp_path / "out" / CODE_FILE).read_bytes() == before


@pytest.mark.promise("a kept checkpoint …")
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("config.json", {"AutoModel": "someone/else--modeling_mlsm.MlsmModel"}),
        ("config.json", {"AutoModel": "modeling_mlsm.MlsmModel", "AutoConfig": "someone/else--own.Config"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["someone/else--own.Tokenizer", None]}),
    ],
)
def test_a_checkpoint_that_names_other_code_is_not_exported(name, named, lsp_store, settings, tmp_path):
    run = Path(train(StudentConfig(store=lsp_store.path, **settings | {"max_steps": 2}))["run"])
    kept = run / "checkpoints" / "step-00000002"
    (kept / name).write_text(json.dumps(json.loads((kept / name).read_text()) | {"auto_map": named}))
    state = json.loads((kept / "state.json").read_text())
    state["files"][name] = hashlib.sha256((kept / name).read_bytes()).hexdigest()
    (kept / "state.json").write_text(json.dumps(state | {"checksum": checkpoint._checksum(state)}))
    with pytest.raises(RunError, match=f"{name} names code that this package did not write .* nothing was exported"):
        export_run(ExportConfig(run=run, output=tmp_path / "out", step="2"))
    assert not (tmp_path / "out").exists()


def test_the_card_makes_a_sentence_transformers_model(family, lsp_store, tmp_path):
    reason = "sentence-transformers is not installed: no part of this package needs it"
    pytest.importorskip("sentence_transformers", reason=reason)
    _, export = exported(family, Mlsm(lsp_store), lsp_store, tmp_path / "export")
    section = (export / "README.md").read_text().partition("## Sentences\n")[2]
    (code,) = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    scope: dict = {}
    exec(code.replace("PATH", repr(str(export))), scope)
    assert f"Texts are cut to {scope['model'].max_seq_length} tokens, the length of training" in section
    texts = ["w1 w2 w3", "w4", "w7 w7 w8 w9 w10", "w3 " * 99]
    found = scope["model"].encode(texts, convert_to_tensor=True).cpu()
    tokenizer, encoder = AutoTokenizer.from_pretrained(export), AutoModel.from_pretrained(export).eval()
    for text, vector in zip(texts, found, strict=True):
        with torch.no_grad():
            states = encoder(**tokenizer(text, truncation=True, return_tensors="pt")).last_hidden_state
        assert torch.allclose(vector, states.mean(dim=1)[0], atol=1e-5)


def test_sentence_transformers_trains_resumes_and_restores_the_best_model(lsp_store, tmp_path, monkeypatch):
    reason = "sentence-transformers is not installed: no part of this package needs it"
    library = pytest.importorskip("sentence_transformers", reason=reason)
    from datasets import Dataset

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    pairs = Dataset.from_dict({"anchor": ["w1 w2", "w3 w4"] * 4, "positive": ["w2 w1", "w4 w3"] * 4})

    def run(resume):
        model = library.SentenceTransformer(str(export), device="cpu", trust_remote_code=True)
        arguments = library.SentenceTransformerTrainingArguments(
            str(tmp_path / "run"),
            max_steps=2,
            save_steps=1,
            eval_steps=1,
            eval_strategy="steps",
            load_best_model_at_end=True,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        loss = library.sentence_transformer.losses.MultipleNegativesRankingLoss(model)
        trainer = library.SentenceTransformerTrainer(model, arguments, pairs, pairs, loss)
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / "run" / "checkpoint-1"))
        assert type(model[0].auto_model).__name__ == "MlsmModel"
        best = library.SentenceTransformer(trainer.state.best_model_checkpoint, device="cpu", trust_remote_code=True)
        found = model.encode(["w1 w2 w3"])
        assert (found == best.encode(["w1 w2 w3"])).all()
        return found

    assert (run(resume=None) == run(resume=True)).all()
