"""What is kept of many margins: how many pairs need no optimisation, a histogram, and one bit for each image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["above_zero", "eliminated", "histogram", "packed", "unpacked"]

_BINS = 60


def eliminated(members: Tensor, mix: Tensor) -> dict[str, int]:
    """The paper's table 1: pairs, and examples, that it removes before the weights are optimised.

    Args:
        members: margins of each member alone, [T, N, C - 1].
        mix: margins of the fitted mix, [N, C - 1].

    "robust to all": all members have a positive margin. "robust to none": none has. The paper removes the second kind
    too, as hopeless; `none_but_mix` counts those of them that the mix certifies all the same (slopes cancel).
    """
    safe = members > 0
    every, none = safe.all(0), ~safe.any(0)
    whole = safe.all(2)
    return {
        "pairs": every.numel(),
        "pairs_robust_to_all": int(every.sum()),
        "pairs_robust_to_none": int(none.sum()),
        "pairs_none_but_mix": int((none & (mix > 0)).sum()),
        "examples": every.shape[0],
        "examples_robust_to_all": int(whole.all(0).sum()),
        "examples_robust_to_none": int((~whole.any(0)).sum()),
    }


def histogram(margins: Mapping[str, Tensor]) -> dict[str, Any]:
    """Counts of all margins M(x, j) of each mix in the same bins; what lies outside is in the first and last bin.

    Zero is an edge: the bins right of it are the certified pairs, exactly.
    """
    together = torch.cat([values.flatten() for values in margins.values()]).to(torch.float64)
    finite = together[torch.isfinite(together)].numpy()
    low, high = (float(q) for q in np.quantile(finite, [0.005, 0.995])) if len(finite) else (-1.0, 1.0)
    width = max(high - min(low, 0.0), 1e-9) / _BINS
    below, above = max(1, int(np.ceil(-low / width))), max(1, int(np.ceil(high / width)))
    edges = width * np.arange(-below, above + 1)
    counts = {}
    for name, values in margins.items():
        # The bin of a value is (lower, upper]: a margin of exactly zero is not certified.
        place = np.searchsorted(
            edges, values.flatten().to(torch.float64).nan_to_num(nan=-torch.inf).numpy(), side="left"
        )
        counts[name] = np.bincount(np.clip(place - 1, 0, len(edges) - 2), minlength=len(edges) - 1).tolist()
    return {"edges": edges.tolist(), "counts": counts}


def above_zero(found: Mapping[str, Any]) -> dict[str, float]:
    """Share of the margins above zero, by mix, from what `histogram` gives."""
    starts = found["edges"][:-1]
    return {
        mix: sum(count for count, start in zip(counts, starts, strict=True) if start >= 0) / sum(counts)
        for mix, counts in found["counts"].items()
    }


def packed(mask: Tensor) -> str:
    """A mask [N] as hexadecimal text, eight images a byte."""
    return np.packbits(mask.cpu().numpy()).tobytes().hex()


def unpacked(text: str, count: int) -> Tensor:
    """The inverse of `packed`."""
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(text), np.uint8), count=count)
    return torch.from_numpy(bits.astype(bool))
