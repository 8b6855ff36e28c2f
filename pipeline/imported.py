"""Import dictionaries of other programs: .npy files of the official code, SPAMS or scikit-learn.

    import_dictionary(ImportConfig(file=Path("layer_10_k_3000.npy")))    # {"dictionary": "runs/dictionaries/...", ...}

The official code saves the result of SPAMS: float32 or float64, shape (d, K), an atom per column, in Fortran order.
scikit-learn and this project have an atom per row. Not handled here: learning (learn.py), encoding with it (encode.py).

Shapes: d width, K atoms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mlsm.common.disk import file_sha256
from mlsm.common.errors import DictionaryError
from mlsm.common.invocation import program
from mlsm.common.progress import silent
from mlsm.common.settings import Positional, check

ROUNDING = 1e-3  # how far the norm of an atom may be from 1


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Make a dictionary from atoms that another program learned, such as the official MLSM code."""

    file: Positional[Path | None] = None
    """A .npy file of atoms, float16, float32 or float64; the official code has an atom per column."""
    orientation: Literal["auto", "rows", "columns"] = "auto"
    """Whether each row or each column is an atom. `auto` takes those that have norm 1, as learned atoms do, and asks
    where that is true of both or of neither."""
    output: Path = Path("runs")
    """Directory whose `dictionaries` gets the dictionary."""

    def __post_init__(self):
        check(self)
        if self.file is None:
            raise ValueError("FILE is missing: the .npy file of a dictionary")


def import_dictionary(config: ImportConfig, progress: Callable[..., None] = silent) -> dict:
    """Import the dictionary of a file, or find the imported one. Its atoms become float32 but are otherwise unchanged.

    Returns  dictionary (directory), k, width, orientation, dtype, largest_norm, zero_atoms, finished_before
    Raises   ValueError on a file that holds no atoms; DictionaryError on atoms that are not finite or longer than 1, or
             if it is not clear whether rows or columns are the atoms
    """
    import numpy as np

    from pipeline.dictionary import Dictionary
    from pipeline.dictionary.vectors import FLOATS, open_vectors
    from pipeline.job import named_by_content
    from shards.files import refuse_foreign_output

    assert config.file is not None  # the settings refuse it
    refuse_foreign_output(config.output)
    found = open_vectors(config.file)
    if found.ndim != 2 or 0 in found.shape or found.dtype.name not in FLOATS:
        raise DictionaryError(
            f"{config.file}: expected a matrix of {', '.join(FLOATS)}, found {found.dtype} of shape {found.shape}."
        )
    matrix = np.asarray(found, np.float64)
    if not np.isfinite(matrix).all():
        raise DictionaryError(f"{config.file}: NaN or infinity among the atoms. Learn or copy the dictionary again.")
    orientation: str = config.orientation
    if orientation == "auto":
        norms = {name: np.linalg.norm(matrix, axis=axis) for name, axis in (("columns", 0), ("rows", 1))}
        fitting = [name for name in norms if np.abs(norms[name] - 1).max() <= ROUNDING]
        if len(fitting) != 1:
            which = "both the rows and the columns" if fitting else "neither the rows nor the columns"
            raise DictionaryError(
                f"{config.file}, shape {matrix.shape}: {which} all have norm 1, so you must say which of them are "
                "atoms: --orientation columns (the official code, SPAMS) or --orientation rows (scikit-learn)."
            )
        (orientation,) = fitting
    atoms_Kd = matrix.T if orientation == "columns" else matrix
    norms_K = np.linalg.norm(atoms_Kd, axis=1)
    if norms_K.max() > 1 + ROUNDING:
        raise DictionaryError(
            f"{config.file}: atom {norms_K.argmax()} (of the {orientation}) has norm {norms_K.max():.4g}; expected at "
            "most 1, because the penalty is defined for such atoms. Use the other --orientation, or divide the atoms "
            "by their norms."
        )
    if not norms_K.any():
        raise DictionaryError(f"{config.file}: every atom is zero, so every code would be empty. Export it again.")
    source = {"file": config.file.name, "sha256": file_sha256(config.file), "orientation": orientation}
    dictionary = Dictionary(
        np.ascontiguousarray(atoms_Kd, np.float32), [], "imported, not learned here", {"imported": source}
    )
    name = f"{config.file.stem}-k{len(atoms_Kd)}"
    directory = named_by_content(config.output / "dictionaries", name, dictionary.fingerprint)
    finished_before = directory.is_dir()
    if not finished_before:
        dictionary.save(directory)
    elif Dictionary.load(directory).fingerprint != dictionary.fingerprint:
        raise DictionaryError(
            f"{directory} is another dictionary. Choose another --output for  {program()} import-dictionary"
        )
    return {
        "dictionary": str(directory),
        "k": len(atoms_Kd),
        "width": atoms_Kd.shape[1],
        "orientation": orientation,
        "dtype": found.dtype.name,
        "largest_norm": float(norms_K.max()),
        "zero_atoms": int((norms_K == 0).sum()),
        "finished_before": finished_before,
    }
