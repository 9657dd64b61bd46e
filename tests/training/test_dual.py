"""The dual bound: by hand, against the engine and interval arithmetic, in parts, and its estimate by projections."""

import math

import pytest
import torch
from torch.nn import functional as F

from robboost.bounds import margin_bounds
from robboost.threat import Threat
from robboost.training import TrainConfig, dual
from robboost.training.dual import ball, dual_trace, source_sizes
from robboost.training.dual_kernels import relu_estimated
from robboost.training.losses import Batch, LossSettings, Situation, wong_kolter
from robboost.training.member import DeviceData, Member
from robboost.training.network import Network, pixel_mask
from robboost.training.propagation import Norms, box, intervals, linear_margins, points

BLOCK = "[conv 4 4x4/2, conv 4 3x3/1, conv 4 3x3/1]"
STRUCTURES = [
    "fc 12, fc 9",
    "conv 3 3x3/1, conv 4 4x4/2, fc 10, fc 7",
    "conv 3 4x4/2, conv 4 3x3/1",
    f"conv 3 3x3/1, {BLOCK}, {BLOCK}, fc 9",
    f"{BLOCK}, fc 6",
]
SHAPE = (2, 8, 8)
X = torch.rand(4, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 4, 2, 2])


def network(structure: str, *, mask: bool = False, batch_norm: bool = False) -> tuple[Network, torch.Tensor]:
    chosen = pixel_mask(SHAPE, 0.7, seed=3).double() if mask else None
    net = Network.of(structure, SHAPE, num_classes=5, batch_norm=batch_norm, mask=chosen)
    flat = net.initial("default", seed=2).double()
    return net, flat + 0.05 * torch.randn(flat.shape, generator=torch.Generator().manual_seed(0))


def cauchy(projections: int, net: Network, seed: int = 0) -> torch.Tensor:
    numbers = torch.empty(projections, sum(source_sizes(net)), dtype=torch.float64)
    return numbers.cauchy_(generator=torch.Generator().manual_seed(seed))


def margins(net, weights, region, norms, noise=None):
    trace = dual_trace(net, weights, region, noise, norms)
    whole = region[0], region[1].expand_as(region[0])
    return linear_margins(net, weights, trace, whole, Y, norms, "same-slope")


def test_two_layers_by_hand() -> None:
    """x in [-1, 1]: z1 = x, h1 = relu(z1) in x/2 + [0, 1/2]; z2 = (h1 - h2, h1 + h2) with h2 = relu(-x)."""
    net = Network.of("fc 2, fc 2", (1, 1, 1), num_classes=2, batch_norm=False, mask=None)
    weights = [
        torch.tensor([[1.0], [-1.0]]),
        torch.zeros(2),
        torch.tensor([[1.0, -1.0], [1.0, 1.0]]),
        torch.zeros(2),
        torch.eye(2),
        torch.zeros(2),
    ]
    trace = dual_trace(net, weights, (torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1)), None, Norms())
    # h1 = x/2 + 1/4 +- 1/4 and h2 = -x/2 + 1/4 +- 1/4: the difference is x +- 1/2, the sum 1/2 +- 1/2 (exact: |x|).
    (first, second) = trace.relus
    assert first[0].tolist() == [[0.0, 0.0]]
    assert first[1].tolist() == [[1.0, 1.0]]
    assert second[0].tolist() == [[0.0, 0.5]]
    assert second[1].tolist() == [[1.5, 0.5]]


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mask", [False, True])
def test_exact_bounds_equal_the_engines(structure: str, mask: bool) -> None:
    net, flat = network(structure, mask=mask)
    weights = net.weights(flat)
    module = net.module(flat).double()
    # The engine reads the network from its float32 file; so does this.
    weights = [w.float().double() for w in weights]
    for clip in (None, (0.0, 1.0)):
        eps = torch.tensor(0.1, dtype=torch.float64)
        region = ball(X, eps, net.mask) if clip is None else box(X, eps, net.mask)
        certified = margin_bounds(module, X, Y, Threat(0.1, clip=clip), "same-slope", precision="float64").lower
        assert torch.allclose(margins(net, weights, region, Norms()), certified, atol=1e-12, rtol=0)


def test_passes_in_parts_give_the_same_bounds_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    net, flat = network(STRUCTURES[3])
    results = []
    for chunk in (2**27, 3 * 4 * 192):
        monkeypatch.setattr(dual, "_CHUNK", chunk)
        leaf = flat.clone().requires_grad_(True)
        eps = torch.tensor(0.1, dtype=torch.float64)
        lower = margins(net, net.weights(leaf), ball(X, eps, None), Norms())
        results.append((lower, *torch.autograd.grad(lower.sum(), leaf)))
    for whole, parts in zip(*results, strict=True):
        assert torch.allclose(whole, parts, atol=1e-12)


def test_the_gradient_is_that_of_the_bound() -> None:
    net, flat = network(STRUCTURES[3])
    leaf = flat.clone().requires_grad_(True)
    region = ball(X, torch.tensor(0.1, dtype=torch.float64), None)

    def bound(vector: torch.Tensor) -> torch.Tensor:
        return margins(net, net.weights(vector), region, Norms()).sum()

    (gradient,) = torch.autograd.grad(bound(leaf), leaf)
    direction = torch.randn(flat.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    step = 1e-8 * direction  # short: the bound has many kinks
    slope = (bound(flat + step) - bound(flat - step)) / 2e-8
    assert (gradient @ direction).item() == pytest.approx(slope.item(), rel=1e-5)


def test_bounds_enclose_what_the_network_does_and_lie_within_intervals_in_the_second_layer() -> None:
    net, flat = network(STRUCTURES[3], batch_norm=True)
    weights, norms = net.weights(flat), Norms()
    points(net, weights, X, norms)
    eps = torch.tensor(0.1, dtype=torch.float64)
    trace = dual_trace(net, weights, box(X, eps, None), None, norms)
    plain = intervals(net, weights, *box(X, eps, None), norms)
    assert torch.allclose(trace.relus[0][1], plain.relus[0][1])
    threat = Threat(0.1, clip=(0, 1))
    for _ in range(40):
        inside = intervals(net, weights, threat.sample(X), torch.zeros_like(X), norms)
        for (centre, radius), (value, _) in zip(trace.relus, inside.relus, strict=True):
            assert ((value - centre).abs() <= radius + 1e-9).all()


def cauchy_scale(columns: torch.Tensor) -> torch.Tensor:
    return relu_estimated(columns[:1], columns.unsqueeze(1), torch.zeros_like(columns).unsqueeze(1))[0][0]


def test_the_scale_of_cauchy_numbers() -> None:
    numbers = torch.empty(4000, 50, dtype=torch.float64).cauchy_(generator=torch.Generator().manual_seed(0))
    scales = torch.logspace(-6, 6, 50, dtype=torch.float64).requires_grad_(True)
    found = cauchy_scale(numbers * scales)
    (slopes,) = torch.autograd.grad(found.sum(), scales)
    assert ((slopes - 1).abs() < 4 * math.pi / 2 / math.sqrt(4000)).all()  # twice the numbers, twice the scale
    assert (slopes - 1).mean().abs() < 0.02
    assert ((found / scales).log().abs() < 4 * math.pi / 2 / math.sqrt(4000)).all()
    assert (found / scales).log().mean().abs() < 0.02  # no bias to speak of
    zeros = torch.zeros(9, 3, requires_grad=True)
    scale = cauchy_scale(zeros)
    (gradient,) = torch.autograd.grad(scale.sum(), zeros)
    assert scale.min() >= 0
    assert scale.max() < 1e-12
    assert gradient.abs().max() == 0
    near = torch.tensor([[1e-20], [0.0], [1.0], [-2.0], [3.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(cauchy_scale(near).sum(), near)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_projections_estimate_the_radii(structure: str) -> None:
    net, flat = network(structure, mask=True)
    region = ball(X, torch.tensor(0.1, dtype=torch.float64), net.mask)
    exact = dual_trace(net, net.weights(flat), region, None, Norms())
    gaps = []
    for projections in (25, 1601):
        found = dual_trace(net, net.weights(flat), region, cauchy(projections, net), Norms())
        assert torch.equal(found.relus[0][1], exact.relus[0][1])  # the first layer is exact in any case
        ratios = [(b[1] / a[1]).log() for a, b in zip(exact.relus[1:], found.relus[1:], strict=True)]
        gaps.append(torch.cat([ratio.flatten() for ratio in ratios]))
    # The geometric mean of k Cauchy numbers' sizes has a relative deviation of (pi / 2) / sqrt(k).
    assert gaps[1].abs().mean() < 2 * math.pi / 2 / math.sqrt(1601)
    assert gaps[0].abs().mean() > 2 * gaps[1].abs().mean()
    assert (gaps[1] < 0).any()  # an estimate, no bound


def test_the_loss_is_the_engines_bound_or_marked_as_an_estimate() -> None:
    net, flat = network(STRUCTURES[1])
    weights = [w.float().double() for w in net.weights(flat)]
    scalars = torch.tensor([0.1, 1.0, 1.0], dtype=torch.float64)
    module = net.module(flat).double()
    certified = margin_bounds(module, X, Y, Threat(0.1, clip=None), "same-slope", precision="float64").lower
    for projections in (0, 31):
        settings = LossSettings(1, 1.0, 1.0, mixed=False, crowned=True, projections=projections)
        batch = Batch(X, Y, torch.arange(4), cauchy(31, net), *scalars)
        loss, lower = wong_kolter(Situation(net, weights, batch, Norms(), Norms(), settings))
        assert torch.allclose(lower, certified, atol=1e-12) == (projections == 0)
        logits = F.pad(-lower, (1, 0))
        assert loss.item() == pytest.approx(F.cross_entropy(logits, torch.zeros(4, dtype=torch.int64)).item())
        assert TrainConfig("A", method="wong-kolter", projections=projections).estimated == (projections > 0)


def test_every_step_reads_other_random_numbers_and_a_resumed_epoch_the_same() -> None:
    data = DeviceData.of(torch.rand(40, 1, 8, 8), torch.arange(40) % 10, pad=0, classes=10, device=torch.device("cpu"))
    config = TrainConfig("conv 2 4x4/2, fc 5", method="wong-kolter", projections=7, batch=10, epochs=2)
    banks = []
    for _ in range(2):
        member = Member(config, data)
        member.begin_epoch(1)
        seen = []
        for step in range(3):
            member.step_count.fill_(member.steps_per_epoch + step)
            seen.append(member._batch().noise)
        banks.append(seen)
        assert seen[0].shape == (7, sum(source_sizes(member.net)))
        assert (seen[0] != seen[1]).float().mean() > 0.99
        assert (seen[1] != seen[2]).float().mean() > 0.99
        assert seen[0].abs().median().item() == pytest.approx(1.0, abs=0.25)
    assert all(torch.equal(a, b) for a, b in zip(*banks, strict=True))
