"""The backward pass: linear functions of a node's value, carried to the input as lower bounds.

Everything is counted from the centre of the threat set. With z_k = (value at the centre) + dz_k a linear operation has
no constant part, and a line that bounds f(z) has the gap that it leaves at the centre: a row keeps
<A, dz_k> >= sum_j <A'_j, dz_j> + gap on the whole set, until only the input is left (paper, section 3.1). Rounding is
then relative to deviations and gaps, not to the values themselves.
"""
# ruff: noqa: ARG001 - the rules of a table share one signature

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from robboost.bounds.network import Network, Node, window_counts
from robboost.bounds.pieces import Piece, Rows, Window, gather_windows
from robboost.bounds.relaxing import Maps, relaxed
from robboost.bounds.transposed import transposed_conv, transposed_matrix

__all__ = ["carry", "row_elements"]

# Beyond this share of a map, full maps are cheaper than windows.
_DENSE_SHARE = 0.6
# The transposed convolution of small windows is a product with a fixed matrix up to this many times the arithmetic.
_MATRIX_WASTE = 6.0
_MATRIX_ELEMENTS = 2**20


class _Single(NamedTuple):
    """Rows that each pick one value of a node (its flat number), before a matrix turns them into coefficients."""

    neuron: Tensor


@dataclass(frozen=True)
class _Pass:
    """What stays the same on the way: `both` for rows that want the lower and the upper bound of a neuron."""

    network: Network
    rows: Rows
    both: bool
    dtype: torch.dtype

    def piece(self, node: Node, held: Piece | _Single) -> Piece:
        """Coefficients of rows that may still be single neurons."""
        if isinstance(held, Piece):
            return held
        if self.rows.position is not None and len(node.shape) == 3:
            channel = held.neuron // (node.shape[1] * node.shape[2])
            values = F.one_hot(channel, node.shape[0]).to(self.dtype).view(1, -1, node.shape[0], 1, 1)
            return Piece(values, Window((1, 1), (0, 0), (node.shape[1], node.shape[2])))
        size = torch.Size(node.shape).numel()
        values = torch.zeros((1, len(held.neuron), size), dtype=self.dtype, device=held.neuron.device)
        values.scatter_(2, held.neuron.view(1, -1, 1), 1.0)
        return Piece(values.unflatten(2, node.shape))


def carry(
    network: Network, start: int, seed: Tensor, rows: Rows, maps: Mapping[int, Maps], dtype: torch.dtype
) -> tuple[Piece, Tensor]:
    """The piece on the input and the losses [S, M], with <row, dz_start> >= <piece, dx> + loss on the whole set.

    `maps` holds the relaxation of every nonlinear node before `start`. A seed of integers [M] names one value of the
    node for each row: its lower bound comes first, then (S = 2) that of its negative. A seed of coefficients
    [M, *shape] gives lower bounds alone (S = 1).
    """
    both = not seed.is_floating_point()
    job = _Pass(network, rows, both, dtype)
    waiting: dict[int, Any] = {start: _Single(seed) if both else Piece(seed.unsqueeze(0), owned=False)}
    losses = torch.zeros((2 if both else 1, len(rows.example)), dtype=dtype, device=rows.example.device)
    for index in range(start, 0, -1):
        held = waiting.pop(index, None)
        if held is None:
            continue
        node = network.nodes[index]
        shapes = [network.nodes[source].shape for source in node.inputs]
        if index in maps:
            passed, loss = relaxed(node, job.piece(node, held), rows, maps[index], shapes[0], both)
            losses = losses + loss
            parts: list[Any] = [] if passed is None else [passed]
        elif isinstance(held, _Single):
            parts = _singles(job, node, held, shapes)
        else:
            parts = _TRANSPOSED[node.kind](job, node, held, shapes)
        for source, part in zip(node.inputs, parts, strict=False):
            waiting[source] = _sum(job, source, waiting[source], part) if source in waiting else part
    shape = network.nodes[0].shape
    last = waiting.get(0)
    if last is None:
        last = Piece(losses.new_zeros((1, len(rows.example), *shape)))
    piece = job.piece(network.nodes[0], last)
    return (piece.copied() if both else piece), losses


def _sum(job: _Pass, source: int, first: Piece | _Single, second: Piece | _Single) -> Piece:
    node = job.network.nodes[source]
    return job.piece(node, first).plus(job.piece(node, second), job.rows, node.shape)


def _singles(job: _Pass, node: Node, held: _Single, shapes: list[tuple[int, ...]]) -> list[Any]:
    """A matrix's rows are the coefficients of its single outputs; additions pass single neurons on."""
    if node.kind == "add":
        return [held, held]
    if node.kind == "linear" and len(node.shape) == 1 and node.weight is not None:
        return [Piece(node.weight[held.neuron].unsqueeze(0))]
    plain = node.kind == "conv" and node.attributes["groups"] == 1 and node.attributes["dilation"] == (1, 1)
    if plain and job.rows.position is not None and node.weight is not None:
        filters = node.weight[held.neuron // (node.shape[1] * node.shape[2])]
        start = Window((1, 1), (0, 0), (node.shape[1], node.shape[2]))
        return [_fitted(job, Piece(filters.unsqueeze(0), _widened(start, node), clean=False), shapes[0])]
    return _TRANSPOSED[node.kind](job, node, job.piece(node, held), shapes)


def _widened(window: Window, node: Node) -> Window:
    a = node.attributes
    stride = (window.stride[0] * a["stride"][0], window.stride[1] * a["stride"][1])
    offset = tuple(window.offset[i] * a["stride"][i] - a["padding"][i] for i in (0, 1))
    return Window(stride, (offset[0], offset[1]), window.extent)


def _fitted(job: _Pass, piece: Piece, shape: tuple[int, ...]) -> Piece:
    """Full maps as soon as windows save little."""
    if piece.window is None or piece.size[0] * piece.size[1] < _DENSE_SHARE * shape[1] * shape[2]:
        return piece
    return piece.dense(job.rows, shape)


def row_elements(network: Network, start: int) -> int:
    """The most numbers that one row holds at once on any node of its way, by windows where they are used."""
    waiting: dict[int, tuple[int, int] | None] = {start: (1, 1) if len(network.nodes[start].shape) == 3 else None}
    most = 1
    for index in range(start, 0, -1):
        if index not in waiting:
            continue
        node, size = network.nodes[index], waiting.pop(index)
        for source in node.inputs:
            shape = network.nodes[source].shape
            passed = None if len(shape) != 3 or node.kind in ("maxpool", "reshape", "permute", "linear") else size
            if passed is not None and node.kind in ("conv", "avgpool"):
                passed = _grown(node, passed)
                passed = None if passed[0] * passed[1] >= _DENSE_SHARE * shape[1] * shape[2] else passed
            if source in waiting:
                other = waiting[source]
                passed = (
                    None if passed is None or other is None else (max(passed[0], other[0]), max(passed[1], other[1]))
                )
            waiting[source] = passed
            whole = torch.Size(shape).numel()
            most = max(most, whole if passed is None else min(2 * whole, shape[0] * passed[0] * passed[1]))
    return most


def _grown(node: Node, size: tuple[int, int]) -> tuple[int, int]:
    a = node.attributes
    dilation = a.get("dilation", (1, 1))
    height, width = ((size[i] - 1) * a["stride"][i] + dilation[i] * (a["kernel"][i] - 1) + 1 for i in (0, 1))
    return height, width


# Linear operations, transposed ------------------------------------------------------------------------------------


def _linear(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    assert node.weight is not None
    return [Piece(piece.values @ node.weight)]


def _transposed(job: _Pass, node: Node, piece: Piece, weight: Tensor, shape: tuple[int, ...]) -> list[Any]:
    attributes, cache = node.attributes, job.network.kernels(node)
    lead = piece.values.shape[:2]
    flat = piece.cleaned(job.rows, node.shape).values.flatten(0, 1)
    if piece.window is None:
        size = (shape[1], shape[2])
        whole = transposed_conv(
            flat, weight, attributes=attributes, padding=attributes["padding"], size=size, cache=cache
        )
        return [Piece(whole.unflatten(0, lead))]
    height, width = _grown(node, piece.size)
    inner, outer = flat[0].numel(), shape[0] * height * width
    small = height * width <= _MATRIX_WASTE * weight.shape[2] * weight.shape[3] and inner * outer <= _MATRIX_ELEMENTS
    if small and not flat.is_cuda and len(flat) >= inner:
        matrix = transposed_matrix(weight, attributes=attributes, size=piece.size, cache=cache)
        grown = (flat.flatten(1) @ matrix).view(-1, shape[0], height, width)
    else:
        grown = transposed_conv(flat, weight, attributes=attributes, padding=(0, 0), size=(height, width), cache=cache)
    return [_fitted(job, Piece(grown.unflatten(0, lead), _widened(piece.window, node), clean=False), shape)]


def _conv(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    assert node.weight is not None
    return _transposed(job, node, piece, node.weight, shapes[0])


def _avgpool(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    share = 1 / window_counts(node, (shapes[0][1], shapes[0][2])).to(piece.values)
    if piece.window is not None:
        share = gather_windows(share.expand(1, 1, -1, -1), piece.window, piece.size, job.rows)
    channels = shapes[0][0]
    ones = piece.values.new_ones((channels, 1, *node.attributes["kernel"]))
    divided = replace(piece, values=piece.values * share, clean=True, owned=True)
    return _transposed(job, node, divided, ones, shapes[0])


def _scale(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    scale = node.scale
    if scale is None:
        return [piece]
    if isinstance(scale, Tensor) and piece.window is not None:
        full = scale.expand(1, *node.shape) if scale.dim() < 4 else scale
        scale = gather_windows(full, piece.window, piece.size, job.rows)
    return [replace(piece, values=piece.values * scale, owned=True)]


def _add(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    shared = replace(piece, owned=False)
    return [shared, shared]


def _reshape(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    dense = piece.dense(job.rows, node.shape)
    return [replace(dense, values=dense.values.reshape(*dense.values.shape[:2], *shapes[0]))]


def _permute(job: _Pass, node: Node, piece: Piece, shapes: list[tuple[int, ...]]) -> list[Any]:
    order = node.attributes["order"]
    dense = piece.dense(job.rows, node.shape)
    back = [order.index(axis) + 2 for axis in range(len(order))]
    return [replace(dense, values=dense.values.permute(0, 1, *back).contiguous())]


_TRANSPOSED: dict[str, Callable[[_Pass, Node, Piece, list[tuple[int, ...]]], list[Any]]] = {
    "linear": _linear,
    "conv": _conv,
    "avgpool": _avgpool,
    "scale": _scale,
    "add": _add,
    "reshape": _reshape,
    "permute": _permute,
}
