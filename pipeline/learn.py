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
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from pipeline import plan as planning
from pipeline.coder import SOME_WINDOWS, EncodeError, describe, hidden_rows, may_be_the_texts_fault
from pipeline.config import LearnConfig
from pipeline.corpus import silent
from pipeline.files import growing_rows
from pipeline.job import helped, load_teacher, named_by_content, refuse_foreign_output, require_gpu_solver, teacher_job
from shards.manifest import fingerprint

SAMPLE = "sample.npy"
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
    learned = _learn_together(lacking, job.config, job.progress, partial(sample_hidden, job, teacher))
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
    if (dtype := str(teacher.dtype).removeprefix("torch.")) != "float32":  # dictionaries of before it counted have none
        request["dtype"] = dtype
    name = f"{Path(teacher.name).name}-l{layer}-k{k}"
    return Wanted(named_by_content(config.output / "dictionaries", name, fingerprint(request)), k, layer)


def _dictionaries_of_file(config, progress):
    """Reports of the dictionaries of the vectors in a .npy file; no teacher and no corpus is loaded."""
    from pipeline.device import choose_device
    from pipeline.training_vectors import file_digest, file_stamp, open_vectors, refuse_unusable

    refuse_foreign_output(config.output)
    if (config.teacher, config.corpus) != (LearnConfig.teacher, LearnConfig.corpus):
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
    reports = []
    for k in config.k:
        request = {
            "content": content,
            "k": k,
            "lam": config.lam,
            "epochs": config.dictionary_epochs,
            "seed": config.seed,
        }
        name = f"{config.hidden.stem}-k{k}"
        entry = Wanted(named_by_content(config.output / "dictionaries", name, fingerprint(request)), k)
        lacking = [] if entry.directory.is_dir() else [entry]
        learned = _learn_together(lacking, config, progress, lambda _: [hidden_Nd], check_unchanged)
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


def _learn_together(lacking, config, progress, make_vectors, check_vectors=silent):
    """Learn dictionaries that share a pass of the teacher.

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
            _learn(config, entry.k, hidden_Nd, place, progress, check_vectors).save(entry.directory)
    return [entry for entry, _ in places]


def _learn(config, k, hidden_Nd, place, progress, check_vectors):
    from pipeline.dictionary import learn_dictionary as learn
    from pipeline.learning_checkpoint import forget

    found = learn(
        hidden_Nd,
        k,
        config.lam,
        seed=config.seed,
        epochs=config.dictionary_epochs,
        device=config.device,
        checkpoint=place,
        progress=progress,
    )
    try:
        check_vectors()
    except ValueError:
        forget(place)  # learned in part from other vectors
        raise
    return found


def _announce(directory):
    """Say that a new dictionary means a new store, when others were learned for the same teacher, layer and k."""
    others = sorted(directory.parent.glob(directory.name.rpartition("-")[0] + "-*"))
    if others:
        logger.info(
            "learning a new dictionary for this corpus and these settings, hence a new store; "
            "--dictionary %s would add to the store of an earlier one",
            others[-1],
        )


# -- the sample --------------------------------------------------------------------------------------------


def sample_hidden(job, teacher, places):
    """Unit-length hidden states of a uniform sample of training windows: one float16 (N, d) map for every place.

    They go to sample.npy in each place batch by batch; the file appears when it is complete, and one that is there
    already is used. Places of one layer share its file.

    places  pairs (Wanted, directory)
    """
    file_of = {entry.layer: place / SAMPLE for entry, place in places}
    file_of |= {entry.layer: place / SAMPLE for entry, place in places if (place / SAMPLE).is_file()}
    new = {layer: path for layer, path in file_of.items() if not path.is_file()}
    if new:
        windows, count = _chosen_windows(job, max(entry.k for entry, _ in places))
        _write_samples(new, job, teacher, windows, count)
    for entry, place in places:
        if not (place / SAMPLE).is_file():
            (place / SAMPLE).hardlink_to(file_of[entry.layer])
    return [np.load(place / SAMPLE, mmap_mode="r") for _, place in places]


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
    batch, shape = max(1, job.config.batch_tokens // job.config.max_length), (count, teacher.hidden_size)
    batches, layers = [windows[i : i + batch] for i in range(0, len(windows), batch)], tuple(path_of)
    with ExitStack() as files:
        add = {layer: files.enter_context(growing_rows(path, shape, np.float16)) for layer, path in path_of.items()}
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

    Returns  list of (n, d) float32, one for a layer
    Raises   EncodeError when it fails at most of them
    """
    batch, found = max(1, job.config.batch_tokens // job.config.max_length), []
    if not windows:
        return [np.zeros((0, teacher.hidden_size), np.float32)] * len(layers)
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
        rows, _ = hidden_rows(teacher, windows, batch, job.config.max_length, job.special_ids, layers)
        return [(rows_nd, 0) for rows_nd in rows]
    except Exception as error:
        if not may_be_the_texts_fault(error):
            raise
        if len(layers) > 1:  # it may be the fault of one, and the others' samples must not know of that one
            return [_usable_rows(job, teacher, (layer,), windows, batch)[0] for layer in layers]
        if len(windows) == 1:
            logger.warning("a window is left out of the dictionary's sample: %s", describe(error))
            return [(np.zeros((0, teacher.hidden_size), np.float32), 1)]
    half = len(windows) // 2
    parts = [_usable_rows(job, teacher, layers, part, batch)[0] for part in (windows[:half], windows[half:])]
    return [(np.concatenate([rows_nd for rows_nd, _ in parts]), sum(failing for _, failing in parts))]
