"""How this program was called, for the commands in messages to the user.

    f"Make one:  {program()} encode-lsp"    # "mlsm encode-lsp", "python cli.py encode-lsp", "python -m mlsm encode-lsp"

Error messages do not use it: they always start with `mlsm`.
"""

import shutil
import sys
from pathlib import Path

from mlsm.common.text import shell_quote


def program() -> str:
    """The words before the command's name: as the user typed them on the command line; from Python, `mlsm`.

    The console script appears in sys.argv with its whole path, even if the shell found it on the PATH. Then the result
    is `mlsm`; if the shell would not find it, the result is its path.
    """
    called = sys.argv[0] if sys.argv else ""
    if Path(called).name == "cli.py":
        return f"python {shell_quote(called)}"
    if Path(called).parts[-2:] == ("mlsm", "__main__.py"):
        return "python -m mlsm"
    if Path(called).name == "mlsm" and shutil.which("mlsm") != called:
        return shell_quote(called)
    return "mlsm"
