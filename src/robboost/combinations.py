"""Other ways to use several members: voting (sound), cascades (unsound), and oracles (not networks at all)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from robboost.errors import InputError
from robboost.mixtures import pool_bounds
from robboost.threat import Threat

__all__ = ["Cascade", "all_certify", "some_certify", "vote_certified"]


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

    def fooled(self, x: Tensor, labels: Tensor, points: Tensor) -> Tensor:
        """Examples called certified whose class differs at the given points [K, N, *input] of their threat sets."""
        claimed = self.certified(x, labels)
        broken = torch.zeros_like(claimed)
        index = claimed.nonzero()[:, 0]
        for part in points:
            if len(index):
                broken[index] |= self.answer(part[index])[0] != labels[index]
        return broken
