"""Results files of the bench: rows are read as they were written, and the tracked files stay small."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from bench import reports, result_files
from bench.meta import RESULTS, ROOT, describe

OURS = sorted(path for path in RESULTS.glob("*/*") if path.parent != reports.FOLDER)
ROWS = [
    {"layer": "o", "M": 1, "us": 4.5, "cached": False, "group_size": None, "peers": {}, "not_run": {"a": "M > 128"}},
    {"layer": "up, gate", "M": 2, "us": 1e-05, "cached": True, "peers": {"a": 1.0, "b c": 2.5}, "not_run": {}},
    {
        "layer": "",
        "M": 123456789,
        "us": -3.0,
        "group_size": 128,
        "peers": {"b c": 1e300},
        "not_run": {},
        "more": [1, 2.5],
    },
    {"layer": "128", "M": 0, "us": 2.0, "peers": {}, "not_run": {"a": 'two\nlines, "quoted"'}, "more": []},
    {"layer": "true", "M": 3, "us": 0.0, "peers": {}, "not_run": {"a": "null"}},
]


def written(rows: list[dict], meta: dict | None = None) -> dict:
    return result_files.loads(result_files.dumps({"meta": meta or {}, "rows": rows}))


def test_rows_are_read_as_they_were_written() -> None:
    """With their types: text that looks like a number, whole floats, keys that a row lacks."""
    assert written(ROWS)["rows"] == ROWS
    for before, after in zip(ROWS, written(ROWS)["rows"], strict=True):
        assert json.dumps(before, sort_keys=True) == json.dumps(after, sort_keys=True)
    assert written([])["rows"] == []
    assert written([{"peers": {}}, {"peers": {}}])["rows"] == [{"peers": {}}, {"peers": {}}]


def test_metadata_is_read_as_it_was_written() -> None:
    meta = {"device": "GPU = 1, # 2", "peers": {"triton": "3.6"}, "shape": [384, 1536], "held_by": {}, "date": None}
    assert written(ROWS, meta) == {"meta": meta, "rows": ROWS}


def test_a_file_has_a_line_for_a_row() -> None:
    text = result_files.dumps(
        {"meta": {"device": "GPU"}, "rows": [{"M": m, "us": m / 3, "p": {"x": 1}} for m in (1, 2)]}
    )
    assert text.splitlines() == ['# device = "GPU"', "M,us,p.x", "1,0.3333333,1", "2,0.6666667,1"]


def test_a_float_keeps_its_digits() -> None:
    (row,) = written([{"us": 1234567.891, "s": 0.000123456789}])["rows"]
    assert row == {"us": 1234568.0, "s": 0.0001234568}


def test_runs_of_one_setting() -> None:
    meta = describe("cpu")
    assert meta["command"].startswith("python ")
    again = meta | {"load": 17.0, "command": "python -m bench int4 --resume"}
    assert result_files.same_setting(meta, again)
    assert not result_files.same_setting(meta, again | {"date": "2026-01-01"})
    assert result_files.same_setting(meta, again | {"date": "2026-01-01"}, but=("date",))
    assert not result_files.same_setting(meta, again | {"torch": "1"})


@pytest.mark.parametrize(
    "path",
    sorted(set(RESULTS.glob("*/*")) - set(reports.FOLDER.glob("*"))),
    ids=lambda path: f"{path.parent.name}-{path.stem}",
)
def test_a_tracked_file_says_what_it_was_measured_on(path: Path) -> None:
    assert path.suffix == ".csv"
    results = result_files.read(path)
    assert result_files.dumps(results) == path.read_text()
    assert results["meta"].keys() >= {"device", "torch", "date", "source_hash"}
    assert results["rows"] and len(results["meta"]["source_hash"]) == 64


def test_all_results_are_at_most_a_megabyte() -> None:
    listed = subprocess.run(["git", "ls-files", "bench/results"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("needs a git checkout")
    assert sum((ROOT / name).stat().st_size for name in listed.stdout.splitlines()) <= 1_000_000
