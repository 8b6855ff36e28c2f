"""Which codebooks of product quantisation a command needs, and their learning where they are not there yet.

    codebook = provide_codebook(executor, teacher, layer)

They are named by what they are learned from, as dictionaries are, and from the same sample: hidden states of training
windows, chosen by --seed. Left out: the sample (sample.py), the quantisation (coding/quantise.py).
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.durable import publish_directory
from common.errors import EncodeError
from common.workplaces import discard, workplace
from pipeline.coding.batch import Reading
from pipeline.coding.quantise import Codebook
from pipeline.executors.base import PART, Executor
from pipeline.job import named_by_content
from pipeline.sample import SAMPLE, sample_hidden
from shards.manifest import fingerprint

if TYPE_CHECKING:
    from pipeline.teacher import Teacher

logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """What sample.py asks for: the centroids of a layer's states need no more vectors than there are."""

    layer: int
    k: int = 0


def provide_codebook(executor: Executor, teacher: "Teacher", layer: int) -> Codebook | None:
    """The Codebook that the settings ask for; None for --quantise int8.

    Raises  EncodeError when it does not fit the teacher, or the sample is too small
    """
    job, config = executor.job, executor.job.config
    if config.quantise == "int8":
        return None
    if teacher.hidden_size % config.bytes:
        raise EncodeError(
            f"--bytes {config.bytes} does not divide the {teacher.hidden_size} values of a hidden state of "
            f"{teacher.name}. Give another of 16, 32 and 64, or --quantise int8."
        )
    if config.codebook is not None:
        return _load(config, teacher)
    request: dict[str, Any] = {
        "teacher": teacher.fingerprint,
        "layer": layer,
        "plan": job.plan.id,
        "bytes": config.bytes,
        "tokens": config.dictionary_tokens,
        "seed": config.seed,
        "dtype": str(teacher.dtype).removeprefix("torch."),
    } | Reading.of(config, teacher).settings()
    if job.stored is not None:
        request["hidden"] = job.stored.store.target_id
    name = f"{Path(teacher.name).name}-l{layer}-pq{config.bytes}"
    directory = named_by_content(config.output / "codebooks", name, fingerprint(request))
    work = directory.with_name(f".{directory.name.rpartition('-')[2]}.learning")
    if not directory.is_dir():
        with workplace(work, (SAMPLE, f"{PART}*.npy")) as place:
            if not directory.is_dir():  # another process may have finished while this one waited
                (hidden_Nd,) = sample_hidden(executor, teacher, [(_Wanted(layer), place)])
                publish_directory(directory, Codebook.train(hidden_Nd, config.bytes, config.seed).save)
    discard(work)
    return Codebook.load(directory)


def _load(config, teacher):
    codebook = Codebook.load(config.codebook)
    pieces, _, length = codebook.centroids.shape
    if (pieces, pieces * length) != (config.bytes, teacher.hidden_size):
        raise EncodeError(
            f"--codebook {config.codebook} quantises {pieces * length} values to {pieces} bytes, but --bytes is "
            f"{config.bytes} and {teacher.name} has hidden states of {teacher.hidden_size} values."
        )
    return codebook
