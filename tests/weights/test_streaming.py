"""A streamed problem gives what the same arrays give in memory."""

import pytest
import torch

from robboost.errors import InputError
from robboost.weights import HeldSlopes, SolverSettings, SomePairs, margins, solve, streamed_problem, weight_problem
from robboost.weights.oracle import checked_pass, reference_pass
from robboost.weights.verify import DualPoint, recompute


class _Slabs(HeldSlopes):
    """Slabs of seven pairs, whose memory is overwritten as soon as the next is asked for."""

    def slabs(self):
        for start in range(0, self.held.shape[1], 7):
            part = slice(start, min(start + 7, self.held.shape[1]))
            slab = self.held[:, part].clone()
            yield part, slab
            slab.fill_(float("nan"))


def _arrays(pairs: int, *, members: int = 4, dim: int = 9, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(members, pairs, dim, generator=generator).to(dtype) * 0.2
    return slopes, torch.rand(members, pairs, generator=generator, dtype=torch.float64) + 0.3


def _settings(**changes):
    return SolverSettings(**{"gap": 1e-6, **changes})


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
@pytest.mark.parametrize("radius", [0.7, torch.linspace(0.1, 1.0, 9)])
def test_pass_margins_and_proof_equal_those_in_memory(norm, radius):
    slopes, c = _arrays(40)
    memory = weight_problem(slopes, c, radius, norm=norm)
    stream = streamed_problem(_Slabs(slopes), c, radius, norm=norm)
    a = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for read in (checked_pass, reference_pass):
        ours, theirs = read(stream, a, 0.01), read(memory, a, 0.01)
        assert torch.allclose(ours.norms, theirs.norms, rtol=1e-14)
        assert torch.allclose(ours.slopes, theirs.slopes, rtol=1e-13, atol=1e-15)
    assert torch.allclose(margins(stream, a), margins(memory, a), rtol=1e-13)
    proof = [DualPoint(a, 0.01, torch.linspace(0, 1, 40, dtype=torch.float64))]
    ours, theirs = recompute(stream, a, proof), recompute(memory, a, proof)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-13)
    assert ours.bound == pytest.approx(theirs.bound, rel=1e-12)


@pytest.mark.parametrize("method", ["auto", "uniform"])
def test_solution_equals_that_in_memory(method):
    slopes, c = _arrays(300)
    memory = solve(weight_problem(slopes, c, 1.0), method=method, settings=_settings())
    stream = solve(streamed_problem(_Slabs(slopes), c), method=method, settings=_settings())
    assert stream.objective == pytest.approx(memory.objective, rel=2e-6)
    assert stream.status == memory.status
    assert stream.gap == pytest.approx(memory.gap, abs=1e-6)
    assert stream.lower_bound <= memory.objective * (1 + 1e-12)


def test_large_problems_start_from_a_sample_of_the_stream():
    slopes, c = _arrays(20_001, members=3, dim=5, dtype=torch.float16)
    stream = solve(streamed_problem(_Slabs(slopes), c, kappa=2.0), settings=_settings())
    memory = solve(weight_problem(slopes, c, 1.0, kappa=2.0), settings=_settings())
    assert stream.status == memory.status == "optimal"
    assert stream.objective == pytest.approx(memory.objective, rel=2e-6)


def test_take_pairs_and_every_hold_the_rows_that_they_name():
    slopes, c = _arrays(50)
    radius = torch.linspace(0.1, 1.0, 9)
    stream = streamed_problem(_Slabs(slopes), c, radius)
    part = stream.take_pairs(torch.tensor([41, 3, 17]))
    assert torch.equal(part.slopes, slopes[:, [3, 17, 41]])
    assert torch.equal(part.intercepts, c[:, [3, 17, 41]])
    mask = torch.zeros(50, dtype=torch.bool)
    mask[[5, 6]] = True
    assert torch.equal(stream.take_pairs(mask).slopes, slopes[:, [5, 6]])
    assert torch.equal(stream.columns(slice(2, 4)), slopes[:, 2:4].double() * radius.double())
    sample = stream.every(5)
    rows = [int((slopes[0] == row).all(1).nonzero()) for row in sample.slopes[0]]
    assert len(set(rows)) == sample.n_pairs >= 10
    assert torch.equal(sample.intercepts, c[:, rows])


@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_stream_equal_parts_of_the_arrays(seed):
    slopes, c = _arrays(60)
    kept = torch.rand(60, generator=torch.Generator().manual_seed(seed)) < 0.5
    kept[:9] = seed > 0
    stream = SomePairs(_Slabs(slopes), kept).take_members([2, 0])
    problem = streamed_problem(stream, c[[2, 0]][:, kept])
    expected = weight_problem(slopes[[2, 0]][:, kept], c[[2, 0]][:, kept], 1.0)
    a = torch.tensor([0.3, 0.7], dtype=torch.float64)
    assert torch.allclose(margins(problem, a), margins(expected, a), rtol=1e-13)
    assert torch.equal(problem.take_pairs(torch.arange(0, 20, 3)).slopes, expected.slopes[:, :20:3])
    spread = stream.spread(10)
    assert len(spread) >= 3
    assert torch.equal(stream.take(spread), expected.slopes[:, spread])
    whole = streamed_problem(_Slabs(slopes), c)
    assert torch.allclose(margins(whole.take_members([1]), [1.0]), margins(whole, [0.0, 1.0, 0.0, 0.0]), rtol=1e-13)


def test_refusals():
    slopes, c = _arrays(10)
    with pytest.raises(InputError, match=r"intercepts have shape \(4, 9\)"):
        streamed_problem(HeldSlopes(slopes), c[:, :9])
    with pytest.raises(InputError, match="NaN or infinity"):
        streamed_problem(HeldSlopes(slopes), c / 0)
    with pytest.raises(InputError, match="kappa=0"):
        streamed_problem(HeldSlopes(slopes), c, kappa=0.0)
    with pytest.raises(InputError, match="holds no pair"):
        streamed_problem(HeldSlopes(slopes[:, :0]), c[:, :0])
    problem = streamed_problem(HeldSlopes(slopes), c)
    with pytest.raises(InputError, match="method='coordinate' needs the slopes in memory"):
        solve(problem, method="coordinate")
    with pytest.raises(InputError, match="expected `runs`"):
        problem.run(slice(0, 2))
    broken = slopes.clone()
    broken[2, 8, 1] = float("nan")
    with pytest.raises(InputError, match="slopes of pair 8 hold NaN"):
        solve(streamed_problem(_Slabs(broken), c))
