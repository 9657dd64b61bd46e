"""Networks: the paper's architectures, ensembles, and files."""

from __future__ import annotations

from robboost.models.checkpoints import ModelMetadata, load_model, load_models, read_metadata, save_model
from robboost.models.demo import demo_pool
from robboost.models.ensemble import Ensemble
from robboost.models.layers import Normalize, PixelMask
from robboost.models.pools import Pool, PoolMember, read_pool, write_pool
from robboost.models.shipped import Shipped, read_mix

__all__ = [
    "Ensemble",
    "ModelMetadata",
    "Normalize",
    "PixelMask",
    "Pool",
    "PoolMember",
    "Shipped",
    "demo_pool",
    "load_model",
    "load_models",
    "read_metadata",
    "read_mix",
    "read_pool",
    "save_model",
    "write_pool",
]
