"""The paper's architectures A to L (its Table 4), and the few others that results are given for.

Structure texts are read left to right: "conv 8 4x4/2" is a convolution with 8 filters of 4x4 and stride 2, "fc 128" a
fully connected layer, "[...]" a residual block whose skip is a strided 2x2 projection. Every layer is followed by ReLU
(in a block: the last one after the addition), and a last fully connected layer gives the classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robboost.errors import InputError

__all__ = ["ARCHITECTURES", "PAPER_CIFAR", "PAPER_MNIST", "Residual", "build", "float32_bytes"]

ARCHITECTURES: dict[str, str] = {
    "A": "conv 4 4x4/2, conv 8 4x4/2, fc 128",
    "B": "conv 8 4x4/2, conv 16 4x4/2, fc 256",
    "C": "conv 4 3x3/1, conv 8 3x3/1, conv 8 4x4/4, fc 64",
    "D": "conv 8 3x3/1, conv 16 3x3/1, conv 16 4x4/4, fc 128",
    "E": "conv 4 5x5/1, conv 8 5x5/1, conv 8 5x5/4, fc 64",
    "F": "conv 8 5x5/1, conv 16 5x5/1, conv 16 5x5/4, fc 128",
    "G": "conv 4 3x3/1, conv 4 4x4/2, conv 8 3x3/1, conv 8 4x4/2, fc 256, fc 256",
    "H": "conv 4 3x3/1, conv 4 4x4/2, conv 8 3x3/1, conv 8 4x4/2, fc 512, fc 512",
    "I": "conv 8 3x3/1, conv 8 4x4/2, conv 16 3x3/1, conv 16 4x4/2, fc 256, fc 256",
    "J": "conv 8 3x3/1, conv 8 4x4/2, conv 16 3x3/1, conv 16 4x4/2, fc 512, fc 512",
    "K": "conv 4 3x3/1, [conv 8 4x4/2, conv 8 3x3/1, conv 8 3x3/1], [conv 8 4x4/2, conv 8 3x3/1, conv 8 3x3/1], fc 128",
    "L": "conv 8 3x3/1, [conv 16 4x4/2, conv 16 3x3/1, conv 16 3x3/1], "
    "[conv 16 4x4/2, conv 16 3x3/1, conv 16 3x3/1], fc 256",
    # The small network of Wong and Kolter's public checkpoints.
    "wk-small": "conv 16 4x4/2, conv 32 4x4/2, fc 100",
    # Figure 1 of the paper: four layers of weights, 1024 neurons in each hidden one.
    "mlp-4x1024": "fc 1024, fc 1024, fc 1024",
}
PAPER_MNIST = tuple("ABCDEFGHIJKL")
PAPER_CIFAR = tuple("ABCDEFGHIJK")

# (kernel, stride) -> padding: the choice under which the sizes add up to the paper's 9.1 and 10.0 MB.
_PADDING = {(3, 1): 1, (4, 2): 1, (5, 1): 2, (4, 4): 0, (5, 4): 1}
_CONV = re.compile(r"conv (\d+) (\d+)x\2/(\d+)")
_FC = re.compile(r"fc (\d+)")


class Residual(nn.Module):
    """relu(body(x) + skip(x)): convolutions with ReLU between them, and a strided 2x2 projection beside them."""

    def __init__(self, body: nn.Sequential, skip: nn.Conv2d) -> None:
        super().__init__()
        self.body = body
        self.skip = skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def build(
    structure: str,
    input_shape: Sequence[int],
    *,
    num_classes: int = 10,
    batch_norm: bool = False,
    seed: int | None = None,
) -> nn.Sequential:
    """A network from the name of an architecture or from a structure text, with PyTorch's default initialisation.

    Args:
        structure: a key of `ARCHITECTURES`, or a text such as "conv 16 4x4/2, conv 32 4x4/2, fc 100".
        input_shape: (channels, height, width) of an image.
        num_classes: length of the logits.
        batch_norm: put a BatchNorm2d behind every convolution of the trunk and blocks (to be folded before shipping).
        seed: initialise from this seed without touching the global generator's state; None uses the global generator.
    """
    text = ARCHITECTURES.get(structure, structure)
    if len(input_shape) != 3 or any(side < 1 for side in input_shape):
        raise InputError(f"input_shape={tuple(input_shape)}: expected (channels, height, width)")
    if seed is None:
        return _build(text, input_shape, num_classes, batch_norm)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(text, input_shape, num_classes, batch_norm)


def float32_bytes(model: nn.Module) -> int:
    """Size of the parameters and buffers if each floating-point number took four bytes."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum(4 * t.numel() for t in tensors if t.is_floating_point())


def _build(text: str, input_shape: Sequence[int], num_classes: int, batch_norm: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    channels, *sides = input_shape
    width: int | None = None  # of the flattened features, once there is a fully connected layer
    for item in _items(text):
        if match := _FC.fullmatch(item):
            if width is None:
                layers.append(nn.Flatten())
            layers += [nn.Linear(width or channels * math.prod(sides), int(match[1])), nn.ReLU()]
            width = int(match[1])
            continue
        specs = [_CONV.fullmatch(part) for part in _items(item.strip("[]"))]
        closed = item.startswith("[") == item.endswith("]")
        if width is not None or not specs or not all(specs) or not closed:
            known = ", ".join(ARCHITECTURES)
            raise InputError(
                f"architecture {text!r}: cannot read {item!r}; expected a name ({known}) or a structure text"
            )
        body: list[nn.Module] = []
        first = channels
        for spec in specs:
            filters, kernel, stride = map(int, spec.groups())  # type: ignore[union-attr]
            padding = _PADDING.get((kernel, stride), (kernel - 1) // 2)
            body.append(nn.Conv2d(channels, filters, kernel, stride=stride, padding=padding, bias=not batch_norm))
            body += [nn.BatchNorm2d(filters)] if batch_norm else []
            body.append(nn.ReLU())
            channels = filters
            sides = [(side + 2 * padding - kernel) // stride + 1 for side in sides]
        if min(sides) < 1:
            size = tuple(input_shape)
            raise InputError(
                f"architecture {text!r}: {item!r} does not fit images of shape {size}; expected larger ones"
            )
        if item.startswith("["):
            layers.append(Residual(nn.Sequential(*body[:-1]), nn.Conv2d(first, channels, 2, stride=2)))
        else:
            layers += body
    head = [] if width is not None else [nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(width or channels * math.prod(sides), num_classes))


def _items(text: str) -> list[str]:
    """The parts between commas that are not inside brackets."""
    return [part.strip() for part in re.findall(r"\[[^\]]*\]|[^,\s][^,]*", text) if part.strip()]
