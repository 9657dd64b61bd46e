"""Slopes from the engine: the demo pool on the MNIST images that ship with RobBoost, shifted for more of them."""

from __future__ import annotations

import time

import torch

from robboost.data import load_dataset
from robboost.mixtures import pool_bounds
from robboost.models import demo_pool
from robboost.threat import Threat
from robboost.weights import WeightProblem, store


def demo_slopes(images: int, device: str) -> tuple[WeightProblem, str]:
    """The solver's problem for l_inf 0.1 in float16, and a line about it; 6,000 images a shift, the first of none."""
    splits = [load_dataset("mnist-small", split=split) for split in ("heldout", "test", "train")]
    x, y = torch.cat([part.images for part in splits]), torch.cat([part.labels for part in splits])
    shifts = sorted(((dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)), key=lambda at: at[0] ** 2 + at[1] ** 2)
    copies = -(-images // len(x))
    if copies > len(shifts):
        raise ValueError(f"images={images}: expected at most {len(shifts) * len(x)}")
    x = torch.cat([x.roll(shift, dims=(2, 3)) for shift in shifts[:copies]])[:images].to(device)
    y = y.repeat(copies)[:images].to(device)
    models = [model.to(device) for model in demo_pool().models]
    began = time.perf_counter()
    bounds = pool_bounds(models, x, y, Threat(0.1, clip=(0.0, 1.0)), method="crown")
    computed = time.perf_counter() - began
    problem = bounds.problem(torch.tensor(bounds.scales().values, dtype=torch.float64, device=device))
    stored = store(problem, "float16")
    return stored.problem, (
        f"real: {len(models)} members of the demo pool, {images} images ({copies} shifts), {problem.n_pairs} pairs; "
        f"bounds in {computed:.1f} s; float16 takes at most {float(stored.error.max()):.1e} off a margin; "
        f"{len(stored.inputs)} of {problem.dim} inputs are alive"
    )
