"""The public edge: from a network, images and a threat to proved linear margins."""

from __future__ import annotations

import html
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from robboost.bounds.arithmetic import full_precision
from robboost.bounds.budget import Budget
from robboost.bounds.engine import Problem
from robboost.bounds.methods import METHODS, TIGHTEST, propagate, tightest
from robboost.bounds.network import Network
from robboost.errors import InputError
from robboost.models.graph import trace
from robboost.threat import Threat

__all__ = ["MarginBounds", "Options", "margin_bounds"]

Precision = Literal["float32", "float64"]


@dataclass(frozen=True)
class Options:
    """What is rarely changed.

    Args:
        iterations: gradient steps of "alpha-crown".
        parts: the methods that "tightest" chooses from.
        memory: bytes that a call may use for intermediate tensors; None: a share of what is free on the device.
    """

    iterations: int = 20
    parts: tuple[str, ...] = TIGHTEST
    memory: int | None = None


@dataclass(frozen=True)
class MarginBounds:
    """Proved linear lower bounds: margin_j(x + d) >= <slope_j, d> + intercept_j for every x + d of the threat set.

    margin_j is the logit of the true class minus that of the j-th other class, in class order.

    Attributes:
        slope: [N, C-1, *input].
        intercept: [N, C-1]; the value at d = 0.
        lower: [N, C-1], the minimum of the right side over the set (paper, equation 4 without the division by a scale).
        method: the method asked for.
        precision: "float32" or "float64", of all arithmetic. Proved for real arithmetic; rounding is not enclosed, and
            is of the order of 1e-6 (float32) or 1e-15 (float64) times the size of the sums.
        box_used: whether the bounds hold on the ball cut by the box (True) or on the whole ball (False).
        winner: [N, C-1], for "tightest" the position in `parts` of the method that won; None otherwise.
        parts: the methods compared by "tightest"; empty otherwise.
    """

    slope: Tensor
    intercept: Tensor
    lower: Tensor
    method: str
    precision: Precision
    box_used: bool
    winner: Tensor | None = None
    parts: tuple[str, ...] = ()

    def to_numpy(self) -> dict[str, np.ndarray[Any, Any]]:
        """Slope, intercept and lower as arrays, without their graph."""
        tensors = {"slope": self.slope, "intercept": self.intercept, "lower": self.lower}
        return {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}

    def __str__(self) -> str:
        images, targets = self.lower.shape
        positive = int((self.lower > 0).all(1).sum())
        box = "within the box" if self.box_used else "without a box"
        return (
            f"margins of {images} images against {targets} targets each, {self.method}, {self.precision}, {box}:"
            f" all above zero for {positive}, lowest {float(self.lower.min()) if images else float('nan'):.4g}"
        )

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def margin_bounds(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    method: str = "crown",
    *,
    precision: Precision = "float32",
    differentiable: bool = False,
    options: Options | None = None,
) -> MarginBounds:
    """Linear lower bounds of the margins of `model` around each image, on the whole threat set (Proposition 3.1).

    Args:
        model: any deterministic module in evaluation mode, made of operations that have a bound rule.
        x: images [N, *input], float32 or float64, finite, and within the threat's box where it has one.
        y: labels [N], int64.
        threat: the set around each image.
        method: "ibp", "crown-ibp", "same-slope", "crown", "alpha-crown" or "tightest".
        precision: arithmetic of the whole call, whatever the global TF32 and autocast settings are.
        differentiable: keep the graph, so that slope, intercept and lower carry gradients to the model's parameters.
        options: see `Options`.

    Guaranteed: the bounds hold for real arithmetic on the parameters given; eps = 0 gives the margins of the logits.
    Not guaranteed: an enclosure of float rounding (see `MarginBounds.precision`).
    """
    options = options or Options()
    _check_method(method, precision, options)
    _check_images(x, y, threat)
    dtype = torch.float64 if precision == "float64" else torch.float32
    graph = trace(model, tuple(x.shape[1:]))
    _check_labels(y, graph.classes)
    # Inference mode would forbid the gradients that optimised slopes are found with.
    with full_precision(), torch.inference_mode(False), nullcontext() if differentiable else torch.no_grad():
        network = Network.build(graph, model, dtype)
        _check_network(network, x)
        images = x.clone().to(dtype) if x.is_inference() else x.to(dtype)
        copies = 8 if "alpha-crown" in (method, *options.parts) else 0
        budget = Budget.of(network, dtype, x.device, options.memory, copies)
        found = _Collected(len(x))
        for start in range(0, len(x), budget.examples):
            part = slice(start, start + budget.examples)
            region = threat.region(images[part])
            problem = Problem.of(network, images[part], y[part].long(), region, threat.norm, budget.elements)
            found.add(start, _one_chunk(problem, method, options))
    slope, intercept, lower, *winner = found.whole()
    parts = options.parts if method == "tightest" else ()
    return MarginBounds(
        slope, intercept, lower, method, precision, threat.box_used, winner[0] if winner else None, parts
    )


class _Collected:
    """The results of the chunks; written into place unless gradients have to flow, so that memory is not doubled."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.parts: list[list[Tensor]] = []
        self.filled: list[Tensor] = []

    def add(self, start: int, result: list[Tensor]) -> None:
        if torch.is_grad_enabled() or len(result[0]) == self.count:
            self.parts.append(result)
            return
        if not self.filled:
            self.filled = [part.new_empty((self.count, *part.shape[1:])) for part in result]
        for whole, part in zip(self.filled, result, strict=True):
            whole[start : start + len(part)] = part

    def whole(self) -> list[Tensor]:
        if self.filled:
            return self.filled
        return self.parts[0] if len(self.parts) == 1 else [torch.cat(found) for found in zip(*self.parts, strict=True)]


def _one_chunk(problem: Problem, method: str, options: Options) -> list[Tensor]:
    """Slope, intercept and lower of the chunk, and for "tightest" the winners."""
    if method != "tightest":
        return list(propagate(problem, method, options.iterations))
    best, winner = tightest([propagate(problem, part, options.iterations) for part in options.parts])
    return [*best, winner]


def _check_method(method: str, precision: str, options: Options) -> None:
    if method not in METHODS:
        raise InputError(f"method={method!r}: expected one of {', '.join(map(repr, METHODS))}")
    if precision not in ("float32", "float64"):
        raise InputError(f"precision={precision!r}: expected 'float32' or 'float64'")
    wrong = [part for part in options.parts if part not in METHODS or part == "tightest"]
    if wrong or not options.parts:
        raise InputError(f"parts={options.parts!r}: expected one or more methods other than 'tightest'")
    if options.iterations < 0:
        raise InputError(f"iterations={options.iterations}: expected zero or more")


def _check_images(x: Tensor, y: Tensor, threat: Threat) -> None:
    if not isinstance(threat, Threat):
        raise InputError(f"threat is a {type(threat).__name__}, expected a robboost.Threat")
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.float64):
        kind = str(x.dtype) if isinstance(x, Tensor) else type(x).__name__
        raise InputError(f"x is {kind}, expected a tensor of float32 or float64 images (divide 8-bit pixels by 255)")
    if x.dim() < 2 or len(x) == 0:
        raise InputError(f"x has shape {list(x.shape)}, expected [N, *input] with at least one image")
    if not isinstance(y, Tensor) or y.dtype not in (torch.int64, torch.int32, torch.uint8) or y.shape != x.shape[:1]:
        kind = f"{y.dtype} {list(y.shape)}" if isinstance(y, Tensor) else type(y).__name__
        raise InputError(f"y is {kind}, expected {len(x)} integer labels, one for each image")
    if not bool(torch.isfinite(x).all()):
        raise InputError("x holds NaN or infinite pixels, expected finite ones")
    if threat.clip is not None:
        lo, hi = threat.clip
        low, high = float(x.min()), float(x.max())
        if low < lo or high > hi:
            raise InputError(
                f"x has pixels from {low:g} to {high:g}, expected them within the threat's box [{lo:g}, {hi:g}]"
            )


def _check_labels(y: Tensor, classes: int) -> None:
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise InputError(f"y holds labels from {int(y.min())} to {int(y.max())}, expected 0 to {classes - 1}")


def _check_network(network: Network, x: Tensor) -> None:
    for node in network.nodes:
        for value in (node.weight, node.bias, node.scale, node.shift):
            if isinstance(value, Tensor):
                if value.device != x.device:
                    raise InputError(f"the model is on {value.device} and x on {x.device}, expected one device")
                if not bool(torch.isfinite(value).all()):
                    raise InputError("the model holds NaN or infinite parameters, expected finite ones")
