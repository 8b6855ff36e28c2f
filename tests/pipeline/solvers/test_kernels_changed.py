"""What depends on the solvers alone is checked again as soon as a file that they depend on changes."""

import json
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent))

import kernels_changed


@pytest.mark.parametrize("check", kernels_changed.FILES)
def test_every_file_counts(check, tmp_path):
    files = [file for pattern in kernels_changed.FILES[check] for file in kernels_changed.ROOT.glob(pattern)]
    assert len(files) >= len(kernels_changed.FILES[check]), "each pattern finds a file"
    for file in files:
        copy = tmp_path / file.relative_to(kernels_changed.ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    before = kernels_changed.digest(check, tmp_path)
    assert before == kernels_changed.digest(check)
    for file in files:
        copy = tmp_path / file.relative_to(kernels_changed.ROOT)
        content = copy.read_bytes()
        copy.write_bytes(content + b"\n")
        assert kernels_changed.digest(check, tmp_path) != before, file
        copy.write_bytes(content)


def test_what_was_skipped_is_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels_changed, "RECORD", tmp_path / "checked.json")
    kernels_changed.RECORD.write_text('{"budgets": "before"}')
    kernels_changed.record(
        "SKIPPED [9] tests/pipeline/solvers/test_instruction_budgets.py:75: no ptxas\n"
        "SKIPPED [1] tests/pipeline/solvers/test_cd_cuda.py:68: needs a GPU"
    )
    found = json.loads(kernels_changed.RECORD.read_text())
    passed = kernels_changed.FILES.keys() - {"budgets"}
    assert found == {"budgets": "before"} | {check: kernels_changed.digest(check) for check in passed}


@pytest.mark.parametrize("library", kernels_changed.LIBRARIES)
def test_every_library_counts(library, monkeypatch):
    before = kernels_changed.digest("compiled")
    monkeypatch.setattr(kernels_changed, "version", lambda name: "0.1" if name == library else version(name))
    assert kernels_changed.digest("compiled") != before


def test_the_record_decides(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels_changed, "RECORD", tmp_path / "checked.json")
    monkeypatch.delenv("MLSM_GPU_CHECKS", raising=False)

    def skips(record):
        kernels_changed.RECORD.write_text(record)
        return kernels_changed.only_if_changed("streams").mark.args[0]

    passed = f'{{"streams": "{kernels_changed.digest("streams")}"}}'
    assert skips(passed) and not skips("{}") and not skips('{"streams": "of other files"}')
    monkeypatch.setenv("MLSM_GPU_CHECKS", "1")
    assert not skips(passed)
