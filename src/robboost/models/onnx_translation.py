"""The state of reading an ONNX graph: which of its values are constants, and which are steps of the network so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import CheckpointError, UnsupportedOperationError
from robboost.models.wiring import Step

__all__ = ["MAX_NUMBERS", "Translation"]

MAX_NUMBERS = 2**28  # in one value for one image, and in one folded constant


class Translation:
    """Values of the file by name: constants (tensors), or steps of the network with their shape for one image.

    A value's shape keeps the batch axis of one in front. `finish` drops steps that the output does not need.
    """

    def __init__(self, dtype: torch.dtype, uses: Mapping[str, int]) -> None:
        self.dtype = dtype
        self.classes = 0
        self._uses = uses  # by name in the file: how many inputs of nodes, and outputs of the file, it is
        self._products: dict[str, nn.Linear] = {}  # by name in the file: made by a layer without bias
        self.steps: list[Step] = []
        self.layers: dict[str, nn.Module] = {}
        self.stored: dict[str, Tensor] = {}
        self._constants: dict[str, Tensor] = {}
        self._flows: dict[str, str] = {}  # name in the file -> name of the step's output
        self._shapes: dict[str, tuple[int, ...]] = {}  # by name of the step's output
        self._pads: dict[str, list[int]] = {}  # by name in the file: top, left, bottom, right, not applied yet
        self._node: Any
        self._attributes: dict[str, Any] = {}

    # --- what the driver calls ---

    def add_constant(self, name: str, value: Tensor) -> None:
        self._constants[name] = self._typed(value)

    def add_input(self, name: str, shape: Sequence[int]) -> None:
        self._flows[name] = "input"
        self._shapes["input"] = (1, *shape)

    def enter(self, node: Any, attributes: dict[str, Any]) -> None:
        self._node, self._attributes = node, attributes
        for name in node.output:
            if name in self._flows or name in self._constants:
                raise CheckpointError(f"value {name!r} is defined twice, expected each name once")
        if not node.output or node.output[0] == "":
            raise self.refuse("it has no output")

    def finish(self, output: str) -> None:
        if output not in self._flows:
            raise UnsupportedOperationError(f"output {output!r} does not depend on the images")
        last = self._flows[output]
        if output in self._pads:
            raise UnsupportedOperationError(f"output {output!r} is a padded value, expected logits")
        if len(self._shapes[last]) != 2 or self._shapes[last][1] < 2:
            raise CheckpointError(f"output {output!r} has shape {list(self._shapes[last])}, expected [1, classes]")
        self.classes = self._shapes[last][1]
        needed = {last}
        kept = []
        for step in reversed(self.steps):
            if step.output in needed:
                kept.append(step)
                needed.update(step.inputs)
        self.steps = kept[::-1]
        self.layers = {
            step.operation: self.layers[step.operation] for step in self.steps if step.operation in self.layers
        }

    # --- what the rules call ---

    def refuse(self, why: str) -> UnsupportedOperationError:
        name = self._node.name or ", ".join(self._node.output)
        return UnsupportedOperationError(f"{self._node.op_type} at node {name!r}: {why}")

    def attribute(self, name: str, default: Any = None) -> Any:
        value = self._attributes.get(name, default)
        if default is not None and type(value) is not type(default):
            raise self.refuse(f"attribute {name}={value!r}, expected a {type(default).__name__}")
        return value

    def numbers(self, name: str, default: list[int]) -> list[int]:
        """A list of integers, as many as in `default`."""
        value = self.attribute(name, default)
        if len(value) != len(default) or not all(isinstance(part, int) and 0 <= part < 2**31 for part in value):
            raise self.refuse(f"attribute {name}={value!r}, expected {len(default)} numbers")
        return list(value)

    def given(self, position: int) -> bool:
        return len(self._node.input) > position and self._node.input[position] != ""

    def constant(self, position: int) -> Tensor | None:
        """The constant tensor at this input, or None where the input is missing or depends on the images."""
        return self._constants.get(self._node.input[position]) if self.given(position) else None

    def needed(self, position: int) -> Tensor:
        value = self.constant(position)
        if value is None:
            raise self.refuse(f"input {position} is not a constant")
        return value

    def axes(self, position: int, name: str = "axes") -> list[int] | None:
        """Axes from an attribute (older opsets) or a constant input (newer ones)."""
        if self.given(position):
            return [int(axis) for axis in self.needed(position).flatten().tolist()]
        value = self._attributes.get(name)
        return None if value is None else [int(axis) for axis in value]

    @property
    def outputs(self) -> list[str]:
        return list(self._node.output)

    @property
    def count(self) -> int:
        """Number of inputs."""
        return len(self._node.input)

    def all_constant(self) -> bool:
        return all(name == "" or name in self._constants for name in self._node.input)

    def flow(self, position: int, *, padded: bool = False) -> str:
        """The step's output at this input; padding that waits for a convolution is refused unless `padded`."""
        name = self._node.input[position] if self.given(position) else ""
        if name not in self._flows:
            what = "a constant" if name in self._constants else f"unknown ({name!r})"
            raise self.refuse(f"input {position} is {what}, expected a value that depends on the images")
        if name in self._pads and not padded:
            raise self.refuse("its input is padded, which only a convolution can take over")
        return self._flows[name]

    def shape(self, flow: str) -> tuple[int, ...]:
        return self._shapes[flow]

    def image_sides(self, flow: str) -> tuple[int, int]:
        if len(self._shapes[flow]) != 4:
            raise self.refuse(f"its input has shape {list(self._shapes[flow])}, expected images [1, C, H, W]")
        return self._shapes[flow][2], self._shapes[flow][3]

    def pads(self, position: int) -> list[int]:
        """Zeros around the images of this input that still have to be put there: top, left, bottom, right."""
        return self._pads.get(self._node.input[position], [0, 0, 0, 0])

    def alias(self, flow: str) -> None:
        self._flows[self._node.output[0]] = flow

    def fold(self, value: Tensor) -> None:
        self._constants[self._node.output[0]] = self._typed(value)

    def pad_later(self, flow: str, pads: list[int]) -> None:
        self.alias(flow)
        self._pads[self._node.output[0]] = pads

    def layer(self, flow: str, module: nn.Module, state: dict[str, Tensor] | None = None) -> str:
        """Adds a module (on the meta device) as a step, after its result's shape; then its tensors are put in place."""
        name = f"{self._node.op_type.lower()}{len(self.layers)}"
        shape = self._run(lambda: module.to("meta").eval()(self._meta(flow)))
        if state is not None:
            try:
                module.load_state_dict(state, strict=True, assign=True)
            except RuntimeError:
                sizes = {key: list(value.shape) for key, value in state.items()}
                raise self.refuse(f"tensors of shapes {sizes} do not fit together") from None
        if not all(bool(value.isfinite().all()) for value in module.state_dict().values() if not value.is_meta):
            raise self.refuse("its parameters are not finite")
        self.layers[name] = module
        if isinstance(module, nn.Linear) and getattr(module, "bias", None) is None:
            self._products[self._node.output[0]] = module
        return self._step(Step(name, (flow,), self._fresh()), shape)

    def reshape(self, flow: str, shape: Sequence[int]) -> None:
        """A change of shape that keeps every image apart."""
        if len(shape) < 1 or shape[0] != 1 or math.prod(shape) != math.prod(self.shape(flow)):
            raise self.refuse(
                f"from {list(self.shape(flow))} to {list(shape)}: the batch axis of one must stay in front"
            )
        if tuple(shape) == self.shape(flow):
            self.alias(flow)
        elif len(shape) == 2:
            self.layer(flow, nn.Flatten())
        else:
            self._step(Step("reshape", (flow,), self._fresh(), tuple(shape[1:])), tuple(shape))

    def permute(self, flow: str, axes: Sequence[int]) -> None:
        if list(axes) == list(range(len(axes))):
            self.alias(flow)
            return
        shape = tuple(self.shape(flow)[axis] for axis in axes)
        self._step(Step("permute", (flow,), self._fresh(), tuple(axes)), shape)

    def arithmetic(self, operation: str, inputs: Sequence[str | Tensor]) -> None:
        """Two operands of which at least one depends on the images; a constant must not enlarge the other."""
        names, shapes = [], []
        for operand in inputs:
            if isinstance(operand, Tensor):
                name = f"constant{len(self.stored)}"
                self.stored[name] = self._typed(operand.to(self.dtype))
                shapes.append(tuple(operand.shape))
            else:
                name = operand
                shapes.append(self.shape(operand))
            names.append(name)
        flowing = next(shape for shape, operand in zip(shapes, inputs, strict=True) if not isinstance(operand, Tensor))
        try:
            result = tuple(torch.broadcast_shapes(*shapes))
        except RuntimeError:
            raise self.refuse(f"shapes {shapes} do not fit together") from None
        if result != flowing or any(len(shape) > len(flowing) for shape in shapes):
            raise self.refuse(f"shapes {shapes}: an operand would enlarge the other")
        self._step(Step(operation, tuple(names), self._fresh()), result)

    def product(self, position: int) -> nn.Linear | None:
        """The layer without bias that made this input, where nothing else in the file uses its result."""
        name = self._node.input[position]
        return self._products.get(name) if self._uses[name] == 1 else None

    def _fresh(self) -> str:
        return f"value{len(self.steps)}"

    def _meta(self, flow: str) -> Tensor:
        # The default type, for the layers' own tensors have it as long as they are on the meta device.
        return torch.empty(self.shape(flow), device="meta")

    def _run(self, compute: Callable[[], Tensor]) -> tuple[int, ...]:
        try:
            return tuple(compute().shape)
        except (RuntimeError, ValueError, TypeError, IndexError, OverflowError, ZeroDivisionError) as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise self.refuse(f"sizes do not fit ({lines[0][:200]})") from None

    def _step(self, step: Step, shape: tuple[int, ...]) -> str:
        if math.prod(shape) > MAX_NUMBERS:
            raise self.refuse(f"gives {math.prod(shape)} numbers for one image, at most {MAX_NUMBERS} are allowed")
        self.steps.append(step)
        self._shapes[step.output] = shape
        self._flows[self._node.output[0]] = step.output
        return step.output

    def _typed(self, value: Tensor) -> Tensor:
        value = value.to(self.dtype) if value.is_floating_point() else value
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"a constant is not finite as {self.dtype}, expected finite numbers")
        return value
