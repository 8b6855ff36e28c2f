"""Handle failures in coding text by passing over the same text again.

When a stage fails, it only marks the batch with the error. The stage `retry`, after the solver, codes it again:

- If the text may have caused the error, the batch is halved until the windows at which coding fails are found. They
  stay in place without entries, and the batch is coded once more without them. So its bytes follow only from the text
  and from which windows failed.
- If a GPU has too little memory for a batch, it is coded in smaller batches, and later batches have the smaller size
  too. The results are equal within tolerance, and the unit's record counts these batches (`out_of_memory`).
- Any other error, such as numbers too large for the precision, ends the run, because no document caused it.

Text may also kill the process. `find_killers` searches for such text in another way than `isolate`. `isolate` keeps the
results of parts that work, whereas a death leaves no result, costs the loading of a teacher and may be chance. Not
handled here: what happens to a document whose windows failed (encode.py names it in the record, stores.py limits how
many may fail).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mlsm.common.errors import EncodeError, PrecisionError, describe
from mlsm.common.proofs import lacks_memory
from pipeline.batch import UNIT_END, add_amounts

SOME_WINDOWS = 4  # so many may fail in any batch; otherwise at most half
# Parts of the messages of errors without a class of their own.
MACHINE_SIGNS = ("allocate memory", "ALLOC_FAILED", "CUDA error", "OUT_OF_MEMORY")
REASON = "kills the worker process"
MOST_KILLERS = 32  # most such windows per unit; each costs several workers
RANGES = 32  # into which a range of windows is cut; not two, because each death costs the loading of a teacher
TOO_LITTLE_MEMORY = (
    "Do they have too little memory? Give each more (fewer --workers on one machine), or use a smaller --batch-tokens."
)
logger = logging.getLogger(__name__)


def may_be_the_texts_fault(error: Exception) -> bool:
    """Whether an error may come from these windows, and not from disk, device, dtype or a lack of memory."""
    machine = isinstance(error, OSError | PrecisionError) or lacks_memory(error)
    return not machine and not any(sign in str(error) for sign in MACHINE_SIGNS)


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the memory of a GPU is full."""
    return lacks_memory(error) and not isinstance(error, MemoryError)


def isolate(windows: Sequence | np.ndarray, attempt: Callable) -> Iterator[tuple]:
    """Try windows together and, if that fails, each half of them, down to single ones.

    attempt  function of some of the windows
    Yields   (windows, result, None) of a part that works, (window alone in a list or array, None, error) of one that
             fails; in the order of the windows
    Raises   an error that is not the text's fault
    """
    try:
        result = attempt(windows)
    except Exception as error:
        if not may_be_the_texts_fault(error):
            raise
        if len(windows) == 1:
            yield windows, None, error
            return
    else:
        yield windows, result, None
        return
    half = len(windows) // 2
    yield from isolate(windows[:half], attempt)
    yield from isolate(windows[half:], attempt)


def retry(coder: Any, batches: Iterable) -> Iterator:
    """The batches of a Coder, each with its codes: batches that a stage marked or skipped are coded here."""
    for batch in batches:
        if batch is UNIT_END or batch.idle or batch.codes is not None:
            yield batch
            continue
        try:
            retried = None if batch.error is None else _code_without_failing(coder, batch)
        except Exception as error:
            if len(batch.ids_WL) == 1 or not ran_out_of_memory(error):
                raise
            _note_lack_of_memory(coder, batch)
            retried = None
        if retried is not None:
            yield retried
            continue
        batch.hidden = batch.codes = batch.error = None  # their memory is needed
        yield from retry(coder, coder.code(coder.teach(_divide(coder, batch))))


def _code_without_failing(coder, batch):
    """The batch coded without the windows at which its coding fails, which its block notes.

    Raises the error if it is not the text's fault, for example because most windows fail
    """
    error, failing, tried = batch.error, {}, batch.not_known_to_fail()
    if not may_be_the_texts_fault(error):
        raise error

    def attempt(windows):
        coder.code_again(batch.only(windows))  # drop these codes: the bytes must not depend on the halving

    for windows, _, reason in isolate(np.array(tried), attempt):
        if reason is not None:
            failing[int(windows[0])] = describe(reason)
        if len(failing) > max(SOME_WINDOWS, batch.windows // 2):
            raise error
    if not failing:
        logger.warning("a batch failed once but not when repeated: %s", describe(error))
    batch.block.failed |= {batch.first + window: reason for window, reason in failing.items()}
    whole = [window for window in tried if window not in failing]
    if not whole:
        return replace(batch, coded_T=np.zeros_like(batch.coded_T), codes=None, hidden=None, marks={})
    batch.error = None
    return coder.code_again(batch.only(whole) if failing else batch)


def _note_lack_of_memory(coder, batch):
    size = len(batch.ids_WL)  # with the copies
    coder.most_windows = min(coder.most_windows, -(-size // 2))
    add_amounts(batch.block.statistics, {"out_of_memory": 1})
    logger.warning(
        "the device has too little memory for %d windows at once: continuing with %d", size, coder.most_windows
    )
    torch.cuda.empty_cache()  # does nothing without a GPU


def _divide(coder, batch):
    """Split a batch into batches of the size that last fitted into the device's memory."""
    size, stop = coder.most_windows, batch.first + batch.windows
    batch.block.batches += -(-batch.windows // size) - 1
    for start in range(batch.first, stop, size):
        compared = batch.compared and start == batch.first
        yield coder.cut(batch.blocks, start, min(start + size, stop), size, compared)


# -- text that kills the process ---------------------------------------------------------------------------


def find_killers(survives: Callable[[int, int, int], bool], count: int, progress: Callable[..., None]) -> list[int]:
    """Numbers of the windows at which workers die, among the first `count`, which killed a worker together.

    survives  function of (first, stop, trials): whether a worker survives this range in at least one of the trials. A
              single window must kill twice, as the first death may have been chance
    progress  called as progress("search", windows, of how many, unit="windows", found=how many killers)
    Raises    EncodeError when workers die without any text, or at more than MOST_KILLERS windows
    """
    if not survives(0, 0, 2):
        raise EncodeError(f"workers crash before they encode any text. {TOO_LITTLE_MEMORY}")
    found: list[int] = []

    def search(first, stop):
        step = max(1, -(-(stop - first) // RANGES))
        for begin in range(first, stop, step):
            end = min(begin + step, stop)
            progress("search", begin, stop, unit="windows", found=len(found))
            if survives(begin, end, 2 if step == 1 else 1):
                continue
            if step > 1:
                search(begin, end)
                continue
            found.append(begin)
            if len(found) > MOST_KILLERS:
                raise EncodeError(
                    f"workers crash at more than {MOST_KILLERS} windows, so the windows are probably not the cause. "
                    f"{TOO_LITTLE_MEMORY}"
                )

    search(0, count)
    return found
