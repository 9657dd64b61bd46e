"""Quick figures of a member on held-out images, by interval and CROWN-IBP bounds in float32.

A member trained by "wong-kolter" is measured by the engine's same-slope bounds as well: intervals say nothing of it.

They steer training and choose nothing on the test set; the published figures come from `robboost.certify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robboost.bounds import margin_bounds
from robboost.threat import Threat
from robboost.training.losses import point_margins
from robboost.training.member import Member
from robboost.training.precision import full_float32
from robboost.training.propagation import Norms, box, interval_margins, intervals, linear_margins, points

__all__ = ["QuickFigures", "quick_figures", "uniform_error"]

# Same-slope bounds of all layers cost as much as an epoch: so many images have to do.
_DEAR_IMAGES = 1000


@dataclass(frozen=True)
class QuickFigures:
    """Margins [N, C-1] of the best of all bounds, and the shares of images in error (0 to 1)."""

    margins: Tensor
    clean_error: float
    ibp_error: float
    crown_ibp_error: float
    verified_error: float
    same_slope_error: float | None = None

    def errors(self) -> dict[str, float]:
        named = {
            "clean_error": self.clean_error,
            "ibp_error": self.ibp_error,
            "crown_ibp_error": self.crown_ibp_error,
            "verified_error": self.verified_error,
        }
        return named if self.same_slope_error is None else {**named, "same_slope_error": self.same_slope_error}


@torch.no_grad()
def quick_figures(member: Member, images: Tensor, labels: Tensor, *, batch: int = 500) -> QuickFigures:
    """Clean and verified error of the averaged weights at `config.eps` (not train_eps).

    A misclassified image is never certified; NaN and ties are not certified. "wong-kolter": of the first 1,000 images.
    """
    net, device = member.net, member.flat.device
    norms = member.final_norms()
    dual = None
    if member.config.method == "wong-kolter":
        images, labels = images[:_DEAR_IMAGES], labels[:_DEAR_IMAGES]
        threat = Threat(member.config.eps, clip=(0.0, 1.0))
        model = net.module(member.average, norms.in_order()).to(device)
        dual = margin_bounds(model, images.to(device), labels.to(device), threat, "same-slope").lower
    weights = net.weights(member.average)
    eps = torch.tensor(member.config.eps, device=device)
    clean, ibp, crown, best = [], [], [], []
    with full_float32():
        for start in range(0, len(images), batch):
            x, y = images[start : start + batch].to(device), labels[start : start + batch].to(device)
            x = x.contiguous(memory_format=torch.channels_last)
            fixed = Norms(dict(norms.pairs))
            region = box(x, eps, net.mask)
            trace = intervals(net, weights, *region, fixed)
            lower = interval_margins(net, weights, trace, y)
            linear = linear_margins(net, weights, trace, region, y, fixed, "adaptive")
            tightest = torch.maximum(lower, linear)
            clean.append((point_margins(points(net, weights, x, fixed), y) > 0).all(1))
            ibp.append((lower > 0).all(1))
            crown.append((linear > 0).all(1))
            best.append(tightest if dual is None else torch.maximum(tightest, dual[start : start + batch]))
    margins = torch.cat(best)
    right = torch.cat(clean)
    return QuickFigures(
        margins.cpu(),
        _error(right),
        _error(torch.cat(ibp) & right),
        _error(torch.cat(crown) & right),
        _error((margins > 0).all(1) & right),
        None if dual is None else _error((dual > 0).all(1) & right),
    )


def uniform_error(margins: Sequence[Tensor]) -> float:
    """Verified error of the plain average, from the members' margins alone, each scaled by its mean size.

    Sound but pessimistic: mixing slopes before they are concretised certifies more. Of the images that all have in
    common, the first ones.
    """
    count = min(len(m) for m in margins)
    total = torch.stack([m[:count] / m[:count].abs().mean().clamp(min=1e-12) for m in margins]).mean(0)
    return _error((total > 0).all(1))


def _error(certified: Tensor) -> float:
    return 1.0 - certified.float().mean().item()
