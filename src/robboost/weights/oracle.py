"""One pass over the slopes: the norm of every pair's mixed column, and a dual-feasible minorant of it.

The plain PyTorch form, in float64, is the reference. Where a compiled kernel exists for the device, it takes the place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from robboost.errors import InputError
from robboost.observability import span
from robboost.weights.problem import Norm, WeightProblem

__all__ = ["Pass", "answer", "checked_pass", "euclidean", "evaluate_columns", "fast_pass", "reference_pass"]

# Below this many numbers the reference is done before a compiled kernel has started.
_WORTH_COMPILING = 500_000


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass at weights a returns, pair by pair (float64, on the device of the slopes).

    For any d with dual norm at most 1, `<d, A_n b> <= ||A_n b||_q` for every b, with near equality at b = a for the d
    chosen here. So `slopes[n] . b` is a linear minorant of the norm, valid everywhere.

    Attributes:
        norms: [n], ||A_n a||_q.
        slopes: [n, T], A_n^T d.
        sizes: [n], at least the sum of magnitudes `|A_nt|^T |d|` of every member t, which the rounding of `slopes` is
            relative to; only where sums are float64.
    """

    norms: torch.Tensor
    slopes: torch.Tensor
    sizes: torch.Tensor | None = None


def evaluate_columns(
    columns: torch.Tensor, weights: torch.Tensor, width: float, norm: Norm, *, sized: bool = False
) -> Pass:
    """One pass over columns [T, m, d] in float64."""
    norms, dual = answer(torch.einsum("t,tmd->md", weights, columns), width, norm)
    sizes = torch.einsum("md,tmd->mt", dual.abs(), columns.abs()).amax(1) if sized else None
    return Pass(norms=norms, slopes=torch.einsum("md,tmd->mt", dual, columns), sizes=sizes)


def answer(mixed: torch.Tensor, width: float, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms [m] of mixed columns [m, d], and for each the attacker's (smoothed) best answer d [m, d].

    d = clip(u / width, -1, 1) for l_inf threats, u / max(||u||, width) for l_2; at width 0 a subgradient. For l_1 it is
    the sign of the single largest entry, whatever the width.
    """
    if norm == "linf":
        return mixed.abs().sum(1), (mixed / width).clamp(-1.0, 1.0) if width > 0 else mixed.sign()
    if norm == "l2":
        norms = euclidean(mixed)
        # The clamp keeps 0 / 0 out; 0 is a valid d there.
        return norms, mixed / norms.clamp(min=max(width, torch.finfo(torch.float64).tiny))[:, None]
    norms, where = mixed.abs().max(dim=1)
    return norms, torch.zeros_like(mixed).scatter_(1, where[:, None], mixed.gather(1, where[:, None]).sign())


def euclidean(values: torch.Tensor) -> torch.Tensor:
    """l_2 norms over the last dimension, of numbers whose squares may be beyond the range of floating point."""
    largest = values.abs().amax(-1)
    unit = torch.where(largest > 0, largest, 1.0)
    return torch.linalg.vector_norm(values / unit[..., None], dim=-1) * unit


def reference_pass(problem: WeightProblem, weights: torch.Tensor, width: float = 0.0, *, sized: bool = True) -> Pass:
    """One pass over a whole problem, in chunks, in float64: the twin that the kernels are checked against."""
    parts = (evaluate_columns(columns, weights, width, problem.norm, sized=sized) for _, columns in problem.chunks())
    return _collected(problem, parts, sized)


def fast_pass(
    problem: WeightProblem, weights: torch.Tensor, width: float = 0.0, *, double: bool = False, threads: int = 1
) -> Pass:
    """The same by a compiled kernel where one fits (l_inf, contiguous inputs, enough of them).

    Its sums are float32, or float64 with `double`.
    """
    slopes = problem.slopes
    if slopes.is_meta:
        runs = problem.runs(problem.n_pairs)
        parts = (fast_pass(run, weights, width, double=double, threads=threads) for _, run in runs)
        return _collected(problem, parts, double)
    fits = problem.norm == "linf" and (slopes.stride(2) == 1 or problem.dim == 1)
    if fits and slopes.is_cuda and find_spec("triton"):
        from robboost.weights.kernel_gpu import gpu_pass

        return gpu_pass(slopes, problem.radius, weights, width, double=double)
    if fits and slopes.device.type == "cpu" and slopes.numel() >= _WORTH_COMPILING and find_spec("numba"):
        from robboost.weights.kernel_cpu import cpu_pass

        return cpu_pass(slopes, problem.radius, weights, width, double=double, threads=threads)
    return reference_pass(problem, weights, width, sized=double)


@span("passes over the slopes")
def checked_pass(
    problem: WeightProblem, weights: torch.Tensor, width: float = 0.0, *, double: bool = False, threads: int = 1
) -> Pass:
    """`fast_pass`, refusing slopes that are not numbers: any of them makes its pair's norm NaN or infinite."""
    result = fast_pass(problem, weights, width, double=double, threads=threads)
    finite = torch.isfinite(result.norms)
    if not bool(finite.all()):
        pair = int((~finite).nonzero()[0, 0])
        raise InputError(f"slopes of pair {pair} hold NaN, infinity or numbers too large: expected finite numbers")
    return result


def _collected(problem: WeightProblem, parts: Iterable[Pass], sized: bool) -> Pass:
    """The pass over all pairs from those over runs of them; `sized`: their sizes too, which every part then holds.

    Their place is set aside at the start: results kept among the temporaries of every run leave holes in the heap, and
    a stream then holds most of what it was to hold only for a moment.
    """
    count = problem.own_pairs
    norms = torch.empty(count, dtype=torch.float64, device=problem.device)
    slopes = torch.empty(count, problem.n_members, dtype=torch.float64, device=problem.device)
    sizes = torch.full((count if sized else 0,), torch.inf, dtype=torch.float64, device=problem.device)
    first = 0
    for part in parts:
        last = first + len(part.norms)
        norms[first:last], slopes[first:last] = part.norms, part.slopes
        if sized and part.sizes is not None:
            sizes[first:last] = part.sizes
        first = last
    # Asked of every process alike, also of one that holds no pair.
    whole = problem.whole(norms), problem.whole(slopes)
    return Pass(*whole, problem.whole(sizes) if sized else None)
