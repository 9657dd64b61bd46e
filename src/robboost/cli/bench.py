"""bench: how fast this machine is at what RobBoost does."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
import typer

from robboost.bounds import margin_bounds
from robboost.cli.console import show
from robboost.cli.options import JsonOption, ThreadsOption, set_threads
from robboost.devices import usable_device
from robboost.errors import InputError
from robboost.models.architectures import build
from robboost.threat import Threat
from robboost.weights import solve_weights

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(bench)


def bench(
    architecture: Annotated[str, typer.Option("--architecture", help="A name or a structure text.")] = "A",
    input_shape: Annotated[str, typer.Option("--input-shape", help="Shape of an image.")] = "1,28,28",
    images: Annotated[int, typer.Option("--images", help="Images in a batch.")] = 32,
    pairs: Annotated[int, typer.Option("--pairs", help="(image, target) pairs for the solver.")] = 2000,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, ...")] = "cpu",
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measure bounds (images/s, random weights) and the weight solver on this machine, on random numbers."""
    set_threads(threads)
    if images < 1 or pairs < 1:
        raise InputError(f"--images {images} --pairs {pairs}: expected at least 1")
    chosen = usable_device(device)
    try:
        shape = tuple(int(side) for side in input_shape.split(","))
    except ValueError:
        raise InputError(f"--input-shape {input_shape}: expected sides with commas between them") from None
    generator = torch.Generator().manual_seed(0)
    network = build(architecture, shape, seed=0).eval().to(chosen)
    x = torch.rand(images, *shape, generator=generator).to(chosen)
    y = torch.zeros(images, dtype=torch.int64, device=chosen)
    rates = {
        method: images / _seconds(partial(margin_bounds, network, x, y, Threat(0.1, clip=(0, 1)), method))
        for method in ("ibp", "crown-ibp", "same-slope", "crown")
    }
    slopes = torch.randn(8, pairs, x[0].numel(), generator=generator).to(chosen)
    intercepts = 1 + 0.3 * torch.randn(8, pairs, generator=generator, dtype=torch.float64).to(chosen)
    began = time.perf_counter()
    solution = solve_weights(slopes, intercepts, 1 / x[0].numel())
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {chosen}, {torch.get_num_threads()} threads",
        "network": f"{architecture} on {input_shape}",
        "images_per_second": {method: round(rate, 2) for method, rate in rates.items()},
        "solver": {"pairs": pairs, "seconds": round(seconds, 3), "passes": solution.passes, "gap": solution.gap},
    }
    lines = [result["machine"], result["network"]]
    lines += [f"  {method:<12} {rate:>10.1f} images/s" for method, rate in rates.items()]
    lines.append(f"  solver       {seconds:>10.2f} s for {pairs} pairs x 8 members, gap {solution.gap:.1e}")
    show(result if as_json else "\n".join(lines), as_json)


def _seconds(work: Callable[[], Any]) -> float:
    """Best of a few calls after a first one that traces and warms up."""
    work()
    best = float("inf")
    for _ in range(3):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best
