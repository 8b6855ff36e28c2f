"""Files for visitors and their tools: one version everywhere, workflows that lint as `make lint` does, scripts that parse
and whose steps run here with a stand-in for what only a cluster has."""

import configparser
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from shards.reader import finished_stores

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "slurm").glob("*.sbatch"))


def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_there_is_one_version():
    version = setup_cfg()["metadata"]["version"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == version and citation["license"] == setup_cfg()["metadata"]["license"]
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]


def test_every_lint_is_that_of_make_lint():
    recipe = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    wanted = {
        " ".join(re.sub(r"--quiet|\$\(BIN\)/| \.$", "", line.strip()).split()) for line in recipe.splitlines()[1:]
    }
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"] for hook in hooks} == wanted == {"ruff check", "ruff format --check", "mypy"}
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


@pytest.mark.skipif(shutil.which("dask", path=Path(sys.executable).parent) is None, reason="no program dask")
def test_the_steps_of_encoding_on_slurm(tmp_path, english_text, teacher_directory):
    """`srun` runs its command here, as two tasks; the rest is the script's own: scheduler, address, workers, the end."""
    programs = write_programs(
        tmp_path / "bin", srun='shift; "$@" & "$@" & wait', mlsm=f'exec {sys.executable} -m mlsm "$@"'
    )
    given = f"--teacher {teacher_directory} --layer 2 --k 24 --lam 0.1 --max-length 32 --max-tokens 4000"
    given += f" --dictionary-tokens 1000 --dtype float32 --device cpu --corpus {english_text} --output {tmp_path}/runs"
    command = ["bash", ROOT / "slurm/encode.sbatch", *given.split()]
    environment = os.environ | programs | {"SLURM_CPUS_PER_TASK": "1", "TMPDIR": str(tmp_path)}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert run.returncode == 0, run.stderr[-2000:]
    assert len(finished_stores(tmp_path / "runs" / "stores")) == 1
    assert not list(tmp_path.glob("tmp.*")), "the scheduler's file is gone"


def test_the_steps_of_training_on_slurm(tmp_path):
    """What torchrun is told on two nodes of four GPUs; the training itself is test_distributed's."""
    programs = write_programs(tmp_path / "bin", srun='exec "$@"', scontrol="printf 'n1\\nn2\\n'", torchrun='echo "$@"')
    slurm = {"JOB_NODELIST": "n[1-2]", "CPUS_PER_TASK": "32", "GPUS_ON_NODE": "4", "NNODES": "2", "JOB_ID": "7"}
    environment = os.environ | programs | {f"SLURM_{name}": value for name, value in slurm.items()}
    command = ["bash", ROOT / "slurm/train.sbatch", "--encoder", "bert-tiny"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-id 7 --rdzv-backend c10d --rdzv-endpoint n1:29500" in run.stdout
    assert run.stdout.rstrip().endswith("-m mlsm train-student --encoder bert-tiny")
    from torch.distributed.run import parse_args

    parsed = parse_args(run.stdout.split())
    assert (parsed.module, parsed.training_script) == (True, "mlsm")
