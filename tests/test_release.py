"""What a release promises: versions that agree, pinned CI, equal bytes from equal sources."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import qao
from qao.integrations.serving.common import TESTED

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))  # not in source distributions
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py", "python", "third_party", "tools")
MINOR = tuple(map(int, qao.__version__.split(".")[:2]))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def policy(row: str) -> str:
    """The supported versions in a row of docs/policy.md."""
    found = re.search(rf"^\| {row} \| ([^|]+) \|", read("docs/policy.md"), re.MULTILINE)
    assert found, row
    return found[1]


# ---- versions ------------------------------------------------------------------------------------------------------


def test_the_policy_names_the_versions_that_are_checked() -> None:
    project = read("pyproject.toml")
    for row, pattern, source in (
        ("Python", r'requires-python = ">=([\d.]+)"', project),
        ("torch", r'dependencies = \["torch>=([\d.]+)"', project),
        ("torch", r"QAO_TORCH_TARGET ([\d.]+)\)", read("third_party/torch.cmake")),
        ("transformers", r'"transformers>=([\d.]+)"', project),
        ("CUDA toolkit, to build", r"nvcc ≥ ([\d.]+)", read("CONTRIBUTING.md")),
    ):
        found = re.search(pattern, source)
        assert found and policy(row).startswith(found[1]), f"{row}: {policy(row)}, but {pattern} says {found}"


def test_the_policy_shows_the_versions_that_ran() -> None:
    versions = runpy.run_path(str(ROOT / "tools" / "versions.py"))
    results = json.loads((ROOT / "tests" / "versions.json").read_text())
    assert versions["MARKS"][0] + versions["table"](results) + versions["MARKS"][1] in read("docs/policy.md")


def test_the_engines_that_ran_are_shown_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the newest versions, which ``make test`` uses, no case is skipped."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    engines = runpy.run_path(str(ROOT / "tools" / "engines.py"))
    results = json.loads((ROOT / "tests" / "engines.json").read_text())
    marks = runpy.run_path(str(ROOT / "tools" / "versions.py"))["MARKS"]
    assert marks[0] + engines["table"](results) + marks[1] in read("docs/serving.md")
    for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang")):
        versions, named = engines["SOURCES"][engine], re.findall(r"[\d.]+", TESTED[engine])
        assert TESTED[engine] == policy(title).strip()
        assert versions[0].startswith(named[-1]) and versions[-1].startswith(named[0])
        assert all(not results[f"{engine}-{version}"]["failed"] for version in versions)
        assert results[f"{engine}-{versions[0]}"]["skipped"] == 0


def test_the_version_is_cited_and_gets_security_fixes() -> None:
    assert f"\nversion: {qao.__version__}\n" in read("CITATION.cff")
    assert f"| {MINOR[0]}.{MINOR[1]} | yes |" in read("SECURITY.md")
    assert read("CHANGELOG.md").startswith(f"# Changelog\n\n## {qao.__version__}")


def test_every_version_since_the_promise_has_files_in_the_corpus() -> None:
    versions = re.findall(r"^## (\d+\.\d+\.\d+)", read("CHANGELOG.md"), re.MULTILINE)
    promised = [version for version in versions if tuple(map(int, version.split("."))) >= (0, 2, 0)]
    assert promised and promised == [version for version in promised if (ROOT / "tests" / "corpus" / version).is_dir()]


# ---- the repository's host -------------------------------------------------------------------------------------------


@pytest.mark.skipif(not WORKFLOWS, reason="source distributions have no .github")
def test_workflows_run_stages_of_ci_with_pinned_actions() -> None:
    yaml = pytest.importorskip("yaml")
    stages = set(re.findall(r"^(\w+)\(\) \{", read(".ci/run"), re.MULTILINE))
    called = set()
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}, path.name
        for job in workflow["jobs"].values():
            assert "timeout-minutes" in job, path.name
            for step in job["steps"]:
                if "uses" in step:
                    assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]), f"{path.name}: {step['uses']}"
                else:
                    script, *names = step["run"].split()
                    assert script == ".ci/run" and names and stages.issuperset(names), f"{path.name}: {step['run']}"
                    called.update(names)
    assert stages - called == {"compile"}  # needs nvcc


@pytest.mark.skipif(not FORMS, reason="source distributions have no .github")
def test_issue_forms_ask_for_something_once() -> None:
    yaml = pytest.importorskip("yaml")
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        if path.name != "config.yml":
            names = [field["id"] for field in form["body"] if field["type"] != "markdown"]
            assert form["name"] and form["description"] and names and len(names) == len(set(names)), path.name


# ---- equal bytes -----------------------------------------------------------------------------------------------------


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


def test_no_device_code_is_named_by_a_path() -> None:
    """nvcc puts a hash of the file's absolute path into names with internal linkage. Launch functions are host code."""
    for path in [*(ROOT / "cuda").rglob("*.cu"), *(ROOT / "cuda").rglob("*.cuh")]:
        text = path.read_text()
        assert not ("__global__" in text and re.search(r"^namespace {", text, re.M)), path
        assert not re.search(r"^static __device__", text, re.M), path


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
