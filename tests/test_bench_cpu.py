"""CPU benchmarks: every scheme against ``F.linear``, and thread scaling."""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from qao.schemes import SCHEMES as LAYERS

from bench import busy, host, linear, result_files, threads
from bench.schemes import SCHEMES


def stored(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as a file holds them: numbers are rounded."""
    found: list[dict[str, Any]] = result_files.loads(result_files.dumps({"meta": {}, "rows": rows}))["rows"]
    return found


def _linear(path: Path, *words: str) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser()
    linear.add_arguments(parser)
    return linear.run(parser.parse_args(["--seconds", "1e-4", *words]), path)


def test_a_cell_is_measured_for_every_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LAYERS", ("64x128",))
    path = tmp_path / "linear.json"
    _linear(path, "--layers", "64x128", "--m", "1", "--dtype", "float32")
    rows = _linear(path, "--layers", "64x128", "--m", "2", "--dtype", "float32", "--add")
    assert result_files.read_rows(path) == stored(rows)
    assert [(row["M"], row["scheme"]) for row in rows] == [(m, word) for m in (1, 2) for word in SCHEMES]
    assert all(row["ratio"] == pytest.approx(row["linear_us"] / row["us"], 1e-5) for row in rows)
    text = linear.render(result_files.read(path))
    assert text.count("| 64 × 128 |") == 2 and "float32 x" in text
    assert len(_linear(path, "--layers", "64x128", "--m", "2")) == len(SCHEMES)


def test_cells_below_their_bar() -> None:
    def row(scheme: str, m: int, ratio: float, dtype: str = "bfloat16") -> dict[str, Any]:
        return {"layer": "4096x4096", "scheme": scheme, "M": m, "ratio": ratio, "dtype": dtype}

    good = [row("int8", 16, 1.0), row("int8", 64, 1.05), row("fp8_fp8", 64, 1.0), row("int8_int4", 16, 1.5, "float32")]
    bad = [
        row("int8", 64, 1.04),
        row("int8_int8", 64, 1.59),
        row("fp8_int4", 1, 0.99),
        row("int8_int8", 16, 1.4, "float32"),
    ]
    lines, compared = linear.misses(good + bad)
    assert compared == 8 and [line.split(",")[0] for line in lines] == [one["scheme"] for one in bad]
    assert lines[0] == "int8, 4096x4096, M = 64: 1.04, the bar is 1.05"


def test_threads_are_counted_and_a_neighbor_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LAYER", (64, 128))
    monkeypatch.setattr(threads, "BUSY_TOKENS", 2)
    path = tmp_path / "threads.json"
    rows = threads.run(1e-4, [2], [1, 2], path)
    assert result_files.read_rows(path) == stored(rows)
    names = {"bf16", *SCHEMES}
    assert {(row["scheme"], row["threads"], row["busy"]) for row in rows} == {
        (name, *case) for name in names for case in ((1, False), (2, False), (2, True))
    }
    one = {row["scheme"]: row["us"] for row in rows if row["threads"] == 1}
    for row in rows:
        if not row["busy"]:
            assert row["efficiency"] == pytest.approx(one[row["scheme"]] / (row["us"] * row["threads"]))
    assert threads.render(result_files.read(path)).count("\n| ") == len(names) + 2


def test_bars_of_threads() -> None:
    cell = {"M": 64, "threads": 2, "busy": False}
    busy = {"M": 256, "threads": 2, "busy": True}
    rows = [
        {**cell, "scheme": "bf16", "efficiency": 0.5},
        {**cell, "scheme": "int4", "efficiency": 0.79},
        {**cell, "scheme": "int8", "efficiency": 0.8},
        {**busy, "scheme": "bf16", "slowdown": 1.5},
        {**busy, "scheme": "int4", "slowdown": 3.0},
        {**busy, "scheme": "int8", "slowdown": 3.1},
    ]
    lines, compared = threads.misses(rows)
    assert compared == 4
    assert lines == [
        "int4, M = 64, 2 threads: efficiency 0.79",
        "int8 next to a busy process: 3.10 times slower, bfloat16 1.50",
    ]


def test_layers_beside_a_busy_process_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "SIZE", 128)
    path = tmp_path / "busy.json"
    rows = busy.run(1e-4, [1, 2], path)
    assert result_files.read_rows(path) == stored(rows)
    assert [(row["M"], row["scheme"]) for row in rows] == [
        *((None, word) for word in LAYERS),
        *((m, name) for m in (1, 2) for name in (busy.LINEAR, *LAYERS)),
    ]
    assert all(row["slowdown"] == pytest.approx(row["busy_us"] / row["us"]) for row in rows)
    assert busy.render(result_files.read(path)).count("\n| ") == len(LAYERS) + 3


def test_bars_beside_a_busy_process() -> None:
    def weight(scheme: str, rate: float, slowdown: float) -> dict[str, Any]:
        return {"scheme": scheme, "M": None, "weights_s_core": rate, "slowdown": slowdown}

    rows = [weight("int4", 40e6, 1.5), weight("int8", 39e6, 1.5), weight("fp8", 40e6, 1.51)]
    rows += [{"scheme": name, "M": 16, "ratio": ratio} for name, ratio in ((busy.LINEAR, 1.0), ("int4", 2.0))]
    lines, compared = busy.misses([*rows, {"scheme": "int8", "M": 16, "ratio": 2.1}])
    assert compared == 8
    assert lines == [
        "int8, quantizing: 39.00 M weights a second and core",
        "fp8, quantizing: 1.51 times slower",
        "int8, M = 16: 2.10 times F.linear",
    ]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.timed
@pytest.mark.usefixtures("one_thread")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="an emulator may run it")
def test_quantizing_takes_a_core_no_longer_than_its_bar() -> None:
    """In CPU time, which other processes hardly change: 40 million weights per second."""
    dense = torch.nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    nvfp4 = partial(qao.QuantLinear.from_linear, dense, qao.Fp4WeightOnly("nvfp4"))
    for name, call in {**busy.quantize_calls(dense), "nvfp4": nvfp4}.items():
        seconds = []
        for _ in range(5):
            begun = time.process_time()
            call()
            seconds.append(time.process_time() - begun)
        assert dense.weight.numel() / min(seconds) >= busy.WEIGHTS_BAR, name


class _Linear(torch.autograd.Function):
    """The shortest function with a backward pass written in Python."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, operands: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ctx.weight = operands[0]
        return torch.nn.functional.linear(x, *operands)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None]:
        return grads[0] @ ctx.weight, None


class _FunctionLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = _Linear.apply(x, (self._parameters["weight"], self._parameters["bias"]))
        return y


@pytest.mark.timed
@pytest.mark.usefixtures("one_thread")
def test_a_call_with_gradients_takes_the_host_no_longer_than_a_function() -> None:
    """The best of some tries.

    ``bench host`` compares with nn.Linear, which has its autograd in C++. QuantLinear takes 0.9 to 1.25 times its time,
    depending on the CPU, so nn.Linear cannot be the bound of a test.
    """
    contenders = dict(host._contenders("cpu", 64, True))
    calls = {name: contenders[name] for name in host.LAYER_SCHEMES}
    x = contenders[host.BASELINE].args[0]
    calls["function"] = partial(_FunctionLinear(64, 64, dtype=torch.bfloat16), x)
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(5):
        seconds = host._host_seconds(calls, "cpu")
        least = {name: min(least[name], seconds[name] / seconds["function"]) for name in calls}
        if max(least.values()) <= 1.0:
            break
    assert max(least.values()) <= 1.0, least


@pytest.fixture
def all_cores() -> Iterator[None]:
    """One thread per core, so that a busy process takes the core of one."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(before)


@pytest.mark.timed
@pytest.mark.usefixtures("all_cores")
def test_a_busy_process_holds_up_quantizing_no_more_than_its_share() -> None:
    """Fair shares of two cores for three threads give 1.5. The best of some tries, as others may be busy, too."""
    dense = torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    calls = {name: call for name, call in busy.quantize_calls(dense).items() if name in ("int4", "int8", "fp8", "fp4")}
    least = dict.fromkeys(calls, float("inf"))
    for attempt in range(15):
        time.sleep(0 if attempt < 3 else 2)  # whatever else is busy may end
        alone = busy.times(calls, 0.1)
        with busy.busy_process():
            slowed = busy.times(calls, 0.1)
        least = {name: min(least[name], slowed[name] / alone[name]) for name in calls}
        if max(least.values()) < 2.5:
            break
    assert max(least.values()) < 2.5, least


@pytest.mark.timed
@pytest.mark.usefixtures("all_cores")
def test_a_busy_process_holds_up_products_no_more_than_linear() -> None:
    dense = torch.nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16)
    layers = {word: qao.QuantLinear.from_linear(dense, kind()) for word, kind in LAYERS.items()}
    calls = busy.product_calls(dense, layers, 16)
    least = dict.fromkeys(layers, float("inf"))
    with busy.busy_process(), torch.inference_mode():
        for attempt in range(12):
            time.sleep(0 if attempt < 3 else 2)
            slowed = busy.times(calls, 0.03)
            least = {name: min(least[name], slowed[name] / slowed[busy.LINEAR]) for name in layers}
            if max(least.values()) < 2:
                break
    assert max(least.values()) < 2, least
