"""``qao generate``: the continuation of a prompt by a language model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from .common import Failure, Output, command
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
Streams the text to stdout, then prints the speed to stderr. The prompt is continued as it is; with --chat it is a
message to a chat model. The prompt "-" is read from stdin.
"""
_EXAMPLES = """
qao generate Qwen3-8B-int4 "The capital of France is" --max-new-tokens 20
qao generate SmolLM2-135M-Instruct.gguf --chat "What is the capital of France?" --temperature 0
"""


def add(commands: Any) -> None:
    parser = command(commands, "generate", run, "generate text from a prompt", _DESCRIPTION, _EXAMPLES)
    add_model_options(parser)
    parser.add_argument("prompt", metavar="PROMPT")
    parser.add_argument("--chat", action="store_true", help="apply the model's chat template")
    add_generation_options(parser)


def run(args: argparse.Namespace) -> int:
    import torch

    check_generation(args)
    if args.system and not args.chat:
        args.parser.error("--system needs --chat")
    output = Output(args)
    tokenizer = load_tokenizer(args, args.model)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if args.chat:
        start = [{"role": "system", "content": args.system}] if args.system else []
        ids = chat_ids(tokenizer, [*start, {"role": "user", "content": prompt}], args.model)
    else:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    if ids.shape[1] == 0:
        raise Failure("the prompt is empty")
    model = load_model(args, args.model)
    torch.manual_seed(args.seed)
    answer = Answer(tokenizer, output.write)
    generate(args, model, ids, answer)
    output.write("\n")
    if not args.quiet:
        print(answer, file=sys.stderr)
    figures = {"tokens": answer.tokens, "seconds": answer.seconds, "tokens_per_second": answer.tokens_per_second}
    output.result({"text": answer.text, "prompt_tokens": ids.shape[1], **figures})
    return 0


def chat_ids(tokenizer: Any, messages: list[dict[str, str]], path: str) -> Any:
    """ids [1, T] of a conversation, ending where the model answers."""
    if not tokenizer.chat_template:
        raise Failure(f"{path} has no chat template, so it is not a chat model; use qao generate without --chat")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
