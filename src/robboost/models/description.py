"""Networks as JSON and back: what a checkpoint stores instead of code.

A network is described by the types and settings of its layers. Only the types below are ever built, and on the "meta"
device: nothing is allocated before the sizes have been compared with the tensors of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from robboost.errors import CheckpointError, UnsupportedOperationError
from robboost.models.architectures import Residual
from robboost.models.layers import Normalize, PixelMask
from robboost.models.wiring import Step, WiredNetwork

__all__ = ["describe", "network_from"]

_MAX_LAYERS = 10_000
_MAX_DEPTH = 20
_MAX_SIZE = 2**31 - 1

# Type -> settings that its constructor takes and its attributes hold.
_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Conv2d: ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "bias"),
    nn.Linear: ("in_features", "out_features", "bias"),
    nn.BatchNorm1d: ("num_features", "eps", "affine"),
    nn.BatchNorm2d: ("num_features", "eps", "affine"),
    nn.AvgPool2d: ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    nn.MaxPool2d: ("kernel_size", "stride", "padding", "ceil_mode"),
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.ReLU: (),
    nn.LeakyReLU: ("negative_slope",),
    nn.Sigmoid: (),
    nn.Tanh: (),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Identity: (),
    nn.Dropout: ("p",),
    nn.Dropout2d: ("p",),
}
_BY_NAME = {layer.__name__: layer for layer in _LAYERS}


def describe(model: nn.Module) -> dict[str, Any]:
    """The layers of a network as plain JSON values; UnsupportedOperationError for a type that has no description."""
    kind = type(model)
    if kind in _LAYERS:
        if getattr(model, "padding_mode", "zeros") != "zeros":
            raise UnsupportedOperationError(f"{model}: only zero padding can be saved, expected padding_mode='zeros'")
        return {"type": kind.__name__} | {name: _setting(model, name) for name in _LAYERS[kind]}
    if kind is nn.Sequential:
        return {"type": "Sequential", "layers": {name: describe(layer) for name, layer in model.named_children()}}
    if isinstance(model, Residual):
        return {"type": "Residual", "body": describe(model.body), "skip": describe(model.skip)}
    if isinstance(model, Normalize):
        return {"type": "Normalize", "channels": len(model.mean), "axes": model.mean.dim() - 1}
    if isinstance(model, PixelMask):
        return {"type": "PixelMask", "shape": list(model.mask.shape)}
    if isinstance(model, WiredNetwork):
        return {
            "type": "WiredNetwork",
            "steps": [[step.operation, [*step.inputs], step.output, [*step.setting]] for step in model.steps],
            "layers": {name: describe(layer) for name, layer in model.layers.items()},
            "constants": {name: list(value.shape) for name, value in model.constants.named_buffers()},
        }
    raise UnsupportedOperationError(
        f"a layer of type {kind.__name__} has no description, expected a Sequential of standard layers"
    )


def network_from(description: Any) -> nn.Module:
    """The network of a description, on the meta device and in eval mode; CheckpointError for anything else."""
    count = [0]
    try:
        with torch.device("meta"):
            return _build(description, 0, count).eval()
    except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, OverflowError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"layers of the network cannot be read ({lines[0]}), expected what save_model writes"
        ) from None


def _setting(model: nn.Module, name: str) -> Any:
    value = getattr(model, name)
    if name == "bias":
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def _build(description: Any, depth: int, count: list[int]) -> nn.Module:
    count[0] += 1
    if not isinstance(description, Mapping) or depth > _MAX_DEPTH or count[0] > _MAX_LAYERS:
        raise CheckpointError(
            f"layers of the network: expected nested tables, at most {_MAX_DEPTH} deep and {_MAX_LAYERS} in number"
        )
    kind = description.get("type")
    if isinstance(kind, str) and kind in _BY_NAME:
        layer = _BY_NAME[kind]
        settings = {name: _checked(name, description[name]) for name in _LAYERS[layer]}
        return layer(**settings)
    if isinstance(kind, str) and kind in _CONTAINERS:
        return _CONTAINERS[kind](description, depth + 1, count)
    raise CheckpointError(f"layer type {kind!r} is unknown, expected one of {', '.join([*_BY_NAME, *_CONTAINERS])}")


def _checked(name: str, value: Any) -> Any:
    parts = value if isinstance(value, list) else [value]
    for part in parts:
        if part is not None and not isinstance(part, (bool, int, float)) and (name, part) not in _WORDS:
            raise CheckpointError(f"layer setting {name}={value!r}: expected numbers")
        if isinstance(part, (int, float)) and not -2 <= part <= _MAX_SIZE:
            raise CheckpointError(f"layer setting {name}={value!r}: out of range, expected at most {_MAX_SIZE}")
    if not 1 <= len(parts) <= 4:
        raise CheckpointError(f"layer setting {name} holds {len(parts)} values, expected one to four")
    return tuple(value) if isinstance(value, list) else value


_WORDS = {("padding", "same"), ("padding", "valid")}


def _sequential(description: Mapping[str, Any], depth: int, count: list[int]) -> nn.Module:
    network = nn.Sequential()
    for name, layer in description["layers"].items():
        network.add_module(name, _build(layer, depth, count))
    return network


def _residual(description: Mapping[str, Any], depth: int, count: list[int]) -> nn.Module:
    body, skip = (_build(description[name], depth, count) for name in ("body", "skip"))
    if not isinstance(body, nn.Sequential) or not isinstance(skip, nn.Conv2d):
        raise CheckpointError("a Residual layer needs a Sequential body and a Conv2d skip")
    return Residual(body, skip)


def _normalize(description: Mapping[str, Any], _depth: int, _count: list[int]) -> nn.Module:
    channels, axes = (int(_checked(name, description[name])) for name in ("channels", "axes"))
    if not (1 <= channels <= 10_000 and 0 <= axes <= 4):
        raise CheckpointError(f"a Normalize layer of {channels} channels and {axes} axes, expected images")
    with torch.device("cpu"):  # its constructor looks at the values; the file's replace them
        return Normalize([0.0] * channels, [1.0] * channels, axes=axes).to("meta")


def _pixel_mask(description: Mapping[str, Any], _depth: int, _count: list[int]) -> nn.Module:
    shape = _checked("shape", description["shape"])
    with torch.device("cpu"):
        layer = PixelMask(torch.ones(()))
    layer.mask = torch.empty(shape, device="meta")
    return layer


def _wired(description: Mapping[str, Any], depth: int, count: list[int]) -> nn.Module:
    layers = {name: _build(layer, depth, count) for name, layer in description["layers"].items()}
    constants = {
        name: torch.empty(_checked("shape", shape) if shape else (), device="meta")
        for name, shape in description["constants"].items()
    }
    if len(description["steps"]) > _MAX_LAYERS or len(constants) > _MAX_LAYERS:
        raise CheckpointError(f"a WiredNetwork of {len(description['steps'])} steps, expected at most {_MAX_LAYERS}")
    steps = []
    for operation, inputs, output, setting in description["steps"]:
        names = (operation, output, *inputs)
        if not all(isinstance(name, str) for name in names):
            raise CheckpointError(f"step {names} of a WiredNetwork, expected texts")
        steps.append(Step(operation, tuple(inputs), output, _checked("setting", setting) if setting else ()))
    return WiredNetwork(steps, layers, constants)


_CONTAINERS: dict[str, Callable[[Mapping[str, Any], int, list[int]], nn.Module]] = {
    "Sequential": _sequential,
    "Residual": _residual,
    "Normalize": _normalize,
    "PixelMask": _pixel_mask,
    "WiredNetwork": _wired,
}
