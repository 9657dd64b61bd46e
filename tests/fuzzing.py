"""Damaged files for the loaders: seeds of every kind, and mutations of their bytes and of the JSON in them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from robboost.exchange import (
    LinearBounds,
    export_onnx,
    load_linear_bounds,
    read_property,
    save_linear_bounds,
    write_properties,
)
from robboost.models import Ensemble, Normalize, PoolMember, load_model, read_pool, save_model, write_pool
from robboost.models.architectures import build
from robboost.threat import Threat

SHAPE = (1, 6, 6)
INTERESTING = [0, 1, 0x7F, 0x80, 0xFF, 0x22, 0x2D, 0x39, 0x5B, 0x7B]
NUMBERS = [0, -1, 1, 2, 7, 2**31 - 1, 2**31, 2**40, 2**63, 2**64, -(2**63), 0.5, -0.0, 1e308, 10**30, True]
VALUES: list[Any] = [None, "", "x", [], {}, [[]], [None], {"type": "ReLU"}, "__class__", "a.b", "input", *NUMBERS]


def seeds(folder: Path) -> dict[str, tuple[bytes, str, Callable[[Path], Any]]]:
    """For each kind of file: its bytes, its name, and what loads it."""
    model = nn.Sequential(Normalize([0.1], [0.3]), *build("conv 2 3x3/1, fc 5", SHAPE, num_classes=3, seed=0)).eval()
    residual = build("[conv 2 2x2/2, conv 2 3x3/1], fc 4", SHAPE, num_classes=3, seed=1).eval()
    save_model(model, folder / "m.safetensors", {"architecture": "x"}, input_shape=SHAPE, dtype=torch.float16)
    save_model(Ensemble([model, residual], [0.25, 0.75], [1.0, 2.0]), folder / "e.safetensors", input_shape=SHAPE)
    export_onnx(residual, folder / "m.onnx", input_shape=SHAPE)
    save_model(load_model(folder / "m.onnx"), folder / "w.safetensors", input_shape=SHAPE)
    state = {"state_dict": [build("conv 4 4x4/2, fc 5", (1, 28, 28), seed=0).state_dict()], "epoch": 3}
    torch.save(state, folder / "m.pt")
    torch.save(state, folder / "l.pt", _use_new_zipfile_serialization=False)
    x, y = torch.rand(1, *SHAPE), torch.tensor([1])
    (written,) = write_properties(folder, x, y, Threat(0.1), num_classes=3)
    rng = np.random.default_rng(0)
    bounds = LinearBounds(
        rng.normal(size=(2, 3, 4)), rng.normal(size=(2, 3)), 0.1, names=("a", "b"), targets=np.arange(3)
    )
    save_linear_bounds(bounds, folder / "b.npz")
    save_linear_bounds(bounds, folder / "b.safetensors")
    np.savez_compressed(folder / "c.npz", slopes=np.ones((2, 3, 4)), intercepts=np.ones((2, 3)), radius=0.1)
    write_pool(folder / "pool", [PoolMember("a", model, SHAPE)])
    loaders: dict[str, Callable[[Path], Any]] = {
        "m.safetensors": load_model,
        "e.safetensors": load_model,
        "w.safetensors": load_model,
        "m.pt": load_model,
        "l.pt": load_model,
        "m.onnx": load_model,
        "b.npz": load_linear_bounds,
        "c.npz": load_linear_bounds,
        "b.safetensors": load_linear_bounds,
    }
    found = {name: ((folder / name).read_bytes(), name, loader) for name, loader in loaders.items()}
    found["vnnlib"] = (written.read_bytes(), "p.vnnlib", read_property)
    manifest = (folder / "pool" / "manifest.json").read_bytes()
    found["manifest"] = (manifest, "pool/manifest.json", lambda file: read_pool(file.parent))
    return found


def mutants(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Damaged versions: cut short, bits flipped, bytes and lengths replaced, parts moved or doubled; JSON changed."""
    chance = random.Random(seed)
    for _ in range(count):
        kind = chance.random()
        if kind < 0.35 and (changed := _changed_json(content, chance)) is not None:
            yield changed
            continue
        data = bytearray(content)
        for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
            _damage(data, chance)
        yield bytes(data)


def _damage(data: bytearray, chance: random.Random) -> None:
    # Headers are short and parameters long: half of all damage is done near the beginning or the end.
    edge = chance.randrange(max(1, min(len(data), 600)))
    place = chance.choice((chance.randrange(max(1, len(data))), edge, max(0, len(data) - 1 - edge)))
    kind = chance.randrange(8)
    if kind == 0:
        del data[place:]
    elif kind == 1 and data:
        data[place] ^= 1 << chance.randrange(8)
    elif kind == 2 and data:
        data[place] = chance.choice(INTERESTING)
    elif kind == 3:
        data[place : place + 8] = chance.choice(NUMBERS[:11]).to_bytes(9, "little", signed=True)[:8]
    elif kind == 4:
        data[place:place] = data[place : place + chance.randrange(1, 64)]
    elif kind == 5:
        del data[place : place + chance.randrange(1, 64)]
    elif kind == 6:
        data[place : place + 4] = chance.randbytes(4)
    elif data:
        other = chance.randrange(len(data))
        size = chance.randrange(1, 32)
        data[place : place + size] = data[other : other + size]


def _changed_json(content: bytes, chance: random.Random) -> bytes | None:
    """One value of the file's JSON replaced: a manifest, or the header of a safetensors file and the text within it."""
    if content[:1] == b"{":
        return _replaced(json.loads(content), chance)
    length = int.from_bytes(content[:8], "little")
    if length > len(content) or content[8:9] != b"{":
        return None
    header = json.loads(content[8 : 8 + length])
    key = next(iter(header.get("__metadata__", {}).keys() - {"format"}), None)
    if key is not None and chance.random() < 0.7:
        header["__metadata__"][key] = _replaced(json.loads(header["__metadata__"][key]), chance).decode()
        changed = json.dumps(header).encode()
    else:
        changed = _replaced(header, chance)
    return len(changed).to_bytes(8, "little") + changed + content[8 + length :]


def _replaced(tree: Any, chance: random.Random) -> bytes:
    places: list[tuple[Any, Any]] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            waiting.append(node[key])
    node, key = chance.choice(places)
    kind = chance.random()
    if kind < 0.2:
        del node[key]
    elif kind < 0.3 and isinstance(node, dict):
        node[chance.choice(("", "type", "x", "0.weight"))] = node.pop(key)
    elif kind < 0.5:
        other, place = chance.choice(places)
        if (isinstance(other, dict) and place in other) or (isinstance(other, list) and place < len(other)):
            node[key] = json.loads(json.dumps(other[place]))
    else:
        node[key] = chance.choice(VALUES)
    return json.dumps(tree).encode()
