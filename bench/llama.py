"""Whole decoders under every scheme: tokens per second of decoding and of a prompt, eager and compiled.

``python -m bench llama``. Compiled means: every block, the embedding and the head compiled by torch.compile, and on a
GPU the whole pass replayed as one CUDA graph.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from qao import schemes
from torch import Tensor

from .llama_model import PRESETS, VARIANTS, Inputs, Model, Step
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .timing import capture, interleaved, settle_clocks

SCHEMES = {scheme.word: scheme for scheme in (getattr(schemes, name)() for name in schemes.__all__)}
BASELINE = "bf16"
CONTENDERS = (BASELINE, *sorted(SCHEMES))
CONTEXT = 512  # tokens a sequence has when the measured one is decoded
PROMPT = 2048
BATCHES = (1, 8, 32)

_CELL_S = 0.3  # timing budget of one number
_HOST_CALLS = 10
# Rounding differs between an eager and a compiled pass and between variants, and the layers amplify it; what two
# unrelated results differ by is 1.4.
_MAX_DIFFERENCE = 0.35


@dataclass(frozen=True)
class Run:
    """What to measure. ``layers``: None, as many as the model has. ``compile``: arguments of torch.compile."""

    models: Sequence[str] = tuple(name for name in PRESETS if name != "tiny")
    device: str = "cuda"
    layers: int | None = None
    contenders: Sequence[str] = CONTENDERS
    variants: Sequence[str] = VARIANTS
    batches: Sequence[int] = BATCHES
    prompt: int = PROMPT  # 0: none
    context: int = CONTEXT
    quantize_head: bool = False
    compile: dict[str, Any] | None = None


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", nargs="+", choices=list(PRESETS), default=list(Run.models))
    command.add_argument("--layers", type=int, metavar="N", help="instead of as many as the model has")
    command.add_argument("--schemes", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    command.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    command.add_argument("--batch", nargs="*", type=int, default=list(BATCHES), metavar="B", help="sequences decoded")
    command.add_argument("--prompt", type=int, default=PROMPT, metavar="T", help="tokens of a prompt; 0: no prompt")
    command.add_argument("--head", action="store_true", help="quantise the language model's head as well")
    command.add_argument(
        "--inductor", nargs="+", default=[], metavar="OPTION", help="options to set, triton.enable_pdl"
    )


def from_arguments(arguments: argparse.Namespace) -> Run:
    return Run(
        models=arguments.model,
        device=arguments.device,
        layers=arguments.layers,
        contenders=arguments.schemes,
        variants=arguments.variants,
        batches=arguments.batch,
        prompt=arguments.prompt,
        quantize_head=arguments.head,
        compile={"options": dict.fromkeys(arguments.inductor, True)} if arguments.inductor else None,
    )


@torch.inference_mode()
def run(request: Run) -> dict[str, Any]:
    """Measures, prints a line a case, and returns what belongs in the results file."""
    meta = describe(request.device) | {"context": request.context, "quantize_head": request.quantize_head}
    warn_if_busy(meta)
    if request.device == "cuda":
        settle_clocks()
    rows = []
    for name in request.models:
        for word in request.contenders:
            logits: dict[Any, Tensor] = {}  # by case, of the first variant
            for variant in request.variants:
                rows += _contender(request, name, word, variant, logits)
    return {"meta": meta, "rows": rows}


def _contender(request: Run, name: str, word: str, variant: str, logits: dict[Any, Tensor]) -> Iterator[dict[str, Any]]:
    gc.collect()
    torch._dynamo.reset()
    model = Model(name, request.layers, SCHEMES.get(word), variant, request.device, request.quantize_head)
    about = {"model": name, "layers": model.layers, "scheme": word, "variant": variant}
    about["weights_mib"] = sum(t.nbytes for t in (*model.parameters(), *model.buffers())) / 2**20
    print(f"\n{name}, {model.layers} layers, {word}, {variant}: {about['weights_mib']:.0f} MiB of weights")
    cases = [("decode", batch) for batch in request.batches] + ([("prefill", 1)] if request.prompt else [])
    for i, (phase, batch) in enumerate(cases):
        make, length = (Inputs.decode, request.context) if phase == "decode" else (Inputs.prefill, request.prompt)
        inputs = make(model, batch, length, request.device)
        # The first case compiles without anything that others left on disk: that is the time to report.
        with _no_caches() if i == 0 else contextlib.nullcontext():
            row, result = _case(model, inputs, request)
        before = logits.setdefault((phase, batch), result)
        _check(result, before, f"{name}, {word}, {phase} {batch}: {variant} against {request.variants[0]}")
        row["compile_s"] = row["compile_s"] if i == 0 else None
        row = about | {"phase": phase, "batch": batch, "tokens": inputs.tokens.numel()} | row
        _print_row(row)
        yield row


def _case(model: Model, inputs: Inputs, request: Run) -> tuple[dict[str, Any], Tensor]:
    """Everything that is measured of one pass, and its logits."""
    device = request.device
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first_tokens = inputs.tokens.clone()
    eager = Step(model, inputs)
    expected = eager()
    eager_s = interleaved([eager], _CELL_S, device)[0]
    eager_host = _host_s(eager, synchronize)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None

    options = request.compile or {}
    compiled = Step(model, inputs, lambda function: torch.compile(function, fullgraph=True, dynamic=False, **options))
    inputs.tokens.copy_(first_tokens)
    synchronize()
    start = time.perf_counter()
    result = compiled()
    synchronize()
    compile_s = time.perf_counter() - start
    _check(result, expected, "compiled against eager")
    compiled_host = _host_s(compiled, synchronize)
    call: Callable[[], object] = capture(compiled).replay if device == "cuda" else compiled
    compiled_s = interleaved([call], _CELL_S, device)[0]
    tokens = inputs.tokens.numel()
    row = {
        **{"eager_tokens_s": tokens / eager_s, "compiled_tokens_s": tokens / compiled_s, "compile_s": compile_s},
        **{"eager_host_us": eager_host * 1e6, "compiled_host_us": compiled_host * 1e6},
        **{"graph_host_us": _host_s(call, synchronize) * 1e6, "peak_mib": peak},
    }
    return row, result.clone()


def _host_s(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Median seconds until a call returns, nothing before it in the queue."""
    samples = []
    for _ in range(_HOST_CALLS):
        synchronize()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    synchronize()
    return median(samples)


def _check(result: Tensor, expected: Tensor, what: str) -> None:
    difference = ((result.float() - expected.float()).norm() / expected.float().norm()).item()
    if not difference < _MAX_DIFFERENCE:
        raise RuntimeError(f"{what}: logits differ by {difference:.3g}")


@contextlib.contextmanager
def _no_caches() -> Iterator[None]:
    from torch._inductor.utils import fresh_cache

    with fresh_cache():
        yield


def _print_row(row: dict[str, Any]) -> None:
    compile_s = "" if row["compile_s"] is None else f"  {row['compile_s']:.1f} s to compile"
    peak = "" if row["peak_mib"] is None else f"  {row['peak_mib']:.0f} MiB"
    print(f"  {row['phase']:<7} {row['batch']:>2}  eager {row['eager_tokens_s']:8.0f} tokens/s", end="")
    print(f"  compiled {row['compiled_tokens_s']:8.0f}  host us {row['eager_host_us']:.0f}", end="")
    print(f" / {row['compiled_host_us']:.0f} / {row['graph_host_us']:.0f}{peak}{compile_s}", flush=True)


# ---- documents -------------------------------------------------------------------------------------------------------


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    head = "quantised too" if meta["quantize_head"] else "in bfloat16"
    text = f"{caption(meta)}; the head {head}, {meta['context']} tokens of context when decoding."
    parts = [text]
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        for variant in dict.fromkeys(row["variant"] for row in mine):
            parts.append(_speeds(name, variant, [row for row in mine if row["variant"] == variant]))
        parts.append(_costs(name, mine))
    return "\n\n".join(parts)


def _speeds(name: str, variant: str, rows: list[dict[str, Any]]) -> str:
    cases = list(dict.fromkeys((row["phase"], row["batch"]) for row in rows))
    cells = {(row["scheme"], row["phase"], row["batch"]): row for row in rows}
    lines = []
    for word in dict.fromkeys(row["scheme"] for row in rows):
        line = [f"`{word}`"]
        for case in cases:
            row, base = cells[(word, *case)], cells.get((BASELINE, *case))
            for key in ("eager_tokens_s", "compiled_tokens_s"):
                line.append(f"{row[key]:.0f}" + (f" ({row[key] / base[key]:.2f})" if base else ""))
        lines.append(line)
    names = [f"batch {batch}" if phase == "decode" else "prompt" for phase, batch in cases]
    header = ["scheme", *(f"{case}, {way}" for case in names for way in ("eager", "compiled"))]
    title = f"**{name}**, {rows[0]['layers']} layers, {variant} blocks: tokens/s (times {BASELINE})"
    return f"{title}\n\n{table(header, lines)}"


def _costs(name: str, rows: list[dict[str, Any]]) -> str:
    """Memory, time to compile and host time of the first case of every contender, and memory of the last."""
    lines = []
    for word, variant in dict.fromkeys((row["scheme"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["scheme"], row["variant"]) == (word, variant)]
        first, peaks = mine[0], [row["peak_mib"] for row in mine]
        lines.append(
            [
                *(f"`{word}`", variant, f"{first['weights_mib']:.0f}"),
                *("–" if peak is None else f"{peak:.0f}" for peak in peaks),
                *(f"{first[key]:.0f}" for key in ("eager_host_us", "compiled_host_us", "graph_host_us")),
                f"{first['compile_s']:.1f}",
            ]
        )
    cases = dict.fromkeys((row["phase"], row["batch"]) for row in rows)
    peaks_at = [f"peak MiB, {f'batch {batch}' if phase == 'decode' else 'prompt'}" for phase, batch in cases]
    hosts = [f"host µs, {way}" for way in ("eager", "compiled", "CUDA graph")]
    header = ["scheme", "blocks", "weights MiB", *peaks_at, *hosts, "s to compile"]
    return f"**{name}**: memory, host time of one pass at the first batch, time to compile it\n\n{table(header, lines)}"
