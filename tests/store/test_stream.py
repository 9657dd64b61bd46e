"""Streaming: every pair once and in order, whatever the slabs; errors of the readers reach the caller."""

import pytest
import torch
from small_stores import filled

from robboost.distributed import Processes
from robboost.errors import InputError, StoreError
from robboost.store import StoredColumns


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
