"""What quantize_ did, layer by layer."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

_GROUP_ABOVE = 40  # layers; a longer table joins layers that differ only in the numbers of their names


@dataclass
class Row:
    """One linear layer or embedding, or one big weight of another module."""

    name: str
    shape: tuple[int, ...]  # of the float weight; [N, K] for linear layers
    status: str  # see Report
    scheme: str | None = None
    note: str | None = None  # why it was left, or what it shares with others
    bytes_before: int = 0  # of the weight, without the bias; 0 if counted with the layer it is shared with
    bytes_after: int = 0  # of weight, scales and zero points
    relative_error: float | None = None  # ‖W - Ŵ‖ / ‖W‖, Frobenius; None if unknown
    kernel: str | None = None  # for one token / for many; None if unknown
    aliases: list[str] = field(default_factory=list)  # other names of the same module
    output_error: float | None = None  # ‖(W - Ŵ) X‖ / ‖W X‖ over inputs X of calibration; None if unknown


@dataclass
class Report:
    """The result of ``quantize_``; print it for a table.

    ``status`` of a row is one of
        quantized: it is a QuantLinear now.
        already quantized: it was one before.
        excluded: the scheme or the filter left it out.
        left: it was asked for and could not be quantised; ``note`` says why.
        kept: an embedding that stays in floats; ``note`` says what it would take to quantise it.
        untouched: a fused expert tensor or another big weight, which belongs to neither.
    """

    parameters: int  # elements of all parameters of the float model, each counted once
    parameters_quantized: int  # of these, elements of quantised weights
    rows: list[Row] = field(default_factory=list)

    @property
    def coverage(self) -> float:
        """Share of the model's parameters that are quantised, 0..1."""
        return self.parameters_quantized / self.parameters if self.parameters else 0.0

    @property
    def bytes_before(self) -> int:
        """Bytes of the quantised weights as they were."""
        return sum(row.bytes_before for row in self._quantized())

    @property
    def bytes_after(self) -> int:
        """Bytes of the quantised weights as they are."""
        return sum(row.bytes_after for row in self._quantized())

    @property
    def problems(self) -> list[Row]:
        """Rows that were asked for and are not quantised."""
        return [row for row in self.rows if row.status in ("left", "untouched")]

    @property
    def reasons(self) -> list[str]:
        """Why linear layers are not quantised, most frequent first: "3 of 4: by the filter"."""
        notes = Counter(row.note for row in self.rows if row.status in ("excluded", "left"))
        return [f"{count} of {notes.total()}: {note}" for note, count in notes.most_common()]

    def to_dict(self) -> dict[str, Any]:
        """Everything in types that JSON knows."""
        totals = ("parameters", "parameters_quantized", "coverage", "bytes_before", "bytes_after")
        return {name: getattr(self, name) for name in totals} | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        header = ("layer", "shape", "scheme", "MiB before", "after", "error", "kernel")
        lines = table(header, [_cells(rows) for rows in self._groups()])
        quantized = len(list(self._quantized()))
        layers = sum(row.status not in ("untouched", "kept") for row in self.rows)
        lines.append(
            f"{quantized} of {layers} layers quantised: {_mebibytes(self.bytes_before)} -> "
            f"{_mebibytes(self.bytes_after)} MiB, {self.coverage:.1%} of {self.parameters:,} parameters"
        )
        if self.problems:
            lines.append(
                f"{len(self.problems)} weights that were asked for are not quantised: see the lines with a reason"
            )
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
    """Lines of a table. The last column is not padded: a long reason stays one line and widens nothing.

    ``width``: columns that there are; None: those of the terminal that stdout is, or any number. Where the table is
    wider, the last column goes on in further lines, and names in the first lose their beginning.
    """
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    everything = [[str(cell) for cell in cells] for cells in (header, *rows)]
    widths = [max(len(cells[i]) for cells in everything) for i in range(len(header) - 1)]
    last = max(len(cells[-1]) for cells in everything)
    if width is not None and widths and sum(widths) + 2 * len(widths) + last > width:
        others = sum(widths[1:]) + 2 * len(widths)
        wanted = min(last, _LEAST_LAST)
        widths[0] = min(widths[0], max(_LEAST_FIRST, width - others - wanted))
        last = max(wanted, width - others - widths[0])
    lines: list[str] = []
    for cells in everything:
        first = cells[0] if not widths or len(cells[0]) <= widths[0] else f"…{cells[0][1 - widths[0] :]}"
        wrapped = textwrap.wrap(cells[-1], last) or [""]
        own = zip([first, *cells[1:-1]], widths, strict=False) if widths else ()
        lines.append("  ".join((*(cell.ljust(size) for cell, size in own), wrapped[0])).rstrip())
        lines += [" " * (sum(widths) + 2 * len(widths)) + part for part in wrapped[1:]]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return lines


_LEAST_FIRST, _LEAST_LAST = 16, 16  # columns that a narrow table leaves for names and for remarks


def _cells(rows: list[Row]) -> tuple[str, ...]:
    first = rows[0]
    name = common_name([row.name for row in rows])
    errors = [row.relative_error for row in rows if row.relative_error is not None]
    low, high = (f"{error:.4f}" for error in (min(errors), max(errors))) if errors else ("-", "-")
    done = first.status in ("quantized", "already quantized")
    remark = first.kernel or "-" if done else first.note or first.status
    if done and first.note:
        remark += f" ({first.note})"
    if first.aliases:
        remark += f" (also {', '.join(first.aliases)})"
    return (
        name,
        "x".join(str(size) for size in first.shape),
        first.scheme or "-",
        _mebibytes(sum(row.bytes_before for row in rows)),
        _mebibytes(sum(row.bytes_after for row in rows)) if done else "-",
        low if low == high else f"{low}..{high}",
        remark,
    )


def common_name(names: list[str]) -> str:
    """'layers.{0..31}.up x32' for names that differ only in their numbers."""
    if len(names) == 1:
        return names[0]
    parts = re.split(r"\d+", names[0])
    numbers = zip(*([int(number) for number in re.findall(r"\d+", name)] for name in names), strict=True)
    ranges = [f"{min(seen)}" if len(set(seen)) == 1 else f"{{{min(seen)}..{max(seen)}}}" for seen in numbers]
    return "".join(part + number for part, number in zip(parts, [*ranges, ""], strict=True)) + f" x{len(names)}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}"
