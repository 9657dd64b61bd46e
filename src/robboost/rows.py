"""The rows of a comparison: networks, the weighted vote, the cascade, and oracles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robboost.combinations import Cascade, all_certify, some_certify, vote_certified, vote_verdicts
from robboost.counterexamples import Counterexample, save_counterexample
from robboost.errors import SoundnessError
from robboost.fitting import RobBoost
from robboost.intervals import Share
from robboost.journal import remembered
from robboost.models import Ensemble
from robboost.models.architectures import float32_bytes
from robboost.observability import span
from robboost.proofs import Proof
from robboost.threat import Threat

__all__ = ["Row", "cascade_row", "network_rows", "oracle_rows", "vote_row"]


@dataclass(frozen=True)
class Row:
    """One way to classify. `claim` is "proved", "UNSOUND" (a figure without a proof) or "oracle" (no network).

    Errors are shares of the examples; None where the question makes no sense or was not asked.
    """

    name: str
    claim: str
    verified_fit: Share | None
    verified: Share
    targeted: float | None = None
    clean: Share | None = None
    attacked: Share | None = None
    size_mb: float | None = None
    members: int | None = None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and text."""
        shares = {
            "verified_error_fit": self.verified_fit,
            "verified_error": self.verified,
            "clean_error": self.clean,
            "attack_error": self.attacked,
        }
        return {
            "name": self.name,
            "claim": self.claim,
            **{name: None if share is None else share.to_dict() for name, share in shares.items()},
            "targeted_verified_error": self.targeted,
            "size_mb": self.size_mb,
            "members": self.members,
            "note": self.note,
        }


def network_rows(
    mixes: Mapping[str, Tensor], members: Mapping[str, nn.Module], on_fit: Proof, on_test: Proof
) -> list[Row]:
    """One row a mix: coefficients weight / scale [T] by name."""
    sizes = torch.tensor([float32_bytes(member) / 1e6 for member in members.values()], dtype=torch.float64)
    rows = []
    for n, (name, mix) in enumerate(mixes.items()):
        used = mix > 0
        rows.append(
            Row(
                name=name,
                claim="proved",
                verified_fit=_errors(on_fit.certified[n]),
                verified=_errors(on_test.certified[n]),
                targeted=1 - float((on_test.margins[n] > 0).double().mean()),
                clean=_errors(on_test.correct[n]),
                size_mb=float(sizes[used].sum()),
                members=int(used.sum()),
            )
        )
    return rows


def vote_row(
    fitted: RobBoost,
    members: Mapping[str, nn.Module],
    on_fit: Proof,
    on_test: Proof,
    labels: tuple[Tensor, Tensor],
    attacked: tuple[Tensor, list[Tensor]],
) -> Row:
    """The vote whose weights certify most fit images; attacked with points [N, *input] found against networks.

    `labels` of fit and test images; `attacked` is the test images and the points.
    """
    count = len(members)
    share = on_fit.certified[:count].double().mean(1).clamp(1e-3, 1 - 1e-3)
    candidates = {
        "equal weights": torch.full((count,), 1 / count, dtype=torch.float64),
        "RobBoost's weights": fitted.weights,
        "log odds of being certified": (share / (1 - share)).log().clamp(min=0),
    }
    verdicts = {
        name: vote_certified(on_fit.margins[:count], on_fit.correct[:count], labels[0], weights)
        for name, weights in candidates.items()
    }
    best = max(verdicts, key=lambda name: int(verdicts[name].sum()))
    weights = candidates[best]
    certified = vote_certified(on_test.margins[:count], on_test.correct[:count], labels[1], weights)
    used = [member for member, weight in zip(members.values(), weights.tolist(), strict=True) if weight > 0]
    x, points = attacked
    wrong = vote_verdicts(list(members.values()), weights, x, labels[1], points)
    broken = (certified & wrong.attacked).nonzero()[:, 0]
    if len(broken):
        saved = _save_turned_vote(list(members.values()), weights, broken[:1], (x, labels[1], points), fitted.threat)
        raise SoundnessError(
            f"weighted voting: test image {int(broken[0])} is certified and wrong ({len(broken)} in all): {saved};"
            " please report this"
        )
    return Row(
        name="weighted voting",
        claim="proved",
        verified_fit=_errors(verdicts[best]),
        verified=_errors(certified),
        clean=_errors(~wrong.clean),
        attacked=_errors(~wrong.attacked) if points else None,
        size_mb=_megabytes(used),
        members=len(used),
        note=f"{best}; attacked with the points found against the networks",
    )


def _save_turned_vote(
    networks: list[nn.Module],
    weights: Tensor,
    index: Tensor,
    tried: tuple[Tensor, Tensor, list[Tensor]],
    threat: Threat,
) -> str:
    """Saves example `index` [1] with the point that turned its vote, and the voters as an ensemble with their weights.

    `tried`: images, labels and points of all examples.
    """
    x, labels, points = tried
    label = labels[index]
    turned = next(
        part[index]
        for part in (x, *points)
        if bool(vote_verdicts(networks, weights, part[index], label, []).clean.any())
    )
    margin = torch.full((1,), torch.nan, dtype=torch.float64)  # a vote has none
    found = Counterexample(index, turned.to(torch.float64), x[index], label, margin)
    about = {"rule": "weighted vote of the members' classes", "weights": weights.tolist(), "threat": vars(threat)}
    return save_counterexample(Ensemble(networks, weights / weights.sum()), found, about)


def cascade_row(cascade: Cascade, fit: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], points: list[Tensor]) -> Row:
    def judged() -> dict[str, Tensor]:
        with span("cascade"):
            wrong = cascade.verdicts(*test, points)
        return {"fit": cascade.certified(*fit), "test": cascade.certified(*test), **wrong._asdict()}

    found = remembered("cascade", judged)
    note = "no proof: the attacker chooses which member answers"
    if points:
        broken = int((found["test"] & found["attacked"]).sum())
        note = f"{broken} of its {int(found['test'].sum())} 'certified' images fooled by attacks on single members"
    return Row(
        name="cascade",
        claim="UNSOUND",
        verified_fit=_errors(found["fit"]),
        verified=_errors(found["test"]),
        clean=_errors(~found["clean"]),
        attacked=_errors(~found["attacked"]) if points else None,
        size_mb=_megabytes(cascade.pool),
        members=len(cascade.pool),
        note=note,
    )


def _megabytes(networks: Sequence[nn.Module]) -> float:
    return sum(float32_bytes(network) for network in networks) / 1e6


def oracle_rows(on_fit: Proof, on_test: Proof, count: int) -> list[Row]:
    """What at least one of the first `count` mixes certifies, and what all do."""
    return [
        Row(
            name, "oracle", _errors(rule(on_fit.certified[:count])), _errors(rule(on_test.certified[:count])), note=note
        )
        for name, rule, note in (
            ("some member certifies", some_certify, "headroom: no network is known to reach it"),
            ("all members certify", all_certify, "what the members agree on"),
        )
    ]


def _errors(good: Tensor) -> Share:
    return Share(int((~good).sum()), len(good))
