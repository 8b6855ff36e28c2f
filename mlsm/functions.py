"""The commands as functions: `mlsm.encode_lsp(teacher=..., layer=10)` is `mlsm encode-lsp --teacher ... --layer 10`.

Each takes the settings of its command as keyword arguments (`mlsm help encode-lsp` lists them), or one settings object
(`mlsm.EncodeConfig`), and two arguments more:

    recipe    name of a recipe, or a YAML file, whose settings hold where no argument is given. Unlike on the command
              line, no recipe applies by itself, except that a training starts from the one that made its store
    progress  called as progress(stage, done, total, unit=..., **figures); nothing is shown without it

All raise ValueError on settings that do not fit, TypeError on an unknown one, and what mlsm/common/errors.py lists:
each class says what went wrong, its message what to do next. Where a command works on a store, a student or a run and
none is named, it takes the newest that fits, as on the command line, and logs which.
"""

import logging
from collections.abc import Callable, Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlsm.common.progress import silent
from mlsm.results import EncodedStore, Estimate, Exported, LearnedDictionary, Report, Result, TrainedStudent, Verified

if TYPE_CHECKING:
    from mlsm.evaluation.comparison.config import CompareConfig
    from mlsm.evaluation.inspection.lsps.config import LspConfig
    from mlsm.evaluation.inspection.machine import DoctorConfig
    from mlsm.evaluation.inspection.pages import DocsConfig
    from mlsm.evaluation.inspection.tracking.config import TrackConfig
    from mlsm.evaluation.preparation.config import PrepareDataConfig
    from mlsm.evaluation.studies.flops.config import CountFlopsConfig
    from mlsm.evaluation.studies.protocol.config import StudyConfig
    from mlsm.evaluation.studies.sweeps.config import SweepConfig
    from mlsm.evaluation.studies.targets.config import MatchEntropyConfig
    from mlsm.evaluation.studies.word_senses.config import ChooseLayerConfig
    from mlsm.evaluation.tasks.blimp.config import BlimpConfig
    from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig
    from mlsm.evaluation.tasks.scoring.config import ScoreTextConfig
    from pipeline.config import (
        EncodeConfig,
        EncodeHiddenConfig,
        EncodeIdsConfig,
        EncodeLogitsConfig,
        LearnConfig,
        TokenizerConfig,
    )
    from pipeline.images import ImagesConfig
    from pipeline.imported import ImportConfig
    from shards.config import CleanConfig, DeriveConfig, ExportStoreConfig, ShowConfig, VerifyConfig
    from student.config import ProbeConfig, StudentConfig
    from student.masks.config import MaskWeightsConfig
    from student.runs.export_config import ExportConfig

logger = logging.getLogger("mlsm")
Progress = Callable[..., None] | None
Recipe = str | PathLike[str] | None


def encode_lsp(
    config: "EncodeConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[EncodedStore]:
    """Encode a corpus into LSP shards: a store for each layer and k, from one pass of the teacher.

    mlsm.encode_lsp(teacher="bert-base-cased", layer=10, corpus="wiki/*.txt")
    With dry_run=True: a list of one Estimate, and nothing is kept.
    """
    return _stores(_run("encode-lsp", config, settings, recipe, progress))


def encode_ids(
    config: "EncodeIdsConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[EncodedStore]:
    """Encode a corpus into shards of token ids, all that the mlm objective needs: a list of one store."""
    return _stores(_run("encode-ids", config, settings, recipe, progress))


def encode_logits(
    config: "EncodeLogitsConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's most probable words, for distillation: a list of one store."""
    return _stores(_run("encode-logits", config, settings, recipe, progress))


def encode_hidden(
    config: "EncodeHiddenConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[EncodedStore]:
    """Encode a corpus into shards of the teacher's hidden states: a list of one store for each layer."""
    return _stores(_run("encode-hidden", config, settings, recipe, progress))


def derive_shards(
    config: "DeriveConfig | None" = None, /, *, progress: Progress = None, **settings: Any
) -> EncodedStore:
    """Make a store with fewer entries a token from a stored one, without the teacher."""
    return EncodedStore.of(_run("derive-shards", config, settings, None, progress)[0])


def export_store(config: "ExportStoreConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Write a store as Parquet files with a dataset card: datasets.load_dataset(exported["output"]) reads them."""
    return Report.of(_run("export-store", config, settings, None, progress))


def learn_dictionary(
    config: "LearnConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[LearnedDictionary]:
    """Learn the dictionary of each layer and k of a teacher, or one of the vectors in a file: hidden="states.npy"."""
    reports = _run("learn-dictionary", config, settings, recipe, progress)
    return [LearnedDictionary.of(report) for report in reports]


def import_dictionary(config: "ImportConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Make a dictionary of ours of a .npy file of atoms, such as the official code's: file="layer_10_k_3000.npy"."""
    return Report.of(_run("import-dictionary", config, settings, None, progress))


def encode_images(config: "ImagesConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Write the vectors of the patches of images, for learn_dictionary and show_lsp."""
    return Report.of(_run("encode-images", config, settings, None, progress))


def train_tokenizer(
    config: "TokenizerConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> list[str]:
    """Train a cased WordPiece tokenizer. Returns the directories that were made, in a list of one."""
    return [str(path) for path in _run("train-tokenizer", config, settings, recipe, progress)]


def train_student(
    config: "StudentConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> TrainedStudent:
    """Train an encoder from shards; continue where an interrupted run of the same settings stopped.

    mlsm.train_student(store=store, encoder="bert-6x256")    # steps, batch and rate follow from the store
    """
    return TrainedStudent.of(_run("train-student", config, settings, recipe, progress))


def train_probe(
    config: "ProbeConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> TrainedStudent:
    """Train a linear probe that predicts words from the LSPs of a frozen student."""
    return TrainedStudent.of(_run("train-probe", config, settings, recipe, progress))


def export_student(config: "ExportConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Exported:
    """Export a checkpoint of a run as files that transformers loads; with push_to_hub also to the Hub."""
    return Exported.of(_run("export-student", config, settings, None, progress))


def verify_shards(config: "VerifyConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Verified:
    """Check that a store is whole; with full=True every byte of it."""
    return Verified.of(_run("verify-shards", config, settings, None, progress))


def show_shards(config: "ShowConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """What a store holds: statistics, or one document or window with its targets."""
    return Report.of(_run("show-shards", config, settings, None, progress))


def show_lsp(config: "LspConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """What LSPs stand for: of a store, a word, a text; with html="lsps" as pages to browse."""
    return Report.of(_run("show-lsp", config, settings, None, progress))


def similarity(
    texts_a: str | Iterable[str] = (),
    texts_b: str | Iterable[str] = (),
    model: str | PathLike[str] | None = None,
    *,
    progress: Progress = None,
    **settings: Any,
) -> Report:
    """How alike texts are by their LSPs, pair by pair: `similarity("A cat.", "A dog.", store)` has them as `pairs`.

    model  a store of LSPs, or a student that predicts them; with tasks="stsb" instead of texts: tables
    """
    texts = {"texts_a": texts_a, "texts_b": texts_b}
    given = {name: (value,) if isinstance(value, str) else tuple(value) for name, value in texts.items()}
    return Report.of(_run("similarity", None, given | {"store": model} | settings, None, progress))


def choose_layer(
    config: "ChooseLayerConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> Report:
    """Which layer of a teacher to encode, by word-sense disambiguation with every layer's LSPs."""
    return Report.of(_run("choose-layer", config, settings, recipe, progress))


def sweep(
    config: "SweepConfig | None" = None, /, *, recipe: Recipe = None, progress: Progress = None, **settings: Any
) -> Report:
    """Train a student for every layer, or every k, from one pass of the teacher."""
    return Report.of(_run("sweep", config, settings, recipe, progress))


def study(config: "StudyConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Run a whole study from one recipe: stores, students, evaluations, and their comparison."""
    return Report.of(_run("study", config, settings, None, progress))


def evaluate_blimp(config: "BlimpConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Score masked language models on BLiMP's minimal pairs."""
    return Report.of(_run("evaluate-blimp", config, settings, None, progress))


def score_text(config: "ScoreTextConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Score the sentences, or the minimal pairs, of files: models="bert-base-cased", sentences="reviews.txt"."""
    return Report.of(_run("score-text", config, settings, None, progress))


def finetune(config: "FinetuneConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Fine-tune models on ten tasks, with paired heads and batches: one record a task and seed."""
    return Report.of(_run("finetune", config, settings, None, progress))


def compare(config: "CompareConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Compare models by the records of finetune and evaluate_blimp."""
    return Report.of(_run("compare", config, settings, None, progress).as_report())


def track(config: "TrackConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Match the LSPs of two or more stores of the same text: mlsm.track(stores=(before, after))."""
    return Report.of(_run("track", config, settings, None, progress))


def count_flops(config: "CountFlopsConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Count the operations of pre-training, from configurations alone."""
    return Report.of(_run("count-flops", config, settings, None, progress))


def make_mask_weights(
    config: "MaskWeightsConfig | None" = None, /, *, progress: Progress = None, **settings: Any
) -> Report:
    """Make a table of how often each token shall be masked: mlsm.train_student(mask_weights=made["mask_weights"])."""
    return Report.of(_run("make-mask-weights", config, settings, None, progress))


def match_entropy(
    config: "MatchEntropyConfig | None" = None, /, *, progress: Progress = None, **settings: Any
) -> Report:
    """Find the temperature, and the penalty, at which a store's targets are as flat as another's."""
    return Report.of(_run("match-entropy", config, settings, None, progress))


def clean(config: "CleanConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Remove what killed processes left behind."""
    return Report.of(_run("clean", config, settings, None, progress))


def prepare_data(config: "PrepareDataConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Put evaluation data as published into the layout that evaluations read: dataset="wic", from_="downloads"."""
    return Report.of(_run("prepare-data", config, settings, None, progress))


def doctor(config: "DoctorConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """What this machine has, and what that means for speed: doctor()["checks"]."""
    return Report.of(_run("doctor", config, settings, None, progress))


def docs(config: "DocsConfig | None" = None, /, *, progress: Progress = None, **settings: Any) -> Report:
    """Find a page of the documentation: docs(page="corpora")["file"]; all of them: docs()["pages"]."""
    return Report.of(_run("docs", config, settings, None, progress))


def read_records(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """The records of evaluations in files and directories, checked. Raises RecordError, which names what is wrong."""
    from mlsm.evaluation import records

    return records.read(paths)


def _stores(reports) -> list[Any]:
    """Stores, or what a dry run estimated instead of making them."""
    kinds: list[type[Result]] = [EncodedStore if "store" in report else Estimate for report in reports]
    return [kind.of(report) for kind, report in zip(kinds, reports, strict=True)]


def _run(name, config, settings, recipe, progress):
    """The report of a command, from its entry in the table of the command line."""
    from cli import VERBS
    from mlsm.terminal.choice import choose, load

    verb = VERBS[name]
    if config is not None and (settings or recipe is not None):
        raise TypeError(f"{name.replace('-', '_')}: give a settings object or keyword arguments, not both")
    if config is None:
        config = _configured(name, load(verb.settings), settings, recipe)
    config, choice = choose(verb, config)
    if choice is not None:
        logger.info("%s", choice)
    return load(verb.function)(config, progress or silent)


def _configured(name, settings_class, settings, recipe):
    from mlsm.recipes.reading import recipe_settings, recipe_to_keep
    from mlsm.terminal.flags import meant_by, settable

    fields = {field.name: field for field in settable(settings_class)}
    for unknown in settings.keys() - fields.keys():
        meant = meant_by(unknown, fields)
        hint = f" Did you mean {meant}?" if meant else f" It has: {', '.join(fields)}."
        raise TypeError(f"{name.replace('-', '_')} has no setting {unknown!r}.{hint}")
    values = {} if recipe is None else recipe_settings(str(recipe), name, settings_class, True)
    if settings.get("dictionary") is not None:
        values.pop("k", None)  # a recipe's k is that of the dictionary which would be learned
    if "max_steps" in fields and "epochs" in fields:
        from student.resolve import without_rivals

        values = without_rivals(values, settings)
    config = settings_class(**values | settings)
    if recipe is not None and hasattr(settings_class, "recipe"):
        object.__setattr__(config, "recipe", recipe_to_keep(str(recipe)))
    return config
