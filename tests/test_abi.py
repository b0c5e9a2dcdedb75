"""Symbols of the operator library: only those of the LibTorch stable ABI of torch 2.11."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import qao
import torch

LIBRARY = Path(qao.__file__).with_name("_C.so")
TARGET = "0x020b000000000000"  # torch 2.11
SHIMS = ("torch/csrc/inductor/aoti_torch/c/shim.h", "torch/csrc/stable/c/shim.h")
# glibc, libstdc++ and libgcc version their symbols.
RUNTIME = re.compile(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_[\d.]+$")


def run(*command: str | Path) -> str:
    if not shutil.which(str(command[0])):
        pytest.fail(f"{command[0]} is missing; it comes with every C++ compiler")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def undefined() -> set[str]:
    """Symbols the library must find elsewhere, "name" or "name@VERSION"; weak ones may stay missing."""
    lines = [line.split() for line in run("nm", "-D", "--undefined-only", LIBRARY).splitlines()]
    symbols = {name.replace("@@", "@") for kind, name in lines if kind == "U"}
    assert "aoti_torch_library_init_def" in symbols
    return symbols


def test_only_the_stable_abi_and_the_c_runtime(undefined: set[str]) -> None:
    stable = re.compile(r"^(aoti_torch|torch)_\w+$")
    assert not [s for s in undefined if not RUNTIME.search(s) and not stable.match(s)]


def test_no_python_symbol(undefined: set[str]) -> None:
    assert not [symbol for symbol in undefined if re.match(r"_?Py", symbol)]


def test_every_torch_symbol_is_declared_at_the_target_version(undefined: set[str], tmp_path: Path) -> None:
    source = tmp_path / "shims.cpp"
    source.write_text("".join(f"#include <{shim}>\n" for shim in SHIMS))
    include = Path(torch.__file__).parent / "include"
    flags = [f"-DTORCH_TARGET_VERSION={TARGET}", "-I", include, "-I", include / "torch" / "csrc" / "api" / "include"]
    declared = set(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", run("g++", "-E", "-P", "-std=c++20", *flags, source)))
    assert len(declared) > 50
    symbols = {symbol for symbol in undefined if re.match(r"(aoti_)?torch_", symbol)}
    assert symbols <= declared, f"not in torch 2.11: {sorted(symbols - declared)}"


def test_it_needs_only_libtorch_cpu_and_the_c_runtime() -> None:
    dynamic = run("readelf", "-d", LIBRARY)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", dynamic))
    runtime = re.compile(r"lib(stdc\+\+|gcc_s|c|m|dl|rt|pthread)\.so\.\d+|ld-linux.*")
    assert {name for name in needed if not runtime.fullmatch(name)} == {"libtorch_cpu.so"}
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_it_exports_nothing_of_qao_or_cuda() -> None:
    exported = run("nm", "-D", "--defined-only", "--demangle", LIBRARY)
    assert not re.findall(r" (?:qao::|cuda|__cuda).*", exported)


def test_no_path_of_the_machine_that_built_it() -> None:
    """Messages of torch's headers name their source file."""
    content = LIBRARY.read_bytes()
    for path in (Path(torch.__file__).parent, LIBRARY.parents[2]):
        assert str(path).encode() not in content
