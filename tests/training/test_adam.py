"""A step of Adam against PyTorch's, with clipping and averaging; TRITON_INTERPRET=1 sends it through the kernel."""

import math

import pytest
import torch

from robboost.training.adam import AdamState, adam_step
from robboost.training.schedule import BETA1, BETA2

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 2051


def state() -> AdamState:
    flat = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return AdamState(flat, flat.clone(), torch.zeros_like(flat), torch.zeros_like(flat))


def row(step: int, lr: float, averaging: float) -> torch.Tensor:
    """Step size, root scale and averaging share of the schedule's table."""
    numbers = (lr / (1 - BETA1**step), 1 / math.sqrt(1 - BETA2**step), averaging)
    return torch.tensor([9.0, *numbers], device=DEVICE)[1:]


@pytest.mark.parametrize("clip_norm", [0.0, 0.5, 1e6])
def test_steps_are_pytorchs(clip_norm: float) -> None:
    found = state()
    wanted = found.flat.double().clone().requires_grad_(True)
    average = wanted.detach().clone()
    optimizer = torch.optim.Adam([wanted], lr=0.01, betas=(BETA1, BETA2))
    for step, averaging in enumerate((1.0, 0.1, 0.7), start=1):
        gradient = torch.randn(COUNT, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        adam_step(found, gradient, gradient.norm(), row(step, 0.01, averaging), clip_norm=clip_norm)
        wanted.grad = gradient.double()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_([wanted], clip_norm)
        optimizer.step()
        average.lerp_(wanted.detach(), averaging)
        assert torch.allclose(found.flat.double(), wanted, rtol=1e-6, atol=1e-6)
        assert torch.allclose(found.average.double(), average, rtol=1e-6, atol=1e-6)
        if averaging == 1.0:
            assert torch.equal(found.flat, found.average)


def test_a_gradient_that_is_not_finite_shows() -> None:
    found = state()
    gradient = torch.ones(COUNT, device=DEVICE)
    gradient[5] = torch.nan
    adam_step(found, gradient, gradient.norm(), row(1, 0.01, 1.0), clip_norm=1.0)
    assert found.flat.isnan().all()
