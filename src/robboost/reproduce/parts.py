"""Long work in parts, each kept in a file, so that an interrupted run goes on where it was."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robboost.models.files import write_atomically

__all__ = ["Parts", "identity"]


def identity(**facts: Any) -> str:
    """Twelve hexadecimal digits that stand for these facts: parts of other work lie in another folder."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Parts:
    """A folder of finished parts; None: nothing is kept, and everything is computed."""

    folder: Path | None

    def arrays(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The arrays of NAME.npz, or those that `compute` gives, kept as such."""
        if self.folder is None:
            return dict(compute())
        file = self.folder / f"{name}.npz"
        if (found := _read(file)) is not None:
            return found
        made = {key: value.cpu() for key, value in compute().items()}
        stream = io.BytesIO()
        np.savez_compressed(stream, **{key: value.numpy() for key, value in made.items()})  # type: ignore[arg-type]
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, stream.getvalue())
        return made

    def values(self, name: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The plain values of NAME.json, or those that `compute` gives, kept as such."""
        if self.folder is None:
            return compute()
        file = self.folder / f"{name}.json"
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            return found
        made = compute()
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(made).encode())
        return made


def _read(file: Path) -> dict[str, Tensor] | None:
    """None where there is no whole file: it is computed again."""
    try:
        with np.load(file, allow_pickle=False) as found:
            return {key: torch.from_numpy(found[key]) for key in found.files}
    except (OSError, ValueError, zipfile.BadZipFile):
        return None
