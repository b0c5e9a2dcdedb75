"""Runs under compute-sanitizer: verdicts on its output, calls of operators, order of tests, and the summary.

gpu_sanitize.py also runs the test of single operators on a GPU.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import gpu_sanitize
import pytest
import qao
import torch
from gpu_sanitize import SUMMARY, TOOLS, judge, merged, problem
from qao.diagnostics.operator_checks import OPERATORS
from sanitize_plugin import Calls, Recorder, cuda_operators, ordered
from torch._subclasses.fake_tensor import FakeTensorMode

TILE = (
    "void qao::gemm::sm80_mma::sm80_mma<__half, qao::widen::Fp8, qao::gemm::sm80_mma::Tile<{}>, (bool)0>(Params)+0x{}"
)
SLICES = "(int)4, (int)1, (int)2, (int)2, (int)8, (int)3, (int)1"  # two slices of K of four warps each


def hazard(tile: str, write: int, read: int) -> list[str]:
    return [
        "tests/test_mm.py::test_one ========= Error: Potential RAW hazard detected at __shared__ 0xed0:",
        f"=========     Write Thread ({write},0,0) at {TILE.format(tile, '8bb0')}",
        f"=========     Read Thread ({read},0,0) at {TILE.format(tile, '9c00')}",
        "=========     Current Value : 12",
        "========= ",
        "PASSED [  1%]",
        "========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)",
    ]


def uninitialized(kernel: str) -> list[str]:
    return [
        "tests/test_mm.py::test_two ========= Uninitialized __global__ memory read of size 2 bytes",
        f"=========     at {kernel}+0x870",
        "========= ",
        "========= ERROR SUMMARY: 1 error",
    ]


@pytest.mark.parametrize(
    "tool,lines,errors,known",
    [
        ("racecheck", hazard(SLICES, 66, 168), 0, 1),  # of two slices, which meet at __syncthreads
        ("racecheck", hazard(SLICES, 66, 100), 1, 0),  # of one
        ("racecheck", hazard("(int)1, (int)1, (int)8, (int)2, (int)1, (int)3, (int)1", 2, 40), 1, 0),
        ("racecheck", [line.replace("qao::", "nvjet::") for line in hazard(SLICES, 66, 100)], 0, 1),  # of cuBLAS
        ("initcheck", uninitialized("void at::native::unrolled_elementwise_kernel<int>(int)"), 0, 1),
        ("initcheck", uninitialized("void qao::quantize::rows_kernel(qao::quantize::Params)"), 1, 0),
        ("memcheck", ["tests/test_mm.py::test_three PASSED", "========= ERROR SUMMARY: 0 errors"], 0, 0),
        ("memcheck", ["========= Something new", "========= ERROR SUMMARY: 3 errors"], 3, 0),
        ("synccheck", ["tests/test_mm.py::test_four Fatal Python error: Aborted"], 1, 0),
    ],
)
def test_judge(tool: str, lines: list[str], errors: int, known: int) -> None:
    assert judge(tool, lines)[:2] == (errors, known)


def test_an_error_is_shown_with_its_test() -> None:
    (report,) = judge("racecheck", hazard(SLICES, 66, 100)).reports
    assert report[0] == "tests/test_mm.py::test_one" and "Write Thread (66,0,0)" in report[2]


# ---- calls of operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cuda_operators())
def test_an_operator_is_near_its_reference(name: str, device: str) -> None:
    with Calls(device) as calls:
        assert OPERATORS[name](device) < 2.0**-6
    pre_hopper = device == "cuda" and torch.cuda.get_device_capability() < (9, 0)
    assert calls.counts[name] or (pre_hopper and name in ("_key_range", "_token_attention"))


def test_calls_with_a_tensor_on_the_device_count() -> None:
    x = torch.randn(3, 64)
    with Calls("cpu") as calls, Calls("cuda") as others:
        torch.ops.qao.silu_mul(x, x)
        with torch.inference_mode():
            torch.ops.qao.silu_mul.default(x, up=x)
        (x + x).sum()
    assert calls.counts == {"silu_mul": 2} and not others.counts


def test_calls_in_autograd_and_compiled_code_count() -> None:
    layer = qao.QuantLinear.from_linear(torch.nn.Linear(64, 32), qao.Int8WeightOnly())
    x = torch.randn(3, 64, requires_grad=True)
    with Calls("cpu") as calls:
        layer(x).sum().backward()
        assert calls.counts == {"int8_mm": 1}
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert calls.counts == {"int8_mm": 2}


def test_calls_with_lists_of_tensors_count() -> None:
    layers = [qao.QuantLinear.from_linear(torch.nn.Linear(64, n), qao.Int8WeightOnly()) for n in (32, 48)]
    lists = ([layer.qweight for layer in layers], [layer.scales for layer in layers], [layer.bias for layer in layers])
    counting = Calls("cpu")
    with counting, torch.inference_mode():
        torch.ops.qao._merged_int8_mm(torch.randn(3, 64), *lists)
    assert counting.counts == {"_merged_int8_mm": 1}
    assert any(map(counting._is_there, torch.utils._pytree.tree_leaves(((None, [1, lists[0]]), {}))))


def test_calls_that_fail_or_compute_nothing_do_not_count() -> None:
    x = torch.randn(3, 64)
    with Calls("cpu") as calls:
        with pytest.raises(RuntimeError, match="silu_mul"):
            torch.ops.qao.silu_mul(x, x[:, :3])
        with FakeTensorMode() as mode:
            torch.ops.qao.silu_mul(mode.from_tensor(x), mode.from_tensor(x))
        torch.ops.qao.silu_mul(x.to("meta"), x.to("meta"))
    assert not calls.counts


def report(when: str, outcome: Any) -> pytest.TestReport:
    return pytest.TestReport("test_one", ("", None, ""), {}, outcome, None, when)  # type: ignore[arg-type]


def test_calls_of_passed_tests_are_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    recorder = Recorder(gpu_sanitize.Share(0, 1, 0, 60, str(file)))
    for outcome, name in (("passed", "int4_mm"), ("failed", "int8_mm"), ("skipped", "fp8_mm"), ("passed", "int4_mm")):
        recorder.calls = Calls("cpu")
        recorder.calls.counts[name] = 3
        for when, result in (("setup", "passed"), ("call", outcome), ("teardown", "passed")):
            recorder.pytest_runtest_logreport(report(when, result))
    assert json.loads(file.read_text()) == {"passed": 2, "failed": ["test_one"], "operators": {"int4_mm": 6}}


# ---- order of tests --------------------------------------------------------------------------------------------------


def test_every_function_and_scheme_comes_before_a_second_case() -> None:
    schemes = ("int4", "int8_int4", "fp8")
    sweep = [f"test_mm.py::test_sweep[cuda-{scheme}-m{m}-s_fp16]" for scheme in schemes for m in range(40)]
    sizes = [f"test_scaled_mm.py::test_products[cuda-(5, {n})-torch.float16-fp8_fp8-row]" for n in range(9)]
    single = [f"test_gpu_sanitize.py::test_an_operator_is_near_its_reference[cuda-{name}]" for name in ("a", "fp8_mm")]
    tests = [*sweep, *sizes, "test_attention.py::test_views[cuda]", *single]
    order = ordered(tests, seed=3)
    assert sorted(order) == sorted(tests) and order == ordered(tests, seed=3) != ordered(tests, seed=4)
    assert set(order[:2]) == set(single)
    first = {(test.partition("[")[0], *(word for word in schemes if f"-{word}-" in test)) for test in order[2:7]}
    assert len(first) == 5
    assert sum("fp8_fp8" in test for test in order[7:11]) == 1


# ---- the summary -----------------------------------------------------------------------------------------------------


def summary(*tools: str, sources: str = "a", passed: int = 1) -> dict[str, Any]:
    entry = {"errors": 0, "known": 2, "passed": passed, "failed": [], "processes": 4}
    entry |= {"operators": {"int4_mm": 3}, "not_called": []}
    return {"source_hash": sources, "device": "GPU", "tools": {tool: copy.deepcopy(entry) for tool in tools}}


def test_a_run_of_some_tools_keeps_the_others_of_the_same_sources() -> None:
    old, new = summary(*TOOLS), summary("racecheck", passed=2)
    both = merged(old, new)
    assert tuple(both["tools"]) == TOOLS
    assert [entry["passed"] for entry in both["tools"].values()] == [1, 2, 1, 1]
    assert merged(old, summary("racecheck", sources="b")) == summary("racecheck", sources="b")
    assert merged(None, new) == new


@pytest.mark.parametrize(
    "key,value,reason",
    [
        ("errors", 2, "initcheck: 2 errors"),
        ("failed", ["test_one"], "initcheck: 1 failed: test_one"),
        ("passed", 0, "initcheck: no test passed"),
        ("not_called", ["hadamard", "swiglu"], "initcheck: not called: hadamard, swiglu"),
        (None, None, "initcheck did not run"),
    ],
)
def test_problems(key: str | None, value: Any, reason: str) -> None:
    found = summary(*TOOLS)
    assert problem(found) is None
    if key is None:
        del found["tools"]["initcheck"]
    else:
        found["tools"]["initcheck"][key] = value
    assert problem(found) == reason


@pytest.mark.parametrize(
    "given,tools", [([], list(TOOLS)), (["synccheck", "memcheck"], ["memcheck", "synccheck"]), (["all"], list(TOOLS))]
)
def test_tools_of_a_run(given: list[str], tools: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_sanitize, "run", lambda arguments: arguments.tools)
    monkeypatch.setattr("sys.argv", ["gpu_sanitize.py", "--seed", "3", *given])
    found: Any = gpu_sanitize.main()
    assert found == tools


def test_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gpu_sanitize, "TESTS", tmp_path / "tests")
    monkeypatch.setattr(gpu_sanitize, "SUMMARY", tmp_path / "gpu_sanitize.json")
    monkeypatch.setattr(gpu_sanitize, "source_hash", lambda: "a" * 64)
    found, one_tool = summary(*TOOLS, sources="a" * 64), summary("memcheck", sources="b" * 64)
    assert gpu_sanitize.check() == 1 and "gpu_sanitize.json is missing" in capsys.readouterr().out
    gpu_sanitize.SUMMARY.write_text(json.dumps(found))
    assert gpu_sanitize.check() == 0
    said = capsys.readouterr().out
    assert "no errors in any operator on GPU: memcheck in 1 tests, " in said
    assert said.endswith("(sources aaaaaaaaaaaa, the present ones).\n")
    gpu_sanitize.SUMMARY.write_text(json.dumps(one_tool))
    assert gpu_sanitize.check() == 1
    assert "racecheck did not run (sources bbbbbbbbbbbb, now aaaaaaaaaaaa)" in capsys.readouterr().out


def test_what_a_tool_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"passed": 5, "failed": [], "operators": {"int8_mm": 1, "int4_mm": 2}}
    for worker in range(2):
        (tmp_path / f"memcheck-{worker}.txt").write_text("========= ERROR SUMMARY: 0 errors\n")
        (tmp_path / f"memcheck-{worker}.json").write_text(json.dumps(results))
    entry = gpu_sanitize.entry_of("memcheck", [0, 0], tmp_path, ["fp8_mm", "int4_mm", "int8_mm"])
    assert list(entry["operators"].items()) == [("int4_mm", 4), ("int8_mm", 2)] and entry["not_called"] == ["fp8_mm"]
    assert "0 errors (0 known to be none); 10 tests passed in 2 processes and called 2 of 3" in capsys.readouterr().out
    (tmp_path / "memcheck-1.json").unlink()
    entry = gpu_sanitize.entry_of("memcheck", [0, 2], tmp_path, ["int4_mm"])
    assert entry["failed"] == ["process 1, which ended with status 2"] and entry["passed"] == 5


def test_the_committed_summary_has_every_operator() -> None:
    found = json.loads(SUMMARY.read_text())
    assert problem(found) is None
    for tool in TOOLS:
        assert found["tools"][tool]["operators"].keys() >= set(cuda_operators()), tool
