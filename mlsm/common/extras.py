"""Packages that only some commands need, and the extra of mlsm-pretrain (setup.cfg) that installs each.

    with name_extras("encode-lsp"):      # a missing package is one line that says what to install
        ...

A command that can also work without a package checks for that package itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

from mlsm.common.errors import MissingPackageError

EXTRA_OF = {  # by the import name of a package
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
    """Turn the import error for a missing package into an error that names the extra to install.

    what    what needs the package, such as a command
    Raises  MissingPackageError
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF or find_spec(package) is not None:  # only a part of the package is missing
            raise
        raise MissingPackageError(
            f'{what} needs {package}, which is not installed. Run:  pip install "mlsm-pretrain[{EXTRA_OF[package]}]"'
        ) from error
