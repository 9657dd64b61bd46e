"""Faults put in by force: flipped bits, lost and cut files, full disks, second writers, kill -9. Each is named."""

import errno
import multiprocessing
import os
import random
import resource
import signal
import time
from pathlib import Path

import pytest
import zarr
from small_stores import THREAT, examples, filled, fingerprint, pool, settings

from robboost.errors import StoreError
from robboost.store import BoundStore, StoredColumns, fill_store, settled_pairs
from robboost.store.disk import Disk


def _flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(bytes(raw))


def _fill(folder: Path, **changes: object) -> BoundStore:
    return fill_store(str(folder), pool(), examples(), THREAT, settings=settings(**changes))


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_any_flipped_bit_in_any_data_file_is_found_named_and_repaired(tmp_path, storage):
    screening = settled_pairs("linf") if storage == "int8" else None
    store = filled(tmp_path / "s", storage=storage, screening=screening)
    clean = fingerprint(tmp_path / "s")
    rng = random.Random(0)
    kinds = {"slopes", "intercepts", "errors", *(("scales", "verdicts") if storage == "int8" else ())}
    for kind in sorted(kinds):
        files = [p for p in sorted((tmp_path / "s" / kind / "c").rglob("*")) if p.is_file()]
        for path in rng.sample(files, 3):
            size = 8 * path.stat().st_size
            # The last bits too: there the index of a shard and the checksums are.
            for bit in {0, size - 1, size - 40, *rng.sample(range(size), 3)}:
                before = path.read_bytes()
                _flip(path, bit)
                damage = store_again(tmp_path).verify()
                assert damage, f"{path} bit {bit}"
                assert all("checksum" in d.reason or "another size" in d.reason for d in damage)
                parts = path.relative_to(tmp_path / "s" / kind / "c").parts
                if kind != "verdicts":
                    assert [(d.member, d.shard) for d in damage] == [(int(parts[0]), int(parts[1]))]
                path.write_bytes(before)
    _flip(tmp_path / "s" / "slopes" / "c" / "1" / "2" / "0", 77)
    assert [(d.member, d.shard) for d in store.repair()] == [(1, 2)]
    with pytest.raises(StoreError, match="are missing"):
        StoredColumns(store_again(tmp_path))
    _fill(tmp_path / "s", storage=storage, screening=screening)
    assert fingerprint(tmp_path / "s") == clean


def store_again(tmp_path: Path) -> BoundStore:
    return BoundStore.open(str(tmp_path / "s"))


def test_a_lost_file_of_every_kind_is_named(tmp_path):
    filled(tmp_path / "s", storage="int8", screening=settled_pairs("linf"))
    for kind, name in (("slopes", "slopes/c/1/2/0"), ("intercepts", "intercepts/c/1/2"), ("errors", "errors/c/1/2"),
                       ("scales", "scales/c/1/2"), ("verdicts", "verdicts/c/2")):  # fmt: skip
        path = tmp_path / "s" / name
        kept = path.read_bytes()
        path.unlink()
        store = store_again(tmp_path)
        # The verdicts belong to the shards of all members.
        members = [0, 1, 2] if kind == "verdicts" else [1]
        message = f"{len(members)} of 15 shards are missing .first: member {members[0]}, shard 2"
        with pytest.raises(StoreError, match=message):
            StoredColumns(store)
        damage = store.verify()
        assert [(d.member, d.shard) for d in damage] == [(t, 2) for t in members]
        assert all(f"{kind} of member" in d.reason and "missing" in d.reason for d in damage)
        path.write_bytes(kept)
    assert store_again(tmp_path).verify() == []


def test_a_cut_file_is_named(tmp_path):
    filled(tmp_path / "s")
    path = tmp_path / "s" / "slopes" / "c" / "0" / "1" / "0"
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        (found,) = store_again(tmp_path).verify()
        assert (found.member, found.shard) == (0, 1)
        assert "cut short" in found.reason or "checksum" in found.reason


def test_a_store_begun_again_computes_only_what_is_missing(tmp_path, monkeypatch):
    import robboost.store.fill as fill

    filled(tmp_path / "s")
    clean = fingerprint(tmp_path / "s")
    (tmp_path / "s" / "slopes" / "c" / "2" / "4" / "0").unlink()
    calls = []
    honest = fill.margin_columns
    monkeypatch.setattr(fill, "margin_columns", lambda *a, **k: calls.append(len(a[1])) or honest(*a, **k))
    _fill(tmp_path / "s")
    assert calls == [6]
    assert fingerprint(tmp_path / "s") == clean


def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path):
    """The kernel refuses the bytes: a limit on file size, in a child, hits like a full disk inside a shard."""

    def limited() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (700, resource.RLIM_INFINITY))
        try:
            # The manifest is larger than the limit: laid out before.
            _fill(tmp_path / "s")
        except StoreError as error:
            return str(error)
        return "no error"

    BoundStore.prepare(str(tmp_path / "s"), filled(tmp_path / "other").identity)
    message = _in_child(limited)
    assert "disk full (file size limit reached)" in message
    assert "writing slopes of member 0, shard 0" in message
    assert list((tmp_path / "s").rglob("*.partial")) == []
    assert store_again(tmp_path).complete() == set()
    _fill(tmp_path / "s")
    assert fingerprint(tmp_path / "s") == fingerprint(tmp_path / "other")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_space_left_at_any_write(tmp_path, monkeypatch, code):
    import zarr.storage._local as local

    filled(tmp_path / "other")
    honest = local._put
    for fails_at in range(0, 12, 3):
        count = iter(range(1000))

        def full(path, *rest, fails_at=fails_at, count=count, **options):
            if next(count) == fails_at:
                raise OSError(code, os.strerror(code))
            return honest(path, *rest, **options)

        folder = tmp_path / str(fails_at)
        monkeypatch.setattr(local, "_put", full)
        with pytest.raises(StoreError, match="disk full"):
            _fill(folder)
        monkeypatch.setattr(local, "_put", honest)
        _fill(folder)
        assert fingerprint(folder) == fingerprint(tmp_path / "other")


def test_a_store_whose_creation_was_cut_off_is_taken_up(tmp_path):
    filled(tmp_path / "other")
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "zarr.dd52b287ec4f446a9a63f855c6389529.partial").write_bytes(b'{"attri')
    _fill(tmp_path / "s")
    assert list((tmp_path / "s").rglob("*.partial")) == []
    assert fingerprint(tmp_path / "s") == fingerprint(tmp_path / "other")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "film.partial").write_bytes(b"")
    with pytest.raises(StoreError, match=r"holds 'film\.partial', which is no part"):
        _fill(tmp_path / "foreign")


def test_a_disk_error_is_named(tmp_path, monkeypatch):
    store = filled(tmp_path / "s")
    monkeypatch.setattr(os, "preadv", lambda *a: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    with pytest.raises(StoreError, match=r"slopes of member 0, shard 0: .*Input/output error"):
        StoredColumns(store).load()


def test_a_second_writer_is_refused_and_told_who_holds_the_store(tmp_path):
    store = filled(tmp_path / "s")
    with store.writing():
        assert f"is being written by process {os.getpid()} on" in _in_child(
            lambda: _message(lambda: _fill(tmp_path / "s"))
        )
        # Reading needs no lock.
        assert store_again(tmp_path).verify() == []
    assert _in_child(lambda: _message(lambda: _fill(tmp_path / "s"))) == "no error"


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    import fcntl

    store = filled(tmp_path / "s")

    def refuse(handle, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=r"knows no locks \(No locks available\)"), store.writing():
        pass


def test_the_lock_of_a_killed_writer_is_free(tmp_path):
    store = filled(tmp_path / "s")

    def hold() -> None:
        with store.writing():
            os.kill(os.getpid(), signal.SIGKILL)

    assert _killed(hold)
    with store.writing():
        pass


def test_damaged_manifests_and_foreign_folders_are_refused(tmp_path):
    filled(tmp_path / "s")
    root = tmp_path / "s" / "zarr.json"
    text = root.read_text()
    cases = {
        '"eps": 0.05': ('"eps": 0.06', "manifest is damaged"),
        '"format": 1': ('"format": 9', "manifest is damaged"),
        '"zarr_format": 3': ('"zarr_format": @', "cannot be read"),
    }
    for old, (new, message) in cases.items():
        assert old in text
        root.write_text(text.replace(old, new))
        with pytest.raises(StoreError, match=message):
            store_again(tmp_path)
    root.write_text(text)
    array = tmp_path / "s" / "slopes" / "zarr.json"
    kept = array.read_text()
    array.write_text(kept.replace('"float32"', '"float64"'))
    with pytest.raises(StoreError, match=r"slopes/zarr.json does not fit the manifest"):
        store_again(tmp_path)
    array.unlink()
    with pytest.raises(StoreError, match=r"slopes/zarr.json is missing or damaged"):
        store_again(tmp_path)
    array.write_text(kept)
    assert store_again(tmp_path).verify() == []

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"holds 'thesis.tex', which is no part of a bound store"):
        _fill(tmp_path / "mine")
    with pytest.raises(StoreError, match="no bound store here"):
        BoundStore.open(str(tmp_path / "nothing"))
    zarr.create_array(tmp_path / "z", shape=(3,), dtype="f4")
    with pytest.raises(StoreError):
        BoundStore.open(str(tmp_path / "z"))


def test_another_format_is_refused(tmp_path, monkeypatch):
    import robboost.store.identity as identity

    filled(tmp_path / "s")
    monkeypatch.setattr(identity, "FORMAT", 2)
    with pytest.raises(StoreError, match="store format 1; this version reads format 2"):
        store_again(tmp_path)


@pytest.mark.parametrize("screening", [None, settled_pairs("linf")])
def test_killed_after_every_write_and_continued_it_is_bit_equal(tmp_path, screening):
    """One process after another, each killed by itself at a later write, until one gets through."""
    filled(tmp_path / "whole", screening=screening)
    honest = Disk.write
    deaths = 0
    while True:

        def fill_and_die(allowed: int = deaths) -> None:
            left = iter(range(allowed))

            def write(self, *arguments):
                honest(self, *arguments)
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            Disk.write = write
            _fill(tmp_path / "s", screening=screening)

        if not _killed(fill_and_die):
            break
        deaths += 1
        assert deaths < 40
    assert deaths >= 7
    assert fingerprint(tmp_path / "s") == fingerprint(tmp_path / "whole")


def test_kill_9_at_random_instants_in_a_loop(tmp_path):
    """Killed from outside at any instant, also inside a write and while the store is laid out."""
    began = time.perf_counter()
    filled(tmp_path / "whole")
    usual = time.perf_counter() - began
    rng = random.Random(5)
    context = multiprocessing.get_context("fork")
    killed = 0
    for attempt in range(4):
        folder = tmp_path / f"s{attempt}"
        for _ in range(4):
            child = context.Process(target=_fill, args=(folder,))
            child.start()
            time.sleep(rng.uniform(0.0, usual))
            killed += child.is_alive()
            child.kill()
            child.join()
        _fill(folder)
        assert fingerprint(folder) == fingerprint(tmp_path / "whole")
        assert store_names(folder) == store_names(tmp_path / "whole")
    assert killed >= 4


def store_names(folder: Path) -> list[str]:
    """Every file, so that nothing half-written is left behind."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def _message(call) -> str:
    try:
        call()
    except StoreError as error:
        return str(error)
    return "no error"


def _in_child(call) -> str:
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: writer.send(call()))
    child.start()
    assert reader.poll(60)
    answer = reader.recv()
    child.join()
    return answer


def _killed(call) -> bool:
    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    child.join(60)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0
