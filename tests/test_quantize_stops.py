"""quantize_ and dequantize_ of invalid models: errors before the first change, or warnings."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import qao
import torch
from qao import Float8WeightOnly, Int4WeightOnly, Int8WeightOnly, QuantLinear, quantize_
from qao.nn import QuantEmbedding
from qao.quantization.report import Report
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

SCHEME = Int4WeightOnly(group_size=32)
pytestmark = pytest.mark.filterwarnings("ignore:quantize_. these big weights stay")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def linear(change: Callable[[nn.Linear], Any], **arguments: Any) -> Callable[[], nn.Linear]:
    def build() -> nn.Linear:
        made = nn.Linear(64, 48, **arguments)
        change(made)
        return made

    return build


def with_weight(weight: Tensor) -> Callable[[], nn.Linear]:
    return linear(lambda layer: setattr(layer, "weight", nn.Parameter(weight, requires_grad=False)))


def with_bias(bias: Tensor) -> Callable[[], nn.Linear]:
    return linear(lambda layer: setattr(layer, "bias", nn.Parameter(bias, requires_grad=False)))


def bias_in_a_buffer(layer: nn.Linear) -> None:
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


class Subclass(Tensor):
    pass


def fake() -> nn.Linear:
    with FakeTensorMode():
        return nn.Linear(64, 48)


LEFT = {
    "bias in a buffer": (linear(bias_in_a_buffer), "its bias is not a Parameter"),
    "bias that was deleted": (linear(lambda layer: delattr(layer, "bias")), "its bias is not a Parameter"),
    "bias with a parametrization": (
        linear(lambda layer: nn.utils.parametrize.register_parametrization(layer, "bias", nn.Identity())),
        "its bias is not a Parameter",
    ),
    "bias too short": (with_bias(torch.ones(47)), r"its bias is float32\[47\], not \[48\] in a float dtype"),
    "bias of one": (with_bias(torch.ones(1)), r"its bias is float32\[1\], not \[48\]"),
    "integer bias": (with_bias(torch.ones(48).int()), r"its bias is int32\[48\], not \[48\] in a float dtype"),
    "complex bias": (with_bias(torch.ones(48).cfloat()), r"its bias is complex64\[48\]"),
    "sparse bias": (with_bias(torch.ones(48).to_sparse()), "its bias has layout torch.sparse_coo"),
    "bias of a subclass": (with_bias(torch.ones(48).as_subclass(Subclass)), "its bias is a Subclass"),
    "sparse weight": (with_weight(torch.eye(64)[:48].to_sparse()), "its weight has layout torch.sparse_coo"),
    "weight of three dimensions": (with_weight(torch.ones(2, 48, 64)), "its weight .* does not have two dimensions"),
    "weight of one dimension": (with_weight(torch.ones(48)), "its weight .* does not have two dimensions"),
    "weight of other rows": (with_weight(torch.ones(32, 64)), r"its bias is float32\[48\], not \[32\]"),
    "complex weight": (lambda: nn.Linear(64, 48, dtype=torch.complex64), "its weight has dtype torch.complex64"),
    "integer weight": (with_weight(torch.ones(48, 64).int()), "its weight has dtype torch.int32"),
    "e4m3 weight": (with_weight(torch.ones(48, 64).to(torch.float8_e4m3fn)), "its weight has dtype"),
    "weight of a subclass": (with_weight(torch.ones(48, 64).as_subclass(Subclass)), "its weight is a Subclass"),
    "fake weight": (fake, "its weight is a "),
    "lazy": (lambda: nn.LazyLinear(48), "it is lazy and has no weight yet"),
}


@pytest.mark.parametrize("build,reason", LEFT.values(), ids=LEFT)
def test_a_layer_that_cannot_be_quantized_is_left_and_the_others_are_not(build: Any, reason: str) -> None:
    model = nn.Sequential(nn.Linear(64, 64), build(), nn.Linear(64, 64))
    odd = model[1]
    with pytest.raises(ValueError, match=rf"strict(?s:.*)1 .*: {reason}"):
        quantize_(model, SCHEME, strict=True)
    assert [type(module) for module in model] == [nn.Linear, type(odd), nn.Linear]
    report = quantize_(model, SCHEME)
    assert isinstance(model[0], QuantLinear) and model[1] is odd and isinstance(model[2], QuantLinear)
    assert report.rows[1].status == "left" and str(report)
    with pytest.raises(ValueError, match=reason):
        QuantLinear.from_linear(odd, SCHEME)


def test_a_weight_that_overlaps_itself_is_quantized_as_its_values() -> None:
    row = torch.randn(1, 64)
    model, plain = (nn.Sequential(with_weight(row.expand(48, 64))()) for _ in range(2))
    plain[0].weight = nn.Parameter(row.repeat(48, 1))
    quantize_(model, SCHEME), quantize_(plain, SCHEME)
    assert torch.equal(model[0].qweight, plain[0].qweight)


TOO_LARGE = [
    (Int4WeightOnly(scale_dtype=torch.float16), 3e6, torch.float32),
    (Int4WeightOnly(scale_dtype=torch.float16, symmetric=True), -1e6, torch.bfloat16),
    (SCHEME, 1e200, torch.float64),
    (Int8WeightOnly(), 1e200, torch.float64),
    (Float8WeightOnly(), 1e200, torch.float64),
    (SCHEME, float("nan"), torch.float16),
    (Float8WeightOnly(), float("-inf"), torch.float32),
]


@pytest.mark.parametrize("scheme,value,dtype", TOO_LARGE)
def test_a_late_weight_that_cannot_be_quantized_changes_nothing(
    scheme: qao.Scheme, value: float, dtype: torch.dtype, device: str
) -> None:
    model = Tied().to(dtype).to(device)
    model.layers[2].weight.data[17, 5] = value
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    with pytest.raises(ValueError, match=r"^layers\.2: .*(overflows|holds NaN or Inf)"):
        quantize_(model, scheme, progress=False)
    assert list(model.modules()) == modules
    for (name, a), b in zip(model.state_dict().items(), before.values(), strict=True):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), name
    assert isinstance(quantize_(model, {"layers.2": None, "re:.*": scheme}, progress=False), Report)
    assert isinstance(model.layers[1], QuantLinear)


def test_large_weights_that_do_fit_are_quantized() -> None:
    """Near the limit of the scales, where the check has to try."""
    model = nn.Sequential(nn.Linear(64, 64).half())
    model[0].weight.data.fill_(65504)[:, ::2] = -65504
    quantize_(model, Int4WeightOnly(scale_dtype=torch.float16))
    assert isinstance(model[0], QuantLinear) and model[0].scales.isfinite().all()


@pytest.mark.parametrize("place", ["layers.2.bias", "layers.1.weight"])
def test_something_on_meta_and_a_device(place: str, device: str) -> None:
    model = Tied()
    parent = model.get_submodule(place.rpartition(".")[0])
    name = place.rpartition(".")[2]
    setattr(parent, name, nn.Parameter(getattr(parent, name).to("meta")))
    modules = list(model.modules())
    with pytest.raises(ValueError, match=rf"quantize_: {place.removesuffix('.weight')} is on meta and has no data"):
        quantize_(model, SCHEME, device=device)
    assert list(model.modules()) == modules


@pytest.mark.parametrize("device,error", [("meta", "has data, which device='meta' would drop"), ("nowhere", "nowhere")])
def test_a_device_that_cannot_be(device: str, error: str) -> None:
    model = Tied()
    with pytest.raises((ValueError, RuntimeError), match=error):
        quantize_(model, SCHEME, device=device)
    assert not any(isinstance(module, QuantLinear) for module in model.modules())


# ---- in the middle ---------------------------------------------------------------------------------------------------


class Stops:
    """A function that raises instead of the call of this number."""

    def __init__(self, function: Callable[..., Any], number: int, error: BaseException) -> None:
        self.function, self.left, self.error = function, number, error

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return self.function(*arguments, **named)


ERRORS = [KeyboardInterrupt(), torch.OutOfMemoryError("no memory"), MemoryError()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_quantize_stops_between_layers_and_goes_on(
    number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, whole, tokens = Tied(), Tied(), torch.arange(10)
    quantize_(whole, SCHEME, embeddings=True)
    floats = Tied()
    monkeypatch.setattr(
        qao.quantization.quantize, "pack_weight", Stops(qao.quantization.quantize.pack_weight, number, error)
    )
    with pytest.warns(UserWarning, match=rf"{type(error).__name__} in \S+: {number - 1} of 5 layers are quantized"):
        with pytest.raises(type(error)) as caught:
            quantize_(model, SCHEME, embeddings=True, progress=False)
    assert caught.value is error
    kinds = [type(module) for module in (*model.layers, model.head)]
    assert kinds == [QuantLinear] * (number - 1) + [nn.Linear] * (5 - number)
    for layer, other, plain in zip(model.layers, whole.layers, floats.layers, strict=True):
        expected = other if isinstance(layer, QuantLinear) else plain
        for (name, a), b in zip(layer.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(a, b), name
    assert model.head.weight is model.embed.weight and model(tokens).isfinite().all()
    quantize_(model, SCHEME, embeddings=True, progress=False)
    assert torch.equal(model(tokens), whole(tokens))
    assert model.head.qweight is model.embed.qweight


def test_layers_of_one_weight_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizing the embedding of a head fails after the head: both stay in float."""
    model = Tied()
    monkeypatch.setattr(QuantEmbedding, "from_packed", Stops(QuantEmbedding.from_packed, 1, KeyboardInterrupt()))
    with pytest.warns(UserWarning, match="KeyboardInterrupt in head: 3 of 5"), pytest.raises(KeyboardInterrupt):
        quantize_(model, SCHEME, embeddings=True, progress=False)
    assert isinstance(model.head, nn.Linear) and model.head.weight is model.embed.weight


@pytest.mark.parametrize("number", [1, 2, 4, 5])
def test_dequantize_stops_between_layers_and_goes_on(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Tied(), torch.arange(10)
    quantize_(model, SCHEME, embeddings=True, progress=False)
    whole = qao.dequantize_(copy.deepcopy(model))
    stops, error = {"left": number}, torch.OutOfMemoryError("no memory")

    def stop(self: Any, weight: Any = None, *, _real: Any) -> Any:
        stops["left"] -= 1
        if stops["left"] == 0:
            raise error
        return _real(self, weight)

    for kind in (QuantLinear, QuantEmbedding):
        real = kind.to_float
        monkeypatch.setattr(kind, "to_float", lambda self, weight=None, real=real: stop(self, weight, _real=real))
    with pytest.raises(torch.OutOfMemoryError):
        qao.dequantize_(model)
    assert model(tokens).isfinite().all()
    assert isinstance(model.head, QuantLinear) == isinstance(model.embed, QuantEmbedding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qao.dequantize_(model)
    assert model.head.weight is model.embed.weight and torch.equal(model(tokens), whole(tokens))
