"""What the command line answers before torch is imported, which takes seconds: --version, --help, errors, Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType


def _is_command() -> bool:
    """Whether ``qao ...`` or ``python -m qao ...`` imports the package, and not a program that uses it."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module
        return sys.orig_argv[-len(sys.argv) :][:1] == ["qao"]
    script = getattr(sys.modules.get("__main__"), "__file__", None) or ""
    return os.path.basename(script) == "qao" and os.path.basename(sys.argv[0]) == "qao"


def _stop(number: int, frame: FrameType | None) -> None:
    """Nothing is written yet that would have to be removed, and C++ that is being loaded takes no exception."""
    os.write(2, b"qao: stopped\n" if number == signal.SIGINT else b"qao: ended by SIGTERM\n")
    os._exit(128 + number)


def begin() -> None:
    """Makes Ctrl-C end without a traceback until a command runs, and ends where the command line needs no torch."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)
    from .cli import first_look

    status = first_look(sys.argv[1:])
    if status is not None:
        raise SystemExit(status)


if _is_command():
    begin()
