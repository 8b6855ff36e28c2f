# Written by tests/stub.py from mlsm/commands/: change those files, and run it again.

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any, Literal

from mlsm.api import read_records as read_records
from mlsm.common.errors import MlsmError as MlsmError
from mlsm.evaluation.comparison.config import CompareConfig as _CompareConfig
from mlsm.evaluation.inspection.lsps.config import ShowLspConfig as _ShowLspConfig
from mlsm.evaluation.inspection.machine import DoctorConfig as _DoctorConfig
from mlsm.evaluation.inspection.pages import DocsConfig as _DocsConfig
from mlsm.evaluation.inspection.tracking.config import TrackConfig as _TrackConfig
from mlsm.evaluation.preparation.config import PrepareDataConfig as _PrepareDataConfig
from mlsm.evaluation.similarity.config import SimilarityConfig as _SimilarityConfig
from mlsm.evaluation.studies.flops.config import CountFlopsConfig as _CountFlopsConfig
from mlsm.evaluation.studies.protocol.config import StudyConfig as _StudyConfig
from mlsm.evaluation.studies.targets.config import MatchEntropyConfig as _MatchEntropyConfig
from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig as _ChooseLayerConfig
from mlsm.evaluation.tasks.blimp.config import BlimpConfig as _BlimpConfig
from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig as _FinetuneConfig
from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig as _ScoreTextConfig
from mlsm.results import Compared as Compared
from mlsm.results import EncodedStore as EncodedStore
from mlsm.results import Estimate as Estimate
from mlsm.results import Evaluated as Evaluated
from mlsm.results import Exported as Exported
from mlsm.results import ImportedStudent as ImportedStudent
from mlsm.results import LearnedDictionary as LearnedDictionary
from mlsm.results import MaskWeights as MaskWeights
from mlsm.results import Report as Report
from mlsm.results import SavedDictionary as SavedDictionary
from mlsm.results import TrainedStudent as TrainedStudent
from mlsm.results import Verified as Verified
from pipeline.config import EncodeConfig as _EncodeConfig
from pipeline.config import EncodeHiddenConfig as _EncodeHiddenConfig
from pipeline.config import EncodeIdsConfig as _EncodeIdsConfig
from pipeline.config import EncodeLogitsConfig as _EncodeLogitsConfig
from pipeline.config import LearnConfig as _LearnConfig
from pipeline.config import TokenizerConfig as _TokenizerConfig
from pipeline.dictionary import Dictionary as Dictionary
from pipeline.images import ImagesConfig as _ImagesConfig
from pipeline.imported import ImportConfig as _ImportConfig
from pipeline.solvers import Codes as Codes
from pipeline.solvers import nonneg_lasso as nonneg_lasso
from shards.codec import block_windows as block_windows
from shards.config import CleanConfig as _CleanConfig
from shards.config import DeriveConfig as _DeriveConfig
from shards.config import ExportStoreConfig as _ExportStoreConfig
from shards.config import ShowConfig as _ShowConfig
from shards.config import VerifyConfig as _VerifyConfig
from shards.reader import Store as Store
from shards.remote import Remote as Remote
from shards.remote import gopen as gopen
from shards.torch_dataset import LspDataset as LspDataset
from shards.torch_dataset import LspWindows as LspWindows
from shards.torch_dataset import WindowTensors as WindowTensors
from student.config import ProbeConfig as _ProbeConfig
from student.config import StudentConfig as _StudentConfig
from student.lsp_model import LspModel as LspModel
from student.lsp_model import TextLsps as TextLsps
from student.masks.config import MaskWeightsConfig as _MaskWeightsConfig
from student.pretraining import LspCollator as LspCollator
from student.pretraining import LspForPreTraining as LspForPreTraining
from student.probe import ProbedLspModel as ProbedLspModel
from student.runs.config import ExportConfig as _ExportConfig
from student.runs.config import ImportStudentConfig as _ImportStudentConfig

_Progress = Callable[..., object] | bool | None
_PathOrText = str | PathLike[str]

COMMANDS: list[str]
HOME: dict[str, str]
__all__: list[str]

class BlimpConfig(_BlimpConfig):
    """Which models to score on which minimal pairs, and how.

    A special token written out in a sentence ("[MASK]") is text, and is split like any other.
    """

    def __init__(
        self,
        *,
        models: _PathOrText | Sequence[_PathOrText] = (),
        step: _PathOrText | None = None,
        metric: Literal["original", "within-word-l2r"] = "original",
        batch_tokens: int | None = None,
        device: _PathOrText = "auto",
        data_dir: _PathOrText | None = None,
        tasks: _PathOrText | Sequence[_PathOrText] = (),
        per_paradigm: int | None = None,
        output: _PathOrText = "runs",
    ) -> None: ...

class EncodeConfig(_EncodeConfig):
    """Encode a corpus into LSP shards."""

    def __init__(
        self,
        *,
        corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
        text_field: _PathOrText = "text",
        document_boundary: Literal["blank-line", "file"] = "blank-line",
        invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
        min_characters: int = 0,
        keep_duplicates: bool = False,
        output: _PathOrText = "runs",
        held_out_by: Literal["document", "file"] = "document",
        packing: Literal["packed", "pairs"] = "packed",
        max_length: int = 128,
        max_tokens: int | None = None,
        unit_tokens: int = 1048576,
        workers: int = 1,
        scheduler: _PathOrText | None = None,
        teacher: _PathOrText | None = None,
        batch_tokens: int | None = None,
        dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
        documents_apart: bool = False,
        device: _PathOrText = "auto",
        products: Literal["auto", "onednn", "torch"] = "auto",
        layer: int | Sequence[int] = (10,),
        k: int | Sequence[int] | None = None,
        atoms: Literal["learned", "sampled", "clusters"] = "learned",
        lam: float = 0.05,
        center: Literal["none", "mean", "position"] = "none",
        dictionary_tokens: int = 2000000,
        dictionary_epochs: float = 2.0,
        seed: int = 42,
        retry_quarantine: bool = False,
        dry_run: bool = False,
        hidden: _PathOrText | None = None,
        dictionary: _PathOrText | None = None,
        tolerance: float = 0.0001,
        solver: Literal["cd", "fista", "nearest"] = "cd",
        solver_steps: int = 100,
        solver_backend: Literal["auto", "torch"] = "auto",
        top_n: int | Literal["all"] | None = None,
    ) -> None: ...

class FinetuneConfig(_FinetuneConfig):
    """Fine-tune models on ten tasks and record fourteen scores per seed (MLSM paper, section 4.2).

    The settings are the paper's unless you change them: learning rate, falling linearly to zero, batch, epochs, scores
    after the last. Where it is silent they are the official code's: AdamW, weight decay 0.01 on everything, float32.
    Warm-up and clipping are added, as fine-tuning without them fails more often; `--warmup 0 --grad-clip 0` trains
    as the official code does.
    """

    def __init__(
        self,
        *,
        models: _PathOrText | Sequence[_PathOrText] = (),
        step: _PathOrText | None = None,
        frozen: bool = False,
        tasks: Literal["all", "cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic", "wsd"] | Sequence[Literal["all", "cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic", "wsd"]] = ("all",),
        layer: int | Sequence[int] | None = None,
        seeds: int = 5,
        data_dir: _PathOrText | None = None,
        output: _PathOrText = "runs",
        overwrite: Literal["missing", "always", "never"] = "missing",
        epochs: int = 3,
        lr: float | Sequence[float] = 2e-05,
        warmup: float = 0.06,
        grad_clip: float = 1.0,
        batch: int = 32,
        max_length: int | None = None,
        dropout: float = 0.1,
        segments: Literal["auto", "never", "always"] = "auto",
        split: Literal["validation", "test", "train-tenth"] = "validation",
        limit_train: int | None = None,
        max_steps: int | None = None,
        device: _PathOrText = "auto",
        smoke: bool = False,
    ) -> None: ...

class ProbeConfig(_ProbeConfig):
    """The settings of training a probe: of which student, on which store, and how.

    Settings that only students have are fixed for a probe: its encoder is the student's, its objective mlm.
    """

    def __init__(
        self,
        *,
        store: _PathOrText | None = None,
        documents_apart: bool = False,
        segments: Literal["auto", "never"] = "auto",
        epochs: float | None = None,
        max_steps: int | None = None,
        batch_windows: int | None = None,
        micro_batch: int | None = None,
        lr: float | None = None,
        warmup: float = 0.02,
        schedule: Literal["linear", "cosine", "wsd"] = "linear",
        decay_share: float = 0.2,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        weight_decay: float = 0.0,
        decay_all: bool = False,
        grad_clip: float = 1.0,
        seed: int = 42,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        products: Literal["auto", "onednn", "torch"] = "auto",
        device: _PathOrText = "auto",
        compile: bool | None = None,
        activation_checkpointing: bool = False,
        checkpoints: float | Sequence[float] = (0.1, 0.25, 0.5, 1.0),
        save_every: int | None = None,
        keep_last: int = 1,
        eval_every: int | None = None,
        eval_windows: int | None = None,
        track: Literal["tensorboard", "wandb", "trackio"] | Sequence[Literal["tensorboard", "wandb", "trackio"]] = (),
        run_dir: _PathOrText | None = None,
        student: _PathOrText | None = None,
        probe_input: Literal["softmax", "logits", "hidden"] = "softmax",
    ) -> None: ...

class StudentConfig(_StudentConfig):
    """The settings of training a student: what to train, on which store, and how.

    Settings that are unset follow from the store and the recipe that made it.
    """

    def __init__(
        self,
        *,
        store: _PathOrText | Sequence[_PathOrText] | None = None,
        store_weights: float | Sequence[float] | None = None,
        objective: Literal["mlsm", "mlm", "kd", "mtl", "hard-mlsm", "naive-mlsm", "supersense", "type", "regress", "recon"] = "mlsm",
        wordnet: _PathOrText | None = None,
        kappa: float | None = None,
        regress_loss: Literal["cosine", "mse"] = "cosine",
        target_temperature: float = 1.0,
        untied: bool = False,
        encoder: _PathOrText = "bert-12x768",
        continue_from: _PathOrText | None = None,
        continue_head: bool = False,
        documents_apart: bool = False,
        segments: Literal["auto", "never"] = "auto",
        short_windows: int | None = None,
        short_share: float = 0.9,
        dropout: float | None = None,
        epochs: float | None = None,
        max_steps: int | None = None,
        batch_windows: int | None = None,
        micro_batch: int | None = None,
        lr: float | None = None,
        optimizer: Literal["adamw", "muon"] = "adamw",
        warmup: float = 0.02,
        schedule: Literal["linear", "cosine", "wsd"] = "linear",
        decay_share: float = 0.2,
        adam_beta1: float = 0.9,
        adam_beta2: float = 0.999,
        weight_decay: float = 0.01,
        decay_all: bool = False,
        grad_clip: float = 1.0,
        positions: Literal["masked", "all"] = "masked",
        mask_rate: float = 0.15,
        mask_rate_end: float | None = None,
        mask_schedule: Literal["linear", "cosine", "steps"] = "linear",
        mask_rate_steps: float | Sequence[float] = (0.5,),
        mask_weights: _PathOrText | Sequence[_PathOrText] | None = None,
        mask_weight_steps: float | Sequence[float] = (0.5,),
        mask_update_steps: int = 200,
        mask_unit: Literal["token", "word", "span"] = "token",
        corruption: _PathOrText = "mask",
        mask_later: int = 0,
        seed: int = 42,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        products: Literal["auto", "onednn", "torch"] = "auto",
        device: _PathOrText = "auto",
        compile: bool | None = None,
        activation_checkpointing: bool = False,
        checkpoints: float | Sequence[float] = (0.1, 0.25, 0.5, 1.0),
        save_every: int | None = None,
        keep_last: int = 1,
        eval_every: int | None = None,
        eval_windows: int | None = None,
        track: Literal["tensorboard", "wandb", "trackio"] | Sequence[Literal["tensorboard", "wandb", "trackio"]] = (),
        run_dir: _PathOrText | None = None,
    ) -> None: ...

def choose_layer(
    config: _ChooseLayerConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    batch_tokens: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    documents_apart: bool = False,
    device: _PathOrText = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    layer: int | Sequence[int] | Literal["all"] = "all",
    k: int | Sequence[int] = (3072,),
    atoms: Literal["learned", "sampled", "clusters"] = "learned",
    lam: float = 0.05,
    center: Literal["none", "mean", "position"] = "none",
    dictionary_tokens: int = 2000000,
    dictionary_epochs: float = 2.0,
    seed: int = 42,
    data_dir: _PathOrText | None = None,
    limit_train: int | None = None,
    tolerance: float = 0.001,
) -> Report:
    """Choose the layer of a teacher to encode, by word-sense disambiguation with every layer's LSPs.

    Settings: `mlsm help choose-layer`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def clean(
    config: _CleanConfig | None = None,
    *,
    progress: _Progress = None,
    path: _PathOrText = "runs",
    dry_run: bool = False,
    all: bool = False,
) -> Report:
    """Remove what killed processes left behind.

    Settings: `mlsm help clean`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def compare(
    config: _CompareConfig | None = None,
    *,
    progress: _Progress = None,
    results: _PathOrText | Sequence[_PathOrText] = (),
    output: _PathOrText = "runs/comparison",
    paper: bool = False,
    diagnostic: _PathOrText | None = None,
    intruders: _PathOrText | Sequence[_PathOrText] = (),
) -> Compared:
    """Compare models by the records of finetune and evaluate_blimp.

    Settings: `mlsm help compare`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def count_flops(
    config: _CountFlopsConfig | None = None,
    *,
    progress: _Progress = None,
    encoder: _PathOrText = "deberta-base",
    teacher: _PathOrText = "bert-base",
    vocab_size: int | None = None,
    k: int = 3072,
    layer: int = 10,
    mask_rate: float = 0.15,
    max_length: int = 128,
    max_steps: int = 100000,
    batch_windows: int = 1024,
    dictionary_tokens: int = 2000000,
    dictionary_epochs: float = 2.0,
    output: _PathOrText = "runs",
) -> Report:
    """Count the operations of pre-training, only from configurations.

    Settings: `mlsm help count-flops`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def derive_shards(
    config: _DeriveConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    top_n: int = 8,
    output: _PathOrText | None = None,
) -> EncodedStore:
    """Make a store with fewer entries per token from a stored one, without the teacher.

    Settings: `mlsm help derive-shards`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def docs(
    config: _DocsConfig | None = None,
    *,
    progress: _Progress = None,
    page: _PathOrText | None = None,
) -> Report:
    """Find a page of the documentation: docs(page="corpora")["file"]; all of them: docs()["pages"].

    Settings: `mlsm help docs`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def doctor(
    config: _DoctorConfig | None = None,
    *,
    progress: _Progress = None,
    output: _PathOrText = "runs",
    gpu: bool = False,
) -> Report:
    """What this machine has, and what that means for speed: doctor()["checks"].

    Settings: `mlsm help doctor`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def encode_hidden(
    config: _EncodeHiddenConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    batch_tokens: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    documents_apart: bool = False,
    device: _PathOrText = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    retry_quarantine: bool = False,
    dry_run: bool = False,
    layer: int | Sequence[int] = (10,),
    quantise: Literal["int8", "pq"] = "int8",
    bytes: int | None = None,
    codebook: _PathOrText | None = None,
    dictionary_tokens: int = 262144,
    seed: int = 42,
    hidden: _PathOrText | None = None,
) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's hidden states: a list of one store for each layer.

    Settings: `mlsm help encode-hidden`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def encode_ids(
    config: _EncodeIdsConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    retry_quarantine: bool = False,
    dry_run: bool = False,
    tokenizer: _PathOrText | None = None,
) -> list[EncodedStore]:
    """Encode a corpus into shards of token ids, all that the mlm objective needs: a list of one store.

    Settings: `mlsm help encode-ids`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def encode_images(
    config: _ImagesConfig | None = None,
    *,
    progress: _Progress = None,
    images: _PathOrText | Sequence[_PathOrText] = (),
    teacher: _PathOrText | None = None,
    layer: int | None = None,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    output: _PathOrText = "runs",
) -> Report:
    """Write the vectors of the patches of images, for learn_dictionary and show_lsp.

    Settings: `mlsm help encode-images`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def encode_logits(
    config: _EncodeLogitsConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    batch_tokens: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    documents_apart: bool = False,
    device: _PathOrText = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    retry_quarantine: bool = False,
    dry_run: bool = False,
    top_n: int | Literal["all"] = 64,
    masked: bool = False,
) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's most probable words, for distillation: a list of one store.

    Settings: `mlsm help encode-logits`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def encode_lsp(
    config: _EncodeConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    batch_tokens: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    documents_apart: bool = False,
    device: _PathOrText = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    layer: int | Sequence[int] = (10,),
    k: int | Sequence[int] | None = None,
    atoms: Literal["learned", "sampled", "clusters"] = "learned",
    lam: float = 0.05,
    center: Literal["none", "mean", "position"] = "none",
    dictionary_tokens: int = 2000000,
    dictionary_epochs: float = 2.0,
    seed: int = 42,
    retry_quarantine: bool = False,
    dry_run: bool = False,
    hidden: _PathOrText | None = None,
    dictionary: _PathOrText | None = None,
    tolerance: float = 0.0001,
    solver: Literal["cd", "fista", "nearest"] = "cd",
    solver_steps: int = 100,
    solver_backend: Literal["auto", "torch"] = "auto",
    top_n: int | Literal["all"] | None = None,
) -> list[EncodedStore]:
    """Encode a corpus into LSP shards: a store for each layer and k, from one pass of the teacher.

    mlsm.encode_lsp(teacher="bert-base-cased", layer=10, corpus="wiki/*.txt")
    With dry_run=True it returns a list of one Estimate and keeps no files.

    Settings: `mlsm help encode-lsp`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def evaluate_blimp(
    config: _BlimpConfig | None = None,
    *,
    progress: _Progress = None,
    models: _PathOrText | Sequence[_PathOrText] = (),
    step: _PathOrText | None = None,
    metric: Literal["original", "within-word-l2r"] = "original",
    batch_tokens: int | None = None,
    device: _PathOrText = "auto",
    data_dir: _PathOrText | None = None,
    tasks: _PathOrText | Sequence[_PathOrText] = (),
    per_paradigm: int | None = None,
    output: _PathOrText = "runs",
) -> Evaluated:
    """Score masked language models on BLiMP's minimal pairs.

    Settings: `mlsm help evaluate-blimp`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def export_store(
    config: _ExportStoreConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    output: _PathOrText | None = None,
) -> Report:
    """Write a store as Parquet files with a dataset card: datasets.load_dataset(exported["output"]) reads them.

    Settings: `mlsm help export-store`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def export_student(
    config: _ExportConfig | None = None,
    *,
    progress: _Progress = None,
    run: _PathOrText | None = None,
    step: _PathOrText = "latest",
    output: _PathOrText | None = None,
    store: _PathOrText | Sequence[_PathOrText] | None = None,
    push_to_hub: _PathOrText | None = None,
    private: bool = False,
    license: _PathOrText | None = None,
    language: _PathOrText | Sequence[_PathOrText] = (),
    dry_run: bool = False,
) -> Exported:
    """Export a checkpoint of a run as files that transformers loads; with push_to_hub also to the Hub.

    Settings: `mlsm help export-student`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def finetune(
    config: _FinetuneConfig | None = None,
    *,
    progress: _Progress = None,
    models: _PathOrText | Sequence[_PathOrText] = (),
    step: _PathOrText | None = None,
    frozen: bool = False,
    tasks: Literal["all", "cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic", "wsd"] | Sequence[Literal["all", "cola", "conll2003", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wic", "wsd"]] = ("all",),
    layer: int | Sequence[int] | None = None,
    seeds: int = 5,
    data_dir: _PathOrText | None = None,
    output: _PathOrText = "runs",
    overwrite: Literal["missing", "always", "never"] = "missing",
    epochs: int = 3,
    lr: float | Sequence[float] = 2e-05,
    warmup: float = 0.06,
    grad_clip: float = 1.0,
    batch: int = 32,
    max_length: int | None = None,
    dropout: float = 0.1,
    segments: Literal["auto", "never", "always"] = "auto",
    split: Literal["validation", "test", "train-tenth"] = "validation",
    limit_train: int | None = None,
    max_steps: int | None = None,
    device: _PathOrText = "auto",
    smoke: bool = False,
) -> Evaluated:
    """Fine-tune models on ten tasks, with paired heads and batches: one record per task and seed.

    Settings: `mlsm help finetune`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def import_dictionary(
    config: _ImportConfig | None = None,
    *,
    progress: _Progress = None,
    file: _PathOrText | None = None,
    orientation: Literal["auto", "rows", "columns"] = "auto",
    output: _PathOrText = "runs",
) -> SavedDictionary:
    """Make a dictionary from a .npy file of atoms, such as the official code's: file="layer_10_k_3000.npy".

    Settings: `mlsm help import-dictionary`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def import_student(
    config: _ImportStudentConfig | None = None,
    *,
    progress: _Progress = None,
    model: _PathOrText | None = None,
    max_length: int = 128,
    output: _PathOrText | None = None,
) -> ImportedStudent:
    """Split a checkpoint of the official MLSM code into encoder, LSP head and word head: an export.

    Settings: `mlsm help import-student`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def learn_dictionary(
    config: _LearnConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    held_out_by: Literal["document", "file"] = "document",
    packing: Literal["packed", "pairs"] = "packed",
    max_length: int = 128,
    max_tokens: int | None = None,
    unit_tokens: int = 1048576,
    workers: int = 1,
    scheduler: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    batch_tokens: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    documents_apart: bool = False,
    device: _PathOrText = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    layer: int | Sequence[int] = (10,),
    k: int | Sequence[int] = (3072,),
    atoms: Literal["learned", "sampled", "clusters"] = "learned",
    lam: float = 0.05,
    center: Literal["none", "mean", "position"] = "none",
    dictionary_tokens: int = 2000000,
    dictionary_epochs: float = 2.0,
    seed: int = 42,
    hidden: _PathOrText | None = None,
) -> list[LearnedDictionary]:
    """Learn the dictionary of each layer and k of a teacher, or one of the vectors in a file: hidden="states.npy".

    Settings: `mlsm help learn-dictionary`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def make_mask_weights(
    config: _MaskWeightsConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    kind: Literal["frequency", "common", "domain", "pmi"] = "frequency",
    power: float = 0.5,
    weight: float = 10.0,
    against: _PathOrText | None = None,
    words: _PathOrText | None = None,
    output: _PathOrText | None = None,
) -> MaskWeights:
    """Make a table of how often each token is to be masked: mlsm.train_student(mask_weights=made).

    Settings: `mlsm help make-mask-weights`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def match_entropy(
    config: _MatchEntropyConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    against: _PathOrText | None = None,
    entropy: float | None = None,
    samples: int = 20000,
    teacher: _PathOrText | None = None,
) -> Report:
    """Find the temperature, and the penalty, at which a store's targets are as flat as another's.

    Settings: `mlsm help match-entropy`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def prepare_data(
    config: _PrepareDataConfig | None = None,
    *,
    progress: _Progress = None,
    dataset: Literal["blimp", "wsd", "glue", "wic", "conll"] | None = None,
    from_: _PathOrText | None = None,
    output: _PathOrText = "data",
) -> Report:
    """Put evaluation data as published into the layout that evaluations read: dataset="wic", from_="downloads".

    Settings: `mlsm help prepare-data`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def score_text(
    config: _ScoreTextConfig | None = None,
    *,
    progress: _Progress = None,
    models: _PathOrText | Sequence[_PathOrText] = (),
    step: _PathOrText | None = None,
    metric: Literal["original", "within-word-l2r"] = "original",
    batch_tokens: int | None = None,
    device: _PathOrText = "auto",
    sentences: _PathOrText | Sequence[_PathOrText] = (),
    pairs: _PathOrText | Sequence[_PathOrText] = (),
    text_field: _PathOrText = "text",
    output: _PathOrText = "runs",
) -> Report:
    """Score the sentences, or the minimal pairs, of files: models="bert-base-cased", sentences="reviews.txt".

    Settings: `mlsm help score-text`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def show_lsp(
    config: _ShowLspConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    lsp: int | Sequence[int] = (),
    word: _PathOrText | None = None,
    text: _PathOrText | None = None,
    student: _PathOrText | None = None,
    scale: _PathOrText | Sequence[_PathOrText] = (),
    teacher: _PathOrText | None = None,
    intruders: bool = False,
    judge: _PathOrText | None = None,
    against: _PathOrText | Sequence[_PathOrText] = (),
    similar_to: _PathOrText | None = None,
    vectors: _PathOrText | None = None,
    html: _PathOrText | None = None,
    samples: int = 2000000,
    diagnostic: _PathOrText | None = None,
) -> Report:
    """What LSPs stand for: of a store, a word, a text; with html="lsps" as pages to browse.

    Settings: `mlsm help show-lsp`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def show_shards(
    config: _ShowConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    document: int | None = None,
    window: int | None = None,
    split: Literal["train", "held_out"] = "train",
    top_n: int = 5,
    max_tokens: int = 512,
    against: _PathOrText | None = None,
) -> Report:
    """What a store holds: statistics, or one document or window with its targets.

    Settings: `mlsm help show-shards`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def similarity(
    texts_a: _PathOrText | Sequence[_PathOrText] | _SimilarityConfig = (),
    texts_b: _PathOrText | Sequence[_PathOrText] = (),
    store: _PathOrText | None = None,
    *,
    progress: _Progress = None,
    tasks: Literal["stsb", "wic"] | Sequence[Literal["stsb", "wic"]] = (),
    data_dir: _PathOrText | None = None,
    teacher: _PathOrText | None = None,
    samples: int = 300000,
) -> Report:
    """How alike texts are by their LSPs, pair by pair: `similarity("A cat.", "A dog.", store)` has them as `pairs`.

    store  a store of LSPs, or a student that predicts them; with tasks="stsb" instead of texts: tables

    Settings: `mlsm help similarity`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def study(
    config: _StudyConfig | None = None,
    *,
    progress: _Progress = None,
    recipe: _PathOrText = "study-demo",
    output: _PathOrText | None = None,
    data_dir: _PathOrText | None = None,
    only: _PathOrText | Sequence[_PathOrText] = (),
    dry_run: bool = False,
    print_commands: Literal["make", "slurm"] | None = None,
) -> Report:
    """Run a whole study from one recipe: stores, students, evaluations, and their comparison.

    Settings: `mlsm help study`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def track(
    config: _TrackConfig | None = None,
    *,
    progress: _Progress = None,
    stores: _PathOrText | Sequence[_PathOrText] = (),
    matching: Literal["hungarian", "mutual-best"] = "hungarian",
    samples: int = 2000000,
    output: _PathOrText = "runs/tracking",
) -> Report:
    """Match the LSPs of two or more stores of the same text: mlsm.track(stores=(before, after)).

    Settings: `mlsm help track`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def train_probe(
    config: _ProbeConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    documents_apart: bool = False,
    segments: Literal["auto", "never"] = "auto",
    epochs: float | None = None,
    max_steps: int | None = None,
    batch_windows: int | None = None,
    micro_batch: int | None = None,
    lr: float | None = None,
    warmup: float = 0.02,
    schedule: Literal["linear", "cosine", "wsd"] = "linear",
    decay_share: float = 0.2,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    grad_clip: float = 1.0,
    seed: int = 42,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    device: _PathOrText = "auto",
    compile: bool | None = None,
    activation_checkpointing: bool = False,
    checkpoints: float | Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    save_every: int | None = None,
    keep_last: int = 1,
    eval_every: int | None = None,
    eval_windows: int | None = None,
    track: Literal["tensorboard", "wandb", "trackio"] | Sequence[Literal["tensorboard", "wandb", "trackio"]] = (),
    run_dir: _PathOrText | None = None,
    student: _PathOrText | None = None,
    probe_input: Literal["softmax", "logits", "hidden"] = "softmax",
) -> TrainedStudent:
    """Train a linear probe that predicts words from the LSPs of a frozen student.

    Settings: `mlsm help train-probe`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def train_student(
    config: _StudentConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    store: _PathOrText | Sequence[_PathOrText] | None = None,
    store_weights: float | Sequence[float] | None = None,
    objective: Literal["mlsm", "mlm", "kd", "mtl", "hard-mlsm", "naive-mlsm", "supersense", "type", "regress", "recon"] = "mlsm",
    wordnet: _PathOrText | None = None,
    kappa: float | None = None,
    regress_loss: Literal["cosine", "mse"] = "cosine",
    target_temperature: float = 1.0,
    untied: bool = False,
    encoder: _PathOrText = "bert-12x768",
    continue_from: _PathOrText | None = None,
    continue_head: bool = False,
    documents_apart: bool = False,
    segments: Literal["auto", "never"] = "auto",
    short_windows: int | None = None,
    short_share: float = 0.9,
    dropout: float | None = None,
    epochs: float | None = None,
    max_steps: int | None = None,
    batch_windows: int | None = None,
    micro_batch: int | None = None,
    lr: float | None = None,
    optimizer: Literal["adamw", "muon"] = "adamw",
    warmup: float = 0.02,
    schedule: Literal["linear", "cosine", "wsd"] = "linear",
    decay_share: float = 0.2,
    adam_beta1: float = 0.9,
    adam_beta2: float = 0.999,
    weight_decay: float = 0.01,
    decay_all: bool = False,
    grad_clip: float = 1.0,
    positions: Literal["masked", "all"] = "masked",
    mask_rate: float = 0.15,
    mask_rate_end: float | None = None,
    mask_schedule: Literal["linear", "cosine", "steps"] = "linear",
    mask_rate_steps: float | Sequence[float] = (0.5,),
    mask_weights: _PathOrText | Sequence[_PathOrText] | None = None,
    mask_weight_steps: float | Sequence[float] = (0.5,),
    mask_update_steps: int = 200,
    mask_unit: Literal["token", "word", "span"] = "token",
    corruption: _PathOrText = "mask",
    mask_later: int = 0,
    seed: int = 42,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    products: Literal["auto", "onednn", "torch"] = "auto",
    device: _PathOrText = "auto",
    compile: bool | None = None,
    activation_checkpointing: bool = False,
    checkpoints: float | Sequence[float] = (0.1, 0.25, 0.5, 1.0),
    save_every: int | None = None,
    keep_last: int = 1,
    eval_every: int | None = None,
    eval_windows: int | None = None,
    track: Literal["tensorboard", "wandb", "trackio"] | Sequence[Literal["tensorboard", "wandb", "trackio"]] = (),
    run_dir: _PathOrText | None = None,
) -> TrainedStudent:
    """Train an encoder from shards; continue where an interrupted run of the same settings stopped.

    mlsm.train_student(store=store, encoder="bert-6x256")    # steps, batch size and learning rate follow from the store

    Settings: `mlsm help train-student`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def train_tokenizer(
    config: _TokenizerConfig | None = None,
    *,
    recipe: _PathOrText | None = None,
    progress: _Progress = None,
    corpus: _PathOrText | Sequence[_PathOrText] = ("bundled",),
    text_field: _PathOrText = "text",
    document_boundary: Literal["blank-line", "file"] = "blank-line",
    invalid_utf8: Literal["strict", "replace", "skip"] = "strict",
    min_characters: int = 0,
    keep_duplicates: bool = False,
    output: _PathOrText = "runs",
    vocab_size: int = 8192,
) -> list[str]:
    """Train a cased WordPiece tokenizer. Returns a list with its directory.

    Settings: `mlsm help train-tokenizer`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """

def verify_shards(
    config: _VerifyConfig | None = None,
    *,
    progress: _Progress = None,
    store: _PathOrText | None = None,
    full: bool = False,
    repair: bool = False,
) -> Verified:
    """Check that a store is whole; with full=True every byte of it.

    Settings: `mlsm help verify-shards`. Raises ValueError for a setting that does not fit, TypeError for an unknown one.
    """
