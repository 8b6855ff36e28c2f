import logging

import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from student.config import StudentConfig
from student.export import HEAD_LAYOUTS, export_student, stock_model
from student.model import build_student
from student.objectives import Mlm, Mlsm
from student.trainer import train

LINEAGE = {
    "settings": {"seed": 1}, "step": 5, "tokens": 99, "held_out": {"loss": 1.5}, "baseline": {"loss": 2.0},
}
WHERE = torch.tensor([2, 9, 17])
IDS = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))
ATTENTION = (torch.arange(16) < torch.tensor([[16], [12]])).long()


def scrambled(model):
    """The model with weights as if trained: nothing is zero or one by construction."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def test_mlm_export_predicts_what_the_student_predicts(family, ids_store, tmp_path):
    model = scrambled(build_student(StudentConfig(encoder=str(family)), ids_store, Mlm(ids_store)))
    (tmp_path / "export").mkdir()
    export_student(model, tmp_path / "export", "mlm", ids_store, LINEAGE)
    stock = AutoModelForMaskedLM.from_pretrained(tmp_path / "export")
    theirs = stock(input_ids=IDS, attention_mask=ATTENTION).logits.flatten(0, 1)[WHERE]
    assert torch.allclose(theirs, model(IDS, ATTENTION, WHERE), atol=1e-5)
    assert stock.get_output_embeddings().weight is stock.get_input_embeddings().weight
    encoder = AutoModel.from_pretrained(tmp_path / "export")
    hidden = encoder(input_ids=IDS, attention_mask=ATTENTION).last_hidden_state
    assert torch.allclose(hidden, model.encoder(IDS, ATTENTION).last_hidden_state, atol=1e-6)


def test_mlsm_export_gives_the_encoder_and_a_documented_head(family, lsp_store, tmp_path):
    model = scrambled(build_student(StudentConfig(encoder=str(family)), lsp_store, Mlsm(lsp_store)))
    (tmp_path / "export").mkdir()
    export_student(model, tmp_path / "export", "mlsm", lsp_store, LINEAGE)
    encoder = AutoModel.from_pretrained(tmp_path / "export")
    hidden = encoder(input_ids=IDS, attention_mask=ATTENTION).last_hidden_state.flatten(0, 1)[WHERE]
    head = load_file(tmp_path / "export" / "lsp_head.safetensors")
    dense = torch.nn.functional.linear(hidden, head["dense.weight"], head.get("dense.bias"))
    norm, eps = (head["norm.weight"], head.get("norm.bias")), model.head.norm.eps
    normed = torch.nn.functional.layer_norm(torch.nn.functional.gelu(dense), dense.shape[-1:], *norm, eps)
    logits = normed @ head["output.weight"].T + head["output.bias"]
    assert torch.allclose(logits, model(IDS, ATTENTION, WHERE), atol=1e-5)


def test_a_family_of_unknown_layout_exports_its_encoder_and_says_so(ids_store, tmp_path, monkeypatch):
    monkeypatch.delitem(HEAD_LAYOUTS, "bert")
    model = build_student(StudentConfig(encoder="bert-2x32"), ids_store, Mlm(ids_store))
    export_student(model, tmp_path, "mlm", ids_store, LINEAGE)
    assert "head is not exported" in (tmp_path / "README.md").read_text()
    assert AutoModel.from_pretrained(tmp_path).config.hidden_size == 32


def test_every_export_of_a_run_loads_with_its_tokenizer(lsp_store, settings, caplog):
    config = StudentConfig(store=lsp_store.path, **settings)
    train(config)
    kept = [config.output / "checkpoints" / f"step-{step:08d}" for step in (1, 2, 4, 8)]
    with caplog.at_level(logging.ERROR):
        for directory in (*kept, config.output / "export"):
            assert AutoModel.from_pretrained(directory).config.num_hidden_layers == 2
            assert AutoTokenizer.from_pretrained(directory).vocab_size == lsp_store.vocab_size
    last, export = (load_file(path / "model.safetensors") for path in (kept[-1], config.output / "export"))
    assert all(torch.equal(last[name], export[name]) for name in export)


def test_the_card_tells_figures_lineage_and_how_to_load(lsp_store, tmp_path):
    model = build_student(StudentConfig(encoder="bert-2x32"), lsp_store, Mlsm(lsp_store))
    export_student(model, tmp_path, "mlsm", lsp_store, LINEAGE)
    card = (tmp_path / "README.md").read_text()
    ids = (lsp_store.target_id, lsp_store.plan_id)
    for part in ("1.5000 | 2.0000", "AutoModel", '"layer": 3', "99 real tokens", *ids):
        assert part in card


def test_exporting_leaves_global_randomness_alone(ids_store):
    model = build_student(StudentConfig(encoder="bert-2x32"), ids_store, Mlm(ids_store))
    before = torch.random.get_rng_state()
    stock_model(model)
    assert torch.equal(before, torch.random.get_rng_state())
