"""ReLUs of the dual bound on random columns and on rows: one kernel forward and one backward where Triton is there.

A step of `wong-kolter` moves tens of random columns for each example through every ReLU. Written as single operations
they are read and written dozens of times; here each is read once and written once in either direction, and what is kept
for the gradient is the columns themselves and a few numbers for each neuron.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from robboost.training import dual_plain

__all__ = ["relax_rows", "relu_estimated", "relu_given"]


class _ReluEstimated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, centre: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        offset, total, *outputs = _twin(centre).estimated_forward(centre, columns, fresh)
        ctx.save_for_backward(centre, columns, fresh, offset, total)
        radius, centre, columns = outputs
        return radius, centre, columns

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        kept = ctx.saved_tensors
        return *_twin(kept[0]).estimated_backward(kept, *gradients), None


class _ReluGiven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, centre: Tensor, radius: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(centre, radius, columns, fresh)
        return _twin(centre).given_forward(centre, radius, columns, fresh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        kept = ctx.saved_tensors
        return *_twin(kept[0]).given_backward(kept, *gradients), None


class _RelaxRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, centre: Tensor, radius: Tensor, rule: str) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, centre, radius)
        ctx.rule = rule
        return _twin(rows).rows_forward(rows, centre, radius, rule)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        kept = ctx.saved_tensors
        return *_twin(kept[0]).rows_backward(kept, *gradients, ctx.rule), None


def relu_estimated(centre: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A ReLU between lines of the same slope d and distance s, on an interval whose radius its columns estimate.

    Args:
        centre: [N, ...] of the inputs.
        columns: Cauchy numbers [K, N, ...] whose scale is the radius.
        fresh: Cauchy numbers [K, 1, ...] for the ReLU's own distance, without gradient.

    Returns:
        The radius [N, ...]; the centre d centre + s / 2 and the columns d columns + s / 2 fresh behind the ReLU.
    """
    if columns.shape[1] < len(centre):
        columns = columns.expand(-1, len(centre), *centre.shape[1:])
    radius, centre, columns = _ReluEstimated.apply(centre, columns, fresh)
    return radius, centre, columns


def relu_given(centre: Tensor, radius: Tensor, columns: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """As `relu_estimated` where the radius [N or 1, ...] is known; columns [K, N, ...] or, shared, [K, 1, ...]."""
    centre, columns = _ReluGiven.apply(centre, radius.expand_as(centre), columns, fresh)
    return centre, columns


def relax_rows(rows: Tensor, centre: Tensor, radius: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    """Rows [N, T, ...] before a ReLU from those behind it, and what they lose [N, T].

    The ReLU's inputs lie in [centre +- radius], radius [N or 1, ...].
    <rows, relu(z)> >= <passed, z> + lost with passed = rows+ * low + rows- * up, lost = <rows-, shift>, for the lines
    of `dual_plain.relaxation`.
    """
    passed, lost = _RelaxRows.apply(rows, centre, radius.expand_as(centre), rule)
    return passed, lost


def _twin(tensor: Tensor) -> Any:
    """The module whose functions fit the tensor's device."""
    if not tensor.is_cuda:
        return dual_plain
    from robboost.training import dual_triton

    return dual_triton
