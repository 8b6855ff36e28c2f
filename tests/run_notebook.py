"""Run a notebook's cells of code from first to last, as in one session: python run_notebook.py NOTEBOOK [EXECUTED].

EXECUTED is a file for the notebook with the outputs of its cells: what they print, the value of a last expression, and
figures, as Jupyter shows them. Output to stderr (progress) is not kept.
"""

import ast
import base64
import contextlib
import hashlib
import io
import json
import sys
from pathlib import Path


def run(notebook):
    """Run the cells and give them their outputs."""
    scope, number = {"__name__": "__main__"}, 0
    for place, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            number += 1
            cell |= {"execution_count": number, "outputs": _run_cell("".join(cell["source"]), f"cell {place}", scope)}
            for output in cell["outputs"]:
                if output["output_type"] == "execute_result":
                    output["execution_count"] = number
    notebook["metadata"]["executed"] = digest(notebook)


def digest(notebook):
    """The SHA-256 of all code, by which stored outputs are known to be of it."""
    code = [cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def _run_cell(source, name, scope):
    tree, value, printed = ast.parse(source, name), None, _Both()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    outputs = []
    if text := printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value).splitlines(keepends=True)}
        outputs.append({"data": data, "metadata": {}, "output_type": "execute_result"})
    return outputs + [
        {"data": {"image/png": figure, "text/plain": ["<Figure>"]}, "metadata": {}, "output_type": "display_data"}
        for figure in _figures()
    ]


class _Both(io.StringIO):
    """Keeps what is printed, which goes to the terminal, too."""

    def write(self, text):
        sys.__stdout__.write(text)
        return super().write(text)


def _figures():
    """The open figures as PNG in base64; they are closed."""
    plt = sys.modules.get("matplotlib.pyplot")
    if plt is None:
        return
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        yield base64.b64encode(picture.getvalue()).decode()
    plt.close("all")


if __name__ == "__main__":
    sys.path[0] = ""  # as in Jupyter: the working directory, not this one
    content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    run(content)
    if sys.argv[2:]:
        Path(sys.argv[2]).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
