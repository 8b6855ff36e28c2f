"""Dictionaries of other programs: the same atoms whichever way they lie, the same codes as their own program finds."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array

from mlsm import __main__ as cli
from mlsm.common.errors import DictionaryError
from pipeline.commands import encode_lsp
from pipeline.config import EncodeConfig
from pipeline.dictionary import Dictionary
from pipeline.imported import ImportConfig, import_dictionary
from pipeline.solvers import nonneg_lasso
from shards.reader import Store


@pytest.fixture
def atoms_Kd():
    atoms = np.random.default_rng(0).standard_normal((24, 16))
    return atoms / np.linalg.norm(atoms, axis=1, keepdims=True)


def saved(path, array):
    np.save(path, array)
    return path


def run(path, **settings):
    return import_dictionary(ImportConfig(file=path, output=path.parent / "runs", **settings))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_rows_and_columns_are_told_apart(tmp_path, atoms_Kd, dtype):
    """The official code's file is the second: what SPAMS returns, in Fortran order."""
    arrays = {"rows": atoms_Kd.astype(dtype), "columns": np.asfortranarray(atoms_Kd.T.astype(dtype))}
    assert arrays["columns"].flags.f_contiguous and arrays["columns"].shape == (16, 24)
    reports = {name: run(saved(tmp_path / "layer_10_k_24.npy", array)) for name, array in arrays.items()}
    assert {name: report["orientation"] for name, report in reports.items()} == {name: name for name in arrays}
    assert reports["rows"]["dictionary"] == reports["columns"]["dictionary"], "one content, one name"
    assert [report["finished_before"] for report in reports.values()] == [False, True]
    assert Path(reports["rows"]["dictionary"]).name.startswith("layer_10_k_24-k24-")
    loaded = Dictionary.load(reports["rows"]["dictionary"])
    np.testing.assert_array_equal(loaded.atoms_Kd, atoms_Kd.astype(dtype).astype(np.float32))
    assert loaded.centering == "none" and "atoms" not in loaded.settings, "targets of stores are named without it"


def test_a_dictionary_of_spams_codes_as_in_spams(tmp_path):
    spams = pytest.importorskip("spams", reason="SPAMS is the official code's dictionary learner")
    hidden = np.random.default_rng(1).standard_normal((16, 400))
    hidden = np.asfortranarray(hidden / np.linalg.norm(hidden, axis=0))
    settings = {"K": 24, "lambda1": 0.05, "posAlpha": True, "iter": 20, "batchsize": 100, "verbose": False}
    learned = spams.trainDL(hidden, **settings, numThreads=1)
    report = run(saved(tmp_path / "layer_10_k_24", learned).with_suffix(".npy"))
    assert (report["orientation"], report["dtype"], report["k"], report["width"]) == ("columns", "float64", 24, 16)
    theirs = spams.lasso(hidden, learned, lambda1=0.05, pos=True, numThreads=1).toarray().T
    atoms_Kd = Dictionary.load(report["dictionary"]).atoms_Kd
    codes = nonneg_lasso(np.ascontiguousarray(hidden.T, np.float32), atoms_Kd, 0.05, tol=1e-5)
    ours = csr_array((codes.values, codes.indices, codes.indptr), (400, 24)).toarray()
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


def test_what_cannot_be_imported_is_said(tmp_path, atoms_Kd):
    orthogonal = np.linalg.qr(np.random.default_rng(2).standard_normal((16, 16)))[0]
    with pytest.raises(DictionaryError, match=r"both the rows and the columns.*--orientation columns"):
        run(saved(tmp_path / "square.npy", orthogonal))
    assert run(tmp_path / "square.npy", orientation="rows")["k"] == 16
    with pytest.raises(DictionaryError, match="neither the rows nor the columns"):
        run(saved(tmp_path / "long.npy", 3 * atoms_Kd))
    with pytest.raises(DictionaryError, match=r"atom \d+ \(of the columns\) has norm .* expected at most 1"):
        run(saved(tmp_path / "other.npy", atoms_Kd), orientation="columns")
    short = run(saved(tmp_path / "short.npy", np.vstack([0.5 * atoms_Kd, np.zeros((1, 16))])), orientation="rows")
    with pytest.raises(DictionaryError, match="every atom is zero"):
        run(saved(tmp_path / "zeros.npy", np.zeros((9, 16))), orientation="rows")
    assert short["zero_atoms"] == 1 and short["largest_norm"] == pytest.approx(0.5)
    spoilt = atoms_Kd.copy()
    spoilt[3, 2] = np.nan
    with pytest.raises(DictionaryError, match="NaN or infinity"):
        run(saved(tmp_path / "nan.npy", spoilt))
    with pytest.raises(DictionaryError, match="expected a matrix of .* found int64"):
        run(saved(tmp_path / "int.npy", np.eye(4, dtype=np.int64)))
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match="is not a .npy file"):
        run(tmp_path / "text.npy")


def test_text_is_encoded_with_it(tmp_path, english_text, teacher_directory, capsys):
    """The store's dictionary is the imported one, and a code of the store is that of the atoms in the file."""
    atoms_dK = np.random.default_rng(3).standard_normal((32, 48))
    path = saved(tmp_path / "official.npy", np.asfortranarray(atoms_dK / np.linalg.norm(atoms_dK, axis=0)))
    assert cli.run(["import-dictionary", str(path), "--output", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    (dictionary,) = (tmp_path / "runs" / "dictionaries").iterdir()
    assert "the columns of the file" in shown and f"encode-lsp --dictionary {dictionary} --teacher" in shown
    settings = EncodeConfig(
        teacher=str(teacher_directory), corpus=(str(english_text),), layer=(2,), dictionary=dictionary
    )
    settings = replace(settings, lam=0.1, max_length=32, max_tokens=2_000, device="cpu", output=tmp_path / "runs")
    (report,) = encode_lsp(settings)
    store = Store.open(report["store"])
    assert store.settings["k"] == 48 and store.settings["dictionary"] == Dictionary.load(dictionary).fingerprint
    assert report["max_kkt"] <= 1e-4 and report["nnz_per_token"] > 1
