"""Every loss against the engine: what it trains on is the certified bound or a worse one, or is said to be no bound."""

import pytest
import torch
from torch.nn import functional as F

from robboost.bounds import margin_bounds
from robboost.threat import Threat
from robboost.training.losses import LOSSES, METHODS, Batch, LossSettings, Situation, attacked
from robboost.training.network import Network, pixel_mask
from robboost.training.propagation import Norms, points

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
    assert set(METHODS) == {*BOUNDS, "natural", "adversarial", "sabr"}


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


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "wong-kolter", "mtl-ibp", "cc-ibp"])
def test_a_mixture_lies_between_its_ends(method: str) -> None:
    ends = [LOSSES[method](situation(STRUCTURES[0], mixture=mixture))[0].item() for mixture in (0.0, 1.0)]
    (middle,) = [LOSSES[method](situation(STRUCTURES[0], mixture=mixture))[0].item() for mixture in (0.5,)]
    assert ends[0] < middle < ends[1]
    if method != "cc-ibp":  # that one mixes margins, not losses
        assert middle == pytest.approx(sum(ends) / 2)
