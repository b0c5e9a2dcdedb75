"""A valid call of every operator and its hostile variants; as a program, a seeded run of such calls.

``python abuse_support.py SEED COUNT`` prints each call before it makes it.
"""

from __future__ import annotations

import random
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import qao  # noqa: F401  # the operators
import torch
from ops_support import randn
from test_errors import BYTES, K, N, arguments_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

Arguments = dict[str, Any]
Change = Callable[[Tensor, random.Random], Any]

PACKED = ("int4_mm", "int8_int4_mm", "fp8_int4_mm", "pack_int4", "unpack_int4", "dequantize_int4")
INT8 = torch.int8


def _others(device: str) -> dict[str, Arguments]:
    x, norm = randn(3, K, dtype=torch.bfloat16, device=device), randn(K, dtype=torch.float32, device=device)
    weight, scales, bias = (arguments_of("int4_mm", device)[name] for name in ("weight", "scales", "bias"))
    ids = torch.tensor([1, 2, 0], device=device)
    sizes = {"out_features": N, "in_features": K, "group_size": 64}
    rows = {"num_embeddings": N, "embedding_dim": K, "group_size": 64}
    groups = {"group_size": 64, "dtype": torch.uint8, "symmetric": False, "scale_dtype": torch.float16}
    groups["factors"] = [1.0, 0.9]
    normed = {"x": x, "residual": x.clone(), "weight": norm, "eps": 1e-6}
    fused = {"norm_weight": norm, "eps": 1e-6, "weight": weight, "scales": scales, "bias": bias, **sizes}
    gate = {"alpha": 1.702, "limit": 7.0, "shift": 1.0, "interleaved": True}
    fp4 = {
        "weight": torch.zeros(3, 4, 512, dtype=INT8, device=device),
        "scales": torch.ones(3, 16, 1, 16, dtype=torch.bfloat16, device=device),
    }
    q8 = torch.zeros(N, 192 // 32 * 34, dtype=torch.uint8)
    return {
        "fp4_mm": {"x": x, **fp4, "bias": bias, **sizes, "group_size": 16},
        "expert_topk": {
            **{"logits": randn(3, 8, dtype=torch.bfloat16, device=device), "bias": torch.rand(8, device=device)},
            **{"top_k": 2, "sigmoid": True, "normalized": True, "factor": 2.5, "groups": 4, "top_groups": 2},
        },
        "expert_sort": {"experts": torch.tensor([[1, 2], [0, 2]], device=device), "num_experts": 3},
        "expert_sum": {
            "rows": x,
            "places": torch.tensor([[0, 2], [1, 1]], dtype=torch.int32, device=device),
            "weights": torch.ones(2, 2, device=device),
        },
        "int8_quantize": {"x": x, "symmetric": True},
        "hadamard": {"x": torch.randn(3, 192, device=device), "size": 64},
        "fp8_quantize": {"x": x, "group_size": 0, "scale": torch.ones(1, device=device)},
        "add_rms_norm": normed,
        "silu_mul": {"gate": x, "up": x.clone()},
        "rms_norm_quantize": {"x": x, "weight": norm, "eps": 1e-6, "dtype": INT8},
        "add_rms_norm_quantize": {**normed, "dtype": INT8},
        "silu_mul_quantize": {"gate": x, "up": x.clone(), "dtype": INT8},
        "swiglu": {"x": x, **gate},
        "swiglu_quantize": {"x": x, **gate, "dtype": INT8},
        "quantize_groups": {
            "weight": torch.randn(N, K, device=device),
            **groups,
            "importance": torch.rand(K, device=device),
        },
        "quantize_blocks": {"weight": torch.randn(N, K), "rows": 1, "columns": K},
        "quantize_fp4": {"weight": torch.randn(N, K), "group_size": 32},
        "quantize_weight_": {
            **{"weight": torch.randn(N, K, device=device), "dtype": INT8, "rows": 1, "columns": K},
            **{"symmetric": True, "whole_zeros": False, "q": torch.zeros(N, K, dtype=INT8, device=device)},
            **{"scales": torch.ones(N, device=device), "fault": torch.zeros(1, dtype=torch.int32, device=device)},
            "largest": torch.ones(1, device=device),
        },
        "load_weight_": {
            **{"weight": torch.randn(N, K, device=device), "dtype": INT8, "rows": 1, "columns": K},
            **{"symmetric": True, "whole_zeros": False, "q": torch.zeros(N, K, dtype=INT8, device=device)},
            **{"scales": torch.ones(N, device=device), "limit": 1e30},
        },
        "largest_magnitude": {"weight": torch.randn(N, K, device=device)},
        "gptq_columns": {
            **{name: torch.ones(5, N, device=device) for name in ("weight", "moved", "scales", "zeros")},
            **{"ratios": torch.ones(5, 5, device=device), "dtype": INT8},
        },
        "add_rms_norm_int4_mm": {"x": x, "residual": x.clone(), **fused, "gated": True},
        "int4_embedding": {"ids": ids, "weight": weight, "scales": scales, **rows, "dtype": torch.float32},
        "decode_attention": {
            **{n: torch.randn(1, h, 5, 16, device=device).half() for n, h in (("q", 4), ("k", 2), ("v", 2))},
            **{"mask": torch.ones(5, 5, dtype=torch.bool, device=device), "scale": 0.25},
        },
        "gguf_mm": {"x": x[:, :192].float().cpu(), "weight": q8, "bias": bias.cpu(), "qtype": 8},
        "gguf_grouped_mm": {
            **{"x": x[:, :192].float().cpu(), "weight": torch.stack((q8, q8)), "qtype": 8},
            **{"bias": torch.stack((bias, bias)).cpu(), "offsets": torch.tensor([1, 4], dtype=torch.int32)},
            **{"row_index": torch.tensor([2, 0, 1, 0]), "row_scale": torch.ones(4)},
        },
        "dequantize_gguf": {"weight": q8, "qtype": 8, "dtype": torch.float32},
        "gguf_embedding": {"ids": ids.cpu(), "weight": q8, "qtype": 8, "dtype": torch.float32},
        "int8_embedding": {
            "ids": ids,
            "weight": torch.ones(N, K, dtype=INT8, device=device),
            "scales": torch.ones(N, device=device),
            "dtype": torch.float32,
        },
    }


DENSE = [op for op in (*PACKED, *BYTES) if op.endswith("_mm") and "scaled" not in op]
GROUPED = [op.replace("_mm", "_grouped_mm") for op in (*DENSE, "fp4_mm")]
# Whatever the device.
ON_CPU = ("quantize_blocks", "quantize_fp4", "gguf_mm", "gguf_grouped_mm", "dequantize_gguf", "gguf_embedding")
CALLS = (*PACKED, *BYTES, *GROUPED, *_others("cpu"))  # every operator


def _of_experts(op: str, device: str) -> Arguments:
    dense = call_of(op.replace("_grouped_mm", "_mm"), device)
    experts = {name: torch.stack((dense[name], dense[name])) for name in PER_EXPERT if name in dense}
    routing = {
        "offsets": torch.tensor([1, 4], dtype=torch.int32, device=device),
        "row_index": torch.tensor([2, 0, 1, 0], device=device),
        "row_scale": torch.ones(4, device=device),
    }
    return dense | experts | routing


PER_EXPERT = ("weight", "scales", "bias", "weight_sums", "row_scales")


def call_of(op: str, device: str) -> Arguments:
    """Arguments that fit, by name; every optional tensor is given."""
    if op in GROUPED:
        return _of_experts(op, device)
    return arguments_of(op, device) if op in PACKED or op in BYTES else _others(device)[op]


# ---- hostile arguments -----------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8, torch.int32,
          torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16)  # fmt: skip


class _Subclass(Tensor):
    pass


def freed(t: Tensor) -> Tensor:
    """A tensor with freed storage, as FSDP leaves it."""
    t = t.clone()
    t.untyped_storage().resize_(0)
    return t


def _offset(t: Tensor) -> Tensor:
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def _out_of_range(t: Tensor, rng: random.Random) -> Tensor:
    largest = {torch.int64: 2**62, torch.int32: 2**31 - 1}.get(t.dtype)
    return t * 2 if largest is None else torch.full_like(t, rng.choice((largest, N, -1, largest // 2**30)))


TENSORS: dict[str, Change] = {
    "None": lambda t, rng: None,
    "list": lambda t, rng: [1.0],
    "str": lambda t, rng: "x",
    "array": lambda t, rng: numpy.zeros(3, "f"),
    "dtype": lambda t, rng: t.to(rng.choice(DTYPES)),
    "a number": lambda t, rng: t.flatten()[0],
    "a dimension more": lambda t, rng: t[None],
    "flat": lambda t, rng: t.flatten(),
    "63 dimensions": lambda t, rng: t.reshape([1] * (63 - t.dim()) + list(t.shape)),
    "empty": lambda t, rng: t[:0],
    "short": lambda t, rng: t.narrow(rng.randrange(t.dim()), 0, 1),
    "double": lambda t, rng: torch.cat((t, t), rng.randrange(t.dim())),
    "transposed": lambda t, rng: t.transpose(0, -1),
    "transposed memory": lambda t, rng: t.transpose(0, -1).contiguous().transpose(0, -1),
    "offset": lambda t, rng: _offset(t),
    "huge": lambda t, rng: t[:1].expand(2 ** rng.choice((33, 40, 50)), *t.shape[1:]),
    "huge and empty": lambda t, rng: t.new_empty(2**31, 0, t.shape[-1]),
    "overlapping": lambda t, rng: t.as_strided(t.shape, [1] * t.dim()),
    "one element": lambda t, rng: t.as_strided(t.shape, [0] * t.dim()),
    "sparse": lambda t, rng: t.to_sparse(),
    "compressed": lambda t, rng: t.to_sparse_csr(),
    "blocked": lambda t, rng: t.float().to_mkldnn(),
    "nested": lambda t, rng: torch.nested.nested_tensor([t, t]),
    "quantized by torch": lambda t, rng: torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8),
    "meta": lambda t, rng: t.to("meta"),
    "fake": lambda t, rng: FakeTensorMode().from_tensor(t),
    "functional": lambda t, rng: torch._to_functional_tensor(t),
    "subclass": lambda t, rng: t.as_subclass(_Subclass),
    "Parameter": lambda t, rng: nn.Parameter(t, requires_grad=False),
    "needs a gradient": lambda t, rng: t.clone().requires_grad_(),
    "imaginary": lambda t, rng: t.to(torch.complex64).conj().imag,
    "freed": lambda t, rng: freed(t),
    "NaN": lambda t, rng: t.clone().fill_(float("nan")),
    "infinite": lambda t, rng: t.clone().fill_(float("inf")),
    "out of range": _out_of_range,
}
SIZES = (
    -(2**63),
    -(2**31),
    -1,
    0,
    1,
    2,
    31,
    32,
    64,
    128,
    200,
    2**31 - 1,
    2**31,
    2**62,
    2**63 - 1,
    2**63,
    1.5,
    None,
    "x",
)
WRITTEN = ("q", "scales", "fault", "refused")  # by the operators that change arguments
NUMBERS = (float("nan"), float("inf"), -1.0, 0.0, 1e308, None, "x")


def hostile(op: str, rng: random.Random) -> tuple[str, Arguments]:
    """A call of ``op`` with one to three arguments of another kind, and which."""
    arguments, said = call_of(op, "cpu"), []
    for name in rng.sample(list(arguments), min(len(arguments), rng.choice((1, 1, 2, 3)))):
        value = arguments[name]
        if isinstance(value, Tensor):
            kind = rng.choice(list(TENSORS))
            # Torch writes to no view that is negated when it is read, and says "Expected Tensor but got None".
            if kind == "imaginary" and op.endswith("_") and name in WRITTEN:
                continue
            # Torch's message about mixed fake and real tensors prints these and reads freed memory.
            if {"fake", "freed"} <= {kind, *(one.partition(": ")[2] for one in said)}:
                continue
            # Torch asks nested tensors for strides, which they refuse, on the way to functional ones.
            if {"nested", "functional"} <= {kind, *(one.partition(": ")[2] for one in said)}:
                continue
            try:
                arguments[name] = TENSORS[kind](value, rng)
            except (RuntimeError, NotImplementedError, IndexError):  # of torch: no such tensor
                continue
        else:
            choices = SIZES if type(value) is int else NUMBERS if type(value) is float else (*DTYPES, None, 5, "x")
            arguments[name] = rng.choice(choices)
            kind = repr(arguments[name])
        said.append(f"{name}: {kind}")
    return f"{op} {said}", arguments


def abuse(seed: int, count: int) -> Iterator[str]:
    """Make the calls. Yields each call beforehand, and every bad message."""
    rng = random.Random(seed)
    for _ in range(count):
        op = rng.choice(CALLS)
        what, arguments = hostile(op, rng)
        yield f"at {what}"
        try:
            getattr(torch.ops.qao, op)(**arguments)
        except Exception as error:
            yield from _blame(op, what, error)


def _blame(op: str, what: str, error: Exception) -> Iterator[str]:
    text = str(error)
    ours = text.startswith(f"qao::{op}: ")
    # Torch itself rejects some calls: non-tensors, dtypes without kernels, fake and real tensors together.
    named = f"qao::{op}" in text or f"qao.{op}" in text
    if "API call failed" in text or not (ours or named) or (ours and "a call of torch failed" in text):
        if not isinstance(error, NotImplementedError) and "fake" not in what:
            yield f"BAD {what}: {type(error).__name__}: {text[:400]}"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # Some systems promise more memory than they have, and kill who uses it.
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))
    for line in abuse(int(sys.argv[1]), int(sys.argv[2])):
        print(line, flush=True)
    print("survived", flush=True)
