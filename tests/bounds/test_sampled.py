"""Points of the threat set never lie below a bound: every operation, method, norm, with and without the box."""

from __future__ import annotations

import pytest
import torch
from networks_for_bounds import NETWORKS, build

from robboost import Threat, margin_bounds
from robboost.bounds.methods import METHODS

THREATS = [
    Threat(0.1),
    Threat(0.15, clip=(0.0, 1.0)),
    Threat(0.4, "l2"),
    Threat(0.8, "l1"),
]


def margins_of(model, x, y):
    logits = model(x)
    own = logits.gather(1, y[:, None])
    others = torch.arange(logits.shape[1] - 1).expand(len(y), -1)
    others = others + (others >= y[:, None])
    return own - logits.gather(1, others)


def attacked_points(model, x, y, threat, steps=10):
    """A few ascent steps against each target's margin, from random starts inside the set."""
    point = threat.sample(x)
    for _ in range(steps):
        point = point.detach().requires_grad_()
        margins_of(model, point, y).min(1).values.sum().backward()
        point = threat.project(point - 0.1 * point.grad.sign(), x)
    return point.detach()


def assert_below(bounds, model, x, y, points, tolerance):
    true = margins_of(model, points, y)
    claimed = (bounds.slope.flatten(2) @ (points - x).flatten(1)[:, :, None]).squeeze(2) + bounds.intercept
    assert (claimed <= true + tolerance).all(), float((claimed - true).max())
    assert (bounds.lower <= true + tolerance).all(), float((bounds.lower - true).max())


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", NETWORKS)
def test_no_point_of_the_set_lies_below(name, threat):
    model, shape = build(name)
    torch.manual_seed(1)
    x = torch.rand(4, *shape, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 0])
    points = [threat.sample(x) for _ in range(20)] + [threat.extreme_points(x) for _ in range(20)]
    points.append(attacked_points(model, x, y, threat))
    for method in METHODS:
        bounds = margin_bounds(model, x, y, threat, method, precision="float64")
        for point in points:
            assert_below(bounds, model, x, y, point, 1e-10)
        assert torch.isfinite(bounds.lower).all()


@pytest.mark.parametrize("name", NETWORKS)
def test_tightest_is_never_below_a_part_and_the_box_never_loosens(name):
    model, shape = build(name)
    x = torch.rand(3, *shape, dtype=torch.float64)
    y = torch.tensor([2, 1, 0])
    parts = ["ibp", "crown-ibp", "same-slope", "crown"]
    for threat in THREATS:
        best = margin_bounds(model, x, y, threat, "tightest", precision="float64")
        for part in parts:
            single = margin_bounds(model, x, y, threat, part, precision="float64")
            assert (best.lower >= single.lower).all()
        optimised = margin_bounds(model, x, y, threat, "alpha-crown", precision="float64")
        crown = margin_bounds(model, x, y, threat, "crown", precision="float64")
        assert (optimised.lower >= crown.lower - 1e-12).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_eps_zero_gives_the_logits(name, method):
    model, shape = build(name)
    x = torch.rand(3, *shape, dtype=torch.float64)
    y = torch.tensor([2, 1, 0])
    true = margins_of(model, x, y)
    for norm in ("linf", "l2", "l1"):
        bounds = margin_bounds(model, x, y, Threat(0.0, norm), method, precision="float64")
        assert torch.allclose(bounds.lower, true, atol=1e-9)
        assert torch.allclose(bounds.intercept, true, atol=1e-9)
