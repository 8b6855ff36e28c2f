"""The whole teacher with its masked-LM head.

    teacher = MaskedLm.load("google-bert/bert-base-cased")
    logits_CV = teacher.logits(rows_Cd)

Not handled here: turning logits into distributions (targets/logits.py).

Shapes: C tokens, d hidden width, V entries of the vocabulary.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import MODEL_FOR_MASKED_LM_MAPPING
from transformers.modeling_outputs import BaseModelOutput

from mlsm.common.device import choose_device
from mlsm.common.errors import TeacherError
from mlsm.common.invocation import program
from mlsm.common.matrix_products import Shape
from pipeline.teacher.cut import Teacher, check_report, cut_config, load_weights, read_config, torch_dtype
from pipeline.teacher.location import fingerprint, locate

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_ROWS = 1024  # most tokens per pass of the head; more would not be faster


class MaskedLm(Teacher):
    """A whole encoder and its masked-LM head, ready to run on unmasked text. As a Teacher, its layer is the last one.

    vocabulary  V, logits of a token; may exceed the tokenizer's largest id
    """

    def __init__(self, name: str, model: "PreTrainedModel", fingerprint: str):
        layers = model.config.num_hidden_layers
        self._whole, self._head = model, _head_alone(model)
        super().__init__(name, layers, layers, model.base_model, fingerprint)
        self.vocabulary = self.logits(torch.zeros(1, self.hidden_size, device=self.device)).shape[1]

    @classmethod
    def load(  # type: ignore[override]  # a whole model leaves no layer to choose
        cls, name_or_path: str | Path, *, dtype: str = "float32", device: str | torch.device = "cpu"
    ) -> "MaskedLm":
        """Load a teacher with its head; for the arguments see `Teacher.load`.

        Raises  TeacherError if it is not found, does not fit or has no masked-LM head; DeviceError
        """
        directory = locate(name_or_path)
        config = read_config(directory, name_or_path)
        device = choose_device(device)
        whole = cut_config(config, config.num_hidden_layers)
        model_class = MODEL_FOR_MASKED_LM_MAPPING[type(config)]
        model, report = load_weights(model_class, directory, whole, torch_dtype(dtype, device), name_or_path)
        _require_head(report, model.base_model_prefix, name_or_path)
        check_report(report, model, name_or_path)
        return cls(str(name_or_path), model.to(device), fingerprint(directory, name_or_path))

    def in_float32(self) -> "MaskedLm":
        """See Teacher."""
        return MaskedLm.load(self.name, dtype="float32", device=self.device)

    def _all_layers(self) -> Iterable[torch.nn.Module]:
        return self._whole.modules()

    def _shapes(self, tokens: int, length: int) -> set[Shape]:
        encoder = set(self._model.modules())
        head = [layer for layer in self._whole.modules() if isinstance(layer, torch.nn.Linear) and layer not in encoder]
        rows = min(tokens, HEAD_ROWS)
        return super()._shapes(tokens, length) | {(rows, layer.in_features, layer.out_features) for layer in head}

    @torch.inference_mode()
    def logits(self, rows_Cd: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states of the last layer: a new float32 tensor (C, V), regardless of the teacher's dtype."""
        return self._head(inputs_embeds=rows_Cd[None].to(self.dtype)).logits[0].float()


def _head_alone(model):
    """A model whose encoder passes its inputs_embeds on unchanged, so its forward pass is only that of the head,
    regardless of the family. The weights are shared."""
    head, encoder = copy.copy(model), copy.copy(model.base_model)
    head._modules = dict(model._modules)
    encoder.forward = lambda *_, inputs_embeds, **__: BaseModelOutput(last_hidden_state=inputs_embeds)
    setattr(head, model.base_model_prefix, encoder)
    return head


def _require_head(report, encoder, name):
    """Raise TeacherError if weights of the head are missing; the encoder's are checked elsewhere."""
    missing = sorted(report["missing_keys"])
    if missing and not any(key.startswith(f"{encoder}.") for key in missing):
        raise TeacherError(
            f"{name}: this teacher has no masked-LM head, so it predicts no words: its checkpoint lacks "
            f"{missing[0]}{' and more' if len(missing) > 1 else ''}. Use one that was saved as a masked language "
            f"model, such as google-bert/bert-base-cased or bundled, or encode its hidden states: {program()} "
            "encode-lsp"
        )
