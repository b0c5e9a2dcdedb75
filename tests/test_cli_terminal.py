"""Commands as users run them: in a fresh process, with a pseudo terminal, or with output to a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli import TEXT, save_llama

pytest.importorskip("transformers")

COMMANDS: dict[str, list[str]] = {
    "facts": [],
    "version": ["--version"],
    "quantize": ["quantize", "{llama}", "{tmp}/out", "--scheme", "int8"],
    "quantize, calibrated": [
        *("quantize", "{llama}", "{tmp}/out", "--scheme", "int4", "--group-size", "32"),
        *("--calibrate", "{text}", "--samples", "2", "--window", "20"),
    ],
    "convert": ["convert", "{int8}", "{tmp}/out", "--to", "qao"],
    "inspect": ["inspect", "{int8}", "--against", "{llama}"],
    "generate": ["generate", "{int8}", "Hello", "--max-new-tokens", "4"],
    "eval": ["eval", "{llama}", "--text", "{text}", "--windows", "2", "--window", "20"],
    "eval, compared": ["eval", "{llama}", "--scheme", "int8", "--text", "{text}", "--windows", "2", "--window", "20"],
    "eval, layers": [
        *("eval", "{llama}", "--scheme", "int8", "--layers", "--text", "{text}", "--windows", "2", "--window", "20"),
    ],
    "bench": ["bench", "--layer", "64x64", "--tokens", "1", "--scheme", "int8"],
}


NAMES = {arguments[0] for name, arguments in COMMANDS.items() if name not in ("facts", "version")} | {"chat", "doctor"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from qao.cli import main

    folder = tmp_path_factory.mktemp("terminal")
    (folder / "text.txt").write_text(TEXT)
    llama = save_llama(folder / "llama")
    assert main(["quantize", str(llama), str(folder / "int8"), "--scheme", "int8", "--quiet"]) == 0
    return {"llama": llama, "int8": folder / "int8", "text": folder / "text.txt"}


def in_terminal(arguments: list[str], typed: str = "", columns: int = 80) -> tuple[int, str]:
    """The exit status and the terminal output; each line of ``typed`` follows a prompt."""
    master, slave = pty.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": str(columns)}
    process = subprocess.Popen(
        [sys.executable, "-m", "qao", *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    lines, shown, deadline = typed.splitlines(), b"", time.monotonic() + 240
    asked = 0
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            try:
                part = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        elif process.poll() is not None:
            break
        if lines and shown.count(b"> ") > asked:
            asked = shown.count(b"> ")
            os.write(master, (lines.pop(0) + "\n").encode())
    status = process.wait(timeout=60)
    os.close(master)
    return status, shown.decode()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_commands_in_a_terminal(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    arguments = [text.format(**files, tmp=tmp_path) for text in COMMANDS[name]]
    status, shown = in_terminal(arguments)
    assert status == 0, shown
    assert "Traceback" not in shown and "error:" not in shown
    if name.startswith("eval"):
        assert "perplexity" in shown


def test_reports_fit_the_terminal(files: dict[str, Path], tmp_path: Path) -> None:
    for name in ("inspect", "quantize"):
        arguments = [text.format(**files, tmp=tmp_path) for text in COMMANDS[name]]
        status, shown = in_terminal([*arguments, "--quiet"], columns=90)
        tables = [line for line in shown.splitlines() if re.search(r"q_proj|v_proj|lm_head|^layer|^-", line)]
        assert status == 0 and len(tables) > 5 and max(map(len, tables)) <= 90, shown


@pytest.mark.parametrize("name", sorted(NAMES))
def test_help_fits_the_terminal(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "qao", name, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    commands = [line for line in done.stdout.splitlines() if line.startswith("  qao ")]  # to be copied, so not wrapped
    assert commands
    assert max(len(line) for line in done.stdout.splitlines() if line not in commands) <= 80


def test_the_version_needs_no_torch() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "qao", "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(r"qao \S.*\n", done.stdout)
    assert time.monotonic() - begun < 1.5  # torch alone takes longer
    program = "import sys; sys.argv = ['program', '--version']; import qao; print(qao.QuantLinear.__name__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "QuantLinear\n", done.stderr


QUICK: dict[str, tuple[list[str], int, str]] = {
    "help": (["--help"], 0, "Without a command, shows"),
    **{f"help of {name}": ([name, "--help"], 0, f"usage: qao {name}") for name in sorted(NAMES)},
    "no such command": (["quant"], 2, "invalid choice: 'quant'"),
    "no scheme": (["quantize", "{llama}", "{tmp}/out"], 2, "required: --scheme"),
    "a scheme of others": (["quantize", "{llama}", "{tmp}/out", "--scheme", "nf4"], 2, "the equivalent in qao is int4"),
    "no model": (["quantize", "{tmp}/none", "{tmp}/out", "--scheme", "int4"], 1, "none: no such file or directory"),
    "no model to talk with": (["chat", "{tmp}/none"], 1, "none: no such file or directory"),
    "no second model": (["inspect", "{llama}", "--against", "{tmp}/none"], 1, "none: no such file or directory"),
    "no text": (["eval", "{llama}", "--text", "{tmp}/none.txt"], 1, "none.txt: no such file"),
    "a text that is none": (["eval", "{llama}", "--text", "{tmp}"], 1, "is a directory, not a text file"),
    "out exists": (["convert", "{int8}", "{llama}"], 1, "exists; choose another name, or replace it with --force"),
}


@pytest.mark.parametrize("name", list(QUICK))
def test_what_needs_no_torch_does_not_wait_for_it(name: str, files: dict[str, Path], tmp_path: Path) -> None:
    words, status, expected = QUICK[name]
    arguments = [text.format(**files, tmp=tmp_path) for text in words]
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "qao", *arguments], capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    shown = done.stdout + "".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert done.returncode == status and expected in shown, shown
    assert "argparse" in imported and imported.isdisjoint({"torch", "transformers", "numpy"})
    assert not list(tmp_path.iterdir())


def test_words_of_the_command_line_are_those_of_the_library() -> None:
    from qao import _words as words
    from qao.schemes import SCHEMES

    assert words.SCHEMES == {word: kind.__name__ for word, kind in SCHEMES.items()}


def catches(process: subprocess.Popen[str], number: int) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (mask,) = (int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(mask >> (number - 1) & 1)


@pytest.mark.parametrize("seconds", [0.1, 0.8])
def test_ctrl_c_while_torch_is_imported(seconds: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "qao", "doctor"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while process.poll() is None and not catches(process, signal.SIGTERM):  # a busy machine starts Python slowly
        time.sleep(0.02)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "qao: stopped\n"


def test_chat_in_a_terminal(files: dict[str, Path]) -> None:
    typed = "/help\n/nonsense\nHello\n/system Be brief.\n/clear\nHello\n/exit\n"
    status, shown = in_terminal(["chat", str(files["int8"]), "--max-new-tokens", "3", "--temperature", "0"], typed)
    assert status == 0, shown
    assert "/system TEXT" in shown and "/nonsense is not a command" in shown
    assert len(re.findall(r"\[\d+ tokens?, ", shown)) == 2
    assert re.search(r"qao: \S+int8: cpu, int8, bfloat16 for the rest|qao: \S+int8: cuda.*, int8, bfloat16", shown)


def test_what_is_no_terminal_gets_no_control_characters(files: dict[str, Path], tmp_path: Path) -> None:
    arguments = [text.format(**files, tmp=tmp_path) for text in COMMANDS["eval, compared"]]
    done = subprocess.run([sys.executable, "-m", "qao", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\r" not in done.stdout + done.stderr and "\x1b" not in done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 2 and len(done.stdout.splitlines()) == 3


def test_a_reader_that_goes_away(files: dict[str, Path]) -> None:
    command = f"{sys.executable} -m qao inspect {files['int8']} | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True)
    assert done.stdout.startswith("layer") and done.stderr == ""
