"""doctor agrees with what the system itself reports, and marks problems."""

import errno
import os
import shutil
import tempfile
import time
from importlib import metadata
from pathlib import Path

import pytest

from mlsm import __main__ as cli
from mlsm.cli.flags import read_flags, take_value
from mlsm.commands import load
from mlsm.commands.doctor import show as examination
from mlsm.common.device import choose_device
from mlsm.common.machine import usable_cores
from mlsm.evaluation.inspection import machine
from mlsm.evaluation.inspection.machine import DoctorConfig, examine
from pipeline.solvers.parallel import thread_count


@pytest.fixture
def look(monkeypatch, tmp_path):
    """Examine the machine with little to write; returns the checks by name."""
    monkeypatch.setattr(machine, "WRITTEN", 2**22)

    def look():
        report = examine(DoctorConfig(output=tmp_path / "runs" / "deep"))
        assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
        return {check["name"]: check for check in report["checks"]}

    return look


def test_what_is_found_is_what_the_system_says(look, tmp_path):
    checks = look()
    assert checks["cores"]["values"]["cores"] <= len(os.sched_getaffinity(0))
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < checks["memory"]["values"]["bytes"] <= pages
    free = shutil.disk_usage(tmp_path).free
    assert checks["free disk"]["values"]["bytes"] == pytest.approx(free, rel=0.05)
    assert checks["free disk"]["values"]["directory"] == str(tmp_path), "the nearest directory that exists"
    versions = checks["versions"]["values"]["packages"]
    assert {"torch", "numpy", "transformers"} <= versions.keys() and "pytest" not in versions, "extras are left out"
    assert all(metadata.version(name) == version for name, version in versions.items())
    assert all(check["means"].endswith((".", '"mlsm-pretrain[gpu]"')) for check in checks.values())


def test_cores_and_memory_are_those_that_dask_finds():
    from dask.system import CPU_COUNT
    from distributed.system import MEMORY_LIMIT

    assert (machine.available_cores(), machine.available_memory()) == (CPU_COUNT, MEMORY_LIMIT)


def test_more_threads_than_a_quota_leaves_cores_are_advised_against(look, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr(machine, "available_cores", lambda: 3)
    check = look()["cores"]
    assert not check["ok"] and "unset OMP_NUM_THREADS, or set it to 3" in check["means"]


@pytest.mark.parametrize("given", [None, "2"])
def test_threads_keep_to_a_quota_unless_their_number_is_given(monkeypatch, given):
    torch, numba = pytest.importorskip("torch"), pytest.importorskip("numba")
    before = torch.get_num_threads()
    for module in ("mlsm.common.device", "pipeline.solvers.parallel"):
        monkeypatch.setattr(f"{module}.available_cores", lambda: 1)
    monkeypatch.setattr(numba.config, "NUMBA_NUM_THREADS", 2)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
    try:
        torch.set_num_threads(2)
        choose_device("cpu")
        assert (torch.get_num_threads(), thread_count()) == ((1, 1) if given is None else (2, 2))
    finally:
        torch.set_num_threads(before)


def test_where_a_process_is_not_told_its_cores_it_has_all_of_them(monkeypatch):
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert usable_cores() == os.cpu_count()


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("quota", "cores"), [(50_000, 1), (100_000, 1), (10**9, None), (-1, None)])
def test_a_control_group_leaves_less(tmp_path, monkeypatch, version, quota, cores):
    monkeypatch.setattr("mlsm.common.machine.CONTROL_GROUPS", tmp_path)
    machine_has = machine.available_cores(), machine.available_memory()
    group = Path("/proc/self/cgroup").read_text().split(":")[-1].strip().strip("/")
    names = ("cpu", "memory") if version == 1 else (group, group)
    for name in names:
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
    if version == 1:
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text(f"{quota}\n")
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{2**28 if cores else 2**63 - 4096}\n")
    else:
        (tmp_path / group / "cpu.max").write_text(f"{'max' if quota < 0 else quota} 100000\n")
        (tmp_path / group / "memory.max").write_text(f"{2**28 if cores else 'max'}\n")
    found = machine.available_cores(), machine.available_memory()
    assert found == ((cores, 2**28) if cores else machine_has)


def test_packages_outside_of_their_ranges_are_named(look, monkeypatch):
    stated = ["numpy>=99", "numba>=0.1", "no-such-package>=1", 'no-such-extra>=1; extra == "gpu"']
    monkeypatch.setattr(metadata, "requires", lambda name: stated)
    check = look()["versions"]
    assert not check["ok"]
    assert check["values"]["wrong"] == [
        f"numpy {metadata.version('numpy')} is not >=99",
        "no-such-package is missing",
    ]


def test_faiss_for_gpus_serves_as_well_and_two_of_them_clash(look, monkeypatch, tmp_path):
    place = tmp_path.with_name("site-packages")
    for build in ("gpu", "cpu"):
        facts = place / f"faiss_{build}-1.15.dist-info"
        facts.mkdir(parents=True)
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: faiss-{build}\nVersion: 1.15\n")
    monkeypatch.setattr(metadata, "requires", lambda name: ["faiss-cpu>=1.11"])
    monkeypatch.setattr(metadata, "distributions", lambda: metadata.Distribution.discover(path=[str(place)]))
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution(name).version)
    monkeypatch.setattr(metadata.Distribution, "from_name", lambda name: found_in(place, name))
    faiss = look()["faiss"]
    assert not faiss["ok"] and "faiss-cpu and faiss-gpu own the same directory" in faiss["means"]
    shutil.rmtree(place / "faiss_cpu-1.15.dist-info")
    checks = look()
    assert checks["faiss"]["ok"] and checks["versions"]["values"]["packages"] == {"faiss-cpu": "1.15"}


def found_in(place, name):
    """An installed package, looked for in one directory."""
    found = list(metadata.Distribution.discover(name=name, path=[str(place)]))
    if not found:
        raise metadata.PackageNotFoundError(name)
    return found[0]


def test_a_gpu_that_this_torch_cannot_use(look, monkeypatch):
    torch = pytest.importorskip("torch")
    if torch.version.cuda or torch.version.hip:
        pytest.skip("this torch is built for GPUs")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    check = look()["GPU"]
    assert not check["ok"] and "torch built for CUDA" in check["means"]


def test_a_slow_disk_and_one_without_hard_links(look, monkeypatch):
    def refuse(*paths):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda descriptor: time.sleep(0.6))
    checks = look()
    assert 1e6 < checks["disk speed"]["values"]["bytes_per_second"] < 2**22 / 0.6
    assert not checks["disk speed"]["ok"] and not checks["hard links"]["ok"]
    shown = examination({"checks": list(checks.values())}, DoctorConfig())
    assert (
        "! hard links  PermissionError" in shown and "Worth a look:" in shown and "hard links" in shown.splitlines()[-1]
    )


def test_a_directory_that_cannot_be_written_to(look, monkeypatch):
    """The rest of what was found is shown all the same."""

    def refuse(**where):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    checks = look()
    assert not checks["disk speed"]["ok"] and "Read-only" in checks["disk speed"]["found"]
    assert "cores" in checks and "hard links" not in checks


def test_idle_cores_are_the_fault_of_a_setting_alone(look, monkeypatch):
    """Without one torch may take half of the logical cores on purpose."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS=1 leaves some of them idle" in look()["cores"]["means"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert look()["cores"]["ok"]


def test_the_program_alone_greets_with_three_ways_to_begin(capsys):
    assert cli.run([]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(lines) == 3
    for line in lines:
        for command in line.split(" && "):
            name, *words = command.removeprefix("mlsm ").replace("'", "").split()
            if load(name).recipes:
                take_value(words, "--recipe")
            read_flags(load(name).settings, words)  # raises on a flag that does not exist
