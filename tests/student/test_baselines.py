"""The constant prediction that an objective is compared with is about the best one, found by gradient descent.

A baseline in other units than the loss, such as one inherited with another loss, would make up an improvement.
"""

import pytest
import torch
from masked_half import mask_half

from student.objectives import OBJECTIVES
from student.train import term_scales


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_baseline_is_about_what_the_best_constant_scores(name, store_for, needed_by):
    store = store_for(name)
    objective = OBJECTIVES[name](store, **needed_by(name))
    micro = mask_half(store, objective)
    baseline = objective.baseline(store.split("train"), [micro.targets])["loss"]
    generator = torch.Generator().manual_seed(0)
    constant_K = (0.01 * torch.randn(objective.outputs, generator=generator)).requires_grad_()
    optimizer = torch.optim.Adam([constant_K], lr=0.1)
    scales_T = torch.tensor(term_scales(objective.term_weights, micro.targets.counts))
    for _ in range(300):
        optimizer.zero_grad()
        sums_T = objective.loss_sums(constant_K.expand(len(micro.where_M), -1).clone(), micro.targets)
        loss = sums_T @ scales_T
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.001 * baseline < 1.15 * loss.item()
