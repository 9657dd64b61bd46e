"""method="auto": the global optimum with a certified gap, in a handful of passes.

A sum of millions of |u_i| is nearly smooth, so its curvature is read off a sample; the hinge is not, so it is kept
exact. Newton's step on that model, taken first on a part of the pairs, then on all, converges quadratically. Where
there are too few rows for any smoothness, the pairwise cutting-plane model takes over, which needs none.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from robboost.observability import event
from robboost.weights.bundle import Bundle, Cut
from robboost.weights.curvature import Curvature, estimate_curvature
from robboost.weights.oracle import checked_pass
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import Method, Progress, Solution, SolverSettings, Status, relative_gap
from robboost.weights.verify import recompute

__all__ = ["Clock", "finish", "solve_auto"]

# Pairs of the first, small problem, from which on it pays, and its steps.
_FIRST_PAIRS, _FIRST_FROM, _FIRST_STEPS = 6000, 20_000, 8
# Share of the wanted gap that smoothing may cost, and that the search aims at (float32 sums take some).
_SMOOTHING, _AIM = 0.1, 0.6
# A gap so many times the wanted one is not closed by what other passes add to the newest one's bound. On a GPU another
# pass takes less time than finding out.
_FAR = {"cpu": 30.0, "cuda": 1.0}
# Share of the curvature that steadies a step on all cuts.
_PROXIMAL = 0.1


@dataclass
class Clock:
    """Passes and seconds spent, and the history."""

    settings: SolverSettings
    began: float = field(default_factory=time.perf_counter)
    passes: float = 0.0
    history: list[Progress] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def note(self, objective: float, bound: float) -> None:
        self.history.append(Progress(self.passes, self.seconds, objective, bound))
        event("pass", {"passes": self.passes, "seconds": self.seconds, "objective": objective, "bound": bound})

    def expired(self, reserve: float) -> Status | None:
        """The limit that the next pass would break, with `reserve` passes kept for the proof."""
        if self.seconds > self.settings.max_seconds:
            return "time-limit"
        if self.passes + 1 + reserve > self.settings.max_passes:
            return "pass-limit"
        return None


def solve_auto(problem: WeightProblem, settings: SolverSettings) -> Solution:
    """Minimises the loss until the certified gap is reached, or a limit."""
    clock = Clock(settings)
    bundle = Bundle(problem)
    start = torch.full((problem.n_members,), 1.0 / problem.n_members, dtype=torch.float64, device=problem.device)
    if problem.n_pairs >= _FIRST_FROM:
        start = _first(problem, start, clock)
    status = _search(problem, bundle, start, clock, aim=_AIM * settings.gap)
    solution = finish(problem, bundle, clock, method="auto", status=status)
    if status == "optimal" and solution.gap > settings.gap:
        # Float32 sums hid more than was set aside for them: once more with float64 sums and a closer aim.
        best = bundle.best.weights if bundle.best is not None else start
        bundle = Bundle(problem)
        status = _search(problem, bundle, best, clock, aim=0.2 * settings.gap, double=True)
        solution = finish(problem, bundle, clock, method="auto", status=status)
    return solution


def _first(problem: WeightProblem, start: torch.Tensor, clock: Clock) -> torch.Tensor:
    """The optimum of an even part of the pairs, nearly: close to that of all, for a fraction of a pass."""
    step = problem.n_pairs // _FIRST_PAIRS
    # Pairs come in runs (targets of one example), so the step must not share a factor with a run's length.
    while any(step % prime == 0 for prime in (2, 3, 5, 7, 11)):
        step += 1
    part = problem.every(step)
    share = part.n_pairs / problem.n_pairs
    bundle = Bundle(part)
    current, before = start, float("inf")
    for _ in range(_FIRST_STEPS):
        value = bundle.add(current, 0.0, checked_pass(part, current, threads=clock.settings.threads))
        clock.passes += share
        if bundle.best is None or not value < before * (1 - 1e-5):
            break
        before = value
        curvature = estimate_curvature(part, bundle.best.weights, bundle.best.costs, 0.0)
        if curvature is None:
            break
        clock.passes += curvature.passes * share
        current = bundle.curved_step(curvature.matrix, tolerance=1e-5)
    return start if bundle.best is None else bundle.best.weights


def _search(
    problem: WeightProblem, bundle: Bundle, start: torch.Tensor, clock: Clock, *, aim: float, double: bool = False
) -> Status:
    """Steps until the bundle's own gap is at most `aim`."""
    current, width, kind, gap_before, stuck = start, 0.0, 0, 1.0, 0
    far = _FAR.get(problem.device.type, 30.0)
    read_at: Cut | None = None
    curvature: Curvature | None = None
    while True:
        limit = clock.expired(reserve=bundle.proof_passes) if bundle.cuts else None
        if limit is not None:
            return limit
        if not bundle.cuts:
            # The first pass's smoothing comes from a guess at the loss; the later ones' from the pass before.
            width = _first_width(problem, current, clock)
        bundle.add(current, width, checked_pass(problem, current, width, double=double, threads=clock.settings.threads))
        clock.passes += 1
        tolerance = 0.02 * clock.settings.gap
        gap, newest = bundle.prove_alone(aim, tolerance)
        candidate = newest if len(bundle.cuts) == 1 else None
        # All passes together only where that may end it, or where Newton's steps are not getting on by themselves.
        alone = kind == 0 and curvature is not None and far * aim < gap <= 0.5 * gap_before
        if candidate is None and gap > aim and not alone:
            candidate = bundle.improve_bound(tolerance)
        clock.note(bundle.best_value, bundle.bound)
        gap = bundle.gap
        if gap <= aim:
            return "optimal"
        stuck = stuck + 1 if gap > 0.999 * gap_before else 0
        if stuck >= 8:
            return "stalled"
        if gap > 0.5 * gap_before:
            kind = (kind + 1) % 3
        gap_before = min(gap, gap_before)
        best = bundle.best
        allowed = _SMOOTHING * clock.settings.gap * max(bundle.best_value, 1e-3 * problem.kappa * problem.n_pairs)
        if best is not read_at:
            # Read once for each new best: where that has not changed, neither has its curvature.
            curvature = estimate_curvature(problem, best.weights, best.costs, allowed) if best is not None else None
            clock.passes += 0.0 if curvature is None else curvature.passes
            read_at = best
        width = 0.0 if curvature is None else curvature.width
        # Where the curvature promises more than it keeps, all cuts together go on, steadied by a little of it or alone.
        if curvature is not None and kind == 0:
            current = bundle.curved_step(curvature.matrix)
        elif curvature is not None and kind == 1:
            current = bundle.proximal_step(_PROXIMAL * curvature.matrix)
        else:
            current = bundle.improve_bound(tolerance) if candidate is None else candidate


def _first_width(problem: WeightProblem, weights: torch.Tensor, clock: Clock) -> float:
    everything = torch.ones(problem.n_pairs, dtype=torch.float64, device=problem.device)
    guess = 0.1 * problem.kappa * problem.n_pairs
    curvature = estimate_curvature(problem, weights, everything, _SMOOTHING * clock.settings.gap * guess)
    if curvature is None:
        return 0.0
    clock.passes += curvature.passes
    return curvature.width


def finish(problem: WeightProblem, bundle: Bundle, clock: Clock, *, method: Method, status: Status) -> Solution:
    """Recomputes loss and bound from the arrays; whether the status is "optimal" is for that gap alone to say."""
    if bundle.best is None:
        raise RuntimeError("a bundle without a pass has no solution")
    checked = recompute(problem, bundle.best.weights, bundle.proof, threads=clock.settings.threads)
    clock.passes += checked.passes
    lower = min(checked.bound, checked.loss)
    gap = relative_gap(checked.loss, lower, problem.kappa * problem.n_pairs)
    if gap <= clock.settings.gap:
        status = "optimal"
    elif status == "optimal":
        status = "stalled"
    sizes = {"pairs": problem.n_pairs, "members": problem.n_members}
    spent = {"passes": clock.passes, "seconds": clock.seconds}
    event("solved", {"method": method, "status": status, "objective": checked.loss, "gap": gap, **sizes, **spent})
    return Solution(
        weights=tuple(bundle.best.weights.tolist()),
        objective=checked.loss,
        lower_bound=lower,
        gap=gap,
        status=status,
        passes=clock.passes,
        seconds=clock.seconds,
        method=method,
        kappa=problem.kappa,
        norm=problem.norm,
        n_pairs=problem.n_pairs,
        history=tuple(clock.history),
    )
