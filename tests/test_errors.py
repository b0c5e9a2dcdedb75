"""Bad input: each message names the op, the problem, every tensor involved and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accuracy import check_close
from ops_schemes import INT4, Int4Format
from ops_support import randn
from torch import Tensor

N, K, G = 40, 200, 64
Arguments = dict[str, Any]


def arguments_of(op: str, device: str) -> Arguments:
    """A correct call: N = 40, K = 200, groups of 64, zero points, float32 scales, bfloat16 x and bias."""
    fmt = Int4Format(G, "integer")
    parts = INT4.parts(N, K, fmt, device)
    if op == "pack_int4":
        return {"q": parts.q, "scales": parts.scales, "zeros": parts.zeros, "group_size": G}
    if op in BYTES:
        return BYTES[op](device)
    weight, scales = parts.operands()
    sizes = {"weight": weight, "scales": scales, "out_features": N, "in_features": K, "group_size": G}
    if op.endswith("_mm"):
        sums = {"weight_sums": parts.dense().sum(1).float()} if op == "int8_int4_mm" else {}
        return {"x": activation(device), "bias": randn(N, dtype=torch.bfloat16, device=device), **sums, **sizes}
    return sizes | ({"dtype": torch.bfloat16} if op == "dequantize_int4" else {})


def activation(device: str) -> Tensor:
    return randn(3, K, dtype=torch.bfloat16, device=device)


def bytes_of(dtype: torch.dtype, device: str, *, x: Tensor | None = None, **others: Any) -> Arguments:
    """A correct call of an op with an 8-bit weight, a scale a row and asymmetric activations, if any."""
    weight = torch.ones(N, K, dtype=torch.int8, device=device).view(dtype)
    scales, bias = (randn(N, dtype=dtype, device=device) for dtype in (torch.float32, torch.bfloat16))
    x = activation(device) if x is None else x
    others = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in others.items()}
    return {"x": x, "weight": weight, "scales": scales, "bias": bias, **others}


def int8_scaled_arguments(device: str) -> Arguments:
    x, x_scales, x_zeros = torch.ops.qao.int8_quantize(activation(device), False)
    given = {"x_scales": x_scales, "x_zeros": x_zeros, "weight_sums": torch.ones(N), "out_dtype": torch.bfloat16}
    return bytes_of(torch.int8, device, x=x, **given)


def fp8_scaled_arguments(device: str) -> Arguments:
    x, x_scales = torch.ops.qao.fp8_quantize(activation(device), None, -1)
    return bytes_of(F8, device, x=x, x_scales=x_scales, out_dtype=torch.bfloat16, fast_accum=False)


F8 = torch.float8_e4m3fn
BYTES: dict[str, Callable[[str], Arguments]] = {
    "int8_mm": lambda device: bytes_of(torch.int8, device),
    "fp8_mm": lambda device: bytes_of(F8, device),
    "int8_int8_mm": lambda device: bytes_of(torch.int8, device, weight_sums=torch.ones(N)),
    "fp8_fp8_mm": lambda device: bytes_of(F8, device, x_scale=torch.ones(1), x_group_size=0, fast_accum=False),
    "int8_scaled_mm": int8_scaled_arguments,
    "fp8_scaled_mm": fp8_scaled_arguments,
}


def with_(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {name: change(arguments[name])}


def misaligned(t: Tensor) -> Tensor:
    flat = t.new_empty(t.numel() + 1)
    return flat[1:].view(t.shape).copy_(t)


def transposed_memory(t: Tensor) -> Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


# Mistakes in the packed operands, common to the three ops that take them: name -> (change, what, remedy).
PACKED: dict[str, tuple[Callable[[Arguments], Arguments], str, str]] = {
    "uint8 weight": (
        with_("weight", lambda t: t.view(torch.uint8)),
        "weight must be packed int4 in an int8 tensor",
        "pack_int4",
    ),
    "float weight": (with_("weight", lambda t: t.bfloat16()), "weight must be packed int4", "pack_int4"),
    "plain weight": (with_("weight", lambda t: t.new_zeros(N, K)), "weight must have shape", "pack_int4"),
    "another N": (with_("out_features", lambda n: n + 16), "weight must have shape [ceil(N / 16)", "out_features"),
    "another K": (with_("weight", lambda t: t[:, :3].contiguous()), "weight must have shape", "in_features"),
    "no out_features": (with_("out_features", lambda n: 0), "at least 1", "N and K"),
    "negative out_features": (with_("out_features", lambda n: -N), "at least 1", "N and K"),
    "weight not contiguous": (with_("weight", transposed_memory), "weight must be contiguous", "weight.contiguous()"),
    "weight misaligned": (with_("weight", misaligned), "weight must start at a multiple of 16 bytes", "weight.clone()"),
    "float64 scales": (with_("scales", lambda t: t.double()), "scales must be float32, float16 or bfloat16", "Convert"),
    "integer scales": (with_("scales", lambda t: t.int()), "scales must be float32, float16 or bfloat16", "Convert"),
    "scales of rank 3": (with_("scales", lambda t: t.flatten(2)), "scales must have shape", "pack_int4 returned"),
    "scales with 3 planes": (
        with_("scales", lambda t: torch.cat((t, t[:, :, :1]), 2)),
        "scales must have shape",
        "pack_int4 returned",
    ),
    "scales of another N": (with_("scales", lambda t: t[:2].contiguous()), "scales must have shape", "pack_int4"),
    "scales not contiguous": (with_("scales", transposed_memory), "scales must be contiguous", "scales.contiguous()"),
    "scales misaligned": (with_("scales", misaligned), "scales must start at a multiple of 16 bytes", "scales.clone()"),
    "group size of another weight": (with_("group_size", lambda g: 128), "scales must have shape", "group_size"),
    "one group where there are many": (with_("group_size", lambda g: -1), "scales must have shape", "group_size"),
}
GROUP_SIZES: dict[str, tuple[Callable[[Arguments], Arguments], str, str]] = {
    f"group size {size}": (
        with_("group_size", lambda g, size=size: size),
        "group_size must be 32, 64, 128, 256",
        "epack",
    )
    for size in (0, -2, -128, 1, 48, 96, 512, 2**40)
}
MM = {
    "float64 x": (with_("x", lambda t: t.double()), "x must be float32, float16 or bfloat16", "x.to(torch.bfloat16)"),
    "integer x": (with_("x", lambda t: t.int()), "x must be float32, float16 or bfloat16", "x.to(torch.bfloat16)"),
    "complex x": (with_("x", lambda t: t.to(torch.complex64)), "x must be float32", "x.to(torch.bfloat16)"),
    "float8 x": (with_("x", lambda t: t.to(torch.float8_e4m3fn)), "x must be float32", "x.to(torch.bfloat16)"),
    "x one too wide": (with_("x", lambda t: t.new_zeros(3, K + 1)), "x must have shape [..., in_features]", "x.shape"),
    "x one too narrow": (with_("x", lambda t: t[:, 1:]), "x must have shape [..., in_features]", "x.shape"),
    "x transposed": (with_("x", lambda t: t.t()), "x must have shape [..., in_features]", "x.shape"),
    "x a number": (with_("x", lambda t: t[0, 0]), "x must have shape [..., in_features]", "x.shape"),
    "x empty and too narrow": (with_("x", lambda t: t[:0, 1:]), "x must have shape [..., in_features]", "x.shape"),
    "in_features 0": (lambda a: a | {"in_features": 0, "x": a["x"][:, :0]}, "at least 1", "N and K"),
    "bias too short": (with_("bias", lambda t: t[1:]), "bias must have shape [out_features]", "bias.shape"),
    "bias of rank 2": (with_("bias", lambda t: t[None]), "bias must have shape [out_features]", "bias.shape"),
    "bias a number": (with_("bias", lambda t: t[0]), "bias must have shape [out_features]", "bias.shape"),
    "float64 bias": (with_("bias", lambda t: t.double()), "bias must be float32, float16 or bfloat16", "Convert"),
    "bias strided": (
        with_("bias", lambda t: torch.stack((t, t), 1)[:, 0]),
        "bias must be contiguous",
        "bias.contiguous()",
    ),
    "bias expanded": (with_("bias", lambda t: t[:1].expand(N)), "bias must be contiguous", "bias.contiguous()"),
}
PACK = {
    "signed q": (with_("q", lambda t: t.to(torch.int8)), "q must be a uint8 tensor [N, K]", "q.to(torch.uint8)"),
    "float q": (with_("q", lambda t: t.float()), "q must be a uint8 tensor [N, K]", "q.to(torch.uint8)"),
    "q of rank 1": (with_("q", lambda t: t[0]), "q must be a uint8 tensor [N, K]", "one unsigned value per byte"),
    "q of rank 3": (with_("q", lambda t: t[None]), "q must be a uint8 tensor [N, K]", "one unsigned value per byte"),
    "no rows": (with_("q", lambda t: t[:0]), "q must be a uint8 tensor [N, K]", "one unsigned value per byte"),
    "no columns": (with_("q", lambda t: t[:, :0]), "q must be a uint8 tensor [N, K]", "one unsigned value per byte"),
    "q not contiguous": (with_("q", transposed_memory), "must be contiguous", ".contiguous()"),
    "float64 scales": (with_("scales", lambda t: t.double()), "scales must be float32, float16 or bfloat16", "Convert"),
    "scales of another group size": (with_("group_size", lambda g: 32), "scales must have shape", "scales.shape"),
    "flat scales": (with_("scales", lambda t: t.flatten()), "scales must have shape", "scales.shape"),
    "scales not contiguous": (with_("scales", transposed_memory), "must be contiguous", ".contiguous()"),
    "zeros of another dtype": (
        with_("zeros", lambda t: t.half()),
        "zeros must have the dtype and shape of scales",
        "zeros.to(scales.dtype)",
    ),
    "integer zeros": (
        with_("zeros", lambda t: t.int()),
        "zeros must have the dtype and shape",
        "zeros.to(scales.dtype)",
    ),
    "zeros of another shape": (with_("zeros", lambda t: t[:, 1:].contiguous()), "zeros must have", "zeros"),
}
# Mistakes in an 8-bit weight and its scales.
BYTE_WEIGHT: dict[str, tuple[Callable[[Arguments], Arguments], str, str]] = {
    "uint8 weight": (with_("weight", lambda t: t.view(torch.uint8)), "weight must be", "Quantize the weight"),
    "float weight": (with_("weight", lambda t: t.bfloat16()), "weight must be", "Quantize the weight"),
    "weight of rank 3": (with_("weight", lambda t: t[None]), "weight must be", "Quantize the weight"),
    "no rows": (with_("weight", lambda t: t[:0]), "weight must be", "Quantize the weight"),
    "weight transposed": (with_("weight", transposed_memory), "weight must be contiguous", "weight.contiguous()"),
    "float64 scales": (with_("scales", lambda t: t.double()), "scales must be float32", "scales.float()"),
    "bfloat16 scales": (with_("scales", lambda t: t.bfloat16()), "scales must be float32", "scales.float()"),
    "too few scales": (with_("scales", lambda t: t[1:]), "scales must have shape [N]", "scales.shape"),
    "scales as a row": (with_("scales", lambda t: t[None]), "scales must have shape [N]", "scales.shape"),
    "scales strided": (
        with_("scales", lambda t: torch.stack((t, t), 1)[:, 0]),
        "scales must be contiguous",
        "scales.contiguous()",
    ),
}
FLOAT_X = {name: MM[name] for name in MM if name != "in_features 0"}
SUMS = {
    "weight_sums too short": (with_("weight_sums", lambda t: t[1:]), "weight_sums must be float32", "row sums"),
    "float64 weight_sums": (with_("weight_sums", lambda t: t.double()), "weight_sums must be float32", "row sums"),
}
FP8_X = {
    "x by an unknown group": (with_("x_group_size", lambda g: 64), "must be -1", "one of these"),
    "a scale for rows": (with_("x_group_size", lambda g: -1), "a given scale is for the whole", "group size 0"),
    "two scales": (with_("x_scale", lambda t: t.repeat(2)), "the scale of x must be one float32", "reshape(1)"),
    "blocks of x alone": (
        lambda a: a | {"x_scale": None, "x_group_size": 128},
        "x in blocks of 128 columns requires a weight in blocks of 128 x 128",
        "the same granularity",
    ),
}
SCALED = {
    "float x": (with_("x", lambda t: t.float()), "x must be", "_quantize"),
    "float64 x_scales": (with_("x_scales", lambda t: t.double()), "x_scales must be float32", "x_scales.float()"),
    "too few x_scales": (with_("x_scales", lambda t: t[1:]), "one scale for each row", "_quantize"),
    "to float64": (
        with_("out_dtype", lambda d: torch.float64),
        "out_dtype must be torch.float32, torch.float16",
        "one of these",
    ),
}
ZEROS = {
    "float x_zeros": (with_("x_zeros", lambda t: t.float()), "x_zeros must be int32", "int8_quantize"),
    "x_zeros alone": (with_("weight_sums", lambda t: None), "x_zeros need weight_sums", "row sums"),
    "weight_sums alone": (with_("x_zeros", lambda t: None), "weight_sums without x_zeros", "both, or neither"),
}
DEQUANTIZE = {
    f"to {dtype}": (with_("dtype", lambda d, dtype=dtype: dtype), "dtype must be torch.float32, torch.float16", "Pass")
    for dtype in (torch.float64, torch.int8, torch.float8_e4m3fn)
}
MISTAKES = [
    pytest.param(op, *mistake, id=f"{op}-{name}".replace(" ", "_"))
    for op, tables in {
        "int4_mm": (PACKED, GROUP_SIZES, MM),
        "int8_int4_mm": (PACKED, GROUP_SIZES, MM, SUMS),
        "fp8_int4_mm": (PACKED, GROUP_SIZES, MM),
        "int8_mm": (BYTE_WEIGHT, FLOAT_X),
        "fp8_mm": (BYTE_WEIGHT, FLOAT_X),
        "int8_int8_mm": (BYTE_WEIGHT, FLOAT_X, SUMS),
        "fp8_fp8_mm": (BYTE_WEIGHT, FLOAT_X, FP8_X),
        "int8_scaled_mm": (BYTE_WEIGHT, SCALED, SUMS, ZEROS),
        "fp8_scaled_mm": (BYTE_WEIGHT, SCALED),
        "unpack_int4": (PACKED, GROUP_SIZES),
        "dequantize_int4": (PACKED, GROUP_SIZES, DEQUANTIZE),
        "pack_int4": (GROUP_SIZES, PACK),
    }.items()
    for table in tables
    for name, mistake in table.items()
]


def describe(name: str, value: Any) -> str | None:
    """How a message shows an argument; None where it need not."""
    if isinstance(value, Tensor):
        return f"{name}: {str(value.dtype).removeprefix('torch.')}{str(list(value.shape))}"
    return f"{name}: {value}" if type(value) is int else None


def check_rejected(op: str, arguments: Arguments, what: str, remedy: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        getattr(torch.ops.qao, op)(**arguments)
    message = str(caught.value)
    assert f"qao::{op}: " in message
    statement, _, rest = message.partition(". Got ")
    assert what in statement
    for name, value in arguments.items():
        description = describe(name, value)
        assert description is None or description in rest
    assert remedy in rest
    assert message.rstrip().splitlines()[0].endswith(".")


@pytest.mark.parametrize("op,change,what,remedy", MISTAKES)
def test_mistakes(op: str, change: Callable[[Arguments], Arguments], what: str, remedy: str, device: str) -> None:
    good = arguments_of(op, device)
    getattr(torch.ops.qao, op)(**good)
    check_rejected(op, change(good), what, remedy)
    getattr(torch.ops.qao, op)(**good)


@pytest.mark.parametrize("value", [16, 128, 255])
@pytest.mark.parametrize("row,column", [(0, 0), (17, 99), (N - 1, K - 1)])
def test_values_past_15(row: int, column: int, value: int) -> None:
    """Checked where it costs no synchronization: on the CPU."""
    arguments = arguments_of("pack_int4", "cpu")
    arguments["q"][row, column] = value
    check_rejected("pack_int4", arguments, f"q holds {value} at row {row}, column {column}; values must be 0..15", "")


@pytest.mark.parametrize("op,name", [("int4_mm", name) for name in ("x", "weight", "scales", "bias")]
                         + [("pack_int4", name) for name in ("q", "scales", "zeros")]
                         + [("unpack_int4", "scales"), ("dequantize_int4", "weight")])  # fmt: skip
def test_different_devices(op: str, name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    arguments = arguments_of(op, "cuda")
    check_rejected(op, arguments | {name: arguments[name].cpu()}, "on different devices", ".to(device)")


@pytest.mark.parametrize(
    "op", ["int4_mm", "int8_int4_mm", "fp8_int4_mm", *BYTES, "pack_int4", "unpack_int4", "dequantize_int4"]
)
def test_meta_tensors_have_shapes_only(op: str) -> None:
    """On the meta device the ops give meta results: what deferred initialization needs."""
    arguments = arguments_of(op, "cpu")
    real = getattr(torch.ops.qao, op)(**arguments)
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    fake = getattr(torch.ops.qao, op)(**meta)
    for r, f in zip(*(t if isinstance(t, tuple) else (t,) for t in (real, fake)), strict=True):
        assert (f.shape, f.dtype, f.stride(), f.device.type) == (r.shape, r.dtype, r.stride(), "meta")


@pytest.mark.parametrize(
    "op", ["int4_mm", "int8_int4_mm", "fp8_int4_mm", *BYTES, "pack_int4", "unpack_int4", "dequantize_int4"]
)
def test_meta_operands_beside_others(op: str, device: str) -> None:
    """Each operand alone on meta, and each alone elsewhere: never uninitialized memory."""
    arguments = arguments_of(op, device)
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    meta = arguments | {name: value.to("meta") for name, value in tensors.items()}
    for name, value in tensors.items():
        for mixed in (arguments | {name: value.to("meta")}, meta | {name: value}):
            check_rejected(op, mixed, "operands are on different devices", ".to(device)")


def test_the_message_lists_strides_of_views(device: str) -> None:
    arguments = arguments_of("int4_mm", device)
    x = torch.zeros(3, 2 * K, dtype=torch.float64, device=device)[:, ::2]
    with pytest.raises(RuntimeError, match=rf"x: float64\[3, {K}\] strides \[{2 * K}, 2\] on {device}"):
        torch.ops.qao.int4_mm(**(arguments | {"x": x}))


def test_an_error_in_compiled_code_keeps_its_message(device: str) -> None:
    arguments = arguments_of("int4_mm", device)
    wrong = arguments | {"group_size": 128}
    compiled = torch.compile(lambda: torch.ops.qao.int4_mm(**wrong), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="scales must have shape"):
        compiled()


def test_correct_after_many_errors(device: str) -> None:
    arguments = arguments_of("int4_mm", device)
    for _ in range(1000):
        with pytest.raises(RuntimeError):
            torch.ops.qao.int4_mm(**(arguments | {"group_size": 0}))
    weight = INT4.make_weight(N, K, Int4Format(G, "integer"), device)
    y = torch.ops.qao.int4_mm(**arguments)
    check_close(y, arguments["x"], weight.dense, arguments["bias"])
