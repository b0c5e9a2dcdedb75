"""What a release promises: equal bytes from equal sources."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "python", "third_party", "tools")


def distributions(tree: Path, private: bool) -> dict[str, bytes]:
    """The sdist and the wheel of a copy of the sources, without libraries. ``private``: the modes of a strict umask."""
    for name in SOURCES:
        source = ROOT / name
        ignore = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
        tree.mkdir(exist_ok=True)
        shutil.copytree(source, tree / name, ignore=ignore) if source.is_dir() else shutil.copy(source, tree)
    for path in tree.rglob("*"):
        if private:
            path.chmod(0o700 if path.is_dir() else 0o600)
            os.utime(path, (1_500_000_000, 1_500_000_000))
    command = [sys.executable, "setup.py", "-q", "build_py", "sdist", "bdist_wheel", "--skip-build"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "QAO_REPOSITORY": "", "QAO_PYBIND": "OFF"}
    umask = 0o077 if private else 0o002
    result = subprocess.run(command, cwd=tree, env=environment, umask=umask, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return {path.name: path.read_bytes() for path in (tree / "dist").iterdir()}


def test_two_builders_make_the_same_wheel_and_sdist(tmp_path: Path) -> None:
    first, second = distributions(tmp_path / "first", False), distributions(tmp_path / "elsewhere", True)
    assert len(first) == 2 and first.keys() == second.keys()
    assert [name for name, content in first.items() if content != second[name]] == []


def test_the_bill_lists_what_cmake_put_into_the_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedx")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    file = tmp_path / "components.txt"
    file.write_text("library torch 2.13.0+cpu BSD-3-Clause\nlibrary cuda-cudart 13.0 LicenseRef-E\ncompiler GNU 12 -\n")
    bill = runpy.run_path(str(ROOT / "tools" / "sbom.py"))["bill"]
    text = bill("1.2.3", file)
    assert text == bill("1.2.3", file) and text != bill("1.2.4", file)
    content = json.loads(text)
    assert content["bomFormat"] == "CycloneDX" and content["metadata"]["component"]["version"] == "1.2.3"
    assert content["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    found = {part["name"]: (part["version"], part["scope"]) for part in content["components"]}
    assert found == {
        "torch": ("2.13.0+cpu", "required"),
        "cuda-cudart": ("13.0", "required"),
        "GNU": ("12", "excluded"),
    }
    uses = {entry["ref"]: entry.get("dependsOn") for entry in content["dependencies"]}
    assert uses["qao@1.2.3"] == ["cuda-cudart@13.0", "torch@2.13.0+cpu"]
