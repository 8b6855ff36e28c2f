"""Which package may import which, and that light modules stay light (DESIGN.md, import directions)."""

import ast
import configparser
import graphlib
import os
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from mlsm.common.extras import EXTRA_OF

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"mlsm/common", "mlsm/recipes", "shards", "student", "pipeline", "mlsm/evaluation", "mlsm/terminal"}
PACKAGES |= {"mlsm/commands", "mlsm/cli", "mlsm/results"}
OURS = PACKAGES | {"benchmarks", "mlsm"}
ALLOWED = {
    "mlsm/common": {"mlsm/common"},
    "mlsm/recipes": {"mlsm/recipes", "mlsm/common"},
    "shards": {"shards", "mlsm/common"},
    "student": {
        "student",
        "shards",
        "mlsm/recipes",
        "mlsm/common",
    },  # recipes: which one made the store that is trained on
    "pipeline": {"pipeline", "shards", "mlsm/common"},
    "mlsm/evaluation": PACKAGES - {"mlsm/terminal", "mlsm/commands", "mlsm/cli"},
    "mlsm/terminal": PACKAGES - {"mlsm/commands", "mlsm/cli"},
    "mlsm/commands": PACKAGES - {"mlsm/cli"},
    "mlsm/cli": PACKAGES,
    "mlsm": OURS - {"benchmarks"},
}
SOLVER_LIBRARIES = {"numpy", "numba", "llvmlite", "threadpoolctl", "torch", "pipeline"} | set(sys.stdlib_module_names)
SOLVER_LIBRARIES |= {"cuda", "mlsm/common"}  # cuda.core, beneath numba-cuda; oneDNN


def package_of(name):
    """The package of a module: mlsm/common of mlsm.common.disk, shards of shards.reader."""
    first, *rest = name.split(".")
    return f"mlsm/{rest[0]}" if first == "mlsm" and rest and f"mlsm/{rest[0]}" in PACKAGES else first


def imported(path):
    """Full names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def python_files(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_of(path):
    """The name under which a file is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_graph(package):
    """Every module of a package to those of the same package that it imports, anywhere in its file."""
    files = {module_of(path): path for path in python_files(package)}
    graph = {}
    for name, path in files.items():
        graph[name] = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):  # of a package either a module or what the package names
                assert node.level == 0, f"{path}: a relative import"
                named = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                found = {full if full in files else node.module for full in named.values()}
            else:
                continue
            graph[name] |= (found & files.keys()) - {name}  # dask_workers asks for itself in another process
    return graph


def test_no_circle_in_the_pipeline():
    graph = import_graph("pipeline")
    assert sum(map(len, graph.values())) > 100
    try:
        tuple(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_the_pipeline_is_read_from_top_to_bottom():
    """Each line of its block in ARCHITECTURE.md imports only lines above it."""
    page = (ROOT / "docs" / "ARCHITECTURE.md").read_text(encoding="utf-8")
    block = re.search(r"^pipeline/ .*\n((?:  .*\n)+)", page, re.MULTILINE)[1]
    rows = [re.findall(r"([a-z_]+)(?:\.py|/)", re.split(r" {2,}", line.strip())[0]) for line in block.splitlines()]
    place = {name: number for number, row in enumerate(rows) for name in row}
    edges = {(name, other) for name, others in import_graph("pipeline").items() for other in others}
    rooms = {(name.split(".")[1], other.split(".")[1]) for name, other in edges if "." in name and "." in other}
    assert len(rooms) > 60 and not {(name, other) for name, other in rooms if place[name] < place[other]}


def test_workers_know_no_step():
    graph = import_graph("pipeline")
    assert graph["pipeline.executor"] == set() and graph["pipeline.dask_workers"] == {"pipeline.executor"}


@pytest.mark.parametrize("package", [name for name in ALLOWED if (ROOT / name).is_dir()])
def test_packages_import_only_what_they_may(package):
    files = python_files(package)
    assert files
    wrong = [
        (str(path.relative_to(ROOT)), name)
        for path in files
        for name in imported(path)
        if package_of(name) in OURS - ALLOWED[package]
    ]
    assert not wrong


def test_solvers_know_arrays_only():
    wrong = [
        (path.name, name)
        for path in python_files("pipeline/solvers")
        for name in imported(path)
        if package_of(name) not in SOLVER_LIBRARIES or (name.startswith("pipeline") and "solvers" not in name)
    ]
    assert not wrong


def test_shards_need_torch_in_one_file_at_most():
    users = {path.name for path in python_files("shards") for name in imported(path) if name.split(".")[0] == "torch"}
    assert users <= {"torch_dataset.py"}


def requirements():
    """Of setup.cfg: what is always installed, and what each extra adds, without the extras that it includes."""
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = {"": parser["options"]["install_requires"]} | dict(parser["options.extras_require"])
    names = {name: re.findall(r"^([\w-]+)(?!.*mlsm-pretrain)", text, re.MULTILINE) for name, text in lists.items()}
    return {name: {found for found in these if found != "mlsm-pretrain"} for name, these in names.items()}


def providers_of_modules():
    """The distributions of every module that the product imports, by the name that it is imported by."""
    modules = {
        module.split(".")[0]
        for package in ("mlsm", "pipeline", "shards", "student")
        for path in python_files(package)
        for module in imported(path)
    }
    found = packages_distributions()
    return {module: {name.lower().replace("_", "-") for name in found.get(module, ())} for module in modules}


def test_every_required_package_is_imported():
    required = requirements()[""]
    used = set().union(*providers_of_modules().values())
    assert required - used == {"webdataset"}, "webdataset reads shards for others; what else is required is imported"


BROUGHT = {
    "aiohttp",
    "jinja2",
    "markupsafe",
    "packaging",
    "tornado",
}  # by packages that need them


def test_what_is_imported_and_not_always_installed_has_an_extra():
    of_extras = requirements()
    for module, providers in providers_of_modules().items():
        if providers and not providers & of_extras[""] and not providers & {"mlsm-pretrain"} and module not in BROUGHT:
            listed = of_extras[EXTRA_OF[module]]
            assert providers & listed, f"{module} is not in {EXTRA_OF[module]}"


EXTRAS = {
    "aiohttp",
    "bokeh",
    "dask",
    "datasets",
    "distributed",
    "matplotlib",
    "pandas",
    "pyarrow",
    "seqeval",
    "sklearn",
    "PIL",
}  # but for those of `encode`
DEMONSTRATION = """
import contextlib
from mlsm import __main__ as cli

for command in (["encode-lsp", "--layer", "2", "--max-tokens", "5_000", "--k", "32"],
                ["train-student", "--max-steps", "2", "--encoder", "bert-1x32"],
                ["show-lsp", "--json"], ["doctor"]):
    assert cli.run(command) == 0
for command in (["encode-lsp", "--layer", "2", "--max-tokens", "5_000", "--workers", "2"],
                ["encode-lsp", "--layer", "2", "--corpus", "a.parquet", "--teacher", "bundled"],
                ["encode-lsp", "--layer", "2", "--corpus", "a.txt.zst", "--teacher", "bundled"],
                ["show-lsp", "--intruders"],
                ["export-store"],
                ["show-shards", "http://127.0.0.1:9/lsp"]):
    sys.argv[1:] = command
    with contextlib.suppress(SystemExit):
        cli.main()
"""


def run_without(extras, code, directory, *arguments):
    """Run Python from cold, where these packages cannot be imported."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", f"import sys\nsys.modules |= dict.fromkeys({extras})\n{code}", *arguments]
    run = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """What it said, and its store."""
    directory = tmp_path_factory.mktemp("demonstration")
    for name in ("a.parquet", "a.txt.zst"):
        (directory / name).write_bytes(b"whatever")
    said = run_without(EXTRAS, DEMONSTRATION, directory).stderr
    (store,) = (directory / "runs" / "stores").iterdir()
    return said, store


def test_the_demonstration_needs_no_extra_and_errors_name_those_of_other_commands(demonstration):
    said, _ = demonstration
    needs = re.findall(r"needs? .*?\. Run: +pip install \"mlsm-pretrain\[(\w+)\]\"", said)
    assert needs == ["cluster", "corpora", "corpora", "eval", "corpora", "remote"], said


CORE = """
import contextlib
from mlsm import __main__ as cli

store = sys.argv[1]
sys.modules["pipeline"] = None
assert cli.run(["train-student", "--store", store, "--print-config"]) == 0
assert cli.run(["train-student", "--store", store, "--max-steps", "2", "--encoder", "bert-1x32"]) == 0
del sys.modules["pipeline"]
for command in (["train-probe", "--max-steps", "2"], ["export-student"], ["verify-shards", store], ["doctor"]):
    assert cli.run(command) == 0
for command in (["encode-lsp"], ["learn-dictionary"], ["show-lsp", store], ["track", store, store],
                ["finetune", "bundled", "--data-dir", "."]):
    sys.argv[1:] = command
    with contextlib.suppress(SystemExit):
        cli.main()
import mlsm
for use in (lambda: mlsm.nonneg_lasso, lambda: mlsm.encode_lsp(layer=2, corpus="bundled", teacher="bundled")):
    try:
        use()
    except ImportError as error:
        print(error, file=sys.stderr)
"""


def test_training_needs_no_extra_and_errors_name_those_of_other_commands(demonstration, tmp_path):
    """Training itself needs nothing of the package `pipeline`, which makes stores."""
    _, store = demonstration
    said = run_without(set(EXTRA_OF), CORE, tmp_path, store).stderr
    message = r'(\S+) needs \w+, which is not installed\. Run: +pip install "mlsm-pretrain\[(\w+)\]"'
    needs = re.findall(message, said)
    commands = ["encode-lsp", "learn-dictionary", "show-lsp", "track", "finetune"]
    names = [*commands, "mlsm.nonneg_lasso", "mlsm.encode_lsp"]
    assert needs == [(name, "eval" if name == "finetune" else "encode") for name in names], said


LIGHT = ("mlsm.__main__", "mlsm", "pipeline.config", "shards.config", "student.config")


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module):
    heavy = {"torch", "transformers", "numba", "numpy", "webdataset", "dask", "distributed"}
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {heavy}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
