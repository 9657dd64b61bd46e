"""CROWN and Fast-Lin written a second time, on matrices in float64 with NumPy alone: slow, short, shared with nothing.

Every layer is turned into a matrix by feeding it the unit vectors, so that convolutions, strides and padding need no
rules of their own here. For networks that are a chain of affine layers and ReLUs.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

DUAL = {"linf": 1, "l2": 2, "l1": np.inf}


@dataclass
class Chain:
    """Pre-activation k is matrices[k] @ relu(pre-activation k-1) + offsets[k]; the first one takes the input."""

    matrices: list[np.ndarray]
    offsets: list[np.ndarray]


def chain_of(model: nn.Sequential, input_shape) -> Chain:
    matrices, offsets, group = [], [], []
    shape = tuple(input_shape)

    def close():
        nonlocal shape, group
        layer = nn.Sequential(*group).double()
        size = int(np.prod(shape))
        with torch.no_grad():
            at_zero = layer(torch.zeros(1, *shape, dtype=torch.float64))
            units = layer(torch.eye(size, dtype=torch.float64).view(size, *shape)) - at_zero
        matrices.append(units.flatten(1).T.numpy())
        offsets.append(at_zero.flatten().numpy())
        shape, group = tuple(at_zero.shape[1:]), []

    for module in model:
        if isinstance(module, nn.ReLU):
            close()
        else:
            group.append(module)
    close()
    return Chain(matrices, offsets)


def relaxation(lower, upper, method):
    """(lower slope, upper slope, upper intercept) of each ReLU; the lower intercept is 0."""
    upper_slope = np.where(
        lower >= 0, 1.0, np.where(upper <= 0, 0.0, upper / np.where(upper > lower, upper - lower, 1))
    )
    unstable = (lower < 0) & (upper > 0)
    offset = np.where(unstable, -upper_slope * lower, 0.0)
    if method == "same-slope":
        return upper_slope, upper_slope, offset
    return np.where(unstable, (upper > -lower).astype(float), upper_slope), upper_slope, offset


def backward(chain, layer, rows, relaxations):
    """Slope and intercept below rows @ (pre-activation `layer`), in terms of the input."""
    slope, intercept = rows @ chain.matrices[layer], rows @ chain.offsets[layer]
    for k in range(layer - 1, -1, -1):
        low, up, offset = relaxations[k]
        positive, negative = np.maximum(slope, 0), np.minimum(slope, 0)
        intercept = intercept + negative @ offset
        slope = positive * low + negative * up
        intercept = intercept + slope @ chain.offsets[k]
        slope = slope @ chain.matrices[k]
    return slope, intercept


def concretise(slope, intercept, centre, radius, norm):
    if norm == "linf":
        return intercept + slope @ centre - np.abs(slope) @ radius
    return intercept + slope @ centre - radius * np.linalg.norm(slope, ord=DUAL[norm], axis=1)


def interval_step(chain, k, lower, upper):
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    at, spread = chain.matrices[k] @ middle + chain.offsets[k], np.abs(chain.matrices[k]) @ half
    return at - spread, at + spread


def margins(chain, centre, radius, norm, true_class, method):
    """Slope, intercept (at the input's zero) and lower bound of each margin; hidden bounds by CROWN alone."""
    relaxations = []
    for k in range(len(chain.matrices) - 1):
        eye = np.eye(len(chain.offsets[k]))
        lower = concretise(*backward(chain, k, eye, relaxations), centre, radius, norm)
        upper = -concretise(*backward(chain, k, -eye, relaxations), centre, radius, norm)
        relaxations.append(relaxation(lower, upper, method))
    classes = len(chain.offsets[-1])
    rows = np.stack([np.eye(classes)[true_class] - np.eye(classes)[j] for j in range(classes) if j != true_class])
    slope, intercept = backward(chain, len(chain.matrices) - 1, rows, relaxations)
    return slope, intercept, concretise(slope, intercept, centre, radius, norm)
