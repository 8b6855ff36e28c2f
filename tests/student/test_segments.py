"""Sentence pairs: the encoder is told which sentence a token belongs to. The oracle is transformers' own forward."""

import json

import numpy as np
import pytest
import torch
from tiny_exports import scrambled
from tiny_store import SPECIAL, log_of, write_store
from transformers import BertConfig, DebertaConfig, DebertaV2Config, ElectraConfig, RobertaConfig

from mlsm.common.model_checks import token_types
from student.batches import Loader
from student.config import ProbeConfig, StudentConfig
from student.encoders.build import encoder_config
from student.encoders.model import build_student
from student.encoders.stock import masked_lm
from student.masks.masking import Masking
from student.objectives.mlm import Mlm
from student.probe import ProbedStudent, train_probe
from student.runs.config import ExportConfig
from student.runs.export_run import export_run
from student.runs.identity import find_description
from student.train import train

SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
RELATIVE = SIZE | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "type_vocab_size": 2}
WITH_TYPES = {
    "bert": BertConfig(**SIZE),
    "electra": ElectraConfig(**SIZE, embedding_size=16),
    "roberta": RobertaConfig(**SIZE),
    "deberta": DebertaConfig(**RELATIVE),
    "deberta-v2": DebertaV2Config(**RELATIVE),
}


@pytest.fixture(scope="session")
def pairs_store(tmp_path_factory):
    """A store of sentence pairs with k = 24."""
    return write_store(tmp_path_factory.mktemp("pairs") / "store", k=24, pairs=True)


@pytest.fixture(params=WITH_TYPES)
def encoder(request, tmp_path):
    """A directory with the config of an encoder of two token types."""
    WITH_TYPES[request.param].save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def loader(store, **reading):
    masking = Masking(store.special_ids, store.vocab_size, 0.3, corruption="80-10-10")
    return Loader(store.split("train"), masking, Mlm(store).read_targets, micro_batch=4, **reading)


def segments_by_hand(ids, length):
    second = ids.index(SPECIAL["sep"]) + 1
    return [int(second <= place < length) for place in range(len(ids))]


def test_batches_say_which_sentence_a_token_belongs_to(pairs_store):
    plain, told = loader(pairs_store).step(1, 0, 10), loader(pairs_store, segments=True).step(1, 0, 10)
    assert plain.digest == told.digest and [micro.segments_WL for micro in plain.micro] == [None] * 3
    window_ids, _ = pairs_store.split("train").stream(1, 0, 10)
    read = pairs_store.split("train").read(window_ids)
    expected = [segments_by_hand(ids, n) for ids, n in zip(read.ids.tolist(), read.lengths.tolist(), strict=True)]
    assert torch.cat([micro.segments_WL for micro in told.micro]).tolist() == expected
    part = loader(pairs_store, segments=True).step(1, 0, 10, (5, 10))  # the second of two processes
    assert torch.cat([micro.segments_WL for micro in part.micro]).tolist() == expected[5:]


@pytest.mark.parametrize("how", ["plain", "documents_apart", "compiled"])
def test_logits_are_those_of_transformers_with_token_types(encoder, how, pairs_store):
    """In a pair both sentences are of one document, so that keeping documents apart changes nothing."""
    if how == "compiled" and encoder.name != "electra":
        pytest.skip("slow: one family suffices")
    student = scrambled(build_student(StudentConfig(encoder=str(encoder)), pairs_store, Mlm(pairs_store)))
    stock = masked_lm(student, None, student.output_bias_K)
    reading = {"segments": True, "documents_apart": how == "documents_apart"}
    if how == "compiled":
        student.compile(backend="eager")
    for micro in loader(pairs_store, **reading).step(1, 0, 8).micro:
        given = micro.input_WL, micro.attention_WL, micro.where_M, micro.documents_WL, micro.most_masked
        with torch.no_grad():
            found = student(*given, micro.segments_WL)
            expected = stock(micro.input_WL, micro.attention_WL, token_type_ids=micro.segments_WL).logits
            without = student(*given)
        assert torch.allclose(found, expected.flatten(0, 1)[micro.where_M], atol=1e-5)
        assert not torch.allclose(found, without, atol=1e-3)


def test_the_second_segment_is_trained(encoder, pairs_store):
    student = build_student(StudentConfig(encoder=str(encoder)), pairs_store, Mlm(pairs_store))
    micro = loader(pairs_store, segments=True).step(1, 0, 8).micro[0]
    student(micro.input_WL, micro.attention_WL, micro.where_M, None, None, micro.segments_WL).square().sum().backward()
    gradient = student.encoder.embeddings.token_type_embeddings.weight.grad
    assert gradient.shape[0] == 2 and (gradient.abs().sum(dim=1) > 0).all()


def test_pairs_train_with_segments_unless_asked_not_to(pairs_store, settings, tmp_path):
    runs = {}
    for name in ("auto", "never"):
        train(StudentConfig(**settings | {"store": pairs_store.path, "segments": name, "run_dir": tmp_path / name}))
        runs[name] = log_of(tmp_path / name)
        start = json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[0])
        lineage = json.loads((tmp_path / name / "export" / "lineage.json").read_text())
        described = find_description(tmp_path / name)["settings"]
        assert start["segments"] is (name == "auto")
        assert lineage["settings"].get("segments", False) is described.get("segments", False) is (name == "auto")
        assert lineage["settings"] == described
        tokenizer_config = json.loads((tmp_path / name / "export" / "tokenizer_config.json").read_text())
        assert ("model_input_names" in tokenizer_config) is (name == "never")
    assert [line["batch"] for line in runs["auto"].values()] == [line["batch"] for line in runs["never"].values()]
    assert runs["auto"][1]["loss"] != runs["never"][1]["loss"]
    assert runs["auto"][8]["held_out"] != runs["never"][8]["held_out"]


def test_on_packed_stores_nothing_changes(lsp_store, settings, tmp_path):
    for name in ("auto", "never"):
        train(StudentConfig(**settings | {"store": lsp_store.path, "segments": name, "run_dir": tmp_path / name}))
    logs = [[line["loss"] for line in log_of(tmp_path / name).values()] for name in ("auto", "never")]
    described = [find_description(tmp_path / name) for name in ("auto", "never")]
    assert logs[0] == logs[1] and described[0]["settings"] == described[1]["settings"]
    assert "segments" not in described[0]["settings"] and "segments" not in StudentConfig().identity()


def test_an_encoder_without_segments_is_told_none(pairs_store, settings, tmp_path):
    DebertaConfig(**SIZE).save_pretrained(tmp_path / "deberta")  # as the named deberta-base: no token types
    train(StudentConfig(**settings | {"store": pairs_store.path, "encoder": str(tmp_path / "deberta")}))
    assert "segments" not in find_description(settings["run_dir"])["settings"]


@pytest.mark.parametrize(
    ("family", "types"),
    [
        ("bert", 2),
        ("roberta", 2),
        ("deberta", 0),
        ("deberta-v2", 0),
        ("electra", 2),
        ("distilbert", 0),
        ("modernbert", 0),
    ],
    indirect=["family"],
)
def test_which_families_know_segments(family, types, lsp_store):
    assert token_types(encoder_config(StudentConfig(encoder=str(family)), lsp_store)) == types


def test_a_value_that_is_not_one_is_refused():
    with pytest.raises(ValueError, match="--segments takes one of auto, never, found .always"):
        StudentConfig(segments="always")


class Stopped(Exception):
    pass


def stop_after_4(*args, step=0, **figures):
    if step == 4:
        raise Stopped


@pytest.mark.parametrize("learned", [True, False])
def test_a_probe_reads_the_student_as_it_was_trained(learned, pairs_store, settings, tmp_path, monkeypatch, caplog):
    taught = {"store": pairs_store.path, "segments": "auto" if learned else "never", "run_dir": tmp_path / "student"}
    train(StudentConfig(**settings | taught))
    told = []
    forward = ProbedStudent.forward

    def spied(model, *inputs):
        told.append(inputs[5])
        return forward(model, *inputs)

    monkeypatch.setattr(ProbedStudent, "forward", spied)
    probing = {name: value for name, value in settings.items() if name != "encoder"}
    probing |= {"store": str(pairs_store.path), "student": str(tmp_path / "student"), "lr": 0.05}
    with pytest.raises(Stopped):
        train_probe(ProbeConfig(**probing), stop_after_4)
    assert told and {tensor is not None for tensor in told} == {learned} and "segments" not in caplog.text
    assert find_description(settings["run_dir"])["settings"].get("segments", False) is learned
    export_run(ExportConfig(run=settings["run_dir"], output=tmp_path / "out"))
    lineage = json.loads((tmp_path / "out" / "lineage.json").read_text())
    assert lineage["settings"].get("segments", False) is learned
    told.clear()
    train_probe(ProbeConfig(**probing | {"segments": "never", "run_dir": tmp_path / "never", "max_steps": 1}))
    assert {tensor is not None for tensor in told} == {False}
    assert ("trained with segments, the probe is without" in caplog.text) is learned
    assert np.isfinite(log_of(tmp_path / "never")[1]["loss"])
    for export in (tmp_path / "out", tmp_path / "never" / "export"):  # the student's encoder is in both
        tokenizer_config = json.loads((export / "tokenizer_config.json").read_text())
        assert ("model_input_names" in tokenizer_config) is not learned
