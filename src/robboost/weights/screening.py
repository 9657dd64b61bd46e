"""Which pairs no choice of weights can change: the paper's elimination, and exact screening beside it.

Margins are concave in the weights, so a pair that every member certifies is certified by every mix. The converse, which
the paper also uses, is false: two members that fail a pair can certify it together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from robboost.errors import InputError
from robboost.weights.oracle import answer, euclidean
from robboost.weights.problem import Array, WeightProblem, weight_tensor

__all__ = ["Elimination", "Screening", "eliminate", "member_margins", "screen", "verified_error"]


def member_margins(problem: WeightProblem) -> torch.Tensor:
    """Certified margin of every member alone, [T, n], float64: the corners M_n(e_t). One read of the slopes."""
    parts = [torch.zeros(0, problem.n_members, dtype=torch.float64, device=problem.device)]
    for _, columns in problem.chunks():
        if problem.norm == "linf":
            norms = columns.abs().sum(2)
        elif problem.norm == "l2":
            norms = euclidean(columns)
        else:
            norms = columns.abs().amax(2)
        parts.append(norms.T)
    return problem.intercepts - problem.whole(torch.cat(parts)).T


def verified_error(margins: torch.Tensor, example: Array) -> float:
    """Share of examples with some margin that is not above zero (paper, definition 3.2); NaN counts as not certified.

    `margins` [n] belong to pairs, `example` [n] says to which example each pair belongs (any integers).
    """
    owner = _owners(example, margins)
    failed = torch.zeros(int(owner.max()) + 1, dtype=torch.bool, device=margins.device)
    failed[owner[~(margins > 0)]] = True
    return float(failed.double().mean())


@dataclass(frozen=True, eq=False)
class Elimination:
    """The paper's data elimination (section 4, table 1), pair by pair and example by example.

    Attributes:
        robust: [n], pairs that every member certifies: any mix does, so dropping them is exact for verified error; it
            changes the loss, which still asks for a margin of kappa.
        hopeless: [n], pairs that no member certifies. The paper drops them; a mix may certify some all the same.
        examples_robust: share of examples that every member certifies.
        examples_hopeless: share of examples that no member certifies.
    """

    robust: torch.Tensor
    hopeless: torch.Tensor
    examples_robust: float
    examples_hopeless: float

    @property
    def remaining(self) -> torch.Tensor:
        """[n], the pairs that the paper's algorithm is run on."""
        return ~(self.robust | self.hopeless)

    def __str__(self) -> str:
        n, names = self.robust.numel(), ("robust", "hopeless", "remaining")
        pairs = ", ".join(f"{name} {int(getattr(self, name).sum()) / n:.2%}" for name in names)
        examples = f"robust {self.examples_robust:.2%}, hopeless {self.examples_hopeless:.2%}"
        return f"{n} pairs: {pairs}; examples: {examples}"


def eliminate(problem: WeightProblem, example: Array | None = None) -> Elimination:
    """The paper's elimination; without `example` [n], each pair counts as an example."""
    certified = member_margins(problem) > 0
    owner = _owners(torch.arange(problem.n_pairs) if example is None else example, certified[0])
    by_member = torch.ones(problem.n_members, int(owner.max()) + 1, dtype=torch.bool, device=problem.device)
    for t in range(problem.n_members):
        by_member[t, owner[~certified[t]]] = False
    return Elimination(
        robust=certified.all(0),
        hopeless=~certified.any(0),
        examples_robust=float(by_member.all(0).double().mean()),
        examples_hopeless=float((~by_member).all(0).double().mean()),
    )


@dataclass(frozen=True, eq=False)
class Screening:
    """What is proved about each pair, for every mix at once; all masks are [n].

    Attributes:
        costless: margin of at least kappa under every mix (all corners reach kappa): dropping is exact for the loss.
        certain: certified by every mix: dropping is exact for verified error.
        impossible: certified by no mix: some d of dual norm 1 has max_t (c_t - <d, A_t>) <= 0.
        possible: certified by a mix that was found (which may fail other pairs).
        undecided: neither proved impossible nor found possible within the rounds.
    """

    costless: torch.Tensor
    certain: torch.Tensor
    impossible: torch.Tensor
    possible: torch.Tensor
    undecided: torch.Tensor

    def __str__(self) -> str:
        n = self.costless.numel()
        names = ("costless", "certain", "possible", "impossible", "undecided")
        return f"{n} pairs: " + ", ".join(f"{name} {int(getattr(self, name).sum()) / n:.2%}" for name in names)


def screen(problem: WeightProblem, *, rounds: int = 20) -> Screening:
    """Decides for each pair by itself whether some mix, or no mix, certifies it.

    Pair by pair this is the game max_a M_n(a) = min_d max_t (c_t - <d, A_t>). Each round answers the mix that is best
    against the answers so far; a mixture of answers with a value of at most 0 proves impossibility (float64, with room
    for its rounding), a mix with a positive margin proves possibility.
    """
    corners = member_margins(problem)
    possible = (corners > 0).any(0)
    impossible = torch.zeros_like(possible)
    open_pairs = (~possible).nonzero()[:, 0]
    step = max(1, 2**23 // (problem.n_members * problem.dim))
    for start in range(0, open_pairs.numel(), step):
        index = open_pairs[start : start + step]
        found, refuted = _game(problem.take_pairs(index), rounds)
        possible[index] = found
        impossible[index] = refuted
    return Screening(
        costless=(corners >= problem.kappa).all(0),
        certain=(corners > 0).all(0),
        impossible=impossible,
        possible=possible,
        undecided=~(possible | impossible),
    )


def _game(problem: WeightProblem, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of the problem's pairs are certified by a mix of their own, and which provably by none."""
    n, members = problem.n_pairs, problem.n_members
    columns, c = problem.columns(slice(0, n)), problem.intercepts.T
    a = torch.full((n, members), 1.0 / members, dtype=torch.float64, device=problem.device)
    scale = columns.abs().sum(2).amax(0) + c.abs().amax(1)
    # Rounding of the sums over inputs and members, and of the averaged answers.
    room = 2.0**-51 * (problem.dim + members + 200) * scale
    found = torch.zeros(n, dtype=torch.bool, device=problem.device)
    refuted = torch.zeros_like(found)
    payoffs: list[torch.Tensor] = []
    for _ in range(rounds):
        norms, dual = answer(torch.einsum("mt,tmd->md", a, columns), 0.0, problem.norm)
        found |= (a * c).sum(1) - norms > room
        payoffs.append(c - torch.einsum("md,tmd->mt", dual, columns))
        a, value = _matrix_game(torch.stack(payoffs, dim=2), scale)
        refuted |= value <= -room
        if bool((found | refuted).all()):
            break
    return found, refuted & ~found


def _matrix_game(payoff: torch.Tensor, scale: torch.Tensor, steps: int = 150) -> tuple[torch.Tensor, torch.Tensor]:
    """For each payoff [n, T, K]: weights good against all K answers, and an upper bound on what any weights reach.

    Optimistic multiplicative weights on both sides; the bound is read off the averaged mixture of answers, so it holds
    however far the play has come.
    """
    n, members, answers = payoff.shape
    rate = 8.0 / scale.clamp(min=1e-300)[:, None]
    a_log = torch.zeros(n, members, dtype=payoff.dtype, device=payoff.device)
    mu_log = torch.zeros(n, answers, dtype=payoff.dtype, device=payoff.device)
    a_sum, mu_sum = torch.zeros_like(a_log), torch.zeros_like(mu_log)
    gain_before, loss_before = torch.zeros_like(a_log), torch.zeros_like(mu_log)
    for _ in range(steps):
        a = torch.softmax(a_log + rate * gain_before, 1)
        mu = torch.softmax(mu_log - rate * loss_before, 1)
        gain = torch.einsum("ntk,nk->nt", payoff, mu)
        loss = torch.einsum("ntk,nt->nk", payoff, a)
        a_log, mu_log = a_log + rate * gain, mu_log - rate * loss
        gain_before, loss_before = gain, loss
        a_sum, mu_sum = a_sum + a, mu_sum + mu
    value = torch.einsum("ntk,nk->nt", payoff, mu_sum / steps).amax(1)
    return a_sum / steps, value


def _owners(example: Array, margins: torch.Tensor) -> torch.Tensor:
    owner = weight_tensor(example, "example").to(margins.device)
    if owner.shape != margins.shape:
        raise InputError(
            f"example has shape {tuple(owner.shape)}: expected one example per pair, {tuple(margins.shape)}"
        )
    if owner.is_floating_point() or owner.is_complex():
        raise InputError(f"example is {owner.dtype}: expected integers that say which pairs belong together")
    return torch.unique(owner, return_inverse=True)[1]
