"""Ctrl-C, SIGTERM and SIGHUP, also where they come back as another error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn


class Terminated(BaseException):
    """A signal that asks the process to end: half-written files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C inside leaves this block as a KeyboardInterrupt, SIGTERM and SIGHUP as Terminated, whatever became of
    them on their way.

    Python raises the exception in whatever runs. C++ that has just asked Python something may drop it and report that
    the question failed; torch does. Outside the main thread, and where a signal is ignored, nothing changes.
    """
    came: list[BaseException] = []

    def press(number: int, *_: Any) -> NoReturn:
        came.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        raise came[-1]

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if not callable(previous[signal.SIGINT]):  # ignored, as a shell does for jobs in the background
        del previous[signal.SIGINT]
    previous = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    for number in previous:
        signal.signal(number, press)
    try:
        yield
    except Exception as error:
        if came:
            raise came[-1] from error
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
