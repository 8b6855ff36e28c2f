"""Handle failures in coding text, by second passes over the same text.

A stage only marks a batch with the error that it met. `retry`, the stage after the solver, codes such a batch again:

- Where the error may be the text's fault, the windows at which coding fails are found by halving the batch. They keep
  their places without entries, and the batch is coded once more without them, so its bytes follow from the text and
  from which windows failed.
- A batch that a GPU has no memory for is coded in smaller ones, and the batches to come are as small: the results are
  equal within tolerance, and the unit's record counts it (`out_of_memory`).
- Any other error, also that of a precision that cannot hold the numbers, ends the run: no document is to blame for it.

Text may also kill the process. `find_killers` has its own search for that, since the two share only the recursion:
`isolate` keeps the results of the parts that work, whereas a death leaves no result, costs the loading of a teacher and
may be chance. Not handled here: what becomes of a document whose windows failed (encode.py names it in the record,
stores.py limits how many may).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from mlsm.common.errors import EncodeError, PrecisionError, describe
from pipeline.batch import UNIT_END, add_amounts

SOME_WINDOWS = 4  # may fail in any batch; beyond half of a batch's windows the fault is not theirs
# In the messages of errors that have no class of their own.
MACHINE_SIGNS = ("allocate memory", "ALLOC_FAILED", "CUDA error", "OUT_OF_MEMORY")
REASON = "kills the worker process"
MOST_KILLERS = 32  # windows of a unit; each costs several workers
RANGES = 32  # into which a range of windows is cut; not two, because each death costs the loading of a teacher
TOO_LITTLE_MEMORY = "Do they have too little memory? Use fewer --workers or a smaller --batch-tokens."
logger = logging.getLogger(__name__)


def may_be_the_texts_fault(error: Exception) -> bool:
    """Whether an error may come from these windows, and not from disk, device, dtype or a lack of memory."""
    machine = isinstance(error, OSError | MemoryError | torch.OutOfMemoryError | PrecisionError)
    return not machine and not any(sign in str(error) for sign in MACHINE_SIGNS)


def ran_out_of_memory(error: Exception) -> bool:
    """Whether an error says that the memory of a GPU is full."""
    return isinstance(error, torch.OutOfMemoryError) or "OUT_OF_MEMORY" in str(error)


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
    """The batches of a Coder, each with its codes: those that a stage marked or passed over are coded here."""
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
        coder.code_again(batch.only(windows))  # its codes are let go: how a batch is cut must not show in the bytes

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
    size = len(batch.ids_WL)  # with the copies that fill it up
    coder.most_windows = min(coder.most_windows, -(-size // 2))
    add_amounts(batch.block.statistics, {"out_of_memory": 1})
    logger.warning(
        "the device has too little memory for %d windows at once: continuing with %d", size, coder.most_windows
    )
    if coder.teacher.device.type == "cuda":
        torch.cuda.empty_cache()


def _divide(coder, batch):
    """The windows of a batch as batches of the size that the device had memory for last."""
    size, block, stop = coder.most_windows, batch.block, batch.first + batch.windows
    block.batches += -(-batch.windows // size) - 1
    for start in range(batch.first, stop, size):
        part = coder.cut(block, start, min(start + size, stop), size)
        part.blocks, part.first, part.compared = batch.blocks, start, batch.compared and start == batch.first
        yield part.without_known_failures()


# -- text that kills the process ---------------------------------------------------------------------------


def find_killers(survives: Callable[[int, int, int], bool], count: int, progress: Callable[..., None]) -> list[int]:
    """Numbers of the windows at which workers die; the search is for `count` windows that killed one together.

    survives  function of (first, stop, trials): whether a worker survives this range, in one of that many trials. A
              window that is alone must kill twice: the first time may have been chance
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
