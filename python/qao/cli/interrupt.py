"""Ctrl-C, also where it comes back as another error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside leaves this block as a KeyboardInterrupt, whatever became of it on its way.

    Python raises KeyboardInterrupt in whatever runs. C++ that has just asked Python something may drop it and report
    that the question failed; torch does. Outside the main thread, and where Ctrl-C is ignored, nothing changes.
    """
    pressed = False

    def press(*_: Any) -> NoReturn:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    signal.signal(signal.SIGINT, press)
    try:
        yield
    except Exception as error:
        if pressed:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.signal(signal.SIGINT, previous)
