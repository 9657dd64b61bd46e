"""Random networks (hypothesis): structure, weights, threat and method drawn; no point of the set lies below."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks_for_bounds import Skip
from torch import nn

from robboost import Threat, margin_bounds
from robboost.bounds.methods import METHODS, TIGHTEST

ACTIVATIONS = st.sampled_from([nn.ReLU(), nn.LeakyReLU(0.01), nn.LeakyReLU(0.5), nn.Tanh(), nn.Sigmoid()])


@st.composite
def networks(draw):
    """(network, input shape): up to two image layers, then up to two flat ones."""
    torch.manual_seed(draw(st.integers(0, 10**6)))
    side, channels = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    shape, layers = (channels, side, side), []
    for _ in range(draw(st.integers(0, 2))):
        kernel = draw(st.integers(1, min(3, side)))
        wide, stride = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        kind = draw(st.sampled_from(["conv", "grouped", "norm", "average", "max", "skip"]))
        if kind == "grouped":
            layers.append(nn.Conv2d(channels, channels * wide, kernel, stride, groups=channels))
            channels *= wide
        elif kind in ("conv", "norm"):
            layers.append(nn.Conv2d(channels, wide, kernel, stride, padding=draw(st.integers(0, kernel // 2))))
            channels = wide
            if kind == "norm":
                layers.append(nn.BatchNorm2d(wide))
                layers[-1].running_mean.normal_()
                layers[-1].running_var.uniform_(0.2, 2)
                nn.init.normal_(layers[-1].weight)
        elif kind == "skip":
            layers.append(Skip(nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1)), nn.Identity()))
        else:
            layers.append((nn.AvgPool2d if kind == "average" else nn.MaxPool2d)(kernel, stride))
        layers.append(draw(ACTIVATIONS))
        side = nn.Sequential(*layers).eval()(torch.zeros(1, *shape)).shape[-1]
    layers.append(nn.Flatten())
    size = channels * side * side
    for _ in range(draw(st.integers(0, 2))):
        wide = draw(st.integers(1, 6))
        layers += [nn.Linear(size, wide), draw(ACTIVATIONS)]
        size = wide
    layers.append(nn.Linear(size, draw(st.integers(2, 4))))
    return nn.Sequential(*layers).double().eval().requires_grad_(False), shape


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    networks(),
    st.sampled_from(["linf", "l2", "l1"]),
    st.sampled_from([None, (0.0, 1.0)]),
    st.floats(0, 1),
    st.sampled_from(METHODS),
)
def test_no_point_of_the_set_lies_below(drawn, norm, clip, eps, method):
    model, shape = drawn
    x, threat = torch.rand(2, *shape, dtype=torch.float64), Threat(eps, norm, clip)
    y = model(x).argmax(1)
    bounds = margin_bounds(model, x, y, threat, method, precision="float64")
    others = torch.arange(bounds.lower.shape[1]).expand(2, -1)
    others = others + (others >= y[:, None])
    for draw in range(24):
        point = threat.sample(x) if draw % 2 else threat.extreme_points(x)
        logits = model(point)
        true = logits.gather(1, y[:, None]) - logits.gather(1, others)
        line = (bounds.slope.flatten(2) @ (point - x).flatten(1)[:, :, None]).squeeze(2) + bounds.intercept
        assert (line <= true + 1e-9).all()
        assert (bounds.lower <= true + 1e-9).all()
    if method == "tightest":
        for part in TIGHTEST:
            assert (bounds.lower >= margin_bounds(model, x, y, threat, part, precision="float64").lower).all()
