"""What a run did and cost: structured log lines, where the time went, and peak memory."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

import torch

__all__ = ["JsonLines", "Profile", "Resources", "event", "log_json", "profiled", "resources", "span"]

LOGGER = logging.getLogger("robboost")


def event(name: str, values: Mapping[str, Any]) -> None:
    """One structured log line at level INFO: a name, and values that JSON knows."""
    if LOGGER.isEnabledFor(logging.INFO):
        text = " ".join(f"{key}={value}" for key, value in values.items())
        LOGGER.info("%s %s", name, text, extra={"event": name, "values": dict(values)})


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, event, and its values."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": getattr(record, "event", record.name),
        }
        values = getattr(record, "values", None)
        line.update(values if values is not None else {"message": record.getMessage()})
        return json.dumps(line, default=str)


@contextmanager
def log_json(stream: IO[str]) -> Iterator[None]:
    """Writes the events of the block to a stream as JSON lines."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines())
    before = LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(before)


@dataclass
class Profile:
    """Seconds and calls of each named span; spans of several threads add up, and may exceed the wall clock."""

    wall: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, name: str, seconds: float) -> None:
        with self._lock:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self.calls[name] = self.calls.get(name, 0) + 1

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        spans = {name: {"seconds": self.seconds[name], "calls": self.calls[name]} for name in self.seconds}
        return {"wall": self.wall, "spans": spans}

    def __str__(self) -> str:
        lines = [f"{'where the time went':<32} {'seconds':>9} {'share':>6} {'calls':>8}"]
        for name, seconds in sorted(self.seconds.items(), key=lambda item: -item[1]):
            share = 100 * seconds / self.wall if self.wall > 0 else 0.0
            lines.append(f"{name:<32} {seconds:>9.3f} {share:>5.1f}% {self.calls[name]:>8}")
        return "\n".join([*lines, f"{'wall clock':<32} {self.wall:>9.3f}"])


_active: list[Profile] = []


@contextmanager
def profiled() -> Iterator[Profile]:
    """Collects the spans of the block, from all threads."""
    profile = Profile()
    began = time.perf_counter()
    _active.append(profile)
    try:
        yield profile
    finally:
        _active.remove(profile)
        profile.wall = time.perf_counter() - began


@contextmanager
def span(name: str) -> Iterator[None]:
    """Counts the block's time under `name` in every profile that is open; nearly free when none is."""
    if not _active:
        yield
        return
    began = time.perf_counter()
    try:
        yield
    finally:
        passed = time.perf_counter() - began
        for profile in tuple(_active):
            profile.add(name, passed)


@dataclass(frozen=True)
class Resources:
    """Peak memory of this process so far, in bytes; `gpu` is None without a GPU."""

    memory: int
    gpu: int | None

    def to_dict(self) -> dict[str, Any]:
        return {"peak_memory": self.memory, "peak_gpu_memory": self.gpu}


def resources() -> Resources:
    """Peak memory of this process since it started (and of PyTorch on the GPUs it used)."""
    gpu = None
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        gpu = sum(torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count()))
    return Resources(_peak_rss(), gpu)


def _peak_rss() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kilobytes on Linux, bytes on macOS.
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024
