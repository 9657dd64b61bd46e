"""The paper's networks A to L on both shapes: points of the set, Wong and Kolter's own bounds, gradients, memory."""

from __future__ import annotations

import warnings

import pytest
import torch
from networks_for_bounds import build as small
from torch import nn

from robboost import Threat, margin_bounds
from robboost.bounds import Options, backward
from robboost.bounds.budget import Budget
from robboost.bounds.network import Network
from robboost.errors import InputError
from robboost.models.architectures import Residual, build
from robboost.models.graph import trace

SHAPES = {"mnist": (1, 28, 28), "cifar": (3, 32, 32)}


def margins_of(model, x, y):
    logits = model(x)
    others = torch.arange(logits.shape[1] - 1).expand(len(y), -1)
    others = others + (others >= y[:, None])
    return logits.gather(1, y[:, None]) - logits.gather(1, others)


def worst_points(model, x, y, threat, steps=5):
    """Random points, corners, and a few steps of descent on the least margin, for one image."""
    count = 12
    many, labels = x.expand(count, *x.shape[1:]), y.expand(count)
    points = [threat.sample(many), threat.extreme_points(many)]
    point = points[0]
    for _ in range(steps):
        point = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(margins_of(model, point, labels).amin(1).sum(), point)
        point = threat.project(point.detach() - threat.eps * gradient.sign(), many)
    return torch.cat([*points, point])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", "ABCDEFGHIJKL")
def test_no_point_of_the_set_lies_below(name, shape):
    torch.manual_seed(0)
    model = build(name, SHAPES[shape], seed=7).eval()
    x, y = torch.rand(1, *SHAPES[shape]), torch.tensor([3])
    threats = (Threat(0.002), Threat(0.003, clip=(0, 1)), Threat(0.02, "l2"), Threat(0.1, "l1"))
    for threat in threats if name in "ACE" else threats[1:2]:
        points = worst_points(model, x, y, threat)
        labels = y.expand(len(points))
        true = margins_of(model, points, labels)
        for method in ("ibp", "crown-ibp", "crown"):
            bound = margin_bounds(model, x, y, threat, method)
            line = (bound.slope.flatten(2) @ (points - x).flatten(1).T)[0].T + bound.intercept
            assert (line <= true + 1e-5).all(), (threat, method, float((line - true).max()))
            assert (bound.lower <= true + 1e-5).all(), (threat, method)


def dual(model):
    """The network in the form that convex_adversarial takes: skips as layers with two inputs."""
    from convex_adversarial import Dense, DenseSequential

    layers = []
    for module in model:
        if not isinstance(module, Residual):
            layers.append(Dense(module) if isinstance(module, (nn.Conv2d, nn.Linear)) else module)
            continue
        body = list(module.body)
        convolutions = sum(isinstance(part, nn.Conv2d) for part in body)
        *first, last = body
        layers += [Dense(part) if isinstance(part, nn.Conv2d) else part for part in first]
        # Layers between the input of the block and that of its last convolution.
        gap = 2 * convolutions - 3
        layers += [Dense(module.skip, *[None] * gap, last), nn.ReLU()]
    return DenseSequential(*layers)


@pytest.mark.parametrize("name", ["A", "G", "K"])
def test_same_slope_is_wong_and_kolters_bound(name):
    """`convex_adversarial` in exact mode, without the box, on smaller images: every margin to 1e-5."""
    from convex_adversarial import DualNetwork

    shape = (1, 12, 12)
    torch.manual_seed(0)
    model = build(name, shape, seed=1).double().eval()
    x, y = torch.rand(2, *shape, dtype=torch.float64), torch.tensor([4, 7])
    eps = 0.02
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            network = DualNetwork(dual(model) if name == "K" else model, x, eps)
            eye = torch.eye(10, dtype=torch.float64)
            rows = torch.stack([torch.stack([eye[t] - eye[j] for j in range(10) if j != t]) for t in y.tolist()])
            oracle = network(rows)
        finally:
            torch.set_default_dtype(before)
    mine = margin_bounds(model, x, y, Threat(eps), "same-slope", precision="float64").lower
    assert torch.allclose(mine, oracle, rtol=0, atol=1e-5 * float(oracle.abs().max())), (mine - oracle).abs().max()


DIFFERENTIATED = [
    (name, method)
    for name in ("leaky", "conv", "residual", "norm", "pool", "tanh")
    for method in ("ibp", "crown-ibp", "same-slope", "crown")
    # The adaptive slopes of tanh and sigmoid are held fixed: see docs/bounds.md.
    if name != "tanh" or method in ("ibp", "same-slope")
]


@pytest.mark.parametrize(("name", "method"), DIFFERENTIATED)
def test_gradients_are_those_of_finite_differences(name, method):
    """Slope, intercept and lower with respect to every tenth parameter, in float64."""
    model, shape = small(name)
    torch.manual_seed(3)
    x, y, threat = torch.rand(2, *shape, dtype=torch.float64), torch.tensor([0, 2]), Threat(0.05, clip=(0, 1))
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.requires_grad_()
    first = margin_bounds(model, x, y, threat, method, precision="float64", differentiable=True)
    weights = [torch.randn_like(part) for part in (first.slope, first.intercept, first.lower)]

    def value(bounds):
        parts = (bounds.slope, bounds.intercept, bounds.lower)
        return sum((part * weight).sum() for part, weight in zip(parts, weights, strict=True))

    gradients = torch.autograd.grad(value(first), parameters, allow_unused=True)
    step = 1e-6
    for parameter, gradient in zip(parameters, gradients, strict=True):
        flat = parameter.data.view(-1)
        for position in range(0, len(flat), max(1, len(flat) // 2)):
            ends = []
            for sign in (1, -1):
                flat[position] += sign * step
                ends.append(float(value(margin_bounds(model, x, y, threat, method, precision="float64"))))
                flat[position] -= sign * step
            expected = (ends[0] - ends[1]) / (2 * step)
            mine = 0.0 if gradient is None else float(gradient.view(-1)[position])
            assert mine == pytest.approx(expected, rel=2e-4, abs=2e-5)
    assert not margin_bounds(model, x, y, threat, method).slope.requires_grad


# Memory ------------------------------------------------------------------------------------------------------------


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """The most numbers in any one tensor that comes into being, views of broadcasts aside."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor) and part.numel():
                self.most = max(self.most, part.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("method", ["same-slope", "crown", "alpha-crown"])
@pytest.mark.parametrize("structure", ["conv 4 3x3/1, conv 4 4x4/2, fc 16", "conv 4 3x3/1, [conv 4 4x4/2], fc 8"])
def test_a_budget_bounds_every_tensor_and_changes_nothing(structure, method):
    shape = (1, 12, 12)
    model = build(structure, shape, num_classes=4, seed=1).eval()
    x, y = torch.rand(64, *shape, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 4
    free = margin_bounds(model, x, y, Threat(0.05), method, options=Options(iterations=2))
    memory = 4 * 2**20
    with Largest() as seen:
        tight = margin_bounds(model, x, y, Threat(0.05), method, options=Options(iterations=2, memory=memory))
    # The result itself comes on top of the budget.
    assert seen.most <= max(memory // 2, tight.slope.numel() * 4)
    assert torch.allclose(free.lower, tight.lower, atol=2e-5)


@pytest.mark.parametrize("name", ["J", "L"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_plan_for_large_batches_of_large_networks(name, shape):
    """Under 4 GiB the rows of one pass times what a row holds stay within the elements planned, of a share of them."""
    model = build(name, SHAPES[shape]).eval()
    network = Network.build(trace(model, SHAPES[shape]), model, torch.float32)
    for device, memory in (("cpu", 4 * 2**30), ("cuda", 16 * 2**30)):
        budget = Budget.of(network, torch.float32, torch.device(device), memory, 0)
        most = max(torch.Size(node.shape).numel() for node in network.nodes)
        assert budget.elements * 4 * 6 <= memory // 2 + 6 * 8 * most
        assert budget.elements < 2**31 // 8
        assert budget.examples * 9 * most <= 4 * budget.elements + 9 * most
        for index in range(1, len(network.nodes)):
            assert 2 * backward.row_elements(network, index) <= budget.elements


def test_too_small_a_budget_is_refused():
    model, shape = small("mlp")
    with pytest.raises(InputError, match=r"memory=1000: expected at least one MiB"):
        margin_bounds(model, torch.rand(1, *shape), torch.tensor([0]), Threat(0.1), options=Options(memory=1000))
