"""Ctrl-C that gets through, also where a library swallowed it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["insisting"]


@contextmanager
def insisting(*, again: float = 5.0) -> Iterator[None]:
    """Raises KeyboardInterrupt on SIGINT, and again every `again` seconds until the block has ended.

    Python drops an exception that is raised in a destructor or a callback: a Ctrl-C at such an instant was lost.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        signal.setitimer(signal.ITIMER_REAL, again)
        raise KeyboardInterrupt

    # Jobs in the background have it ignored, and other threads cannot have handlers.
    ours = threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer")
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGALRM, before)
