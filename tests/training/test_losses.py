"""Every loss against the engine: what it trains on is the certified bound or a worse one, or is said to be no bound."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from robboost.bounds import margin_bounds
from robboost.threat import Threat
from robboost.training.losses import LOSSES, METHODS, Batch, LossSettings, Situation, attacked, point_margins
from robboost.training.network import Network, pixel_mask
from robboost.training.propagation import Norms, box, intervals, points

SHAPE = (2, 8, 8)
EPS = 0.05
STRUCTURES = ["conv 3 3x3/1, conv 4 4x4/2, fc 10", "conv 3 3x3/1, [conv 4 4x4/2, conv 4 3x3/1, conv 4 3x3/1], fc 9"]
# The engine's method whose bound the loss trains on, and whether on the set cut by the box.
BOUNDS = {
    "ibp": ("ibp", True),
    "crown-ibp": ("crown-ibp", True),
    "wong-kolter": ("same-slope", False),
    "mtl-ibp": ("ibp", True),
    "cc-ibp": ("ibp", True),
}


def situation(structure: str, *, batch_norm: bool = False, share: float = 1.0, mixture: float = 1.0) -> Situation:
    generator = torch.Generator().manual_seed(3)
    net = Network.of(
        structure, SHAPE, num_classes=5, batch_norm=batch_norm, mask=pixel_mask(SHAPE, 0.8, seed=1).double()
    )
    flat = net.initial("default", seed=2).double()
    x = torch.rand(6, *SHAPE, dtype=torch.float64, generator=generator)
    noise = torch.rand(x.shape, dtype=torch.float64, generator=generator) * 2 - 1
    scalars = torch.tensor([EPS, mixture, share], dtype=torch.float64)
    batch = Batch(x, torch.tensor([0, 4, 2, 2, 1, 3]), torch.arange(6), noise, *scalars)
    norms = Norms()
    points(net, net.weights(flat), x, norms)  # so that the folded module and the loss have the same statistics
    settings = LossSettings(3, 1.0, 0.4, mixed=mixture < 1, crowned=share == 1)
    return Situation(net, net.weights(flat), batch, norms, norms, settings)


def module(case: Situation) -> torch.nn.Module:
    """The network as the trainer saves it, but not rounded to float32."""
    flat = torch.cat([w.permute(0, 2, 3, 1).reshape(-1) if w.dim() == 4 else w.reshape(-1) for w in case.weights])
    return case.net.module(flat, case.norms.in_order()).double()


def engine(case: Situation, method: str, *, box: bool = True, at: torch.Tensor | None = None, eps: float = EPS):
    threat = Threat(eps, clip=(0, 1) if box else None)
    x = case.batch.x if at is None else at
    return margin_bounds(module(case), x, case.batch.y, threat, method, precision="float64").lower


def test_every_method_is_checked_here() -> None:
    assert set(METHODS) == {*BOUNDS, "fused-crown-ibp", "mean-crown-ibp", "natural", "adversarial", "sabr"}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("method", BOUNDS)
def test_the_bound_of_a_loss_is_the_certified_one(method: str, batch_norm: bool, structure: str) -> None:
    case = situation(structure, batch_norm=batch_norm)
    loss, lower = LOSSES[method](case)
    name, box = BOUNDS[method]
    certified = engine(case, name, box=box)
    # The saved network is float32: what it differs by in a margin is of that size.
    assert torch.allclose(lower, certified, atol=2e-6, rtol=0)
    worst = F.cross_entropy(F.pad(-lower, (1, 0)), torch.zeros(6, dtype=torch.int64))
    assert loss.item() == pytest.approx(worst.item())


def least_of_a_sum(case: Situation, index: int, weights: torch.Tensor, method: str) -> torch.Tensor:
    """The engine's lower bound of <weights, margins> of one example, as the margin of a network made for it."""
    network, label = module(case), int(case.batch.y[index])
    last, targets = network[-1], [j for j in range(5) if j != label]
    weight = weights @ (last.weight[label] - last.weight[targets])
    bias = weights @ (last.bias[label] - last.bias[targets])
    head = torch.nn.Linear(len(weight), 2).double()
    head.weight.data = torch.stack([weight, 0 * weight])
    head.bias.data = torch.stack([bias, 0 * bias])
    whole = torch.nn.Sequential(*network[:-1], head).eval()
    x, threat = case.batch.x[index : index + 1], Threat(EPS, clip=(0, 1))
    return margin_bounds(whole, x, torch.zeros(1, dtype=torch.int64), threat, method, precision="float64").lower[0, 0]


def fused_by_the_engine(case: Situation, index: int) -> torch.Tensor:
    """log of the fused bound of sum_j exp(-margin_j) of one example."""
    units = torch.eye(4, dtype=torch.float64)
    lower = torch.stack([least_of_a_sum(case, index, unit, "ibp") for unit in units])
    upper = -torch.stack([least_of_a_sum(case, index, -unit, "ibp") for unit in units])
    chords = ((-lower).exp() - (-upper).exp()) / (upper - lower)
    least = least_of_a_sum(case, index, chords, "crown-ibp")
    return (((-lower).exp() + chords * lower).sum() - least).log()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_fused_loss_is_the_engines_bound_and_above_every_point(batch_norm: bool, structure: str) -> None:
    case = situation(structure, batch_norm=batch_norm)
    loss, found = LOSSES["fused-crown-ibp"](case)
    wanted = torch.stack([fused_by_the_engine(case, index) for index in range(len(case.batch.y))])
    assert torch.allclose(-found.squeeze(1), wanted, atol=1e-5, rtol=0)
    assert loss.item() == pytest.approx(F.softplus(wanted).mean().item(), abs=1e-5)
    points_seen = [attacked(case, torch.tensor(EPS, dtype=torch.float64))]
    for seed in range(50):
        noise = torch.rand(case.batch.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        points_seen.append((case.batch.x + EPS * (2 * noise - 1).sign()).clamp(0, 1))
    for point in points_seen:
        margins = point_margins(points(case.net, case.weights, point, case.norms), case.batch.y)
        assert ((-margins).logsumexp(1) <= wanted + 1e-9).all()


def test_the_fused_loss_survives_very_wide_intervals_and_none() -> None:
    case = situation(STRUCTURES[0])
    wide = replace(case, weights=[40 * w for w in case.weights])
    loss, _ = LOSSES["fused-crown-ibp"](wide)
    assert torch.isfinite(loss)
    assert loss > 100
    point = replace(case, batch=replace(case.batch, eps=torch.zeros((), dtype=torch.float64)))
    loss, _ = LOSSES["fused-crown-ibp"](point)
    assert loss.item() == pytest.approx(LOSSES["natural"](case)[0].item())


def test_the_fused_loss_has_the_gradient_of_its_value() -> None:
    case = situation(STRUCTURES[0])

    def value(*weights: torch.Tensor) -> torch.Tensor:
        return LOSSES["fused-crown-ibp"](replace(case, weights=list(weights), norms=Norms()))[0]

    weights = [w.detach().clone().requires_grad_(True) for w in case.weights]
    assert torch.autograd.gradcheck(value, weights, atol=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_estimate_is_the_bound_of_one_mean_and_near_the_linear_bounds(structure: str) -> None:
    case = situation(structure)
    _, found = LOSSES["mean-crown-ibp"](case)
    _, linear = LOSSES["crown-ibp"](case)
    region = box(case.batch.x, case.batch.eps, case.net.mask)
    trace = intervals(case.net, case.weights, *region, case.norms)
    logits = F.linear(trace.centre, case.weights[case.net.head.weight], case.weights[case.net.head.bias])
    shares = torch.softmax(-point_margins(logits, case.batch.y), 1)
    wanted = torch.stack([least_of_a_sum(case, n, shares[n], "crown-ibp") for n in range(len(shares))])
    assert torch.allclose((shares * found).sum(1), wanted, atol=2e-6)
    middle = point_margins(logits, case.batch.y)
    assert torch.allclose(middle - found, (middle - found)[:, :1].expand_as(found))
    assert (found - linear).abs().mean() < 0.5 * (middle - linear).mean()


def test_a_share_of_the_linear_bound_is_below_the_better_of_both() -> None:
    case = situation(STRUCTURES[1], share=0.5)
    _, lower = LOSSES["crown-ibp"](case)
    interval, linear = engine(case, "ibp"), engine(case, "crown-ibp")
    assert torch.allclose(lower, (interval + linear) / 2, atol=2e-6)
    assert (lower <= torch.maximum(interval, linear) + 2e-6).all()


@pytest.mark.parametrize("structure", STRUCTURES)
def test_points_are_the_networks_and_attacks_stay_above_every_bound(structure: str) -> None:
    case = situation(structure)
    _, plain = LOSSES["natural"](case)
    assert torch.allclose(plain, engine(case, "ibp", eps=0.0), atol=2e-6)
    point = attacked(case, torch.tensor(EPS, dtype=torch.float64))
    assert ((point - case.batch.x).abs() <= EPS + 1e-12).all()
    assert point.min() >= 0
    assert point.max() <= 1
    natural, _ = LOSSES["natural"](case)
    adversarial, margins = LOSSES["adversarial"](case)
    assert (margins >= engine(case, "tightest") - 2e-6).all()
    assert adversarial > natural


def test_the_small_box_lies_within_the_set_and_its_bound_is_the_certified_one_there() -> None:
    case = situation(STRUCTURES[0])
    _, lower = LOSSES["sabr"](case)
    small = 0.4 * EPS
    centre = attacked(case, torch.tensor(EPS - small, dtype=torch.float64))
    assert ((centre - case.batch.x).abs() + small <= EPS + 1e-12).all()
    assert torch.allclose(lower, engine(case, "ibp", at=centre, eps=small), atol=2e-6)
    assert (lower >= engine(case, "ibp") - 2e-6).all()  # so it is no bound on the whole set


@pytest.mark.parametrize(
    "method", ["ibp", "crown-ibp", "fused-crown-ibp", "mean-crown-ibp", "wong-kolter", "mtl-ibp", "cc-ibp"]
)
def test_a_mixture_lies_between_its_ends(method: str) -> None:
    ends = [LOSSES[method](situation(STRUCTURES[0], mixture=mixture))[0].item() for mixture in (0.0, 1.0)]
    (middle,) = [LOSSES[method](situation(STRUCTURES[0], mixture=mixture))[0].item() for mixture in (0.5,)]
    assert ends[0] < middle < ends[1]
    if method != "cc-ibp":  # that one mixes margins, not losses
        assert middle == pytest.approx(sum(ends) / 2)
