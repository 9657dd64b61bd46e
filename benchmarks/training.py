"""Seconds an epoch for a pool of interval-trained members, against a plain PyTorch loop in the same run.

    python benchmarks/training.py [--device cuda] [--images 55000] [--profile]
    python benchmarks/training.py --recipes mnist-0.2,cifar10-2-255 [--profile]     seconds an epoch of pools that ship

The images are random: time does not depend on them. The plain loop is what one writes first: a module, lower and upper
bounds, autograd, `torch.optim.Adam`, one member after another, everything on the device. On a GPU the run first checks
that recorded and plain steps, and GPU kernels and their formulas, agree.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from training_dual import check_dual_kernels

from robboost.models.architectures import PAPER_MNIST, Residual, build
from robboost.training import TrainConfig
from robboost.training.adam import AdamState, adam_step
from robboost.training.config import load_pool
from robboost.training.first_convolution import first_convolution
from robboost.training.kernels import interval_relu
from robboost.training.member import DeviceData, Member
from robboost.training.network import BN_EPS
from robboost.training.normalisation import normalisation, scaled, scaled_interval
from robboost.training.precision import fast_training, full_float32
from robboost.training.turns import Turns

DEEP = "conv 32 3x3/1, conv 32 4x4/2, conv 64 3x3/1, conv 64 4x4/2, conv 64 3x3/1, conv 64 4x4/2, fc 256"
STRIDED = "conv 32 4x4/2, conv 64 3x3/1, conv 64 4x4/2, conv 64 3x3/1, conv 64 4x4/2, fc 256"


def plain_bounds(layers: nn.Sequential, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            centre, radius = (lower + upper) / 2, (upper - lower) / 2
            middle = layer(centre)
            if isinstance(layer, nn.Conv2d):
                width = F.conv2d(radius, layer.weight.abs(), stride=layer.stride, padding=layer.padding)
            else:
                width = F.linear(radius, layer.weight.abs())
            lower, upper = middle - width, middle + width
        elif isinstance(layer, Residual):
            inner = plain_bounds(layer.body, lower, upper)
            side = plain_bounds(nn.Sequential(layer.skip), lower, upper)
            lower, upper = torch.relu(inner[0] + side[0]), torch.relu(inner[1] + side[1])
        else:
            lower, upper = layer(lower), layer(upper)
    return lower, upper


def plain_epoch_seconds(structure: str, data: DeviceData, batch: int, steps: int) -> float:
    """An epoch of the plain loop, from `steps` timed steps."""
    device = data.images.device
    model = build(structure, data.input_shape, seed=0).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    images = data.images.permute(0, 3, 1, 2).contiguous()
    order = torch.randperm(len(images), device=device)
    seconds = 0.0
    for step in range(steps + 3):
        if step == 3:
            synchronize(device)
            seconds = -time.perf_counter()
        chosen = order[(step * batch) % (len(images) - batch) :][:batch]
        x, y = images[chosen], data.labels[chosen]
        lower, upper = plain_bounds(model, (x - 0.1).clamp(min=0), (x + 0.1).clamp(max=1))
        worst = torch.where(F.one_hot(y, 10).bool(), lower, upper)
        loss = F.cross_entropy(worst, y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10)
        optimizer.step()
    synchronize(device)
    return (seconds + time.perf_counter()) / steps * (len(images) // batch)


def pool_epoch_seconds(configs: list[TrainConfig], data: DeviceData, streams: int, steps: int) -> float:
    """An epoch of the pool, from `steps` timed turns of every member."""
    members = [Member(config, data) for config in configs]
    turns = Turns(members, streams=streams, capture=True)
    for member in members:
        turns.begin_epoch(member, 0)
    seconds = 0.0
    for step in range(steps + 3):
        if step == 3:
            turns.synchronize()
            seconds = -time.perf_counter()
        for member in members:
            turns.step(member)
    turns.synchronize()
    return (seconds + time.perf_counter()) / steps * members[0].steps_per_epoch


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gap(function: Callable[..., Tensor | tuple[Tensor, ...]], tensors: list[Tensor], device: torch.device) -> float:
    """Largest difference of outputs, and gradients of what needs them, to the same in float64 on the CPU."""
    results: list[list[Tensor]] = []
    for kind, where in ((torch.float32, device), (torch.float64, torch.device("cpu"))):
        inputs = [t.detach().to(where, kind).requires_grad_(t.requires_grad) for t in tensors]
        found = function(*inputs)
        outputs = (found,) if isinstance(found, Tensor) else found
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(o.shape, generator=generator).to(where, kind) for o in outputs]
        total = sum((o * w).sum() for o, w in zip(outputs, weights, strict=True) if o.requires_grad)
        gradients = torch.autograd.grad(total, [t for t in inputs if t.requires_grad])
        results.append([t.detach().cpu().double() for t in (*outputs, *gradients)])
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(*results, strict=True))


def judge(name: str, gaps: list[float], allowed: float = 1e-5) -> None:
    print(f"{name}: largest difference to float64 {max(gaps):.1e} in {len(gaps)} cases", flush=True)
    if not all(found < allowed for found in gaps):
        raise SystemExit("the kernel is wrong")


def on_a_grid(values: Tensor, digits: int) -> Tensor:
    """Multiples of 2^-digits: with a shift off the grid no value behind the scale is 0, where a ReLU's slope jumps."""
    return (values * 2**digits).round() / 2**digits


def check_kernels(device: torch.device) -> None:
    """Every kernel of a step on the device against its formula in float64, values and gradients."""
    torch.manual_seed(0)
    gaps: dict[str, list[float]] = {}
    for channels, layout in itertools.product((1, 5, 32, 48, 130), (torch.contiguous_format, torch.channels_last)):
        shape = (64, channels, 28, 28) if channels == 32 else (7, channels, 9, 11)
        ends = [on_a_grid(torch.randn(shape), 8), on_a_grid(torch.rand(shape), 8)]
        ends = [t.contiguous(memory_format=layout).requires_grad_(True) for t in ends]
        pair = [on_a_grid(torch.randn(channels), 4), on_a_grid(torch.randn(channels), 12) + 2**-13]
        cases: list[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]], list[Tensor]]] = []
        for relu, trained in itertools.product((False, True), repeat=2):
            both = [t.clone().requires_grad_(trained) for t in pair]
            name = f"{'trained' if trained else 'fixed'} scale{' and ReLU' if relu else ''}"
            cases.append((f"interval, {name}", partial(scaled_interval, relu=relu), [*ends, *both]))
            cases.append((f"points, {name}", partial(scaled, relu=relu), [ends[0], *both]))
        weights = [t.clone().requires_grad_(True) for t in pair]
        cases.append(("normalisation", partial(normalisation, eps=BN_EPS), [ends[0], *weights]))
        apart = (ends[0] + 2**-9).detach().requires_grad_(True)
        cases.append(("interval ReLU", interval_relu, [apart, ends[1]]))
        for name, function, tensors in cases:
            gaps.setdefault(name, []).append(gap(function, tensors, device))
    for name, found in gaps.items():
        judge(name, found)
    check_first_convolution(device)
    check_adam(device)


def check_first_convolution(device: torch.device) -> None:
    gaps = []
    for channels, outer, kernel, stride in ((1, 32, 3, 1), (3, 32, 4, 2), (3, 70, 5, 1), (1, 4, 4, 2), (4, 16, 3, 1)):
        image, weight = torch.rand(64, channels, 28, 28), torch.randn(outer, kernel, kernel, channels)
        tensors = [image, weight.permute(0, 3, 1, 2).requires_grad_(True)]
        with full_float32():
            convolution = partial(first_convolution, bias=None, stride=stride, padding=kernel // 2)
            gaps.append(gap(convolution, tensors, device))
    judge("first convolution", gaps, allowed=1e-4)


def check_adam(device: torch.device) -> None:
    """Three steps on the device against PyTorch's operations in float64."""
    results = []
    for kind, where in ((torch.float32, device), (torch.float64, torch.device("cpu"))):
        generator = torch.Generator().manual_seed(2)
        flat = torch.randn(360_001, generator=generator).to(where, kind)
        state = AdamState(flat, flat.clone(), torch.zeros_like(flat), torch.zeros_like(flat))
        for averaging in (1.0, 0.1, 0.7):
            gradient = torch.randn(len(flat), generator=generator).to(where, kind)
            adam_step(state, gradient, gradient.norm(), torch.tensor([0.01, 20.0, averaging]).to(flat), clip_norm=5.0)
        results.append([t.cpu().double() for t in state])
    judge("Adam", [float((a - b).abs().max()) for a, b in zip(*results, strict=True)])
    check_dual_kernels(device)


def check_recording(data: DeviceData) -> None:
    """Thirty recorded steps against thirty plain ones, members side by side."""
    configs = [
        TrainConfig("K", train_eps=0.1, batch_norm=True, warmup=0, ramp=0.1, epochs=1, clip_norm=1, average=0.9),
        TrainConfig("A", method="mtl-ibp", mixture=0.5, shift=1, warmup=0, ramp=0.1, epochs=1, batch_norm=True),
        TrainConfig("A", method="crown-ibp", mixture=0.5, warmup=0, ramp=0.1, epochs=1, batch_norm=True),
        TrainConfig("B", method="sabr", attack_steps=2, warmup=0, ramp=0.1, epochs=1, seed=3),
        TrainConfig("A", method="wong-kolter", batch=64, warmup=0, ramp=0.1, epochs=1, init="default"),
        TrainConfig("K", method="wong-kolter", batch=64, projections=31, warmup=0, ramp=0.1, epochs=1, init="default"),
    ]
    flats = []
    for capture in (False, True):
        members = [Member(config, data) for config in configs]
        turns = Turns(members, streams=3, capture=capture)
        for member in members:
            turns.begin_epoch(member, 0)
        for _ in range(30):
            for member in members:
                turns.step(member)
        turns.synchronize()
        flats.append([torch.cat([m.flat.detach(), m.average, m.log[0]]) for m in members])
    for config, plain, recorded in zip(configs, *flats, strict=True):
        apart = float((plain - recorded).abs().max())
        print(f"recorded against plain steps, {config.label}: largest difference {apart:.1e}")
        if not apart < 1e-3:
            raise SystemExit("recorded steps are wrong")


def measure_recipe(name: str, device: torch.device, options: argparse.Namespace) -> None:
    """Seconds an epoch of a pool file, and of the first member of each method by itself; kernels on request."""
    pool = load_pool(name)
    channels, side = (3, 32) if pool.dataset == "cifar10" else (1, 28)
    count = min(options.images, 45_000 if pool.dataset == "cifar10" else 55_000)
    images, labels = torch.rand(count, channels, side, side), torch.randint(10, (count,))
    configs = [member.with_epochs(2) for member in pool.members]
    data = DeviceData.of(images, labels, pad=max(c.shift for c in configs), classes=10, device=device)
    took = pool_epoch_seconds(configs, data, 8, options.steps)
    print(f"{name}: {len(configs)} members, {took:.2f} seconds an epoch", flush=True)
    for config in {(c.method, c.architecture): c for c in configs}.values() if options.profile else ():
        alone = pool_epoch_seconds([config], data, 1, options.steps)
        print(f"  {config.label}, {config.method}, alone: {alone:.2f} seconds an epoch", flush=True)
        if config.method != "wong-kolter":
            profile(config, data, shown=12)


def profile(config: TrainConfig, data: DeviceData, shown: int = 22) -> None:
    """The kernels of ten plain steps, longest first."""
    member = Member(config, data)
    turns = Turns([member], streams=1, capture=False)
    turns.begin_epoch(member, 0)
    for _ in range(3):
        turns.step(member)
    turns.synchronize()
    with torch.profiler.profile() as result:
        for _ in range(10):
            turns.step(member)
        turns.synchronize()
    events = [e for e in result.key_averages() if str(e.device_type).endswith("CUDA")]
    events.sort(key=lambda e: -e.self_device_time_total)
    total, count = sum(e.self_device_time_total for e in events) / 10, sum(e.count for e in events) / 10
    print(f"profile of {config.architecture}: {total:.0f} us and {count:.0f} kernels a step")
    for event in events[:shown]:
        print(f"  {event.self_device_time_total / 10:7.1f} us {event.count / 10:5.1f}x  {event.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=55_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--recipes", default="", help="only time these pool files or recipes")
    options = parser.parse_args()
    device = torch.device(options.device)
    images, labels = torch.rand(options.images, 1, 28, 28), torch.randint(10, (options.images,))
    data = DeviceData.of(images, labels, pad=1, classes=10, device=device)
    bare = DeviceData.of(images, labels, pad=0, classes=10, device=device)
    with fast_training():
        if device.type == "cuda":
            check_kernels(device)
            check_recording(data)
        if options.recipes:
            for name in options.recipes.split(","):
                measure_recipe(name, device, options)
            return
        pools = {
            "paper A-L": ([*PAPER_MNIST], False),
            "paper A-L, batch norm": ([*PAPER_MNIST], True),
            "7 deep, batch norm": ([DEEP] * 7, True),
            "7 deep": ([DEEP] * 7, False),
            "7 strided, batch norm": ([STRIDED] * 7, True),
        }
        dual = {"method": "wong-kolter", "projections": 31, "batch": 64, "init": "default", "epochs": 2}
        for name, (structures, batch_norm) in pools.items():
            shared = {"batch": options.batch, "batch_norm": batch_norm, "epochs": 2}
            configs = [TrainConfig(s, seed=i, **shared) for i, s in enumerate(structures)]
            counts = (1, 8) if name == "7 deep, batch norm" else (8,)
            times = {n: pool_epoch_seconds(configs, bare, n, options.steps) for n in counts}
            line = ", ".join(f"{n} streams {t:.2f}" for n, t in times.items())
            if not batch_norm:
                plain = sum(plain_epoch_seconds(s, bare, options.batch, options.steps) for s in structures)
                line += f"; plain loop {plain:.2f}: {plain / min(times.values()):.1f} times as long"
            memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            print(f"{name}, seconds an epoch: {line} (at most {memory:.1f} GiB)", flush=True)
        if device.type == "cuda":
            configs = [TrainConfig(s, seed=i, **dual) for i, s in enumerate(PAPER_MNIST)]
            seconds = pool_epoch_seconds(configs, bare, 8, options.steps)
            print(f"paper A-L, wong-kolter, 31 projections, batch 64, seconds an epoch: {seconds:.2f}", flush=True)
        if options.profile:
            profile(TrainConfig(DEEP, batch=options.batch, batch_norm=True, epochs=2), bare)


if __name__ == "__main__":
    main()
