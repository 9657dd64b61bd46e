"""Files that stay open while a store is streamed: the kernel reads ahead only where a handle is read in order."""

from __future__ import annotations

import os
import threading
from pathlib import Path

__all__ = ["OpenFiles"]


class OpenFiles:
    """Handles by path, for any number of threads that read at positions of their own."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        self._lock = threading.Lock()

    def handle(self, path: Path) -> int:
        """A handle for reading, opened at the first call."""
        with self._lock:
            if path not in self._held:
                self._held[path] = os.open(path, os.O_RDONLY)
            return self._held[path]

    def close(self) -> None:
        """Closes all of them; nobody may be reading any more."""
        with self._lock:
            while self._held:
                os.close(self._held.popitem()[1])
