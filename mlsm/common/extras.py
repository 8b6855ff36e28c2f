"""Packages that only some commands need, and the extra of mlsm-pretrain (setup.cfg) that installs each.

    with name_extras("encode-lsp"):      # a missing package is one line that says what to install
        ...

Not handled here: what a command needs of a package that it also does without (it asks for that package itself).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from mlsm.common.errors import MissingPackageError

EXTRA_OF = {  # of a package, by the name that it is imported by
    "PIL": "vision",
    "aiohttp": "remote",
    "cuda": "gpu",
    "dask": "cluster",
    "datasets": "eval",
    "distributed": "cluster",
    "faiss": "encode",
    "llvmlite": "encode",
    "matplotlib": "eval",
    "numba": "encode",
    "pyarrow": "corpora",
    "seqeval": "eval",
    "sklearn": "eval",
    "tensorboard": "track",
    "trackio": "track",
    "wandb": "track",
}


@contextmanager
def name_extras(what: str) -> Iterator[None]:
    """Turn the error of a package that is not installed into one that names its extra.

    what    needs the package, such as a command
    Raises  MissingPackageError
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF or find_spec(package) is not None:  # a part of it is missing, not all
            raise
        raise MissingPackageError(
            f'{what} needs {package}, which is not installed. Run:  pip install "mlsm-pretrain[{EXTRA_OF[package]}]"'
        ) from error
