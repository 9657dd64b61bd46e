"""Large jobs are checked in float64, and arithmetic that is broken on purpose is noticed by every one of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import robboost as rb
from robboost.bounds import Options, backward, checked_examples, cross_check, engine, margins
from robboost.bounds.methods import METHODS
from robboost.bounds.pieces import Piece
from robboost.errors import PrecisionError, SoundnessError
from robboost.mixtures import pool_bounds
from robboost.models.architectures import build
from robboost.store import FillSettings, fill_store

SHAPE = (1, 8, 8)
THREAT = rb.Threat(0.05, clip=(0.0, 1.0))


def network(seed=0):
    return build("conv 4 4x4/2, fc 16", SHAPE, num_classes=4, seed=seed).eval()


def examples(count=100):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, *SHAPE, generator=generator), torch.randint(4, (count,), generator=generator)


def test_which_examples():
    assert checked_examples(0, 99, 99) == []
    assert checked_examples(0, 100, 100) == [99]
    assert checked_examples(0, 1000, 1000) == [249, 499, 749, 999]
    # However a job is cut into chunks, the same four examples are checked, the very last one among them.
    for step in (1, 7, 100, 333, 5000):
        parts = range(0, 60000, step)
        found = [s + i for s in parts for i in checked_examples(s, min(step, 60000 - s), 60000)]
        assert found == [14999, 29999, 44999, 59999]


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("threat", [THREAT, rb.Threat(0.2, "l2"), rb.Threat(0.3, "l1")], ids=str)
def test_honest_bounds_pass(method, precision, threat):
    model, (x, y) = network(), examples(6)
    found = rb.margin_bounds(model, x, y, threat, method, precision=precision)
    cross_check(model, found, x, y, threat, [0, 3, 5])


def tf32(values):
    """Ten bits of mantissa instead of 23, in float32 alone: what a GPU's reduced precision does."""
    if values.dtype != torch.float32:
        return values
    return (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


@pytest.fixture
def reduced_precision(monkeypatch):
    def linear(job, node, piece, shapes):
        return [Piece(tf32(piece.values) @ tf32(node.weight))]

    monkeypatch.setitem(backward._TRANSPOSED, "linear", linear)


@pytest.fixture
def wrong_large_tensors(monkeypatch):
    """Right for few rows, wrong for many, as one library call over a huge tensor was."""
    honest = backward.transposed_conv

    def broken(values, weight, **settings):
        return honest(values, weight, **settings) * (1.0 if len(values) < 100 else 0.5)

    monkeypatch.setattr(backward, "transposed_conv", broken)


JOBS = {
    "certify": lambda folder: rb.certify(network(), *examples(), THREAT, method="crown"),
    "fit": lambda folder: rb.RobBoost(THREAT, bounds="crown").fit([network(), network(1)], *examples()),
    "store": lambda folder: fill_store(
        str(folder), [network()], examples(), THREAT, settings=FillSettings(method="crown")
    ),
    "bounds of a pool": lambda folder: pool_bounds([network()], *examples(), THREAT, method="same-slope"),
}


@pytest.mark.parametrize("job", JOBS)
def test_every_long_job_notices_reduced_precision(job, tmp_path, reduced_precision):
    with pytest.raises(PrecisionError, match=r"differ from the same bounds in float64 by .* nothing of this job holds"):
        JOBS[job](tmp_path / "store")


@pytest.mark.parametrize("job", JOBS)
def test_every_long_job_notices_wrong_large_tensors(job, tmp_path, wrong_large_tensors):
    with pytest.raises(PrecisionError) as caught:
        JOBS[job](tmp_path / "store")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SoundnessError)


@pytest.mark.parametrize("job", JOBS)
def test_the_same_jobs_pass_when_nothing_is_broken(job, tmp_path):
    JOBS[job](tmp_path / "store")


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_bounds_above_the_network_itself_are_noticed(monkeypatch, precision):
    """An engine wrong in every precision alike: only the module's own margins can tell."""
    honest = engine.carry

    def generous(*arguments, **keywords):
        piece, losses = honest(*arguments, **keywords)
        return piece, losses + 0.5

    monkeypatch.setattr(engine, "carry", generous)
    model, (x, y) = network(), examples(8)
    found = rb.margin_bounds(model, x, y, rb.Threat(0.001), precision=precision)
    with pytest.raises(PrecisionError, match=r"claim .* more than the network's own margin .*example \d"):
        cross_check(model, found, x, y, rb.Threat(0.001), [0, 7])


def test_the_trace_of_another_network_is_noticed(monkeypatch):
    model, other, (x, y) = network(), network(5), examples(8)
    graph, constants = margins.trace(other, SHAPE), margins.Network.build
    monkeypatch.setattr(margins, "trace", lambda *_: graph)
    monkeypatch.setattr(margins.Network, "build", staticmethod(lambda g, m, dtype: constants(g, other, dtype)))
    found = rb.margin_bounds(model, x, y, THREAT)
    with pytest.raises(PrecisionError, match="network's own margin"):
        cross_check(model, found, x, y, THREAT, list(range(8)))


def test_a_neuron_that_ties_moves_one_bound_and_is_no_alarm():
    """z in [-1, 1] up to rounding: slope 0 in one precision, 1 in the other, and both are valid."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    torch.manual_seed(0)
    x, y = torch.rand(100, 8), torch.randint(4, (100,))
    with torch.no_grad():
        model[0].bias[0] = -model[0].weight[0] @ x[99]
    for eps in (0.01, 0.1):
        found = rb.margin_bounds(model, x, y, rb.Threat(eps))
        cross_check(model, found, x, y, rb.Threat(eps), [99])


def test_overflow_that_claims_nothing_is_no_alarm():
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(1e20)
        model[-1].weight.mul_(1e20)
    x, y = examples(4)
    found = rb.margin_bounds(model, x, y, THREAT, options=Options())
    assert not (found.lower > 0).any()
    cross_check(model, found, x, y, THREAT, [0, 3])
