"""The backward pass: linear functions of a node's value, carried to the input as lower bounds.

A row is a vector A; the pass replaces <A, z_k> step by step by <A', z_j> + bias of earlier nodes with
<A, z_k> >= sum_j <A'_j, z_j> + bias on the whole threat set, until only the input is left (paper, section 3.1).
At a nonlinear node the positive part of A meets the line below the function, the negative part the line above.
"""

# ruff: noqa: ARG001, ARG005 - the rules of a table share one signature

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.bounds.network import Network, Node, window_counts
from robboost.bounds.relaxations import Lines

__all__ = ["carry"]


def carry(network: Network, start: int, rows: Tensor, lines: Mapping[int, Lines]) -> tuple[Tensor, Tensor]:
    """Slope [N, R, *input] and bias [N, R] with <rows, z_start> >= <slope, x'> + bias for every x' of the set.

    rows [N, R, *shape of start]; `lines` holds the relaxation of every nonlinear node before `start`. N may be 1 where
    no relaxation lies on the way.
    """
    waiting: dict[int, Tensor] = {start: rows}
    bias = torch.zeros(rows.shape[:2], dtype=rows.dtype, device=rows.device)
    for index in range(start, 0, -1):
        held = waiting.pop(index, None)
        if held is None:
            continue
        node = network.nodes[index]
        if index in lines:
            passed, offset = _relaxed(network.nodes[node.inputs[0]], held, lines[index])
            bias = bias + offset
            parts = [] if passed is None else [passed]
        else:
            bias = bias + _constant_part(node, held)
            shapes = [network.nodes[source].shape for source in node.inputs]
            parts = _TRANSPOSED[node.kind](node, held, shapes)
        for source, part in zip(node.inputs, parts, strict=False):
            waiting[source] = waiting[source] + part if source in waiting else part
    slope = waiting.get(0)
    if slope is None:
        slope = torch.zeros((*bias.shape, *network.nodes[0].shape), dtype=rows.dtype, device=rows.device)
    return slope, bias


def _relaxed(source: Node, rows: Tensor, lines: Lines) -> tuple[Tensor | None, Tensor]:
    positive, negative = rows.clamp(min=0), rows.clamp(max=0)
    offset = positive * _row(lines.lower_intercept, rows) + negative * _row(lines.upper_intercept, rows)
    total = offset.flatten(2).sum(2)
    if lines.lower_slope is None or lines.upper_slope is None:
        return None, total
    passed = positive * _row(lines.lower_slope, rows) + negative * _row(lines.upper_slope, rows)
    if lines.choice is not None:
        size = source.shape[-2] * source.shape[-1]
        index = lines.choice.flatten(2).unsqueeze(1).expand(*rows.shape[:2], -1, -1)
        empty = torch.zeros((*rows.shape[:3], size), dtype=rows.dtype, device=rows.device)
        passed = empty.scatter_add(3, index, passed.flatten(3)).reshape(*rows.shape[:2], *source.shape)
    return passed, total


def _row(value: Tensor, rows: Tensor) -> Tensor:
    """Maps without a row axis are shared by all rows of an example."""
    return value.unsqueeze(1) if value.dim() < rows.dim() else value


def _constant_part(node: Node, rows: Tensor) -> Tensor:
    """<rows, constant part of the node>, [N, R] (or 0)."""
    zero = rows.new_zeros(())
    if node.kind in ("linear", "conv"):
        if node.bias is None:
            return zero
        if node.kind == "conv":
            return rows.sum((3, 4)) @ node.bias
        return (rows @ node.bias).flatten(2).sum(2) if rows.dim() > 3 else rows @ node.bias
    if node.kind == "scale" and node.shift is not None:
        return (rows * node.shift).flatten(2).sum(2)
    return zero


def _linear(node: Node, rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    assert node.weight is not None
    return [rows @ node.weight]


def _transposed_conv(rows: Tensor, weight: Tensor, node: Node, groups: int, shape: tuple[int, ...]) -> Tensor:
    """The transpose of a convolution whose operand has `shape`; rows [N, R, C', H', W']."""
    a = node.attributes
    kernel, stride, padding = a["kernel"], a["stride"], a["padding"]
    dilation = a.get("dilation", (1, 1))
    sizes = [(rows.shape[3 + i] - 1) * stride[i] + dilation[i] * (kernel[i] - 1) + 1 for i in (0, 1)]
    flat = rows.reshape(-1, *rows.shape[2:])
    full = F.conv_transpose2d(flat, weight, None, stride, 0, 0, groups, dilation)
    # Windows may end before the padded operand does (unused pixels) or after it (ceil mode).
    ends = [padding[i] + shape[1 + i] - sizes[i] for i in (0, 1)]
    if any(end > 0 for end in ends):
        full = F.pad(full, (0, max(ends[1], 0), 0, max(ends[0], 0)))
    cut = full[:, :, padding[0] : padding[0] + shape[1], padding[1] : padding[1] + shape[2]]
    return cut.reshape(*rows.shape[:2], *shape)


def _conv(node: Node, rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    assert node.weight is not None
    return [_transposed_conv(rows, node.weight, node, node.attributes["groups"], shapes[0])]


def _avgpool(node: Node, rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    counts = window_counts(node, (shapes[0][1], shapes[0][2])).to(rows)
    channels, kernel = shapes[0][0], node.attributes["kernel"]
    ones = rows.new_ones((channels, 1, *kernel))
    return [_transposed_conv(rows / counts, ones, node, channels, shapes[0])]


def _scale(node: Node, rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    return [rows if node.scale is None else rows * node.scale]


def _permute(node: Node, rows: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    order = node.attributes["order"]
    back = [order.index(axis) + 2 for axis in range(len(order))]
    return [rows.permute(0, 1, *back)]


_TRANSPOSED: dict[str, Callable[[Node, Tensor, list[tuple[int, ...]]], list[Tensor]]] = {
    "linear": _linear,
    "conv": _conv,
    "avgpool": _avgpool,
    "scale": _scale,
    "add": lambda node, rows, shapes: [rows, rows],
    "reshape": lambda node, rows, shapes: [rows.reshape(*rows.shape[:2], *shapes[0])],
    "permute": _permute,
}
