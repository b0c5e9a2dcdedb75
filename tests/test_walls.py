"""The walls between the packages of the source tree: what may include, import or call what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CUDA, CSRC, PYTHON = ROOT / "cuda", ROOT / "csrc", ROOT / "python" / "qao"
FAMILIES = sorted(path.name for path in (CUDA / "gemm").iterdir() if path.is_dir())
C_SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".inc"}
OPS = sorted(path.name for path in CUDA.iterdir() if path.is_dir() and path.name not in ("include", "common", "layout"))


def sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in C_SUFFIXES)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def all_includes(path: Path) -> set[str]:
    """Those of the headers it includes, too, as far as they are ours."""
    found: set[str] = set()
    waiting = [path]
    while waiting:
        for name in includes(waiting.pop()):
            if name in found:
                continue
            found.add(name)
            homes = (folder / name for folder in (CSRC, CUDA, CUDA / "include"))
            waiting += [home for home in homes if home.is_file()][:1]
    return found


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            prefix = "qao." if node.level else ""
            yield from (f"{prefix}{node.module or ''}.{alias.name}" for alias in node.names)


def test_there_is_something_to_check() -> None:
    assert "gemm" in OPS and "sm90_ws" in FAMILIES
    assert len(sources(CUDA)) >= 8 and len(sources(CSRC)) >= 8
    assert CPU_FOLDERS["x86"]["amx"] == ("avx2", "avx512", "avx512_bf16", "amx")
    assert "torch/csrc/stable/library.h" in includes(CSRC / "stable_abi" / "library.cpp")
    assert "torch" in set(imports(PYTHON / "ops" / "matmul.py"))


def test_every_include_of_ours_is_found() -> None:
    """Or all_includes() would look past it."""
    folders = (CSRC, CUDA, CUDA / "include")
    for path in [*sources(CUDA), *sources(CSRC)]:
        ours = re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.MULTILINE)
        assert not [name for name in ours if not any((folder / name).is_file() for folder in folders)], path


@pytest.mark.parametrize("path", [*sources(CUDA), *sources(CSRC / "cpu")], ids=lambda path: str(path.relative_to(ROOT)))
def test_no_torch_and_no_python_behind_the_wall(path: Path) -> None:
    forbidden = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")
    assert not [name for name in all_includes(path) if forbidden.match(name)]


def cpu_folders(architecture: str) -> dict[str, tuple[str, ...]]:
    """Each folder of CPU kernels with the folders of included instruction sets (cpu/features.h)."""
    sets = dict(re.findall(r"constexpr Features k(\w+) =([^;]+);", (CSRC / "cpu" / "features.h").read_text()))

    def parts(name: str) -> tuple[str, ...]:
        found = [part for base in re.findall(r"\bk(?!Has)(\w+)", sets[name]) for part in parts(base)]
        return (*found, re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())

    every = {of[-1]: of for of in map(parts, sets)}
    folders = (path.name for path in (CSRC / "cpu" / architecture).iterdir() if path.is_dir())
    return {folder: every[folder] for folder in folders}


CPU_FOLDERS = {architecture: cpu_folders(architecture) for architecture in ("x86", "arm")}


@pytest.mark.parametrize("path", sources(CSRC / "cpu"), ids=lambda path: str(path.relative_to(ROOT)))
def test_cpu_code_includes_headers_of_its_instruction_set_alone(path: Path) -> None:
    place = path.relative_to(CSRC / "cpu").parts
    allowed: list[str] = []
    if place[0] in CPU_FOLDERS:
        allowed += [f"cpu/{place[0]}/{name.name}" for name in (CSRC / "cpu" / place[0]).glob("*.h")]
    if len(place) == 3:
        allowed += [f"cpu/{place[0]}/{folder}/" for folder in CPU_FOLDERS[place[0]][place[1]]]
    sets = [name for name in all_includes(path) if name.startswith(("cpu/x86/", "cpu/arm/"))]
    assert not [name for name in sets if not name.startswith(tuple(allowed))]
    intrinsics = {name for name in all_includes(path) if name.endswith("intrin.h") or name.startswith("arm_")}
    assert intrinsics <= {"x86": {"immintrin.h"}, "arm": {"arm_neon.h"}}.get(place[0], set())


@pytest.mark.parametrize("architecture", CPU_FOLDERS)
def test_every_cpu_folder_has_compiler_flags(architecture: str) -> None:
    folders = set(CPU_FOLDERS[architecture])
    assert len(folders) >= 4
    named = re.search(r"foreach\(folder ([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert named and folders <= set(named[1].split())


@pytest.mark.parametrize("path", sources(CSRC), ids=lambda path: str(path.relative_to(ROOT)))
def test_csrc_uses_the_stable_abi_alone(path: Path) -> None:
    allowed = re.compile(r"torch/(csrc/stable/|csrc/inductor/aoti_torch/c/|headeronly/)")
    torch_headers = [name for name in all_includes(path) if re.match(r"(torch|ATen|c10|caffe2)/", name)]
    assert not [name for name in torch_headers if not allowed.match(name)]
    if path.name != "host.cpp":
        assert not [name for name in all_includes(path) if name.startswith("pybind11/")]


@pytest.mark.parametrize("op", OPS)
def test_op_folders_include_nothing_of_each_other(op: str) -> None:
    others = re.compile(rf"({'|'.join(other for other in OPS if other != op)})/")
    for path in sources(CUDA / op):
        assert not [name for name in all_includes(path) if others.match(name)], path


def test_common_layouts_and_the_public_headers_include_no_op() -> None:
    for path in [path for folder in ("common", "include", "layout") for path in sources(CUDA / folder)]:
        assert not [name for name in all_includes(path) if name.startswith(tuple(f"{op}/" for op in OPS))], path


@pytest.mark.parametrize("path", [*sources(CUDA), *sources(CSRC)], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_has_at_most_600_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 600


@pytest.mark.parametrize("path", sorted(PYTHON.rglob("*.py")), ids=lambda path: str(path.relative_to(PYTHON)))
def test_a_python_module_has_at_most_600_lines_and_its_functions_80(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 600
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
            code = node.end_lineno - node.body[documented and len(node.body) > 1].lineno + 1  # type: ignore[operator]
            assert code <= 80, f"{node.name}() has {code} lines"


def test_plans_are_pure_host_code() -> None:
    """A .cpp under cuda/ is a plan: it also runs where nothing of CUDA is installed."""
    plans = sorted(CUDA.rglob("*.cpp"))
    assert {path.parent.name for path in plans} == {"gemm", *FAMILIES}
    for path in plans:
        names = all_includes(path)
        assert not [name for name in names if name.startswith("cuda") or name.endswith((".cuh", ".cu"))], path


def test_compute_capabilities_are_asked_for_in_one_place() -> None:
    """Everything else asks what the GPU can do."""
    asking = {
        path.name for path in sources(CUDA / "gemm") if re.search(r"compute_capability *[<>=!]", path.read_text())
    }
    assert asking == {"arch.h"}


@pytest.mark.parametrize("family", FAMILIES)
def test_kernel_families_know_of_each_other_what_their_plans_say(family: str) -> None:
    others = re.compile(rf"gemm/({'|'.join(other for other in FAMILIES if other != family)})/(?!heuristics\.h$)")
    for path in sources(CUDA / "gemm" / family):
        assert not [name for name in all_includes(path) if others.match(name)], path


def test_reference_imports_no_op() -> None:
    path = PYTHON / "ops" / "reference.py"
    assert not [name for name in imports(path) if name.startswith("qao")]
    assert "torch.ops" not in path.read_text()


# From the lowest up; those in one row do not import each other.
PACKAGES = (
    ("ops",),
    ("quant_primitives",),
    ("schemes",),
    ("nn",),
    ("distributed",),
    ("quantization",),
    ("inductor",),
    ("calibration", "checkpoints", "diagnostics"),
    ("integrations",),
    ("cli",),
)
UPWARD = {  # imported when they are called
    ("nn/packed_module.py", "checkpoints"),  # load_state_dict of what save_pretrained wrote
    ("checkpoints/save_load.py", "integrations"),  # qao.load(path) without a module
}


def packages_imported(path: Path) -> Iterator[str]:
    """Packages of qao that a module in a package of qao imports from, anywhere in it."""
    own = path.relative_to(PYTHON).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level > len(own):
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("qao."):
            yield str(node.module).split(".")[1]


def test_python_packages_are_listed() -> None:
    folders = {path.name for path in PYTHON.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {name for row in PACKAGES for name in row}
    assert len([path for path in PYTHON.iterdir() if path.suffix == ".py" and path.name != "__init__.py"]) <= 5


def test_python_packages_import_downwards() -> None:
    rank = {name: index for index, row in enumerate(PACKAGES) for name in row}
    upward = set()
    for path in sorted(PYTHON.rglob("*.py")):
        own = path.relative_to(PYTHON)
        if len(own.parts) == 1:
            continue
        for name in packages_imported(path):
            if name in rank and name != own.parts[0] and rank[name] >= rank[own.parts[0]]:
                upward.add((own.as_posix(), name))
    assert upward == UPWARD
