"""Handling of Ctrl-C, SIGTERM and SIGHUP, even if they resurface as another error."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any, NoReturn


class Terminated(BaseException):
    """A signal that ends the process. Partial files are removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Leave the block with KeyboardInterrupt after Ctrl-C and with Terminated after SIGTERM or SIGHUP.

    Python raises the exception in the code that runs. C++ that has just called Python may drop it and report a failed
    call; torch does. Outside the main thread, and for ignored signals, nothing changes.
    """
    came: list[BaseException] = []

    def press(number: int, *_: Any) -> NoReturn:
        came.append(KeyboardInterrupt() if number == signal.SIGINT else Terminated(number))
        raise came[-1]

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if not callable(previous[signal.SIGINT]):  # ignored, as in a shell's background jobs
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
