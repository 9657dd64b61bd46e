"""Sizes and shapes of the paper's networks."""

import pytest
import torch

from robboost.errors import InputError
from robboost.models.architectures import ARCHITECTURES, PAPER_CIFAR, PAPER_MNIST, Residual, build, float32_bytes

MNIST, CIFAR = (1, 28, 28), (3, 32, 32)
# MB (1e6 bytes), two decimals.
MNIST_MB = dict(
    zip("ABCDEFGHIJKL", (0.21, 0.82, 0.11, 0.43, 0.11, 0.45, 0.68, 1.88, 1.10, 2.70, 0.22, 0.88), strict=True)
)
CIFAR_MB = dict(zip("ABCDEFGHIJK", (0.27, 1.07, 0.14, 0.55, 0.14, 0.57, 0.81, 2.13, 1.35, 3.20, 0.29), strict=True))


@pytest.mark.parametrize(("shape", "sizes"), [(MNIST, MNIST_MB), (CIFAR, CIFAR_MB)], ids=["mnist", "cifar"])
def test_size_of_each_model(shape, sizes):
    for name, megabytes in sizes.items():
        assert float32_bytes(build(name, shape)) / 1e6 == pytest.approx(megabytes, abs=0.00501), name


def test_sizes_add_up_to_the_papers():
    mib = 2.0**20
    assert sum(float32_bytes(build(n, MNIST)) for n in PAPER_MNIST) / mib == pytest.approx(9.16, abs=0.01)
    assert sum(float32_bytes(build(n, CIFAR)) for n in PAPER_CIFAR) / mib == pytest.approx(10.02, abs=0.01)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("shape", [MNIST, CIFAR], ids=["mnist", "cifar"])
def test_gives_logits(name, shape):
    assert build(name, shape, num_classes=7)(torch.rand(2, *shape)).shape == (2, 7)


def test_residual_block_by_hand():
    block = build("[conv 1 2x2/2]", (1, 2, 2), num_classes=1)[0]
    assert isinstance(block, Residual)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.fill_(0.5)
    x = torch.tensor([[[[1.0, 2.0], [3.0, -8.0]]]])
    # body and skip each: 0.5 * (1 + 2 + 3 - 8) + 0.5 = -0.5; the ReLU comes after the sum
    assert block(x).item() == 0.0
    assert block(-x).item() == 2 * 1.5


def test_seed_gives_the_same_network_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    first, second, other = (build("A", MNIST, seed=s) for s in (3, 3, 4))
    assert torch.equal(before, torch.random.get_rng_state())
    pairs = list(zip(first.parameters(), second.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) and not torch.equal(a, c) for a, b, c in pairs)


def test_batch_norm_behind_every_convolution():
    names = [type(m).__name__ for m in build("K", MNIST, batch_norm=True).modules()]
    assert names.count("BatchNorm2d") == 7
    assert names.count("Conv2d") == 9  # the skips have none


@pytest.mark.parametrize("name", ["K", "L"])
def test_residual_networks_are_two_blocks_of_three_convolutions(name):
    """Sizes alone do not show where a block ends."""
    layers = [type(layer).__name__ for layer in build(name, MNIST)]
    assert layers == ["Conv2d", "ReLU", "Residual", "Residual", "Flatten", "Linear", "ReLU", "Linear"]
    for block in build(name, MNIST)[2:4]:
        assert [type(layer).__name__ for layer in block.body] == ["Conv2d", "ReLU", "Conv2d", "ReLU", "Conv2d"]


@pytest.mark.parametrize(
    "text",
    [
        "[conv 4 4x4/2",
        "conv 4 3x3/1, conv 4 4x4/2]",
        "Z",
        "conv 4 3x5/1",
        "fc 10, conv 4 3x3/1",
        "[fc 3]",
        "conv 4 3x3/1, [",
        "fc -3",
    ],
)
def test_unreadable_structure_is_refused(text):
    with pytest.raises(InputError, match="cannot read"):
        build(text, MNIST)


def test_structure_that_does_not_fit_is_refused():
    with pytest.raises(InputError, match="does not fit images of shape"):
        build("conv 4 4x4/4, conv 4 4x4/4, conv 4 4x4/4", MNIST)
    with pytest.raises(InputError, match="channels, height, width"):
        build("A", (28, 28))
