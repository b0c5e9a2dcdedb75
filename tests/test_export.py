"""torch.export and AOTInductor with every scheme: exported programs run without the Python of qao."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from ops_support import randn
from test_compile_schemes import SideBySide
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = Path(qao.__file__).with_name("_C.so")
TOKENS = torch.export.Dim("tokens", min=2, max=4096)


class Stacked(nn.Module):
    """[schemes, M, 64]: the block's output for x under every scheme."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.blocks = SideBySide().to(device)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.blocks(x).values()))


def x_of(m: int, device: str) -> Tensor:
    return randn(m, 64, dtype=torch.float32, device=device, seed=m)


def exported(model: nn.Module, device: str) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, (x_of(5, device),), dynamic_shapes=({0: TOKENS},))


def check_close(actual: Tensor, expected: Tensor) -> None:
    """The same operators; the additions between them are rounded once."""
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= 2.0**-22 * expected.abs().max()


def run_fresh(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """``code`` in a fresh Python process."""
    command = [sys.executable, "-c", code, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["PYTHONFAULTHANDLER"] = "1"  # reports where a process crashes
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


def fresh_process(code: str, *arguments: str) -> dict[str, Any]:
    """What ``code`` prints as JSON."""
    result = run_fresh(code, *arguments)
    assert result.returncode == 0, result.stderr
    loaded: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return loaded


def test_a_saved_program_takes_any_number_of_tokens(device: str, tmp_path: Path) -> None:
    model = Stacked(device)
    program = exported(model, device)
    called = [node.target for node in program.graph.nodes if "qao" in str(node.target)]
    assert len(called) == 2 * len(model.blocks.blocks)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for m in (2, 5, 130):
        check_close(loaded(x_of(m, device)), model(x_of(m, device)))


# Imports the operator library at most, as a program without Python would load it.
RUN_PACKAGE = """
import json, sys, torch
library, package, inputs, outputs = sys.argv[1:]
if library:
    torch.ops.load_library(library)
inputs = torch.load(inputs)
model = torch._inductor.aoti_load_package(package)
torch.save([model(x) for x in inputs], outputs)
print(json.dumps({"modules": [name for name in sys.modules if name.partition(".")[0] == "qao"]}))
"""


@pytest.fixture(scope="module", autouse=True)
def shared_libstdcxx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A compiler that puts libstdc++ into libraries makes packages that die while they are loaded, most of the time:
    there they are compiled with the cure that docs/compile.md gives."""
    config = torch._inductor.config
    folder, compiler = tmp_path_factory.mktemp("compiler"), config.cpp.cxx[-1]
    source, library, cure = folder / "probe.cpp", folder / "probe.so", folder / "shared-g++"
    source.write_text("#include <string>\nstd::string twice(const std::string& s) { return s + s; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    if "libstdc++" in subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=True).stdout:
        yield
        return
    document = (ROOT / "docs" / "compile.md").read_text()
    cure.write_text(document.partition("cat > shared-g++ <<'END'\n")[2].partition("END\n")[0])
    cure.chmod(0o755)
    with config.patch({"cpp.cxx": (None, str(cure))}):
        yield


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """Compiled ahead of time for the CPU."""
    model = Stacked("cpu")
    path = tmp_path_factory.mktemp("aoti") / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported(model, "cpu"), package_path=str(path))
    return model, path


def check_package(model: nn.Module, path: Path, device: str, folder: Path) -> None:
    inputs = [x_of(m, device) for m in (2, 5, 130)]
    torch.save(inputs, folder / "inputs.pt")
    result = fresh_process(RUN_PACKAGE, str(LIBRARY), str(path), str(folder / "inputs.pt"), str(folder / "outputs.pt"))
    assert result["modules"] == []  # qao's Python was not needed
    for x, y in zip(inputs, torch.load(folder / "outputs.pt"), strict=True):
        check_close(y, model(x))


def test_a_package_runs_in_a_fresh_process(package: tuple[nn.Module, Path], tmp_path: Path) -> None:
    check_package(*package, "cpu", tmp_path)


@pytest.mark.early
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_cuda_package_runs_in_a_fresh_process(tmp_path: Path) -> None:
    # Skips if torch's own packages fail here without qao.
    plain = tmp_path / "plain.pt2"
    torch._inductor.aoti_compile_and_package(exported(nn.Linear(64, 64).to("cuda"), "cuda"), package_path=str(plain))
    torch.save([x_of(2, "cuda")], tmp_path / "inputs.pt")
    files = str(plain), str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt")
    result = run_fresh(RUN_PACKAGE, "", *files)
    if result.returncode != 0:
        pytest.skip(
            f"a package of a plain nn.Linear, without qao, ends with return code {result.returncode} under torch "
            f"{torch.__version__} ({(result.stderr.strip() or 'no message').splitlines()[-1]})"
        )
    model, path = Stacked("cuda"), tmp_path / "model.pt2"
    torch._inductor.aoti_compile_and_package(exported(model, "cuda"), package_path=str(path))
    check_package(model, path, "cuda", tmp_path)


@pytest.mark.extended
@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_the_cpp_example_runs_a_package(package: tuple[nn.Module, Path], tmp_path: Path) -> None:
    """examples/aoti: a program without Python."""
    model, path = package
    build = tmp_path / "build"
    torch_root = Path(torch.__file__).parent
    for command in (
        ["cmake", "-S", str(ROOT / "examples" / "aoti"), "-B", str(build), f"-DTORCH_ROOT={torch_root}"],
        ["cmake", "--build", str(build)],
    ):
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    # The program's x: row m holds m + 1 in every column, over 64.
    x = (torch.arange(1.0, 4.0)[:, None] / 64).expand(3, 64).contiguous()
    command = [str(build / "run"), str(LIBRARY), str(path), "3", "64"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    expected = model(x)
    assert answer["shape"] == list(expected.shape)
    assert abs(answer["sum"] - expected.double().sum().item()) <= 1e-5 * expected.double().abs().sum().item()


@pytest.fixture(scope="module")
def onnx_block() -> tuple[nn.Module, Tensor]:
    pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 128)).eval(), torch.randn(3, 128)


@pytest.mark.parametrize("word", qao.schemes.SCHEMES)
def test_onnx_says_what_to_export(word: str, onnx_block: tuple[nn.Module, Tensor]) -> None:
    model, x = copy.deepcopy(onnx_block[0]), onnx_block[1]
    qao.quantize_(model, qao.schemes.SCHEMES[word]())
    with pytest.raises(Exception, match=f"qao::{word}_mm: ONNX has no such operator. Call qao.dequantize_"):
        torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    torch.export.export(model, (x,))  # others still know it


def test_onnx_takes_the_dequantized_model(onnx_block: tuple[nn.Module, Tensor]) -> None:
    reference = pytest.importorskip("onnx.reference")
    model, x = copy.deepcopy(onnx_block[0]), onnx_block[1]
    qao.quantize_(model, qao.Int4WeightOnly())
    plain = copy.deepcopy(model)
    qao.dequantize_(plain)
    program = torch.onnx.export(plain, (x,), dynamo=True, verbose=False).model_proto
    (y,) = reference.ReferenceEvaluator(program).run(None, {program.graph.input[0].name: x.numpy()})
    actual, expected = torch.from_numpy(y), model(x)
    assert (actual - expected).abs().max() <= 2.0**-20 * expected.abs().max()  # sums of 128 products, in another order
