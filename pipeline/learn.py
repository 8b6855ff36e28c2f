"""Which dictionaries a command needs, and their learning where they are not there yet.

    for report in dictionaries(job, teacher):   # one for every layer and k of the settings
        report["dictionary"], report["layer"], report["finished_before"]

All that are lacking are sampled in one pass of the teacher, then learned one after the other. A dictionary's
directory is named by what it is learned from; its work lies in a hidden directory beside it until it is finished, so
that an interruption costs at most a minute of learning. Left out: the learning itself (dictionary.py).

Shapes: N vectors, d hidden width.
"""

import logging
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from common.errors import EncodeError
from common.invocation import program
from common.progress import silent
from pipeline import plan as planning
from pipeline.centering import Center, HiddenSums
from pipeline.coder import SOME_WINDOWS, Reading, describe, hidden_rows, may_be_the_texts_fault
from pipeline.config import LearnConfig
from pipeline.files import growing_rows
from pipeline.job import helped, load_teacher, named_by_content, refuse_foreign_output, require_gpu_solver, teacher_job
from shards import copies
from shards.manifest import StoreFiles, fingerprint

SAMPLE, RAW_SAMPLE = "sample.npy", "raw.npy"
ROWS_AT_ONCE = 65_536
ALWAYS_BEFORE = 2048  # vectors of a minibatch
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A dictionary that the settings ask for."""

    directory: Path
    k: int
    layer: int | None = None

    @property
    def work(self):
        """Where its sample and checkpoints are until it is learned, whatever the name of what it is learned from."""
        return self.directory.with_name(f".{self.directory.name.rpartition('-')[2]}.learning")


def learn_dictionary(config, progress=silent):
    """Learn, or find, the dictionary of every layer and k of the settings, or those of the file config.hidden.

    Returns  list of report dicts: directory, finished_before, the figures of its atoms
    Raises   as encode_lsp, DictionaryError; ValueError on a file that cannot be used or changes meanwhile
    """
    if config.hidden is not None:
        return _dictionaries_of_file(config, progress)
    job = teacher_job(config, progress)
    with helped(job):
        return dictionaries(job, load_teacher(job))


def dictionaries(job, teacher):
    """Reports of the dictionaries that the settings ask for, layer by layer; learned now where they are not there."""
    wanted = wanted_dictionaries(job, teacher)
    lacking = [entry for entry in wanted if not entry.directory.is_dir()]
    for entry in lacking:
        _announce(entry.directory)
    sample = partial(sample_hidden, job, teacher)
    learned = _learn_together(lacking, job.config, minibatch_of_sample(job), job.progress, sample)
    return [_report(entry, learned) | {"layer": entry.layer} for entry in wanted]


def wanted_dictionaries(job, teacher):
    """The dictionaries that the settings ask for, layer by layer, whether they are there or not."""
    return [_wanted(job, teacher, layer, k) for layer in job.config.layer for k in job.config.k]


def _wanted(job, teacher, layer, k):
    config = job.config
    request = {
        "teacher": teacher.fingerprint,
        "layer": layer,
        "plan": job.plan.id,
        "k": k,
        "lam": config.lam,
        "tokens": config.dictionary_tokens,
        "epochs": config.dictionary_epochs,
        "seed": config.seed,
    }
    request |= Reading.of(config, teacher).settings()
    if (dtype := str(teacher.dtype).removeprefix("torch.")) != "float32":  # dictionaries of before it counted have none
        request["dtype"] = dtype
    request |= batch_key(minibatch_of_sample(job))
    if config.center != "none":  # nor have those that are not centred
        request["center"] = config.center
    name = f"{Path(teacher.name).name}-l{layer}-k{k}"
    return Wanted(named_by_content(config.output / "dictionaries", name, fingerprint(request)), k, layer)


def minibatch_of_sample(job):
    """Vectors of a minibatch, as the settings say or by the size of the sample, so far as the plan tells it."""
    from pipeline.dictionary import minibatch_size

    return job.config.dictionary_batch or minibatch_size(min(job.config.dictionary_tokens, job.expected_tokens))


def batch_key(batch):
    """The minibatch as part of what names a dictionary: not when it is what it was before it could be chosen."""
    return {} if batch == ALWAYS_BEFORE else {"batch": batch}


def _dictionaries_of_file(config, progress):
    """Reports of the dictionaries of the vectors in a .npy file; no teacher and no corpus is loaded."""
    from common.device import choose_device
    from pipeline.dictionary import minibatch_size
    from pipeline.training_vectors import file_digest, file_stamp, open_vectors, refuse_unusable

    refuse_foreign_output(config.output)
    if config.teacher is not None or config.corpus != LearnConfig.corpus:
        logger.info("learning from %s: the settings of teacher, layer and corpus are not used", config.hidden)
    if choose_device(config.device).type == "cuda":
        require_gpu_solver()
    stamp = file_stamp(config.hidden)

    def check_unchanged():
        if file_stamp(config.hidden) != stamp:
            raise ValueError(
                f"{config.hidden} changed while it was read. Run the command again once nobody writes to it."
            )

    hidden_Nd = open_vectors(config.hidden)
    refuse_unusable(hidden_Nd, config.hidden)
    content = file_digest(config.hidden)
    batch, reports = config.dictionary_batch or minibatch_size(len(hidden_Nd)), []
    for k in config.k:
        request = {
            "content": content,
            "k": k,
            "lam": config.lam,
            "epochs": config.dictionary_epochs,
            "seed": config.seed,
            **batch_key(batch),
        }
        name = f"{config.hidden.stem}-k{k}"
        entry = Wanted(named_by_content(config.output / "dictionaries", name, fingerprint(request)), k)
        lacking = [] if entry.directory.is_dir() else [entry]
        learned = _learn_together(lacking, config, batch, progress, lambda _: [hidden_Nd], check_unchanged)
        reports.append(_report(entry, learned))
    return reports


def _report(entry, learned):
    from pipeline.dictionary import Dictionary
    from pipeline.learning_checkpoint import discard

    discard(entry.work)
    return Dictionary.load(entry.directory).report() | {
        "dictionary": str(entry.directory),
        "finished_before": entry not in learned,
    }


def _learn_together(lacking, config, batch, progress, make_vectors, check_vectors=silent):
    """Learn dictionaries that share a pass of the teacher.

    batch          vectors of a minibatch
    make_vectors   function from (Wanted, its working directory) pairs to their training vectors
    check_vectors  raises when they are no longer what the names of the directories say
    Returns        those that were learned; another process may have finished the rest before their places were ours
    """
    from pipeline.learning_checkpoint import workplace

    with ExitStack() as held:
        places = [(entry, held.enter_context(workplace(entry.work))) for entry in lacking]
        places = [(entry, place) for entry, place in places if not entry.directory.is_dir()]
        vectors = make_vectors(places) if places else []
        for (entry, place), hidden_Nd in zip(places, vectors, strict=True):
            _learn(config, entry.k, batch, hidden_Nd, place, progress, check_vectors).save(entry.directory)
    return [entry for entry, _ in places]


def _learn(config, k, batch, hidden_Nd, place, progress, check_vectors):
    from pipeline.dictionary import learn_dictionary as learn
    from pipeline.learning_checkpoint import forget

    found = learn(
        hidden_Nd,
        k,
        config.lam,
        seed=config.seed,
        epochs=config.dictionary_epochs,
        batch=batch,
        device=config.device,
        checkpoint=place,
        progress=progress,
    )
    try:
        check_vectors()
    except ValueError:
        forget(place)  # learned in part from other vectors
        raise
    return found if config.center == "none" else replace(found, center=Center.load(place))


def _announce(directory):
    """Say that a new dictionary means a new store, when others were learned for the same teacher, layer and k."""
    others = sorted(directory.parent.glob(directory.name.rpartition("-")[0] + "-*"))
    if others:
        logger.info(
            "learning a new dictionary for this corpus and these settings, hence a new store; "
            "--dictionary %s would add to the store of an earlier one",
            others[-1],
        )


def load_dictionary(config, source, teacher):
    """The dictionary of a directory, to code hidden states of the teacher with.

    Raises  DictionaryError; EncodeError when its width or its centring does not fit; TeacherError
    """
    from pipeline.dictionary import Dictionary
    from pipeline.teacher import check_position_means

    dictionary = Dictionary.load(Path(source))
    _check_dictionary_of_a_store(Path(source), dictionary)
    width = dictionary.atoms_Kd.shape[1]
    if width != teacher.hidden_size:
        raise EncodeError(
            f"{source}: atoms of width {width}, but {teacher.name} has hidden "
            f"states of width {teacher.hidden_size}. Learn one for this teacher: {program()} learn-dictionary"
        )
    if config.center not in ("none", dictionary.centering):
        raise EncodeError(
            f"--center {config.center}, but {source} was learned with --center {dictionary.centering}, and hidden "
            "states must be coded as they were learned from. Leave --center out, or learn another dictionary."
        )
    if dictionary.centering != config.center:
        logger.info("hidden states are centred as those of the dictionary: --center %s", dictionary.centering)
    if dictionary.centering == "position":
        check_position_means(teacher.name)
    return dictionary


def _check_dictionary_of_a_store(directory, dictionary):
    """Raise StoreError when a dictionary is taken from a store whose target names another: some other atoms have got
    there, and what they encode would silently be a new store."""
    files = StoreFiles(directory.absolute().parent)
    if directory.name == files.dictionary.name and files.target_file.is_file():
        copies.check_dictionary(files, dictionary.fingerprint)


# -- the sample --------------------------------------------------------------------------------------------


def sample_hidden(job, teacher, places):
    """Unit-length hidden states of a uniform sample of training windows: one float16 (N, d) map for every place.

    They go to sample.npy in each place batch by batch; the file appears when it is complete, and one that is there
    already is used. Places of one layer share its file. With --center they come as the teacher gives them to raw.npy
    first, in float32 with their positions; then the means are taken, and sample.npy and center.npy follow from both.

    places  pairs (Wanted, directory)
    """
    centred = job.config.center != "none"
    place_of = {entry.layer: place for entry, place in places}
    place_of |= {entry.layer: place for entry, place in places if (place / SAMPLE).is_file()}
    first = RAW_SAMPLE if centred else SAMPLE
    new = {layer: place / first for layer, place in place_of.items()
           if not (place / SAMPLE).is_file() and not (place / first).is_file()}  # fmt: skip
    if new:
        windows, count = _chosen_windows(job, max(entry.k for entry, _ in places))
        _write_samples(new, job, teacher, windows, count)
    for place in place_of.values():
        if not (place / SAMPLE).is_file():
            _center_sample(place, job.config.center)
    names = (SAMPLE, "center.npy", "center.json") if centred else (SAMPLE,)
    for entry, place in places:
        for name in names:
            if not (place / name).is_file():
                (place / name).hardlink_to(place_of[entry.layer] / name)
    return [np.load(place / SAMPLE, mmap_mode="r") for _, place in places]


def _center_sample(place, kind):
    """raw.npy of a place to center.npy, center.json and, last, sample.npy."""
    raw_N = np.load(place / RAW_SAMPLE, mmap_mode="r")
    shape, starts = raw_N["row"].shape, range(0, len(raw_N), ROWS_AT_ONCE)
    sums = HiddenSums(shape[1])
    for start in starts:
        rows_n = raw_N[start : start + ROWS_AT_ONCE]
        sums.add(rows_n["position"], rows_n["row"])
    center = sums.center(kind)
    center.save(place)
    with growing_rows(place / SAMPLE, shape, np.float16) as add:
        for start in starts:
            rows_n = raw_N[start : start + ROWS_AT_ONCE]
            rows_nd = center.subtracted(rows_n["row"], rows_n["position"])
            add(rows_nd / np.maximum(np.linalg.norm(rows_nd, axis=1, keepdims=True), 1e-12))
    (place / RAW_SAMPLE).unlink()


def sample_dtype(job, teacher):
    """Of the rows that a sample is made of: with --center a raw one and its position."""
    if job.config.center == "none":
        return np.dtype((np.float16, (teacher.hidden_size,)))
    return np.dtype([("position", "<i4"), ("row", "<f4", (teacher.hidden_size,))])


def _chosen_windows(job, k):
    """The windows of the sample, and how many vectors it shall have."""
    config = job.config
    if job.crew:
        windows = job.crew.sample_windows(config.dictionary_tokens, config.seed)
    else:
        windows = planning.sample_windows(job.plan, job.windows, config.dictionary_tokens, config.seed)
    job.check_sources()
    special = job.special_ids["all"]
    count = min(config.dictionary_tokens, sum(int((~np.isin(window.ids, special)).sum()) for window in windows))
    if count <= k:
        raise EncodeError(
            f"--k {k} atoms need more training vectors than that, but the sample has "
            f"{count:,}. Use a smaller --k, more text or more --dictionary-tokens."
        )
    return windows, count


def _write_samples(path_of, job, teacher, windows, count):
    """Write the sample of every layer in one pass of the teacher."""
    batch, dtype = max(1, job.config.batch_tokens // job.config.max_length), sample_dtype(job, teacher)
    shape = (count, *dtype.shape)
    batches, layers = [windows[i : i + batch] for i in range(0, len(windows), batch)], tuple(path_of)
    with ExitStack() as files:
        add = {layer: files.enter_context(growing_rows(path, shape, dtype.base)) for layer, path in path_of.items()}
        done = dict.fromkeys(path_of, 0)
        if job.crew:
            found = job.crew.hidden_rows(teacher, batches, layers, next(iter(path_of.values())).parent)
        else:
            found = (rows_of_batch(job, teacher, layers, windows) for windows in batches)
        for rows in files.enter_context(closing(found)):
            for layer, rows_nd in zip(layers, rows, strict=True):
                rows_nd = rows_nd[: count - done[layer]]
                done[layer] += len(rows_nd)
                add[layer](rows_nd)
            job.progress("sample", max(done.values()), count)


def rows_of_batch(job, teacher, layers, windows):
    """Hidden states of the windows of one forward pass, those left out at which the teacher fails.

    Returns  list of (n, d) float32, one for a layer; with --center list of (n) records as `sample_dtype` has them
    Raises   EncodeError when it fails at most of them
    """
    batch, found = max(1, job.config.batch_tokens // job.config.max_length), []
    if not windows:
        return [_no_rows(job, teacher)] * len(layers)
    for layer, (rows_nd, failing) in zip(layers, _usable_rows(job, teacher, layers, windows, batch), strict=True):
        if failing > max(SOME_WINDOWS, len(windows) // 2):
            raise EncodeError(f"{teacher.name}, layer {layer}, fails at most of a batch; see the log")
        found.append(rows_nd)
    return found


def _usable_rows(job, teacher, layers, windows, batch):
    """For every layer, hidden states of the windows at which the teacher does not fail, and at how many it does.

    These are found by halving.
    """
    try:
        reading = Reading.of(job.config, teacher)
        raw = job.config.center != "none"
        rows, _ = hidden_rows(teacher, windows, batch, job.config.max_length, job.special_ids, layers, reading, raw)
        return [(_recorded(found, sample_dtype(job, teacher)) if raw else found, 0) for found in rows]
    except Exception as error:
        if not may_be_the_texts_fault(error):
            raise
        if len(layers) > 1:  # it may be the fault of one, and the others' samples must not know of that one
            return [_usable_rows(job, teacher, (layer,), windows, batch)[0] for layer in layers]
        if len(windows) == 1:
            logger.warning("a window is left out of the dictionary's sample: %s", describe(error))
            return [(_no_rows(job, teacher), 1)]
    half = len(windows) // 2
    parts = [_usable_rows(job, teacher, layers, part, batch)[0] for part in (windows[:half], windows[half:])]
    return [(np.concatenate([rows_nd for rows_nd, _ in parts]), sum(failing for _, failing in parts))]


def _recorded(found, dtype):
    """HiddenRows as an array of records."""
    records_n = np.empty(len(found.rows_Nd), dtype)
    records_n["row"], records_n["position"] = found.rows_Nd, found.position_N
    return records_n


def _no_rows(job, teacher):
    dtype = sample_dtype(job, teacher)
    return np.zeros((0, *dtype.shape), np.float32 if dtype.shape else dtype)
