"""What a report shows beyond the table: a range of radii, the slopes of one image, the extremes of the test set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from robboost.comparison import Comparison
from robboost.errors import InputError
from robboost.inputs import check_pool
from robboost.mixtures import Members, PoolBounds, Progress, named, pool_bounds, target_classes
from robboost.proofs import prove
from robboost.threat import Threat

__all__ = ["Slopes", "Study", "study"]

_RADII = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
_SHOWN = 8


@dataclass(frozen=True, eq=False)
class Slopes:
    """The slopes that bound one margin of one image (paper, figure 1), each divided by its member's scale.

    Attributes:
        image: [*input].
        label: true class; target: the class that is hardest to keep away.
        members: name -> slope [*input]; members whose bound is constant have a slope of zero.
        mixes: name ("uniform", "RobBoost") -> slope of the mix.
    """

    image: Tensor
    label: int
    target: int
    members: Mapping[str, Tensor]
    mixes: Mapping[str, Tensor]


@dataclass(frozen=True, eq=False)
class Study:
    """Data of the report's figures.

    Attributes:
        radii: eps values; the first is 0, where certified means correct.
        certified: row name -> share of the images certified at each eps.
        count: number of images behind `certified`.
        slopes: of the least certain image that is certified.
        fragile, secure: positions of the certified images with the smallest and largest margins.
        failed: positions of images without a certificate, the worst first.
    """

    radii: tuple[float, ...]
    certified: Mapping[str, tuple[float, ...]]
    count: int
    slopes: Slopes
    fragile: tuple[int, ...]
    secure: tuple[int, ...]
    failed: tuple[int, ...]


def study(
    comparison: Comparison,
    pool: Members,
    x: Tensor,
    y: Tensor,
    *,
    images: int = 200,
    progress: Progress | None = None,
) -> Study:
    """Computes what the figures need.

    Args:
        comparison: of this pool on these test images.
        pool: the members.
        x: test images of the comparison.
        y: their labels.
        images: number of images for the range of radii.
        progress: told what is being done, steps done, and steps in all.
    """
    members = named(pool)
    x, y = check_pool(list(members.values()), x, y, list(members))
    margins = comparison.margins["RobBoost"]
    if len(margins) != len(x):
        raise InputError(f"{len(x)} images: expected the {len(margins)} test images of the comparison")
    order = margins.argsort()
    positive = [int(n) for n in order if margins[n] > 0]
    failed = [int(n) for n in order if not margins[n] > 0]
    shown = positive[0] if positive else int(order[-1])
    radii, certified = _sweep(comparison, members, x[:images], y[:images], progress)
    return Study(
        radii=radii,
        certified=certified,
        count=min(images, len(x)),
        slopes=_slopes(comparison, members, x[shown : shown + 1], y[shown : shown + 1]),
        fragile=tuple(positive[:_SHOWN]),
        secure=tuple(positive[::-1][:_SHOWN]),
        failed=tuple(failed[:_SHOWN]),
    )


def _sweep(
    comparison: Comparison, members: Members, x: Tensor, y: Tensor, progress: Progress | None
) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    threat = comparison.fitted.threat
    best = comparison.rows[0].name
    single = best.removeprefix("best single (").removesuffix(")")
    chosen = {
        best: comparison.mixes[f"member {single}"],
        "uniform": comparison.mixes["uniform"],
        "RobBoost": comparison.mixes["RobBoost"],
    }
    widest = torch.inf if threat.clip is None or threat.norm != "linf" else threat.clip[1] - threat.clip[0]
    scaled = tuple(threat.eps * factor for factor in _RADII if 0 < threat.eps * factor <= widest)
    shares: dict[str, list[float]] = {name: [] for name in chosen}
    networks = list(named(members).values())
    for step, eps in enumerate(scaled, start=1):
        proof = prove(networks, x, y, Threat(eps, threat.norm, threat.clip), list(chosen.values()),
                      method=comparison.fitted.bounds_.method)  # fmt: skip
        for row, name in enumerate(chosen):
            if step == 1:
                shares[name].append(float(proof.correct[row].double().mean()))
            shares[name].append(float(proof.certified[row].double().mean()))
        if progress is not None:
            progress("certified at other radii", step, len(scaled))
    return (0.0, *scaled), {name: tuple(values) for name, values in shares.items()}


def _slopes(comparison: Comparison, members: Mapping[str, torch.nn.Module], x: Tensor, y: Tensor) -> Slopes:
    threat, method = comparison.fitted.threat, comparison.fitted.bounds_.method
    # The slopes of intervals are zero: where backward bounds are among the methods, they are what there is to see.
    seen = "+".join(part for part in method.split("+") if part != "ibp") or method
    bounds: PoolBounds = pool_bounds(list(members.values()), x, y, threat, method=seen)
    target = int(bounds.mix(comparison.mixes["RobBoost"]).lower[0].argmin())
    found = bounds.slopes[:, 0, target].to(device="cpu", dtype=torch.float64)
    shape = x.shape[1:]
    scales = comparison.fitted.scales
    return Slopes(
        image=x[0],
        label=int(y[0]),
        target=int(target_classes(y, bounds.logits.shape[2])[0, target]),
        members={name: (found[t] / scales[t]).view(shape) for t, name in enumerate(members)},
        mixes={
            name: torch.einsum("t,td->d", comparison.mixes[name], found).view(shape) for name in ("uniform", "RobBoost")
        },
    )
