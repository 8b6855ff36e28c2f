"""What docs/promises.md and docs/faults.md promise is what tests promise: their tables are made of the markers.

    @pytest.mark.promise("SIGKILL at a call: no uncommitted unit visible, visible ones whole", cases="58 real kills")
    def test_kill_at_every_call(...)

    python tests/promises.py                # writes the tables into the pages; tests/test_docs.py compares them

One of the tests behind a promise says all of it; the others give its first words and an ellipsis: "SIGKILL at a …". As
a file's `pytestmark` a promise is that of all its tests. Promises that begin with a number are faults.
Files are parsed and not imported, so that this takes no time. This script cannot check whether a test is as strong as
its promise.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("faults", "pipeline", "shards", "student", "evaluation", "common")  # their order on the page
TABLES = {  # page -> the head of its table
    ROOT / "docs" / "promises.md": "| promise | tests | cases |\n|---|---|---|\n",
    ROOT / "docs" / "faults.md": "| fault | tests |\n|---|---|\n",
}


def find_markers():
    """Every marker as (text, cases or None, file without suffix, words of the test's name or "" for the whole file).

    Raises  ValueError where a file has a marker at another place than a test or `pytestmark`
    """
    files = sorted(path.relative_to(ROOT / "tests") for path in ROOT.glob("tests/**/test_*.py"))
    files.sort(key=lambda path: FOLDERS.index(path.parts[0]) if path.parts[0] in FOLDERS else len(FOLDERS))
    for file in files:
        tree, found = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8")), 0
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                name, marks = node.name.removeprefix("test_").replace("_", " "), node.decorator_list
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
                name, marks = "", node.value.elts if isinstance(node.value, ast.List) else [node.value]
            else:
                continue
            for mark in marks:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.promise":
                    found += 1
                    cases = [ast.literal_eval(word.value) for word in mark.keywords]
                    yield ast.literal_eval(mark.args[0]), *(cases or [None]), file.with_suffix("").as_posix(), name
        if found != sum(
            isinstance(n, ast.Attribute) and ast.unparse(n) == "pytest.mark.promise" for n in ast.walk(tree)
        ):
            raise ValueError(f"tests/{file}: a promise belongs on a test function of the file, or into its pytestmark")


def make_page(page):
    """The text of a page of TABLES with its table generated again.

    Raises  ValueError if a marker's first words are those of no promise or of several
    """
    markers = list(find_markers())
    promises = {said: cases for said, cases, *_ in markers if not said.endswith("…")}
    tests = {said: {} for said in promises}
    for said, _, file, name in markers:
        meant = [one for one in promises if one == said or said.endswith("…") and one.startswith(said[:-1].rstrip())]
        if len(meant) != 1:
            raise ValueError(f"tests/{file}.py: {said!r} begins {len(meant)} promises. Give the first words of one")
        tests[meant[0]].setdefault(file, []).append(name)
    rows, faults = [], page.name == "faults.md"
    for said, cases in sorted(promises.items(), key=lambda item: number(item[0])):
        if (number(said) > 0) == faults:
            proofs = "; ".join(
                f"`{file}`" + f": {', '.join(names)}" * all(names) for file, names in tests[said].items()
            )
            rows.append(f"| {' | '.join([said, proofs] if faults else [said, proofs, cases or ''])} |\n")
    head = TABLES[page]
    before, _, rest = page.read_text(encoding="utf-8").partition(head)
    return before + head + "".join(rows) + re.sub(r"\A(\|.*\n)*", "", rest)


def number(said):
    """The number that a promise begins with, else 0."""
    return int((re.match(r"\d+ ", said) or ["0"])[0])


if __name__ == "__main__":
    for page in TABLES:
        page.write_text(make_page(page), encoding="utf-8")
