"""The bench: what it writes, what it compares, what it puts into the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import bars, kernels, meta, plots, quantize, table
from bench.meta import write
from bench.peers import Peer
from bench.peers.torch4 import TinyGemm, TorchInt4
from bench.runner import Layer, Run, run
from bench.schemes import SCHEMES, Int4
from bench.weights import GroupedWeight, RowWeight, Weight


class Wrong(Peer):
    """A peer that answers fast and wrongly."""

    name = "wrong"

    def __init__(self, weight: Weight) -> None:
        self.tensors = (weight.dequantize().roll(1, 0),)

    def run(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x @ tensors[0].T


@pytest.fixture(scope="module")
def results() -> dict:
    scheme = SCHEMES["int4"]._replace(peers=(TinyGemm, TorchInt4, Wrong))
    layers, tokens = [Layer("up", 64, 128)], [1, 3]
    return run(Run(scheme, "cpu", layers, tokens, group_size=64, symmetric=False, quick=True))


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


@pytest.mark.parametrize("word", [word for word in SCHEMES if word != "int4"])
def test_every_scheme_is_measured_beside_its_peers(word: str) -> None:
    grouping = {"group_size": 32, "symmetric": True} if SCHEMES[word].grouped else {}
    measured = run(Run(SCHEMES[word], "cpu", [Layer("up", 64, 128)], [2], quick=True, **grouping))
    (row,) = measured["rows"]
    unavailable = {peer.name: peer.unavailable("cpu") for peer in SCHEMES[word].peers}
    assert row["peers"].keys() == {name for name, reason in unavailable.items() if reason is None}
    assert row["not_run"] == {name: reason for name, reason in unavailable.items() if reason is not None}
    assert row["group_size"] == grouping.get("group_size")


def test_int8_nearest_is_within_half_a_step() -> None:
    weight = GroupedWeight.random(48, 128, 32, False, "cpu")
    rows = RowWeight.nearest_int8(weight)
    error = (rows.q.float() * rows.scales[:, None] - weight.dequantize().float()).abs()
    assert (error <= rows.scales[:, None] * 0.5001).all()


def test_quantisers_are_measured_against_a_copy() -> None:
    rows = quantize.run("cpu", shapes=((2, 64),))["rows"]
    assert [row["op"] for row in rows] == [case.name for case in quantize.CASES]
    for row in rows:
        assert min(row["us"], row["copy_us"], row["gb_s"], row["copy_gb_s"]) > 0


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
    assert bars.misses([row], "cpu", bars.BARS["int4"]) == (["o M=16: 2.40x bf16, the bar is 2.5x"], 1)
    assert bars.misses([row | {"bf16_us": 25.0}], "cpu", bars.BARS["int4"]) == ([], 1)
    assert bars.misses([row | {"K": 896}], "cpu", bars.BARS["int4"]) == ([], 0)
    row |= {"cached": False, "us": 20.0}
    assert bars.misses([row], "cuda", bars.BARS["int8_int8"]) == ([], 0)  # promised for large layers alone
    missed = ["o70 M=16: 1.20x bf16, the bar is 1.3x"]
    assert bars.misses([row | {"layer": "o70"}], "cuda", bars.BARS["int8_int8"]) == (missed, 1)


def test_bars_of_the_quantisers() -> None:
    row = {"op": "int8_quantize", "M": 4096, "K": 8192, "passes": 1, "us": 10.0, "copy_us": 6.0}
    assert bars.quantize_misses([row]) == (["int8_quantize: 60% of a copy, the bar is 80%"], 1)
    assert bars.quantize_misses([row | {"copy_us": 8.1}]) == ([], 1)
    assert bars.quantize_misses([row | {"M": 16}, row | {"passes": 2}]) == ([], 0)


@pytest.mark.parametrize("word", SCHEMES)
def test_every_scheme_has_bars_on_both_devices(word: str) -> None:
    assert {bar.device for bar in bars.BARS[word]} == {"cpu", "cuda"}


# ---- documents -------------------------------------------------------------------------------------------------------


def test_table_replaces_its_block_and_nothing_else(
    results: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    write(results, tmp_path / "cpu" / "int4.json")
    readme = tmp_path / "README.md"
    unmeasured = "<!-- /bench -->\nb\n<!-- bench:int4:h200 -->\n<!-- /bench -->"
    summary = "<!-- bench:summary:cpu -->\nold\n<!-- /bench -->\n"
    readme.write_text(f"a\n{summary}<!-- bench:int4:cpu -->\nold\n{unmeasured}")
    assert table.update(check=True) == 1
    assert table.update(check=False) == 0
    assert table.update(check=True) == 0
    text = readme.read_text()
    assert text.startswith("a\n<!-- bench:summary:cpu -->\n")
    assert "N = 64, K = 128.\n\n| scheme | M=1 | M=3 |" in text and "\n| `int4` | " in text
    assert "**up**: N = 64, K = 128\n" in text and "old" not in text
    assert text.endswith(unmeasured)
    assert "is missing" in capsys.readouterr().out
    assert json.loads((tmp_path / "cpu" / "int4.json").read_text())["rows"] == results["rows"]


def test_the_readme_says_what_the_kernels_say() -> None:
    pytest.importorskip("qao._host", reason="qao was built without qao._host")
    text = (meta.ROOT / "README.md").read_text()
    assert f"<!-- kernels -->\n{kernels.render()}\n<!-- /kernels -->" in text, "run `python -m bench table`"


def test_every_scheme_has_a_kernel_everywhere() -> None:
    host = pytest.importorskip("qao._host", reason="qao was built without qao._host")
    rows = host.kernels()
    places = {row.get("isa", row.get("compute_capability")) for row in rows}
    assert places == {"scalar", "avx2", "avx512", "avx512_bf16", "amx", 80, 86, 89, 90, 100, 120}
    for word in SCHEMES:
        mine = [row for row in rows if row["op"] == f"{word}_mm"]
        assert {row.get("isa", row.get("compute_capability")) for row in mine} == places
        assert all(row["kernel"] and row["instruction"] for row in mine)


def test_kernel_table_merges_hardware_that_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    host = pytest.importorskip("qao._host", reason="qao was built without qao._host")
    cpu = [{"op": "int8_mm", "device": "cpu", "isa": isa, "instruction": "vpfoo"} for isa in ("avx2", "amx")]
    gpu = [
        {"op": "int8_mm", "device": "cuda", "compute_capability": 90, "instruction": instruction}
        for instruction in ("mma.sync bf16", "mma.sync f16", "wgmma f16")
    ]
    monkeypatch.setattr(host, "kernels", lambda: cpu + gpu)
    on_cpus, on_gpus = kernels.render().split("\n\n")
    assert "| CPU | any x86-64, AVX-512 VNNI, AVX-512 BF16 | AVX2, AMX |" in on_cpus
    assert "| `int8` | none | `vpfoo` |" in on_cpus
    assert "| `int8` | `mma.sync` bf16, f16; `wgmma` f16 |" in on_gpus


def test_results_become_a_picture(results: dict, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plots.draw("int4", results, tmp_path / "int4.svg")
    again = tmp_path / "again.svg"
    plots.draw("int4", results, again)
    picture = again.read_text()
    assert picture == (tmp_path / "int4.svg").read_text()  # drawn again nothing changes
    assert all(word in picture for word in ("int4", "bf16", "torch_int4", "roofline", "best peer", "N = 64, K = 128"))
