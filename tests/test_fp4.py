"""Four-bit floats: packing, exact dequantization, quantization, layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import qao
import torch
from accuracy import check_close
from ops_schemes import FP4, Fp4Format
from ops_support import randn
from qao import Fp4WeightOnly, QuantLinear, ops
from qao.ops import reference
from qao.ops.fp4 import codes_of, values_of
from torch import Tensor, nn

FORMATS = (Fp4Format(), Fp4Format(16, "tensor"), Fp4Format(16, "row"))
SCHEMES = (Fp4WeightOnly(), Fp4WeightOnly("nvfp4"))
VALUES = torch.tensor([*reference.FP4_VALUES, *(-value for value in reference.FP4_VALUES)])
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


# ---- codes -----------------------------------------------------------------------------------------------------------


def test_values_and_codes_are_inverse(device: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8, device=device)
    values = values_of(codes)
    assert torch.equal(values.cpu(), VALUES) and values.signbit().tolist() == [False] * 8 + [True] * 8
    assert torch.equal(codes_of(values), codes)


def test_codes_are_the_nearest_and_the_even_of_two() -> None:
    x = torch.linspace(-9, 9, 18 * 64 + 1)
    distance = (x[:, None].double() - VALUES.double()).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    chosen = nearest.gather(1, codes_of(x).long()[:, None])
    assert chosen.all()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert codes_of(middles).tolist() == [0, 2, 2, 4, 4, 6, 6] and codes_of(-middles).tolist() == [
        8,
        10,
        10,
        12,
        12,
        14,
        14,
    ]
    assert codes_of(torch.tensor([float("inf"), -1e30, float("nan")]))[:2].tolist() == [7, 15]


# ---- packing ---------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("n, k", [(1, 1), (16, 64), (33, 100), (40, 31), (5, 48), (17, 200)])
def test_unpack_is_the_inverse_of_pack(n: int, k: int, fmt: Fp4Format, device: str) -> None:
    parts = FP4.parts(n, k, fmt, device)
    q, scales, divisor = ops.unpack_fp4(*parts.operands(), n, k, fmt.group_size)
    assert torch.equal(q, parts.q) and torch.equal(scales.float(), parts.scales)
    assert (divisor is None) == (parts.zeros is None) and (divisor is None or torch.equal(divisor, parts.zeros))


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dequantizing_is_exact(fmt: Fp4Format, dtype: torch.dtype, device: str) -> None:
    """One rounding of scale / divisor and one of the product, in float32, and one to the dtype."""
    n, k = 40, 200
    parts = FP4.parts(n, k, fmt, device)
    dense = ops.dequantize_fp4(*parts.operands(), n, k, fmt.group_size, dtype)
    of_groups = parts.scales if parts.zeros is None else parts.scales / parts.zeros[:, None]
    values = VALUES.to(device)[parts.q.long()]
    expected = (values * of_groups.repeat_interleave(fmt.group_size, 1)[:, :k]).to(dtype)
    assert torch.equal(dense, expected) and dense.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(dense.double(), parts.dense(), rtol=2.0**-23, atol=0)


def test_every_scale_of_both_formats_is_exact() -> None:
    powers = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    for scales, size in ((powers, 32), (e4m3, 16)):
        q = torch.randint(0, 16, (len(scales), size), dtype=torch.uint8)
        weight = ops.pack_fp4(q, scales[:, None], None, size)
        assert torch.equal(ops.unpack_fp4(*weight, len(scales), size, size)[1].float(), scales[:, None])
        # float32 overflows above 2^125 * 6, and torch may flush subnormal results to 0.
        known = (scales < 2.0**125) & (scales > 2.0**-124)
        dense = ops.dequantize_fp4(*weight, len(scales), size, size, torch.float32)
        assert torch.equal(dense[known], (VALUES[q.long()] * scales[:, None])[known])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(4, 64, dtype=torch.int8)}, "q must be uint8"),
        ({"q": torch.zeros(64, dtype=torch.uint8)}, "q must be uint8"),
        ({"scales": torch.ones(4, 2)}, r"scales must be \[4, 4\] in a float dtype .* groups of 16"),
        ({"scales": torch.ones(4, 4, dtype=torch.int32)}, "scales must be"),
        ({"scales": torch.full((4, 4), 1.0625)}, "e4m3 values"),
        ({"scales": torch.full((4, 4), -1.0)}, "e4m3 values"),
        ({"scales": torch.full((4, 4), float("nan"))}, "e4m3 values"),
        ({"scales": torch.full((4, 4), 480.0)}, "e4m3 values"),
        ({"divisor": torch.ones(4, dtype=torch.float64)}, "divisor must be float32"),
        ({"divisor": torch.ones(3)}, r"divisor must be float32 \[4\] or \[1\]"),
        ({"divisor": torch.zeros(1)}, "divisor must be from"),
        ({"divisor": torch.full((1,), float("nan"))}, "divisor must be from"),
        ({"group_size": 64}, "group_size must be 32 .* or 16"),
        ({"group_size": 32, "scales": torch.full((4, 2), 3.0), "divisor": None}, "powers of two"),
        ({"group_size": 32, "scales": torch.full((4, 2), float("inf")), "divisor": None}, "powers of two"),
        ({"group_size": 32, "scales": torch.ones(4, 2)}, "have no divisor"),
    ],
)
def test_pack_refuses(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.zeros(4, 64, dtype=torch.uint8),
        "scales": torch.ones(4, 4),
        "divisor": torch.ones(1),
        "group_size": 16,
    }
    with pytest.raises(ValueError, match=f"pack_fp4: .*{message}"):
        ops.pack_fp4(**given | change)


def test_unpack_refuses_scales_of_other_groups() -> None:
    weight, scales = FP4.parts(40, 200, FORMATS[0]).operands()
    with pytest.raises(ValueError, match=r"unpack_fp4: scales must be \[3, 16, 1, 16\]"):
        ops.unpack_fp4(weight, scales, 40, 200, 16)


# ---- the operator ----------------------------------------------------------------------------------------------------


def arguments() -> dict[str, Any]:
    weight, scales = FP4.parts(40, 200, FORMATS[1]).operands()
    x, bias = (randn(*shape, dtype=torch.bfloat16, device="cpu") for shape in ((3, 200), (40,)))
    sizes = {"out_features": 40, "in_features": 200, "group_size": 16}
    return {"x": x, "weight": weight, "scales": scales, "bias": bias, **sizes}


def misaligned(t: Tensor) -> Tensor:
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("group_size", lambda _: 64, "group_size must be 32 .MXFP4. or 16 .NVFP4."),
        ("group_size", lambda _: -1, "group_size must be 32"),
        ("group_size", lambda _: 32, r"scales must have shape .* with groups of 32"),
        ("out_features", lambda _: 0, "out_features and in_features must be at least 1"),
        ("out_features", lambda _: 64, "weight must have shape"),
        ("in_features", lambda _: 2**40, "x must have shape"),
        ("in_features", lambda _: 199, "x must have shape"),
        ("weight", lambda t: t.view(torch.uint8), "weight must be packed fp4 in an int8 tensor"),
        ("weight", lambda t: t[:, :3], "weight must have shape"),
        ("weight", lambda t: t.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
        ("weight", misaligned, "multiple of 16 bytes"),
        ("scales", misaligned, "multiple of 16 bytes"),
        ("scales", lambda t: t.float(), "scales must be bfloat16"),
        ("scales", lambda t: t.view(torch.int16), "scales must .*float"),
        ("scales", lambda t: t[:, :13], "scales must have shape"),
        ("scales", lambda t: t.expand(-1, -1, 2, -1), "scales must have shape"),
        ("bias", lambda t: t[:39], "bias must have shape"),
        ("x", lambda t: t.double(), "float32, float16 or bfloat16"),
        ("x", lambda t: t[:, :64], "x must have shape"),
        ("x", lambda t: t.to("meta"), "different devices"),
    ],
)
def test_mistakes_have_their_message(name: str, change: Callable[[Any], Any], message: str) -> None:
    given = arguments()
    with pytest.raises(RuntimeError, match=f"(?s)fp4_mm: .*{message}"):
        torch.ops.qao.fp4_mm(**given | {name: change(given[name])})


def test_scales_that_are_no_numbers_give_no_numbers() -> None:
    """Values of scales are not checked; invalid ones must show in y."""
    given = arguments()
    given["scales"][0, 2, 0, 5] = float("nan")
    y = torch.ops.qao.fp4_mm(**given)
    assert y[:, 5].isnan().all() and y[:, [*range(5), *range(6, 40)]].isfinite().all()


@pytest.mark.parametrize(
    "capability, shared_bytes", [(80, 166912), (86, 101376), (90, 232448), (100, 232448), (120, 101376)]
)
def test_every_gpu_has_a_plan(capability: int, shared_bytes: int) -> None:
    host: Any = pytest.importorskip("qao._host")
    gpu = host.Gpu(compute_capability=capability, num_sms=100, shared_bytes_per_cta=shared_bytes)
    for m in (1, 16, 256):
        for dtype in ("float32", "float16", "bfloat16"):
            facts = {"m": m, "n": 4096, "k": 4096, "weight": "fp4", "group_size": 16, "x_dtype": dtype}
            facts["scale_dtype"] = "bfloat16"
            many = "sm90_ws" if capability == 90 else "sm80_mma"
            streams = capability in (90, 100) and dtype == "bfloat16"  # it does not fit 12.0
            kernel = {1: "sm90_skinny_smem_x", 16: "sm90_skinny_ring_x", 256: many}[m] if streams else "sm80_mma"
            assert host.plan(host.Problem(**facts), gpu)["family"] == kernel


# ---- quantizing ------------------------------------------------------------------------------------------------------


def weight_of(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)) * torch.logspace(-3, 1, n)[:, None]


@every_scheme
def test_no_step_is_wider_than_it_must_be(scheme: Fp4WeightOnly) -> None:
    """Of the largest magnitude of a group, a code is off by a sixth at most: half of a step of 2 at 6."""
    weight = weight_of(40, 200)
    packed = scheme.quantize(weight)
    error = (scheme.dequantize(packed.qweight, packed.scales, 40, 200, torch.float32) - weight).double()
    padded = nn.functional.pad(weight, (0, -200 % scheme.group_size)).view(40, -1, scheme.group_size).abs().amax(-1)
    largest = padded.repeat_interleave(scheme.group_size, 1)[:, :200]
    # MXFP4: magnitudes up to 8 have the largest code, 6. NVFP4: e4m3 rounds scales by a sixteenth, and those below
    # 2^-6 to multiples of 2^-9.
    slack = 0.25 if scheme.format == "mxfp4" else 1 / 6 + 1 / 16
    least = 0 if scheme.format == "mxfp4" else 6 * 2.0**-10 / (6 * 448 / weight.abs().max())
    assert (error.abs() <= slack * largest + least).all()
    relative = error.norm() / weight.double().norm()
    assert packed.relative_error == pytest.approx(relative.item(), rel=1e-4)
    assert relative < {"mxfp4": 0.13, "nvfp4": 0.11}[scheme.format]


@every_scheme
def test_what_is_of_the_format_comes_back(scheme: Fp4WeightOnly) -> None:
    """Quantizing a quantized weight again adds no error."""
    first = scheme.quantize(weight_of(33, 128))
    dense = scheme.dequantize(first.qweight, first.scales, 33, 128, torch.float32)
    again = scheme.quantize(dense)
    back = scheme.dequantize(again.qweight, again.scales, 33, 128, torch.float32)
    torch.testing.assert_close(back, dense, rtol=2.0**-22, atol=0)


@every_scheme
@pytest.mark.parametrize("value", [0.0, 1e-38, 1e38, -3e38])
def test_weights_of_any_size(scheme: Fp4WeightOnly, value: float) -> None:
    packed = scheme.quantize(torch.full((20, 70), value))
    dense = scheme.dequantize(packed.qweight, packed.scales, 20, 70, torch.float32)
    assert dense.isfinite().all()
    if value == 0 or abs(value) > 1e30 and scheme.format == "mxfp4":
        torch.testing.assert_close(dense, torch.full((20, 70), value), rtol=0.25, atol=0)


@every_scheme
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(scheme: Fp4WeightOnly, bad: float) -> None:
    weight = weight_of(16, 64)
    weight[3, 5] = bad
    with pytest.raises(ValueError, match="head: .*NaN or Inf"):
        scheme.quantize(weight, "head")


# ---- layers ----------------------------------------------------------------------------------------------------------


@every_scheme
def test_a_model_is_quantized_saved_and_loaded(scheme: Fp4WeightOnly, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")

    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(96, 40), nn.ReLU(), nn.Linear(40, 24, bias=False))

    model, x = make(), randn(5, 96, dtype=torch.float32, device="cpu")
    report = qao.quantize_(model, scheme, progress=False)
    assert [row.status for row in report.rows] == ["quantized"] * 2 and str(scheme) in str(report)
    layer = model[0]
    assert isinstance(layer, QuantLinear) and scheme.word in report.rows[0].scheme
    check_close(layer(x), x, layer.dequantize(torch.float64), layer.bias)
    qao.save(model, tmp_path)
    loaded = qao.load(tmp_path, make())
    assert torch.equal(loaded(x), model(x)) and loaded[0].scheme == scheme
    assert torch.equal(layer.weight + 0, layer.dequantize(torch.float32))
    assert str(scheme) in str(qao.explain(model, x))


@every_scheme
def test_embeddings_and_experts_say_that_they_cannot(scheme: Fp4WeightOnly) -> None:
    with pytest.raises(ValueError, match="embeddings are quantized to int4 or int8, but fp4 has fp4 weights"):
        qao.nn.QuantEmbedding.from_embedding(nn.Embedding(8, 64), scheme)


def test_the_class_refuses_other_formats() -> None:
    with pytest.raises(ValueError, match='Fp4WeightOnly: format must be "mxfp4" or "nvfp4", not \'fp4\''):
        Fp4WeightOnly("fp4")  # type: ignore[arg-type]
    for scheme in SCHEMES:
        assert qao.schemes.scheme_from_dict(scheme.to_dict()) == scheme
