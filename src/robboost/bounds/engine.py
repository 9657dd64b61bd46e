"""The methods: which intermediate bounds, which lines, and the backward passes of the margins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from robboost.bounds.backward import carry
from robboost.bounds.concretisation import box_hull, spread
from robboost.bounds.intervals import Interval, interval_rule
from robboost.bounds.network import NONLINEAR, Network
from robboost.bounds.relaxations import Lines, Rule, relaxation
from robboost.threat import Norm, Region

__all__ = ["LinearBounds", "Problem", "Single", "finish", "intermediate", "margin_rows"]

Single = Literal["ibp", "crown-ibp", "crown", "same-slope", "alpha-crown"]


class LinearBounds(NamedTuple):
    """margin_j(x + d) >= <slope_j, d> + intercept_j; lower is the minimum of the right side over the set."""

    slope: Tensor
    intercept: Tensor
    lower: Tensor


@dataclass(frozen=True)
class Problem:
    """One chunk of examples: the network, the images, the set around each, and how many rows fit at once."""

    network: Network
    x: Tensor
    region: Region
    norm: Norm
    row_elements: int

    def intervals_at(self, rows_slope: Tensor, bias: Tensor) -> Tensor:
        """Minimum over the set of <slope, x'> + bias, [N, R]."""
        centre = self.region.centre.flatten(1).unsqueeze(2)
        middle = (rows_slope.flatten(2) @ centre).squeeze(2)
        return middle + bias - spread(rows_slope, self.region.radius, self.norm)


def margin_rows(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Row j of example n: +1 at the label, -1 at the j-th other class; [N, C-1, C]."""
    eye = torch.eye(classes, dtype=dtype, device=y.device)
    others = torch.arange(classes - 1, device=y.device).expand(len(y), -1)
    targets = others + (others >= y.unsqueeze(1))
    return eye[y].unsqueeze(1) - eye[targets]


def finish(problem: Problem, rows: Tensor, lines: dict[int, Lines]) -> LinearBounds:
    slope, bias = carry(problem.network, len(problem.network.nodes) - 1, rows, lines)
    lower = problem.intervals_at(slope, bias)
    intercept = bias + (slope.flatten(2) @ problem.x.flatten(1).unsqueeze(2)).squeeze(2)
    return LinearBounds(slope, intercept, lower)


def intermediate(
    problem: Problem, rule: Rule, *, backward: bool, intersect: bool = True
) -> tuple[dict[int, Lines], dict[int, Interval]]:
    """Lines of every nonlinear node, and the bounds of its input: by intervals, or backward passes (and intervals)."""
    network = problem.network
    intervals: list[Interval] = []
    lines: dict[int, Lines] = {}
    # The image of a tight interval under an increasing function is tight: no backward pass starts there.
    queries = {node.inputs[0] for node in network.nodes if node.kind in NONLINEAR}
    queries = {index for index in queries if network.nodes[index].kind not in NONLINEAR}
    for index, node in enumerate(network.nodes):
        if node.kind == "input":
            intervals.append(box_hull(problem.region))
            continue
        interval = interval_rule(node, [intervals[source] for source in node.inputs])
        if index in queries:
            if node.affine and not (node.direct and problem.norm == "linf"):
                interval = _affine_bounds(problem, index)
            elif backward and not node.affine:
                tighter = _backward_bounds(problem, index, lines)
                interval = tighter.intersected(interval) if intersect else tighter
        intervals.append(interval)
        if node.kind in NONLINEAR:
            lines[index] = relaxation(node, intervals[node.inputs[0]], rule)
    return lines, {index: intervals[network.nodes[index].inputs[0]] for index in lines}


def _eye_rows(problem: Problem, index: int, examples: int) -> Iterator[Tensor]:
    """One-hot rows of a node's values in chunks, [examples, R, *shape]."""
    shape = problem.network.nodes[index].shape
    count = torch.Size(shape).numel()
    largest = max(torch.Size(node.shape).numel() for node in problem.network.nodes[: index + 1])
    size = max(1, problem.row_elements // (examples * largest))
    for start in range(0, count, size):
        numbers = torch.arange(start, min(start + size, count), device=problem.x.device)
        rows = torch.zeros((len(numbers), count), dtype=problem.x.dtype, device=problem.x.device)
        rows[torch.arange(len(numbers), device=rows.device), numbers] = 1
        yield rows.reshape(1, len(numbers), *shape).expand(examples, -1, *[-1] * len(shape))


def _affine_bounds(problem: Problem, index: int) -> Interval:
    """Exact bounds of a node before every nonlinear one: one slope for all examples, and the dual norm."""
    parts = [carry(problem.network, index, rows, {}) for rows in _eye_rows(problem, index, 1)]
    slope, bias = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    middle = problem.region.centre.flatten(1) @ slope[0].flatten(1).T + bias
    if problem.norm == "linf":
        radius = problem.region.radius.flatten(1) @ slope[0].flatten(1).abs().T
    else:
        unit = torch.ones_like(problem.region.radius[:1])
        radius = spread(slope, unit, problem.norm) * problem.region.radius.unsqueeze(1)
    shape = (len(problem.x), *problem.network.nodes[index].shape)
    return Interval((middle - radius).reshape(shape), (middle + radius).reshape(shape))


def _backward_bounds(problem: Problem, index: int, lines: dict[int, Lines]) -> Interval:
    lowers: list[Tensor] = []
    uppers: list[Tensor] = []
    for rows in _eye_rows(problem, index, len(problem.x)):
        lowers.append(problem.intervals_at(*carry(problem.network, index, rows, lines)))
        uppers.append(-problem.intervals_at(*carry(problem.network, index, -rows, lines)))
    shape = (len(problem.x), *problem.network.nodes[index].shape)
    return Interval(torch.cat(lowers, 1).reshape(shape), torch.cat(uppers, 1).reshape(shape))
