"""MLSM from Python: what README, docs, model cards and notebooks import.

    import mlsm

    (store,) = mlsm.encode_lsp(teacher="bert-base-cased", layer=10, corpus="wiki/*.txt")
    student = mlsm.train_student(store=store, encoder="bert-6x256")
    model = mlsm.LspModel.from_pretrained(student)

The commands of the command line are functions here: their flags are keyword arguments, their results small objects
whose `report` is the dict that --json prints. Nothing is loaded before it is used, so that the import takes
milliseconds. Left out: the rooms that do the work (pipeline, student, shards, evaluation), which may change.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlsm.evaluation.tasks.blimp.config import BlimpConfig as BlimpConfig
    from mlsm.evaluation.tasks.finetuning.config import FinetuneConfig as FinetuneConfig
    from mlsm.functions import choose_layer as choose_layer
    from mlsm.functions import clean as clean
    from mlsm.functions import compare as compare
    from mlsm.functions import count_flops as count_flops
    from mlsm.functions import derive_shards as derive_shards
    from mlsm.functions import docs as docs
    from mlsm.functions import doctor as doctor
    from mlsm.functions import encode_hidden as encode_hidden
    from mlsm.functions import encode_ids as encode_ids
    from mlsm.functions import encode_images as encode_images
    from mlsm.functions import encode_logits as encode_logits
    from mlsm.functions import encode_lsp as encode_lsp
    from mlsm.functions import evaluate_blimp as evaluate_blimp
    from mlsm.functions import export_store as export_store
    from mlsm.functions import export_student as export_student
    from mlsm.functions import finetune as finetune
    from mlsm.functions import import_dictionary as import_dictionary
    from mlsm.functions import learn_dictionary as learn_dictionary
    from mlsm.functions import make_mask_weights as make_mask_weights
    from mlsm.functions import match_entropy as match_entropy
    from mlsm.functions import prepare_data as prepare_data
    from mlsm.functions import read_records as read_records
    from mlsm.functions import score_text as score_text
    from mlsm.functions import show_lsp as show_lsp
    from mlsm.functions import show_shards as show_shards
    from mlsm.functions import similarity as similarity
    from mlsm.functions import study as study
    from mlsm.functions import sweep as sweep
    from mlsm.functions import track as track
    from mlsm.functions import train_probe as train_probe
    from mlsm.functions import train_student as train_student
    from mlsm.functions import train_tokenizer as train_tokenizer
    from mlsm.functions import verify_shards as verify_shards
    from pipeline.config import EncodeConfig as EncodeConfig
    from pipeline.dictionary import Dictionary as Dictionary
    from pipeline.solvers import nonneg_lasso as nonneg_lasso
    from shards.codec import block_windows as block_windows
    from shards.reader import Store as Store
    from shards.remote import Remote as Remote
    from shards.remote import gopen as gopen
    from shards.torch_dataset import LspDataset as LspDataset
    from student.config import ProbeConfig as ProbeConfig
    from student.config import StudentConfig as StudentConfig
    from student.lsp_model import LspModel as LspModel
    from student.probe import ProbedLspModel as ProbedLspModel

ROOMS = ("pipeline", "shards", "student")
COMMANDS = (
    "choose_layer", "clean", "compare", "count_flops", "derive_shards", "docs", "doctor", "encode_hidden", "encode_ids",
    "encode_images", "encode_logits", "encode_lsp", "evaluate_blimp", "export_store", "export_student", "finetune",
    "import_dictionary", "learn_dictionary", "make_mask_weights", "match_entropy", "prepare_data", "score_text",
    "show_lsp", "show_shards", "similarity", "study", "sweep", "track", "train_probe", "train_student",
    "train_tokenizer", "verify_shards",
)  # fmt: skip
HOME = {
    "BlimpConfig": "mlsm.evaluation.tasks.blimp.config",
    "Dictionary": "pipeline.dictionary",
    "EncodeConfig": "pipeline.config",
    "FinetuneConfig": "mlsm.evaluation.tasks.finetuning.config",
    "LspDataset": "shards.torch_dataset",
    "LspModel": "student.lsp_model",
    "ProbeConfig": "student.config",
    "ProbedLspModel": "student.probe",
    "Remote": "shards.remote",
    "Store": "shards.reader",
    "StudentConfig": "student.config",
    "block_windows": "shards.codec",
    "gopen": "shards.remote",
    "nonneg_lasso": "pipeline.solvers",
    "read_records": "mlsm.functions",
} | dict.fromkeys(COMMANDS, "mlsm.functions")  # public name -> module

__all__ = sorted(HOME)


def _refuse_shadows() -> None:
    """Raise ImportError where Python finds another package under the name of one of ours.

    Their names are short, and Python takes the first that lies on its path.
    """
    root = Path(__file__).resolve().parent.parent
    for name in ROOMS:
        try:
            spec = find_spec(name)
        except ValueError:  # a module that was put into sys.modules by hand does not say where it is from
            continue
        origin = spec.origin if spec is not None else None
        if origin is None:
            raise ImportError(f"mlsm needs its package `{name}`, which is not beside it in {root}. Install mlsm again.")
        path = Path(origin).resolve()
        if root not in path.parents or len(path.relative_to(root).parts) > 2:
            raise ImportError(
                f"mlsm needs its own package `{name}`, but Python finds another one first: {origin}. Rename or remove "
                f"that one, start Python elsewhere, or put ours before it:  PYTHONPATH={root}"
            )


_refuse_shadows()


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module 'mlsm' has no attribute {name!r}. It has: {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
