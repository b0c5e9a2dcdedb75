"""README.md and docs/*.md: Python runs, commands parse, links lead somewhere, operators are as docs/ops.md has them.

The Python blocks of a page run in its order, in one namespace and an empty folder. What a page's reader has and the
page does not make (a model, its inputs, a checkpoint) comes from comments of the form

<!-- setup: Python, on one line or many -->

which run in their places among the blocks; <!-- check: ... --> is the same, for what must hold there. A block that
begins with ```python {.gpu} runs where torch sees a GPU.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import qao
import torch
from ops_schemes import INT4, Int4Format
from qao import cli

from bench.__main__ import make_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs" / "kernels").rglob("*.md"))]
OPS_PAGE = ROOT / "docs" / "ops.md"
OPS = sorted(s.name.removeprefix("qao::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("qao::"))
assert "int4_mm" in OPS

_BLOCK = re.compile(
    r"^<!-- (?:setup|check):(?P<setup>.*?)-->"
    r"|^(?P<indent> *)```(?P<language>\w*)(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of the page, from 0, where text begins
    gpu: bool


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Blocks of these languages, setups as "setup", in order."""
    content = page.read_text()
    for match in _BLOCK.finditer(content):
        part, language = ("code", match["language"]) if match["setup"] is None else ("setup", "setup")
        if language in languages:
            text = textwrap.dedent(match[part].lstrip(" ") if part == "setup" else match[part])
            yield Block(language, text, content.count("\n", 0, match.start(part)), "{.gpu}" in (match["mark"] or ""))


# ---- Python ----------------------------------------------------------------------------------------------------------

PYTHON_PAGES = [page for page in PAGES if any(blocks(page, "python"))]


@pytest.mark.parametrize("page", PYTHON_PAGES, ids=lambda page: page.name)
def test_python(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch._dynamo.reset()
    namespace: dict[str, Any] = {"__name__": page.name}
    for block in blocks(page, "python", "setup"):
        # Behind as many empty lines as are above it, so that a traceback shows the page's.
        code = compile("\n" * block.line + block.text, page, "exec", dont_inherit=True)
        if torch.cuda.is_available() or not block.gpu:
            exec(code, namespace)
    torch._dynamo.reset()


# ---- commands --------------------------------------------------------------------------------------------------------


def commands(*program: str) -> list[list[str]]:
    """The arguments of every call of a program in the pages' shell blocks."""
    found = []
    for page in EVERY_PAGE:
        for block in blocks(page, "sh", "console"):
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[: len(program)] == list(program):
                    found.append(words[len(program) :])
    return found


def test_make_knows_every_target() -> None:
    assert ["demo"] in commands("make")
    for arguments in commands("make"):
        result = subprocess.run(["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, f"make {' '.join(arguments)}: {result.stderr}"


def test_bench_takes_every_command() -> None:
    assert ["table"] in commands("python", "-m", "bench")
    for arguments in commands("python", "-m", "bench"):
        make_parser().parse_args(arguments)


def test_qao_takes_every_command() -> None:
    assert ["chat", "Qwen3-8B-int4"] in commands("qao")
    for arguments in commands("qao") + commands("python", "-m", "qao"):
        cli.parser().parse_args(arguments)


# ---- links -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those written out."""
    content = page.read_text()
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```$", "", content, flags=re.MULTILINE | re.DOTALL), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([^"]+)">', content)
    )


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^()\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        if target.startswith("https://"):
            continue
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target} is not there"
        assert not anchor or anchor in anchors(file), f"{page.name}: {target} has no such heading"


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "kernels").glob("*.md")), ids=lambda page: page.name)
def test_a_kernel_page_is_short(page: Path) -> None:
    """What was tried belongs to docs/kernels/log."""
    assert len(page.read_text().splitlines()) <= 150


# ---- docs/architecture.md --------------------------------------------------------------------------------------------


def test_the_walk_of_a_call_is_the_one_that_plan_takes() -> None:
    """The table's bodies are those of plan() on an H200; its files are the eight before the body's and the row's."""
    host = pytest.importorskip("qao._host", reason="built without pybind11")
    gpu = host.Gpu(compute_capability=90, num_sms=132, shared_bytes_per_cta=232448)
    content = (ROOT / "docs" / "architecture.md").read_text()
    (steps,) = re.findall(r"as far as the plan:\n(.*?)\nFrom there", content, re.DOTALL)
    before = {name for name in re.findall(r"\]\((\S+)\)", steps) if not name.endswith("library.cpp")}
    (table,) = re.findall(r"<!-- walk -->\n(.*?)<!-- /walk -->", content, re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) >= 6
    for word, m, body, *places, count in rows:
        x, _, weight = word.rpartition("_")
        facts = {"group_size": 128, "has_zeros": True, "scale_dtype": "bfloat16"}
        problem = host.Problem(m=int(m), n=4096, k=4096, x=x or "float", weight=weight, **facts)
        assert host.plan(problem, gpu)["kernel"] == body, (word, m)
        assert len(before | set(re.findall(r"\]\((\S+)\)", " ".join(places)))) == int(count), (word, m)


# ---- docs/api.md -----------------------------------------------------------------------------------------------------


def test_every_public_name_is_in_the_reference() -> None:
    documented = set(re.findall(r"^::: qao\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    assert documented == {*qao.__all__, "ops", "distributed"} - {"__version__"}


# ---- docs/ops.md -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", OPS)
def test_an_operator_has_its_schema_and_an_example(op: str) -> None:
    schema = str(getattr(torch.ops.qao, op).default._schema).removeprefix("qao::")
    assert schema in [block.text.strip() for block in blocks(OPS_PAGE, "text")]
    assert f"torch.ops.qao.{op}(" in "".join(block.text for block in blocks(OPS_PAGE, "python"))


def test_the_error_message_is_the_one_raised() -> None:
    weight = INT4.make_weight(16, 64, Int4Format(64))
    with pytest.raises(RuntimeError) as caught:
        INT4.mm(torch.zeros(3, 65, dtype=torch.bfloat16), weight)
    (documented,) = (block.text.strip() for block in blocks(OPS_PAGE, "text") if block.text.startswith("qao::"))
    assert documented in str(caught.value)
