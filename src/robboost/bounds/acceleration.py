"""Whether the GPU kernels can serve a tensor; everywhere else plain PyTorch does the same."""

from __future__ import annotations

import os
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

__all__ = ["kernels_for"]


@cache
def _kernels() -> ModuleType | None:
    if os.environ.get("ROBBOOST_KERNELS", "1") == "0" or find_spec("triton") is None:
        return None
    return import_module("robboost.bounds.kernels")


@cache
def _interpreted() -> bool:
    """Triton's own switch: its interpreter runs the kernels on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The kernels, if these tensors lie on a GPU (or Triton interprets) and nothing has to be differentiated."""
    first = tensors[0]
    if not (first.is_cuda or _interpreted()) or first.numel() == 0:
        return None
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return None
    return _kernels()
