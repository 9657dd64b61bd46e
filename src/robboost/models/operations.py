"""From the operators that PyTorch exports to the few kinds of operation that have bound rules.

Kinds: "input", "linear", "conv", "scale" (x * scale + shift), "add" (sum of its inputs), "reshape", "permute",
"avgpool", "maxpool", "relu" (with a slope for negative inputs), "sigmoid" and "tanh". The rest is refused by name.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from robboost.errors import UnsupportedOperationError

__all__ = ["RULES", "Context", "Operation", "Slot", "Step", "name_of", "place_of"]


@dataclass(frozen=True)
class Slot:
    """A constant's place in the list that `Graph.constants` returns."""

    index: int


@dataclass(frozen=True)
class Step:
    """One call of the constant program: its arguments may be slots."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """One operation: `kind` is a key of every rule table, `shape` leaves the batch axis out.

    `inputs` are positions in `Graph.operations`; `constants` maps a role ("weight", "bias", ...) to None, a number or
    the slot of a live constant; `place` says where the operation stands in the network, for error messages.
    """

    kind: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    constants: Mapping[str, Any]
    attributes: Mapping[str, Any]
    place: str


def name_of(node: torch.fx.Node) -> str:
    """`aten.conv2d` for every overload of that operator."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket)
    return str(getattr(target, "__name__", target))


def place_of(node: torch.fx.Node) -> str:
    """Path of the module whose forward calls the operator, and the operator's name in the exported graph."""
    stack = node.meta.get("nn_module_stack")
    path = str(list(stack.values())[-1][0]) if stack else ""
    path = path.removeprefix("L['self']").removeprefix(".")
    return f"{path or 'forward'} ({node.name})"


class Context:
    """What a conversion rule sees: the exported node, and where to put operations and constants."""

    def __init__(
        self,
        positions: dict[torch.fx.Node, int],
        slots: dict[torch.fx.Node, Slot],
        operations: list[Operation],
        program: list[Any],
    ) -> None:
        self.positions, self.slots, self.operations, self.program = positions, slots, operations, program
        self.batch: Any = None
        self.node: torch.fx.Node

    def refuse(self, why: str) -> UnsupportedOperationError:
        return UnsupportedOperationError(f"{name_of(self.node)} at {place_of(self.node)} has no bound rule: {why}")

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument of the operator: an fx node, a number, a list, or `default` where it was left out."""
        if len(self.node.args) > position:
            return self.node.args[position]
        return self.node.kwargs.get(name, default)

    def flows(self, value: Any) -> bool:
        """Whether `value` depends on the network's input."""
        return isinstance(value, torch.fx.Node) and value in self.positions

    def source(self, value: Any) -> int:
        if not self.flows(value):
            raise self.refuse("its first operand does not depend on the network's input")
        return self.positions[value]

    def shape(self, position: int) -> tuple[int, ...]:
        return self.operations[position].shape

    def constant(self, value: Any) -> Any:
        """A number, None, or the slot of a constant tensor; sizes of the batch are refused."""
        if value is None or isinstance(value, (bool, int, float)):
            return value
        if isinstance(value, torch.fx.Node) and value in self.slots:
            return self.slots[value]
        raise self.refuse("an operand is neither a number nor a parameter (it may depend on the batch size)")

    def compute(self, function: Callable[..., Any], *arguments: Any) -> Slot:
        """Adds a step to the constant program."""
        self.program.append(Step(function, arguments, {}))
        return Slot(len(self.program) - 1)

    def result_shape(self) -> tuple[int, ...]:
        """Shape of the node's value for one example; refuses values without a leading batch axis."""
        value = self.node.meta["val"]
        value = value[0] if isinstance(value, (tuple, list)) else value
        if value.dim() < 1 or not (value.shape[0] is self.batch or value.shape[0] == self.batch):
            raise self.refuse("its result has no leading batch axis")
        try:
            return tuple(int(size) for size in value.shape[1:])
        except Exception as error:
            raise self.refuse("its result's shape depends on the batch size") from error

    def emit(
        self,
        kind: str,
        inputs: tuple[int, ...],
        shape: tuple[int, ...],
        constants: Mapping[str, Any] | None = None,
        **attributes: Any,
    ) -> int:
        frozen = MappingProxyType(dict(constants or {}))
        self.operations.append(
            Operation(kind, inputs, tuple(shape), frozen, MappingProxyType(attributes), place_of(self.node))
        )
        return len(self.operations) - 1

    def reshaped(self, position: int, shape: tuple[int, ...]) -> int:
        """A row-major reshape that keeps the batch axis, and hence every example, apart."""
        if self.shape(position) == shape:
            return position
        if math.prod(self.shape(position)) != math.prod(shape):
            raise self.refuse("it moves values between examples")
        return self.emit("reshape", (position,), shape)


def _pair(value: Any, fallback: Any = None) -> tuple[int, int]:
    if value is None or (isinstance(value, (list, tuple)) and len(value) == 0):
        value = fallback
    if isinstance(value, int):
        return (value, value)
    parts = tuple(int(part) for part in value)
    return (parts[0], parts[0]) if len(parts) == 1 else (parts[0], parts[1])


def _identity(context: Context) -> int:
    return context.source(context.node.args[0])


def _cast(context: Context) -> int:
    # Bounds are proved for real arithmetic: a change between float types is no operation, anything else is one.
    value = context.node.meta["val"]
    if value.dtype not in (torch.float32, torch.float64):
        raise context.refuse(f"it converts to {value.dtype}")
    return _identity(context)


def _reshape(context: Context) -> int:
    return context.reshaped(context.source(context.node.args[0]), context.result_shape())


def _permute(context: Context) -> int:
    position = context.source(context.node.args[0])
    rank = len(context.shape(position)) + 1
    name = name_of(context.node)
    order = list(range(rank))
    if name == "aten.permute":
        order = [int(axis) % rank for axis in context.argument(1, "dims")]
    elif name == "aten.transpose":
        first, second = int(context.argument(1, "dim0")) % rank, int(context.argument(2, "dim1")) % rank
        order[first], order[second] = second, first
    else:
        order = order[::-1]
    if order[0] != 0:
        raise context.refuse("it moves the batch axis")
    if order == list(range(rank)):
        return position
    return context.emit("permute", (position,), context.result_shape(), order=tuple(axis - 1 for axis in order[1:]))


def _linear(context: Context) -> int:
    position = context.source(context.argument(0, "input"))
    weight = context.constant(context.argument(1, "weight"))
    bias = context.constant(context.argument(2, "bias"))
    return context.emit("linear", (position,), context.result_shape(), {"weight": weight, "bias": bias})


def _transposed(matrix: Tensor) -> Tensor:
    return matrix.transpose(-1, -2)


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    return tensor * factor


def _addmm(context: Context) -> int:
    bias, flow, matrix = (context.node.args[index] for index in range(3))
    beta, alpha = context.argument(3, "beta", 1), context.argument(4, "alpha", 1)
    position = context.source(flow)
    weight = context.compute(_transposed, context.constant(matrix))
    offset = context.constant(bias)
    if alpha != 1:
        weight = context.compute(_scaled, weight, alpha)
    if beta != 1:
        offset = context.compute(_scaled, offset, beta)
    shape = context.result_shape()
    return context.emit("linear", (position,), shape, {"weight": weight, "bias": _vector(context, offset, shape[-1])})


def _vector(context: Context, value: Any, size: int) -> Any:
    def expand(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).expand(size)

    return context.compute(expand, value)


def _matmul(context: Context) -> int:
    flow, matrix = context.node.args[0], context.node.args[1]
    position = context.source(flow)
    if matrix.meta["val"].dim() != 2:  # type: ignore[union-attr]
        raise context.refuse("its second operand is no constant matrix")
    weight = context.compute(_transposed, context.constant(matrix))
    return context.emit("linear", (position,), context.result_shape(), {"weight": weight, "bias": None})


def _conv(context: Context) -> int:
    position = context.source(context.argument(0, "input"))
    if len(context.shape(position)) != 3:
        raise context.refuse("only two-dimensional convolutions of images [N, C, H, W] have one")
    if name_of(context.node) == "aten.convolution":
        if context.argument(6, "transposed"):
            raise context.refuse("it is a transposed convolution")
        groups = context.argument(8, "groups")
    else:
        groups = context.argument(6, "groups", 1)
    weight = context.constant(context.argument(1, "weight"))
    bias = context.constant(context.argument(2, "bias"))
    stride, dilation = _pair(context.argument(3, "stride"), 1), _pair(context.argument(5, "dilation"), 1)
    padding = context.argument(4, "padding", 0)
    kernel = tuple(int(size) for size in context.node.args[1].meta["val"].shape[-2:])  # type: ignore[union-attr]
    if isinstance(padding, str):
        totals = [(size - 1) * step if padding == "same" else 0 for size, step in zip(kernel, dilation, strict=True)]
        if any(total % 2 for total in totals):
            raise context.refuse("its padding differs between the two sides")
        padding = [total // 2 for total in totals]
    return context.emit(
        "conv",
        (position,),
        context.result_shape(),
        {"weight": weight, "bias": bias},
        stride=stride,
        padding=_pair(padding, 0),
        dilation=dilation,
        groups=int(groups),
        kernel=kernel,
    )


def _batch_norm(context: Context) -> int:
    name = name_of(context.node)
    if name == "aten.batch_norm" and context.argument(5, "training"):
        raise context.refuse("batch normalisation in training mode is no fixed function, call model.eval()")
    if name == "aten._native_batch_norm_legit_no_training":
        epsilon = context.argument(6, "eps")
    else:
        epsilon = context.argument(7, "eps", 1e-5)
    position = context.source(context.node.args[0])
    shape = context.shape(position)
    weight, bias, mean, variance = (context.constant(context.node.args[index]) for index in range(1, 5))
    if mean is None or variance is None:
        raise context.refuse("batch normalisation without running statistics depends on the batch")

    def scale_of(gain: Tensor | None, spread: Tensor) -> Tensor:
        scale = torch.rsqrt(spread + epsilon)
        scale = scale if gain is None else scale * gain
        return scale.reshape(-1, *(1,) * (len(shape) - 1))

    def shift_of(offset: Tensor | None, centre: Tensor, scale: Tensor) -> Tensor:
        shift = -centre.reshape(scale.shape) * scale
        return shift if offset is None else shift + offset.reshape(scale.shape)

    scale = context.compute(scale_of, weight, variance)
    shift = context.compute(shift_of, bias, mean, scale)
    return context.emit("scale", (position,), shape, {"scale": scale, "shift": shift})


def _broadcast(context: Context, value: Any, position: int) -> Any:
    """A constant operand for the operation at `position`: a number, or a slot that broadcasts to its shape."""
    constant = context.constant(value)
    if not isinstance(constant, Slot):
        return constant
    sizes = [int(size) for size in value.meta["val"].shape]
    shape = context.shape(position)
    if len(sizes) > len(shape) + 1 or (len(sizes) == len(shape) + 1 and sizes[0] != 1):
        raise context.refuse("a constant operand differs between the examples of a batch")
    if context.result_shape() != shape:
        raise context.refuse("a constant operand enlarges its result")
    if len(sizes) == len(shape) + 1:
        return context.compute(_first, constant)
    return constant


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


def _add(context: Context) -> int:
    sign = -1.0 if name_of(context.node) in ("aten.sub", "aten.rsub") else 1.0
    left, right = context.argument(0, "self"), context.argument(1, "other")
    alpha = context.argument(2, "alpha", 1)
    if not isinstance(alpha, (int, float)):
        raise context.refuse("alpha is no number")
    if name_of(context.node) == "aten.rsub":
        left, right = right, left
        if alpha != 1:
            raise context.refuse("alpha is not 1")
    factor = sign * float(alpha)
    if context.flows(left) and context.flows(right):
        first, second = context.positions[left], context.positions[right]
        if context.shape(first) != context.shape(second):
            raise context.refuse("it adds values of different shapes")
        if factor != 1.0:
            second = context.emit("scale", (second,), context.shape(second), {"scale": factor, "shift": None})
        return context.emit("add", (first, second), context.shape(first))
    if context.flows(left):
        position = context.positions[left]
        shift = _broadcast(context, right, position)
        shift = context.compute(_scaled, shift, factor) if isinstance(shift, Slot) else shift * factor
        return context.emit("scale", (position,), context.shape(position), {"scale": None, "shift": shift})
    position = context.source(right)
    shift = _broadcast(context, left, position)
    scale = factor if factor != 1.0 else None
    return context.emit("scale", (position,), context.shape(position), {"scale": scale, "shift": shift})


def _multiply(context: Context) -> int:
    left, right = context.argument(0, "self"), context.argument(1, "other")
    if context.flows(left) and context.flows(right):
        raise context.refuse("both of its factors depend on the network's input")
    flow, other = (left, right) if context.flows(left) else (right, left)
    position = context.source(flow)
    scale = _broadcast(context, other, position)
    return context.emit("scale", (position,), context.shape(position), {"scale": scale, "shift": None})


def _reciprocal(value: Any) -> Any:
    return 1.0 / value


def _divide(context: Context) -> int:
    if context.node.kwargs.get("rounding_mode") is not None:
        raise context.refuse("it rounds")
    if context.flows(context.node.args[1]):
        raise context.refuse("its divisor depends on the network's input")
    position = context.source(context.node.args[0])
    scale = _broadcast(context, context.node.args[1], position)
    scale = context.compute(_reciprocal, scale) if isinstance(scale, Slot) else 1.0 / scale
    return context.emit("scale", (position,), context.shape(position), {"scale": scale, "shift": None})


def _negate(context: Context) -> int:
    position = context.source(context.node.args[0])
    return context.emit("scale", (position,), context.shape(position), {"scale": -1.0, "shift": None})


def _pooled(
    context: Context, kind: str, position: int, kernel: tuple[int, int], shape: tuple[int, ...], **extra: Any
) -> int:
    if len(context.shape(position)) != 3:
        raise context.refuse("only images [N, C, H, W] are pooled")
    settings: dict[str, Any] = {"stride": kernel, "padding": (0, 0), "ceil": False, **extra}
    settings["groups"] = context.shape(position)[0]
    return context.emit(kind, (position,), shape, kernel=kernel, **settings)


def _avg_pool(context: Context) -> int:
    kernel = _pair(context.argument(1, "kernel_size"))
    stride = _pair(context.argument(2, "stride"), kernel)
    padding = _pair(context.argument(3, "padding", 0), 0)
    position, shape = context.source(context.node.args[0]), context.result_shape()
    divisor = context.argument(6, "divisor_override")
    if divisor is not None and divisor <= 0:
        raise context.refuse(f"its divisor {divisor} is not above zero")
    return _pooled(
        context,
        "avgpool",
        position,
        kernel,
        shape,
        stride=stride,
        padding=padding,
        ceil=bool(context.argument(4, "ceil_mode", False)),
        include_pad=bool(context.argument(5, "count_include_pad", True)),
        divisor=divisor,
    )


def _adaptive_avg_pool(context: Context) -> int:
    position, shape = context.source(context.node.args[0]), context.result_shape()
    sizes = context.shape(position)[-2:]
    if any(size % target for size, target in zip(sizes, shape[-2:], strict=True)):
        raise context.refuse(f"its output {shape[-2:]} does not divide its input {sizes}: the windows differ in size")
    kernel = (sizes[0] // shape[-2], sizes[1] // shape[-1])
    return _pooled(context, "avgpool", position, kernel, shape, include_pad=True, divisor=None)


def _mean(context: Context) -> int:
    position, shape = context.source(context.node.args[0]), context.result_shape()
    before = context.shape(position)
    rank = len(before) + 1
    axes = sorted(int(axis) % rank for axis in context.argument(1, "dim") or range(rank))
    if len(before) != 3 or axes != [2, 3]:
        raise context.refuse("only the mean over height and width of images has one")
    kernel = (before[1], before[2])
    pooled = _pooled(context, "avgpool", position, kernel, (before[0], 1, 1), include_pad=True, divisor=None)
    return context.reshaped(pooled, shape)


def _max_pool(context: Context) -> int:
    kernel = _pair(context.argument(1, "kernel_size"))
    stride = _pair(context.argument(2, "stride"), kernel)
    padding = _pair(context.argument(3, "padding", 0), 0)
    if _pair(context.argument(4, "dilation", 1), 1) != (1, 1):
        raise context.refuse("dilated pooling")
    position, shape = context.source(context.node.args[0]), context.result_shape()
    ceil = bool(context.argument(5, "ceil_mode", False))
    return _pooled(context, "maxpool", position, kernel, shape, stride=stride, padding=padding, ceil=ceil)


def _relu(context: Context) -> int:
    position = context.source(context.node.args[0])
    return context.emit("relu", (position,), context.shape(position), negative=0.0)


def _leaky(context: Context) -> int:
    position = context.source(context.node.args[0])
    negative = context.argument(1, "negative_slope", 0.01)
    if not isinstance(negative, (int, float)) or not 0.0 <= negative <= 1.0:
        raise context.refuse(f"its slope {negative} for negative inputs is not within [0, 1]")
    return context.emit("relu", (position,), context.shape(position), negative=float(negative))


def _smooth(kind: str) -> Callable[[Context], int]:
    def rule(context: Context) -> int:
        position = context.source(context.node.args[0])
        return context.emit(kind, (position,), context.shape(position))

    return rule


def _dropout(context: Context) -> int:
    probability, train = context.argument(1, "p"), context.argument(2, "train")
    if train and probability != 0.0:
        raise context.refuse("dropout in training mode is random, call model.eval()")
    return _identity(context)


def _item(context: Context) -> int:
    if context.node.args[1] != 0:
        raise context.refuse("only the first of its results is a value of the network")
    return _identity(context)


RULES: dict[str, Callable[[Context], int]] = {
    operator.getitem.__name__: _item,
    **dict.fromkeys(
        ("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.positive"),
        _identity,
    ),
    **dict.fromkeys(("aten.to", "aten._to_copy", "aten.type_as"), _cast),
    **dict.fromkeys(
        (
            "aten.view",
            "aten.reshape",
            "aten._unsafe_view",
            "aten.flatten",
            "aten.unflatten",
            "aten.squeeze",
            "aten.unsqueeze",
        ),
        _reshape,
    ),
    **dict.fromkeys(("aten.permute", "aten.transpose", "aten.t", "aten.numpy_T"), _permute),
    "aten.linear": _linear,
    "aten.addmm": _addmm,
    **dict.fromkeys(("aten.matmul", "aten.mm"), _matmul),
    **dict.fromkeys(("aten.conv2d", "aten.convolution"), _conv),
    **dict.fromkeys(("aten.batch_norm", "aten._native_batch_norm_legit_no_training"), _batch_norm),
    **dict.fromkeys(("aten.add", "aten.add_", "aten.sub", "aten.sub_", "aten.rsub"), _add),
    **dict.fromkeys(("aten.mul", "aten.mul_"), _multiply),
    **dict.fromkeys(("aten.div", "aten.div_"), _divide),
    "aten.neg": _negate,
    "aten.avg_pool2d": _avg_pool,
    **dict.fromkeys(("aten.adaptive_avg_pool2d", "aten._adaptive_avg_pool2d"), _adaptive_avg_pool),
    "aten.mean": _mean,
    **dict.fromkeys(("aten.max_pool2d", "aten.max_pool2d_with_indices"), _max_pool),
    **dict.fromkeys(("aten.relu", "aten.relu_"), _relu),
    **dict.fromkeys(("aten.leaky_relu", "aten.leaky_relu_"), _leaky),
    **dict.fromkeys(("aten.sigmoid", "aten.sigmoid_"), _smooth("sigmoid")),
    **dict.fromkeys(("aten.tanh", "aten.tanh_"), _smooth("tanh")),
    **dict.fromkeys(("aten.dropout", "aten.dropout_", "aten.feature_dropout"), _dropout),
}
