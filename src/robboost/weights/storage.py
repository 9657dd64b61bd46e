"""Slopes in fewer bytes, with every margin still valid: what rounding may cost is taken off the intercepts.

Rounding the magnitude of each slope outward would be unsound for mixtures, where slopes cancel. Instead, with stored
slopes A^ and e_tn = ||radius * (A_tn - A^_tn)||_q rounded up, the triangle inequality gives for every mix

    c . a - ||A a||_q >= (c - e) . a - ||A^ a||_q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from robboost.errors import InputError
from robboost.weights.oracle import euclidean
from robboost.weights.problem import WeightProblem

__all__ = ["Precision", "Stored", "store"]

Precision = Literal["float16", "bfloat16", "float32"]

# Room for the rounding of the float64 sums that measure an error.
_ROOM = 1.0 + 1e-9


@dataclass(frozen=True, eq=False)
class Stored:
    """A problem in lower precision.

    Attributes:
        problem: its margins are at most those of the original, under every mix.
        error: [T, n], what was taken off each intercept.
        inputs: indices [d'] of the inputs that were kept; the others (dead pixels) have no slope or no radius anywhere.
    """

    problem: WeightProblem
    error: torch.Tensor
    inputs: torch.Tensor


def store(problem: WeightProblem, precision: Precision, *, out: torch.Tensor | None = None) -> Stored:
    """Rounds the slopes to `precision`, chunk by chunk, and drops dead inputs; reads the slopes twice.

    A radius of its own for every input goes into the slopes, so that a pass reads them alone, and a power of two moves
    between them and the scalar radius left, so that float16's narrow range fits. `out` takes the place of the new array
    (a memory map, say): its leading [T, n, d'] numbers are used.
    """
    if precision not in get_args(Precision):
        raise InputError(f"precision={precision!r}: expected one of {', '.join(map(repr, get_args(Precision)))}")
    dtype = getattr(torch, precision)
    largest, alive = _extent(problem)
    inputs = alive.nonzero()[:, 0]
    if inputs.numel() == 0:
        inputs = torch.zeros(1, dtype=torch.long, device=problem.device)
    # Largest number at 2^14: a factor of two below float16's limit, 2^28 above its smallest normal number.
    lift = 2.0 ** min(14 - math.ceil(math.log2(largest)), 1000) if largest > 0 else 1.0
    shape = (problem.n_members, problem.n_pairs, inputs.numel())
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=problem.device)
    elif out.dtype != dtype or out.ndim != 3 or any(have < need for have, need in zip(out.shape, shape, strict=True)):
        raise InputError(f"out is {out.dtype} of shape {tuple(out.shape)}: expected {dtype} of at least {shape}")
    held = out[: shape[0], : shape[1], : shape[2]]
    radius = (problem.radius if problem.radius.ndim == 0 else problem.radius.new_ones(())) / lift
    error = torch.empty_like(problem.intercepts)
    for part in _parts(problem):
        exact = _scaled(problem, part)[:, :, inputs] * lift
        held[:, part] = exact.to(dtype)
        lost = (exact - held[:, part].to(torch.float64)).abs()
        if problem.radius.ndim:
            # The product of slope and radius was rounded itself.
            lost += 2.0**-53 * exact.abs()
        lost *= radius
        if problem.norm == "linf":
            error[:, part] = lost.sum(2)
        elif problem.norm == "l2":
            error[:, part] = euclidean(lost)
        else:
            error[:, part] = lost.amax(2)
    error *= _ROOM
    lowered = problem.intercepts - error
    # Rounding down: a subtraction may have rounded up.
    lowered = torch.where(error > 0, torch.nextafter(lowered, torch.full_like(lowered, -math.inf)), lowered)
    stored = replace(problem, slopes=held, intercepts=lowered, radius=radius)
    return Stored(problem=stored, error=error, inputs=inputs)


def _scaled(problem: WeightProblem, part: slice) -> torch.Tensor:
    """The slopes of a run of pairs in float64, times the radius where inputs have their own: [T, m, d]."""
    return problem.columns(part) if problem.radius.ndim else problem.slopes[:, part].to(torch.float64)


def _extent(problem: WeightProblem) -> tuple[float, torch.Tensor]:
    """Largest number to be stored, and which inputs have both a slope and a radius on some pair."""
    largest = 0.0
    alive = torch.zeros(problem.dim, dtype=torch.bool, device=problem.device)
    for part in _parts(problem):
        top = _scaled(problem, part).abs().amax(0)
        peak = float(top.max())
        if not math.isfinite(peak):
            raise InputError(
                f"slopes of pairs {part.start} to {part.stop} hold NaN or infinity: expected finite numbers"
            )
        alive |= ((top > 0) & (problem.radius > 0)).any(0) if problem.radius.ndim == 0 else (top > 0).any(0)
        largest = max(largest, peak)
    return largest, alive


def _parts(problem: WeightProblem) -> list[slice]:
    step = max(1, 2**23 // (problem.n_members * problem.dim))
    return [slice(start, start + step) for start in range(0, problem.n_pairs, step)]
