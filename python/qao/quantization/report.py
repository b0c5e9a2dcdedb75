"""The report of quantize_, one row per layer, and its table."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from .._words import counted

_GROUP_ABOVE = 40  # layers; a longer table merges layers with names that differ only in numbers


@dataclass
class Row:
    """One linear layer or embedding, or one big weight of another module."""

    name: str
    shape: tuple[int, ...]  # of the float weight; [N, K] for linear layers
    status: str  # see Report
    scheme: str | None = None
    note: str | None = None  # why it was not quantized, or which tensors it shares
    bytes_before: int = 0  # of the weight, without the bias; 0 if counted with the layer it is shared with
    bytes_after: int = 0  # of weight, scales and zero points
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius; None if unknown
    kernel: str | None = None  # for one token / for many; None if unknown
    aliases: list[str] = field(default_factory=list)  # other names of the same module
    output_error: float | None = None  # ‖(W - Ŵ) X‖ / ‖W X‖ over inputs X of calibration; None if unknown
    output_error_nearest: float | None = None  # the same for round-to-nearest


@dataclass
class Report:
    """The result of ``quantize_``; print it for a table.

    ``status`` of a row is one of
        quantized: this call quantized it.
        already quantized: it was quantized before.
        excluded: the scheme or the filter excluded it.
        left: it was requested but could not be quantized; ``note`` says why.
        kept: an embedding that stays in float; ``note`` says how to quantize it.
        untouched: a fused expert tensor or another big weight, which is neither a linear layer nor an embedding.
    """

    parameters: int  # elements of all parameters of the float model, each counted once
    parameters_quantized: int  # of these, elements of quantized weights
    rows: list[Row] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """Share of the model's parameters that are quantized, 0..1."""
        return self.parameters_quantized / self.parameters if self.parameters else 0.0

    @property
    def bytes_before(self) -> int:
        """Bytes of the quantized weights before quantization."""
        return sum(row.bytes_before for row in self._quantized())

    @property
    def bytes_after(self) -> int:
        """Bytes of the quantized weights after quantization."""
        return sum(row.bytes_after for row in self._quantized())

    @property
    def problems(self) -> list[Row]:
        """Rows that were requested but are not quantized."""
        return [row for row in self.rows if row.status in ("left", "untouched")]

    @property
    def reasons(self) -> list[str]:
        """Why linear layers are not quantized, most frequent first: "3 of 4: by the filter"."""
        notes = Counter(row.note for row in self.rows if row.status in ("excluded", "left"))
        return [f"{count} of {notes.total()}: {note}" for note, count in notes.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        totals = ("parameters", "parameters_quantized", "coverage", "bytes_before", "bytes_after")
        return {name: getattr(self, name) for name in totals} | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        calibrated = any(row.output_error is not None for row in self.rows)
        errors = ("output error, nearest", "calibrated") if calibrated else ("error",)
        kernels, notes = (any(getattr(row, name) for row in self.rows) for name in ("kernel", "note"))
        last = "kernel, note" if kernels and notes else "kernel" if kernels else "note"
        header = ("layer", "shape", "scheme", "MiB before", "after", *errors, last)
        cells = [_cells(rows, calibrated) for rows in self._groups()]
        lines = table(header, cells)
        quantized = len(list(self._quantized()))
        layers = sum(row.status not in ("untouched", "kept") for row in self.rows)
        lines.append(
            f"{quantized} of {counted(layers, 'layer')} quantized: {self.bytes_before / 2**20:.2f} -> "
            f"{self.bytes_after / 2**20:.2f} MiB, {self.coverage:.1%} of {self.parameters:,} parameters"
        )
        if calibrated:
            lines.append("output errors on the data: with the weight rounded to nearest, and as quantized")
        if count := len(self.problems):
            asked = "1 requested weight is" if count == 1 else f"{count} requested weights are"
            lines.append(f"{asked} not quantized: {'its note says' if count == 1 else 'their notes say'} why")
        return "\n".join(lines)

    def _quantized(self) -> Iterator[Row]:
        return (row for row in self.rows if row.status in ("quantized", "already quantized"))

    def _groups(self) -> Iterable[list[Row]]:
        if len(self.rows) <= _GROUP_ABOVE:
            return [[row] for row in self.rows]
        groups: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            key = (re.sub(r"\d+", "#", row.name), row.shape, row.status, row.scheme, row.note, row.kernel)
            groups.setdefault(key, []).append(row)
        return groups.values()


def table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Lines of a table. The last column is not padded, so a long reason stays on one line and widens nothing.

    Columns without a value in any row are left out.
    ``width``: maximum columns; None: those of the terminal if stdout is one, otherwise unlimited. If the table is
    wider, the last column wraps and names in the first column lose their beginning, then other columns wrap; if that
    is not enough, each row becomes a name and a paragraph below it.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    used = [i for i in range(len(header)) if i == 0 or not rows or any(cells[i] not in ("", "-") for cells in rows)]
    everything = [[str(cells[i]) for i in used] for cells in (header, *rows)]
    widths = [max(len(cells[i]) for cells in everything) for i in range(len(used))]
    if width is not None:
        widths = _narrowed(everything, widths, width)
        if not widths:
            return _paragraphs(everything, width)
    lines: list[str] = []
    for index, cells in enumerate(everything):
        first = cells[0] if len(cells[0]) <= widths[0] or len(cells) == 1 else f"…{cells[0][1 - widths[0] :]}"
        columns = [textwrap.wrap(cell, size) or [""] for cell, size in zip([first, *cells[1:]], widths, strict=True)]
        for parts in zip_longest(*columns, fillvalue=""):
            padded = (part.ljust(size) for part, size in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
        if index == 0:
            head = len(lines)
    lines.insert(head, "-" * max(len(line) for line in lines))
    return lines


_LEAST_FIRST, _LEAST_LAST = 16, 12  # minimum columns for names and for remarks


def _narrowed(everything: list[list[str]], widths: list[int], width: int) -> list[int]:
    """Widths of columns that fit into ``width``; empty if no widths do."""
    if len(widths) == 1:
        return [min(widths[0], width)]
    *widths, last = widths
    gaps = 2 * len(widths)
    least, least_first = min(last, _LEAST_LAST), min(widths[0], _LEAST_FIRST)
    words = [max(len(word) for cells in everything for word in (cells[i].split() or [""])) for i in range(len(widths))]
    saved = {i: widths[i] - words[i] for i in range(1, len(widths))}
    for i in sorted(saved, key=lambda i: -saved[i]):
        if least_first + sum(widths[1:]) + gaps + least <= width:
            break
        widths[i] = words[i]
    others = sum(widths[1:]) + gaps
    if least_first + others + least > width:
        return []
    widths[0] = min(widths[0], max(least_first, width - others - min(last, 16)))
    return [*widths, max(1, min(last, width - others - widths[0]))]


def _paragraphs(everything: list[list[str]], width: int) -> list[str]:
    """Rows for a terminal that is too narrow for a table: the first cell, then "column: cell" for the others."""
    header, *rows = everything
    lines = []
    for first, *cells in rows:
        parts = [f"{name}: {cell}" for name, cell in zip(header[1:], cells, strict=True) if cell not in ("", "-")]
        lines += textwrap.wrap(first, width)
        lines += textwrap.wrap("; ".join(parts), width, initial_indent="  ", subsequent_indent="  ")
    return lines


def _cells(rows: list[Row], calibrated: bool) -> tuple[str, ...]:
    first = rows[0]
    name = common_name([row.name for row in rows])
    if calibrated:
        errors = [[row.output_error_nearest for row in rows], [row.output_error for row in rows]]
    else:
        errors = [[row.relative_error for row in rows]]
    done = first.status in ("quantized", "already quantized")
    remark = first.kernel or first.note or "-" if done else first.note or first.status
    if done and first.kernel and first.note:
        remark += f" ({first.note})"
    if first.aliases:
        remark += f" (also {', '.join(first.aliases)})"
    return (
        name,
        "x".join(str(size) for size in first.shape),
        first.scheme or "-",
        _mebibytes(sum(row.bytes_before for row in rows)),  # "-": counted with the layer that shares it
        _mebibytes(sum(row.bytes_after for row in rows)) if done else "-",
        *map(_range, errors),
        remark,
    )


def _range(values: Sequence[float | None]) -> str:
    """ "0.0079..0.0099"; "-" if no value is known."""
    known = [f"{value:.4f}" for value in sorted(value for value in values if value is not None)]
    return "-" if not known else known[0] if known[0] == known[-1] else f"{known[0]}..{known[-1]}"


def common_name(names: list[str]) -> str:
    """'layers.{0..31}.up x32' for names that differ only in their numbers."""
    if len(names) == 1:
        return names[0]
    parts = re.split(r"\d+", names[0])
    numbers = zip(*([int(number) for number in re.findall(r"\d+", name)] for name in names), strict=True)
    ranges = [f"{min(seen)}" if len(set(seen)) == 1 else f"{{{min(seen)}..{max(seen)}}}" for seen in numbers]
    return "".join(part + number for part, number in zip(parts, [*ranges, ""], strict=True)) + f" x{len(names)}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}" if count else "-"
