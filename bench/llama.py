"""Whole decoders under every scheme: tokens per second of decoding and prefill, eager and compiled.

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
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from .llama_model import PRESETS, VARIANTS, Inputs, Model, Step, weights_mib
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import same_setting
from .schemes import LAYER_SCHEMES
from .timing import capture, interleaved, settle_clocks

BASELINE = "bf16"
CONTENDERS = (BASELINE, *sorted(LAYER_SCHEMES))
CONTEXT = 512  # length of a sequence when the measured token is decoded
PROMPT = 2048
BATCHES = (1, 8, 32)

# Inductor options for fused blocks on a GPU: its kernels trigger PDL, as qao's do, and independent kernels are
# combined. Plain blocks use torch's defaults.
FUSED_OPTIONS = {"triton.enable_pdl": True, "combo_kernels": True}

_CASE = ("model", "layers", "scheme", "variant", "phase", "batch", "tokens")
_CELL_S = 0.2  # timing budget of one number
_HOST_CALLS = 5
# Rounding differs between eager and compiled passes and between variants, and layers amplify it, most with 8-bit
# activations (0.14 after six layers). Unrelated results differ by 1.4.
_MAX_DIFFERENCE = 0.7


@dataclass(frozen=True)
class Run:
    """Settings of a run. ``layers``: None, all layers of the model. ``backend``: for torch.compile."""

    models: Sequence[str] = tuple(name for name in PRESETS if name != "tiny")
    device: str = "cuda"
    layers: int | None = None
    contenders: Sequence[str] = CONTENDERS
    variants: Sequence[str] = VARIANTS
    batches: Sequence[int] = BATCHES
    prompt: int = PROMPT  # 0: none
    context: int = CONTEXT
    quantize_head: bool = False
    backend: str = "inductor"

    def compile(self, variant: str) -> Callable[[Any], Any]:
        tuned = variant == "fused" and self.device == "cuda"
        return partial(
            torch.compile,
            fullgraph=True,
            dynamic=False,
            backend=self.backend,
            options=FUSED_OPTIONS if tuned else None,
        )


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", nargs="+", choices=list(PRESETS), default=list(Run.models))
    command.add_argument("--layers", type=int, metavar="N", help="instead of as many as the model has")
    command.add_argument("--schemes", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    command.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    command.add_argument("--batch", nargs="*", type=int, default=list(BATCHES), metavar="B", help="sequences decoded")
    command.add_argument("--prompt", type=int, default=PROMPT, metavar="T", help="tokens of a prompt; 0: no prompt")
    command.add_argument("--head", action="store_true", help="quantize the language model's head as well")
    command.add_argument("--add", action="store_true", help="keep the other cases that the results file holds")


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
    )


@torch.inference_mode()
def run(request: Run, save: Callable[[dict[str, Any]], None] = lambda results: None) -> dict[str, Any]:
    """Measure, print one line per case, and return the content of the results file.

    ``save`` gets partial results after every contender, in case a long run is interrupted.
    """
    meta = describe(request.device) | {"context": request.context, "quantize_head": request.quantize_head}
    warn_if_busy(meta)
    if request.device == "cuda":
        settle_clocks()
    # Exclude the compiler's startup from the first contender.
    torch.compile(torch.sin, backend=request.backend)(torch.ones(8, device=request.device))
    results: dict[str, Any] = {"meta": meta, "rows": []}
    for name in request.models:
        for word in request.contenders:
            logits: dict[Any, Tensor] = {}  # of the first variant, by case
            for variant in request.variants:
                results["rows"] += _contender(request, name, word, variant, logits)
                save(results)
    return results


def add(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Merge the results of two runs. The later run replaces common cases."""
    if not same_setting(before["meta"], now["meta"], but=("date",)):
        raise ValueError(f"results of another setting: {before['meta']}, now {now['meta']}")

    def cases(results: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {tuple(row[key] for key in _CASE): row for row in results["rows"]}

    return {"meta": now["meta"], "rows": list((cases(before) | cases(now)).values())}


def _contender(request: Run, name: str, word: str, variant: str, logits: dict[Any, Tensor]) -> Iterator[dict[str, Any]]:
    gc.collect()
    torch._dynamo.reset()
    model = Model(name, request.layers, LAYER_SCHEMES.get(word), variant, request.device, request.quantize_head)
    about = {"model": name, "layers": model.layers, "scheme": word, "variant": variant}
    about["weights_mib"] = weights_mib(model)
    print(f"\n{name}, {model.layers} layers, {word}, {variant}: {about['weights_mib']:.0f} MiB of weights")
    cases = [("decode", batch) for batch in request.batches] + ([("prefill", 1)] if request.prompt else [])
    for i, (phase, batch) in enumerate(cases):
        make, length = (Inputs.decode, request.context) if phase == "decode" else (Inputs.prefill, request.prompt)
        inputs = make(model, batch, length, request.device)
        # The first case compiles without on-disk caches. Its time is reported.
        with _no_caches() if i == 0 else contextlib.nullcontext():
            row, result = _case(model, inputs, request.device, request.compile(variant))
        before = logits.setdefault((phase, batch), result)
        check_logits(result, before, f"{name}, {word}, {phase} {batch}: {variant} against {request.variants[0]}")
        row["compile_s"] = row["compile_s"] if i == 0 else None
        row = about | {"phase": phase, "batch": batch, "tokens": inputs.tokens.numel()} | row
        _print_row(row)
        yield row


def _case(model: Model, inputs: Inputs, device: str, compile: Callable[[Any], Any]) -> tuple[dict[str, Any], Tensor]:
    """All measurements of one pass, and its logits."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first_tokens = inputs.tokens.clone()
    eager = Step(model, inputs)
    expected = eager()
    # An eager pass is host-bound, and the host may be shared: use the best of three attempts.
    moments = [_eager_s(eager, device, synchronize)]
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None

    compiled = Step(model, inputs, compile)
    inputs.tokens.copy_(first_tokens)
    synchronize()
    start = time.perf_counter()
    result = compiled()
    synchronize()
    compile_s = time.perf_counter() - start
    check_logits(result, expected, "compiled against eager")
    compiled_host = _host_s(compiled, synchronize)
    moments.append(_eager_s(eager, device, synchronize))
    call: Callable[[], object] = capture(compiled).replay if device == "cuda" else compiled
    compiled_s = interleaved([call], _CELL_S, device)[0]
    moments.append(_eager_s(eager, device, synchronize))
    eager_s, eager_host = map(min, zip(*moments, strict=True))
    tokens = inputs.tokens.numel()
    row = {
        **{"eager_tokens_s": tokens / eager_s, "compiled_tokens_s": tokens / compiled_s, "compile_s": compile_s},
        **{"eager_host_us": eager_host * 1e6, "compiled_host_us": compiled_host * 1e6},
        **{"graph_host_us": _host_s(call, synchronize) * 1e6, "peak_mib": peak},
    }
    return row, result.clone()


def _eager_s(eager: Step, device: str, synchronize: Callable[[], None]) -> tuple[float, float]:
    """Seconds of a pass, and until its call returns."""
    return interleaved([eager], _CELL_S, device)[0], _host_s(eager, synchronize)


def _host_s(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    """Median seconds until a call returns, with an empty queue."""
    samples = []
    for _ in range(_HOST_CALLS):
        synchronize()
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    synchronize()
    return median(samples)


def relative_difference(result: Tensor, expected: Tensor) -> float:
    return ((result.float() - expected.float()).norm() / expected.float().norm()).item()


def check_logits(result: Tensor, expected: Tensor, what: str) -> None:
    difference = relative_difference(result, expected)
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


Case = tuple[str, int, int]


def case_of(row: dict[str, Any]) -> Case:
    return row["phase"], row["batch"], row["tokens"]


def title_of(case: Case) -> str:
    phase, batch, tokens = case
    return f"batch {batch}" if phase == "decode" else f"prompt of {tokens}"


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    head = "quantized too" if meta["quantize_head"] else "in bfloat16"
    parts = [f"{caption(meta)}; the head {head}, {meta['context']} tokens of context when decoding."]
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        parts += [_speeds(name, variant, mine) for variant in dict.fromkeys(row["variant"] for row in mine)]
        parts.append(_costs(name, mine))
    return "\n\n".join(parts)


def _speeds(name: str, variant: str, rows: list[dict[str, Any]]) -> str:
    rows = [row for row in rows if row["variant"] == variant]
    cases = {(row["phase"], row["batch"]): _label(row) for row in rows}
    cells = {(row["scheme"], row["phase"], row["batch"]): row for row in rows}
    lines = []
    for word in dict.fromkeys(row["scheme"] for row in rows):
        found = [(cells.get((word, *case)), cells.get((BASELINE, *case))) for case in cases]
        speeds = [_speed(row, base, way) for row, base in found for way in ("eager", "compiled")]
        lines.append([f"`{word}`", *speeds])
    header = ["scheme", *(f"{case}, {way}" for case in cases.values() for way in ("eager", "compiled"))]
    title = f"**{name}**, {rows[0]['layers']} layers, {variant} blocks: tokens/s (times {BASELINE})"
    return f"{title}\n\n{table(header, lines)}"


def _speed(row: dict[str, Any] | None, base: dict[str, Any] | None, way: str) -> str:
    if row is None:
        return "–"
    key = f"{way}_tokens_s"
    return f"{row[key]:.0f}" + (f" ({row[key] / base[key]:.2f})" if base else "")


def _costs(name: str, rows: list[dict[str, Any]]) -> str:
    """Memory of a contender in every case; host and compile time in its first case."""
    cases = {(row["phase"], row["batch"]): _label(row) for row in rows}
    peaks = {(row["scheme"], row["variant"], row["phase"], row["batch"]): row["peak_mib"] for row in rows}
    lines = []
    for row in rows:
        if row["compile_s"] is None:
            continue
        contender = row["scheme"], row["variant"]
        here = [peaks.get((*contender, *case)) for case in cases]
        lines.append(
            [
                *(f"`{row['scheme']}`", row["variant"], f"{row['weights_mib']:.0f}"),
                *("–" if peak is None else f"{peak:.0f}" for peak in here),
                *(f"{row[key]:.0f}" for key in ("eager_host_us", "compiled_host_us", "graph_host_us")),
                f"{row['compile_s']:.1f}",
            ]
        )
    hosts = [f"host µs, {way}" for way in ("eager", "compiled", "CUDA graph")]
    header = ["scheme", "blocks", "weights MiB", *(f"peak MiB, {case}" for case in cases.values()), *hosts, "compile s"]
    title = f"**{name}**: memory; host time of one pass, and time to compile it, at the first batch"
    return f"{title}\n\n{table(header, lines)}"


def _label(row: dict[str, Any]) -> str:
    return f"batch {row['batch']}" if row["phase"] == "decode" else "prompt"
