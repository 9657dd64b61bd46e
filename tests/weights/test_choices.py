"""Screening, choices on a validation part, and best subsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from weight_families import families
from weight_solvers import conic_optimum, highs_optimum

import robboost as rb
from robboost.weights import (
    Budget,
    Part,
    SolverSettings,
    best_subset,
    eliminate,
    margins,
    member_margins,
    normalisers,
    objective,
    prune_weights,
    refine_weights,
    screen,
    select_weights,
    solve,
    verified_error,
    weight_problem,
)

FAMILIES = families(1)


def split(name, pairs_per_example=4, seed=0):
    """A fit part and a validation part of one family, with examples."""
    slopes, intercepts = FAMILIES[name]
    half = slopes.shape[1] // (2 * pairs_per_example) * pairs_per_example
    example = np.arange(half) // pairs_per_example
    first = weight_problem(slopes[:, :half], intercepts[:, :half], 1.0)
    second = weight_problem(slopes[:, half : 2 * half], intercepts[:, half : 2 * half], 1.0)
    return Part(first, example), Part(second, example)


def test_verified_error_by_hand():
    values = torch.tensor([1.0, 0.5, 0.0, 2.0, float("nan"), 1.0, 3.0, -1.0])
    # Example 7 has a zero, example 2 a NaN, example 5 a negative margin; example 9 is certified.
    assert verified_error(values, [9, 9, 7, 7, 2, 2, 5, 5]) == 0.75
    with pytest.raises(rb.InputError, match="example has shape"):
        verified_error(values, [1, 2])
    with pytest.raises(rb.InputError, match="integers"):
        verified_error(values, np.zeros(8))


def test_elimination_counts_by_hand():
    # Margins (member x pair): pair 0 robust for both, 1 for one, 2 and 3 for none. Examples: {0}, {1, 2}, {3}.
    problem = weight_problem(np.zeros((2, 4, 1)), np.array([[2.0, 1.0, -1.0, 0.0], [0.5, -1.0, -2.0, -3.0]]), 1.0)
    found = eliminate(problem, [0, 1, 1, 2])
    assert found.robust.tolist() == [True, False, False, False]
    assert found.hopeless.tolist() == [False, False, True, True]
    assert found.remaining.tolist() == [False, True, False, False]
    assert (found.examples_robust, found.examples_hopeless) == (pytest.approx(1 / 3), pytest.approx(2 / 3))
    assert str(found) == (
        "4 pairs: robust 25.00%, hopeless 50.00%, remaining 25.00%; examples: robust 33.33%, hopeless 66.67%"
    )


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_member_margins_are_the_corners(norm):
    slopes, intercepts = FAMILIES["heavy tails"]
    problem = weight_problem(slopes, intercepts, 0.3, norm=norm)
    for t, row in enumerate(member_margins(problem)):
        assert row == pytest.approx(margins(problem, np.eye(len(slopes))[t]), rel=1e-12)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_screening_agrees_with_the_best_mix_of_each_pair(norm):
    rng = np.random.default_rng(2)
    slopes, intercepts = rng.normal(size=(4, 60, 5)), rng.normal(size=(4, 60)) + 0.7
    problem = weight_problem(slopes, intercepts, 1.0, norm=norm)
    found = screen(problem, rounds=40)
    groups = torch.stack([found.possible, found.impossible, found.undecided]).sum(0)
    assert bool((groups == 1).all())
    assert int(found.undecided.sum()) <= 3
    hidden = 0
    for n in range(60):
        # kappa far above every margin: the loss is kappa - max_a M_n(a).
        top = 100 - conic_optimum(slopes[:, n : n + 1], intercepts[:, n : n + 1], 1.0, norm, kappa=100.0)
        assert not (found.impossible[n] and top > 1e-7)
        assert not (found.possible[n] and top < -1e-7)
        hidden += bool(found.possible[n]) and bool((member_margins(problem)[:, n] <= 0).all())
    assert hidden > 0  # certified by a mix, by no member: the paper's elimination would have dropped these


def test_eliminations_as_options():
    slopes, intercepts = FAMILIES["shared structure"]
    intercepts = intercepts + np.where(np.arange(300) < 60, 6.0, np.where(np.arange(300) < 90, -8.0, 0.0))
    full = rb.solve_weights(slopes, intercepts, 1.0)
    exact = rb.solve_weights(slopes, intercepts, 1.0, settings=SolverSettings(eliminate="exact"))
    paper = rb.solve_weights(slopes, intercepts, 1.0, settings=SolverSettings(eliminate="paper"))
    assert exact.n_pairs <= 240
    assert paper.n_pairs < exact.n_pairs
    removed = screen(weight_problem(slopes, intercepts, 1.0)).costless
    assert (full.eliminated, exact.eliminated) == (0, int(removed.sum()))
    counted = eliminate(weight_problem(slopes, intercepts, 1.0))
    assert paper.n_pairs == int((counted.remaining & ~removed).sum())
    assert f"{paper.eliminated} of 300 pairs were eliminated first" in str(paper)
    assert rb.Solution.from_json(paper.to_json()) == paper
    assert exact.objective == pytest.approx(full.objective, rel=2e-6)
    assert paper.objective < full.objective
    everything = rb.solve_weights(slopes, intercepts + 50, 1.0, settings=SolverSettings(eliminate="exact"))
    assert (everything.objective, everything.n_pairs) == (0.0, 1)


def test_scales_are_the_mean_where_that_is_safe():
    c = np.array([[1.0, 3.0], [-1.0, -3.0], [1.0, -0.99], [0.0, 0.0]])
    found = normalisers(c)
    assert found.values == pytest.approx((2.0, 2.0, 0.995, 1.0))
    assert found.rules == ("mean", "mean-absolute", "mean-absolute", "one")
    assert found.fallback == (1, 2, 3)
    with pytest.raises(rb.InputError, match="members, pairs"):
        normalisers(np.ones(3))


@pytest.mark.parametrize("name", ["shared structure", "heavy tails", "sparse", "a member with everything negative"])
def test_chosen_weights_are_never_worse_than_best_member_or_average(name):
    fit, validation = split(name)
    choice = select_weights(fit.problem, validation, kappas=(1.0, 0.1))
    members = fit.problem.n_members
    singles = [validation.error(row) for row in np.eye(members)]
    assert validation.error(choice.weights) == choice.chosen.error
    assert choice.chosen.error <= min(*singles, validation.error([1 / members] * members))
    assert [c.kappa for c in choice.candidates] == [1.0, 0.1, None, None]
    assert str(choice).count("*") == 1


def test_a_case_where_kappa_1_loses_to_the_best_member():
    # Member 1 certifies 3 pairs barely; a mix with member 0 buys margin on the hopeless-looking pair 3 instead.
    intercepts = np.array([[-1.0, -1.0, -1.0, 9.0], [0.05, 0.05, 0.05, -30.0]])
    problem = weight_problem(np.zeros((2, 4, 1)), intercepts, 1.0)
    part = Part(problem, np.arange(4))
    at_one = solve(problem.with_kappa(1.0))
    choice = select_weights(problem, part, kappas=(1.0,))
    assert part.error(at_one.weights) == 0.75
    assert choice.chosen.name == "member 1 alone"
    assert choice.chosen.error == 0.25


def test_selection_refuses_what_does_not_fit():
    fit, validation = split("heavy tails")
    with pytest.raises(rb.InputError, match="kappas is empty"):
        select_weights(fit.problem, validation, kappas=())
    with pytest.raises(rb.InputError, match="2 members: expected 6"):
        select_weights(fit.problem, Part(validation.problem.take_members([0, 1]), validation.example))


def test_refinement_is_taken_only_if_the_validation_part_improves():
    fit, validation = split("shared structure")
    start = [1 / 8] * 8
    found = refine_weights(start, fit, validation)
    assert validation.error(found.weights) == found.error
    assert found.error <= validation.error(start)
    # Judged on itself, the search can only improve; judged on pairs that nothing changes, it is refused.
    alone = refine_weights(start, fit, fit)
    assert fit.error(alone.weights) < fit.error(start)
    fixed = Part(weight_problem(np.zeros((8, 2, 1)), -np.ones((8, 2)), 1.0), [0, 1])
    refused = refine_weights(start, fit, fixed)
    assert (refused.name, refused.weights) == ("not refined", pytest.approx(tuple(start)))


def test_small_weights_go_only_if_the_certificate_does_not_suffer():
    # Pair 0 needs a little of member 1; pair 1 does not care.
    problem = weight_problem(np.zeros((3, 2, 1)), np.array([[-0.001, 1.0], [1.0, 1.0], [0.0, 1.0]]), 1.0)
    part = Part(problem, [0, 1])
    weights = (0.99, 0.006, 0.004)
    kept = prune_weights(weights, part)
    assert kept.name == "pruned by 1"
    assert kept.weights == pytest.approx((0.99 / 0.996, 0.006 / 0.996, 0.0))
    assert part.error(kept.weights) == 0.0
    assert prune_weights((0.99, 0.01, 0.0), part).name == "not pruned"
    assert prune_weights((0.994, 0.006, 0.0), part).name == "not pruned"


@pytest.mark.parametrize("seed", range(4))
def test_best_subset_by_enumeration(seed):
    rng = np.random.default_rng(seed)
    slopes = rng.normal(size=(6, 30, 5)) * np.exp(0.5 * rng.normal(size=(6, 1, 1))) / 4
    intercepts = rng.normal(size=(6, 30)) * 0.5 + 1
    problem = weight_problem(slopes, intercepts, 1.0)
    exact = {
        chosen: highs_optimum(slopes[list(chosen)], intercepts[list(chosen)], 1.0)
        for size in (1, 2, 3)
        for chosen in itertools.combinations(range(6), size)
    }
    for k in (1, 2, 3):
        found = best_subset(problem, Budget(members=k), settings=SolverSettings(gap=1e-6))
        truth = min(value for chosen, value in exact.items() if len(chosen) <= k)
        assert found.proved
        assert len(found.members) <= k
        assert found.objective == pytest.approx(truth, rel=1e-5)
        assert found.lower_bound <= truth * (1 + 1e-9)
    sizes = tuple(rng.integers(1, 6, size=6).astype(float))
    found = best_subset(problem, Budget(size=6.0, members=3, sizes=sizes), settings=SolverSettings(gap=1e-6))
    allowed = [c for c in exact if sum(sizes[t] for t in c) <= 6.0]
    assert sum(sizes[t] for t in found.members) <= 6.0
    assert found.objective == pytest.approx(min(exact[c] for c in allowed), rel=1e-5)


def test_a_search_cut_short_says_so_and_still_bounds():
    slopes, intercepts = FAMILIES["64 members"]
    problem = weight_problem(slopes[:16], intercepts[:16], 1.0)
    short = best_subset(problem, Budget(members=3), max_nodes=6)
    long = best_subset(problem, Budget(members=3), max_nodes=40)
    assert not short.proved
    assert short.lower_bound <= long.objective
    assert short.objective >= long.lower_bound
    assert len(short.members) <= 3
    assert short.gap > 0
    # One node is not enough to have a mix; the search goes on until there is one.
    shortest = best_subset(problem, Budget(members=1), max_nodes=1)
    assert len(shortest.members) == 1
    assert shortest.lower_bound <= min(objective(problem, corner) for corner in np.eye(16))
    with pytest.raises(rb.InputError, match="max_nodes=0"):
        best_subset(problem, Budget(members=1), max_nodes=0)


@pytest.mark.parametrize(
    "budget",
    [
        Budget(),
        Budget(members=0),
        Budget(size=1.0),
        Budget(size=1.0, sizes=(1.0,)),
        Budget(size=0.5, sizes=(1.0,) * 6),
    ],
)
def test_impossible_budgets_are_refused(budget):
    slopes, intercepts = FAMILIES["heavy tails"]
    with pytest.raises(rb.InputError):
        best_subset(weight_problem(slopes, intercepts, 1.0), budget)
