"""What a store holds: the bounds themselves, sound in every storage type, readable by plain zarr."""

import numpy as np
import pytest
import torch
import zarr
from small_stores import THREAT, examples, filled, pool

import robboost as rb
from robboost.errors import InputError, StoreError
from robboost.rounding import decode_columns
from robboost.store import BoundStore, FillSettings, StoredColumns, fill_store, settled_pairs
from robboost.store.fill import margin_columns
from robboost.store.screening import CERTIFIED, HOPELESS, KEEP, Screening

STORAGES = ["float64", "float32", "float16", "int8"]


def test_hand_computed_linear_member(tmp_path):
    """Logits (x0, x1) around x = (0.5, 0.02), label 0, eps 0.1 in [0, 1]: margin x0 - x1, pixel 1 in [0, 0.12]."""
    member = torch.nn.Linear(2, 2)
    with torch.no_grad():
        member.weight.copy_(torch.eye(2))
        member.bias.zero_()
    x, y = torch.tensor([[0.5, 0.02]]), torch.tensor([0])
    store = fill_store(str(tmp_path / "s"), [member.eval()], (x, y), rb.Threat(0.1, clip=(0.0, 1.0)))
    columns, intercepts = store.read(0, 0)
    # Radii 0.1 and 0.06; centre (0.5, 0.06); margin at the centre 0.44; lowest margin 0.4 - 0.12 = 0.28.
    assert columns.tolist() == [pytest.approx([0.1, -0.06], abs=1e-7)]
    assert intercepts.tolist() == pytest.approx([0.44], abs=1e-7)
    assert float(intercepts[0] - columns[0].abs().sum()) == pytest.approx(0.28, abs=1e-7)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_stored_margins_hold_on_sampled_points(tmp_path, storage, norm):
    """Each member's stored margin stays below its true margin at random and extreme points of the set."""
    threat = rb.Threat(0.05 if norm == "linf" else 0.3, norm, clip=(0.0, 1.0))
    x, y = examples(12)
    members = pool()
    store = fill_store(
        str(tmp_path / "s"), members, (x, y), threat, settings=FillSettings(method="crown", storage=storage)
    )
    columns, c = StoredColumns(store).load().double(), store.intercepts()
    size = {"linf": columns.abs().sum(-1), "l2": columns.norm(dim=-1), "l1": columns.abs().amax(-1)}[norm]
    lower = (c - size).reshape(len(members), len(x), -1)
    generator = torch.Generator().manual_seed(0)
    for draw in range(40):
        point = (threat.sample if draw % 2 else threat.extreme_points)(x, generator=generator)
        for t, member in enumerate(members):
            logits = member(point).double()
            others = torch.tensor([[j for j in range(4) if j != label] for label in y.tolist()])
            margins = logits.gather(1, y[:, None]) - logits.gather(1, others)
            assert bool((lower[t] <= margins + 1e-6).all())


@pytest.mark.parametrize("storage", STORAGES)
def test_equals_the_bounds_less_the_error(tmp_path, storage):
    store = filled(tmp_path / "s", storage=storage)
    assert store.identity.n_shards >= 5
    assert store.identity.shard_pairs > store.identity.chunk_pairs
    columns = StoredColumns(store, slab_bytes=500).load().double()
    x, y = examples()
    for t, member in enumerate(pool()):
        exact, c = margin_columns(member, x, y, THREAT, method="crown", precision="float32")
        moved = (exact - columns[t]).abs().sum(1)
        # Batches of another size round differently in float32, in the seventh digit.
        assert bool((moved <= store.errors()[t] + 1e-6).all())
        assert torch.allclose(store.intercepts()[t] + store.errors()[t], c, atol=1e-6)
    assert bool((store.errors() == 0).all()) == (storage == "float64")


@pytest.mark.parametrize("storage", STORAGES)
def test_plain_zarr_reads_the_same(tmp_path, storage):
    store = filled(tmp_path / "s", storage=storage)
    group = zarr.open_group(tmp_path / "s", mode="r")
    scales = torch.from_numpy(group["scales"][:]) if storage == "int8" else None
    columns = decode_columns(torch.from_numpy(group["slopes"][:]), scales)
    assert torch.equal(columns, StoredColumns(store).load())
    assert np.array_equal(group["intercepts"][:] - group["errors"][:], store.intercepts().numpy())


def test_any_fsspec_url(tmp_path):
    """The same bits through a URL, where reads go through zarr instead of the file system."""
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").rm("/", recursive=True) if fsspec.filesystem("memory").ls("/") else None
    remote = fill_store(
        "memory://bucket/store", pool(), examples(), THREAT, settings=FillSettings(method="crown", shard_bytes=1000)
    )
    local = filled(tmp_path / "s")
    again = BoundStore.open("memory://bucket/store")
    assert torch.equal(StoredColumns(again, slab_bytes=700).load(), StoredColumns(local).load())
    assert torch.equal(again.intercepts(), local.intercepts())
    assert again.identity == remote.identity
    with again.writing(), pytest.raises(StoreError, match="is being written by process"), remote.writing():
        pass
    again.disk.run(again.disk.group.store.delete("slopes/c/1/2/0"))
    with pytest.raises(StoreError, match=r"1 of \d+ shards are missing \(first: member 1, shard 2\)"):
        again.require_complete()


def test_a_dead_writer_s_lock_on_a_url_is_named_and_can_be_broken():
    from zarr.core.buffer import default_buffer_prototype

    store = fill_store("memory://bucket/locked", pool(), examples(), THREAT, settings=FillSettings(method="crown"))
    dead = default_buffer_prototype().buffer.from_bytes(b'{"pid": 7, "host": "far", "since": "long ago"}')
    store.disk.run(store.disk.group.store.set(".lock", dead))
    with pytest.raises(StoreError, match=r"process 7 on far since long ago.*--break-lock"), store.writing():
        pass
    store.break_lock()
    with store.writing():
        pass


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_screening_drops_exactly_the_pairs_that_all_members_certify(tmp_path, storage):
    whole, screened = filled(tmp_path / "a"), filled(tmp_path / "b", storage=storage, screening=settled_pairs("linf"))
    columns = StoredColumns(whole).load().double()
    lower = whole.intercepts() - columns.abs().sum(-1)
    settled = (lower > 0).all(0)
    assert 0 < int(settled.sum()) < settled.numel()
    pairs = screened.pairs()
    kept = pairs.examples * 3 + pairs.targets
    assert torch.equal(kept, (~settled).nonzero()[:, 0])
    assert torch.equal(pairs.certified[:, 0] * 3 + pairs.certified[:, 1], settled.nonzero()[:, 0])
    streamed = StoredColumns(screened, slab_bytes=300).load()
    assert torch.allclose(streamed.double(), columns[:, kept], atol=1e-6 if storage == "float32" else 1e-2)
    assert torch.allclose(screened.intercepts() + screened.errors(), (whole.intercepts() + whole.errors())[:, kept])
    # Verified error of any mix is the same from the part that was kept.
    for a in torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((20,)):
        mixed = a @ whole.intercepts() - torch.einsum("t,tnd->nd", a, columns).abs().sum(1)
        assert bool((mixed[settled] > 0).all())


def test_screening_for_the_loss_uses_kappa_and_scales(tmp_path):
    rule = settled_pairs("linf", kappa=0.2, scales=[1.0, 2.0, 0.5])
    columns = torch.zeros(3, 4, 2, dtype=torch.float64)
    c = torch.tensor([[0.3, 0.3, 0.3, 0.2], [0.5, 0.3, 0.5, 0.5], [0.2, 0.2, 0.05, 0.2]], dtype=torch.float64)
    # Needed: 0.2, 0.4 and 0.1. Pair 1 fails member 1, pair 2 member 2; pair 3 ties, and ties are kept.
    assert rule.judge(columns, c).tolist() == [CERTIFIED, KEEP, KEEP, KEEP]
    assert rule.name != settled_pairs("linf", kappa=0.2, scales=[1.0, 2.0, 1.0]).name
    with pytest.raises(InputError, match="without scales"):
        settled_pairs("linf", kappa=0.2)
    with pytest.raises(InputError, match="kappa=-1"):
        settled_pairs("linf", kappa=-1)


def test_a_screening_that_keeps_nothing_leaves_a_complete_empty_store(tmp_path):
    nothing = Screening("nothing", lambda columns, c: torch.full((columns.shape[1],), HOPELESS, dtype=torch.int8))
    store = filled(tmp_path / "s", screening=nothing)
    stream = StoredColumns(store)
    assert stream.shape == (3, 0, 12)
    assert list(stream.slabs()) == []
    assert len(store.pairs().hopeless) == 90
    assert store.intercepts().shape == (3, 0)
    assert store.verify() == []


def test_bounds_that_are_not_numbers_are_refused_by_name(tmp_path, monkeypatch):
    import robboost.store.fill as fill

    honest = fill.margin_columns

    def broken(member, x, y, threat, **chosen):
        columns, c = honest(member, x, y, threat, **chosen)
        if float(x[0, 0, 0]) == float(examples()[0][0, 0, 0]):
            c[7] = float("nan")
        return columns, c

    monkeypatch.setattr(fill, "margin_columns", broken)
    with pytest.raises(StoreError, match="member 0 on example 2, target 1"):
        filled(tmp_path / "s")


def test_wrong_settings_are_refused():
    with pytest.raises(InputError, match="memory=5"):
        FillSettings(memory=5)
    with pytest.raises(InputError, match="shard_bytes=0"):
        FillSettings(shard_bytes=0)
    with pytest.raises(InputError, match="storage='int4'"):
        FillSettings(storage="int4")


def test_an_example_larger_than_a_piece_is_cut_by_targets(tmp_path):
    """Pieces of a third of an example: 9 targets of 12 pixels in pieces of 144 bytes."""
    x, y = examples(5, classes=10)
    store = fill_store(
        str(tmp_path / "s"), pool(2, classes=10), (x, y), THREAT, settings=FillSettings(method="crown", shard_bytes=600)
    )
    assert (store.identity.chunk_pairs, store.identity.shard_pairs, store.identity.n_shards) == (3, 9, 5)
    assert StoredColumns(store, slab_bytes=1).load().shape == (2, 45, 12)
