"""Command-line handling before the slow import of torch: --version, --help, errors, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _is_command() -> bool:
    """Whether ``qao ...`` or ``python -m qao ...`` imports the package, not a program that uses it."""
    if sys.argv[:1] == ["-m"]:  # while Python looks up the module
        return sys.orig_argv[-len(sys.argv) :][:1] == ["qao"]
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.basename(script) == "qao" and os.path.basename(sys.argv[0]) == "qao"


def _stop(number: int, frame: FrameType | None) -> None:
    """Exit at once: no written files need cleanup yet, and C++ that is being loaded cannot take an exception."""
    os.write(2, b"qao: stopped\n" if number == signal.SIGINT else b"qao: ended by SIGTERM\n")
    os._exit(128 + number)


def begin() -> None:
    """Exit on Ctrl-C without a traceback until a command runs, and answer command lines that do not need torch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    from .cli import first_look

    status = first_look(sys.argv[1:])
    if status is not None:
        raise SystemExit(status)


if _is_command():
    begin()
