"""What each kind of store needs: its teacher, what names it, and what codes for it.

    kind = KINDS["lsp"]
    target = kind.target(job, teacher, output)     # the content of target.json
    coder = kind.open_coder(context, stores)       # in any process that encodes

To add a kind, write the functions of its row, and a coder (coder.py says what that is).
Left out: the commands (encode.py), the stores themselves (stores.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from common.errors import EncodeError
from pipeline.coder import IdsCoder, LspCoder, Output, Reading
from pipeline.job import check_same_teacher, check_teacher, load_teacher
from shards import copies
from shards.manifest import differing, fingerprint
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES, LSP_OCTAVES


class Description(NamedTuple):
    """What is particular about a store.

    name      begins the name of its directory
    settings  what names it: where they differ, the content does;  lineage  what else its target.json says
    k         entries of a distribution, 0 where there is none;  octaves  of the stored weights
    """

    name: str
    settings: dict
    lineage: dict
    k: int
    octaves: int = LSP_OCTAVES


@dataclass(frozen=True)
class Kind:
    """One kind of store.

    load_teacher  function of a Job to what reads the text, None where nothing does
    describe      function of a Job, its teacher and an Output to a Description
    read_output   function of an OpenStore and a teacher to the Output that the store was made for
    make_coder    function of a teacher, Outputs, settings and special ids to the coder
    """

    load_teacher: Callable
    describe: Callable
    read_output: Callable
    make_coder: Callable

    def target(self, job, teacher, output):
        """The content of target.json."""
        found = self.describe(job, teacher, output)
        return job.target(found.settings, found.lineage, found.k, found.octaves)

    def open_coder(self, context, stores):
        """What codes for some OpenStores, an output of the coder for each, in any process.

        Raises  EncodeError where the teacher or the settings are not the stores', StoreError where a store holds
                another dictionary than its target names
        """
        job = context.job
        teacher = context.keep("teacher", partial(self.load_teacher, job))
        if teacher is not None:
            for store in stores:
                check_same_teacher(teacher, store.target["settings"]["teacher"], store.target["settings"]["dtype"])
        outputs = []
        for store in stores:
            outputs.append(self.read_output(store, teacher))
            _check_settings(store, self.describe(job, teacher, outputs[-1]).settings)
        return self.make_coder(teacher, outputs, job.config, job.special_ids)


def _check_settings(store, settings):
    """Raise EncodeError when a store was made with other settings than those that it would be added to with."""
    found = store.target["settings"]
    if fingerprint(settings) != fingerprint(found):
        raise EncodeError(
            f"{store.files.path} was made with other settings than those of this command: {differing(found, settings)}."
            " Give the settings of the store, or another --output."
        )


def name_of_dtype(teacher):
    """How settings spell the precision that a teacher computes in."""
    return str(teacher.dtype).removeprefix("torch.")


# -- ids ---------------------------------------------------------------------------------------------------


def _load_no_teacher(job):
    return None


def _describe_ids(job, teacher, output):
    settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
    return Description(f"ids-L{job.config.max_length}", settings, {"tokenizer_name": job.config.tokenizer}, k=0)


def _read_no_output(store, teacher):
    return None


def _make_ids_coder(*_):
    return IdsCoder()


# -- logits ------------------------------------------------------------------------------------------------


def load_masked_lm(job):
    """The teacher of a store of logits, whole and with its head. Raises as `load_teacher`."""
    from pipeline.logits import MaskedLm

    teacher = MaskedLm.load(job.config.teacher, dtype=job.config.dtype, device=job.config.device)
    check_teacher(job, teacher)
    return teacher


def _describe_logits(job, teacher, output):
    from pipeline.logits import entries_kept

    settings = {
        "kind": "logits",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "k": teacher.vocabulary,
        "top_n": entries_kept(job.config.top_n, teacher),
        "octaves": LOGITS_OCTAVES,
        "dtype": name_of_dtype(teacher),
    } | Reading.of(job.config, teacher).settings()
    lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
    return Description(f"logits-{Path(teacher.name).name}", settings, lineage, teacher.vocabulary, LOGITS_OCTAVES)


def _read_logits_output(store, teacher):
    return Output(teacher.layer, None)


def _make_logits_coder(*arguments):
    from pipeline.logits import LogitsCoder

    return LogitsCoder(*arguments)


# -- LSPs --------------------------------------------------------------------------------------------------


def _describe_lsp(job, teacher, output):
    config, k = job.config, len(output.dictionary.atoms_Kd)
    settings = {
        "kind": "lsp",
        "format": FORMAT_VERSION,
        "windowing": job.rules,
        "teacher": teacher.fingerprint,
        "layer": output.layer,
        "dictionary": output.dictionary.fingerprint,
        "k": k,
        "lam": config.lam,
        "top_n": config.top_n,
        "dtype": name_of_dtype(teacher),
    }
    if config.solver == "fista":
        settings["solver"] = {"name": "fista", "steps": config.solver_steps}
    else:
        settings["tolerance"] = config.tolerance  # which FISTA does not ask for
    if output.dictionary.center is not None:  # stores from before there was centring have no such key
        settings["center"] = output.dictionary.centering
    settings |= Reading.of(config, teacher).settings()
    lineage = {
        "teacher_name": teacher.name,
        "teacher_layers": teacher.num_layers,
        "dictionary_settings": output.dictionary.settings,
    }
    return Description(f"lsp-{Path(teacher.name).name}-l{output.layer}-k{k}", settings, lineage, k)


def _read_lsp_output(store, teacher):
    from pipeline.dictionary import Dictionary

    dictionary = Dictionary.load(store.files.dictionary)
    copies.check_dictionary(store.files, dictionary.fingerprint)
    return Output(store.target["settings"]["layer"], dictionary)


KINDS = {  # of named functions alone, so that a Kind can be sent to other processes
    "ids": Kind(_load_no_teacher, _describe_ids, _read_no_output, _make_ids_coder),
    "logits": Kind(load_masked_lm, _describe_logits, _read_logits_output, _make_logits_coder),
    "lsp": Kind(load_teacher, _describe_lsp, _read_lsp_output, LspCoder),
}
