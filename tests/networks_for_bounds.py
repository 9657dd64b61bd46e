"""Small random networks that between them hold every operation with a bound rule."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Skip(nn.Module):
    """relu(body(x) + skip(x))."""

    def __init__(self, body, skip):
        super().__init__()
        self.body, self.skip = body, skip

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


class Normalised(nn.Module):
    """Per-channel (x - mean) / std in front of a network, and a last constant scale and shift behind it."""

    def __init__(self, network, channels):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.linspace(0.3, 0.6, channels).view(1, -1, 1, 1))
        self.register_buffer("std", torch.linspace(0.5, 0.8, channels).view(-1, 1, 1))

    def forward(self, x):
        return 2.0 * self.network((x - self.mean) / self.std) - 1.0


class Functional(nn.Module):
    """Functional forms: permute, transpose, matmul, subtraction of two flows, mean over pixels, negation."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding="same", dilation=2)
        self.matrix = nn.Parameter(torch.randn(3 * 6 * 6, 8) * 0.3)
        self.last = nn.Linear(8 + 0, 4)
        self.side = nn.Linear(3, 4)

    def forward(self, x):
        z = F.leaky_relu(self.conv(x), 0.2)
        flat = z.permute(0, 2, 3, 1).reshape(x.shape[0], -1)
        hidden = torch.tanh(flat @ self.matrix)
        return self.last(hidden) - self.side(z.mean((2, 3))) * 0.5 + (-0.1)


def _batch_norm(channels):
    layer = nn.BatchNorm2d(channels)
    layer.running_mean.normal_(0, 0.3)
    layer.running_var.uniform_(0.5, 2)
    nn.init.uniform_(layer.weight, -1.5, 1.5)
    nn.init.normal_(layer.bias, 0, 0.3)
    return layer


def build(name, seed=0):
    """(network in evaluation mode, input shape) by name."""
    torch.manual_seed(seed)
    maker, shape = NETWORKS[name]
    model = maker().double().eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model, shape


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 6), nn.ReLU(), nn.Linear(6, 3)), (5,)),
    "leaky": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.LeakyReLU(0.3), nn.Linear(6, 6), nn.LeakyReLU(0.1), nn.Linear(6, 3)),
        (5,),
    ),
    "sigmoid": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)),
        (4,),
    ),
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), (4,)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 4, stride=2, padding=1, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(36, 5),
            nn.ReLU(),
            nn.Linear(5, 3),
        ),
        (2, 6, 6),
    ),
    "odd-conv": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, (3, 2), stride=(2, 3), padding=(1, 0)),
            nn.ReLU(),
            nn.Conv2d(3, 2, 2, dilation=(2, 1)),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        (1, 8, 9),
    ),
    "norm": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1, bias=False),
            _batch_norm(3),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
            nn.Conv2d(3, 3, 2),
            _batch_norm(3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        (1, 6, 6),
    ),
    "pool": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(3, 3, 2),
            nn.AvgPool2d(2, 1, ceil_mode=True),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(3, 3),
        ),
        (1, 6, 6),
    ),
    "residual": (
        lambda: Normalised(
            nn.Sequential(
                nn.Conv2d(2, 3, 3, padding=1),
                nn.ReLU(),
                Skip(
                    nn.Sequential(nn.Conv2d(3, 4, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
                    nn.Conv2d(3, 4, 2, stride=2),
                ),
                Skip(
                    nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)),
                    nn.Identity(),
                ),
                nn.Flatten(),
                nn.Linear(36, 6),
                nn.ReLU(),
                nn.Linear(6, 3),
            ),
            2,
        ),
        (2, 6, 6),
    ),
    "functional": (Functional, (2, 6, 6)),
    "deep-linear": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)),
        (4,),
    ),
}
