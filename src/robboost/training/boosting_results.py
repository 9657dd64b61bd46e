"""Ensembles side by side on one set of images: proved and clean errors, and whether a difference is one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robboost.data import Dataset
from robboost.errors import InputError
from robboost.intervals import PairedTest, Share, paired_test
from robboost.models import Ensemble
from robboost.models.architectures import float32_bytes
from robboost.proofs import prove
from robboost.threat import Threat

__all__ = ["Measured", "against", "measure", "table"]


@dataclass(frozen=True, eq=False)
class Measured:
    """What one ensemble proves on the images.

    Attributes:
        name: of the row.
        certified, correct: [N] on the CPU; ties, NaN and misclassified images are not certified.
        members: with weight above zero; size_mb: theirs in float32, in 1e6 bytes.
    """

    name: str
    certified: Tensor
    correct: Tensor
    members: int
    size_mb: float

    @property
    def verified(self) -> Share:
        return Share(int((~self.certified).sum()), len(self.certified))

    @property
    def clean(self) -> Share:
        return Share(int((~self.correct).sum()), len(self.correct))

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text; "failed" lists the images without a certificate, so that any two files compare."""
        return {
            "name": self.name,
            "members": self.members,
            "size_mb": self.size_mb,
            "verified_error": self.verified.to_dict(),
            "clean_error": self.clean.to_dict(),
            "failed": (~self.certified).nonzero()[:, 0].tolist(),
        }


def measure(
    ensembles: Mapping[str, Ensemble], data: Dataset, threat: Threat, method: str, device: torch.device
) -> list[Measured]:
    """The certificates (those of `certify`) of all ensembles; members that several share are bounded once.

    Members count as shared where they are the same object.
    """
    if not ensembles:
        raise InputError("ensembles={}: expected at least one")
    union: dict[int, nn.Module] = {}
    mixes: list[dict[int, float]] = []
    for ensemble in ensembles.values():
        shares: dict[int, float] = {}
        for member, coefficient in zip(ensemble.members, ensemble.coefficients().tolist(), strict=True):
            if coefficient > 0:
                union[id(member)] = member
                shares[id(member)] = shares.get(id(member), 0.0) + coefficient
        mixes.append(shares)
    pool = [copy.deepcopy(member).to(device).eval() for member in union.values()]
    images, labels = data.images.to(device), data.labels.to(device)
    vectors = [torch.tensor([mix.get(key, 0.0) for key in union], dtype=torch.float64, device=device) for mix in mixes]
    proof = prove(pool, images, labels, threat, vectors, method=method)
    return [
        Measured(
            name,
            proof.certified[row].cpu(),
            proof.correct[row].cpu(),
            len(mixes[row]),
            sum(float32_bytes(union[key]) for key in mixes[row]) / 1e6,
        )
        for row, name in enumerate(ensembles)
    ]


def against(rows: list[Measured], chosen: str) -> dict[str, PairedTest]:
    """McNemar's exact test of the row `chosen` (the first) against every other, on who is not certified."""
    (first,) = (row for row in rows if row.name == chosen)
    return {row.name: paired_test(~first.certified, ~row.certified) for row in rows if row is not first}


def table(rows: list[Measured], chosen: str) -> str:
    """One line a row, in percent with Wilson's intervals; at its end what the row `chosen` certifies more.

    p is that of McNemar's exact test: a difference with p above 0.05 could be chance.
    """
    tests = against(rows, chosen)
    cells = [("", "members", "MB", "verified error, %", "clean error, %", "more certified by *")]
    for row in rows:
        test = tests.get(row.name)
        gain = "*" if test is None else f"{test.difference:+d} images, p = {test.p_value:.2g}"
        cells.append((row.name, str(row.members), f"{row.size_mb:.2f}", f"{row.verified:i}", f"{row.clean:i}", gain))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    texts = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join(text.rstrip() for text in texts)
