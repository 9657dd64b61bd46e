"""Bounds small enough to work out on paper."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from robboost import Threat, margin_bounds
from robboost.bounds.intervals import Interval
from robboost.bounds.network import Node
from robboost.bounds.relaxations import relaxation

METHODS = ["ibp", "crown-ibp", "same-slope", "crown", "alpha-crown", "tightest"]


def linear(weight, bias):
    layer = nn.Linear(len(weight[0]), len(weight), dtype=torch.float64)
    layer.weight.data = torch.tensor(weight, dtype=torch.float64)
    layer.bias.data = torch.tensor(bias, dtype=torch.float64)
    return layer


@pytest.mark.parametrize("method", [m for m in METHODS if m not in ("ibp",)])
@pytest.mark.parametrize(("norm", "dual"), [("linf", 4.0), ("l2", 10**0.5), ("l1", 3.0)])
def test_linear_network_is_exact(method, norm, dual):
    # Logits (x1 + 2 x2, -x2): the margin of class 0 is x1 + 3 x2, 7 at (1, 2); its dual norms are 4, sqrt(10), 3.
    model = nn.Sequential(linear([[1.0, 2.0], [0.0, -1.0]], [0.0, 0.0])).eval()
    x = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    bounds = margin_bounds(model, x, torch.tensor([0]), Threat(0.5, norm), method, precision="float64")
    assert bounds.slope.tolist() == [[[1.0, 3.0]]]
    assert bounds.intercept.item() == pytest.approx(7.0, abs=1e-12)
    assert bounds.lower.item() == pytest.approx(7.0 - 0.5 * dual, abs=1e-12)


def test_box_moves_the_centre():
    # Margin x1 - x2 at (0.1, 0.9), eps 0.3, box [0, 1]: x1 >= 0, x2 <= 1, so the minimum is -1 instead of -1.4.
    model = nn.Sequential(linear([[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0])).eval()
    x, y = torch.tensor([[0.1, 0.9]], dtype=torch.float64), torch.tensor([0])
    bounds = margin_bounds(model, x, y, Threat(0.3, clip=(0.0, 1.0)), precision="float64")
    assert bounds.lower.item() == pytest.approx(-1.0, abs=1e-12)
    assert bounds.intercept.item() == pytest.approx(-0.8, abs=1e-12)
    assert bounds.box_used
    free = margin_bounds(model, x, y, Threat(0.3), precision="float64")
    assert free.lower.item() == pytest.approx(-1.4, abs=1e-12)
    assert not free.box_used


@pytest.fixture
def one_relu():
    """Logits (relu(z), 0) with z = x1 + x2 + 1."""
    return nn.Sequential(linear([[1.0, 1.0]], [1.0]), nn.ReLU(), linear([[1.0], [0.0]], [0.0, 0.0])).eval()


@pytest.mark.parametrize(
    ("method", "label", "slope", "intercept", "lower"),
    [
        # eps = 1: z in [-1, 3]. Class 0 needs relu below: crown takes slope 1 (3 > 1), same-slope 3/4, intervals 0.
        ("crown", 0, 1.0, 1.0, -1.0),
        ("crown-ibp", 0, 1.0, 1.0, -1.0),
        ("same-slope", 0, 0.75, 0.75, -0.75),
        ("ibp", 0, 0.0, 0.0, 0.0),
        ("alpha-crown", 0, 0.0, 0.0, 0.0),
        ("tightest", 0, 0.0, 0.0, 0.0),
        # Class 1 needs -relu below: the chord 3/4 (z + 1), at x = 0 it is 3/2.
        ("crown", 1, -0.75, -1.5, -3.0),
        ("crown-ibp", 1, -0.75, -1.5, -3.0),
        ("same-slope", 1, -0.75, -1.5, -3.0),
        ("ibp", 1, 0.0, -3.0, -3.0),
    ],
)
def test_one_relu(one_relu, method, label, slope, intercept, lower):
    x = torch.zeros(1, 2, dtype=torch.float64)
    bounds = margin_bounds(one_relu, x, torch.tensor([label]), Threat(1.0), method, precision="float64")
    assert bounds.slope[0, 0].tolist() == pytest.approx([slope, slope], abs=1e-6)
    assert bounds.intercept.item() == pytest.approx(intercept, abs=1e-6)
    assert bounds.lower.item() == pytest.approx(lower, abs=1e-6)


def test_one_leaky_relu():
    # z in [-3, 1] (bias -1), slope 1/4 for negatives: the chord goes from -3/4 to 1 with slope 7/16.
    model = nn.Sequential(linear([[1.0, 1.0]], [-1.0]), nn.LeakyReLU(0.25), linear([[1.0], [0.0]], [0.0, 0.0])).eval()
    x = torch.zeros(1, 2, dtype=torch.float64)
    first = margin_bounds(model, x, torch.tensor([0]), Threat(1.0), "crown", precision="float64")
    assert first.slope[0, 0].tolist() == [0.25, 0.25]
    assert first.lower.item() == pytest.approx(-0.75, abs=1e-12)
    second = margin_bounds(model, x, torch.tensor([1]), Threat(1.0), "crown", precision="float64")
    assert second.slope[0, 0].tolist() == pytest.approx([-7 / 16, -7 / 16], abs=1e-12)
    assert second.intercept.item() == pytest.approx(-(7 / 16 * -1 + 9 / 16), abs=1e-12)
    assert second.lower.item() == pytest.approx(-1.0, abs=1e-12)


def test_maxpool_with_a_sure_winner_is_linear_and_without_one_constant():
    # Pixels (3, 0 / 1, 0) win surely for eps = 1/2; for eps = 2 the upper line is the constant 5.
    model = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), linear([[1.0], [0.0]], [0.0, 0.0])).eval()
    x = torch.tensor([[[[3.0, 0.0], [1.0, 0.0]]]], dtype=torch.float64)
    sure = margin_bounds(model, x, torch.tensor([1]), Threat(0.5), "crown", precision="float64")
    assert sure.slope.flatten().tolist() == [-1.0, 0.0, 0.0, 0.0]
    assert sure.lower.item() == pytest.approx(-3.5, abs=1e-12)
    loose = margin_bounds(model, x, torch.tensor([1]), Threat(2.0), "crown", precision="float64")
    assert loose.slope.flatten().tolist() == [0.0, 0.0, 0.0, 0.0]
    assert loose.lower.item() == pytest.approx(-5.0, abs=1e-12)


@pytest.mark.parametrize(("kind", "layer"), [("sigmoid", nn.Sigmoid()), ("tanh", nn.Tanh())])
def test_one_smooth_activation(kind, layer):
    # z in [-1, 1]: by symmetry the two lines are mirror images, and the output interval holds the function's range.
    model = nn.Sequential(linear([[1.0]], [0.0]), layer, linear([[1.0], [0.0]], [0.0, 0.0])).eval()
    x = torch.zeros(1, 1, dtype=torch.float64)
    bounds = margin_bounds(model, x, torch.tensor([0]), Threat(1.0), "ibp", precision="float64")
    assert bounds.lower.item() == pytest.approx(float(layer(torch.tensor(-1.0, dtype=torch.float64))), abs=1e-12)
    line = margin_bounds(model, x, torch.tensor([0]), Threat(1.0), "crown", precision="float64")
    low = float(line.lower)
    assert low <= float(layer(torch.tensor(-1.0, dtype=torch.float64)))
    # The tangent through the right end: it touches the function left of zero.
    end = float(line.slope.flatten()[0] * 1.0 + line.intercept)
    assert end == pytest.approx(float(layer(torch.tensor(1.0, dtype=torch.float64))), abs=1e-6)


@pytest.mark.parametrize("negative", [0.01, 0.1, 0.3])
def test_leaky_slope_keeps_its_value_in_float64(negative):
    # z in [-3, 1]: the lower line has slope `negative` itself and touches the function at -3. Rounded to float32
    # (0.01 becomes 0.00999999977...) it would lie above the function there.
    model = nn.Sequential(linear([[1.0]], [-1.0]), nn.LeakyReLU(negative), linear([[1.0], [0.0]], [0.0, 0.0])).eval()
    x = torch.zeros(1, 1, dtype=torch.float64)
    bounds = margin_bounds(model, x, torch.tensor([0]), Threat(2.0), "crown", precision="float64")
    assert bounds.slope.item() == negative
    assert bounds.lower.item() == pytest.approx(-3 * negative, abs=1e-15)


@pytest.mark.parametrize("method", METHODS)
def test_numbers_too_large_for_the_arithmetic_prove_nothing(method):
    # z = w (x1 - x2) overflows float32: whatever follows, no finite margin may be claimed.
    model = nn.Sequential(
        linear([[3e38, -3e38], [1.0, 0.0]], [0.0, 0.0]), nn.ReLU(), linear([[1.0, 1.0], [0.0, 0.0]], [0.0, 0.0])
    ).eval()
    x = torch.tensor([[2.0, 2.0]])
    bounds = margin_bounds(model.float(), x, torch.tensor([0]), Threat(1.0), method)
    assert not (bounds.lower > 0).any()


@pytest.mark.parametrize("rule", ["adaptive", "same-slope", "constant"])
def test_a_bound_that_is_no_number_is_not_taken_for_a_stable_neuron(rule):
    node = Node("relu", (0,), (3,), {"negative": 0.0})
    unknown, one = torch.tensor([[torch.nan, -1.0, torch.nan]]), torch.tensor([[1.0, torch.nan, torch.nan]])
    lines = relaxation(node, Interval(unknown, one), rule)
    parts = [lines.upper_intercept, lines.lower_intercept] if rule == "constant" else [lines.lower_slope]
    assert torch.stack(parts).isnan().any(0).all()
