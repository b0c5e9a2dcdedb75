"""``qao eval``: perplexity of a model on a text, and the cost of quantizing it."""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

from .common import Failure, Output, add_scheme_options, command, counted, progress, read_text, scheme_of
from .model import add_model_options, load_model, load_tokenizer

_DESCRIPTION = """
Computes perplexity and bits per byte over windows of a text; each window is predicted without the ones before it.

--against compares two models. --scheme quantizes a float MODEL while it is loaded, and compares it with the float model
or with --against. The comparison goes window by window, so the standard error of the difference is far smaller than
that of either model.

With --layers, each layer of a float MODEL is quantized alone. The table lists the layers that change the predictions
most: the Kullback-Leibler divergence from the float model, with its standard error over windows.

Without --text, the text is Python's own help (pydoc), which depends on the version of Python: use it to compare models
on one machine, not with published numbers.
"""
_EXAMPLES = """
qao eval Qwen3-8B-int4 --against Qwen3-8B --text wikitext.txt --windows 100
qao eval Qwen3-8B --scheme int4 --group-size 32
qao eval Qwen3-8B --scheme int4 --layers --windows 2 --plot layers.png
qao eval SmolLM2-135M-Instruct.gguf --json
"""


def add(commands: Any) -> None:
    parser = command(commands, "eval", run, "measure perplexity, or compare two models", _DESCRIPTION, _EXAMPLES)
    add_model_options(parser)
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text in UTF-8")
    parser.add_argument("--windows", type=int, default=20, metavar="N", help="at most N windows (default: 20)")
    parser.add_argument("--window", type=int, default=512, metavar="TOKENS", help="length of a window (default: 512)")
    parser.add_argument("--against", metavar="MODEL2", help="another model, with the same tokenizer")
    add_scheme_options(parser, required=False)
    group = parser.add_argument_group("layers")
    group.add_argument("--layers", action="store_true", help="quantize one layer at a time and rank them")
    group.add_argument(
        "--worst", type=int, default=20, metavar="N", help="rows in the table (default: 20); --json has all layers"
    )
    group.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot all layers to a .png, .svg or .pdf file; needs matplotlib"
    )


def run(args: argparse.Namespace) -> int:
    from ..diagnostics.perplexity import compare

    if args.windows < 1 or args.window < 1:
        args.parser.error("--windows and --window must be at least 1")
    options = (args.group_size, args.granularity)
    if args.scheme is None and (args.symmetric or args.set or any(option is not None for option in options)):
        args.parser.error("--group-size, --symmetric, --granularity and --set need a --scheme")
    if args.layers and (args.scheme is None or args.against):
        args.parser.error("--layers needs a --scheme and cannot be combined with --against")
    if args.worst < 1 or (args.plot and not args.layers):
        args.parser.error("--worst must be at least 1, and --plot needs --layers")
    output, scheme = Output(args), scheme_of(args) if args.scheme else None
    text = text_of(args.text)
    if args.layers:
        from .layers import run as by_layer

        tokens, count = tokens_of(load_tokenizer(args, args.model), text, args.windows * args.window)
        return by_layer(args, output, scheme, tokens, count)
    tokens, count = tokens_of(load_tokenizer(args, args.model), text, args.windows * args.window)
    reference = args.against or (args.model if scheme is not None else None)
    if args.against and tokens_of(load_tokenizer(args, args.against), text, args.windows * args.window) != (
        tokens,
        count,
    ):
        raise Failure(f"{args.model} and {args.against} have different tokenizers, so they cannot be compared")

    name = args.model if scheme is None else f"{args.model}, {scheme}"
    results = {name: _evaluate(args, args.model, scheme, tokens, count)}
    if reference is not None:
        results[reference] = _evaluate(args, reference, None, tokens, count)
    report: dict[str, Any] = {"tokens": len(tokens) - 1, "window": args.window, "models": []}
    for of, result in results.items():
        bits = result.bits_per_byte
        output.say(f"{of}: perplexity {result.perplexity:.4f}, {bits:.4f} bits per byte")
        report["models"].append({"model": of, "perplexity": result.perplexity, "bits_per_byte": bits})
    if len(results) > 1:
        first, second = results.values()
        difference = compare(first, second)
        output.say(
            f"difference: {difference}, {difference.bits_per_byte:+.4f} ± {difference.bits_standard_error:.4f} bits "
            f"per byte ({counted(len(first.window_tokens), 'window')})"
        )
        report["difference"] = vars(difference)
    output.result(report)
    return 0


def _evaluate(args: argparse.Namespace, path: str, scheme: Any, tokens: list[int], count: int) -> Any:
    from ..diagnostics.perplexity import perplexity

    model = load_model(args, path, scheme)
    with progress(args, -(-(len(tokens) - 1) // args.window), Path(path).name, unit="window") as bar:

        def advance(*_: Any) -> None:  # returns None, since a forward hook's result replaces the output
            bar.update()

        handle = model.register_forward_hook(advance)
        try:
            result = perplexity(model, tokens, window=args.window, num_bytes=count)
        finally:
            handle.remove()
    del model
    gc.collect()  # free memory for the next model
    return result


def text_of(file: Path | None) -> str:
    """The text of a file, or Python's own help."""
    if file is not None:
        return read_text(file)
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def tokens_of(tokenizer: Any, text: str, most: int) -> tuple[list[int], int]:
    """At most ``most`` tokens of the text after a first one, and the number of bytes they cover."""
    # A token rarely exceeds 16 characters on average. Tokenizing a whole book would be slow.
    encoded = tokenizer(text[: 32 * most], add_special_tokens=False, verbose=False)
    ids: list[int] = encoded["input_ids"]
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    first, ids = ([begin], ids[:most]) if begin is not None else (ids[:1], ids[1 : most + 1])
    if not ids:
        raise Failure("the text is too short: it has fewer than two tokens")
    return first + ids, len(tokenizer.decode(ids).encode())
