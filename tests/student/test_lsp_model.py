import json
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tiny_exports import ATTENTION, IDS, WHERE, exported

from mlsm.common.errors import RunError
from mlsm.common.model_checks import token_types
from student import lsp_model
from student.config import StudentConfig
from student.lsp_model import LspModel
from student.objectives.mlm import Mlm
from student.objectives.mlsm import Mlsm
from student.objectives.mtl import Mtl
from student.objectives.naive_mlsm import NaiveMlsm
from student.train import train

TEXTS = ["w3 w10 w31", "", "w7 w22 w7 w59 w1"]
MASK, CLS, SEP = 4, 2, 3


@pytest.fixture
def exported_mlsm(lsp_store, tmp_path):
    """A student and its LspModel."""
    student, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    return student, LspModel.from_pretrained(export)


@pytest.mark.parametrize("objective", [Mlsm, NaiveMlsm, Mtl])
def test_the_loaded_model_has_the_logits_of_the_student(objective, family, lsp_store, tmp_path):
    objective = objective(lsp_store)
    student, export = exported(family, objective, lsp_store, tmp_path / "export")
    model = LspModel.from_pretrained(export)
    logits = model(IDS, ATTENTION)
    assert logits.shape == (2, 16, lsp_store.k)
    expected = student(IDS, ATTENTION, WHERE)[:, objective.lsp_columns]
    assert torch.allclose(logits.flatten(0, 1)[WHERE], expected, atol=1e-5)
    types = torch.arange(IDS.shape[1]).expand_as(IDS) % 2
    segments = types if token_types(student.encoder.config) >= 2 else None
    expected = student(IDS, ATTENTION, WHERE, segments_WL=segments)[:, objective.lsp_columns]
    given = model(input_ids=IDS, attention_mask=ATTENTION, token_type_ids=types)  # as a tokenizer returns them
    assert torch.allclose(given.flatten(0, 1)[WHERE], expected, atol=1e-5)


def test_every_token_is_masked_in_turn(exported_mlsm):
    student, model = exported_mlsm
    for batch_windows in (2, 32):
        found = model.lsp(TEXTS, batch_windows=batch_windows)
        assert [lsps.tokens for lsps in found] == [text.split() for text in TEXTS]
        for lsps, words in zip(found, ([3, 10, 31], [], [7, 22, 7, 59, 1]), strict=True):
            assert lsps.distributions_Tk.shape == (len(words), 24)
            for place, row in enumerate(lsps.distributions_Tk):
                ids = [CLS, *(word + 5 for word in words), SEP]
                ids[1 + place] = MASK
                logits = student(torch.tensor([ids]), None, torch.tensor([1 + place]))
                assert torch.allclose(row, logits.softmax(dim=1)[0], atol=1e-6)


def test_texts_can_be_read_as_they_are(exported_mlsm):
    student, model = exported_mlsm
    (lsps,) = model.lsp("w7 [MASK] w9", masking="none")
    logits = student(torch.tensor([[CLS, 12, MASK, 14, SEP]]), None, torch.tensor([1, 2, 3]))
    assert lsps.tokens == ["w7", "[MASK]", "w9"]
    assert torch.allclose(lsps.distributions_Tk, logits.softmax(dim=1), atol=1e-6)
    with pytest.raises(ValueError, match="at least 0, found -1"):
        lsps.top(-1)
    best, next_best = lsps.top(2)[1]
    assert best[0] == int(logits[1].argmax()) and best[1] > next_best[1]
    assert best[1] == pytest.approx(logits[1].softmax(dim=0).max().item(), abs=1e-6)


@pytest.mark.parametrize("masking", ["each", "none"])
def test_threads_that_share_a_model_get_their_own_answers(exported_mlsm, masking):
    """As those of a web server do."""
    _, model = exported_mlsm
    texts = [" ".join(f"w{(7 * i + j) % 60}" for j in range(4 + i % 9)) for i in range(40)]
    alone = [model.lsp([text], masking=masking)[0].distributions_Tk for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: model.lsp([text], masking=masking)[0].distributions_Tk, texts))
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(alone, found, strict=True))


def test_a_child_that_is_forked_meanwhile_does_not_wait():
    with lsp_model._COMPUTING:  # as another thread may hold it
        child = os.fork()
        if not child:
            os._exit(0 if lsp_model._COMPUTING.acquire(timeout=10) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_torchs_default_type_does_not_matter(exported_mlsm, lsp_store, tmp_path):
    _, model = exported_mlsm
    torch.set_default_dtype(torch.float64)
    try:
        found = LspModel.from_pretrained(tmp_path / "export").lsp(TEXTS)
    finally:
        torch.set_default_dtype(torch.float32)
    for lsps, expected in zip(found, model.lsp(TEXTS), strict=True):
        assert torch.allclose(lsps.distributions_Tk, expected.distributions_Tk, atol=1e-6)


def test_it_can_be_exported_by_torch(exported_mlsm):
    _, model = exported_mlsm
    inputs = torch.full((2, 8), 7), torch.ones(2, 8, dtype=torch.int64)
    with torch.no_grad():
        program = torch.export.export(model, inputs)
        assert torch.allclose(program.module()(*inputs), model(*inputs), atol=1e-5)


def test_a_text_that_is_too_long_is_one_clear_line(exported_mlsm):
    _, model = exported_mlsm
    assert len(model.lsp(" ".join(["w1"] * 14))[0].tokens) == 14
    with pytest.raises(ValueError, match="a text of 15 tokens.*at most 14"):
        model.lsp(["w1", " ".join(["w1"] * 15)])
    with pytest.raises(ValueError, match="each or none, found some"):
        model.lsp(["w1"], masking="some")


def test_it_loads_from_a_run_its_export_and_a_kept_checkpoint(lsp_store, settings):
    config = StudentConfig(store=lsp_store.path, **settings | {"objective": "mtl"})
    train(config)
    last = config.run_dir / "checkpoints" / "step-00000008"
    logits = [LspModel.from_pretrained(path)(IDS) for path in (config.run_dir, config.run_dir / "export", str(last))]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])
    first = LspModel.from_pretrained(config.run_dir / "checkpoints" / "step-00000001")
    assert not torch.equal(first(IDS), logits[0])
    assert first.facts["store"] == lsp_store.target_id


def test_it_loads_a_revision_from_the_hub(lsp_store, tmp_path, monkeypatch):
    """The Hub's cache is laid out by hand; nothing is fetched."""
    student, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    cache = tmp_path / "cache" / "models--someone--student"
    shutil.copytree(export, cache / "snapshots" / ("a" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "step-00000004").write_text("a" * 40)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    model = LspModel.from_pretrained("someone/student", revision="step-00000004")
    expected = student(IDS, None, WHERE)
    assert torch.allclose(model(IDS).flatten(0, 1)[WHERE], expected, atol=1e-5)


def test_what_has_no_lsps_is_one_clear_line(ids_store, tmp_path):
    _, export = exported("bert-2x32", Mlm(ids_store), ids_store, tmp_path / "export")
    sources = {
        export: "has no lsp_head.safetensors",
        tmp_path / "nothing": "no such directory",
        "nobody/nothing": "not a repository with lsp_head.safetensors on the Hub",
    }
    for source, message in sources.items():
        with pytest.raises(RunError, match=f"{message}.*Expected") as caught:
            LspModel.from_pretrained(source)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["lsp_head.safetensors", "model.safetensors", "config.json"])
def test_an_export_that_may_not_be_read_is_not_called_damaged(name, lsp_store):
    """Of model.safetensors the libraries say that it does not exist. Root may read everything, so it is nobody here."""
    with tempfile.TemporaryDirectory() as place:  # not pytest's, which other users cannot enter
        Path(place).chmod(0o755)
        _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, Path(place) / "export")
        for file in export.iterdir():
            file.chmod(0 if file.name == name else 0o644)
        user = os.getuid()
        os.setresuid(user or 65534, user or 65534, user)
        try:
            with pytest.raises(RunError, match=f"its {name} may not be read by this user.*chmod") as caught:
                LspModel.from_pretrained(export)
        finally:
            os.setresuid(user, user, user)
        assert "damaged" not in str(caught.value)


def test_an_export_whose_mask_token_is_a_word_is_refused(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    config = json.loads((export / "tokenizer_config.json").read_text())
    (export / "tokenizer_config.json").write_text(json.dumps(config | {"mask_token": "w7"}))
    with pytest.raises(RunError, match="the token for mask is an ordinary word, 'w7'"):
        LspModel.from_pretrained(export)


def test_loading_leaves_global_randomness_alone(lsp_store, tmp_path):
    _, export = exported("bert-2x32", Mlsm(lsp_store), lsp_store, tmp_path / "export")
    before = torch.random.get_rng_state()
    LspModel.from_pretrained(export)
    assert torch.equal(before, torch.random.get_rng_state())
