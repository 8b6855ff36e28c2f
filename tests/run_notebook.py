"""Run a notebook's cells of code from first to last, as in one session: python run_notebook.py NOTEBOOK."""

import json
import sys
from pathlib import Path

sys.path[0] = ""  # as in Jupyter: the working directory, not this one
scope = {"__name__": "__main__"}
for number, cell in enumerate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), scope)
