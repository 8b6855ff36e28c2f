"""A linear probe: words from the outputs of a frozen student (MLSM paper, section 4.3.1).

One matrix k x V without bias, between the student's k outputs and the vocabulary, learned by cross-entropy at masked
positions: `train_probe(config)`, the trainer's own loop with another Task. What it reads:

    softmax   the distribution over LSPs: are the words in the LSPs? The export is a ProbedLspModel, and loads as an
              AutoModelForMaskedLM where transformers may run its code
    logits    the raw outputs, z = O h + c. The probe merges with them, P z = (P O) h + P c, into an untied decoder:
              the export is the family's stock *ForMaskedLM, with the same scores
    hidden    the encoder's last hidden states, without any head: one readout for students of every objective, so that
              their BLiMP and perplexity compare. The export is a ProbedLspModel, as of softmax

With logits and k > d, the probe amounts to a decoder on the encoder's own states. So softmax is the default.
Not handled here: the student (lsp_model.py), scoring sentences.

Shapes: W windows, L positions, M masked tokens, V vocabulary, k LSPs, d width of the head's output.
"""

import json
import logging
from collections.abc import Callable
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import MaskedLMOutput

from mlsm.common.disk import read_file
from mlsm.common.documents import why_not_apart
from mlsm.common.errors import RunError
from mlsm.common.json_checks import find_problem, object_of, optional
from mlsm.common.matrix_products import USUAL
from mlsm.common.model_checks import load_tensors, max_positions, quiet_transformers
from mlsm.common.progress import silent
from shards.reader import Store
from student.batches import store_has_pairs
from student.config import ProbeConfig
from student.encoders.build import vocabulary_of, weights_fingerprint
from student.encoders.flops import forward_flops
from student.encoders.linear import linear
from student.encoders.mask_later import mask_later_of
from student.encoders.model import FrozenEncoder, Student
from student.encoders.modeling_mlsm import HIDDEN_PROBE, PROBE_FILE, SOFTMAX_PROBE
from student.encoders.stock import has_known_head, masked_lm
from student.lsp_model import (
    LspModel,
    at_all_positions,
    explain_damaged_export,
    find_file,
    load_encoder,
    load_student,
    load_tokenizer,
    save_lsp_head,
)
from student.objectives.mlm import Mlm
from student.runs.export import (
    LINEAGE_FILE,
    LSP_LOADING,
    CardText,
    auto_loading,
    lsps_in_transformers,
    mask_later_note,
    positions_learned,
    write_card_and_lineage,
)
from student.runs.probed import export_of, with_student_and_store
from student.task import TrainingTask
from student.train import train

logger = logging.getLogger(__name__)

PROBE_FACT = "probe_input"  # in lsp_config.json
_FROZEN = slice(None)  # all outputs of a loaded student are LSPs


class ProbedStudent(nn.Module):
    """A frozen student and the probe on its outputs. Only the probe is a parameter, is trained and is saved.

    probe_input  softmax, logits or hidden; the student of the latter is a FrozenEncoder
    """

    def __init__(self, student: Student, vocabulary: int, probe_input: str):
        super().__init__()
        # Inside a tuple it is not a submodule, so it stays in evaluation mode and out of optimiser and checkpoints.
        self._frozen = (student.eval().requires_grad_(False),)
        self.probe_input = probe_input
        self.libraries = USUAL  # the probe's; the frozen part always uses oneDNN
        width = student.encoder.config.hidden_size if probe_input == "hidden" else len(student.output_bias_K)
        self.probe_Vk = nn.Parameter(torch.zeros(vocabulary, width))  # the loss is convex: any start serves

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, V) of the masked positions; arguments as of a Student."""
        with torch.no_grad():
            outputs_Mk = self.student(*args, **kwargs)
            if self.probe_input == "softmax":
                outputs_Mk = outputs_Mk.float().softmax(dim=1).to(self.probe_Vk.dtype)  # it may be half precision
        return linear(outputs_Mk, self.probe_Vk, None, self.libraries)

    @torch.no_grad()
    def words(self, lsps_Mk: Tensor) -> Tensor:
        """Probabilities (M, V) of the words that a softmax probe predicts from distributions over LSPs, float64."""
        return (lsps_Mk.double() @ self.probe_Vk.double().T).softmax(dim=1)

    def checkpoint_activations(self) -> None:
        """Do nothing: the frozen part keeps no activations."""

    def training_flops(self, windows: int, length: int, masked: int) -> int:
        """Operations of the frozen part's forward pass, and of the probe's: forward, and backward to its weights."""
        return forward_flops(self.student, windows, length, masked) + 2 * 2 * masked * self.probe_Vk.numel()

    @property
    def output_shapes(self) -> list[tuple[int, int]]:
        """Inputs and outputs of the probe, as of a Student's output matrix."""
        return [(self.probe_Vk.shape[1], self.probe_Vk.shape[0])]

    @property
    def student(self) -> Student:
        """The frozen part."""
        return self._frozen[0]

    @property
    def encoder(self) -> nn.Module:
        """The encoder of the frozen part."""
        return self.student.encoder

    def _apply(self, function, recurse=True):
        self.student._apply(function, recurse)  # .to(device) moves the frozen part too
        return super()._apply(function, recurse)


class ProbedLspModel(nn.Module):
    """A probed student for use, with the interface of a *ForMaskedLM: logits over the vocabulary.

    Its parameters and state_dict are the probe's alone; the student's are in `probed.student`.

    model = ProbedLspModel.from_pretrained("runs/probes/<run>")
    model(input_ids, attention_mask).logits
    """

    def __init__(self, probed: ProbedStudent, tokenizer: PreTrainedTokenizerBase):
        super().__init__()
        self.probed, self.tokenizer = probed, tokenizer
        self.eval()

    @classmethod
    def from_pretrained(cls, source: str | PathLike[str], revision: str | None = None) -> "ProbedLspModel":
        """Load a softmax or hidden probe: a finished run's directory, an export, a kept checkpoint, or a Hub id.

        Raises RunError if there is no such probe
        """
        source = fspath(source)
        place = export_of(source)
        probe_file = None
        with suppress(RunError):
            probe_file = find_file(place, PROBE_FILE, revision)
        if probe_file is not None:
            with explain_damaged_export(place):
                tensors = load_tensors(probe_file)
            if HIDDEN_PROBE in tensors:
                return cls(*_load_hidden(place, tensors[HIDDEN_PROBE], revision))
        probed, model = load_probe(source, revision)
        return cls(probed, model.tokenizer)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, token_type_ids: Tensor | None = None
    ) -> MaskedLMOutput:
        """`logits` (W, L, V) of all positions; trained at positions that hold the mask token."""
        return MaskedLMOutput(logits=at_all_positions(self.probed, input_ids, attention_mask, token_type_ids))


def _load_hidden(source, probe_Vd, revision) -> tuple[ProbedStudent, PreTrainedTokenizerBase]:
    """A hidden probe and its tokenizer."""
    with explain_damaged_export(source):
        student = FrozenEncoder(load_encoder(source, revision))
        probed = ProbedStudent(student, len(probe_Vd), "hidden")
        probed.load_state_dict({"probe_Vk": probe_Vd}, strict=True)
    return probed, load_tokenizer(source, student, revision)


def load_probe(source: str | Path, revision: str | None = None) -> tuple[ProbedStudent, LspModel]:
    """A softmax probe and its student as an LspModel; the two share the student's weights. Arguments are those of
    `ProbedLspModel.from_pretrained`.

    Raises RunError if there is no such probe
    """
    source = export_of(source)
    student, facts = load_student(source, revision)
    if facts.get(PROBE_FACT) != "softmax":
        raise RunError(
            f"{source} has no softmax probe. Expected a run or export of train-probe; a logits probe is loaded with "
            "AutoModelForMaskedLM."
        )
    with explain_damaged_export(source):
        probe_Vk = load_tensors(find_file(source, PROBE_FILE, revision))[SOFTMAX_PROBE]
        probed = ProbedStudent(student, len(probe_Vk), facts[PROBE_FACT])
        probed.load_state_dict({"probe_Vk": probe_Vk}, strict=True)
    return probed, LspModel(student, load_tokenizer(source, student, revision), facts)


def train_probe(config: ProbeConfig, progress: Callable[..., None] = silent) -> dict:
    """Train, evaluate and export a probe; resume an interrupted run with the same settings.

    Returns  the summary of `train`, of the probe
    Raises   as `train`; RunError if there is no student, or student and store do not belong together
    """
    return train(with_student_and_store(config), progress, prepare=probe_task)


def probe_task(config: ProbeConfig, store: Store) -> TrainingTask:
    """Train a probe. Raises RunError if settings, student and store do not belong together."""
    if config.student is None:
        raise RunError("no student given: name a run, an export, a kept checkpoint or a Hub id with --student.")
    source = export_of(config.student)
    student, facts = _load_frozen(source) if config.probe_input == "hidden" else load_student(source)
    _check_fits(config, store, source, student, facts)
    with explain_damaged_export(source):
        lineage_of_student = json.loads(read_file(find_file(source, LINEAGE_FILE)))
        if problem := find_problem(lineage_of_student, object_of({"settings": optional(dict)})):
            raise RunError(f"{source}/{LINEAGE_FILE}: {problem}. Export the student again.")
    _warn_of_documents(config, lineage_of_student)
    if positions_learned(lineage_of_student) == "all":
        logger.warning(
            "the student was trained on unmasked text (--positions all), and a probe reads its outputs at masked"
            " tokens, which it never saw: they say little"
        )
    frozen = weights_fingerprint(student)
    segments = _reads_segments(config, store, lineage_of_student)

    def build() -> ProbedStudent:
        return ProbedStudent(student, store.vocab_size, config.probe_input)

    def export(model, directory, objective, store, lineage) -> None:
        before = {"student": {"name": config.encoder_source, "weights": frozen} | lineage_of_student}
        export_probe(model, directory, facts, store, lineage | before)

    return TrainingTask("train-probe", Mlm(store), {"student": frozen}, build, export, segments)


def _load_frozen(source: str | Path) -> tuple[Student, dict]:
    """The encoder of any student, and the entries of lsp_config.json for a probe of hidden states."""
    with explain_damaged_export(source):
        encoder = load_encoder(source)
        known = json.loads(read_file(find_file(source, LINEAGE_FILE)))
    facts: dict[str, Any] = {PROBE_FACT: "student"} if "student" in known else {}
    trained = known.get("store", {}).get("windowing", {}).get("max_length")
    return FrozenEncoder(encoder).eval(), facts | {"max_length": trained or max_positions(encoder)}


def export_probe(model: ProbedStudent, directory: Path, facts: dict, store: Store, lineage: dict) -> None:
    """Write a probed student into an existing directory.

    facts    the lsp_config.json of the student
    lineage  as for a student's card, with `student`: the student's own
    """
    merges = model.probe_input == "logits"
    with quiet_transformers():
        (merge(model) if merges else model.encoder).save_pretrained(directory)
    if not merges:
        probe = model.probe_Vk.detach().cpu().contiguous()
        save_file({HIDDEN_PROBE if model.probe_input == "hidden" else SOFTMAX_PROBE: probe}, directory / PROBE_FILE)
    if model.probe_input != "hidden":
        save_lsp_head(model.student, _FROZEN, facts | {PROBE_FACT: model.probe_input}, directory)
    write_card_and_lineage(directory, _card_text(model, lineage), store, lineage)


def merge(model: ProbedStudent) -> PreTrainedModel:
    """A logits probe as the family's stock *ForMaskedLM: its decoder is probe x output matrix.

    The product is computed in float64, so the scores of the two models differ by rounding only.
    """
    student = model.student
    probe_Vk = model.probe_Vk.detach().double()
    matrix_Vd, bias_V = probe_Vk @ student.output_matrix.double(), probe_Vk @ student.output_bias_K.double()
    return masked_lm(student, matrix_Vd, bias_V)


def _check_fits(config: ProbeConfig, store: Store, source: str | Path, student: Student, facts: dict) -> None:
    if PROBE_FACT in facts:
        raise RunError(f"{source} is a probe; pass the student that it probes:  --student")
    theirs, ours = vocabulary_of(source), store.load_tokenizer().get_vocab()
    if theirs != ours:
        raise RunError(
            f"store of another tokenizer: the student {source} has a vocabulary of {len(theirs)} tokens, {store.path} "
            f"one of {len(ours)} (or the same tokens with other ids). Pass a --store with the student's tokenizer."
        )
    if store.max_length > facts["max_length"]:
        raise RunError(
            f"{store.path} has windows of {store.max_length} tokens, the student {source} was trained on at most "
            f"{facts['max_length']}. Pass a --store with such windows."
        )
    if config.documents_apart and (reason := why_not_apart(student.encoder.config)) is not None:
        raise RunError(f"--documents-apart: {reason}")
    if config.probe_input == "logits" and not has_known_head(student.encoder.config):
        raise RunError(
            f"a logits probe of this {student.encoder.config.model_type} student cannot be exported: no masked language"
            " model of that family is known here that computes the same. Use --probe-input softmax."
        )


def _reads_segments(config: ProbeConfig, store: Store, lineage_of_student: dict) -> bool:
    """Whether the student reads segments: on sentence pairs, if trained with them, unless `segments` is never."""
    learned = lineage_of_student.get("settings", {}).get("segments", False)
    if learned and store_has_pairs(store) and config.segments == "never":
        logger.warning(
            "the student was trained with segments, the probe is without (--segments never): the student's outputs will"
            " be poorer"
        )
    return learned and store_has_pairs(store) and config.segments == "auto"


def _warn_of_documents(config: ProbeConfig, lineage_of_student: dict) -> None:
    """Warn if the probe lets the student read documents in another way than in its training."""
    learned = lineage_of_student.get("settings", {}).get("documents_apart", False)
    if learned != config.documents_apart:
        theirs, ours = ("with", "without") if learned else ("without", "with")
        logger.warning(
            "the student was trained %s --documents-apart, the probe is %s: the student's outputs will be poorer",
            theirs,
            ours,
        )


_PROBE_CODE = f"""\
{auto_loading("AutoModelForMaskedLM", runs_code=True)}

The code is `modeling_mlsm.py` in this repository, which needs transformers 5.23 or newer and no other package.
`pipeline("fill-mask", model=PATH, trust_remote_code=True)` fills masks. Without `trust_remote_code=True`, transformers
puts a head of random weights on the encoder, and warns of it. `AutoModel` loads only the encoder."""

_PROBED_LSP_MODEL = """\
Scores over the vocabulary; this needs the package `mlsm`:

```python
import mlsm
model = mlsm.ProbedLspModel.from_pretrained(PATH)    # model(input_ids, attention_mask).logits
```"""


def _card_text(model: ProbedStudent, lineage: dict) -> CardText:
    family, what = model.encoder.config.model_type, "raw LSP outputs"
    layer, positions = mask_later_of(model.encoder.config), positions_learned(lineage["student"])
    loading = auto_loading("AutoModelForMaskedLM")
    if model.probe_input != "logits":
        what = "distribution over LSPs" if model.probe_input == "softmax" else "last hidden states"
        loading = "\n\n".join([_PROBE_CODE] * (layer == 0) + [_PROBED_LSP_MODEL])
    notes = [LSP_LOADING] * (model.probe_input != "hidden") + [mask_later_note(layer)] * (layer > 0)
    return CardText(
        title=f"{family} encoder pre-trained with {lineage['student']['objective'].upper()}, with a linear probe",
        made=f"The student is frozen; one matrix was trained to predict masked tokens from its {what}.",
        loading="\n\n".join([loading, *notes]),
        tags=["linear-probe", "mlsm", "masked-latent-semantic-modeling"],
        fills_masks=layer == 0,
        in_transformers="" if model.probe_input == "hidden" else lsps_in_transformers(positions),
        reads_words=True,
    )
