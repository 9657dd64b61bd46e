"""Parameters out of PyTorch's own checkpoint files (.pt, .pth), without running what is pickled in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robboost.errors import CheckpointError
from robboost.models.files import MAX_BYTES, MAX_TENSORS, check_zip, existing_file

__all__ = ["State", "check_finite", "read_state_dicts", "widened"]

State = dict[str, Tensor]
_WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "weights")


def read_state_dicts(path: str | Path) -> list[State]:
    """Every network's state dict in a checkpoint: one, or several where the file holds a list of them.

    Only tensors and plain containers are unpickled (`torch.load(weights_only=True)`). A first pass on the "meta" device
    compares the sizes that the file claims with the bytes that it has, so that nothing large is allocated on its word.
    """
    file = existing_file(path)
    with file.open("rb") as stream:
        zipped = stream.read(4) == b"PK\x03\x04"  # how PyTorch tells its two formats apart
    if zipped:
        check_zip(file)
    claimed = _storages(_load(file, "meta"), file)
    total = sum(storage.nbytes() for storage in claimed)
    if len(claimed) > MAX_TENSORS or total > min(file.stat().st_size, MAX_BYTES):
        raise CheckpointError(f"{file}: claims {total} bytes of tensors in a file of {file.stat().st_size}, refused")
    states = [_state(found, file) for found in _unwrapped(_load(file, "cpu"))]
    if not states:
        raise CheckpointError(f"{file}: holds no state dict, expected names and tensors")
    return states


def widened(value: Tensor) -> Tensor:
    """Half-precision numbers as the float32 numbers that they are, exactly; everything else as it is."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def check_finite(state: Mapping[str, Tensor], file: Path) -> None:
    """Refuses NaN and infinity: no bound of such a network means anything."""
    for name, value in state.items():
        if not bool(value.isfinite().all()):
            raise CheckpointError(f"{file}: {name} holds NaN or infinity, expected finite parameters")


def _load(file: Path, device: str) -> Any:
    try:
        return torch.load(file, map_location=device, weights_only=True)
    # Damaged files make the reader fail in any way that Python knows; pickled objects other than tensors end here too.
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(
            f"{file}: damaged, or holds more than tensors ({lines[0][:200]}); expected a state dict (torch.save of"
            " model.state_dict())"
        ) from None


def _storages(found: Any, file: Path) -> list[torch.UntypedStorage]:
    """The distinct storages of all tensors in a checkpoint."""
    storages: dict[int, torch.UntypedStorage] = {}
    for value in _tensors(found):
        if value.layout != torch.strided or value.is_quantized or value.is_complex():
            raise CheckpointError(f"{file}: holds a sparse, quantised or complex tensor, expected plain numbers")
        storage = value.untyped_storage()
        storages[storage._cdata] = storage
    return list(storages.values())


def _tensors(found: Any, depth: int = 0) -> Iterator[Tensor]:
    if depth > 20:
        raise CheckpointError("checkpoint nested more than 20 deep, expected a state dict")
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from _tensors(value, depth + 1)
    elif isinstance(found, (list, tuple)):
        for value in found:
            yield from _tensors(value, depth + 1)


def _unwrapped(found: Any) -> Sequence[Any]:
    for _ in range(3):
        if isinstance(found, Mapping):
            key = next((key for key in _WRAPPERS if isinstance(found.get(key), (Mapping, list))), None)
            if key is None:
                break
            found = found[key]
    return found if isinstance(found, list) else [found]


def _state(found: Any, file: Path) -> State:
    if not isinstance(found, Mapping) or not found:
        raise CheckpointError(f"{file}: holds a {type(found).__name__} where a state dict was expected")
    state: State = {}
    for name, value in found.items():
        if not isinstance(name, str) or type(value) not in (Tensor, torch.nn.Parameter):
            raise CheckpointError(f"{file}: entry {name!r} is a {type(value).__name__}, expected only named tensors")
        state[name.removeprefix("module.")] = widened(value.detach()).contiguous()
    check_finite(state, file)
    return state
