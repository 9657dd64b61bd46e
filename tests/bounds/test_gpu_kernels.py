"""The GPU kernels of the backward pass against what they stand for; TRITON_INTERPRET=1 runs the same tests on a CPU."""

import os

import pytest
import torch
import torch.nn.functional as F

import robboost as rb
from robboost.models.architectures import build

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (INTERPRETED or torch.cuda.is_available()),
        reason="needs a CUDA device; its CPU twin, plain PyTorch, is what the other tests of the bounds run on",
    ),
]


def random(*shape):
    return torch.randn(*shape, device=DEVICE)


# Outer channels, inner channels, kernel, stride, side of the operand: with few, many, and odd numbers of channels.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("outer", "inner", "kernel", "stride", "side"),
    [
        (16, 16, 3, 1, 5),
        (8, 8, 3, 1, 4),
        (32, 16, 4, 2, 3),
        (16, 8, 2, 2, 4),
        (4, 4, 5, 1, 5),
        (13, 5, 3, 2, 4),
        (8, 8, 5, 4, 3),
        (8, 4, 4, 4, 2),
        (16, 1, 4, 2, 4),
        (8, 3, 3, 1, 4),
        # Seen wrong in float64, for the padded call: ptxas dropped constants of packed 16-bit additions.
        (8, 4, 3, 1, 28),
        (8, 4, 5, 1, 28),
    ],
)
def test_transposed_convolution(outer, inner, kernel, stride, side, dtype):
    from robboost.bounds import kernels_conv as kernels

    torch.manual_seed(0)
    values, weight = random(7, outer, side, side).to(dtype), random(outer, inner, kernel, kernel).to(dtype)
    whole = F.conv_transpose2d(values.double(), weight.double(), None, stride)
    size = whole.shape[2]
    sums = F.conv_transpose2d(values.double().abs(), weight.double().abs(), None, stride).max()
    room = (2e-6 if dtype == torch.float32 else 1e-14) * sums
    for cut, extra in ((0, 0), (1, 0), (1, stride - 1)):
        wanted = F.pad(whole, (0, extra, 0, extra))[:, :, cut : size + extra - cut, cut : size + extra - cut]
        side_out = (size + extra - 2 * cut,) * 2
        found = kernels.transpose_conv(values, weight, (stride,) * 2, (cut,) * 2, side_out, kernels.pack(weight))
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) <= room


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_relaxation_and_reach(windowed, both):
    from robboost.bounds import kernels_rows as kernels

    torch.manual_seed(1)
    rows, examples, shape = 9, 3, (4, 6, 5)
    example = torch.arange(rows, device=DEVICE) % examples
    maps = [random(examples, *shape) for _ in range(4)]
    radius = random(examples, *shape).abs()
    values = random(1, rows, 4, 3, 3) if windowed else random(1, rows, *shape)
    origin, full = None, values
    if windowed:
        tops = torch.tensor([-2, -1, 0, 1, 2, 3, 4, 5, 0], device=DEVICE, dtype=torch.int32)
        lefts = torch.tensor([0, 4, 3, 2, 1, 0, -1, -2, 1], device=DEVICE, dtype=torch.int32)
        origin = (tops, lefts)
        full = kernels.place(values, shape, origin)
        expected = torch.zeros(1, rows, *shape, device=DEVICE)
        for row in range(rows):
            for y in range(3):
                for x in range(3):
                    at = int(tops[row]) + y, int(lefts[row]) + x
                    if 0 <= at[0] < shape[1] and 0 <= at[1] < shape[2]:
                        expected[0, row, :, at[0], at[1]] = values[0, row, :, y, x]
        assert torch.equal(full, expected)
    slope, step, gap, gap_step = (part[example] for part in maps)
    negative = full.clamp(max=0)
    passed, losses = kernels.relax(values, example, maps, origin, both)
    wanted = full * slope + negative * step
    sums = [(full * gap + negative * gap_step).flatten(2).sum(2)]
    if both:
        upper = -full
        sums.append((upper * gap + upper.clamp(max=0) * gap_step).flatten(2).sum(2))
    assert torch.allclose(losses, torch.cat(sums), atol=1e-4)
    inside = passed if origin is None else kernels.place(passed, shape, origin)
    assert torch.allclose(inside, wanted, atol=1e-5)
    reach = kernels.reach(values, example, radius, origin)
    assert torch.allclose(reach, (full.abs() * radius[example]).flatten(2).sum(2), atol=1e-4)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch):
    from robboost.bounds import kernels, kernels_conv, kernels_rows

    values, weight, example = random(5, 4, 3, 3), random(4, 2, 3, 3), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    maps, radius = [random(1, 4, 3, 3) for _ in range(4)], random(1, 4, 3, 3).abs()
    origin = (torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.ones(5, dtype=torch.int32, device=DEVICE))
    calls = [
        (kernels_conv, "transpose_conv", (values, weight, (1, 1), (1, 1), (3, 3), kernels.pack(weight))),
        (kernels_rows, "relax", (values[None], example, maps, None, True)),
        (kernels_rows, "relax", (values[None], example, maps, origin, False)),
        (kernels_rows, "reach", (values[None], example, radius, origin)),
        (kernels_rows, "place", (values[None], (4, 5, 6), origin)),
    ]
    for module, name, arguments in calls:
        right = getattr(module, name)
        expected = right(*arguments)
        for wrong in (
            lambda *given, right=right: _changed(right(*given)),
            lambda *given, right=right: _changed(right(*given), torch.nan),
        ):
            monkeypatch.setattr(kernels, "_SOUND", {})
            monkeypatch.setattr(module, name, wrong)
            with pytest.warns(RuntimeWarning, match=f"{name} .* disagrees"):
                found = getattr(kernels, name)(*arguments)
            monkeypatch.setattr(module, name, right)
            for one, other in zip(_flat(found), _flat(expected), strict=True):
                assert torch.allclose(one, other, atol=1e-4)
        monkeypatch.setattr(kernels, "_SOUND", {})
        for one, other in zip(_flat(getattr(kernels, name)(*arguments)), _flat(expected), strict=True):
            assert torch.equal(one, other)
        assert all(kernels._SOUND.values())


def test_small_work_in_float64_is_not_compiled(monkeypatch):
    from robboost.bounds import kernels

    values, weight, example = random(5, 4, 3, 3), random(4, 2, 3, 3), torch.zeros(5, dtype=torch.int64, device=DEVICE)
    maps = [random(1, 4, 3, 3) for _ in range(4)]
    origin = (torch.zeros(5, dtype=torch.int32, device=DEVICE), torch.ones(5, dtype=torch.int32, device=DEVICE))
    values, weight, maps = values.double(), weight.double(), [part.double() for part in maps]
    calls = {
        "transpose_conv": (values, weight, (1, 1), (1, 1), (3, 3), kernels.pack(weight)),
        "relax": (values[None], example, maps, origin, False),
        "reach": (values[None], example, maps[0].abs(), origin),
        "place": (values[None], (4, 5, 6), origin),
    }
    for name, arguments in calls.items():
        monkeypatch.setattr(kernels, "_SOUND", {})
        plain = getattr(kernels, name)(*arguments)
        assert kernels._SOUND == {}
        with monkeypatch.context() as always:
            always.setattr(kernels, "_COMPILED_PRODUCTS", 0)
            always.setattr(kernels, "_COMPILED_NUMBERS", 0)
            compiled = getattr(kernels, name)(*arguments)
        assert kernels._SOUND
        assert all(kernels._SOUND.values())
        for one, other in zip(_flat(plain), _flat(compiled), strict=True):
            assert torch.allclose(one, other, atol=1e-12)


def _flat(result):
    return result if isinstance(result, tuple) else (result,)


def _changed(result, by=0.01):
    """One number of the first result is wrong."""
    first, *others = _flat(result)
    first = first.clone()
    first.view(-1)[-1] += by
    return (first, *others) if others else first


@pytest.mark.parametrize("method", ["ibp", "crown-ibp", "same-slope", "crown", "alpha-crown"])
@pytest.mark.parametrize("name", ["A", "K"])
def test_whole_bounds_equal_float64_without_kernels(name, method):
    if INTERPRETED:
        pytest.skip("the interpreter is too slow for whole networks; the kernels are compared one by one above")
    torch.manual_seed(2)
    x, y = torch.rand(6, 1, 28, 28), torch.arange(6)
    model, threat = build(name, (1, 28, 28), seed=1).eval(), rb.Threat(0.03, clip=(0, 1))
    exact = rb.margin_bounds(model, x, y, threat, method, precision="float64")
    found = rb.margin_bounds(model.to(DEVICE), x.to(DEVICE), y.to(DEVICE), threat, method)
    scale = float(exact.lower.abs().max())
    room = 1e-4 if method == "alpha-crown" else 2e-6
    assert float((found.lower.cpu() - exact.lower).abs().max()) <= room * scale
