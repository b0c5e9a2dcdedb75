"""Weights of about four bits by qao and other packages: bits, divergence, nats, neighbors, seconds.

Every method rounds the same layers of the same models, and the stored weights are evaluated in float32 on the same
text. SmolLM2 is taken "off its grid" (see calibrate.py): groups of 32 with a zero point would reproduce its file
exactly. Its groups remain near that grid, so methods without data also round it with its channels in another order,
where no group was one in the file. Methods of packages that are not installed are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import numpy
import qao
import torch
from qao.calibration import calibrating
from qao.calibration.stream import evaluating, samples_of
from qao.diagnostics.perplexity import windows
from qao.nn.linear import linear_weight
from qao.quantization import quantize
from torch import Tensor, nn

from . import ggml
from .calibrate import off_grid, permuted, samples
from .divergence import Reference, compared
from .language import HEAD, WINDOW, load_text
from .markdown import caption, table
from .meta import describe
from .numerics import load_embedding
from .result_files import read, read_rows, write
from .weights_only import SENTENCES, nearest, vectors

WINDOWS = 6
HALF = torch.float16
_WITH_MATRIX = ("Q4_0", "Q4_1", "IQ4_XS", "Q4_K", "Q6_K", *ggml.MIXES)  # an importance matrix leaves Q8_0 as it is
Rounding = Callable[[Tensor], tuple[Tensor, float]]  # weight [N, K] to the stored values and bits
Calibrating = Callable[[nn.Module, list[Tensor], Any], float]  # quantizes a model in place; returns bits per weight


def bitsandbytes(weight: Tensor) -> tuple[Tensor, float]:
    from bitsandbytes import functional

    q, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return functional.dequantize_4bit(q, state), 8 * (q.nbytes + state.absmax.nbytes)


def hqq(size: int) -> Rounding:
    def rounded(weight: Tensor) -> tuple[Tensor, float]:
        from hqq.core.quantize import Quantizer

        options: dict[str, Any] = {"nbits": 4, "group_size": size, "axis": 1, "device": "cpu"}
        q, facts = Quantizer.quantize(weight, compute_dtype=torch.float32, **options)
        groups = facts["scale"].numel() + facts["zero"].numel()
        return Quantizer.dequantize(q, facts), 4 * weight.numel() + 16 * groups

    return rounded


def torchao(size: int) -> Rounding:
    def rounded(weight: Tensor) -> tuple[Tensor, float]:
        from torchao.quantization import IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup
        from torchao.quantization.quant_primitives import MappingType

        linear = nn.Linear(*reversed(weight.shape), bias=False)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        asymmetric = MappingType.ASYMMETRIC
        quantize_(linear, IntxWeightOnlyConfig(torch.int4, PerGroup(size), mapping_type=asymmetric))
        # 16-bit scales and zero points, as in its 4-bit tensors.
        return linear.weight.dequantize(), weight.numel() * (4 + 2 * 16 / size)

    return rounded


def gguf(name: str) -> Rounding:
    def rounded(weight: Tensor) -> tuple[Tensor, float]:
        import gguf

        kind = getattr(gguf.GGMLQuantizationType, name)
        q = gguf.quants.quantize(weight.numpy(), kind)
        return torch.from_numpy(numpy.ascontiguousarray(gguf.quants.dequantize(q, kind))), 8 * q.nbytes

    return rounded


def _llm_compressor(size: int) -> Calibrating:
    """Its GPTQ with its defaults (W4A16_ASYM). Each layer's H comes from the quantized preceding layers."""

    def calibrated(model: nn.Module, data: list[Tensor], rules: Any) -> float:
        from compressed_tensors.quantization import QuantizationArgs
        from compressed_tensors.quantization.utils import calculate_qparams
        from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

        kind: Any = {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": size}
        arguments = QuantizationArgs(**kind, actorder="static")
        units = quantize.units_of(quantize.plan(model, rules, None, False, None, False).pending)
        with evaluating(model):
            for some, hessian, _ in calibrating._inputs(model, samples_of(data, model), units, False):
                assert hessian is not None
                for unit in some:
                    weight = linear_weight(unit[0].module).detach()
                    groups = nn.functional.pad(weight, (0, -weight.shape[1] % size)).unflatten(1, (-1, size))
                    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
                    operands = [one[None].clone() for one in (weight, hessian, scales, zeros)]
                    weight.copy_(quantize_weight(*operands, None, arguments)[0][0])
        return 4 + (16 + 4) / size  # zero points are packed in four bits

    return calibrated


def _random_tokens(size: int) -> Calibrating:
    """qao's method "importance" on random tokens, which needs no text."""

    def calibrated(model: nn.Module, data: list[Tensor], rules: Any) -> float:
        scheme = _int4(size)
        report = qao.calibrate(model, None, {name: rule and scheme for name, rule in rules.items()}, progress=False)
        return 8 * report.bytes_after / report.parameters_quantized

    return calibrated


def _int4(size: int, **options: Any) -> qao.Scheme:
    return qao.Int4WeightOnly(group_size=size, scale_dtype=HALF, **options)


# A scheme or the rounding of another package; or what quantizes a language model, and its number of texts.
METHODS: dict[str, qao.Scheme | Rounding | tuple[qao.Scheme | Calibrating, int]] = {
    "qao int4 g128, symmetric": _int4(128, symmetric=True),
    "qao int4 g64, symmetric": _int4(64, symmetric=True),
    "qao int4 g64": _int4(64),
    "torchao int4 g64, to nearest": torchao(64),
    "HQQ int4 g64": hqq(64),
    "bitsandbytes nf4, blocks of 64": bitsandbytes,
    "qao int4 g32, symmetric": _int4(32, symmetric=True),
    "qao int4 g128": _int4(128),
    "qao int4 g32": _int4(32),
    "torchao int4 g32, to nearest": torchao(32),
    "HQQ int4 g32": hqq(32),
    "qao int8": qao.Int8WeightOnly(),
    **{f"llama.cpp {name}": gguf(name) for name in ("Q4_0", "Q4_1", "Q8_0")},  # the same numbers as ggml's
    **{f"llama.cpp {name}": ggml.rounding(name) for name in ("IQ4_XS", "Q4_K", "Q6_K")},
    **{f"llama.cpp {name}": (ggml.quantizing(name), 0) for name in ggml.MIXES},
    **{f"llama.cpp {name}, types of its file": (ggml.quantizing(name, whole_rows=True), 0) for name in ggml.MIXES},
    **{f"llama.cpp {name}, importance matrix": (ggml.quantizing(name), 16) for name in _WITH_MATRIX},
    **{f"qao int4 g{size}, random tokens": (_random_tokens(size), 0) for size in (128, 64, 32)},
    "qao int4 g128, calibrated": (_int4(128), 16),
    "qao int4 g64, calibrated": (_int4(64), 16),
    "qao int4 g32, calibrated": (_int4(32), 16),
    "llm-compressor GPTQ g128": (_llm_compressor(128), 16),
    "llm-compressor GPTQ g64": (_llm_compressor(64), 16),
    "llm-compressor GPTQ g32": (_llm_compressor(32), 16),
}


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--only", choices=list(METHODS), action="append", help="these, added to those in the file")
    command.add_argument("--permuted", action="store_true", help="only the divergence with permuted channels")
    command.add_argument("--add", type=Path, metavar="FILE", help="measure nothing: join the results of another run")


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure one method at a time and write the results file after each."""
    if arguments.add:
        write(joined(read(path), read(arguments.add)), path)
        return
    gguf_file, ids, _, tokenizer = load_text()
    ids = ids[: WINDOWS * WINDOW + 1]
    language = qao.dequantize_(qao.from_pretrained(gguf_file, dtype=torch.float32))
    off_grid(language)
    pieces = windows(language, ids, WINDOW)
    reference = Reference(language, pieces)
    exact = math.log(compared(language, reference)["perplexity"])
    other = copy.deepcopy(language)
    permuted(other)
    reference_of_other = Reference(other, pieces)
    embedding, encoder, batches = load_embedding("cpu", SENTENCES)
    truth = vectors(embedding, encoder, batches)
    kept = read_rows(path) if arguments.only else []
    rows = {row["method"]: row for row in kept if row["method"] in METHODS}
    for name in arguments.only or METHODS:
        method, texts = METHODS[name], _texts(METHODS[name])
        if arguments.permuted and texts:
            continue
        row: dict[str, Any] = {"method": name, "samples": texts}
        try:
            if not arguments.permuted:
                data = samples(tokenizer, texts) if texts else []
                model, seconds, bits = _applied(method, language, {HEAD: None}, data)
                cost = compared(model, reference)
                row |= {"bits": bits, "seconds": seconds}
                row |= {key: cost[key] for key in ("perplexity", "divergence", "divergence_error")}
                row |= {"nats_above": cost["nats_above"] / exact, "standard_error": cost["nats_error"] / exact}
            if not arguments.permuted and not isinstance(method, tuple):
                small = _applied(method, encoder, {}, [])[0]
                found = vectors(embedding, small, batches)
                row["neighbors_kept"] = (nearest(found) == nearest(truth)).double().mean().item()
                row["cosine_mean"] = (found * truth).sum(-1).mean().item()
            if not texts:
                cost = compared(_applied(method, other, {HEAD: None}, [])[0], reference_of_other)
                row |= {"permuted": cost["divergence"], "permuted_error": cost["divergence_error"]}
        except ImportError as missing:
            print(f"{name} is left out: {missing}", flush=True)
            continue
        rows[name] = row
        print(json.dumps(row), flush=True)
        meta = describe("cpu") | {"windows": WINDOWS, "window": WINDOW, "sentences": SENTENCES}
        meta["nats_per_token"] = exact
        del meta["command"]  # may hold paths
        write({"meta": meta, "rows": [rows[one] for one in METHODS if one in rows]}, path)


def joined(before: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Rows of both, with the numbers of the other where both have one, in the order of METHODS.

    Both share a reference. Seconds are those of the machine of the first run, but in added rows.
    """
    assert abs(before["meta"]["nats_per_token"] - other["meta"]["nats_per_token"]) < 1e-4
    rows: dict[str, dict[str, Any]] = {}
    for row in (*before["rows"], *other["rows"]):
        rows[row["method"]] = rows.get(row["method"], {}) | row
    return {"meta": before["meta"], "rows": [rows[name] for name in METHODS if name in rows]}


def _texts(method: Any) -> int:
    return method[1] if isinstance(method, tuple) else 0


def _applied(
    method: Any, model: nn.Module, left: dict[str, None], data: list[Tensor]
) -> tuple[nn.Module, float, float]:
    """A quantized copy, processor seconds, and bits per weight."""
    model = copy.deepcopy(model)
    begun = time.process_time()
    scheme = method[0] if isinstance(method, tuple) else method
    if isinstance(method, tuple) and callable(scheme):
        bits = scheme(model, data, {**left, "re:.*": _int4(-1)})  # any scheme that takes all layers
        return model, time.process_time() - begun, bits
    if not callable(scheme):
        rules: Any = {**left, "re:.*": scheme}
        if data:
            report = qao.calibrate(model, data, rules, progress=False)
        else:
            report = qao.quantize_(model, rules, progress=False)
        seconds = time.process_time() - begun
        return model, seconds, 8 * report.bytes_after / report.parameters_quantized
    bits, elements = apply(method, model, left)
    return model, time.process_time() - begun, bits / elements


@torch.no_grad()
def apply(rounding: Rounding, model: nn.Module, left: Collection[str]) -> tuple[float, int]:
    """Round the linear layers with names that are not in ``left``. Returns their bits and weights."""
    bits, elements = 0.0, 0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name not in left:
            values, taken = rounding(module.weight.detach().float().cpu())
            module.weight.copy_(values)
            bits, elements = bits + taken, elements + module.weight.numel()
    return bits, elements


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file, sorted by bits."""
    meta, rows = results["meta"], results["rows"]
    nats = f"{meta['nats_per_token']:.3f} nats a token in float32 (perplexity {math.exp(meta['nats_per_token']):.2f})"
    text = f"{meta['windows']} windows of {meta['window']} tokens, {nats}; {meta['sentences']} sentences"
    peers = ", ".join(f"{name} {version}" for name, version in sorted(meta["peers"].items()))
    lines = [
        [
            row["method"],
            f"{row['bits']:.2f}",
            f"{row['divergence']:.4f} ± {row['divergence_error']:.4f}",
            f"{row['permuted']:.4f} ± {row['permuted_error']:.4f}" if "permuted" in row else "",
            f"{row['perplexity']:.2f}",
            f"{row['nats_above']:+.2%} ± {row['standard_error']:.2%}",
            f"{row['neighbors_kept']:.1%}" if "neighbors_kept" in row else "",
            f"{row['cosine_mean']:.4f}" if "cosine_mean" in row else "",
            f"{row['seconds']:.0f}",
        ]
        for row in sorted(rows, key=lambda row: (round(row["bits"], 2), row["divergence"]))
    ]
    header = ["method", "bits a weight", "KL divergence, nats", "channels permuted", "perplexity", "nats above fp32"]
    header += ["neighbors kept", "cosine: mean", "processor seconds"]
    return f"{caption(meta)}; {text}; {peers}.\n\n{table(header, lines)}"
