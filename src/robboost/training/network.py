"""A network as a program over one flat parameter vector, so that a training step is few and large tensor operations.

The module that `build` returns is read once into a list of operations; weights are slices of one vector (one `split`
forward, one `cat` backward), so that clipping, Adam, averaging and L1 touch a single tensor. Convolution weights lie in
the vector as [out, height, width, in]: their view is "channels last", which is what tensor cores read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.models.architectures import Residual, build
from robboost.models.layers import PixelMask
from robboost.training.first_convolution import first_convolution, reads_an_image

__all__ = [
    "BN_EPS",
    "Conv",
    "Fc",
    "Flatten",
    "Network",
    "Norm",
    "Op",
    "Relu",
    "Skip",
    "conv",
    "pixel_mask",
]

BN_EPS = 1e-5


@dataclass(frozen=True)
class Conv:
    """A convolution; `weight` and `bias` are slots (bias None: a normalisation follows).

    `output_padding` makes the transposed convolution return to the input's size.
    """

    weight: int
    bias: int | None
    stride: int
    padding: int
    output_padding: tuple[int, int]


@dataclass(frozen=True)
class Fc:
    """A fully connected layer."""

    weight: int
    bias: int


@dataclass(frozen=True)
class Norm:
    """Batch normalisation of one convolution's channels; `index` counts the normalisations of the network."""

    gamma: int
    beta: int
    index: int
    channels: int


@dataclass(frozen=True)
class Relu:
    """max(0, z); `index` counts the ReLUs of the network."""

    index: int


@dataclass(frozen=True)
class Flatten:
    """[N, C, H, W] -> [N, C * H * W]."""

    shape: tuple[int, ...]


@dataclass(frozen=True)
class Skip:
    """body(x) + skip(x)."""

    body: tuple[Op, ...]
    skip: Conv


Op = Conv | Fc | Norm | Relu | Flatten | Skip


def pixel_mask(shape: Sequence[int], share: float, seed: int) -> Tensor:
    """A fixed random `share` of the pixels as ones [1, 1, H, W]; all channels of a pixel go together."""
    height, width = shape[1:]
    count = height * width
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(count)
    mask[torch.randperm(count, generator=generator)[: round(share * count)]] = 1.0
    return mask.view(1, 1, height, width)


@dataclass
class Network:
    """Operations, the shapes of their slots in the flat vector, and the input mask (None: every pixel is seen).

    The last operation is always the fully connected layer of the logits; `trunk` is everything before it.
    """

    structure: str
    input_shape: tuple[int, ...]
    num_classes: int
    batch_norm: bool
    mask: Tensor | None
    trunk: tuple[Op, ...] = ()
    head: Fc = field(default_factory=lambda: Fc(0, 0))
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    num_norms: int = 0
    num_relus: int = 0

    @classmethod
    def of(
        cls, structure: str, input_shape: Sequence[int], *, num_classes: int, batch_norm: bool, mask: Tensor | None
    ) -> Network:
        """The program of `build(structure, input_shape, ...)`."""
        module = build(structure, input_shape, num_classes=num_classes, batch_norm=batch_norm, seed=0)
        net = cls(structure, tuple(input_shape), num_classes, batch_norm, mask)
        with torch.no_grad():
            ops = net._read(list(module), torch.zeros(2, *input_shape))
        head = ops[-1]
        if not isinstance(head, Fc):
            raise InputError(f"architecture {structure!r}: expected a last fully connected layer")
        net.trunk, net.head = tuple(ops[:-1]), head
        return net

    @classmethod
    def of_module(cls, module: nn.Module, input_shape: Sequence[int]) -> Network:
        """The program of a finished network: layers such as `build` makes, behind a pixel mask or none.

        `flat_of(module)` holds its parameters. Batch normalisation must have been folded.
        """
        layers = list(module.children())
        mask = None
        if layers and isinstance(layers[0], PixelMask):
            mask = layers[0].mask
            layers = layers[1:]
        if not isinstance(module, nn.Sequential) or not layers or not isinstance(layers[-1], nn.Linear):
            raise InputError(f"network is a {type(module).__name__}: expected a Sequential with a last Linear layer")
        if any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules()):
            raise InputError("network holds a BatchNorm2d: expected it folded into the convolution before")
        net = cls("", tuple(input_shape), layers[-1].out_features, False, mask)
        with torch.no_grad():
            ops = net._read(layers, torch.zeros(2, *input_shape, device=layers[-1].weight.device))
        net.trunk, net.head = tuple(ops[:-1]), ops[-1]  # type: ignore[assignment]
        return net

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def norm_channels(self) -> int:
        """Channels of all normalisations together."""
        return sum(op.channels for op in _walk(self.trunk) if isinstance(op, Norm))

    def weights(self, flat: Tensor) -> list[Tensor]:
        """The slots of the flat vector as tensors in PyTorch's layout (views)."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [
            part.view(shape).permute(0, 3, 1, 2) if len(shape) == 4 else part.view(shape)
            for part, shape in zip(parts, self.shapes, strict=True)
        ]

    def initial(self, init: str, seed: int) -> Tensor:
        """The flat vector at the start.

        "interval": normal with standard deviation sqrt(2 pi) / fan_in, biases 0 (Shi et al. 2021: the width of an
        interval then neither grows nor shrinks from layer to layer). "default": PyTorch's.
        """
        if init == "default":
            return self.flat_of(
                build(
                    self.structure,
                    self.input_shape,
                    num_classes=self.num_classes,
                    batch_norm=self.batch_norm,
                    seed=seed,
                )
            )
        generator = torch.Generator().manual_seed(seed)
        gammas = {op.gamma for op in _walk(self.trunk) if isinstance(op, Norm)}
        parts = []
        for slot, shape in enumerate(self.shapes):
            if len(shape) == 1:
                parts.append(torch.ones(shape) if slot in gammas else torch.zeros(shape))
            else:
                deviation = math.sqrt(2 * math.pi) / math.prod(shape[1:])
                parts.append(torch.randn(shape, generator=generator) * deviation)
        return torch.cat([part.reshape(-1) for part in parts])

    def is_weight(self) -> Tensor:
        """1.0 where the flat vector holds a weight, 0.0 for biases and normalisations (what L1 leaves alone)."""
        return torch.cat([torch.full((math.prod(shape),), float(len(shape) > 1)) for shape in self.shapes])

    def flat_of(self, module: nn.Module) -> Tensor:
        """The flat vector of a module that `build` made with the same arguments."""
        tensors = [t.detach().permute(0, 2, 3, 1) if t.dim() == 4 else t.detach() for t in module.parameters()]
        return torch.cat([t.reshape(-1) for t in tensors])

    def module(self, flat: Tensor, norms: Sequence[tuple[Tensor, Tensor]] = ()) -> nn.Sequential:
        """A module without batch normalisation: each (scale, shift) of `norms` is folded into its convolution."""
        plain = build(self.structure, self.input_shape, num_classes=self.num_classes, batch_norm=False, seed=0)
        weights = [w.detach().double().cpu() for w in self.weights(flat)]
        pairs = [(scale.detach().double().cpu(), shift.detach().double().cpu()) for scale, shift in norms]
        tensors = _folded((*self.trunk, self.head), weights, pairs)
        with torch.no_grad():
            for target, value in zip(plain.parameters(), tensors, strict=True):
                target.copy_(value)
        if self.mask is None:
            return plain.eval()
        return nn.Sequential(PixelMask(self.mask.cpu().clone()), *plain).eval()

    def _slot(self, tensor: Tensor) -> int:
        shape = tuple(tensor.shape)
        self.shapes.append((shape[0], shape[2], shape[3], shape[1]) if len(shape) == 4 else shape)
        return len(self.shapes) - 1

    def _conv(self, layer: nn.Conv2d, x: Tensor) -> Conv:
        stride, padding, kernel = layer.stride[0], int(layer.padding[0]), layer.kernel_size[0]
        extra = [(side + 2 * padding - kernel) % stride for side in x.shape[2:]]
        weight = self._slot(layer.weight)
        bias = None if layer.bias is None else self._slot(layer.bias)
        return Conv(weight, bias, stride, padding, (extra[0], extra[1]))

    def _read(self, layers: Sequence[nn.Module], x: Tensor) -> list[Op]:
        """The operations of `layers`; slots are numbered in the order of `Module.parameters()`."""
        ops: list[Op] = []
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                ops.append(self._conv(layer, x))
            elif isinstance(layer, nn.Linear):
                ops.append(Fc(self._slot(layer.weight), self._slot(layer.bias)))
            elif isinstance(layer, nn.BatchNorm2d):
                ops.append(Norm(self._slot(layer.weight), self._slot(layer.bias), self.num_norms, layer.num_features))
                self.num_norms += 1
            elif isinstance(layer, nn.ReLU):
                ops.append(self._relu())
            elif isinstance(layer, nn.Flatten):
                ops.append(Flatten(tuple(x.shape[1:])))
            elif isinstance(layer, Residual):
                body = tuple(self._read(list(layer.body), x))
                ops += [Skip(body, self._conv(layer.skip, x)), self._relu()]
            else:
                raise InputError(f"architecture {self.structure!r}: cannot train a {type(layer).__name__}")
            x = layer(x)
        return ops

    def _relu(self) -> Relu:
        self.num_relus += 1
        return Relu(self.num_relus - 1)


def conv(op: Conv, weights: Sequence[Tensor], x: Tensor, *, bias: bool = True) -> Tensor:
    """The convolution of `op` on x; bias False: of a radius, which no shift moves."""
    shift = weights[op.bias] if bias and op.bias is not None else None
    weight = weights[op.weight]
    if reads_an_image(x, weight):
        return first_convolution(x, weight, shift, op.stride, op.padding)
    return F.conv2d(x, weight, shift, stride=op.stride, padding=op.padding)


def _walk(ops: Sequence[Op]) -> list[Op]:
    found: list[Op] = []
    for op in ops:
        found += [*_walk(op.body), op.skip] if isinstance(op, Skip) else [op]
    return found


def _folded(ops: Sequence[Op], weights: list[Tensor], norms: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Weights and biases of the layers in order, every normalisation folded: W' = scale W, b' = scale b + shift."""
    tensors: list[Tensor] = []
    for op in ops:
        if isinstance(op, Skip):
            tensors += _folded(op.body, weights, norms) + _folded([op.skip], weights, norms)
        elif isinstance(op, Norm):
            scale, shift = norms[op.index]
            bias = tensors.pop()
            tensors[-1] = tensors[-1] * scale.view(-1, 1, 1, 1)
            tensors.append(bias * scale + shift)
        elif isinstance(op, Conv | Fc):
            weight = weights[op.weight]
            bias = weights[op.bias] if op.bias is not None else torch.zeros(len(weight), dtype=weight.dtype)
            tensors += [weight, bias]
    return tensors
