"""What a long run has computed so far, kept on disk: the same run, started again, continues where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robboost.errors import SoundnessError

__all__ = ["Journal", "journal_folder", "package_digest", "remembered", "resumable"]

# Steps are no longer saved where they would leave less than this free, or once they hold more than that together.
_FREE_BYTES = 2 * 10**9
_MOST_BYTES = 20 * 10**9
_FORGOTTEN_DAYS = 14


@dataclass
class Journal:
    """The steps of one run, numbered as they come.

    Attributes:
        folder: where they are; None: they are not saved.
        before: steps that an interrupted run left.
        reused: steps that were taken from there.
    """

    folder: Path | None
    before: int = 0
    reused: int = 0
    _next: int = field(default=0, repr=False)
    _bytes: int = field(default=0, repr=False)
    _inside: bool = field(default=False, repr=False)

    def step(self, name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """The step's tensors: those saved under its number and name, or computed and then saved."""
        if self.folder is None or self._inside:
            return compute()
        path = self.folder / f"{self._next:06d}.safetensors"
        self._next += 1
        found = _read(path, name)
        if found is not None:
            self.reused += 1
            return found
        self._inside = True  # what the step is made of is part of it
        try:
            values = compute()
        finally:
            self._inside = False
        self._save(path, name, values)
        return values

    def _save(self, path: Path, name: str, values: Mapping[str, Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        size = sum(value.numel() * value.element_size() for value in values.values())
        part = path.with_suffix(".part")
        try:
            if self._bytes + size > _MOST_BYTES or shutil.disk_usage(path.parent).free < _FREE_BYTES + size:
                return
            tensors = {key: value.detach().cpu().contiguous().clone() for key, value in values.items()}
            save_file(tensors, part, {"step": name, "sha256": _digest(tensors)})
            part.replace(path)
            self._bytes += size
        except (OSError, SafetensorError):  # a run that cannot be resumed is better than none
            part.unlink(missing_ok=True)


_ACTIVE: ContextVar[Journal | None] = ContextVar("journal", default=None)


def remembered(name: str, compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """`compute()`, or, within `resumable`, what an interrupted run saved of this very step.

    Tensors that were saved come back on the CPU. Steps are told apart by their order and their names, so a run must
    take the same steps each time; what decides them belongs into the identity of `resumable`.
    """
    journal = _ACTIVE.get()
    return compute() if journal is None else journal.step(name, compute)


@contextmanager
def resumable(identity: Mapping[str, Any], *, folder: Path | None = None) -> Iterator[Journal]:
    """Saves the steps of the block until it ends well; interrupted and begun again, the block finds them.

    Args:
        identity: everything that the results depend on, as JSON knows it: hashes of networks and data, settings. The
            code of the package is added: another version never continues this one's work.
        folder: where runs are kept; None: `journal_folder()`.
    """
    text = json.dumps({**identity, "torch": torch.__version__, "code": package_digest()}, sort_keys=True, default=str)
    root = journal_folder() if folder is None else folder
    mine = root / hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        mine.mkdir(parents=True, exist_ok=True)
        _forget(root)
        journal = Journal(mine, before=len(list(mine.glob("*.safetensors"))))
    except OSError:  # no place to write: the run can be made, but not resumed
        journal = Journal(None)
    token = _ACTIVE.set(journal)
    try:
        yield journal
    except SoundnessError:
        shutil.rmtree(mine, ignore_errors=True)  # a contradiction is looked at from the start
        raise
    except BaseException:
        if not any(mine.glob("*.safetensors")):
            shutil.rmtree(mine, ignore_errors=True)
        raise
    else:
        shutil.rmtree(mine, ignore_errors=True)
    finally:
        _ACTIVE.reset(token)


def journal_folder() -> Path:
    """ROBBOOST_WORK, or "unfinished" in the user's cache."""
    if stated := os.environ.get("ROBBOOST_WORK"):
        return Path(stated)
    import pooch

    return Path(pooch.os_cache("robboost")) / "unfinished"


def _read(path: Path, name: str) -> dict[str, Tensor] | None:
    """The saved tensors, or None where they are not there, damaged, or those of another step."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(path, "pt") as opened:
            notes = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            # A flipped bit must not become a certificate.
            intact = notes.get("step") == name and notes.get("sha256") == _digest(tensors)
            return tensors if intact else None
    except (OSError, SafetensorError, ValueError):
        return None


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for key, tensor in sorted(tensors.items()):
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _forget(root: Path) -> None:
    """Removes what was interrupted long ago and never continued."""
    oldest = time.time() - 86400 * _FORGOTTEN_DAYS
    for folder in root.iterdir():
        with suppress(OSError):  # another run may be done with it at this moment
            if folder.is_dir() and folder.stat().st_mtime < oldest:
                shutil.rmtree(folder, ignore_errors=True)


@cache
def package_digest() -> str:
    """SHA-256 over the code of the package: what one version computed is not continued by another."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
