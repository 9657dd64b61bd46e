"""Bounds of one chunk of examples: intermediate bounds node by node, then the margins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from robboost.bounds.backward import carry, row_elements
from robboost.bounds.concretisation import box_hull, reach, unit_reach
from robboost.bounds.intervals import Interval, interval_rule
from robboost.bounds.network import NONLINEAR, Network, Node
from robboost.bounds.pieces import Rows
from robboost.bounds.relaxations import Lines, Rule, relaxation
from robboost.bounds.relaxing import Maps, maps_of
from robboost.threat import Norm, Region

__all__ = ["LinearBounds", "Problem", "finish", "intermediate", "maps_for"]


class LinearBounds(NamedTuple):
    """margin_j(x + d) >= <slope_j, d> + intercept_j; lower is the minimum of the right side over the set."""

    slope: Tensor
    intercept: Tensor
    lower: Tensor


@dataclass(frozen=True)
class Problem:
    """One chunk of examples: the network, the images and labels, the set around each.

    values: every node's value at the centre of the set. elements: numbers that one tensor of a pass may hold.
    """

    network: Network
    x: Tensor
    y: Tensor
    region: Region
    norm: Norm
    elements: int
    values: list[Tensor] = field(default_factory=list)

    @staticmethod
    def of(network: Network, x: Tensor, y: Tensor, region: Region, norm: Norm, elements: int) -> Problem:
        return Problem(network, x, y, region, norm, elements, network.forward(region.centre))


def maps_for(problem: Problem, index: int, lines: Lines) -> Maps:
    """The lines of a node, seen from the centre."""
    before = problem.values[problem.network.nodes[index].inputs[0]]
    if lines.choice is not None:
        before = before.flatten(2).gather(2, lines.choice.flatten(2)).view(lines.choice.shape)
    return maps_of(lines, before, problem.values[index])


def finish(problem: Problem, maps: dict[int, Maps]) -> LinearBounds:
    """The backward pass of the margins: one row for each (example, other class)."""
    network, count = problem.network, len(problem.x)
    classes = network.nodes[-1].shape[0]
    device, dtype = problem.x.device, problem.x.dtype
    others = torch.arange(classes - 1, device=device).expand(count, -1)
    targets = others + (others >= problem.y.unsqueeze(1))
    eye = torch.eye(classes, dtype=dtype, device=device)
    seed = (eye[problem.y].unsqueeze(1) - eye[targets]).flatten(0, 1)
    rows = Rows(torch.arange(count, device=device).repeat_interleave(classes - 1), uniform=classes - 1)
    piece, losses = carry(network, len(network.nodes) - 1, seed, rows, maps, dtype)
    logits = problem.values[-1]
    margin = logits.gather(1, problem.y.unsqueeze(1)) - logits.gather(1, targets)
    slope = piece.values[0].unflatten(0, (count, classes - 1))
    middle = margin + losses[0].view(count, -1)
    # An overflow proves nothing, least of all an infinite margin.
    middle = torch.where(middle.isinf(), torch.nan, middle)
    shift = (problem.x - problem.region.centre).flatten(1).unsqueeze(2)
    return LinearBounds(
        slope,
        middle + (slope.flatten(2) @ shift).squeeze(2),
        middle - reach(piece, rows, problem.region, problem.norm)[0].view(count, -1),
    )


def intermediate(
    problem: Problem, rule: Rule, *, backward: bool, intersect: bool = True
) -> tuple[dict[int, Maps], dict[int, Lines], dict[int, Interval]]:
    """Relaxations of all nonlinear nodes (seen from the centre, and as lines), and the bounds of their operands.

    Bounds come by intervals alone, or by backward passes through the relaxations found so far; `intersect` takes the
    tighter of the two, and spares the backward pass of neurons that intervals prove stable: their relaxation is exact.
    """
    network = problem.network
    # The image of a tight interval under an increasing function is tight: no backward pass starts there.
    queries = {node.inputs[0] for node in network.nodes if node.kind in NONLINEAR}
    queries = {index for index in queries if network.nodes[index].kind not in NONLINEAR}
    piecewise = {
        index
        for index in queries
        if all(node.kind == "relu" for node in network.nodes if index in node.inputs and node.kind in NONLINEAR)
    }
    intervals: list[Interval] = []
    lines: dict[int, Lines] = {}
    maps: dict[int, Maps] = {}
    for index, node in enumerate(network.nodes):
        if node.kind == "input":
            intervals.append(box_hull(problem.region))
            continue
        interval = interval_rule(node, [intervals[source] for source in node.inputs])
        if index in queries:
            if node.affine:
                if not (node.direct and problem.norm == "linf"):
                    interval = _affine_bounds(problem, index)
            elif backward:
                unknown = _crossing(interval) if intersect and index in piecewise else None
                interval = _backward_bounds(problem, index, maps, interval, unknown, intersect)
        intervals.append(interval)
        if node.kind in NONLINEAR:
            lines[index] = relaxation(node, intervals[node.inputs[0]], rule)
            maps[index] = maps_for(problem, index, lines[index])
    return maps, lines, {index: intervals[network.nodes[index].inputs[0]] for index in lines}


def _crossing(interval: Interval) -> Tensor:
    return (interval.lower < 0) & (interval.upper > 0)


def _all_rows(node: Node, neuron: Tensor, example: Tensor) -> Rows:
    if len(node.shape) != 3:
        return Rows(example)
    pixel = neuron % (node.shape[1] * node.shape[2])
    position = torch.stack([pixel // node.shape[2], pixel % node.shape[2]], 1)
    return Rows(example, position=position)


def _chunks(problem: Problem, index: int, example: Tensor, neuron: Tensor) -> Iterator[tuple[Rows, Tensor, slice]]:
    """The rows (example, neuron) of a node in chunks that fit."""
    node = problem.network.nodes[index]
    # Twice: the lower and the upper row of a neuron.
    size = max(1, problem.elements // (2 * row_elements(problem.network, index)))
    for start in range(0, len(neuron), size):
        part = slice(start, start + size)
        yield _all_rows(node, neuron[part], example[part]), neuron[part], part


def _affine_bounds(problem: Problem, index: int) -> Interval:
    """Exact bounds of a node before every nonlinear one: one row for all examples, and the dual norm."""
    node, region = problem.network.nodes[index], problem.region
    count = torch.Size(node.shape).numel()
    neuron = torch.arange(count, device=problem.x.device)
    radii = []
    for rows, numbers, _ in _chunks(problem, index, torch.zeros_like(neuron), neuron):
        piece, _ = carry(problem.network, index, numbers, rows, {}, problem.x.dtype)
        shape = problem.network.nodes[0].shape
        if problem.norm == "linf":
            radii.append(region.radius.flatten(1) @ piece.dense(rows, shape).values[0].flatten(1).abs().T)
        else:
            radii.append(region.radius[:, None] * unit_reach(piece, rows, shape, problem.norm)[0])
    radius = torch.cat(radii, 1).view(-1, *node.shape)
    return Interval(problem.values[index] - radius, problem.values[index] + radius)


def _backward_bounds(
    problem: Problem,
    index: int,
    maps: dict[int, Maps],
    interval: Interval,
    unknown: Tensor | None,
    intersect: bool,
) -> Interval:
    """Bounds of a node's values (all of them, or those marked unknown) by backward passes."""
    if unknown is None:
        unknown = torch.ones_like(interval.lower, dtype=torch.bool)
    example, neuron = unknown.flatten(1).nonzero(as_tuple=True)
    centre = problem.values[index].flatten(1)[example, neuron]
    found = []
    for rows, numbers, _ in _chunks(problem, index, example, neuron):
        piece, losses = carry(problem.network, index, numbers, rows, maps, problem.x.dtype)
        found.append(losses - reach(piece, rows, problem.region, problem.norm))
    if not found:
        return interval
    lowest, highest = torch.cat(found, 1)
    lower, upper = centre + lowest, centre - highest
    if intersect:
        lower = torch.maximum(lower, interval.lower.flatten(1)[example, neuron])
        upper = torch.minimum(upper, interval.upper.flatten(1)[example, neuron])
    return Interval(
        interval.lower.flatten(1).index_put((example, neuron), lower).view_as(interval.lower),
        interval.upper.flatten(1).index_put((example, neuron), upper).view_as(interval.upper),
    )
