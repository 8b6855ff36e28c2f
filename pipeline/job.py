"""What one command of stage A works on: sources, tokenizer, plan, and where its output goes.

    job = teacher_job(config, progress)
    job.plan.units, job.windows(unit), job.target(settings, lineage, k)

The corpus is scanned once, when the job is made; a worker process makes the same job from what that found. Left out:
dictionaries (learn.py), encoding (encode.py), the workers (distributed.py).
"""

from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pipeline import plan as planning
from pipeline.coder import EncodeError
from pipeline.corpus import CorpusError, open_sources
from pipeline.corpus.documents import Selection
from shards.manifest import fingerprint
from shards.schema import LSP_OCTAVES, StoreError


class Planned(NamedTuple):
    """What the scan of a corpus found.

    sources  name to reader
    stamps   name to what says that the source is still the one that was scanned
    """

    sources: dict
    stamps: dict
    plan: planning.Plan


class Job:
    """Sources, tokenizer and plan of one command.

    planned  what an earlier scan found; the corpus is scanned without it
    crew     the workers that help, inside `helped`
    teacher  once it is loaded
    Raises   CorpusError, StoreError
    """

    crew = teacher = None

    def __init__(self, config, tokenizer, progress, planned=None):
        from pipeline.teacher import special_ids, tokenizer_fingerprint

        self.config, self.tokenizer, self.progress = config, tokenizer, progress
        refuse_foreign_output(config.output)
        self.special_ids = special_ids(tokenizer)
        self.rules = planning.windowing(tokenizer_fingerprint(tokenizer), config.max_length, config.packing)
        self.planned = planned or self._scan()
        self.sources, self._stamps, self.plan = self.planned
        if planned is None:
            self.check_sources()

    def _scan(self):
        config = self.config
        sources = open_sources(config, self.progress)
        stamps = {source.name: source.stamp() for source in sources}
        plan = planning.scan(
            sources,
            self.tokenizer,
            self.special_ids,
            self.rules,
            unit_tokens=config.unit_tokens,
            max_tokens=config.max_tokens,
            selection=Selection.of(config),
            progress=self.progress,
        )
        return Planned({source.name: source for source in sources}, stamps, plan)

    def check_sources(self):
        """Raise CorpusError if a source is no longer the file that was scanned."""
        for name in self.sources:
            self.check_unchanged(name)

    def check_unchanged(self, name):
        """The same of one source."""
        if self.sources[name].stamp() != self._stamps[name]:
            raise CorpusError(f"{name} changed while it was read. Run the command again once nobody writes to it.")

    @property
    def expected_tokens(self):
        """About how many tokens the plan holds, for progress."""
        estimate = self.plan.corpus["bytes"] // planning.BYTES_PER_TOKEN
        return min(estimate, self.config.max_tokens or estimate)

    def target(self, settings, lineage, k, octaves=LSP_OCTAVES):
        """The content of target.json."""
        return {
            "target": fingerprint(settings),
            "settings": settings,
            "lineage": lineage,
            "k": k,
            "vocab_size": max(self.tokenizer.get_vocab().values()) + 1,
            "max_length": self.config.max_length,
            "weight_octaves": octaves,
            "special_ids": self.special_ids,
        }

    def windows(self, unit):
        """The windows of a planned unit."""
        return planning.unit_windows(unit, self.sources[unit.source], self.tokenizer, self.special_ids, self.rules)


def teacher_job(config, progress):
    """The Job of a command that has a teacher; a layer it lacks is refused before the corpus is read."""
    from pipeline.teacher import check_layers, load_tokenizer

    check_layers(config.teacher, config.layer)
    return Job(config, load_tokenizer(config.teacher), progress)


@contextmanager
def helped(job):
    """Let the workers that the settings ask for, if any, help with the job in this block, as `job.crew`."""
    if job.config.workers == 1 and job.config.scheduler is None:
        yield
        return
    from pipeline.distributed import Crew

    try:
        with Crew(job) as job.crew:
            yield
    finally:
        job.crew = None


def load_teacher(job):
    """The teacher of the settings, cut after the deepest of their layers; loaded once in a job.

    Raises  TeacherError, DeviceError; EncodeError when the windows are too long or a GPU has no solver
    """
    if job.teacher is None:
        job.teacher = _load_teacher(job)
    return job.teacher


def check_same_teacher(teacher, fingerprint, dtype):
    """Raise EncodeError if a teacher is not the one, in the precision, that the work was planned for."""
    found = str(teacher.dtype).removeprefix("torch.")
    if (teacher.fingerprint, found) != (fingerprint, dtype):
        what = f"computes in {found}, not {dtype}" if found != dtype else f"finds other files at {teacher.name}"
        raise EncodeError(
            f"a worker {what} as the command that was given. Let all see the same files, and give --dtype and --device."
        )


def _load_teacher(job):
    from pipeline.teacher import Teacher

    config = job.config
    teacher = Teacher.load(config.teacher, max(config.layer), dtype=config.dtype, device=config.device)
    if teacher.device.type == "cuda":
        require_gpu_solver()
    check_teacher(job, teacher)
    return teacher


def check_teacher(job, teacher):
    """Raise TeacherError or EncodeError when a teacher cannot read what the job's tokenizer and windows give it."""
    teacher.check_tokenizer(job.tokenizer)
    max_length = job.config.max_length
    if max_length > teacher.max_positions:
        raise EncodeError(
            f"--max-length {max_length}, but {teacher.name} reads at most {teacher.max_positions} tokens. "
            f"Use --max-length {teacher.max_positions} or less."
        )


def require_gpu_solver():
    """Raise EncodeError, which says what to install, when the solver cannot run on a GPU."""
    try:
        from pipeline.solvers import cd_cuda  # noqa: F401
    except ImportError as error:
        raise EncodeError(f"{error}. Or use --device cpu.") from error


def named_by_content(parent, name, content):
    """`<parent>/<name>-<12 digits of content>`, or what has those digits already, under whatever name."""
    return next(iter(sorted(parent.glob(f"*-{content[:12]}"))), parent / f"{name}-{content[:12]}")


def refuse_foreign_output(output):
    """Raise StoreError when the output directory is a file, a store or a run itself."""
    if Path(output).is_file():
        raise StoreError(f"--output {output} is a file. Give a directory, such as ./runs.")
    for mark, what in (("target.json", "a store"), ("config.json", "a training run")):
        if (Path(output) / mark).is_file():
            raise StoreError(
                f"--output {output} is {what} itself. Give the directory that shall contain stores, such as ./runs."
            )
