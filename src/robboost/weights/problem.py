"""The problem of the best mix as a validated value: slopes, intercepts, radius, kappa and norm.

Everything below `weights` works on this value and nothing else: it never sees a network.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from robboost.errors import InputError

__all__ = ["Array", "Norm", "WeightProblem", "check_weights", "weight_problem", "weight_tensor"]

Array: TypeAlias = "torch.Tensor | np.ndarray[Any, Any] | Sequence[Any]"
Norm = Literal["linf", "l2", "l1"]

_STORED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
# One chunk of pairs in float64: small enough to stay out of the way, large enough to amortise a call.
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class WeightProblem:
    """Margins of T members on n (example, target) pairs, as linear functions of the attacker's move.

    Member t certifies `intercepts[t, n] - ||radius * slopes[t, n]||_q` on pair n, with q dual to `norm`. A mix with
    weights a on the simplex certifies (equation 7 of the paper)

        M_n(a) = intercepts[:, n] . a - || sum_t a_t radius * slopes[t, n] ||_q,

    which is concave in a, and its loss is `g(a) = sum_n max(0, kappa - M_n(a))` (equation 8).

    Build it with `weight_problem`, which checks everything but the values of the slopes: those are read for the first
    time by the first pass, which refuses NaN and infinity.

    Attributes:
        slopes: [T, n, d], float64, float32, float16 or bfloat16, any strides; never copied; may be memory-mapped.
        intercepts: [T, n], float64.
        radius: scalar, [d] or [n, d], float64. The threat set is {x : ||x / radius||_p <= 1}.
        kappa: the margin from which on a pair costs nothing.
        norm: the norm p of the threat.
    """

    slopes: torch.Tensor
    intercepts: torch.Tensor
    radius: torch.Tensor
    kappa: float
    norm: Norm

    @property
    def n_members(self) -> int:
        return int(self.slopes.shape[0])

    @property
    def n_pairs(self) -> int:
        return int(self.slopes.shape[1])

    @property
    def own_pairs(self) -> int:
        """Pairs that `runs` visits: all of them here, a part where processes share them."""
        return self.n_pairs

    @property
    def dim(self) -> int:
        return int(self.slopes.shape[2])

    @property
    def device(self) -> torch.device:
        return self.slopes.device

    @property
    def nbytes(self) -> int:
        """Bytes that one pass over the slopes reads."""
        return self.slopes.numel() * self.slopes.element_size()

    def with_kappa(self, kappa: float) -> WeightProblem:
        """The same margins under another kappa; no data is copied."""
        return replace(self, kappa=_checked_kappa(kappa))

    def take_members(self, members: Sequence[int]) -> WeightProblem:
        """The problem of a part of the pool; the slopes of the chosen members are copied."""
        index = torch.as_tensor(list(members), dtype=torch.long, device=self.device)
        return replace(self, slopes=self.slopes[index], intercepts=self.intercepts[index])

    def take_pairs(self, pairs: torch.Tensor) -> WeightProblem:
        """The problem of a part of the pairs, given by index or mask [n]; their slopes are copied."""
        index = pairs.to(self.device)
        if index.dtype == torch.bool:
            index = index.nonzero()[:, 0]
        radius = self.radius[index] if self.radius.ndim == 2 else self.radius
        return replace(
            self,
            slopes=self.slopes.index_select(1, index),
            intercepts=self.intercepts.index_select(1, index),
            radius=radius,
        )

    def only(self, kept: torch.Tensor) -> WeightProblem:
        """The problem of the pairs where `kept` [n] is true."""
        return self.take_pairs(kept)

    def every(self, step: int) -> WeightProblem:
        """The problem of every `step`-th pair, as a view: nothing is copied."""
        radius = self.radius[::step].contiguous() if self.radius.ndim == 2 else self.radius
        return replace(self, slopes=self.slopes[:, ::step], intercepts=self.intercepts[:, ::step], radius=radius)

    def run(self, part: slice) -> WeightProblem:
        """The problem of a run of pairs, as a view: nothing is copied."""
        radius = self.radius[part] if self.radius.ndim == 2 else self.radius
        return replace(self, slopes=self.slopes[:, part], intercepts=self.intercepts[:, part], radius=radius)

    def runs(self, step: int) -> Iterator[tuple[slice, WeightProblem]]:
        """Runs over the pairs, `step` at a time: a slice, and its problem with slopes in memory."""
        for start in range(0, self.n_pairs, step):
            part = slice(start, min(start + step, self.n_pairs))
            yield part, self.run(part)

    def whole(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of all pairs from those that `runs` visited: the same here, gathered where processes share the pairs."""
        return rows

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sums over all pairs from those over the pairs that `runs` visited."""
        return values

    def chunks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Runs over the pairs: a slice, and the columns `radius * slopes` there as float64, [T, m, d]."""
        step = max(1, _CHUNK_BYTES // max(1, 8 * self.n_members * self.dim))
        for start in range(0, self.n_pairs, step):
            part = slice(start, min(start + step, self.n_pairs))
            yield part, self.columns(part)

    def columns(self, part: slice) -> torch.Tensor:
        """The columns `radius * slopes` of the pairs in `part`, float64, [T, m, d]."""
        radius = self.radius[part] if self.radius.ndim == 2 else self.radius
        return self.slopes[:, part].to(torch.float64) * radius


def weight_problem(
    slopes: Array,
    intercepts: Array,
    radius: Array | float,
    *,
    kappa: float = 1.0,
    norm: str = "linf",
) -> WeightProblem:
    """Checks the arrays of a problem and wraps them without copying the slopes.

    Args:
        slopes: [T, n, d] or [T, n, *input]; NumPy (also memory-mapped) or torch, CPU or GPU.
        intercepts: [T, n]; with a box, already re-centred: `c + <slope, centre - x>`.
        radius: scalar, [d] or [n, d] (the trailing input shape may be spelled out); not negative.
        kappa: margin from which on a pair costs nothing; above zero.
        norm: norm of the threat, "linf", "l2" or "l1".
    """
    if norm not in get_args(Norm):
        raise InputError(f"norm={norm!r}: expected one of {', '.join(map(repr, get_args(Norm)))}")
    held = weight_tensor(slopes, "slopes")
    if held.dtype not in _STORED:
        raise InputError(f"slopes are {held.dtype}: expected float64, float32, float16 or bfloat16, so convert them")
    if held.ndim < 3:
        raise InputError(f"slopes have shape {tuple(held.shape)}: expected [members, pairs, inputs]")
    if min(held.shape) == 0:
        raise InputError(f"slopes have shape {tuple(held.shape)}: expected at least one member, pair and input")
    held = held.detach().flatten(2)
    c = weight_tensor(intercepts, "intercepts").detach()
    if c.is_complex():
        raise InputError(f"intercepts are {c.dtype}: expected real numbers")
    c = c.to(device=held.device, dtype=torch.float64)
    if c.shape != held.shape[:2]:
        raise InputError(
            f"intercepts have shape {tuple(c.shape)}: expected [members, pairs] = {tuple(held.shape[:2])} as in slopes"
        )
    if not bool(torch.isfinite(c).all()):
        t, n = (int(v) for v in (~torch.isfinite(c)).nonzero()[0])
        raise InputError(f"intercept of member {t} on pair {n} is {float(c[t, n])}: expected a finite number")
    return WeightProblem(
        slopes=held,
        intercepts=c,
        radius=_checked_radius(radius, held),
        kappa=_checked_kappa(kappa),
        norm=norm,  # type: ignore[arg-type]
    )


def check_weights(weights: Array, n_members: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Weights on the simplex as a float64 tensor [T], normalised exactly; refuses anything else."""
    a = weight_tensor(weights, "weights").detach().to(device=device, dtype=torch.float64)
    if a.shape != (n_members,):
        raise InputError(f"weights have shape {tuple(a.shape)}: expected ({n_members},), one per member")
    total = float(a.sum())
    if not bool((a >= 0).all()) or not abs(total - 1.0) <= 1e-6:
        raise InputError(f"weights sum to {total} with minimum {float(a.min())}: expected none negative and sum 1")
    return a / total


def _checked_radius(radius: Array | float, slopes: torch.Tensor) -> torch.Tensor:
    r = weight_tensor(radius, "radius").detach().to(device=slopes.device, dtype=torch.float64)
    n, d = int(slopes.shape[1]), int(slopes.shape[2])
    if r.numel() == 1:
        r = r.reshape(())
    elif r.shape[0] == n and r.numel() == n * d and r.ndim >= 2:
        r = r.reshape(n, d)
    elif r.numel() == d:
        r = r.reshape(d)
    else:
        raise InputError(f"radius has shape {tuple(r.shape)}: expected a scalar, [{d}] or [{n}, {d}]")
    if not bool(torch.isfinite(r).all()) or bool((r < 0).any()):
        raise InputError(f"radius reaches from {float(r.min())} to {float(r.max())}: expected finite, not negative")
    return r


def _checked_kappa(kappa: float) -> float:
    if not (math.isfinite(kappa) and kappa > 0):
        raise InputError(f"kappa={kappa}: expected a finite number above 0")
    return float(kappa)


def weight_tensor(value: Array | float, name: str) -> torch.Tensor:
    """A tensor that shares memory with the array where it can."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        array = np.asarray(value)
        with warnings.catch_warnings():
            # A read-only memory map is meant to stay read-only; nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} is {type(value).__name__}: expected an array of numbers ({error})") from None
