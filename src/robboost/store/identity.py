"""What a store's bounds are bounds of: hashes of members and data, threat, method, precision and versions.

A store is read for exactly this and never for anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import InputError, StoreError
from robboost.store.member_hash import hash_data, hash_member
from robboost.threat import Threat

__all__ = ["FORMAT", "Identity", "identify", "like", "with_layout"]

# Raised when the meaning or the layout of the files changes; a store of another format is refused.
FORMAT = 1


@dataclass(frozen=True)
class Identity:
    """The manifest of a store.

    Attributes:
        members: hash of each member, in order.
        data: hash of images and labels.
        threat: eps, norm and clip.
        method: bound method, as in `margin_bounds`.
        precision: arithmetic of the bounds ("float32", "float64").
        screening: name of the rule that chose the pairs, "none" for all of them.
        storage: type of the columns on disk.
        batch: examples per call of the bounds. Part of the identity of the bits, since a batch of another size rounds
            differently.
        input_shape, n_examples, n_targets: sizes.
        shard_pairs, chunk_pairs: pairs per file, and per checksummed piece of it.
        versions: format, robboost and torch. Format must agree; the others must agree to continue a fill.
    """

    members: tuple[str, ...]
    data: str
    threat: dict[str, Any]
    method: str
    precision: str
    screening: str
    storage: str
    batch: int
    input_shape: tuple[int, ...]
    n_examples: int
    n_targets: int
    shard_pairs: int
    chunk_pairs: int
    versions: dict[str, Any]

    @property
    def n_slots(self) -> int:
        """Pairs of all examples and targets; a screened store fills fewer."""
        return self.n_examples * self.n_targets

    @property
    def dim(self) -> int:
        return int(torch.Size(self.input_shape).numel())

    @property
    def n_shards(self) -> int:
        """Files per member."""
        return -(-self.n_slots // self.shard_pairs)

    def to_attributes(self) -> dict[str, Any]:
        """JSON values, with a checksum over them."""
        body: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return {"manifest": body, "sha256": _digest(body)}

    @classmethod
    def from_attributes(cls, attributes: dict[str, Any], where: str) -> Identity:
        """The inverse; refuses a damaged manifest and another format."""
        body = attributes.get("manifest")
        if not isinstance(body, dict):
            raise StoreError(f"{where}: holds no manifest of bounds; expected a folder written by `robboost bounds`")
        if attributes.get("sha256") != _digest(body):
            raise StoreError(
                f"{where}: manifest is damaged (its checksum does not fit); delete the store and fill again"
            )
        if body.get("versions", {}).get("format") != FORMAT:
            found = body.get("versions", {}).get("format")
            raise StoreError(f"{where}: store format {found}; this version reads format {FORMAT}, so fill a new store")
        values = {f.name: body[f.name] for f in fields(cls)}
        return cls(
            **{
                **values,
                "members": tuple(values["members"]),
                "input_shape": tuple(int(s) for s in values["input_shape"]),
            }
        )

    def require(self, wanted: Identity, where: str) -> None:
        """Refuses to serve bounds of anything but `wanted`; the message names the first field that differs."""
        if len(self.members) != len(wanted.members):
            raise StoreError(
                f"{where}: holds bounds of {len(self.members)} members, asked for {len(wanted.members)};"
                " name another folder for this pool"
            )
        for t, (held, asked) in enumerate(zip(self.members, wanted.members, strict=True)):
            if held != asked:
                raise StoreError(
                    f"{where}: member {t} is {held[:12]}, asked for {asked[:12]} (other weights or structure);"
                    " name another folder for this pool"
                )
        for name in _MUST_AGREE:
            held, asked = getattr(self, name), getattr(wanted, name)
            if held != asked:
                raise StoreError(
                    f"{where}: holds bounds with {name} {_short(held)}, asked for {_short(asked)};"
                    " name another folder, or delete this one"
                )

    def require_same_versions(self, wanted: Identity, where: str) -> None:
        """Refuses to continue a fill with other versions: the two halves would not be bit-equal to one run."""
        if self.versions != wanted.versions:
            raise StoreError(
                f"{where}: begun with versions {self.versions}, continued with {wanted.versions};"
                " install those versions, or fill a new store"
            )


_MUST_AGREE = (
    "data", "threat", "method", "precision", "screening", "storage", "input_shape", "n_examples", "n_targets",
)  # fmt: skip


def identify(
    pool: Sequence[nn.Module], x: Tensor, y: Tensor, threat: Threat, *, method: str, precision: str
) -> Identity:
    """The identity of the bounds of this pool on these examples; `with_layout` adds how they are stored."""
    import robboost

    if not pool:
        raise InputError("pool is empty: expected at least one member")
    if len(x) != len(y) or len(x) == 0:
        raise InputError(f"{len(x)} images and {len(y)} labels: expected as many, and at least one")
    return Identity(
        members=tuple(hash_member(member) for member in pool),
        data=hash_data(x, y),
        threat={"eps": threat.eps, "norm": threat.norm, "clip": None if threat.clip is None else list(threat.clip)},
        method=method,
        precision=precision,
        screening="none",
        storage="float32",
        batch=0,
        input_shape=tuple(x.shape[1:]),
        n_examples=len(x),
        n_targets=_n_targets(pool, x),
        shard_pairs=0,
        chunk_pairs=0,
        versions={"format": FORMAT, "robboost": robboost.__version__, "torch": torch.__version__.split("+")[0]},
    )


def with_layout(identity: Identity, *, storage: str, screening: str, batch: int, shard: int, chunk: int) -> Identity:
    """The identity with its storage chosen."""
    return replace(identity, storage=storage, screening=screening, batch=batch, shard_pairs=shard, chunk_pairs=chunk)


def _n_targets(pool: Sequence[nn.Module], x: Tensor) -> int:
    counts = set()
    for member in pool:
        with torch.no_grad():
            counts.add(int(member(like(member, x[:1])).shape[-1]))
    if len(counts) != 1 or min(counts) < 2:
        raise InputError(f"members give {sorted(counts)} logits: expected the same number, two or more")
    return counts.pop() - 1


def like(member: nn.Module, x: Tensor) -> Tensor:
    """Images where the member is, in its precision."""
    parameter = next((p for p in member.parameters() if p.is_floating_point()), x)
    return x.to(device=parameter.device, dtype=parameter.dtype)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
