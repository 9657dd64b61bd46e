"""Clipping, Adam and averaging of one flat vector, in place: one pass over memory where Triton is there."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from robboost.training.kernels import fused
from robboost.training.schedule import BETA1, BETA2

__all__ = ["ADAM_EPS", "AdamState", "adam_step"]

ADAM_EPS = 1e-8
# So that a gradient of length 0 can be clipped.
_LEAST = 1e-6


class AdamState(NamedTuple):
    """Parameters, their average, and both moments, each [P]."""

    flat: Tensor
    average: Tensor
    first_moment: Tensor
    second_moment: Tensor


def adam_step(state: AdamState, gradient: Tensor, length: Tensor, scalars: Tensor, *, clip_norm: float) -> None:
    """Moves `state` by one step, without gradient.

    g = gradient * min(1, clip_norm / length)         (clip_norm 0: as it is)
    m, v = means of g and g^2;  flat -= step_size m / (root_scale sqrt(v) + 1e-8);  average moves towards flat

    Args:
        length: norm of the gradient, a tensor as the host must not wait for it.
        scalars: [3]: step_size, root_scale, averaging (see `schedule.table`).
    """
    if fused(state.flat):
        from robboost.training import triton_adam

        triton_adam.step(state, gradient, length, scalars, clip_norm=clip_norm, least=_LEAST, eps=ADAM_EPS)
        return
    step_size, root_scale, averaging = scalars.unbind()
    if clip_norm:
        gradient = gradient * (clip_norm / (length + _LEAST)).clamp(max=1)
    state.first_moment.lerp_(gradient, 1 - BETA1)
    state.second_moment.lerp_(gradient * gradient, 1 - BETA2)
    root = state.second_moment.sqrt().mul_(root_scale).add_(ADAM_EPS)
    state.flat.sub_(state.first_moment / root * step_size)
    state.average.lerp_(state.flat, averaging)
