"""Muon against a singular value decomposition and against torch's own."""

import pytest
import torch

from student.config import StudentConfig
from student.objectives.mlm import Mlm
from student.optimizer import Muon, build_optimizer, orthogonalise
from student.task import student_task


@pytest.mark.parametrize("shape", [(3, 24, 24), (2, 24, 96), (2, 96, 24)])
def test_singular_vectors_stay_and_singular_values_become_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, S, Vh = torch.linalg.svd(matrices.double(), full_matrices=False)
    in_their_basis = U.mT @ orthogonalise(matrices).double() @ Vh.mT
    values = in_their_basis.diagonal(dim1=-2, dim2=-1)
    assert (in_their_basis - torch.diag_embed(values)).abs().max() < 1e-4
    large = values[0.05 * S.amax(dim=-1, keepdim=True) < S]
    assert large.min() > 0.65 and large.max() < 1.25


def test_steps_are_those_of_torch_up_to_its_bfloat16():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(48, 16, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    mine = Muon([{"params": [ours], "weight_decay": 0.1, "orthogonal": True}], lr=0.02, fused=True)
    mine.found_inf = torch.zeros(())
    stock = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        gradient = torch.randn(48, 16, generator=generator)
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        stock.step()
    moved = (theirs - start).detach()
    assert (ours - theirs).detach().norm() < 0.02 * moved.norm()
    assert mine.state[ours]["step"] == 5
    mine.found_inf, ours.grad = torch.ones(()), torch.full((48, 16), torch.nan)
    mine.step()
    assert mine.state[ours]["step"] == 5 and ours.isfinite().all(), "a step that changes nothing is not counted"


def test_muon_takes_the_matrices_between_layers_alone(ids_store):
    config = StudentConfig(store=ids_store.path, objective="mlm", encoder="bert-2x32", lr=1e-3, optimizer="muon")
    model = student_task(config, ids_store).build()
    hidden, others, small = build_optimizer(model, config).param_groups
    names = {id(weight): name for name, weight in model.named_parameters()}
    assert len(hidden["params"]) == 2 * 6 + 1, "four of attention and two behind it in each layer, and the head's"
    assert {names[id(weight)].rsplit(".", 2)[-2] for weight in others["params"]} == {
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
    }
    assert {weight.ndim for weight in small["params"]} == {1} and Mlm(ids_store).tied
