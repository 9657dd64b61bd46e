"""Full-precision arithmetic whatever the caller's TF32, autocast and matmul-precision settings say."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["full_precision"]

_LOCK = threading.Lock()
_STATE: dict[str, Any] = {"depth": 0, "saved": []}


def _settings() -> list[tuple[Any, str, Any]]:
    """(holder, attribute, value for full precision) of every switch that lowers float32 arithmetic."""
    b: Any = torch.backends
    if hasattr(b.cuda.matmul, "fp32_precision"):  # PyTorch 2.9 and later; the older switches read these
        holders = [b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
        return [(holder, "fp32_precision", "ieee") for holder in holders]
    return [(b.cuda.matmul, "allow_tf32", False), (b.cudnn, "allow_tf32", False)]


def _enter() -> None:
    with _LOCK:
        if _STATE["depth"] == 0:
            settings = _settings()
            saved = [(holder, name, getattr(holder, name)) for holder, name, _ in settings]
            legacy = not hasattr(torch.backends.cuda.matmul, "fp32_precision")
            _STATE["saved"] = saved
            _STATE["matmul"] = torch.get_float32_matmul_precision() if legacy else None
            for holder, name, value in settings:
                setattr(holder, name, value)
            if legacy:
                torch.set_float32_matmul_precision("highest")
        _STATE["depth"] += 1


def _leave() -> None:
    with _LOCK:
        _STATE["depth"] -= 1
        if _STATE["depth"] == 0:
            if _STATE["matmul"] is not None:
                torch.set_float32_matmul_precision(_STATE["matmul"])
            for holder, name, value in _STATE["saved"]:
                setattr(holder, name, value)


@contextmanager
def full_precision() -> Iterator[None]:
    """Within it float32 products are float32 products; the caller's settings come back at the end, also on an error.

    The switches are global to the process: the last of several threads inside puts the settings back.
    """
    _enter()
    try:
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            yield
    finally:
        _leave()
