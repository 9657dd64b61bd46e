"""Full-precision arithmetic whatever the caller's TF32, autocast and matmul-precision settings say."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["full_precision"]

_LOCK = threading.Lock()
_STATE: dict[str, Any] = {"depth": 0, "saved": []}


def _attribute(holder: Any, name: str, value: Any) -> tuple[Callable[[], Any], Callable[[Any], None], Any]:
    return (lambda: getattr(holder, name)), (lambda chosen: setattr(holder, name, chosen)), value


def _switches() -> list[tuple[Callable[[], Any], Callable[[Any], None], Any]]:
    """(read, write, value for full precision) of every switch that lowers float32 arithmetic, older ones first.

    PyTorch 2.9 and later keeps newer switches beside the older ones, and refuses to read an older one that disagrees:
    both are set, so that whatever else runs meanwhile can read either.
    """
    b: Any = torch.backends
    # In this order: the second of them also writes what the third one reads.
    older = [
        _attribute(b.cudnn, "allow_tf32", False),
        _attribute(b.cuda.matmul, "allow_tf32", False),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    ]
    if not hasattr(b.cuda.matmul, "fp32_precision"):
        return older
    holders = [b.cuda.matmul, b.cudnn.conv, b.cudnn.rnn, b.mkldnn.matmul, b.mkldnn.conv, b.mkldnn.rnn]
    return older + [_attribute(holder, "fp32_precision", "ieee") for holder in holders]


def _read(switch: Callable[[], Any]) -> list[Any]:
    """The switch's value; none where older and newer switches disagree already and the caller cannot read it either."""
    try:
        return [switch()]
    except RuntimeError:
        return []


def _enter() -> None:
    with _LOCK:
        if _STATE["depth"] == 0:
            switches = _switches()
            _STATE["saved"] = [(write, value) for read, write, _ in switches for value in _read(read)]
            for _, write, value in switches:
                write(value)
        _STATE["depth"] += 1


def _leave() -> None:
    with _LOCK:
        _STATE["depth"] -= 1
        if _STATE["depth"] == 0:
            for write, value in _STATE["saved"]:
                write(value)


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
