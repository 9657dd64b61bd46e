"""Tiny pools that learnt something, for tests of everything above the bounds."""

import copy
from functools import cache

import torch
from torch import nn

from robboost.models.architectures import build

SHAPE = (1, 6, 6)
CLASSES = 3


def examples(count, seed):
    """Noisy stripes: the class says which third of the image is bright."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(CLASSES, (count,), generator=generator)
    x = 0.35 * torch.rand(count, *SHAPE, generator=generator)
    for n, label in enumerate(y.tolist()):
        x[n, :, 2 * label : 2 * label + 2] += 0.35
    return x.clamp(0, 1), y


def trained(structure, seed, steps=60):
    model = build(structure, SHAPE, num_classes=CLASSES, seed=seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(steps):
        x, y = examples(64, seed=1000 * seed + step)
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x + 0.1 * torch.rand_like(x).sub(0.5)), y).backward()
        optimiser.step()
    return model.eval()


def pool():
    """Three members, trained once in a process; each caller has its own copies."""
    return copy.deepcopy(_pool())


@cache
def _pool():
    torch.manual_seed(0)
    return [trained("fc 12", 1), trained("conv 4 3x3/1, fc 8", 2), trained("fc 8, fc 8", 3, steps=12)]
