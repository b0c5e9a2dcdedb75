"""``qao serve``: transformers' server with the API of OpenAI, for quantized models."""

from __future__ import annotations

import argparse
from typing import Any

from .common import Failure, command

_DESCRIPTION = """
Runs `transformers serve MODEL ...` in a process that loads quantized checkpoints into qao's layers. Options after MODEL
are those of `transformers serve`: --port, --continuous-batching, --compile and others. It needs
`pip install "transformers[serving]"`, version 5.
"""
_EXAMPLES = """
qao serve Qwen3-8B-int4 --continuous-batching
qao serve SmolLM2-135M-int8 --device cpu --port 8001
"""


def add(commands: Any) -> None:
    parser = command(commands, "serve", run, "serve a model over HTTP", _DESCRIPTION, _EXAMPLES, json=False)
    parser.add_argument("model", metavar="MODEL", help="directory of a model, or its name on the hub")
    parser.add_argument("options", nargs=argparse.REMAINDER, metavar="...", help="options of `transformers serve`")


def run(args: argparse.Namespace) -> int:
    try:
        from transformers.cli.transformers import app

        app(["serve", args.model, *args.options], prog_name="qao", standalone_mode=False)
    except ImportError as error:
        needs = 'pip install "transformers[serving]>=5" requests'
        raise Failure(f"qao serve needs transformers' server: {needs} ({error})") from error
    except Exception as error:
        if _is_usage(error):
            raise Failure(f"{str(error).splitlines()[0]} (see transformers serve --help)", 2) from error
        raise
    return 0


def _is_usage(error: Exception) -> bool:
    """Whether transformers' command line rejects the options."""
    return any(one.__name__ == "UsageError" for one in type(error).__mro__)
