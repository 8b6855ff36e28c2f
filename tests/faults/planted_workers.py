"""Faults in the processes of Dask workers, planted by plugins, which also reach a worker that takes a dead one's place.

Faults in this process are in test_quarantine.py.
"""

import os
import signal
from pathlib import Path

import numpy as np
from distributed import WorkerPlugin


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Patched(WorkerPlugin):
    """Something else in place of an attribute of a module or class of ours, until the plugin goes."""

    def setup(self, worker):
        self._place, self._name = self.where()
        self._before = getattr(self._place, self._name)
        setattr(self._place, self._name, self.changed(self._before))

    def teardown(self, worker):
        setattr(self._place, self._name, self._before)


class AtWindows(Patched):
    """The teacher fails when it meets one of some windows: it kills its process, or raises.

    windows  rows of ids
    """

    def __init__(self, windows, kills):
        self._keys, self._kills = {np.ascontiguousarray(row, np.int64).tobytes() for row in windows}, kills

    def where(self):
        from pipeline.teacher import Teacher

        return Teacher, "__call__"

    def changed(self, works):
        def teach(teacher, ids_WL, *rest, **options):
            if any(row.tobytes() in self._keys for row in ids_WL.numpy()):
                if self._kills:
                    die()
                raise RuntimeError("the teacher chokes on this")
            return works(teacher, ids_WL, *rest, **options)

        return teach


class AfterCommit(Patched):
    """The first worker that has committed a unit dies before it can say so, and leaves a mark."""

    def __init__(self, mark):
        self._mark = Path(mark)

    def where(self):
        from pipeline import encode as units

        return units, "encode_units"

    def changed(self, works):
        def encode_units(context, items, **given):
            items = list(items)
            for (number, *_), answer in zip(items, works(context, iter(items), **given), strict=True):
                if not self._mark.exists():
                    self._mark.write_text(context.job.plan.units[number].id)
                    die()
                yield answer

        return encode_units


class Slow(Patched):
    """Every pass of the teacher takes a little longer."""

    def where(self):
        from pipeline.teacher import Teacher

        return Teacher, "__call__"

    def changed(self, works):
        def teach(*given, **options):
            import time

            time.sleep(0.02)
            return works(*given, **options)

        return teach
