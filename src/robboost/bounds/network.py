"""A traced network with its constants in place: what the bound rules walk over.

A constant scale and shift (batch normalisation) after a linear operation is folded into it. Everything stays
differentiable with respect to the parameters.
"""

# ruff: noqa: ARG005 - the rules of a table share one signature

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robboost.models.graph import Graph, Slot

__all__ = ["NONLINEAR", "Network", "Node", "activation", "window_counts"]

NONLINEAR = frozenset({"relu", "sigmoid", "tanh", "maxpool"})


@dataclass(frozen=True)
class Node:
    """One operation with its constants as tensors (or numbers, for a scale and a shift).

    `affine`: no nonlinear operation lies between the input and this node. `direct`: affine, and interval arithmetic is
    exact up to here for a box of inputs, because every input reaches each value along one path of one matrix.
    """

    kind: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    attributes: Mapping[str, Any]
    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: Any = None
    shift: Any = None
    affine: bool = False
    direct: bool = False


@dataclass(frozen=True)
class Network:
    """Nodes in topological order, the last one the logits."""

    nodes: tuple[Node, ...]
    _kernels: dict[int, dict[Any, Tensor]] = field(default_factory=dict, repr=False)

    def kernels(self, node: Node) -> dict[Any, Tensor]:
        """Where rearranged forms of the node's weight are kept while this network lives."""
        return self._kernels.setdefault(id(node), {})

    @staticmethod
    def build(graph: Graph, model: nn.Module, dtype: torch.dtype) -> Network:
        values = graph.constants(model, dtype)
        nodes: list[Node] = []
        for operation in graph.operations:
            constants = {
                role: values[value.index] if isinstance(value, Slot) else value
                for role, value in operation.constants.items()
            }
            nodes.append(Node(operation.kind, operation.inputs, operation.shape, operation.attributes, **constants))
        return _with_flags(_folded(nodes))

    def detached(self) -> Network:
        """The same numbers without their history."""

        def plain(value: Any) -> Any:
            return value.detach() if isinstance(value, Tensor) else value

        return Network(
            tuple(
                replace(
                    node,
                    weight=plain(node.weight),
                    bias=plain(node.bias),
                    scale=plain(node.scale),
                    shift=plain(node.shift),
                )
                for node in self.nodes
            )
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        """The value of every node for the images x [N, ...]."""
        values: list[Tensor] = []
        for node in self.nodes:
            values.append(x if node.kind == "input" else FORWARD[node.kind](node, [values[i] for i in node.inputs]))
        return values


def _uses(nodes: list[Node]) -> list[int]:
    counts = [0] * len(nodes)
    for node in nodes:
        for source in node.inputs:
            counts[source] += 1
    counts[-1] += 1
    return counts


def _folded(nodes: list[Node]) -> list[Node]:
    """Scales behind a linear operation that nothing else uses become part of it."""
    uses = _uses(nodes)
    kept: list[Node] = []
    moved: dict[int, int] = {}
    for index, node in enumerate(nodes):
        node = replace(node, inputs=tuple(moved[source] for source in node.inputs))
        if node.kind == "scale" and uses[nodes[index].inputs[0]] == 1:
            merged = _merge(kept[node.inputs[0]], node)
            if merged is not None:
                kept[node.inputs[0]] = merged
                moved[index] = node.inputs[0]
                continue
        moved[index] = len(kept)
        kept.append(node)
    return kept


def _merge(first: Node, node: Node) -> Node | None:
    """`node`, a scale, as part of `first`; None where that is not possible."""
    if first.kind == "scale":
        scale = _times(first.scale, node.scale)
        shift = _plus(_times(first.shift, node.scale, zero=True), node.shift)
        return replace(first, scale=scale, shift=shift)
    if first.kind not in ("linear", "conv") or first.weight is None:
        return None
    scale, shift = (_per_channel(value, first) for value in (node.scale, node.shift))
    if scale is False or shift is False:
        return None
    weight, bias = first.weight, first.bias
    if scale is not None:
        weight = weight * (scale.reshape(-1, *[1] * (weight.dim() - 1)) if isinstance(scale, Tensor) else scale)
        bias = None if bias is None else bias * scale
    if shift is not None:
        zero = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
        bias = (zero if bias is None else bias) + shift
    return replace(first, weight=weight, bias=bias)


def _times(value: Any, factor: Any, *, zero: bool = False) -> Any:
    if value is None:
        return None if zero else factor
    return value if factor is None else value * factor


def _plus(value: Any, other: Any) -> Any:
    if value is None or other is None:
        return other if value is None else value
    return value + other


def _per_channel(value: Any, node: Node) -> Any:
    """A constant as one number per output channel (or one number); False where it varies within a channel."""
    if not isinstance(value, Tensor):
        return value
    channels = node.shape[0] if node.kind == "conv" else node.shape[-1]
    axis = 0 if node.kind == "conv" else len(node.shape) - 1
    full = value.reshape((1,) * (len(node.shape) - value.dim()) + tuple(value.shape))
    if any(size != 1 for position, size in enumerate(full.shape) if position != axis):
        return False
    return full.reshape(-1).expand(channels)


def _with_flags(nodes: list[Node]) -> Network:
    done: list[Node] = []
    mixed: list[bool] = []  # whether a matrix lies on the way from the input
    for node in nodes:
        sources = [done[i] for i in node.inputs]
        affine = node.kind not in NONLINEAR and all(source.affine for source in sources)
        matrix = any(mixed[i] for i in node.inputs)
        own = node.kind in ("linear", "conv", "avgpool")
        direct = affine and len(sources) <= 1 and all(source.direct for source in sources) and not (matrix and own)
        done.append(replace(node, affine=affine, direct=direct))
        mixed.append(matrix or own)
    return Network(tuple(done))


def _scale_rule(node: Node, inputs: list[Tensor]) -> Tensor:
    value = inputs[0]
    if node.scale is not None:
        value = value * node.scale
    return value if node.shift is None else value + node.shift


def _conv_rule(node: Node, inputs: list[Tensor]) -> Tensor:
    a = node.attributes
    return F.conv2d(inputs[0], node.weight, node.bias, a["stride"], a["padding"], a["dilation"], a["groups"])  # type: ignore[arg-type]


def window_counts(node: Node, size: tuple[int, int]) -> Tensor:
    """What each window of an average pooling divides by, [H', W']."""
    a = node.attributes
    if a["divisor"] is not None:
        return torch.full(node.shape[-2:], float(a["divisor"]), dtype=torch.float64)
    lengths = []
    for axis in (0, 1):
        kernel, stride, padding = a["kernel"][axis], a["stride"][axis], a["padding"][axis]
        start = torch.arange(node.shape[1 + axis], dtype=torch.float64) * stride - padding
        end = (start + kernel).clamp(max=size[axis] + (padding if a["include_pad"] else 0))
        lengths.append(end - (start if a["include_pad"] else start.clamp(min=0)))
    return lengths[0][:, None] * lengths[1][None, :]


def _avgpool_rule(node: Node, inputs: list[Tensor]) -> Tensor:
    a = node.attributes
    return F.avg_pool2d(inputs[0], a["kernel"], a["stride"], a["padding"], a["ceil"], a["include_pad"], a["divisor"])


def _maxpool_rule(node: Node, inputs: list[Tensor]) -> Tensor:
    a = node.attributes
    return F.max_pool2d(inputs[0], a["kernel"], a["stride"], a["padding"], ceil_mode=a["ceil"])


def activation(node: Node, value: Tensor) -> Tensor:
    """The component-wise function of a relu, sigmoid or tanh node: all of them increase."""
    if node.kind == "relu":
        negative = node.attributes["negative"]
        return F.relu(value) if negative == 0 else F.leaky_relu(value, negative)
    return torch.sigmoid(value) if node.kind == "sigmoid" else torch.tanh(value)


FORWARD: dict[str, Callable[[Node, list[Tensor]], Tensor]] = {
    "linear": lambda node, inputs: F.linear(inputs[0], node.weight, node.bias),  # type: ignore[arg-type]
    "conv": _conv_rule,
    "scale": _scale_rule,
    "add": lambda node, inputs: inputs[0] + inputs[1],
    "reshape": lambda node, inputs: inputs[0].reshape(len(inputs[0]), *node.shape),
    "permute": lambda node, inputs: inputs[0].permute(0, *[axis + 1 for axis in node.attributes["order"]]),
    "avgpool": _avgpool_rule,
    "maxpool": _maxpool_rule,
    "relu": lambda node, inputs: activation(node, inputs[0]),
    "sigmoid": lambda node, inputs: activation(node, inputs[0]),
    "tanh": lambda node, inputs: activation(node, inputs[0]),
}
