"""Lines and frozen sums: a hand-computed case, the engine as second method, points of the set, finite differences."""

import copy

import pytest
import torch

import robboost as rb
from robboost.errors import InputError
from robboost.models.architectures import build
from robboost.models.layers import PixelMask
from robboost.training.boosting_bounds import Lines, concrete_margins, frozen_sum
from robboost.training.boosting_member import (
    SURROGATES,
    FrozenNetworks,
    Objective,
    estimated_margins,
    lines_of,
    tightest_lines,
)
from robboost.training.losses import LOSSES, Batch, LossSettings, Situation, point_margins
from robboost.training.network import Network
from robboost.training.propagation import Norms, box, intervals

SHAPE = (2, 8, 8)
STRUCTURES = [
    "fc 12",
    "conv 3 3x3/1, conv 4 4x4/2, fc 10, fc 7",
    "conv 3 3x3/1, [conv 4 4x4/2, conv 4 3x3/1, conv 4 3x3/1], fc 9",
]


def member(structure: str, seed: int, *, mask: bool = False) -> torch.nn.Sequential:
    network = build(structure, SHAPE, num_classes=5, seed=seed).eval().requires_grad_(False)
    if not mask:
        return network
    keep = (torch.rand(1, 8, 8, generator=torch.Generator().manual_seed(seed)) < 0.7).float()
    return torch.nn.Sequential(PixelMask(keep), *network).eval()


def examples(count: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(count, *SHAPE, generator=generator), torch.arange(count) % 5


def situation(model, x, y, eps, *, share=1.0, crowned=True, flat=None) -> Situation:
    net = Network.of_module(model, SHAPE)
    dtype = x.dtype
    if net.mask is not None:
        net.mask = net.mask.to(dtype)
    weights = net.weights(net.flat_of(model).to(dtype) if flat is None else flat)
    scalars = [torch.tensor(value, dtype=dtype) for value in (eps, 1.0, share)]
    batch = Batch(x, y, torch.arange(len(x)), x, eps=scalars[0], mixture=scalars[1], crown_share=scalars[2])
    settings = LossSettings(attack_steps=1, attack_scale=1.0, small_box=1.0, mixed=False, crowned=crowned)
    return Situation(net, weights, batch, Norms(), Norms(), settings)


def test_slopes_cancel_before_their_size_is_taken() -> None:
    """One pixel x = 0.5, set [0.5, 0.9] (centre 0.7, radius 0.2); lines 3 d + 1, -2 d + 0.5 and 0.25 (no slope).

    Sum: d + 1.75 with d in [0, 0.4]: least 1.75 at d = 0. One by one: 1 + (0.5 - 0.8) + 0.25 = 0.95.
    """
    x = torch.full((1, 1, 1, 1), 0.5)
    region = torch.full_like(x, 0.7), torch.full_like(x, 0.2)
    lines = [
        Lines(torch.full((1, 1, 1, 1, 1), 3.0), torch.tensor([[1.0]])),
        Lines(torch.full((1, 1, 1, 1, 1), -2.0), torch.tensor([[0.5]])),
        Lines(None, torch.tensor([[0.25]])),
    ]
    assert concrete_margins(lines, x, region).item() == pytest.approx(1.75)
    assert sum(concrete_margins([line], x, region).item() for line in lines) == pytest.approx(0.95)
    # M(x, kappa = 3): cross-entropy log(1 + exp(-1.75)), hinge 3 - 1.75.
    margins = concrete_margins(lines, x, region)
    assert Objective()(margins).item() == pytest.approx(0.16023, abs=1e-4)
    assert Objective("hinge", 3.0)(margins).item() == pytest.approx(1.25)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mask", [False, True])
def test_lines_are_the_engines(structure: str, mask: bool) -> None:
    model = member(structure, 1, mask=mask)
    x, y = (part.double() if part.is_floating_point() else part for part in examples())
    threat = rb.Threat(0.1, clip=(0, 1))
    region = box(x, torch.tensor(0.1, dtype=torch.float64), None)
    expected = rb.margin_bounds(model, x, y, threat, "crown-ibp", precision="float64")
    found = lines_of(situation(model, x, y, 0.1), "crown-ibp")
    assert torch.allclose(found.slope, expected.slope, atol=1e-6)
    assert torch.allclose(found.intercept, expected.intercept, atol=1e-6)
    assert torch.allclose(concrete_margins([found], x, region), expected.lower, atol=1e-6)
    plain = rb.margin_bounds(model, x, y, threat, "ibp", precision="float64")
    assert torch.allclose(lines_of(situation(model, x, y, 0.1), "ibp").intercept, plain.lower, atol=1e-6)
    best = tightest_lines(situation(model, x, y, 0.1))
    assert torch.allclose(concrete_margins([best], x, region), torch.maximum(plain.lower, expected.lower), atol=1e-6)
    # Between the two a share of each.
    half = lines_of(situation(model, x, y, 0.1, share=0.25, crowned=False), "crown-ibp")
    mixed = 0.25 * expected.lower + 0.75 * plain.lower
    assert torch.allclose(concrete_margins([half], x, region), mixed, atol=1e-6)


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "ibp+crown-ibp"])
@pytest.mark.parametrize("storage", ["float16", "float32"])
def test_a_frozen_sum_is_a_bound_and_close_to_the_engines(method: str, storage: str) -> None:
    members = [member(structure, seed, mask=seed == 1) for seed, structure in enumerate(STRUCTURES)]
    coefficients = [1.0, 0.5, 2.0]
    x, y = examples()
    threat = rb.Threat(0.1, clip=(0, 1))
    frozen = frozen_sum(members, coefficients, (x, y), threat, method, storage=storage)
    order = torch.tensor([4, 0, 2])
    region = threat.region(x[order])
    margins = concrete_margins([frozen.rows(order)], x[order], region)
    exact = torch.zeros_like(margins, dtype=torch.float64)
    if method == "crown-ibp":
        ensemble = rb.Ensemble(members, [c / 3.5 for c in coefficients])
        exact = 3.5 * rb.margin_bounds(ensemble, x[order], y[order], threat, method, precision="float64").lower
        assert (margins <= exact + 1e-6).all()
        assert torch.allclose(margins.double(), exact, atol=1e-2 if storage == "float16" else 1e-5)
    clean = sum(c * point_margins(m(x[order]), y[order]) for c, m in zip(coefficients, members, strict=True))
    assert torch.allclose(frozen.at(Batch(x, y, order, x, x, x, x))[1], clean, atol=1e-5)
    generator = torch.Generator().manual_seed(0)
    lines = frozen.rows(order)
    for _ in range(40):
        point = threat.sample(x[order], generator=generator)
        real = sum(c * point_margins(m(point), y[order]) for c, m in zip(coefficients, members, strict=True))
        assert (margins <= real + 1e-5).all()
        line = lines.intercept
        if lines.slope is not None:
            line = line + torch.einsum("njchw,nchw->nj", lines.slope, point - x[order])
        assert (line <= real + 1e-5).all()


def test_what_storage_rounds_away_is_taken_off() -> None:
    """A slope of 1 + 2^-12 becomes 1 in float16; on |d| <= 0.25 that hides up to 2^-14 of the margin's fall."""
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2)).eval()
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([[1 + 2.0**-12], [0.0]]))
        network[1].bias.copy_(torch.tensor([1.0, 0.0]))
    x, y = torch.full((1, 1, 1, 1), 0.5), torch.tensor([0])
    threat = rb.Threat(0.25, clip=(0, 1))
    frozen = frozen_sum([network], [1.0], (x, y), threat, "crown-ibp")
    assert frozen.slope is not None
    assert frozen.slope.item() == 1.0
    margin = concrete_margins([frozen.rows(torch.tensor([0]))], x, threat.region(x)).item()
    exact = 1 + 0.25 * (1 + 2.0**-12)
    assert margin == pytest.approx(exact, abs=1e-6)


def test_a_sum_that_grows_equals_one_made_at_once() -> None:
    """Rounding included: a run that is taken up again trains on the same numbers."""
    members = [member(structure, seed) for seed, structure in enumerate(STRUCTURES)]
    x, y = examples()
    threat = rb.Threat(0.1, clip=(0, 1))
    whole = frozen_sum(members, [1.0, 0.5, 2.0], (x, y), threat, "crown-ibp")
    grown = frozen_sum(members[:1], [1.0], (x, y), threat, "crown-ibp")
    for part, coefficient in zip(members[1:], [0.5, 2.0], strict=True):
        grown.add(part, coefficient, (x, y), threat, "crown-ibp")
    assert whole.slope is not None
    assert torch.equal(whole.slope, grown.slope)
    assert torch.equal(whole.intercept, grown.intercept)
    assert torch.equal(whole.points, grown.points)


def test_recomputed_sums_equal_stored_ones() -> None:
    members = [member(structure, seed) for seed, structure in enumerate(STRUCTURES)]
    x, y = examples()
    threat = rb.Threat(0.1, clip=(0, 1))
    for method, engine in (("ibp", "ibp"), ("crown-ibp", "ibp+crown-ibp")):
        stored = frozen_sum(members, [1.0, 0.5, 2.0], (x, y), threat, engine, storage="float32")
        batch = situation(members[0], x, y, 0.1).batch
        again, clean = FrozenNetworks.of(members, [1.0, 0.5, 2.0], SHAPE, method).at(batch)
        region = box(x, torch.tensor(0.1), None)
        first = concrete_margins([stored.rows(batch.chosen)], x, region)
        assert torch.allclose(first, concrete_margins([again], x, region), atol=1e-4)
        assert torch.allclose(clean, stored.points, atol=1e-5)


@pytest.mark.parametrize("mask", [False, True])
def test_the_estimate_of_one_member_is_that_of_its_own_loss(mask: bool) -> None:
    x, y = (part.double() if part.is_floating_point() else part for part in examples())
    case = situation(member(STRUCTURES[2], 4, mask=mask), x, y, 0.1)
    _, wanted = LOSSES["mean-crown-ibp"](case)
    assert torch.allclose(estimated_margins([(case, 1.0)], None), wanted, atol=1e-12)


def test_the_estimate_of_an_ensemble_bounds_the_mean_of_its_margins() -> None:
    """The line of each member's mean margin is the engine's, of a network that outputs this mean."""
    models = [member(structure, seed) for seed, structure in enumerate(STRUCTURES)]
    coefficients = [0.5, 2.0, 1.0]
    x, y = (part.double() if part.is_floating_point() else part for part in examples())
    threat, region = rb.Threat(0.1, clip=(0, 1)), box(x, torch.tensor(0.1, dtype=torch.float64), None)
    # The last member is frozen: lines for all targets, and its margins at the images.
    bounds = rb.margin_bounds(models[2], x, y, threat, "crown-ibp", precision="float64")
    with torch.no_grad():
        frozen = Lines(bounds.slope, bounds.intercept), point_margins(models[2].double()(x), y)
    moving = [situation(model, x, y, 0.1) for model in models[:2]]
    found = estimated_margins(list(zip(moving, coefficients, strict=False)), frozen)
    middle = frozen[1].clone()
    for one, coefficient in zip(moving, coefficients, strict=False):
        trace = intervals(one.net, one.weights, *region, Norms())
        head = one.net.head
        logits = torch.nn.functional.linear(trace.centre, one.weights[head.weight], one.weights[head.bias])
        middle = middle + coefficient * point_margins(logits, y)
    shares = torch.softmax(-middle, 1)
    assert torch.allclose(middle - found, (middle - found)[:, :1].expand_as(found))
    for n, label in enumerate(y.tolist()):
        others = [j for j in range(5) if j != label]
        slope = (shares[n].view(-1, 1, 1, 1) * frozen[0].slope[n]).sum(0)
        intercept = (shares[n] * frozen[0].intercept[n]).sum()
        for model, coefficient in zip(models[:2], coefficients, strict=False):
            network = copy.deepcopy(model).double()
            last = network[-1]
            weight = last.weight[label] - shares[n] @ last.weight[others]
            bias = last.bias[label] - shares[n] @ last.bias[others]
            head = torch.nn.Linear(len(weight), 2).double()
            head.weight.data, head.bias.data = torch.stack([weight, 0 * weight]), torch.stack([bias, 0 * bias])
            whole = torch.nn.Sequential(*network[:-1], head).eval().requires_grad_(False)
            line = rb.margin_bounds(
                whole, x[n : n + 1], torch.zeros(1, dtype=torch.int64), threat, "crown-ibp", precision="float64"
            )
            slope = slope + coefficient * line.slope[0, 0]
            intercept = intercept + coefficient * line.intercept[0, 0]
        least = intercept + (slope * (region[0] - x)[n]).sum() - (slope.abs() * region[1][n]).sum()
        assert (shares[n] * found[n]).sum().item() == pytest.approx(least.item(), abs=1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("method", ["ibp", "crown-ibp"])
def test_the_gradient_of_the_ensemble_loss_against_finite_differences(structure, surrogate, method) -> None:
    frozen = member(STRUCTURES[0], 7)
    new = member(structure, 2)
    x, y = (part.double() if part.is_floating_point() else part for part in examples(4))
    threat = rb.Threat(0.05, clip=(0, 1))
    bounds = rb.margin_bounds(frozen, x, y, threat, "crown-ibp", precision="float64")
    fixed = Lines(bounds.slope, bounds.intercept)
    region = box(x, torch.tensor(0.05, dtype=torch.float64), None)
    flat = Network.of_module(new, SHAPE).flat_of(new).double().requires_grad_(True)
    objective = Objective(surrogate, kappa=0.02)  # neither all pairs nor none have M < kappa

    def loss(parameters):
        own = lines_of(situation(new, x, y, 0.05, flat=parameters), method)
        return objective(concrete_margins([own, fixed], x, region))

    (gradient,) = torch.autograd.grad(loss(flat), flat)
    generator = torch.Generator().manual_seed(0)
    assert gradient.norm() > 1e-3
    for _ in range(5):
        direction = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
        step = 1e-7
        with torch.no_grad():
            rise = (loss(flat + step * direction) - loss(flat - step * direction)) / (2 * step)
        assert rise.item() == pytest.approx((gradient @ direction).item(), rel=1e-4, abs=1e-6)
    # The frozen part matters: without it the gradient is another one.
    own = lines_of(situation(new, x, y, 0.05, flat=flat), method)
    (alone,) = torch.autograd.grad(objective(concrete_margins([own], x, region)), flat)
    assert not torch.allclose(alone, gradient, atol=1e-4)


def test_a_budget_that_is_too_small_is_refused() -> None:
    x, y = examples()
    with pytest.raises(InputError, match=r"frozen bounds of 6 images take 0.0 GB in float16; expected at most"):
        frozen_sum([member(STRUCTURES[0], 0)], [1.0], (x, y), rb.Threat(0.1), "crown-ibp", budget=1000)


@pytest.mark.parametrize(("entries", "words"), [({"surrogate": "exp"}, "surrogate='exp'"), ({"kappa": 0.0}, "kappa")])
def test_a_wrong_objective_is_refused(entries, words) -> None:
    with pytest.raises(InputError, match=words):
        Objective(**entries)
