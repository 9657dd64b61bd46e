"""ONNX out: a network or a whole ensemble, written from the very operations that its bounds are computed from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from robboost.errors import InputError, SoundnessError, UnsupportedOperationError
from robboost.models.files import write_atomically
from robboost.models.graph import Operation, Slot, trace

__all__ = ["OPSET", "ExportedNetwork", "export_onnx"]

OPSET = 13  # read by alpha-beta-CROWN, Marabou and every current runtime
_TOLERANCE = 1e-5
_SAMPLES = 16


@dataclass(frozen=True)
class ExportedNetwork:
    """A written file; `largest_difference` is that of logits from onnxruntime, relative to max(1, |logit|)."""

    path: Path
    nodes: int
    largest_difference: float


def export_onnx(
    model: nn.Module,
    path: str | Path,
    *,
    input_shape: Sequence[int],
    batch_size: int | None = None,
) -> ExportedNetwork:
    """Writes a network or an `Ensemble` (one network, its members side by side) as ONNX: input "x", logits "y".

    The file is run with onnxruntime on random images of [0, 1] before this function returns; a logit that differs from
    the module's by more than 1e-5 of max(1, |logit|) raises SoundnessError, and the file is not left behind. A
    certificate is for the module's function in real arithmetic: another runtime rounds in another order.

    Args:
        model: in eval mode; any network whose operations have bounds. float64 parameters are rounded to float32, the
            only precision that runtimes have for all operations.
        path: of the file.
        input_shape: shape of an image.
        batch_size: None leaves the batch axis open; some verifiers want 1.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError:
        raise InputError(f"path={str(path)!r}: ONNX needs two packages: pip install 'robboost[onnx]'") from None
    shape = tuple(int(side) for side in input_shape)
    dtype = next((value.dtype for value in model.parameters()), torch.float32)
    if dtype not in (torch.float32, torch.float64):
        raise InputError(f"model has {dtype} parameters, expected float32 or float64: convert it first")
    if batch_size is not None and batch_size < 1:
        raise InputError(f"batch_size={batch_size}, expected at least 1, or None for an open batch axis")
    graph = trace(model, shape)
    writer = _Writer(graph.constants(model, torch.float64))
    for position, operation in enumerate(graph.operations):
        _WRITERS[operation.kind](writer, operation, position)
    writer.node("Identity", [f"v{len(graph.operations) - 1}"], "y")
    written = _model(onnx, writer, shape, (batch_size or "N", graph.classes))
    onnx.checker.check_model(written, full_check=True)
    content = written.SerializeToString()
    difference = _difference(onnxruntime, content, model, (batch_size, *shape))
    if not difference <= _TOLERANCE:
        raise SoundnessError(
            f"{path}: logits from onnxruntime differ by {difference:.3g}, expected at most {_TOLERANCE}:"
            " please report this"
        )
    file = Path(path)
    write_atomically(file, content)
    return ExportedNetwork(file, len(written.graph.node), difference)


class _Writer:
    """Nodes and initializers so far; the value of the operation at position p is called "vp"."""

    def __init__(self, constants: Sequence[Any]) -> None:
        from onnx import helper, numpy_helper

        self._helper, self._numpy = helper, numpy_helper
        self._values = constants
        self.nodes: list[Any] = []
        self.initializers: list[Any] = []

    def value(self, constant: Any) -> Any:
        return self._values[constant.index] if isinstance(constant, Slot) else constant

    def constant(self, value: Any, *, integers: bool = False) -> str:
        """Stores a tensor, a number, or a list of integers; returns its name."""
        name = f"c{len(self.initializers)}"
        if integers:
            array = np.asarray(value, dtype=np.int64)
        else:
            array = torch.as_tensor(value).detach().to("cpu", torch.float32).contiguous().numpy()
        self.initializers.append(self._numpy.from_array(array, name))
        return name

    def node(self, kind: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(self._helper.make_node(kind, inputs, [output], name=f"{kind}_{output}", **attributes))
        return output


def _model(onnx: Any, writer: _Writer, shape: tuple[int, ...], output: tuple[int | str, int]) -> Any:
    helper = onnx.helper
    kind = onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        writer.nodes,
        "robboost",
        [helper.make_tensor_value_info("x", kind, [output[0], *shape])],
        [helper.make_tensor_value_info("y", kind, list(output))],
        writer.initializers,
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], producer_name="robboost")
    made.ir_version = 7
    return made


def _difference(onnxruntime: Any, content: bytes, model: nn.Module, shape: tuple[int | None, ...]) -> float:
    """Largest difference between the logits of file and module, relative to max(1, |logit|); NaN where one is NaN."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    like = next((value for value in model.parameters()), torch.zeros(()))
    generator = torch.Generator().manual_seed(0)
    batch = shape[0] or _SAMPLES
    largest = 0.0
    for _ in range(math.ceil(_SAMPLES / batch)):
        x = torch.rand((batch, *[int(side or 1) for side in shape[1:]]), generator=generator)
        with torch.no_grad():
            expected = model(x.to(like)).cpu().double()
        given = torch.from_numpy(session.run(None, {"x": x.float().numpy()})[0]).double()
        largest = max(largest, float(((given - expected).abs() / expected.abs().clamp(min=1)).max()))
        if math.isnan(float((given - expected).sum())):
            return math.nan
    return largest


def _source(operation: Operation) -> str:
    return f"v{operation.inputs[0]}"


def _input(writer: _Writer, _operation: Operation, position: int) -> None:
    writer.node("Identity", ["x"], f"v{position}")


def _linear(writer: _Writer, operation: Operation, position: int) -> None:
    weight, bias = (writer.value(operation.constants[role]) for role in ("weight", "bias"))
    output = f"v{position}"
    if len(operation.shape) == 1:
        inputs = [_source(operation), writer.constant(weight)]
        writer.node("Gemm", inputs + ([] if bias is None else [writer.constant(bias)]), output, transB=1)
        return
    first = output if bias is None else output + "_"
    product = writer.node("MatMul", [_source(operation), writer.constant(weight.T)], first)
    if bias is not None:
        writer.node("Add", [product, writer.constant(bias)], output)


def _conv(writer: _Writer, operation: Operation, position: int) -> None:
    weight, bias = (writer.value(operation.constants[role]) for role in ("weight", "bias"))
    settings = operation.attributes
    inputs = [_source(operation), writer.constant(weight)] + ([] if bias is None else [writer.constant(bias)])
    writer.node(
        "Conv",
        inputs,
        f"v{position}",
        kernel_shape=list(weight.shape[2:]),
        strides=list(settings["stride"]),
        pads=[*settings["padding"], *settings["padding"]],
        dilations=list(settings["dilation"]),
        group=settings["groups"],
    )


def _scale(writer: _Writer, operation: Operation, position: int) -> None:
    """x * scale + shift, each of which may be missing."""
    scale, shift = (writer.value(operation.constants[role]) for role in ("scale", "shift"))
    value, output = _source(operation), f"v{position}"
    if scale is not None:
        value = writer.node("Mul", [value, writer.constant(scale)], output + ("" if shift is None else "_"))
    if shift is not None:
        value = writer.node("Add", [value, writer.constant(shift)], output)
    if value != output:
        writer.node("Identity", [value], output)


def _reshape(writer: _Writer, operation: Operation, position: int) -> None:
    if len(operation.shape) == 1:
        writer.node("Flatten", [_source(operation)], f"v{position}", axis=1)
    else:
        shape = writer.constant([-1, *operation.shape], integers=True)
        writer.node("Reshape", [_source(operation), shape], f"v{position}")


def _permute(writer: _Writer, operation: Operation, position: int) -> None:
    axes = [0, *(axis + 1 for axis in operation.attributes["order"])]
    writer.node("Transpose", [_source(operation)], f"v{position}", perm=axes)


def _pool(kind: str) -> Callable[[_Writer, Operation, int], None]:
    def write(writer: _Writer, operation: Operation, position: int) -> None:
        settings, output = operation.attributes, f"v{position}"
        if settings["ceil"]:
            raise UnsupportedOperationError(
                f"{operation.kind} at {operation.place}: ceil_mode is not exported,"
                " for versions of ONNX define it differently"
            )
        window = {
            "kernel_shape": list(settings["kernel"]),
            "strides": list(settings["stride"]),
            "pads": [*settings["padding"], *settings["padding"]],
        }
        if kind == "MaxPool":
            writer.node(kind, [_source(operation)], output, **window)
            return
        divisor, size = settings["divisor"], math.prod(settings["kernel"])
        include = int(settings["include_pad"] or divisor is not None)
        if divisor is None or divisor == size:
            writer.node(kind, [_source(operation)], output, count_include_pad=include, **window)
            return
        mean = writer.node(kind, [_source(operation)], output + "_", count_include_pad=include, **window)
        writer.node("Mul", [mean, writer.constant(size / divisor)], output)

    return write


def _relu(writer: _Writer, operation: Operation, position: int) -> None:
    negative = operation.attributes["negative"]
    if negative == 0:
        writer.node("Relu", [_source(operation)], f"v{position}")
    else:
        writer.node("LeakyRelu", [_source(operation)], f"v{position}", alpha=float(negative))


def _plain(kind: str) -> Callable[[_Writer, Operation, int], None]:
    def write(writer: _Writer, operation: Operation, position: int) -> None:
        writer.node(kind, [f"v{source}" for source in operation.inputs], f"v{position}")

    return write


_WRITERS: dict[str, Callable[[_Writer, Operation, int], None]] = {
    "input": _input,
    "linear": _linear,
    "conv": _conv,
    "scale": _scale,
    "add": _plain("Add"),
    "reshape": _reshape,
    "permute": _permute,
    "avgpool": _pool("AveragePool"),
    "maxpool": _pool("MaxPool"),
    "relu": _relu,
    "sigmoid": _plain("Sigmoid"),
    "tanh": _plain("Tanh"),
}
