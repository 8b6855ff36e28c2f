"""Files for visitors and their tools: one version everywhere, workflows that lint as `make lint` does, and scripts for
Slurm whose steps run here with stand-ins for the programs of a cluster."""

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from mlsm.common.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_there_is_one_version():
    assert setup_cfg()["metadata"]["version"] == "attr: mlsm.common.version.VERSION"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == VERSION and citation["license"] == setup_cfg()["metadata"]["license"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] in ("Unreleased", VERSION) and VERSION in headings[:2]


def test_every_lint_is_that_of_make_lint():
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    wanted = {
        " ".join(re.sub(r"--quiet|\$\(BIN\)/| \.$", "", line.strip()).split()) for line in recipe.splitlines()[1:]
    }
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"] for hook in hooks} == wanted == {"ruff check", "ruff format --check", "mypy", "codespell"}
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert "make lint" in [step.get("run") for step in jobs["lint"]["steps"]]
    suite = [step.get("run", "") for step in jobs["suite"]["steps"]]
    of_make = re.search(r"-m pytest (.+)", (ROOT / "Makefile").read_text())[1]
    assert f"python -m pytest {of_make}" in suite, "the suite runs as `make test` runs it"
    pythons = {entry["python"] for entry in jobs["suite"]["strategy"]["matrix"]["include"]}
    assert min(pythons, key=lambda text: int(text[2:])) == setup_cfg()["options"]["python_requires"].removeprefix(">=")


@pytest.mark.parametrize("name", ["bug.yml", "idea.yml"])
def test_issue_templates_have_fields(name):
    form = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / name).read_text())
    assert {"name", "description", "body"} <= form.keys()
    assert len({field["id"] for field in form["body"]}) == len(form["body"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse(script):
    subprocess.run(["bash", "-n", script], check=True)


def write_programs(directory, **programs):
    """Stand-ins on a PATH of their own, before the environment's programs."""
    directory.mkdir()
    for name, body in programs.items():
        (directory / name).write_text(f"#!/bin/bash\n{body}\n")
        (directory / name).chmod(0o755)
    here = Path(sys.executable).parent
    return {"PATH": f"{directory}:{here}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}


def test_the_steps_of_encoding_on_slurm(tmp_path):
    """The script waits for the scheduler's address, and gives it to the workers and to the command."""
    scheduler = (
        """echo "$@"; test $1 = scheduler || exit 0; echo '{"address": "tcp://n1:1"}' > "${@: -1}"; exec sleep 60"""
    )
    programs = write_programs(
        tmp_path / "bin",
        srun='shift; "$@"; exec sleep 60',
        dask=scheduler,
        mlsm='sleep 1; echo "mlsm $@"',
        python="echo tcp://n1:1",
    )
    environment = os.environ | programs | {"SLURM_CPUS_PER_TASK": "8", "TMPDIR": str(tmp_path)}
    command = ["bash", ROOT / "slurm/encode.sbatch", "--layer", "10"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=50)
    assert "worker tcp://n1:1 --nthreads 1 --memory-limit 0 --no-dashboard\n" in run.stdout
    assert "mlsm encode-lsp --dtype float16 --scheduler tcp://n1:1 --layer 10\n" in run.stdout
    assert not list(tmp_path.glob("tmp.*")), "the scheduler's file is gone"


@pytest.mark.parametrize(("srun", "mlsm", "code"), [("exit 3", "exec sleep 60", 1), ("exec sleep 60", "exit 5", 5)])
def test_the_job_ends_with_its_workers_or_as_its_command_does(srun, mlsm, code, tmp_path):
    scheduler = """echo '{"address": "tcp://n1:1"}' > "${@: -1}"; exec sleep 60"""
    programs = write_programs(tmp_path / "bin", dask=scheduler, srun=srun, mlsm=mlsm)
    environment = os.environ | programs | {"SLURM_CPUS_PER_TASK": "8", "TMPDIR": str(tmp_path)}
    script = ["bash", ROOT / "slurm/encode.sbatch"]
    run = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=30)
    assert run.returncode == code and ("workers ended before" in run.stderr) == (code == 1)


def test_a_scheduler_that_cannot_start_ends_the_job(tmp_path):
    """Instead of sixteen GPUs that wait for it until the wall time."""
    programs = write_programs(tmp_path / "bin", dask="echo no address >&2; exit 1", mlsm="echo never")
    environment = os.environ | programs | {"SLURM_CPUS_PER_TASK": "8", "TMPDIR": str(tmp_path)}
    run = subprocess.run(
        ["bash", ROOT / "slurm/encode.sbatch"], env=environment, capture_output=True, text=True, timeout=50
    )
    assert run.returncode != 0 and "no address" in run.stderr and "never" not in run.stdout
    assert not list(tmp_path.glob("tmp.*"))


def test_the_steps_of_training_on_slurm(tmp_path):
    """What torchrun is told on two nodes of four GPUs; the training itself is test_distributed's."""
    programs = write_programs(
        tmp_path / "bin",
        srun='echo "$SRUN_CPUS_PER_TASK cores"; exec "$@"',
        scontrol="printf 'n1\\nn2\\n'",
        torchrun='echo "$@"',
    )
    slurm = {"JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "32", "GPUS_ON_NODE": "4", "NNODES": "2", "JOB_ID": "7"}
    environment = os.environ | programs | {f"SLURM_{name}": value for name, value in slurm.items()}
    command = ["bash", ROOT / "slurm/train.sbatch", "--encoder", "bert-tiny"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("32 cores\n"), "srun gets them by its own variable alone"
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint n1:29507" in run.stdout
    assert run.stdout.rstrip().endswith("-m mlsm train-student --encoder bert-tiny")
    from torch.distributed.run import parse_args

    parsed = parse_args(run.stdout.splitlines()[-1].split())
    assert (parsed.module, parsed.training_script) == (True, "mlsm")
