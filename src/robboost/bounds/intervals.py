"""Interval arithmetic: lower and upper bounds of every value from those of its operands.

For a linear operation with centre m and radius r of its operand the result is W m + b -+ |W| r; increasing functions
map the ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from robboost.bounds.network import FORWARD, Network, Node

__all__ = ["Interval", "forward_intervals", "interval_rule"]


class Interval(NamedTuple):
    """lower <= value <= upper, both [N, *shape]."""

    lower: Tensor
    upper: Tensor

    def intersected(self, other: Interval) -> Interval:
        return Interval(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))


def interval_rule(node: Node, inputs: list[Interval]) -> Interval:
    """The node's interval from its inputs' intervals."""
    return _RULES[node.kind](node, inputs)


def forward_intervals(network: Network, start: Interval, known: dict[int, Interval]) -> list[Interval]:
    """Intervals of all nodes; where `known` holds a tighter one (the exact first layer, say) it is used."""
    intervals: list[Interval] = []
    for index, node in enumerate(network.nodes):
        if index in known:
            intervals.append(known[index])
        elif node.kind == "input":
            intervals.append(start)
        else:
            intervals.append(interval_rule(node, [intervals[i] for i in node.inputs]))
    return intervals


def _matrix(node: Node, inputs: list[Interval]) -> Interval:
    lower, upper = inputs[0]
    centre, radius = (lower + upper) / 2, (upper - lower) / 2
    assert node.weight is not None
    middle = FORWARD[node.kind](node, [centre])
    spread = FORWARD[node.kind](replace(node, weight=node.weight.abs(), bias=None), [radius])
    return Interval(middle - spread, middle + spread)


def _scale(node: Node, inputs: list[Interval]) -> Interval:
    first, second = (FORWARD["scale"](node, [end]) for end in inputs[0])
    if node.scale is None or (not isinstance(node.scale, Tensor) and node.scale >= 0):
        return Interval(first, second)
    return Interval(torch.minimum(first, second), torch.maximum(first, second))


def _monotone(node: Node, inputs: list[Interval]) -> Interval:
    ends = (FORWARD[node.kind](node, [interval[end] for interval in inputs]) for end in (0, 1))
    return Interval(*ends)


_RULES: dict[str, Callable[[Node, list[Interval]], Interval]] = {
    "linear": _matrix,
    "conv": _matrix,
    "scale": _scale,
    **dict.fromkeys(("add", "reshape", "permute", "avgpool", "maxpool", "relu", "sigmoid", "tanh"), _monotone),
}
