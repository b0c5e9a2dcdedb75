"""``qao doctor``: installation check. ``qao`` alone: version and environment."""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

from .._version import __version__
from ..quantization.report import table
from . import share
from .common import Output, command, counted

# Benchmark: one layer, with copies that together exceed a core's private caches, for few tokens and for many.
_SIZE, _TOKENS, _BYTES, _ROUNDS = 2048, (1, 256), 32 << 20, 3


def add(commands: Any) -> None:
    parser = command(
        commands,
        "doctor",
        run,
        "check every operator against its reference, and show which scheme is fastest here",
        "Shows versions, GPU, driver and instruction set, checks every operator on every device, and times a layer of\n"
        "every scheme against F.linear in bfloat16, which takes about two seconds per device.\n"
        "Include the output in bug reports. The exit status is 1 if a check fails.",
        "qao doctor\nqao doctor --json > doctor.json\nqao doctor --share report.json",
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--facts", action="store_true", help="show the installation only, like qao without a command")
    group.add_argument(
        "--share",
        nargs="?",
        const="-",
        metavar="FILE",
        help="also write an anonymous hardware report, in JSON, to a new FILE, or to stdout",
    )


def run(args: argparse.Namespace) -> int:
    from ..diagnostics import doctor

    args.json = args.json or args.share == "-"
    output = Output(args)
    facts = _facts()
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    for name, text in facts:
        lines = textwrap.wrap(text, max(width - 13, 20), break_long_words=False, break_on_hyphens=False)
        output.say(f"{name:<12} " + f"\n{' ' * 13}".join(lines if width else [text]))
    if args.facts:
        output.result({"facts": dict(facts)})
        return 0
    output.say()
    checks = []
    for check in doctor.checks():
        checks.append(check)
        output.say(
            "  ".join([f"{'ok' if check.problem is None else 'FAIL':<5} {check.name}", *filter(None, [check.problem])])
        )
    failed = sum(check.problem is not None for check in checks)
    output.say(f"\n{len(checks) - failed} of {len(checks)} checks passed")
    speeds = [] if failed else _speeds(output)
    result = {"facts": dict(facts), "checks": [check._asdict() for check in checks], "failed": failed}
    result["speeds"] = speeds
    if args.share:
        report = share.report(checks, speeds)
        output.say(f"\n{share.explanation(args.share)}")
        if args.share == "-":
            result = report
        else:
            with open(args.share, "x") as file:
                file.write(share.text(report))
    output.result(result)
    return 1 if failed else 0


def _speeds(output: Output) -> list[dict[str, Any]]:
    """Time a layer of every scheme on every device, for few tokens and for many."""
    import torch

    from ..schemes import SCHEMES
    from .timing import copies_of_layers, seconds_of_calls

    speeds = []
    for name in ("cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))):
        device = torch.device(name)
        words = [word for word, kind in SCHEMES.items() if device.type in kind.devices]
        layers = copies_of_layers(_SIZE, _SIZE, words, device, _BYTES)
        output.say(f"\n{name}: speedup over F.linear in bfloat16, {_SIZE}x{_SIZE}")
        cells = []
        for tokens in _TOKENS:
            x = torch.randn(tokens, _SIZE, device=device).bfloat16()
            times = seconds_of_calls(layers, x, _ROUNDS)
            ratios = {word: times["F.linear"] / times[word] for word in words}
            fastest = max(ratios, key=lambda word: ratios[word])
            speed = {"device": name, "m": tokens, "n": _SIZE, "k": _SIZE, "bf16_us": 1e6 * times["F.linear"]}
            speeds.append(speed | {"ratios": ratios, "fastest": fastest})
            cells.append((str(tokens), *(f"{ratios[word]:.2f}" for word in words), fastest))
        for line in table(("M", *words, "fastest"), cells):
            output.say(line)
    return speeds


def _facts() -> list[tuple[str, str]]:
    import torch

    from .._version import commit

    built_from = f"commit {commit()}" if commit() else None
    return [
        ("qao", ", ".join(filter(None, (__version__, built_from, str(Path(__file__).parents[1]))))),
        ("Python", f"{platform.python_version()}, {sys.executable}"),
        ("torch", f"{torch.__version__}, {counted(torch.get_num_threads(), 'CPU thread')}, CUDA {torch.version.cuda}"),
        *_gpus(),
        *_build(),
    ]


def _build() -> list[tuple[str, str]]:
    import torch

    from ..nn import cuda_build
    from ..ops.library import build_info, cpu_features

    build, cpu = build_info(), cpu_features()
    cuda = f"CUDA {build['cuda']} ({', '.join(build['archs'])})" if build["cuda"] else "no CUDA kernels"
    missing = cuda_build.problem()
    return [
        *([("WARNING", missing)] if missing else []),
        ("build", f"{cuda}, {build['compiler']}, torch {build['torch']}"),
        ("ABI", f"LibTorch stable ABI of torch {build['torch_target']}, loaded by torch {torch.__version__}"),
        ("CPU kernels", cpu["error"] or f"{cpu['selected']} (this CPU offers {cpu['detected']})"),
    ]


def _gpus() -> list[tuple[str, str]]:
    from ..diagnostics import hardware

    driver = hardware.driver()
    if driver is None:
        return [("GPU", "none that torch supports")]
    version = f"{driver.version}, " if driver.version else ""
    return [
        ("driver", f"{version}for CUDA {driver.cuda}"),
        *((f"GPU {i}", f"{gpu.name}, compute capability {gpu.capability}") for i, gpu in enumerate(hardware.gpus())),
    ]
