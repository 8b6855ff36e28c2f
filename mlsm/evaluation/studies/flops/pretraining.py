"""The cost of a batch of pre-training: as in the paper's table 3, in full, and offline with a shared store.

    setting = Setting.of(CountFlopsConfig())
    pretraining_table(setting)["mlsm-10"]  # rows of table 3
    pretraining_flops(setting, "kd")   # all computations, by part
    offline_flops(setting, reuse=10)

A backward pass costs two forward passes. The paper counts logits at every position, only the linear layers of the
teacher, and no solver. In full means: logits only at masked positions (the loss needs no others), the teacher's
attention products, and the official code's sparse solver, 100 FISTA steps at masked positions. Not handled here: how
one encoder is counted (encoders.py), the tables for people (mlsm/commands/count_flops.py).
"""

from typing import NamedTuple

from mlsm.evaluation.studies.flops.config import CountFlopsConfig
from mlsm.evaluation.studies.flops.encoders import EncoderShape
from mlsm.evaluation.studies.flops.solver import fista_flops, learning_flops, solver_flops

FISTA = "sparse solver, 100 FISTA steps"
WINDOWS = 128  # of the tables' batch, as in the paper
TRAINING = 3  # cost of a forward and backward pass, in forward passes


class Setting(NamedTuple):
    """A batch, and the models that process it."""

    student: EncoderShape
    teacher: EncoderShape
    vocabulary: int
    k: int
    layer: int
    windows: int
    length: int
    mask_rate: float

    @classmethod
    def of(cls, config: CountFlopsConfig) -> "Setting":
        """The setting of a CountFlopsConfig. Raises FlopsError if an encoder or its layer does not exist."""
        student, teacher = EncoderShape.find(config.encoder), EncoderShape.find(config.teacher)
        teacher.cut(config.layer)
        return cls(
            student,
            teacher,
            config.vocab_size or teacher.vocabulary,
            config.k,
            config.layer,
            WINDOWS,
            config.max_length,
            config.mask_rate,
        )

    @property
    def tokens(self) -> int:
        """Tokens of the batch, including special ones."""
        return self.windows * self.length

    @property
    def masked(self) -> float:
        """Tokens that are predicted."""
        return self.mask_rate * self.tokens

    @property
    def paradigms(self) -> list[str]:
        """The table's columns: mlsm-<layer> for the whole teacher, and for the teacher cut after the layer."""
        return ["mlm", "kd", "naive-mlsm", *dict.fromkeys([f"mlsm-{self.teacher.layers}", f"mlsm-{self.layer}"])]

    def outputs(self, paradigm: str) -> int:
        """Logits of the student at one position."""
        words = 0 if paradigm.startswith("mlsm-") else self.vocabulary
        return words + (self.k if "mlsm" in paradigm else 0)

    def teacher_layers(self, paradigm: str) -> int:
        """The number of teacher layers that are computed."""
        if paradigm.startswith("mlsm-"):
            return int(paradigm.removeprefix("mlsm-"))
        return 0 if paradigm == "mlm" else self.teacher.layers


def pretraining_table(setting: Setting) -> dict[str, dict[str, float]]:
    """Table 3 of the paper: operations of a batch by paradigm and row, unrounded; `percent_of_mlm` among the rows."""
    columns = {paradigm: _column(setting, paradigm) for paradigm in setting.paradigms}
    for rows in columns.values():
        rows["total"] = sum(rows.values())
    return _add_percent(columns)


def _column(setting, paradigm):
    windows, length, tokens = setting.windows, setting.length, setting.tokens
    layers = setting.teacher_layers(paradigm)
    teacher = setting.teacher.cut(layers).forward(windows, length).linear if layers else 0
    logits = paradigm in ("kd", "naive-mlsm")  # the official code computes the teacher's and does not use them
    return {
        "trained encoder": TRAINING * setting.student.forward(windows, length).total,
        "trained unembedding": TRAINING * setting.student.head(tokens, setting.outputs(paradigm)),
        "auxiliary encoder": teacher,
        "auxiliary unembedding": setting.teacher.head(tokens, setting.vocabulary) if logits else 0,
    }


def pretraining_flops(setting: Setting, paradigm: str) -> dict[str, float]:
    """All operations of one batch of online pre-training, by part, with their `total`."""
    windows, length, masked = setting.windows, setting.length, setting.masked
    parts = student_flops(setting, paradigm)
    if layers := setting.teacher_layers(paradigm):
        products = setting.teacher.cut(layers).forward(windows, length)
        parts |= {"teacher, linear layers": products.linear, "teacher, attention": products.attention}
    if paradigm == "kd":
        parts["teacher, logits at masked positions"] = setting.teacher.head(masked, setting.vocabulary)
    if "mlsm" in paradigm:
        parts[FISTA] = fista_flops(masked, setting.k, setting.teacher.width)
    return parts | {"total": sum(parts.values())}


def student_flops(setting: Setting, paradigm: str) -> dict[str, float]:
    """The student on one batch, forward and backward: its whole encoder, and its logits at masked positions."""
    student = setting.student
    return {
        "student, encoder": TRAINING * student.forward(setting.windows, setting.length).total,
        "student, logits at masked positions": TRAINING * student.head(setting.masked, setting.outputs(paradigm)),
    }


def teacher_flops(teacher: EncoderShape, layer: int, windows: float, length: int) -> float:
    """Operations of the teacher cut after a layer, over whole windows, attention included."""
    return windows * teacher.cut(layer).forward(1, length).total


def encoding_flops(setting: Setting) -> dict[str, float]:
    """Encoding every token of one batch once, as encode-lsp does: the teacher up to its layer, and our solver."""
    return {
        "teacher": teacher_flops(setting.teacher, setting.layer, setting.windows, setting.length),
        "sparse solver": solver_flops(setting.tokens, setting.k, setting.teacher.width),
    }


def offline_flops(setting: Setting, reuse: float) -> dict[str, float]:
    """One batch of an offline student, by part, when each encoded token is trained on `reuse` times."""
    encoding = {f"{part}, a share of 1/R": flops / reuse for part, flops in encoding_flops(setting).items()}
    parts = student_flops(setting, f"mlsm-{setting.layer}") | encoding
    return parts | {"total": sum(parts.values())}


def dictionary_flops(setting: Setting, vectors: int, epochs: float) -> float:
    """Learning the dictionary once: the teacher over the sample, then `epochs` passes over its vectors."""
    teacher = teacher_flops(setting.teacher, setting.layer, vectors / setting.length, setting.length)
    return teacher + learning_flops(vectors, epochs, setting.k, setting.teacher.width)


def full_table(setting: Setting) -> dict[str, dict[str, float]]:
    """`pretraining_flops` of every paradigm, with `percent_of_mlm` counted in the same way."""
    return _add_percent({paradigm: pretraining_flops(setting, paradigm) for paradigm in setting.paradigms})


def _add_percent(columns):
    for rows in columns.values():
        rows["percent_of_mlm"] = 100 * rows["total"] / columns["mlm"]["total"]
    return columns
