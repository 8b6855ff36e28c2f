"""A job's work shared among Dask workers: the units of a plan, and the sample that dictionaries are learned from.

    with Crew(job) as crew:
        for unit, tokens, figures in crew.encode(tasks, stores, make_coder): ...

Workers are processes of this machine (--workers; cluster.py) or those of a running scheduler (--scheduler). A task is a
unit: a worker encodes what the stores lack of it, commits, and answers with counts (worker.py). So a task may run
twice or die anywhere, and another worker finishes what the first began. Plan, learning and errors stay with the driver.

A unit at which workers die twice is put aside until nothing else runs. Then ranges of its windows are coded in vain,
smaller and smaller ones, until the windows that kill a worker are alone; the unit is encoded without them, and its
record names their documents. Left out: one unit on several workers; the learning of a dictionary on several.
"""

import logging
import time
import uuid
import warnings
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from itertools import islice

import numpy as np
from distributed import Client, as_completed
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker

from common.errors import EncodeError
from pipeline import plan as planning
from pipeline import worker
from pipeline.cluster import SECONDS_TO_STOP, event_loop, is_lost, local_cluster, quiet

KILLED = object()  # in place of a result: every worker that tried died
REASON = "kills the worker process"
MOST_KILLERS = 32  # windows of a unit; each costs several workers
TOO_LITTLE_MEMORY = "Do they have too little memory? Use fewer --workers or a smaller --batch-tokens."
RANGES = 32  # that a range of windows is cut into; not two, because each death costs the loading of a teacher
PART_BATCHES = 8  # of the teacher, in one task of the sample
SECONDS_TO_ANSWER = 10  # that a scheduler has
SECONDS_BETWEEN_LOOKS = 0.02
logger = logging.getLogger(__name__)


class Crew:
    """The workers of one command: started at the first work there is, gone with the `with` block."""

    def __init__(self, job):
        self.job, self._name = job, f"mlsm-{uuid.uuid4().hex}"
        self._client = self._cluster = None  # the cluster only if it is ours

    def __enter__(self):
        self._opened = ExitStack()
        return self

    def __exit__(self, *error):
        with self._opened:
            if self._client:
                self._dismiss()

    def _dismiss(self):
        """Workers end what they do and forget the job."""
        with suppress(Exception):  # it may be the cluster's loss that brought us here
            unregister = self._client._unregister_worker_plugin
            self._client.sync(unregister, self._name, callback_timeout=SECONDS_TO_STOP)

    def _start(self):
        if self._client is None:
            self._client = self._connect()
            self._client.register_plugin(worker.Work.of(self.job), name=self._name)
            logger.info("workers at %s, dashboard %s", self._client.scheduler.address, self._client.dashboard_link)

    def _connect(self):
        config, enter = self.job.config, self._opened.enter_context
        enter(quiet())
        loop = enter(event_loop())
        if config.scheduler is None:
            self._cluster = enter(local_cluster(config.workers, getattr(config, "device", "cpu"), loop))
        address = config.scheduler or self._cluster.scheduler_address
        try:
            return enter(Client(address, loop=loop, set_as_default=False, timeout=SECONDS_TO_ANSWER))
        except (OSError, ValueError) as error:
            raise EncodeError(
                f"--scheduler {address}: no scheduler answers there ({error}). Start one with: dask scheduler"
            ) from error

    # -- tasks ---------------------------------------------------------------------------------------------

    def _results(self, task, arguments, trials=2):
        """Pairs (argument, result) of a worker's task, as they come; KILLED for one at which `trials` workers died.

        arguments  tuples, taken when there is room for one more task
        Raises     what the task raises; ConnectionError when the scheduler is gone
        """
        try:
            self._start()
            yield from self._as_they_end(task, arguments, trials)
        except (CancelledError, CommClosedError) as error:
            raise ConnectionError(
                "the scheduler is gone; finished units are kept. Run the same command to go on"
            ) from error

    def _as_they_end(self, task, arguments, trials):
        arguments, running, ended = iter(arguments), {}, as_completed(loop=self._client.loop)

        def submit(argument, trial=1):
            future = self._client.submit(worker.perform, self._name, task, argument, pure=False)
            running[future] = argument, trial
            ended.add(future)

        def fill():
            room = 2 * sum(self._client.nthreads().values()) + 4
            for argument in islice(arguments, max(0, room - len(running))):
                submit(argument)

        fill()
        while running:
            future = self._next(ended)
            argument, trial = running.pop(future)
            try:
                result = _passed_on(*future.result())
            except KilledWorker:
                if trial < trials:
                    submit(argument, trial + 1)
                    continue
                result = KILLED
            except Exception as error:
                _pass_on(getattr(error, "worker_notes", ()))
                raise
            yield argument, result
            fill()

    def _next(self, ended):
        """The next future that ends. Raises ChildProcessError if there is nobody left to end it."""
        while not ended.has_ready():
            if self._cluster and is_lost(self._cluster):
                raise ChildProcessError("no worker is left and none can be started; finished units are kept")
            time.sleep(SECONDS_BETWEEN_LOOKS)
        return next(ended)

    def _survives(self, task, argument, trials):
        ((_, result),) = self._results(task, [argument], trials)
        return result is not KILLED

    def _killers(self, task, argument_of, count):
        """Numbers below `count` at which workers die: argument_of(first, stop) makes the argument of a range.

        One that is alone must kill twice: the first time may have been chance.
        Raises  EncodeError when workers die at no text at all, or at more than MOST_KILLERS of it
        """
        if not self._survives(task, argument_of(0, 0), trials=2):
            raise EncodeError(f"workers die before they code any text. {TOO_LITTLE_MEMORY}")
        return self._searched(task, argument_of, 0, count, [])

    def _searched(self, task, argument_of, first, stop, found):
        """What was found before, and the killers from `first` to `stop`."""
        step = -(-(stop - first) // RANGES)
        for begin in range(first, stop, max(1, step)):
            end = min(begin + step, stop)
            self.job.progress("search", begin, stop, unit="windows", found=len(found))
            if self._survives(task, argument_of(begin, end), trials=2 if step == 1 else 1):
                continue
            found = [*found, begin] if step == 1 else self._searched(task, argument_of, begin, end, found)
            if len(found) > MOST_KILLERS:
                raise EncodeError(
                    f"workers die at more than {MOST_KILLERS} windows, so it is hardly their fault. {TOO_LITTLE_MEMORY}"
                )
        return found

    # -- units ---------------------------------------------------------------------------------------------

    def encode(self, tasks, stores, make_coder):
        """Encode units on the workers.

        tasks   pairs (unit, numbers of the stores that want it)
        stores  their directories;  make_coder as `encode.run` takes it
        Yields  (unit, tokens and quarantined documents of each of its stores, figures of merit) as units end
        Raises  as encode_lsp
        """
        units, number_of = self.job.plan.units, {unit.id: i for i, unit in enumerate(self.job.plan.units)}
        stores, suspects = tuple(stores), []
        arguments = ((number_of[unit.id], tuple(outputs), {}, stores, make_coder) for unit, outputs in tasks)
        for argument, result in self._results(worker.encode, arguments):
            if result is KILLED:
                suspects.append(argument)
            else:
                yield units[argument[0]], *result
        for number, outputs, *_ in suspects:
            for output in outputs:
                yield units[number], *self._encode_without_killers(number, output, stores, make_coder)

    def _encode_without_killers(self, number, output, stores, make_coder):
        """Encode a unit for one store without the windows that kill workers. Returns what `worker.encode` does."""
        unit = self.job.plan.units[number]
        where = f"records {unit.start} to {unit.stop - 1} of {unit.source}"
        logger.info("workers died at %s: looking for the windows that kill them", where)
        ((_, windows),) = self._results(worker.count_windows, [(number,)])
        if windows is KILLED:
            raise EncodeError(f"workers die when they read {where}: nothing of it can be encoded. Leave it out.")
        killers = self._killers(
            worker.code_in_vain, lambda first, stop: (number, first, stop, output, stores, make_coder), windows
        )
        failed = dict.fromkeys(killers, REASON)
        ((_, result),) = self._results(worker.encode, [(number, (output,), failed, stores, make_coder)])
        if result is KILLED:
            raise EncodeError(
                f"workers die at {where}, also without the {len(killers)} windows that kill one alone. "
                f"{TOO_LITTLE_MEMORY}"
            )
        return result

    # -- the sample ----------------------------------------------------------------------------------------

    def sample_windows(self, tokens, seed):
        """The same windows as plan.sample_windows."""
        sample = planning.WindowSample(self.job.plan, tokens)
        training = [i for i, unit in enumerate(self.job.plan.units) if unit.split == "train"]
        results, suspects = self._results(worker.candidates, ((i, seed, sample.bound) for i in training)), []
        for done, ((number, *_), found) in enumerate(results, start=1):
            if found is KILLED:
                suspects.append(number)
                continue
            sample.add(found)
            self.job.progress("choose", done, len(training), unit="units")
        for number in suspects:  # alone: another's death may have been laid at its door
            ((_, found),) = self._results(worker.candidates, [(number, seed, sample.bound)])
            if found is KILLED:
                raise EncodeError(f"workers die when they read {self.job.plan.units[number].source}. Leave it out.")
            sample.add(found)
        return sample.windows()

    def hidden_rows(self, teacher, batches, layers, place):
        """Hidden states of batches of windows, some batches at a time, in order; the teacher's as the driver has it.

        place   directory for the workers' files, which are gone when this ends
        Yields  lists of rows as the sample holds them (learn.sample_dtype), one for a layer
        """
        ready, wanted = {}, 0
        expected = teacher.fingerprint, str(teacher.dtype).removeprefix("torch.")
        try:
            for number, names in self._parts(batches, layers, place, expected):
                ready[number] = names
                while wanted in ready:
                    yield [_taken(place / name) for name in ready.pop(wanted)]
                    wanted += 1
        finally:
            for path in place.glob(f"*{worker.PART}*"):
                path.unlink(missing_ok=True)

    def _parts(self, batches, layers, place, expected):
        """Pairs (number of a part, names of its files), as they come."""
        parts = [batches[i : i + PART_BATCHES] for i in range(0, len(batches), PART_BATCHES)]
        arguments = [(part, layers, place, expected) for part in parts]
        number_of, suspects = {id(argument): i for i, argument in enumerate(arguments)}, []
        for argument, names in self._results(worker.hidden_rows, arguments):
            if names is KILLED:
                suspects.append(argument)
            else:
                yield number_of[id(argument)], names
        for argument in suspects:
            spared = [self._without_killers(windows, layers) for windows in argument[0]]
            ((_, names),) = self._results(worker.hidden_rows, [(spared, *argument[1:])])
            if names is KILLED:
                raise EncodeError(f"workers die at the dictionary's sample. {TOO_LITTLE_MEMORY}")
            yield number_of[id(argument)], names

    def _without_killers(self, windows, layers):
        killers = self._killers(
            worker.hidden_rows_in_vain, lambda first, stop: (windows[first:stop], layers), len(windows)
        )
        for _ in killers:
            logger.warning("a window is left out of the dictionary's sample: %s", REASON)
        return [window for number, window in enumerate(windows) if number not in killers]


def _taken(path):
    rows_nd = np.load(path)
    path.unlink()
    return rows_nd


def _passed_on(notes, result):
    """A task's result, once what was logged and warned of during it is logged and warned of here."""
    _pass_on(notes)
    return result


def _pass_on(notes):
    for name, kind, text in notes:
        if name is None:
            warnings.warn(text, kind, stacklevel=2)
        else:
            logging.getLogger(name).log(kind, "%s", text)
