"""What the command line answers before torch is imported, which takes seconds: --version, and Ctrl-C until then."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from ._version import __version__


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
    """Answers ``--version`` and ends; for other commands, makes Ctrl-C end without a traceback until they run."""
    if sys.argv[1:] == ["--version"]:
        print(f"qao {__version__}")
        raise SystemExit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _stop)


if _is_command():
    begin()
