"""The command line: ``qao <command>``, or ``python -m qao <command>``. One module per command.

A command is a module with ``add(commands)``, which declares its arguments, and a function that runs it and returns the
exit status. Heavy modules (transformers, checkpoints) are imported when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from .._version import __version__
from . import bench, chat, convert, doctor, eval, generate, inspect, quantize, serve
from .common import Failure, one_line
from .interrupt import Terminated, interruptible
from .paths import check_paths

EXIT_CODES = """\
exit status:
  0    done
  1    failed, or problems were found
  2    wrong usage
  130  stopped with Ctrl-C
  143  ended by SIGTERM (129: by SIGHUP)
"""


class _Help(argparse.HelpFormatter):
    """Help text that fits the terminal: paragraphs wrap, and indented lines stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for kept, block in itertools.groupby(text.splitlines(), lambda line: line[:1] in ("", " ")):
            part = list(block)
            lines += part if kept else textwrap.wrap(" ".join(part), width)
        return "\n".join(indent + line for line in lines)


class _Parser(argparse.ArgumentParser):
    """Argument parser with one-line errors, and the exit codes at the end of every help text."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", _Help)
        options["epilog"] = "\n\n".join(filter(None, [options.get("epilog"), EXIT_CODES]))
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"qao: error: {message} (see {self.prog} --help)\n")


def parser() -> argparse.ArgumentParser:
    top = _Parser(
        prog="qao",
        description="Quantized linear layers for PyTorch. Without a command, shows what this installation supports.",
    )
    top.add_argument("--version", action="version", version=f"qao {__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", parser_class=_Parser)
    for module in (quantize, convert, inspect, chat, generate, serve, eval, bench, doctor):
        module.add(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; ``arguments``: without the program's name, None: sys.argv."""
    words = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        args = _parse(words)
        with _warnings(args.quiet), interruptible():
            status: int = args.run(args)
        return status

    return _status(run, words) or 0


def first_look(arguments: Sequence[str]) -> int | None:
    """Handle help, usage errors and missing paths without torch.

    Returns the exit status; None if the command has to run.
    """

    def look() -> None:
        _parse(arguments)

    return _status(look, arguments)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    args = parser().parse_args(arguments or ["doctor", "--facts"])
    check_paths(args)
    return args


def _status(step: Callable[[], int | None], arguments: Sequence[str]) -> int | None:
    """The result of ``step``, or the exit status for its exception, which is printed."""
    try:
        try:
            status = step()
        except SystemExit as stop:  # from argparse
            status = stop.code if isinstance(stop.code, int) else 0
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("qao: stopped", file=sys.stderr)
        return 130
    except Terminated as end:
        print(f"qao: ended by {end}", file=sys.stderr)
        return 128 + end.number
    except BrokenPipeError:  # the reader closed the pipe; avoid Python's complaint at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if "--debug" in arguments:
            raise
        print(f"qao: error: {one_line(error)}", file=sys.stderr)
        return error.status if isinstance(error, Failure) else 1


@contextlib.contextmanager
def _warnings(quiet: bool) -> Iterator[None]:
    """Print warnings as single lines without the source location."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning) and not quiet:
            print(f"qao: warning: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
