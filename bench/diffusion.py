"""Denoising step of a diffusion transformer under 8-bit schemes, compiled: ``python -m bench diffusion``.

The model is diffusers' FluxTransformer2DModel in the shape of FLUX.1-dev with random weights, so nothing is downloaded.
A step has the tokens of an image of 1024 x 1024 pixels and of its text. The repeated blocks are compiled, as diffusers
recommends: those of quantized models with the backend "qao", those of the model in bfloat16 with Inductor.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import qao
import torch

from .llama import BASELINE, relative_difference
from .llama_model import weights_mib
from .markdown import caption, table
from .meta import describe, warn_if_busy
from .result_files import write
from .schemes import LAYER_SCHEMES
from .timing import seconds_of
from .turns import Turns

COMMON = {"in_channels": 64, "guidance_embeds": True}
MODELS: dict[str, dict[str, Any]] = {
    "flux.1-dev": {
        **{"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24},
        **{"joint_attention_dim": 4096, "pooled_projection_dim": 768},
    },
    # for trying the bench itself
    "tiny": {
        **{"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 128, "num_attention_heads": 1},
        **{"joint_attention_dim": 32, "pooled_projection_dim": 32},
    },
}
SCHEMES = ("int8_int8", "fp8_fp8")
CONTENDERS = (BASELINE, *sorted(LAYER_SCHEMES))
_SIDE = 64  # tokens: 1024 pixels, 8 of a latent pixel, 2 of a token
_TEXT = 512  # tokens
_ROUNDS = 9
_MOST_DIFFERENCE = 0.1  # of a compiled step from an eager one, relative root mean square


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=MODELS, default="flux.1-dev")
    command.add_argument("--side", type=int, default=_SIDE, metavar="T", help="tokens of a side of the image")
    command.add_argument("--schemes", nargs="+", choices=CONTENDERS, default=[BASELINE, *SCHEMES], metavar="NAME")
    command.add_argument("--backend", default="qao", help="of torch.compile, for quantized models")
    command.add_argument(
        "--turns", type=Path, metavar="FILE", help="of several runs on one GPU: one measures while none compiles"
    )


@torch.no_grad()
def run(arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Measure, print one line per scheme, and write the results after each of them."""
    import diffusers

    meta = describe(arguments.device) | {"diffusers": diffusers.__version__, "model": arguments.model}
    meta |= {"image_tokens": arguments.side**2, "text_tokens": _TEXT}
    warn_if_busy(meta)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        turns = Turns(arguments.turns or Path(folder) / "turns")
        for word in arguments.schemes:
            rows.append(_measure(arguments, word, turns))
            write({"meta": meta, "rows": rows}, path)
    return {"meta": meta, "rows": rows}


def _measure(arguments: argparse.Namespace, word: str, turns: Turns) -> dict[str, Any]:
    with turns.start():
        model = _model(arguments, word)
        step = partial(model, **_inputs(arguments, model))
        expected = step()[0]
        model.compile_repeated_blocks(fullgraph=True, backend="inductor" if word == BASELINE else arguments.backend)
        first_s = seconds_of(step, 1, arguments.device)
        difference = relative_difference(step()[0], expected)
    if not difference < _MOST_DIFFERENCE:
        raise RuntimeError(f"{word}: a compiled step differs by {difference:.3g} from an eager one")
    with turns.measure():
        step_s = median(seconds_of(step, 1, arguments.device) for _ in range(_ROUNDS))
    print(f"{word:<10} {1e3 * step_s:8.1f} ms per step, first {first_s:.0f} s", flush=True)
    return {"scheme": word, "weights_mib": weights_mib(model), "step_ms": 1e3 * step_s, "first_s": first_s}


def _model(arguments: argparse.Namespace, word: str) -> Any:
    import diffusers

    gc.collect()  # the model before
    torch._dynamo.reset()
    torch.manual_seed(0)
    with torch.device(arguments.device):
        model = diffusers.FluxTransformer2DModel(**COMMON | MODELS[arguments.model])
    model = model.to(torch.bfloat16).eval()
    if word != BASELINE:
        qao.quantize_(model, LAYER_SCHEMES[word], progress=False)
    return model


def _inputs(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    like = {"device": arguments.device, "dtype": torch.bfloat16}
    config = model.config
    places = torch.cartesian_prod(torch.arange(1), *2 * [torch.arange(arguments.side)]).to(**like)
    return {
        "hidden_states": torch.randn(1, arguments.side**2, config.in_channels, **like),
        "encoder_hidden_states": torch.randn(1, _TEXT, config.joint_attention_dim, **like),
        "pooled_projections": torch.randn(1, config.pooled_projection_dim, **like),
        "timestep": torch.full([1], 0.5, **like),
        "guidance": torch.full([1], 3.5, device=arguments.device),
        "img_ids": places,
        "txt_ids": torch.zeros(_TEXT, 3, **like),
        "return_dict": False,
    }


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file: milliseconds of a step, in relation to bfloat16."""
    meta, rows = results["meta"], results["rows"]
    base = next((row["step_ms"] for row in rows if row["scheme"] == BASELINE), None)
    lines = [
        [f"`{row['scheme']}`", f"{row['weights_mib'] / 1024:.1f}", f"{row['step_ms']:.1f}"]
        + ([f"{base / row['step_ms']:.2f}"] if base else [])
        for row in rows
    ]
    header = ["scheme", "weights GiB", "ms per step", *([f"times {BASELINE}"] if base else [])]
    about = f"{meta['model']}, {meta['image_tokens']} + {meta['text_tokens']} tokens, diffusers {meta['diffusers']}"
    return f"{about}; {caption(meta)}.\n\n{table(header, lines)}"
