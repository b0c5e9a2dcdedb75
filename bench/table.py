"""Results as Markdown, between markers in the documents, so that no number is ever typed by hand.

``<!-- bench:int4:cpu -->`` … ``<!-- /bench -->`` holds every cell of bench/results/cpu/int4.json, one table a layer;
``<!-- bench:int4:cpu:short -->`` only the speed-up over bfloat16, layers by tokens.
"""

from __future__ import annotations

import json
import re
from typing import Any

from .meta import RESULTS, ROOT, source_hash

_DOCUMENTS = ("README.md", "docs/benchmarks.md")
_BLOCK = re.compile(r"<!-- bench:(\w+):([\w-]+)(:short)? -->\n.*?<!-- /bench -->", re.DOTALL)


def update(check: bool) -> int:
    """Renders every block of every document; with ``check`` writes nothing and returns 1 if one would change."""
    stale = []
    for name in _DOCUMENTS:
        path = ROOT / name
        if not path.exists():
            continue
        before = path.read_text()
        after = _BLOCK.sub(_render_block, before)
        if after != before:
            stale.append(name)
            if not check:
                path.write_text(after)
    print(f"{'out of date' if check else 'updated'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


def render(results: dict[str, Any], short: bool) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    where = f"{meta['device']}{', {} threads'.format(meta['threads']) if 'threads' in meta else ''}"
    kind = "symmetric" if rows[0]["symmetric"] else "asymmetric"
    caption = (
        f"{where}, torch {meta['torch']}, {meta['date']}, sources {meta['source_hash'][:12]}; "
        f"{rows[0]['dtype']} activations, {kind} groups of {rows[0]['group_size']}; "
        f"memory reads {meta['read_gb_s']:.0f} GB/s, bfloat16 matrices multiply at {meta['bf16_tflop_s']:.1f} TFLOP/s."
    )
    layers = {row["layer"]: [r for r in rows if r["layer"] == row["layer"]] for row in rows}
    tables = [_short(layers)] if short else [_full(name, cells) for name, cells in layers.items()]
    return "\n\n".join([caption, *tables])


def _render_block(match: re.Match[str]) -> str:
    scheme, device, short = match.groups()
    path = RESULTS / device / f"{scheme}.json"
    if not path.exists():
        print(f"{path} is missing: its block stays as it is")
        return match[0]
    results = json.loads(path.read_text())
    if results["meta"]["source_hash"] != source_hash():
        print(f"{path} was measured on other sources than the present ones")
    body = render(results, short is not None)
    return f"<!-- bench:{scheme}:{device}{short or ''} -->\n{body}\n<!-- /bench -->"


def _short(layers: dict[str, list[dict[str, Any]]]) -> str:
    tokens = sorted({row["M"] for rows in layers.values() for row in rows})
    lines = []
    for rows in layers.values():
        ratio = {row["M"]: f"{row['bf16_us'] / row['us']:.2f}" for row in rows}
        shape = f"{rows[0]['N']} × {rows[0]['K']}{', cached' if rows[0]['cached'] else ''}"
        lines.append([shape, *(ratio.get(m, "–") for m in tokens)])
    return _table(["N × K", *(f"M={m}" for m in tokens)], lines)


def _full(name: str, rows: list[dict[str, Any]]) -> str:
    peers = sorted({peer for row in rows for peer in row["peers"]})
    header = ["M", "µs", "of roofline", "GB/s", "TFLOP/s", "bf16 µs", "× bf16"]
    lines = []
    for row in rows:
        us = row["us"]
        line = [str(row["M"]), f"{us:.1f}", f"{row['floor_us'] / us:.0%}", f"{row['gb_s']:.0f}"]
        line += [f"{row['tflop_s']:.2f}", f"{row['bf16_us']:.1f}", f"{row['bf16_us'] / us:.2f}"]
        line += [f"{row['peers'][peer] / us:.2f}" if peer in row["peers"] else "–" for peer in peers]
        lines.append(line)
    cached = ", one copy of the weight" if rows[0]["cached"] else ""
    title = f"**{name}**: N = {rows[0]['N']}, K = {rows[0]['K']}{cached}"
    return f"{title}\n\n{_table(header + [f'× {peer}' for peer in peers], lines)}"


def _table(header: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [header, ["---:"] * len(header), *lines])
