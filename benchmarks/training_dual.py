"""The kernels of the dual bound on a GPU: against their formulas in float64, and their time.

    python benchmarks/training_dual.py [--device cuda]

Time is that of one ReLU forward and backward, 31 columns for each of 64 images, against plain operations and autograd.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from robboost.training.dual_kernels import relax_rows, relu_estimated, relu_given
from robboost.training.dual_plain import LEAST, TINY, relaxation

Outputs = tuple[Tensor, ...]
PROJECTIONS, IMAGES, TARGETS = 31, 64, 9


@dataclass(frozen=True)
class Case:
    """Kernels, their formulas, and what both are called with: first what has a gradient, then what has none."""

    name: str
    kernels: Callable[..., Outputs]
    formulas: Callable[..., Outputs]
    moving: tuple[Tensor, ...]
    fixed: tuple[Tensor, ...] = ()

    def gradients(self, function: Callable[..., Outputs], where: torch.device, kind: torch.dtype) -> Outputs:
        """Outputs, and gradients of a fixed sum of them."""
        leaves = [value.float().to(where, kind).requires_grad_(True) for value in self.moving]
        outputs = function(*leaves, *(value.float().to(where, kind) for value in self.fixed))
        sides = [torch.linspace(0.5, 2, o.numel(), dtype=torch.float64).view(o.shape).to(where, kind) for o in outputs]
        return *(output.detach() for output in outputs), *torch.autograd.grad(outputs, leaves, sides)


def cases(shape: Sequence[int], images: int, layout: torch.memory_format) -> list[Case]:
    """Random numbers that lie in memory as convolutions leave them, no ReLU's interval close to a kink."""
    torch.manual_seed(0)

    def random(first: int, second: int = 1) -> Tensor:
        numbers = torch.randn(first * second, *shape, dtype=torch.float64)
        return (numbers.contiguous(memory_format=layout) if len(shape) == 3 else numbers).view(first, second, *shape)

    centre, radius, rows = 2 * random(images)[:, 0], random(1)[:, 0].abs(), random(images, TARGETS)
    columns, shared, fresh = random(PROJECTIONS, images), random(PROJECTIONS), random(PROJECTIONS)
    estimate = estimated_plain(centre, columns, fresh)[0]
    kinks = [centre, *(centre + side for side in (radius, -radius, estimate, -estimate))]
    centre = centre + 1e-3 * (torch.stack([kink.abs() for kink in kinks]).amin(0) < 1e-5)
    return [
        Case("estimated", relu_estimated, estimated_plain, (centre, columns), (fresh,)),
        Case("given", relu_given, given_plain, (centre, radius, columns), (fresh,)),
        Case("given, shared", relu_given, given_plain, (centre, radius, shared), (fresh,)),
        *(
            Case(
                f"rows, {rule}", partial(relax_rows, rule=rule), partial(rows_plain, rule=rule), (rows, centre, radius)
            )
            for rule in ("same-slope", "adaptive")
        ),
    ]


def estimated_plain(centre: Tensor, columns: Tensor, fresh: Tensor) -> Outputs:
    squares = columns * columns
    offset = (0.5 * torch.log(squares.detach() + TINY).mean(0)).exp().mul(0.5).clamp(min=LEAST)
    radius = ((0.5 * torch.log(squares + offset * offset).mean(0)).exp() - offset).clamp(min=0)
    slope, _, shift = relaxation(centre, radius, "same-slope")
    half = shift / 2
    return radius, centre * slope + half, torch.addcmul(fresh * half, columns, slope)


def given_plain(centre: Tensor, radius: Tensor, columns: Tensor, fresh: Tensor) -> Outputs:
    slope, _, shift = relaxation(centre, radius, "same-slope")
    half = shift / 2
    return centre * slope + half, torch.addcmul(fresh * half, columns, slope)


def rows_plain(rows: Tensor, centre: Tensor, radius: Tensor, rule: str) -> Outputs:
    low, up, shift = (part.unsqueeze(1) for part in relaxation(centre, radius, rule))
    negative = rows.clamp(max=0)
    return rows * low + negative * (up - low), (negative * shift).flatten(2).sum(2)


def check_dual_kernels(device: torch.device) -> None:
    """Values and gradients on the device against formulas and autograd in float64, relative to the largest number."""
    host = torch.device("cpu")
    for shape in ((100,), (8, 7, 7), (5, 9, 11), (16, 28, 28)):
        for layout in (torch.contiguous_format, torch.channels_last)[: 1 if len(shape) == 1 else 2]:
            worst = {}
            for case in cases(shape, 11, layout):
                found, again = (case.gradients(case.kernels, device, torch.float32) for _ in range(2))
                if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
                    raise SystemExit(f"{case.name}: the kernel does not repeat its results")
                wanted = case.gradients(case.formulas, host, torch.float64)
                pairs = [(a.cpu().double(), b) for a, b in zip(found, wanted, strict=True)]
                worst[case.name] = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
            print(f"dual kernels, {shape}, {layout}: {', '.join(f'{n} {g:.0e}' for n, g in worst.items())}", flush=True)
            if not max(worst.values()) < 1e-4:
                raise SystemExit("the kernel is wrong")


def microseconds(run: Callable[[], object], device: torch.device, times: int = 20) -> float:
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(parser.parse_args().device)
    check_dual_kernels(device)
    for shape in ((8, 7, 7), (16, 14, 14), (16, 28, 28)):
        for case in cases(shape, IMAGES, torch.channels_last):
            leaves = [value.float().to(device).requires_grad_(True) for value in case.moving]
            rest = [value.float().to(device) for value in case.fixed]
            sides = [output.detach() for output in case.kernels(*leaves, *rest)]

            def both(function: Callable[..., Outputs], leaves=leaves, rest=rest, sides=sides) -> None:  # type: ignore
                torch.autograd.grad(function(*leaves, *rest), leaves, sides)

            took = [microseconds(partial(both, function), device) for function in (case.kernels, case.formulas)]
            print(f"{shape}, {case.name}: {took[0]:.0f} us, plain operations {took[1]:.0f} us", flush=True)


if __name__ == "__main__":
    main()
