"""The GPU kernels of the backward pass: each against its twin in float64, then their time inside real calls, by shape.

    python benchmarks/bounds_kernels.py [--nets J,L,wk-small] [--shape mnist] [--images 1024]

Every call that a margin bound makes is timed by events around it, and summed by kernel and sizes.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict

import torch
import torch.nn.functional as F
from bounds import EPS, SHAPES

import robboost as rb
from robboost.bounds import kernels, kernels_conv
from robboost.models.architectures import build

# Outer and inner channels, kernel, stride, side of the operand, side of the result before cropping.
SIZES = (
    (16, 16, 3, 1, 7, 9),
    (8, 8, 3, 1, 5, 7),
    (32, 16, 4, 2, 3, 8),
    (16, 8, 4, 2, 7, 16),
    (8, 4, 4, 2, 7, 16),
    (8, 8, 4, 4, 7, 28),
    (16, 8, 2, 2, 14, 28),
    (4, 4, 5, 1, 9, 13),
    (8, 4, 3, 1, 28, 30),
    (8, 4, 5, 1, 28, 32),
    (13, 5, 3, 2, 6, 13),
    (64, 64, 3, 1, 4, 6),
    (16, 1, 4, 2, 14, 30),
    (8, 3, 5, 4, 6, 25),
)
KERNELS = ("transpose_conv", "relax", "reach", "place")


def check() -> None:
    """The convolutions as compiled, in both types, for sizes of networks and odd ones; then whole networks."""
    for dtype, room in ((torch.float32, 1e-6), (torch.float64, 1e-14)):
        worst = 0.0
        for outer, inner, kernel, stride, side, size in SIZES:
            values = torch.randn(37, outer, side, side, device="cuda", dtype=dtype)
            weight = torch.randn(outer, inner, kernel, kernel, device="cuda", dtype=dtype)
            exact = F.conv_transpose2d(values.double(), weight.double(), None, stride)
            exact = F.pad(exact, (0, size - exact.shape[3], 0, size - exact.shape[2]))
            sums = F.conv_transpose2d(values.double().abs(), weight.double().abs(), None, stride).max()
            for cut in (0, 1):
                side_out = (size - 2 * cut,) * 2
                packed = kernels.pack(weight)
                found = kernels_conv.transpose_conv(values, weight, (stride,) * 2, (cut,) * 2, side_out, packed)
                wanted = exact[:, :, cut : size - cut, cut : size - cut]
                worst = max(worst, float((found - wanted).abs().max() / sums))
        print(f"transposed convolution, {dtype}: largest error {worst:.1e} of the sum of magnitudes")
        if not worst < room:
            sys.exit("FAILED: the kernel is wrong")
    check_networks()


def check_networks(images: int = 1000) -> None:
    """Large jobs in float32 and float64 on the GPU against float64 on the CPU at some of their examples."""
    for name in ("A", "C", "E", "H", "J", "K", "L", "wk-small"):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.rand((images, 1, 28, 28), generator=generator), torch.randint(10, (images,), generator=generator)
        model, threat, some = build(name, (1, 28, 28), seed=1).eval(), rb.Threat(0.02), [0, images // 2, images - 1]
        exact = rb.margin_bounds(model, x[some], y[some], threat, precision="float64")
        scale = (exact.intercept.abs() + (exact.intercept - exact.lower).abs()).max()
        model.cuda()
        found = rb.margin_bounds(model, x.cuda(), y.cuda(), threat).lower[some].cpu()
        double = rb.margin_bounds(model, x[some].cuda(), y[some].cuda(), threat, precision="float64").lower.cpu()
        errors = [float((lower - exact.lower).abs().max() / scale) for lower in (found, double)]
        print(f"{name}: {images} images, off by {errors[0]:.0e} (float32), {errors[1]:.0e} (float64)", flush=True)
        if errors[0] > 1e-4 or errors[1] > 1e-11:
            sys.exit(f"FAILED: bounds of {name} are wrong")


class Timed:
    """Events around every call of the kernels while it is active."""

    def __init__(self) -> None:
        self.events: dict[tuple, list] = defaultdict(list)

    def __enter__(self) -> Timed:
        self.kept = {name: getattr(kernels, name) for name in KERNELS}
        for name, function in self.kept.items():
            setattr(kernels, name, self._around(name, function))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self.kept.items():
            setattr(kernels, name, function)

    def _around(self, name: str, function):
        def call(values, *rest):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            result = function(values, *rest)
            end.record()
            key, work = (name, tuple(values.shape[-3:])), values.numel() * 4
            if name == "transpose_conv":
                weight, stride, _, size, _ = rest
                key = (name, tuple(values.shape[1:]), tuple(weight.shape), stride, size)
                work = 2 * values.numel() * weight[0].numel()
            self.events[key].append((begin, end, work))
            return result

        return call

    def rows(self) -> list[tuple[float, int, float, tuple]]:
        torch.cuda.synchronize()
        found = []
        for key, events in self.events.items():
            spent = sum(begin.elapsed_time(end) for begin, end, _ in events) / 1e3
            found.append((spent, len(events), sum(work for *_, work in events) / spent, key))
        return sorted(found, reverse=True)


def measure(name: str, shape: str, images: int, shown: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand((images, *SHAPES[shape]), generator=generator).cuda()
    y = torch.randint(10, (images,), generator=generator).cuda()
    model, threat = build(name, SHAPES[shape], seed=1).eval().cuda(), rb.Threat(EPS[shape])
    rb.margin_bounds(model, x[:64], y[:64], threat)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rb.margin_bounds(model, x, y, threat)
    begin.record()
    rb.margin_bounds(model, x, y, threat)
    end.record()
    end.synchronize()
    total = begin.elapsed_time(end) / 1e3
    with Timed() as timed:
        rb.margin_bounds(model, x, y, threat)
    rows = timed.rows()
    by_kernel = {kernel: sum(row[0] for row in rows if row[3][0] == kernel) for kernel in KERNELS}
    shares = ", ".join(f"{kernel} {1e3 * spent:.1f}" for kernel, spent in by_kernel.items())
    print(f"{shape} {name}: {images / total:.0f} images/s; of {1e3 * total:.1f} ms: {shares}", flush=True)
    for spent, calls, rate, key in rows[:shown]:
        unit = f"{rate / 1e12:6.2f} TFLOP/s" if key[0] == "transpose_conv" else f"{rate / 1e9:6.0f} GB/s read"
        print(f"   {1e3 * spent:8.2f} ms {calls:5} calls {unit}  {' '.join(map(str, key))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="wk-small,J,L")
    parser.add_argument("--shape", default="mnist")
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--shown", type=int, default=8)
    args = parser.parse_args()
    check()
    for name in args.nets.split(","):
        measure(name, args.shape, args.images, args.shown)


if __name__ == "__main__":
    main()
