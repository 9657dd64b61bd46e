"""The convolution of images against PyTorch's; TRITON_INTERPRET=1 sends its gradient through the kernel."""

import os

import pytest
import torch
from torch.nn import functional as F

from robboost.training import first_convolution as module
from robboost.training.first_convolution import first_convolution, reads_an_image
from robboost.training.precision import full_float32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET", "0") == "1"


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


# Channels of the image, of the output, kernel, stride, padding, height, width: sizes that divide and sizes that do not.
@pytest.mark.parametrize(
    ("channels", "outer", "kernel", "stride", "padding", "height", "width"),
    [
        (1, 32, 3, 1, 1, 28, 28),
        (1, 4, 4, 2, 1, 28, 28),
        (3, 8, 4, 2, 1, 32, 32),
        (3, 70, 3, 1, 1, 6, 5),
        (2, 5, 5, 4, 1, 9, 11),
        (1, 1, 1, 1, 0, 3, 3),
        (4, 16, 5, 1, 2, 7, 7),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_values_and_gradients(channels, outer, kernel, stride, padding, height, width, biased, monkeypatch) -> None:
    if KERNELS:
        from robboost.training import triton_convolution

        monkeypatch.setattr(triton_convolution, "_PROGRAMS", 4)  # several tiles each
    x = normal(3, channels, height, width, seed=0)
    # As the flat vector holds them: channels last.
    weight = normal(outer, kernel, kernel, channels, seed=1).permute(0, 3, 1, 2).requires_grad_(True)
    bias = normal(outer, seed=2).requires_grad_(True) if biased else None
    given = [weight] if bias is None else [weight, bias]
    assert reads_an_image(x, weight) == KERNELS
    with full_float32():
        found = first_convolution(x, weight, bias, stride, padding)
        wanted = F.conv2d(x.double(), weight.double(), bias.double() if biased else None, stride, padding)
        assert torch.allclose(found.double(), wanted, rtol=1e-5, atol=1e-5)
        factors = normal(*found.shape, seed=3)
        gradients = torch.autograd.grad((found * factors).sum(), given)
        exact = torch.autograd.grad((wanted * factors).sum(), given)
    for one, two in zip(gradients, exact, strict=True):
        assert one.shape == two.shape
        assert torch.allclose(one, two, rtol=1e-5, atol=2e-6 * factors[:, 0].numel() ** 0.5 * 10)


def test_float64_is_left_to_pytorch() -> None:
    x, weight = normal(2, 3, 6, 6, seed=0).double(), normal(4, 3, 3, 3, seed=1).double().requires_grad_(True)
    total = first_convolution(x, weight, None, 1, 1).square().sum()
    exact = F.conv2d(x, weight, None, 1, 1).square().sum()
    (one,), (two,) = torch.autograd.grad(total, weight), torch.autograd.grad(exact, weight)
    assert torch.allclose(one, two, rtol=1e-12)


def test_where_it_stands_for_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fused", lambda values: True)
    image, weight = torch.zeros(2, 3, 8, 8), torch.zeros(4, 3, 3, 3, requires_grad=True)
    assert reads_an_image(image, weight)
    assert not reads_an_image(image.clone().requires_grad_(True), weight)  # an attacked point
    assert not reads_an_image(image, weight.detach())
    assert not reads_an_image(torch.zeros(2, 5, 8, 8), torch.zeros(4, 5, 3, 3, requires_grad=True))
    assert not reads_an_image(image, torch.zeros(4, 3, 3, 1, requires_grad=True))
    assert not reads_an_image(image, torch.zeros(4, 3, 7, 7, requires_grad=True))
    assert not reads_an_image(image.double(), weight.double())
