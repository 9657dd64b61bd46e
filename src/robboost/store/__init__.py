"""Bounds of many members and examples on disk: written shard by shard, read as a stream."""

from robboost.store.bound_store import BoundStore, Damage, Pairs
from robboost.store.fill import FillSettings, fill_store
from robboost.store.identity import Identity
from robboost.store.member_hash import hash_data, hash_member
from robboost.store.screening import Screening, settled_pairs
from robboost.store.stream import StoredColumns

__all__ = [
    "BoundStore",
    "Damage",
    "FillSettings",
    "Identity",
    "Pairs",
    "Screening",
    "StoredColumns",
    "fill_store",
    "hash_data",
    "hash_member",
    "settled_pairs",
]
