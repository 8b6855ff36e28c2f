"""Which windows kill the process that codes them: ever smaller ranges of windows are tried.

Left out: what a trial does and what becomes of the windows (units.py, sample.py).
"""

from collections.abc import Callable

from common.errors import EncodeError

REASON = "kills the worker process"
MOST_KILLERS = 32  # windows of a unit; each costs several workers
RANGES = 32  # into which a range of windows is cut; not two, because each death costs the loading of a teacher
TOO_LITTLE_MEMORY = "Do they have too little memory? Use fewer --workers or a smaller --batch-tokens."


def find_killers(survives: Callable[[int, int, int], bool], count: int, progress: Callable[..., None]) -> list[int]:
    """Numbers of the windows at which workers die; the search is for `count` windows that killed one together.

    survives  function of (first, stop, trials): whether a worker survives this range, in one of so many trials. A
              window that is alone must kill twice: the first time may have been chance
    progress  called as progress("search", windows, of how many, unit="windows", found=how many killers)
    Raises    EncodeError when workers die without any text, or at more than MOST_KILLERS windows
    """
    if not survives(0, 0, 2):
        raise EncodeError(f"workers die before they code any text. {TOO_LITTLE_MEMORY}")
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
                    f"workers die at more than {MOST_KILLERS} windows, so it is hardly their fault. {TOO_LITTLE_MEMORY}"
                )

    search(0, count)
    return found
