"""Effects of importing and installing qao on a Python process and an environment.

The tests marked `packaging` build and install it in new environments: they take minutes, and the network where pip
isolates builds.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import qao
import torch
from qao import _moved
from qao.ops.library import build_info

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(qao.__file__).parent
SOURCES = (
    "LICENSE",
    "README.md",
    "CMakeLists.txt",
    "MANIFEST.in",
    "Makefile",
    "csrc",
    "cuda",
    "pyproject.toml",
    "python",
    "setup.py",
    "third_party",
    "tools",
)
RUN_OPERATORS = """
import torch, qao.ops
q = torch.randint(0, 16, (20, 70), dtype=torch.uint8)
weight, scales = torch.ops.qao.pack_int4(q, torch.ones(20, 2), None, 64)
y = qao.ops.int4_mm(torch.ones(3, 70), weight, scales, None, 20, 70, 64)
assert torch.equal(y, (q.float() - 8).sum(1).expand(3, 20))
print("operators run:", qao.__file__)
"""


def python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs code in a fresh interpreter that finds qao in `path`, by default where this one found it."""
    environment = {**os.environ, "PYTHONPATH": str(path or PACKAGE.parent), **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd="/")


def host() -> ModuleType:
    """qao._host; skips tests that need it in builds without it."""
    module: ModuleType = pytest.importorskip("qao._host", reason="qao was built without qao._host")
    return module


def output(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def package_copy(tmp_path: Path) -> Path:
    """A copy of the package, to break."""
    return Path(shutil.copytree(PACKAGE, tmp_path / "qao"))


@pytest.fixture
def source_copy(tmp_path: Path) -> Path:
    """A source tree as a clone has it, without anything built."""
    tree = tmp_path / "source"
    ignore = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=ignore)
        else:
            tree.mkdir(exist_ok=True)
            shutil.copy(source, tree / name)
    return tree


# ---- import ----------------------------------------------------------------------------------------------------------


@pytest.mark.timed
def test_import_takes_less_than_300_ms_beyond_torch(tmp_path: Path) -> None:
    """With bytecode, as pip installs it: the first run writes it."""
    code = "import time, torch; start = time.perf_counter(); import qao; print(time.perf_counter() - start)"
    bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    assert min(float(output(python(code, **bytecode))) for _ in range(4)) < 0.3


def test_import_touches_no_global_setting() -> None:
    code = """
import json, locale, logging, os, random, signal, sys, threading, warnings
import numpy, torch
def others(finders):  # than those of qao: for other libraries once they are imported, and for old names of its modules
    return [str(finder) for finder in finders if not type(finder).__module__.startswith("qao.")]
def settings():
    return {
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()],
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "modes": [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")],
        "deterministic": [torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode()],
        "matmul": [torch.get_float32_matmul_precision(), torch.backends.cuda.matmul.allow_tf32],
        "cudnn": [torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32],
        "denormals": float(torch.tensor(1e-310, dtype=torch.float64) * 1.0),
        "random": [str(random.getstate()), torch.get_rng_state().sum().item(), str(numpy.random.get_state())],
        "cuda": torch.cuda.is_initialized(),
        "warnings": [str(entry) for entry in warnings.filters],
        "logging": [logging.root.level, len(logging.root.handlers), logging.root.manager.disable],
        "process": [dict(os.environ), os.getcwd(), str(signal.getsignal(signal.SIGINT))],
        "locale": locale.setlocale(locale.LC_ALL),
        "hooks": [str(sys.excepthook), str(sys.displayhook), str(sys.gettrace()), others(sys.meta_path)],
        "print": str(torch._tensor_str.PRINT_OPTS),
    }
before = settings()
import qao
after = settings()
print(json.dumps([key for key in before if before[key] != after[key]]))
"""
    assert json.loads(output(python(code))) == []


def test_a_missing_library_says_what_to_do(package_copy: Path) -> None:
    (package_copy / "_C.so").unlink()
    result = python("import qao.ops", package_copy.parent)
    assert "ImportError" in result.stderr and "missing" in result.stderr and "pip install" in result.stderr


def test_an_unloadable_library_says_why_and_what_to_do(package_copy: Path) -> None:
    (package_copy / "_C.so").write_bytes(b"not a library")
    result = python("import qao.ops", package_copy.parent)
    assert "ImportError" in result.stderr and torch.__version__ in result.stderr and "reinstall" in result.stderr
    assert "invalid ELF header" in result.stderr or "file too short" in result.stderr


FACTS = """
from qao.integrations.huggingface.model_class import kept_gguf_types
from qao.nn import cuda_build
from qao.ops.library import build_info, cpu_features
print(kept_gguf_types(None), cuda_build.problem(), build_info(), cpu_features())
"""


def test_wheels_without_host_do_the_same(package_copy: Path) -> None:
    """Released wheels are for every Python 3, so they have no qao._host: operators, kernels and types of GGUF files."""
    expected = output(python(FACTS, package_copy.parent))
    for module in package_copy.glob("_host*"):
        module.unlink()
    output(python(RUN_OPERATORS, package_copy.parent))
    assert output(python(FACTS, package_copy.parent)) == expected
    report = output(python("import runpy; runpy.run_module('qao', run_name='__main__')", package_copy.parent))
    assert "CPU kernels" in report and "stable ABI" in report


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_another_system_is_refused_by_name(platform: str) -> None:
    build = "import setuptools.command.bdist_wheel, setuptools.command.build_ext, setuptools.command.sdist, sys; "
    codes = (
        f"import sys, torch; sys.platform = {platform!r}; import qao",
        build + f"sys.platform = {platform!r}; exec(open({str(ROOT / 'setup.py')!r}).read())",
    )
    for code in codes:
        result = python(code)
        assert result.returncode != 0 and "qao only runs on Linux" in result.stderr and "WSL 2" in result.stderr


# ---- names -----------------------------------------------------------------------------------------------------------


def test_dir_is_the_public_api() -> None:
    shown = {name for name in dir(qao) if not name.startswith("__")}
    packages = {"diagnostics", "distributed", "nn", "ops", "quantization", "schemes"}
    assert shown == {*qao.__all__, *packages} and len(qao.__all__) <= 20


@pytest.mark.parametrize(("name", "module"), _moved.NAMES.items())
def test_a_moved_name_warns_and_is_the_new_one(name: str, module: str) -> None:
    new = getattr(importlib.import_module(module), name)
    message = f"^qao.{name} is now {module}.{name}; the old name will be removed in qao 0.4$"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        assert getattr(qao, name) is new
    assert [warning.filename for warning in caught] == [__file__]
    assert name not in dir(qao)


def test_imports_of_moved_names_warn_where_they_are() -> None:
    shown = python(f"\nfrom qao import {', '.join(_moved.NAMES)}").stderr  # the default filter shows it in __main__
    for name, module in _moved.NAMES.items():
        assert f"<string>:2: DeprecationWarning: qao.{name} is now {module}.{name};" in shown


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("quantize_modle", "quantize_"),
        ("quantise_", "quantize_"),
        ("int4weightonly", "Int4WeightOnly"),
        ("Int8WeightOnlyConfig", "Int8WeightOnly"),
        ("from_pretraind", "from_pretrained"),
    ],
)
def test_the_error_for_an_unknown_name_suggests_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(AttributeError, match=f"'{name}'; did you mean qao.{nearest}\\?"):
        getattr(qao, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing_like_it'$"):
        _ = qao.nothing_like_it  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["quantize", "dequantize", "update"])
def test_a_module_that_is_called_names_the_function(name: str) -> None:
    code = f"import qao, torch; qao.{name}(torch.nn.Linear(64, 64), qao.Int4WeightOnly())"
    assert f"did you mean qao.{name}_?" in python(code).stderr


def test_a_type_checker_sees_misspelled_names(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    file = tmp_path / "user.py"
    moved = [f"{place}.{name}" for name, module in _moved.NAMES.items() for place in ("qao", module)]
    known = ["qao.quantize_", "qao.distributed.Colwise", "qao.ops.int4_mm", *moved]
    file.write_text("\n".join(["import qao", *known, "qao.quantize_modle\n"]))
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    environment = {**os.environ, "MYPYPATH": str(PACKAGE.parent)}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    shown = result.stdout + result.stderr
    assert f"user.py:{len(known) + 2}: error" in shown and "Found 1 error" in shown, shown


def test_the_commit_is_that_of_the_checkout() -> None:
    commit = output(python("import qao; print(qao.__commit__)")).strip()
    if (ROOT / ".git").exists() and PACKAGE == ROOT / "python" / "qao":
        head = output(subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True))
        assert head.startswith(commit.removesuffix("-dirty"))
    else:
        assert commit == "None" or re.fullmatch("[0-9a-f]{7,40}(-dirty)?", commit)


# ---- duplicated facts ------------------------------------------------------------------------------------------------


def test_one_version() -> None:
    assert qao.__version__ == build_info()["version"]


def test_python_and_cpp_agree_on_the_layout() -> None:
    assert host().layout() == {name: getattr(qao.ops.packed_shape, name) for name in ("TILE_N", "TILE_K", "TILE_BYTES")}


def test_doctor_names_what_a_bug_report_needs() -> None:
    report = output(python("import runpy; runpy.run_module('qao', run_name='__main__')"))
    assert (qao.__commit__ is None) is ("commit" not in report) and (qao.__commit__ or "") in report
    for fact in (qao.__version__, str(PACKAGE), torch.__version__, sys.executable, "GPU"):
        assert fact in report


def test_doctor_reports_an_impossible_isa() -> None:
    report = output(python("import runpy; runpy.run_module('qao', run_name='__main__')", QAO_CPU_ISA="sse2"))
    assert "QAO_CPU_ISA=sse2 is not one of" in report


@pytest.mark.parametrize("library", sorted(PACKAGE.glob("*.so")), ids=lambda library: library.name.split(".")[0])
def test_no_folder_of_the_builder_is_in_a_binary(library: Path) -> None:
    """__FILE__ and the like name sources as from the root of the repository, and headers as from torch's package."""
    content = library.read_bytes()
    assert bytes(ROOT) not in content
    assert not re.findall(rb"\0/[\w./+-]+/(?:csrc/\w+\.cpp|cuda/\w+/\w+\.cu|torch/include/[\w./]+)", content)
    assert library.name != "_C.so" or b"\0torch/include/torch/csrc/stable/" in content


# ---- build errors ----------------------------------------------------------------------------------------------------


def test_an_old_python_is_refused_by_name() -> None:
    setup = "import sys, setuptools.command.bdist_wheel, setuptools.command.build_ext, setuptools.command.sdist; "
    setup += "sys.version_info = (3, 10, 5); "
    result = python(setup + f"exec(open({str(ROOT / 'setup.py')!r}).read())")
    assert result.returncode != 0 and "qao needs Python 3.10.6 or newer" in result.stderr


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext"]
    return subprocess.run(command, cwd=tree, env={**os.environ, **environment}, capture_output=True, text=True)


def hidden_nvcc() -> dict[str, str]:
    """The environment variables that keep the build from finding an nvcc."""
    folders = ["/usr/local/cuda/bin", *os.environ["PATH"].split(os.pathsep)]
    hidden = ";".join(folder for folder in folders if Path(folder, "nvcc").exists())
    return {"CUDA_HOME": "", "CUDA_PATH": "", "CUDACXX": "", "CMAKE_ARGS": f"'-DCMAKE_IGNORE_PATH={hidden}'"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_code_compiles_in_a_folder_with_a_space(source_copy: Path, tmp_path: Path) -> None:
    """One file of each compiler: all have the same options."""
    tree = source_copy.rename(tmp_path / "a source")
    (tree / "bench").mkdir()
    shutil.copy(ROOT / "bench" / "sweep.cpp", tree / "bench")
    environment = {**os.environ, "PATH": os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"]))}
    options: dict[str, Any] = {"cwd": tree, "env": environment, "capture_output": True, "text": True}
    definitions = [f"-DTORCH_ROOT={Path(torch.__file__).parent}", "-DQAO_CUDA=ON", "-DQAO_PYBIND=OFF"]
    configured = subprocess.run(["cmake", "-G", "Ninja", "-S", ".", "-B", "b", *definitions], **options)
    assert configured.returncode == 0, configured.stderr
    objects = ("CMakeFiles/qao_cuda_plain.dir/cuda/gemm/split_x.cu.o", "CMakeFiles/_C.dir/csrc/stable_abi/facts.cpp.o")
    result = subprocess.run(["ninja", "-C", "b", *objects], **options)
    assert result.returncode == 0, result.stdout


def test_cuda_on_without_nvcc_is_an_error(source_copy: Path) -> None:
    result = build(source_copy, QAO_CUDA="ON", **hidden_nvcc())
    assert result.returncode != 0
    message = " ".join(result.stderr.split())
    assert "QAO_CUDA=ON, but nvcc was not found" in message and "QAO_CUDA=OFF" in message


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("QAO_CUDA", "maybe", "QAO_CUDA=MAYBE is not one of AUTO, ON, OFF"),
        ("QAO_PYBIND", "maybe", "QAO_PYBIND=MAYBE is not one of AUTO, ON, OFF"),
        ("QAO_SBOM", "maybe", "QAO_SBOM=MAYBE is not one of ON, OFF"),
        ("QAO_ARCH", "riscv64", "builds for itself and aarch64"),
        ("QAO_CUDA_ARCHS", "80;hopper", "'hopper' is not an architecture"),
        ("TORCH_CUDA_ARCH_LIST", "6.1 7.5", "names no architecture of compute capability 8.0 or newer"),
    ],
)
def test_an_option_that_means_nothing_is_an_error(source_copy: Path, variable: str, value: str, message: str) -> None:
    if variable.endswith(("ARCHS", "LIST")) and not shutil.which("nvcc"):
        pytest.skip("architectures are read only where there is an nvcc")
    result = build(source_copy, **{variable: value})
    assert result.returncode != 0 and message in " ".join(result.stderr.split())


def test_make_names_what_an_environment_lacks() -> None:
    command = [sys.executable, str(ROOT / "tools" / "require.py"), "torch>=2.11", "torch>=99", "no-such-package"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "torch>=99 is needed" in result.stdout and "no-such-package is not installed" in result.stdout
    assert "torch>=2.11" not in result.stdout


# ---- the source distribution -----------------------------------------------------------------------------------------


def test_the_sdist_holds_all_that_make_touches(tmp_path: Path) -> None:
    ignore = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__", ".?*", "build", "dist", "*.py[cod]")
    tree = Path(shutil.copytree(ROOT, tmp_path / "tree", ignore=ignore))
    shutil.copy(ROOT / ".clang-format", tree)  # for make lint
    files = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    measured = {name for name in files if name.startswith(("bench/results/", "docs/plots/"))}
    assert len(measured) > 50
    expected = files - measured
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(tmp_path)]
    subprocess.run(command, cwd=tree, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("qao-*.tar.gz")
    subprocess.run(["tar", "xf", sdist, "-C", tmp_path], check=True)
    assert (
        "Provides-Extra: transformers" in (sdist.with_name(sdist.name.removesuffix(".tar.gz")) / "PKG-INFO").read_text()
    )
    root = sdist.with_name(sdist.name.removesuffix(".tar.gz"))
    assert {name for name in expected if not (root / name).exists()} == set()
    assert not (root / "bench" / "results").exists() and not (root / "docs" / "plots").exists()
    assert sdist.stat().st_size < 3 * 2**20
    for target in ("demo", "test", "docs", "lint", "wheel"):
        for venv in ("", ".venv"):
            make = ["make", "-n", target, f"VENV={venv}", f"PYTHON={sys.executable}", "QAO_PREBUILT="]
            commands = output(subprocess.run(make, cwd=root, capture_output=True, text=True))
            scripts = re.findall(r"(?<=[ \n])[\w/]+\.py\b", commands)
            assert "setup.py" in scripts and all((root / script).exists() for script in scripts)


# ---- the page of an index of packages --------------------------------------------------------------------------------

LINK = re.compile(r"!?\[([^\]]*)\]\(([^()\s]+)\)")


def metadata(tmp_path: Path, repository: str) -> str:
    """PKG-INFO of the tree; ``repository``: QAO_REPOSITORY."""
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    environment = {**os.environ, "QAO_REPOSITORY": repository}
    output(subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True))
    return (tmp_path / "qao.egg-info" / "PKG-INFO").read_text()


def test_links_of_the_description_lead_into_the_repository(tmp_path: Path) -> None:
    content = metadata(tmp_path, "https://example.org/qao/qao.git")
    home, version = "https://example.org/qao/qao", f"v{qao.__version__}"
    assert f"Project-URL: Source, {home}\n" in content and f"Project-URL: Issues, {home}/issues\n" in content
    assert f"Project-URL: Documentation, {home}/tree/{version}/docs\n" in content
    assert "Description-Content-Type: text/markdown" in content
    assert f"[Quickstart]({home}/blob/{version}/docs/quickstart.md)" in content
    assert f"]({home}/raw/{version}/docs/plots/h200-generate.svg)" in content
    targets = [target for _, target in LINK.findall(content)]
    assert len(targets) > 20 and all(target.startswith("https://") for target in targets)
    for target in targets:
        path = target.removeprefix(f"{home}/").partition(version + "/")[2].partition("#")[0]
        assert not target.startswith(home) or (ROOT / path).exists(), target


@pytest.mark.parametrize("repository", ["", "/srv/qao", "https://user:secret@example.org/qao"])
def test_a_description_without_a_public_repository_has_no_dead_links(tmp_path: Path, repository: str) -> None:
    content = metadata(tmp_path, repository)
    assert "Project-URL" not in content and "secret" not in content
    assert LINK.findall(content) == [] and "Quickstart · choosing a scheme" in content


# ---- a GPU without kernels for it ------------------------------------------------------------------------------------

WITHOUT_KERNELS = """
import sys, torch
torch.version.cuda, torch.cuda.device_count = "13.0", lambda: {gpus}
torch.cuda.is_available = lambda: False  # there is nothing to ask these GPUs about
from qao.nn import cuda_build
facts = {{**cuda_build.build_info(), "cuda": {cuda!r}}}
cuda_build.build_info = lambda: facts
"""


def test_a_gpu_that_the_build_has_no_kernels_for_is_a_warning() -> None:
    host()
    use = "import qao\nfor _ in range(2): qao.QuantLinear.from_linear(torch.nn.Linear(64, 64), qao.Int8WeightOnly())"
    warned = "torch sees 2 GPUs, but this build of qao has no CUDA kernels"
    without = WITHOUT_KERNELS.format(gpus=2, cuda=None)
    result = python(without + use)
    assert result.returncode == 0 and result.stderr.count(warned) == 1, result.stderr
    assert "UserWarning" in result.stderr and "QAO_CUDA=ON" in result.stderr
    for gpus, cuda in ((0, None), (2, "13.0")):
        assert "no CUDA kernels" not in python(WITHOUT_KERNELS.format(gpus=gpus, cuda=cuda) + use).stderr
    assert warned in output(python(without + "from qao.cli import main; sys.exit(main(['doctor', '--facts']))"))


NOTICE = """
import runpy, setuptools, subprocess, sys
from setuptools.dist import Distribution
setuptools.setup = lambda **_: None
build = runpy.run_path("setup.py")["CMakeBuild"](Distribution({"name": "qao"}))
build.initialize_options()
build.inplace, build.debug, build.build_lib = True, False, "build/lib"
run = subprocess.run
subprocess.run = lambda command: run(command) if "-S" in command else subprocess.CompletedProcess(command, 0)
build.build_extensions()
"""


@pytest.mark.parametrize(("choice", "shown"), [("AUTO", True), ("OFF", False)])
def test_a_build_without_nvcc_says_so(source_copy: Path, choice: str, shown: bool) -> None:
    """All of setup.py's build except the compiler and the copy of its output."""
    environment = {**os.environ, **hidden_nvcc(), "QAO_CUDA": choice}
    command = [sys.executable, "-c", NOTICE]
    result = subprocess.run(command, cwd=source_copy, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ("qao: WARNING: nvcc was not found: this build runs on CPUs only." in result.stderr) is shown
    assert ("set CUDA_HOME to it, and build again with QAO_CUDA=ON" in result.stderr) is shown
    announced = r"^qao: building for CPUs only .*: \d+ C\+\+ files, about \d+ (seconds|minutes) with \d+ jobs"
    assert re.search(announced, "\n".join(result.stdout.splitlines()[:5]), re.M), result.stdout


def test_the_demo_builds_cuda_kernels_only_for_a_gpu(source_copy: Path) -> None:
    def choice(target: str, **environment: str) -> str:
        command = ["make", target, "VENV=", "PYTHON=true", "BUILD=@echo QAO_CUDA=$$QAO_CUDA"]
        outer = {"QAO_CUDA", "MAKEFLAGS", "MAKELEVEL", "MFLAGS"}  # what `make test` passes on to the programs it runs
        environment = {name: value for name, value in os.environ.items() if name not in outer} | environment
        return output(subprocess.run(command, cwd=source_copy, env=environment, capture_output=True, text=True)).strip()

    gpu = any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/dxg").exists()
    assert choice("build-demo") == f"QAO_CUDA={'AUTO' if gpu else 'OFF'}"
    assert choice("build-demo", QAO_CUDA="ON") == "QAO_CUDA=ON"
    assert choice("build-test") == "QAO_CUDA="
    (source_copy / "build" / "cmake-x" / "CMakeFiles" / "qao_cuda_plain.dir").mkdir(parents=True)  # built by make test
    assert choice("build-demo") == "QAO_CUDA=AUTO"


# ---- installing ------------------------------------------------------------------------------------------------------


def pip(*arguments: str | Path, **environment: str) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    environment = {**os.environ, "QAO_CUDA": "OFF", **environment}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.packaging
def test_isolated_install(source_copy: Path, tmp_path: Path) -> None:
    pip("install", "--no-deps", "--target", tmp_path / "site", source_copy)
    assert str(tmp_path / "site") in output(python(RUN_OPERATORS, tmp_path / "site"))


@pytest.mark.packaging
def test_sdist_to_install(source_copy: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", tmp_path, source_copy]
    subprocess.run(command, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("qao-*.tar.gz")
    pip("install", "--no-deps", "--no-build-isolation", "--target", tmp_path / "site", sdist)
    assert str(tmp_path / "site") in output(python(RUN_OPERATORS, tmp_path / "site"))
    package, target = ROOT / "python" / "qao", tmp_path / "site" / "qao"
    modules = {str(path.relative_to(package)) for path in package.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    files = (path for path in target.rglob("*") if path.is_file() and path.suffix != ".pyc")
    installed = {str(path.relative_to(target)) for path in files}
    hosts = {path.name for path in PACKAGE.glob("_host.*.so")}
    assert installed == modules | hosts | {"_C.so", "py.typed"}


@pytest.mark.packaging
def test_without_pybind_the_wheel_fits_every_python_3(source_copy: Path, tmp_path: Path) -> None:
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source_copy, QAO_PYBIND="OFF")
    (wheel,) = tmp_path.glob("qao-*.whl")
    assert "-py3-none-linux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "qao/_C.so" in names and not [
        name for name in names if name.startswith("qao/_host.") and name.endswith(".so")
    ]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    output(python(RUN_OPERATORS, tmp_path / "site"))


@pytest.mark.packaging
def test_make_release_makes_a_wheel_for_other_machines(source_copy: Path, tmp_path: Path) -> None:
    """Its tag matches its symbols; it bundles no library, and includes the licenses and the bill of its contents."""
    pytest.importorskip("auditwheel")
    pytest.importorskip("cyclonedx")
    command = ["make", "release", "VENV=", f"PYTHON={sys.executable}"]
    result = subprocess.run(
        command, cwd=source_copy, capture_output=True, text=True, env={**os.environ, "QAO_CUDA": "OFF"}
    )
    output(result)
    dist = source_copy / "dist"
    output(subprocess.run(["sha256sum", "--check", "SHA256SUMS"], cwd=dist, capture_output=True, text=True))
    statement = json.loads((dist / f"qao-{qao.__version__}.provenance.json").read_text())
    subjects = {entry["name"]: entry["digest"]["sha256"] for entry in statement["subject"]}
    assert len(subjects) == 3
    for name, digest in subjects.items():
        assert hashlib.sha256((dist / name).read_bytes()).hexdigest() == digest
    (wheel,) = dist.glob("qao-*.whl")
    assert "-py3-none-manylinux_2_" in wheel.name and "-linux_" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    bill = tmp_path / "site" / f"qao-{qao.__version__}.dist-info" / "sboms" / "qao.cdx.json"
    assert bill.read_bytes() == (dist / f"qao-{qao.__version__}.cdx.json").read_bytes()
    assert "torch" in {part["name"] for part in json.loads(bill.read_text())["components"]}
    assert not [name for name in names if ".libs/" in name]
    for text in ("LICENSE", "third_party/licenses/pybind11.txt", "third_party/licenses/pytorch.txt"):
        assert f"qao-{qao.__version__}.dist-info/licenses/{text}" in names
    for library in (tmp_path / "site" / "qao").glob("*.so"):
        assert bytes(source_copy) not in library.read_bytes()
    output(python(RUN_OPERATORS, tmp_path / "site"))
