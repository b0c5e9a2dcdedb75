"""Shared by all commands: options, errors, output for people and for programs, progress."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._words import SCHEMES, word_hint
from .._words import counted as counted

if TYPE_CHECKING:
    import torch
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ..schemes import Scheme

DTYPES = ("float32", "float16", "bfloat16")


class Failure(Exception):
    """An error fully explained by its message; ``status`` is the exit status."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks, with the type if the message alone is unclear."""
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    text = " ".join(str(error).split())
    return text if isinstance(error, (Failure, ValueError, OSError)) and text else f"{type(error).__name__}: {text}"


def command(
    commands: Any,
    name: str,
    run: Callable[[argparse.Namespace], int],
    summary: str,
    description: str = "",
    examples: str = "",
    json: bool = True,
) -> argparse.ArgumentParser:
    """Create a subcommand with the options common to all commands."""
    about = f"{summary[0].upper()}{summary[1:]}.\n\n{description.strip()}"
    epilog = "examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()) if examples else None
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=about, epilog=epilog)
    parser.set_defaults(run=run, parser=parser, json=False)
    if json:
        parser.add_argument("--json", action="store_true", help="JSON on stdout; text for people goes to stderr")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, no warnings")
    parser.add_argument("--debug", action="store_true", help="errors with their traceback")
    return parser


class Output:
    """Text for people on stdout, or on stderr if stdout is for a program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._json: bool = args.json
        self._stream = sys.stderr if args.json else sys.stdout

    def say(self, text: str = "") -> None:
        print(text, file=self._stream, flush=True)

    def write(self, text: str) -> None:
        """Write part of a line."""
        self._stream.write(text)
        self._stream.flush()

    def result(self, content: dict[str, Any]) -> None:
        """Print the result as JSON; without --json, nothing."""
        if self._json:
            print(json.dumps(content, indent=2))


def progress(args: argparse.Namespace, total: int, name: str, unit: str = "B") -> tqdm[Any]:
    """A progress bar over bytes, or ``unit``; none without a terminal."""
    from tqdm import tqdm

    off = args.quiet or not sys.stderr.isatty()
    return tqdm(total=total, desc=name, unit=unit, unit_scale=unit == "B", unit_divisor=1024, disable=off)


def memory() -> dict[str, int]:
    """Current and peak memory of this process in bytes, also on the GPU."""
    import torch

    sizes = {"now": 0, "peak": 0}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            sizes["now" if name == "VmRSS" else "peak"] = int(value.split()[0]) * 1024
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        sizes["gpu_peak"] = torch.cuda.max_memory_allocated()
    return sizes


def size(count: float) -> str:
    """Bytes for people: "98.3 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def add_scheme_options(parser: argparse.ArgumentParser, required: bool) -> None:
    group = parser.add_argument_group("scheme")
    group.add_argument("--scheme", type=scheme_word, metavar="SCHEME", required=required, help=_SCHEME_HELP)
    group.add_argument(
        "--group-size", type=int, metavar="G", help="int4 weights: 32, 64, 128 (default), 256, or -1 (a whole row)"
    )
    group.add_argument("--symmetric", action="store_true", help="int4 weights without zero points")
    group.add_argument(
        "--granularity", choices=["row", "tensor", "block"], help="fp8 weights: the elements that share a scale"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other field of the scheme (docs/quantize.md); repeatable",
    )


def scheme_of(args: argparse.Namespace) -> Scheme:
    """The scheme that the options describe. Inconsistent options are usage errors."""
    from .. import schemes

    content: dict[str, Any] = {"scheme": args.scheme}
    if args.group_size is not None:
        content["group_size"] = args.group_size
    if args.symmetric:
        content["symmetric"] = True
    if args.granularity is not None:
        content["granularity"] = args.granularity
    for text in args.set:
        name, found, value = text.partition("=")
        if not found:
            args.parser.error(f"--set {text}: must be FIELD=VALUE, such as clip_search=false")
        content[name] = _value(value)
    known = [field.name for field in fields(schemes.SCHEMES[args.scheme])]  # type: ignore[arg-type]
    if unknown := sorted(content.keys() - {"scheme", *known}):
        args.parser.error(f"{args.scheme} has no {_options(unknown)}; it has {_options(known)}")
    try:
        return schemes.scheme_from_dict(content)
    except (ValueError, TypeError) as error:
        args.parser.error(one_line(error))
        raise  # unreachable: error() exits


def _options(fields: list[str]) -> str:
    """Fields of a scheme as options of the command line."""
    own = {"group_size", "budget_bits", "symmetric", "granularity"}
    return ", ".join(f"--{name.replace('_', '-')}" if name in own else f"--set {name}=VALUE" for name in fields)


_SCHEME_HELP = f"weights, or activations_weights: {', '.join(SCHEMES)}"


def scheme_word(text: str) -> str:
    """A word of ``SCHEMES``. For a word of another library, the error names its equivalent."""
    if text in SCHEMES:
        return text
    found = word_hint(text)
    said = f"; the equivalent in qao is {found}" if found else ""
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(SCHEMES)}){said}")


def _value(text: str) -> Any:
    """Parse true, false, null or a number; other text stays text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def device_of(args: argparse.Namespace, default: str = "cpu") -> torch.device:
    """The checked --device, or ``default``."""
    import torch

    try:
        device = torch.device(args.device or default)
    except RuntimeError:
        args.parser.error(f"--device {args.device}: no such device; use cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Failure(f"--device {args.device}: torch {torch.__version__} finds no GPU; run qao doctor")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Failure(f"--device {args.device}: there are {torch.cuda.device_count()} GPUs, starting at cuda:0")
    return device


def dtype_of(args: argparse.Namespace) -> torch.dtype | None:
    """The dtype of --dtype."""
    import torch

    dtype: torch.dtype | None = getattr(torch, args.dtype) if args.dtype else None
    return dtype


def read_text(file: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Failure(f"{file}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of commands that read a model, named like the arguments of ``from_pretrained``."""
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hugging Face hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="allow code from the model's directory to run")


def local_path(path: str | Path, revision: str | None = None) -> Path:
    """A file or directory. A model on the Hugging Face hub is downloaded with its tokenizer, code and other files.

    Raises:
        CheckpointError: it does not exist.
    """
    from ..checkpoints.hub import local_copy

    return local_copy(path, everything=True, revision=revision)
