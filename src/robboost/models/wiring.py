"""Networks whose layers are wired by a list of steps: skips, additions and reshapes that a Sequential cannot say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from robboost.errors import InputError

__all__ = ["ARITHMETIC", "SHAPING", "Step", "WiredNetwork"]

ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
}
# Shapes leave the batch axis out; axes of a permutation are numbered with it, and it stays first.
SHAPING: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "reshape": lambda value, shape: value.reshape(-1, *shape),
    "permute": lambda value, axes: value.permute(axes),
}


@dataclass(frozen=True)
class Step:
    """`output` = `operation` of `inputs`: the name of a layer, of arithmetic (two inputs), or of a change of shape."""

    operation: str
    inputs: tuple[str, ...]
    output: str
    setting: tuple[int, ...] = ()


class WiredNetwork(nn.Module):
    """Values by name: "input" is the images, constants are buffers, each step adds one, the last one is the result.

    Args:
        steps: in order; their inputs are names of constants, of earlier outputs, or "input".
        layers: the modules that steps name.
        constants: tensors that steps name, saved with the network.
    """

    def __init__(
        self, steps: Sequence[Step], layers: Mapping[str, nn.Module], constants: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.steps = tuple(steps)
        self.layers = nn.ModuleDict(layers)
        self.constants = nn.Module()
        for name, value in (constants or {}).items():
            self.constants.register_buffer(name, value)
        known = {"input", *(constants or {})}
        for step in self.steps:
            if step.operation not in {*layers, *ARITHMETIC, *SHAPING} or not known.issuperset(step.inputs):
                raise InputError(f"{step}: expected the name of a layer or operation, and inputs that come before it")
            if step.output in known or len(step.inputs) != (2 if step.operation in ARITHMETIC else 1):
                raise InputError(f"{step}: expected a new name, and two inputs for arithmetic, one otherwise")
            known.add(step.output)
        if not self.steps:
            raise InputError("steps is empty, expected at least one")

    def forward(self, x: Tensor) -> Tensor:
        values = {"input": x, **dict(self.constants.named_buffers())}
        for step in self.steps:
            inputs = [values[name] for name in step.inputs]
            if step.operation in ARITHMETIC:
                values[step.output] = ARITHMETIC[step.operation](*inputs)
            elif step.operation in SHAPING:
                values[step.output] = SHAPING[step.operation](inputs[0], step.setting)
            else:
                values[step.output] = self.layers[step.operation](inputs[0])
        return values[self.steps[-1].output]
