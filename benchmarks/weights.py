"""Weights by several solvers side by side, the exact line step, and the CPU pass against a plain read: one run.

    PYTHONPATH=src:tests python benchmarks/weights.py            # about 4 minutes on one core, 4 GB of memory
    PYTHONPATH=src:tests python benchmarks/weights.py --quick    # about half a minute

Times are seconds of CPU of this process, on one thread, so that other work on the machine counts little; every ratio
is between two times of this run. Solvers that take longer than a limit at one size are left out at larger ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from printed_step import ALL_FIXES, printed_minimum, printed_terms, sorted_minimum
from synthetic import realistic
from weight_families import families
from weight_solvers import conic_optimum, highs_optimum

from robboost.weights import SolverSettings, objective, solve, solve_weights, weight_problem
from robboost.weights.kernel_cpu import cpu_pass
from robboost.weights.line import Rows, minimise_line

MEMBERS, DIM = 12, 784
PARTS = ("pass", "step", "solvers", "zoo", "real")


def timed(work: Callable[[], object]) -> tuple[float, object]:
    began = time.process_time()
    result = work()
    return time.process_time() - began, result


def elapsed(work: Callable[[], object]) -> float:
    """The time that passes meanwhile, which is what counts for several threads."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def compare_solvers(sizes: list[int], limit: float) -> None:
    print(f"\nLoss and time of each solver, d = {DIM}, T = {MEMBERS}; gap: above the best lower bound of this size")
    print(f"{'pairs':>7}  {'solver':<34} {'seconds':>9} {'passes':>7} {'gap':>9}  certificate")
    left = {"HiGHS, linear program", "Clarabel through CVXPY", "as printed, 3 sweeps", "sorted exact step, 3 sweeps"}
    for pairs in sizes:
        slopes, intercepts = realistic(MEMBERS, pairs, DIM, seed=pairs)
        problem = weight_problem(slopes, intercepts, 1.0)
        arrays = slopes.numpy(), intercepts.numpy()
        took, best = timed(lambda problem=problem: solve(problem))
        bound = best.lower_bound
        show(pairs, "ours, auto", took, best.gap, best.passes, f"gap {best.gap:.1e}, {best.status}")
        took, found = timed(lambda problem=problem: solve(problem, method="coordinate"))
        show(
            pairs,
            "ours, coordinate, 3 sweeps",
            took,
            (found.objective - bound) / bound,
            found.passes,
            f"gap {found.gap:.1e}",
        )
        # Fewer where a step takes long; still twice the passes of the slowest of ours.
        steps = 150 if pairs <= 1000 else 30
        took, weights = timed(lambda problem=problem, steps=steps: adam(problem, steps=steps))
        above = (objective(problem, weights) - bound) / bound
        show(pairs, f"Adam on softmax weights, {steps} steps", took, above, 2.0 * steps, "none")
        others: dict[str, Callable[[], float]] = {
            "HiGHS, linear program": lambda arrays=arrays: highs_optimum(*arrays, 1.0),
            "Clarabel through CVXPY": lambda arrays=arrays: conic_optimum(*arrays, 1.0, "linf"),
            "as printed, 3 sweeps": lambda arrays=arrays, problem=problem: sweeps(*arrays, problem, printed=True),
            "sorted exact step, 3 sweeps": lambda arrays=arrays, problem=problem: sweeps(
                *arrays, problem, printed=False
            ),
        }
        # The sorted step holds the slopes in float64 several times over.
        for name in sorted(left) if pairs <= 3000 else ():
            took, value = timed(others[name])
            certificate = "its own tolerance" if "HiGHS" in name or "Clarabel" in name else "none"
            show(pairs, name, took, (value - bound) / bound, None, certificate)
            if took > limit:
                left.discard(name)


def show(pairs: int, name: str, seconds: float, gap: float, passes: float | None, certificate: str) -> None:
    read = "" if passes is None else f"{passes:.2f}"
    print(f"{pairs:>7}  {name:<34} {seconds:>9.3f} {read:>7} {gap:>9.1e}  {certificate}", flush=True)


def adam(problem, steps: int) -> list[float]:
    """The usual way out: gradient descent on softmax weights with a falling step, in float32, all pairs at once."""
    logits = torch.zeros(problem.n_members, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.1)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    flat = problem.slopes.reshape(problem.n_members, -1)
    intercepts = problem.intercepts.float()
    for _ in range(steps):
        optimiser.zero_grad()
        a = logits.softmax(0)
        norms = (a @ flat).view(problem.n_pairs, -1).abs().sum(1)
        (problem.kappa - a @ intercepts + norms).clamp(min=0).mean().backward()
        optimiser.step()
        falling.step()
    return logits.detach().double().softmax(0).tolist()


def sweeps(slopes: np.ndarray, intercepts: np.ndarray, problem, *, printed: bool) -> float:
    """Coordinate descent with the algorithm as printed, or with the sorted exact step."""
    columns, c = slopes.transpose(1, 2, 0).astype(np.float64), intercepts.T
    a = np.full(len(slopes), 1.0 / len(slopes))
    for _ in range(3):
        for t in range(len(a)):
            terms = printed_terms(columns, c, a, t, frozenset() if printed else ALL_FIXES)
            s = (printed_minimum(terms) if printed else sorted_minimum(terms))[0]
            others = np.where(np.arange(len(a)) == t, 0.0, a)
            moved = (1 - s) * others / others.sum()
            moved[t] = s
            # As printed, a step to s = 1 leaves the next one undefined.
            if np.isfinite(moved).all() and s < 1:
                a = moved
    return objective(problem, a)


def exact_step(sizes: list[int]) -> None:
    print("\nThe exact minimiser on a line (median of 5)")
    for pairs in sizes:
        slopes, intercepts = realistic(MEMBERS, pairs, DIM, seed=1)
        columns = slopes.permute(1, 2, 0).double().numpy()
        terms = printed_terms(columns, intercepts.T.numpy(), np.full(MEMBERS, 1 / MEMBERS), 3, ALL_FIXES)
        omega, nu, gamma, mu = (torch.from_numpy(np.ascontiguousarray(x)) for x in terms)
        rows = [Rows(gamma, mu, omega, nu)]
        minimise_line(lambda rows=rows: rows, n_rows=omega.numel())
        runs = [timed(lambda rows=rows: minimise_line(lambda: rows, n_rows=rows[0].omega.numel())) for _ in range(5)]
        ours, found = statistics.median(took for took, _ in runs), runs[0][1]
        ordered, (_, value) = timed(lambda terms=terms: sorted_minimum(terms))
        agree = abs(found.value - value) / value
        print(
            f"{pairs:>7} pairs, {omega.numel():>9} rows: {1e3 * ours:8.2f} ms; sorted {1e3 * ordered:9.1f} ms, "
            f"{ordered / ours:6.1f} times longer; values differ by {agree:.0e}",
            flush=True,
        )
    few = realistic(MEMBERS, 20, DIM, seed=1)
    columns = few[0].permute(1, 2, 0).double().numpy()
    terms = printed_terms(columns, few[1].T.numpy(), np.full(MEMBERS, 1 / MEMBERS), 3, ALL_FIXES)
    rows = [Rows(*(torch.from_numpy(np.ascontiguousarray(terms[k])) for k in (2, 3, 0, 1)))]
    ours = statistics.median(timed(lambda: minimise_line(lambda: rows, n_rows=terms[0].size))[0] for _ in range(5))
    printed, _ = timed(lambda: printed_minimum(terms))
    print(
        f"     20 pairs, {terms[0].size:>9} rows: {1e3 * ours:8.2f} ms; as printed {1e3 * printed:6.1f} ms, "
        f"{printed / ours:6.1f} times longer (quadratic in the rows)"
    )


def bandwidth(pairs: int, threads: list[int]) -> None:
    from plain_read_cpu import read

    print("\nThe fused CPU pass against a plain read of the same bytes (best of 7, alternating)")
    for dtype in (torch.float32, torch.float16):
        slopes, _ = realistic(MEMBERS, pairs, DIM, dtype=dtype)
        radius = torch.ones((), dtype=torch.float64)
        a = torch.full((MEMBERS,), 1 / MEMBERS, dtype=torch.float64)
        words = slopes.view(torch.int32).reshape(-1).numpy()
        size = words.nbytes
        for count in threads:
            passes, reads = [], []
            for _ in range(8):
                clock = elapsed if count > 1 else lambda work: timed(work)[0]
                passes.append(clock(partial(cpu_pass, slopes, radius, a, 1e-5, threads=count)))
                reads.append(clock(partial(read, words, count)))
            ours, plain = size / min(passes[1:]), size / min(reads[1:])
            print(
                f"  {str(dtype)[6:]}, {count} threads, {size / 1e9:.2f} GB: pass {ours / 1e9:.1f} GB/s, plain read "
                f"{plain / 1e9:.1f} GB/s: {ours / plain:.0%}",
                flush=True,
            )


def zoo() -> None:
    print("\nPasses to a certified 1e-6 on every family of the test zoo")
    for name, (slopes, intercepts) in families().items():
        took, found = timed(lambda s=slopes, c=intercepts: solve_weights(s, c, 1.0, settings=SolverSettings(gap=1e-6)))
        print(
            f"  {name:<36} {slopes.shape!s:<16} {found.passes:6.2f} passes, {took:6.3f} s, {found.status}, "
            f"gap {found.gap:.1e}",
            flush=True,
        )


def real(images: int) -> None:
    """The demo pool's own slopes: what each method leaves, by its own certificate."""
    from engine_slopes import demo_slopes

    problem, words = demo_slopes(images, "cpu")
    print(f"\n{words}")
    for kappa in (1.0, 0.3):
        for method in ("auto", "coordinate", "uniform"):
            took, found = timed(lambda k=kappa, m=method: solve(problem.with_kappa(k), method=m))
            weights = ", ".join(f"{w:.3f}" for w in found.weights)
            print(
                f"  kappa {kappa:g}, {method:<10} {took:8.3f} s {found.passes:7.2f} passes, loss "
                f"{found.objective:.8g}, certified gap {found.gap:.1e}, weights {weights}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part (may be repeated)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="also time the pass on so many threads")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}, one thread"
    )
    warm = realistic(MEMBERS, 600, DIM)
    solve_weights(*warm, 1.0)
    solve_weights(*warm, 1.0, method="coordinate", settings=SolverSettings(epochs=1))
    parts = options.part or PARTS
    if "pass" in parts:
        bandwidth(2000 if options.quick else 9000, sorted({1, options.threads}))
    if "step" in parts:
        exact_step([300, 1000] if options.quick else [300, 3000, 9000])
    if "solvers" in parts:
        sizes = [10, 100] if options.quick else [10, 30, 100, 300, 1000, 27_000]
        compare_solvers(sizes, limit=0.5 if options.quick else 3.0)
    if "zoo" in parts:
        zoo()
    if "real" in parts:
        real(100 if options.quick else 1000)


if __name__ == "__main__":
    main()
