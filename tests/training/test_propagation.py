"""The training bounds: a hand-computed case, the module they stand for, and points of the set never below them."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from robboost.errors import InputError
from robboost.models.architectures import build
from robboost.threat import Threat
from robboost.training.losses import point_margins
from robboost.training.network import Network, pixel_mask
from robboost.training.propagation import Norms, box, interval_margins, intervals, linear_bounds, linear_margins, points

SHAPE = (2, 9, 9)
STRUCTURES = [
    "fc 12",
    "conv 3 3x3/1, conv 4 4x4/2, fc 10, fc 7",
    "conv 3 4x4/2, conv 4 3x3/1",
    "conv 3 3x3/1, [conv 4 4x4/2, conv 4 3x3/1, conv 4 3x3/1], fc 9",
]


def network(structure: str, *, batch_norm: bool = False, shape: tuple[int, ...] = SHAPE, mask: bool = False) -> Network:
    chosen = pixel_mask(shape, 0.7, seed=3) if mask else None
    return Network.of(structure, shape, num_classes=5, batch_norm=batch_norm, mask=chosen)


def even(structure: str) -> tuple[int, ...]:
    return (2, 8, 8) if "[" in structure else SHAPE


def all_bounds(net, weights, x, y, eps, norms):
    region = box(x, torch.tensor(eps), net.mask)
    trace = intervals(net, weights, *region, norms)
    bounds = {"interval": interval_margins(net, weights, trace, y)}
    for rule in ("adaptive", "same-slope"):
        bounds[rule] = linear_margins(net, weights, trace, region, y, norms, rule)
    return bounds


def test_a_network_computed_by_hand() -> None:
    """x in [0.25, 0.75]; hidden relu(x - 0.5), relu(0.5 - x); logits (h1 - h2, 0.1, ...): see the numbers below."""
    net = Network.of("fc 2", (1, 1, 1), num_classes=2, batch_norm=False, mask=None)
    weights = [
        torch.tensor([[1.0], [-1.0]]),
        torch.tensor([-0.5, 0.5]),
        torch.tensor([[1.0, -1.0], [0.0, 0.0]]),
        torch.tensor([0.0, 0.1]),
    ]
    x, y = torch.full((1, 1, 1, 1), 0.5), torch.tensor([0])
    bounds = all_bounds(net, weights, x, y, 0.25, Norms())
    # Both hidden inputs are in [-1/4, 1/4], both outputs in [0, 1/4]: h1 - h2 - 0.1 >= -0.35.
    assert bounds["interval"].item() == pytest.approx(-0.35)
    # h1 >= (x - 1/2) / 2 and h2 <= (1/2 - x) / 2 + 1/8 (same slope), so h1 - h2 - 0.1 >= x - 0.725 >= -0.475.
    assert bounds["same-slope"].item() == pytest.approx(-0.475)
    # Adaptive, at a tie: h1 >= 0 and h2 as before, so h1 - h2 - 0.1 >= -1/4 - 0.1.
    assert bounds["adaptive"].item() == pytest.approx(-0.35)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_program_and_saved_module_agree(structure: str, batch_norm: bool) -> None:
    shape = even(structure)
    net = network(structure, batch_norm=batch_norm, shape=shape, mask=True)
    flat = net.initial("default", seed=1) + 0.05 * torch.randn(net.size, generator=torch.Generator().manual_seed(0))
    x = torch.rand(6, *shape, generator=torch.Generator().manual_seed(1))
    norms = Norms()
    logits = points(net, net.weights(flat), x, norms)
    module = net.module(flat, norms.in_order())
    assert torch.allclose(module(x), logits, atol=1e-5)
    hidden = net.mask == 0
    assert torch.equal(module(x), module(torch.where(hidden, 1 - x, x)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_flat_vector_holds_the_built_module(structure: str) -> None:
    shape = even(structure)
    net = network(structure, shape=shape)
    built = build(structure, shape, num_classes=5, seed=7)
    x = torch.rand(3, *shape)
    assert torch.allclose(points(net, net.weights(net.initial("default", 7)), x, Norms()), built(x), atol=1e-6)
    assert torch.allclose(net.module(net.flat_of(built))(x), built(x), atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_no_point_of_the_set_is_below_a_bound(structure: str, batch_norm: bool) -> None:
    shape = even(structure)
    net = network(structure, batch_norm=batch_norm, shape=shape, mask=True)
    generator = torch.Generator().manual_seed(5)
    weights = [w.double() for w in net.weights(net.initial("default", seed=2))]
    net.mask = net.mask.double()
    x = torch.rand(4, *shape, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 4, 2, 2])
    norms = Norms()
    bounds = all_bounds(net, weights, x, y, 0.1, norms)
    threat = Threat(0.1, clip=(0, 1))
    lowest = torch.full_like(bounds["interval"], torch.inf)
    for target in range(4):
        point = threat.extreme_points(x, generator=generator)
        for _ in range(30):
            point = point.detach().requires_grad_(True)
            margins = point_margins(points(net, weights, point, norms), y)
            lowest = torch.minimum(lowest, margins.detach())
            (gradient,) = torch.autograd.grad(margins[:, target].sum(), point)
            point = threat.project(point - 0.02 * gradient.sign(), x)
    for name, lower in bounds.items():
        assert (lower <= lowest + 1e-9).all(), name
    assert (bounds["interval"] < lowest - 1e-6).any()


def test_bounds_at_radius_zero_are_the_margins() -> None:
    structure = STRUCTURES[1]
    net = network(structure)
    weights = net.weights(net.initial("default", seed=2))
    x, y = torch.rand(3, *SHAPE), torch.tensor([1, 0, 4])
    exact = point_margins(points(net, weights, x, Norms()), y)
    for name, lower in all_bounds(net, weights, x, y, 0.0, Norms()).items():
        assert torch.allclose(lower, exact, atol=1e-5), name


def test_the_interval_start_keeps_the_width_of_an_interval() -> None:
    """Shi et al.: with standard deviation sqrt(2 pi) / fan_in, |W| sums to 2 over a fan-in, and ReLU halves widths."""
    net = Network.of("fc 400, fc 400, fc 400", (1, 20, 20), num_classes=5, batch_norm=False, mask=None)
    weights = net.weights(net.initial("interval", seed=0))
    trace = intervals(net, weights, torch.full((1, 1, 20, 20), 0.5), torch.full((1, 1, 20, 20), 0.1), Norms())
    widths = [radius.mean().item() for _, radius in trace.relus]
    assert all(0.5 < later / earlier < 2.0 for earlier, later in itertools.pairwise(widths))


def test_targets_skip_the_true_class_in_class_order() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 7.0]])
    assert point_margins(logits, torch.tensor([2])).tolist() == [[1.0, -3.0, -5.0]]
    net = Network.of("fc 3", (1, 2, 2), num_classes=4, batch_norm=False, mask=None)
    weights = net.weights(net.initial("default", seed=0))
    x = torch.rand(4, 1, 2, 2)
    y = torch.arange(4)
    logits = F.linear(torch.relu(F.linear(x.flatten(1), weights[0], weights[1])), weights[2], weights[3])
    assert torch.allclose(all_bounds(net, weights, x, y, 0.0, Norms())["interval"], point_margins(logits, y), atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_finished_network_is_read_back(structure: str) -> None:
    shape = even(structure)
    net = network(structure, shape=shape, mask=True)
    module = net.module(net.initial("default", seed=4))
    again = Network.of_module(module, shape)
    x = torch.rand(3, *shape)
    assert torch.equal(points(again, again.weights(again.flat_of(module)), x, Norms()), module(x))


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([nn.Flatten(), nn.Linear(4, 2), nn.ReLU()], "last Linear"),
        ([nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)], "BatchNorm2d"),
        ([nn.Flatten(), nn.Tanh(), nn.Linear(4, 2)], "Tanh"),
    ],
)
def test_a_network_that_cannot_be_read_is_named(layers, words) -> None:
    with pytest.raises(InputError, match=words):
        Network.of_module(nn.Sequential(*layers), (1, 2, 2))


def test_linear_bounds_are_lines_below_the_margins() -> None:
    structure = STRUCTURES[1]
    net = network(structure)
    weights = [w.double() for w in net.weights(net.initial("default", seed=2))]
    x = torch.rand(3, *SHAPE, dtype=torch.float64)
    y = torch.tensor([1, 0, 4])
    trace = intervals(net, weights, *box(x, torch.tensor(0.1), None), Norms())
    slope, intercept = linear_bounds(net, weights, trace, y, Norms(), "adaptive")
    threat = Threat(0.1, clip=(0, 1))
    for _ in range(50):
        point = threat.sample(x)
        margins = point_margins(points(net, weights, point, Norms()), y)
        assert (torch.einsum("njchw,nchw->nj", slope, point) + intercept <= margins + 1e-9).all()
