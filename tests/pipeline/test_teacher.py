"""The cut teacher against the full model of transformers, per family and layer; then what must not load."""

import json
import logging
import pickle
import re
import shutil

import pytest
import torch
from minilm import minilm_dir, mpnet_dir
from tiny_families import LAYERS, LAYOUTS, VOCABULARY, edit_weights, tiny_model, windows
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerFast

from mlsm.common.errors import DeviceError, TeacherError
from pipeline.teacher import (
    FAMILIES,
    Teacher,
    check_documents_apart,
    load_tokenizer,
    locate,
    special_ids,
    teacher_fingerprint,
)
from shards.copies import tokenizer_fingerprint

pytestmark = pytest.mark.promise(
    "a checkpoint of which transformers would compute different model (relative positions that it dropped, code "
    "of its own, weights in embeddings or layers up to l without a place): refused as teacher, masked LM, "
    "start of a student, for fine-tuning and BLiMP; heads, poolers, layers above l and buffers of older "
    "versions are fine",
    cases="11 families × 2 layouts",
)


@pytest.fixture(autouse=True)
def short_passes(monkeypatch):
    """On a CPU a pass has few windows: here one or two, so that every oracle sees calls of several passes."""
    monkeypatch.setattr("pipeline.teacher.cut.CACHED_NUMBERS", 48 * 32)  # the tiny models are 32 wide


@pytest.fixture
def bert_dir(tmp_path):
    tiny_model("bert", "masked-lm").save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


# ---- equality with the full model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_equals_the_full_model(family, layout, tmp_path):
    model = tiny_model(family, layout)
    model.save_pretrained(tmp_path)
    teachers = {layer: Teacher.load(tmp_path, layer) for layer in range(1, LAYERS + 1)}
    for ids, attention in windows():
        with torch.no_grad():
            expected = model(input_ids=ids, attention_mask=attention.long(), output_hidden_states=True).hidden_states
        for layer, teacher in teachers.items():
            hidden = teacher(ids, attention)
            assert hidden.dtype == torch.float32 and hidden.shape == (3, 24, teacher.hidden_size)
            torch.testing.assert_close(hidden[attention], expected[layer][attention], rtol=0, atol=1e-5)
            assert (hidden - expected[layer - 1])[attention].abs().max() > 0.1  # and no other layer's


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_above_are_not_built(family, tmp_path):
    tiny_model(family).save_pretrained(tmp_path)
    sizes = [
        sum(parameter.numel() for parameter in Teacher.load(tmp_path, layer)._model.parameters()) for layer in (1, 2, 3)
    ]
    per_layer = sizes[1] - sizes[0]
    assert per_layer > 0 and sizes[2] - sizes[1] == per_layer


def test_settings_per_layer_are_cut_too(tmp_path):
    tiny_model("modernbert").save_pretrained(tmp_path)
    config = Teacher.load(tmp_path, 2)._model.config
    assert (config.num_hidden_layers, config.layer_types) == (2, ["full_attention", "sliding_attention"])


@pytest.mark.parametrize(
    "family, positions", [("bert", 40), ("roberta", 38), ("mpnet", 38), ("deberta", 40), ("modernbert", 40)]
)
def test_the_longest_window_fits_and_one_more_is_refused(family, positions, tmp_path):
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, LAYERS)
    assert teacher.max_positions == positions
    ids, attention = windows(positions)[0]
    torch.testing.assert_close(teacher(ids, attention), model(input_ids=ids)[0].detach(), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=f"--max-length {positions}"):
        teacher(*windows(positions + 1)[0])


@pytest.mark.parametrize(
    ("find", "layers", "width", "positions"), [(minilm_dir, 6, 384, 512), (mpnet_dir, 12, 768, 512)]
)
def test_layers_of_a_real_teacher_equal_the_full_model(find, layers, width, positions):
    directory = find()
    tokenizer = load_tokenizer(directory)
    batch = tokenizer(
        ["A bank of the river.", f"The bank raised its rates {tokenizer.mask_token} again, and twice."],
        padding=True,
        return_tensors="pt",
    )
    attention = batch["attention_mask"].bool()
    with torch.no_grad():
        full = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
        expected = full(**batch, output_hidden_states=True).hidden_states
    for layer in range(1, layers + 1):
        teacher = Teacher.load(directory, layer)
        assert (teacher.num_layers, teacher.hidden_size, teacher.max_positions) == (layers, width, positions)
        hidden = teacher(batch["input_ids"], attention)
        torch.testing.assert_close(hidden[attention], expected[layer][attention], rtol=0, atol=5e-5)


def test_old_norm_names_are_understood(bert_dir):
    """bert-base-cased, the paper's teacher, calls the norms' weights gamma and beta."""
    ids, attention = windows()[0]
    before = Teacher.load(bert_dir, 3)(ids, attention)

    def rename(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    edit_weights(bert_dir, lambda weights: {rename(name): tensor for name, tensor in weights.items()})
    assert torch.equal(Teacher.load(bert_dir, 3)(ids, attention), before)


# ---- checkpoints of which transformers would compute different model


def add_weight(directory, like, ending):
    """Add a weight beside the first whose name contains `like`; returns its name."""
    names = []

    def edit(weights):
        first = next(name for name in sorted(weights) if like in name)
        names.append(first.rpartition(like)[0] + like + ending)
        return weights | {names[0]: torch.ones(2)}

    edit_weights(directory, edit)
    return names[0]


def change_config(directory, **settings):
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))


LAYER_NAMES = {"distilbert": "layer.{}.", "eurobert": "layers.{}.", "modernbert": "layers.{}."}
EMBEDDING_NAMES = {"eurobert": "embed_tokens."}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_no_layer_up_to_l_has_a_place_for(family, layout, tmp_path):
    layer = LAYER_NAMES.get(family, "layer.{}.")
    tiny_model(family, layout).save_pretrained(tmp_path)
    add_weight(tmp_path, layer.format(2), "attention.self.distance_embedding.weight")
    Teacher.load(tmp_path, 2)  # it belongs to the third
    with pytest.raises(TeacherError, match="1 weights .*no place for.*distance_embedding") as caught:
        Teacher.load(tmp_path, 3)
    assert "different model" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_the_embeddings_have_no_place_for(family, tmp_path):
    tiny_model(family, "masked-lm").save_pretrained(tmp_path)
    add_weight(tmp_path, EMBEDDING_NAMES.get(family, "embeddings."), "scale.weight")
    with pytest.raises(TeacherError, match=r"no place for \(.*scale.weight\)"):
        Teacher.load(tmp_path, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_of_older_versions_and_heads_do_no_harm(family, layout, tmp_path):
    tiny_model(family, layout).save_pretrained(tmp_path)
    embeddings = EMBEDDING_NAMES.get(family, "embeddings.")
    for buffer in ("position_ids", "token_type_ids"):
        add_weight(tmp_path, embeddings, buffer)
    add_weight(tmp_path, LAYER_NAMES.get(family, "layer.{}.").format(0), "attn.rotary_emb.inv_freq")
    heads = {"classifier.weight": torch.ones(2), "qa_outputs.bias": torch.ones(2)}
    edit_weights(tmp_path, lambda weights: weights | heads)
    Teacher.load(tmp_path, LAYERS)


@pytest.mark.parametrize("positions", ["relative_key", "relative_key_query"])
def test_relative_positions_that_transformers_no_longer_computes(bert_dir, positions):
    change_config(bert_dir, position_embedding_type="absolute")
    Teacher.load(bert_dir, 1)
    change_config(bert_dir, position_embedding_type=positions)
    with pytest.raises(TeacherError, match=f"position_embedding_type '{positions}'.*absolute positions"):
        Teacher.load(bert_dir, 1)


@pytest.mark.parametrize("code", ["modeling_bert.JinaBertModel", "jinaai/jina-bert--modeling_bert.JinaBertModel"])
def test_code_of_its_own(bert_dir, code):
    change_config(bert_dir, auto_map={"AutoModel": code, "AutoTokenizer": ["x.Slow", None]})
    with pytest.raises(TeacherError, match=f"auto_map: {code}.*not run.*different model"):
        Teacher.load(bert_dir, 1)


def test_code_that_transformers_has_taken_over(tmp_path):
    tiny_model("eurobert").save_pretrained(tmp_path)
    for place in ("", "EuroBERT/EuroBERT-210m--"):
        change_config(tmp_path, auto_map={"AutoModel": f"{place}modeling_eurobert.EuroBertModel"})
        Teacher.load(tmp_path, 1)
    change_config(tmp_path, auto_map={"AutoModel": "modeling_other.EuroBertModel"})
    with pytest.raises(TeacherError, match="auto_map"):
        Teacher.load(tmp_path, 1)


# ---- dropout


def test_dropout_is_off(tmp_path):
    tiny_model("bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5).save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, 3)
    ids, attention = windows()[0]
    assert torch.equal(teacher(ids, attention), teacher(ids, attention))


# ---- documents apart, segments

DOCUMENTS = torch.tensor([[0] * 9 + [1] * 11 + [2] * 4, [0] * 13 + [1] * 5 + [-1] * 6])
WITHOUT_CONVOLUTION = {"deberta-v2": {"conv_kernel_size": 0}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_documents_of_a_window_are_read_as_if_alone(family, dtype, tmp_path):
    """Against a pass of transformers' own model over each document's tokens, at two layers at once."""
    model = tiny_model(family, **WITHOUT_CONVOLUTION.get(family, {}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # attention far from uniform
    model.save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, LAYERS, dtype=dtype)
    check_documents_apart(tmp_path)
    ids = torch.randint(5, VOCABULARY, DOCUMENTS.shape, generator=torch.Generator().manual_seed(2))
    ids = torch.where(DOCUMENTS < 0, 1, ids)
    apart = teacher(ids, DOCUMENTS >= 0, layers=[2, LAYERS], documents_WL=DOCUMENTS)
    as_one = teacher(ids, DOCUMENTS >= 0, layers=[2, LAYERS])
    for window, document in [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]:
        mine = DOCUMENTS[window] == document
        with torch.no_grad():
            states = model(input_ids=ids[window, mine][None], output_hidden_states=True).hidden_states
        for found, one, layer in zip(apart, as_one, (2, LAYERS), strict=True):
            alone, scale = states[layer][0], states[layer].norm()
            error = (found[window, mine] - alone).norm() / scale
            whole = (one[window, mine] - alone).norm() / scale
            assert error < {"float32": 1e-5, "bfloat16": 0.05, "float16": 0.01}[dtype], (layer, error, whole)
            assert dtype != "float32" or whole > 100 * error


def test_a_teacher_that_cannot_keep_documents_apart_says_so(tmp_path):
    tiny_model("deberta-v2").save_pretrained(tmp_path)
    with pytest.raises(TeacherError, match="--documents-apart: .* convolution over neighbouring tokens"):
        check_documents_apart(tmp_path)


@pytest.mark.parametrize(
    ("family", "types"),
    [
        ("bert", 2),
        ("electra", 2),
        ("roberta", 2),
        ("xlm-roberta", 1),
        ("deberta", 0),
        ("distilbert", 0),
        ("modernbert", 0),
        ("mpnet", 0),
        ("eurobert", 0),
    ],
)
def test_segments_change_what_a_teacher_with_token_types_reads(family, types, tmp_path):
    model = tiny_model(family, **({"type_vocab_size": types} if types else {}))
    model.save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, 2)
    assert teacher.segments == types
    if types < 2:
        return
    ids, attention = windows()[1]
    segments = torch.zeros_like(ids)
    segments[:, 6:] = 1
    with torch.no_grad():
        expected = model(ids, attention.long(), token_type_ids=segments, output_hidden_states=True).hidden_states[2]
    found = teacher(ids, attention, segments_WL=segments)
    torch.testing.assert_close(found[attention], expected[attention], rtol=0, atol=1e-5)
    assert (found - teacher(ids, attention))[attention].abs().max() > 0.01


# ---- layer, dtype, device


@pytest.mark.parametrize("layer", [-1, 0, LAYERS + 1])
def test_no_such_layer(bert_dir, layer):
    with pytest.raises(TeacherError, match=f"has {LAYERS} layers, no layer {layer}"):
        Teacher.load(bert_dir, layer)


def test_half_precision_checkpoint_is_computed_in_float32(bert_dir):
    edit_weights(bert_dir, lambda weights: {name: tensor.half() for name, tensor in weights.items()})
    config = json.loads((bert_dir / "config.json").read_text())
    (bert_dir / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert Teacher.load(bert_dir, 2).dtype == torch.float32
    assert Teacher.load(bert_dir, 2, dtype="auto").dtype == torch.float32  # on a CPU


def test_low_precision_returns_float32_and_is_close(bert_dir):
    ids, attention = windows()[1]
    exact = Teacher.load(bert_dir, 2)(ids, attention)
    teacher = Teacher.load(bert_dir, 2, dtype="bfloat16")
    hidden = teacher(ids, attention)
    assert teacher.dtype == torch.bfloat16 and hidden.dtype == torch.float32
    torch.testing.assert_close(hidden[attention], exact[attention], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_call_of_many_windows_is_that_of_each_window(family, tmp_path):
    """Ids, padding, documents and segments of a window go into the same pass, and its states to its place."""
    tiny_model(family).save_pretrained(tmp_path)
    teacher = Teacher.load(tmp_path, 2)
    (count, length), generator = (7, 20), torch.Generator().manual_seed(3)
    ids = torch.randint(5, VOCABULARY, (count, length), generator=generator)
    ends = torch.randint(5, length, (count, 2), generator=generator).sort().values
    places = torch.arange(length)[None]
    documents = torch.where(places < ends[:, 1:], (places >= ends[:, :1]).long(), -1)
    segments = (places >= ends[:, :1]).long() if teacher.segments == 2 else None
    rest = {"documents_WL": documents, "segments_WL": segments}
    tokens = torch.randperm(count * length, generator=generator)[:50]
    found = teacher(ids, documents >= 0, layers=[1, 2], **rest)
    some = teacher(ids, documents >= 0, tokens, layers=[1, 2], **rest)
    for window in range(count):
        one = {name: None if tensor is None else tensor[window, None] for name, tensor in rest.items()}
        alone = teacher(ids[window, None], documents[window, None] >= 0, layers=[1, 2], **one)
        real = documents[window] >= 0
        for whole, own in zip(found, alone, strict=True):
            torch.testing.assert_close(whole[window, real], own[0, real], rtol=0, atol=1e-5)
    for whole, chosen in zip(found, some, strict=True):
        assert torch.equal(whole.flatten(0, 1)[tokens], chosen)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chosen_tokens_are_those_of_the_whole(bert_dir, dtype):
    teacher = Teacher.load(bert_dir, 2, dtype=dtype)
    tokens = torch.tensor([0, 3, 24, 25, 40])
    for ids, attention in windows():
        whole = teacher(ids, attention)
        chosen = teacher(ids, None if attention.all() else attention, tokens)
        assert chosen.dtype == torch.float32 and torch.equal(chosen, whole.flatten(0, 1)[tokens])


def test_wrong_dtype_and_device(bert_dir):
    with pytest.raises(TeacherError, match="float32, bfloat16, float16 or auto"):
        Teacher.load(bert_dir, 1, dtype="int8")
    for device in ("toaster", "meta"):
        with pytest.raises(DeviceError, match="cpu, cuda or auto"):
            Teacher.load(bert_dir, 1, device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu(bert_dir):
    assert Teacher.load(bert_dir, 1, device="auto").device.type == "cpu"
    with pytest.raises(DeviceError, match="no GPU"):
        Teacher.load(bert_dir, 1, device="cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_agrees_with_cpu(bert_dir):
    ids, attention = windows()[1]
    hidden = Teacher.load(bert_dir, 3, device="auto")(ids, attention)
    expected = Teacher.load(bert_dir, 3)(ids, attention)
    torch.testing.assert_close(hidden.cpu()[attention], expected[attention], rtol=0, atol=1e-4)


def test_shapes_must_match(bert_dir):
    teacher = Teacher.load(bert_dir, 1)
    ids, attention = windows()[0]
    with pytest.raises(ValueError, match="one shape"):
        teacher(ids, attention[:, :-1])
    with pytest.raises(ValueError, match="one shape"):
        teacher(ids[0], attention[0])


# ---- a checkpoint that does not fit, or that could run code


def test_loading_says_nothing_and_leaves_logging_alone(bert_dir, capfd, caplog):
    logger = logging.getLogger("transformers")
    before = logger.level
    with caplog.at_level(logging.DEBUG):
        Teacher.load(bert_dir, 2)
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name.startswith("transformers")]
    assert logger.level == before


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "weights are quantised"),
        ({"is_decoder": True}, "says is_decoder"),
    ],
)
def test_weights_and_directions_of_reading_that_are_not_ours_are_refused(bert_dir, setting, message):
    change_config(bert_dir, **setting)
    with pytest.raises(TeacherError, match=message):
        Teacher.load(bert_dir, 1)


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_is_refused(bert_dir, alone):
    """Where peft is installed, transformers would add it to the weights, and the fingerprint would not cover it."""
    (bert_dir / "adapter_config.json").write_text("{}")
    if alone:
        (bert_dir / "config.json").unlink()
    with pytest.raises(TeacherError, match="Merge it into the model first"):
        Teacher.load(bert_dir, 1)


@pytest.mark.parametrize("weight", ["encoder.layer.1.output.dense.weight", "embeddings.LayerNorm.bias"])
def test_missing_weight_is_refused(bert_dir, weight):
    def drop(weights):
        del weights[f"bert.{weight}"]
        return weights

    edit_weights(bert_dir, drop)
    with pytest.raises(TeacherError, match="lacks 1 weights.*" + weight):
        Teacher.load(bert_dir, 2)
    if "layer.1" in weight:
        Teacher.load(bert_dir, 1)  # not needed there


@pytest.mark.parametrize("spread", [-0.98, "much", float("nan")])
def test_a_spread_of_new_weights_that_cannot_be_is_refused(bert_dir, spread):
    config = json.loads((bert_dir / "config.json").read_text())
    (bert_dir / "config.json").write_text(json.dumps(config | {"initializer_range": spread}))
    with pytest.raises(TeacherError, match="initializer_range"):
        Teacher.load(bert_dir, 1)


def test_foreign_weights_are_refused(bert_dir):
    edit_weights(bert_dir, lambda weights: {f"other.{name}": tensor for name, tensor in weights.items()})
    with pytest.raises(TeacherError, match="lacks"):
        Teacher.load(bert_dir, 1)


def test_weights_of_another_shape_are_refused(bert_dir):
    config = json.loads((bert_dir / "config.json").read_text())
    (bert_dir / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(TeacherError, match="another shape for 3 weights.*intermediate"):
        Teacher.load(bert_dir, 1)


def test_cut_weights_file_is_refused(bert_dir):
    file = bert_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(TeacherError, match="cannot be loaded"):
        Teacher.load(bert_dir, 1)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.mark.promise("32 pickles, `../`")
def test_pickled_weights_are_refused_and_not_opened(bert_dir, tmp_path):
    (bert_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(str(tmp_path / "exploded"))))
    Teacher.load(bert_dir, 1)  # safetensors beside it are what is read
    (bert_dir / "model.safetensors").unlink()
    for load in (lambda: Teacher.load(bert_dir, 1), lambda: teacher_fingerprint(bert_dir)):
        with pytest.raises(TeacherError, match="only pytorch_model.bin.*convert it: python -c"):
            load()
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("family", ["gpt2", "something-new", None])
def test_families_without_a_test_are_refused(bert_dir, family):
    (bert_dir / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(TeacherError, match="cannot be cut.*modernbert"):
        Teacher.load(bert_dir, 1)


def test_damaged_config(bert_dir):
    (bert_dir / "config.json").write_text('{"model_type": "bert", "hidden_size": "wide"}')
    with pytest.raises(TeacherError, match="config.json cannot be read"):
        Teacher.load(bert_dir, 1)
    (bert_dir / "config.json").write_text("{")
    with pytest.raises(TeacherError, match="config.json cannot be read"):
        Teacher.load(bert_dir, 1)
    (bert_dir / "config.json").unlink()
    with pytest.raises(TeacherError, match="no config.json"):
        Teacher.load(bert_dir, 1)


def test_checkpoint_in_parts(tmp_path):
    model = tiny_model("bert")
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "parts", max_shard_size="40KB")
    parts = sorted((tmp_path / "parts").glob("model-*.safetensors"))
    assert len(parts) > 1
    ids, attention = windows()[0]
    hidden = Teacher.load(tmp_path / "parts", 4)(ids, attention)
    assert torch.equal(hidden, Teacher.load(tmp_path / "whole", 4)(ids, attention))
    parts[-1].unlink()
    with pytest.raises(TeacherError, match="every part"):
        Teacher.load(tmp_path / "parts", 1)


# ---- fingerprint


def test_fingerprint_follows_content_not_place(bert_dir, tmp_path):
    fingerprint = teacher_fingerprint(bert_dir)
    assert fingerprint == Teacher.load(bert_dir, 1).fingerprint == Teacher.load(bert_dir, 2).fingerprint
    copy = shutil.copytree(bert_dir, tmp_path / "elsewhere")
    (copy / "README.md").write_text("another card")
    assert teacher_fingerprint(copy) == fingerprint

    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert teacher_fingerprint(copy) != fingerprint


def test_fingerprint_sees_the_config_and_every_part(tmp_path):
    tiny_model("bert").save_pretrained(tmp_path, max_shard_size="40KB")
    seen = {teacher_fingerprint(tmp_path)}
    files = [tmp_path / "config.json", *sorted(tmp_path.glob("model-*.safetensors"))]
    for file in files:
        file.write_bytes(file.read_bytes() + b" ")
        seen.add(teacher_fingerprint(tmp_path))
    assert len(seen) == 1 + len(files)


# ---- where teachers lie


def test_bundled_is_a_reserved_name(bert_dir, monkeypatch, tmp_path):
    monkeypatch.setattr("pipeline.teacher.location.BUNDLED", bert_dir)
    teacher = Teacher.load("bundled", 1)
    assert teacher.name == "bundled" and teacher.fingerprint == teacher_fingerprint(bert_dir)
    monkeypatch.setattr("pipeline.teacher.location.BUNDLED", tmp_path / "nothing")
    with pytest.raises(TeacherError, match="bundled teacher is missing"):
        locate("bundled")


@pytest.mark.parametrize("name", ["./no-such-model", "/no/such/model", "~/no-such-model"])
def test_no_such_directory(name):
    with pytest.raises(TeacherError, match="no such directory.*or its name on the Hub"):
        Teacher.load(name, 1)


def test_a_file_is_not_a_teacher(bert_dir):
    with pytest.raises(TeacherError, match="is a file"):
        Teacher.load(bert_dir / "model.safetensors", 1)


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """An empty Hub cache and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def test_not_in_the_cache_and_no_network(hub_cache):
    message = "'someone/teacher' not found.*no network.*hf download someone/teacher"
    with pytest.raises(TeacherError, match=message) as caught:
        Teacher.load("someone/teacher", 1)
    assert "\n" not in str(caught.value)


def test_a_path_is_not_asked_for_on_the_hub(monkeypatch):
    monkeypatch.setattr("pipeline.teacher.location.snapshot_download", None)
    with pytest.raises(TeacherError, match="no such directory: models/bert/base.*--teacher"):
        Teacher.load("models/bert/base", 1)


def test_hub_name_comes_from_the_cache(hub_cache, bert_dir):
    """The layout of the cache is documented: refs/main holds the commit, snapshots/<commit> the files."""
    repository = hub_cache / "models--someone--teacher"
    wordpiece().save_pretrained(bert_dir)
    shutil.copytree(bert_dir, repository / "snapshots" / "c0ffee")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("c0ffee")
    assert Teacher.load("someone/teacher", 1).fingerprint == teacher_fingerprint(bert_dir)
    assert tokenizer_fingerprint(load_tokenizer("someone/teacher")) == tokenizer_fingerprint(wordpiece())


# ---- tokenizer

SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
WORDS = [*SPECIALS.values(), "the", "bank", "MASK", "[", "]", "##s"]


def wrap(model, **roles):
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    roles = roles or SPECIALS
    if "cls_token" in roles:
        backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(tokenizer_object=backend, **roles)


def wordpiece(words=WORDS, **roles):
    return wrap(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"), **roles)


def bpe():
    vocabulary = {word: i for i, word in enumerate([*SPECIALS.values(), *"thebank", "th", "the"])}
    return wrap(models.BPE(vocabulary, [("t", "h"), ("th", "e")], unk_token="[UNK]"))


def unigram():
    return wrap(models.Unigram([(word, -float(i)) for i, word in enumerate(WORDS)], unk_id=1))


def saved(tokenizer, directory):
    tokenizer.save_pretrained(directory)
    return load_tokenizer(directory)


def test_words_are_not_split_at_random(tmp_path):
    tokenizer = bpe()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    tokenizer.save_pretrained(tmp_path)
    found = load_tokenizer(tmp_path)
    assert len({tuple(found("the bank the").input_ids) for _ in range(20)}) == 1
    assert tokenizer_fingerprint(found) == tokenizer_fingerprint(bpe())


@pytest.mark.parametrize("given", [{}, {"split_special_tokens": False}, {"split_special_tokens": True}])
def test_special_tokens_in_a_text_are_text(tmp_path, given):
    wordpiece().save_pretrained(tmp_path / "first")
    config = tmp_path / "first" / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | given))
    tokenizer = load_tokenizer(tmp_path / "first")
    expected = [2, 5, 8, 7, 9, 6, 3]  # [CLS] the [ MASK ] bank [SEP]
    assert tokenizer("the [MASK] bank").input_ids == expected
    assert tokenizer.backend_tokenizer.encode("the [MASK] bank").ids == expected
    assert tokenizer(["the [MASK] bank"]).input_ids == [expected]

    tokenizer.save_pretrained(tmp_path / "second")  # what a student is exported with behaves as usual
    assert AutoTokenizer.from_pretrained(tmp_path / "second")("the [MASK] bank").input_ids == [2, 5, 4, 6, 3]


def test_saved_truncation_and_padding_are_switched_off(tmp_path):
    tokenizer = wordpiece()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=4)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    tokenizer.save_pretrained(tmp_path / "config")
    shutil.copy(tmp_path / "config" / "tokenizer_config.json", tmp_path)
    backend = load_tokenizer(tmp_path).backend_tokenizer
    assert len(backend.encode("the bank " * 50).ids) == 102
    assert [len(encoding.ids) for encoding in backend.encode_batch(["the", "the bank"])] == [3, 4]


def test_minilm_reads_long_documents():
    backend = load_tokenizer(minilm_dir()).backend_tokenizer  # its tokenizer.json truncates at 128
    assert len(backend.encode("bank " * 1000).ids) == 1002


@pytest.mark.parametrize("make", [wordpiece, bpe, unigram])
def test_tokenizer_fingerprint_survives_saving(make, tmp_path):
    first = saved(make(), tmp_path / "first")
    second = saved(first, tmp_path / "second")
    second("the bank", truncation=True, max_length=3, padding="max_length")
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(second)


def test_minilm_fingerprint_survives_saving(tmp_path):
    first = load_tokenizer(minilm_dir())
    assert tokenizer_fingerprint(saved(first, tmp_path)) == tokenizer_fingerprint(first)


def test_tokenizer_fingerprint_tells_tokenizers_apart(tmp_path):
    other_words = [*WORDS[:-1], "##es"]
    swapped_words = [*WORDS[:5], "bank", "the", *WORDS[7:]]
    swapped_roles = SPECIALS | {"cls_token": "[SEP]", "sep_token": "[CLS]"}
    made = [bpe(), unigram(), wordpiece(), wordpiece(other_words), wordpiece(swapped_words)]
    made.append(wordpiece(**swapped_roles))
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in made}) == len(made)


def test_special_ids():
    assert special_ids(wordpiece()) == {"cls": 2, "sep": 3, "mask": 4, "pad": 0, "all": [0, 1, 2, 3, 4]}


def test_special_ids_fall_back_on_sequence_ends():
    tokenizer = wordpiece(bos_token="[CLS]", eos_token="[SEP]", mask_token="[MASK]", pad_token="[PAD]")
    assert special_ids(tokenizer) == {"cls": 2, "sep": 3, "mask": 4, "pad": 0, "all": [0, 2, 3, 4]}


def test_special_ids_name_what_is_missing():
    with pytest.raises(TeacherError, match="no token for sep, mask;"):
        special_ids(wordpiece(bos_token="[CLS]", pad_token="[PAD]"))


@pytest.mark.parametrize("lost", ["[MASK]", "[SEP]", "[CLS]", "[PAD]"])
def test_a_special_token_that_the_vocabulary_lacks_gets_no_words_id(lost, tmp_path):
    """The ids keep a gap, so that the next id that transformers gives, the vocabulary's size, is the last word's."""
    wordpiece().save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["model"]["vocab"][lost]
    content["added_tokens"] = [added for added in content["added_tokens"] if added["content"] != lost]
    content["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    opened = AutoTokenizer.from_pretrained(tmp_path)
    assert opened.convert_tokens_to_ids(lost) == opened.convert_tokens_to_ids("##s") == 10  # what transformers does
    with pytest.raises(TeacherError, match=rf"the vocabulary in .* lacks {re.escape(lost)}; .*Use the complete"):
        load_tokenizer(tmp_path)
    opened.save_pretrained(tmp_path / "again")  # now the file lists both tokens, with one id
    with pytest.raises(TeacherError, match=rf"'##s' and '{re.escape(lost)}' have the same id, 10"):
        special_ids(load_tokenizer(tmp_path / "again"))


def test_a_vocab_txt_without_a_special_token_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(word for word in WORDS if word != "[MASK]"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SPECIALS | {"tokenizer_class": "BertTokenizer"}))
    with pytest.raises(TeacherError, match=r"the vocabulary in .* lacks \[MASK\]"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    assert special_ids(load_tokenizer(tmp_path))["mask"] == 4


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        ({"mask_token": "[UNK]"}, r"the tokens for mask and unk are the same, '\[UNK\]'"),
        ({"mask_token": "[SEP]"}, "the tokens for sep and mask are the same"),
        ({"sep_token": "[CLS]"}, "the tokens for cls and sep are the same"),
        ({"pad_token": "[MASK]"}, "the tokens for mask and pad are the same"),
        ({"mask_token": "bank"}, "the token for mask is an ordinary word, 'bank'"),
        ({"sep_token": "the"}, "the token for sep is an ordinary word, 'the'"),
    ],
)
def test_a_special_token_with_a_second_use_is_refused(roles, problem, tmp_path):
    with pytest.raises(TeacherError, match=problem):
        special_ids(saved(wordpiece(**SPECIALS | roles), tmp_path))


def test_padding_may_be_the_token_that_ends_a_text(tmp_path):
    """As in EuroBERT."""
    made = saved(wordpiece(bos_token="[CLS]", eos_token="[SEP]", mask_token="[MASK]", pad_token="[SEP]"), tmp_path)
    assert special_ids(made) == {"cls": 2, "sep": 3, "mask": 4, "pad": 3, "all": [2, 3, 4]}


def test_a_word_that_is_no_special_token_of_its_own_id_is_kept(tmp_path):
    """Ids with gaps are no fault."""
    words = {word: 3 * number for number, word in enumerate(WORDS)}
    made = saved(wrap(models.WordPiece(words, unk_token="[UNK]"), **SPECIALS), tmp_path)
    assert special_ids(made)["all"] == [0, 3, 6, 9, 12]


def test_teacher_without_tokenizer(bert_dir):
    with pytest.raises(TeacherError, match="no tokenizer in .*tokenizer.json"):
        load_tokenizer(bert_dir)


def test_damaged_tokenizer(bert_dir):
    (bert_dir / "tokenizer.json").write_text("{")
    with pytest.raises(TeacherError, match="cannot be read"):
        load_tokenizer(bert_dir)


def test_a_sentencepiece_model_alone_needs_its_library(bert_dir, monkeypatch):
    """DeBERTa-v2 and v3 come so; transformers would ask for tiktoken, and of a BERT make a vocabulary up."""
    (bert_dir / "spm.model").write_bytes(b"no model")
    monkeypatch.setattr("pipeline.teacher.location.find_spec", lambda name: None)
    with pytest.raises(TeacherError, match=r"\(spm\.model\) needs .*pip install sentencepiece protobuf"):
        load_tokenizer(bert_dir)
    (bert_dir / "model.safetensors").rename(bert_dir / "pytorch_model.bin")
    with pytest.raises(TeacherError, match=r"use converted \(after pip install sentencepiece protobuf\)"):
        Teacher.load(bert_dir, 1)
    (bert_dir / "tokenizer.json").write_text("{")
    with pytest.raises(TeacherError, match="cannot be read"):
        load_tokenizer(bert_dir)
    with pytest.raises(TeacherError, match="use converted$"):
        Teacher.load(bert_dir, 1)


def test_tokenizer_of_another_teacher(bert_dir):
    teacher = Teacher.load(bert_dir, 1)
    teacher.check_tokenizer(wordpiece())
    with pytest.raises(TeacherError, match=f"has {VOCABULARY} rows.*go up to 99"):
        teacher.check_tokenizer(wordpiece([*WORDS, *(f"word{i}" for i in range(len(WORDS), 100))]))
