"""The benchmarks: results files, comparisons, and generated documents."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch
from cpu_isas import ISA_FLAGS
from torch import Tensor

import bench.__main__ as bench_command
from bench import (
    bars,
    calibrate,
    choosing,
    diffusion,
    experts,
    experts_contenders,
    four_bits,
    generate,
    ggml,
    gguf,
    kernel_pages,
    kernels,
    language,
    llama,
    llama_model,
    meta,
    plans,
    plots,
    prefill,
    quantize,
    rotation,
    table,
    tune,
    tune_choices,
)
from bench.meta import describe
from bench.peers import Peer, vllm_experts
from bench.peers.torch4 import TinyGemm, TorchInt4
from bench.result_files import earlier, read, write
from bench.runner import LAYERS, TOKENS, Layer, Run, run
from bench.schemes import LAYER_SCHEMES, SCHEMES, Int4
from bench.weights import GroupedWeight, RowWeight, Weight
from examples.decoder_block import DecoderBlock


class Wrong(Peer):
    """A peer with fast but wrong results."""

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


def test_results_are_saved_after_every_layer() -> None:
    layers = [Layer("up", 64, 128), Layer("down", 128, 64)]
    scheme, saved = SCHEMES["int8"]._replace(peers=()), []
    results = run(
        Run(scheme, "cpu", layers, [1, 2], quick=True), save=lambda results: saved.append(len(results["rows"]))
    )
    assert saved == [2, 4] and len(results["rows"]) == 4


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


def test_quantizers_are_measured_against_a_copy() -> None:
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


@pytest.mark.parametrize(
    "name,same,other",
    [
        ("k.cu", 'f("//x");  // why\n\n/* two\nlines */\ng();\n', 'f("//y");\ng();\n'),
        ("m.py", '# why\nx = "#1"  # this\n\n', 'x = "#2"\n'),
        ("m.py", '"""What\nit is."""\n\nx = "#1"\n', '"""What\nit is."""\nx = "#1"\n"more"\n'),
    ],
)
def test_source_hash_skips_comments(tmp_path: Path, name: str, same: str, other: str) -> None:
    plain = {"k.cu": 'f("//x");\ng();\n', "m.py": 'x = "#1"\n'}[name]
    (tmp_path / "cuda").mkdir()
    hashes = []
    for text in (plain, same, other):
        (tmp_path / "cuda" / name).write_text(text)
        hashes.append(meta.source_hash(tmp_path))
    assert hashes[0] == hashes[1] != hashes[2]


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
    assert bars.misses([row], "cuda", bars.BARS["int8_int4"]) == ([], 0)  # promised for large layers alone
    missed = ["o70 M=16: 1.20x bf16, the bar is 1.3x"]
    assert bars.misses([row | {"layer": "o70"}], "cuda", bars.BARS["int8_int4"]) == (missed, 1)


def test_bars_for_means_are_of_the_best_peer_of_each_cell() -> None:
    row = {"layer": "o", "K": 4096, "M": 1, "cached": False, "us": 1.0, "bf16_us": 9.0, "peers": {"a": 1.0, "b": 4.0}}
    rows = [row, row | {"M": 16, "peers": {"b": 1.69}}, row | {"M": 32, "peers": {}}]
    bar = bars.Bar("cuda", 1, 64, "best peer", 1.3, mean=True)
    assert bars.misses(rows, "cuda", (bar,)) == ([], 1)
    missed = ["mean of M=1..32: 1.30x best peer, the bar is 1.31x"]
    assert bars.misses(rows, "cuda", (bar._replace(ratio=1.31),)) == (missed, 1)
    assert bars.misses(rows, "cuda", (bar._replace(mean=False),)) == (["o M=1: 1.00x best peer, the bar is 1.3x"], 2)
    assert bars.misses(rows[2:], "cuda", (bar,)) == ([], 0)


def test_bars_of_the_quantizers() -> None:
    row = {"op": "int8_quantize", "M": 4096, "K": 8192, "passes": 1, "us": 10.0, "copy_us": 6.0}
    assert bars.quantize_misses([row]) == (["int8_quantize: 60% of a copy, the bar is 80%"], 1)
    assert bars.quantize_misses([row | {"copy_us": 8.1}]) == ([], 1)
    assert bars.quantize_misses([row | {"M": 16}, row | {"passes": 2}]) == ([], 0)


def test_bars_of_whole_decoders() -> None:
    case = {"model": "llama-3.1-8b", "phase": "decode", "batch": 1}
    rows = [
        case | {"scheme": scheme, "variant": variant, "eager_tokens_s": eager, "compiled_tokens_s": compiled}
        for scheme, variant, eager, compiled in (
            ("bf16", "plain", 90.0, 200.0),
            ("bf16", "fused", 100.0, 190.0),
            ("int4", "plain", 110.0, 450.0),
            ("int4", "fused", 80.0, 440.0),
        )
    ]
    missed = "llama-3.1-8b, decode 1, compiled, int4: 2.25x bf16, the bar is 2.3x"
    assert bars.decoder_misses(rows) == ([missed], 2)
    rows[3]["compiled_tokens_s"] = 461.0
    assert bars.decoder_misses(rows) == ([], 2)
    assert bars.decoder_misses(rows[2:]) == ([], 0)


@pytest.mark.parametrize("word", SCHEMES)
def test_every_scheme_has_bars_on_both_devices(word: str) -> None:
    assert {bar.device for bar in bars.BARS[word]} == {"cpu", "cuda"}


# ---- whole decoders --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoders() -> dict:
    pytest.importorskip("transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "_CELL_S", 0.005)
        saved = []
        results = llama.run(
            llama.Run(
                models=["tiny"],
                device="cpu",
                contenders=["bf16", "int8_int8"],
                batches=[2],
                prompt=8,
                context=16,
                backend="aot_eager",
            ),
            save=lambda results: saved.append(len(results["rows"])),
        )
        assert saved == [2, 4, 6, 8]
        return results


def test_decoders_are_measured_in_every_case(decoders: dict) -> None:
    rows = decoders["rows"]
    cases = [(row["scheme"], row["variant"], row["phase"], row["batch"], row["tokens"]) for row in rows]
    assert cases == [
        (scheme, variant, *case)
        for scheme in ("bf16", "int8_int8")
        for variant in ("plain", "fused")
        for case in (("decode", 2, 2), ("prefill", 1, 8))
    ]
    for row in rows:
        assert min(row["eager_tokens_s"], row["compiled_tokens_s"], row["eager_host_us"], row["weights_mib"]) > 0
        assert (row["compile_s"] is not None) == (row["phase"] == "decode")  # the first case alone
    weights = {row["scheme"]: row["weights_mib"] for row in rows}
    assert weights["int8_int8"] < weights["bf16"]


def test_decoders_in_the_documents(decoders: dict) -> None:
    text = llama.render(decoders)
    assert "| scheme | batch 2, eager | batch 2, compiled | prompt, eager | prompt, compiled |" in text
    assert text.count("\n| `bf16` | ") == 4 and text.count(" (1.00) |") >= 8
    assert "**tiny**, 2 layers, fused blocks" in text


def test_an_unmodified_model_decodes_in_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(generate, "_FIRST", 2)
    monkeypatch.setattr(generate, "PROMPT", 24)
    path = tmp_path / "generate.csv"
    sizes = ["--model", "tiny", "--layers", "1", "--context", "16", "--steps", "40", "--backend", "eager"]
    for schemes in (["bf16"], ["int8", "int8, bf16 head"]):
        words = ["generate", "--device", "cpu", *sizes, "--schemes", *schemes]
        generate.run(bench_command.make_parser().parse_args(words), path)
    turns = ["--turns", str(tmp_path / "turns")]
    words = ["generate", "--device", "cpu", *sizes, "--schemes", "int8", "--ways", "prompt", *turns]
    *_, prompt = generate.run(bench_command.make_parser().parse_args(words), path)["rows"]
    assert prompt["way"] == "prompt" and prompt["tokens_s"] > 0 and prompt["first_s"] is None
    results = read(path)
    rows = [row for row in results["rows"] if row["way"] != "prompt"]
    schemes, ways = ["bf16", "int8", "int8, bf16 head"], ["eager", "static", "compiled"]  # the default
    assert [(row["scheme"], row["way"]) for row in rows] == [(s, way) for s in schemes for way in ways]
    assert all(row["tokens_s"] > 0 and row["first_s"] > 0 for row in rows)
    weights = {row["scheme"]: row["weights_mib"] for row in rows}
    assert weights["bf16"] > weights["int8, bf16 head"] > weights["int8"]
    text = generate.render(results)
    assert "**tiny**, batch 1: tokens/s (times bf16)" in text and "\n| `int8`, bf16 head | " in text
    plots.draw_unmodified(results, tmp_path / "generate.svg")
    assert "step compiled by hand" in (tmp_path / "generate.svg").read_text()


def test_a_diffusion_transformer_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    sizes = ["--model", "tiny", "--side", "4", "--backend", "eager"]
    words = ["diffusion", "--device", "cpu", *sizes, "--schemes", "int8_int8"]
    results = diffusion.run(bench_command.make_parser().parse_args(words), tmp_path / "diffusion.csv")
    (row,) = results["rows"]
    assert row["step_ms"] > 0 and row["weights_mib"] > 0
    assert "\n| `int8_int8` | " in diffusion.render(results)


def test_gguf_files_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    from test_gguf_native import write as write_gguf

    monkeypatch.setattr(gguf, "_BACKEND", "eager")
    monkeypatch.setattr(gguf, "_ROUNDS", 1)
    files = [str(write_gguf(tmp_path / f"{kind}.gguf", kind)) for kind in ("Q4_K", "Q8_0")]
    for one in files:  # two runs
        words = ["gguf", one, "--steps", "40", "--prompt", "16", "--threads", "1"]
        results = gguf.run(bench_command.make_parser().parse_args(words), tmp_path / "gguf.csv")
    assert [row["file"] for row in results["rows"] if row["name"] == "qao"] == ["Q4_K", "Q8_0"]
    assert all(row["decode"] > 0 and row["prefill"] > 0 and row["read_mib"] < row["mib"] for row in results["rows"])
    assert read(tmp_path / "gguf.csv")["meta"]["threads"] == 1
    text = gguf.render(results)
    assert "\n| `Q8_0` | " in text and "1 threads" in text


def test_a_crash_of_llama_cpp_leaves_it_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gguf, "_TRIAL", "import os; os.abort()")
    assert not gguf.llama_cpp_runs(Path("model.gguf"))
    assert "llama.cpp is left out: it ends with -6 on model.gguf" in capsys.readouterr().out
    monkeypatch.setattr(gguf, "_TRIAL", "import sys; assert sys.argv[1:] == ['model.gguf']")
    assert gguf.llama_cpp_runs(Path("model.gguf")) and not capsys.readouterr().out


def test_two_runs_of_decoders_become_one(decoders: dict) -> None:
    meta, rows = decoders["meta"], decoders["rows"]
    again = [rows[1] | {"eager_tokens_s": 1.0}, rows[2]]
    joined = llama.add({"meta": meta, "rows": rows[:2]}, {"meta": meta | {"date": "later"}, "rows": again})
    assert joined == {"meta": meta | {"date": "later"}, "rows": [rows[0], *again]}
    with pytest.raises(ValueError, match="another setting"):
        llama.add(decoders, {"meta": meta | {"torch": "2.0"}, "rows": []})


@pytest.mark.parametrize("variant", llama_model.VARIANTS)
def test_the_code_of_one_block_serves_all(variant: str) -> None:
    pytest.importorskip("transformers")
    graphs = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        nonlocal graphs
        graphs += 1
        return graph

    torch._dynamo.reset()
    with torch.inference_mode():
        model = llama_model.Model("tiny", 3, LAYER_SCHEMES["int8_int8"], variant, "cpu", quantize_head=True)
        inputs = llama_model.Inputs.decode(model, 2, 16, "cpu")
        llama_model.Step(model, inputs, lambda function: torch.compile(function, backend=count, fullgraph=True))()
    assert graphs == 3  # embedding, block, head


def test_the_likeliest_token() -> None:
    logits = torch.randn(3, 1280)
    assert torch.equal(llama_model._likeliest(logits), logits.argmax(-1))


def test_a_decoder_that_computes_something_else_is_refused() -> None:
    x = torch.randn(2, 64)
    llama.check_logits(x * 1.1, x, "nearly the same")
    with pytest.raises(RuntimeError, match="fused: logits differ by 1."):
        llama.check_logits(x.roll(1), x, "fused")
    with pytest.raises(RuntimeError, match="nan"):
        llama.check_logits(x * torch.nan, x, "fused")


@pytest.mark.parametrize("preset", ["tiny", "qwen2.5-0.5b"])
def test_the_example_block_computes_what_the_layer_of_transformers_computes(preset: str) -> None:
    transformers = pytest.importorskip("transformers")
    numbers = llama_model.PRESETS[preset] | {"num_hidden_layers": 1, "vocab_size": 8}
    config = transformers.AutoConfig.for_model(**numbers, attn_implementation="sdpa")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).model
    layer = model.layers[0].eval().requires_grad_(False)
    for parameter in layer.parameters():  # norms of all ones and biases of zeros would hide an error
        torch.nn.init.normal_(parameter, std=0.1)
    block = DecoderBlock(layer, None)
    for positions in (torch.arange(6), torch.tensor([5])):
        x = torch.randn(2, len(positions), config.hidden_size, dtype=torch.float64)
        cos, sin = model.rotary_emb(x, positions[None])
        caches = [llama_model.Cache(config, 2, positions, 6, torch.float64) for _ in range(2)]
        caches[1].keys.copy_(caches[0].keys), caches[1].values.copy_(caches[0].values)
        cache = {llama_model.cache_keyword(layer): caches[0]}
        expected = layer(x, attention_mask=None, position_embeddings=(cos, sin), **cache)
        delta, residual = block(0.25 * x, 0.75 * x, cos, sin, caches[1])
        torch.testing.assert_close(delta + residual, expected, rtol=1e-6, atol=1e-6)  # norms work in float32
        torch.testing.assert_close(caches[1].keys, caches[0].keys, rtol=1e-6, atol=1e-6)


# ---- documents -------------------------------------------------------------------------------------------------------


def test_table_replaces_its_block_and_nothing_else(
    results: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "ROOT", tmp_path)
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    write(results, tmp_path / "cpu" / "int4.csv")
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
    saved = read(tmp_path / "cpu" / "int4.csv")["rows"]
    assert [row["us"] for row in saved] == pytest.approx([row["us"] for row in results["rows"]])


def test_the_documents_say_what_the_results_and_the_kernels_say() -> None:
    pytest.importorskip("qao._host", reason="qao was built without qao._host")
    assert table.update(check=True) == 0, "run `python -m bench table`"


def test_a_body_has_the_cells_that_plan_gives_it() -> None:
    """int4 at one token on an H200 is sm90_skinny's, at 4096 sm90_ws's; int8_int8 at one token sm90_mma's."""
    pytest.importorskip("qao._host", reason="qao was built without qao._host")
    about = {"device": "NVIDIA H200", "sms": 132, "torch": "2", "date": "today", "source_hash": "0123456789abcdef"}
    row = {"N": 4096, "K": 4096, "us": 2.0, "bf16_us": 8.0, "floor_us": 1.0}
    grouping = {"group_size": 128, "symmetric": False}
    results = {
        "int4": {"meta": about, "rows": [row | grouping | {"M": m} for m in (1, 4096)]},
        "int8_int8": {
            "meta": about,
            "rows": [row | {"group_size": None, "symmetric": None, "M": m} for m in (1, 4096)],
        },
    }
    tables = {page: kernel_pages.render(page, results).partition("\n\n")[2].splitlines() for page in kernel_pages.PAGES}
    assert tables["sm90_skinny"] == ["| N × K | M=1 |", "| :--- | ---: |", "| 4096 × 4096 | 2.0 (4.00) |"]
    assert tables["sm80_mma"] == tables["sm90_skinny"]
    cells = ["| `int4` | 4.00, 50% |", "| `int8_int8` | 4.00, 50% |"]
    assert tables["sm90_ws"] == ["| scheme | M=4096 |", "| :--- | ---: |", *cells]


def test_the_fastest_scheme_is_bold() -> None:
    row = {"K": 4096, "N": 8, "cached": False, "bf16_us": 4.0}
    about = {"device": "GPU", "torch": "2", "date": "today", "source_hash": "0123456789abcdef"}
    times = {"int4": {1: (1.0, 4.0), 64: (2.0, 2.0)}, "int8": {1: (4.0, 4.0), 64: (1.0, 1.0)}, "fp8": {1: (8.0,)}}
    results = {
        word: {"meta": about, "rows": [row | {"M": m, "us": us} for m, cells in by_m.items() for us in cells]}
        for word, by_m in times.items()
    }
    for left_out in ({"K": 64}, {"cached": True}):
        results["int8"]["rows"].append(row | {"M": 1, "us": 0.1} | left_out)
    assert choosing.render_tokens(results).splitlines() == [
        "GPU, torch 2, today, sources 0123456789ab; layers 8 × 4096.",
        "",
        "| tokens M | `int4` | `int8` | `fp8` |",
        "| :--- | ---: | ---: | ---: |",
        "| 1 | **2.00** | 1.00 | 0.50 |",
        "| 64 | 2.00 | **4.00** | – |",
    ]


def test_every_scheme_has_a_kernel_everywhere() -> None:
    host = pytest.importorskip("qao._host", reason="qao was built without qao._host")
    rows = host.kernels()
    places = {row.get("isa", row.get("compute_capability")) for row in rows}
    assert places == {*ISA_FLAGS, 80, 86, 89, 90, 100, 120}
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
    assert "| CPU | any x86-64, AVX-VNNI, AVX-512 VNNI, AVX-512 BF16 | AVX2, AMX |" in on_cpus
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


# ---- tuner -----------------------------------------------------------------------------------------------------------

COSTS: tune.Costs = {("kInt8Int8", 64): (0.25, 2.0, 4.0, 0.5), ("kInt8Int8", 128): (0.375, 3.0, 5.0, 0.25)}
MEMORY = tune.Memory(4e6, 0.25)


def _timings(shapes: Iterable[tuple[int, int]], tokens: Iterable[int]) -> list[tune.Timing]:
    """A GPU of 132 multiprocessors for which COSTS and MEMORY hold; the plan as built takes the largest tile."""
    timings = []
    for (n, k), m in itertools.product(shapes, tokens):
        for row, split in itertools.product(COSTS, (1, 2, 4)):
            waves = math.ceil(math.ceil(n / 128) * math.ceil(m / row[1]) * split / 132)
            parts = (1.0, float(split)) if split > 1 else (0.0, 0.0)
            counts = (float(waves * math.ceil(k / 128 / split)), float(waves), *parts)
            timing = tune.Timing((m, n, k), row, counts, float(n * k), 0.0, row[1] == 128 and split == 1)
            timings.append(timing._replace(us=tune.expected(timing, COSTS, MEMORY)))
        timings.append(tune.Timing((m, n, k), None, (0.0,) * 4, float(n * k), 10000.0, False))
    return timings


def test_the_tuner_finds_the_costs_behind_its_timings() -> None:
    timings = _timings(((4096, 4096), (8192, 8192), (1024, 14336), (28672, 4096)), (64, 200, 1000, 4096))
    assert tune.fit_memory(timings, 4e6) == MEMORY
    costs = tune.fit(timings, MEMORY)
    assert costs.keys() == COSTS.keys()
    for row, expected in COSTS.items():
        assert costs[row] == pytest.approx(expected, rel=1e-2, abs=1e-3)
    assert max(tune.losses(timings, costs, MEMORY).values()) == pytest.approx(1)
    swapped = dict(zip(costs, reversed(costs.values()), strict=True))
    assert max(tune.losses(timings, swapped, MEMORY).values()) > 1.05
    assert max(tune.chosen_losses(timings).values()) > 1.05


def test_the_tuner_gives_no_negative_cost() -> None:
    timings = [
        tune.Timing((64, tiles, 0), ("kInt8Int8", 64), (tiles, 1.0, 0.0, 0.0), 0.0, 2 * tiles - 1, True)
        for tiles in (1.0, 2.0, 4.0, 8.0)
    ]
    ((k_tile, wave, split, part),) = tune.fit(timings, MEMORY).values()
    assert k_tile > 0 and wave == split == part == 0


def test_the_tuner_moves_costs_to_where_they_choose_faster_plans() -> None:
    """An x that is quantized beforehand does not restrict the choice."""
    shapes, tokens = ((4096, 4096), (8192, 8192), (1024, 14336), (28672, 4096)), (64, 200, 300, 1000, 4096)
    timings = [t._replace(us=t.us + 3, before=3.0) for t in _timings(shapes, tokens)]
    near = tune.fit(timings, MEMORY)
    assert tune_choices.refine([timings], near, MEMORY) == near  # nothing to gain
    far = {("kInt8Int8", 64): (0.25, 2.0, 9.0, 2.5), ("kInt8Int8", 128): (0.55, 3.0, 5.0, 0.25)}
    found = tune_choices.refine([timings, timings], far, MEMORY, rounds=300)
    average = {
        name: geometric_mean(tune.losses(timings, costs, MEMORY).values())
        for name, costs in (("far", far), ("found", found))
    }
    assert average["far"] > 1.02 and average["found"] < 1 + (average["far"] - 1) / 2
    assert found == tune_choices.refine([timings, timings], far, MEMORY, rounds=300)


def test_the_tuner_rewrites_its_rows_and_no_others(tmp_path: Path) -> None:
    table_path = tmp_path / "costs.inc"
    table_path.write_text(tune.TABLE.read_text())
    before, memory = tune.read_table()
    assert memory.bytes_per_us > 0 and all(len(row) == 4 for row in before.values())
    for _ in range(2):  # the second time nothing changes
        tune.write_table(COSTS, MEMORY, "NVIDIA Test", table_path)
        assert tune.read_table(table_path) == (before | COSTS, MEMORY)
        assert "// Written by `python -m bench tune` on an NVIDIA Test.\n" in table_path.read_text()


def test_a_sweep_becomes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a program in qao_sweep's place that answers from COSTS."""
    shapes = {(layer.n, layer.k) for layer in LAYERS["cuda"]} | set(tune.UNSEEN)
    answers: dict[str, list[str]] = {}
    for timing in _timings(shapes, {*TOKENS["cuda"], *tune.BETWEEN, *tune.UNSEEN_TOKENS}):
        (operands, tile_m), (m, n, k) = timing.row or ("", 0), timing.problem
        entry = {"m": m, "n": n, "k": k, "operands": operands, "tile_m": tile_m, "counts": timing.counts}
        entry |= {"bytes": timing.bytes, "us": timing.us, "chosen": timing.chosen, "final": True, "plan": ""}
        answers.setdefault(f"{m} {n} {k}", []).append(json.dumps(entry))
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    program = tmp_path / "sweep"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nanswers = json.load(open({str(tmp_path / 'answers.json')!r}))\n"
        "for line in sys.stdin: print(*answers[line.strip()], sep='\\n')\n"
    )
    program.chmod(0o755)
    table_path = tmp_path / "costs.inc"
    table_path.write_text(tune.TABLE.read_text())
    assert tune.run(tune.OPERANDS, program, "NVIDIA Test", 4e6, table_path)
    assert "unseen layers: 1.000 times the best" in capsys.readouterr().out
    costs, memory = tune.read_table(table_path)
    assert memory == MEMORY
    for row, expected in COSTS.items():
        assert costs[row] == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_choices_are_compared_with_interleaved_plans(tmp_path: Path) -> None:
    """A plan that was fastest once, but is not among the final ones, does not count."""
    shapes = plans.layers(1, 40)
    assert shapes == plans.layers(1, 40) != plans.layers(2, 40)
    assert all(plans.LEAST <= size <= plans.MOST for shape in shapes for size in shape)
    some = plans.problems(shapes, 2, "1")
    assert len(set(some)) == 80 and max(m * n * k for m, n, k in some) <= plans.MOST_PRODUCTS
    answers = [
        f'"chosen": {chosen}, "final": {final}, "us": {us}, "plan": "{us} us"'
        for chosen, final, us in (("true", "true", 12), ("false", "true", 10), ("false", "false", 9))
    ]
    program = tmp_path / "sweep"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfor m, n, k in map(str.split, sys.stdin):\n    for answer in {answers}:\n"
        """        print(f'{{"m": {m}, "n": {n}, "k": {k}, "operands": "", "counts": [], "bytes": 1, {answer}}}')\n"""
    )
    program.chmod(0o755)
    rows = plans.measure(program, "int8_int8", some)
    assert {(row["us"], row["best_us"], row["plans"]) for row in rows} == {(12, 10, 3)}
    assert {(row["plan"], row["best_plan"]) for row in rows} == {("12 us", "10 us")}
    assert "1.200" in plans.render({"meta": describe("cpu") | {"seed": 1}, "rows": rows})


def test_another_model_off_its_grid_computes_the_same() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, vocab_size=64, num_hidden_layers=2)
    ).double()
    ids = torch.arange(20)[None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids).logits
        calibrate.off_grid(model)
        assert torch.allclose(model(ids).logits, expected, rtol=1e-6, atol=1e-9)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == ("layers" not in name), name
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate.permuted(model)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected, rtol=1e-4, atol=1e-6)  # norms are computed in float32
    for name, value in model.state_dict().items():
        if value.dim() == 2:
            assert not torch.equal(value, before[name]), name
            assert torch.equal(value.flatten().sort()[0], before[name].flatten().sort()[0]), name


def test_methods_of_four_bits_are_applied_alike() -> None:
    """Of qao and of others: the same layers, the bits that are stored, and the model itself stays."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rounded, _, bits = four_bits._applied(lambda weight: (weight.sign(), 5.5 * weight.numel()), model, {"2": None}, [])
    assert bits == 5.5 and torch.equal(rounded[2].weight, before["2.weight"])
    assert all(torch.equal(rounded[i].weight, before[f"{i}.weight"].sign()) for i in (0, 1))
    quantized, _, bits = four_bits._applied(four_bits._int4(32), model, {"2": None}, [])
    assert [type(layer).__name__ for layer in quantized] == ["QuantLinear", "QuantLinear", "Linear"]
    assert bits == 4 + 2 * 16 / 32
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    whole = (lambda copy, data, rules: float(len(data) + len(rules)), 0)
    assert four_bits._applied(whole, model, {"2": None}, [])[2] == 2


def test_mixes_of_ggml() -> None:
    """Types that llama.cpp gives the layers of 30 blocks, and the mean bits of Llama's layers in Q4_K_M."""
    kinds = ["self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"]
    fine = [
        f"{index}.{kind}"
        for index in range(30)
        for kind in kinds
        if ggml.type_of(f"model.layers.{index}.{kind}", "Q4_K_M", 30) == "Q6_K"
    ]
    blocks = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 26, 27, 28, 29]
    assert fine == [f"{index}.{kind}" for index in blocks for kind in ("self_attn.v_proj", "mlp.down_proj")]
    assert ggml.type_of("model.layers.7.mlp.down_proj", "Q5_K_M", 30) == "Q5_K"


def test_importance_matrix() -> None:
    """Mean squares of the inputs over all tokens; the model has no hooks afterwards."""
    layer = torch.nn.Linear(3, 2, bias=False)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), layer)
    data = [torch.tensor([[0, 1]]), torch.tensor([[2, 2, 4]])]
    found = ggml.mean_squares(model, {"1": layer}, data)
    expected = model[0](torch.tensor([0, 1, 2, 2, 4])).square().mean(0)
    assert torch.allclose(found["1"], expected) and not layer._forward_pre_hooks


def test_weights_by_ggml() -> None:
    """As gguf quantizes them; blocks of 256 in rows of 96; importance reduces the error that it weighs."""
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    for name in ("Q4_0", "Q4_1", "Q8_0"):
        (values, bits), (others, same) = ggml.quantized(weight, name), four_bits.gguf(name)(weight)
        assert torch.equal(values, others) and bits == same
    importance = torch.linspace(0, 1, 96).pow(4)
    for name, size in (("Q4_K", 4.5), ("Q6_K", 6.5625), ("IQ4_XS", 4.25)):
        (plain, bits), (better, _) = ggml.quantized(weight, name), ggml.quantized(weight, name, importance)
        assert bits == size * weight.numel()
        losses = [((values - weight).square() * importance).sum() for values in (plain, better)]
        assert losses[1] < losses[0] < 0.01 * (weight.square() * importance).sum()


def test_four_bits_in_the_documents() -> None:
    meta = {"device": "cpu", "torch": "2", "date": "2026-01-01", "source_hash": "0" * 64, "peers": {"hqq": "1"}}
    meta |= {"windows": 6, "window": 512, "sentences": 320, "nats_per_token": 2.6}
    row = {"seconds": 90.0, "samples": 16, "standard_error": 0.001, "divergence_error": 0.002, "perplexity": 14.0}
    rows = [row | {"method": "data", "bits": 4.5, "nats_above": 0.02, "divergence": 0.05}]
    row |= {"permuted": 0.12, "permuted_error": 0.003}
    row |= {"seconds": 3.4, "samples": 0, "standard_error": 0.004, "neighbors_kept": 0.85, "cosine_mean": 0.97}
    rows.append(row | {"method": "more", "bits": 5.0, "nats_above": 0.01, "divergence": 0.03})
    rows.append(row | {"method": "less", "bits": 4.5, "nats_above": 0.01, "divergence": 0.09})
    lines = four_bits.render({"meta": meta, "rows": rows}).splitlines()
    assert "2.600 nats a token in float32 (perplexity 13.46); 320 sentences; hqq 1." in lines[0]
    assert lines[4:] == [
        "| data | 4.50 | 0.0500 ± 0.0020 |  | 14.00 | +2.00% ± 0.10% |  |  | 90 |",
        "| less | 4.50 | 0.0900 ± 0.0020 | 0.1200 ± 0.0030 | 14.00 | +1.00% ± 0.40% | 85.0% | 0.9700 | 3 |",
        "| more | 5.00 | 0.0300 ± 0.0020 | 0.1200 ± 0.0030 | 14.00 | +1.00% ± 0.40% | 85.0% | 0.9700 | 3 |",
    ]


def test_two_runs_of_four_bits_become_one() -> None:
    first, second, third = list(four_bits.METHODS)[:3]
    before = {"meta": {"nats_per_token": 2.8}, "rows": [{"method": second, "bits": 1}, {"method": third, "bits": 1}]}
    other = {
        "meta": {"nats_per_token": 2.80001},
        "rows": [{"method": third, "permuted": 2}, {"method": first, "bits": 2}],
    }
    rows = [{"method": first, "bits": 2}, {"method": second, "bits": 1}, {"method": third, "bits": 1, "permuted": 2}]
    assert four_bits.joined(before, other) == {"meta": before["meta"], "rows": rows}
    other["meta"]["nats_per_token"] = 2.9
    with pytest.raises(AssertionError):
        four_bits.joined(before, other)


def test_the_command_joins_runs_of_four_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bench_command.RESULTS / "cpu" / "four_bits.csv"
    shutil.copy(source, tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "four_bits", "--add", str(source), "--out", str(tmp_path)])
    bench_command.main()
    assert (tmp_path / source.name).read_text() == source.read_text()


def test_two_runs_of_calibration_become_one() -> None:
    first, second = {"model": "fp32", "nats_per_token": 2.7}, {"model": "fp32", "nats_per_token": 2.70001}
    before = {"meta": "old", "rows": [first, {"model": "int4 g32", "samples": 1}, {"model": "int4 g128", "samples": 1}]}
    other = {"meta": "new", "rows": [second, {"model": "fp8_fp8", "samples": 2}, {"model": "int4 g128", "samples": 2}]}
    rows = [
        second,
        {"model": "int4 g128", "samples": 2},
        {"model": "fp8_fp8", "samples": 2},
    ]  # no such case as int4 g32
    assert calibrate.joined(before, other) == {"meta": "new", "rows": rows}


def test_a_rotation_is_a_hadamard_matrix_by_blocks() -> None:
    x = torch.randn(3, 96, dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < 32:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    expected = (x.view(3, 3, 32) @ matrix / 32**0.5).view(3, 96)
    torch.testing.assert_close(rotation.rotated(x, 32), expected)
    assert rotation.block_of(96, 128) == 32
    assert rotation.block_of(1536, 128) == 128


def test_a_rotated_layer_computes_the_same() -> None:
    linear = torch.nn.Linear(96, 8, dtype=torch.float64)
    x = torch.randn(3, 96, dtype=torch.float64)
    expected = linear(x)
    with torch.no_grad():
        linear.weight.copy_(rotation.rotated(linear.weight, 32))
    torch.testing.assert_close(rotation.Rotated(linear, 32)(x), expected)
    assert not torch.allclose(linear(x), expected)


def test_rotations_stand_beside_the_same_without_one() -> None:
    meta = {"device": "cpu", "torch": "2", "date": "2026", "source_hash": "0" * 64, "windows": 2, "window": 512}
    plain = {"scheme": "int8", "method": None, "block": 0, "layers": "all", "nats_above": 0.04, "standard_error": 0.01}
    turned = plain | {"method": "gptq", "block": 64, "difference": -0.02, "standard_error_of_difference": 0.005}
    text = rotation.render({"meta": meta | {"nats_per_token": 2.0}, "rows": [plain, turned]})
    assert text.splitlines()[-2:] == [
        "| int8, no data | none | +2.00% ± 0.50% |  |",
        "| int8, gptq | all, 64 | +2.00% ± 0.50% | -1.00% ± 0.25% |",
    ]


def test_a_language_model_is_shown_when_quality_and_speed_are_measured() -> None:
    meta = {"device": "cpu", "torch": "2", "date": "2026", "source_hash": "0" * 64, "windows": 2, "window": 512}
    row = {"model": "fp32", "nats_per_token": 2.0, "bits_per_byte": 1.0, "nats_above": 0.0, "standard_error": 0.0}
    both = row | {"model": "int8", "nats_above": 0.1, "bytes": 2**20, "times_bf16": 1.5}
    rows = [row | {"bytes": 2**21, "times_bf16": 1.0}, both, row | {"model": "half"}]
    text = language.render({"meta": meta | {"text_bytes": 9}, "rows": rows})
    assert text.splitlines()[-1] == "| int8 | 1 | 1.0000 | +5.00% ± 0.00% | 1.50 |"


def test_experts_times_every_scheme_beside_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "_CELL_S", 0.002)
    monkeypatch.setitem(experts.MODELS, "tiny", experts_contenders.Model(8, 2, 64, 128))
    results = experts.run("cpu", ["tiny"], [1, 20])
    schemes = set(experts.SCHEMES) - {"fp8_fp8_fast"}
    assert {row["name"] for row in results["rows"] if "times_loop" in row} == schemes
    assert experts.misses(results["rows"])[1] == len(schemes) * len(experts.ROUTINGS) * 2
    text = experts.render(results)
    assert text.count("| tiny |") == len(experts.ROUTINGS) * (len(schemes) + 1)
    timed = experts_contenders.Experts(experts.MODELS["tiny"], "cpu", ["int4", "int8_int8"])
    calls = 2 * 20 * 2 * 64 * 128 / 1e12
    assert timed.floors(20, "uniform", (1e30, 1e12))["int8_int8"] == calls / 2
    assert timed.floors(1, "uniform", (1e9, 1e30))["int8_int8"] == 2 * (64 * 128 + 4 * 64) / 1e9


def test_a_run_goes_on_with_rows_of_the_same_description(tmp_path: Path) -> None:
    path, meta = tmp_path / "a.csv", describe("cpu") | {"engines": ("a", "b")}
    assert earlier(path, meta) == []
    write({"meta": meta, "rows": [{"n": 1}]}, path)
    assert earlier(path, meta) == [{"n": 1}]
    assert earlier(path, meta | {"source_hash": "another"}) == []


def test_experts_are_chosen_by_the_law_that_is_asked_for() -> None:
    model = experts_contenders.Model(64, 8, 16, 16)
    for routing in experts.ROUTINGS:
        index, ends = experts_contenders.route(model, 100, routing)
        assert len(index) == ends[-1] == 800 and (torch.bincount(index) == 8).all()
    counts = torch.cat((ends[:1], ends.diff()))
    assert counts[0] > 80 and counts[32:].float().mean() < 8


@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize("block", [8, 16])
def test_routings_as_vllm_takes_them(tokens: int, block: int) -> None:
    """Every slot stands once, in a tile of its expert; a tile's other rows are no slots."""
    model = experts_contenders.Model(64, 8, 16, 16)
    index, ends = experts_contenders.route(model, tokens, "zipf")
    expert_of_row = torch.repeat_interleave(torch.arange(64), ends.diff(prepend=ends.new_zeros(1)))
    chosen = [set(expert_of_row[index == token].tolist()) for token in range(tokens)]

    slots, owners, rows = vllm_experts.tiles(index, ends, model.top_k, block)
    assert slots is not None and rows % block == 0 and rows <= len(slots) <= len(owners) * block
    held: list[set[int]] = [set() for _ in range(tokens)]
    for tile in range(int(rows) // block):
        for slot in slots[tile * block : (tile + 1) * block].tolist():
            if slot < tokens * 8:
                held[slot // 8].add(int(owners[tile]))
    assert held == chosen and (slots < tokens * 8).sum() == tokens * 8

    nothing, owners, rows = vllm_experts.tiles(index, ends, model.top_k, block, alone=True)
    assert nothing is None and int(rows) == tokens * 8 * block
    assert [set(own.tolist()) for own in owners.view(tokens, 8)] == chosen


def test_the_kernel_of_vllm_is_cut_out_of_its_module() -> None:
    text = (
        "import vllm\n\n@decorate\ndef write_zeros_to_output(a):\n    return a\n\n\ndef another():\n    pass\n\n\n"
        "@decorate\ndef fused_moe_kernel(\n    a,\n):\n    return a\n"
    )
    source = vllm_experts.kernel_source(text)
    assert "vllm" not in source and "another" not in source
    assert source.count("@decorate\ndef ") == 2 and source.endswith("def fused_moe_kernel(\n    a,\n):\n    return a\n")


def test_vllm_is_launched_by_its_table_or_its_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QAO_BENCH_PEERS", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200 NVL")
    assert vllm_experts.config_of(1, 8, 64, "")["BLOCK_SIZE_M"] == 16
    (tmp_path / "configs").mkdir()
    table = {"triton_version": "3", "1": {"BLOCK_SIZE_M": 32}, "64": {"BLOCK_SIZE_M": 48}}
    (tmp_path / "configs" / "E=8,N=64,device_name=NVIDIA_H200.json").write_text(json.dumps(table))
    assert vllm_experts.config_of(20, 8, 64, "") == {"BLOCK_SIZE_M": 32}
    assert vllm_experts.config_of(40, 8, 64, "") == {"BLOCK_SIZE_M": 48}
    assert vllm_experts.config_of(40, 8, 64, ",dtype=fp8_w8a8")["BLOCK_SIZE_K"] == 128


def test_prefill_compares_with_the_fastest_other() -> None:
    """Bars apply to the mean over cells and to each cell; peers that did not run are ignored."""
    shapes = prefill.drawn(3, 8)
    assert shapes == prefill.drawn(3, 8) != prefill.drawn(4, 8)
    assert len(shapes) == 8 and max(n * k for n, k in shapes) <= prefill.MOST_WEIGHTS
    cell = {"family": "fp8", "n": 1024, "k": 2048}
    rows = [
        {**cell, "m": m, "us": {"fp8_fp8": 10.0, "vLLM fp8": 12.0, "SGLang fp8": us}} for m, us in ((256, 9), (512, 13))
    ]
    rows.append({**cell, "m": 1024, "us": {"fp8_fp8": 10.0}})
    (bar, *_) = prefill.FAMILIES["fp8"].bars
    assert [round(ratio, 2) for ratio, _ in prefill.ratios(rows, "fp8", bar)] == [0.9, 1.2]
    lines, compared = prefill.misses(rows)
    assert compared == 2 and [line.split(": ")[0] for line in lines] == [
        "fp8_fp8 against vLLM fp8 and SGLang fp8, 1024 x 2048, M = 256",
        "fp8_fp8 against vLLM fp8 and SGLang fp8",
    ]
    results = {"meta": describe("cpu"), "rows": rows}
    assert "| 1 of 2 |" in prefill.render(results)
    assert "| `fp8_fp8` / vLLM fp8 or SGLang fp8 | 0.90 | 1.20 |" in prefill.render_others(results)
    for family in prefill.FAMILIES.values():
        assert {bar.name for bar in family.bars} <= set(family.ours)
