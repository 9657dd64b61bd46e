"""What is proved of mixes of a pool: verdicts image by image, first cheaply, then harder where it is still open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from robboost.attacks import AttackSettings, attack
from robboost.errors import InputError, SoundnessError
from robboost.inputs import Progress
from robboost.journal import remembered
from robboost.mixtures import Mixed, PoolBounds, bound_parts, pool_bounds, progress_steps
from robboost.models import Ensemble
from robboost.observability import span
from robboost.threat import Threat

__all__ = ["Proof", "prove", "stages"]

# An example whose decision hangs on a margin this small, relative to the terms it is the difference of, is bounded
# again in float64. Full float32 was seen to err by 3e-6.
_DOUBTFUL = 1e-4
# What an open example must withstand before a later stage is spent on it.
_SHORT = AttackSettings(steps=20, restarts=1)


class Proof(NamedTuple):
    """Margins of M mixes, close calls decided in float64, [M, N, C - 1]; verdicts and correctness, [M, N].

    `rechecked` counts those close calls, `later` [M] the examples that only a later stage has certified.
    """

    margins: Tensor
    certified: Tensor
    correct: Tensor
    rechecked: int
    later: Tensor


def prove(
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    mixes: Sequence[Tensor],
    *,
    method: str = "tightest",
    progress: Progress | None = None,
) -> Proof:
    """What is certified under each mix of the pool, close calls decided by bounds in float64.

    Where `method` names several, a mix gets, pair by pair, the best of: every member under the same one of them, and
    every member under the one that is tightest for it alone. (The tightest bounds of the members need not be those that
    add up best: slopes cancel only between bounds that have them.)

    Stages, "crown>alpha-crown": what a stage leaves open (classified correctly, not certified, and not fooled by a
    short attack either) is bounded by the next one, each mix as one network. An example that a stage certifies has its
    margins from that stage alone.

    Args:
        pool: the members.
        x: examples [N, *input], checked.
        y: labels [N].
        threat: the set.
        mixes: coefficients [T] of each mix, none negative.
        method: of `margin_bounds`, or several joined by "+", or stages of these joined by ">".
        progress: told after every few examples.
    """
    first, *others = stages(method)
    lower, correct, certified, rechecked = [], [], [], 0
    for part in progress_steps(x):
        place = (part.start, len(x))
        decide = partial(_decided, pool, x[part], y[part], threat, mixes, first, place)
        step = remembered(f"proof {first} {threat} {part.start}", decide)
        margins, right = step["margins"].to(x.device), step["correct"].to(x.device)
        rechecked += len(step["doubtful"])
        lower.append(margins)
        correct.append(right)
        certified.append(_verdicts(margins, right, range(part.start, part.stop), f"{threat}, {first}"))
        if progress is not None:
            progress(f"bounds ({first})", part.stop, len(x))
    later = torch.zeros(len(mixes), dtype=torch.int64, device=x.device)
    proof = Proof(torch.cat(lower, 1), torch.cat(certified, 1), torch.cat(correct, 1), rechecked, later)
    for stage in others:
        for position, mix in enumerate(mixes):
            network = Ensemble(pool, mix / mix.sum()).pruned().to(x.device).eval()
            proof = _continued(proof, position, (network, float(mix.sum())), (x, y), threat, stage, progress)
    return proof


def stages(method: str) -> list[str]:
    """The stages of a method, each a method for `pool_bounds`; weights are fitted on bounds of the first."""
    found = [part.strip() for part in method.split(">")]
    if not all(found):
        raise InputError(f"method={method!r}: expected methods joined by '>', such as 'crown>alpha-crown'")
    return found


def _continued(
    proof: Proof,
    position: int,
    mix: tuple[Ensemble, float],
    examples: tuple[Tensor, Tensor],
    threat: Threat,
    stage: str,
    progress: Progress | None,
) -> Proof:
    """The proof after one more stage for the mix at `position`: scale * network; new tensors."""
    (network, scale), (x, y) = mix, examples
    margins, certified, later = (part.clone() for part in (proof.margins, proof.certified, proof.later))
    rechecked = proof.rechecked
    open_ones = (proof.correct[position] & ~certified[position]).nonzero()[:, 0]
    one = [torch.ones(1, dtype=torch.float64)]
    for part in progress_steps(open_ones):
        chosen = open_ones[part]

        def decide(chosen: Tensor = chosen, part: slice = part) -> dict[str, Tensor]:
            fooled = attack(network, x[chosen], y[chosen], threat, settings=_SHORT).success.to(chosen.device)
            left = chosen[~fooled]
            if len(left) == 0:
                return {"left": left}
            place = (part.start, len(open_ones))
            return {"left": left, **_decided([network], x[left], y[left], threat, one, stage, place)}

        step = remembered(f"proof {stage} {threat} mix {position} {part.start}", decide)
        left = step["left"].to(x.device)
        if len(left):
            found, right = step["margins"].to(x.device), step["correct"].to(x.device)
            verdicts = _verdicts(found, right, left.tolist(), f"{threat}, {stage}")[0]
            new = left[verdicts]
            margins[position, new] = found[0, verdicts] * scale
            certified[position, new] = True
            later[position] += len(new)
            rechecked += len(step["doubtful"])
        if progress is not None:
            progress(f"bounds ({stage}) of what is open", part.stop, len(open_ones))
    return proof._replace(margins=margins, certified=certified, later=later, rechecked=rechecked)


def _decided(
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    mixes: Sequence[Tensor],
    method: str,
    place: tuple[int, int],
) -> dict[str, Tensor]:
    """By name, as a journal keeps them: margins [M, n, C - 1], close calls in float64, whose positions are `doubtful`;

    correctness [M, n].
    """
    margins, near, right = _bounded(pool, x, y, threat, mixes, method, "float32", place)
    # Only where a verdict hangs on a close margin: no other target already denies the certificate.
    doubtful = (near.any(2) & (near | (margins > 0)).all(2)).any(0).nonzero()[:, 0]
    if len(doubtful):
        again = _bounded(pool, x[doubtful], y[doubtful], threat, mixes, method, "float64")
        margins[:, doubtful] = again[0]
    return {"margins": margins, "correct": right, "doubtful": doubtful}


def _bounded(
    pool: Sequence[nn.Module],
    x: Tensor,
    y: Tensor,
    threat: Threat,
    mixes: Sequence[Tensor],
    method: str,
    precision: Literal["float32", "float64"],
    place: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Margins [M, n, C - 1], whether each is too near zero for the precision, and correctness [M, n]."""
    parts = bound_parts(method)
    same = [pool_bounds(pool, x, y, threat, method=part, precision=precision, place=place) for part in parts]
    ways = same if len(same) == 1 else [*same, _tightest(same)]
    rows, nears = [], []
    with span("sums of mixes"):
        for mix in mixes:
            best = ways[0].mix(mix)
            for way in ways[1:]:
                other = way.mix(mix)
                better = (other.lower > best.lower) | best.lower.isnan()
                best = Mixed(*(torch.where(better, new, old) for new, old in zip(other, best, strict=True)))
            rows.append(best.lower)
            nears.append(best.lower.abs() <= _DOUBTFUL * best.size)
    correct = torch.stack([ways[0].correct(mix) for mix in mixes])
    return torch.stack(rows), torch.stack(nears), correct


def _tightest(ways: Sequence[PoolBounds]) -> PoolBounds:
    """For each member and pair the bound with the largest margin of its own."""
    members = torch.eye(ways[0].members, dtype=torch.float64)
    own = torch.stack([torch.stack([way.mix(unit).lower for unit in members]) for way in ways])
    winner = own.nan_to_num(nan=-torch.inf).argmax(0)
    slopes, intercepts = ways[0].slopes, ways[0].intercepts
    for position, way in enumerate(ways[1:], start=1):
        wins = winner == position
        slopes = torch.where(wins[..., None], way.slopes, slopes)
        intercepts = torch.where(wins, way.intercepts, intercepts)
    return replace(ways[0], slopes=slopes, intercepts=intercepts)


def _verdicts(margins: Tensor, correct: Tensor, positions: Sequence[int], what: str) -> Tensor:
    positive = (margins > 0).all(2)
    if bool((positive & ~correct).any()):
        m, n = (positive & ~correct).nonzero()[0].tolist()
        raise SoundnessError(
            f"example {positions[n]} is misclassified, yet all its margin bounds are positive (lowest"
            f" {float(margins[m, n].min()):.3g}, {what}): the bounds are wrong; please report this"
        )
    return positive & correct
