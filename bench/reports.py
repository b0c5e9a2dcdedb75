"""Contributed reports: the check that ``bench accept`` runs before one enters bench/results/contributed.

A report comes from a stranger. The check reads at most SIZE bytes, allows the keys below and no other, and limits every
text to a few plain characters, which cannot be Markdown or HTML. It proves the form of a report, not its truth.
Imports without torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import result_files
from .markdown import table
from .meta import RESULTS

FOLDER = RESULTS / "contributed"
SIZE = 32 << 10
Check = Callable[[Any, str], None]  # of a value and its place in the report; raises Rejected


class Rejected(ValueError):
    """Why a report is not accepted."""


def text(pattern: str) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise Rejected(f"{place} must be text that matches {pattern}, not {_shown(value)}")

    return check


def number(low: float, high: float, kinds: tuple[type, ...] = (int, float)) -> Check:
    def check(value: Any, place: str) -> None:
        if type(value) not in kinds or not low <= value <= high:  # type(True) is bool
            raise Rejected(f"{place} must be a number from {low:g} to {high:g}, not {_shown(value)}")

    return check


def whole(low: int, high: int) -> Check:
    return number(low, high, (int,))


def several(one: Check, most: int) -> Check:
    def check(value: Any, place: str) -> None:
        if not isinstance(value, list) or len(value) > most:
            raise Rejected(f"{place} must be a list of at most {most} entries, not {_shown(value)}")
        for index, entry in enumerate(value):
            one(entry, f"{place}[{index}]")

    return check


def optional(one: Check) -> Check:
    def check(value: Any, place: str) -> None:
        if value is not None:
            one(value, place)

    return check


def fields(may: Mapping[str, Check] | None = None, /, **checks: Check) -> Check:
    """An object with these keys, perhaps those of ``may``, and no other."""
    known = {**checks, **(may or {})}

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict) or not checks.keys() <= value.keys() <= known.keys():
            raise Rejected(f"{place} must be an object with the keys {', '.join(checks)}, not {_shown(value)}")
        for key, entry in value.items():
            known[key](entry, f"{place}.{key}")

    return check


def by_name(name: Check, one: Check, most: int) -> Check:
    """An object with keys of this form."""

    def check(value: Any, place: str) -> None:
        if not isinstance(value, dict) or len(value) > most:
            raise Rejected(f"{place} must be an object with at most {most} keys, not {_shown(value)}")
        for key, entry in value.items():
            name(key, f"a key of {place}")
            one(entry, f"{place}.{key}")

    return check


VERSION = text(r"\d[0-9A-Za-z.+]{0,39}")
NAME = text(r"[A-Za-z0-9 ()@.,+/_:-]{1,80}")  # of a product or a check
WORD = text(r"[a-z0-9_]{1,40}")  # of a scheme, a feature or a level of kernels
LABEL = text(r"[A-Za-z0-9_.-]{1,40}")  # of a package or an environment variable
HARDWARE = fields(
    schema=text("qao hardware report"),
    version=whole(1, 1),
    qao=VERSION,
    commit=optional(text(r"[0-9a-f]{7,40}(-dirty)?")),
    python=VERSION,
    torch=VERSION,
    os=text(r"[A-Za-z]{1,20}"),
    machine=WORD,
    cpu=fields(model=NAME, features=several(WORD, 64), kernels=optional(WORD), threads=whole(1, 4096)),
    cuda=fields(
        torch=optional(VERSION), qao=optional(VERSION), driver=optional(VERSION), driver_cuda=optional(VERSION)
    ),
    gpus=several(fields(name=NAME, capability=VERSION, sms=whole(1, 4096), gib=whole(1, 4096)), 16),
    checks=fields(passed=whole(0, 100_000), failed=several(NAME, 2000)),
    speeds=several(
        fields(
            device=text(r"cpu|cuda:\d{1,2}"),
            **dict.fromkeys(("m", "n", "k"), whole(1, 1 << 20)),
            bf16_us=number(1e-3, 1e9),
            ratios=by_name(WORD, number(1e-6, 1e6), 64),
        ),
        64,
    ),
)


ACCURACY = fields(
    meta=fields(
        {
            **dict.fromkeys(("threads", "sms"), whole(1, 4096)),
            **{"kernels": WORD, "l2_bytes": whole(1, 1 << 40), "cuda": VERSION, "held_by": by_name(LABEL, LABEL, 8)},
        },
        **dict.fromkeys(("text", "model"), NAME),
        **dict.fromkeys(("source_hash", "tokens_sha256"), text(r"[0-9a-f]{64}")),
        **dict.fromkeys(("torch", "python"), VERSION),
        **dict.fromkeys(("windows", "window"), whole(1, 1 << 20)),
        device=text(r"[A-Za-z0-9 ()@.,+/_:-]{1,160}"),
        peers=by_name(LABEL, VERSION, 16),
        date=text(r"\d{4}-\d\d-\d\d"),
    ),
    rows=several(
        fields(
            {"tasks": by_name(WORD, number(0, 1), 64)},
            method=NAME,
            bytes=whole(1, 1 << 45),
            perplexity=number(1, 1e30),
            same_top=number(0, 1),
            **dict.fromkeys(("nats_above", "nats_error", "divergence", "divergence_error"), number(-1e3, 1e3)),
        ),
        100,
    ),
)


def read(path: Path) -> dict[str, Any]:
    """The content of a hardware report (.json) or of results of ``bench accuracy`` (.csv).

    Raises:
        Rejected: the file is neither.
    """
    if path.is_symlink() or not path.is_file():
        raise Rejected(f"{path}: not a file")
    with path.open("rb") as file:
        content = file.read(SIZE + 1)
    if len(content) > SIZE:
        raise Rejected(f"{path}: more than {SIZE} bytes")
    try:
        return _results(content.decode()) if path.suffix == ".csv" else _hardware(content.decode())
    except Exception as error:  # the parsers raise many types for files that they did not write
        raise Rejected(f"{path}: {error}") from None


def _hardware(content: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(content, object_pairs_hook=_object, parse_constant=_no_constant)
    HARDWARE(report, "report")
    return report


def _results(content: str) -> dict[str, Any]:
    results = result_files.loads(content)
    for key in ("load", "command"):  # of one run; a command holds paths
        results["meta"].pop(key, None)
    ACCURACY(results, "results")
    return results


def accept(path: Path, folder: Path) -> Path:
    """Write the report at ``path`` into ``folder`` under a name made of its content. Raises as ``read``."""
    content = read(path)
    if path.suffix == ".csv":
        kind, canonical = "accuracy", result_files.dumps(content)
    else:
        kind, canonical = "hardware", json.dumps(content, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
    target = folder / f"{kind}-{digest}{'.csv' if kind == 'accuracy' else '.json'}"
    if target.exists():
        raise Rejected(f"{path}: {target} holds the same report")
    folder.mkdir(parents=True, exist_ok=True)
    target.write_text(canonical)
    return target


def accept_all(paths: Sequence[Path], folder: Path) -> int:
    """Accept each report, and print where it is or why it is rejected. Returns the exit status."""
    rejected = 0
    for path in paths:
        try:
            print(f"accepted {accept(path, folder)}")
        except Rejected as why:
            rejected += 1
            print(f"rejected {why}")
    return 1 if rejected else 0


def render(folder: Path) -> str:
    """Markdown of all accepted hardware reports: a line for each device."""
    lines = [line for path in sorted(folder.glob("*.json")) for line in _lines(read(path))]
    header = ["device", "kernels", "checks", "torch", "qao", "M", "fastest", "× bf16"]
    return table(header, sorted(lines)) if lines else "No report yet."


def _lines(report: dict[str, Any]) -> Iterator[list[str]]:
    cpu, checks = report["cpu"], report["checks"]
    counts = f"{checks['passed']} of {checks['passed'] + len(checks['failed'])}"
    devices = {"cpu": (cpu["model"], cpu["kernels"] or "unknown")}
    devices |= {f"cuda:{i}": (gpu["name"], f"sm {gpu['capability']}") for i, gpu in enumerate(report["gpus"])}
    for device, (name, kernels) in devices.items():
        facts = [name, kernels, counts, report["torch"], report["qao"]]
        speeds = [speed for speed in report["speeds"] if speed["device"] == device and speed["ratios"]]
        for speed in speeds:
            word, ratio = max(speed["ratios"].items(), key=lambda item: item[1])
            yield [*facts, str(speed["m"]), word, f"{ratio:.2f}"]
        if not speeds:
            yield [*facts, "", "", ""]


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Rejected(f"a key appears twice in {_shown(found)}")
    return found


def _no_constant(name: str) -> Any:
    raise Rejected(f"{name} is not a number")


def _shown(value: Any) -> str:
    """The beginning of a value, with control characters escaped."""
    shown = ascii(list(value) if isinstance(value, dict) else value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"
