"""Bounds of a pool that lie in a store, as the choice of weights sees them: read as a stream, never held as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from robboost.distributed import ALONE, Processes
from robboost.errors import InputError, StoreError
from robboost.inputs import in_float64
from robboost.mixtures import correct_under
from robboost.store import BoundStore, Pairs, Screening, StoredColumns, hash_data, hash_member, settled_pairs
from robboost.store.screening import HOPELESS, KEEP
from robboost.threat import Threat
from robboost.weights import Normalisers, WeightProblem, normalisers, screen, streamed_problem, weight_problem
from robboost.weights.oracle import fast_pass

__all__ = ["StoredBounds", "decided_pairs", "stored_bounds"]

_BATCH = 500


@dataclass(frozen=True, eq=False)
class StoredBounds:
    """Bounds of T members on N examples against C - 1 targets each, in a bound store.

    Stands where `PoolBounds` stands in the choice of weights. Margins of mixes are sums in float64 of bounds rounded to
    the storage type, less their errors: to choose by. What is published is certified from the networks.

    Attributes:
        store: complete.
        logits: [T, N, C], float64, of the examples themselves.
        labels: [N].
        examples: [N'] positions of the examples that are looked at; all of them, or a part.
        processes: the processes that share the pairs.
        pairs: which pairs the store holds.
    """

    store: BoundStore
    logits: Tensor
    labels: Tensor
    examples: Tensor
    processes: Processes = ALONE
    pairs: Pairs = field(repr=False, kw_only=True)

    @property
    def members(self) -> int:
        return len(self.store.identity.members)

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def threat(self) -> Threat:
        stated = self.store.identity.threat
        return Threat(stated["eps"], stated["norm"], stated["clip"])

    @property
    def method(self) -> str:
        return self.store.identity.method

    @property
    def precision(self) -> str:
        return self.store.identity.precision

    def scales(self) -> Normalisers:
        """Scale of each member, over the pairs that the store holds."""
        return normalisers(self.store.intercepts())

    def pairs_of(self, examples: Tensor) -> Tensor:
        """Mask of the pairs of the examples where `examples` [N'] is true, as `problem` counts them."""
        wanted = torch.zeros(len(self.labels), dtype=torch.bool)
        wanted[self.examples[examples]] = True
        return wanted[self.pairs.examples[self._kept()]]

    def take(self, examples: Tensor) -> StoredBounds:
        """The part for some examples (positions among these, ascending)."""
        return replace(self, examples=self.examples[examples.to(self.examples.device)])

    def problem(self, scales: Tensor) -> WeightProblem:
        """The solver's problem on these examples, members divided by their scales."""
        return self._problem(tuple((1.0 / scales).tolist()))

    def lower(self, mixes: Tensor) -> Tensor:
        """Lower bounds of the margins [M, N', C - 1] of mixes [M, T], in one read of the store.

        Pairs that a screening left out are infinite: positive where every mix certifies them, negative where none does.
        """
        targets = self.store.identity.n_targets
        found = torch.full((len(mixes), len(self.labels), targets), torch.nan, dtype=torch.float64)
        for settled, value in ((self.pairs.certified, torch.inf), (self.pairs.hopeless, -torch.inf)):
            found[:, settled[:, 0], settled[:, 1]] = value
        problem = self._problem(None)
        coefficients = mixes.to(torch.float64)
        rows = [torch.zeros(0, len(mixes), dtype=torch.float64)]
        for _, run in problem.runs(problem.n_pairs):
            norms = torch.stack([fast_pass(run, mix, double=True).norms for mix in coefficients], dim=1)
            rows.append(run.intercepts.T @ coefficients.T - norms)
        where = self._kept()
        found[:, self.pairs.examples[where], self.pairs.targets[where]] = problem.whole(torch.cat(rows)).T
        return found[:, self.examples]

    def correct(self, coefficients: Tensor) -> Tensor:
        """Whether the true logit of sum_t coefficient_t f_t alone is the largest, in float64: [N']."""
        return correct_under(coefficients, self.logits[:, self.examples], self.labels[self.examples])

    def _kept(self) -> Tensor:
        """Of the store's pairs, those of these examples."""
        wanted = torch.zeros(len(self.labels), dtype=torch.bool)
        wanted[self.examples] = True
        return wanted[self.pairs.examples]

    def _problem(self, factors: tuple[float, ...] | None) -> WeightProblem:
        stream = StoredColumns(self.store, processes=self.processes, factors=factors)
        problem = streamed_problem(stream, stream.intercepts(), norm=self.threat.norm, processes=self.processes)
        kept = self._kept()
        return problem if bool(kept.all()) else problem.only(kept)


def stored_bounds(
    store: BoundStore,
    pool: Sequence[nn.Module],
    examples: tuple[Tensor, Tensor],
    *,
    processes: Processes = ALONE,
) -> StoredBounds:
    """The bounds of a complete store, once it is sure that they are of this pool and these examples.

    Args:
        store: as `fill_store` returns it.
        pool: the members, in the order of the store.
        examples: images [N, *input] and labels [N], as they were when the store was filled.
        processes: those that share the work.
    """
    x, y = examples
    store.require_complete()
    if hash_data(x, y) != store.identity.data:
        raise StoreError(f"{store.url}: holds bounds on other images or labels; name the data that it was filled with")
    hashes = tuple(hash_member(member) for member in pool)
    if hashes != store.identity.members:
        raise StoreError(f"{store.url}: holds bounds of another pool; name the pool that it was filled with")
    with torch.no_grad():
        logits = torch.stack([_logits(in_float64(member), x) for member in pool])
    pairs = store.pairs()
    if len(pairs.examples) == 0:
        raise InputError(f"{store.url}: screening settled every pair, so that every mix certifies the same")
    return StoredBounds(store, logits, y.cpu(), torch.arange(len(x)), processes, pairs=pairs)


def decided_pairs(norm: str, *, rounds: int = 20) -> Screening:
    """Drops the pairs that every mix certifies, and those that provably none does, whatever the members' scales.

    Exact for verified error; the loss of a mix loses its share of these pairs. What proves a pair hopeless is an answer
    d of the attacker with max_t (c_t - <d, A_t>) <= 0, sought in `rounds` rounds of a small game: see `screen`.
    """
    settled = settled_pairs(norm)

    def judge(columns: Tensor, intercepts: Tensor) -> Tensor:
        verdicts = settled.judge(columns, intercepts)
        open_pairs = (verdicts == KEEP).nonzero()[:, 0]
        if len(open_pairs):
            problem = weight_problem(columns[:, open_pairs], intercepts[:, open_pairs], 1.0, norm=norm)
            verdicts[open_pairs[screen(problem, rounds=rounds).impossible]] = HOPELESS
        return verdicts

    return Screening(name=f"decided {rounds} rounds", judge=judge)


def _logits(member: nn.Module, x: Tensor) -> Tensor:
    device = next((p.device for p in member.parameters()), x.device)
    parts = x.to(torch.float64).split(_BATCH)
    return torch.cat([member(part.to(device)).cpu() for part in parts])
