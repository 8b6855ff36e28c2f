"""Trainer, accelerate and Lightning on a store. Oracles: train-student's own run, dense formulas, an unbroken run."""

import copy
import json
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from preloaded import start_ranks
from pretrain import BATCH, Losses, digests
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny_store import log_of, write_store
from torch.utils.data import DataLoader
from transformers import AutoModel, Trainer, TrainingArguments

from mlsm.common.errors import RunError, WriteError
from mlsm.evaluation.lineage import lineage
from shards.torch_dataset import LspDataset, LspWindows
from student.batches import Loader
from student.config import StudentConfig
from student.held_out import MASK_SEED
from student.lsp_model import LspModel
from student.masks.masking import build_masking, choose_mask, maskable_positions
from student.objectives.mlsm import Mlsm
from student.pretraining import LspCollator, LspForPreTraining
from student.train import train

ROOT = Path(__file__).resolve().parents[2]
STEPS = 20  # of BATCH windows, of which ten batches are an epoch of the store's 150


def arguments(directory, **settings):
    """TrainingArguments that leave everything at its default but noise, and what is given."""
    return TrainingArguments(str(directory), report_to=[], disable_tqdm=True, use_cpu=True, **settings)


def model_of(store, **settings):
    return LspForPreTraining.from_encoder("bert-2x32", store, **{"seed": 1} | settings)


def mask_of(windows, number, *, seed, epoch, rate=0.15):
    """The masked positions of a window as train-student chooses them."""
    read = windows.read([number])
    maskable = maskable_positions(read.ids, read.lengths, windows.store.special_ids["all"])
    return np.flatnonzero(choose_mask(maskable, np.array([number]), seed=seed, epoch=epoch, rate=rate)[0])


# -- batches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.15, 0.5])
def test_a_batch_holds_what_the_store_says_of_the_masked_tokens(lsp_store, rate):
    """Oracle: the dense rows of LspDataset at the positions that train-student masks."""
    dataset = LspWindows(lsp_store)
    dataset.set_epoch(2)
    batch = LspCollator(lsp_store, mask_rate=rate, seed=5)([dataset[number] for number in (3, 0, 149)])
    assert all(len(tensor) == 3 for tensor in batch.values())
    samples = {int(sample["window_id"]): sample for sample in LspDataset(lsp_store, shuffle=False)}
    for row, number in enumerate((3, 0, 149)):
        sample, n = samples[number], len(samples[number]["input_ids"])
        masked = mask_of(dataset.windows, number, seed=5, epoch=2, rate=rate)
        positions, count = batch["positions"][row], len(masked)
        assert positions.tolist() == [*masked, *[-1] * (len(positions) - count)] and count
        hidden = sample["input_ids"].clone()
        hidden[masked] = lsp_store.special_ids["mask"]
        assert batch["input_ids"][row, :n].tolist() == hidden.tolist()
        assert batch["attention_mask"][row].sum() == n and not batch["input_ids"][row, n:].any()
        coded = sample["lsp_weights"].sum(1)[masked] > 0
        labels = torch.where(coded, sample["input_ids"][masked], -100)
        assert batch["labels"][row].tolist() == [*labels, *[-100] * (len(positions) - count)]
        dense, expected = (
            torch.zeros(count, lsp_store.k).scatter_add_(1, of["indices"], of["weights"])
            for of in (
                {name: batch[f"lsp_{name}"][row, :count] for name in ("indices", "weights")},
                {name: sample[f"lsp_{name}"][masked] for name in ("indices", "weights")},
            )
        )
        assert torch.equal(dense, expected)
        assert not batch["lsp_weights"][row, count:].any()


def test_shapes_follow_from_the_store_and_the_rate_alone(lsp_store, tmp_path):
    """So accelerate can put batches together, whatever windows are in them."""
    dataset, collator = LspWindows(lsp_store), LspCollator(lsp_store, mask_rate=0.3)
    shapes = [{name: tensor.shape for name, tensor in collator([dataset[number]]).items()} for number in range(150)]
    assert all(shape == shapes[0] for shape in shapes)
    assert shapes[0]["positions"] == (1, 5) and shapes[0]["lsp_indices"] == (1, 5, 24)
    pairs = write_store(tmp_path / "pairs", k=24, pairs=True)
    (segments,) = LspCollator(pairs)([LspWindows(pairs)[0]])["token_type_ids"]
    assert segments.tolist() == [0] * 6 + [1] * 10


@pytest.mark.parametrize("unit", ["word", "span"])
def test_other_masks_are_those_of_train_student(lsp_store, unit):
    """Oracle: the batch that the trainer's loader makes of these windows."""
    config = StudentConfig(max_steps=1, mask_rate=0.4, mask_unit=unit, corruption="80-10-10")
    windows, numbers = LspWindows(lsp_store), np.arange(60)
    batch = LspCollator(lsp_store, mask_rate=0.4, mask_unit=unit, corruption="80-10-10", seed=9)(
        [windows[number] for number in numbers]
    )
    loader = Loader(windows.windows, build_masking(config, lsp_store), Mlsm(lsp_store).read_targets, micro_batch=60)
    (micro,) = loader.load(numbers, np.zeros(60, np.int64), 9, 0.4).micro
    assert torch.equal(batch["input_ids"], micro.input_WL)
    masked = batch["positions"] >= 0
    where = torch.arange(0, 60 * 16, 16)[:, None] + batch["positions"]
    assert torch.equal(where[masked], micro.where_M) and masked.sum(1).unique().numel() > 1


def test_held_out_windows_have_the_masks_of_every_evaluation(lsp_store):
    dataset = LspWindows(lsp_store, "held_out")
    dataset.set_epoch(3)
    for seed in (1, 2):
        (positions,) = LspCollator(lsp_store, seed=seed)([dataset[4]])["positions"]
        assert positions[positions >= 0].tolist() == mask_of(dataset.windows, 4, seed=MASK_SEED, epoch=0).tolist()


def test_what_does_not_belong_together_is_one_clear_line(lsp_store, ids_store, tmp_path):
    other = write_store(tmp_path / "other", k=20)
    collator, train_windows, held_out = LspCollator(lsp_store), LspWindows(lsp_store), LspWindows(lsp_store, "held_out")
    refused = {
        "windows are from .*other, the collator is for": [LspWindows(other)[0]],
        "windows of several datasets": [train_windows[0], held_out[0]],
        "needs windows from mlsm.LspWindows, found dict": [dict(train_windows[0])],
    }
    for message, items in refused.items():
        with pytest.raises(ValueError, match=message):
            collator(items)
    with pytest.raises(RunError, match="needs a store of LSP distributions"):
        LspCollator(ids_store)
    with pytest.raises(RunError, match="needs a store of LSP distributions"):
        model_of(ids_store)
    with pytest.raises(ValueError, match="--mask-rate"):
        LspCollator(lsp_store, mask_rate=1.5)
    with pytest.raises(RunError, match="0.0015 masks none of a window's .* such as 0.15"):
        LspCollator(lsp_store, mask_rate=0.0015)  # 0.15 percent
    with pytest.raises(IndexError, match="window 150 of 150"):
        train_windows[150]
    assert train_windows[-1].number == 149


# -- model -----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_divergence_of_tokens_with_a_target(lsp_store):
    """Oracle: torch's kl_div of dense rows, from the logits that are returned."""
    dataset = LspWindows(lsp_store)
    batch = LspCollator(lsp_store)([dataset[number] for number in range(12)])
    model = model_of(lsp_store).eval()
    assert model.student.encoder.config._attn_implementation == "sdpa"
    output = model(**batch)
    masked, coded = batch["positions"] >= 0, batch["labels"] != -100
    assert 0 < coded.sum() < masked.sum() < masked.numel()
    target = torch.zeros(*masked.shape, 24).scatter_add_(2, batch["lsp_indices"], batch["lsp_weights"])
    expected = torch.nn.functional.kl_div(output.logits.log_softmax(2)[coded], target[coded], reduction="sum")
    assert torch.allclose(output.loss, expected / coded.sum(), atol=1e-5)
    assert torch.allclose(model(**batch, num_items_in_batch=7).loss, expected / 7, atol=1e-5)
    everywhere = model(batch["input_ids"], batch["attention_mask"]).logits
    windows = torch.arange(12)[:, None].expand_as(masked)
    assert torch.allclose(output.logits[masked], everywhere[windows[masked], batch["positions"][masked]], atol=1e-5)
    batch["labels"][:] = -100
    assert model(**batch).loss == 0


@pytest.mark.parametrize("accumulated", [1, 3])
def test_trainer_learns_what_train_student_learns(lsp_store, settings, tmp_path, accumulated):
    """Equal windows, masks, first weights and AdamW: the curves differ by rounding, and so do the weights."""
    same = {"lr": 1e-3, "weight_decay": 0.01, "warmup": 0.0, "dropout": 0.0, "seed": 1, "encoder": "bert-2x32"}
    same |= {"batch_windows": BATCH, "micro_batch": BATCH, "max_steps": STEPS, "eval_windows": 20}
    result = train(StudentConfig(store=lsp_store.path, **settings | same))
    log = log_of(settings["run_dir"])
    model, losses = model_of(lsp_store, dropout=0.0), Losses()
    args = arguments(
        tmp_path / "trainer",
        learning_rate=1e-3,
        weight_decay=0.01,
        per_device_train_batch_size=BATCH // accumulated,
        gradient_accumulation_steps=accumulated,
        per_device_eval_batch_size=20,
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=LspWindows(lsp_store, seed=1),
        eval_dataset=LspWindows(lsp_store, "held_out"),
        data_collator=LspCollator(lsp_store, seed=1),
        callbacks=[losses],
    )
    trainer.train()
    assert losses.seen == pytest.approx({step: log[step]["loss"] for step in range(1, STEPS + 1)}, rel=1e-4)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(result["held_out_loss"], rel=1e-4)
    model.export(tmp_path / "export")
    mine, theirs = tmp_path / "export", settings["run_dir"] / "export"
    assert {path.name for path in mine.iterdir()} == {path.name for path in theirs.iterdir()}
    for name in ("model.safetensors", "lsp_head.safetensors"):
        ours, others = load_file(mine / name), load_file(theirs / name)
        assert ours.keys() == others.keys()
        assert all(torch.allclose(ours[key], others[key], atol=2e-4) for key in ours)


# -- epochs and resuming ---------------------------------------------------------------------------------------


class Recording:
    """A collator that writes down which masks each window has in which epoch, also in a loader's workers."""

    def __init__(self, collator, file):
        self.collator, self.file = collator, file

    def __call__(self, items):
        batch = self.collator(items)
        with open(self.file, "a") as file:
            for item, positions in zip(items, batch["positions"], strict=True):
                file.write(json.dumps([item.epoch, item.number, positions[positions >= 0].tolist()]) + "\n")
        return batch


def recorded(store, file, seed):
    """Windows by epoch, once each line was compared with the mask that its epoch, window and seed have."""
    windows, seen = store.split("train"), {}
    for line in file.read_text().splitlines():
        epoch, number, positions = json.loads(line)
        assert positions == mask_of(windows, number, seed=seed, epoch=epoch).tolist()
        seen.setdefault(epoch, []).append(number)
    return seen


WORKERS = {
    "none": {},
    "two": {"dataloader_num_workers": 2},
    "persistent": {"dataloader_num_workers": 2, "dataloader_persistent_workers": True},
    "spawned": {
        "dataloader_num_workers": 1,
        "dataloader_multiprocessing_context": "spawn",
        "dataloader_persistent_workers": True,
    },
}
ORDERS = [(order, workers) for order in ("random", "sequential") for workers in WORKERS]


@pytest.mark.parametrize(("order", "workers"), [each for each in ORDERS if each != ("sequential", "spawned")])
def test_masks_follow_the_epoch_without_a_callback(lsp_store, tmp_path, order, workers):
    file, seed = tmp_path / "seen", None if order == "random" else 3
    args = arguments(
        tmp_path / "out",
        per_device_train_batch_size=25,
        num_train_epochs=3,
        train_sampling_strategy=order,
        eval_strategy="epoch",
        save_strategy="no",
        **WORKERS[workers],
    )
    collator = Recording(LspCollator(lsp_store, seed=3), file)
    held_out = LspWindows(lsp_store, "held_out")
    dataset = LspWindows(lsp_store, seed=seed)
    trainer = Trainer(model_of(lsp_store), args, train_dataset=dataset, eval_dataset=held_out, data_collator=collator)
    trainer.get_eval_dataloader = lambda *_: DataLoader(held_out, 20, collate_fn=collator.collator)
    trainer.train()
    seen = recorded(lsp_store, file, 3)
    assert sorted(seen) == [0, 1, 2] and all(sorted(numbers) == list(range(150)) for numbers in seen.values())
    if order == "sequential" and workers == "none":
        assert all(seen[epoch] == dataset.windows.order(3, epoch, 0, 150).tolist() for epoch in seen)


def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(lsp_store, tmp_path):
    """With dropout, at an epoch's begin and in the middle of the second one, as in a new process."""
    weights = []
    for name, checkpoint in {"unbroken": None, "middle": 14, "begin": 10}.items():
        model, file = model_of(lsp_store), tmp_path / f"seen-{name}"
        args = arguments(tmp_path / "out", per_device_train_batch_size=BATCH, num_train_epochs=3, save_steps=2)
        trainer = Trainer(
            model,
            args,
            train_dataset=LspWindows(lsp_store.path),
            data_collator=Recording(LspCollator(lsp_store.path), file),
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(tmp_path / "out" / f"checkpoint-{checkpoint}"))
        weights.append(model.state_dict())
        seen = recorded(lsp_store, file, 42)
        assert {epoch: len(numbers) for epoch, numbers in seen.items()} == {
            "unbroken": {0: 150, 1: 150, 2: 150},
            "middle": {1: 90, 2: 150},
            "begin": {1: 150, 2: 150},
        }[name]
    assert all(torch.equal(value, other[name]) for other in weights[1:] for name, value in weights[0].items())


def test_a_plain_loader_is_told_the_epoch(lsp_store):
    dataset, collator = LspWindows(lsp_store), LspCollator(lsp_store)
    loader = DataLoader(dataset, 30, collate_fn=collator, num_workers=1, persistent_workers=True)
    epochs = []
    for epoch in (0, 1, 4):
        dataset.set_epoch(epoch)
        epochs.append(torch.cat([batch["positions"] for batch in loader]))
        masked = mask_of(dataset.windows, 7, seed=42, epoch=epoch).tolist()
        assert epochs[-1][7].tolist() == [*masked, -1][: len(epochs[-1][7])]
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])


@pytest.mark.parametrize("shuffle", [True, False])
def test_accelerates_loader_has_the_epoch_and_says_so_where_another_was_wanted(lsp_store, caplog, shuffle):
    dataset = LspWindows(lsp_store)
    loader = DataLoader(dataset, 50, shuffle=shuffle, collate_fn=lambda items: {items[0].epoch})
    loader = Accelerator(cpu=True).prepare(loader)
    loader.set_epoch(3)
    assert set().union(*loader) == {3} and set().union(*loader) == {4} and not caplog.text
    dataset.set_epoch(2)
    assert set().union(*loader) == {5}
    assert "set_epoch(2) has no effect: accelerate's loader is in epoch 5. Call loader.set_epoch(2)" in caplog.text


# -- several processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_share_every_window_once_and_learn_what_one_process_learns(lsp_store, settings, tmp_path, ranks):
    """Oracle: rows of the whole split in that epoch, the losses of train-student, and an unbroken run."""
    started = start_ranks([ROOT / "tests" / "pretrain.py", lsp_store.path, tmp_path], ranks)
    said = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(said)
    found = [json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in range(ranks)]
    dataset, collator, rows = LspWindows(lsp_store), LspCollator(lsp_store, seed=3), []
    for epoch in (0, 1):
        dataset.set_epoch(epoch)
        rows.append(sorted(digests(collator([dataset[number] for number in range(150)]))))
    assert rows[0] != rows[1]
    for loader in found[0]["rows"]:
        read = [sum((part["rows"][loader][epoch] for part in found), []) for epoch in (0, 1)]
        assert [sorted(one) for one in read] == rows, f"dispatch_batches and workers: {loader}"
        assert all(len(part["rows"][loader][0]) == 150 // ranks for part in found)
    steps = 20 // ranks
    same = {"lr": 1e-3, "weight_decay": 0.01, "warmup": 0.0, "dropout": 0.0, "encoder": "bert-2x32"}
    same |= {"batch_windows": BATCH * ranks, "micro_batch": BATCH, "max_steps": steps}
    train(StudentConfig(store=lsp_store.path, **settings | same))
    log = log_of(settings["run_dir"])
    losses = {int(step): loss for step, loss in found[0]["losses"].items()}
    assert losses == pytest.approx({step: log[step]["loss"] for step in range(1, steps + 1)}, rel=1e-4)
    assert len({weights for part in found for weights in part["weights"]}) == 1, "resumed, and on the other rank"
    assert LspModel.from_pretrained(tmp_path / "plain" / "export").facts["lsps"] == 24


def test_lightning_trains_as_a_plain_loop_does(lsp_store, tmp_path):
    """Also after it was resumed, with the workers of the documentation's loader."""
    reason = "Lightning is not a dependency of this project: pip install lightning"
    lightning = pytest.importorskip("lightning.pytorch", reason=reason)
    file = tmp_path / "seen"
    block = next(block for block in python_blocks() if "def on_train_epoch_start" in block)

    def loader(dataset, *, collate_fn, num_workers=0, **other):
        return DataLoader(dataset, 50, num_workers=num_workers, collate_fn=collate_fn)

    def trained(model, epochs, resumed=None):
        names = {"DataLoader": loader, "train": LspWindows(lsp_store, seed=1)}
        names["collator"] = Recording(LspCollator(lsp_store, seed=1), file)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model, self.losses = model, []

            def training_step(self, batch, number):
                loss = self.model(**batch).loss
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)

            def on_train_start(self):
                time.sleep(0.5)  # workers run by now, and read ahead

            exec(block, names, locals())

        module = Module()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        trainer = lightning.Trainer(max_epochs=epochs, enable_checkpointing=False, default_root_dir=tmp_path, **quiet)
        trainer.fit(module, ckpt_path=resumed)
        trainer.save_checkpoint(tmp_path / "checkpoint")
        return module.losses

    begun = trained(model_of(lsp_store, dropout=0.0), 1)
    resumed = trained(model_of(lsp_store, dropout=0.0), 3, tmp_path / "checkpoint")
    seen = recorded(lsp_store, file, 1)
    assert sorted(seen) == [0, 1, 2] and all(sorted(numbers) == list(range(150)) for numbers in seen.values())
    dataset, model, losses = LspWindows(lsp_store, seed=1), model_of(lsp_store, dropout=0.0).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(3):
        dataset.set_epoch(epoch)
        for batch in loader(dataset, collate_fn=LspCollator(lsp_store, seed=1)):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert begun + resumed == pytest.approx(losses, rel=1e-5)


def test_one_process_for_several_gpus_is_one_clear_line(lsp_store):
    """As Trainer starts where it sees several GPUs and no launcher: the last layer knows of one copy of the model."""
    replica = model_of(lsp_store)._replicate_for_data_parallel()
    with pytest.raises(RunError, match="Start one process per GPU: torchrun"):
        replica(torch.zeros(2, 16, dtype=torch.int64))


# -- as it is used ---------------------------------------------------------------------------------------------


def python_blocks():
    """The Python of docs/python.md."""
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "python.md").read_text(), re.DOTALL)


def test_the_script_of_the_documentation_runs(lsp_store, tmp_path, monkeypatch):
    """With default TrainingArguments, but on a tiny store; then its loop of accelerate."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    script = next(block for block in python_blocks() if "model.export(" in block)
    small = {'"runs/stores/<store>"': repr(str(lsp_store.path)), '"bert-6x256"': '"bert-2x32"'}
    for shown, used in small.items():
        assert script.count(shown) == 1
        script = script.replace(shown, used)
    names = {}
    exec(script, names)
    assert len(LspModel.from_pretrained("export").lsp("w3 w10")[0].tokens) == 2
    before = [weight.detach().clone() for weight in names["model"].parameters()]
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    exec(next(block for block in python_blocks() if "accelerator.prepare(model" in block), names)
    pairs = zip(before, names["model"].parameters(), strict=True)
    assert any(not torch.equal(weight, after.cpu()) for weight, after in pairs)
    assert names["train"][0].epoch == 2


@pytest.mark.parametrize("encoder", ["bert-2x32", "modernbert-2x32"])
def test_activation_checkpointing_changes_no_gradient(lsp_store, encoder):
    """Trainer's gradient_checkpointing: the last layer, of which only some rows are computed, is not computed again."""
    dataset, gradients = LspWindows(lsp_store), []
    batch = LspCollator(lsp_store)([dataset[number] for number in range(9)])
    for checkpointing in (False, True):
        model = LspForPreTraining.from_encoder(encoder, lsp_store, dropout=0.0).train()
        if checkpointing:
            model.activation_checkpointing_enable()
        model(**batch).loss.backward()
        gradients.append([weight.grad for weight in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# -- saving ----------------------------------------------------------------------------------------------------


def test_an_export_that_cannot_be_written_is_a_write_error(lsp_store, tmp_path, monkeypatch):
    def full(*arguments):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("student.pretraining.export_student", full)
    with pytest.raises(WriteError, match="export could not be written: .*No space left.*Make room"):
        model_of(lsp_store).export(tmp_path / "export")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_loads_and_exports_without_its_trainer(lsp_store, tmp_path):
    model = model_of(lsp_store).eval()
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = LspForPreTraining.from_pretrained(tmp_path / "checkpoint")
    inputs = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)
    known = {"step": 7, "held_out": {"loss": 1.5}, "settings": {"lr": 1e-3}}
    loaded.export(tmp_path / "export", lineage=known)
    loaded.export(str(tmp_path / "export"), store=lsp_store.path, lineage=known)  # an export is replaced
    assert torch.allclose(LspModel.from_pretrained(tmp_path / "export")(inputs), model(inputs).logits, atol=1e-6)
    theirs = AutoModel.from_pretrained(tmp_path / "export", trust_remote_code=True)
    assert torch.allclose(theirs(inputs).lsp_logits, model(inputs).logits, atol=1e-5)
    with pytest.raises(TypeError, match="lineage has no setps. It has: step, tokens"):
        loaded.export(tmp_path / "other", lineage={"setps": 3})
    written = json.loads((tmp_path / "export" / "lineage.json").read_text())
    assert written["settings"] == {
        "objective": "mlsm",
        "encoder": "bert-2x32",
        "seed": 1,
        "dropout": None,
        "lr": 1e-3,
    }
    assert written["step"] == 7 and written["tokens"] is None and written["store"]["target"] == lsp_store.target_id
    recorded = lineage(tmp_path / "export")
    assert (recorded["objective"], recorded["step"], recorded["encoder"]) == ("mlsm", 7, "bert-2x32")
    assert "7 optimiser steps. Settings:" in (tmp_path / "export" / "README.md").read_text()


def test_a_checkpoint_in_bfloat16_runs(lsp_store, tmp_path):
    model = model_of(lsp_store).eval().to(torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint")
    loaded = LspForPreTraining.from_pretrained(tmp_path / "checkpoint")
    inputs = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded(inputs).logits, model(inputs).logits)


@pytest.mark.parametrize(("encoder", "told"), [("bert-2x32", True), ("modernbert-2x32", False)])
def test_an_export_tells_whether_its_encoder_read_segments(lsp_store, tmp_path, encoder, told):
    """As train-student's does: probes and fine-tuning follow it."""
    pairs = write_store(tmp_path / "pairs", k=24, pairs=True)
    for store, expected in [(pairs, told), (lsp_store, False)]:
        LspForPreTraining.from_encoder(encoder, store).export(tmp_path / "export")
        described = json.loads((tmp_path / "export" / "lineage.json").read_text())
        assert described["settings"].get("segments", False) is expected


def test_a_batch_without_targets_has_no_loss_and_no_gradient(lsp_store):
    """Trainer counts the labels itself, and divides by none."""
    dataset = LspWindows(lsp_store)
    batch = LspCollator(lsp_store)([dataset[0], dataset[1]])
    batch["labels"].fill_(-100)
    for count in (None, 0, torch.tensor(0)):
        model = model_of(lsp_store)
        loss = model(**batch, num_items_in_batch=count).loss
        loss.backward()
        assert loss == 0 and all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_tokens_can_be_added(lsp_store):
    model = model_of(lsp_store).eval()
    batch = LspCollator(lsp_store)([LspWindows(lsp_store)[0]])
    before, tokens = model(**batch).loss, len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(tokens + 3)
    assert len(model.student.encoder.get_input_embeddings().weight) == tokens + 3 == model.config.vocab_size
    assert torch.equal(model(**batch).loss, before)


def epochs_of(items):
    return [item.epoch for item in items]


def test_a_copied_dataset_shares_its_epoch_with_its_workers(lsp_store):
    dataset = copy.deepcopy(LspWindows(lsp_store))
    loader = DataLoader(dataset, collate_fn=epochs_of, num_workers=1, persistent_workers=True)
    assert next(iter(loader)) == [0]
    dataset.set_epoch(1)
    assert next(iter(loader)) == [1]


def test_an_export_replaces_nothing_else_and_needs_its_store(lsp_store, tmp_path):
    model = model_of(lsp_store)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(RunError, match="in use and holds no export. Nothing was changed. Choose another directory"):
        model.export(tmp_path / "mine")
    with pytest.raises(RunError, match="is not the store that this model learned from"):
        model.export(tmp_path / "export", store=write_store(tmp_path / "other", k=20))
    with pytest.raises(RunError, match="is not the store that this model learned from"):  # another plan
        model.export(tmp_path / "export", store=write_store(tmp_path / "more", k=lsp_store.k, train_windows=160))
    assert not (tmp_path / "export").exists()
