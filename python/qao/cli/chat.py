"""``qao chat``: a conversation with a model."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from .common import Output, command
from .generate import chat_ids
from .interrupt import interruptible
from .model import (
    Answer,
    add_generation_options,
    add_model_options,
    check_generation,
    generate,
    load_model,
    load_tokenizer,
)

_DESCRIPTION = """
Streams each answer, and prints its speed to stderr. Ctrl-C stops an answer; at the prompt it ends the program. /help
lists the commands that can be typed instead of a message. Without a terminal, each line of stdin is a message.
"""
_EXAMPLES = """
qao chat Qwen3-8B-int4
qao chat SmolLM2-135M-Instruct.gguf --temperature 0 --system "Answer in one sentence."
"""


def add(commands: Any) -> None:
    parser = command(commands, "chat", run, "chat with a model", _DESCRIPTION, _EXAMPLES, json=False)
    add_model_options(parser)
    add_generation_options(parser)


_HELP = """\
/help          show this list
/reset         start a new conversation (also /clear)
/system TEXT   start a new conversation with this system message, or with none
/exit          end the program (also /quit and Ctrl-D)
Ctrl-C         stop the answer; at the prompt, end the program"""


def run(args: argparse.Namespace) -> int:
    import torch

    check_generation(args)
    output = Output(args)
    tokenizer = load_tokenizer(args, args.model)
    start = _start(args.system)
    chat_ids(tokenizer, [*start, {"role": "user", "content": "?"}], args.model)  # fails before the model is loaded
    model = load_model(args, args.model)
    torch.manual_seed(args.seed)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # a Python without readline has no line editing
            import readline  # noqa: F401  # input() uses it from here on
        _tell("/help lists the commands, /exit ends the program")
    messages = list(start)
    while (line := _read()) is not None:
        word, _, rest = line.partition(" ")
        if word in ("/exit", "/quit", "/bye"):
            break
        if word in ("/reset", "/clear"):
            messages = _restart(start)
        elif word == "/system":
            start = _start(rest.strip())
            messages = _restart(start)
        elif word in ("/help", "/?"):
            _tell(_HELP)
        elif _is_command(word):
            _tell(f"{word} is not a command; /help lists the commands")
        elif line:
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(args, output, model, tokenizer, messages)})
    return 0


def _start(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _tell(text: str) -> None:
    """Print a remark to stderr; stdout has only answers."""
    print(text, file=sys.stderr, flush=True)


def _restart(start: list[dict[str, str]]) -> list[dict[str, str]]:
    _tell(f"new conversation, {'with a' if start else 'without a'} system message")
    return list(start)


def _is_command(word: str) -> bool:
    """Whether it is "/foo", as opposed to a path such as "/usr/bin"."""
    return word.startswith("/") and word[1:].isalpha()


def _answer(
    args: argparse.Namespace, output: Output, model: Any, tokenizer: Any, messages: list[dict[str, str]]
) -> str:
    answer = Answer(tokenizer, output.write)
    try:
        with interruptible():
            generate(args, model, chat_ids(tokenizer, messages, args.model), answer)
    except KeyboardInterrupt:
        output.write(" …")
    output.say()
    if not args.quiet:
        _tell(f"[{answer}]\n")
    return answer.text


def _read() -> str | None:
    """A stripped line from the user; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        if sys.stdin.isatty():
            _tell("")  # the shell's prompt starts on its own line
        return None
