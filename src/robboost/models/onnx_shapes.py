"""What ONNX operations on shapes become: a reshape or permutation that keeps images apart, or a folded constant."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from robboost.models.onnx_translation import Translation

__all__ = ["SHAPE_RULES"]


def _flatten(to: Translation) -> None:
    flow = to.flow(0)
    shape, axis = to.shape(flow), to.attribute("axis", 1)
    if not -len(shape) <= axis <= len(shape):
        raise to.refuse(f"axis={axis} of a value of shape {list(shape)}")
    axis = axis + len(shape) if axis < 0 else axis
    to.reshape(flow, [math.prod(shape[:axis]), math.prod(shape[axis:])])


def _reshape(to: Translation) -> None:
    wanted = [int(side) for side in to.needed(1).flatten().tolist()] if to.given(1) else list(to.attribute("shape", []))
    folded = to.constant(0)
    before = tuple(folded.shape) if folded is not None else to.shape(to.flow(0))
    after = []
    for n, side in enumerate(wanted):
        copied = side == 0 and not to.attribute("allowzero", 0)
        if copied and n >= len(before):
            raise to.refuse(f"shape {wanted} of a value of shape {list(before)}")
        after.append(before[n] if copied else side)
    if after.count(-1) == 1:
        known = math.prod(side for side in after if side != -1)
        after[after.index(-1)] = math.prod(before) // known if known > 0 else 0
    if any(side < 0 for side in after) or math.prod(after) != math.prod(before):
        raise to.refuse(f"shape {wanted} of a value of shape {list(before)}")
    if folded is not None:
        to.fold(folded.reshape(after))
    else:
        to.reshape(to.flow(0), after)


def _transpose(to: Translation) -> None:
    folded = to.constant(0)
    rank = folded.dim() if folded is not None else len(to.shape(to.flow(0)))
    axes = to.attribute("perm", list(range(rank))[::-1])
    if sorted(axes) != list(range(rank)):
        raise to.refuse(f"perm={axes} of a value with {rank} axes")
    if folded is not None:
        to.fold(folded.permute(axes).contiguous())
    elif axes[:1] != [0]:
        raise to.refuse(f"perm={axes} moves the batch axis")
    else:
        to.permute(to.flow(0), axes)


def _squeeze(to: Translation) -> None:
    folded, axes = to.constant(0), to.axes(1)
    shape = tuple(folded.shape) if folded is not None else to.shape(to.flow(0))
    if axes is None:
        axes = [n for n, side in enumerate(shape) if side == 1]
    chosen = _within(to, axes, len(shape))
    if any(shape[axis] != 1 for axis in chosen):
        raise to.refuse(f"axes={axes} of a value of shape {list(shape)}")
    after = [side for n, side in enumerate(shape) if n not in chosen]
    if folded is not None:
        to.fold(folded.reshape(after))
    else:
        to.reshape(to.flow(0), after)


def _unsqueeze(to: Translation) -> None:
    folded, axes = to.constant(0), to.axes(1) or []
    shape = tuple(folded.shape) if folded is not None else to.shape(to.flow(0))
    after = list(shape)
    for axis in sorted(_within(to, axes, len(shape) + len(axes))):
        after.insert(axis, 1)
    if folded is not None:
        to.fold(folded.reshape(after))
    else:
        to.reshape(to.flow(0), after)


def _within(to: Translation, axes: Sequence[int], rank: int) -> set[int]:
    if rank > 8 or not all(-rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise to.refuse(f"axes={list(axes)} of a value with {rank} axes")
    return {axis % rank for axis in axes}


def _shape_of(to: Translation) -> None:
    """The shape of one image's value: older exporters compute the shape of a reshape from it."""
    folded = to.constant(0)
    shape = tuple(folded.shape) if folded is not None else to.shape(to.flow(0))
    first, last = to.attribute("start", 0), to.attribute("end", len(shape))
    to.fold(torch.tensor(shape, dtype=torch.int64)[first:last])


def _gather(to: Translation) -> None:
    value, index = to.needed(0), to.needed(1)
    if value.dim() != 1 or to.attribute("axis", 0) != 0 or index.is_floating_point() or index.dim() > 1:
        raise to.refuse("only entries of a constant list have a rule")
    if bool(((index < -len(value)) | (index >= len(value))).any()):
        raise to.refuse(f"entries {index.tolist()} of a list of {len(value)}")
    to.fold(value[index.long()])


def _concat(to: Translation) -> None:
    if not to.all_constant():
        raise to.refuse("joining values that depend on the images has no bound rule")
    parts = [to.needed(position) for position in range(to.count)]
    if any(part.dim() != 1 for part in parts) or sum(len(part) for part in parts) > 1024:
        raise to.refuse("only short lists of constants are joined")
    to.fold(torch.cat(parts))


SHAPE_RULES: dict[str, Callable[[Translation], None]] = {
    "Flatten": _flatten,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Shape": _shape_of,
    "Gather": _gather,
    "Concat": _concat,
}
