"""Lets an interrupt (Ctrl-C) wait until a piece of bookkeeping is whole.

A step's forward cannot be interrupted anyway, since the interpreter only looks for signals between its own
instructions; what surrounds it is short, and half of it would leave pages held for ever.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT that arrives inside is handled at the end. Does nothing outside the main thread, which alone gets it."""
    handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(handler):
        yield
        return
    arrived: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: arrived.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if arrived:
            handler(*arrived[-1])
