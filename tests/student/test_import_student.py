"""import-student on checkpoints in the layout of the official code, made as its pretrainer.py makes them."""

import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_exports import ATTENTION, IDS
from tiny_families import tiny_model
from tiny_store import write_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from mlsm import __main__ as cli
from mlsm.common.errors import ModelError, RunError, TeacherError
from mlsm.evaluation import records
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.miniature import write_miniatures
from mlsm.evaluation.tasks.finetuning.suite import finetune
from mlsm.evaluation.tasks.scoring.models import load as load_scored
from student.encoders.stock import HEAD_LAYOUTS
from student.lsp_model import LspModel
from student.runs.config import ImportStudentConfig
from student.runs.import_student import import_student

K, WORDS = 12, 64
FAMILIES = sorted(HEAD_LAYOUTS)


def official(directory, family="bert", symbols=None, words_trained=True):
    """A checkpoint of pretrainer.py: tokens [MASK-i] are added, the model is resized and trained, both are saved."""
    write_tokenizer(directory, WORDS - 5)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    symbols = [f"[MASK-{i}]" for i in range(K)] if symbols is None else symbols
    tokenizer.add_special_tokens({"additional_special_tokens": symbols})
    model = tiny_model(family, "masked-lm", num_hidden_layers=2, pad_token_id=0)
    model.resize_token_embeddings(len(tokenizer))
    with torch.no_grad():
        model.get_output_embeddings().bias.normal_(generator=torch.Generator().manual_seed(4))
        if not words_trained:
            model.get_output_embeddings().bias[:WORDS] = 0
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model.eval()


def imported(directory, **settings):
    config = ImportStudentConfig(model=str(directory), max_length=32, output=directory.parent / "export", **settings)
    return import_student(config)


def to_pickle(directory, model):
    """What transformers 4.34, which the official code names, saves: all names of shared weights, in a pickle."""
    (directory / "model.safetensors").unlink()
    torch.save(
        model.state_dict() | {"bert.embeddings.position_ids": torch.arange(40)[None]}, directory / "pytorch_model.bin"
    )


@torch.no_grad()
def assert_split(model, export):
    inputs, real = {"input_ids": IDS, "attention_mask": ATTENTION}, ATTENTION.bool()
    logits = model(**inputs).logits[real]
    lsps = LspModel.from_pretrained(export)(IDS, ATTENTION)[real]
    assert torch.allclose(lsps, logits[:, WORDS:], atol=1e-4)
    stock, report = AutoModelForMaskedLM.from_pretrained(export, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and stock.config.vocab_size == WORDS
    assert torch.allclose(stock(**inputs).logits[real], logits[:, :WORDS], atol=1e-4)
    hidden, expected = (encoder(**inputs)[0][real] for encoder in (AutoModel.from_pretrained(export), model.base_model))
    assert torch.allclose(hidden, expected, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_split_into_words_and_lsps(family, tmp_path):
    model = official(tmp_path / "official", family)
    report = imported(tmp_path / "official")
    assert (report["words"], report["lsps"], report["predicts_words"]) == (WORDS, K, True)
    assert_split(model, tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.model_max_length == report["max_length"] == 32
    assert len(tokenizer) == WORDS and "MASK-" not in (tmp_path / "export" / "tokenizer_config.json").read_text()
    assert tokenizer("w1 w2")["input_ids"] == AutoTokenizer.from_pretrained(tmp_path / "official")("w1 w2")["input_ids"]
    assert load_scored(tmp_path / "export", torch.device("cpu"))[0].vocabulary == WORDS


def test_a_pickled_checkpoint_is_read_without_running_what_it_holds(tmp_path):
    model = official(tmp_path / "official")
    to_pickle(tmp_path / "official", model)
    imported(tmp_path / "official")
    assert_split(model, tmp_path / "export")

    class Hostile:
        def __reduce__(self):
            return (exec, (f"open({str(tmp_path / 'ran')!r}, 'w')",))

    (tmp_path / "official" / "pytorch_model.bin").write_bytes(pickle.dumps({"a": Hostile()}))
    with pytest.raises(ModelError, match="cannot be read as weights"):
        imported(tmp_path / "official")
    assert not (tmp_path / "ran").exists()


def test_token_embeddings_may_have_the_words_alone(tmp_path):
    model = official(tmp_path / "official")
    file = tmp_path / "official" / "model.safetensors"
    weights = load_file(file)
    embeddings = weights["bert.embeddings.word_embeddings.weight"]
    weights["cls.predictions.decoder.weight"] = embeddings.clone()
    weights["bert.embeddings.word_embeddings.weight"] = embeddings[:WORDS].clone()
    save_file(weights, file, metadata={"format": "pt"})
    imported(tmp_path / "official")
    assert_split(model, tmp_path / "export")


def test_a_decoder_of_its_own_stays_one(tmp_path):
    model = official(tmp_path / "official")
    model.config.tie_word_embeddings = False
    model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.detach() + 1)
    model.save_pretrained(tmp_path / "official")
    imported(tmp_path / "official")
    assert_split(model, tmp_path / "export")


def test_words_that_were_not_trained_are_no_word_head(tmp_path, capsys):
    official(tmp_path / "official", words_trained=False)
    assert not imported(tmp_path / "official")["predicts_words"]
    with pytest.raises(ModelError, match="predicts LSPs, not words.*train-probe"):
        load_scored(tmp_path / "export", torch.device("cpu"))
    assert "AutoModelForMaskedLM" not in (tmp_path / "export" / "README.md").read_text()
    arguments = ["import-student", str(tmp_path / "official"), "--max-length", "32", "--output", str(tmp_path / "out")]
    assert cli.run(arguments) == 0 and "has no word head" in capsys.readouterr().out


def test_the_unsplit_checkpoint_is_not_scored(tmp_path):
    """Its softmax would go over words and LSPs together."""
    official(tmp_path / "official")
    with pytest.raises(ModelError, match="one output layer predicts words and 12 LSPs.*import-student"):
        load_scored(tmp_path / "official", torch.device("cpu"))


def test_the_unsplit_checkpoint_teaches_no_words(tmp_path):
    official(tmp_path / "official")
    (tmp_path / "text.txt").write_text("w1 w2 w3\n")
    arguments = ["encode-logits", "--teacher", str(tmp_path / "official"), "--corpus", str(tmp_path / "text.txt")]
    with pytest.raises(TeacherError, match="one output layer predicts words and 12 LSPs"):
        cli.run([*arguments, "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_an_export_is_fine_tuned_as_the_checkpoint_it_comes_from(tmp_path):
    """Fine-tuning reads the encoder alone, which splitting leaves as it is."""
    official(tmp_path / "official")
    imported(tmp_path / "official")
    data = write_miniatures(tmp_path / "data")
    settings = {
        "tasks": ("stsb",),
        "seeds": 1,
        "data_dir": data,
        "epochs": 1,
        "lr": 1e-3,
        "max_length": 32,
        "device": "cpu",
    }
    models = tuple(str(tmp_path / name) for name in ("official", "export"))
    finetune(FinetuneConfig(models=models, output=tmp_path / "out", **settings))
    first, second = records.read([tmp_path / "out" / "evaluations"])
    assert first["figures"] == second["figures"]


def test_what_is_no_such_checkpoint_is_refused(tmp_path):
    def message(name, **settings):
        with pytest.raises((ModelError, RunError)) as raised:
            imported(tmp_path / name, **settings)
        assert not (tmp_path / "export").exists()
        return str(raised.value)

    official(tmp_path / "plain", symbols=[])
    assert "64 rows for the 64 words of its tokenizer" in message("plain")
    official(tmp_path / "knowledge", symbols=["[noun.act]", "[noun.animal]"])
    assert "66 rows for the 66 words" in message("knowledge")
    official(tmp_path / "order", symbols=["[MASK-1]", "[MASK-0]"])
    assert "expected the tokens [MASK-0], [MASK-1]" in message("order")
    official(tmp_path / "code")
    file = tmp_path / "code" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"auto_map": {"AutoModelForMaskedLM": "modeling_own.OwnForMaskedLM"}}))
    assert "names code of its own (auto_map: modeling_own.OwnForMaskedLM), which is not run" in message("code")
    assert "neither the Hub nor its cache has it" in message("nowhere")
    official(tmp_path / "rootless")
    weights = load_file(tmp_path / "rootless" / "model.safetensors")
    words = "bert.embeddings.word_embeddings.weight"
    save_file(
        {name: tensor for name, tensor in weights.items() if name != words}, tmp_path / "rootless" / "model.safetensors"
    )
    assert f"its weights have no token embeddings, {words}" in message("rootless")
    official(tmp_path / "large")
    file = tmp_path / "large" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"intermediate_size": 10**12}))
    assert "its config.json describes a model of 130,000,000," in message("large")
    official(tmp_path / "few", symbols=[f"[MASK-{i}]" for i in range(K)])
    tokens = AutoTokenizer.from_pretrained(tmp_path / "few")
    tokens.add_special_tokens({"additional_special_tokens": [f"[MASK-{K}]"]}, replace_extra_special_tokens=False)
    tokens.save_pretrained(tmp_path / "few")
    assert "has 76 rows, expected 64 words and one of each of the 13 tokens" in message("few")
    padded = tiny_model("bert", "masked-lm", num_hidden_layers=2, pad_token_id=0)
    padded.resize_token_embeddings(WORDS + 8)  # rows that fill a matrix up are no LSPs
    torch.nn.init.normal_(padded.get_output_embeddings().bias)
    padded.save_pretrained(tmp_path / "plain")
    assert "has 72 rows, expected 64 words and one of each of the 0 tokens" in message("plain")
    official(tmp_path / "relu", "roberta")
    file = tmp_path / "relu" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "relu"}))
    assert "always computes gelu" in message("relu")
    official(tmp_path / "family")
    file = tmp_path / "family" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "mobilebert"}))
    assert "is a mobilebert, whose masked-LM head is not known here. Known are those of" in message("family")
    official(tmp_path / "weightless")
    (tmp_path / "weightless" / "model.safetensors").unlink()
    assert "has no weights: expected model.safetensors or" in message("weightless")


def test_checkpoints_of_two_runs_do_not_replace_each_other(tmp_path, monkeypatch):
    """They are named by their step."""
    monkeypatch.chdir(tmp_path)
    for run, is_trained in (("a", True), ("b", False)):
        official(tmp_path / run / "100000", words_trained=is_trained)
    for _ in range(2):
        assert import_student(ImportStudentConfig(model="a/100000", max_length=32))["export"] == "runs/exports/100000"
    with pytest.raises(RunError, match="holds an export of a/100000. Nothing was changed. Give another --output"):
        import_student(ImportStudentConfig(model="b/100000", max_length=32))
    monkeypatch.chdir(tmp_path / "b" / "100000")
    assert import_student(ImportStudentConfig(model=".", max_length=32))["export"] == "runs/exports/100000"


def test_a_pickle_may_hold_numbers_beside_the_tensors(tmp_path):
    model = official(tmp_path / "official")
    (tmp_path / "official" / "model.safetensors").unlink()
    torch.save(model.state_dict() | {"step": 3}, tmp_path / "official" / "pytorch_model.bin")
    imported(tmp_path / "official")
    assert_split(model, tmp_path / "export")


def test_an_output_in_use_is_not_replaced(tmp_path):
    official(tmp_path / "official")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.txt").write_text("mine")
    with pytest.raises(RunError, match="in use and holds no export"):
        imported(tmp_path / "official")
