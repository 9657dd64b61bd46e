"""The device that a user names, or the best there is."""

from __future__ import annotations

import torch

from robboost.errors import InputError

__all__ = ["usable_device"]


def usable_device(name: str | None) -> torch.device:
    """The device named, once it has held a tensor; None or "auto": a GPU if there is one, else the CPU."""
    if name is None or name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"device {name!r}: cannot be used here ({reason}); expected cpu, cuda or cuda:N") from None
    return device
