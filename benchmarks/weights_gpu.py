"""The fused GPU pass and the whole solve, on the GPU: correctness first, then bandwidth, then time to a certified gap.

python benchmarks/weights_gpu.py            # MNIST's and CIFAR-10's size, about 45 GB of GPU memory
python benchmarks/weights_gpu.py --quick    # the same at a hundredth of the size
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from synthetic import realistic

from robboost.weights import SolverSettings, solve, weight_problem
from robboost.weights.oracle import fast_pass, reference_pass

ROWS: list[str] = []


def say(*words: object) -> None:
    print(*words, flush=True)


def seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Median time of one call on the device, after one call that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def check(device: str) -> None:
    """The kernel against the float64 twin on fresh random inputs."""
    seed = int(time.time())
    torch.manual_seed(seed)
    worst = {False: 0.0, True: 0.0}
    for members, pairs, dim, dtype in (
        (12, 301, 784, torch.float16),
        (11, 65, 3072, torch.float16),
        (64, 20, 100, torch.bfloat16),
        (3, 50, 17, torch.float32),
    ):
        slopes = torch.randn(members, 2 * pairs, dim, device=device).to(dtype)[:, ::2]
        kinds = (
            (0.1, 0.01, False),
            (torch.rand(dim), 0.0, False),
            (torch.rand(pairs, dim), 0.01, True),
            (0.1, 0.0, True),
        )
        for radius, width, double in kinds:
            problem = weight_problem(slopes, torch.zeros(members, pairs), radius)
            a = torch.rand(members, dtype=torch.float64, device=device)
            a /= a.sum()
            fast, twin = fast_pass(problem, a, width, double=double), reference_pass(problem, a, width)
            scale = float(problem.columns(slice(0, pairs)).abs().sum(2).max())
            error = float((fast.norms - twin.norms).abs().max()) / scale
            # Without smoothing, rounding may decide a sign.
            if width > 0 or double:
                error = max(error, float((fast.slopes - twin.slopes).abs().max()) / scale)
            worst[double] = max(worst[double], error)
    say(
        f"seed {seed}: kernel against float64 twin, largest error / largest column: float32 sums {worst[False]:.1e}, "
        f"float64 sums {worst[True]:.1e}"
    )
    if not (worst[False] < 2e-5 and worst[True] < 2e-7):
        sys.exit("FAILED: the kernel disagrees with its twin")


def bandwidth(name: str, slopes: torch.Tensor) -> None:
    """A plain read of the same bytes, a copy, and the fused pass in its variants."""
    from plain_read import reader

    from robboost.weights.kernel_gpu import gpu_pass

    size = slopes.numel() * slopes.element_size()
    read = size / seconds(reader(slopes))
    summed = size / seconds(lambda: slopes.view(torch.int32).view(torch.float32).sum())
    part = slopes.view(-1)[: min(slopes.numel(), 2**31)]
    target = torch.empty_like(part)
    copied = 2 * part.numel() * part.element_size() / seconds(lambda: target.copy_(part))
    say(
        f"{name}: {size / 1e9:.1f} GB; TB/s: plain read {read / 1e12:.2f}, torch.sum {summed / 1e12:.2f}, "
        f"copy (both ways) {copied / 1e12:.2f}"
    )
    radius = torch.ones((), dtype=torch.float64, device=slopes.device)
    a = torch.full((slopes.shape[0],), 1.0 / slopes.shape[0], dtype=torch.float64, device=slopes.device)
    variants: list[tuple[int | None, int | None, bool]] = [
        (None, None, False),
        (1, 2048, False),
        (2, 4096, False),
        (4, 4096, False),
        (None, None, True),
        (2, 1024, True),
    ]
    for warps, tile, double in variants:
        took = seconds(partial(gpu_pass, slopes, radius, a, 1e-5, warps=warps, tile=tile, double=double), 5)
        label = "default" if warps is None else f"{warps} warps, tile {tile}"
        rate = size / took
        say(
            f"  fused pass, {label}, {'float64' if double else 'float32'} sums: {1e3 * took:.2f} ms, "
            f"{rate / 1e12:.2f} TB/s, {rate / read:.0%} of a plain read"
        )
        if warps is None:
            kind = "float64" if double else "float32"
            ROWS.append(
                f"{name:<8} pass, {kind} sums   {rate / 1e12:.2f} TB/s = {rate / read:.0%} of plain read "
                f"({read / 1e12:.2f})"
            )
    radius = torch.rand(slopes.shape[2], dtype=torch.float64, device=slopes.device)
    took = seconds(lambda: gpu_pass(slopes, radius, a, 1e-5), 5)
    say(f"  fused pass, default, radius per input: {1e3 * took:.2f} ms, {size / took / 1e12:.2f} TB/s")


def solve_to_proof(name: str, slopes: torch.Tensor, intercepts: torch.Tensor, device: str) -> None:
    """The whole solve, the proof included: the first call compiles; the others meet another loss (kappa)."""
    for label, kappa in (("first call, compiling", 0.7), ("kappa 1", 1.0), ("kappa 0.3", 0.3), ("kappa 1 again", 1.0)):
        problem = weight_problem(slopes, intercepts, 1.0, kappa=kappa)
        if device != "cpu":
            torch.cuda.synchronize()
        began = time.perf_counter()
        found = solve(problem, settings=SolverSettings(gap=1e-6))
        took = time.perf_counter() - began
        say(
            f"  {name}, {label}: {found.status}, gap {found.gap:.1e}, {took:.3f} s, {found.passes:.2f} passes, "
            f"loss {found.objective:.8g}, weights {[round(w, 3) for w in found.weights]}"
        )
        for step in found.history:
            say(
                f"      after {step.passes:.2f} passes, {step.seconds:.3f} s: loss {step.objective:.9g}, "
                f"bound {step.lower_bound:.9g}"
            )
        if label == "kappa 1 again":
            ROWS.append(
                f"{name:<8} certified gap {found.gap:.1e} in {took:.3f} s, {found.passes:.2f} passes, "
                f"{problem.nbytes / 1e9:.1f} GB"
            )


def profile(slopes: torch.Tensor, intercepts: torch.Tensor) -> None:
    """Where a warm solve spends its time, by function."""
    import cProfile
    import pstats

    problem = weight_problem(slopes, intercepts, 1.0)
    recorder = cProfile.Profile()
    recorder.enable()
    solve(problem)
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(14)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    if options.device != "cpu":
        say(torch.cuda.get_device_name(), torch.__version__)
        check(options.device)
    share = 100 if options.quick else 1
    for name, members, pairs, dim in (("MNIST", 12, 540_000, 784), ("CIFAR", 11, 450_000, 3072)):
        began = time.perf_counter()
        slopes, intercepts = realistic(members, pairs // share, dim, device=options.device, dtype=torch.float16)
        costs = float((intercepts.mean(0) < 1.0).double().mean())
        say(f"{name}: made in {time.perf_counter() - began:.1f} s; intercepts below 1: {costs:.0%}")
        if options.device != "cpu":
            bandwidth(name, slopes)
        solve_to_proof(name, slopes, intercepts, options.device)
        if options.profile:
            profile(slopes, intercepts)
        del slopes, intercepts
    say("-" * 78)
    for row in ROWS:
        say(row)


if __name__ == "__main__":
    main()
