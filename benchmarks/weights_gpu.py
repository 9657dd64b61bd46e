"""The fused GPU pass and the whole solve, on the GPU: correctness first, then bandwidth, then time to a certified gap.

    PYTHONPATH=src:tests python benchmarks/weights_gpu.py                # all parts, about 45 GB of GPU memory
    PYTHONPATH=src:tests python benchmarks/weights_gpu.py --quick        # the same at a hundredth of the size
    PYTHONPATH=src:tests python benchmarks/weights_gpu.py --part check   # what tests marked gpu check, without pytest

Parts: "check", the kernel against its float64 twin and the solver on the GPU against the CPU's; "mnist" and "cifar",
random numbers with the structure of real slopes at these sizes; "real", bounds that the engine computes on this GPU for
the demo pool on shifted copies of the embedded MNIST images. Needs torch, triton, numpy and safetensors
alone.
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
from weight_families import families
from weight_kernels import CASES, KINDS, gpu_errors, make

from robboost.weights import SolverSettings, WeightProblem, solve, weight_problem

PARTS = ("check", "mnist", "cifar", "real")
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


def check() -> None:
    """The kernel against the float64 twin on fresh random inputs, then the solver on this GPU against the CPU's."""
    seed = int(time.time())
    worst: dict[str, float] = {}
    views = (lambda p: p, lambda p: p.every(2), lambda p: p.run(slice(1, 3)))
    for case in CASES:
        for kind in KINDS:
            for view in views[: 3 if case[1] > 2 else 1]:
                for name, error in gpu_errors(*make(*case, kind, seed), view).items():
                    worst[name] = max(worst.get(name, 0.0), error)
    largest = ", ".join(f"{name} {error:.2f}" for name, error in worst.items())
    say(f"seed {seed}: kernel against float64 twin, {len(CASES) * len(KINDS)} cases, error / stated room: {largest}")
    if not max(worst.values()) <= 1:
        sys.exit("FAILED: the kernel disagrees with its twin")
    began, count, passes = time.perf_counter(), 0, 0.0
    for name, (slopes, intercepts) in families(seed).items():
        for norm in ("linf", "l2", "l1"):
            here = weight_problem(slopes, intercepts, 1.0, norm=norm)
            there = weight_problem(torch.from_numpy(slopes).cuda(), intercepts, 1.0, norm=norm)
            ours, theirs = solve(there), solve(here)
            room = 1e-9 * max(ours.objective, 1e-3 * here.n_pairs)
            if ours.lower_bound > theirs.objective + room or theirs.lower_bound > ours.objective + room:
                sys.exit(f"FAILED: {name}, {norm}: GPU {ours}, CPU {theirs}")
            if ours.status != "optimal":
                sys.exit(f"FAILED: {name}, {norm}: {ours}")
            count, passes = count + 1, max(passes, ours.passes)
    took = time.perf_counter() - began
    say(f"{count} problems of the test zoo: optimal on the GPU, bounds and losses of GPU and CPU agree, {took:.0f} s")


def bandwidth(name: str, slopes: torch.Tensor) -> None:
    """A plain read of the same bytes, a copy, and the fused pass in its variants."""
    from plain_read import reader

    from robboost.weights.kernel_gpu import gpu_pass

    size = slopes.numel() * slopes.element_size()
    flat = slopes.view(-1)[: slopes.numel() // 2 * 2]
    read = size / seconds(reader(flat))
    summed = size / seconds(lambda: flat.view(torch.int32).view(torch.float32).sum())
    part = flat[: min(flat.numel(), 2**31)]
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


def solve_to_proof(name: str, held: WeightProblem) -> None:
    """The whole solve, the proof included: the first call compiles; the others meet another loss (kappa)."""
    for label, kappa in (("first call, compiling", 0.7), ("kappa 1", 1.0), ("kappa 0.3", 0.3), ("kappa 1 again", 1.0)):
        problem = held.with_kappa(kappa)
        if problem.device.type == "cuda":
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


def profile(problem: WeightProblem) -> None:
    """Where a warm solve spends its time, by function."""
    import cProfile
    import pstats

    recorder = cProfile.Profile()
    recorder.enable()
    solve(problem)
    recorder.disable()
    pstats.Stats(recorder).sort_stats("tottime").print_stats(14)


def real(images: int, device: str) -> WeightProblem:
    from engine_slopes import demo_slopes

    problem, words = demo_slopes(images, device)
    say(words)
    return problem


def made(name: str, share: int, device: str) -> WeightProblem:
    """Random numbers with the structure of real slopes, at the size of the paper's training sets."""
    members, pairs, dim = {"mnist": (12, 540_000, 784), "cifar": (11, 450_000, 3072)}[name]
    began = time.perf_counter()
    slopes, intercepts = realistic(members, pairs // share, dim, device=device, dtype=torch.float16)
    costs = float((intercepts.mean(0) < 1.0).double().mean())
    say(f"{name}: made in {time.perf_counter() - began:.1f} s; intercepts below 1: {costs:.0%}")
    return weight_problem(slopes, intercepts, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--images", type=int, default=60_000, help="of the real set")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    parts = options.part or PARTS
    share = 100 if options.quick else 1
    on_gpu = options.device != "cpu"
    if on_gpu:
        say(torch.cuda.get_device_name(), torch.__version__)
    if "check" in parts and on_gpu:
        check()
    for name in parts:
        if name == "check":
            continue
        held = real(options.images // share, options.device) if name == "real" else made(name, share, options.device)
        if on_gpu:
            bandwidth(name, held.slopes)
        solve_to_proof(name, held)
        if options.profile:
            profile(held)
        del held
    say("-" * 78)
    for row in ROWS:
        say(row)


if __name__ == "__main__":
    main()
