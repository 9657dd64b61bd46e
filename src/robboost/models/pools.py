"""Pools of networks: a folder or a list of files, all checked before any long work starts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import nn

from robboost.errors import CheckpointError, InputError
from robboost.models.checkpoints import SUFFIXES, load_checkpoints, save_model
from robboost.models.files import existing_file, parse_json, write_atomically

__all__ = ["MANIFEST", "Pool", "PoolMember", "parameter_digest", "read_pool", "write_pool"]

MANIFEST = "manifest.json"
_FORMAT = 1
_MAX_MEMBERS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")


@dataclass(frozen=True)
class PoolMember:
    """One network of a pool, and what is known of it.

    `architecture`, `config`, `seed` and `metrics` come from the manifest (or the file's notes) and are never
    interpreted; `sha256` is of the file; `input_shape` is None where the file does not say.
    """

    name: str
    model: nn.Module = field(repr=False)
    input_shape: tuple[int, ...] | None = None
    architecture: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""
    sha256: str = ""
    num_classes: int | None = None


@dataclass(frozen=True)
class Pool:
    """The members in order; `notes` is the manifest's (data set, threat, versions)."""

    members: tuple[PoolMember, ...]
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def models(self) -> list[nn.Module]:
        return [member.model for member in self.members]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(member.name for member in self.members)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of an image, where some file says it (they all agree)."""
        return next((member.input_shape for member in self.members if member.input_shape is not None), None)

    def __len__(self) -> int:
        return len(self.members)


def read_pool(
    source: str | Path | Sequence[str | Path],
    *,
    architecture: str | None = None,
    input_shape: Sequence[int] | None = None,
    num_classes: int | None = None,
) -> Pool:
    """All networks of a folder (by its manifest.json, or every model file in it), a file, or a list of those.

    Every file is found and, with a manifest, compared with its SHA-256 before the first is loaded; the first broken one
    is named. Members must be different networks for the same input shape and number of classes. The other arguments are
    those of `load_model`, for files that do not describe themselves.
    """
    entries, notes = _entries(source)
    if not 1 <= len(entries) <= _MAX_MEMBERS:
        raise CheckpointError(f"{_text(source)}: {len(entries)} models, expected 1 to {_MAX_MEMBERS}")
    hashes = [_verified(file, entry) for file, entry in entries]
    members: list[PoolMember] = []
    for (file, entry), digest in zip(entries, hashes, strict=True):
        loaded = load_checkpoints(file, architecture=architecture, input_shape=input_shape, num_classes=num_classes)
        name = str(entry.get("name", file.stem))
        for n, checkpoint in enumerate(loaded):
            members.append(
                PoolMember(
                    name=name if len(loaded) == 1 else f"{name}-{n}",
                    model=checkpoint.model,
                    input_shape=checkpoint.input_shape,
                    architecture=str(entry.get("architecture", checkpoint.notes.get("architecture", ""))),
                    config=_table(entry.get("config", checkpoint.notes.get("config"))),
                    seed=_integer(entry.get("seed", checkpoint.notes.get("seed"))),
                    metrics=_table(entry.get("metrics", checkpoint.notes.get("metrics"))),
                    file=str(file),
                    sha256=digest,
                    num_classes=checkpoint.num_classes,
                )
            )
    _check_alike(members)
    return Pool(tuple(members), notes)


def write_pool(
    folder: str | Path,
    members: Sequence[PoolMember],
    notes: Mapping[str, Any] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Pool:
    """Saves each member as NAME.safetensors and writes manifest.json with their hashes; returns what was written.

    `dtype` is that of `save_model`. The manifest is written last: an interrupted run leaves the old one.
    """
    target = Path(folder)
    names = [member.name for member in members]
    if not members or len(set(names)) != len(names) or not all(_NAME.fullmatch(name) for name in names):
        raise InputError(f"names {names}: expected at least one, all different, of letters, digits and ._+- only")
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be created ({error.strerror}), expected a folder name") from None
    written = []
    for member in members:
        if member.input_shape is None:
            raise InputError(f"member {member.name!r} has no input_shape, expected the shape of an image")
        described = {
            "architecture": member.architecture,
            "config": dict(member.config),
            "seed": member.seed,
            "metrics": dict(member.metrics),
        }
        file = target / f"{member.name}.safetensors"
        save_model(member.model, file, described, input_shape=member.input_shape, dtype=dtype)
        written.append(replace(member, file=str(file), sha256=_sha256(file)))
    _check_alike(written)
    entries = [
        {
            "name": member.name,
            "file": Path(member.file).name,
            "sha256": member.sha256,
            "architecture": member.architecture,
            "config": dict(member.config),
            "seed": member.seed,
            "metrics": dict(member.metrics),
        }
        for member in written
    ]
    try:
        text = json.dumps(
            {"format": _FORMAT, "members": entries, "notes": dict(notes or {})}, indent=1, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"notes cannot be written as JSON ({error}): expected texts, numbers, lists, tables") from None
    write_atomically(target / MANIFEST, text.encode())
    return Pool(tuple(written), dict(notes or {}))


def _entries(source: str | Path | Sequence[str | Path]) -> tuple[list[tuple[Path, dict[str, Any]]], dict[str, Any]]:
    if not isinstance(source, (str, Path)):
        return [entry for path in source for entry in _entries(path)[0]], {}
    folder = Path(source)
    if not folder.is_dir():
        return [(existing_file(folder), {})], {}
    manifest = folder / MANIFEST
    if manifest.is_file():
        return _manifest_entries(folder, manifest)
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error.strerror}), expected a folder of models") from None
    return [(existing_file(file), {}) for file in files], {}


def _manifest_entries(folder: Path, manifest: Path) -> tuple[list[tuple[Path, dict[str, Any]]], dict[str, Any]]:
    found = parse_json(existing_file(manifest).read_bytes(), str(manifest))
    entries = found.get("members") if isinstance(found, dict) and found.get("format") == _FORMAT else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f'{manifest}: expected a table with "format": {_FORMAT} and a list of "members"')
    paths = []
    for entry in entries:
        name = entry.get("file")
        if not isinstance(name, str) or not isinstance(entry.get("sha256"), str):
            raise CheckpointError(f"{manifest}: member {entry.get('name')!r} has no file or sha256, expected both")
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or "\\" in name or "\0" in name:
            raise CheckpointError(f"{manifest}: file {name!r} leaves the folder, expected a name inside it")
        paths.append((existing_file(folder / relative), entry))
    return paths, _table(found.get("notes"))


def _verified(file: Path, entry: Mapping[str, Any]) -> str:
    digest = _sha256(file)
    if entry.get("sha256", digest) != digest:
        raise CheckpointError(f"{file}: SHA-256 is {digest}, the manifest says {entry['sha256']}: fetch the file again")
    return digest


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_alike(members: Sequence[PoolMember]) -> None:
    """Different networks, same input shape; equal parameters in another file or format are a duplicate, too."""
    known: dict[str, str] = {}
    names: set[str] = set()
    for member in members:
        digest = parameter_digest(member.model)
        if digest in known:
            raise CheckpointError(
                f"{member.file}: the same network as {known[digest]}, expected different members: remove one"
            )
        if member.name in names:
            raise CheckpointError(f"{member.file}: a second member named {member.name!r}, expected different names")
        known[digest] = member.file or member.name
        names.add(member.name)
    shaped = [member for member in members if member.input_shape is not None]
    for member in shaped[1:]:
        if member.input_shape != shaped[0].input_shape:
            raise CheckpointError(
                f"{member.file}: takes images of shape {member.input_shape}, {shaped[0].file} those of"
                f" {shaped[0].input_shape}; expected one shape for all members"
            )
    counted = [member for member in members if member.num_classes is not None]
    for member in counted[1:]:
        if member.num_classes != counted[0].num_classes:
            raise CheckpointError(
                f"{member.file}: {member.num_classes} classes, {counted[0].file} {counted[0].num_classes}; expected one"
                " number for all members"
            )


def parameter_digest(model: nn.Module) -> str:
    """Hash of shapes and values in order; names, precision and the kind of file do not matter."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for value in model.state_dict().values():
        if value.is_floating_point():
            digest.update(str(tuple(value.shape)).encode())
            digest.update(value.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _table(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {}


def _integer(value: Any) -> int | None:
    return value if isinstance(value, int) else None


def _text(source: str | Path | Sequence[str | Path]) -> str:
    return str(source) if isinstance(source, (str, Path)) else f"list of {len(source)} files"
