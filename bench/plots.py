"""Plots of results files: the site build draws all of them, ``python -m bench plots`` those of README.

Needs matplotlib.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .generate import WAYS
from .llama import BASELINE, case_of, title_of
from .meta import RESULTS, ROOT
from .ratios import BEST_PEER, BF16, mean_ratio
from .result_files import read
from .schemes import SCHEMES
from .serving.tables import speedups

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = ROOT / "docs" / "plots"
DECODERS = "llama"  # bench/llama.py
UNMODIFIED = "generate"  # bench/generate.py
ENGINES = "vllm", "sglang"  # bench/serving
WORDS = (*SCHEMES, DECODERS, UNMODIFIED, *ENGINES)  # results files with plots
TRACKED = (("h200", UNMODIFIED), ("h200", "vllm"))  # in FOLDER
_COLUMNS = 3
_OURS, _BF16, _FLOOR = "#0b5fb0", "#222222", "#999999"
_STYLE = {
    "svg.hashsalt": "qao",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_PEERS = ("#d1495b", "#edae49", "#66a182", "#8d6a9f", "#c97b2d", "#3aa6b9", "#7a7a3c", "#b0578d")


def name_of(device: str, word: str) -> str:
    return f"{device}-{word}.svg"


def draw_tracked() -> None:
    """Draws the pictures that the repository holds."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for device, word in TRACKED:
        target = FOLDER / name_of(device, word)
        draw_file(RESULTS / device / f"{word}.csv", target)
        print(f"wrote {target.relative_to(ROOT)}")


def draw_file(path: Path, target: Path) -> None:
    """Plot a results file of one of WORDS."""
    if path.stem == DECODERS:
        draw_decoders(read(path), target)
    elif path.stem == UNMODIFIED:
        draw_unmodified(read(path), target)
    elif path.stem in ENGINES:
        draw_served(read(path), target)
    else:
        draw(path.stem, read(path), target)


@contextmanager
def _panels(target: Path, lines: int, columns: int, width: float, height: float) -> Iterator[tuple[Figure, list[Axes]]]:
    """A grid of panels, sizes in inches, in reading order; written to ``target`` at the end."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context(_STYLE):
        figure, grid = pyplot.subplots(lines, columns, figsize=(width * columns, height * lines), squeeze=False)
        yield figure, list(grid.flat)
        figure.tight_layout()
        figure.savefig(target, metadata={"Date": None})
        pyplot.close(figure)


def draw_decoders(results: dict[str, Any], target: Path) -> None:
    """One panel per case of the first model, compiled: one bar per scheme, tokens per second."""
    first = results["rows"][0]
    rows = [row for row in results["rows"] if (row["model"], row["variant"]) == (first["model"], first["variant"])]
    cases = list(dict.fromkeys(map(case_of, rows)))
    with _panels(target, 1, len(cases), 2.0, 2.0) as (figure, panels):
        for panel, case in zip(panels, cases, strict=True):
            speeds = {row["scheme"]: row["compiled_tokens_s"] for row in rows if case_of(row) == case}
            _bars(panel, title_of(case), speeds, panel is panels[0])
        figure.suptitle(f"{first['model']}, tokens a second on one {results['meta']['device']}")


def draw_unmodified(results: dict[str, Any], target: Path) -> None:
    """One panel per way of decoding of the first model, on one scale: one bar per scheme, tokens per second."""
    first = results["rows"][0]
    rows = [row for row in results["rows"] if (row["model"], row["batch"]) == (first["model"], first["batch"])]
    rows = [row for row in rows if row["way"] != "prompt"]  # a hundred times as many
    ways = [way for way in WAYS if any(row["way"] == way for row in rows)]
    with _panels(target, 1, len(ways), 3.2, 1.6) as (figure, panels):
        for panel, way in zip(panels, ways, strict=True):
            speeds = {row["scheme"]: row["tokens_s"] for row in rows if row["way"] == way}
            _bars(panel, WAYS[way].replace("`", "").replace("(c", "(\nc"), speeds, panel is panels[0])
            panel.set_xlim(0, 1.25 * max(row["tokens_s"] for row in rows))
        about = f"an unmodified transformers model, batch {first['batch']}"
        figure.suptitle(f"{first['model']}, {about}: tokens a second on one {results['meta']['device']}")


def draw_served(results: dict[str, Any], target: Path) -> None:
    """One panel per model: tokens per second of decoding, times those of the engine's own kernels, by requests."""
    found = speedups(results)
    with _panels(target, 1, len(found), 3.4, 2.6) as (figure, panels):
        for panel, (model, lines) in zip(panels, found.items(), strict=True):
            for (checkpoint, points), color in zip(lines.items(), (_OURS, *_PEERS), strict=False):
                panel.plot(*zip(*points, strict=True), color=color, linewidth=1.6, marker="o", markersize=3)
                panel.plot([], [], color=color, label=checkpoint)
            panel.axhline(1, color=_FLOOR, linewidth=1)
            panel.set(xscale="log", title=model, ylim=(0.8, None))
            _tokens_axis(panel, sorted({requests for points in lines.values() for requests, _ in points}))
            panel.set_xlabel("requests at once")
            panel.legend(frameon=False)
        panels[0].set_ylabel("times faster with qao")
        figure.suptitle(f"Decoding on one {results['meta']['device']}")


def _bars(panel: Axes, title: str, speeds: dict[str, float], labels: bool) -> None:
    colors = [_BF16 if word == BASELINE else _OURS for word in speeds]
    bars = panel.barh(list(speeds), list(speeds.values()), color=colors)
    panel.bar_label(bars, fmt="%.0f", padding=2)
    panel.invert_yaxis()
    panel.set_title(title)
    panel.spines[["bottom", "left"]].set_visible(False)
    panel.tick_params(length=0, labelleft=labels, labelbottom=False)
    panel.margins(x=0.25)


def draw(word: str, results: dict[str, Any], target: Path) -> None:
    """One panel per layer, time against tokens; the last panel compares over all layers."""
    rows = results["rows"]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    peers = sorted({peer for row in rows for peer in row["peers"]})
    colors = {peer: _PEERS[i % len(_PEERS)] for i, peer in enumerate(peers)}
    lines = math.ceil((len(layers) + 1) / _COLUMNS)
    with _panels(target, lines, _COLUMNS, 3.4, 2.6) as (figure, panels):
        for panel, name in zip(panels, layers, strict=False):
            _layer(panel, word, [row for row in rows if row["layer"] == name], colors)
        _ratios(panels[len(layers)], rows)
        for panel in panels[len(layers) + 1 :]:
            panel.set_visible(False)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False)
        figure.suptitle(" ")  # room for the legend


def _layer(panel: Axes, word: str, rows: list[dict[str, Any]], colors: dict[str, str]) -> None:
    tokens = [row["M"] for row in rows]
    panel.plot(tokens, [row["us"] for row in rows], color=_OURS, linewidth=2.2, marker="o", markersize=3, label=word)
    panel.plot(tokens, [row["bf16_us"] for row in rows], color=_BF16, linewidth=1.2, label="bf16")
    for peer, color in colors.items():
        points = [(row["M"], row["peers"][peer]) for row in rows if peer in row["peers"]]
        # A peer without a cell in this layer still gets a legend entry.
        panel.plot(*(zip(*points, strict=True) if points else ([], [])), color=color, linewidth=1.2, label=peer)
    panel.plot(tokens, [row["floor_us"] for row in rows], color=_FLOOR, linestyle="--", linewidth=1, label="roofline")
    panel.set(xscale="log", yscale="log", title=f"{rows[0]['layer']}: N = {rows[0]['N']}, K = {rows[0]['K']}")
    panel.set(ylabel="µs a call")
    _tokens_axis(panel, tokens)


def _ratios(panel: Axes, rows: list[dict[str, Any]]) -> None:
    """Geometric means over the layers: speedup over bf16, and over the best peer of each cell."""
    tokens = sorted({row["M"] for row in rows})
    for against, color, end in ((BF16, _BF16, 0), (BEST_PEER, _PEERS[0], -1)):
        means = {m: mean_ratio([row for row in rows if row["M"] == m], against) for m in tokens}
        known = [(m, value) for m, value in means.items() if value is not None]
        if known:
            panel.plot(*zip(*known, strict=True), color=color, linewidth=1.6, marker="o", markersize=3)
            side = {"ha": "right" if end else "left", "color": color}
            panel.annotate(against, known[end], textcoords="offset points", xytext=(0, 5), **side)
    panel.axhline(1, color=_FLOOR, linewidth=1)
    panel.set(xscale="log", yscale="log", title="all layers", ylabel="times faster, geometric mean")
    low, high = panel.get_ylim()
    ticks = [2.0**i for i in range(-3, 8) if low <= 2.0**i <= high]
    panel.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    _tokens_axis(panel, tokens)


def _tokens_axis(panel: Axes, tokens: list[int]) -> None:
    panel.set_xticks(tokens, [str(m) for m in tokens], rotation=60)
    panel.minorticks_off()
    panel.grid(alpha=0.25, linewidth=0.5)
    panel.set_xlabel("M (tokens)")
