"""What a store's bounds are bounds of: hashes of members and data, threat, method, precision and versions.

A store is read for exactly this and never for anything else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from robboost.errors import InputError, StoreError
from robboost.threat import Threat

__all__ = ["FORMAT", "Identity", "hash_data", "hash_member", "identify"]

# Raised when the meaning or the layout of the files changes; a store of another format is refused.
FORMAT = 1

# What every module carries; everything else on a module is its author's and part of its identity.
_MODULE_INTERNALS = frozenset(vars(nn.Module()))


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


def hash_member(member: nn.Module) -> str:
    """SHA-256 over parameters, buffers, structure, plain attributes and the code of every `forward`.

    Two members with the same hash compute the same function up to what their code reaches outside themselves (globals,
    files): such members are not told apart.
    """
    digest = hashlib.sha256()
    for name, module in member.named_modules():
        kind = type(module)
        _feed(digest, ("module", name, kind.__module__, kind.__qualname__, module.extra_repr()))
        for key, value in sorted(vars(module).items()):
            if key not in _MODULE_INTERNALS:
                _feed(digest, ("attribute", key, _plain(value)))
        code = getattr(kind.forward, "__code__", None)
        if code is not None and not kind.__module__.startswith("torch."):
            _feed(digest, ("code", _code(code)))
    for name, tensor in sorted([*member.named_parameters(), *member.named_buffers()], key=lambda item: item[0]):
        _feed_tensor(digest, name, tensor)
    return digest.hexdigest()


def hash_data(x: Tensor, y: Tensor) -> str:
    """SHA-256 over images and labels, with their types and shapes."""
    digest = hashlib.sha256()
    _feed_tensor(digest, "x", x)
    _feed_tensor(digest, "y", y.to(torch.int64))
    return digest.hexdigest()


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


def _feed(digest: Any, value: object) -> None:
    text = repr(value).encode()
    digest.update(len(text).to_bytes(8, "little") + text)


def _feed_tensor(digest: Any, name: str, tensor: Tensor) -> None:
    flat = tensor.detach().cpu().contiguous()
    _feed(digest, (name, str(flat.dtype), tuple(flat.shape)))
    # Byte view also for types that NumPy does not know (bfloat16).
    digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes() if flat.numel() else b"")


def _plain(value: object) -> object:
    """A form of an attribute that does not depend on where it lies in memory."""
    if isinstance(value, Tensor):
        return hash_data(value, torch.zeros(0))
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, (str, int, float, complex, bool, bytes, type(None), torch.dtype, torch.Size)):
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(v)) for v in value)
    if isinstance(value, dict):
        return [(repr(_plain(k)), _plain(v)) for k, v in value.items()]
    code = getattr(value, "__code__", None)
    return (type(value).__qualname__, getattr(value, "__qualname__", ""), _code(code) if code else "")


def _code(code: CodeType) -> object:
    return (code.co_code.hex(), code.co_names, [_plain(c) for c in code.co_consts])


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
