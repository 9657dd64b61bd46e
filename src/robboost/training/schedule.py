"""All that changes from step to step, worked out beforehand: one row per step, which a captured step looks up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robboost.training.config import TrainConfig

__all__ = ["COLUMNS", "table"]

COLUMNS = ("eps", "mixture", "crown_share", "step_size", "root_scale", "averaging")

BETA1, BETA2 = 0.9, 0.999


def table(config: TrainConfig, steps_per_epoch: int) -> Tensor:
    """The schedule of a run, float32 [steps, 6], one column for each of `COLUMNS`.

    step_size = lr / (1 - beta1^t) and root_scale = 1 / sqrt(1 - beta2^t) are Adam's bias corrections folded in;
    averaging is the share of the new weights in the average (1 until the ramp ends: the average starts there).
    """
    steps = config.epochs * steps_per_epoch
    start = config.warmup * steps
    length = config.ramp * steps
    mixture_start = config.mixture if config.mixture_start is None else config.mixture_start
    rows = []
    for step in range(steps):
        grown = 1.0 if step >= start + length else 0.0 if step < start else smooth((step - start) / length)
        after = max(0.0, (step - start - length) / max(1.0, steps - start - length))
        lr = config.lr * (config.lr_end + (1 - config.lr_end) * 0.5 * (1 + math.cos(math.pi * after)))
        rows.append(
            (
                config.final_eps * grown,
                mixture_start + (config.mixture - mixture_start) * grown,
                1.0 + (config.crown_share - 1.0) * grown,
                lr / (1 - BETA1 ** (step + 1)),
                1 / math.sqrt(1 - BETA2 ** (step + 1)),
                1.0 - config.average if grown == 1.0 else 1.0,
            )
        )
    return torch.tensor(rows, dtype=torch.float32)


def smooth(share: float) -> float:
    """0 to 1, as the fourth power over the first quarter, then linearly (with the same slope where they meet).

    A network close to its start cannot follow a radius that grows linearly from 0: the first steps matter most.
    """
    middle = 0.25
    factor = 1 / (middle**4 + 4 * middle**3 * (1 - middle))
    if share < middle:
        return factor * share**4
    return factor * (middle**4 + 4 * middle**3 * (share - middle))
