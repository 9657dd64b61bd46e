"""The provably best mix, from arrays alone: this package never sees a network."""

from robboost.weights.problem import WeightProblem, weight_problem
from robboost.weights.scaling import Normalisers, normalisers
from robboost.weights.solution import Progress, Solution, SolverSettings
from robboost.weights.solve import solve, solve_weights
from robboost.weights.streaming import HeldSlopes, SlopeStream, SomePairs, streamed_problem
from robboost.weights.verify import margins, objective

__all__ = [
    "HeldSlopes",
    "Normalisers",
    "Progress",
    "SlopeStream",
    "SomePairs",
    "Solution",
    "SolverSettings",
    "WeightProblem",
    "margins",
    "normalisers",
    "objective",
    "solve",
    "solve_weights",
    "streamed_problem",
    "weight_problem",
]
