"""Models with a task head. All models get the same initial head, so that their scores are paired.

The head is all parameters outside the encoder: the classifier and the pooler (also if the checkpoint has one). Its
initial weights are drawn once for (task, seed, names and shapes) from a separate generator and saved in a directory,
the bank. They are loaded into every model with the same names and shapes. Matrices are normal with standard deviation
0.02, norms are one, biases zero, as in BERT.

    <bank>/<task>-seed<seed>-<8 digits of names and shapes>.safetensors

The encoder's weights must all be in the checkpoint. Not handled here: training (training.py), which tokens a task uses
(trials.py).

Shapes: V tokens of the vocabulary, R of them with rows.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from mlsm.common.device import spare_randomness
from mlsm.common.disk import read_file
from mlsm.common.durable import make_directories, refuse_what_is_in_the_way, replace_bytes
from mlsm.common.errors import ModelError, describe
from mlsm.common.invocation import program
from mlsm.common.model_checks import max_positions, open_config, quiet_transformers, without_pooler
from mlsm.evaluation.tasks.finetuning.batches import task_number
from mlsm.evaluation.tasks.finetuning.tasks import Task
from pipeline.teacher import check_report, check_settings, load_weights
from shards.counter import hash_u64
from shards.manifest import fingerprint
from student.encoders.deberta import adapt_deberta
from student.encoders.dropout import use_fast_dropout
from student.encoders.linear import use_fast_linear

_HEAD_PURPOSE = 0x66744864  # "ftHd"
DEVIATION = 0.02  # standard deviation of BERT's initialiser
NO_LIMIT = 1 << 30  # tokens, for a model without a limit of positions


class Backbone:
    """The encoder in a directory, from which models with heads are made.

    Raises  ModelError, TeacherError if it cannot be loaded or lacks weights
    """

    def __init__(self, directory: Path | str):
        self.directory = Path(directory)
        self.config = read_config(self.directory)
        model_class = MODEL_MAPPING[type(self.config)]
        self.encoder, report = load_weights(
            model_class, self.directory, self.config, torch.float32, self.directory, **without_pooler(self.config)
        )
        check_report(report, self.encoder, self.directory)

    def with_head(self, task: Task, seed: int, bank: Path | str) -> tuple[PreTrainedModel, str]:
        """The model for a task, on the CPU, and the SHA-256 of its head. torch's generator is not changed.

        bank  directory of the heads
        """
        auto_class = AutoModelForTokenClassification if task.labels_words else AutoModelForSequenceClassification
        self.config.num_labels = task.outputs
        with spare_randomness(), quiet_transformers():  # all weights drawn here are replaced
            model = auto_class.from_config(self.config, dtype=torch.float32)
        if isinstance(table := self.encoder.get_input_embeddings(), PartialEmbedding):
            whole = model.base_model.get_input_embeddings()
            model.base_model.set_input_embeddings(PartialEmbedding(whole, table.ids_R))
        head = _head_parameters(model)
        self._fill_encoder(model, head)
        digest = _fill_head(head, task.name, seed, Path(bank))
        # faster on a CPU with the same results: DeBERTa without gathers, cheaper dropout, oneDNN's products
        adapt_deberta(model.base_model)
        use_fast_dropout(model.base_model)
        use_fast_linear(model)
        return model, digest

    def _fill_encoder(self, model, head):
        report = model.base_model.load_state_dict(self.encoder.state_dict(), strict=False)
        prefix = f"{model.base_model_prefix}."
        missing = [name for name in report.missing_keys if prefix + name not in head]
        if missing or report.unexpected_keys:
            raise ModelError(
                f"{self.directory}: its encoder is not the one of {type(model).__name__}"
                f" ({', '.join([*missing, *report.unexpected_keys][:3])}). It cannot be fine-tuned here."
            )

    def set_dropout(self, rate: float) -> None:
        """Set the dropout of models that `with_head` makes from now on; see `dropouts`."""
        for name, value in dropouts(self.config, rate).items():
            setattr(self.config, name, value)

    def keep_rows(self, *used: Sequence[int] | np.ndarray) -> None:
        """Let models that `with_head` makes from now on have token embeddings only for some ids.

        An encoder that uses its token embeddings for more than lookup keeps all of them.

        used    the ids, in any order and number
        """
        table = self.encoder.get_input_embeddings()
        assert not isinstance(table, PartialEmbedding), "rows were kept before: load the encoder again"
        of_modules = [weight for _, weight in self.encoder.named_parameters(remove_duplicate=False)]
        if type(table) is not nn.Embedding or sum(weight is table.weight for weight in of_modules) > 1:
            return
        keeps_V = torch.zeros(table.num_embeddings, dtype=torch.bool)
        for ids in used:
            keeps_V[torch.as_tensor(ids)] = True
        if table.padding_idx is not None:
            keeps_V[table.padding_idx] = True
        self.encoder.set_input_embeddings(PartialEmbedding(table, keeps_V.nonzero().flatten()))
        # copy: the weights' file stays mapped as long as any weight refers to it
        for weight in self.encoder.parameters():
            weight.data = weight.data.clone()


class PartialEmbedding(nn.Embedding):
    """Some rows of an embedding table, looked up by the ids of the whole table.

    A task's examples use only some tokens of a vocabulary. The rows of other tokens get no gradient and are never read
    (Williams and Aletras, RepL4NLP 2025, partial embedding matrix adaptation). Without them the table, its gradient and
    AdamW's two moments are smaller, and the scores are the same. Tokens keep their ids, and this module maps ids to
    rows, because models also use ids otherwise: RoBERTa counts positions from its padding id.

    The only difference from training all rows is that missing rows get no weight decay. All other weights are computed
    from the same numbers, on a CPU in the same order. Trained rows are not written back into the whole table, because
    fine-tuned models are not saved.
    """

    ids_R: Tensor
    """of the rows"""
    rows_V: Tensor
    """row of each id; -1 if it has none"""

    def __init__(self, whole: nn.Embedding, ids_R: Tensor):
        """whole: an nn.Embedding; ids_R: int64, ascending, the rows to keep, including its padding_idx."""
        super().__init__(len(ids_R), whole.embedding_dim, _weight=whole.weight.detach()[ids_R])
        rows_V = torch.full((whole.num_embeddings,), -1)  # no row: reading it raises an error
        rows_V[ids_R] = torch.arange(len(ids_R))
        self.padding_idx = None if whole.padding_idx is None else int(rows_V[whole.padding_idx])
        self.register_buffer("rows_V", rows_V, persistent=False)
        self.register_buffer("ids_R", ids_R, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.rows_V[ids])


def takes_types(config: PretrainedConfig) -> bool:
    """Whether an encoder with this configuration has token types for the two sentences of a pair."""
    return getattr(config, "type_vocab_size", 0) >= 2


def dropouts(config: PretrainedConfig, rate: float) -> dict[str, float | None]:
    """Name -> value of all dropouts of a configuration: `rate` in the encoder, the family's default in the head.

    The head's are those of classifier and pooler. For most families their default is None, which means the encoder's.
    """
    family = type(config)().to_dict()
    names = [name for name in config.to_dict() if "dropout" in name]
    parts_of_a_head = ("classif", "cls", "pooler", "qa", "summary")
    return {name: family.get(name) if any(part in name for part in parts_of_a_head) else rate for name in names}


def positions_of(config: PretrainedConfig) -> int:
    """The longest input in tokens of an encoder with this configuration. It is built on the meta device, without
    weights.
    """
    with torch.device("meta"):
        return int(min(max_positions(MODEL_MAPPING[type(config)](config)), NO_LIMIT))


def read_config(directory: Path) -> PretrainedConfig:
    """The configuration of a model. Raises ModelError if there is none, or if transformers has no head for it."""
    if not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has no config.json. Expected a run, an export, a kept checkpoint or the directory of a model."
            f" Any other checkpoint of a run:  {program()} export-student RUN --step STEP"
        )
    try:
        config = open_config(directory, local_files_only=True)
    except Exception as error:  # transformers raises many classes for a damaged file
        raise ModelError(f"{directory / 'config.json'} cannot be read: {describe(error)}.") from error
    known = (MODEL_MAPPING, *(c._model_mapping for c in _AUTO_CLASSES))
    if not all(type(config) in mapping for mapping in known):
        raise ModelError(f"{directory}: models of type {config.model_type!r} have no classifier in transformers.")
    check_settings(config, directory)
    return config


_AUTO_CLASSES = (AutoModelForSequenceClassification, AutoModelForTokenClassification)


def _head_parameters(model):
    """Name -> parameter, for all outside the encoder, and for its pooler."""
    prefix = f"{model.base_model_prefix}."
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if not name.startswith(prefix) or name.startswith(f"{prefix}pooler.")
    }


def _fill_head(head, task, seed, bank):
    """Load the head of (task, seed, names, shapes) from the bank, drawing it first if it is not there. Returns its
    SHA-256.
    """
    shapes = {name: list(parameter.shape) for name, parameter in head.items()}
    file = bank / f"{task}-seed{seed}-{fingerprint(shapes)[:8]}.safetensors"
    if not file.exists():
        with refuse_what_is_in_the_way():
            make_directories(file.parent)
            # if two processes write it, they write the same bytes
            replace_bytes(file, save_safetensors(_draw(shapes, task, seed)))
    raw = read_file(file)
    try:
        weights = load_safetensors(raw)
        with torch.no_grad():
            for name, parameter in head.items():
                parameter.copy_(weights[name])
    except (SafetensorError, KeyError, RuntimeError) as error:
        raise ModelError(
            f"{file} cannot be read as the saved head for this task and seed ({error}). Delete it and run again."
        ) from None
    return hashlib.sha256(raw).hexdigest()


def _draw(shapes, task, seed):
    drawn = {}
    for name, shape in shapes.items():
        key = int(hash_u64(_HEAD_PURPOSE, task_number(task), seed, task_number(name)) >> 1)  # torch seeds have 63 bits
        generator = torch.Generator().manual_seed(key)
        if len(shape) > 1:
            drawn[name] = DEVIATION * torch.randn(shape, generator=generator, dtype=torch.float32)
        else:
            drawn[name] = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=torch.float32)
    return drawn
