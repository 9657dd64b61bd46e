"""No method is above the exact minimum of the margins of tiny networks, for each operation and norm."""

from __future__ import annotations

import pytest
import torch
from exact_minimum import exact_minima
from networks_for_bounds import Normalised, Skip
from torch import nn

from robboost import Threat, margin_bounds
from robboost.bounds.methods import METHODS


def _normalisation(channels):
    layer = nn.BatchNorm2d(channels)
    layer.running_mean.normal_(0, 0.3)
    layer.running_var.uniform_(0.5, 2)
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.normal_(layer.bias, 0, 0.3)
    return layer


PIECEWISE_LINEAR = {
    "relu": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), (3,)),
    "leaky relu": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.01), nn.Linear(5, 5), nn.LeakyReLU(0.4), nn.Linear(5, 3)),
        (3,),
    ),
    "stride, padding, groups": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 2, groups=2, padding=(1, 0)),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        (1, 4, 4),
    ),
    "dilation": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2),
            nn.ReLU(),
            nn.Conv2d(2, 3, 2, dilation=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(27, 3),
        ),
        (1, 4, 4),
    ),
    "batch norm, average pooling, dropout": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2, bias=False),
            _normalisation(2),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AvgPool2d(2, 1, padding=1, count_include_pad=False),
            nn.Flatten(),
            nn.Linear(32, 4),
            nn.ReLU(),
            nn.Linear(4, 3),
        ),
        (1, 4, 4),
    ),
    "max pooling": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 2), nn.ReLU(), nn.MaxPool2d(2, 2, padding=1), nn.Flatten(), nn.Linear(8, 3)
        ),
        (1, 4, 4),
    ),
    "max pooling first": (
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(3, 3)),
        (1, 4, 4),
    ),
    "residual, scale and shift": (
        lambda: Normalised(
            nn.Sequential(
                nn.Conv2d(1, 2, 2, padding=1),
                nn.ReLU(),
                Skip(nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 1)), nn.Identity()),
                Skip(nn.Sequential(nn.Conv2d(2, 2, 2, stride=2)), nn.Conv2d(2, 2, 2, stride=2)),
                nn.Flatten(),
                nn.Linear(2, 3),
            ),
            1,
        ),
        (1, 2, 2),
    ),
    "two affine layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), (3,)),
}
THREATS = [Threat(0.25), Threat(0.4, clip=(0.0, 1.0)), Threat(0.5, "l2"), Threat(0.8, "l1")]


def made(table, name, seed):
    torch.manual_seed(seed)
    maker, shape = table[name]
    model = maker().double().eval().requires_grad_(False)
    return model, torch.rand(shape, dtype=torch.float64)


@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_never_above_the_exact_minimum(name, threat):
    model, x = made(PIECEWISE_LINEAR, name, 3)
    label = int(model(x[None]).argmax())
    exact = torch.tensor(exact_minima(model, x, label, threat), dtype=torch.float64)
    stated, attained = exact.T
    assert (stated <= attained + 2e-5).all(), (stated, attained)
    if threat.norm != "l2" or x.numel() <= 4:  # the program is the network, to its tolerances
        assert torch.allclose(stated, attained, atol=2e-5), (stated, attained)
    for method in METHODS:
        bound = margin_bounds(model, x[None], torch.tensor([label]), threat, method, precision="float64").lower[0]
        assert (bound <= attained + 1e-9).all(), (method, bound - attained)


@pytest.mark.parametrize("norm", ["linf", "l1"])
@pytest.mark.parametrize("name", [name for name in PIECEWISE_LINEAR if "max" not in name])
def test_the_exact_minimum_itself_where_every_neuron_is_stable(name, norm):
    model, x = made(PIECEWISE_LINEAR, name, 3)
    label = int(model(x[None]).argmax())
    threat = Threat(1e-4, norm)
    exact = torch.tensor(exact_minima(model, x, label, threat), dtype=torch.float64)
    for method in ("same-slope", "crown-ibp", "crown", "alpha-crown", "tightest"):
        bound = margin_bounds(model, x[None], torch.tensor([label]), threat, method, precision="float64").lower[0]
        assert torch.allclose(bound, exact[:, 1], rtol=0, atol=1e-8), (method, bound - exact[:, 1])


SMOOTH = {
    "sigmoid": (
        lambda: nn.Sequential(nn.Linear(2, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)),
        (2,),
    ),
    "tanh": (lambda: nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (2,)),
    "mixed": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, (1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3), nn.Sigmoid()
        ),
        (1, 1, 2),
    ),
    "one input, saturated": (
        lambda: nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 4), nn.Sigmoid(), nn.Linear(4, 3)),
        (1,),
    ),
}


def grid_of(x, threat, steps=301):
    """A dense grid of the set in one or two dimensions, its border included."""
    axis = torch.linspace(-1, 1, steps, dtype=torch.float64)
    square = torch.cartesian_prod(*[axis] * x.numel()).view(-1, x.numel())
    if threat.norm == "linf":
        centre, radius = threat.region(x[None])
        return centre + radius * square.view(-1, *x.shape)
    size = {"l2": square.norm(dim=1), "l1": square.abs().sum(1)}[threat.norm]
    # The square's own rings become the ball's: every ray keeps its points.
    scaled = square * (square.abs().amax(1) / size.clamp(min=1e-300))[:, None]
    return x + threat.eps * scaled.view(-1, *x.shape)


@pytest.mark.parametrize("scale", [1.0, 6.0])
@pytest.mark.parametrize("threat", THREATS, ids=str)
@pytest.mark.parametrize("name", SMOOTH)
def test_never_above_the_minimum_on_a_dense_grid(name, threat, scale):
    model, x = made(SMOOTH, name, 1)
    for layer in model:
        if hasattr(layer, "weight"):
            layer.weight.data *= scale  # large weights: intervals that reach far into both flat ends
    label = int(model(x[None]).argmax())
    points = grid_of(x, threat)
    free = Threat(threat.eps, threat.norm)
    assert free.contains(points, x[None].expand_as(points), tolerance=1e-12).all()
    logits = model(points)
    margins = logits[:, label : label + 1] - logits
    lowest = torch.cat([margins[:, :label], margins[:, label + 1 :]], 1).amin(0)
    for method in METHODS:
        found = margin_bounds(model, x[None], torch.tensor([label]), threat, method, precision="float64")
        assert (found.lower[0] <= lowest + 1e-9).all(), (method, found.lower[0] - lowest)
        line = points.sub(x).flatten(1) @ found.slope[0].flatten(1).T + found.intercept[0]
        others = torch.cat([margins[:, :label], margins[:, label + 1 :]], 1)
        assert (line <= others + 1e-9).all(), method
