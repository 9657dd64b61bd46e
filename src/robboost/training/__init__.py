"""Training members that can be certified: losses, schedules, and many small networks at once."""

from __future__ import annotations

from robboost.training.config import PoolConfig, TrainConfig, load_config, load_pool, recipe
from robboost.training.pool import Progress, RunOptions, Trained, train, train_pool

__all__ = [
    "PoolConfig",
    "Progress",
    "RunOptions",
    "TrainConfig",
    "Trained",
    "load_config",
    "load_pool",
    "recipe",
    "train",
    "train_pool",
]
