"""A Hadamard rotation in front of int8 activations: operators, layers, saving and serving."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import qao
import torch
from cpu_isas import runs_amx
from qao.ops import reference
from qao.ops.rotation import SIZES, rotated
from torch import Tensor, nn

OPS = torch.ops.qao
SCHEMES = [
    qao.Int8DynamicActivationInt8Weight(rotation=64),
    qao.Int8DynamicActivationInt8Weight(symmetric_activations=False, rotation=128),
    qao.Int8DynamicActivationInt4Weight(32, rotation=64),
    qao.Int8DynamicActivationInt4Weight(128, True, symmetric_activations=False, rotation=32),
    qao.Int8DynamicActivationInt4Weight(32, True, integer_scales=True, rotation=64),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INT8 = qao.Int8DynamicActivationInt8Weight


def matrix(k: int, size: int) -> Tensor:
    """R, float64 [k, k]."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < size:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    return torch.block_diag(*[block / math.sqrt(size)] * (k // size))


def by_stages(x: Tensor, size: int) -> Tensor:
    """What every device computes, bit for bit: float32 sums and differences at distances 1, 2, 4, … and one factor."""
    values = x.float().cpu().reshape(-1, size)
    step = 1
    while step < size:
        low, high = values.view(-1, size // (2 * step), 2, step).unbind(2)
        values = torch.stack((low + high, low - high), 2).view(-1, size)
        step *= 2
    factor = torch.tensor({32: 0.5**0.5 / 4, 128: 0.5**0.5 / 8}.get(size, size**-0.5), dtype=torch.float32)
    return (values * factor).view(x.shape)


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def with_outlier(x: Tensor) -> Tensor:
    x[..., 5] *= 100
    return x


def linear(k: int = 192, n: int = 48, dtype: torch.dtype = torch.float32, device: str = "cpu") -> nn.Linear:
    made = nn.Linear(k, n, dtype=dtype, device=device)
    with torch.no_grad():
        made.weight.copy_(randn(n, k, seed=1) * 0.05)
        made.bias.copy_(randn(n, seed=2))  # type: ignore[union-attr]
    return made


# ---- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.every_isa
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_hadamard_is_the_product_with_the_matrix(size: int, dtype: torch.dtype, device: str) -> None:
    for rows, k in ((1, size), (3, 3 * size), (17, 768), (300, 256), (2, 9216)):
        x = randn(rows, k, dtype=dtype, device=device)
        y = OPS.hadamard(x, size)
        assert y.dtype == dtype and y.shape == x.shape
        assert torch.equal(y.cpu(), by_stages(x, size).to(dtype))
        exact = (x.double().cpu().view(-1, size) @ matrix(size, size)).view(rows, k)
        # log2(size) sums of up to `size` values, the factor, and the rounding to the dtype.
        bound = 2.0**-24 * (math.log2(size) + 2) * x.abs().amax().item() * math.sqrt(size)
        eps = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0
        assert ((y.double().cpu() - exact).abs() <= bound + eps * exact.abs() * 1.01).all()


@pytest.mark.every_isa
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_int8_quantize_rounds_what_is_rotated(size: int, dtype: torch.dtype, symmetric: bool, device: str) -> None:
    """All bits, of rows that lie aligned and that do not; a row's are those that it has alone."""
    for rows, k in ((1, 1536), (5, 768), (300, 4096), (3, 16384)):
        wide = with_outlier(randn(rows, k + 1, dtype=dtype, device=device))
        for x in (wide[:, :k].contiguous(), wide[:, 1:]):
            result = OPS.int8_quantize(x, symmetric, size)
            expected = reference.quantize_activation_int8(by_stages(x, size), symmetric=symmetric)
            for a, b in zip(result, expected, strict=True):
                assert torch.equal(a.cpu().double(), b.double().view(a.shape))
            alone = OPS.int8_quantize(x[-1], symmetric, size)
            assert all(torch.equal(a[-1], b) for a, b in zip(result, alone, strict=True))


def test_what_is_not_finite_stays_in_its_row(device: str) -> None:
    x = randn(3, 256, device=device)
    x[0, 3], x[2, 200] = math.inf, math.nan
    q, scales, zeros = OPS.int8_quantize(x, False, 64)
    assert scales.isnan().flatten().tolist() == [True, False, True]
    assert not q[0].any() and not q[2].any() and q[1].any() and zeros[0] == 0


def test_no_rows(device: str) -> None:
    x = torch.empty(0, 64, device=device)
    assert OPS.hadamard(x, 64).shape == OPS.int8_quantize(x, True, 32)[0].shape == (0, 64)


@pytest.mark.parametrize("size", [-64, 1, 8, 48, 65, 512, 1 << 40])
def test_a_size_that_is_none_is_refused(size: int, device: str) -> None:
    x, weight = randn(3, 192, device=device), torch.ones(16, 192, dtype=torch.int8, device=device)
    scales = torch.ones(16, device=device)
    for call in (
        lambda: OPS.hadamard(x, size),
        lambda: OPS.int8_quantize(x, True, size),
        lambda: OPS.int8_int8_mm(x, weight, scales, None, None, False, size),
    ):
        with pytest.raises(RuntimeError, match=r"blocks of 16, 32, 64, 128 or 256 columns.*Pass one of 16, 32, 64"):
            call()


def test_a_size_that_does_not_divide_is_refused(device: str) -> None:
    with pytest.raises(RuntimeError, match="divide the 192 of x: 128 does not.*Pass one of 16, 32, 64"):
        OPS.int8_quantize(randn(3, 192, device=device), True, 128)
    with pytest.raises(RuntimeError, match="No block divides them"):
        OPS.hadamard(randn(3, 100, device=device), 16)
    with pytest.raises(RuntimeError, match="16, 32, 64, 128 or 256"):
        OPS.hadamard(randn(3, 64, device=device), 0)


def test_hadamard_is_differentiable_and_can_be_traced() -> None:
    x = randn(3, 128).double().float().requires_grad_()
    torch.autograd.gradcheck(
        lambda t: OPS.hadamard(t.float(), 64).double(), (x.detach().double().requires_grad_(),), eps=1e-2, atol=1e-3
    )
    dy = randn(3, 128, seed=1)
    (dx,) = torch.autograd.grad(OPS.hadamard(x, 32), x, dy)
    assert torch.equal(dx, OPS.hadamard(dy, 32))
    assert OPS.hadamard(x.to("meta"), 32).shape == x.shape
    torch.testing.assert_close(torch.vmap(lambda t: OPS.hadamard(t, 32))(x), OPS.hadamard(x, 32))
    compiled = torch.compile(lambda t: OPS.hadamard(t, 32) + 1, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), OPS.hadamard(x, 32) + 1)


# ---- layers ----------------------------------------------------------------------------------------------------------


def factors(layer: qao.QuantLinear, x: Tensor) -> tuple[Tensor, Tensor]:
    """x as the quantizing operator rounds it and W Rᵀ as it is stored, in float64."""
    size, scheme = layer.scheme.rotation, layer.scheme
    seen = reference.dequantize_activation(*OPS.int8_quantize(x, scheme.symmetric_activations, size))
    q, scales, zeros = scheme.unpack(layer.qweight, layer.scales, layer.out_features, layer.in_features)
    if zeros is None and isinstance(scheme, qao.Int8DynamicActivationInt8Weight):
        stored = reference.dequantize_8bit(q, scales)
    else:
        stored = reference.dequantize(q, scales, zeros, scheme.group_size)  # type: ignore[attr-defined]
    return seen.to(stored), stored


def multiplied(layer: qao.QuantLinear, x: Tensor) -> Tensor:
    """y in float64, of x and W as they are multiplied."""
    seen, stored = factors(layer, x)
    return seen @ stored.T + (0 if layer.bias is None else layer.bias.double())


@pytest.mark.every_isa
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layer_multiplies_what_it_rounds(scheme: qao.Scheme, dtype: torch.dtype, device: str) -> None:
    layer = qao.QuantLinear.from_linear(linear(dtype=dtype, device=device), scheme)
    for m in (1, 3, 16, 40, 300):
        x = with_outlier(randn(m, 192, dtype=dtype, device=device))
        y, exact = layer(x), multiplied(layer, x)
        # Integer sums are exact; scales, zero points and bias are applied in float32, and y is rounded to its dtype.
        slack = (x.double().abs().amax(1, keepdim=True) * layer.dequantize(torch.float64).norm(dim=1)) * 2.0**-16
        if dtype == torch.bfloat16 and device == "cpu" and runs_amx():  # W of short groups is multiplied in bfloat16
            seen, stored = factors(layer, x)
            slack = slack + 2.0**-9 * seen.abs() @ stored.abs().T
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + slack).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_weight_is_that_of_the_float_layer(scheme: Any, device: str) -> None:
    floats = linear(device=device)
    layer = qao.QuantLinear.from_linear(floats, scheme)
    q, scales, zeros = scheme.unpack(layer.qweight, layer.scales, 48, 192)
    bits = 8 if zeros is None and scheme.weights == "int8" else 4
    error = (layer.dequantize(torch.float32) - floats.weight).norm() / floats.weight.norm()
    assert error < (0.01 if bits == 8 else 0.15)
    packed = scheme.quantize(floats.weight.detach())
    assert packed.relative_error == pytest.approx(error.item(), rel=0.02)
    if bits == 8:
        stored = reference.dequantize_8bit(q, scales)
        exact = floats.weight.double() @ matrix(192, layer.scheme.rotation).to(floats.weight.device)
        assert ((stored - exact).abs() <= scales.double()[:, None] * 3).all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_outliers_cost_less(scheme: Any, device: str) -> None:
    floats = linear(768, 64, device=device)
    x = with_outlier(randn(64, 768, device=device))
    exact = floats(x)
    plain = qao.QuantLinear.from_linear(floats, _plain(scheme))
    turned = qao.QuantLinear.from_linear(floats, scheme)

    def activation_error(layer: qao.QuantLinear) -> float:
        return (layer(x) - (x @ layer.dequantize(torch.float32).T + layer.bias)).norm().item()

    assert activation_error(turned) < activation_error(plain) * (0.4 if scheme.symmetric_activations else 0.7)
    if scheme.weights == "int8":
        assert (turned(x) - exact).norm() < 0.5 * (plain(x) - exact).norm()


def _plain(scheme: Any) -> Any:
    from dataclasses import replace

    return replace(scheme, rotation=0)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_those_of_the_unrotated_weight(scheme: Any, device: str) -> None:
    layer = qao.QuantLinear.from_linear(linear(device=device), scheme)
    x, dy = randn(5, 192, device=device), randn(5, 48, device=device, seed=3)
    dense = layer.dequantize(torch.float32)
    given = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(layer(given), given, dy)
    torch.testing.assert_close(dx, dy @ dense)
    _, tangent = torch.func.jvp(layer, (x,), (x,))
    torch.testing.assert_close(tangent, x @ dense.T)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    jagged = layer(torch.nested.nested_tensor([x, x[:2]], layout=torch.jagged))
    torch.testing.assert_close(jagged.values()[:5], layer(x))


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
def test_batch_invariance_holds_beside_it(scheme: Any, device: str) -> None:
    layer = qao.QuantLinear.from_linear(linear(dtype=torch.bfloat16, device=device), scheme)
    x = with_outlier(randn(70, 192, dtype=torch.bfloat16, device=device))
    with qao.ops.batch_invariant():
        y = layer(x)
        assert all(torch.equal(layer(x[i : i + 1]), y[i : i + 1]) for i in (0, 33, 69))
        assert torch.equal(layer(x[:20]), y[:20])


def test_the_operator_in_a_graph(device: str) -> None:
    layer = qao.QuantLinear.from_linear(linear(device=device), SCHEMES[0])
    x = randn(5, 192, device=device)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    exported = torch.export.export(layer, (x,)).module()
    assert torch.equal(exported(x), layer(x))


def test_the_largest_block_that_divides_is_taken_and_kept() -> None:
    sizes = {256: 256, 192: 64, 576: 64, 96: 32, 80: 16, 100: 0, 97: 0}
    for k, size in sizes.items():
        layer = qao.QuantLinear.from_linear(linear(k), INT8(rotation=256))
        assert layer.scheme.rotation == size and layer.scheme.to_dict().get("rotation", 0) == size
        again = qao.QuantLinear.empty(k, 48, scheme=INT8(rotation=256))
        assert again.scheme == layer.scheme
        again.load_state_dict(layer.state_dict())
        x = randn(3, k)
        assert torch.equal(again(x), layer(x))
    model = nn.Sequential(linear(192, 100), linear(100, 48))
    rows = qao.quantize_(model, INT8(rotation=64)).rows
    assert [row.scheme for row in rows] == ["int8_int8, rotation 64", "int8_int8"]


@pytest.mark.parametrize("value", [True, 8, 48, 512, -16, 64.0, None])
def test_the_option_is_checked(value: Any) -> None:
    for kind in (INT8, qao.Int8DynamicActivationInt4Weight):
        with pytest.raises(ValueError, match="rotation must be 16, 32, 64, 128, 256, or 0 for none"):
            kind(rotation=value)


def test_dicts_are_those_of_before_without_it() -> None:
    assert "rotation" not in INT8().to_dict()
    assert all(qao.schemes.scheme_from_dict(scheme.to_dict()) == scheme for scheme in SCHEMES)
    assert str(SCHEMES[0]) == "int8_int8, rotation 64"


# ---- saving ----------------------------------------------------------------------------------------------------------


def test_a_state_dict_of_another_rotation_is_refused() -> None:
    layers = [qao.QuantLinear.from_linear(linear(), INT8(rotation=size)) for size in (0, 32, 64)]
    for a in layers:
        for b in layers:
            if a is not b:
                stored, wanted = a.scheme.rotation or None, b.scheme.rotation or None
                message = rf"the checkpoint holds rotation={stored}, but this QuantLinear .* has rotation={wanted}"
                with pytest.raises(RuntimeError, match=message):
                    b.load_state_dict(a.state_dict())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_files_keep_it(scheme: Any, tmp_path: Any) -> None:
    model = nn.Sequential(linear(192, 64), linear(64, 48))
    qao.quantize_(model, scheme)
    qao.save(model, tmp_path / "model.safetensors")
    loaded = nn.Sequential(linear(192, 64), linear(64, 48))
    qao.load(tmp_path / "model.safetensors", loaded)
    x = with_outlier(randn(7, 192))
    assert torch.equal(loaded(x), model(x)) and loaded[0].scheme == model[0].scheme
    copied = copy.deepcopy(model)
    assert torch.equal(copied(x), model(x))


def test_compressed_tensors_cannot_hold_it() -> None:
    from qao.checkpoints.compressed_tensors.write import can_write, layer_tensors

    assert "cannot hold the rotation" in (can_write(SCHEMES[0]) or "")
    with pytest.raises(ValueError, match="compressed-tensors cannot hold the rotation of int8_int8, rotation 64"):
        layer_tensors(qao.QuantLinear.from_linear(linear(), SCHEMES[0]))


@pytest.mark.parametrize("scheme", [*SCHEMES, INT8(clip_search=False, rotation=64)], ids=str)
def test_another_weight_in_place(scheme: Any, device: str) -> None:
    layer = qao.QuantLinear.from_linear(linear(device=device), scheme)
    other = linear(device=device)
    with torch.no_grad():
        other.weight.copy_(randn(48, 192, seed=9) * 0.1)
    layer.load_float_(other.weight.detach())
    expected = qao.QuantLinear.from_linear(other, scheme)
    x = randn(3, 192, device=device)
    assert torch.equal(layer(x), expected(x))
    assert torch.equal(layer.qweight, expected.qweight) and torch.equal(layer.scales, expected.scales)


def test_an_embedding_cannot_share_it() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(50, 64), "head": nn.Linear(64, 50, bias=False)})
    model["head"].weight = model["embed"].weight
    report = qao.quantize_(model, INT8(rotation=64), embeddings=True)
    assert all(row.status != "quantized" for row in report.rows)
    with pytest.raises(ValueError, match="its rows are not rows of the embedding"):
        qao.nn.QuantEmbedding.from_embedding(nn.Embedding(50, 64), INT8(rotation=64))


# ---- calibration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("method", ["gptq", "smoothquant"])
def test_calibrate(method: str, scheme: Any, device: str) -> None:
    """On similar data a calibrated layer is at least as good as one rounded to nearest."""
    mix = randn(192, 192, seed=4, device=device) / 14
    data = [with_outlier(randn(64, 192, seed=10 + i, device=device) @ mix) for i in range(8)]
    model = nn.Sequential(nn.LayerNorm(192, device=device), linear(device=device))
    nearest, tuned = copy.deepcopy(model), copy.deepcopy(model)
    qao.quantize_(nearest, scheme)
    report = qao.calibrate(tuned, data, scheme, method=method, progress=False)
    assert tuned[1].scheme == nearest[1].scheme and tuned[1].scheme.rotation

    def error(quantized: nn.Module) -> float:
        return sum((quantized(x) - model(x)).norm().item() for x in data)

    assert error(tuned) < error(nearest) * 1.05
    weight_error = (tuned[1].dequantize(torch.float32) - model[1].weight).norm() / model[1].weight.norm()
    if method == "gptq":
        assert report.rows[0].relative_error == pytest.approx(weight_error.item(), rel=0.02)


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_of_experts(scheme: Any, device: str) -> None:
    from qao.nn.experts import QuantProjection, quantize_projection

    weights = randn(3, 48, 192, device=device, seed=5) * 0.05
    packed = quantize_projection(weights, scheme, False, None, "w")
    projection = QuantProjection(3, 48, 192, scheme, packed, None, torch.float32)
    x = with_outlier(randn(20, 192, device=device))
    offsets = torch.tensor([4, 4, 17], dtype=torch.int32, device=device)
    y = projection(x, offsets)
    dense = projection.dequantize(torch.float32)
    for e, (first, last) in enumerate(((0, 4), (4, 4), (4, 17))):
        layer = qao.QuantLinear(192, 48, scheme, scheme.quantize(weights[e]), None, torch.float32)
        torch.testing.assert_close(y[first:last], layer(x[first:last]), rtol=1e-4, atol=1e-4)
    assert not y[17:].any()
    given, dy = x.clone().requires_grad_(), randn(20, 48, device=device, seed=6)
    (dx,) = torch.autograd.grad(projection(given, offsets), given, dy)
    expected = torch.cat((dy[:4] @ dense[0], dy[4:17] @ dense[2], torch.zeros(3, 192, device=device)))
    torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)


# ---- parts of a weight ----


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_parts_add_up_to_the_whole(scheme: Any) -> None:
    """As ranks have them: columns are cut between blocks, and each part is rotated as the whole is."""
    from qao.distributed.cut import cut, part, units

    k, size = 512, scheme.fitted(512).rotation
    layer = qao.QuantLinear.from_linear(linear(k), scheme)
    assert units(layer.scheme, (48, k))[1] == max(size, scheme.units(48, k)[1])
    dense = layer.dequantize(torch.float32)
    for world in (2, 4):
        for rank in range(world):
            own = cut((48, k), 1, units(layer.scheme, (48, k)), rank, world, "Rowwise")
            packed = part(layer.scheme, layer.packed, (48, k), own)
            some = qao.QuantLinear(k // world, 48, layer.scheme, packed, None, torch.float32)
            assert some.scheme == layer.scheme
            torch.testing.assert_close(some.dequantize(torch.float32), dense[:, own.begin : own.end])
    with pytest.raises(ValueError, match="share a scale or a rotation.*Numbers of ranks that work: 1"):
        cut((48, 192), 1, units(INT8(rotation=64), (48, 192)), 0, 2, "Rowwise")


def test_a_served_layer_keeps_it() -> None:
    from qao.integrations.serving.config import Served
    from qao.integrations.serving.linear import ServedLinear

    class Made(ServedLinear):
        pass

    layer = qao.QuantLinear.from_linear(linear(192), INT8(symmetric_activations=False, rotation=64))
    with pytest.raises(ValueError, match="can only be divided at multiples of 64 columns"):
        Made(layer.scheme, "down", Served({}, "an engine"))._check_cuts([48], 96, cut_rows=False, cut_columns=True)
    served: Any = Made(layer.scheme, "down", Served({}, "an engine"))
    served.parts, served.k, served.full_k = [48], 192, 384  # so that sums cover only its columns
    served.rest = layer.scheme.constants(48, 192)
    holder: Any = nn.Module()
    for name, tensor in layer.packed.tensors().items():
        holder.register_parameter(name, None if tensor is None else nn.Parameter(tensor.clone(), requires_grad=False))
    holder.weight_sums.data.zero_()
    served.process_weights_after_loading(holder)
    x = with_outlier(randn(5, 192))
    torch.testing.assert_close(served.apply(holder, x, layer.bias), layer(x))


def test_a_pickle_with_the_numbers_of_an_earlier_version_loads() -> None:
    """qao 0.2 moved row_scales before the sizes, among which a pickle has it."""
    scheme = qao.Int8DynamicActivationInt4Weight(32, rotation=64)
    layer = qao.QuantLinear.from_linear(linear(192), scheme)
    expected = layer(x := with_outlier(randn(5, 192)))
    layer._constants = 48, 192, 32, None, False, 64
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


# ---- a plan ----------------------------------------------------------------------------------------------------------


def test_the_plan_names_it() -> None:
    host = pytest.importorskip("qao._host")
    h100 = host.Gpu(compute_capability=90, num_sms=132, shared_bytes_per_cta=232448)
    for m in (1, 4, 64, 4096):
        problem = host.Problem(m=m, n=4096, k=4096, x="int8", weight="int8", x_rotation=64)
        assert "quantizes_x no (x is rotated)" in host.plan(problem, h100)["text"]


def test_rotated_keeps_what_is_not_to_be() -> None:
    x = randn(2, 64, dtype=torch.bfloat16)
    assert rotated(x, 0) is x and rotated(x, 64).dtype == torch.float32
