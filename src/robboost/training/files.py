"""What a run leaves on disk: members as safetensors, logs as JSON lines, and states to resume from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robboost.errors import CheckpointError
from robboost.models import save_model
from robboost.models.files import write_atomically
from robboost.training.config import TrainConfig
from robboost.training.member import LOG, Member

__all__ = ["estimates", "history", "load_state", "notes", "save_history", "save_member", "save_state"]


def save_member(member: Member, folder: Path) -> Path:
    """NAME.safetensors: the member as it is (`Member.network`), in float32; the file describes itself."""
    path = folder / f"{member.config.label}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(member.network(), path, notes(member.config), input_shape=member.net.input_shape)
    return path


def notes(config: TrainConfig) -> dict[str, Any]:
    """What a member's file says of its training."""
    return {"architecture": config.architecture, "config": config.as_dict(), "seed": config.seed}


def estimates(configs: Iterable[TrainConfig]) -> dict[str, Any]:
    """The manifest's note on members whose training bounds were estimates (their certificates are not)."""
    names = [config.short_name for config in configs if config.estimated]
    return {"trained_on_estimated_bounds": names} if names else {}


def history(member: Member) -> list[dict[str, float]]:
    """One entry per finished epoch: mean loss, share robust under the training bound, mean length of the gradient.

    Where the training bound is an estimate, the entry says from how many passes (of random sums, or one).
    """
    done = int(member.step_count.item()) // member.steps_per_epoch
    rows = (member.log[:done] / member.steps_per_epoch).tolist()
    table = member.table.cpu()
    entries = []
    for epoch, row in enumerate(rows):
        last = table[(epoch + 1) * member.steps_per_epoch - 1]
        entry = {"epoch": epoch + 1, "eps": last[0].item(), "mixture": last[1].item()}
        entry |= dict(zip(LOG, row, strict=True))
        if member.config.estimated:
            entry["estimated_from"] = member.config.projections or 1
        entries.append(entry)
    return entries


def save_history(entries: list[dict[str, float]], config: TrainConfig, folder: Path) -> None:
    """NAME.log.jsonl: one JSON object per epoch."""
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    path = folder / f"{config.label}.log.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text.encode())


def save_state(member: Member, folder: Path) -> None:
    """NAME.state: everything that a resumed run needs, and the configuration that it belongs to."""
    path = folder / f"{member.config.label}.state"
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_suffix(".partial")
    torch.save({"config": member.config.as_dict(), "state": {k: v.cpu() for k, v in member.state().items()}}, spare)
    os.replace(spare, path)


def load_state(config: TrainConfig, folder: Path) -> tuple[TrainConfig, dict[str, Tensor]] | None:
    """The saved run of this configuration (its epochs may be fewer: a time limit shortens them); None: none there."""
    path = folder / f"{config.label}.state"
    if not path.exists():
        return None
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        known = TrainConfig(**saved["config"])
        state: dict[str, Tensor] = saved["state"]
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); delete it to train from the start") from None
    if known.with_epochs(config.epochs) != config:
        raise CheckpointError(
            f"{path}: belongs to another configuration; expected the one that it was started with, or another folder"
        )
    return known, state
