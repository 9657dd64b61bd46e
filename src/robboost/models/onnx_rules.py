"""What each ONNX operation becomes: a layer, arithmetic with a constant, or a folded constant."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from robboost.models.onnx_shapes import SHAPE_RULES
from robboost.models.onnx_translation import MAX_NUMBERS, Translation

__all__ = ["RULES"]

Rule = Callable[[Translation], None]


def _convolution(to: Translation) -> None:
    flow, weight = to.flow(0, padded=True), to.needed(1)
    bias = to.needed(2) if to.given(2) else None
    height, width = to.image_sides(flow)
    if weight.dim() != 4:
        raise to.refuse(f"weight of shape {list(weight.shape)}, only two-dimensional convolutions have a rule")
    kernel = list(weight.shape[2:])
    if to.attribute("kernel_shape", kernel) != kernel:
        raise to.refuse(f"kernel_shape={to.attribute('kernel_shape')} with weight {list(weight.shape)}")
    stride, dilation = to.numbers("strides", [1, 1]), to.numbers("dilations", [1, 1])
    waiting = to.pads(0)
    sides = [height + waiting[0] + waiting[2], width + waiting[1] + waiting[3]]
    pads = [a + b for a, b in zip(_pads(to, sides, kernel, stride, dilation), waiting, strict=True)]
    weight, padding = _even_padding(to, weight, pads, dilation)
    groups = to.attribute("group", 1)
    if groups < 1 or weight.shape[0] % groups:
        raise to.refuse(f"group={groups} with {weight.shape[0]} filters")
    with torch.device("meta"):
        layer = nn.Conv2d(
            weight.shape[1] * groups,
            weight.shape[0],
            tuple(weight.shape[2:]),  # type: ignore[arg-type]
            stride=tuple(stride),  # type: ignore[arg-type]
            padding=padding,
            dilation=tuple(dilation),  # type: ignore[arg-type]
            groups=groups,
            bias=bias is not None,
        )
    to.layer(flow, layer, _state(weight=weight, bias=bias))


def _pads(to: Translation, sides: list[int], kernel: list[int], stride: list[int], dilation: list[int]) -> list[int]:
    """Zeros at top, left, bottom and right, from the attribute pads or auto_pad."""
    mode = to.attribute("auto_pad", "NOTSET")
    if mode == "NOTSET":
        return to.numbers("pads", [0, 0, 0, 0])
    if mode == "VALID":
        return [0, 0, 0, 0]
    if mode not in ("SAME_UPPER", "SAME_LOWER") or 0 in stride:
        raise to.refuse(f"auto_pad={mode!r}")
    before, after = [], []
    for side, size, step, spread in zip(sides, kernel, stride, dilation, strict=True):
        total = max((math.ceil(side / step) - 1) * step + (size - 1) * spread + 1 - side, 0)
        small, large = total // 2, total - total // 2
        before.append(small if mode == "SAME_UPPER" else large)
        after.append(large if mode == "SAME_UPPER" else small)
    return [*before, *after]


def _even_padding(
    to: Translation, weight: Tensor, pads: list[int], dilation: list[int]
) -> tuple[Tensor, tuple[int, int]]:
    """The same convolution with equal padding on both sides: the kernel takes the difference as rows of zeros.

    With padding b at the top instead of t < b, the kernel needs b - t rows of zeros before its first one.
    """
    top, left, bottom, right = pads
    if (top != bottom and dilation[0] != 1) or (left != right and dilation[1] != 1):
        raise to.refuse("padding that differs between two sides, in a dilated convolution")
    extra = [max(right - left, 0), max(left - right, 0), max(bottom - top, 0), max(top - bottom, 0)]
    if any(extra):
        if (weight.shape[2] + extra[2] + extra[3]) * (weight.shape[3] + extra[0] + extra[1]) > 2**20:
            raise to.refuse(f"pads={pads}")
        weight = functional.pad(weight, extra)
    return weight, (max(top, bottom), max(left, right))


def _gemm(to: Translation) -> None:
    flow, matrix = to.flow(0), to.needed(1)
    alpha, beta = to.attribute("alpha", 1.0), to.attribute("beta", 1.0)
    if to.attribute("transA", 0) or len(to.shape(flow)) != 2 or matrix.dim() != 2:
        raise to.refuse(
            f"input {list(to.shape(flow))}, matrix {list(matrix.shape)}: expected images as rows, and a matrix"
        )
    weight = alpha * (matrix if to.attribute("transB", 0) else matrix.T)
    bias = None
    if to.given(2):
        bias = beta * to.needed(2)
        if bias.dim() == 2 and bias.shape[0] == 1:
            bias = bias[0]
        if bias.dim() > 1 or bias.numel() not in (1, weight.shape[0]):
            raise to.refuse(f"bias of shape {list(bias.shape)} for {weight.shape[0]} outputs")
        bias = bias.reshape(-1).expand(weight.shape[0])
    _linear(to, flow, weight, bias)


def _matmul(to: Translation) -> None:
    flow, matrix = to.flow(0), to.needed(1)
    if matrix.dim() != 2:
        raise to.refuse(f"second factor of shape {list(matrix.shape)}, expected a matrix")
    _linear(to, flow, matrix.T, None)


def _linear(to: Translation, flow: str, weight: Tensor, bias: Tensor | None) -> None:
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    to.layer(flow, layer, _state(weight=weight.to(to.dtype), bias=None if bias is None else bias.to(to.dtype)))


def _batch_norm(to: Translation) -> None:
    flow = to.flow(0)
    if (
        to.attribute("training_mode", 0)
        or not to.attribute("spatial", 1)
        or len([name for name in to.outputs if name]) > 1
    ):
        raise to.refuse("in training mode, or not by channel")
    weight, bias, mean, variance = (to.needed(position) for position in range(1, 5))
    if len({value.shape for value in (weight, bias, mean, variance)}) != 1 or weight.dim() != 1:
        raise to.refuse("its four tensors differ in shape")
    if bool((variance < 0).any()):
        raise to.refuse("a variance below zero")
    kind = nn.BatchNorm2d if len(to.shape(flow)) == 4 else nn.BatchNorm1d
    with torch.device("meta"):
        layer = kind(len(weight), eps=to.attribute("epsilon", 1e-5))
    state = _state(weight=weight, bias=bias, running_mean=mean, running_var=variance)
    to.layer(flow, layer, state | {"num_batches_tracked": torch.tensor(0)})


def _pool(kind: Callable[..., nn.Module]) -> Rule:
    def rule(to: Translation) -> None:
        flow = to.flow(0)
        sides = list(to.image_sides(flow))
        kernel = to.numbers("kernel_shape", [0, 0])
        stride = to.numbers("strides", [1, 1])
        if to.numbers("dilations", [1, 1]) != [1, 1] or len([name for name in to.outputs if name]) > 1 or 0 in kernel:
            raise to.refuse("dilated pooling, or pooling with indices")
        top, left, bottom, right = _pads(to, sides, kernel, stride, [1, 1])
        if (top, left) != (bottom, right):
            raise to.refuse("padding that differs between two sides")
        settings: dict[str, Any] = {"stride": tuple(stride), "padding": (top, left)}
        settings["ceil_mode"] = bool(to.attribute("ceil_mode", 0))
        if settings["ceil_mode"] and any(
            (side + 2 * pad - size) % step
            for side, pad, size, step in zip(sides, (top, left), kernel, stride, strict=True)
        ):
            raise to.refuse("ceil_mode with windows over the edge, which versions of ONNX define differently")
        if kind is nn.AvgPool2d:
            settings["count_include_pad"] = bool(to.attribute("count_include_pad", 0))
        to.layer(flow, kind(tuple(kernel), **settings))

    return rule


def _global_average(to: Translation) -> None:
    flow = to.flow(0)
    to.image_sides(flow)
    to.layer(flow, nn.AdaptiveAvgPool2d((1, 1)))


def _activation(kind: Callable[[], nn.Module]) -> Rule:
    return lambda to: _ignore(to.layer(to.flow(0), kind()))


def _leaky(to: Translation) -> None:
    to.layer(to.flow(0), nn.LeakyReLU(to.attribute("alpha", 0.01)))


def _arithmetic(operation: str, compute: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    def rule(to: Translation) -> None:
        first, second = to.constant(0), to.constant(1)
        if first is not None and second is not None:
            _fold_pair(to, compute, first, second)
            return
        if operation in ("mul", "div") and first is None and second is None:
            raise to.refuse("both operands depend on the images")
        if operation == "div" and (second is None or not second.is_floating_point() or bool((second == 0).any())):
            raise to.refuse("a divisor that is not a constant without zeros")
        constant = second if first is None else first
        if operation == "add" and constant is not None:
            position = 0 if first is None else 1
            flow, linear = to.flow(position), to.product(position)
            if linear is not None and constant.shape[-1:] == (linear.out_features,) == constant.squeeze().shape:
                linear.bias = nn.Parameter(constant.reshape(-1).to(to.dtype))
                to.alias(flow)
                return
        to.arithmetic(operation, [to.flow(0) if first is None else first, to.flow(1) if second is None else second])

    return rule


def _fold_pair(to: Translation, compute: Callable[[Tensor, Tensor], Tensor], first: Tensor, second: Tensor) -> None:
    try:
        shape = torch.broadcast_shapes(first.shape, second.shape)
    except RuntimeError:
        raise to.refuse(f"shapes {list(first.shape)} and {list(second.shape)} do not fit together") from None
    if math.prod(shape) > MAX_NUMBERS or first.dtype != second.dtype or first.dtype == torch.bool:
        raise to.refuse(f"constants of shapes {list(first.shape)} and {list(second.shape)}")
    result = compute(first, second)
    if compute is torch.div and not first.is_floating_point():
        raise to.refuse("division of integers")
    if not bool(result.isfinite().all()):
        raise to.refuse("its constant result is not finite")
    to.fold(result)


def _pad(to: Translation) -> None:
    flow = to.flow(0)
    to.image_sides(flow)
    pads = to.axes(1, "pads") or []
    value = float(to.needed(2).sum()) if to.given(2) else to.attribute("value", 0.0)
    if to.attribute("mode", "constant") != "constant" or value != 0 or to.given(3):
        raise to.refuse("only zeros around whole images have a rule")
    if len(pads) != 8 or any(pads[n] for n in (0, 1, 4, 5)) or not all(0 <= pad < 2**20 for pad in pads):
        raise to.refuse(f"pads={pads}, expected zeros around height and width")
    if any(pads):
        to.pad_later(flow, [pads[2], pads[3], pads[6], pads[7]])
    else:
        to.alias(flow)


def _identity(to: Translation) -> None:
    folded = to.constant(0)
    if folded is not None:
        to.fold(folded)
    else:
        to.alias(to.flow(0))


def _dropout(to: Translation) -> None:
    if to.given(2) and bool(to.needed(2).any()):
        raise to.refuse("in training mode it is random")
    if any(to.outputs[1:]):
        raise to.refuse("its mask is used")
    _identity(to)


def _cast(to: Translation) -> None:
    kinds = {1: torch.float32, 6: torch.int32, 7: torch.int64, 11: torch.float64}
    kind, folded = kinds.get(to.attribute("to", 0)), to.constant(0)
    if kind is None or (folded is None and kind != to.dtype):
        raise to.refuse(f"to type {to.attribute('to', 0)}")
    if folded is None:
        to.alias(to.flow(0))
    else:
        to.fold(folded.to(to.dtype if kind.is_floating_point else kind))


def _constant(to: Translation) -> None:
    value = to.attribute("value")
    for name, kind in (
        ("value_float", to.dtype),
        ("value_floats", to.dtype),
        ("value_int", None),
        ("value_ints", None),
    ):
        given = to.attribute(name)
        if given is not None:
            value = torch.tensor(given, dtype=kind or torch.int64)
    if not isinstance(value, Tensor):
        raise to.refuse("no number in it")
    to.fold(value.to(to.dtype) if value.is_floating_point() else value)


def _negate(to: Translation) -> None:
    to.arithmetic("mul", [to.flow(0), torch.tensor(-1.0)])


def _state(**tensors: Tensor | None) -> dict[str, Tensor]:
    return {name: value.contiguous() for name, value in tensors.items() if value is not None}


def _ignore(_value: object) -> None:
    return None


RULES: dict[str, Rule] = {
    **SHAPE_RULES,
    "Add": _arithmetic("add", torch.add),
    "AveragePool": _pool(nn.AvgPool2d),
    "BatchNormalization": _batch_norm,
    "Cast": _cast,
    "Constant": _constant,
    "Conv": _convolution,
    "Div": _arithmetic("div", torch.div),
    "Dropout": _dropout,
    "Gemm": _gemm,
    "GlobalAveragePool": _global_average,
    "Identity": _identity,
    "LeakyRelu": _leaky,
    "MatMul": _matmul,
    "MaxPool": _pool(nn.MaxPool2d),
    "Mul": _arithmetic("mul", torch.mul),
    "Neg": _negate,
    "Pad": _pad,
    "Relu": _activation(nn.ReLU),
    "Sigmoid": _activation(nn.Sigmoid),
    "Sub": _arithmetic("sub", torch.sub),
    "Tanh": _activation(nn.Tanh),
}
