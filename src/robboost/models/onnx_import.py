"""ONNX files to ordinary modules: reading, checking, and wiring what the rules of `onnx_rules` translate."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import CheckpointError, InputError, RobBoostError, UnsupportedOperationError
from robboost.models.files import MAX_AXES, MAX_TENSORS, existing_file
from robboost.models.onnx_rules import RULES
from robboost.models.onnx_translation import Translation
from robboost.models.wiring import ARITHMETIC, SHAPING, WiredNetwork

__all__ = ["MAX_OPSET", "MIN_OPSET", "load_onnx"]

# Operators below opset 7 broadcast in another way; each rule was read against the specification up to this version.
MIN_OPSET, MAX_OPSET = 7, 24
_MAX_NODES = 10_000


def load_onnx(path: str | Path, *, input_shape: Sequence[int] | None = None) -> tuple[nn.Module, tuple[int, ...], int]:
    """The network of an ONNX file, the shape of its images without the batch axis, and the number of classes.

    What is taken over is the file's function of ONE image (batch size 1); for a batch the module computes it for each.
    A chain of layers becomes a Sequential, anything else a `WiredNetwork`. `input_shape` fills sides that the file
    leaves open. Raises UnsupportedOperationError for an operation without rule, naming it and its node, and
    CheckpointError for anything else that is wrong with the file; no other file is ever read (no external data).
    """
    file = existing_file(path)
    model = _parse(file)
    _check_header(model, file)
    try:
        translation, shape = _translate(model, input_shape)
        return _network(translation), shape, translation.classes
    except RobBoostError as error:
        if isinstance(error, InputError):
            raise CheckpointError(f"{file}: {error}") from None
        message = str(error)
        raise type(error)(message if message.startswith(str(file)) else f"{file}: {message}") from None


def _parse(file: Path) -> Any:
    try:
        import onnx
    except ImportError:
        raise CheckpointError(f"{file}: reading ONNX needs the package onnx: pip install 'robboost[onnx]'") from None
    try:
        model = onnx.ModelProto.FromString(file.read_bytes())
    except Exception as error:  # protobuf's errors, whose type onnx does not export
        raise CheckpointError(f"{file}: damaged, no ONNX model ({error}), expected an intact file") from None
    return model


def _check_header(model: Any, file: Path) -> None:
    domains = {entry.domain: entry.version for entry in model.opset_import}
    version = domains.get("", domains.get("ai.onnx", 0))
    if not MIN_OPSET <= version <= MAX_OPSET:
        raise CheckpointError(f"{file}: opset {version}, expected {MIN_OPSET} to {MAX_OPSET}")
    graph = model.graph
    if len(graph.node) > _MAX_NODES or len(graph.initializer) > MAX_TENSORS:
        raise CheckpointError(f"{file}: {len(graph.node)} nodes, expected at most {_MAX_NODES}")
    if len(graph.sparse_initializer) or len(graph.quantization_annotation):
        raise CheckpointError(f"{file}: sparse or quantised tensors, expected plain ones")


def _translate(model: Any, input_shape: Sequence[int] | None) -> tuple[Translation, tuple[int, ...]]:
    graph = model.graph
    constants = {tensor.name: read_tensor(tensor) for tensor in graph.initializer}
    entries = [value for value in graph.input if value.name not in constants]
    if len(entries) != 1 or len(graph.output) != 1:
        raise UnsupportedOperationError(
            f"{len(entries)} inputs and {len(graph.output)} outputs, expected images in and logits out"
        )
    shape, dtype = _input_of(entries[0], input_shape)
    uses = Counter(name for node in graph.node for name in node.input) + Counter([graph.output[0].name])
    translation = Translation(dtype, uses)
    for name, value in constants.items():
        translation.add_constant(name, value)
    translation.add_input(entries[0].name, shape)
    for node in graph.node:
        if node.domain not in ("", "ai.onnx") or node.op_type not in RULES:
            domain = f"{node.domain}." if node.domain else ""
            known = ", ".join(sorted(RULES))
            raise UnsupportedOperationError(
                f"{domain}{node.op_type} at node {node.name or list(node.output)!r} has no rule; known: {known}"
            )
        translation.enter(node, {entry.name: _attribute(entry) for entry in node.attribute})
        RULES[node.op_type](translation)
    translation.finish(graph.output[0].name)
    return translation, shape


def _input_of(entry: Any, input_shape: Sequence[int] | None) -> tuple[tuple[int, ...], torch.dtype]:
    import onnx

    kind = entry.type.tensor_type
    dtypes = {
        onnx.TensorProto.FLOAT: torch.float32,
        onnx.TensorProto.FLOAT16: torch.float32,
        onnx.TensorProto.DOUBLE: torch.float64,
    }
    if kind.elem_type not in dtypes:
        raise CheckpointError(f"input {entry.name!r} is of type {kind.elem_type}, expected floating-point images")
    sides = [dimension.dim_value if dimension.HasField("dim_value") else 0 for dimension in kind.shape.dim]
    if len(sides) < 2 or len(sides) > MAX_AXES or sides[0] not in (0, 1):
        raise CheckpointError(f"input {entry.name!r} has shape {sides}, expected a batch axis (1 or open) and images")
    shape = sides[1:] if input_shape is None else list(input_shape)
    if len(shape) != len(sides) - 1 or any(own not in (0, given) for own, given in zip(sides[1:], shape, strict=True)):
        raise CheckpointError(f"input {entry.name!r} has shape {sides}, which does not fit input_shape={tuple(shape)}")
    if any(type(side) is not int or not 1 <= side <= 2**20 for side in shape):
        raise CheckpointError(
            f"input {entry.name!r} leaves sides open ({sides}), expected input_shape=(...) to be given"
        )
    return tuple(shape), dtypes[kind.elem_type]


def read_tensor(proto: Any) -> Tensor:
    """A tensor of the file after comparing the size it claims with the bytes it has."""
    import onnx
    from onnx import TensorProto, numpy_helper

    name, shape = proto.name, list(proto.dims)
    fields = {
        TensorProto.FLOAT: ("float_data", 4),
        TensorProto.DOUBLE: ("double_data", 8),
        TensorProto.FLOAT16: ("int32_data", 2),
        TensorProto.INT64: ("int64_data", 8),
        TensorProto.INT32: ("int32_data", 4),
        TensorProto.BOOL: ("int32_data", 1),
    }
    if proto.data_type not in fields:
        raise CheckpointError(f"tensor {name!r} is of type {proto.data_type}, expected floats or integers")
    if proto.data_location == onnx.TensorProto.EXTERNAL or len(proto.external_data):
        raise CheckpointError(
            f"tensor {name!r} lies in another file, expected all tensors inside (external data refused)"
        )
    attribute, size = fields[proto.data_type]
    count = math.prod(shape)
    held = len(proto.raw_data) / size if proto.HasField("raw_data") else len(getattr(proto, attribute))
    if len(shape) > MAX_AXES or any(side < 0 for side in shape) or held != count:
        raise CheckpointError(f"tensor {name!r} of shape {shape} holds {held:g} numbers, expected {count}")
    try:
        value = torch.from_numpy(numpy_helper.to_array(proto).copy())
    except (ValueError, TypeError, OverflowError) as error:
        raise CheckpointError(f"tensor {name!r} cannot be read ({error}), expected an intact one") from None
    if not bool(value.isfinite().all()):
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity, expected finite numbers")
    return value


def _attribute(entry: Any) -> Any:
    """A node's attribute as a Python value; types that no rule reads become None."""
    from onnx import AttributeProto

    if entry.type == AttributeProto.TENSOR:
        return read_tensor(entry.t)
    readers = {
        AttributeProto.FLOAT: lambda: float(entry.f),
        AttributeProto.INT: lambda: int(entry.i),
        AttributeProto.STRING: lambda: entry.s.decode(errors="replace"),
        AttributeProto.FLOATS: lambda: [float(value) for value in entry.floats],
        AttributeProto.INTS: lambda: [int(value) for value in entry.ints],
    }
    return readers[entry.type]() if entry.type in readers else None


def _network(translation: Translation) -> nn.Module:
    """A Sequential where every step is a layer of the one before, else a WiredNetwork; in eval mode."""
    steps = translation.steps
    before = ["input", *(step.output for step in steps)]
    chain = all(
        step.operation not in {*ARITHMETIC, *SHAPING} and step.inputs == (name,)
        for step, name in zip(steps, before, strict=False)
    )
    if chain:
        return nn.Sequential(*(translation.layers[step.operation] for step in steps)).eval()
    used = {name for step in steps for name in step.inputs}
    constants = {name: value for name, value in translation.stored.items() if name in used}
    return WiredNetwork(steps, translation.layers, constants).eval()
