"""Lower precision: no margin is ever overstated, under any mix, and little is lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from weight_families import families

import robboost as rb
from robboost.weights import margins, store, weight_problem

FAMILIES = families(3)


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("name", ["shared structure", "cancelling members", "heavy tails", "sparse", "large numbers"])
def test_no_margin_is_overstated(name, norm, precision):
    slopes, intercepts = FAMILIES[name]
    rng = np.random.default_rng(0)
    radius = rng.random(slopes.shape[1:])
    problem = weight_problem(slopes, intercepts, radius, norm=norm)
    stored = store(problem, precision)
    assert stored.problem.slopes.dtype == getattr(torch, precision)
    scale = np.abs(slopes * radius).sum(2).max() + np.abs(intercepts).max()
    loss = 0.0
    for a in np.concatenate([rng.dirichlet(np.ones(len(slopes)), size=20), np.eye(len(slopes))]):
        truth, kept = margins(problem, a), margins(stored.problem, a)
        # The room is that of the float64 sums of this very comparison.
        assert bool((kept <= truth + 1e-15 * slopes.shape[2] * scale).all())
        loss = max(loss, float((truth - kept).max()))
    assert loss <= scale * {"float16": 2e-3, "bfloat16": 2e-2, "float32": 3e-7}[precision]


def test_hand_computed_rounding():
    # 1 + 2^-12 lies between two float16 numbers, 2^-12 above the lower and nearer to it.
    problem = weight_problem(np.array([[[1 + 2.0**-12, 0.0]]]), np.array([[5.0]]), 2.0)
    stored = store(problem, "float16")
    assert stored.inputs.tolist() == [0]
    assert stored.error[0, 0] == pytest.approx(2 * 2.0**-12)
    assert float(margins(stored.problem, [1.0])) == pytest.approx(5 - 2 - 2 * 2.0**-12)
    assert float(margins(stored.problem, [1.0])) <= float(margins(problem, [1.0]))


def test_rounding_magnitudes_outward_would_be_unsound():
    # Two members that cancel: larger magnitudes cancel differently, and the mixture's norm falls.
    exact = np.array([[[1 + 2.0**-12]], [[-1.0]]])
    outward = np.array([[[1 + 2.0**-10]], [[-1.0]]])
    weights = (0.5 - 2.0**-12, 0.5 + 2.0**-12)
    problem, wrong = (weight_problem(s, np.ones((2, 1)), 1.0) for s in (exact, outward))
    assert float(margins(wrong, weights)) > float(margins(problem, weights))
    assert float(margins(store(problem, "float16").problem, weights)) <= float(margins(problem, weights))


def test_a_radius_for_every_input_goes_into_the_slopes():
    problem = weight_problem(np.array([[[0.5, 8.0]]]), np.array([[5.0]]), np.array([[4.0, 0.25]]))
    stored = store(problem, "float16").problem
    assert stored.radius.ndim == 0
    assert (stored.slopes * stored.radius).tolist() == [[[2.0, 2.0]]]
    assert float(margins(stored, [1.0])) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("scale", [1e-290, 1e-150, 1e150])
def test_any_units_fit_into_float16(scale):
    rng = np.random.default_rng(0)
    problem = weight_problem(scale * rng.normal(size=(2, 4, 3)), scale * rng.normal(size=(2, 4)), 1.0)
    truth, kept = (margins(p, [0.5, 0.5]) / scale for p in (problem, store(problem, "float16").problem))
    assert bool((kept <= truth + 1e-13).all())
    assert kept.numpy() == pytest.approx(truth.numpy(), abs=1e-2)


def test_dead_inputs_are_dropped():
    slopes = np.random.default_rng(0).normal(size=(3, 10, 6))
    slopes[:, :, 2] = 0.0
    radius = np.ones((10, 6))
    radius[:, 4] = 0.0
    problem = weight_problem(slopes, np.ones((3, 10)), radius)
    stored = store(problem, "float32")
    assert stored.inputs.tolist() == [0, 1, 3, 5]
    assert stored.problem.dim == 4
    assert margins(stored.problem, [0.2, 0.3, 0.5]) == pytest.approx(margins(problem, [0.2, 0.3, 0.5]), abs=1e-6)
    nothing = store(weight_problem(np.zeros((2, 3, 4)), np.ones((2, 3)), 1.0), "float16")
    assert margins(nothing.problem, [0.5, 0.5]).tolist() == [1.0, 1.0, 1.0]


def test_optimum_hardly_moves_in_float16():
    slopes, intercepts = FAMILIES["shared structure"]
    exact = rb.solve_weights(slopes, intercepts, 1.0)
    problem = weight_problem(slopes, intercepts, 1.0)
    half = rb.weights.solve(store(problem, "float16").problem)
    assert half.objective >= exact.lower_bound
    assert half.objective == pytest.approx(exact.objective, rel=1e-3)


def test_into_a_mapped_file(tmp_path):
    slopes, intercepts = FAMILIES["tiny"]
    problem = weight_problem(slopes, intercepts, 1.0)
    mapped = np.memmap(tmp_path / "slopes", dtype=np.float16, mode="w+", shape=slopes.shape)
    stored = store(problem, "float16", out=torch.from_numpy(mapped))
    assert stored.problem.slopes.data_ptr() == torch.from_numpy(mapped).data_ptr()
    assert torch.equal(stored.problem.slopes, store(problem, "float16").problem.slopes)
    with pytest.raises(rb.InputError, match="out is"):
        store(problem, "float16", out=torch.empty(1, 2, 3))


def test_refusals():
    with pytest.raises(rb.InputError, match="precision='int8'"):
        store(weight_problem(np.ones((1, 1, 1)), np.ones((1, 1)), 1.0), "int8")
    with pytest.raises(rb.InputError, match="NaN"):
        store(weight_problem(np.full((1, 1, 1), np.nan), np.ones((1, 1)), 1.0), "float16")
