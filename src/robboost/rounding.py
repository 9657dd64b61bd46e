"""Margin columns in fewer bits, each pair with a proved bound of what the rounding can cost it.

Rounding |A| outward is unsound for mixtures, where columns of opposite sign cancel. What is sound: round to nearest,
keep `error >= ||A - rounded A||_q`, and use `intercept - error`. For weights a >= 0 the mixed error is then at most the
mix of the errors, by the triangle inequality.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from robboost.errors import InputError

__all__ = ["Rounded", "Storage", "check_storage", "decode_columns", "round_columns"]

Storage = Literal["float64", "float32", "float16", "int8"]
_DTYPE: dict[Storage, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "int8": torch.int8,
}
_INT8_STEPS = 127


class Rounded(NamedTuple):
    """Rounded columns, with what is needed to read them soundly.

    values: [..., d] in the type of storage.
    scales: [...] float32 for int8 (an entry means `float32(value) * scale`, rounded to float32), None otherwise.
    errors: [...] float64, at least `||columns - decoded||_q`.
    """

    values: Tensor
    scales: Tensor | None
    errors: Tensor


def round_columns(columns: Tensor, storage: str, *, norm: str) -> Rounded:
    """Rounds columns [..., d] to `storage` and bounds the dual norm of the change, pair by pair.

    `errors` is computed in float64 and raised by more than its own rounding (d additions of relative error 2^-53
    each). It is a proved bound for the columns as handed in; entries beyond the range of the type are clamped, which
    costs error and never soundness.
    """
    kind = check_storage(storage)
    exact = columns.to(torch.float64)
    if not bool(torch.isfinite(exact).all()):
        where = tuple(int(i) for i in (~torch.isfinite(exact)).nonzero()[0])
        raise InputError(f"column entry {where} is {float(exact[where])}: expected finite numbers")
    scales = None
    if kind == "int8":
        # A float32 scale may round to below max/127; the clamp then costs error, which is counted.
        scales = (exact.abs().amax(-1) / _INT8_STEPS).to(torch.float32)
        step = scales.to(torch.float64).clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        values = (exact / step).round().clamp(-_INT8_STEPS, _INT8_STEPS).to(torch.int8)
    else:
        limit = torch.finfo(_DTYPE[kind]).max
        values = exact.clamp(-limit, limit).to(_DTYPE[kind])
    gap = exact - decode_columns(values, scales).to(torch.float64)
    if norm == "linf":
        size = gap.abs().sum(-1)
    elif norm == "l2":
        size = torch.linalg.vector_norm(gap, dim=-1)
    elif norm == "l1":
        size = gap.abs().amax(-1)
    else:
        raise InputError(f"norm={norm!r}: expected one of 'linf', 'l2', 'l1'")
    slack = 1 + 2.0**-50 * (columns.shape[-1] + 8)
    return Rounded(values, scales, torch.where(size > 0, size * slack + torch.finfo(torch.float64).tiny, 0.0))


def decode_columns(values: Tensor, scales: Tensor | None) -> Tensor:
    """The columns that stored values stand for: themselves, or `float32(value) * scale` in float32 for int8."""
    return values if scales is None else values.to(torch.float32) * scales[..., None]


def check_storage(storage: str) -> Storage:
    """Refuses a storage type that does not exist."""
    if storage not in _DTYPE:
        raise InputError(f"storage={storage!r}: expected one of {', '.join(map(repr, get_args(Storage)))}")
    return storage
