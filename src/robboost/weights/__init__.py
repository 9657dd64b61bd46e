"""The provably best mix, from arrays alone: this package never sees a network."""

from robboost.weights.problem import WeightProblem, weight_problem
from robboost.weights.scaling import Normalisers, normalisers
from robboost.weights.screening import Elimination, Screening, eliminate, member_margins, screen, verified_error
from robboost.weights.selection import Candidate, Choice, Part, prune_weights, refine_weights, select_weights
from robboost.weights.solution import Progress, Solution, SolverSettings
from robboost.weights.solve import solve, solve_weights
from robboost.weights.storage import Stored, store
from robboost.weights.streaming import HeldSlopes, SlopeStream, SomePairs, streamed_problem
from robboost.weights.subset import Budget, SubsetSolution, best_subset
from robboost.weights.verify import margins, objective

__all__ = [
    "Budget",
    "Candidate",
    "Choice",
    "Elimination",
    "HeldSlopes",
    "Normalisers",
    "Part",
    "Progress",
    "Screening",
    "SlopeStream",
    "SomePairs",
    "Solution",
    "SolverSettings",
    "Stored",
    "SubsetSolution",
    "WeightProblem",
    "best_subset",
    "eliminate",
    "margins",
    "member_margins",
    "normalisers",
    "objective",
    "prune_weights",
    "refine_weights",
    "screen",
    "select_weights",
    "solve",
    "solve_weights",
    "store",
    "streamed_problem",
    "verified_error",
    "weight_problem",
]
