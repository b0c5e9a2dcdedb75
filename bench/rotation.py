"""Gain of a Hadamard rotation of activations in nats per token, with and without calibration.

W x is (W Rᵀ) (R x) for an orthogonal R, here a Hadamard matrix per block of K: outlier columns are spread over their
block. The model is SmolLM2 as in bench/calibrate.py. int8_int8 has its own option, up to blocks of 256; for other
schemes R x is computed by plain torch and the GEMM by qao.
"""

from __future__ import annotations

import argparse
import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import qao
import torch
from qao.diagnostics.perplexity import Evaluation, compare, perplexity
from qao.ops.rotation import SIZES
from torch import Tensor, nn

from .calibrate import samples
from .language import HEAD, WINDOW, WINDOWS, load_text
from .markdown import caption, table
from .meta import describe
from .result_files import read_rows, write

SAMPLES = 16
SCHEMES: dict[str, qao.Scheme] = {
    "int8_int4 g128": qao.Int8DynamicActivationInt4Weight(),
    "int8_int8": qao.Int8DynamicActivationInt8Weight(),
    "int4 g128": qao.Int4WeightOnly(),
}
ALL, LAST, DOWN = r".*_proj", r".*(o_proj|down_proj)", r".*down_proj"
LAYERS = {ALL: "all", LAST: "o, down", DOWN: "down"}


class Case(NamedTuple):
    scheme: str
    method: str | None  # None: without data
    block: int = 0  # 0: not rotated
    layers: str = ALL

    @property
    def name(self) -> str:
        return ", ".join(
            (self.scheme, self.method or "no data", *([f"{LAYERS[self.layers]} {self.block}"] * bool(self.block)))
        )


_ROTATIONS = ((0, ALL), (16, ALL), (32, ALL), (64, ALL), (128, ALL), (128, LAST), (512, DOWN))
_CALIBRATED = ((0, ALL), (64, ALL), (128, LAST))
CASES = [
    *(Case(scheme, None, *rotation) for scheme in SCHEMES for rotation in _ROTATIONS),
    *(Case(scheme, "gptq", *rotation) for scheme in SCHEMES for rotation in _CALIBRATED),
    *(Case(scheme, "smoothquant", *rotation) for scheme in ("int8_int8", "int8_int4 g128") for rotation in _CALIBRATED),
]


class Rotated(nn.Module):
    """A linear layer with weight W Rᵀ that applies R to its input."""

    def __init__(self, linear: nn.Module, block: int) -> None:
        super().__init__()
        self.linear, self.block = linear, block

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(rotated(x, self.block))
        return result


def rotated(x: Tensor, block: int) -> Tensor:
    """[..., K] with runs of ``block`` columns (a power of two) each multiplied by the orthogonal Hadamard matrix."""
    result = x.unflatten(-1, (-1, block))
    step = 1
    while step < block:
        pairs = result.unflatten(-1, (-1, 2, step))
        result = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
        step *= 2
    return result.flatten(-2) * block**-0.5


def block_of(k: int, limit: int) -> int:
    """The largest power of two up to ``limit`` that divides K."""
    return min(limit, k & -k)


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--only", nargs="+", metavar="NAME", help=f"these cases, as {CASES[1].name!r}")


def run(arguments: argparse.Namespace, path: Path) -> None:
    """Measure each case with and without rotation, and write the results file after each."""
    gguf, ids, _, tokenizer = load_text()
    ids = ids.to(arguments.device)
    float32 = qao.dequantize_(qao.from_pretrained(gguf, dtype=torch.float32, device=arguments.device))
    data = samples(tokenizer, SAMPLES)
    exact = perplexity(float32, ids, window=WINDOW)
    kept = read_rows(path) if arguments.only else []
    rows: dict[str, dict[str, Any]] = {row["case"]: row for row in kept}
    for case in CASES:
        if arguments.only and case.name not in arguments.only:
            continue
        found = perplexity(quantized(float32, case, data), ids, window=WINDOW)
        cost = compare(found, exact)
        row: dict[str, Any] = {"case": case.name, "scheme": case.scheme, "method": case.method, "block": case.block}
        row |= {"layers": LAYERS[case.layers], "nats_above": cost.nats_per_token, "standard_error": cost.standard_error}
        row["windows"] = found.window_nats
        plain = rows.get(Case(case.scheme, case.method).name)
        if case.block and plain:
            gained = compare(found, Evaluation(tuple(plain["windows"]), found.window_tokens))
            row |= {"difference": gained.nats_per_token, "standard_error_of_difference": gained.standard_error}
        rows[case.name] = row
        print(case.name, *(f"{key} {value:.5g}" for key, value in row.items() if isinstance(value, float)), flush=True)
        meta = describe(arguments.device) | {"windows": WINDOWS, "window": WINDOW, "samples": SAMPLES}
        meta["nats_per_token"] = exact.nats_per_token
        write({"meta": meta, "rows": [rows[one.name] for one in CASES if one.name in rows]}, path)


def quantized(model: nn.Module, case: Case, data: list[Tensor]) -> nn.Module:
    """A quantized copy; layers outside the decoder's blocks stay in float."""
    model = copy.deepcopy(model)
    scheme = SCHEMES[case.scheme]
    if isinstance(scheme, qao.Int8DynamicActivationInt8Weight) and case.block in (0, *SIZES):
        return _with_option(model, case, replace(scheme, rotation=case.block), data)
    rules: dict[str, qao.Scheme | None] = {HEAD: None, "re:.*": scheme}
    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and re.fullmatch(case.layers, n)]
    if case.method == "smoothquant":
        smoothed(model, data, rules)
    for name in names if case.block else ():
        weight = model.get_submodule(name).weight
        with torch.no_grad():
            weight.copy_(rotated(weight, block_of(weight.shape[1], case.block)))
    # Without data, layers keep their names, by which they share estimates of importance.
    if case.method is None:
        qao.quantize_(model, rules, progress=False)
    for name in names if case.block else ():
        linear = model.get_submodule(name)
        model.set_submodule(name, Rotated(linear, block_of(linear.in_features, case.block)))
    if case.method is not None:
        qao.calibrate(model, data, rules, progress=False)
    return model


def _with_option(model: nn.Module, case: Case, scheme: qao.Scheme, data: list[Tensor]) -> nn.Module:
    rules = {HEAD: None, f"re:{case.layers}": scheme, "re:.*": SCHEMES[case.scheme]}
    if case.method is None:
        qao.quantize_(model, rules, progress=False)
    else:
        qao.calibrate(model, data, rules, method=case.method, progress=False)
    return model


def smoothed(model: nn.Module, data: list[Tensor], rules: Any) -> None:
    """Fold SmoothQuant's factors into norms and weights before the rotation."""
    from qao.calibration.scaling import smooth
    from qao.calibration.stream import evaluating, samples_of
    from qao.quantization import quantize

    planned = quantize.plan(model, rules, None, False, None, False)
    try:
        with evaluating(model):
            smooth(model, samples_of(data, model), quantize.units_of(planned.pending), [])
    finally:
        planned.settle()


def render(results: dict[str, Any]) -> str:
    """Markdown of one results file: one line per rotation, next to the same case without one."""
    meta, rows = results["meta"], results["rows"]
    nats = meta["nats_per_token"]
    lines = []
    for row in rows:
        gained = ""
        if "difference" in row:
            gained = f"{row['difference'] / nats:+.2%} ± {row['standard_error_of_difference'] / nats:.2%}"
        where = f"{row['layers']}, {row['block']}" if row["block"] else "none"
        above = f"{row['nats_above'] / nats:+.2%} ± {row['standard_error'] / nats:.2%}"
        lines.append([f"{row['scheme']}, {row['method'] or 'no data'}", where, above, gained])
    header = ["scheme, method", "rotated: layers, block", "nats above fp32", "compared with no rotation"]
    text = f"{caption(meta)}; {meta['windows']} windows of {meta['window']} tokens, fp32 {nats:.3f} nats a token."
    return f"{text}\n\n{table(header, lines)}"
