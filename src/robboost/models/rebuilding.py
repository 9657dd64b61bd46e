"""Any network that has bounds as standard layers: the operations of its trace, wired again with its parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import UnsupportedOperationError
from robboost.models.graph import Operation, Slot, trace
from robboost.models.wiring import Step, WiredNetwork

__all__ = ["rebuilt"]


def rebuilt(model: nn.Module, input_shape: Sequence[int]) -> WiredNetwork:
    """A network of standard layers that computes what `model` computes (in real arithmetic: rounding may differ).

    Its parameters are copies, in the model's precision. Raises UnsupportedOperationError for an operation without a
    bound rule, naming it.
    """
    graph = trace(model, tuple(input_shape))
    dtype = next((value.dtype for value in model.parameters() if value.is_floating_point()), torch.float32)
    with torch.no_grad():
        wiring = _Wiring([_copied(value) for value in graph.constants(model, dtype)], dtype)
        for position, operation in enumerate(graph.operations):
            _BUILDERS[operation.kind](wiring, operation, position)
    return WiredNetwork(wiring.steps, wiring.layers, wiring.constants).eval()


class _Wiring:
    """Steps, layers and constants so far; the value of the operation at position p is called "vp"."""

    def __init__(self, values: Sequence[Any], dtype: torch.dtype) -> None:
        self._values, self._dtype = values, dtype
        self.steps: list[Step] = []
        self.layers: dict[str, nn.Module] = {}
        self.constants: dict[str, Tensor] = {}

    def value(self, constant: Any) -> Any:
        return self._values[constant.index] if isinstance(constant, Slot) else constant

    def layer(self, source: str, module: nn.Module, output: str) -> str:
        name = f"{type(module).__name__.lower()}{len(self.layers)}"
        self.layers[name] = module
        self.steps.append(Step(name, (source,), output))
        return output

    def arithmetic(self, operation: str, source: str, value: Any, output: str) -> str:
        name = f"constant{len(self.constants)}"
        self.constants[name] = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=self._dtype)
        self.steps.append(Step(operation, (source, name), output))
        return output


def _copied(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _source(operation: Operation) -> str:
    return f"v{operation.inputs[0]}"


def _with_tensors(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    state = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    layer.load_state_dict(state, assign=True)
    return layer


def _input(wiring: _Wiring, _operation: Operation, position: int) -> None:
    wiring.layer("input", nn.Identity(), f"v{position}")


def _linear(wiring: _Wiring, operation: Operation, position: int) -> None:
    weight, bias = (wiring.value(operation.constants[role]) for role in ("weight", "bias"))
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    wiring.layer(_source(operation), _with_tensors(layer, weight.contiguous(), bias), f"v{position}")


def _conv(wiring: _Wiring, operation: Operation, position: int) -> None:
    weight, bias = (wiring.value(operation.constants[role]) for role in ("weight", "bias"))
    settings = operation.attributes
    layer = nn.Conv2d(
        weight.shape[1] * settings["groups"],
        weight.shape[0],
        tuple(weight.shape[2:]),
        stride=settings["stride"],
        padding=settings["padding"],
        dilation=settings["dilation"],
        groups=settings["groups"],
        bias=bias is not None,
        device="meta",
    )
    wiring.layer(_source(operation), _with_tensors(layer, weight.contiguous(), bias), f"v{position}")


def _scale(wiring: _Wiring, operation: Operation, position: int) -> None:
    """x * scale + shift, each of which may be missing."""
    scale, shift = (wiring.value(operation.constants[role]) for role in ("scale", "shift"))
    value, output = _source(operation), f"v{position}"
    if scale is not None:
        value = wiring.arithmetic("mul", value, scale, output if shift is None else output + "s")
    if shift is not None:
        value = wiring.arithmetic("add", value, shift, output)
    if value != output:
        wiring.layer(value, nn.Identity(), output)


def _add(wiring: _Wiring, operation: Operation, position: int) -> None:
    first, second = operation.inputs
    wiring.steps.append(Step("add", (f"v{first}", f"v{second}"), f"v{position}"))


def _reshape(wiring: _Wiring, operation: Operation, position: int) -> None:
    wiring.steps.append(Step("reshape", (_source(operation),), f"v{position}", operation.shape))


def _permute(wiring: _Wiring, operation: Operation, position: int) -> None:
    axes = (0, *(axis + 1 for axis in operation.attributes["order"]))
    wiring.steps.append(Step("permute", (_source(operation),), f"v{position}", axes))


def _avg_pool(wiring: _Wiring, operation: Operation, position: int) -> None:
    settings, output = operation.attributes, f"v{position}"
    divisor, size = settings["divisor"], math.prod(settings["kernel"])
    if divisor is not None and settings["ceil"]:
        raise UnsupportedOperationError(
            f"avgpool at {operation.place}: a divisor of its own together with ceil_mode cannot be saved"
        )
    layer = nn.AvgPool2d(
        settings["kernel"],
        settings["stride"],
        settings["padding"],
        ceil_mode=settings["ceil"],
        count_include_pad=settings["include_pad"] if divisor is None else True,
    )
    if divisor is None:
        wiring.layer(_source(operation), layer, output)
        return
    wiring.arithmetic("mul", wiring.layer(_source(operation), layer, output + "m"), size / divisor, output)


def _max_pool(wiring: _Wiring, operation: Operation, position: int) -> None:
    settings = operation.attributes
    layer = nn.MaxPool2d(settings["kernel"], settings["stride"], settings["padding"], ceil_mode=settings["ceil"])
    wiring.layer(_source(operation), layer, f"v{position}")


def _relu(wiring: _Wiring, operation: Operation, position: int) -> None:
    negative = operation.attributes["negative"]
    layer = nn.ReLU() if negative == 0 else nn.LeakyReLU(negative)
    wiring.layer(_source(operation), layer, f"v{position}")


def _plain(layer: Callable[[], nn.Module]) -> Callable[[_Wiring, Operation, int], None]:
    def build(wiring: _Wiring, operation: Operation, position: int) -> None:
        wiring.layer(_source(operation), layer(), f"v{position}")

    return build


_BUILDERS: dict[str, Callable[[_Wiring, Operation, int], None]] = {
    "input": _input,
    "linear": _linear,
    "conv": _conv,
    "scale": _scale,
    "add": _add,
    "reshape": _reshape,
    "permute": _permute,
    "avgpool": _avg_pool,
    "maxpool": _max_pool,
    "relu": _relu,
    "sigmoid": _plain(nn.Sigmoid),
    "tanh": _plain(nn.Tanh),
}
