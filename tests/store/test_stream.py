"""Streaming: every pair once and in order, whatever the slabs; errors of the readers reach the caller."""

import os
import sys
from pathlib import Path

import pytest
import torch
from small_stores import THREAT, examples, filled, pool, settings

from robboost.distributed import Processes
from robboost.errors import InputError, StoreError
from robboost.store import StoredColumns, fill_store, settled_pairs
from robboost.weights import solve, solve_weights, streamed_problem


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return filled(tmp_path_factory.mktemp("stream") / "s")


@pytest.mark.parametrize("slab_bytes", [1, 700, 10**9])
@pytest.mark.parametrize(("ahead", "threads"), [(1, 1), (3, 4)])
def test_slabs_cover_all_pairs_in_order(store, slab_bytes, ahead, threads):
    stream = StoredColumns(store, slab_bytes=slab_bytes, ahead=ahead, threads=threads)
    whole = torch.stack([torch.cat([store.read(t, s)[0] for s in range(store.identity.n_shards)]) for t in range(3)])
    position = 0
    for part, columns in stream.slabs():
        assert part.start == position
        assert torch.equal(columns, whole[:, part])
        position = part.stop
    assert position == 90
    assert stream.shape == (3, 90, 12)
    assert stream.nbytes == 3 * 90 * 12 * 4


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_processes_share_the_pairs_without_gap_or_overlap(store, size):
    whole = StoredColumns(store).load()
    parts = [StoredColumns(store, processes=Processes(r, size), slab_bytes=500) for r in range(size)]
    assert torch.equal(torch.cat([p.load() for p in parts], 1), whole)
    stretches = [p.pairs for p in parts if p.shape[1]]
    assert [s.stop for s in stretches[:-1]] == [s.start for s in stretches[1:]]


def test_more_processes_than_slabs_leave_some_without_work(store):
    parts = [StoredColumns(store, processes=Processes(r, 40), slab_bytes=10**9) for r in range(40)]
    assert sum(p.shape[1] for p in parts) == 90
    assert min(p.shape[1] for p in parts) == 0


def test_stopping_early_ends_the_readers(store):
    import threading

    before = threading.active_count()
    for _ in StoredColumns(store, slab_bytes=1).slabs():
        break
    names = [t.name for t in threading.enumerate() if t.name.startswith("robboost-read")]
    assert names == []
    assert threading.active_count() <= before + 1


@pytest.mark.skipif(sys.platform != "linux", reason="counts the files in /proc")
def test_files_stay_open_for_their_shard_alone(store):
    """Five shards of three members: never more than those under way, and none after a pass or where it is given up."""

    def opened() -> list[str]:
        links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
        return [os.readlink(link) for link in links if link.is_symlink() and store.url in os.readlink(link)]

    stream = StoredColumns(store, slab_bytes=1, ahead=1, threads=1)
    most = max(len(opened()) for _ in stream.slabs())
    assert 3 <= most <= 9
    assert opened() == []
    slabs = stream.slabs()
    next(slabs)
    assert opened()
    slabs.close()
    assert opened() == []


def test_damage_found_by_a_reader_thread_reaches_the_caller(tmp_path):
    store = filled(tmp_path / "s")
    path = tmp_path / "s" / "slopes" / "c" / "2" / "3" / "0"
    raw = bytearray(path.read_bytes())
    raw[10] ^= 4
    path.write_bytes(bytes(raw))
    with pytest.raises(StoreError, match=r"slopes of member 2, shard 3, piece 0: checksum does not fit"):
        StoredColumns(store).load()


def test_refusals(store):
    for name in ("slab_bytes", "ahead", "threads"):
        with pytest.raises(InputError, match=f"{name}=0"):
            StoredColumns(store, **{name: 0})


@pytest.mark.parametrize("storage", ["float32", "float16", "int8", "float64"])
def test_factors_scale_members_while_reading(tmp_path, storage):
    store = filled(tmp_path / "s", storage=storage)
    plain = StoredColumns(store).load().double()
    factors = (0.5, 1.0 / 3.0, 2.0)
    scaled = StoredColumns(store, factors=factors, slab_bytes=400)
    assert scaled.dtype == (torch.float64 if storage == "float64" else torch.float32)
    expected = plain * torch.tensor(factors, dtype=torch.float64)[:, None, None]
    assert torch.allclose(scaled.load().double(), expected, rtol=3e-7, atol=0)
    part = StoredColumns(store, factors=factors, processes=Processes(1, 2), slab_bytes=400)
    assert torch.equal(part.intercepts()[1], store.intercepts()[1, part.pairs] * factors[1])
    for wrong in ((1.0, 1.0), (1.0, 0.0, 1.0), (1.0, float("nan"), 1.0)):
        with pytest.raises(InputError, match="expected 3 positive numbers"):
            StoredColumns(store, factors=wrong)


@pytest.mark.parametrize("storage", ["float32", "int8"])
@pytest.mark.parametrize("process", [Processes(0, 1), Processes(1, 3)])
def test_take_and_spread(tmp_path, storage, process):
    stream = StoredColumns(filled(tmp_path / "s", storage=storage), processes=process, factors=(1.0, 2.0, 3.0))
    whole = stream.load()
    index = torch.tensor([0, 1, 7, whole.shape[1] - 1])
    assert torch.equal(stream.take(index), whole[:, index])
    for count in (1, 10, 1000):
        spread = stream.spread(count)
        assert len(spread) >= 1
        assert spread.tolist() == sorted(set(spread.tolist()))
        assert int(spread[-1]) < whole.shape[1]
        assert torch.equal(stream.take(spread), whole[:, spread])


def test_take_from_a_screened_store_and_from_a_url(tmp_path):
    screened = StoredColumns(filled(tmp_path / "s", screening=settled_pairs("linf")))
    whole = screened.load()
    index = torch.arange(0, whole.shape[1], 3)
    assert torch.equal(screened.take(index), whole[:, index])
    remote = fill_store("memory://bucket/take", pool(), examples(), THREAT, settings=settings())
    stream = StoredColumns(remote)
    assert torch.equal(stream.take(index), stream.load()[:, index])


@pytest.mark.parametrize("screening", [None, settled_pairs("linf", kappa=0.2, scales=[1.0, 1.0, 1.0])])
def test_solver_on_a_stored_problem_equals_the_solver_on_arrays(tmp_path, screening):
    """Screening with the loss's own kappa leaves the loss of every mix as it was, so also its optimum."""
    whole = filled(tmp_path / "whole")
    memory = solve_weights(StoredColumns(whole).load(), whole.intercepts(), 1.0, kappa=0.2)
    store = filled(tmp_path / "s", screening=screening)
    stream = StoredColumns(store, slab_bytes=700)
    if screening is not None:
        assert stream.shape[1] < 90
    solution = solve(streamed_problem(stream, stream.intercepts(), kappa=0.2))
    assert solution.objective == pytest.approx(memory.objective, rel=2e-6)
    assert solution.gap < 1e-6


def test_some_members_alone(tmp_path):
    store = filled(tmp_path / "s", storage="int8")
    whole = StoredColumns(store, factors=(1.0, 2.0, 3.0))
    part = whole.take_members([2, 0])
    assert torch.equal(part.load(), whole.load()[[2, 0]])
    assert torch.equal(part.intercepts(), whole.intercepts()[[2, 0]])
    assert torch.equal(part.take_members([1]).take(torch.tensor([4])), whole.take(torch.tensor([4]))[[0]])
    for wrong in ((3,), ()):
        with pytest.raises(InputError, match="expected positions below 3"):
            StoredColumns(store, members=wrong)
