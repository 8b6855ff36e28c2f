"""One training: the loss is transformers' own, the rate falls to zero, the same bits come out twice, and it learns."""

import numpy as np
import pytest
import torch
from made_beside import models_made_during
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from mlsm.common.progress import silent
from mlsm.evaluation.tasks.finetuning import training
from mlsm.evaluation.tasks.finetuning.batches import EncodedExamples, order, tokenise
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
from mlsm.evaluation.tasks.finetuning.data import load_task
from mlsm.evaluation.tasks.finetuning.heads import Backbone
from mlsm.evaluation.tasks.finetuning.metrics import UNREAD, figures
from mlsm.evaluation.tasks.finetuning.tasks import TASKS
from pipeline.teacher import load_tokenizer


@pytest.fixture
def prepared(teacher_directory, miniatures, tmp_path):
    """(task name, seed) -> model, training part, development part and its labels."""

    def prepare(name, seed=0):
        task = TASKS[name]
        data = load_task(task, miniatures)
        tokenizer = load_tokenizer(teacher_directory)
        reading = {"max_length": 64, "takes_types": True}
        train, dev = (
            tokenise(tokenizer, examples, task.labels_words, **reading)
            for examples in (data.train, data.evaluation["validation"])
        )
        model, _ = Backbone(teacher_directory).with_head(task, seed, tmp_path / "heads")
        return model, train, dev, [example.label for example in data.evaluation["validation"]]

    return prepare


@pytest.mark.parametrize("name", ["rte", "conll2003", "stsb"])
def test_the_loss_is_that_of_transformers(prepared, name):
    model, train, *_ = prepared(name)
    inputs, labels = train.batch(np.arange(10))
    model.eval()
    torch.testing.assert_close(training._loss(model, inputs, labels), model(**inputs, labels=labels).loss)


@pytest.mark.parametrize("warmup", [0.0, 0.3])
def test_the_rate_rises_for_a_share_of_the_steps_and_falls_linearly(prepared, monkeypatch, warmup):
    rates, decays = [], []

    class Watched(torch.optim.AdamW):
        def step(self):
            rates.append(self.param_groups[0]["lr"])
            decays.append([group["weight_decay"] for group in self.param_groups])
            return super().step()

    monkeypatch.setattr(torch.optim, "AdamW", Watched)
    settings = FinetuneConfig(batch=24, epochs=2, lr=1e-3, warmup=warmup)
    training.train(*prepared("rte")[:2], TASKS["rte"], 0, settings, silent)
    shares = [0, 0.5, 1, 0.75, 0.5, 0.25] if warmup else [left / 6 for left in (6, 5, 4, 3, 2, 1)]
    assert rates == pytest.approx([1e-3 * share for share in shares])  # 64 examples: 24, 24, 16
    assert decays == [[0.01]] * 6 and training.steps_of(64, settings) == 6
    assert training.rate_factor(0, 1, warmup) == 1, "a run of one step has the peak, not a rate of 0"


@pytest.mark.parametrize(("warmup", "grad_clip"), [(0.0, 0.0), (0.3, 1e-4)])
def test_a_training_is_what_transformers_and_torch_do(prepared, tmp_path, warmup, grad_clip):
    """Stock model, plain AdamW and transformers' own schedule, on the same batches and without dropout."""
    settings, task = FinetuneConfig(batch=24, epochs=2, lr=1e-3, warmup=warmup, grad_clip=grad_clip), TASKS["rte"]
    model, train, *_ = prepared("rte")
    model.save_pretrained(tmp_path / "stock")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "stock").train()
    for module in [*model.modules(), *stock.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.config.attention_probs_dropout_prob = stock.config.attention_probs_dropout_prob = 0.0
    optimizer = torch.optim.AdamW(stock.parameters(), lr=settings.lr, weight_decay=0.01, foreach=False)
    schedule = get_linear_schedule_with_warmup(optimizer, 2 if warmup else 0, 6)
    for epoch in range(2):
        for rows in np.split(order("rte", epoch, 64), [24, 48]):
            inputs, labels = train.batch(rows)
            stock(**inputs, labels=labels).loss.backward()
            if grad_clip:
                norm = torch.nn.utils.clip_grad_norm_(stock.parameters(), grad_clip)
                assert norm > grad_clip, "something is clipped"
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    training.train(model, train, task, 0, settings, silent)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), stock.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=2e-5, msg=name)


def test_seeds_decide_everything(prepared):
    settings = FinetuneConfig(batch=16, epochs=1, lr=1e-3)

    def weights(seed, head=0):
        model, train, *_ = prepared("mrpc", head)
        torch.manual_seed(torch.seed() % 1000)  # whatever happened before
        assert training.train(model, train, TASKS["mrpc"], seed, settings, silent) is None
        return model.base_model.encoder.layer[0].output.dense.weight.detach()

    first, again, other_dropout, other_head = weights(0), weights(0), weights(1), weights(0, head=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other_dropout) and not torch.equal(first, other_head)


def test_a_model_that_another_thread_makes_changes_nothing(prepared, monkeypatch):
    settings = FinetuneConfig(batch=16, epochs=1, lr=1e-3, max_steps=3)

    def weights():
        model, train, *_ = prepared("mrpc")
        training.train(model, train, TASKS["mrpc"], 0, settings, silent)
        return model.base_model.encoder.layer[0].output.dense.weight.detach()

    alone = weights()
    with models_made_during(monkeypatch, EncodedExamples, "batch") as made:
        assert torch.equal(weights(), alone) and len(made) == 3


@pytest.mark.parametrize(("name", "least"), [("sst2", 0.9), ("conll2003", 0.9), ("stsb", 0.7)])
def test_it_learns(prepared, name, least):
    model, train, dev, gold = prepared(name)
    settings = FinetuneConfig(batch=8, epochs=8, lr=2e-3)
    training.train(model, train, TASKS[name], 0, settings, silent)
    (first, *_) = figures(TASKS[name], {"": gold}, {"": training.predict(model, dev, TASKS[name])})
    assert first["value"] > least


def test_predictions_are_in_the_order_of_the_examples(prepared):
    model, train, *_ = prepared("stsb")
    model.eval()
    with torch.no_grad():
        alone = [model(**train.batch(np.array([row]))[0]).logits.item() for row in range(len(train))]
    np.testing.assert_allclose(training.predict(model, train, TASKS["stsb"]), alone, rtol=1e-4, atol=1e-6)


def test_words_beyond_the_cut_have_no_prediction(teacher_directory, miniatures, tmp_path):
    data = load_task(TASKS["conll2003"], miniatures)
    examples = data.evaluation["validation"]
    encoded = tokenise(load_tokenizer(teacher_directory), examples, True, max_length=8, takes_types=False)
    model, _ = Backbone(teacher_directory).with_head(TASKS["conll2003"], 0, tmp_path / "heads")
    said = training.predict(model, encoded, TASKS["conll2003"])
    for labels, words, example in zip(said, encoded.words_N, examples, strict=True):
        assert len(labels) == len(example.label) and labels[-1] == UNREAD  # seven words never fit
        assert [label == UNREAD for label in labels] == [place < 0 for place in words]
    assert encoded.unread == np.mean([label == UNREAD for labels in said for label in labels]) and encoded.cut == 1


def test_a_loss_that_is_not_finite_is_found(prepared):
    model, train, dev, gold = prepared("rte")
    settings = FinetuneConfig(batch=16, epochs=1, lr=1e38)
    step = training.train(model, train, TASKS["rte"], 0, settings, silent)
    assert step in (2, 3)
    assert len(training.predict(model, dev, TASKS["rte"])) == len(gold)
