"""Fitting from a store gives what fitting from memory gives, and never from the store of something else."""

import pytest
import torch
from process_groups import run_processes
from small_stores import THREAT, examples, pool

import robboost as rb
from robboost.errors import InputError, StoreError
from robboost.mixtures import pool_bounds
from robboost.store import BoundStore, FillSettings, Screening, fill_store, settled_pairs
from robboost.store.screening import CERTIFIED, HOPELESS, KEEP
from robboost.stored import decided_pairs, stored_bounds

# Margins are small in these untrained networks: labels that the first member likes make some of them positive.
COUNT = 90


def _labelled():
    x, _ = examples(COUNT)
    return x, pool()[0](x).argmax(1)


def _filled(folder, **changes):
    settings = FillSettings(**{"method": "crown", "precision": "float64", "shard_bytes": 2000, **changes})
    return fill_store(str(folder), pool(), _labelled(), THREAT, settings=settings)


def _memory():
    x, y = _labelled()
    return pool_bounds(pool(), x, y, THREAT, method="crown", precision="float64")


def test_margins_scales_and_correctness_equal_those_in_memory(tmp_path):
    memory, stored = _memory(), stored_bounds(_filled(tmp_path / "s"), pool(), _labelled())
    mixes = torch.tensor([[0.2, 0.3, 0.5], [0.0, 2.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(stored.lower(mixes), memory.lower(mixes), atol=1e-6)
    assert stored.scales().values == pytest.approx(memory.scales().values, rel=1e-5)
    assert torch.equal(stored.correct(mixes[0]), memory.correct(mixes[0]))
    part = torch.tensor([1, 4, 5, 80])
    assert torch.allclose(stored.take(part).lower(mixes), memory.take(part).lower(mixes), atol=1e-6)
    again = stored.take(part).take(torch.tensor([0, 3]))
    assert torch.allclose(again.lower(mixes), memory.take(torch.tensor([1, 80])).lower(mixes), atol=1e-6)
    assert len(again) == 2
    assert (stored.members, stored.method, stored.precision, stored.threat) == (3, "crown", "float64", THREAT)


@pytest.mark.parametrize("options", [{}, {"max_members": 1}, {"method": "uniform"}])
@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_fit_equals_fit_in_memory(tmp_path, options, storage):
    memory = rb.RobBoost(THREAT, kappa=0.3, **options).fit_bounds(pool(), _memory())
    stored = stored_bounds(_filled(tmp_path / "s", storage=storage), pool(), _labelled())
    fitted = rb.RobBoost(THREAT, kappa=0.3, **options).fit_bounds(pool(), stored)
    assert fitted.chosen.name == memory.chosen.name
    assert torch.allclose(fitted.scales, memory.scales, rtol=1e-2)
    assert fitted.solution.objective == pytest.approx(
        memory.solution.objective, rel=1e-2 if storage == "int8" else 1e-5
    )
    for ours, theirs in zip(fitted.candidates, memory.candidates, strict=True):
        assert ours.name == theirs.name
        assert abs(ours.verified.count - theirs.verified.count) <= (storage == "int8")


def test_pairs_that_were_screened_count_as_what_they_are(tmp_path):
    memory = _memory()
    stored = stored_bounds(_filled(tmp_path / "s", screening=settled_pairs("linf")), pool(), _labelled())
    assert len(stored.pairs.certified) > 0
    mixes = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    ours, theirs = stored.lower(mixes), memory.lower(mixes)
    infinite = ours.isinf()
    assert int(infinite.sum()) == len(stored.pairs.certified)
    assert bool((theirs[infinite] > 0).all())
    assert torch.allclose(ours[~infinite], theirs[~infinite], atol=1e-6)
    hard = Screening("pair 5 is hopeless", lambda columns, c: _verdicts(columns.shape[1]))
    marked = stored_bounds(_filled(tmp_path / "h", screening=hard), pool(), _labelled())
    assert bool((marked.lower(mixes) == -torch.inf).any())
    rb.RobBoost(THREAT, kappa=0.3).fit_bounds(pool(), stored)


def _verdicts(count):
    found = torch.zeros(count, dtype=torch.int8)
    found[0] = HOPELESS
    return found


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_decided_pairs_are_decided_for_every_mix(norm):
    """Against a grid of all mixes, and a hand-made pair that two members certify together though neither does."""
    generator = torch.Generator().manual_seed(0)
    columns = 0.3 * torch.randn(3, 300, 4, generator=generator, dtype=torch.float64)
    c = 0.5 + 0.6 * torch.randn(1, 300, generator=generator) + 0.3 * torch.randn(3, 300, generator=generator).double()
    columns[:, 0], c[:, 0] = 0, 1.0
    columns[0, 0, 0], columns[1, 0, 0], columns[2, 0, 0] = 2.0, -2.0, 2.0
    verdicts = decided_pairs(norm).judge(columns, c)
    steps = torch.arange(31, dtype=torch.float64) / 30
    grid = torch.tensor([[a, b, 1 - a - b] for a in steps for b in steps if a + b <= 1 + 1e-12], dtype=torch.float64)
    mixed = torch.einsum("gt,tnd->gnd", grid, columns)
    size = {"linf": mixed.abs().sum(2), "l2": mixed.norm(dim=2), "l1": mixed.abs().amax(2)}[norm]
    margins = grid @ c - size
    assert verdicts[0] == KEEP
    assert not bool((margins[[0, -1], 0] > 0).any())
    assert bool((margins[:, verdicts == HOPELESS] <= 0).all())
    assert bool((margins[:, verdicts == CERTIFIED] > 0).all())
    # And nearly all that the grid calls decided is found to be.
    decided = (margins <= 0).all(0) | (margins > 0).all(0)
    assert int(((verdicts == KEEP) & decided).sum()) <= 0.05 * int(decided.sum())
    assert min(int((verdicts == v).sum()) for v in (KEEP, HOPELESS, CERTIFIED)) > 20


def test_verified_error_of_a_mix_is_the_same_from_decided_pairs(tmp_path):
    memory = _memory()
    stored = stored_bounds(_filled(tmp_path / "s", screening=decided_pairs("linf")), pool(), _labelled())
    assert min(len(stored.pairs.hopeless), len(stored.pairs.certified), len(stored.pairs.examples)) > 0
    mixes = torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((30,))
    ours, theirs = stored.lower(mixes), memory.lower(mixes)
    assert torch.equal(ours > 0, theirs > 0)


def test_two_processes_fit_the_same(tmp_path):
    store = _filled(tmp_path / "s")
    alone = rb.RobBoost(THREAT, kappa=0.3).fit_bounds(pool(), stored_bounds(store, pool(), _labelled()))

    def work(processes):
        found = stored_bounds(BoundStore.open(str(tmp_path / "s")), pool(), _labelled(), processes=processes)
        return rb.RobBoost(THREAT, kappa=0.3).fit_bounds(pool(), found).weights

    for weights in run_processes(2, work):
        assert not isinstance(weights, Exception), weights
        assert torch.allclose(weights, alone.weights, atol=1e-3)


def test_another_pool_or_other_data_are_refused(tmp_path):
    x, y = _labelled()
    store = _filled(tmp_path / "s")
    with pytest.raises(StoreError, match="bounds of another pool"):
        stored_bounds(store, pool(seed=4), (x, y))
    with pytest.raises(StoreError, match="other images or labels"):
        stored_bounds(store, pool(), (x, y.flip(0)))
    (tmp_path / "s" / "errors" / "c" / "0" / "0").unlink()
    with pytest.raises(StoreError, match="are missing"):
        stored_bounds(store, pool(), (x, y))
    everything = settled_pairs("linf")
    nothing = Screening("none left", lambda columns, c: everything.judge(columns * 0, c * 0 + 1))
    with pytest.raises(InputError, match="screening settled every pair"):
        stored_bounds(_filled(tmp_path / "n", screening=nothing), pool(), (x, y))
