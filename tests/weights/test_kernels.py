"""The compiled kernels against the float64 twin, and the twin against plain NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from weight_kernels import CASES, KINDS, ROUNDING, gpu_errors, make

import robboost as rb
from robboost.weights import kernel_cpu, weight_problem
from robboost.weights.kernel_cpu import cpu_pass
from robboost.weights.oracle import reference_pass


def test_twin_by_hand():
    problem = weight_problem(np.array([[[1.0, -4.0]], [[3.0, 0.0]]]), np.zeros((2, 1)), [1.0, 0.5])
    a = torch.tensor([0.5, 0.5], dtype=torch.float64)
    # Columns (1, -2) and (3, 0); mixed (2, -1); norm 3; signs (1, -1) give minorants 3 and 3.
    sharp = reference_pass(problem, a)
    assert sharp.norms.tolist() == [3.0]
    assert sharp.slopes.tolist() == [[3.0, 3.0]]
    # Smoothed at width 2: d = (1, -1/2), minorants 1 + 1 and 3.
    assert reference_pass(problem, a, 2.0).slopes.tolist() == [[2.0, 3.0]]


@pytest.mark.parametrize("width", [0.0, 0.05])
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_minorants_are_below_the_norm_everywhere_and_meet_it(norm, width):
    rng = np.random.default_rng(0)
    slopes = rng.normal(size=(4, 30, 9))
    problem = weight_problem(slopes, np.zeros((4, 30)), 1.0, norm=norm)
    a = torch.full((4,), 0.25, dtype=torch.float64)
    here = reference_pass(problem, a, width)
    order = {"linf": 1, "l2": 2, "l1": np.inf}[norm]
    for b in np.concatenate([rng.normal(size=(50, 4)), np.eye(4)]):
        norms = np.linalg.norm(np.einsum("t,tnd->nd", b, slopes), order, axis=1)
        assert (here.slopes.numpy() @ b <= norms + 1e-12).all()
    if width == 0 or norm == "l1":
        assert here.slopes @ a == pytest.approx(here.norms)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_kernel_is_its_twin(case, kind):
    problem, a = make(*case, kind)
    scale = problem.columns(slice(None)).abs().sum(2).amax(0)
    for width in (0.02, 0.0):
        twin = reference_pass(problem, a, width)
        double = cpu_pass(problem.slopes, problem.radius, a, width, double=True)
        assert bool(((double.norms - twin.norms).abs() <= 1e-13 * scale).all())
        assert bool(((double.slopes - twin.slopes).abs() <= 1e-13 * scale[:, None]).all())
        # Magnitudes that rounding is measured by: summed over members here, their largest in the twin.
        assert bool((double.sizes >= twin.sizes * (1 - 1e-12)).all())
        assert bool((double.sizes <= len(a) * twin.sizes * (1 + 1e-12)).all())
        fast = cpu_pass(problem.slopes, problem.radius, a, width, threads=2)
        assert bool(((fast.norms - twin.norms).abs() <= ROUNDING * scale).all())
        # The dual itself is rounded: by 2^-24 / width per entry where it is not clipped.
        room = ROUNDING * (1 + (problem.columns(slice(None)).abs().amax() / width if width else 0))
        if width:
            assert bool(((fast.slopes - twin.slopes).abs() <= room * scale[:, None]).all())


def test_cpu_kernel_takes_strided_views():
    problem, a = make(4, 60, 40, torch.float32, "pair")
    for view in (problem.every(7), problem.run(slice(13, 31))):
        twin = reference_pass(view, a, 0.02)
        fast = cpu_pass(view.slopes, view.radius, a, 0.02)
        assert torch.allclose(fast.norms, twin.norms, rtol=1e-6)
        assert torch.allclose(fast.slopes, twin.slopes, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [case for case in CASES if case[3] == torch.float16], ids=str)
def test_float16_is_widened_alike_by_processor_and_by_integers(monkeypatch, case):
    problem, a = make(*case, "input")
    first = cpu_pass(problem.slopes, problem.radius, a, 0.02, double=True)
    monkeypatch.setattr(kernel_cpu, "_WIDENS", not kernel_cpu._WIDENS)
    if kernel_cpu._WIDENS:
        pytest.skip("this processor does not widen float16, so there is one way only")
    second = cpu_pass(problem.slopes, problem.radius, a, 0.02, double=True)
    for name in ("norms", "slopes", "sizes"):
        one, other = getattr(first, name), getattr(second, name)
        assert torch.allclose(one, other, rtol=1e-13)
    problem.slopes[0, 1, -1] = float("inf")
    for widens in (False, True):
        monkeypatch.setattr(kernel_cpu, "_WIDENS", widens)
        assert not torch.isfinite(cpu_pass(problem.slopes, problem.radius, a, 0.02).norms[1])


@pytest.mark.parametrize("threads", [1, 3])
def test_cpu_kernel_takes_a_large_radius_piece_by_piece(monkeypatch, threads):
    problem, a = make(4, 60, 40, torch.float16, "pair")
    twin = reference_pass(problem, a, 0.02)
    monkeypatch.setattr(kernel_cpu, "_RADII", 7 * 40)
    for view, pairs in ((problem, slice(None)), (problem.every(3), slice(0, None, 3))):
        found = cpu_pass(view.slopes, view.radius, a, 0.02, double=True, threads=threads)
        assert torch.allclose(found.norms, twin.norms[pairs], rtol=1e-12)
        assert torch.allclose(found.slopes, twin.slopes[pairs], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_kernels_do_not_swallow_what_is_not_a_number(dtype, bad):
    slopes = torch.randn(4, 300, 450).to(dtype)
    slopes[2, 177, 449] = bad
    with pytest.raises(rb.InputError, match="pair 177"):
        rb.solve_weights(slopes, torch.ones(4, 300), 0.1)


def test_small_float16_numbers_keep_their_value():
    # Subnormal numbers of float16 included.
    slopes = (2.0 ** torch.arange(-24, -8, dtype=torch.float64)).to(torch.float16).repeat(3, 2, 1)
    problem = weight_problem(slopes, torch.zeros(3, 2), 1.0)
    a = torch.full((3,), 1 / 3, dtype=torch.float64)
    fast = cpu_pass(slopes, problem.radius, a, 0.0, double=True)
    assert fast.norms == pytest.approx(reference_pass(problem, a).norms, rel=1e-14)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; its CPU twin is above")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gpu_kernel_is_its_twin(case, kind):
    # `python benchmarks/weights_gpu.py --check` does the same where pytest is missing.
    errors = gpu_errors(*make(*case, kind))
    assert max(errors.values()) <= 1, errors
