"""Estimate what an encoding will need before it starts: tokens, bytes, hours, disk space.

    estimate(job, coder, targets)               # --dry-run: measures for a few seconds; keeps nothing
    warn_of_disk(output, bytes)                 # before encoding: warns if it will probably not fit

The measurement does real work: windows from several places of the plan, none of them read before, go through the real
stages into temporary stores, whose bytes are counted. Missing dictionaries are learned from a few vectors and dropped
afterwards.
Not handled here: the encoding (encode.py).

Shapes: K atoms, N vectors, d hidden width.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.batch import InputFormat, hidden_rows
from pipeline.config import minibatch_size
from pipeline.corpus_summary import describe_corpus
from pipeline.dictionary import Dictionary, DictionarySettings, LearningSchedule, learn_dictionary
from pipeline.dictionary.centering import HiddenSums
from pipeline.dictionary.learning import CLUSTER_ITERATIONS
from pipeline.encode import make_coder, write_units
from pipeline.job import Job
from pipeline.learn import check_memory, minibatch_of_sample, wanted_dictionaries
from pipeline.plan import HELD_OUT_SHARE
from pipeline.sample import check_enough
from pipeline.stores import free_bytes
from pipeline.targets.lsp import Lsp
from pipeline.teacher import Teacher
from shards.files import StoreFiles
from shards.schema import BLOCK_TOKENS, ShardMeta
from shards.writer import UnitWriter

SECONDS = 10  # a measurement lasts at least this long, if there is enough text
PLACES = 4  # most places of the plan to measure: the speed differs between texts, and over time
FEWEST_WINDOWS = 64  # fewest windows per place, and for warming up
VECTORS_AN_ATOM = 8  # for a provisional dictionary, whose stores have about a tenth more bytes than those of a real one
SIZES = np.linspace(0.9, 1.1, 21)  # sizes of units relative to their mean
MEMBER_BYTES = 900  # of a column's tar header, array header and padding
IDS_COLUMNS, LSP_COLUMNS = 4, 9  # columns of a block


def estimate(job: Job, teacher: Any, targets: Sequence[Any]) -> dict:
    """Encode parts of the plan into temporary stores, one for every target, and extrapolate.

    targets  of one class of targets/
    Returns  dict that JSON can hold: units, tokens, bytes (of all stores), bytes_per_token (of one),
             tokens_per_second, slowest and fastest: the same of single parts, seconds, measured_tokens,
             teacher_seconds and solver_seconds a token, disk_free,
             kept (of stores with targets: entries kept and share of the mass that they hold, one pair for each store)
    Raises   CorpusError if no window can be cut from the text
    """
    coder = make_coder(teacher, targets, job)
    target_jsons = [target.describe_store(job)[1] for target in targets]
    parts = _measure(job, coder, target_jsons)
    train = [unit for unit in job.plan.units if unit.split == "train"]
    total, measured = job.tokens_by_sample(train), sum(records[0].tokens for records, _ in parts)
    if not measured:
        raise job.no_windows_error()
    # The teacher also reads the copies that fill up a unit's last batch.
    read = sum(_with_copies(records[0].windows, coder) for records, _ in parts)
    windows = total * sum(records[0].windows for records, _ in parts) / measured
    seconds = sum(seconds for _, seconds in parts) / read * _expected_windows(job.plan.units, windows, coder)
    of_stores = list(zip(*(records for records, _ in parts), strict=True))
    size = sum(_extrapolate_bytes(records, total, len(job.plan.units)) for records in of_stores)
    rates = [records[0].tokens / seconds for records, seconds in parts]
    busy = {
        name: sum(record.environment.get(name, 0.0) for records in of_stores for record in records) / measured
        for name in ("teacher_seconds", "solver_seconds")
    }
    return {
        "units": len(job.plan.units),
        "tokens": total,
        "bytes": size,
        "bytes_per_token": size / max(1, total) / len(targets),
        "tokens_per_second": total / seconds,
        "slowest": min(rates),
        "fastest": max(rates),
        "seconds": seconds,
        "measured_tokens": measured,
        "disk_free": free_bytes(job.config.output),
        "corpus": describe_corpus(job),
        "kept": [
            (target_json["settings"]["top_n"], _total(records, "kept_mass") / max(1, _total(records, "coded_tokens")))
            for target_json, records in zip(target_jsons, of_stores, strict=True)
            if "kept_mass" in records[0].statistics
        ],
        **busy,
    }


def _total(records, name):
    """The sum of one of the statistics of several records."""
    return sum(record.statistics[name] for record in records)


def _with_copies(windows, coder):
    """How many windows the teacher reads for a unit of so many."""
    full = math.floor(windows / coder.most_windows) * coder.most_windows
    return full + (coder.room_for(math.ceil(windows - full), coder.most_windows) if windows > full else 0)


def _expected_windows(units, windows, coder):
    """About how many windows the teacher reads for the units of a plan with this many, copies included."""
    found = 0.0
    for split, share in (("train", 1 - HELD_OUT_SHARE), ("held_out", HELD_OUT_SHARE)):
        if count := sum(unit.split == split for unit in units):
            of_unit = share * windows / count
            found += count * float(np.mean([_with_copies(of_unit * size, coder) for size in SIZES]))
    return found


def _extrapolate_bytes(records, tokens, units):
    """Bytes of a store of this size, from small stores; bytes per token, block and unit are counted separately."""
    blocks = [group["length"] for record in records for group in record.blocks]
    once_a_block = MEMBER_BYTES * (LSP_COLUMNS if "entries" in records[0].statistics else IDS_COLUMNS)
    per_token = (sum(blocks) - once_a_block * len(blocks)) / sum(record.tokens for record in records)
    once_a_unit = (sum(record.bytes for record in records) - sum(blocks)) / len(records)
    return round(tokens * (per_token + once_a_block / BLOCK_TOKENS) + units * once_a_unit)


def estimate_lsp(job: Job, teacher: Teacher, given: Dictionary | None) -> dict:
    """`estimate` for the LSP stores of the settings. The result also has the number of `lacking` dictionaries and the
    `learning_seconds` for them.

    given  the dictionary that the settings name, if they name one
    """
    config, targets = job.config, []
    wanted = [] if given else wanted_dictionaries(job, teacher)
    lacking = [entry for entry in wanted if not entry.directory.is_dir()]
    for entry in lacking:
        check_enough(entry.k, config.dictionary_tokens)
        check_memory(entry.k, config)
    if given:
        targets.append(Lsp(config, teacher, config.layer[0], given))
    seconds_a_vector = 0.0  # of one pass, for all dictionaries that are learned
    for entry in wanted:
        if entry in lacking:
            dictionary, seconds = _learn_provisional(job, teacher, entry)
            seconds_a_vector += seconds
        else:
            dictionary = Dictionary.load(entry.directory)
        targets.append(Lsp(config, teacher, entry.layer, dictionary))
    found = estimate(job, teacher, targets)
    tokens = min(config.dictionary_tokens, found["tokens"])
    learning = tokens * config.dictionary_epochs * seconds_a_vector
    if config.atoms == "clusters":
        learning = tokens * CLUSTER_ITERATIONS * len(lacking) / len(targets) * found["solver_seconds"]
    learning += tokens * found["teacher_seconds"] if lacking else 0
    return found | {"lacking": len(lacking), "learning_seconds": learning}


def _learn_provisional(job, teacher, entry):
    """A dictionary learned in one pass over a few vectors from the end of the plan, and the seconds that a pass of the
    real learning takes for each vector; 0 for controls.

    Much of a minibatch's time depends on k and d, not on its size, so a second pass with the real minibatches is
    measured. The dictionary itself needs more updates than these give from so few vectors.
    """
    config, parts, count = job.config, [], 0
    job.progress("try dictionary", 0, None)
    centred = config.center != "none"
    size, wanted = config.windows_at_once(), VECTORS_AN_ATOM * entry.k
    for unit in reversed(job.plan.units):
        windows = _readable_windows(job, unit)
        while count < wanted and (chunk := list(islice(windows, size))):
            form = InputFormat.of(config, teacher)
            (found,) = hidden_rows(
                teacher, chunk, size, config.max_length, job.special_ids, (entry.layer,), form, raw=centred
            )
            parts.append(found)
            count += len(found.rows_Nd if centred else found)
    if not parts:
        raise job.no_windows_error()
    center = None
    if centred:
        rows_Nd, position_N = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        sums = HiddenSums(teacher.hidden_size)
        sums.add(position_N, rows_Nd)
        center = sums.center(config.center, least_tokens=1)
        parts = [center.subtract_from(rows_Nd, position_N)]
    hidden_Nd = np.concatenate(parts)[:wanted]
    check_enough(entry.k, len(hidden_Nd))
    settings = DictionarySettings(entry.k, config.lam, config.seed, atoms=config.atoms)
    learn = partial(learn_dictionary, settings=settings, device=config.device)
    batch = minibatch_size(len(hidden_Nd))
    found, seconds = learn(hidden_Nd, schedule=LearningSchedule(1, batch)), 0.0  # it also compiles kernels
    if config.atoms == "learned":
        batch = minibatch_of_sample(job)
        few_Nd = hidden_Nd[: max(4 * batch, 2 * entry.k)]  # atoms start from as many vectors
        started = time.perf_counter()
        learn(few_Nd, schedule=LearningSchedule(1, batch))
        seconds = (time.perf_counter() - started) / len(few_Nd)
    return replace(found, center=center), seconds


def _readable_windows(job, unit):
    """The windows of a unit, without those of a store of hidden states that have none."""
    lacking = job.known_failures(unit)
    return (window for number, window in enumerate(job.windows(unit)) if number not in lacking)


def _measure(job, coder, target_jsons):
    """Encode windows from several places until that has lasted long enough.

    target_jsons  contents of the stores' target.json
    Returns       for each place the records of its windows, one for each store, and the seconds
    """
    train = [unit for unit in job.plan.units if unit.split == "train"]
    units = train[:: max(1, len(train) // PLACES)][:PLACES]
    job.progress("measure", 0, None)
    room = coder.most_windows
    count = -(-FEWEST_WINDOWS // room) * room  # full forward passes
    warm_up = _encode_some(job, coder, target_jsons, units[0], _readable_windows(job, units[0]), count)  # compiles
    tokens, most, found = 0, 0, [warm_up]
    unread = [(unit, _readable_windows(job, unit)) for unit in units]
    for _ in islice(unread[0][1], count):  # skip the windows of the warm-up
        pass
    while True:
        parts = []
        for unit, windows in unread:
            if (first := next(windows, None)) is not None:
                parts.append(_encode_some(job, coder, target_jsons, unit, chain([first], windows), count))
                job.progress("measure", tokens := tokens + parts[-1][0][0].tokens, None)
        read = [records[0].windows for records, _ in parts]
        if sum(read) > most:
            most, found = sum(read), parts
        if sum(read) < count * len(units) or sum(seconds for _, seconds in parts) >= SECONDS:
            return found
        count *= 2


def _encode_some(job, coder, target_jsons, unit, windows, count):
    """Encode the next windows of a unit into temporary stores. Returns their records, and the seconds."""
    with tempfile.TemporaryDirectory() as directory:
        opened = []
        for number, target_json in enumerate(target_jsons):
            files = StoreFiles(Path(directory) / str(number))
            files.units.mkdir(parents=True)
            opened.append(UnitWriter(files, ShardMeta.of_unit(target_json, unit.id)))
        began = time.perf_counter()
        written = write_units(
            [(unit, list(range(len(target_jsons))))],
            lambda unit: islice(windows, count),
            coder,
            job.config.max_length,
            lambda unit, output: opened[output],
        )
        for _ in written:
            pass
        return [writer.record for writer in opened], time.perf_counter() - began
