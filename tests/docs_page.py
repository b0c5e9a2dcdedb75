"""Runs a documentation page like a reader: ``python docs_page.py PAGE [--real]``, in an empty folder.

Blocks run in the page's order: Python in one namespace, shell commands in bash in a terminal, with simulated input at
prompts. Names on the Hugging Face hub resolve to small stand-ins (docs_models.HUB), or with --real to SmolLM2 itself. A
comment of the form

<!-- setup: Python, on one line or many -->

runs in its place among the blocks; <!-- check: ... --> does the same for assertions. Both see the names of visible
blocks, but not the reverse.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import os
import pty
import re
import select
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = 77  # exit status of a page that needs a package which is not installed
OPTIONAL = ("accelerate", "diffusers", "peft", "transformers")
# Input at the prompt "> " of an interactive command, line by line.
TYPED = ("What is the capital of France?", "/exit")

# Commands that no test runs, by how they begin, and why.
NOT_RUN = {
    "make demo": "installs packages and runs for minutes; test_docs.py looks for the target",
    "make test": "is what runs this test",
    "make wheel": "builds the package; test_packaging.py runs it",
    "make bench": "measures for hours; test_docs.py looks for the target",
    "make docs": "installs packages and draws plots for minutes; .ci/run calls it",
    "pip install": "changes the environment; test_packaging.py installs the package",
    "python -m bench": "measures for minutes and more; test_docs.py parses the arguments",
    "QAO_CPU_ISA=avx512_bf16 ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 python -m bench": "the same",
    "torchrun": "needs several GPUs",
    "python -c \"import qao, runpy; runpy.run_path('minifier_launcher.py'": "needs what a failed compilation leaves",
    "unzip -o model.pt2": "reads a package of the reader, which no block makes",
    "CXX=$PWD/shared-g++ python compile_package.py": "is a program of the reader, which no block makes",
    "vllm": "needs vLLM and a GPU",
}

_BLOCK = re.compile(
    r"^<!-- (?P<hidden>setup|check):(?P<text>.*?)-->"
    r"|^(?P<indent> *)```(?P<language>\w*)(?P<mark>[^\n]*)\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)
SHELLS = ("sh", "bash", "console")


class Block(NamedTuple):
    language: str
    text: str
    line: int  # of the page, from 0, where text begins
    gpu: bool


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """Blocks of these languages, hidden ones as "setup" and "check", in order."""
    content = page.read_text()
    for match in _BLOCK.finditer(content):
        part, language = ("text", match["hidden"]) if match["hidden"] else ("code", match["language"])
        if language in languages:
            text = textwrap.dedent(match[part].lstrip(" ") if match["hidden"] else match[part])
            yield Block(language, text, content.count("\n", 0, match.start(part)), "{.gpu}" in (match["mark"] or ""))


def commands(block: Block) -> list[str]:
    """The commands of a shell block, each with its continued lines, here-document or loop."""
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    found: list[str] = []
    end: str | None = None  # the line that ends the command which began before
    for line in lines:
        if end is not None or (found and found[-1].endswith("\\")):
            found[-1] += "\n" + line
            end = None if line.strip() == end else end
        elif line.strip() and not line.startswith("#"):
            found.append(line)
            here = re.search(r"<<-?\s*'?(\w+)'?", line)
            end = here[1] if here else "done" if line.startswith("for ") else None
    return found


def reason_not_run(command: str) -> str | None:
    """Why a command does not run in tests; None if it does."""
    return next((reason for start, reason in NOT_RUN.items() if command.startswith(start)), None)


# ---- running ---------------------------------------------------------------------------------------------------------


def run_shell(script: str, folder: Path, environment: dict[str, str], timeout: float = 300) -> str:
    """The terminal output of bash. Raises RuntimeError with it if a command fails or prints nothing for `timeout`."""
    master, slave = pty.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        ["bash", "-e", "-o", "pipefail", "-c", script],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env=environment,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(slave)
    output, seen, typed = b"", 0, 0
    try:
        while select.select([master], [], [], timeout)[0]:
            try:
                part = os.read(master, 65536)
            except OSError:  # every process at the other end is gone
                part = b""
            if not part:
                break
            output += part
            if re.search(rb"(^|[\r\n])[^\r\n]*> $", output[seen:]):
                os.write(master, TYPED[typed % len(TYPED)].encode() + b"\n")
                seen, typed = len(output), typed + 1
        else:
            process.kill()
    finally:
        os.close(master)
    text = output.decode(errors="replace").replace("\r\n", "\n")
    if (status := process.wait()) != 0:
        raise RuntimeError(f"exit status {status}:\n{textwrap.indent(script, '  $ ')}\n{text}")
    return text


def missing_packages(page: Path) -> list[str]:
    """Optional packages that the page's Python imports and this environment lacks."""
    imported = set()
    for block in blocks(page, "python", "setup", "check"):
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    if any(command.startswith("qao ") for block in blocks(page, *SHELLS) for command in commands(block)):
        imported.add("transformers")
    return [name for name in OPTIONAL if name in imported and importlib.util.find_spec(name) is None]


def environment_for(folder: Path) -> dict[str, str]:
    """Environment of the page's process: stand-ins for the hub, and the qao and python under test."""
    programs = folder / ".bin"
    programs.mkdir()
    for name, arguments in {"python": "", "qao": "-m qao"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
        (programs / name).chmod(0o755)
    package = str(Path(importlib.util.find_spec("qao").origin).parents[1])  # type: ignore[union-attr, arg-type]
    paths = [package, str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "HF_HOME": str(folder / ".huggingface"),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TERM": "xterm",
        "COLUMNS": "120",
    }


def main(page: Path) -> None:
    import docs_models
    import torch

    docs_models.write_hub(page.read_text(), real="--real" in sys.argv)
    torch.manual_seed(0)
    visible: dict[str, Any] = {"__name__": page.name}
    hidden: dict[str, Any] = {}
    for block in blocks(page, "python", "setup", "check", *SHELLS):
        if block.language in SHELLS:
            script = "\n".join(command for command in commands(block) if reason_not_run(command) is None)
            if script:
                print(run_shell(script, Path.cwd(), dict(os.environ)), flush=True)
            continue
        # Behind as many empty lines as are above it, so that a traceback shows the page's.
        code = compile("\n" * block.line + block.text, page, "exec", dont_inherit=True)
        if block.language == "python":
            if torch.cuda.is_available() or not block.gpu:
                exec(code, visible)
        else:
            names = {**visible, **hidden}
            exec(code, names)
            hidden |= {name: value for name, value in names.items() if visible.get(name, names) is not value}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
