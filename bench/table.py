"""Generated Markdown between markers in the documents: measured numbers and facts about kernels.

<!-- bench:int4:h200 --> … <!-- /bench -->      every cell of bench/results/h200/int4.csv
<!-- bench:summary:h200 --> … <!-- /bench -->   one layer under every scheme
<!-- bench:tokens:h200 --> … <!-- /bench -->     all large layers under every scheme
<!-- bench:means:h200 --> … <!-- /bench -->      the same with the share of the roofline, schemes by tokens
<!-- bench:formats:cpu -->, <!-- bench:decoders:h200 -->, <!-- bench:others:h100-80gb-hbm3 -->,
<!-- bench:experts_means:h200 -->               of numerics.csv, llama.csv, prefill.csv and experts.csv, in short
<!-- bench:generate_first:h200 -->, <!-- bench:generate_others:h200 -->    of generate.csv, one model and the others
<!-- bench:quantize:h200 -->, <!-- bench:numerics:cpu -->, <!-- bench:weights_only:cpu -->,
<!-- bench:outliers:h100-80gb-hbm3 -->,
<!-- bench:accuracy:cpu -->, <!-- bench:language:cpu -->,
<!-- bench:calibrate:cpu -->, <!-- bench:four_bits:cpu -->, <!-- bench:gptq:h200 -->,
<!-- bench:rotation:cpu -->, <!-- bench:invariance:h100-80gb-hbm3 -->,
<!-- bench:plans:h100-80gb-hbm3 -->, <!-- bench:prefill:h100-80gb-hbm3 -->, <!-- bench:host:h200 -->,
<!-- bench:llama:h200 -->, <!-- bench:linear:epyc-avx2 -->, <!-- bench:threads:xeon-amx -->,
<!-- bench:diffusion:h200 -->,
<!-- bench:llama_head:h200 -->, <!-- bench:busy:epyc-avx512_bf16 -->
<!-- bench:vllm:h200 -->, <!-- bench:vllm_layouts:h200 -->,
<!-- bench:sglang:h200 -->, <!-- bench:sglang_layouts:h200 -->,
<!-- bench:update:h100-80gb-hbm3 -->, <!-- bench:tensor_parallel:h100-80gb-hbm3-x4 -->
<!-- bench:experts:h200 -->, <!-- bench:experts_block:h100-80gb-hbm3 -->
<!-- bench:sm90_skinny:h200 -->, <!-- bench:sm90_ws:h200 --> …    the cells of a kernel family
<!-- kernels --> … <!-- /kernels -->            what qao._host says about each scheme
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from . import (
    accuracy,
    busy,
    calibrate,
    choosing,
    diffusion,
    experts,
    experts_block,
    four_bits,
    generate,
    gguf,
    gptq,
    host,
    invariance,
    kernel_pages,
    kernels,
    language,
    linear,
    llama,
    numerics,
    outliers,
    plans,
    prefill,
    products,
    quantize,
    rotation,
    tensor_parallel,
    threads,
    weights_only,
)
from . import (
    update as new_weights,
)
from .meta import RESULTS, ROOT, source_hash
from .result_files import Results, read
from .schemes import SCHEMES
from .serving import tables as serving

_RENDERERS = {
    "quantize": quantize,
    "numerics": numerics,
    "outliers": outliers,
    "weights_only": weights_only,
    "language": language,
    "accuracy": accuracy,
    "calibrate": calibrate,
    "four_bits": four_bits,
    "rotation": rotation,
    "invariance": invariance,
    "plans": plans,
    "prefill": prefill,
    "gptq": gptq,
    "experts": experts,
    "experts_block": experts_block,
    "host": host,
    "llama": llama,
    "generate": generate,
    "diffusion": diffusion,
    "gguf": gguf,
    "vllm": serving,
    "sglang": serving,
    "llama_head": llama,
    "tensor_parallel": tensor_parallel,
    "update": new_weights,
    "linear": linear,
    "threads": threads,
    "busy": busy,
}
_OF_ALL_SCHEMES: dict[str, Callable[[dict[str, Results]], str]] = {
    "summary": products.render_summary,
    "tokens": choosing.render_tokens,
    "means": products.render_means,
    **{page: partial(kernel_pages.render, page) for page in kernel_pages.PAGES},
}
_IN_SHORT: dict[str, tuple[str, Callable[[Results], str]]] = {
    "formats": ("numerics", choosing.render_formats),
    "decoders": ("llama", choosing.render_decoders),
    "others": ("prefill", prefill.render_others),
    "generate_first": ("generate", generate.render_first),
    "generate_others": ("generate", generate.render_others),
    "experts_means": ("experts", experts.render_means),
    "vllm_layouts": ("vllm", serving.render_layouts),
    "sglang_layouts": ("sglang", serving.render_layouts),
}
_DOCUMENTS = (
    *("README.md", "docs/choosing.md", "docs/performance.md", "docs/numerics.md", "docs/calibrate.md"),
    *("docs/distributed.md", "docs/serving.md", "docs/transformers.md", "docs/kernels/quantize_weight.md"),
    *(f"docs/kernels/{page}.md" for page in kernel_pages.PAGES),
    "docs/kernels/grouped.md",
)
_RESULTS = re.compile(r"<!-- bench:(\w+):([\w-]+) -->\n.*?<!-- /bench -->", re.DOTALL)
_KERNELS = re.compile(r"<!-- kernels -->\n.*?<!-- /kernels -->", re.DOTALL)


def update(check: bool) -> int:
    """Render every block of every document; with ``check`` write nothing and return 1 if a block would change."""
    stale = []
    for name in _DOCUMENTS:
        path = ROOT / name
        if not path.exists():
            continue
        before = path.read_text()
        after = _KERNELS.sub(_kernels_block, _RESULTS.sub(_results_block, before))
        if after != before:
            stale.append(name)
            if not check:
                path.write_text(after)
    print(f"{'out of date' if check else 'updated'}: {', '.join(stale) or 'nothing'}")
    return 1 if check and stale else 0


def _kernels_block(match: re.Match[str]) -> str:
    return f"<!-- kernels -->\n{kernels.render()}\n<!-- /kernels -->"


def _results_block(match: re.Match[str]) -> str:
    kind, device = match.groups()
    for path in _files(kind, device).values():
        if not path.exists():
            print(f"{path} is missing: its block stays as it is")
        elif read(path)["meta"]["source_hash"] != _present():
            print(f"{path} was measured on other sources than the present ones")
    text = body(kind, device)
    return match[0] if text is None else f"<!-- bench:{kind}:{device} -->\n{text}\n<!-- /bench -->"


def body(kind: str, device: str) -> str | None:
    """The Markdown of a block; None: no measurements."""
    present = {word: read(path) for word, path in _files(kind, device).items() if path.exists()}
    if not present:
        return None
    if kind in _OF_ALL_SCHEMES:
        return _OF_ALL_SCHEMES[kind](present)
    if kind in _IN_SHORT:
        return _IN_SHORT[kind][1](*present.values())
    text: str = _RENDERERS.get(kind, products).render(present[kind])
    return text


def _files(kind: str, device: str) -> dict[str, Path]:
    """The results files of a block, by benchmark name."""
    words = list(SCHEMES) if kind in _OF_ALL_SCHEMES else [_IN_SHORT[kind][0] if kind in _IN_SHORT else kind]
    return {word: RESULTS / device / f"{word}.csv" for word in words}


@cache
def _present() -> str:
    return source_hash()
