"""Reads a store through loaders of accelerate and through plain ones; to be started by Python or by torchrun.

    python read_by_accelerate.py STORE DIRECTORY

Each process writes DIRECTORY/found-RANK.json: what every loader raised or, of a plain one, which windows it gave.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainingArguments

from shards.torch_dataset import LspDataset

BATCH = 8
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5  # seconds for which processes of a refused loader are waited for


class Model(torch.nn.Module):
    """Sums the weights of a batch, and remembers which windows it saw, and how many rows were cut off."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.windows, self.cut = [], 0

    def forward(self, window_ids, input_ids, lsp_weights, **_):
        self.windows += window_ids.tolist()
        self.cut += input_ids.numel() - lsp_weights.shape[:2].numel()
        return {"loss": self.scale * lsp_weights.sum()}


class LspTrainer(Trainer):
    """A loop that keeps the plain loader."""

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=None, num_workers=2)


class Around(torch.utils.data.IterableDataset):
    """A dataset of the user's own around one of ours, which passes on no epoch."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        yield from self.dataset


def loaders(store, stateful):
    """Of samples and of batches, with workers and without."""
    loader_class = StatefulDataLoader if stateful else DataLoader
    for workers in (0, 2):
        dataset = LspDataset(store)
        yield loader_class(dataset, batch_size=BATCH, collate_fn=dataset.collate, num_workers=workers)
        yield loader_class(LspDataset(store, batch_size=BATCH), batch_size=None, num_workers=workers)


def windows_of(loader):
    found = []
    for batch in loader:
        assert batch["lsp_weights"].shape[:2] == batch["lsp_indices"].shape[:2] == batch["input_ids"].shape
        found += batch["window_ids"].tolist()
    return sorted(found)


def error_of(accelerator, loader):
    """The text of what preparing and reading a loader raises, and how many batches came before."""
    count = 0
    try:
        for _ in accelerator.prepare(loader):
            count += 1
    except ValueError as error:
        return [count, str(error)]
    return [count, "none"]


def train(trainer_class, store, directory):
    arguments = TrainingArguments(
        directory,
        per_device_train_batch_size=BATCH,
        max_steps=3,
        remove_unused_columns=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    dataset = LspDataset(store) if trainer_class is Trainer else LspDataset(store, batch_size=BATCH, endless=True)
    model = Model()
    trainer = trainer_class(model, arguments, train_dataset=dataset, data_collator=dataset.collate)
    try:
        trainer.train()
    except ValueError as error:
        return str(error)
    return [model.windows, model.cut]


def main(store, directory):
    set_seed(0)
    refused = {}
    for dispatch in (None, True, False):
        for stateful in (False, True):
            settings = DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=stateful)
            accelerator = Accelerator(cpu=True, dataloader_config=settings)
            for number, loader in enumerate(loaders(store, stateful)):
                refused[f"{dispatch} {stateful} {number}"] = error_of(accelerator, loader)
    plain = [windows_of(loader) for stateful in (False, True) for loader in loaders(store, stateful)]
    if accelerator.num_processes == 1:  # of several, one raises, and the others end with it
        loader = DataLoader(Around(LspDataset(store, batch_size=BATCH)), batch_size=None)
        refused["around"] = error_of(accelerator, loader)
    _, loader, *_ = loaders(store, stateful=False)
    whole, rest = (windows_of(skip_first_batches(loader, skip)) for skip in (0, 1))
    found = {"rank": accelerator.process_index, "refused": refused, "plain": plain, "skipped": [len(whole), len(rest)]}
    found["trainer"] = train(Trainer, store, directory)
    found["own loader"] = train(LspTrainer, store, directory)
    Path(directory, f"found-{accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
