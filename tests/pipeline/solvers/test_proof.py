"""Which solver a GPU gets: the decision as a table, and real children that crash, hang, answer wrongly or are right."""

import re
import sys
from pathlib import Path

import pytest
import torch
from lasso import problem
from preloaded import SUBPROCESS, Hanging, standing_in

from mlsm.common import proofs
from pipeline.solvers import choose_backend, proof

sys.path.append(str(Path(__file__).resolve().parent))  # where a child finds planted_trial.py

LAM, CPU = 0.1, torch.device("cpu")
RIGHT = {
    "tokens": 4096,
    "unfinished": 0,
    "kkt": 9e-5,
    "certificate_error": 1e-6,
    "gap": 1e-4,
    "weight": 1.5,
    "differs": 0.001,
    "nonzeros": 30.0,
    "seconds": 0.002,
    "first_seconds": 9.0,
}
SLOW = RIGHT | {"seconds": 0.02}
DIED, HUNG = "it ended with signal SIGSEGV: it printed nothing", "it had not ended after 120 seconds"
RAISED = {"error": "ImportError: numba-cuda is missing"}
FULL = {"error": "OutOfMemoryError: CUDA out of memory", "lacks_memory": True}


@pytest.mark.parametrize(
    ("torch_did", "cuda_did", "trouble", "backend", "says", "keep"),
    [
        (SLOW, RIGHT, None, "cuda", r"the CUDA kernels: both solvers are right.*2 ms, plain torch 20 ms", True),
        (RIGHT, SLOW, None, "torch", "plain torch: both solvers are right", True),
        (RIGHT, RIGHT, None, "torch", "both", True),
        (SLOW, RAISED, None, "torch", "the CUDA kernels cannot be used: ImportError: numba-cuda is missing", True),
        (SLOW, {}, DIED, "torch", "failed while it ran .*SIGSEGV", True),
        (SLOW, {}, HUNG, "torch", "had not ended after 120 seconds", False),
        (SLOW, None, DIED, "torch", "its turn did not come", True),
        (SLOW, FULL, None, "torch", "OutOfMemory", False),
        (SLOW, RIGHT | {"kkt": 2e-4}, None, "torch", "wrong codes: a KKT violation of 0.0002", True),
        (SLOW, RIGHT | {"certificate_error": 1e-4}, None, "torch", "certified codes whose violation is larger", True),
        (SLOW, RIGHT | {"unfinished": 5}, None, "torch", "left 5 of 4,096 rows above", True),
        (SLOW, RIGHT | {"unfinished": 4}, None, "cuda", "", True),
        (SLOW, RIGHT | {"gap": 2e-3}, None, "torch", "wrong codes: a duality gap of 0.002", True),
        (SLOW, RIGHT | {"differs": 0.03}, None, "torch", "total variation of 0.03 from those of the CPU", True),
        (SLOW, RIGHT | {"kkt": float("nan")}, None, "torch", "codes that are no numbers", True),
        (RIGHT | {"kkt": 0.1}, SLOW, None, "cuda", "plain torch cannot be used: wrong codes", True),
        (RAISED, SLOW, None, "cuda", "plain torch cannot be used", True),
        (RAISED, {}, DIED, "cpu", "the CPU: neither the CUDA kernels .*SIGSEGV.* nor plain torch .*missing", True),
        ({}, None, HUNG, "torch", "plain torch: nothing could be tried: .*had not ended", False),
        ({}, None, DIED, "cpu", "neither", True),
        (RAISED, {}, HUNG, "cpu", "neither", False),
        (FULL, FULL, None, "torch", "nothing could be tried", False),
        (None, None, DIED, "torch", "nothing could be tried", False),
    ],
)
def test_the_decision(torch_did, cuda_did, trouble, backend, says, keep):
    trials = {"cpu": RIGHT, "torch": torch_did, "cuda": cuda_did}
    trials = {name: trial for name, trial in trials.items() if trial is not None}
    choice = proof.decide_solver(trials, trouble, LAM, passing=trouble == HUNG)
    assert (choice.backend, choice.keep) == (backend, keep)
    assert re.search(says, choice.line), choice.line
    assert "\n" not in choice.line
    right = {name for name in ("torch", "cuda") if proof.find_solver_fault(trials.get(name), trouble, LAM) is None}
    assert set(choice.right) == right and (backend in right or not right)


def test_what_codes_that_are_all_empty_prove_is_not_kept():
    empty = RIGHT | {"nonzeros": 0.0}
    choice = proof.decide_solver({"cpu": empty, "torch": empty, "cuda": empty}, None, LAM)
    assert set(choice.right) == {"torch", "cuda"} and not choice.keep


def test_right_codes_differ_more_where_the_tolerance_weighs_more_beside_lam():
    trial = RIGHT | {"differs": 0.05, "gap": 0.0}
    faults = [proof.find_solver_fault(trial, None, lam) for lam in (LAM, proof.USUAL_LAM, 0.03, 0.02, 0.001)]
    assert [fault is None for fault in faults] == [False, False, False, True, True]


@pytest.fixture
def planted(monkeypatch, tmp_path):
    """Chooses a solver with a child in which solvers do what is planted; the cache is empty at first."""
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    monkeypatch.setattr(proof, "TRIAL", "planted_trial")
    monkeypatch.setattr(proof, "ROWS", 64)
    monkeypatch.setattr(proof, "_said", set())
    hidden, atoms = problem(40)

    def choose(does, **how):
        monkeypatch.setattr(proof, "_proven", {})  # as in a new process
        monkeypatch.setenv("MLSM_PLANTED", does)
        return proof.choose_solver(hidden, atoms, LAM, CPU, **how)

    return choose


@pytest.mark.parametrize(
    ("does", "backend", "says"),
    [
        ("torch=slow cuda=right", "cuda", "both solvers are right"),
        ("torch=right cuda=slow", "torch", "both solvers are right"),
        ("torch=right cuda=crash", "torch", "SIGSEGV"),
        ("torch=right cuda=other_atoms", "torch", "certified codes whose violation"),
        ("torch=right cuda=honest", "torch", "left 64 of 64 rows"),
        ("torch=right cuda=fail", "torch", "numba-cuda is missing"),
        ("torch=crash cuda=right", "cpu", "neither"),
    ],
)
def test_children_that_fail_and_children_that_do_not(planted, caplog, does, backend, says):
    with caplog.at_level("INFO", "pipeline"):
        choice = planted(does)
    assert choice.backend == backend and says in choice.line
    tries, found = caplog.messages
    assert (caplog.records[-1].levelname == "WARNING") == (not choice.right)
    assert tries == "trying the solvers of this GPU, for 2 minutes at most" and says in found
    assert ("doctor --gpu tries again" in caplog.text) == ("cuda" not in choice.right)
    assert planted("torch=fail cuda=fail") == choice, "it is kept, and no child starts"


def test_a_child_that_hangs_costs_the_time_limit(planted, monkeypatch):
    monkeypatch.setattr(proofs, "subprocess", standing_in(Hanging))
    choice = planted("torch=right cuda=hang")
    assert choice.backend == "torch" and f"had not ended after {proof.SECONDS:.0f} seconds" in choice.line
    assert planted("torch=slow cuda=right").backend == "cuda", "it is not kept"


@pytest.mark.parametrize("fault", ["lack_memory", "lack_memory_of_cublas", "be_killed"])
def test_what_passes_is_not_kept(planted, fault):
    assert planted(f"torch=right cuda={fault}").backend == "torch"
    assert planted("torch=slow cuda=right").backend == "cuda"


def test_what_was_begun_with_a_solver_goes_on_with_it(planted, caplog):
    assert planted("torch=slow cuda=right").backend == "cuda"
    with caplog.at_level("INFO", "pipeline"):
        assert planted("", begun_with="torch").backend == "torch", "slower, and right"
    assert "uses plain torch, as this work was begun with it" in caplog.messages[-1]
    assert planted("", begun_with="cpu").backend == "cpu"
    caplog.clear()
    found = planted("torch=right cuda=crash", begun_with="cuda", fresh=True)
    assert found.backend == "torch"
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "begun with the CUDA kernels" in record.getMessage()
    assert planted("", begun_with="torch").backend == "torch", "a fresh proof takes the place of the one before"


def test_an_answer_is_of_one_driver_one_version_and_one_class_of_shapes(monkeypatch):
    keys = {proof.key_of(CPU, width, atoms, LAM) for width, atoms in ((16, 40), (10, 64), (17, 40), (16, 65))}
    assert len(keys) == 3, "16 x 40 and 10 x 64 are of one class"
    assert proof.key_of(CPU, 16, 40, 0.101) in keys and proof.key_of(CPU, 16, 40, 0.01) not in keys
    for patched, value in (("driver", "550.1"), ("torch", "9.9"), ("device", "another"), ("numba-cuda", "0.1")):
        facts = proofs.device_facts(CPU) | {patched: value}
        monkeypatch.setattr(proofs, "device_facts", lambda device, facts=facts: facts)
        keys.add(proof.key_of(CPU, 16, 40, LAM))
        monkeypatch.undo()
    monkeypatch.setattr(proof, "kernels_digest", lambda: "0")
    keys.add(proof.key_of(CPU, 16, 40, LAM))
    assert len(keys) == 8


def test_an_answer_is_of_what_is_installed(monkeypatch, tmp_path):
    """So that installing a compiler, of kernels or of C, is enough to have what lacked it tried again."""
    versions = dict.fromkeys(proofs.LIBRARIES, "1")
    monkeypatch.setattr(proofs.metadata, "version", lambda name: versions[name])
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    keys = [proofs.key_of(CPU)]
    for name in versions:
        versions[name] = "2"
        keys.append(proofs.key_of(CPU))
    for compiler in ("clang", "gcc"):
        (tmp_path / compiler).write_text("")
        (tmp_path / compiler).chmod(0o755)
        keys.append(proofs.key_of(CPU))
    monkeypatch.setenv("CC", "icx")
    keys.append(proofs.key_of(CPU))
    assert len(set(keys)) == len(keys) == 1 + len(versions) + 3


@pytest.mark.parametrize("spoilt", ["", "[]", '{"KEY": 3}', '{"KEY": {"backend": "cuda"}}', "[" * 100_000])
def test_a_spoilt_cache_holds_no_answer(monkeypatch, tmp_path, spoilt):
    monkeypatch.setenv("MLSM_CACHE", str(tmp_path))
    key = proof.key_of(CPU, 16, 40, LAM)
    proofs.keep(key, proof.decide_solver({"torch": SLOW, "cuda": RIGHT}, None, LAM)._asdict())
    assert proof.kept_backend(CPU, 16, 40, LAM) == "cuda"
    (tmp_path / "gpu-proofs.json").write_text(spoilt.replace("KEY", key))
    assert proof.kept_backend(CPU, 16, 40, LAM) is None
    proofs.keep(key, proof.decide_solver({"torch": SLOW, "cuda": RIGHT}, None, LAM)._asdict())
    assert proof.kept_backend(CPU, 16, 40, LAM) == "cuda"


def test_a_cache_that_cannot_be_written_costs_the_answer_alone(planted, tmp_path):
    (tmp_path / "cache").write_text("")
    assert planted("torch=slow cuda=right").backend == "cuda"


def test_without_a_choice_a_gpu_gets_what_was_proven_or_plain_torch(planted):
    gpu = torch.device("cuda", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proofs, "device_facts", lambda device: {"device": "a GPU"})
        with pytest.warns(UserWarning, match="no solver was proven on cuda:0 .* doctor --gpu"):
            assert choose_backend(gpu, 16, 40, LAM) == "torch"
        proofs.keep(
            proof.key_of(gpu, 16, 40, LAM), proof.decide_solver({"torch": SLOW, "cuda": RIGHT}, None, LAM)._asdict()
        )
        assert choose_backend(gpu, 16, 40, LAM) == "cuda"
    assert choose_backend(CPU, 16, 40, LAM) == "cpu"


def test_the_real_child_proves_plain_torch_and_the_kernels(monkeypatch):
    """The kernels in Numba's simulator; the rows are few, as it is slow."""
    pytest.importorskip("cuda.bindings", reason='no numba-cuda: pip install "mlsm-pretrain[test]"')
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    monkeypatch.setattr(proof, "TRIAL", "simulated_trial")
    monkeypatch.setattr(proof, "ROWS", 3)
    hidden, atoms = problem(3, width=8, atoms=16)
    choice = proof.prove_solvers(hidden, atoms, LAM, CPU)
    assert set(choice.right) == {"torch", "cuda"}, choice.line
    for name in choice.right:
        found = choice.trials[name]
        assert found["tokens"] == 3 and found["differs"] < 0.01 and found["kkt"] <= 1.2e-4 and found["nonzeros"] > 1


def test_a_gpu_that_the_child_cannot_use_is_not_judged(monkeypatch):
    """As where only one process may use it: here there is none."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(proofs, "subprocess", SUBPROCESS)
    choice = proof.prove_solvers(*problem(8), LAM, torch.device("cuda", 0))
    assert (choice.backend, choice.right, choice.keep) == ("torch", (), False)
    assert "nothing could be tried" in choice.line and "torch finds no GPU here" in choice.line


def test_the_real_child_says_what_kernels_lack_on_a_machine_without_a_gpu(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(proof, "ROWS", 8)
    choice = proof.prove_solvers(*problem(8), LAM, CPU)
    assert choice.backend == "torch" and choice.right == ("torch",)
