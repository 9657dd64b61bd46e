"""Normalisation of points and intervals against plain formulas, on a GPU where there is one.

TRITON_INTERPRET=1 sends the same tests through the kernels on a CPU.
"""

import os

import pytest
import torch
from torch.autograd import gradcheck

from robboost.training.kernels import absolute, interval_relu
from robboost.training.network import Network
from robboost.training.normalisation import normalisation, scaled, scaled_interval
from robboost.training.propagation import Norms, _intervals, box, interval_margins, intervals, points

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET", "0") == "1"
EPS = 1e-5
CHANNELS = [1, 4, 5, 48, 130]


def wide(vector):
    return vector.view(1, -1, 1, 1)


def plain_normalisation(values, gamma, beta, eps):
    mean = values.mean(dim=(0, 2, 3))
    variance = ((values - wide(mean)) ** 2).mean(dim=(0, 2, 3))
    scale = gamma / torch.sqrt(variance + eps)
    return values, scale, beta - mean * scale, mean, variance


def plain_scaled(values, scale, shift, *, relu):
    out = values * wide(scale) + wide(shift)
    return out.clamp(min=0) if relu else out


def plain_interval(centre, radius, scale, shift, *, relu):
    centre, radius = centre * wide(scale) + wide(shift), radius * wide(scale.abs())
    if not relu:
        return centre, radius
    lower, upper = (centre - radius).clamp(min=0), (centre + radius).clamp(min=0)
    return (lower + upper) / 2, (upper - lower) / 2


def laid(values, layout):
    """The same numbers in another place of memory."""
    if layout == "nhwc":
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "holes":
        return torch.stack([values, values], dim=4)[..., 0]
    return values.contiguous()


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(channels, layout, dtype, *, interval):
    """Values (and radii) around another mean for each channel, a scale of each sign and 0 among them, a shift."""
    shape = (3, channels, 5, 7)
    values = laid(normal(*shape, seed=1) + 2 * wide(normal(channels, seed=2)), layout)
    scale, shift = normal(channels, seed=3), normal(channels, seed=4)
    if channels > 3:
        scale[3] = 0.0
    radii = [laid(normal(*shape, seed=5).abs(), layout)] if interval else []
    return [t.to(DEVICE, dtype).requires_grad_(True) for t in (values, *radii, scale, shift)]


def agree(found, wanted, given, tolerance, seed=7):
    """Values, and gradients of all `given` behind random weights of the outputs."""
    pairs = [(a, b) for a, b in zip(found, wanted, strict=True) if a.requires_grad]
    weights = [normal(*a.shape, seed=seed + i).to(a) for i, (a, _) in enumerate(pairs)]
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)
    sums = [sum((pair[i] * w).sum() for pair, w in zip(pairs, weights, strict=True)) for i in (0, 1)]
    for a, b in zip(*(torch.autograd.grad(total, given) for total in sums), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, b.abs().max().item()))


CASES = [(torch.float64, 1e-11), (torch.float32, 2e-5)]


@pytest.mark.parametrize(("dtype", "tolerance"), CASES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "holes"])
@pytest.mark.parametrize("channels", CHANNELS)
def test_normalisation(channels, layout, dtype, tolerance) -> None:
    given = inputs(channels, layout, dtype, interval=False)
    found = normalisation(*given, EPS)
    assert not any(t.requires_grad for t in found[3:])
    wanted = plain_normalisation(*given, EPS)
    agree(found, [*wanted[:3], *(t.detach() for t in wanted[3:])], given, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), CASES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "holes"])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("relu", [False, True])
def test_points(relu, channels, layout, dtype, tolerance) -> None:
    given = inputs(channels, layout, dtype, interval=False)
    agree([scaled(*given, relu=relu)], [plain_scaled(*given, relu=relu)], given, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), CASES)
@pytest.mark.parametrize("layout", ["nchw", "nhwc", "holes"])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("relu", [False, True])
def test_intervals(relu, channels, layout, dtype, tolerance) -> None:
    given = inputs(channels, layout, dtype, interval=True)
    agree(scaled_interval(*given, relu=relu), plain_interval(*given, relu=relu), given, tolerance)


def test_programs_of_several_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last program of a large table has fewer rows than the others, or a single one."""
    if KERNELS:
        from robboost.training import triton_channels

        monkeypatch.setattr(triton_channels, "_PROGRAMS", 3)
        monkeypatch.setattr(triton_channels, "_TILE", 64)
    for rows in (1, 16, 47, 48, 49, 113):
        values = (normal(rows, 5, 1, 3, seed=rows) + 3).to(DEVICE).requires_grad_(True)
        radius = normal(rows, 5, 1, 3, seed=rows + 1).abs().to(DEVICE).requires_grad_(True)
        scale, shift = (normal(5, seed=i).to(DEVICE).requires_grad_(True) for i in (2, 3))
        wanted = plain_normalisation(values, scale, shift, EPS)
        found = normalisation(values, scale, shift, EPS)
        agree(found, [*wanted[:3], *(t.detach() for t in wanted[3:])], [values, scale, shift], 1e-10)
        given = [values, radius, scale, shift]
        agree(scaled_interval(*given, relu=True), plain_interval(*given, relu=True), given, 1e-11)
        agree([scaled(*given[1:], relu=True)], [plain_scaled(*given[1:], relu=True)], given[1:], 1e-11)


def test_gradients_are_those_of_differences() -> None:
    """Together as a network has them: statistics of centres, an interval pass and a point pass with the same pair."""
    centre, radius, gamma, beta = (t.detach() for t in inputs(4, "nhwc", torch.float64, interval=True))
    given = [
        t[:2, :, :2, :2].requires_grad_(True) if t.dim() == 4 else t.requires_grad_(True) for t in (centre, radius)
    ]

    def together(centre, radius, gamma, beta):
        values, scale, shift, *_ = normalisation(centre, gamma, beta, EPS)
        ends = scaled_interval(values, radius, scale, shift, relu=True)
        return *ends, scaled(radius, scale, shift, relu=True), scaled(values, scale, shift, relu=False)

    assert gradcheck(together, (*given, gamma.abs().add(0.1).requires_grad_(True), beta.requires_grad_(True)))


def test_digits_do_not_drown_in_a_far_mean() -> None:
    """A mean of 1000 deviations: sums of squares in float32 would leave nothing of the variance."""
    values = (normal(64, 4, 6, 6, seed=0) + 1000).float().to(DEVICE)
    one = torch.ones(4, device=DEVICE)
    *_, mean, variance = normalisation(values, one, one, EPS)
    exact = values.double()
    assert torch.allclose(mean.double(), exact.mean(dim=(0, 2, 3)), rtol=1e-6)
    assert torch.allclose(variance.double(), exact.var(dim=(0, 2, 3), correction=0), rtol=1e-3)


def test_fixed_pairs_and_unused_outputs_have_gradients_too() -> None:
    values, radius, scale, shift = inputs(4, "nhwc", torch.float64, interval=True)
    fixed = scale.detach(), shift.detach()
    for out in (scaled(values, *fixed, relu=True), *scaled_interval(values, radius, *fixed, relu=True)):
        (gradient,) = torch.autograd.grad(out.sum(), values, retain_graph=True)
        assert gradient.shape == values.shape
        assert gradient.abs().sum() > 0
    (gradient,) = torch.autograd.grad(normalisation(values, scale, shift, EPS)[1].sum(), values)
    (wanted,) = torch.autograd.grad(plain_normalisation(values, scale, shift, EPS)[1].sum(), values)
    assert torch.allclose(gradient, wanted, atol=1e-12)


def test_a_diverged_value_stays_one() -> None:
    values, radius, scale, shift = (t.detach() for t in inputs(4, "nhwc", torch.float32, interval=True))
    values[1, 2, 3, 4] = torch.nan
    for out in (scaled(values, scale, shift, relu=True), *scaled_interval(values, radius, scale, shift, relu=True)):
        assert out.isnan().sum() == 1
        assert out[1, 2, 3, 4].isnan()
    assert normalisation(values, scale, shift, EPS)[1].isnan().tolist() == [False, False, True, False]


def test_results_repeat_bit_for_bit() -> None:
    runs = []
    for _ in range(2):
        given = inputs(48, "nhwc", torch.float32, interval=True)
        values, scale, shift, *_ = normalisation(given[0], *given[2:], EPS)
        total = sum(part.square().sum() for part in scaled_interval(values, given[1], scale, shift, relu=True))
        runs.append(torch.cat([g.flatten() for g in torch.autograd.grad(total, given)]))
    assert torch.equal(*runs)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("structure", ["conv 3 3x3/1, [conv 4 4x4/2, conv 4 3x3/1, conv 5 3x3/1], fc 9", "fc 7"])
def test_a_pass_without_a_trace_has_the_same_bounds_and_gradients(structure: str, batch_norm: bool) -> None:
    net = Network.of(structure, (2, 8, 8), num_classes=5, batch_norm=batch_norm, mask=None)
    flat = net.initial("default", seed=1).to(DEVICE).double()
    flat = (flat + 0.1 * normal(net.size, seed=0).to(DEVICE)).requires_grad_(True)
    x = torch.rand(4, 2, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(DEVICE)
    y = torch.tensor([0, 1, 4, 2], device=DEVICE)
    seen = []
    for traced in (True, False):
        weights, norms = net.weights(flat), Norms()
        region = box(x, torch.tensor(0.05, device=DEVICE, dtype=torch.float64), None)
        trace = intervals(net, weights, *region, norms, traced=traced)
        assert len(trace.relus) == (net.num_relus if traced else 0)
        margins = interval_margins(net, weights, trace, y)
        logits = points(net, weights, x, norms)
        (gradient,) = torch.autograd.grad(margins.square().sum() + logits.square().sum(), flat)
        seen.append((margins, logits, gradient))
    for one, two in zip(*seen, strict=True):
        assert torch.allclose(one, two, rtol=1e-10, atol=1e-11)


def test_running_statistics_are_those_of_each_normalisation() -> None:
    net = Network.of("conv 3 3x3/1, conv 5 4x4/2, fc 4", (1, 8, 8), num_classes=3, batch_norm=True, mask=None)
    flat = net.initial("default", seed=1) + 0.1 * normal(net.size, seed=0).float()
    weights, met = net.weights(flat), Norms()
    points(net, weights, torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(1)), met)
    running = Norms.running(net, weights, *met.statistics())
    assert len(running.in_order()) == 2
    for one, two in zip(met.in_order(), running.in_order(), strict=True):
        assert all(torch.allclose(a, b) for a, b in zip(one, two, strict=True))


def test_what_lies_in_memory_for_the_gradient() -> None:
    """Without a trace, an interval layer keeps what the convolutions gave, and none of what is behind the scale."""
    net = Network.of("conv 4 3x3/1, fc 3", (1, 8, 8), num_classes=3, batch_norm=True, mask=None)
    weights = net.weights(net.initial("default", seed=1).requires_grad_(True))
    kept: set[int] = set()

    def pack(tensor):
        if tensor.shape == (5, 4, 8, 8):
            kept.add(tensor.data_ptr())
        return tensor

    x = torch.rand(5, 1, 8, 8)
    absolute = [w.abs() for w in weights]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ends = _intervals(net.trunk[:3], weights, absolute, x, torch.rand_like(x), Norms(), None)
    assert len(kept) == 2
    assert not kept & {end.data_ptr() for end in ends}


@pytest.mark.parametrize("layouts", [("nchw", "nchw"), ("nhwc", "nchw"), ("holes", "nhwc")])
def test_the_interval_relu_alone(layouts) -> None:
    centre, radius, *_ = inputs(5, "nchw", torch.float64, interval=True)
    given = [laid(t.detach(), layout).requires_grad_(True) for t, layout in zip((centre, radius), layouts, strict=True)]
    one = torch.ones(5, dtype=torch.float64, device=DEVICE)
    agree(interval_relu(*given), plain_interval(*given, one, 0 * one, relu=True), given, 1e-11)


def test_sizes_of_many_weights() -> None:
    weights = [laid(normal(*shape, seed=1), "nhwc").to(DEVICE) for shape in ((5, 3, 4, 4), (2, 1, 3, 3))]
    weights += [normal(4, 7, seed=2).to(DEVICE), torch.zeros(1, 2, device=DEVICE, dtype=torch.float64)]
    given = [w.requires_grad_(True) for w in weights]
    agree(absolute(given), [w.abs() for w in given], given, 1e-12)
    assert absolute([]) == []
