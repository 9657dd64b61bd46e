"""The files: a zarr 3 group, written through zarr, its shards read straight from disk.

Any zarr 3 reader opens a store. Ours goes around zarr for the large array only: that is several times faster where the
files are warm, and as fast as the disk where they are not (benchmarks/scale.py).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from robboost.errors import InputError, StoreError
from robboost.store.handles import OpenFiles
from robboost.store.identity import Identity

__all__ = [
    "Array", "Disk", "create_disk", "guarded", "open_disk",
]  # fmt: skip

Array = np.ndarray[Any, Any]
_ABSENT = 2**64 - 1
_CRC = 4
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "quota exceeded", errno.EFBIG: "file size limit reached"}
# readv takes at most 1024 buffers; a piece needs two.
_RUN = 500


class Disk:
    """An open store: its zarr group, its identity, and reads of single pieces.

    Arrays: slopes [T, P, d] (columns, in shards), intercepts and errors [T, P] float64, scales [T, P] float32 for int8,
    and verdicts [P] int8 in a screened store (see `screening`). P counts the slots of all pairs; a screened shard holds
    the pairs that were kept, moved to its front.
    """

    def __init__(self, url: str, group: Any, identity: Identity) -> None:
        self.url = url
        self.group = group
        self.identity = identity
        self.folder = Path(url) if _is_local(url) else None
        self._indices: dict[tuple[int, int], Array] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.identity.storage)

    def slots(self, shard: int) -> slice:
        """Slots of the pairs of one shard."""
        size = self.identity.shard_pairs
        return slice(shard * size, min((shard + 1) * size, self.identity.n_slots))

    def has(self, name: str, member: int, shard: int) -> bool:
        """Whether this piece was written. Files appear by renaming, so what is there is whole."""
        key = self._key(name, member, shard)
        return (self.folder / key).is_file() if self.folder else self.run(self.group.store.exists(key))

    def complete(self) -> set[tuple[int, int]]:
        """(member, shard) of which every file is there, from one listing of the store."""
        names = ["slopes", "intercepts", "errors"] + ["scales"] * (self.identity.storage == "int8")
        found = self._listing()
        shards: Sequence[int] = range(self.identity.n_shards)
        if self.identity.screening != "none":
            shards = [s for s in shards if self._key("verdicts", 0, s) in found]
        members = range(len(self.identity.members))
        return {(t, s) for t in members for s in shards if all(self._key(name, t, s) in found for name in names)}

    def _listing(self) -> set[str]:
        if self.folder:
            paths = (Path(base, file) for base, _, files in os.walk(self.folder) for file in files)
            return {path.relative_to(self.folder).as_posix() for path in paths}

        async def collect() -> set[str]:
            return {key async for key in self.group.store.list()}

        return set(self.run(collect()))

    def write(self, name: str, member: int, shard: int, values: Array) -> None:
        """Writes the first len(values) pairs of one shard, replacing what was there."""
        import zarr

        start = shard * self.identity.shard_pairs
        self._indices.pop((member, shard), None)
        where = f"{self.url}: writing {name} of member {member}, shard {shard}"
        # Zeros are values here: a piece that is absent must mean that it was never written.
        with guarded(where), zarr.config.set({"array.write_empty_chunks": True}):
            array = self.group[name]
            if name == "verdicts":
                array[start : start + len(values)] = values
            else:
                array[member, start : start + len(values)] = values

    def read_small(self, name: str, member: int, shard: int) -> Array:
        """One shard of intercepts, errors, scales or verdicts."""
        where = f"{self.url}: {name} of member {member}, shard {shard}"
        if not self.has(name, member, shard):
            raise StoreError(f"{where} is missing; run `robboost bounds` again to compute it anew")
        with guarded(where):
            array = self.group[name]
            part = self.slots(shard)
            return np.asarray(array[part] if name == "verdicts" else array[member, part])

    def read_columns(self, member: int, shard: int, first: int, out: Array, *, files: OpenFiles | None = None) -> None:
        """Fills `out` [m, d] with the stored columns from piece `first` of a shard on, checksums verified.

        Local files stay open in `files`, if given.
        """
        import google_crc32c

        where = f"{self.url}: slopes of member {member}, shard {shard}"
        index = self._index(member, shard, where)
        size = self.identity.chunk_pairs
        count = -(-len(out) // size)
        full = out if len(out) == count * size else np.empty((count * size, out.shape[1]), out.dtype)
        pieces = full.reshape(count, -1).view(np.uint8)
        offsets = index[first : first + count]
        if len(offsets) < count or (offsets[:, 0] == _ABSENT).any():
            raise StoreError(f"{where} lacks pieces {first} to {first + count - 1}; {_REPAIR}")
        checks = np.empty((count, _CRC), np.uint8)
        self._fetch(self._key("slopes", member, shard), offsets, (pieces, checks), where, files)
        for i in range(count):
            if google_crc32c.value(pieces[i]) != int(checks[i].view("<u4")[0]):
                raise StoreError(f"{where}, piece {first + i}: checksum does not fit (flipped bits); {_REPAIR}")
        if full is not out:
            out[:] = full[: len(out)]

    def read_rows(self, member: int, shard: int, rows: Array, out: Array) -> None:
        """Fills `out` [k, d] with single columns by position in a shard, without the checksum of their pieces.

        For samples that guide a search; whatever is proved reads whole pieces.
        """
        where = f"{self.url}: slopes of member {member}, shard {shard}"
        if self.folder is None:
            self._read_rows_by_pieces(member, shard, rows, out)
            return
        index, size = self._index(member, shard, where), self.identity.chunk_pairs
        width = out.shape[1] * self.dtype.itemsize
        with guarded(where), (self.folder / self._key("slopes", member, shard)).open("rb") as file:
            for row, target in zip(rows.tolist(), out, strict=True):
                piece, inside = divmod(row, size)
                if index[piece, 0] == _ABSENT or (
                    _read_into(file.fileno(), [target.view(np.uint8)], int(index[piece, 0]) + inside * width) < width
                ):
                    raise StoreError(f"{where} lacks piece {piece}; {_REPAIR}")

    def _read_rows_by_pieces(self, member: int, shard: int, rows: Array, out: Array) -> None:
        size = self.identity.chunk_pairs
        piece = np.empty((size, out.shape[1]), self.dtype)
        for first in np.unique(rows // size):
            inside = rows // size == first
            self.read_columns(member, shard, int(first), piece)
            out[inside] = piece[rows[inside] % size]

    def delete(self, member: int, shard: int) -> None:
        """Removes the marker file of a shard, so that the next fill computes it anew."""
        key = self._key("slopes", member, shard)
        self._indices.pop((member, shard), None)
        with guarded(f"{self.url}: removing {key}"):
            if self.folder:
                (self.folder / key).unlink(missing_ok=True)
            else:
                self.run(self.group.store.delete(key))

    def _index(self, member: int, shard: int, where: str) -> Array:
        """Offset and length of each piece of a shard [pieces, 2], from the end of its file."""
        import google_crc32c

        held = self._indices.get((member, shard))
        if held is not None:
            return held
        if not self.has("slopes", member, shard):
            raise StoreError(f"{where} is missing; {_REPAIR}")
        pieces = self.identity.shard_pairs // self.identity.chunk_pairs
        raw = self._tail(self._key("slopes", member, shard), 16 * pieces + _CRC, where)
        if len(raw) != 16 * pieces + _CRC:
            raise StoreError(f"{where} is cut short; {_REPAIR}")
        if google_crc32c.value(raw[:-_CRC]) != int.from_bytes(raw[-_CRC:], "little"):
            raise StoreError(f"{where}: checksum of its index does not fit (flipped bits); {_REPAIR}")
        index = np.frombuffer(raw[:-_CRC], "<u8").reshape(pieces, 2)
        expected = self.identity.chunk_pairs * self.identity.dim * self.dtype.itemsize + _CRC
        if not ((index[:, 1] == expected) | (index[:, 0] == _ABSENT)).all():
            raise StoreError(f"{where}: its pieces have another size than the manifest says; {_REPAIR}")
        self._indices[member, shard] = index
        return index

    def _tail(self, key: str, count: int, where: str) -> bytes:
        with guarded(where):
            if self.folder:
                with (self.folder / key).open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(max(0, size - count))
                    return file.read()
            from zarr.abc.store import SuffixByteRequest

            return self._get(key, SuffixByteRequest(count), where)

    def _fetch(self, key: str, offsets: Array, out: tuple[Array, Array], where: str, files: OpenFiles | None) -> None:
        """Reads pieces and their checksums, adjacent pieces in one call, without a copy."""
        pieces, checks = out
        length = int(offsets[0, 1])
        opened = files or OpenFiles()
        with guarded(where):
            try:
                for start, stop in _runs(offsets):
                    begin, total = int(offsets[start, 0]), (stop - start) * length
                    if self.folder:
                        buffers = [part for i in range(start, stop) for part in (pieces[i], checks[i])]
                        got = _read_into(opened.handle(self.folder / key), buffers, begin)
                        if got != total:
                            raise StoreError(f"{where} is cut short; {_REPAIR}")
                        continue
                    from zarr.abc.store import RangeByteRequest

                    raw = np.frombuffer(self._get(key, RangeByteRequest(begin, begin + total), where), np.uint8)
                    if len(raw) != total:
                        raise StoreError(f"{where} is cut short; {_REPAIR}")
                    rows = raw.reshape(stop - start, length)
                    pieces[start:stop], checks[start:stop] = rows[:, :-_CRC], rows[:, -_CRC:]
            finally:
                if files is None:
                    opened.close()

    def _get(self, key: str, request: Any, where: str) -> bytes:
        from zarr.core.buffer import default_buffer_prototype

        found = self.run(self.group.store.get(key, default_buffer_prototype(), request))
        if found is None:
            raise StoreError(f"{where} is missing; {_REPAIR}")
        return bytes(found.to_bytes())

    def _key(self, name: str, member: int, shard: int) -> str:
        if name == "verdicts":
            return f"verdicts/c/{shard}"
        return f"{name}/c/{member}/{shard}" + ("/0" if name == "slopes" else "")

    @staticmethod
    def run(coroutine: Any) -> Any:
        from zarr.core.sync import sync

        return sync(coroutine)


_OURS = {"zarr.json", ".lock", "slopes", "intercepts", "errors", "scales", "verdicts"}
# What a write leaves that was cut off; removed when the store is next opened for writing.
_CUT_OFF = re.compile(r"zarr\.[0-9a-f]{32}\.partial")
_REPAIR = "run `robboost bounds --repair` to compute it anew"


def create_disk(url: str, identity: Identity) -> Disk:
    """Lays out an empty store. The manifest is written last: a folder without one holds nothing yet."""
    zarr = _zarr()
    if _is_local(url) and Path(url).is_dir():
        names = sorted(path.name for path in Path(url).iterdir())
        foreign = [name for name in names if name not in _OURS and not _CUT_OFF.fullmatch(name)]
        if foreign:
            raise StoreError(f"{url}: holds {foreign[0]!r}, which is no part of a bound store; name an empty folder")
    with guarded(f"{url}: creating the store"):
        group = zarr.open_group(url, mode="a", zarr_format=3)
        for name in list(group):
            # Left by a run that was killed before it wrote the manifest.
            del group[name]
        _create_arrays(group, identity)
        group.attrs["robboost"] = identity.to_attributes()
        return Disk(url, group, identity)


def open_disk(url: str) -> Disk | None:
    """An existing store, its layout checked against its manifest; None where there is nothing yet."""
    zarr = _zarr()
    if _is_local(url) and not (Path(url) / "zarr.json").exists():
        return None
    try:
        with guarded(url):
            group = zarr.open_group(url, mode="r+", zarr_format=3)
    except StoreError:
        raise
    except (FileNotFoundError, zarr.errors.GroupNotFoundError):
        return None
    except Exception as error:
        raise StoreError(f"{url}: zarr.json cannot be read ({_line(error)}); delete the store and fill again") from None
    if "robboost" not in group.attrs:
        return None
    identity = Identity.from_attributes(dict(group.attrs["robboost"]), url)
    expected = zarr.group(store=zarr.storage.MemoryStore(), zarr_format=3)
    _create_arrays(expected, identity)
    for name, array in expected.arrays():
        try:
            found = group[name].metadata.to_dict()
        except Exception as error:
            raise StoreError(
                f"{url}: {name}/zarr.json is missing or damaged ({_line(error)}); fill a new store"
            ) from None
        if found != array.metadata.to_dict():
            raise StoreError(f"{url}: {name}/zarr.json does not fit the manifest; fill a new store")
    return Disk(url, group, identity)


@contextmanager
def guarded(where: str) -> Iterator[None]:
    """Names what the operating system and zarr report: a full disk, a damaged piece."""
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreError(
                f"{where}: disk full ({_FULL[error.errno]}); make room and run again, what is written is kept"
            ) from None
        raise StoreError(f"{where}: {_line(error)}") from None
    except ValueError as error:
        if "checksum" not in str(error).lower():
            raise
        raise StoreError(f"{where}: checksum does not fit (flipped bits); {_REPAIR}") from None


def _create_arrays(group: Any, identity: Identity) -> None:
    from zarr.codecs import Crc32cCodec

    members, slots = len(identity.members), identity.n_slots
    shard, chunk, d = identity.shard_pairs, identity.chunk_pairs, identity.dim
    group.create_array(
        "slopes", shape=(members, slots, d), shards=(1, shard, d), chunks=(1, chunk, d), dtype=identity.storage,
        compressors=[Crc32cCodec()], fill_value=0,
    )  # fmt: skip
    small = {"intercepts": "float64", "errors": "float64"}
    if identity.storage == "int8":
        small["scales"] = "float32"
    for name, dtype in small.items():
        group.create_array(
            name, shape=(members, slots), chunks=(1, shard), dtype=dtype, compressors=[Crc32cCodec()],
            fill_value=float("nan"),
        )  # fmt: skip
    if identity.screening != "none":
        group.create_array(
            "verdicts", shape=(slots,), chunks=(shard,), dtype="int8", compressors=[Crc32cCodec()], fill_value=-1
        )


def _runs(offsets: Array) -> Iterator[tuple[int, int]]:
    """Stretches of pieces that lie one after the other in the file."""
    start = 0
    for i in range(1, len(offsets) + 1):
        if i == len(offsets) or i - start == _RUN or offsets[i, 0] != offsets[i - 1, 0] + offsets[i - 1, 1]:
            yield start, i
            start = i


def _read_into(handle: int, buffers: list[Array], offset: int) -> int:
    """Like preadv, but until everything is read or the file ends."""
    views = [b.data for b in buffers]
    total = 0
    while views:
        got = os.preadv(handle, views, offset + total)
        if got == 0:
            break
        total += got
        while views and got >= len(views[0]):
            got -= len(views.pop(0))
        if got:
            views[0] = views[0][got:]
    return total


def _is_local(url: str) -> bool:
    if not url:
        raise InputError("store path is empty: expected a folder or a URL such as 's3://bucket/name'")
    return "://" not in url


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise InputError("bound stores need the package zarr; install it with `pip install robboost[store]`") from None
    return zarr


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
