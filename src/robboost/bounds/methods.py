"""The public methods in terms of the engine, and the choice of the tightest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from robboost.bounds.engine import LinearBounds, Problem, finish, intermediate, maps_for
from robboost.bounds.intervals import Interval
from robboost.bounds.relaxations import Lines, tangent_lines

__all__ = ["METHODS", "TIGHTEST", "propagate"]

METHODS = ("ibp", "crown-ibp", "same-slope", "crown", "alpha-crown", "tightest")
# What "tightest" chooses from; optimised slopes cost several passes each and are asked for by name.
TIGHTEST = ("ibp", "crown-ibp", "same-slope", "crown")
_STEP = 0.1


def propagate(problem: Problem, method: str, iterations: int) -> LinearBounds:
    """Linear lower bounds of all margins of the chunk by one method other than "tightest"."""
    if method == "ibp":
        maps, _, _ = intermediate(problem, "constant", backward=False)
    elif method == "crown-ibp":
        maps, _, _ = intermediate(problem, "adaptive", backward=False)
    elif method == "same-slope":
        maps, _, _ = intermediate(problem, "same-slope", backward=True, intersect=False)
    else:
        maps, lines, bounds = intermediate(problem, "adaptive", backward=True)
        if method == "alpha-crown":
            best = _optimised_lines(problem, lines, bounds, iterations)
            maps = {index: maps_for(problem, index, line) for index, line in best.items()}
    return finish(problem, maps)


def _optimised_lines(
    problem: Problem, lines: dict[int, Lines], bounds: dict[int, Interval], iterations: int
) -> dict[int, Lines]:
    """Lines with a lower slope for each (example, target, neuron), improved by projected gradient ascent.

    Any slope in [negative, 1] lies below a crossing (leaky) ReLU, and any slope at all has a valid intercept for
    sigmoid and tanh, so every iterate is a valid bound; the best iterate of each pair is kept, the first being CROWN's.
    """
    fixed = {index: _detached(line) for index, line in lines.items()}
    intervals = {index: Interval(*(end.detach() for end in interval)) for index, interval in bounds.items()}
    targets = problem.network.nodes[-1].shape[0] - 1
    detached = replace(problem, values=[value.detach() for value in problem.values], network=problem.network.detached())
    variables: dict[tuple[int, str], Tensor] = {}
    for index, line in fixed.items():
        kind = problem.network.nodes[index].kind
        for side in ("lower_slope",) if kind == "relu" else ("lower_slope", "upper_slope"):
            start = getattr(line, side)
            if kind == "maxpool" or start is None:
                continue
            variables[index, side] = start.unsqueeze(1).repeat(1, targets, *[1] * (start.dim() - 1))
    best = {key: value.clone() for key, value in variables.items()}
    if not variables:
        return lines
    record: Tensor | None = None
    with torch.enable_grad():
        for value in variables.values():
            value.requires_grad_()
        optimiser = torch.optim.Adam(list(variables.values()), lr=_STEP)
        for _ in range(iterations + 1):
            trial = _lines_with(problem, fixed, intervals, variables)
            lower = finish(detached, {index: maps_for(detached, index, line) for index, line in trial.items()}).lower
            record, best = _keep_best(record, best, lower.detach(), variables)
            optimiser.zero_grad(set_to_none=True)
            (-lower.sum()).backward(inputs=list(variables.values()))
            optimiser.step()
            _project(problem, variables)
    return _lines_with(problem, lines, bounds, best)


def _detached(lines: Lines) -> Lines:
    parts: list[Any] = [None if part is None else part.detach() for part in lines]
    return Lines(*parts)


def _keep_best(
    record: Tensor | None,
    best: dict[tuple[int, str], Tensor],
    lower: Tensor,
    variables: dict[tuple[int, str], Tensor],
) -> tuple[Tensor, dict[tuple[int, str], Tensor]]:
    if record is None:
        return lower, best
    better = lower > record
    kept = {
        key: torch.where(better.view(*better.shape, *[1] * (value.dim() - 2)), value.detach(), best[key])
        for key, value in variables.items()
    }
    return torch.where(better, lower, record), kept


@torch.no_grad()
def _project(problem: Problem, variables: dict[tuple[int, str], Tensor]) -> None:
    for (index, _), value in variables.items():
        node = problem.network.nodes[index]
        if node.kind == "relu":
            value.clamp_(node.attributes["negative"], 1)
        else:
            value.clamp_(0, 0.25 if node.kind == "sigmoid" else 1)


def _lines_with(
    problem: Problem,
    lines: dict[int, Lines],
    bounds: dict[int, Interval],
    variables: dict[tuple[int, str], Tensor],
) -> dict[int, Lines]:
    """The lines with free slopes in the place of the fixed ones, where the neuron is not stable."""
    result = dict(lines)
    for index in {index for index, _ in variables}:
        node, line = problem.network.nodes[index], lines[index]
        below = variables[index, "lower_slope"]
        if node.kind == "relu":
            crossing = ((bounds[index].lower < 0) & (bounds[index].upper > 0)).unsqueeze(1)
            assert line.lower_slope is not None
            result[index] = line._replace(lower_slope=torch.where(crossing, below, line.lower_slope.unsqueeze(1)))
        else:
            result[index] = tangent_lines(node.kind, bounds[index], below, variables[index, "upper_slope"])
    return result


def tightest(candidates: list[LinearBounds]) -> tuple[LinearBounds, Tensor]:
    """For each (example, target) the candidate with the largest lower bound, and its position in the list.

    NaN never wins over a number.
    """
    lower = torch.stack([torch.nan_to_num(bound.lower, nan=-torch.inf) for bound in candidates])
    winner = lower.argmax(0)
    slope = candidates[0].slope
    intercept, best = candidates[0].intercept, candidates[0].lower
    for position, bound in enumerate(candidates[1:], start=1):
        wins = winner == position
        slope = torch.where(wins.view(*wins.shape, *[1] * (slope.dim() - 2)), bound.slope, slope)
        intercept = torch.where(wins, bound.intercept, intercept)
        best = torch.where(wins, bound.lower, best)
    return LinearBounds(slope, intercept, best), winner
