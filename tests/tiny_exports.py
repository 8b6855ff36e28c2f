"""Exports of tiny students as if trained, and inputs to compare models with."""

import torch

from student.config import StudentConfig
from student.encoders.model import build_student
from student.runs.export import export_student

LINEAGE = {
    "settings": {"seed": 1},
    "step": 5,
    "tokens": 99,
    "flops": 10**9,
    "held_out": {"loss": 1.5},
    "baseline": {"loss": 2.0},
}
WHERE = torch.tensor([2, 9, 17])
IDS = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(0))
ATTENTION = (torch.arange(16) < torch.tensor([[16], [12]])).long()


def scrambled(model):
    """The model with weights as if trained: nothing is zero or one by construction."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
    return model.eval()


def exported(encoder, objective, store, directory):
    """A student as if trained, and the directory of its export."""
    model = scrambled(build_student(StudentConfig(encoder=str(encoder)), store, objective))
    directory.mkdir(exist_ok=True)
    export_student(model, directory, objective, store, LINEAGE)
    return model, directory
