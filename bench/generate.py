"""An unmodified transformers model under every scheme: tokens per second of ``generate()`` and of a compiled step.

``python -m bench generate``. The weights are random, so nothing is downloaded. Four ways of decoding are measured:
``generate()`` as it is, ``generate(cache_implementation="static")``, which transformers compiles on a GPU, a decoding
step that the user compiles by hand, with a static cache and CUDA graphs (a quantized model with the backend "qao", the
model in bfloat16 with Inductor), and transformers' continuous batching, ``generate_batch()``, on a GPU.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import qao
import torch
from torch import Tensor

from .llama import BASELINE, check_logits
from .llama_model import COMMON, PRESETS, cache_keyword, weights_mib
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import OF_ROWS, dated, earlier, join, write
from .schemes import LAYER_SCHEMES, without_search
from .timing import seconds_of

HEAD = "lm_head"
CONTENDERS = (BASELINE, *sorted(LAYER_SCHEMES), *(f"{word}, bf16 head" for word in sorted(LAYER_SCHEMES)))
CONTEXT = 512  # tokens of the prompt
STEPS = 64  # timed tokens
_FIRST = 16  # new tokens of the shorter call, which the time of the longer one is compared with
_ROUNDS = 3
WAYS = {
    "eager": "`generate()`",
    "static": '`generate(cache_implementation="static")`',
    "compiled": "step compiled by hand",
    "batched": "`generate_batch()`",
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=list(PRESETS), default="llama-3.1-8b")
    command.add_argument("--layers", type=int, metavar="N", help="instead of as many as the model has")
    command.add_argument("--schemes", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    command.add_argument("--ways", nargs="+", choices=WAYS, default=["eager", "static", "compiled"])
    command.add_argument("--batch", type=int, default=1, metavar="B", help="sequences decoded")
    command.add_argument("--context", type=int, default=CONTEXT, metavar="T", help="tokens of the prompt")
    command.add_argument("--steps", type=int, default=STEPS, metavar="T", help="timed tokens")
    command.add_argument("--backend", default="qao", help="of torch.compile, for quantized models compiled by hand")
    command.add_argument("--add", nargs="+", type=Path, metavar="FILE", help="add these results to those in --out")


@torch.no_grad()
def run(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure, print one line per case, and write the results after each of them."""
    import transformers

    meta = describe(arguments.device) | {"transformers": transformers.__version__, "context": arguments.context}
    warn_if_busy(meta)
    kept = {_key(row): row for row in earlier(path, meta, OF_ROWS)}
    for word in arguments.schemes:
        gc.collect()
        torch._dynamo.reset()
        model = _model(arguments, word)
        about = {"model": arguments.model, "layers": model.config.num_hidden_layers, "scheme": word}
        about |= {"batch": arguments.batch, "weights_mib": weights_mib(model)}
        torch.manual_seed(1)
        ids = torch.randint(model.config.vocab_size, (arguments.batch, arguments.context), device=model.device)
        expected: Tensor | None = None
        for way in arguments.ways:
            backend = "inductor" if word == BASELINE else arguments.backend
            row, logits = _WAYS[way](model, ids, arguments, backend)
            expected = logits if expected is None else expected
            if logits is not None and expected is not None:
                check_logits(logits, expected, f"{word}, {way}")
            row = dated(meta, about | {"way": way} | row)
            print(f"{word:<20} {way:<9} {row['tokens_s']:8.1f} tokens/s, first call {row['first_s']:.1f} s", flush=True)
            kept[_key(row)] = row
            write({"meta": meta, "rows": list(kept.values())}, path)
        del model
    return {"meta": meta, "rows": list(kept.values())}


def add(arguments: argparse.Namespace, path: Path) -> None:
    """Add the rows of the files ``--add`` to the results at ``path``."""
    join(arguments.add, path, _key)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "layers", "scheme", "batch", "way"))


def _model(arguments: argparse.Namespace, word: str) -> Any:
    """A model as ``AutoModelForCausalLM`` makes it, then ``qao.quantize_``."""
    from transformers import AutoConfig, AutoModelForCausalLM

    numbers = COMMON | PRESETS[arguments.model]
    config = AutoConfig.for_model(**numbers | {"num_hidden_layers": arguments.layers or numbers["num_hidden_layers"]})
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    model.generation_config.eos_token_id = None  # random weights may choose it
    model.generation_config.pad_token_id = 0
    kind, _, head = word.partition(", ")
    if kind != BASELINE:
        scheme = without_search(LAYER_SCHEMES[kind])
        qao.quantize_(model, {HEAD: None, "re:.*": scheme} if head else scheme, progress=False)
    return model


# ---- ways of decoding ------------------------------------------------------------------------------------------------


def _generate(
    options: dict[str, Any], model: Any, ids: Tensor, arguments: argparse.Namespace, _: str
) -> tuple[dict[str, Any], Tensor]:
    """Seconds of a token are those by which a longer call takes longer than a shorter one: both contain the prompt."""

    def call(tokens: int, **more: Any) -> Any:
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens,
            **options, **more,
        )  # fmt: skip

    first_s, seconds = _marginal(call, arguments.steps, ids.device.type)
    logits = call(2, output_logits=True, return_dict_in_generate=True).logits[1]
    return {"tokens_s": ids.shape[0] * arguments.steps / seconds, "first_s": first_s}, logits


def _compiled(model: Any, ids: Tensor, arguments: argparse.Namespace, backend: str) -> tuple[dict[str, Any], Tensor]:
    """A decoding step and the choice of the likeliest token in one compiled function."""
    from transformers import StaticCache

    keyword = cache_keyword(model)
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1] + (_ROUNDS + 1) * arguments.steps + _FIRST)
    token = model(ids, **{keyword: cache}).logits[:, -1:].argmax(-1)

    def step(token: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(token, **{keyword: cache}).logits[:, -1]
        return logits.argmax(-1, keepdim=True), logits

    mode = "reduce-overhead" if backend in ("inductor", "qao") else None
    compiled = torch.compile(step, mode=mode, fullgraph=True, backend=backend)
    logits: list[Tensor] = []

    def steps(count: int) -> None:
        for _ in range(count):
            chosen, here = compiled(token)
            token.copy_(chosen)
            if not logits:
                logits.append(here.clone())

    first_s = seconds_of(partial(steps, 1), 1, ids.device.type)
    steps(_FIRST - 1)  # among them, those that record the CUDA graph
    seconds = median(seconds_of(partial(steps, arguments.steps), 1, ids.device.type) for _ in range(_ROUNDS))
    return {"tokens_s": ids.shape[0] * arguments.steps / seconds, "first_s": first_s}, logits[0]


def _batched(model: Any, ids: Tensor, arguments: argparse.Namespace, _: str) -> tuple[dict[str, Any], None]:
    """Requests that transformers batches by itself. Seconds of a token as in ``_generate``."""
    prompts = ids.tolist()

    def call(tokens: int) -> None:
        made = model.generate_batch(prompts, max_new_tokens=tokens, persistent_manager=True)
        counts = [len(one.generated_tokens) for one in made.values()]
        if counts != [tokens] * len(prompts):
            raise RuntimeError(f"generate_batch() made {counts} tokens instead of {tokens}")

    first_s, seconds = _marginal(call, arguments.steps, ids.device.type)
    model.destroy_cached_continuous_batching_manager()
    return {"tokens_s": len(prompts) * arguments.steps / seconds, "first_s": first_s}, None


def _marginal(call: Callable[[int], Any], steps: int, device: str) -> tuple[float, float]:
    """Seconds of the first call, and those by which a call with ``steps`` more tokens takes longer."""
    first_s = seconds_of(partial(call, _FIRST + steps), 1, device)  # first the longer: its cache serves both
    call(_FIRST)
    rounds = [[seconds_of(partial(call, _FIRST + more), 1, device) for more in (steps, 0)] for _ in range(_ROUNDS)]
    long, short = (median(times) for times in zip(*rounds, strict=True))
    return first_s, long - short


_WAYS: dict[str, Callable[..., tuple[dict[str, Any], Tensor | None]]] = {
    "eager": partial(_generate, {}),
    "static": partial(_generate, {"cache_implementation": "static"}),
    "compiled": _compiled,
    "batched": _batched,
}


# ---- documents -------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file: tokens per second by scheme and way, in relation to bfloat16."""
    meta, rows = results["meta"], results["rows"]
    cells = {(row["model"], row["batch"], row["scheme"], row["way"]): row for row in rows}
    parts = [f"{caption(meta, rows)}; transformers {meta['transformers']}, a prompt of {meta['context']} tokens."]
    for model, batch in dict.fromkeys((row["model"], row["batch"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["batch"]) == (model, batch)]
        ways = [way for way in WAYS if any(row["way"] == way for row in mine)]
        lines = []
        for scheme, weights in {row["scheme"]: row["weights_mib"] for row in mine}.items():
            speeds = _speeds(cells, model, batch, scheme, ways)
            word, comma, head = scheme.partition(",")
            lines.append([f"`{word}`{comma}{head}", f"{weights / 1024:.1f}", *speeds])
        header = ["scheme", "weights GiB", *(WAYS[way] for way in ways)]
        parts.append(f"**{model}**, batch {batch}: tokens/s (times {BASELINE})\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def _speeds(cells: dict[Any, dict[str, Any]], model: str, batch: int, scheme: str, ways: list[str]) -> Iterator[str]:
    for way in ways:
        row, base = cells.get((model, batch, scheme, way)), cells.get((model, batch, BASELINE, way))
        if row is None:
            yield "–"
        else:
            yield f"{row['tokens_s']:.0f}" + (f" ({row['tokens_s'] / base['tokens_s']:.2f})" if base else "")
