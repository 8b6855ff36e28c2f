"""Too little memory, simulated on the CPU, and the option that needs less."""

import pytest
import torch
from tiny_store import log_of

from mlsm.common.errors import TrainingError
from student.config import StudentConfig
from student.encoders.model import Student
from student.held_out import HeldOut
from student.memory import forget_peak, peak_memory, what_fits
from student.train import train

pytestmark = pytest.mark.promise("11 a GPU's memory …")


FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity of ...")
FULL_FOR_CUDA = RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://...\n")
FULL_FOR_CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


def allow(monkeypatch, most, after=0, error=FULL):
    """Let the model's forward pass fail for more windows than `most`, but for the first `after` calls."""
    forward, calls = Student.forward, []

    def limited(self, input_WL, *rest, **counted):
        if counted:  # no real pass: its operations are counted
            return forward(self, input_WL, *rest, **counted)
        calls.append(len(input_WL))
        if len(input_WL) > most and len(calls) > after:
            raise error
        return forward(self, input_WL, *rest)

    monkeypatch.setattr(Student, "forward", limited)
    return calls


@pytest.mark.parametrize(
    ("most", "error", "said"),
    [
        (5, FULL, "CUDA out of memory, with --micro-batch 12. --micro-batch 3 fits"),
        (1, FULL, "CUDA out of memory, with --micro-batch 12. --micro-batch 1 fits"),
        (5, FULL_FOR_CUDA, "CUDA error: out of memory, with --micro-batch 12. --micro-batch 3 fits"),
        (5, FULL_FOR_CUBLAS, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED .*, with --micro-batch 12. --micro-batch 3 fits"),
    ],
)
def test_the_error_names_a_micro_batch_that_does_fit(ids_store, settings, monkeypatch, most, error, said):
    calls = allow(monkeypatch, most, error=error)
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"micro_batch": 12})
    with pytest.raises(TrainingError, match=f"step 1: {said}") as caught:
        train(config)
    assert "\n" not in str(caught.value) and calls[-1] <= most
    assert not log_of(config.run_dir) and not list(config.run_dir.glob("checkpoints/step-*"))


def test_what_was_advised_trains_the_run_to_its_end(ids_store, settings, monkeypatch):
    """From the last whole checkpoint, as the micro-batch is not what makes it another run."""
    allow(monkeypatch, 4, after=5)
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"micro_batch": 12, "eval_windows": 4})
    with pytest.raises(TrainingError, match="--micro-batch 3 fits.*Last whole checkpoint: .*step-0000000"):
        train(config)
    advised = settings | {"micro_batch": 3, "eval_windows": 4}
    assert train(StudentConfig(store=ids_store.path, objective="mlm", **advised))["steps"] == 8


def test_where_nothing_fits_the_error_says_so(ids_store, settings, monkeypatch):
    allow(monkeypatch, 0)
    with pytest.raises(TrainingError, match="Not even one window fits"):
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings))


def test_too_little_memory_for_an_evaluation_is_one_line_too(ids_store, settings, monkeypatch):
    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(HeldOut, "evaluate", full)
    with pytest.raises(TrainingError, match="evaluation after step 2: CUDA out of memory. Take a smaller") as caught:
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings | {"eval_every": 2, "checkpoints": (1,)}))
    assert "\n" not in str(caught.value)


def test_the_largest_of_the_halves_is_found():
    tried = []
    advice = what_fits(100, lambda windows: tried.append(windows) or windows <= 12)
    assert tried == [50, 25, 12] and "--micro-batch 12 fits" in advice
    assert "Not even one window fits" in what_fits(1, lambda windows: True)
    assert "Not even one window fits" in what_fits(5, lambda windows: False)


def test_a_gpu_forgets_its_peak_and_one_that_was_not_used_yet_has_none(monkeypatch):
    """As in a process that has done nothing but choose its device, where torch's own function raises."""
    forgotten = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    for is_used in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda is_used=is_used: is_used)
        forget_peak(torch.device("cuda", 1))
        assert forgotten == [torch.device("cuda", 1)] * is_used


def test_trying_leaves_no_trace(ids_store, settings, monkeypatch):
    """A try that fits updates nothing: weights, optimiser and curve are as without it."""
    from student.train import Stepper

    curves = []
    for output, tries in (("plain", False), ("tried", True)):
        update = Stepper.update

        def with_tries(self, step, batch, tries=tries, update=update):
            if tries:
                with torch.random.fork_rng():
                    assert self.fits(batch.micro[0], batch.counts)
            return update(self, step, batch)

        monkeypatch.setattr(Stepper, "update", with_tries)
        changes = {"run_dir": settings["run_dir"].with_name(output), "max_steps": 3}
        train(StudentConfig(store=ids_store.path, objective="mlm", **settings | changes))
        curves.append([(line["loss"], line["grad_norm"]) for line in log_of(changes["run_dir"]).values()])
        monkeypatch.undo()
    assert curves[0] == curves[1]


def test_activation_checkpointing_changes_no_bit(lsp_store, settings):
    """With dropout, whose random numbers must be the same in the second forward pass."""
    curves = []
    for checkpointing in (False, True):
        output = settings["run_dir"].with_name(str(checkpointing))
        changes = {
            "activation_checkpointing": checkpointing,
            "run_dir": output,
            "dropout": 0.2,
            "store": lsp_store.path,
        }
        train(StudentConfig(**settings | changes))
        curves.append([(line["loss"], line["grad_norm"]) for line in log_of(output).values()])
    assert curves[0] == curves[1]


def test_activation_checkpointing_keeps_less_for_the_backward_pass(lsp_store, settings):
    from student.encoders.model import build_student
    from student.objectives import OBJECTIVES
    from student.resolve import training_windows
    from student.train import Stepper

    kept = {}
    for checkpointing in (False, True):
        config = StudentConfig(**settings | {"activation_checkpointing": checkpointing, "encoder": "bert-4x32"})
        objective = OBJECTIVES["mlsm"](lsp_store)
        stepper = Stepper(config, build_student(config, lsp_store, objective), objective)
        kept[checkpointing] = saved_bytes(stepper, training_windows(lsp_store))
    assert kept[True] < kept[False] / 2


def saved_bytes(stepper, windows):
    """Bytes that autograd keeps from a forward pass of 4 windows, weights left out."""
    weights = {weight.data_ptr() for weight in stepper.model.parameters()}
    saved = {}

    def note(tensor):
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    ids_WL = torch.from_numpy(windows.read(range(4)).ids.astype("int64"))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        stepper.model(ids_WL, None, torch.arange(6))
    return sum(saved.values())


def test_peak_memory_is_logged_in_bytes(ids_store, settings):
    before = peak_memory(torch.device("cpu"))
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings | {"max_steps": 1})
    train(config)
    assert 50e6 < before <= log_of(config.run_dir)[1]["peak_memory_bytes"] <= peak_memory(torch.device("cpu")) < 1e11
