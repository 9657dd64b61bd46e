"""Other ways to use several members: voting (sound), cascades (unsound), and oracles (not networks at all)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from robboost.errors import InputError
from robboost.inputs import in_float64
from robboost.mixtures import pool_bounds
from robboost.threat import Threat

__all__ = ["Cascade", "Verdicts", "all_certify", "some_certify", "vote_certified", "vote_verdicts"]


def vote_certified(margins: Tensor, correct: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Examples on which the weighted vote of the members' classes cannot change: [N].

    Member t votes for its class with weight_t, and the class with the most weight wins; a tie is no certificate. Under
    attack a member whose margins are all positive keeps voting for y; any other may vote for y or for a target j whose
    margin is not positive, whichever is worse. So the vote stands if

        sum of weights of certified members > sum of weights of members with margin_j <= 0, for every target j,

    and, given nothing but the signs of the margins, only then.

    Args:
        margins: [T, N, C - 1], lower bounds of each member.
        correct: [T, N].
        labels: [N]; unused classes do not matter, so this is only a check of the shape.
        weights: [T], none negative.
    """
    if margins.ndim != 3 or correct.shape != margins.shape[:2] or labels.shape != margins.shape[1:2]:
        raise InputError(
            f"margins {list(margins.shape)}, correct {list(correct.shape)}: expected [T, N, C - 1], [T, N]"
        )
    a = weights.to(device=margins.device, dtype=torch.float64)
    if a.shape != margins.shape[:1] or not bool((a >= 0).all()):
        raise InputError(f"weights={a.tolist()}: expected {len(margins)} numbers, none negative")
    positive = margins > 0
    sure = positive.all(2) & correct
    for_y = torch.einsum("t,tn->n", a, sure.to(torch.float64))
    against = torch.einsum("t,tnj->nj", a, (~positive).to(torch.float64))
    # Sums of weights that are equal on paper may differ by rounding: that is a tie.
    return (for_y[:, None] > against + 1e-12).all(1)


class Verdicts(NamedTuple):
    """Wrong at the examples themselves, and wrong there or at one of the points tried: [N] each."""

    clean: Tensor
    attacked: Tensor


def vote_verdicts(
    pool: Sequence[nn.Module], weights: Tensor, x: Tensor, labels: Tensor, points: Sequence[Tensor]
) -> Verdicts:
    """Where the weighted vote is wrong, at x [N, *input] and at the given points of the threat sets, in float64.

    The vote is no differentiable function: the points are those that fooled its members. A tie is wrong.
    """
    judges = [in_float64(member) for member in pool]

    def answer(images: Tensor) -> Tensor:
        with torch.no_grad():
            said = torch.stack([functional.one_hot(*_class_of(judge(images.to(torch.float64)))) for judge in judges])
        votes = torch.einsum("t,tnc->nc", weights.to(device=x.device, dtype=torch.float64), said.to(torch.float64))
        top = votes.topk(2, dim=1)
        return torch.where(top.values[:, 0] > top.values[:, 1] + 1e-12, top.indices[:, 0], -1)

    return _verdicts(answer, x, labels, points)


def _class_of(logits: Tensor) -> tuple[Tensor, int]:
    return logits.argmax(1), logits.shape[1]


def _verdicts(answer: Callable[[Tensor], Tensor], x: Tensor, labels: Tensor, points: Sequence[Tensor]) -> Verdicts:
    clean = answer(x) != labels
    attacked = clean.clone()
    for part in points:
        index = (~attacked).nonzero()[:, 0]
        if len(index):
            attacked[index] = answer(part[index]) != labels[index]
    return Verdicts(clean, attacked)


def some_certify(certified: Tensor) -> Tensor:
    """Examples that at least one member certifies: no single network does this, it bounds what mixing could reach."""
    return certified.any(0)


def all_certify(certified: Tensor) -> Tensor:
    """Examples that every member certifies."""
    return certified.all(0)


class Cascade:
    """Members asked in turn; the first that certifies its own answer at the image it is shown gives the class.

    UNSOUND. Whether a member certifies is itself decided at the attacked image x', not at x: the attacker may move to
    an x' where an earlier member certifies a wrong class. That a member certifies x says nothing about which member
    answers at x'. It is here because it is in use, and because its figures look better than those of sound methods.

    Args:
        pool: members, in the order in which they are asked.
        threat: the set around the image that is shown.
        method: of the bounds.
    """

    def __init__(self, pool: list[nn.Module], threat: Threat, *, method: str) -> None:
        if not pool:
            raise InputError("pool is empty: expected at least one member")
        self.pool = pool
        self.threat = threat
        self.method = method

    def answer(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Class [N] that the cascade gives for images x [N, *input], and the member that certified it (-1: none did).

        Where no member certifies, the last one answers.
        """
        count = len(x)
        answer = torch.zeros(count, dtype=torch.int64, device=x.device)
        stage = torch.full((count,), -1, dtype=torch.int64, device=x.device)
        for t, member in enumerate(self.pool):
            waiting = (stage < 0).nonzero()[:, 0]
            if not len(waiting):
                break
            images = x[waiting]
            with torch.no_grad():
                classes = member(images).argmax(1)
            bounds = pool_bounds([member], images, classes, self.threat, method=self.method)
            sure = (bounds.mix(torch.ones(1)).lower > 0).all(1)
            answer[waiting] = classes
            stage[waiting[sure]] = t
        return answer, stage

    def certified(self, x: Tensor, labels: Tensor) -> Tensor:
        """Examples that the cascade calls certified, with the right class: [N]. Not a proof of anything."""
        answer, stage = self.answer(x)
        return (stage >= 0) & (answer == labels)

    def verdicts(self, x: Tensor, labels: Tensor, points: Sequence[Tensor]) -> Verdicts:
        """Where the cascade is wrong, at x [N, *input] and at the given points of the threat sets."""
        return _verdicts(lambda images: self.answer(images.to(x.dtype))[0], x, labels, points)

    def fooled(self, x: Tensor, labels: Tensor, points: Sequence[Tensor]) -> Tensor:
        """Examples called certified whose class differs at one of the K given points [N, *input] of their sets."""
        return self.certified(x, labels) & self.verdicts(x, labels, points).attacked
