"""The bench: what it writes, what it compares, what it puts into the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import bars, meta, table
from bench.int4 import Int4
from bench.peers import GroupedWeight, Peer
from bench.peers.aten import TinyGemm, TorchInt4
from bench.runner import Layer, Run, run, write


class Wrong(Peer):
    """A peer that answers fast and wrongly."""

    name = "wrong"

    def __init__(self, weight: GroupedWeight) -> None:
        self.tensors = (weight.dequantize().roll(1, 0),)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x @ tensors[0].T


@pytest.fixture(scope="module")
def results() -> dict:
    peers = (TinyGemm, TorchInt4, Wrong)
    layers, tokens = [Layer("small", 64, 128)], [1, 3]
    return run(Run("int4", Int4, peers, "cpu", layers, tokens, group_size=64, symmetric=False, quick=True))


def test_rows_hold_what_the_tables_need(results: dict) -> None:
    assert [row["M"] for row in results["rows"]] == [1, 3]
    for row in results["rows"]:
        assert min(row["us"], row["bf16_us"], row["floor_us"], row["gb_s"], row["tflop_s"]) > 0
        assert row["peers"].keys() == {"torch_int4"}
    assert results["meta"]["source_hash"] == meta.source_hash()


def test_peers_that_do_not_run_are_recorded_with_the_reason(results: dict) -> None:
    not_run = results["rows"][0]["not_run"]
    assert not_run["tinygemm"] == "CUDA only"
    assert "wrong result" in not_run["wrong"]


@pytest.mark.parametrize("symmetric", [False, True])
def test_random_weight_is_what_the_operator_multiplies_with(symmetric: bool) -> None:
    weight = GroupedWeight.random(48, 128, 32, symmetric, "cpu")
    layer = Int4(weight)
    expected = torch.ops.qao.dequantize_int4(*layer.tensors, 48, 128, 32, torch.bfloat16)
    assert torch.equal(weight.dequantize(), expected)


def test_source_hash_follows_names_and_contents(tmp_path: Path) -> None:
    source = tmp_path / "csrc" / "a.cpp"
    source.parent.mkdir()
    source.write_text("int a;")
    first = meta.source_hash(tmp_path)
    (tmp_path / "csrc" / "a.o").write_text("no source")
    assert meta.source_hash(tmp_path) == first
    source.write_text("int b;")
    second = meta.source_hash(tmp_path)
    source.rename(source.with_name("b.cpp"))
    assert len({first, second, meta.source_hash(tmp_path)}) == 3


def test_bars_name_the_cells_below_them() -> None:
    row = {"layer": "o", "K": 4096, "M": 16, "cached": True, "us": 10.0, "bf16_us": 24.0, "peers": {}}
    assert bars.misses([row], "cpu", bars.INT4) == (["o M=16: 2.40x bf16, the bar is 2.5x"], 1)
    assert bars.misses([row | {"bf16_us": 25.0}], "cpu", bars.INT4) == ([], 1)
    assert bars.misses([row | {"K": 896}], "cpu", bars.INT4) == ([], 0)


def test_table_replaces_its_block_and_nothing_else(
    results: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    write(results, tmp_path / "cpu" / "int4.json")
    readme = tmp_path / "README.md"
    unmeasured = "<!-- /bench -->\nb\n<!-- bench:int4:h200 -->\n<!-- /bench -->"
    readme.write_text(f"a\n<!-- bench:int4:cpu:short -->\nold\n{unmeasured}")
    assert table.update(check=True) == 1
    assert table.update(check=False) == 0
    assert table.update(check=True) == 0
    text = readme.read_text()
    assert text.startswith("a\n<!-- bench:int4:cpu:short -->\n")
    assert "| 64 × 128 |" in text and "old" not in text
    assert text.endswith(unmeasured)
    assert "is missing" in capsys.readouterr().out
    assert json.loads((tmp_path / "cpu" / "int4.json").read_text())["rows"] == results["rows"]
