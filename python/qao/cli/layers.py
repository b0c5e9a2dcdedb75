"""``qao eval --layers``: effect of quantizing each layer alone on a model's predictions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..diagnostics.sensitivity import LayerCost, blocks, by_layer
from ..quantization.dequantize import dequantize_
from ..quantization.report import table
from .common import Failure, Output, counted
from .model import load_model

_FORMATS = (".png", ".svg", ".pdf")


def run(args: argparse.Namespace, output: Output, scheme: Any, tokens: list[int], count: int) -> int:
    from ..diagnostics.perplexity import perplexity

    if args.plot is not None:
        _check_plot(args)
    model: Any = dequantize_(load_model(args, args.model))
    whole = perplexity(model, tokens, window=args.window, num_bytes=count)
    costs = by_layer(model, tokens, scheme, window=args.window, progress=not args.quiet)
    ranked = sorted(costs, key=lambda cost: -cost.divergence)
    total = sum(cost.divergence for cost in costs)
    header = ("layer", "shape", "divergence, nats", "of all", "loss, nats", "error", "scheme")
    several = len({cost.scheme for cost in costs}) > 1
    output.say(
        f"{args.model}: perplexity {whole.perplexity:.4f}, {whole.bits_per_byte:.4f} bits per byte in float; one "
        f"layer at a time under {scheme}, {counted(len(whole.window_tokens), 'window')}"
    )
    output.say("\n".join(table(header, [_cells(cost, total, several) for cost in ranked[: args.worst]])))
    if len(ranked) > args.worst:
        rest = sum(cost.divergence for cost in ranked[args.worst :])
        output.say(
            f"and {len(ranked) - args.worst} more with {rest / total if total else 0:.1%} of the sum {total:.4f}"
        )
    if args.plot is not None:
        draw(costs, args.plot, str(scheme))
        output.say(str(args.plot))
    facts = {"tokens": len(tokens) - 1, "window": args.window, "scheme": scheme.to_dict()}
    facts |= {"perplexity": whole.perplexity, "bits_per_byte": whole.bits_per_byte}
    output.result({**facts, "layers": [asdict(cost) for cost in costs]})
    return 0


def _cells(cost: LayerCost, total: float, several: bool) -> tuple[str, ...]:
    return (
        cost.name,
        "x".join(map(str, cost.shape)),
        f"{cost.divergence:.5f} ± {cost.divergence_error:.5f}",
        f"{cost.divergence / total if total else 0:.1%}",
        f"{cost.nats_per_token:+.5f} ± {cost.standard_error:.5f}",
        "-" if cost.relative_error is None else f"{cost.relative_error:.4f}",
        cost.scheme if several else "-",  # one for all is above the table
    )


def _check_plot(args: argparse.Namespace) -> None:
    if args.plot.suffix not in _FORMATS:
        args.parser.error(f"--plot {args.plot}: must end in {', '.join(_FORMATS)}")
    if not args.plot.resolve().parent.is_dir():
        raise Failure(f"--plot {args.plot}: no such directory")
    try:
        import matplotlib  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
    except ImportError:
        raise Failure("--plot needs matplotlib: pip install matplotlib") from None


def draw(costs: Sequence[LayerCost], path: Path, title: str) -> None:
    """Plot divergence over the block number with standard errors, one line per type of layer."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # type: ignore[import-not-found,unused-ignore]
    from matplotlib.figure import Figure  # type: ignore[import-not-found,unused-ignore]

    figure: Any = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, layers in blocks(costs):
        numbers = [number for number, _ in layers]
        values = [cost.divergence for _, cost in layers]
        # A standard error is NaN for a single window.
        errors = [cost.divergence_error if cost.divergence_error == cost.divergence_error else 0 for _, cost in layers]
        axes.errorbar(numbers, values, errors, marker="o", markersize=3, linewidth=1, label=kind)
    if any(cost.divergence > 0 for cost in costs):
        axes.set_yscale("log", nonpositive="clip")
    axes.set_xlabel("block")
    axes.set_ylabel("divergence, nats per token")
    axes.set_title(f"One layer at a time under {title}")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
