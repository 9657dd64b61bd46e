"""One stage of boosting: a member whose loss is that of the ensemble which it joins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.training.boosting_bounds import FrozenSum, Lines, concrete_margins
from robboost.training.config import TrainConfig
from robboost.training.losses import ESTIMATING, Batch, LossSettings, Situation, margin_loss
from robboost.training.member import DeviceData, Member
from robboost.training.network import Network
from robboost.training.propagation import (
    Norms,
    box,
    interval_margins,
    intervals,
    linear_bounds,
    mean_line,
    mean_shares,
    middle_margins,
    spread,
)

__all__ = [
    "BOUNDS",
    "SURROGATES",
    "BoostedMember",
    "FrozenNetworks",
    "Objective",
    "estimated_margins",
    "lines_of",
    "tightest_lines",
]

# Method of a TrainConfig -> the engine's bounds of a member that was trained so.
BOUNDS = {"ibp": "ibp", "crown-ibp": "ibp+crown-ibp", "mean-crown-ibp": "ibp+crown-ibp"}


def cross_entropy(margins: Tensor, kappa: float) -> Tensor:
    """Mean over images of log(1 + sum_j exp(-M_j)), the paper's choice; kappa plays no part."""
    del kappa
    return margin_loss(margins)


def hinge(margins: Tensor, kappa: float) -> Tensor:
    """Mean over images of sum_j max(0, kappa - M_j) (paper, equation 8)."""
    return (kappa - margins).clamp(min=0).sum(1).mean()


SURROGATES: dict[str, Callable[[Tensor, float], Tensor]] = {"cross-entropy": cross_entropy, "hinge": hinge}


@dataclass(frozen=True)
class Objective:
    """The surrogate l of sum_nj l(M_nj) (paper, section 3.5): "cross-entropy" or "hinge" with its kappa."""

    surrogate: str = "cross-entropy"
    kappa: float = 1.0

    def __post_init__(self) -> None:
        if self.surrogate not in SURROGATES:
            raise InputError(f"surrogate={self.surrogate!r}: expected one of {', '.join(SURROGATES)}")
        if not 0 < self.kappa < float("inf"):
            raise InputError(f"kappa={self.kappa!r}: expected a finite number above 0")

    def __call__(self, margins: Tensor) -> Tensor:
        return SURROGATES[self.surrogate](margins, self.kappa)


@dataclass(frozen=True)
class FrozenNetworks:
    """The frozen sum worked out again for each batch: no storage, any augmentation, more arithmetic a step.

    Attributes:
        nets: programs of the frozen members.
        flats: their parameters, without gradient.
        coefficients: a_t of each.
        method: "ibp" or "crown-ibp"; the latter takes the tighter of both for each pair.
    """

    nets: tuple[Network, ...]
    flats: tuple[Tensor, ...]
    coefficients: tuple[float, ...]
    method: str

    @classmethod
    def of(
        cls, members: Sequence[nn.Module], coefficients: Sequence[float], shape: Sequence[int], method: str
    ) -> FrozenNetworks:
        nets = tuple(Network.of_module(member, shape) for member in members)
        flats = tuple(net.flat_of(member).detach() for net, member in zip(nets, members, strict=True))
        return cls(nets, flats, tuple(coefficients), method)

    @torch.no_grad()
    def at(self, batch: Batch) -> tuple[Lines, Tensor]:
        """Lines of the sum on the batch, and its margins at the images themselves."""
        parts, clean = [], torch.zeros((), device=batch.x.device)
        for net, flat, coefficient in zip(self.nets, self.flats, self.coefficients, strict=True):
            situation = Situation(net, net.weights(flat), batch, Norms(), Norms(), _PLAIN)
            lines = lines_of(situation, "ibp") if self.method == "ibp" else tightest_lines(situation)
            parts.append(lines.scaled(coefficient))
            clean = clean + coefficient * situation.margins_at(batch.x)
        return Lines.total(parts), clean


Frozen = FrozenSum | FrozenNetworks

_PLAIN = LossSettings(attack_steps=1, attack_scale=1.0, small_box=1.0, mixed=False, crowned=True)


class BoostedMember(Member):
    """A member trained on M = margins of (frozen sum + itself); its own slopes and intercepts carry the gradients.

    During the ramp the frozen lines are those of the full radius: they hold on every smaller one.
    """

    def __init__(self, config: TrainConfig, data: DeviceData, *, frozen: Frozen | None, objective: Objective) -> None:
        super().__init__(config, data)
        self.frozen = frozen
        self.objective = objective

    def loss(self, situation: Situation) -> tuple[Tensor, Tensor]:
        batch = situation.batch
        frozen = None if self.frozen is None else self.frozen.at(batch)
        clean = None if frozen is None else frozen[1]
        if self.config.method in ESTIMATING:
            margins = estimated_margins([(situation, 1.0)], frozen)
        else:
            parts = [lines_of(situation, self.config.method), *([] if frozen is None else [frozen[0]])]
            margins = concrete_margins(parts, batch.x, box(batch.x, batch.eps, None))
        loss = self.objective(margins)
        if situation.settings.mixed:
            points = situation.margins_at(batch.x)
            loss = torch.lerp(self.objective(points if clean is None else points + clean), loss, batch.mixture)
        return loss, margins


def lines_of(situation: Situation, method: str) -> Lines:
    """The network's own lines, with gradient: zero slopes ("ibp"), or one backward pass over intervals ("crown-ibp").

    For "crown-ibp" the schedule's crown_share s gives s * linear + (1 - s) * interval bound: a mean of two lines below
    the margin is one, too.
    """
    net, batch = situation.net, situation.batch
    region = box(batch.x, batch.eps, net.mask)
    trace = intervals(net, situation.weights, *region, situation.norms, traced=method != "ibp")
    if method == "ibp":
        return Lines(None, interval_margins(net, situation.weights, trace, batch.y))
    lines = linear_bounds(net, situation.weights, trace, batch.y, situation.norms, "adaptive")
    slope, intercept = _at_images(situation, *lines)
    assert slope is not None
    if situation.settings.crowned:
        return Lines(slope, intercept)
    plain = interval_margins(net, situation.weights, trace, batch.y)
    return Lines(slope * batch.crown_share, torch.lerp(plain, intercept, batch.crown_share))


def estimated_margins(
    members: Sequence[tuple[Situation, float | Tensor]], frozen: tuple[Lines, Tensor] | None
) -> Tensor:
    """`propagation.mean_margins` of an ensemble: one backward pass a member for all targets together.

    sum_j p_j M_j is bounded by the sum of the members' lines (and of the frozen ones, averaged by p); what it loses is
    taken off every margin of the ensemble alike. An estimate, for training alone.
    """
    batch = members[0][0].batch
    region = box(batch.x, batch.eps, None)
    traces = [intervals(one.net, one.weights, *box(batch.x, batch.eps, one.net.mask), one.norms) for one, _ in members]
    middle = torch.stack(
        [
            coefficient * middle_margins(one.net, one.weights, trace, batch.y)
            for (one, coefficient), trace in zip(members, traces, strict=True)
        ]
    ).sum(0)
    if frozen is not None:
        middle = middle + frozen[1]
    shares = mean_shares(middle)
    parts = [] if frozen is None else [frozen[0].mean(shares)]
    for (one, coefficient), trace in zip(members, traces, strict=True):
        line = mean_line(one.net, one.weights, trace, batch.y, one.norms, shares)
        parts.append(_at_images(one, *line).scaled(coefficient))
    return spread(middle, shares, concrete_margins(parts, batch.x, region))


def _at_images(situation: Situation, slope: Tensor, constant: Tensor) -> Lines:
    """Lines over the distance from the images in place of the (masked) values."""
    if situation.net.mask is not None:
        slope = slope * situation.net.mask
    at_image = torch.bmm(slope.flatten(2), situation.batch.x.flatten(1).unsqueeze(2)).squeeze(2)
    return Lines(slope, constant + at_image)


def tightest_lines(situation: Situation) -> Lines:
    """For each pair the better of "crown-ibp" and "ibp" (the engine's "ibp+crown-ibp")."""
    crowned = replace(situation, settings=replace(situation.settings, crowned=True))
    linear, plain = lines_of(crowned, "crown-ibp"), lines_of(situation, "ibp")
    batch = situation.batch
    lower = concrete_margins([linear], batch.x, box(batch.x, batch.eps, None))
    better = lower > plain.intercept
    assert linear.slope is not None
    slope = linear.slope * better.view(*better.shape, *[1] * (linear.slope.dim() - 2))
    return Lines(slope, torch.where(better, linear.intercept, plain.intercept))
