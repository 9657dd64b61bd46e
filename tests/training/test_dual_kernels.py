"""ReLUs on random columns and on rows: their gradients against autograd, their kernels against plain PyTorch.

TRITON_INTERPRET=1 runs the tests of the kernels on a CPU.
"""

import os

import pytest
import torch

from robboost.training import TrainConfig, dual_kernels, dual_plain
from robboost.training.dual_kernels import relax_rows, relu_estimated, relu_given
from robboost.training.dual_plain import relaxation
from robboost.training.member import DeviceData, Member

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
gpu = pytest.mark.gpu
needs_triton = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="needs a CUDA device; its CPU twin, plain PyTorch, is what the other tests of training run on",
)
EXAMPLES, SHAPES = 5, [(11,), (3, 4, 5)]


def random(*shape: int, seed: int, last: bool = False) -> torch.Tensor:
    numbers = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    if last and len(shape) > 3:
        numbers = numbers.transpose(-3, -1).contiguous().transpose(-3, -1)
    return numbers


def column_inputs(shape: tuple[int, ...], count: int, *, shared: bool, last: bool = False) -> list[torch.Tensor]:
    """Centre, radius, columns, fresh: a third of the neurons stable; one whose columns are all 0."""
    centre = 2 * random(EXAMPLES, *shape, seed=0, last=last)
    radius = random(1, *shape, seed=1, last=last).abs().expand(EXAMPLES, *shape)
    columns = random(count, 1 if shared else EXAMPLES, *shape, seed=2, last=last)
    columns.flatten(2)[:, 0, 3] = 0
    return [centre, radius, columns, random(count, 1, *shape, seed=3, last=last)]


def written_out(centre, radius, columns, fresh):
    """The formulas as the module says them, for autograd; radius None: estimated."""
    if radius is None:
        squares = columns * columns
        c = (0.5 * torch.log(squares.detach() + 1e-30).mean(0)).exp().mul(0.5).clamp(min=1e-12)
        radius = ((0.5 * torch.log(squares + c * c).mean(0)).exp() - c).clamp(min=0)
    slope, _, shift = relaxation(centre, radius, "same-slope")
    return radius, centre * slope + shift / 2, columns * slope + fresh * shift / 2


def rows_written_out(rows, centre, radius, rule):
    low, up, shift = (part.unsqueeze(1) for part in relaxation(centre, radius, rule))
    passed = rows.clamp(min=0) * low + rows.clamp(max=0) * up
    return passed, (rows.clamp(max=0) * shift).flatten(2).sum(2)


def assert_same(found, expected, inputs, tolerance=1e-12) -> None:
    """Values, and gradients of a random sum of all outputs."""
    gradients = []
    for outputs in (found, expected):
        total = sum((o * random(*o.shape, seed=9 + i)).sum() for i, o in enumerate(outputs))
        gradients.append(torch.autograd.grad(total, inputs))
    for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert a.shape == b.shape
        assert torch.allclose(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shared", [False, True])
def test_columns_have_the_gradients_of_the_formulas(shape: tuple[int, ...], shared: bool) -> None:
    centre, radius, columns, fresh = column_inputs(shape, 7, shared=shared)
    radius = radius.clone()
    inputs = [t.requires_grad_(True) for t in (centre, radius, columns)]
    assert_same(relu_given(*inputs, fresh), written_out(*inputs, fresh)[1:], inputs)
    inputs = [centre, columns]
    expected = written_out(centre, None, columns.expand(-1, EXAMPLES, *shape), fresh)
    assert_same(relu_estimated(*inputs, fresh), expected, inputs)
    slope = relaxation(centre, radius, "same-slope")[0]
    assert set(slope.detach().flatten().tolist()) >= {0.0, 1.0}
    assert ((slope > 0) & (slope < 1)).any()


@pytest.mark.parametrize("rule", ["same-slope", "adaptive"])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_have_the_gradients_of_the_formulas(rule: str, shape: tuple[int, ...]) -> None:
    centre, radius, _, _ = column_inputs(shape, 1, shared=True)
    inputs = [t.requires_grad_(True) for t in (random(EXAMPLES, 4, *shape, seed=5), centre, radius.clone())]
    assert_same(relax_rows(*inputs, rule), rows_written_out(*inputs, rule), inputs)


def test_gradients_are_differences_of_values() -> None:
    """Where nothing jumps; of the estimate, whose c is held fixed, this is tested by the formulas alone."""
    centre, radius, columns, fresh = column_inputs((6,), 3, shared=True)
    inputs = [t.clone().requires_grad_(True) for t in (centre, radius, columns)]
    assert torch.autograd.gradcheck(lambda *values: relu_given(*values, fresh), inputs)
    rows = random(EXAMPLES, 3, 6, seed=6).requires_grad_(True)
    for rule in ("same-slope", "adaptive"):
        assert torch.autograd.gradcheck(lambda *values, rule=rule: relax_rows(*values, rule), (rows, *inputs[:2]))


def on_device(tensors, dtype):
    return [t.to(DEVICE, dtype) for t in tensors]


def close(found, expected, dtype) -> None:
    room = 2e-5 if dtype == torch.float32 else 1e-9
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert (a.cpu().double() - b).abs().max() <= room * b.abs().max().clamp(min=1)


@gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("shape", "count"), [((11,), 1), ((3, 4, 5), 7), ((16, 9, 9), 31)])
def test_kernels_of_columns(shape, count, shared, last, dtype) -> None:
    from robboost.training import dual_triton

    values = column_inputs(shape, count, shared=shared, last=last)
    if shared:  # more examples than one program adds up
        values[0] = random(19, *shape, seed=0, last=last)
        values[1] = values[1][:1].expand_as(values[0])
    centre, radius, columns, fresh = values
    examples = len(centre)
    to_radius, to_centre = random(examples, *shape, seed=6), random(examples, *shape, seed=7)
    to_columns = random(count, examples, *shape, seed=8, last=last)
    wanted = dual_plain.given_forward(centre, radius, columns, fresh)
    assert_kernel(dual_triton.given_forward, (centre, radius, columns, fresh), wanted, dtype)
    kept, gradients = on_device((centre, radius, columns, fresh), dtype), on_device((to_centre, to_columns), dtype)
    wanted = dual_plain.given_backward((centre, radius, columns, fresh), to_centre, to_columns)
    close(dual_triton.given_backward(kept, *gradients), wanted, dtype)
    if shared:
        return
    wanted = dual_plain.estimated_forward(centre, columns, fresh)
    assert_kernel(dual_triton.estimated_forward, (centre, columns, fresh), wanted, dtype)
    kept = (centre, columns, fresh, *wanted[:2])
    gradients = on_device((to_radius, to_centre, to_columns), dtype)
    expected = dual_plain.estimated_backward(kept, to_radius, to_centre, to_columns)
    close(dual_triton.estimated_backward(on_device(kept, dtype), *gradients), expected, dtype)


def assert_kernel(function, inputs, wanted, dtype) -> None:
    close(function(*on_device(inputs, dtype)), wanted, dtype)


@gpu
@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rule", ["same-slope", "adaptive"])
@pytest.mark.parametrize(("shape", "count"), [((11,), 1), ((3, 4, 5), 4), ((16, 9, 9), 9)])
def test_kernels_of_rows(shape, count, rule, last, dtype) -> None:
    from robboost.training import dual_triton

    centre, radius, _, _ = column_inputs(shape, 1, shared=True, last=last)
    rows = random(EXAMPLES, count, *shape, seed=5)
    wanted = dual_plain.rows_forward(rows, centre, radius, rule)
    close(dual_triton.rows_forward(*on_device((rows, centre, radius), dtype), rule), wanted, dtype)
    to_passed, to_lost = random(EXAMPLES, count, *shape, seed=6, last=last), random(EXAMPLES, count, seed=7)
    wanted = dual_plain.rows_backward((rows, centre, radius), to_passed, to_lost, rule)
    found = dual_triton.rows_backward(
        on_device((rows, centre, radius), dtype), *on_device((to_passed, to_lost), dtype), rule
    )
    close(found, wanted, dtype)


@gpu
@needs_triton
@pytest.mark.parametrize("projections", [0, 7])
def test_a_step_with_the_kernels_is_a_step_without(projections: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from robboost.training import dual_triton

    structure = "[conv 4 4x4/2, conv 4 3x3/1, conv 4 3x3/1], conv 3 3x3/1, fc 9"
    images, labels = torch.rand(24, 2, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 10
    chosen = {"method": "wong-kolter", "projections": projections, "train_eps": 0.1, "warmup": 0.0, "ramp": 0.0}
    config = TrainConfig(structure, **chosen, init="default", batch=12, epochs=1)
    results = []
    for module in (dual_plain, dual_triton):
        monkeypatch.setattr(dual_kernels, "_twin", lambda tensor, module=module: module)
        member = Member(config, DeviceData.of(images, labels, pad=0, classes=10, device=torch.device(DEVICE)))
        member.begin_epoch(0)
        for _ in range(2):
            member.step()
        results.append((member.first_moment, member.log))
    for plain, kernels in zip(*results, strict=True):
        assert torch.allclose(plain, kernels, rtol=1e-3, atol=1e-3 * float(plain.abs().max()))
    assert results[0][0].abs().max() > 0
