"""The linear bounds of all members of a pool on the same examples, and what a mix of them proves.

margin(x') >= <slope, x' - centre> + intercept for every x' in the threat set around an example. With weights none
negative these bounds add up, so that one set of arrays answers for every mix of the pool.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from robboost.bounds import Options, checked_examples, cross_check, margin_bounds
from robboost.errors import InputError
from robboost.inputs import Progress, in_float64
from robboost.journal import remembered
from robboost.models import Pool
from robboost.observability import span
from robboost.threat import Norm, Threat
from robboost.weights import Normalisers, WeightProblem, normalisers, weight_problem

__all__ = [
    "Members",
    "Mixed",
    "PoolBounds",
    "Progress",
    "bound_parts",
    "correct_under",
    "mix_margins",
    "named",
    "pool_bounds",
    "progress_steps",
    "target_classes",
]

# Networks in order, or by name, or as `read_pool` gives them.
Members = Sequence[nn.Module] | Mapping[str, nn.Module] | Pool

# Examples whose bounds are computed between two reports of progress: on a GPU more, since small chunks leave it idle.
_STEP = {"cpu": 100, "cuda": 1000}
# Values of a float64 temporary while margins are summed.
_CHUNK = 2**24


class Mixed(NamedTuple):
    """Margins of a mix and the size of the terms that they are the difference of, both [N, C - 1], float64."""

    lower: Tensor
    size: Tensor


@dataclass(frozen=True, eq=False)
class PoolBounds:
    """Bounds of T members on N examples against C - 1 targets each; d is the number of pixels.

    Attributes:
        slopes: [T, N, C - 1, d], as precise as they were computed.
        intercepts: [T, N, C - 1], float64: the bound's value at the centre of the set (of the interval, where l_inf is
            cut by a box; else the example).
        radius: [N, d] per pixel for l_inf, [] (eps) for l_2 and l_1; float64.
        logits: [T, N, C], float64, of the examples themselves.
        labels: [N].
        threat: the set the bounds hold on.
        method: how they were computed.
        precision: the arithmetic they were computed in.
    """

    slopes: Tensor
    intercepts: Tensor
    radius: Tensor
    logits: Tensor
    labels: Tensor
    threat: Threat
    method: str
    precision: str

    @property
    def members(self) -> int:
        return self.slopes.shape[0]

    def __len__(self) -> int:
        return self.slopes.shape[1]

    def mix(self, coefficients: Tensor) -> Mixed:
        """Lower bounds of the margins of sum_t coefficient_t f_t (paper, equation 7, with the box)."""
        chosen = coefficients.to(dtype=torch.float64, device=self.slopes.device)
        if chosen.shape != (self.members,) or not bool((chosen >= 0).all()):
            raise InputError(f"coefficients={chosen.tolist()}: expected {self.members} numbers, none negative")
        used = chosen.nonzero()[:, 0]
        part = self.slopes if len(used) == self.members else self.slopes[used]
        return mix_margins(part, self.intercepts[used], self.radius, chosen[used], norm=self.threat.norm)

    def correct(self, coefficients: Tensor) -> Tensor:
        """Whether the true logit of sum_t coefficient_t f_t alone is the largest, in float64: [N]."""
        return correct_under(coefficients, self.logits, self.labels)

    def lower(self, mixes: Tensor) -> Tensor:
        """Lower bounds of the margins [M, N, C - 1] of mixes [M, T]."""
        return torch.stack([self.mix(mix).lower for mix in mixes])

    def scales(self) -> Normalisers:
        """Scale of each member."""
        return normalisers(self.intercepts.flatten(1))

    def pairs_of(self, examples: Tensor) -> Tensor:
        """Mask of the pairs of the examples where `examples` [N] is true, as `problem` counts them."""
        return examples.repeat_interleave(self.slopes.shape[2])

    def problem(self, scales: Tensor) -> WeightProblem:
        """The solver's problem: members divided by their scales, one row per (example, target) pair."""
        members, count, targets, size = self.slopes.shape
        factor = (1 / scales).to(self.slopes.dtype)
        radius = self.radius if self.radius.ndim == 0 else self.radius.repeat_interleave(targets, dim=0)
        return weight_problem(
            (self.slopes * factor[:, None, None, None]).view(members, count * targets, size),
            (self.intercepts / scales[:, None, None]).view(members, count * targets),
            radius,
            norm=self.threat.norm,
        )

    def take(self, examples: Tensor) -> PoolBounds:
        """The part for some examples (positions)."""
        return replace(
            self,
            slopes=self.slopes[:, examples],
            intercepts=self.intercepts[:, examples],
            radius=self.radius if self.radius.ndim == 0 else self.radius[examples],
            logits=self.logits[:, examples],
            labels=self.labels[examples],
        )


def correct_under(coefficients: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the true logit of sum_t coefficient_t logits_t alone is the largest: logits [T, N, C] -> [N]."""
    mixed = torch.einsum("t,tnc->nc", coefficients.to(dtype=torch.float64, device=logits.device), logits)
    true = mixed.gather(1, labels[:, None])
    others = mixed.scatter(1, labels[:, None], -torch.inf)
    return (true > others).all(1) & ~mixed.isnan().any(1)


def named(pool: Members) -> dict[str, nn.Module]:
    """Members by name: those of the pool, the keys of a mapping, or positions."""
    if isinstance(pool, Pool):
        return dict(zip(pool.names, pool.models, strict=True))
    if isinstance(pool, Mapping):
        return {str(name): member for name, member in pool.items()}
    return {str(t): member for t, member in enumerate(pool)}


def pool_bounds(
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    method: str = "tightest",
    precision: Literal["float32", "float64"] = "float32",
    place: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> PoolBounds:
    """Bounds of every member on examples x [N, *input] with labels y [N], from the engine.

    A few examples of a large job are bounded again in float64; PrecisionError tells of a disagreement.

    Args:
        pool: members that take the same images.
        x: examples, checked.
        y: labels.
        threat: the set.
        method: of `margin_bounds`; "a+b" takes the tighter of methods a and b for each pair.
        precision: of `margin_bounds`.
        place: where x stands in a larger job: (first example, number of examples); None: x is all of it.
        progress: told after every few examples.
    """
    first, count = place or (0, len(x))
    exact = x.to(torch.float64)
    centre, radius = threat.region(exact)
    shift = (centre - exact).flatten(1)
    name, options = _engine_method(method)
    slopes: list[Tensor] = []
    intercepts: list[Tensor] = []
    logits: list[Tensor] = []
    done, total = 0, len(pool) * len(x)
    for t, member in enumerate(pool):
        judge = in_float64(member)

        def bound(part: slice, member: nn.Module = member, judge: nn.Module = judge) -> dict[str, Tensor]:
            with span("bounds"):
                found = margin_bounds(member, x[part], y[part], threat, name, precision=precision, options=options)
            checked = checked_examples(first + part.start, part.stop - part.start, count)
            cross_check(member, found, x[part], y[part], threat, checked, options)
            slope = found.slope.detach().flatten(2)
            moved = torch.einsum("njd,nd->nj", slope.to(torch.float64), shift[part])
            with torch.no_grad():
                values = judge(exact[part])
            return {
                "slope": slope,
                "intercept": found.intercept.detach().to(torch.float64) + moved,
                "logits": values,
            }

        for part in progress_steps(x):
            step = remembered(f"bounds {method} {precision} {t} {part.start}", partial(bound, part))
            slopes.append(step["slope"].to(x.device))
            intercepts.append(step["intercept"].to(x.device))
            logits.append(step["logits"].to(x.device))
            done += part.stop - part.start
            if progress is not None:
                progress(f"bounds ({method})", done, total)
    members = len(pool)
    return PoolBounds(
        _by_member(slopes, members),
        _by_member(intercepts, members),
        radius.flatten(1) if threat.norm == "linf" else torch.tensor(threat.eps, dtype=torch.float64, device=x.device),
        _by_member(logits, members),
        y,
        threat,
        method,
        precision,
    )


def mix_margins(slopes: Tensor, intercepts: Tensor, radius: Tensor, coefficients: Tensor, *, norm: Norm) -> Mixed:
    """c.a - ||r * sum_t a_t L_t||_q in float64, less what rounding could have added.

    Args:
        slopes: [T, N, C - 1, d].
        intercepts: [T, N, C - 1].
        radius: [N, d] or [].
        coefficients: [T], none negative.
        norm: of the threat; q is dual to it.

    The allowance is (d + 2T + 8) 2^-53 (sum_t a_t (|c_t| + ||r L_t||_1)), which bounds the rounding of sums of that
    length in any order (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    members, count, targets, size = slopes.shape
    a = coefficients.to(device=slopes.device, dtype=torch.float64)
    unit = (size + 2 * members + 8) * 2.0**-53
    step = max(1, _CHUNK // max(1, targets * size))
    lower, sizes = [], []
    for start in range(0, count, step):
        part = slice(start, start + step)
        reach = radius if radius.ndim == 0 else radius[part, None, :]
        mixed = torch.zeros((), dtype=torch.float64, device=slopes.device)
        magnitude = torch.zeros((), dtype=torch.float64, device=slopes.device)
        value = torch.zeros((), dtype=torch.float64, device=slopes.device)
        for t in range(members):
            scaled = a[t] * (slopes[t, part].to(torch.float64) * reach)
            mixed = mixed + scaled
            value = value + a[t] * intercepts[t, part]
            magnitude = magnitude + a[t] * intercepts[t, part].abs() + scaled.abs().sum(2)
        lower.append(value - _dual(mixed, norm) - unit * magnitude)
        sizes.append(magnitude)
    return Mixed(torch.cat(lower), torch.cat(sizes))


def target_classes(labels: Tensor, classes: int) -> Tensor:
    """Class of each target [N, C - 1]: classes in order, the true one skipped (paper, equation 4)."""
    j = torch.arange(classes - 1, device=labels.device)[None]
    return j + (j >= labels[:, None]).to(torch.int64)


def progress_steps(x: Tensor) -> list[slice]:
    """Parts of the examples, one report of progress each."""
    step = _STEP.get(x.device.type, 100)
    return [slice(start, min(start + step, len(x))) for start in range(0, len(x), step)]


def bound_parts(method: str) -> tuple[str, ...]:
    if method == "tightest":
        return Options().parts
    return tuple(part.strip() for part in method.split("+"))


def _engine_method(method: str) -> tuple[str, Options | None]:
    return ("tightest", Options(parts=bound_parts(method))) if "+" in method else (method, None)


def _by_member(parts: list[Tensor], members: int) -> Tensor:
    """Parts in the order member by member, examples within: [members, N, ...]."""
    joined = torch.cat(parts)
    return joined.view(members, -1, *joined.shape[1:])


def _dual(values: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return values.abs().sum(-1)
    return values.norm(dim=-1) if norm == "l2" else values.abs().amax(-1)
