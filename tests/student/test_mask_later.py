"""[MASK] that enters later, against stock layers over the whole window that hide masked positions by dense masks."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_exports import LINEAGE, scrambled
from tiny_store import log_of
from torch._dynamo.utils import counters
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    BertConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from mlsm.common.documents import first_position, positions_in_documents
from mlsm.common.durable import replace_json
from mlsm.common.errors import ModelError, RunError
from mlsm.common.model_checks import without_pooler
from mlsm.evaluation.tasks.scoring.models import check_family, load
from mlsm.evaluation.tasks.scoring.scorer import Scorer
from student.batches import Loader
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import build_encoder, encoder_config
from student.encoders.flops import step_flops
from student.encoders.mask_later import set_mask_later
from student.encoders.model import Student, build_student
from student.lsp_model import LspModel
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.probe import train_probe
from student.runs.config import ExportConfig
from student.runs.export import export_student
from student.runs.export_run import export_run
from student.runs.identity import find_description
from student.train import Stepper, train

MASK, LENGTH, OUTPUTS = 4, 24, 7
SIZE = {
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": LENGTH + 2,
    "pad_token_id": 1,
    "type_vocab_size": 2,
}
RELATIVE = SIZE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
TURNED = {name: value for name, value in SIZE.items() if name != "type_vocab_size"} | {"global_attn_every_n_layers": 2}
FAMILIES = {
    "bert": BertConfig(**SIZE),
    "roberta": RobertaConfig(**SIZE),
    "xlm-roberta": XLMRobertaConfig(**SIZE),
    "electra": ElectraConfig(**SIZE, embedding_size=16),
    "deberta": DebertaConfig(**RELATIVE),
    "deberta, near positions": DebertaConfig(**RELATIVE | {"max_relative_positions": 6}),
    "deberta, absolute": DebertaConfig(**SIZE),
    "deberta-v2": DebertaV2Config(**RELATIVE),
    "deberta-v2, buckets": DebertaV2Config(
        **RELATIVE, share_att_key=True, position_buckets=4, norm_rel_ebd="layer_norm"
    ),
    "modernbert": ModernBertConfig(**TURNED, local_attention=128),
    "modernbert, near layers": ModernBertConfig(**TURNED, local_attention=8),
}
DOCUMENTS = torch.tensor([[0] * 9 + [1] * 11 + [2] * 4, [0] * 13 + [1] * 5 + [-1] * 6, [0] * 2 + [1] * 22])
HIDDEN = {  # masked positions of every window
    "even": [[1, 2, 7, 10, 22], [1, 2, 3, 4, 5], [5, 6, 11, 20, 23]],
    "uneven": [[3], [1, 2, 3, 4, 5, 12, 15, 16], [9, 18, 19]],
    "none": [[8, 9], [], [1]],
}


def batch(masked="uneven", padded=False):
    ids = torch.randint(5, 60, DOCUMENTS.shape, generator=torch.Generator().manual_seed(2))
    for row, places in enumerate(HIDDEN[masked]):
        ids[row, places] = MASK
    attention = (DOCUMENTS >= 0).long() if padded else None
    return (ids if attention is None else torch.where(attention == 0, 1, ids)), attention


def student_of(config, layer, seed=1):
    config = copy.deepcopy(config)
    set_mask_later(config, layer, MASK)
    return scrambled(Student(build_encoder(config, seed), OUTPUTS, tied=False, seed=seed))


def dense(config, weights, layer, ids, attention, documents=None, segments=None):
    """A stock encoder of given weights, and its last hidden states (W, L, d), computed as the paper says."""
    encoder = AutoModel.from_config(config, **without_pooler(config)).eval()
    encoder.load_state_dict(weights)
    real = torch.ones_like(ids, dtype=torch.bool) if attention is None else attention.bool()
    see = real[:, None, :].expand(-1, ids.shape[1], -1)
    given = {"input_ids": ids, "token_type_ids": segments}
    if documents is not None:
        see = documents[:, :, None] == documents[:, None, :]
        given["position_ids"] = positions_in_documents(documents) + first_position(encoder)
    elif encoder.config.model_type in ("roberta", "xlm-roberta"):
        given["position_ids"] = (torch.arange(LENGTH) + 2).expand(ids.shape)
    if encoder.config.model_type == "modernbert":
        return encoder, dense_modernbert(encoder, layer, ids, see, given.get("position_ids"))
    embedded = encoder.embeddings(**given)
    embedded = encoder.embeddings_project(embedded) if hasattr(encoder, "embeddings_project") else embedded
    masked, inner, states, extra = ids == MASK, encoder.encoder, embedded, {}
    if encoder.config.model_type.startswith("deberta"):
        extra = {"relative_pos": inner.get_rel_pos(embedded), "rel_embeddings": inner.get_rel_embedding()}
    for number, module in enumerate(inner.layer):
        states = torch.where(masked[..., None], embedded, states) if number == layer else states
        # Below the layer no key is masked, but for masked queries, which are thrown away: no row may be empty.
        seen = see & ~(masked[:, None, :] & ~masked[:, :, None]) if number < layer else see
        states = module(states, attention_mask=seen[:, None], **extra)
        states = states[0] if isinstance(states, tuple) else states
    return encoder, states


def dense_modernbert(encoder, layer, ids, see, positions):
    """The same for its loop, whose layers see the whole window or a part of it. Each position sees itself at least."""
    places, masked, itself = torch.arange(ids.shape[1]), ids == MASK, torch.eye(ids.shape[1], dtype=torch.bool)
    positions = places.expand(ids.shape) if positions is None else positions
    near = (places[:, None] - places).abs() <= encoder.config.local_attention // 2
    states = embedded = encoder.embeddings(input_ids=ids)
    for number, module in enumerate(encoder.layers):
        kind = encoder.config.layer_types[number]
        states = torch.where(masked[..., None], embedded, states) if number == layer else states
        seen = (see & ~masked[:, None, :] if number < layer else see) | itself
        seen = seen & near if kind == "sliding_attention" else seen
        turned = encoder.rotary_emb(states, positions, kind)
        states = module(states, attention_mask=seen[:, None], position_embeddings=turned)
    return encoder.final_norm(states)


def logits_and_gradients(student, encoder, logits):
    logits.square().sum().backward()
    found = {f"encoder.{name}": weight.grad for name, weight in encoder.named_parameters()}
    rest = {name: weight.grad for name, weight in student.named_parameters() if not name.startswith("encoder.")}
    return logits.detach(), found | rest


def assert_same(config, layer, ids, attention, **reading):
    where = (ids == MASK).flatten().nonzero().flatten()
    student = student_of(config, layer)
    reference = copy.deepcopy(student)
    logits = student(ids, attention, where, reading.get("documents"), None, reading.get("segments"))
    ours = logits_and_gradients(student, student.encoder, logits)
    encoder, states = dense(config, reference.encoder.state_dict(), layer, ids, attention, **reading)
    hidden = reference.head(states.flatten(0, 1)[where])
    logits = hidden @ reference.output_Kd.T + reference.output_bias_K
    theirs = logits_and_gradients(reference, encoder, logits)
    assert torch.allclose(ours[0], theirs[0], rtol=1e-4, atol=1e-5)
    for name, gradient in theirs[1].items():
        found = ours[1][name]
        assert (found is None) == (gradient is None), name
        assert gradient is None or torch.allclose(found, gradient, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("masked", "padded"), [("even", False), ("uneven", False), ("none", True), ("even", True)])
def test_logits_and_gradients_are_those_of_dense_masks(name, masked, padded):
    assert_same(FAMILIES[name], 2, *batch(masked, padded))


@pytest.mark.parametrize("name", FAMILIES)
def test_documents_are_kept_apart(name):
    ids, attention = batch("uneven", padded=True)
    assert_same(FAMILIES[name], 1, ids, attention, documents=DOCUMENTS)


@pytest.mark.parametrize("name", ["bert", "electra", "deberta"])
def test_segments_of_pairs_go_along(name):
    config = FAMILIES[name] if name != "deberta" else DebertaConfig(**RELATIVE | {"position_biased_input": True})
    segments = (torch.arange(LENGTH) > 9).long().expand(len(DOCUMENTS), -1)
    assert_same(config, 3, *batch(), segments=segments)


@pytest.mark.parametrize("name", ["bert", "deberta", "modernbert, near layers"])
@pytest.mark.parametrize("way", ["eager attention", "activations computed twice", "numbers rounded up"])
def test_other_ways_to_compute_it_are_equal(name, way):
    config, (ids, attention) = copy.deepcopy(FAMILIES[name]), batch()
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    where, figures = (ids == MASK).flatten().nonzero().flatten(), []
    for usual in (True, False):
        config._attn_implementation = "eager" if way == "eager attention" and not usual else None
        student, visible = student_of(config, 2).train(), None
        if way == "activations computed twice" and not usual:
            student.checkpoint_activations()
        if way == "numbers rounded up" and not usual:
            visible = 16, 24  # more than the 23 that there are
        logits = student(ids, attention, where, None, None, None, visible)
        figures.append(logits_and_gradients(student, student.encoder, logits))
    assert torch.allclose(figures[0][0], figures[1][0], rtol=1e-4, atol=1e-5)
    for name, gradient in figures[0][1].items():
        assert gradient is None or torch.allclose(figures[1][1][name], gradient, rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_without_a_mask_it_is_the_stock_encoder(name):
    """As in fine-tuning; and outside of a student's forward pass it is that on any input."""
    ids, attention = batch("none", padded=True)
    student, words = student_of(FAMILIES[name], 2), torch.where(ids == MASK, 9, ids)
    stock = AutoModel.from_config(FAMILIES[name], **without_pooler(FAMILIES[name])).eval()
    stock.load_state_dict(student.encoder.state_dict())
    everywhere = torch.arange(ids.numel())
    expected = student.head(stock(words, attention).last_hidden_state.flatten(0, 1)) @ student.output_Kd.T
    real = attention.flatten().bool()
    assert torch.allclose(
        (student(words, attention, everywhere) - student.output_bias_K)[real], expected[real], atol=1e-4
    )
    ours, theirs = (model(ids, attention).last_hidden_state for model in (student.encoder, stock))
    assert torch.allclose(ours[attention.bool()], theirs[attention.bool()], atol=1e-4)


def test_bfloat16_is_close_to_float32():
    ids, attention = batch()
    where = (ids == MASK).flatten().nonzero().flatten()
    for name in ("bert", "deberta", "deberta-v2", "modernbert, near layers"):
        student = student_of(FAMILIES[name], 2)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            rough = student(ids, attention, where)
        exact = student(ids, attention, where)
        assert torch.allclose(rough.float(), exact, atol=0.05 * exact.abs().max().item()), name


# -- cost -------------------------------------------------------------------------------------------------------


def test_the_layers_below_cost_less_by_the_share_that_is_masked(ids_store):
    """A layer over n of L positions: four products with d x d, two with d x 4d, scores and averages over n keys."""
    layers, width, length, windows, masked = 6, 64, 12, 8, 4  # masked: round(0.4 x 10) of a window
    costs = {}
    for layer in (0, 4):
        config = StudentConfig(encoder=f"bert-{layers}x{width}", mask_rate=0.4, mask_later=layer, max_steps=1)
        config = StudentConfig(**vars(config) | {"batch_windows": windows, "micro_batch": windows})
        costs[layer] = step_flops(build_student(config, ids_store, Mlm(ids_store)), config, length)

    def of_a_layer(positions):
        return windows * positions * (2 * 12 * width**2 + 2 * 2 * positions * width)

    assert costs[0] - costs[4] == 3 * 4 * (of_a_layer(length) - of_a_layer(length - masked))


# -- batches and runs -------------------------------------------------------------------------------------------


def loaders(store, config, objective, **reading):
    masking = build_masking(config, store)
    given = {"micro_batch": config.micro_batch} | reading
    return Loader(store.split("train"), masking, OBJECTIVES[objective](store).read_targets, **given)


LATER = {"encoder": "bert-3x32", "mask_later": 2, "mask_rate": 0.4}


def test_batches_and_masks_are_those_of_every_other_run(lsp_store, settings):
    config = StudentConfig(**settings | LATER)
    usual = loaders(lsp_store, config, "mlm").step(1, 0, 12)
    for objective in ("mlm", "mlsm"):
        for few_shapes in (False, True):
            batch = loaders(lsp_store, config, objective, mask_later=True, few_shapes=few_shapes).step(1, 0, 12)
            assert batch.digest == usual.digest
            for micro, other in zip(batch.micro, usual.micro, strict=True):
                assert other.visible is None
                real = micro.attention_WL.bool() if micro.attention_WL is not None else micro.input_WL >= 0
                counts = (real & (micro.input_WL != lsp_store.special_ids["mask"])).sum(1)
                assert micro.visible[0] == counts.min() and counts.max() <= micro.visible[1] <= 16
                assert few_shapes or micro.visible[1] == counts.max()


@pytest.mark.parametrize("encoder", ["bert-3x32", "modernbert-3x64"])
def test_a_compiled_student_computes_the_same_from_few_shapes(lsp_store, settings, encoder):
    given = {"encoder": encoder, "batch_windows": 24, "micro_batch": 24, "dropout": 0.0}
    config = StudentConfig(**settings | LATER | given)
    losses, shapes = [], set()
    for compiled in (False, True):
        objective = Mlsm(lsp_store)
        stepper = Stepper(config, build_student(config, lsp_store, objective), objective)
        loader = loaders(lsp_store, config, "mlsm", mask_later=True, few_shapes=compiled)
        if compiled:
            stepper.model.compile(backend="eager")
            counters.clear()
        with torch.random.fork_rng():
            losses.append([])
            for step in range(6):
                batch = loader.step(1, step, 24)
                shapes.add(batch.micro[0].visible[1])
                losses[-1].append(stepper.update(step, batch))
    assert counters["stats"]["unique_graphs"] <= 2
    assert losses[1] == [pytest.approx(figures, rel=1e-4) for figures in losses[0]]


def test_a_killed_run_goes_on_bit_for_bit_and_without_the_setting_is_what_it_was(
    lsp_store, settings, tmp_path, train_until_killed
):
    common = settings | LATER | {"store": str(lsp_store.path)}
    runs = {"later": {}, "usual": {"mask_later": 0}, "words": {"objective": "mlm"}}
    for name, changes in runs.items():
        train(StudentConfig(**common | changes | {"run_dir": tmp_path / name}))
    killed = StudentConfig(**common | {"run_dir": tmp_path / "killed"})
    train_until_killed(killed, 5)
    train(killed)
    curves = {name: log_of(tmp_path / name) for name in (*runs, "killed")}
    for figure in ("loss", "grad_norm", "batch"):
        ours, theirs = ([line[figure] for line in curves[name].values()] for name in ("killed", "later"))
        assert ours == theirs
    ours, theirs = (load_file(tmp_path / name / "export" / "model.safetensors") for name in ("killed", "later"))
    assert all(torch.equal(ours[name], weight) for name, weight in theirs.items())
    for name in ("usual", "words"):
        assert [line["batch"] for line in curves[name].values()] == [line["batch"] for line in curves["later"].values()]
    assert curves["usual"][1]["loss"] != curves["later"][1]["loss"]
    assert curves["later"][1]["flops"] < 0.9 * curves["usual"][1]["flops"]
    described = {name: find_description(tmp_path / name) for name in ("usual", "later")}
    assert described["later"]["settings"] == described["usual"]["settings"] | {"mask_later": 2}
    assert "mask_later" not in described["usual"]["architecture"]


# -- what feeds it [MASK] ---------------------------------------------------------------------------------------


def exported(store, objective, directory, **changes):
    config = StudentConfig(**{"encoder": "bert-3x32", "mask_later": 2} | changes)
    model = scrambled(build_student(config, store, objective))
    directory.mkdir()
    export_student(model, directory, objective, store, LINEAGE)
    return model, directory


def of_masked_tokens(export, words):
    """Dense hidden states (T, d) of the tokens of a text, each masked in turn, by the files of an export alone."""
    config = AutoConfig.from_pretrained(export)
    encoder = AutoModel.from_pretrained(export, **without_pooler(config))
    ids = [2, *(int(word[1:]) + 5 for word in words.split()), 3]
    rows = [torch.tensor([[*ids[:at], MASK, *ids[at + 1 :]]]) for at in range(1, len(ids) - 1)]
    states = [dense(config, encoder.state_dict(), config.mask_later["layer"], row, None)[1] for row in rows]
    return torch.stack([state[0, at] for at, state in enumerate(states, 1)]), torch.tensor(ids[1:-1])


SENTENCES = ["w1 w2 w3", "w1 w9 w3", "w4", "w7 w8 w9 w10 w11 w7 w3"]


@pytest.fixture(params=["bert", "deberta", "modernbert, near layers"])
def encoder(request, tmp_path):
    FAMILIES[request.param].save_pretrained(tmp_path / "encoder")
    return str(tmp_path / "encoder" / "config.json")


@torch.no_grad()
def test_blimp_lets_masks_enter_where_they_did_in_training(encoder, ids_store, tmp_path):
    _, export = exported(ids_store, Mlm(ids_store), tmp_path / "export", encoder=encoder)
    stock = AutoModelForMaskedLM.from_pretrained(export).eval()
    head = stock.cls if hasattr(stock, "cls") else torch.nn.Sequential(stock.head, stock.decoder)
    model, tokenizer = load(export, torch.device("cpu"))
    found = Scorer(model.twin(), tokenizer).score(SENTENCES)  # a twin, as the other threads have
    for sentence, scores in zip(SENTENCES, found, strict=True):
        states, tokens = of_masked_tokens(export, sentence)
        expected = head(states[None])[0].log_softmax(1)[torch.arange(len(tokens)), tokens]
        assert torch.allclose(torch.from_numpy(scores), expected, atol=1e-4)


@torch.no_grad()
def test_lsps_of_text_are_those_of_masks_that_enter_later(encoder, lsp_store, tmp_path):
    model, export = exported(lsp_store, Mlsm(lsp_store), tmp_path / "export", encoder=encoder)
    for sentence, lsps in zip(SENTENCES, LspModel.from_pretrained(export).lsp(SENTENCES), strict=True):
        states, _ = of_masked_tokens(export, sentence)
        expected = (model.head(states) @ model.output_Kd.T + model.output_bias_K).softmax(1)
        assert torch.allclose(lsps.distributions_Tk, expected, atol=1e-5)


@pytest.mark.parametrize("probe_input", ["softmax", "logits"])
def test_a_probe_learns_and_scores_with_masks_that_enter_later(probe_input, lsp_store, settings, tmp_path):
    student, export = exported(lsp_store, Mlsm(lsp_store), tmp_path / "export")
    given = {name: value for name, value in settings.items() if name != "encoder"} | {"lr": 0.05}
    config = ProbeConfig(student=str(export), store=str(lsp_store.path), probe_input=probe_input, **given)
    result = train_probe(config)
    probe_Vk = load_file(tmp_path / "run" / "checkpoints" / "step-00000008" / "resume" / "student.safetensors")[
        "probe_Vk"
    ]
    assert "mask_later" not in find_description(tmp_path / "run")["settings"]
    found = Scorer(*load(Path(result["export"]), torch.device("cpu"))).score(SENTENCES)
    for sentence, scores in zip(SENTENCES, found, strict=True):
        states, tokens = of_masked_tokens(result["export"], sentence)
        with torch.no_grad():
            outputs = student.head(states) @ student.output_Kd.T + student.output_bias_K
            outputs = outputs.softmax(1) if probe_input == "softmax" else outputs
            expected = (outputs @ probe_Vk.T).log_softmax(1)[torch.arange(len(tokens)), tokens]
        assert torch.allclose(torch.from_numpy(scores), expected, atol=1e-4)


def test_an_export_is_a_stock_encoder_and_says_where_masks_enter(ids_store, tmp_path):
    model, export = exported(ids_store, Mlm(ids_store), tmp_path / "export")
    _, usual = exported(ids_store, Mlm(ids_store), tmp_path / "usual", mask_later=0)
    theirs = AutoModel.from_pretrained(export, add_pooling_layer=False).state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in model.encoder.state_dict().items())
    config, plain = (json.loads((place / "config.json").read_text()) for place in (export, usual))
    assert config == plain | {"mask_later": {"layer": 2, "mask_token_id": MASK}}
    card, usual_card = ((place / "README.md").read_text() for place in (export, usual))
    assert "[MASK] entered the encoder at layer 2 in training" in card and "[MASK] entered" not in usual_card
    assert "pipeline_tag: feature-extraction" in card and "pipeline_tag: fill-mask" in usual_card


def test_a_checkpoint_to_resume_from_is_exported_with_it(lsp_store, settings, tmp_path):
    train(StudentConfig(**settings | LATER | {"store": lsp_store.path, "keep_last": 9}))
    report = export_run(ExportConfig(run=tmp_path / "run", step="6", output=tmp_path / "exported"))
    assert not report["kept"] and AutoConfig.from_pretrained(tmp_path / "exported").mask_later["layer"] == 2


def test_training_on_lets_masks_enter_as_it_is_told(ids_store, tmp_path):
    _, export = exported(ids_store, Mlm(ids_store), tmp_path / "export")
    for layer in (0, 1):
        config = encoder_config(StudentConfig(continue_from=export, mask_later=layer), ids_store)
        assert getattr(config, "mask_later", {"layer": 0})["layer"] == layer


# -- what is refused --------------------------------------------------------------------------------------------


def test_settings_that_do_not_go_together_are_refused():
    assert "mask_later" not in StudentConfig().identity() and StudentConfig(mask_later=4).identity()["mask_later"] == 4
    with pytest.raises(ValueError, match="--mask-later 2 is only for --corruption mask, found 80-10-10") as caught:
        StudentConfig(mask_later=2, corruption="80-10-10")
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="--mask-later must be at least 0, found -1"):
        StudentConfig(mask_later=-1)


@pytest.mark.parametrize(
    ("config", "layer", "said"),
    [
        (BertConfig(**SIZE), 4, "field layer: expected a whole number <= 3, found 4"),
        (BertConfig(**SIZE | {"num_hidden_layers": 1}), 1, "has only one layer"),
        (DistilBertConfig(), 2, "not supported for a distilbert encoder, only for bert, deberta"),
        (DebertaV2Config(**RELATIVE, conv_kernel_size=3), 2, "convolution over neighbouring"),
        (DebertaConfig(**RELATIVE, talking_head=True), 2, "talking heads"),
    ],
)
def test_encoders_that_cannot_are_refused(config, layer, said, ids_store, tmp_path):
    config.save_pretrained(tmp_path)
    with pytest.raises(RunError, match=f"--mask-later {layer}: .*{said}.*, or omit it") as caught:
        encoder_config(StudentConfig(encoder=str(tmp_path / "config.json"), mask_later=layer), ids_store)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("setting", [7, {"layer": 3, "mask_token_id": MASK}, {"layer": 2}, {"layer": "2"}])
def test_an_export_whose_setting_is_damaged_is_refused(setting, lsp_store, tmp_path):
    _, export = exported(lsp_store, Mlsm(lsp_store), tmp_path / "export")
    config = json.loads((export / "config.json").read_text())
    replace_json(export / "config.json", config | {"mask_later": setting})
    with pytest.raises(RunError, match="mask_later of config.json: .*expected"):
        LspModel.from_pretrained(export)
    with pytest.raises(ModelError, match="mask_later of config.json: .*expected.* Export or download the model again"):
        check_family(export)
