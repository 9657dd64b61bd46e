"""Linear bounds from RobBoost's engine and from auto_LiRPA, and attempts to refute bounds from anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robboost.bounds import MarginBounds, margin_bounds
from robboost.errors import InputError, SoundnessError
from robboost.exchange.bound_files import LinearBounds
from robboost.threat import Threat

__all__ = ["check_linear_bounds", "from_auto_lirpa", "linear_bounds"]


def linear_bounds(
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    method: str = "crown",
    names: Sequence[str] = (),
) -> LinearBounds:
    """Bounds of every member on every (example, target) pair from RobBoost's own engine, as arrays for other tools.

    Pairs are in the order of the examples, and for each example of the targets in class order, the true class skipped.
    Everything is held in memory: T n d numbers of float32; for more than that there is the bound store.
    """
    if not pool:
        raise InputError("pool is empty, expected at least one member")
    slopes, intercepts = [], []
    for member in pool:
        found = margin_bounds(member, x, y, threat, method)
        slope, intercept = _centred(found, x, threat)
        slopes.append(slope)
        intercepts.append(intercept)
    return _assembled(slopes, intercepts, x, threat, names)


def from_auto_lirpa(
    results: Sequence[Mapping[str, Mapping[str, Mapping[str, Any]]]],
    x: Tensor,
    threat: Threat,
    *,
    names: Sequence[str] = (),
) -> LinearBounds:
    """Bounds from auto_LiRPA: for each member the dictionary of `compute_bounds(..., return_A=True, C=...)`.

    A dictionary has one output and one input: `{output: {input: {"lA": [N, C-1, *input], "lbias": [N, C-1]}}}`. It says
    that the margins are at least lA x + lbias. `C` must have held the margins: row j of an example is +1 at its true
    class and -1 at the j-th other class. `x` [N, *input] and `threat` must be those that the bounds were computed for
    (`x_L`, `x_U` of the perturbation are the ends of the box where the threat has one); `BoundedModule` must have been
    given `bound_opts={"conv_mode": "matrix"}`, for slopes in the form of patches are refused.
    """
    if not results:
        raise InputError("results is empty, expected one dictionary for each member")
    centre = threat.region(x.double()).centre.flatten(1)
    slopes, intercepts = [], []
    for t, result in enumerate(results):
        slope, bias = _auto_lirpa_entry(result, t, x)
        slopes.append(slope.flatten(0, 1))
        intercepts.append((bias + (slope.double() @ centre[:, :, None])[:, :, 0]).flatten())
    return _assembled(slopes, intercepts, x, threat, names)


def check_linear_bounds(
    bounds: LinearBounds,
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    points: int = 32,
) -> float:
    """Tries to refute bounds with points of the threat set, half random, half extreme; returns the smallest slack.

    The slack of a point is the member's margin there minus what the bound promises, in float64; below -1e-5 times the
    size of the margins it raises SoundnessError with member, pair and values. A check that passes proves nothing; one
    that fails means that certificates from these bounds would be false. Needs `examples` and `targets`.
    """
    if bounds.examples is None or bounds.targets is None:
        raise InputError("bounds have no examples or targets, expected both: without them no pair has an image")
    if len(pool) != len(bounds.slopes) or int(bounds.examples.max()) >= len(x):
        raise InputError(
            f"{len(pool)} members and {len(x)} images for bounds of {len(bounds.slopes)} members and examples up to"
            f" {int(bounds.examples.max())}, expected as many"
        )
    if bounds.norm != threat.norm or bounds.slopes.shape[2] != x[0].numel():
        raise InputError(f"threat {threat} and images {list(x.shape)} are not those of the bounds, expected the same")
    index, targets = torch.from_numpy(bounds.examples), torch.from_numpy(bounds.targets)
    labels = y[index]
    others = targets + (targets >= labels).long()
    images = x.double()
    centre = threat.region(images).centre
    generator = torch.Generator().manual_seed(0)
    smallest = float("inf")
    for t, member in enumerate(pool):
        slope, intercept = (
            torch.from_numpy(np.asarray(value[t], np.float64)) for value in (bounds.slopes, bounds.intercepts)
        )
        model = _double(member)
        for n in range(points):
            draw = threat.sample if n % 2 else threat.extreme_points
            point = draw(images, generator=generator)
            with torch.no_grad():
                logits = model(point)[index]
            margin = (logits.gather(1, labels[:, None]) - logits.gather(1, others[:, None]))[:, 0]
            promised = intercept + (slope * (point - centre).flatten(1)[index]).sum(1)
            slack = margin - promised
            worst = int((slack / (1 + margin.abs())).argmin())
            if not bool(slack[worst] >= -1e-5 * (1 + margin[worst].abs())):
                raise SoundnessError(
                    f"member {t}, pair {worst} (example {int(index[worst])}, target {int(targets[worst])}): margin"
                    f" {float(margin[worst]):.6g} at a point of {threat} where the bound promises"
                    f" {float(promised[worst]):.6g}: the bound is wrong, or made for another image, threat or network"
                )
            smallest = min(smallest, float(slack.min()))
    return smallest


def _centred(found: MarginBounds, x: Tensor, threat: Threat) -> tuple[Tensor, Tensor]:
    """Slopes [pairs, d] and intercepts at the centre of the set instead of at the example."""
    points = x.to(found.slope.device, torch.float64)
    shift = (threat.region(points).centre - points).flatten(1)
    slope = found.slope.detach().flatten(2)
    intercept = found.intercept.detach().double() + (slope.double() @ shift[:, :, None])[:, :, 0]
    return slope.flatten(0, 1), intercept.flatten()


def _assembled(
    slopes: Sequence[Tensor], intercepts: Sequence[Tensor], x: Tensor, threat: Threat, names: Sequence[str]
) -> LinearBounds:
    pairs = len(slopes[0])
    targets = pairs // len(x)
    radius: Any = np.float64(threat.eps)
    if threat.box_used:
        radius = threat.region(x.double()).radius.flatten(1).repeat_interleave(targets, 0).cpu().numpy()
    return LinearBounds(
        torch.stack([slope.cpu() for slope in slopes]).numpy(),
        torch.stack([intercept.cpu() for intercept in intercepts]).numpy(),
        radius,
        threat.norm,
        np.repeat(np.arange(len(x)), targets),
        np.tile(np.arange(targets), len(x)),
        tuple(names),
    )


def _auto_lirpa_entry(result: Any, t: int, x: Tensor) -> tuple[Tensor, Tensor]:
    entry = result
    for what in ("output", "input"):
        if not isinstance(entry, Mapping) or len(entry) != 1:
            size = len(entry) if isinstance(entry, Mapping) else 0
            raise InputError(
                f"result of member {t} has {size} {what}s, expected a dictionary with one: use needed_A_dict"
            )
        entry = next(iter(entry.values()))
    slope, bias = (entry.get(key) if isinstance(entry, Mapping) else None for key in ("lA", "lbias"))
    if not isinstance(slope, Tensor) or not isinstance(bias, Tensor):
        kinds = f"{type(slope).__name__} and {type(bias).__name__}"
        raise InputError(
            f"lA and lbias of member {t} are {kinds}, expected tensors: bound_opts={{'conv_mode': 'matrix'}}"
        )
    slope, bias = slope.detach().cpu(), bias.detach().double().cpu()
    if slope.dim() < 3 or slope.shape[0] != len(x) or slope[0, 0].numel() != x[0].numel():
        raise InputError(
            f"lA of member {t} has shape {list(slope.shape)}, expected [{len(x)}, C-1, *{list(x.shape[1:])}]"
        )
    if bias.shape != slope.shape[:2]:
        raise InputError(f"lbias of member {t} has shape {list(bias.shape)}, expected {list(slope.shape[:2])} as lA")
    return slope.flatten(2), bias


def _double(member: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(member).double().eval()
