"""The config classes: rejected options, third-party quantized weights, and the kernel of each."""

from __future__ import annotations

import pytest
import qao
import torch
from accuracy import check_close
from ops_schemes import FP8, INT8, INT8_ASYMMETRIC, Activation, Int4Format, Parts
from ops_support import randn
from qao import (
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
    Float8StaticActivationFloat8Weight,
    Float8WeightOnly,
    Int4WeightOnly,
    Int8DynamicActivationInt4Weight,
    Int8DynamicActivationInt8Weight,
    Int8WeightOnly,
    QuantLinear,
)
from qao.ops import reference
from qao.schemes import scheme_from_dict
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

ALL = (
    Int4WeightOnly,
    Int8WeightOnly,
    Float8WeightOnly,
    Int8DynamicActivationInt8Weight,
    Int8DynamicActivationInt4Weight,
    Float8DynamicActivationFloat8Weight,
    Float8DynamicActivationInt4Weight,
)
INT4 = (Int4WeightOnly, Int8DynamicActivationInt4Weight, Float8DynamicActivationInt4Weight)


# ---- the classes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ALL)
def test_a_scheme_is_a_frozen_value(config: type[qao.Scheme]) -> None:
    scheme = config()
    assert scheme == config() and hash(scheme) == hash(config()) and str(scheme) == str(config())
    assert scheme.word in str(scheme) and hasattr(torch.ops.qao, f"{scheme.word}_mm")
    with pytest.raises(AttributeError):
        scheme.clip_search = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"group_size": 48}, ValueError, "group_size must be 32, 64, 128, 256, or -1"),
        ({"group_size": 0}, ValueError, "group_size must be"),
        ({"group_size": True}, ValueError, "group_size must be"),
        ({"group_size": "128"}, ValueError, "group_size must be.*'128'"),
        ({"symmetric": 1}, TypeError, "symmetric must be True or False"),
        ({"clip_search": None}, TypeError, "clip_search must be True or False"),
        ({"scale_dtype": torch.float64}, ValueError, "scale_dtype must be torch.float32.*torch.float64"),
        ({"scale_dtype": "bfloat16"}, ValueError, "scale_dtype must be"),
    ],
)
@pytest.mark.parametrize("config", INT4)
def test_int4_rejects(
    config: type[qao.Scheme], arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{config.__name__}: {message}"):
        config(**arguments)


@pytest.mark.parametrize(
    "config, arguments, error, message",
    [
        (Int8WeightOnly, {"clip_search": 1}, TypeError, "clip_search must be True or False"),
        (Int8DynamicActivationInt8Weight, {"symmetric_activations": None}, TypeError, "symmetric_activations must be"),
        (Int8DynamicActivationInt4Weight, {"symmetric_activations": 0}, TypeError, "symmetric_activations must be"),
        (Float8WeightOnly, {"granularity": "column"}, ValueError, 'granularity must be "row", "tensor" or "block"'),
        (Float8DynamicActivationFloat8Weight, {"granularity": 128}, ValueError, "granularity must be"),
        (Float8DynamicActivationFloat8Weight, {"fast_accum": 1}, TypeError, "fast_accum must be True or False"),
        *(
            (
                Float8StaticActivationFloat8Weight,
                {"activation_scale": scale},
                ValueError,
                "activation_scale must be a n",
            )
            for scale in (0.0, "1", float("inf"), None, True)
        ),
        (
            Float8StaticActivationFloat8Weight,
            {"activation_scale": 0.1, "granularity": "block"},
            ValueError,
            'granularity must be "row" or "tensor"',
        ),
        (Float8DynamicActivationFloat8Weight, {"activation_scale": 0.0}, ValueError, "activation_scale must be a n"),
    ],
)
def test_eight_bits_reject(
    config: type[qao.Scheme], arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"{config.__name__}: {message}"):
        config(**arguments)


def test_static_scales_have_a_scheme() -> None:
    """Its serialized form is that of the old name, so files are read both ways."""
    scheme = Float8StaticActivationFloat8Weight("tensor", activation_scale=0.25, fast_accum=True)
    message = r"^Float8DynamicActivationFloat8Weight\(activation_scale=...\) is now Float8StaticActivation"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        old = Float8DynamicActivationFloat8Weight("tensor", 0.25, True)
    assert [warning.filename for warning in caught] == [__file__]
    assert list(old.to_dict().items()) == list(scheme.to_dict().items())
    assert scheme_from_dict(old.to_dict()) == scheme != old
    assert str(old) == str(scheme) == "fp8_fp8 tensor, static activations, fast accumulation"
    dynamic = Float8DynamicActivationFloat8Weight()
    assert scheme_from_dict(dynamic.to_dict()) == dynamic
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(64, 48), torch.randn(3, 64)
    layers = [QuantLinear.from_linear(linear, one) for one in (scheme, old)]
    assert torch.equal(layers[0](x), layers[1](x))
    layers[0].load_state_dict(layers[1].state_dict())


# ---- weights that others quantized -----------------------------------------------------------------------------------


def check_layer(layer: QuantLinear, parts: Parts, activation: Activation) -> None:
    """The layer computes with exactly these q, scales and zero points, scales rounded once to what the layer stores."""
    for dtype in (torch.bfloat16, torch.float32):
        for m in (1, 5, 40):
            x = randn(m, layer.in_features, dtype=dtype, device=str(parts.q.device))
            bias = None if layer.bias is None else layer.bias.detach()
            dense = parts.dense()
            seen, slack = activation.seen(x), activation.slack(x, dense)
            check_close(layer(x), x, dense, bias, seen, slack)


@pytest.mark.parametrize("scale_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric_activations", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
def test_int8_by_int4_never_falls_back(
    group_size: int, symmetric: bool, symmetric_activations: bool, scale_dtype: torch.dtype, device: str
) -> None:
    """Grouped or per channel, symmetric or not, scales of any float dtype: one layer, one call of the scheme's own
    operator, a named kernel, and the exact product. Elsewhere such layers silently became a dequantized matmul."""
    fmt = Int4Format(group_size, "none" if symmetric else "float", torch.float32)
    parts = fmt.parts(48, 300, seed=1)
    zeros = None if parts.zeros is None else parts.zeros.to(device, scale_dtype)
    parts = Parts(parts.q.to(device), parts.scales.to(device, scale_dtype), zeros, group_size)
    scheme = Int8DynamicActivationInt4Weight(group_size, symmetric, symmetric_activations=symmetric_activations)
    layer = QuantLinear.from_quantized(parts.q, parts.scales, parts.zeros, scheme=scheme)
    stored = torch.float32 if scale_dtype == torch.float64 else scale_dtype
    assert layer.scales.dtype == stored
    as_stored = Parts(parts.q, parts.scales.to(stored), None if zeros is None else zeros.to(stored), group_size)
    check_layer(layer, as_stored, INT8 if symmetric_activations else INT8_ASYMMETRIC)

    calls: list[str] = []

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(str(function))
            return function(*args, **kwargs or {})

    x = randn(3, 300, dtype=torch.bfloat16, device=device)
    with Record(), torch.no_grad():
        layer(x)
    assert calls == ["qao.int8_int4_mm.default"]
    if qao.schemes.base._host is not None:
        assert scheme.kernel(3, 48, 300, x_dtype=torch.bfloat16, scale_dtype=stored, device=torch.device(device))


@pytest.mark.parametrize("scale_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_scales_of_any_float_dtype(scale_dtype: torch.dtype, device: str) -> None:
    n, k = 200, 300
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8).to(device)
    e4m3 = randn(n, k, dtype=torch.float32, device=device, seed=99).to(torch.float8_e4m3fn)  # no row is one of x
    bias = randn(n, dtype=torch.float64, device=device)
    rows, blocks = (torch.rand(shape, generator=generator).to(device, scale_dtype) for shape in ((n, 1), (2, 3)))
    for weight, scales, scheme, activation in (
        (q, rows.flatten(), Int8WeightOnly(), Activation()),
        (q, rows, Int8DynamicActivationInt8Weight(), INT8),
        (q, rows, Int8DynamicActivationInt8Weight(symmetric_activations=False), INT8_ASYMMETRIC),
        (e4m3, rows.flatten(), Float8WeightOnly(), Activation()),
        (e4m3.view(torch.int8), rows, Float8DynamicActivationFloat8Weight(), FP8),
        (e4m3, blocks, Float8WeightOnly("block"), Activation()),
        (e4m3, blocks[0, 0], Float8WeightOnly("tensor"), Activation()),
    ):
        layer = QuantLinear.from_quantized(weight, scales, bias=bias, scheme=scheme)
        assert layer.scales.dtype == torch.float32 and layer.bias is not None and layer.bias.dtype == torch.float32
        plain = weight if scheme.weights == "int8" else weight.view(torch.float8_e4m3fn)
        check_layer(layer, Parts(plain, scales.float()), activation)
        assert layer.qweight.dtype == torch.int8
        weight_again = reference.dequantize_8bit(plain, layer.scales)
        assert torch.equal(layer.dequantize(torch.float32), weight_again.float())


@pytest.mark.parametrize("config", ALL)
def test_quantizing_and_packing_agree(config: type[qao.Scheme], device: str) -> None:
    """from_quantized on the quantizer's own numbers gives the layer that from_linear gives."""
    linear, scheme = nn.Linear(200, 48, device=device), config()
    made = QuantLinear.from_linear(linear, scheme)
    quantized = scheme._quantize(linear.weight, "weight")
    again = QuantLinear.from_quantized(
        quantized.q, quantized.scales.double(), quantized.zeros, linear.bias, scheme=scheme
    )
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "scheme, q, scales, zeros, message",
    [
        (Int8WeightOnly(), torch.zeros(4, 8), torch.ones(4), None, r"q must be torch.int8 of shape \[N, K\]"),
        (Int8WeightOnly(), torch.zeros(8, dtype=torch.int8), torch.ones(4), None, r"q must be .*not torch.int8\[8\]"),
        (Int8WeightOnly(), torch.zeros(4, 8, dtype=torch.int8), torch.ones(5), None, r"scales must have shape \[4\]"),
        (Int8WeightOnly(), torch.zeros(4, 8, dtype=torch.int8), torch.ones(4).int(), None, "scales must have a float"),
        (Int8WeightOnly(), torch.zeros(4, 8, dtype=torch.int8), torch.ones(4), torch.ones(4), "zeros must be None"),
        (
            Int8WeightOnly(),
            torch.zeros(4, 8, dtype=torch.int8),
            torch.full((4,), 1e300, dtype=torch.float64),
            None,
            "scales hold values that are not finite in torch.float32",
        ),
        (
            Float8WeightOnly("block"),
            torch.zeros(200, 300, dtype=torch.int8),
            torch.ones(3, 2),
            None,
            r"scales must have shape \[2, 3\]",
        ),
        (Int4WeightOnly(32), torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2), None, "zeros must be given"),
        (
            Int4WeightOnly(32, symmetric=True),
            torch.zeros(4, 64, dtype=torch.uint8),
            torch.ones(4, 2),
            torch.ones(4, 2),
            "zeros must be None",
        ),
        (
            Int4WeightOnly(32, scale_dtype=torch.float16),
            torch.zeros(4, 64, dtype=torch.uint8),
            torch.full((4, 2), 1e6),
            torch.ones(4, 2),
            "not finite in torch.float16",
        ),
    ],
)
def test_packing_refuses(
    scheme: qao.Scheme, q: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QuantLinear.from_quantized(q, scales, zeros, scheme=scheme)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ALL)
def test_every_scheme_has_a_kernel(config: type[qao.Scheme], device: str) -> None:
    pytest.importorskip("qao._host")
    scheme = config()
    for m in (1, 512):
        for x_dtype in (torch.float32, torch.float16, torch.bfloat16):
            name = scheme.kernel(m, 64, 256, x_dtype=x_dtype, scale_dtype=torch.float32, device=torch.device(device))
            assert name
    assert scheme.kernel(1, 64, 256, x_dtype=x_dtype, scale_dtype=x_dtype, device=torch.device("meta")) is None
