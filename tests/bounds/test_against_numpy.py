"""The engine against CROWN and Fast-Lin written a second time (`numpy_crown.py`)."""

import numpy as np
import pytest
import torch
from numpy_crown import chain_of, margins
from torch import nn

import robboost as rb
from robboost.models.architectures import build

NETWORKS = {
    "two hidden layers": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 7), nn.ReLU(), nn.Linear(7, 4)
    ),
    "stride, padding, dilation, groups": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, stride=2, groups=2, dilation=1, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 2, 2, dilation=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
    "pooling and normalisation": lambda: nn.Sequential(
        nn.BatchNorm2d(3),
        nn.Conv2d(3, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.AvgPool2d(1, 1),
        nn.Flatten(),
        nn.LazyLinear(4),
    ),
}


def network(name):
    torch.manual_seed(5)
    model = NETWORKS[name]().double().eval()
    model(torch.zeros(1, 3, 2, 2, dtype=torch.float64))  # lazy layers take their shape
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model


def reference(model, x, y, threat, method):
    chain = chain_of(model, x.shape[1:])
    slopes, intercepts, lowers = [], [], []
    for image, label in zip(x, y, strict=True):
        region = threat.region(image[None])
        centre, radius = region.centre.flatten().numpy(), region.radius.flatten().numpy()
        slope, intercept, lower = margins(
            chain, centre, radius if threat.norm == "linf" else radius[0], threat.norm, int(label), method
        )
        slopes.append(slope)
        intercepts.append(intercept + slope @ image.flatten().numpy())
        lowers.append(lower)
    return map(np.stack, (slopes, intercepts, lowers))


@pytest.mark.parametrize(
    "threat", [rb.Threat(0.1), rb.Threat(0.2, clip=(0, 1)), rb.Threat(0.3, "l2"), rb.Threat(0.3, "l1")], ids=str
)
@pytest.mark.parametrize("name", NETWORKS)
def test_same_slope_is_fast_lin(name, threat):
    """The method has no intersection with intervals, so that slope, intercept and bound agree one by one."""
    model = network(name)
    x = torch.rand(5, 3, 2, 2, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 1])
    bounds = rb.margin_bounds(model, x, y, threat, "same-slope", precision="float64")
    slope, intercept, lower = reference(model, x, y, threat, "same-slope")
    np.testing.assert_allclose(bounds.slope.flatten(2).numpy(), slope, rtol=0, atol=1e-10)
    np.testing.assert_allclose(bounds.intercept.numpy(), intercept, rtol=0, atol=1e-10)
    np.testing.assert_allclose(bounds.lower.numpy(), lower, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "threat", [rb.Threat(0.03), rb.Threat(0.05, clip=(0, 1)), rb.Threat(0.1, "l2"), rb.Threat(0.1, "l1")], ids=str
)
@pytest.mark.parametrize("name", NETWORKS)
def test_crown_where_intervals_do_not_help(name, threat):
    """The engine intersects hidden bounds with intervals; on these small sets that changes nothing."""
    model = network(name)
    x = torch.rand(5, 3, 2, 2, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 1])
    bounds = rb.margin_bounds(model, x, y, threat, "crown", precision="float64")
    slope, intercept, lower = reference(model, x, y, threat, "crown")
    np.testing.assert_allclose(bounds.slope.flatten(2).numpy(), slope, rtol=0, atol=1e-10)
    np.testing.assert_allclose(bounds.intercept.numpy(), intercept, rtol=0, atol=1e-10)
    np.testing.assert_allclose(bounds.lower.numpy(), lower, rtol=0, atol=1e-10)


def test_architecture_a_in_float32():
    model = build("A", (1, 28, 28), seed=1).eval()
    data = rb.load_dataset("mnist-small").take(2)
    threat = rb.Threat(0.1, clip=(0, 1))
    for method in ("same-slope", "crown"):
        bounds = rb.margin_bounds(model, data.images, data.labels, threat, method)
        _, intercept, lower = reference(model.double(), data.images.double(), data.labels, threat, method)
        model.float()
        np.testing.assert_allclose(bounds.intercept.numpy(), intercept, rtol=0, atol=2e-5)
        np.testing.assert_allclose(bounds.lower.numpy(), lower, rtol=0, atol=2e-5)
