"""Reader and writer of results files: a CSV table under lines of metadata. Imports without torch.

Lines ``# key = value`` describe the run; the values are JSON. A header follows, then one line per row. A cell is a JSON
number, ``true``, ``false``, ``null`` or text. An empty cell means that the row lacks the key. The column
``peers.tinygemm`` holds ``row["peers"]["tinygemm"]``, and every row has the dictionary if one such column exists.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

DIGITS = 7  # significant digits of a float: more than any table shows
_OF_A_RUN = ("load", "command")  # metadata that may differ between runs of one setting
OF_ROWS = ("date", "source_hash", "peers")  # metadata that may differ between the rows of a file: see ``dated``
Results = dict[str, Any]  # {"meta": {...}, "rows": [{...}, ...]}


def write(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dumps(results))
    _announce(path)


@cache
def _announce(path: Path) -> None:
    """Say once where results go, however often they are written."""
    print(f"writing {path}", flush=True)


def read(path: Path) -> Results:
    return loads(path.read_text())


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; empty if it does not exist."""
    rows: list[dict[str, Any]] = read(path)["rows"] if path.exists() else []
    return rows


def earlier(path: Path, meta: dict[str, Any], but: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The rows of a file measured in the setting of ``meta``, day and sources included; otherwise empty.

    ``but``: keys of the metadata that may differ, such as OF_ROWS for dated rows.
    """
    before = read(path) if path.exists() else None
    if before is None or not same_setting(before["meta"], meta, but):
        return []
    rows: list[dict[str, Any]] = before["rows"]
    return [dated(before["meta"], row) for row in rows] if but == OF_ROWS else rows


def same_setting(meta: dict[str, Any], other: dict[str, Any], but: tuple[str, ...] = ()) -> bool:
    """Whether the metadata of two runs agree, except how a run was started and the keys in ``but``."""
    kept = [{key: one[key] for key in one if key not in (*_OF_A_RUN, *but)} for one in (meta, other)]
    return bool(_rounded(kept[0]) == _rounded(kept[1]))


def dated(meta: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """A row with the day and the sources of its run, for files with rows of several runs."""
    return {"date": meta["date"], "sources": meta["source_hash"][:12]} | row


def runs_of(rows: Sequence[dict[str, Any]]) -> str:
    """Days and sources of dated rows, for a caption."""
    dates, sources = (sorted({row[name] for row in rows}) for name in ("date", "sources"))
    span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{span}, sources {', '.join(sources)}"


def join(
    files: Sequence[Path],
    path: Path,
    key: Callable[[dict[str, Any]], Any],
    wanted: Callable[[dict[str, Any]], bool] = lambda row: True,
) -> None:
    """Add the ``wanted`` rows of earlier runs, which a machine elsewhere wrote, to the results at ``path``.

    A row replaces the one with the same key.

    Raises:
        ValueError: a file was measured in another setting.
    """
    rows: dict[Any, dict[str, Any]] = {}
    meta: dict[str, Any] = {}
    for file in [*([path] if path.exists() else []), *files]:
        found = read(file)
        if meta and not same_setting(meta, found["meta"], OF_ROWS):
            raise ValueError(f"{file} was measured in another setting than {path}")
        meta = found["meta"]
        rows |= {key(row): dated(meta, row) for row in found["rows"] if file == path or wanted(row)}
    write({"meta": meta, "rows": list(rows.values())}, path)


def dumps(results: Results) -> str:
    """The text of a results file."""
    rows = [dict(_flat(row)) for row in results["rows"]]
    found = dict.fromkeys(column for row in rows for column in row)
    outer = {column.partition(".")[0] for column in found if "." in column}
    columns = [column for column in found if column not in outer]
    text = io.StringIO()
    for key, value in results["meta"].items():
        text.write(f"# {key} = {json.dumps(_rounded(value))}\n")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(columns)
    table.writerows([_cell(row[column]) if column in row else "" for column in columns] for row in rows)
    return text.getvalue()


def loads(text: str) -> Results:
    """Parse the output of ``dumps``; floats are rounded to DIGITS."""
    lines = text.splitlines(keepends=True)
    count = next((i for i, line in enumerate(lines) if not line.startswith("# ")), len(lines))
    meta = {}
    for line in lines[:count]:
        key, _, value = line.removeprefix("# ").partition(" = ")
        meta[key] = json.loads(value)
    columns, *cells = csv.reader(lines[count:])
    return {"meta": meta, "rows": [_nested(columns, row) for row in cells]}


def _flat(row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys and values of a row; a nested dictionary becomes ``outer.inner``."""
    for key, value in row.items():
        assert "." not in key, key
        if isinstance(value, dict) and value:
            yield from ((f"{key}.{inner}", one) for inner, one in value.items())
        else:
            yield key, value


def _nested(columns: list[str], cells: list[str]) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for column, cell in zip(columns, cells, strict=True):
        outer, dot, inner = column.partition(".")
        place, key = (row.setdefault(outer, {}), inner) if dot else (row, outer)
        if cell:
            place[key] = _value(cell)
    return row


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value) if value == "" or not isinstance(_value(value), str) else value
    return json.dumps(_rounded(value))


def _value(cell: str) -> Any:
    try:
        return json.loads(cell)
    except ValueError:
        return cell


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, (list, tuple)) else value
