"""A second opinion on a large job: a few of its examples again in float64 and small chunks, loud on disagreement.

Libraries have handed back wrong products without a word (reduced precision switched on elsewhere, one call over a huge
tensor). A job that bounds many examples therefore has some of them bounded again, and compared with what it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from robboost.bounds.margins import MarginBounds, Options, margin_bounds
from robboost.errors import PrecisionError
from robboost.inputs import in_float64
from robboost.threat import Threat

__all__ = ["checked_examples", "cross_check"]

# One example in so many is bounded again, and at most so many of a job: a few per cent of its time.
_ONE_IN = 100
_MOST = 4
# Allowed differences, relative to the terms a margin is made of. Full float32 was seen to err by 3e-6, TF32 by 1e-3.
_TYPICAL = 1e-4
_WORST = 1e-2
# Optimised slopes follow another path after the first rounding, and end at another bound, as valid.
_TYPICAL_OPTIMISED = 2e-2
_WORST_OPTIMISED = 2e-1
# Room of the line's own arithmetic, relative to its terms, where it is held against the network itself.
_ABOVE = 1e-4
_MEMORY = 2**28


def checked_examples(first: int, count: int, total: int) -> list[int]:
    """Which of the examples first, ..., first + count - 1 of a job of `total` are checked, counted from `first`.

    Spread evenly over the job, the last example (of the last chunk) among them; none in a job of fewer than 100.
    """
    wanted = min(_MOST, total // _ONE_IN)
    positions = [total * (k + 1) // wanted - 1 for k in range(wanted)]
    return [position - first for position in positions if first <= position < first + count]


def cross_check(
    model: nn.Module,
    found: MarginBounds,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    examples: Sequence[int],
    options: Options | None = None,
) -> None:
    """Raises PrecisionError unless `found`, the bounds of `model` on all x, holds and agrees at these examples.

    Two questions, both in float64. Do the lines lie below the margins of the module itself (its own forward, not the
    trace) at the example and at the line's worst point? And is each lower bound what the engine finds again? A neuron
    whose bounds nearly tie may take another, equally valid, line after a rounding, and moves a single bound: so the
    typical difference must be of the size of rounding, and the largest one small; if the few examples leave a doubt,
    more are asked.

    Args:
        model, x, y, threat: as they were given to `margin_bounds`.
        found: its result on all of x.
        examples: positions in x, as `checked_examples` gives them; with none nothing is done.
        options: as they were given to `margin_bounds`.
    """
    if not examples:
        return
    chosen = torch.tensor(list(examples), device=x.device)
    _refuse_above(model, found, x, y, threat, chosen)
    typical, worst = _allowed(found)
    difference = _differences(model, found, x, y, threat, chosen, options)
    if difference.median() > typical and not difference.max() > worst:
        more = torch.unique(torch.cat([chosen, torch.linspace(0, len(x) - 1, _MOST, device=x.device).long()]))
        difference = _differences(model, found, x, y, threat, more, options)
    if not (difference.median() <= typical and difference.max() <= worst):
        raise PrecisionError(
            f"{_name(model, found)} differ from the same bounds in float64 by {float(difference.max()):.2g} of their"
            f" terms (typically {float(difference.median()):.2g}, expected at most {typical:g}): the arithmetic of this"
            " device or library is wrong; nothing of this job holds, try another device, precision='float64', or less"
            " memory a call"
        )


def _name(model: nn.Module, found: MarginBounds) -> str:
    device = found.lower.device.type
    return f"bounds ({found.method}, {found.precision}, {device}) of {type(model).__name__}"


def _allowed(found: MarginBounds) -> tuple[float, float]:
    if "alpha-crown" in (found.method, *found.parts):
        return _TYPICAL_OPTIMISED, _WORST_OPTIMISED
    return _TYPICAL, _WORST


def _differences(
    model: nn.Module,
    found: MarginBounds,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    chosen: Tensor,
    options: Options | None,
) -> Tensor:
    """|lower - lower in float64| of the chosen examples, relative to the terms, flat.

    Infinite where `found` holds a number and float64 does not.
    """
    small = replace(options or Options(), memory=_MEMORY)
    again = margin_bounds(model, x[chosen], y[chosen], threat, found.method, precision="float64", options=small)
    mine = found.lower[chosen].detach().double()
    gap = (mine - again.lower).abs() / _terms(again)
    # What claims nothing is no disagreement: large weights may overflow in float32 alone.
    alike = mine.isnan() | mine.isneginf() | (mine == again.lower)
    return torch.where(alike, 0.0, gap.nan_to_num(nan=torch.inf)).flatten()


def _terms(bounds: MarginBounds) -> Tensor:
    """|intercept| + the reach of the slope: the size of what a lower bound is the difference of."""
    return (bounds.intercept.abs() + (bounds.intercept - bounds.lower).abs()).clamp(min=1e-30)


@torch.no_grad()
def _refuse_above(model: nn.Module, found: MarginBounds, x: Tensor, y: Tensor, threat: Threat, chosen: Tensor) -> None:
    """The lines of `found` against the module's own margins at the examples and at each line's lowest point."""
    judge, images, labels = in_float64(model), x[chosen].double(), y[chosen].long()
    slope, intercept = found.slope[chosen].double(), found.intercept[chosen].double()
    size = intercept.abs() + (intercept - found.lower[chosen].double()).abs()
    for target in range(slope.shape[1]):
        for point in (images, _lowest(slope[:, target], images, threat)):
            logits = judge(point)
            other = target + (target >= labels).long()
            own = logits.gather(1, labels[:, None]) - logits.gather(1, other[:, None])
            claimed = intercept[:, target] + (slope[:, target] * (point - images)).flatten(1).sum(1)
            excess = claimed - own[:, 0]
            room = _ABOVE * (size[:, target] + logits.abs().amax(1))
            if bool((excess > room).any()):
                worst = int((excess - room).argmax())
                raise PrecisionError(
                    f"{_name(model, found)} claim {float(excess[worst]):.2g} more than the network's own margin"
                    f" {float(own[worst, 0]):.4g} at a point of the threat set (example {int(chosen[worst])}, target"
                    f" {target}): nothing of this job holds; please report this"
                )


def _lowest(slope: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """The point of the set where a linear function is least (for l_1 and l_2: of the whole ball)."""
    centre, radius = threat.region(x)
    if threat.norm == "linf":
        return centre - radius * slope.sign()
    flat = slope.flatten(1)
    if threat.norm == "l2":
        step = flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-300)
    else:
        pixel = flat.abs().argmax(1, keepdim=True)
        step = torch.zeros_like(flat).scatter(1, pixel, flat.gather(1, pixel).sign())
    return centre - (radius[:, None] * step).view_as(x)
