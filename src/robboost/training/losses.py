"""The training losses: natural, adversarial, certified, and the mixtures between them.

Every loss has the same form, so that a step does not care which one it runs: from a `Situation` to the mean loss, and
margins [N, C-1] whose sign counts as "robust" in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.training.dual import ball, dual_trace
from robboost.training.network import Network
from robboost.training.propagation import (
    Norms,
    box,
    fused_sum,
    interval_margins,
    intervals,
    linear_margins,
    mean_margins,
    point_margins,
    points,
)

__all__ = [
    "ESTIMATING",
    "LOSSES",
    "METHODS",
    "Batch",
    "LossSettings",
    "Situation",
    "attacked",
    "margin_loss",
    "point_margins",
]


@dataclass(frozen=True)
class Batch:
    """Images [N, C, H, W] in [0, 1], labels [N], noise, and the step's scalars.

    `chosen` [N] says where the images stand in the training data. `noise` is in [-1, 1] and of the images' shape; for
    random projections it holds Cauchy numbers [projections, sources] (see `dual`).
    """

    x: Tensor
    y: Tensor
    chosen: Tensor
    noise: Tensor
    eps: Tensor
    mixture: Tensor
    crown_share: Tensor


@dataclass(frozen=True)
class LossSettings:
    """What does not change from step to step.

    `mixed`: whether the schedule ever leaves weight to the natural loss; `crowned`: whether it never leaves any to the
    interval bound. What is never needed is then never computed. `projections`: 0 for exact dual bounds.
    """

    attack_steps: int
    attack_scale: float
    small_box: float
    mixed: bool
    crowned: bool
    projections: int = 0


@dataclass(frozen=True)
class Situation:
    """A network, its weights, a batch; `norms` of this batch (filled by the loss), `running` ones for the attack."""

    net: Network
    weights: Sequence[Tensor]
    batch: Batch
    norms: Norms
    running: Norms
    settings: LossSettings

    def margins_at(self, x: Tensor) -> Tensor:
        """Margins [N, C-1] of the network at x."""
        return point_margins(points(self.net, self.weights, x, self.norms), self.batch.y)

    def interval_margins(self, x: Tensor, eps: Tensor) -> Tensor:
        """Interval lower bounds of the margins on the box of radius eps around x."""
        trace = intervals(self.net, self.weights, *box(x, eps, self.net.mask), self.norms, traced=False)
        return interval_margins(self.net, self.weights, trace, self.batch.y)


def margin_loss(margins: Tensor) -> Tensor:
    """Mean cross-entropy of logits whose differences are `margins` [N, C-1]: log(1 + sum_j exp(-margin_j))."""
    return torch.logsumexp(F.pad(-margins, (1, 0)), dim=1).mean()


def attacked(situation: Situation, radius: Tensor) -> Tensor:
    """Projected gradient ascent on the cross-entropy within `radius` and [0, 1], from a random start.

    With one step it is long (5/4 of the radius); with several each is 2.5 radius / steps. Normalisations are the
    running ones, so that the attack does not move them.
    """
    batch, settings = situation.batch, situation.settings
    fixed = [w.detach() for w in situation.weights]
    lower, upper = (batch.x - radius).clamp(min=0), (batch.x + radius).clamp(max=1)
    point = torch.clamp(batch.x + batch.noise * radius, lower, upper)
    size = radius * (1.25 if settings.attack_steps == 1 else 2.5 / settings.attack_steps)
    for _ in range(settings.attack_steps):
        point.requires_grad_(True)
        loss = F.cross_entropy(points(situation.net, fixed, point, situation.running), batch.y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, point)
        point = torch.clamp(point.detach() + size * gradient.sign(), lower, upper)
    return point.detach()


def natural(situation: Situation) -> tuple[Tensor, Tensor]:
    """Cross-entropy on the images."""
    margins = situation.margins_at(situation.batch.x)
    return margin_loss(margins), margins


def adversarial(situation: Situation) -> tuple[Tensor, Tensor]:
    """Cross-entropy on attacked images (Madry et al.)."""
    radius = situation.batch.eps * situation.settings.attack_scale
    margins = situation.margins_at(attacked(situation, radius))
    return margin_loss(margins), margins


def ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """mixture * interval loss + (1 - mixture) * natural loss (Gowal et al.)."""
    margins = situation.interval_margins(situation.batch.x, situation.batch.eps)
    return _with_natural(situation, margins), margins


def crown_ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """As `ibp`, with crown_share * linear bound + (1 - crown_share) * interval bound as margins (Zhang et al.)."""
    return _with_linear(situation, partial(linear_margins, rule="adaptive"))


def mean_crown_ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """As `crown_ibp`, with margins estimated from one linear pass for all targets: they are no bounds."""
    return _with_linear(situation, mean_margins)


def fused_crown_ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """As `crown_ibp`, at a fraction of the cost: one linear pass for all targets together (Xu et al. 2020).

    The certified loss is log(1 + S), S an upper bound of sum_j exp(-margin_j); -log S stands for the margins.
    """
    net, weights, batch, norms = situation.net, situation.weights, situation.batch, situation.norms
    region = box(batch.x, batch.eps, net.mask)
    trace = intervals(net, weights, *region, norms)
    total = fused_sum(net, weights, trace, region, batch.y, norms)
    loss = F.softplus(total).mean()
    if not situation.settings.crowned:
        loss = torch.lerp(margin_loss(interval_margins(net, weights, trace, batch.y)), loss, batch.crown_share)
    return _mixed(situation, loss), -total.unsqueeze(1)


def wong_kolter(situation: Situation) -> tuple[Tensor, Tensor]:
    """As `ibp`, by same-slope bounds throughout, on the whole ball without the box (Wong and Kolter).

    With random projections the bounds of the hidden layers, and so the margins, are estimates.
    """
    net, weights, batch, norms = situation.net, situation.weights, situation.batch, situation.norms
    if net.num_norms:
        points(net, weights, batch.x, norms)
    centre, radius = ball(batch.x, batch.eps, net.mask)
    noise = batch.noise if situation.settings.projections else None
    trace = dual_trace(net, weights, (centre, radius), noise, norms)
    whole = centre, radius.expand_as(centre)
    margins = linear_margins(net, weights, trace, whole, batch.y, norms, "same-slope")
    return _with_natural(situation, margins), margins


def mtl_ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """mixture * interval loss + (1 - mixture) * adversarial loss (De Palma et al.)."""
    lower, upper = _both_margins(situation)
    return torch.lerp(margin_loss(upper), margin_loss(lower), situation.batch.mixture), lower


def cc_ibp(situation: Situation) -> tuple[Tensor, Tensor]:
    """The loss of mixture * interval margins + (1 - mixture) * attacked margins (De Palma et al.)."""
    lower, upper = _both_margins(situation)
    return margin_loss(torch.lerp(upper, lower, situation.batch.mixture)), lower


def sabr(situation: Situation) -> tuple[Tensor, Tensor]:
    """The interval loss of a small box around an attacked point, the box within the radius (Mueller et al.)."""
    eps = situation.batch.eps
    small = eps * situation.settings.small_box
    margins = situation.interval_margins(attacked(situation, eps - small), small)
    return margin_loss(margins), margins


def _both_margins(situation: Situation) -> tuple[Tensor, Tensor]:
    """Interval margins on the whole set, and margins at the attacked point (of a set attack_scale times as large)."""
    batch = situation.batch
    point = attacked(situation, batch.eps * situation.settings.attack_scale)
    return situation.interval_margins(batch.x, batch.eps), situation.margins_at(point)


def _with_linear(situation: Situation, linear: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of crown_share * linear margins + (1 - crown_share) * interval margins, and these margins."""
    net, weights, batch, norms = situation.net, situation.weights, situation.batch, situation.norms
    region = box(batch.x, batch.eps, net.mask)
    trace = intervals(net, weights, *region, norms)
    margins = linear(net, weights, trace, region, batch.y, norms)
    if not situation.settings.crowned:
        margins = torch.lerp(interval_margins(net, weights, trace, batch.y), margins, batch.crown_share)
    return _with_natural(situation, margins), margins


def _with_natural(situation: Situation, margins: Tensor) -> Tensor:
    return _mixed(situation, margin_loss(margins))


def _mixed(situation: Situation, robust: Tensor) -> Tensor:
    """mixture * robust + (1 - mixture) * natural loss."""
    if not situation.settings.mixed:
        return robust
    return torch.lerp(margin_loss(situation.margins_at(situation.batch.x)), robust, situation.batch.mixture)


LOSSES: dict[str, Callable[[Situation], tuple[Tensor, Tensor]]] = {
    "natural": natural,
    "adversarial": adversarial,
    "wong-kolter": wong_kolter,
    "ibp": ibp,
    "crown-ibp": crown_ibp,
    "fused-crown-ibp": fused_crown_ibp,
    "mean-crown-ibp": mean_crown_ibp,
    "mtl-ibp": mtl_ibp,
    "cc-ibp": cc_ibp,
    "sabr": sabr,
}
METHODS = tuple(LOSSES)
# Those whose margins are estimates whatever the settings ("wong-kolter" estimates with random projections).
ESTIMATING = ("mean-crown-ibp",)
