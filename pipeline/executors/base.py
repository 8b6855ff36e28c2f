"""What an executor is: it applies a function to items, in this process or in others, and knows nothing else.

    for item, result in executor.map(function, items): ...

A function takes a Context and an iterator over items, and yields one result for each of them, in order. Whether it is
given all items or one at a time is the executor's choice: given all, it can begin the next item before it has finished
the one at hand; given one at a time, the items can go to several processes. Functions belong to modules, or are
`partial` of such a function, so that they can be pickled by name.
Left out: what the functions do (units.py, sample.py).
"""

from pathlib import Path

import numpy as np

from common.progress import silent

KILLED = object()  # in place of a result: every process that tried the item died
PART = ".part-"  # is in the names of the files in which arrays come from other processes


class Context:
    """A job in one process, with what the functions keep there from item to item: teacher, coder, windows.

    job      the Job
    teacher  the teacher, where this process has loaded it already
    report   called by functions with what they have done so far of an item; not heard across processes
    """

    def __init__(self, job, teacher=None):
        self.job, self.report = job, silent
        self._kept = {} if teacher is None else {"teacher": (None, teacher)}

    def keep(self, name, make, key=None):
        """What make() returned under this name for this key; what was kept for another key is dropped first."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = key, make()
        return self._kept[name][1]

    def check_wanted(self):
        """Raise what ends the item at hand when nobody waits for its result any more."""

    def pack(self, array, place):
        """An array as part of a result; `unpack` gives it back. Processes hand it over in a file in the directory."""
        return array


def unpack(packed):
    """The array that `Context.pack` was given; its file goes."""
    if not isinstance(packed, Path):
        return packed
    array = np.load(packed)
    packed.unlink()
    return array


class Executor:
    """Applies functions to items, for one job, inside a `with` block.

    job    the Job
    grain  how many small pieces of work make one item that is worth its sending
    """

    grain = 1

    def __init__(self, job):
        self.job = job

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def map(self, function, items, *, trials=2, report=silent):
        """Pairs (item, result) as results come; KILLED for an item at which `trials` processes died.

        items   taken one by one, when there is room for one more
        report  called with what the function reports on its way, where that happens in this process
        Raises  what the function raises; ConnectionError when the scheduler is gone, ChildProcessError when no worker
                is left
        """
        raise NotImplementedError

    def survives(self, function, item, trials):
        """Whether a process can apply the function to the item without dying. The result is dropped."""
        ((_, result),) = self.map(function, [item], trials=trials)
        return result is not KILLED
