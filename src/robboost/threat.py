"""The set an attacker may choose from: an l_inf, l_2 or l_1 ball around an example, cut by the box of valid pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from robboost.errors import InputError

__all__ = ["Norm", "Region", "Threat"]

Norm = Literal["linf", "l2", "l1"]
_DUAL: dict[Norm, Norm] = {"linf": "l1", "l2": "l2", "l1": "linf"}


class Region(NamedTuple):
    """Where a bound must hold, in the form that bound propagation needs.

    l_inf: the interval centre +- radius, pixel by pixel; both have the shape of the images.
    l_2 and l_1: the ball of that radius around the centre; radius has shape [N].
    """

    centre: Tensor
    radius: Tensor


@dataclass(frozen=True)
class Threat:
    """All x' with ||x' - x||_p <= eps, and lo <= x' <= hi where `clip=(lo, hi)` is given.

    Args:
        eps: radius in units of the network's input: a number, or a fraction written as text ("8/255"). Per-channel
            normalisation belongs into the network, as its first layer, so that eps stays in pixel units. (The trap: a
            radius quoted for normalised inputs. A public CIFAR-10 pool's eps of .0348 in normalised units is slightly
            less than 2/255 in pixels, so its figures belong to a smaller threat.)
        norm: "linf", "l2" or "l1".
        clip: the box of valid pixels, or None for none. For l_inf every bound uses it exactly; for l_2 and l_1 attacks
            respect it and bounds do not use it (`box_used` says so): they hold on the whole ball, hence on less.
    """

    eps: float
    norm: Norm = "linf"
    clip: tuple[float, float] | None = None

    def __init__(
        self, eps: float | str, norm: Norm | str = "linf", clip: tuple[float, float] | list[float] | None = None
    ) -> None:
        if norm not in _DUAL:
            raise InputError(f"norm={norm!r}: expected one of 'linf', 'l2', 'l1'")
        box = None if clip is None else _parse_box(clip)
        radius = _parse_eps(eps)
        if norm == "linf" and box is not None and radius > box[1] - box[0]:
            raise InputError(
                f"eps={eps!r}: larger than the whole pixel range {box}; expected at most {box[1] - box[0]:g}"
                " (for a radius in steps of 8-bit pixels write '8/255')"
            )
        object.__setattr__(self, "eps", radius)
        object.__setattr__(self, "norm", norm)
        object.__setattr__(self, "clip", box)

    @property
    def dual_norm(self) -> Norm:
        """The norm q with min over the ball of <L, d> = -eps ||L||_q."""
        return _DUAL[self.norm]

    @property
    def box_used(self) -> bool:
        """Whether bounds hold on the ball cut by the box (True) or on the whole ball (False)."""
        return self.clip is not None and self.norm == "linf"

    def region(self, x: Tensor) -> Region:
        """The set around each example of x [N, ...], as bound propagation needs it."""
        if self.norm != "linf":
            return Region(x, torch.full((len(x),), self.eps, dtype=x.dtype, device=x.device))
        if self.clip is None:
            return Region(x, torch.full_like(x, self.eps))
        lower = (x - self.eps).clamp(min=self.clip[0])
        upper = (x + self.eps).clamp(max=self.clip[1])
        return Region((lower + upper) / 2, (upper - lower) / 2)

    def project(self, point: Tensor, x: Tensor) -> Tensor:
        """A point of the set for each point [N, ...] near its example x [N, ...].

        For l_inf, and without a box, the nearest one. For l_2 and l_1 with a box the nearest of the ball, then moved
        into the box: every coordinate moves towards x, so that it stays in the ball.
        """
        delta = point - x
        if self.norm == "linf":
            delta = delta.clamp(-self.eps, self.eps)
        elif self.norm == "l2":
            length = delta.flatten(1).norm(dim=1).clamp(min=torch.finfo(x.dtype).tiny)
            delta = delta * _per_example((self.eps / length).clamp(max=1), x)
        else:
            delta = _project_l1(delta.flatten(1), self.eps).view_as(x)
        return self._into_box(x + delta)

    def sample(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One random point of the set for each example; uniform on the ball (before it is moved into the box)."""
        if self.norm == "linf":
            centre, radius = self.region(x)
            return centre + radius * (2 * _uniform(x, generator) - 1)
        direction = self._random_direction(x, generator)
        size = torch.rand(len(x), dtype=x.dtype, device=x.device, generator=generator) ** (1 / x[0].numel())
        return self._into_box(x + _per_example(self.eps * size, x) * direction)

    def extreme_points(self, x: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One random extreme point for each example: a corner (l_inf), a point of the sphere (l_2), a tip (l_1).

        For l_2 and l_1 the point is then moved into the box, where there is one.
        """
        if self.norm == "linf":
            centre, radius = self.region(x)
            return torch.where(_uniform(x, generator) < 0.5, centre - radius, centre + radius)
        if self.norm == "l2":
            return self._into_box(x + self.eps * self._random_direction(x, generator))
        flat = torch.zeros_like(x).flatten(1)
        pixel = torch.randint(flat.shape[1], (len(x), 1), device=x.device, generator=generator)
        sign = torch.randint(2, (len(x), 1), device=x.device, generator=generator).to(x.dtype) * 2 - 1
        return self._into_box(x + flat.scatter(1, pixel, sign * self.eps).view_as(x))

    def contains(self, point: Tensor, x: Tensor, *, tolerance: float = 1e-6) -> Tensor:
        """Whether each point [N, ...] lies in the set around its example [N, ...], to within `tolerance`."""
        delta = (point - x).flatten(1)
        size = {"linf": delta.abs().amax(1), "l2": delta.norm(dim=1), "l1": delta.abs().sum(1)}[self.norm]
        inside = size <= self.eps + tolerance
        if self.clip is not None:
            flat = point.flatten(1)
            inside &= (flat >= self.clip[0] - tolerance).all(1) & (flat <= self.clip[1] + tolerance).all(1)
        return inside

    def __str__(self) -> str:
        box = "" if self.clip is None else f" within [{self.clip[0]:g}, {self.clip[1]:g}]"
        return f"{self.norm} {_readable(self.eps)}{box}"

    def _into_box(self, point: Tensor) -> Tensor:
        return point if self.clip is None else point.clamp(*self.clip)

    def _random_direction(self, x: Tensor, generator: torch.Generator | None) -> Tensor:
        """Uniform on the sphere of the norm (l_2: normalised Gaussian; l_1: normalised Laplace)."""
        if self.norm == "l2":
            raw = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
            return raw / _per_example(raw.flatten(1).norm(dim=1), x)
        raw = -torch.log1p(-_uniform(x, generator))
        raw = raw * torch.where(_uniform(x, generator) < 0.5, -1.0, 1.0).to(x.dtype)
        return raw / _per_example(raw.flatten(1).abs().sum(1), x)


def _parse_eps(eps: float | str) -> float:
    try:
        value = float(Fraction(eps.replace(" ", ""))) if isinstance(eps, str) else float(eps)
    except (ValueError, TypeError, ZeroDivisionError):
        raise InputError(f"eps={eps!r}: expected a number or a fraction such as '8/255'") from None
    if not math.isfinite(value) or value < 0:
        raise InputError(f"eps={eps!r}: expected a finite number that is not negative")
    return value


def _parse_box(clip: tuple[float, float] | list[float]) -> tuple[float, float]:
    try:
        lo, hi = (float(end) for end in clip)
    except (TypeError, ValueError):
        raise InputError(f"clip={clip!r}: expected two numbers (lowest, highest pixel) or None") from None
    if not (math.isfinite(lo) and math.isfinite(hi) and lo < hi):
        raise InputError(f"clip={clip!r}: expected two finite numbers, the first below the second")
    return lo, hi


def _readable(eps: float) -> str:
    """The plain number where it is short, '8/255' for a whole number of 8-bit steps."""
    plain, steps = f"{eps:g}", eps * 255
    return f"{round(steps)}/255" if len(plain) > 5 and abs(steps - round(steps)) < 1e-9 else plain


def _per_example(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 1))


def _uniform(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=generator)


def _project_l1(delta: Tensor, eps: float) -> Tensor:
    """Nearest point of the l_1 ball of radius eps, row by row (soft threshold found by sorting)."""
    size = delta.abs()
    ordered = size.sort(dim=1, descending=True).values
    excess = ordered.cumsum(1) - eps
    count = torch.arange(1, delta.shape[1] + 1, dtype=delta.dtype, device=delta.device)
    last = (ordered * count > excess).sum(1, keepdim=True).clamp(min=1)
    threshold = (excess.gather(1, last - 1) / last).clamp(min=0)
    return delta.sign() * (size - threshold).clamp(min=0)
