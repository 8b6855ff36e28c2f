"""MLSM from Python: what README, docs, model cards and notebooks import.

    import mlsm

    (store,) = mlsm.encode_lsp(teacher="bert-base-cased", layer=10, corpus="wiki/*.txt")
    student = mlsm.train_student(store=store, encoder="bert-6x256")
    model = mlsm.LspModel.from_pretrained(student)

Every command of the command line (mlsm/commands/) is a function here. Its flags are keyword arguments. It returns a
small object whose `report` is the dict that --json prints. A name is loaded when it is first used, so that the import
takes milliseconds. Editors and type checkers read mlsm/__init__.pyi, which `python tests/stub.py` writes. The packages
that do the work (pipeline, student, shards, mlsm/evaluation) are not part of this API and may change.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlsm.common.extras import name_extras

TOP_LEVEL = ("pipeline", "shards", "student")
COMMANDS = sorted(path.stem for path in Path(__file__).parent.glob("commands/[!_]*.py"))  # each is a function here
HOME = {
    "BlimpConfig": "mlsm.evaluation.tasks.blimp.config",
    "Codes": "pipeline.solvers",
    "Compared": "mlsm.results",
    "Dictionary": "pipeline.dictionary",
    "EncodeConfig": "pipeline.config",
    "EncodedStore": "mlsm.results",
    "Estimate": "mlsm.results",
    "Evaluated": "mlsm.results",
    "Exported": "mlsm.results",
    "FinetuneConfig": "mlsm.evaluation.tasks.finetuning.config",
    "ImportedStudent": "mlsm.results",
    "LearnedDictionary": "mlsm.results",
    "LspCollator": "student.pretraining",
    "LspDataset": "shards.torch_dataset",
    "LspForPreTraining": "student.pretraining",
    "LspModel": "student.lsp_model",
    "LspWindows": "shards.torch_dataset",
    "MaskWeights": "mlsm.results",
    "MlsmError": "mlsm.common.errors",
    "ProbeConfig": "student.config",
    "ProbedLspModel": "student.probe",
    "Remote": "shards.remote",
    "Report": "mlsm.results",
    "SavedDictionary": "mlsm.results",
    "Store": "shards.reader",
    "StudentConfig": "student.config",
    "TextLsps": "student.lsp_model",
    "TrainedStudent": "mlsm.results",
    "Verified": "mlsm.results",
    "WindowTensors": "shards.torch_dataset",
    "block_windows": "shards.codec",
    "gopen": "shards.remote",
    "nonneg_lasso": "pipeline.solvers",
    "read_records": "mlsm.api",
}  # public name -> module

__all__ = sorted([*HOME, *COMMANDS])


def _refuse_shadows() -> None:
    """Raise ImportError if Python finds another package with the name of one of this project's packages.

    Their names are short, and Python imports the first package on its path that has the name.
    """
    root = Path(__file__).resolve().parent.parent
    for name in TOP_LEVEL:
        try:
            spec = find_spec(name)
        except ValueError:  # a module that was put into sys.modules by hand has no origin
            continue
        origin = spec.origin if spec is not None else None
        if origin is None:  # training works without pipeline/
            continue
        path = Path(origin).resolve()
        if root not in path.parents or len(path.relative_to(root).parts) > 2:
            raise ImportError(
                f"mlsm needs its own package `{name}`, but Python finds another one first: {origin}. Rename or remove "
                f"that one, start Python in another directory, or put the right one first:  PYTHONPATH={root}"
            )


_refuse_shadows()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mlsm' has no attribute {name!r}. It has: {', '.join(__all__)}")
    if name in HOME:
        with name_extras(f"mlsm.{name}"):
            value = getattr(import_module(HOME[name]), name)
    else:
        value = import_module("mlsm.api").function_of(name.replace("_", "-"))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
