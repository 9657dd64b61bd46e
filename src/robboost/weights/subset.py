"""The best mix of at most k members, or of at most so many megabytes, by branch and bound."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass, replace

from robboost.errors import InputError
from robboost.weights.problem import WeightProblem
from robboost.weights.solution import Solution, SolverSettings, relative_gap
from robboost.weights.solve import solve

__all__ = ["Budget", "SubsetSolution", "best_subset"]


@dataclass(frozen=True)
class Budget:
    """What a mix may use: at most `members` members, at most `size` in total where member t weighs `sizes[t]`."""

    members: int | None = None
    size: float | None = None
    sizes: tuple[float, ...] | None = None

    def fits(self, chosen: frozenset[int]) -> bool:
        if self.members is not None and len(chosen) > self.members:
            return False
        return self.size is None or self.sizes is None or sum(self.sizes[t] for t in chosen) <= self.size * (1 + 1e-12)


@dataclass(frozen=True)
class SubsetSolution:
    """The best mix within a budget.

    Attributes:
        weights: [T], zero outside `members`.
        objective: loss of these weights; lower_bound: no mix within the budget has less.
        gap: as in `Solution`.
        proved: the search is complete, so the gap is that of the solver's settings.
        nodes: subproblems solved.
    """

    weights: tuple[float, ...]
    members: tuple[int, ...]
    objective: float
    lower_bound: float
    gap: float
    proved: bool
    nodes: int


def best_subset(
    problem: WeightProblem, budget: Budget, *, max_nodes: int = 300, settings: SolverSettings | None = None
) -> SubsetSolution:
    """Minimises the loss over mixes within the budget.

    A node forces some members in and others out; without the budget, the loss over the members left is a lower bound,
    certified like any other. The search stops when no open node can be better than the best mix found (`proved`) or
    after `max_nodes` nodes (once it has found a mix); the bound then is that of the open nodes.
    """
    limits = settings or SolverSettings(gap=1e-4)
    everyone = frozenset(range(problem.n_members))
    _check(budget, problem.n_members, max_nodes)
    search = _Search(problem, limits)
    order = itertools.count()
    root = search.solve(everyone)
    open_nodes: list[tuple[float, int, frozenset[int], frozenset[int]]] = [
        (root.lower_bound, next(order), frozenset(), everyone)
    ]
    best: tuple[float, frozenset[int]] = (float("inf"), frozenset())
    finished: list[float] = []
    while open_nodes and (search.nodes < max_nodes or not best[1]):
        bound, _, forced, allowed = heapq.heappop(open_nodes)
        if search.gap(best[0], bound) <= limits.gap:
            finished.append(bound)
            continue
        found = search.solve(allowed)
        support = frozenset(t for t in allowed if search.weight(found, allowed, t) > 0)
        rounded = _rounded(found, allowed, forced, budget, search)
        for candidate in {support, rounded} if budget.fits(support) else {rounded}:
            if candidate:
                value = search.solve(candidate).objective
                best = min(best, (value, candidate), key=lambda pair: pair[0])
        if budget.fits(support):
            finished.append(found.lower_bound)
            continue
        split = max(support - forced, key=lambda t: search.weight(found, allowed, t))
        without = allowed - {split}
        within = frozenset(t for t in allowed if budget.fits(forced | {split, t}))
        for keep, left in ((forced, without), (forced | {split}, within)):
            if not budget.fits(keep) or not left:
                continue
            child = search.solve(left)
            if child.lower_bound < best[0]:
                heapq.heappush(open_nodes, (child.lower_bound, next(order), keep, left))
            else:
                finished.append(child.lower_bound)
    chosen = search.solve(best[1])
    lower = min([node[0] for node in open_nodes] + finished + [chosen.objective])
    proved = not open_nodes or search.gap(best[0], min(node[0] for node in open_nodes)) <= limits.gap
    weights = tuple(search.weight(chosen, best[1], t) for t in range(problem.n_members))
    return SubsetSolution(
        weights=weights,
        members=tuple(t for t, w in enumerate(weights) if w > 0),
        objective=chosen.objective,
        lower_bound=lower,
        gap=search.gap(chosen.objective, lower),
        proved=proved,
        nodes=search.nodes,
    )


class _Search:
    """Solved faces of the simplex, each solved once."""

    def __init__(self, problem: WeightProblem, settings: SolverSettings) -> None:
        self.problem, self.settings = problem, settings
        self.solved: dict[frozenset[int], Solution] = {}

    @property
    def nodes(self) -> int:
        return len(self.solved)

    def gap(self, objective: float, bound: float) -> float:
        return relative_gap(objective, bound, self.problem.kappa * self.problem.n_pairs)

    def solve(self, members: frozenset[int]) -> Solution:
        if members not in self.solved:
            part = self.problem.take_members(sorted(members))
            self.solved[members] = replace(solve(part, settings=self.settings), history=())
        return self.solved[members]

    def weight(self, solution: Solution, members: frozenset[int], member: int) -> float:
        return solution.weights[sorted(members).index(member)] if member in members else 0.0


def _rounded(
    found: Solution, allowed: frozenset[int], forced: frozenset[int], budget: Budget, search: _Search
) -> frozenset[int]:
    """Members by falling weight as long as they fit: a mix to beat."""
    chosen = forced
    for t in sorted(allowed - forced, key=lambda t: -search.weight(found, allowed, t)):
        if budget.fits(chosen | {t}):
            chosen = chosen | {t}
    return chosen


def _check(budget: Budget, members: int, max_nodes: int) -> None:
    if max_nodes < 1:
        raise InputError(f"max_nodes={max_nodes}: expected at least 1")
    if budget.members is None and budget.size is None:
        raise InputError("budget is empty: expected members, or size with sizes")
    if budget.members is not None and budget.members < 1:
        raise InputError(f"budget of {budget.members} members: expected at least 1")
    if budget.size is not None and (budget.sizes is None or len(budget.sizes) != members or min(budget.sizes) < 0):
        raise InputError(f"sizes={budget.sizes}: expected {members} numbers, none negative, one per member")
    if not any(budget.fits(frozenset({t})) for t in range(members)):
        raise InputError(f"size={budget.size}: no single member is as small, so raise it")
