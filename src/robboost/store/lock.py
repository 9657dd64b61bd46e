"""One writer at a time: the kernel's lock on a local folder, a lock object elsewhere."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from robboost.errors import StoreError
from robboost.store.disk import Disk

__all__ = ["break_lock", "writer_lock"]

_NAME = ".lock"


@contextmanager
def writer_lock(disk: Disk) -> Iterator[None]:
    """Holds the store for writing, or names who does.

    On a local folder the kernel frees the lock with the process, however that ends. An object store has no such thing:
    there a killed writer leaves its lock behind, and `break_lock` removes it.
    """
    if disk.folder is None:
        yield from _object_lock(disk)
        return
    import fcntl

    handle = os.open(disk.folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(_taken(disk.url, os.pread(handle, 4096, 0), "wait for it, or stop it")) from None
        except OSError as error:
            raise StoreError(
                f"{disk.url}: this file system knows no locks ({error.strerror}), so two writers could not be kept"
                " apart; mount it with locks (NFS 4, Lustre with -o flock), or name another place"
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, _owner(), 0)
        # Left by a writer that was killed between writing a file and renaming it.
        for partial in disk.folder.rglob("*.partial"):
            partial.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)


def break_lock(disk: Disk) -> None:
    """Removes the lock object that a killed writer left in an object store; local locks need no breaking."""
    if disk.folder is None:
        disk.run(disk.group.store.delete(_NAME))


def _object_lock(disk: Disk) -> Iterator[None]:
    from zarr.core.buffer import default_buffer_prototype

    prototype = default_buffer_prototype()
    store = disk.group.store
    mine = _owner()
    disk.run(store.set_if_not_exists(_NAME, prototype.buffer.from_bytes(mine)))
    # Stores differ in whether that call is atomic: read back who won.
    found = disk.run(store.get(_NAME, prototype))
    held = b"" if found is None else bytes(found.to_bytes())
    if held != mine:
        raise StoreError(_taken(disk.url, held, "wait for it, or run `robboost bounds --break-lock` if it is dead"))
    try:
        yield
    finally:
        disk.run(store.delete(_NAME))


def _owner() -> bytes:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    unique = f"{os.getpid()}-{time.monotonic_ns()}"
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": started, "id": unique}).encode()


def _taken(url: str, raw: bytes, advice: str) -> str:
    try:
        owner: dict[str, Any] = json.loads(raw)
        who = f"process {owner['pid']} on {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return f"{url}: is being written by {who}; {advice}"
