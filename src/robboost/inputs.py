"""Examples and labels as a user hands them in, checked once and put where the model is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robboost.errors import InputError

__all__ = ["Progress", "check_examples", "check_pool", "in_float64"]

ArrayLike = Tensor | np.ndarray[Any, Any]
# Called with what is being done, steps done and steps in all.
Progress = Callable[[str, int, int], None]


def check_examples(model: nn.Module, x: ArrayLike, y: ArrayLike) -> tuple[Tensor, Tensor]:
    """Images [N, *input] in the model's precision and labels [N], on the model's device.

    Runs the model on one example: a shape that does not fit, and labels outside its classes, are named before any long
    work starts.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}: expected a torch.nn.Module (load files with load_model)")
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    images, labels = _images(x, like), _labels(y, like.device)
    if len(images) != len(labels):
        raise InputError(f"{len(images)} images and {len(labels)} labels: expected one label for each image")
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            logits = model(images[:1])
    except (RuntimeError, ValueError, TypeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"model does not take images of shape {list(images.shape[1:])}: {reason}") from None
    finally:
        for module in training:
            module.training = True
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] < 2:
        raise InputError(f"model gives {_shape(logits)} for one image: expected logits [1, classes], two or more")
    if int(labels.min()) < 0 or int(labels.max()) >= logits.shape[1]:
        raise InputError(
            f"labels reach from {int(labels.min())} to {int(labels.max())}: expected 0 to {logits.shape[1] - 1}, the"
            " classes of the model"
        )
    return images, labels


def check_pool(pool: Sequence[nn.Module], x: ArrayLike, y: ArrayLike, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The same for every member; an error names the member, and classes must agree."""
    if not pool:
        raise InputError("pool is empty: expected at least one member")
    classes: dict[int, str] = {}
    for member, name in zip(pool, names, strict=True):
        try:
            images, labels = check_examples(member, x, y)
        except InputError as error:
            raise InputError(f"member {name}: {error}") from None
        with torch.no_grad():
            classes.setdefault(member(images[:1]).shape[1], name)
    if len(classes) > 1:
        (first, a), (second, b) = list(classes.items())[:2]
        raise InputError(f"member {a} has {first} classes and member {b} {second}: expected the same for all")
    return images, labels


def in_float64(model: nn.Module) -> nn.Module:
    """A float64 copy in evaluation mode: what attacks and certificates are judged by."""
    return copy.deepcopy(model).to(torch.float64).eval()


def _images(x: ArrayLike, like: Tensor) -> Tensor:
    try:
        images = torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"x is a {type(x).__name__}: expected images [N, *input] as a tensor or array") from None
    if images.ndim < 2 or len(images) == 0:
        raise InputError(f"x has shape {list(images.shape)}: expected at least one image, [N, *input]")
    if not images.is_floating_point():
        raise InputError(f"x is {images.dtype}: expected floating point in the range of the network's input (x / 255?)")
    if not bool(torch.isfinite(images).all()):
        raise InputError("x holds NaN or infinity: expected finite pixels")
    return images.to(device=like.device, dtype=like.dtype)


def _labels(y: ArrayLike, device: torch.device) -> Tensor:
    try:
        labels = torch.as_tensor(y)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"y is a {type(y).__name__}: expected class numbers [N] as a tensor or array") from None
    if labels.ndim != 1 or labels.is_floating_point() or labels.dtype == torch.bool:
        raise InputError(f"y is {labels.dtype} of shape {list(labels.shape)}: expected class numbers [N]")
    return labels.to(device=device, dtype=torch.int64)


def _shape(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
