"""The teacher: a Hugging Face encoder cut off after a layer, and its tokenizer. Other packages import from here.

    teacher = Teacher.load("google-bert/bert-base-cased", layer=8)
    hidden_WLd = teacher(ids_WL)

location.py finds a teacher's files, tokenizer.py reads its tokenizer, cut.py builds and loads the cut model, and
masked_lm.py, which is imported by its own name, loads the whole model with its head.

Silent mistakes are errors here: a weight missing from the checkpoint (it would be initialised at random), a weight or
setting that transformers ignores (it would compute another model), a family that was never compared with its full
model, a pickled checkpoint (it can run code), a directory without a vocabulary (transformers makes up a tokenizer of
five words).

Not handled here: tokenizing text (corpus/), unit length and dropping specials (batch.py).
"""

from pipeline.teacher.cut import (
    FAMILIES,
    FINAL_NORM,
    Teacher,
    check_documents_apart,
    check_layers,
    check_max_length,
    check_position_means,
    check_reads_masks,
    check_report,
    check_settings,
    cut_config,
    load_weights,
    read_config,
)
from pipeline.teacher.location import BUNDLED, locate, teacher_fingerprint
from pipeline.teacher.tokenizer import load_tokenizer, special_ids

__all__ = [
    "BUNDLED",
    "FAMILIES",
    "FINAL_NORM",
    "Teacher",
    "check_documents_apart",
    "check_layers",
    "check_max_length",
    "check_position_means",
    "check_reads_masks",
    "check_report",
    "check_settings",
    "cut_config",
    "load_tokenizer",
    "load_weights",
    "locate",
    "read_config",
    "special_ids",
    "teacher_fingerprint",
]
