"""A fused pass on any device against the float64 twin: one check for tests and for machines without pytest."""

from __future__ import annotations

import torch

from robboost.weights import WeightProblem, weight_problem
from robboost.weights.oracle import fast_pass, reference_pass

# Units of the last place of float32 that a sum over a block may lose.
ROUNDING = 64 * 2.0**-24
KINDS = ("scalar", "input", "pair")
CASES = [
    (12, 5, 784, torch.float32),
    (11, 4, 3072, torch.float32),
    (3, 20, 17, torch.float32),
    (64, 3, 600, torch.float32),
    (1, 2, 1, torch.float32),
    (5, 6, 513, torch.float64),
    (12, 5, 784, torch.float16),
    (3, 4, 1030, torch.bfloat16),
    (7, 9, 33, torch.float16),
]


def make(members, pairs, dim, dtype, kind, seed=0):
    """A problem and weights from random numbers; kind: radius "scalar", "input" [d] or "pair" [n, d]."""
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(members, pairs, dim, generator=generator).to(dtype)
    radius = {"scalar": 0.3, "input": torch.rand(dim, generator=generator)}.get(kind)
    if radius is None:
        radius = torch.rand(pairs, dim, generator=generator)
    problem = weight_problem(slopes, torch.zeros(members, pairs), radius)
    a = torch.rand(members, generator=generator, dtype=torch.float64)
    return problem, a / a.sum()


def gpu_errors(problem: WeightProblem, a: torch.Tensor, view=lambda problem: problem) -> dict[str, float]:
    """Largest errors of the GPU's pass of `view(problem)`, in units of the room stated for each; at most 1 is right.

    Unsmoothed minorants are compared where sums are float64 only: in float32 rounding may decide a sign.
    """
    moved = view(weight_problem(problem.slopes.cuda(), problem.intercepts, problem.radius))
    problem = view(problem)
    scale = problem.columns(slice(None)).abs().sum(2).amax(0)
    worst: dict[str, float] = {}
    for width in (0.02, 0.0):
        twin = reference_pass(problem, a, width)
        double, fast = (fast_pass(moved, a.cuda(), width, double=flag) for flag in (True, False))
        sharpness = 1 + float(problem.columns(slice(None)).abs().amax()) / width if width else 0.0
        found = {
            "float64 norms": (double.norms.cpu() - twin.norms).abs() / (1e-13 * scale),
            # The inverse width itself is float32 in the kernel; the minorant is that of a width next to it.
            "float64 minorants": (double.slopes.cpu() - twin.slopes).abs() / (1e-6 * scale[:, None]),
            "float32 norms": (fast.norms.cpu() - twin.norms).abs() / (ROUNDING * scale),
        }
        if width:
            room = ROUNDING * sharpness * scale[:, None]
            found["float32 minorants"] = (fast.slopes.cpu() - twin.slopes).abs() / room
        # What rounding is measured by may be generous, never less than the true magnitudes.
        found["magnitudes"] = (twin.sizes * (1 - 1e-5) > double.sizes.cpu()).double() * 2
        for name, error in found.items():
            worst[name] = max(worst.get(name, 0.0), float(error.max()))
    return worst
