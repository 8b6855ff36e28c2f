"""Reads and trains on LspWindows by accelerate and Trainer, in one process or several; see student/test_pretraining.py.

    python pretrain.py STORE DIRECTORY

Each process writes DIRECTORY/found-RANK.json: the digest of each row that its loaders gave, by loader and epoch, and
the losses and final weights of Trainer.
"""

import hashlib
import json
import sys
from pathlib import Path

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments

from shards.torch_dataset import LspWindows
from student.pretraining import LspCollator, LspForPreTraining

BATCH = 15
"""windows of a batch on one rank; two ranks take five steps for an epoch of the store's 150"""
STEPS, SAVED = 10, 7


class Losses(TrainerCallback):
    """Remembers the loss that Trainer logs at each step."""

    def __init__(self):
        self.seen = {}

    def on_log(self, args, state, control, logs, **kwargs):
        self.seen |= {state.global_step: float(logs["loss"])} if "loss" in logs else {}


def digests(batch):
    """A hash for each row of a batch, over all of its tensors."""
    rows = zip(*(batch[name].cpu().numpy() for name in sorted(batch)), strict=True)
    return [hashlib.sha256(b"".join(array.tobytes() for array in row)).hexdigest()[:16] for row in rows]


def read(store, dispatch, workers):
    """Digests of the rows of two epochs."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    dataset, collator = LspWindows(store), LspCollator(store, seed=3)
    loader = DataLoader(dataset, BATCH, shuffle=True, collate_fn=collator, num_workers=workers)
    loader = accelerator.prepare(loader)
    return [[digest for batch in loader for digest in digests(batch)] for _ in range(2)]


def train(store, directory, dropout, checkpoint=None):
    """Losses by step, and a digest of the final weights."""
    model, losses = LspForPreTraining.from_encoder("bert-2x32", store, seed=1, dropout=dropout), Losses()
    args = TrainingArguments(
        str(directory),
        learning_rate=1e-3,
        weight_decay=0.01,
        per_device_train_batch_size=BATCH,
        num_train_epochs=2,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_steps=SAVED,
        disable_tqdm=True,
        use_cpu=True,
    )
    windows, collator = LspWindows(store, seed=1), LspCollator(store, seed=1)
    trainer = Trainer(model, args, train_dataset=windows, data_collator=collator, callbacks=[losses])
    trainer.train(resume_from_checkpoint=checkpoint)
    weights = hashlib.sha256(b"".join(weight.detach().numpy().tobytes() for weight in model.parameters()))
    model.export(directory / "export")
    return losses.seen, weights.hexdigest()


def main(store, directory):
    set_seed(0)
    directory, found = Path(directory), {"rows": {}}
    for dispatch in (None, True, False):
        for workers in (0, 1):
            found["rows"][f"{dispatch} {workers}"] = read(store, dispatch, workers)
    found["losses"], _ = train(store, directory / "plain", 0.0)
    _, unbroken = train(store, directory / "dropout", 0.1)
    _, resumed = train(store, directory / "dropout", 0.1, str(directory / "dropout" / f"checkpoint-{SAVED}"))
    found["weights"] = [unbroken, resumed]
    rank = Accelerator(cpu=True).process_index
    (directory / f"found-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
