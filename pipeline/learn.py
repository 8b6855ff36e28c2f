"""Decide which dictionaries and codebooks a command needs, and learn those that do not exist yet.

    codebook = provide_codebook(executor, teacher, layer)
    for report in provide_dictionaries(executor, teacher):   # one for every layer and k of the settings
        report["dictionary"], report["layer"], report["finished_before"]

All missing dictionaries are sampled in one pass of the teacher, then learned one after the other. A dictionary's
directory is named after what it is learned from. Until it is finished, its sample and checkpoints are in a hidden
directory next to it, so an interruption costs at most a minute of learning. Codebooks of product quantisation are named
and sampled in the same way. Not handled here: the sample (sample.py), the learning itself (dictionary/), the
quantisation (targets/hidden.py).
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from mlsm.common.device import choose_device
from mlsm.common.disk import file_sha256
from mlsm.common.durable import publish_directory
from mlsm.common.errors import EncodeError
from mlsm.common.invocation import program
from mlsm.common.machine import available_memory
from mlsm.common.progress import silent
from mlsm.common.workplaces import discard, workplace
from pipeline.announcement import announcement
from pipeline.batch import InputFormat
from pipeline.config import OF_LEARNING, DictionaryConfig, EncodeConfig, EncodeHiddenConfig, LearnConfig, minibatch_size
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule, learning
from pipeline.dictionary import learn_dictionary as learn
from pipeline.dictionary.centering import Center
from pipeline.dictionary.checkpoint import forget
from pipeline.dictionary.near import NEAR, count_near
from pipeline.dictionary.vectors import file_stamp, open_vectors, refuse_unusable
from pipeline.executor import PART, Executor
from pipeline.job import Job, load_teacher, name_of_dtype, named_by_content, open_executor, open_job
from pipeline.sample import RAW_SAMPLE, SAMPLE, sample_hidden
from pipeline.stored import names_a_store
from pipeline.targets.hidden import Codebook
from pipeline.teacher import Teacher, check_position_means
from shards import copies
from shards.files import StoreFiles, refuse_foreign_output
from shards.manifest import fingerprint

WORK_FILES = (SAMPLE, RAW_SAMPLE, f"{PART}*.npy", "center.npy", "center.json", "learning.npz")
LEARNING_BYTES = 14.4  # of memory per pair of atoms, on a CPU: 3.6 matrices of float32 at the peak
FIXED_BATCH = 2048  # vectors per minibatch; not in a dictionary's name if it has this value
# Settings that apply to a file of vectors.
OF_VECTORS = {"hidden", "k", "atoms", "lam", "dictionary_epochs", "seed", "device", "output"}
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A dictionary that the settings require."""

    directory: Path
    k: int


@dataclass(frozen=True)
class WantedOfLayer(Wanted):
    """A dictionary that is learned from a layer of the teacher."""

    layer: int
    teacher: str
    """fingerprint"""


def working_directory(directory: Path) -> Path:
    """Where the sample and checkpoints of a directory are until it is finished: it follows only from the digits of the
    name."""
    return directory.with_name(f".{directory.name.rpartition('-')[2]}.learning")


def learn_dictionary(config: LearnConfig, progress: Callable[..., None] = silent) -> list[dict]:
    """Learn, or find, the dictionary of every layer and k of the settings, or those of the file config.hidden.

    Returns  list of report dicts: directory, finished_before, the figures of its atoms
    Raises   as encode_lsp, DictionaryError; ValueError on a file that cannot be used or changes meanwhile
    """
    if config.hidden is not None and not names_a_store(config.hidden):
        return _provide_from_file(config, Path(config.hidden), progress)
    job = open_job(config, progress)
    teacher = load_teacher(job)
    lacking = [entry.directory for entry in wanted_dictionaries(job, teacher) if not entry.directory.is_dir()]
    logger.info("%s", announcement("learn-dictionary", job, teacher, lacking=lacking))
    with open_executor(job, teacher) as executor:
        return provide_dictionaries(executor, teacher)


def provide_dictionaries(executor: Executor, teacher: Teacher) -> list[dict]:
    """Reports of the dictionaries that the settings require, layer by layer; missing ones are learned now."""
    job = executor.job
    wanted = wanted_dictionaries(job, teacher)
    for entry in wanted:
        if not entry.directory.is_dir():
            _announce(entry.directory)

    def sample(places):
        layers = [(entry.layer, place) for entry, place in places]
        return sample_hidden(executor, teacher, layers, max(entry.k for entry, _ in places))

    reports = _provide(wanted, job.config, minibatch_of_sample(job), job.progress, sample)
    return [report | {"layer": entry.layer} for entry, report in zip(wanted, reports, strict=True)]


def wanted_dictionaries(job: Job, teacher: Teacher) -> list[WantedOfLayer]:
    """The dictionaries that the settings require, layer by layer, whether they exist or not."""
    return [_wanted(job, teacher, layer, k) for layer in job.config.layer for k in job.config.k]


def _wanted(job, teacher, layer, k):
    config = job.config
    request: dict[str, Any] = {
        "algorithm": learning.ALGORITHM,
        "teacher": teacher.fingerprint,
        "layer": layer,
        "plan": job.plan.id,
        "k": k,
        "lam": config.lam,
        "tokens": config.dictionary_tokens,
        "epochs": config.dictionary_epochs,
        "seed": config.seed,
    }
    request |= InputFormat.of(config, teacher).settings()
    # Keys with their usual values are omitted, so that names stay.
    if (dtype := name_of_dtype(teacher)) != "float32":
        request["dtype"] = dtype
    request |= batch_key(minibatch_of_sample(job))
    if config.center != "none":
        request["center"] = config.center
    request |= atoms_key(config)
    if job.stored is not None:
        request["hidden"] = job.stored.store.target_id
    name = "-".join([f"{Path(teacher.name).name}-l{layer}-k{k}", *atoms_key(config).values()])
    return WantedOfLayer(
        named_by_content(config.output / "dictionaries", name, fingerprint(request)), k, layer, teacher.fingerprint
    )


def minibatch_of_sample(job: Job) -> int:
    """Vectors per minibatch, from the sample size that the plan leads to expect."""
    return minibatch_size(min(job.config.dictionary_tokens, job.planned_tokens))


def batch_key(batch: int) -> dict[str, int]:
    """The minibatch in the settings that name a dictionary; empty if it is the usual one."""
    return {} if batch == FIXED_BATCH else {"batch": batch}


def atoms_key(config: DictionaryConfig) -> dict[str, str]:
    """The kind of atoms in the settings that name a dictionary; empty if they are learned."""
    return {} if config.atoms == "learned" else {"atoms": config.atoms}


def _provide_from_file(config, hidden, progress):
    """Learn the dictionaries for vectors in a .npy file, without loading a teacher or a corpus. Returns their
    reports."""
    refuse_foreign_output(config.output)
    _refuse_settings_of_text(config)
    choose_device(config.device)  # refuses a device that does not exist
    stamp = file_stamp(hidden)
    progress("read vectors", 0, None)

    def check_unchanged():
        if file_stamp(hidden) != stamp:
            raise ValueError(
                f"{hidden} changed while it was read. Run the command again when nothing writes to it any more."
            )

    hidden_Nd = open_vectors(hidden)
    refuse_unusable(hidden_Nd, hidden)
    content = file_sha256(hidden)
    batch, reports = minibatch_size(len(hidden_Nd)), []
    for k in config.k:
        request = {
            "algorithm": learning.ALGORITHM,
            "content": content,
            "k": k,
            "lam": config.lam,
            "epochs": config.dictionary_epochs,
            "seed": config.seed,
            **batch_key(batch),
            **atoms_key(config),
        }
        name = "-".join([f"{hidden.stem}-k{k}", *atoms_key(config).values()])
        entry = Wanted(named_by_content(config.output / "dictionaries", name, fingerprint(request)), k)
        reports += _provide([entry], config, batch, progress, lambda _: [hidden_Nd], check_unchanged)
    return reports


def _refuse_settings_of_text(config):
    """Raise ValueError if a setting that does not apply to a file of vectors is set. Settings from a recipe are
    accepted, because recipes name text and teacher for other commands too."""
    for field in fields(config):
        value, is_given = getattr(config, field.name), config.origins.get(field.name, "flag") == "flag"
        if field.name not in OF_VECTORS and is_given and value != field.default:
            flag = field.name.replace("_", "-")
            raise ValueError(
                f"--{flag} applies only when a teacher reads text, but --hidden {config.hidden} is a file of vectors. "
                f"Omit --{flag}."
            )


def _provide(wanted, config, batch, progress, make_vectors, check_vectors=silent):
    """Reports of dictionaries; those that do not exist yet are learned now, from one pass of the teacher.

    batch          vectors of a minibatch
    make_vectors   function from (Wanted, its working directory) pairs to their training vectors
    check_vectors  raises ValueError when the vectors are no longer those that the directories are named by
    """
    lacking = [entry for entry in wanted if not entry.directory.is_dir()]
    for entry in lacking:
        check_memory(entry.k, config)
    with ExitStack() as held:
        places = [
            (entry, held.enter_context(workplace(working_directory(entry.directory), WORK_FILES))) for entry in lacking
        ]
        # Another process may have finished some before this one had their locks.
        places = [(entry, place) for entry, place in places if not entry.directory.is_dir()]
        vectors = make_vectors(places) if places else []
        for (entry, place), hidden_Nd in zip(places, vectors, strict=True):
            progress("start dictionary", 0, None)
            found = learn(
                hidden_Nd,
                DictionarySettings(entry.k, config.lam, config.seed, atoms=config.atoms),
                LearningSchedule(config.dictionary_epochs, batch),
                device=config.device,
                checkpoint=place,
                progress=progress,
            )
            try:
                check_vectors()
            except ValueError:
                forget(place)  # partly learned from other vectors
                raise
            if config.center != "none":
                found = replace(found, center=Center.load(place))
            if isinstance(entry, WantedOfLayer):
                found = replace(found, settings=found.settings | {"teacher": entry.teacher, "layer": entry.layer})
            found.save(entry.directory)
    learned, reports = [entry for entry, _ in places], []
    for entry in wanted:
        discard(working_directory(entry.directory))
        about = {"dictionary": str(entry.directory), "finished_before": entry not in learned}
        reports.append(Dictionary.load(entry.directory).report() | about)
    return reports


def check_memory(k: int, config: DictionaryConfig) -> None:
    """Raise EncodeError if this machine has too little memory to learn k atoms on its CPU: learning would fail only
    when the sample is complete."""
    if config.atoms != "learned" or choose_device(config.device).type != "cpu":
        return
    memory, needed = available_memory(), LEARNING_BYTES * k**2
    if needed > memory:
        raise EncodeError(
            f"--k {k}: learning so many atoms on a CPU takes about {needed / 1e9:,.1f} GB of memory, but this process "
            f"may use {memory / 1e9:,.1f} GB, enough for at most --k {int((memory / LEARNING_BYTES) ** 0.5)}. Use a "
            "smaller --k, or a machine with more memory."
        )


def _announce(directory):
    """Log that a new dictionary means a new store, if others were learned for the same teacher, layer and k."""
    name = directory.name.rpartition("-")[0]
    others = sorted(path for path in directory.parent.glob(f"{name}-*") if path.name.rpartition("-")[0] == name)
    if others:
        logger.info(
            "learning a new dictionary for this corpus and these settings, so this is a new store; --dictionary %s, "
            "instead of options that say how one is learned, would add to the store of an earlier one",
            others[-1],
        )


def load_dictionary(config: EncodeConfig, source: str | Path, teacher: Teacher) -> Dictionary:
    """The dictionary of a directory, to code hidden states of the teacher with.

    Raises  DictionaryError; EncodeError when its width or its centring does not fit; TeacherError; StoreError when a
            store's copy is not the one that the store's target names: it would silently start a new store
    """
    directory = Path(source)
    dictionary = Dictionary.load(directory)
    files = StoreFiles(directory.absolute().parent)
    if directory.name == files.dictionary.name and files.target_file.is_file():
        copies.check_dictionary(files, dictionary.fingerprint)
    width = dictionary.atoms_Kd.shape[1]
    if width != teacher.hidden_size:
        raise EncodeError(
            f"{source}: atoms of width {width}, but {teacher.name} has hidden "
            f"states of width {teacher.hidden_size}. Learn one for this teacher: {program()} learn-dictionary"
        )
    if config.dictionary is not None:
        if config.k is not None and tuple(config.k) != (len(dictionary.atoms_Kd),):
            raise EncodeError(
                f"--k {' '.join(map(str, config.k))}, but the dictionary {source} has {len(dictionary.atoms_Kd):,} "
                f"atoms. Omit --k, or learn another dictionary: {program()} learn-dictionary"
            )
        _refuse_settings_of_learning(config)
        _warn_of_other_origin(config, dictionary, teacher)
    is_given = config.center != "none" or config.origins.get("center") == "flag"
    if is_given and config.center != dictionary.centering:
        raise EncodeError(
            f"--center {config.center}, but {source} was learned with --center {dictionary.centering}, and hidden "
            "states must be centred for coding as they were for learning. Omit --center, or learn another dictionary."
        )
    if dictionary.centering != config.center:
        logger.info(
            "hidden states are centred as they were for learning the dictionary: --center %s", dictionary.centering
        )
    if config.hidden is not None and dictionary.centering != "none":
        raise EncodeError(
            f"{source} was learned with --center {dictionary.centering}, which needs hidden states of their own "
            "length, but --hidden names rows of unit length. Learn another dictionary, or encode without --hidden."
        )
    if dictionary.centering == "position":
        check_position_means(teacher.name)
    # A solver that gives all weight to one atom has nothing to divide.
    near, largest = count_near(dictionary.atoms_Kd) if config.solver != "nearest" else (0, 0.0)
    if near:
        mend = f"Learning replaces such atoms: {program()} learn-dictionary"
        if dictionary.settings.get("atoms", "learned") == "learned" and "largest_cosine" in dictionary.best:
            mend = "Learning could not replace them, because the hidden states are too similar"
            can_centre = dictionary.center is None and config.hidden is None
            mend += f". Subtract their mean: {program()} learn-dictionary --center mean" * can_centre
        warnings.warn(
            f"{source}: {near:,} of {len(dictionary.atoms_Kd):,} atoms have a cosine above {NEAR} with another one, at "
            f"most {largest:.4f}. How a code divides its weight between them is arbitrary within --tolerance. {mend}",
            stacklevel=2,
        )
    return dictionary


def _refuse_settings_of_learning(config):
    """Raise EncodeError if a flag says how to learn a dictionary although one is given."""
    for name in OF_LEARNING:
        if config.origins.get(name) == "flag":
            raise EncodeError(
                f"--{name.replace('_', '-')} says how a dictionary is learned, but --dictionary {config.dictionary} "
                "is learned already. Omit one of them."
            )


def _warn_of_other_origin(config, dictionary, teacher):
    """Warn if a dictionary was learned from another teacher or layer; vectors of a file have none."""
    (layer,), learned = config.layer, dictionary.settings
    if learned.get("layer", layer) != layer:
        wanted = f"--layer {learned['layer']}" if config.hidden is None else "a --hidden store of that layer"
        warnings.warn(
            f"the dictionary was learned from layer {learned['layer']}, but codes hidden states of layer {layer}. If "
            f"that is not what you want, pass {wanted}",
            stacklevel=3,
        )
    elif learned.get("teacher", teacher.fingerprint) != teacher.fingerprint:
        warnings.warn(
            f"the dictionary was learned from another teacher ({learned['teacher'][:12]}) than {teacher.name} "
            f"({teacher.fingerprint[:12]})",
            stacklevel=3,
        )


# -- codebooks ---------------------------------------------------------------------------------------------


def check_bytes(config: EncodeHiddenConfig, teacher: Teacher) -> None:
    """Raise EncodeError if the teacher's hidden states cannot be cut into as many pieces as --bytes."""
    if config.quantise == "pq" and teacher.hidden_size % config.bytes:
        raise EncodeError(
            f"--bytes {config.bytes} does not divide the {teacher.hidden_size} values of a hidden state of "
            f"{teacher.name}. Use another of 16, 32 and 64, or --quantise int8."
        )


def provide_codebook(executor: Executor, teacher: Teacher, layer: int) -> Codebook | None:
    """The Codebook that the settings ask for; None for --quantise int8.

    Raises  EncodeError when it does not fit the teacher, or the sample is too small
    """
    job, config = executor.job, executor.job.config
    if config.quantise == "int8":
        return None
    if config.codebook is not None:
        return _load_codebook(config, teacher)
    request: dict[str, Any] = {
        "teacher": teacher.fingerprint,
        "layer": layer,
        "plan": job.plan.id,
        "bytes": config.bytes,
        "tokens": config.dictionary_tokens,
        "seed": config.seed,
        "dtype": name_of_dtype(teacher),
    } | InputFormat.of(config, teacher).settings()
    if job.stored is not None:
        request["hidden"] = job.stored.store.target_id
    name = f"{Path(teacher.name).name}-l{layer}-pq{config.bytes}"
    directory = named_by_content(config.output / "codebooks", name, fingerprint(request))
    work = working_directory(directory)
    if not directory.is_dir():
        with workplace(work, (SAMPLE, f"{PART}*.npy")) as place:
            if not directory.is_dir():  # another process may have finished before this one had the lock
                (hidden_Nd,) = sample_hidden(executor, teacher, [(layer, place)])
                publish_directory(directory, Codebook.train(hidden_Nd, config.bytes, config.seed).save)
    discard(work)
    return Codebook.load(directory)


def _load_codebook(config, teacher):
    codebook = Codebook.load(config.codebook)
    files = StoreFiles(Path(config.codebook).absolute().parent)
    if Path(config.codebook).name == files.codebook.name and files.target_file.is_file():
        copies.read_codebook(files)  # the copy of a store, which may be damaged
    pieces, _, length = codebook.centroids.shape
    if (pieces, pieces * length) != (config.bytes, teacher.hidden_size):
        raise EncodeError(
            f"--codebook {config.codebook} quantises {pieces * length} values to {pieces} bytes, but --bytes is "
            f"{config.bytes} and {teacher.name} has hidden states of {teacher.hidden_size} values."
        )
    return codebook
