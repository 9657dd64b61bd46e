"""The attacker's set: hand-computed cases, projections, samples, bad input."""

import itertools

import pytest
import torch

from robboost.errors import InputError
from robboost.threat import Threat

THREATS = [
    Threat(eps, norm, clip) for eps in (0.0, 0.1, 0.7) for norm in ("linf", "l2", "l1") for clip in (None, (0, 1))
]


def test_region_of_linf_with_box_by_hand():
    centre, radius = Threat(0.25, clip=(0, 1)).region(torch.tensor([[0.0, 0.5, 0.9]], dtype=torch.float64))
    torch.testing.assert_close(centre, torch.tensor([[0.125, 0.5, 0.825]], dtype=torch.float64))
    torch.testing.assert_close(radius, torch.tensor([[0.125, 0.25, 0.175]], dtype=torch.float64))


def test_region_without_box_and_of_other_norms():
    x = torch.rand(2, 1, 3, 3)
    centre, radius = Threat("8/255").region(x)
    assert torch.equal(centre, x)
    assert torch.equal(radius, torch.full_like(x, 8 / 255))
    for norm in ("l2", "l1"):
        centre, radius = Threat(0.5, norm, (0, 1)).region(x)
        assert torch.equal(centre, x)
        assert radius.tolist() == [0.5, 0.5]


def test_box_used_only_for_linf():
    assert Threat(0.1, clip=(0, 1)).box_used
    assert not Threat(0.1).box_used
    assert not Threat(0.1, "l2", (0, 1)).box_used


def test_eps_as_text():
    assert Threat("8/255").eps == 8 / 255
    assert Threat(" 2 / 255 ").eps == 2 / 255
    assert Threat("0.3").eps == 0.3
    assert str(Threat("8/255", clip=(0, 1))) == "linf 8/255 within [0, 1]"
    assert str(Threat(0.2, "l2")) == "l2 0.2"


@pytest.mark.parametrize("eps", [-0.1, float("nan"), float("inf"), "1/0", "eight", None, "8/255/2", 8.0])
def test_bad_eps(eps):
    with pytest.raises(InputError, match="eps="):
        Threat(eps, clip=(0, 1))


@pytest.mark.parametrize("clip", [(1, 0), (0, 0), (0,), 3, (0, float("inf")), ("a", "b")])
def test_bad_clip(clip):
    with pytest.raises(InputError, match="clip="):
        Threat(0.1, clip=clip)


def test_bad_norm():
    with pytest.raises(InputError, match="norm='l3'"):
        Threat(0.1, "l3")


def test_projection_by_hand():
    x = torch.zeros(1, 2)
    point = torch.tensor([[3.0, 4.0]])
    torch.testing.assert_close(Threat(1.0, "linf").project(point, x), torch.tensor([[1.0, 1.0]]))
    torch.testing.assert_close(Threat(1.0, "l2").project(point, x), torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(Threat(3.0, "l1").project(point, x), torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_projection_lands_inside_and_leaves_inside_points_alone(threat):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(200, 1, 4, 4, dtype=torch.float64, generator=generator)
    far = x + 2 * torch.randn(x.shape, dtype=x.dtype, generator=generator)
    landed = threat.project(far, x)
    assert threat.contains(landed, x, tolerance=1e-12).all()
    torch.testing.assert_close(threat.project(landed, x), landed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_projection_is_the_nearest_point_of_the_ball(norm):
    """Against a grid of the ball in two dimensions."""
    threat = Threat(0.5, norm)
    axis = torch.linspace(-0.5, 0.5, 101, dtype=torch.float64)
    grid = torch.tensor(list(itertools.product(axis.tolist(), repeat=2)), dtype=torch.float64)
    ball = grid[threat.contains(grid, torch.zeros_like(grid), tolerance=0)]
    for point in torch.randn(50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        nearest = threat.project(point[None], torch.zeros(1, 2, dtype=torch.float64))
        assert (nearest - point).norm() <= (ball - point).norm(dim=1).min() + 1e-12


@pytest.mark.parametrize("threat", THREATS, ids=str)
def test_samples_and_extreme_points_are_inside(threat):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(300, 5, dtype=torch.float64, generator=generator)
    for points in (threat.sample(x, generator=generator), threat.extreme_points(x, generator=generator)):
        assert threat.contains(points, x, tolerance=1e-12).all()


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_extreme_points_are_on_the_surface_and_samples_fill_the_ball(norm):
    threat = Threat(0.5, norm)
    x = torch.zeros(4000, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    inner = Threat(0.5 - 1e-9, norm)
    assert not inner.contains(threat.extreme_points(x, generator=generator), x, tolerance=0).any()
    half = Threat(0.25, norm).contains(threat.sample(x, generator=generator), x, tolerance=0).double().mean().item()
    assert half == pytest.approx(1 / 8, abs=0.02)  # an eighth of the volume lies within half the radius


def test_contains_respects_the_box():
    x = torch.zeros(1, 2)
    assert not Threat(0.5, clip=(0, 1)).contains(x - 0.1, x).item()
    assert Threat(0.5).contains(x - 0.1, x).item()
