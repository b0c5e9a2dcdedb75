"""QuantLinear as a module: numbers, devices, dtypes, state, copies, training, compilation."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import qao
import torch
import torch.nn.functional as F
from accuracy import check_close
from ops_schemes import DTYPES, FP8, FP8_BESIDE_INT4, FP8_BLOCK, FP8_TENSOR, INT8, INT8_ASYMMETRIC, Activation
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
from torch import Tensor, nn

SCHEME = Int4WeightOnly(group_size=32)
# Each scheme with its activation transformation.
SCHEMES: dict[qao.Scheme, Activation] = {
    SCHEME: Activation(),
    Int8WeightOnly(): Activation(),
    Float8WeightOnly(): Activation(),
    Float8WeightOnly("block"): Activation(),
    Int8DynamicActivationInt8Weight(): INT8,
    Int8DynamicActivationInt8Weight(symmetric_activations=False): INT8_ASYMMETRIC,
    Int8DynamicActivationInt4Weight(-1, symmetric=True): INT8,
    Int8DynamicActivationInt4Weight(32, symmetric_activations=False): INT8_ASYMMETRIC,
    Float8DynamicActivationFloat8Weight(): FP8,
    Float8DynamicActivationFloat8Weight("tensor"): FP8_TENSOR,
    Float8DynamicActivationFloat8Weight("block"): FP8_BLOCK,
    Float8StaticActivationFloat8Weight(activation_scale=0.02): Activation("fp8", group_size=0, static_scale=0.02),
    Float8DynamicActivationInt4Weight(64): FP8_BESIDE_INT4,
}
every_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: str(scheme).replace(" ", "_"))


def make(
    n: int = 40,
    k: int = 96,
    *,
    bias: bool = True,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    scheme: qao.Scheme = SCHEME,
) -> QuantLinear:
    torch.manual_seed(0)
    return QuantLinear.from_linear(nn.Linear(k, n, bias=bias).to(device, dtype), scheme)


def tensors(layer: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert torch.equal(left[name].cpu(), right[name].cpu()), name


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@every_scheme
def test_forward_is_linear_on_the_dequantized_weight(
    scheme: qao.Scheme, bias: bool, dtype: torch.dtype, device: str
) -> None:
    layer = make(50, 200, bias=bias, device=device, dtype=dtype, scheme=scheme)
    # float32 holds (q - zero) * scale exactly for scales of 16 bits, which a checkpoint in 16 bits has, and within a
    # rounding for others.
    weight, activation = layer.dequantize(torch.float32).double(), SCHEMES[scheme]
    for shape in ((200,), (1, 200), (3, 7, 200), (0, 200)):
        x = randn(*shape, dtype=dtype, device=device)
        rows = x.reshape(-1, 200)
        slack = activation.slack(rows, weight) + 2.0**-23 * activation.seen(rows).abs() @ weight.abs().T
        b = None if layer.bias is None else layer.bias.detach()
        check_close(layer(x).detach(), x, weight, b, activation.seen(rows), slack)


@every_scheme
def test_dequantized_weight_is_near_the_original(scheme: qao.Scheme, device: str) -> None:
    linear = nn.Linear(256, 64, device=device)
    layer = QuantLinear.from_linear(linear, scheme)
    expected = scheme.quantize(linear.weight).relative_error
    error = (linear.weight.detach() - layer.dequantize()).norm() / linear.weight.detach().norm()
    assert expected is not None and error.item() == pytest.approx(expected, rel=1e-4)
    assert layer.dequantize().dtype == torch.float32 and layer.dequantize(torch.bfloat16).dtype == torch.bfloat16


@every_scheme
def test_from_linear_leaves_the_original_alone(scheme: qao.Scheme, device: str) -> None:
    linear = nn.Linear(64, 32, device=device).eval()
    before = tensors(linear)
    layer = QuantLinear.from_linear(linear, scheme)
    assert_same(tensors(linear), before)
    assert linear.bias.requires_grad and not layer.training


@every_scheme
def test_float64_becomes_float32(scheme: qao.Scheme, device: str) -> None:
    layer = make(dtype=torch.float64, device=device, scheme=scheme)
    assert layer.scales.dtype == torch.float32 and layer.bias is not None and layer.bias.dtype == torch.float32


def test_scales_take_the_dtype_of_the_weight() -> None:
    """Those of int4; others are float32 throughout."""
    assert {make(dtype=dtype).scales.dtype for dtype in DTYPES} == set(DTYPES)
    assert make(scheme=Int4WeightOnly(scale_dtype=torch.float16)).scales.dtype == torch.float16
    assert make(scheme=Int8WeightOnly(), dtype=torch.bfloat16).scales.dtype == torch.float32


@pytest.mark.parametrize(
    "scheme, expected",
    [
        (SCHEME, "int4 g32 asymmetric, scales bfloat16"),
        (Int8WeightOnly(), "int8, scales float32"),
        (Float8WeightOnly("block"), "fp8 block, scales float32"),
        (Int8DynamicActivationInt8Weight(), "int8_int8, scales float32"),
        (
            Int8DynamicActivationInt4Weight(64, symmetric=True, symmetric_activations=False),
            "int8_int4 g64 symmetric, asymmetric activations, scales bfloat16",
        ),
        (
            Float8StaticActivationFloat8Weight(activation_scale=0.1, fast_accum=True),
            "fp8_fp8 row, static activations, fast accumulation, scales float32",
        ),
        (Float8DynamicActivationInt4Weight(-1), "fp8_int4 g-1 asymmetric, scales bfloat16"),
    ],
    ids=lambda value: getattr(value, "word", ""),
)
def test_repr(scheme: qao.Scheme, expected: str) -> None:
    layer = make(dtype=torch.bfloat16, scheme=scheme)
    assert repr(layer) == f"QuantLinear(in_features=96, out_features=40, bias=True, {expected})"


# ---- autocast --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_acts_as_on_linear(dtype: torch.dtype, to: torch.dtype, device: str) -> None:
    layer, linear = make(device=device, dtype=dtype), nn.Linear(96, 40, device=device, dtype=dtype)
    x = randn(3, 96, dtype=dtype, device=device)
    with torch.autocast(device, dtype=to):
        y = layer(x)
        assert y.dtype == linear(x).dtype == to
    assert torch.equal(y, layer(x.to(to)))


def test_autocast_leaves_float64_to_the_operator(device: str) -> None:
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="x must be float32"):
        make(device=device)(torch.randn(2, 96, dtype=torch.float64, device=device))


# ---- devices and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.float(),
        lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16),
        lambda m: m.type(torch.float16),
        lambda m: m.to(torch.zeros(1, dtype=torch.float16)),
    ],
    ids=["half", "bfloat16", "float", "to", "to_device_dtype", "type", "to_like"],
)
@every_scheme
def test_casts_touch_the_bias_alone(scheme: qao.Scheme, cast: Any) -> None:
    for dtype in DTYPES:
        model = nn.Sequential(make(dtype=dtype, scheme=scheme), nn.LayerNorm(40))
        before = tensors(model)
        cast(model)
        after = tensors(model)
        assert after["0.bias"].dtype == after["1.weight"].dtype  # as the rest of the model
        frozen = [name for name in before if name.startswith("0.") and name != "0.bias"]
        assert len(frozen) >= 2
        assert_same({name: before[name] for name in frozen}, {name: after[name] for name in frozen})
        x = randn(2, 96, dtype=after["0.bias"].dtype, device="cpu")
        assert model(x).dtype == x.dtype


@every_scheme
def test_memory_format_does_not_reorder(scheme: qao.Scheme, device: str) -> None:
    layer = make(device=device, scheme=scheme)
    x = randn(2, 96, dtype=torch.float32, device=device)
    expected = layer(x)
    layer.to(memory_format=torch.channels_last)
    assert layer.scales.is_contiguous() and torch.equal(layer(x), expected)


@every_scheme
def test_moving_is_idempotent_and_exact(scheme: qao.Scheme, device: str) -> None:
    layer = make(dtype=torch.bfloat16, scheme=scheme)
    before = tensors(layer)
    layer.to(device)
    pointers = [parameter.data_ptr() for parameter in layer.parameters()]
    assert layer.to(device) is layer
    assert [parameter.data_ptr() for parameter in layer.parameters()] == pointers
    assert all(parameter.device.type == device for parameter in layer.parameters())
    assert_same(tensors(layer.to("cpu")), before)


def test_moving_and_casting_at_once(device: str) -> None:
    layer = make(dtype=torch.bfloat16)
    before = tensors(layer)
    layer.to(device, torch.float16)
    assert layer.scales.device.type == device and layer.bias is not None and layer.bias.dtype == torch.float16
    assert_same({"scales": before["scales"]}, {"scales": layer.scales.detach()})


@every_scheme
def test_meta_and_to_empty(scheme: qao.Scheme, device: str) -> None:
    layer = make(dtype=torch.bfloat16, scheme=scheme)
    before = tensors(layer)
    layer.to("meta")
    assert layer(torch.empty(5, 96, device="meta", dtype=torch.bfloat16)).shape == (5, 40)
    layer.to_empty(device=device)
    for name, parameter in layer.named_parameters():
        assert parameter.device.type == device and parameter.dtype == before[name].dtype
        assert parameter.shape == before[name].shape
    layer.load_state_dict(before)
    assert_same(tensors(layer), before)


@every_scheme
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_empty_is_what_from_linear_makes(scheme: qao.Scheme, dtype: torch.dtype, device: str) -> None:
    made = make(33, 100, dtype=dtype, device=device, scheme=scheme)
    on_meta = QuantLinear.from_linear(nn.Linear(100, 33, device="meta", dtype=dtype), scheme)
    empty = QuantLinear.empty(100, 33, scheme=scheme, device=device, dtype=dtype)
    for layer, place in ((on_meta, "meta"), (empty, device)):
        for name, expected in made.packed.tensors().items():
            tensor = getattr(layer, name)
            assert (tensor is None) == (expected is None)
            if expected is not None:
                assert (tensor.shape, tensor.dtype, tensor.device.type) == (expected.shape, expected.dtype, place)
    on_meta.load_state_dict(made.state_dict(), assign=True)
    x = randn(2, 100, dtype=torch.float32, device=device)
    assert torch.equal(on_meta(x), made(x))


def test_empty_follows_the_default_device() -> None:
    with torch.device("meta"):
        layer = QuantLinear.empty(64, 32, scheme=SCHEME)
    assert all(parameter.is_meta for parameter in layer.parameters())


def test_share_memory() -> None:
    layer = make().share_memory()
    assert all(parameter.is_shared() for parameter in layer.parameters())


# ---- state -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@every_scheme
def test_state_dict_through_a_file(scheme: qao.Scheme, assign: bool, device: str) -> None:
    layer = make(dtype=torch.bfloat16, device=device, scheme=scheme)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    always = {"bias", "scales", "qweight", "weight", "pip_install_qao"}
    assert always <= state.keys() <= always | {"weight_sums", "activation_scale"}
    other = QuantLinear.empty(96, 40, scheme=scheme, device=device, dtype=torch.bfloat16)
    assert str(other.load_state_dict(state, strict=True, assign=assign)) == "<All keys matched successfully>"
    assert_same(tensors(other), tensors(layer))
    assert not any(parameter.requires_grad for parameter in other.parameters())
    x = randn(3, 96, dtype=torch.bfloat16, device=device)
    assert torch.equal(other(x), layer(x))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize(
    "other",
    [
        Int4WeightOnly(group_size=64),
        Int4WeightOnly(group_size=-1),
        Int4WeightOnly(group_size=32, symmetric=True),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_scheme(other: Int4WeightOnly, assign: bool) -> None:
    state = nn.Sequential(make(scheme=other)).state_dict()
    model = nn.Sequential(make())
    before = tensors(model)
    with pytest.raises(RuntimeError, match=r"0\.pip_install_qao: the checkpoint holds .*int4 g32 asymmetric.*="):
        model.load_state_dict(state, assign=assign)
    assert_same(tensors(model), before)


@pytest.mark.parametrize(
    "saved, loading",
    [
        (Int8WeightOnly(), SCHEME),
        (Int8WeightOnly(), Float8WeightOnly()),  # both are bytes [N, K]
        (Float8WeightOnly(), Int8DynamicActivationInt8Weight()),
        (Float8WeightOnly("tensor"), Float8WeightOnly("row")),
        (Float8WeightOnly("block"), Float8DynamicActivationFloat8Weight("tensor")),
    ],
    ids=str,
)
def test_a_checkpoint_of_another_weight_format(saved: qao.Scheme, loading: qao.Scheme) -> None:
    layer = make(200, 200, scheme=loading)
    before = tensors(layer)
    with pytest.raises(RuntimeError, match=r"the checkpoint holds (scheme|granularity)="):
        layer.load_state_dict(make(200, 200, scheme=saved).state_dict())
    assert_same(tensors(layer), before)


@pytest.mark.parametrize("assign", [True, False])
def test_schemes_that_differ_in_activations_share_checkpoints(assign: bool) -> None:
    """Activation handling is a property of the layer: the same weights work under both schemes."""
    x = randn(3, 96, dtype=torch.float32, device="cpu")
    int4, int8, fp8 = SCHEME, Int8WeightOnly(), Float8WeightOnly("block")
    for weights, activations in (
        (int4, Int8DynamicActivationInt4Weight(32)),
        (int4, Float8DynamicActivationInt4Weight(32)),
        (int8, Int8DynamicActivationInt8Weight()),
        (fp8, Float8DynamicActivationFloat8Weight("block")),
        (Int8DynamicActivationInt4Weight(32), Float8DynamicActivationInt4Weight(32)),
    ):
        for saved, loading in ((weights, activations), (activations, weights)):
            layer = QuantLinear.empty(96, 40, scheme=loading)
            source = make(scheme=saved)
            layer.load_state_dict(source.state_dict(), assign=assign)
            assert layer.scheme == loading
            assert torch.equal(layer.dequantize(), source.dequantize())
            assert torch.equal(layer(x), make(scheme=loading)(x))


def test_activations_that_need_tensors_of_their_own() -> None:
    asymmetric = Int8DynamicActivationInt8Weight(symmetric_activations=False)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="weight_sums: the checkpoint has none"):
            make(scheme=asymmetric).load_state_dict(make(scheme=Int8WeightOnly()).state_dict(), strict=strict)
    static = Float8StaticActivationFloat8Weight(activation_scale=0.5)
    with pytest.raises(RuntimeError, match='Unexpected key.*"activation_scale"'):
        make(scheme=Float8DynamicActivationFloat8Weight()).load_state_dict(make(scheme=static).state_dict())
    with pytest.raises(RuntimeError, match='Missing key.*"activation_scale"'):
        make(scheme=static).load_state_dict(make(scheme=Float8DynamicActivationFloat8Weight()).state_dict())


def test_a_checkpoint_of_another_shape_or_of_floats() -> None:
    layer = make()
    with pytest.raises(RuntimeError, match=r"holds a weight \[17, 96\], but this .* has a weight \[40, 96\]"):
        layer.load_state_dict(make(17, 96).state_dict())
    with pytest.raises(RuntimeError, match=r"weight: the checkpoint holds float32\[40, 96\].*before quantizing"):
        layer.load_state_dict(nn.Linear(96, 40).state_dict(), strict=False)


def test_scales_of_another_dtype_are_not_cast() -> None:
    layer, state = make(), make(dtype=torch.bfloat16).state_dict()
    with pytest.raises(RuntimeError, match=r"scales: the checkpoint holds bfloat16.*scale_dtype"):
        layer.load_state_dict(state)
    layer.load_state_dict(state, assign=True)  # taking the tensors themselves casts nothing
    assert layer.scales.dtype == torch.bfloat16
    state["scales"] = state["scales"].double()
    with pytest.raises(RuntimeError, match=r"scales: the checkpoint holds float64"):
        layer.load_state_dict(state, assign=True)


def test_missing_and_unexpected_keys_are_reported_as_for_any_module() -> None:
    state = make().state_dict()
    del state["scales"]
    with pytest.raises(RuntimeError, match='Missing key.*"scales"'):
        make().load_state_dict(state)
    with pytest.raises(RuntimeError, match='Unexpected key.*"bias"'):
        make(bias=False).load_state_dict(make().state_dict())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
@every_scheme
def test_copies(scheme: qao.Scheme, copier: Any, device: str) -> None:
    layer = make(device=device, dtype=torch.bfloat16, scheme=scheme).eval()
    other = copier(layer)
    assert_same(tensors(other), tensors(layer))
    assert other.scheme == layer.scheme and repr(other) == repr(layer) and not other.training
    assert not {p.data_ptr() for p in other.parameters()} & {p.data_ptr() for p in layer.parameters()}
    x = randn(3, 96, dtype=torch.bfloat16, device=device)
    assert torch.equal(other(x), layer(x))


# ---- training --------------------------------------------------------------------------------------------------------


@every_scheme
def test_everything_starts_frozen_and_only_the_bias_can_thaw(scheme: qao.Scheme) -> None:
    layer = make(scheme=scheme)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert layer.requires_grad_() is layer
    assert [name for name, parameter in layer.named_parameters() if parameter.requires_grad] == ["bias"]
    layer.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert make(bias=False).requires_grad_().bias is None


@every_scheme
def test_gradients_of_input_and_bias(scheme: qao.Scheme, device: str) -> None:
    layer = make(device=device, scheme=scheme).requires_grad_()
    weight = layer.dequantize().double()
    x = randn(5, 96, dtype=torch.float32, device=device).requires_grad_()
    upstream = randn(5, 40, dtype=torch.float32, device=device, seed=1)
    layer(x).backward(upstream)
    assert x.grad is not None and layer.bias is not None and layer.bias.grad is not None
    check_close(x.grad, upstream, weight.T.contiguous())
    # the bound of any order of adding 5 float32 numbers
    error = (layer.bias.grad.double() - upstream.double().sum(0)).abs()
    assert (error <= 5 * 2.0**-24 * upstream.double().abs().sum(0)).all()
    assert layer.qweight.grad is None and layer.scales.grad is None


def test_scales_that_were_thawed_by_force_get_no_gradient() -> None:
    """Loaders that set requires_grad on every float parameter break neither forward nor backward."""
    layer = make()
    layer.scales.requires_grad = True
    x = torch.randn(2, 96, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None and layer.scales.grad is None


def test_an_adapter_beside_the_layer_trains(device: str) -> None:
    """The way LoRA works: y = base(x) + B(A(x)), with a quantized base."""
    torch.manual_seed(0)
    base, down, up = make(device=device), nn.Linear(96, 4, device=device), nn.Linear(4, 40, device=device)
    optimizer = torch.optim.SGD([*base.parameters(), *down.parameters(), *up.parameters()], lr=0.05)
    x = randn(16, 96, dtype=torch.float32, device=device)
    target = randn(16, 40, dtype=torch.float32, device=device, seed=1)
    before, losses = tensors(base), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(base(x) + up(down(x)), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert_same(tensors(base), before)


@every_scheme
def test_weights_are_parameters_not_buffers(scheme: qao.Scheme) -> None:
    """FSDP shards, DDP leaves alone and accelerate offloads parameters; they do none of it for buffers."""
    layer = make(scheme=scheme)
    assert len(list(layer.parameters())) <= 4  # each is an input of a compiled graph
    assert not list(layer.buffers())
    assert layer.qweight.dtype == torch.int8


# ---- compilation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@every_scheme
def test_compile(scheme: qao.Scheme, backend: str, device: str) -> None:
    if backend == "inductor" and scheme not in (SCHEME, Int8DynamicActivationInt8Weight()):
        pytest.skip("one op is as opaque to it as another")
    torch._dynamo.reset()
    layer = make(device=device, scheme=scheme)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    x = randn(4, 96, dtype=torch.float32, device=device)
    assert torch.equal(compiled(x), layer(x))
    with torch.autocast(device, dtype=torch.bfloat16):
        y = compiled(x)
        assert y.dtype == torch.bfloat16 and torch.equal(y, layer(x))


@every_scheme
def test_export(scheme: qao.Scheme) -> None:
    layer, x = make(scheme=scheme), torch.randn(4, 96)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), layer(x))


# ---- what from_linear refuses ----------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hooked() -> nn.Linear:
    linear = nn.Linear(64, 32)
    linear.register_forward_hook(lambda *_: None)
    return linear


def offloaded() -> nn.Linear:
    linear = nn.Linear(64, 32)
    linear.forward = lambda x: x  # type: ignore[method-assign]
    return linear


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: Doubled(64, 32), "Doubled is a subclass of nn.Linear with its own forward"),
        (hooked, "it has forward_hooks, which would be lost"),
        (offloaded, "its forward was replaced on the instance"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 32)), "its weight is computed from other"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(64, 32)), "its weight is computed from other"),
        (lambda: nn.Linear(64, 32).to(torch.float8_e4m3fn), "its weight has dtype torch.float8_e4m3fn"),
        (lambda: nn.Linear(64, 0), r"its weight \[0, 64\] is empty"),
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_from_linear_refuses(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"QuantLinear: proj cannot be quantized: {message}"):
        QuantLinear.from_linear(build(), SCHEME, name="proj")


def test_from_linear_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match="must be an nn.Linear, not Conv2d"):
        QuantLinear.from_linear(nn.Conv2d(3, 3, 3), SCHEME)
    with pytest.raises(TypeError, match="scheme must be a Scheme"):
        QuantLinear.from_linear(nn.Linear(64, 32), "int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is on meta and has no data"):
        QuantLinear.from_linear(nn.Linear(64, 32, device="meta"), SCHEME, device="cpu")
    linear = nn.Linear(64, 32)
    nn.init.constant_(linear.weight, float("nan"))
    with pytest.raises(ValueError, match="^proj: the weight.*NaN or Inf"):
        QuantLinear.from_linear(linear, SCHEME, name="proj")


@every_scheme
def test_wrong_inputs_are_refused_by_the_operator(scheme: qao.Scheme, device: str) -> None:
    layer = make(device=device, scheme=scheme)
    with pytest.raises(RuntimeError, match=rf"qao::{scheme.word}_mm: x must have shape \[\.\.\., in_features\]"):
        layer(torch.randn(2, 95, device=device))
