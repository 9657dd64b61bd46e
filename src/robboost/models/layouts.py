"""Which network a bare state dict belongs to: named by the caller, or read off the shapes where only one fits."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from robboost.errors import CheckpointError, InputError
from robboost.models.architectures import ARCHITECTURES, build

__all__ = ["network_for"]

_PLAIN = re.compile(r"(?:.*\.)?(\d+)\.(weight|bias)")
# The strides that a kernel of this size has in the architectures known here.
_STRIDES = {2: (2,), 3: (1,), 4: (2, 4), 5: (1, 4)}
_COMMON_SHAPES: dict[int, list[tuple[int, ...]]] = {1: [(1, 28, 28)], 3: [(3, 32, 32)]}
_MAX_COMBINATIONS = 4096


def network_for(
    state: Mapping[str, Tensor],
    *,
    architecture: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
) -> tuple[nn.Module, dict[str, Tensor], tuple[int, ...]]:
    """A network on the meta device, the state under its names, and its input shape; CheckpointError where none fits.

    Without `architecture` the layers must be convolutions then fully connected layers in a Sequential ("0.weight",
    "0.bias", "2.weight", ...), as in Wong and Kolter's public checkpoints; strides do not show in a state dict, so they
    are those of the known architectures, and they must be the only ones that fit the first fully connected layer.
    """
    shapes = [tuple(input_shape)] if input_shape is not None else _guessed_shapes(state)
    texts = [architecture] if architecture is not None else _structures(state)
    found = []
    for text, shape in itertools.product(texts, shapes):
        with torch.device("meta"):
            try:
                network = build(text, shape, num_classes=_classes(state, num_classes))
            except InputError:
                if architecture is not None:
                    raise
                continue
        renamed = _renamed(state, network)
        if renamed is not None:
            found.append((text, network, renamed, shape))
    if len(found) == 1:
        return found[0][1:]
    hint = f"name the architecture ({', '.join(ARCHITECTURES)}, or a text such as {ARCHITECTURES['wk-small']!r})"
    if not found:
        what = (
            f"architecture {architecture!r}"
            if architecture is not None
            else "no convolutional or fully connected layout"
        )
        raise CheckpointError(f"{what} does not fit the tensors {_summary(state)} for images of shape {shapes}; {hint}")
    raise CheckpointError(f"{len(found)} layouts fit ({'; '.join(entry[0] for entry in found[:4])}); {hint}")


def _guessed_shapes(state: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    first = next((value for value in state.values() if value.dim() >= 2), None)
    if first is not None and first.dim() == 4 and first.shape[1] in _COMMON_SHAPES:
        return list(_COMMON_SHAPES[first.shape[1]])
    known = [shape for shapes in _COMMON_SHAPES.values() for shape in shapes]
    if first is not None and first.dim() == 2:
        return [shape for shape in known if shape[0] * shape[1] * shape[2] == first.shape[1]] or known
    return known


def _classes(state: Mapping[str, Tensor], num_classes: int | None) -> int:
    if num_classes is not None:
        return num_classes
    last = [value for value in _ordered(state).values() if value.dim() == 2]
    return int(last[-1].shape[0]) if last else 10


def _ordered(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """By the numbers in the names, as numbers: "10.weight" comes after "2.weight"."""

    def key(name: str) -> list[tuple[int, int, str]]:
        # A weight comes before its bias, as in PyTorch.
        parts = re.sub(r"weight$", " weight", name).split(".")
        return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]

    return {name: state[name] for name in sorted(state, key=key)}


def _structures(state: Mapping[str, Tensor]) -> Iterator[str]:
    """Structure texts for the weights' shapes, one for each combination of the usual strides."""
    weights = [value for name, value in _ordered(state).items() if name.endswith("weight")]
    if not all(_PLAIN.fullmatch(name) for name in state) or not weights or weights[-1].dim() != 2:
        return
    kinds = [weight.dim() for weight in weights]
    if kinds != sorted(kinds, reverse=True) or set(kinds) - {2, 4}:
        return
    convolutions = [weight for weight in weights if weight.dim() == 4]
    if any(weight.shape[2] != weight.shape[3] or weight.shape[2] not in _STRIDES for weight in convolutions):
        return
    dense = [f"fc {weight.shape[0]}" for weight in weights[len(convolutions) : -1]]
    choices = itertools.product(*(_STRIDES[weight.shape[2]] for weight in convolutions))
    for strides in itertools.islice(choices, _MAX_COMBINATIONS):
        parts = [
            f"conv {weight.shape[0]} {weight.shape[2]}x{weight.shape[2]}/{stride}"
            for weight, stride in zip(convolutions, strides, strict=True)
        ]
        yield ", ".join([*parts, *dense])


def _renamed(state: Mapping[str, Tensor], network: nn.Module) -> dict[str, Tensor] | None:
    """The state under the network's names: equal names, or else the same shapes in an order that is beyond doubt."""
    wanted = network.state_dict()
    if set(wanted) == set(state):
        pairs = [(name, state[name]) for name in wanted]
    elif len(wanted) == len(state) and all(_PLAIN.fullmatch(name) for name in [*state, *wanted]):
        pairs = list(zip(wanted, _ordered(state).values(), strict=True))
    elif len(wanted) == len(state) and len({value.shape for value in state.values()}) == len(state):
        by_shape = {value.shape: value for value in state.values()}
        pairs = [(name, by_shape.get(value.shape, value.new_empty(0))) for name, value in wanted.items()]
    else:
        return None
    return dict(pairs) if all(wanted[name].shape == value.shape for name, value in pairs) else None


def _summary(state: Mapping[str, Tensor]) -> str:
    shown = [f"{name} {list(value.shape)}" for name, value in list(state.items())[:6]]
    return ", ".join(shown) + (", ..." if len(state) > 6 else "")
