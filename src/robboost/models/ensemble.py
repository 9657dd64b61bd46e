"""Several trained networks as one: logits = sum_t weight_t * logits_t / scale_t."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.models.architectures import float32_bytes

__all__ = ["Ensemble"]


class Ensemble(nn.Module):
    """The mix F(x) = sum_t a_t f_t(x) / Z_t of the members f_t, with a on the simplex (paper, section 3.2).

    An ordinary module: it moves between devices, has a state dict, can be attacked by any library and exported. Because
    a_t >= 0 and Z_t > 0, slopes and intercepts of the members' linear bounds add up with the same coefficients.

    Args:
        pool: the members; same input shape, same classes. They are put into evaluation mode, and not copied.
        weights: [T], none negative, sum 1 (to within 1e-6; stored divided by their sum).
        scales: [T], all positive; None: all one.
        names: what reports call the members; None: "0", "1", ...
    """

    weights: Tensor
    scales: Tensor

    def __init__(
        self,
        pool: Sequence[nn.Module],
        weights: Sequence[float] | Tensor,
        scales: Sequence[float] | Tensor | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        if not pool:
            raise InputError("pool is empty: expected at least one member")
        if bad := [type(member).__name__ for member in pool if not isinstance(member, nn.Module)]:
            raise InputError(f"pool holds a {bad[0]}: expected torch.nn.Module members (load files with load_model)")
        labels = tuple(str(t) for t in range(len(pool))) if names is None else tuple(str(name) for name in names)
        if len(labels) != len(pool):
            raise InputError(f"names has {len(labels)} entries: expected {len(pool)}, one per member")
        self.names = labels
        self.members = nn.ModuleList(pool)
        # float64: the certificate is stated for these very numbers.
        self.register_buffer("weights", _weights(weights, len(pool)))
        self.register_buffer("scales", _scales(scales, len(pool)))
        self.eval()

    def coefficients(self) -> Tensor:
        """weight_t / scale_t, [T]."""
        return self.weights / self.scales

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, C] of images [N, *input]."""
        coefficients = self.coefficients()
        logits = self.members[0](x)
        logits = logits * coefficients[0].to(logits.dtype)
        for t in range(1, len(self.members)):
            part = self.members[t](x)
            logits = logits + part * coefficients[t].to(part.dtype)
        return logits

    def pruned(self) -> Ensemble:
        """The same function without the members whose weight is exactly zero (members are shared, not copied)."""
        used = [t for t, weight in enumerate(self.weights.tolist()) if weight > 0]
        return Ensemble(
            [self.members[t] for t in used],
            self.weights[used],
            self.scales[used],
            names=[self.names[t] for t in used],
        )

    @property
    def size_mb(self) -> float:
        """Size of all members in float32, in units of 1e6 bytes (the paper's)."""
        return sum(float32_bytes(member) for member in self.members) / 1e6

    def extra_repr(self) -> str:
        parts = zip(self.names, self.weights.tolist(), self.scales.tolist(), strict=True)
        return ", ".join(f"{name}: {weight:.4g}/{scale:.4g}" for name, weight, scale in parts)


def _weights(values: Sequence[float] | Tensor, count: int) -> Tensor:
    weights = _vector(values, count, "weights")
    total = float(weights.sum())
    if bool((weights < 0).any()) or abs(total - 1) > 1e-6:
        raise InputError(f"weights sum to {total:g}, lowest {float(weights.min()):g}: expected none negative and sum 1")
    return weights / total


def _scales(values: Sequence[float] | Tensor | None, count: int) -> Tensor:
    scales = torch.ones(count, dtype=torch.float64) if values is None else _vector(values, count, "scales")
    if not bool((scales > 0).all()):
        # A scale below zero would turn the member's ranking of the classes upside down.
        raise InputError(f"scales has lowest value {float(scales.min()):g}: expected all above zero")
    return scales


def _vector(values: Sequence[float] | Tensor, count: int, name: str) -> Tensor:
    try:
        vector = torch.as_tensor(values).detach().to(device="cpu", dtype=torch.float64).clone()
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{name}={values!r}: expected {count} numbers, one per member") from None
    if vector.shape != (count,):
        raise InputError(f"{name} has shape {list(vector.shape)}: expected [{count}], one per member")
    if not all(math.isfinite(value) for value in vector.tolist()):
        raise InputError(f"{name}={vector.tolist()}: expected finite numbers")
    return vector
