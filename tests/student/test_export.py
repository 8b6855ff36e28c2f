import json
import logging
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from safetensors.torch import load_file
from tiny_exports import ATTENTION, IDS, LINEAGE, WHERE, exported
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    CamembertConfig,
    ElectraConfig,
    ModernBertConfig,
    RobertaConfig,
)

from mlsm.common.errors import RunError
from student.config import StudentConfig
from student.encoders.model import build_student
from student.encoders.stock import HEAD_LAYOUTS, stock_model
from student.objectives.kd import Kd
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.objectives.naive_mlsm import NaiveMlsm
from student.objectives.supersense import Supersense
from student.runs.export import as_trained, export_student, loading_code
from student.task import student_task
from student.train import train

BUNDLED = Path(__file__).resolve().parents[2] / "pipeline" / "bundled_teacher"
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}


def as_kd(store, monkeypatch):
    """Kd over a store of ids that says it holds a teacher's distributions."""
    monkeypatch.setattr(store, "kind", "logits")
    report = store.report() | {"mass_kept": 1.0}
    monkeypatch.setattr(store, "report", lambda: report)
    monkeypatch.setattr(store, "iter_records", lambda: [SimpleNamespace(statistics={"coded_tokens": 1})])
    return Kd(store)


def assert_code_of_ours_names_its_package(card):
    for before in re.split(r"```python\nfrom student\.", card)[:-1]:
        assert "needs the package `mlsm`:" in before.rstrip().splitlines()[-1]


def assert_encoder_is_loadable(model, export):
    encoder = AutoModel.from_pretrained(export)
    hidden = encoder(input_ids=IDS, attention_mask=ATTENTION).last_hidden_state
    assert torch.allclose(hidden, model.encoder(IDS, ATTENTION).last_hidden_state, atol=1e-6)


@pytest.mark.parametrize("name", ["mlm", "kd"])
def test_tied_exports_predict_what_the_student_predicts(name, family, ids_store, tmp_path, monkeypatch):
    objective = Mlm(ids_store) if name == "mlm" else as_kd(ids_store, monkeypatch)
    model, export = exported(family, objective, ids_store, tmp_path / "export")
    stock = AutoModelForMaskedLM.from_pretrained(export)
    theirs = stock(input_ids=IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[WHERE]
    assert torch.allclose(theirs, model(IDS, ATTENTION, WHERE), atol=1e-5)
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    assert not (export / "lsp_head.safetensors").exists()
    assert_encoder_is_loadable(model, export)


def test_a_continued_head_predicts_what_the_model_it_comes_from_does(family, ids_store, tmp_path):
    model, export = exported(family, Mlm(ids_store), ids_store, tmp_path / "export")
    settings = {"objective": "mlm", "continue_from": export, "lr": 1e-3}
    ours, anew = (
        student_task(StudentConfig(**settings, continue_head=keep), ids_store).build().eval() for keep in (True, False)
    )
    expected = model(IDS, ATTENTION, WHERE)
    assert torch.allclose(ours(IDS, ATTENTION, WHERE), expected, atol=1e-5)
    assert not torch.allclose(anew(IDS, ATTENTION, WHERE), expected, atol=1e-1)


@pytest.mark.parametrize("untied", [True, False])
@pytest.mark.parametrize("name", ["mlm", "mtl"])
def test_a_continued_head_has_the_output_matrix_too(untied, name, family, lsp_store, tmp_path):
    model, export = exported(family, Mlm(lsp_store, untied=untied), lsp_store, tmp_path / "export")
    settings = {"objective": name, "continue_from": export, "continue_head": True, "lr": 1e-3}
    task = student_task(StudentConfig(**settings, untied=True), lsp_store)
    logits = task.build().eval()(IDS, ATTENTION, WHERE)[:, task.objective.token_columns]
    assert torch.allclose(logits, model(IDS, ATTENTION, WHERE), atol=1e-5)
    tied = student_task(StudentConfig(**settings), lsp_store)
    if untied:
        with pytest.raises(RunError, match="--continue-head: the output matrix of .* is not its token.*Pass --untied"):
            tied.build()
    else:
        logits = tied.build().eval()(IDS, ATTENTION, WHERE)[:, tied.objective.token_columns]
        assert torch.allclose(logits, model(IDS, ATTENTION, WHERE), atol=1e-5)


@pytest.mark.parametrize("keep", [True, False])
def test_to_continue_from_a_masked_language_model_is_no_news(keep, ids_store, tmp_path, capfd):
    """transformers would draw a bar, and print a table of the head's weights as unexpected, those taken included."""
    _, export = exported("bert-2x32", Mlm(ids_store), ids_store, tmp_path / "export")
    capfd.readouterr()
    config = StudentConfig(objective="mlm", continue_from=export, continue_head=keep, lr=1e-3)
    student_task(config, ids_store).build()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("umask", "expected"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_may_be_read_by_those_whom_the_umask_allows(umask, expected, lsp_store, settings):
    """safetensors allows its files to their owner only."""
    before = os.umask(umask)
    try:
        train(StudentConfig(store=lsp_store.path, **settings))
    finally:
        os.umask(before)
    run = settings["run_dir"]
    files = [path for place in ("export", "checkpoints") for path in (run / place).rglob("*") if path.is_file()]
    assert {path.name for path in files} > {"model.safetensors", "lsp_head.safetensors", "student.safetensors"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected}


def test_a_continued_head_must_be_there(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    config = StudentConfig(continue_from=export, continue_head=True, lr=1e-3)
    with pytest.raises(RunError, match="--continue-head: .*not in the files.*Give the export of a run of mlm"):
        student_task(config, lsp_store).build()
    with pytest.raises(ValueError, match="--continue-head needs --continue-from"):
        StudentConfig(continue_head=True)


def test_an_untied_mtl_export_has_a_decoder_of_its_own_that_predicts_as_the_student(family, lsp_store, tmp_path):
    objective = Mtl(lsp_store, untied=True)
    model, export = exported(family, objective, lsp_store, tmp_path / "export")
    stock, info = AutoModelForMaskedLM.from_pretrained(export, output_loading_info=True)
    assert not info["missing_keys"] and stock.config.tie_word_embeddings is False
    theirs = stock(input_ids=IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[WHERE]
    assert torch.allclose(theirs, model(IDS, ATTENTION, WHERE)[:, objective.token_columns], atol=1e-5)
    assert stock.get_output_embeddings().weight is not stock.get_input_embeddings().weight
    assert_encoder_is_loadable(model, export)
    weights = load_file(export / "model.safetensors").values()
    biases = [weight for weight in weights if weight.shape == (lsp_store.vocab_size,)]
    assert biases and all(torch.equal(bias, biases[0]) for bias in biases)  # older releases tie them on loading


def test_an_export_keeps_the_output_bias_of_a_modernbert_whose_config_has_none(ids_store, tmp_path):
    ModernBertConfig(**SIZE, decoder_bias=False).save_pretrained(tmp_path / "encoder")
    model, export = exported(tmp_path / "encoder", Mlm(ids_store), ids_store, tmp_path / "export")
    theirs = AutoModelForMaskedLM.from_pretrained(export)(input_ids=IDS, attention_mask=ATTENTION).logits
    assert model.output_bias_K.any()
    assert torch.allclose(theirs.flatten(0, 1)[WHERE], model(IDS, ATTENTION, WHERE), atol=1e-5)


@pytest.mark.parametrize("config_class", [CamembertConfig, ElectraConfig, RobertaConfig])
def test_words_are_not_learned_by_a_head_that_transformers_would_compute_otherwise(
    config_class, ids_store, lsp_store, tmp_path
):
    config_class(**SIZE, hidden_act="relu").save_pretrained(tmp_path)
    config = StudentConfig(encoder=str(tmp_path), objective="mlm", lr=1e-3)
    with pytest.raises(RunError, match="hidden_act is relu, but transformers always computes gelu.*Set hidden_act"):
        student_task(config, ids_store)
    student_task(StudentConfig(encoder=str(tmp_path), lr=1e-3), lsp_store).build()  # LSPs have a head of ours
    _, export = exported(tmp_path, Mlm(ids_store), ids_store, tmp_path / "export")  # of an earlier run
    assert "head is not exported" in (export / "README.md").read_text()


@pytest.mark.parametrize("objective", [Mlsm, NaiveMlsm])
def test_mlsm_exports_give_the_encoder_and_a_documented_head(objective, family, lsp_store, tmp_path):
    objective = objective(lsp_store)
    model, export = exported(family, objective, lsp_store, tmp_path / "export")
    encoder = AutoModel.from_pretrained(export)
    hidden = encoder(input_ids=IDS, attention_mask=ATTENTION).last_hidden_state.flatten(0, 1)[WHERE]
    head = load_file(export / "lsp_head.safetensors")
    dense = torch.nn.functional.linear(hidden, head["dense.weight"], head.get("dense.bias"))
    norm, eps = (head["norm.weight"], head.get("norm.bias")), model.head.norm.eps
    normed = torch.nn.functional.layer_norm(torch.nn.functional.gelu(dense), dense.shape[-1:], *norm, eps)
    logits = normed @ head["output.weight"].T + head["output.bias"]
    assert logits.shape == (3, lsp_store.k)
    assert torch.allclose(logits, model(IDS, ATTENTION, WHERE)[:, objective.lsp_columns], atol=1e-5)


def test_a_family_of_unknown_layout_exports_its_encoder_and_says_so(ids_store, tmp_path, monkeypatch, caplog):
    monkeypatch.delitem(HEAD_LAYOUTS, "bert")
    _, export = exported("bert-2x32", Mlm(ids_store), ids_store, tmp_path)
    assert "head is not exported" in (export / "README.md").read_text()
    student_task(StudentConfig(encoder="bert-2x32", objective="mlm"), ids_store)
    assert "the export will have no head that predicts words: the layout of transformers' head of a bert" in caplog.text
    assert AutoModel.from_pretrained(export).config.hidden_size == 32


@pytest.mark.parametrize("segments", [True, False])
def test_a_tokenizer_tells_segments_only_to_a_student_that_learned_them(tmp_path, segments):
    files = {path.name: path.read_bytes() for path in BUNDLED.glob("*token*")}
    for name, content in as_trained(files, 128, segments).items():
        (tmp_path / name).write_bytes(content)
    pair = AutoTokenizer.from_pretrained(tmp_path)("one", "two")
    assert ("token_type_ids" in pair) is segments and len(pair["input_ids"]) == 5


def test_every_export_of_a_run_loads_with_its_tokenizer(lsp_store, settings, caplog):
    config = StudentConfig(store=lsp_store.path, **settings)
    train(config)
    kept = [config.run_dir / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 4, 8)]
    with caplog.at_level(logging.ERROR):
        for directory in (*kept, config.run_dir / "export"):
            assert AutoModel.from_pretrained(directory).config.num_hidden_layers == 2
            tokenizer = AutoTokenizer.from_pretrained(directory)
            assert tokenizer.vocab_size == lsp_store.vocab_size
            read = tokenizer("w1 " * 1000, truncation=True)["input_ids"]  # SentenceTransformer asks for it, too
            assert len(read) == tokenizer.model_max_length == lsp_store.max_length
    assert lsp_store.load_tokenizer().model_max_length > 512  # the store's copy is as before
    last, export = (load_file(path / "model.safetensors") for path in (kept[-1], config.run_dir / "export"))
    assert all(torch.equal(last[name], export[name]) for name in export)


@pytest.mark.parametrize("objective", [Mlsm, Mlm, Mtl, Supersense])
def test_the_card_tells_figures_lineage_and_how_to_load(objective, lsp_store, tmp_path):
    objective = objective(lsp_store)
    _, export = exported("bert-2x32", objective, lsp_store, tmp_path)
    card = ModelCard.load(export / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.tags == [objective.name, "masked-latent-semantic-modeling"]
    assert card.data.pipeline_tag == ("fill-mask" if objective.token_columns else "feature-extraction")
    ids = (lsp_store.target_id, lsp_store.plan_id)
    for part in ("1.5000 | 2.0000", "AutoModel", "| layer of the teacher | `3` |", "99 real tokens", *ids):
        assert part in card.text
    assert ("LspModel" in card.text) == (objective.lsp_columns is not None)
    reads_words = objective.name in ("mlm", "supersense")
    assert ("The student read only its words" in card.text) == reads_words
    assert ("Where the targets come from" in card.text) != reads_words
    assert_code_of_ours_names_its_package(card.text)
    lineage = json.loads((export / "lineage.json").read_text())
    assert lineage.items() >= LINEAGE.items() and lineage["objective"] == objective.name
    assert lineage["store"]["target"] == lsp_store.target_id and lineage["store"]["settings"]["layer"] == 3
    encoded = lineage["store"]["encoded"]
    assert encoded["tokens"] == sum(lsp_store.split(split).tokens for split in ("train", "held_out"))
    assert f"{encoded['tokens']:,} tokens of {encoded['documents']:,} documents were encoded" in card.text


def test_the_card_has_the_metadata_that_the_hub_reads(lsp_store, tmp_path, monkeypatch):
    """As huggingface_hub reads it back. What nobody said, a licence and a language, is not made up."""
    files = {"hf://datasets/allenai/c4@refs/convert/parquet/en/train/0.parquet": {}, "/home/ann/wiki/a.txt": {}}
    files |= {"hf://datasets/allenai/c4/en/1.json.gz": {}, "/data/ann/wiki/a.txt": {}}
    plan = replace(lsp_store.plan, corpus={"documents": 7, "files": files})
    monkeypatch.setattr(lsp_store, "plan", plan)
    model, cached = (
        build_student(StudentConfig(encoder="bert-2x32"), lsp_store, Mlsm(lsp_store)),
        "/home/ann/.cache/hub",
    )
    lineage = LINEAGE | {"continued_from": f"{cached}/models--google--bert_uncased/snapshots/0a1b"}
    lineage |= {
        "held_out": {"loss": 1.5, "accuracy": 0.25},
        "settings": {"encoder": "/home/ann/encoders/small", "lr": 1},
    }
    export_student(model, tmp_path, Mlsm(lsp_store), lsp_store, lineage)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.base_model == ["google/bert_uncased"] and card.data.datasets == ["allenai/c4"]
    assert card.data.license is None and card.data.language is None
    found = {result.metric_type: result for result in card.data.eval_results}
    assert {name: result.metric_value for name, result in found.items()} == lineage["held_out"]
    loss = found["loss"]
    assert (loss.task_type, loss.dataset_type, loss.dataset_split) == ("feature-extraction", "allenai/c4", "held_out")
    assert loss.metric_name == "held-out loss, nats per predicted token"
    assert ModelCardData(**card.data.to_dict()).to_dict() == card.data.to_dict()
    assert "/ann" not in card.content and "from `google/bert_uncased`" in card.text
    for shown in ('"a.txt": {}', '"a.txt (2)": {}', '"encoder": "small"', '"hf://datasets/allenai/c4/en/1.json.gz"'):
        assert shown in card.text
    assert json.loads((tmp_path / "lineage.json").read_text())["store"]["corpus"]["files"] == files


def test_a_card_shows_few_files_and_what_the_run_did(lsp_store, tmp_path, monkeypatch):
    files = {f"texts/{number:04}.txt": {"documents": 1} for number in range(3000)}
    monkeypatch.setattr(lsp_store, "plan", replace(lsp_store.plan, corpus={"documents": 3000, "files": files}))
    model = build_student(StudentConfig(encoder="bert-2x32"), lsp_store, Mlsm(lsp_store))
    settings = {"positions": "all", "mask_rate": 0.15, "corruption": "mask", "lr": 1}
    lineage = LINEAGE | {"settings": settings, "products": {"weight_gradient 64 32 32": "torch"}}
    export_student(model, tmp_path, Mlsm(lsp_store), lsp_store, lineage)
    card = (tmp_path / "README.md").read_text()
    assert card.count(".txt") == 5 and '"other_files": 2995' in card
    assert "mask_rate" not in card and '"weight_gradient 64 32 32": "torch"' in card and "Earlier training" not in card
    assert '"optimizer": "adamw"' in card and '"adam_beta2": 0.999' in card  # usual values, which settings leave out


@pytest.mark.parametrize(
    ("teacher", "base"),
    [
        ("sentence-transformers/all-MiniLM-L6-v2", ["sentence-transformers/all-MiniLM-L6-v2"]),
        ("/home/ann/.cache/hub/models--google--electra/snapshots/0a1b", ["google/electra"]),
        ("bert-base-cased", ["bert-base-cased"]),  # in the Hub's cache
        ("models/minilm", None),  # a directory here, or once
        ("my-teacher", None),
        ("bundled", None),
    ],
)
def test_the_card_names_the_teacher_where_its_name_is_one_on_the_hub(
    teacher, base, lsp_store, ids_store, tmp_path, monkeypatch
):
    cached = tmp_path / "hub" / "models--bert-base-cased"
    for file, text in {"refs/main": "0a1b", "snapshots/0a1b/config.json": "{}"}.items():
        (cached / file).parent.mkdir(parents=True)
        (cached / file).write_text(text)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(lsp_store.settings, "teacher_name", teacher)
    corpus = {"documents": 7, "files": {"/usr/lib/pipeline/bundled_text/wikipedia-en-2014.txt.xz": {}}}
    monkeypatch.setattr(lsp_store, "plan", replace(lsp_store.plan, corpus=corpus))
    for objective, named in ((Mlsm(lsp_store), base), (Mlm(lsp_store), None)):  # Mlm reads no teacher
        _, export = exported("bert-2x32", objective, lsp_store, tmp_path / objective.name)
        data = ModelCard.load(export / "README.md").data
        assert data.base_model == named and data.language == "en" and data.license is None


def test_exporting_leaves_global_randomness_alone(ids_store):
    model = build_student(StudentConfig(encoder="bert-2x32"), ids_store, Mlm(ids_store))
    before = torch.random.get_rng_state()
    stock_model(model, Mlm(ids_store))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("encoder", "has_pooler"), [("bert-2x32", True), ("modernbert-2x32", False)])
def test_what_transformers_says_of_a_pooler_is_explained_where_it_is_loaded(encoder, has_pooler, lsp_store, tmp_path):
    """In the lines that the summary prints, and so in the card; only for encoders that transformers gives one."""
    _, export = exported(encoder, Mlsm(lsp_store), lsp_store, tmp_path / "export")
    _, info = AutoModel.from_pretrained(export, output_loading_info=True)
    assert any("pooler" in name for name in info["missing_keys"]) == has_pooler
    said = loading_code(export)
    assert ("# transformers lists `pooler.dense` as MISSING" in said) == has_pooler
    assert exec(said.partition("# transformers")[0], {}) is None, "the lines run as they are"
