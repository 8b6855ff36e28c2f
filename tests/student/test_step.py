"""One step: the norm by which the gradient is clipped, against float64; which runs are clipped by the older sum; steps
that are not finite; numbers of masked positions that are rounded up for compiled students."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.utils import counters

import student.train
from mlsm.common.errors import TrainingError
from student.batches import Loader, round_to_three_bits
from student.config import StudentConfig
from student.encoders.model import build_student
from student.masks.masking import build_masking
from student.objectives import OBJECTIVES
from student.resolve import resolve_compile
from student.train import Stepper, train

LARGE = 2**24  # values: as many as a third of the embeddings of a base-size model


class Table(torch.nn.Module):
    """A model whose gradient is a given table."""

    def __init__(self, gradient):
        super().__init__()
        self.weight, self.gradient = torch.nn.Parameter(torch.zeros(len(gradient))), gradient
        self.encoder = None

    def forward(self, *_):
        return self.weight @ self.gradient


def test_the_gradient_of_a_large_table_is_clipped_by_its_exact_norm(monkeypatch):
    monkeypatch.setattr(student.train, "use_fast_dropout", lambda encoder: None)
    monkeypatch.setattr(student.train, "to_device", lambda micro, device: micro)
    gradient = torch.rand(LARGE, generator=torch.Generator().manual_seed(0))
    objective = SimpleNamespace(term_weights=(1.0,), loss_sums=lambda logits, _: logits[None])
    config = StudentConfig(grad_clip=2.0, max_steps=10, batch_windows=1, micro_batch=1, lr=1e-3, device="cpu")
    stepper = Stepper(config, Table(gradient), objective)
    micro = SimpleNamespace(targets=(), fillers=0, inputs=())
    with torch.random.fork_rng():
        _, norm = stepper.update(0, SimpleNamespace(micro=[micro], counts=(1,)))
    exact = math.sqrt(gradient.double().square().sum())
    assert norm == pytest.approx(exact, rel=2e-6)
    clipped = math.sqrt(stepper.model.weight.grad.double().square().sum())
    assert clipped == pytest.approx(2.0, rel=2e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("spoilt", ["loss", "gradient", None])
def test_a_step_that_is_not_finite_changes_nothing(lsp_store, settings, spoilt, optimizer):
    """The optimiser looks at loss and norm by itself, on a GPU before the host has seen them."""
    stepper, loader = stepper_and_loader(StudentConfig(**settings, optimizer=optimizer), lsp_store)
    batches = [loader.step(1, step, 12) for step in range(2)]
    with torch.random.fork_rng():
        stepper.update(0, batches[0])
        before = state_of(stepper)
        if spoilt == "loss":  # which leaves the gradient as it is
            loss = stepper.loss
            stepper.loss = lambda *given: loss(*given) + math.inf
        elif spoilt == "gradient":
            next(stepper.model.parameters()).register_hook(lambda gradient: gradient.fill_(math.nan))
        found = stepper.update(1, batches[1])
    assert all(map(math.isfinite, found)) == (spoilt is None)
    same = [torch.equal(one, other) for one, other in zip(before, state_of(stepper), strict=True)]
    assert all(same) if spoilt else not any(same)


def test_one_weight_that_is_not_finite_is_not_saved(ids_store, settings, monkeypatch):
    config = StudentConfig(store=ids_store.path, objective="mlm", **settings)
    honest, calls = torch.optim.AdamW.step, []

    def spoil(self, closure=None):
        honest(self, closure)
        calls.append(1)
        if len(calls) == config.save_every:  # no held-out loss is computed at that step
            self.param_groups[0]["params"][0].data.flatten()[0] = float("inf")

    monkeypatch.setattr(torch.optim.AdamW, "step", spoil)
    with pytest.raises(TrainingError, match="after step 3 there are weights that are not finite, so nothing is saved"):
        train(config)
    assert not (config.run_dir / "checkpoints" / "step-00000003").exists()
    monkeypatch.undo()
    assert train(config)["steps"] == 8


def state_of(stepper):
    """Copies of weights, moments and counted steps."""
    held = [*stepper.model.parameters()]
    held += [value for state in stepper.optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in held]


def stepper_and_loader(config, store, **reading):
    facts = OBJECTIVES[config.objective]
    objective = facts(store, **{name: getattr(config, name) for name in facts.settings})
    masking = build_masking(config, store)
    loader = Loader(store.split("train"), masking, objective.read_targets, micro_batch=config.micro_batch, **reading)
    return Stepper(config, build_student(config, store, objective), objective), loader


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_few_shapes_are_the_same_loss(store_for, needed_by, settings, objective):
    """Numbers of masked positions are rounded up: the losses, gradients and held-out figures of a step stay."""
    changes = {"objective": objective, "dropout": 0.0, "micro_batch": 12, "mask_rate": 0.3} | needed_by(objective)
    config = StudentConfig(**settings | changes)
    figures, sizes = [], []
    for few_shapes in (False, True):
        stepper, loader = stepper_and_loader(config, store_for(objective), few_shapes=few_shapes)
        with torch.random.fork_rng():
            figures.append([stepper.update(step, loader.step(1, step, 12)) for step in range(3)])
        [micro] = loader.step(1, 3, 12).micro
        sizes.append((len(micro.where_M) - micro.fillers, micro.targets.counts))
        with torch.no_grad():
            sums = stepper.objective.measure(stepper.forward(micro), micro.targets)
        figures[-1] += [tuple(value.item() for value in sums.values())]
    assert sizes[0] == sizes[1] and figures[1] == [pytest.approx(one, rel=1e-4) for one in figures[0]]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_learns_the_loss_that_held_out_text_is_measured_by(store_for, needed_by, settings, objective):
    config = StudentConfig(**settings | {"objective": objective, "micro_batch": 12} | needed_by(objective))
    stepper, loader = stepper_and_loader(config, store_for(objective))
    batch = loader.step(1, 0, 12)
    [micro], of_objective = batch.micro, stepper.objective
    with torch.no_grad():
        logits = stepper.forward(micro)
        loss = stepper.loss(logits, micro.targets, batch.counts).item()
        measured = of_objective.figures(of_objective.measure(logits, micro.targets), batch.counts)["loss"]
    assert loss == pytest.approx(float(measured), rel=1e-5)


def test_a_compiled_student_meets_few_shapes(lsp_store, settings, monkeypatch):
    """Batches whose numbers of masked positions differ are two graphs at most: a static one and one of any size."""
    config = StudentConfig(**settings | {"batch_windows": 24, "micro_batch": 24, "dropout": 0.0, "mask_rate": 0.3})
    stepper, loader = stepper_and_loader(config, lsp_store, few_shapes=True)
    stepper.model.compile(backend="eager")
    counters.clear()
    counts, shapes = set(), set()
    with torch.random.fork_rng():
        for step in range(12):
            batch = loader.step(1, step, 24)
            [micro] = batch.micro
            counts.add(len(micro.where_M) - micro.fillers)
            shapes.add((len(micro.where_M), micro.most_masked))
            stepper.update(step, batch)
    assert len(counts) > 5 and len(shapes) <= 2
    assert counters["stats"]["unique_graphs"] <= 2


def test_rounding_up():
    counts = (0, 1, 7, 8, 9, 19, 2432, 2560, 2561)
    assert [round_to_three_bits(count) for count in counts] == [0, 1, 7, 8, 10, 20, 2560, 2560, 3072]


def test_a_student_is_compiled_on_a_gpu_unless_told_otherwise():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert [resolve_compile(None, cpu), resolve_compile(None, gpu)] == [False, True]
    assert resolve_compile(True, cpu) and not resolve_compile(False, gpu)
