"""``qao chat``: a conversation with a model."""

from __future__ import annotations

import argparse
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
Answers appear as they are made, with tokens per second after each. /reset begins anew, /exit or Ctrl-D ends. Ctrl-C
stops an answer, and at the prompt the program.
"""
_EXAMPLES = """
qao chat Qwen3-8B-int4
qao chat SmolLM2-135M-Instruct.gguf --temperature 0 --system "Answer in one sentence."
"""


def add(commands: Any) -> None:
    parser = command(commands, "chat", run, "talk with a model", _DESCRIPTION, _EXAMPLES, json=False)
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="a message before all others that tells how to answer")
    add_generation_options(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    check_generation(args)
    output = Output(args)
    tokenizer = load_tokenizer(args.model)
    start = [{"role": "system", "content": args.system}] if args.system else []
    chat_ids(tokenizer, [*start, {"role": "user", "content": "?"}], args.model)  # before the model takes its time
    model = load_model(args, args.model)
    torch.manual_seed(args.seed)
    messages = list(start)
    while (line := _read()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
            continue
        if not line:
            continue
        messages.append({"role": "user", "content": line})
        answer = Answer(tokenizer, output.write)
        try:
            with interruptible():
                generate(args, model, chat_ids(tokenizer, messages, args.model), answer)
        except KeyboardInterrupt:
            output.write(" …")
        messages.append({"role": "assistant", "content": answer.text})
        output.say(f"\n[{answer}]\n")
    return 0


def _read() -> str | None:
    """A line of the user without its ends; None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
