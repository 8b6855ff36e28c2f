"""What each kind of store needs: its teacher, what names it, and what codes for it.

    kind = KINDS["lsp"]
    target = kind.target(job, teacher, output)     # the content of target.json
    coder = kind.open_coder(context, stores)       # in any process that encodes

To add a kind, write its class and its coder (coding/coder.py says what that is).
Left out: the commands (encode.py), the stores themselves (stores.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from common.errors import EncodeError
from pipeline.coding.batch import Output, Reading
from pipeline.coding.coder import IdsCoder, TeacherCoder
from pipeline.coding.kept import entries_kept
from pipeline.coding.lsp import LspCoder
from pipeline.coding.masked import PASSES
from pipeline.executors.base import Context
from pipeline.job import Job, check_same_teacher, check_teacher, load_teacher
from pipeline.stores import OpenStore
from shards import copies
from shards.manifest import differing, fingerprint
from shards.schema import FORMAT_VERSION, LOGITS_OCTAVES, LSP_OCTAVES

if TYPE_CHECKING:
    from pipeline.teacher import Teacher
    from pipeline.teacher.masked_lm import MaskedLm


class Description(NamedTuple):
    """What is particular about a store.

    name      begins the name of its directory
    settings  what names it: where they differ, the content does
    lineage   what else its target.json says
    k         entries of a distribution; 0 where there is none
    octaves   of the stored weights
    """

    name: str
    settings: dict
    lineage: dict
    k: int
    octaves: int = LSP_OCTAVES


@dataclass(frozen=True)  # equal to itself in other processes, where a coder is kept for it
class Kind:
    """One kind of store; a subclass defines what differs. A kind without a teacher or an Output has None for it."""

    def load_teacher(self, job: Job) -> "Teacher | None":
        """The teacher that reads the text, if the kind needs one."""
        raise NotImplementedError

    def describe(self, job: Job, teacher: Any, output: Any) -> Description:
        """The Description of a store for an Output."""
        raise NotImplementedError

    def read_output(self, store: OpenStore, teacher: Any) -> Output | None:
        """The Output that a store was made for. Raises StoreError when the store holds another dictionary than its
        target names."""
        raise NotImplementedError

    def make_coder(
        self, teacher: Any, outputs: Sequence[Any], config: Any, special_ids: dict
    ) -> IdsCoder | TeacherCoder:
        """The coder for the Outputs."""
        raise NotImplementedError

    def target(self, job: Job, teacher: Any, output: Any) -> dict:
        """The content of target.json."""
        found = self.describe(job, teacher, output)
        return job.target(found.settings, found.lineage, found.k, found.octaves)

    def open_coder(self, context: Context, stores: list[OpenStore]) -> IdsCoder | TeacherCoder:
        """The coder for some stores, with an output for each, in any process.

        Raises  EncodeError when the stores were made with another teacher or other settings; StoreError as
                `read_output`
        """
        job = context.job
        teacher = context.keep("teacher", partial(self.load_teacher, job))
        if teacher is not None:
            for store in stores:
                check_same_teacher(teacher, store.target["settings"]["teacher"], store.target["settings"]["dtype"])
        outputs = []
        for store in stores:
            outputs.append(self.read_output(store, teacher))
            given, found = self.describe(job, teacher, outputs[-1]).settings, store.target["settings"]
            if fingerprint(given) != fingerprint(found):
                raise EncodeError(
                    f"{store.files.path} was made with other settings than those of this command: "
                    f"{differing(found, given)}. Give the settings of the store, or another --output."
                )
        return self.make_coder(teacher, outputs, job.config, job.special_ids)


def name_of_dtype(teacher: "Teacher") -> str:
    """How settings spell the precision that a teacher computes in."""
    return str(teacher.dtype).removeprefix("torch.")


class Ids(Kind):
    """Token ids alone."""

    def load_teacher(self, job: Job) -> None:
        return None

    def describe(self, job: Job, teacher: None, output: None) -> Description:
        settings = {"kind": "ids", "format": FORMAT_VERSION, "windowing": job.rules}
        return Description(f"ids-L{job.config.max_length}", settings, {"tokenizer_name": job.config.tokenizer}, k=0)

    def read_output(self, store: OpenStore, teacher: None) -> None:
        return None

    def make_coder(self, teacher: None, outputs: Sequence[None], config: Any, special_ids: dict) -> IdsCoder:
        return IdsCoder()


class Logits(Kind):
    """The teacher's most probable words at every token."""

    def load_teacher(self, job: Job) -> "MaskedLm":
        from pipeline.teacher.masked_lm import MaskedLm

        teacher = MaskedLm.load(job.config.teacher, dtype=job.config.dtype, device=job.config.device)
        check_teacher(job, teacher)
        teacher.choose_products(job.config.products, job.config.batch_tokens, job.products)
        return teacher

    def describe(self, job: Job, teacher: "MaskedLm", output: Output) -> Description:
        from pipeline.coding.logits import entries_kept

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
        name = f"logits-{Path(teacher.name).name}"
        if job.config.masked:  # left out otherwise, so that stores keep their names
            settings["masked_passes"], name = PASSES, f"{name}-masked"
        lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
        return Description(name, settings, lineage, teacher.vocabulary, LOGITS_OCTAVES)

    def read_output(self, store: OpenStore, teacher: "MaskedLm") -> Output:
        return Output(teacher.layer, None)

    def make_coder(
        self, teacher: "MaskedLm", outputs: Sequence[Output], config: Any, special_ids: dict
    ) -> TeacherCoder:
        from pipeline.coding.logits import LogitsCoder

        return LogitsCoder(teacher, outputs, config, special_ids)


class HiddenStates(Kind):
    """The teacher's unit-length hidden states."""

    def load_teacher(self, job: Job) -> "Teacher":
        return load_teacher(job)

    def describe(self, job: Job, teacher: "Teacher", output: Output) -> Description:
        from pipeline.coding.quantise import layout_of

        layout, codebook = layout_of(output, teacher.hidden_size), output.dictionary
        quantise: dict[str, Any] = {"name": layout.quantise}
        if codebook is not None:
            quantise |= {"bytes": layout.bytes, "codebook": codebook.fingerprint}
        settings = {
            "kind": "hidden",
            "format": FORMAT_VERSION,
            "windowing": job.rules,
            "teacher": teacher.fingerprint,
            "layer": output.layer,
            "width": layout.width,
            "quantise": quantise,
            "dtype": name_of_dtype(teacher),
        } | Reading.of(job.config, teacher).settings()
        name = f"hidden-{Path(teacher.name).name}-l{output.layer}"
        if codebook is not None:
            name = f"{name}-pq{layout.bytes}"
        if job.stored is not None:
            settings["hidden"] = job.stored.identity()
        lineage = {"teacher_name": teacher.name, "teacher_layers": teacher.num_layers}
        return Description(name, settings, lineage, k=0)

    def read_output(self, store: OpenStore, teacher: "Teacher") -> Output:
        from pipeline.coding.quantise import Codebook

        settings = store.target["settings"]
        is_pq = settings["quantise"]["name"] == "pq"
        return Output(settings["layer"], Codebook(copies.load_codebook(store.files)) if is_pq else None)

    def make_coder(self, teacher: Any, outputs: Sequence[Output], config: Any, special_ids: dict) -> TeacherCoder:
        from pipeline.coding.quantise import HiddenCoder

        return HiddenCoder(teacher, outputs, config, special_ids)


class Lsp(Kind):
    """Distributions over latent semantic properties."""

    def load_teacher(self, job: Job) -> "Teacher":
        return load_teacher(job)

    def describe(self, job: Job, teacher: "Teacher", output: Output) -> Description:
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
            "top_n": entries_kept(config, output.dictionary),
            "dtype": name_of_dtype(teacher),
        }
        name = f"lsp-{Path(teacher.name).name}-l{output.layer}-k{k}"
        if (atoms := output.dictionary.settings.get("atoms")) is not None:
            name = f"{name}-{atoms}"
        if config.solver == "fista":
            settings["solver"] = {"name": "fista", "steps": config.solver_steps}
        elif config.solver == "nearest":
            settings["solver"], name = {"name": "nearest"}, f"{name}-nearest"
            del settings["lam"]  # which it does not have
        else:
            settings["tolerance"] = config.tolerance  # which FISTA does not have
        if output.dictionary.center is not None:  # left out otherwise, so that stores keep their names
            settings["center"] = output.dictionary.centering
        settings |= Reading.of(config, teacher).settings()
        if job.stored is not None:
            settings["hidden"] = job.stored.identity()
            quantise = settings["hidden"]["quantise"]
            name = f"{name}-of-{quantise['name']}{quantise.get('bytes', '')}"
        lineage = {
            "teacher_name": teacher.name,
            "teacher_layers": teacher.num_layers,
            "dictionary_settings": output.dictionary.settings,
        }
        return Description(name, settings, lineage, k)

    def read_output(self, store: OpenStore, teacher: "Teacher") -> Output:
        from pipeline.dictionary import Dictionary

        dictionary = Dictionary.load(store.files.dictionary)
        copies.check_dictionary(store.files, dictionary.fingerprint)
        return Output(store.target["settings"]["layer"], dictionary)

    def make_coder(self, teacher: "Teacher", outputs: Sequence[Output], config: Any, special_ids: dict) -> LspCoder:
        return LspCoder(teacher, outputs, config, special_ids)


KINDS: dict[str, Kind] = {"ids": Ids(), "logits": Logits(), "lsp": Lsp(), "hidden": HiddenStates()}
